"""A draft model drafts its own chain on accepted tokens, drawn from the law it hands over, and changes no law of the base."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from infer.candidates import Candidates
from infer.drafters import Drafter, DraftSampling, draft_model
from infer.drafters.adaptive import AdaptiveDrafter
from infer.drafters.draft_model import DraftModelDrafter, draw, load_draft_model
from infer.generate import Generation, Generator
from infer.kv_cache import KVCache
from infer.tree_forward import prefill
from infer.verifiers import VerifierChoice
from tests.tiny_models import tiny_model, tiny_tokenizer

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 5], [30, 31, 32, 33, 34, 35, 36, 30, 31]]
PAIRS = (("llama", "qwen3"), ("gemma3", "llama"), ("mistral_window", "gpt2"))
HIDDEN = torch.zeros(3, 32)


def sampled(**settings: Any) -> GenerationConfig:
    return GenerationConfig(do_sample=True, pad_token_id=0, **settings)


def near_copy(model: PreTrainedModel, noise: float = 0.05) -> PreTrainedModel:
    """A draft model that is sometimes right, sometimes wrong."""
    torch.manual_seed(7)
    for weight in model.parameters():
        weight.data.add_(noise * torch.randn_like(weight))
    return model


class CheckedDrafter(DraftModelDrafter):
    """Compares every proposal with the draft model's laws computed without a cache, by code of its own."""

    num_checked = 0

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        candidates = super().propose(root_B, hidden_BD, texts)
        for row, (text, tokens) in enumerate(zip(texts, candidates.tokens_BN.tolist(), strict=True)):
            if not self.running[row]:
                continue
            for place, token in enumerate(tokens[1:]):
                ids = torch.tensor([[*text, *tokens[1 : place + 1]]])
                logits = self.model(input_ids=ids, use_cache=False).logits[0, -1]
                if candidates.draft_laws is None:
                    assert token == int(logits.argmax())
                else:
                    law = candidates.draft_laws.row(row, vocab_size=len(logits))[place]
                    torch.testing.assert_close(law, (logits / self.temperature).softmax(-1), atol=1e-5, rtol=1e-4)
                    assert law[token] > 0
                self.num_checked += 1
        return candidates


class StaleDrafter(DraftModelDrafter):
    """Control: rejected drafts stay in the cache."""

    def start(self, prompts: list[list[int]]) -> None:
        super().start(prompts)
        assert self.cache is not None
        self.cache.truncate = lambda lengths: None  # type: ignore[method-assign]


def tokens(answers: list[Generation]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def rate(answers: list[Generation]) -> float:
    return sum(a.stats.num_accepted_tokens for a in answers) / sum(a.stats.num_drafted_tokens for a in answers)


@pytest.mark.compat
@pytest.mark.parametrize(("family", "draft_family"), PAIRS)
def test_a_random_draft_model_changes_no_token(family: str, draft_family: str) -> None:
    model, drafter = tiny_model(family), CheckedDrafter(tiny_model(family), tiny_model(draft_family, seed=1), length=3)
    expected = Generator(model).generate(PROMPTS, max_new_tokens=12, eos_ids=())
    assert tokens(Generator(model, drafter).generate(PROMPTS, max_new_tokens=12, eos_ids=())) == tokens(expected)
    assert drafter.num_checked > 60


@pytest.mark.parametrize("settings", [None, sampled(temperature=0.7, top_k=5)], ids=["greedy", "sampled"])
def test_accepted_and_rejected_drafts_are_followed_and_rows_end_apart(settings: GenerationConfig | None) -> None:
    """One row and three; an end token lies inside the accepted drafts of the first row."""
    model = tiny_model("llama")
    drafter = CheckedDrafter(model, near_copy(tiny_model("llama")), length=3)
    answers: list[Generation] = []
    options: dict[str, Any] = dict(
        max_new_tokens=18, generation_config=settings, seed=3, verifier="sample-and-match" if settings else "auto"
    )
    for prompts, place in ((PROMPTS[:1], None), (PROMPTS, 11)):
        free = Generator(model).generate(prompts, **options, eos_ids=())
        eos = () if place is None else (free[0].token_ids[place],)
        found = Generator(model, drafter).generate(prompts, **options, eos_ids=eos)
        assert tokens(found) == tokens(Generator(model).generate(prompts, **options, eos_ids=eos))
        answers += found
    assert 0.05 < rate(answers) < 0.95
    assert len({len(a.token_ids) for a in answers}) > 1, "the rows must end at different steps"


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_the_base_itself_is_always_right(family: str) -> None:
    model = tiny_model(family)
    found = Generator(model, DraftModelDrafter(model, model, length=4)).generate(PROMPTS, max_new_tokens=26, eos_ids=())
    assert all(a.runs == [1, 5, 5, 5, 5, 5] for a in found)
    assert tokens(found) == tokens(Generator(model).generate(PROMPTS, max_new_tokens=26, eos_ids=()))


def test_the_base_itself_is_always_right_when_drafts_are_drawn() -> None:
    """p = q up to rounding: every drawn token is accepted, whatever was drawn."""
    model = tiny_model("llama")
    drafter = CheckedDrafter(model, model, length=4)
    found = Generator(model, drafter).generate(PROMPTS, max_new_tokens=26, eos_ids=(), generation_config=sampled(temperature=0.8, top_k=0))
    assert rate(found) == 1 and drafter.num_checked == 60


def test_a_stale_cache_costs_the_perfect_draft_its_acceptance() -> None:
    """Sampled text leaves the greedy drafts of the base itself, which must then be dropped from the cache."""
    model, config = tiny_model("llama"), sampled(temperature=1.0, top_k=2)
    answers = {
        kind: Generator(model, kind(model, model, length=4)).generate(
            PROMPTS, max_new_tokens=40, eos_ids=(), generation_config=config, verifier="sample-and-match"
        )
        for kind in (DraftModelDrafter, StaleDrafter)
    }
    assert tokens(answers[DraftModelDrafter]) == tokens(answers[StaleDrafter]), "a stale draft costs time, never a token"
    assert rate(answers[StaleDrafter]) < 0.7 * rate(answers[DraftModelDrafter])


def test_only_unseen_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    read: list[list[int]] = []

    def counting_prefill(draft: PreTrainedModel, rows: list[list[int]], cache: KVCache) -> Tensor:
        read.append([len(row) for row in rows])
        return prefill(draft, rows, cache)

    monkeypatch.setattr(draft_model, "prefill", counting_prefill)
    Generator(model, DraftModelDrafter(model, model, length=3)).generate(PROMPTS, max_new_tokens=13, eos_ids=())
    assert read[0] == [len(prompt) + 1 for prompt in PROMPTS]
    assert read[1:] and all(lengths == [2, 2, 2] for lengths in read[1:]), "the last draft and the bonus token"


def test_two_generators_on_the_same_models_do_not_disturb_each_other() -> None:
    model, draft = tiny_model("llama"), near_copy(tiny_model("llama"))
    prompts = (PROMPTS, [[40, 41], [42], [43, 44, 45]])
    runs = [
        Generator(model, DraftModelDrafter(model, draft, length=length)).steps(own, max_new_tokens=18, eos_ids=())
        for own, length in zip(prompts, (2, 4), strict=True)
    ]
    last = [step for steps in zip_longest(*runs) for step in enumerate(steps) if step[1] is not None]
    for index, own in enumerate(prompts):
        rows = [step for place, step in last if place == index][-1].rows
        assert [row.token_ids for row in rows] == tokens(Generator(model).generate(own, max_new_tokens=18, eos_ids=()))


def test_text_that_went_on_without_drafts_leaves_nothing_stale() -> None:
    model = tiny_model("llama")
    drafter = CheckedDrafter(model, tiny_model("qwen3"), length=4)
    drafter.start(PROMPTS)
    texts = PROMPTS
    for added in ([3], [44, 45, 46, 47, 48, 49], [50], [51, 52, 53]):
        texts = [[*text, *added] for text in texts]
        drafter.propose(torch.tensor([text[-1] for text in texts]), HIDDEN, texts)
    assert drafter.num_checked == 48


def test_nothing_is_drafted_beyond_the_draft_models_context() -> None:
    """The base reads 512 tokens, the draft model 64."""
    model, draft = tiny_model("llama"), tiny_model("gpt2")
    prompts = [[7] * 40, [9, 8, 7], [3] * 70]
    for rows in (prompts[:2], prompts):
        found = Generator(model, CheckedDrafter(model, draft)).generate(rows, max_new_tokens=40, eos_ids=())
        assert tokens(found) == tokens(Generator(model).generate(rows, max_new_tokens=40, eos_ids=()))
        assert (found[0].stats.num_drafted_tokens > 0) == (len(rows) == 2)


@pytest.mark.parametrize("adaptive", [False, True])
def test_rows_that_have_ended_do_not_stop_the_others(adaptive: bool) -> None:
    """The first row fills the context of 64 tokens and ends; the second drafts on, always right."""
    model, prompts = tiny_model("gpt2"), [[(7 * i) % 290 + 5 for i in range(56)], [9, 10, 11]]
    drafter: Drafter = CheckedDrafter(model, model, length=4)
    if adaptive:
        drafter = AdaptiveDrafter(drafter, lengths={4: 5.0}, seconds={1: {0: 1.0, 4: 1.5}})
    found = Generator(model, drafter).generate(prompts, max_new_tokens=50, eos_ids=())
    assert tokens(found) == tokens(Generator(model).generate(prompts, max_new_tokens=50, eos_ids=()))
    assert len(found[0].token_ids) == 8 and found[1].runs[-8:-1] == [5] * 7


@pytest.mark.parametrize(("verifier", "pause"), [("auto", 0), ("token-rejection", 0), ("auto", 1)])
def test_drawn_drafts_leave_the_law_of_the_text_alone(verifier: VerifierChoice, pause: int) -> None:
    """Chi-square over the first three tokens of 1,000 answers, two possible at each place, against exact probabilities.
    After a pause the adaptive drafter goes on to draw."""
    model, num_rows = tiny_model("llama"), 1000
    chain = DraftModelDrafter(model, near_copy(tiny_model("llama"), 0.02), length=3)
    drafter = AdaptiveDrafter(chain, lengths={1: 1.5, 3: 2.0}, seconds={1: {0: 1.0, 1: 1.01, 3: 1.02}})
    drafter.pause = pause
    law = text_law(model, PROMPTS[1], 3, temperature=0.3, top_k=2)
    answers = Generator(model, drafter).generate(
        [PROMPTS[1]] * num_rows,
        max_new_tokens=3,
        eos_ids=(),
        generation_config=sampled(temperature=0.3, top_k=2),
        seed=11,
        verifier=verifier,
    )
    assert 0.2 < rate(answers) < 0.8
    counts = Counter(tuple(answer.token_ids) for answer in answers)
    assert counts.keys() <= law.keys()
    chi_square = sum((counts[text] - num_rows * p) ** 2 / (num_rows * p) for text, p in law.items())
    assert chi_square < 24.3, "7 degrees of freedom, one in a thousand"


def text_law(model: PreTrainedModel, prompt: list[int], length: int, *, temperature: float, top_k: int) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown = {}
        for text, probability in law.items():
            values, ids = model(input_ids=torch.tensor([[*prompt, *text]]), use_cache=False).logits[0, -1].topk(top_k)
            for p, token in zip((values / temperature).softmax(-1).tolist(), ids.tolist(), strict=True):
                grown[(*text, token)] = probability * p
        law = grown
    return law


def test_what_a_row_draws_does_not_depend_on_its_batch() -> None:
    model = tiny_model("llama")
    alone, batch = (DraftModelDrafter(model, model, length=3) for _ in range(2))
    for drafter, rows, seeds in ((alone, [1], (5,)), (batch, [0, 1, 2], (4, 5, 6))):
        drafter.start([PROMPTS[row] for row in rows])
        drafter.sample(DraftSampling(1.0, seeds))
    for added in ([3], [4, 5]):
        texts = [[*prompt, *added] for prompt in PROMPTS]
        roots = torch.tensor([text[-1] for text in texts])
        both = batch.propose(roots, HIDDEN, texts), alone.propose(roots[1:2], HIDDEN[:1], texts[1:2])
        assert both[0].tokens_BN[1].tolist() == both[1].tokens_BN[0].tolist()


def test_drawing_follows_the_law_and_spares_impossible_tokens() -> None:
    law = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    uniform = torch.arange(1000, dtype=torch.float64) / 1000
    drawn = draw(law.expand(1000, -1), uniform)
    assert torch.bincount(drawn, minlength=6).tolist() == [0, 250, 0, 500, 250, 0]
    assert draw(law, torch.tensor([1 - 2**-53], dtype=torch.float64)).tolist() == [4]


def test_a_new_batch_draws_nothing_until_it_is_told_to() -> None:
    model = tiny_model("llama")
    drafter = DraftModelDrafter(model, model, length=2)
    drafter.start(PROMPTS)
    drafter.sample(DraftSampling(1.0, (1, 2, 3)))
    drafter.start(PROMPTS)
    assert drafter.propose(torch.tensor([p[-1] for p in PROMPTS]), HIDDEN, PROMPTS).draft_laws is None


def save(folder: Path, model: PreTrainedModel, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_loads_from_a_folder_in_the_bases_type(tmp_path: Path) -> None:
    model = tiny_model("llama").to(torch.bfloat16)  # type: ignore[call-arg,arg-type]
    draft = load_draft_model(save(tmp_path / "draft", tiny_model("qwen3"), tiny_tokenizer()), model, tiny_tokenizer())
    assert draft.dtype == torch.bfloat16 and not any(p.requires_grad for p in draft.parameters())


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="vocabulary of 200 tokens and the base model one of 300"):
        DraftModelDrafter(model, tiny_model("llama", vocab_size=200))
    smaller = save(tmp_path / "smaller", tiny_model("llama", vocab_size=200), tiny_tokenizer())
    with pytest.raises(ValueError, match=r"--draft-model .*smaller: the draft model has a vocabulary of 200"):
        load_draft_model(smaller, model, tiny_tokenizer())
    other = tiny_tokenizer()
    other.add_tokens(["zebra"])
    with pytest.raises(ValueError, match=r"--draft-model .*other: the draft model's tokenizer is another one .*'zebra' in the draft"):
        load_draft_model(save(tmp_path / "other", model, other), model, tiny_tokenizer())


def test_what_is_no_draft_model_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"--draft-model .*nowhere.*: no such folder"):
        load_draft_model(tmp_path / "nowhere", model, tiny_tokenizer())
    with pytest.raises(ValueError, match="length 0 must be at least 1"):
        DraftModelDrafter(model, model, length=0)


@pytest.mark.parametrize("verifier", ["block", "token-rejection", "traversal"])
def test_draft_logits_that_overflow_at_a_small_temperature_draft_on(verifier: VerifierChoice) -> None:
    base, small = tiny_model("llama"), tiny_model("llama", seed=3)
    small.lm_head.weight.data.mul_(50)
    settings = sampled(temperature=1e-37, top_k=0)
    found = Generator(base, DraftModelDrafter(base, small, 3)).generate(
        [[1, 5, 7]], max_new_tokens=6, generation_config=settings, verifier=verifier
    )
    assert found[0].token_ids == Generator(base).generate([[1, 5, 7]], max_new_tokens=6)[0].token_ids  # as cold as greedy
