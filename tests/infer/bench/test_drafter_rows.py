"""Rows of the drafters besides the heads: with --tree auto they draft as much as pays, switch off, and on again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import normalize
from transformers import GenerationConfig, PreTrainedModel

from infer.bench import drafter_rows
from infer.bench.drafter_rows import make_generators
from infer.drafters import Drafter
from infer.drafters.adaptive import AdaptiveDrafter
from infer.drafters.draft_model import DraftModelDrafter
from infer.generate import Generator
from infer.tune import step_times
from infer.tune.step_times import expected_length, measure_drafts, measure_forwards, sizes_up_to, step_curve
from medusa_heads.first_layers import first_layers
from tests.tiny_models import VOCAB_SIZE, tiny_model

NAMES = ["prompt_lookup", "suffix", "draft_model", "early_exit"]
STARTS = (20, 110, 200)  # of the rows of a batch
SAMPLED = GenerationConfig(do_sample=True, temperature=0.9, top_k=0)


def counting_model(step: int = 1) -> PreTrainedModel:
    """After token n comes n + step, whatever came before."""
    model = tiny_model("llama")
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data.zero_()
    embedding = weights["model.embed_tokens.weight"]
    embedding.data = normalize(torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0)))
    weights["lm_head.weight"].data = embedding.data.roll(step, 0)
    return model


def generators(monkeypatch: pytest.MonkeyPatch, names: list[str], model: PreTrainedModel, draft: PreTrainedModel) -> dict[str, Generator]:
    """Rows over step times that do not come from a clock: 3 % of a plain step for a node, as much for drafting it."""
    monkeypatch.setattr(step_times, "_measure_rows", lambda model, sizes, num_rows: {n: 1 + 0.03 * n for n in sizes})
    monkeypatch.setattr(step_times, "measure_drafts", lambda drafter, model, sizes, num_rows: {n: 0.03 * n for n in sizes})
    monkeypatch.setattr(drafter_rows, "load_draft_model", lambda path, base, tokenizer: draft)
    return make_generators(names, [model], {}, tokenizer=None, draft_model="draft", batch_size=3, adapt=True)


def misleading(start: int) -> list[int]:
    """Every pair of tokens of the coming answer, followed by something else."""
    pairs = [token for n in range(start, start + 70) for token in (n % VOCAB_SIZE, (n + 1) % VOCAB_SIZE, (n + 50) % VOCAB_SIZE)]
    return [*pairs, start]


def telling(start: int) -> list[int]:
    """The coming answer, and its first tokens once more."""
    return [*(n % VOCAB_SIZE for n in range(start, start + 120)), start, start + 1]


@pytest.mark.parametrize("name", NAMES)
def test_drafts_switch_off_and_on_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = counting_model()
    generator = generators(monkeypatch, [name], model, counting_model())[name]
    adaptive = generator.drafter
    assert isinstance(adaptive, AdaptiveDrafter) and generator.drafter.name == name

    def decode(prompts: list[list[int]], length: int, draft: PreTrainedModel) -> tuple[list[int], int]:
        """How many tokens each step gave the first row, and how many nodes were drafted for it. The rows end apart."""
        if isinstance(adaptive.drafter, DraftModelDrafter):
            adaptive.drafter.model = first_layers(draft, 1) if name == "early_exit" else draft
        found = generator.generate(prompts, max_new_tokens=length, eos_ids=())
        assert [g.token_ids for g in found] == [[(p[-1] + 1 + n) % VOCAB_SIZE for n in range(length)] for p in prompts]
        return found[0].runs, found[0].stats.num_drafted_tokens

    runs, drafted = decode([misleading(start)[2 * row :] for row, start in enumerate(STARTS)], 68, counting_model(2))
    assert runs == [1] * 68 and 0 < drafted < 68 * adaptive.max_nodes / 3
    assert adaptive.pause or adaptive.trial
    runs, _ = decode([telling(start) for start in STARTS], 110, model)
    assert max(runs[-5:-1]) == 1 + adaptive.max_nodes and runs.index(max(runs)) <= adaptive.next_pause * 16


@pytest.mark.parametrize("settings", [None, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_of_every_row_is_plain_decodings(settings: GenerationConfig | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    rows = generators(monkeypatch, NAMES, model, tiny_model("llama", seed=1))
    assert list(rows) == ["base", *NAMES]
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 30, 40], [20] * 15]
    options: dict[str, Any] = dict(max_new_tokens=40, generation_config=settings, seed=4)
    free = rows["base"].generate(prompts, **options, eos_ids=())
    eos = (free[0].token_ids[20],)  # rows end at different steps
    expected = [g.token_ids for g in rows["base"].generate(prompts, **options, eos_ids=eos)]
    assert len({len(ids) for ids in expected}) > 1
    for name in NAMES:
        found = rows[name].generate(prompts, **options, eos_ids=eos, verifier="sample-and-match" if settings else "auto")
        assert [g.token_ids for g in found] == expected, name


def test_without_auto_all_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(drafter_rows, "load_draft_model", lambda path, base, tokenizer: tiny_model("llama", seed=1))
    monkeypatch.setattr(drafter_rows, "measure_forwards", lambda *args, **kwargs: pytest.fail("nothing is to be measured"))
    rows = make_generators(NAMES, [model], {}, tokenizer=None, draft_model="draft", batch_size=1, adapt=False)
    (answer,) = rows["draft_model"].generate([[5, 6, 7]], max_new_tokens=30, eos_ids=())
    assert answer.stats.num_drafted_tokens == 4 * answer.stats.num_steps


def test_sizes_and_what_they_give_on_average() -> None:
    assert [sizes_up_to(n) for n in (1, 4, 10, 16)] == [[0, 1], [0, 1, 2, 4], [0, 1, 2, 4, 8, 10], [0, 1, 2, 4, 8, 16]]
    assert [expected_length(n) for n in (0, 1, 2)] == pytest.approx([1.0, 1.9, 2.71])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_is_timed_is_a_whole_draft(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size is really proposed, in every row; in a context of 64 tokens too."""
    model = tiny_model(family)
    monkeypatch.setattr(drafter_rows, "load_draft_model", lambda path, base, tokenizer: model)
    drafter = drafter_rows.drafter_builder(name, model, None, "draft", 1)(model)
    proposed: list[tuple[int, ...]] = []
    propose = drafter.propose

    def recording(*args: Any) -> Any:
        candidates = propose(*args)
        proposed.append(tuple(candidates.tokens_BN.shape))
        return candidates

    monkeypatch.setattr(drafter, "propose", recording)
    most = drafter.max_nodes
    seconds = measure_drafts(drafter, model, sizes_up_to(most), num_rows=2)
    assert set(seconds) == set(sizes_up_to(most)) and seconds[0] == 0 < seconds[1]
    assert set(proposed) == {(2, size + 1) for size in sizes_up_to(most) if size} and drafter.max_nodes == most


def test_a_curve_holds_both_parts_of_a_step() -> None:
    model = tiny_model("llama")
    forwards = measure_forwards(model, [0, 1, 2, 4], batch_size=2)
    assert list(forwards) == [1, 2] and all(seconds > 0 for by_nodes in forwards.values() for seconds in by_nodes.values())
    drafter: Drafter = DraftModelDrafter(model, model)
    curve = step_curve(drafter, model, forwards)
    assert [(row["batch_size"], row["num_nodes"]) for row in curve] == [(rows, n) for rows in (1, 2) for n in (0, 1, 2, 4)]
    assert all(row["forward_s"] == forwards[row["batch_size"]][row["num_nodes"]] for row in curve)
    assert curve[0]["draft_s"] == 0 < curve[1]["draft_s"] and curve[3]["draft_s"] > curve[1]["draft_s"]


def test_the_counting_model_counts() -> None:
    (answer,) = Generator(counting_model(7)).generate([[3, 9]], max_new_tokens=60, eos_ids=())
    assert answer.token_ids == [(16 + 7 * n) % VOCAB_SIZE for n in range(60)]
    assert torch.equal(torch.tensor(telling(5)[:3]), torch.tensor([5, 6, 7]))
