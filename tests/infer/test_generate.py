"""Generated tokens equal the base model's own greedy ones, whatever is drafted; stopping inside paths."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

import infer.generate
from infer.candidates import Candidates, chain_candidates
from infer.drafters import Drafter
from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.kv_cache import KVCache
from infer.stage_timer import StageTimer
from infer.tree import Tree, build_tree, chain
from infer.tree_spec import BeamTree
from medusa_heads import base_model
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import create_heads
from tests.infer.scripted_drafter import ScriptedDrafter
from tests.tiny_models import FAMILIES, VOCAB_SIZE, WINDOW, tiny_model, tiny_tokenizer

NEW = 24
BACKENDS = [(family, None) for family in FAMILIES] + [(f, "eager") for f in FAMILIES if f != "gemma2"]
TREES: dict[str, Tree | BeamTree] = {
    "none": chain(0),
    "chain": chain(3),
    "static": build_tree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]),
    "beam:8": BeamTree(8),
    "beam:64": BeamTree(64),
}
RAGGED = (11, 4, 19)


def prompts(lengths: Sequence[int] = RAGGED, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def base_answer(model: PreTrainedModel, prompt: list[int], max_new_tokens: int = NEW, eos: int | None = None) -> list[int]:
    """What transformers' own greedy generate answers, one prompt at a time."""
    settings = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=0, bos_token_id=None)
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)  # type: ignore[operator]
    return found[0, len(prompt) :].tolist()


def random_heads(model: PreTrainedModel, tree: Tree | BeamTree, *, spread: float = 0.2, own_lm_head: bool = False) -> HeadsDrafter:
    heads = create_heads(HeadsConfig(num_heads=3, num_layers=2, own_lm_head=own_lm_head), model).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    return HeadsDrafter(model, heads, tree)


def answers_of(model: PreTrainedModel, texts: Sequence[list[int]], max_new_tokens: int = NEW) -> list[list[int]]:
    return [base_answer(model, text, max_new_tokens) for text in texts]


def oracle(texts: list[list[int]], answers: list[list[int]], *, right: float = 1.0, depth: int = 4) -> ScriptedDrafter:
    return ScriptedDrafter([text + answer for text, answer in zip(texts, answers, strict=True)], right=right, depth=depth)


def tokens(model: PreTrainedModel, drafter: Drafter | None, texts: list[list[int]], max_new_tokens: int = NEW) -> list[list[int]]:
    return [g.token_ids for g in Generator(model, drafter).generate(texts, max_new_tokens=max_new_tokens, eos_ids=())]


@pytest.mark.compat
@pytest.mark.parametrize(("family", "attention"), BACKENDS)
def test_every_tree_gives_the_base_models_tokens(family: str, attention: str | None) -> None:
    model, texts = tiny_model(family, attention=attention), prompts()
    expected = answers_of(model, texts)
    assert tokens(model, None, texts) == expected
    for name, tree in TREES.items():
        drafter = random_heads(model, tree)
        assert tokens(model, drafter, texts) == expected, name
        assert tokens(model, drafter, texts[2:]) == expected[2:], name


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_heads_with_an_lm_head_of_their_own(spread: float) -> None:
    """Spread 0: fresh heads, which propose the base model's own next-token law at every depth."""
    model, texts = tiny_model("qwen3"), prompts()
    drafter = random_heads(model, TREES["beam:8"], spread=spread, own_lm_head=True)
    assert tokens(model, drafter, texts) == answers_of(model, texts)


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
def test_drafts_of_any_quality_give_the_base_models_tokens(family: str, right: float) -> None:
    model, texts = tiny_model(family), prompts()
    answers = answers_of(model, texts, NEW + 8)  # known beyond the limit, so that the last path is long too
    found = Generator(model, oracle(texts, answers, right=right)).generate(texts, max_new_tokens=NEW, eos_ids=())
    for answer, generation in zip(answers, found, strict=True):
        assert generation.token_ids == answer[:NEW]
        assert sum(generation.runs) == NEW and generation.runs[0] == 1
        assert generation.stats.num_steps == len(generation.runs) - 1
        assert generation.stats.num_drafted_tokens == 12 * generation.stats.num_steps
        if right == 1.0:
            assert generation.runs == [1, 5, 5, 5, 5, 3] and generation.stats.accepted_at_depth == [5, 5, 5, 5]
        elif right == 0.0:
            assert generation.runs == [1] * NEW and generation.stats.mean_acceptance_length == 1.0


@pytest.mark.parametrize("filler", [0, 1])
def test_fillers_count_as_drafted_only_where_they_come_true(filler: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row drafts true tokens, the second nothing; its filler is the next token at the first step, and then no more."""
    model, texts = tiny_model("llama"), prompts((9, 9))
    answers = answers_of(model, texts, 10)
    fillers = [answers[1][1], VOCAB_SIZE - 1] if filler else [VOCAB_SIZE - 1] * 2
    assert answers[1][2] != fillers[0]

    class OneRow(Drafter):
        name, max_nodes = "one_row", 2

        def start(self, prompts: list[list[int]]) -> None:
            pass

        def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
            done = len(texts[0]) - 9
            drafted_BC = torch.tensor([(answers[0] + [0, 0])[done : done + 2], fillers if done == 1 else [VOCAB_SIZE - 1] * 2])
            return chain_candidates(root_B, drafted_BC, num_drafted=(2, 0))

    found = Generator(model, OneRow()).generate(texts, max_new_tokens=7, eos_ids=())
    assert [g.token_ids for g in found] == [answer[:7] for answer in answers]
    assert found[0].stats.num_drafted_tokens == found[0].stats.num_accepted_tokens == 4
    assert found[1].stats.num_drafted_tokens == found[1].stats.num_accepted_tokens == filler


class WatchedHidden(ScriptedDrafter):
    """Checks the hidden state it is given against a plain forward over the text before the root."""

    def __init__(self, model: PreTrainedModel, answers: Sequence[Sequence[int]]) -> None:
        super().__init__(answers, right=0.8)
        self.model, self.num_checked = model, 0

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        for text, answer, hidden_D in zip(texts, self.answers, hidden_BD, strict=True):
            if len(text) < len(answer):  # the row runs
                plain_D = base_model.forward_hidden(self.model, torch.tensor([text[:-1]]))[0, -1]
                torch.testing.assert_close(hidden_D, plain_D, rtol=1e-4, atol=1e-4)
                self.num_checked += 1
        return super().propose(root_B, hidden_BD, texts)


def test_drafters_get_the_hidden_state_of_the_token_before_the_root() -> None:
    model, texts = tiny_model("llama"), prompts()
    answers = answers_of(model, texts)
    drafter = WatchedHidden(model, [text + answer for text, answer in zip(texts, answers, strict=True)])
    assert tokens(model, drafter, texts) == answers and drafter.num_checked > 10


def wrong_positions(model: PreTrainedModel, candidates: Candidates, cache: KVCache, *, timer: StageTimer) -> tuple[Tensor, Tensor]:
    from dataclasses import replace

    from infer.tree_forward import tree_forward

    return tree_forward(model, replace(candidates, depths_BN=candidates.depths_BN + 1), cache)


def no_ancestors(model: PreTrainedModel, candidates: Candidates, cache: KVCache, *, timer: StageTimer) -> tuple[Tensor, Tensor]:
    from dataclasses import replace

    from infer.tree_forward import tree_forward

    alone = torch.eye(candidates.num_nodes + 1, dtype=torch.bool)[None]
    return tree_forward(model, replace(candidates, ancestors_BNN=alone), cache)


@pytest.mark.parametrize("corruption", [wrong_positions, no_ancestors])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_tree_forward_changes_the_text(
    family: str, corruption: Callable[..., tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: equality of texts must be able to fail."""
    model, texts = tiny_model(family), prompts()
    answers = answers_of(model, texts)
    monkeypatch.setattr(infer.generate, "tree_forward", corruption)
    assert tokens(model, oracle(texts, answers), texts) != answers


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stale_cache_row_changes_the_text(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: keeping the first nodes instead of the accepted ones."""
    model, texts = tiny_model(family), prompts()
    answers = answers_of(model, texts)
    keep = KVCache.keep

    def keep_first(cache: KVCache, path_BP: Tensor, counts: Sequence[int]) -> None:
        keep(cache, torch.arange(path_BP.shape[1]).expand_as(path_BP), counts)

    monkeypatch.setattr(KVCache, "keep", keep_first)
    assert tokens(model, oracle(texts, answers), texts) != answers


@pytest.mark.parametrize("limit", range(1, 13))
def test_the_limit_cuts_inside_a_path(limit: int) -> None:
    model, texts = tiny_model("llama"), prompts()
    answers = answers_of(model, texts)
    found = Generator(model, oracle(texts, answers)).generate(texts, max_new_tokens=limit, eos_ids=())
    assert [g.token_ids for g in found] == [answer[:limit] for answer in answers]
    assert {g.finish_reason for g in found} == {"length"}


@pytest.mark.parametrize("place", range(12))
def test_an_end_token_inside_a_path(place: int) -> None:
    model, texts = tiny_model("mistral_window"), prompts()
    answers = answers_of(model, texts)
    eos = answers[0][place]
    found = Generator(model, oracle(texts, answers)).generate(texts, max_new_tokens=NEW, eos_ids=(eos,))
    for text, generation in zip(texts, found, strict=True):
        expected = base_answer(model, text, NEW, eos=eos)
        assert generation.token_ids == expected
        assert generation.finish_reason == ("eos" if expected[-1] == eos else "length")
    assert len(found[0].token_ids) == answers[0].index(eos) + 1


def test_the_models_own_end_token_is_the_default() -> None:
    model, (text,) = tiny_model("llama"), prompts((11,))
    answer = base_answer(model, text)
    eos = answer[6]
    model.generation_config.eos_token_id = [eos, VOCAB_SIZE - 1]  # type: ignore[union-attr]
    (found,) = Generator(model, oracle([text], [answer])).generate([text], max_new_tokens=NEW)
    assert found.token_ids == answer[: answer.index(eos) + 1] and found.finish_reason == "eos"


def model_of_readable_text(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A model that never emits a token that is no text of its own: their logits are 0, below the best."""
    model = tiny_model("llama")
    pieces = [str(tokenizer.decode([token])) for token in range(VOCAB_SIZE)]
    broken = [token for token, piece in enumerate(pieces) if token < 3 or "\ufffd" in piece or not piece.isprintable()]
    model.get_output_embeddings().weight[broken] = 0.0  # type: ignore[index,operator,union-attr]
    return model


@pytest.mark.parametrize(("start", "size"), [(0, 3), (3, 4), (5, 2), (9, 1)])
def test_a_stop_string_inside_a_path(start: int, size: int) -> None:
    """Runs are of five tokens after the first, so these stops lie within a run, end one, or span two."""
    tokenizer, texts = tiny_tokenizer(), prompts((9, 13))
    model = model_of_readable_text(tokenizer)
    answers = answers_of(model, texts)
    stop = str(tokenizer.decode(answers[0][start : start + size]))
    assert stop and "\ufffd" not in stop
    found = Generator(model, oracle(texts, answers), tokenizer=tokenizer).generate(texts, max_new_tokens=NEW, eos_ids=(), stop=(stop,))
    alone = Generator(model, tokenizer=tokenizer)
    for text, answer, generation in zip(texts, answers, found, strict=True):
        (one_by_one,) = alone.generate([text], max_new_tokens=NEW, eos_ids=(), stop=(stop,))
        assert (generation.token_ids, generation.text, generation.finish_reason) == (
            one_by_one.token_ids,
            one_by_one.text,
            one_by_one.finish_reason,
        )
        assert generation.token_ids == answer[: len(generation.token_ids)] and stop not in generation.text
    assert found[0].finish_reason == "stop" and len(found[0].token_ids) <= start + size


def test_text_is_the_decoded_tokens() -> None:
    model, tokenizer, texts = tiny_model("gemma2"), tiny_tokenizer(), prompts()
    for generation in Generator(model, random_heads(model, TREES["beam:8"]), tokenizer=tokenizer).generate(texts, max_new_tokens=NEW):
        assert generation.text == tokenizer.decode(generation.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("family", ["mistral_window", "gemma2", "gemma3"])
def test_prompts_and_answers_longer_than_the_window(family: str) -> None:
    model, texts = tiny_model(family, seed=1), prompts((5 * WINDOW, WINDOW, WINDOW + 1))
    answers = answers_of(model, texts, 5 * WINDOW)
    assert tokens(model, oracle(texts, answers, right=0.8), texts, 5 * WINDOW) == answers
    assert tokens(model, random_heads(model, TREES["static"]), texts, 5 * WINDOW) == answers


@pytest.mark.parametrize("length", [63, 62, 60, 50])
def test_answers_end_with_the_context(length: int) -> None:
    """GPT-2 has 64 learned positions: a drafted node beyond them would be an index error."""
    model, texts = tiny_model("gpt2"), prompts((length, 20))
    room = 64 - length
    answers = [base_answer(model, text, count) for text, count in zip(texts, (room, 44), strict=True)]
    for drafter in (None, oracle(texts, answers), random_heads(model, TREES["beam:64"]), random_heads(model, TREES["chain"])):
        found = Generator(model, drafter).generate(texts, max_new_tokens=50, eos_ids=())
        assert [g.token_ids for g in found] == answers
        assert [g.finish_reason for g in found] == ["length", "length"]


@pytest.mark.parametrize("length", [64, 65, 100])
def test_prompts_that_fill_the_context_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=rf"prompt 1 has {length} tokens and the model's context ends at 64: shorten"):
        Generator(tiny_model("gpt2")).generate(prompts((5, length)), max_new_tokens=1)


def test_long_prompt_prefilled_in_chunks() -> None:
    model, texts = tiny_model("llama"), prompts((300, 17))
    answers = answers_of(model, texts, 12)
    assert tokens(model, oracle(texts, answers), texts, 12) == answers


def test_two_generators_interleaved_on_one_model() -> None:
    model, texts, others = tiny_model("gemma3"), prompts(), prompts((6, 15), seed=8)
    first, second = Generator(model, random_heads(model, TREES["beam:8"])), Generator(model, random_heads(model, TREES["chain"]))
    expected = [answers_of(model, texts), answers_of(model, others)]
    runs = [first.steps(texts, max_new_tokens=NEW, eos_ids=()), second.steps(others, max_new_tokens=NEW, eos_ids=())]
    found: list[list[list[int]]] = [[[], [], []], [[], []]]
    running = [0, 1]
    while running:
        for index in list(running):
            step = next(runs[index], None)
            if step is None:
                running.remove(index)
                continue
            for answer, new in zip(found[index], step.new_tokens, strict=True):
                answer += new
            assert not torch.is_inference_mode_enabled(), "the caller's own mode between steps"
    assert found == expected


def test_steps_leave_the_prompts_and_the_model_alone() -> None:
    model, texts = tiny_model("llama"), prompts()
    copies, before, attributes = [list(text) for text in texts], model.state_dict(), set(vars(model))
    before = {name: value.clone() for name, value in before.items()}
    tokens(model, random_heads(model, TREES["beam:8"]), texts)
    assert texts == copies and set(vars(model)) == attributes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("texts", "max_new_tokens", "message"),
    [
        ([[5]], 0, "max_new_tokens is 0"),
        ([], 4, "no prompts"),
        ([[5], []], 4, "prompt 1 has no tokens"),
        ([[5], [-1]], 4, "prompt 1 has token ids outside"),
        ([[300]], 4, "prompt 0 has token ids"),
    ],
)
def test_wrong_requests_are_refused(texts: list[list[int]], max_new_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Generator(tiny_model("llama")).generate(texts, max_new_tokens=max_new_tokens)


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="the tree is 4 deep but the heads predict 3 positions"):
        random_heads(tiny_model("llama"), chain(4))


def test_near_types_are_understood_and_others_named() -> None:
    generator = Generator(tiny_model("llama"), tokenizer=tiny_tokenizer())
    whole = generator.generate([[3, 9, 4]], max_new_tokens=12, eos_ids=())[0]
    assert generator.generate(torch.tensor([[3, 9, 4]]), max_new_tokens=12, eos_ids=())[0] == whole  # type: ignore[arg-type]
    third = whole.token_ids[2]
    assert generator.generate([[3, 9, 4]], max_new_tokens=12, eos_ids=third)[0].finish_reason == "eos"  # type: ignore[arg-type]
    stops: list[Any] = [[whole.text[4:9]], whole.text[4:9]]
    listed, single = (generator.generate([[3, 9, 4]], max_new_tokens=12, eos_ids=(), stop=stop)[0] for stop in stops)
    assert listed == single and listed.finish_reason == "stop"
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ([3, 9, 4], {}, "put a single one into a list"),
        ("hello", {}, "put a single one into a list"),
        (["hello"], {}, "put a single one into a list"),
        ([[1.5, 2.0]], {}, "other things than token ids"),
        ([[3]], {"max_new_tokens": 1.5}, "max_new_tokens is 1.5; give a whole number"),
        ([[3]], {"max_new_tokens": "5"}, "max_new_tokens is '5'; give a whole number"),
    ]
    for prompts_, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            generator.generate(prompts_, **options)
    with pytest.raises(ValueError, match="a beam tree of -1 nodes"):
        BeamTree(-1)


def test_generate_for_comparison_takes_the_most_likely_tokens_and_nothing_else() -> None:
    """As plain decoding does, whatever the model's own settings say."""
    model = copy.deepcopy(tiny_model("llama"))
    own = model.generation_config = GenerationConfig(repetition_penalty=1.7, no_repeat_ngram_size=2, num_beams=2)
    ids = torch.tensor([[5, 9, 31, 7]])
    expected = Generator(model).generate(ids.tolist(), max_new_tokens=20, eos_ids=())[0].token_ids
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_ids": (), "pad_id": 0, "on_token": lambda: None}
    assert base_model.generate_plainly(model, ids, torch.ones_like(ids), **options)[0, 4:].tolist() == expected
    assert model.generation_config is own
