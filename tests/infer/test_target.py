"""Any GenerationConfig: sampled text with drafts is plain sampling's, and processors see each node's own prefix."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, TopPLogitsWarper

from infer import target
from infer.drafters import NoDrafter
from infer.drafters.heads import HeadsDrafter
from infer.drafters.prompt_lookup import PromptLookupDrafter
from infer.generate import Generator
from infer.target import NUM_TOP, ProcessedTarget, RowLaw, top_p_cut
from infer.tree import Tree, build_tree, chain
from infer.tree_spec import BeamTree
from medusa_heads import base_model
from tests.infer.scripted_drafter import ScriptedDrafter
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model, tiny_tokenizer

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 5], [30, 31, 32, 33, 34, 35, 36, 30, 31]]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"do_sample": True, "top_k": 0},
    "cold": {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 0},
    "truncated": {"do_sample": True, "temperature": 1.3, "top_k": 12, "min_p": 0.02},
    "penalties": {"do_sample": True, "top_k": 8, "repetition_penalty": 1.6, "no_repeat_ngram_size": 2},
    "typical": {"do_sample": True, "typical_p": 0.5, "top_k": 0},
    "greedy with penalties": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 6},
    "banned": {"do_sample": False, "bad_words_ids": [[5], [6, 7]], "suppress_tokens": [9, 10], "sequence_bias": [[[12], 3.0]]},
}


def answers(generator: Generator, prompts: list[list[int]] = PROMPTS, *, seed: int = 0, **settings: Any) -> list[list[int]]:
    config = GenerationConfig(max_new_tokens=24, eos_token_id=2, pad_token_id=0, **settings)
    return [answer.token_ids for answer in generator.generate(prompts, generation_config=config, seed=seed)]


def helpful_generator(model: Any, tree: Tree | BeamTree) -> Generator:
    """Zero-initialised heads repeat the base's own law: sometimes right, sometimes wrong."""
    return Generator(model, HeadsDrafter(model, random_heads(model, num_heads=3, num_layers=1), tree))


# ---------------------------------------------------------------- what is drafted changes nothing


@pytest.mark.compat
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral_window"])
def test_drafts_change_no_token(family: str, name: str) -> None:
    model = tiny_model(family)
    expected = answers(Generator(model), seed=3, **SETTINGS[name])
    for generator in (helpful_generator(model, BeamTree(9)), Generator(model, PromptLookupDrafter())):
        assert answers(generator, seed=3, **SETTINGS[name]) == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_that_are_mostly_right_change_no_token(name: str) -> None:
    """The whole depth of the tree is walked, so every node's own prefix counts."""
    model = tiny_model("llama")
    expected = answers(Generator(model), seed=3, **SETTINGS[name])
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    config = GenerationConfig(max_new_tokens=24, eos_token_id=2, pad_token_id=0, **SETTINGS[name])
    found = Generator(model, ScriptedDrafter(texts, right=0.8)).generate(PROMPTS, generation_config=config, seed=3)
    assert [answer.token_ids for answer in found] == expected
    assert all(max(answer.runs) >= 4 for answer in found if len(answer.token_ids) == 24)


def test_drafts_are_accepted_when_sampling() -> None:
    model = tiny_model("llama")
    config = GenerationConfig(do_sample=True, temperature=0.2, top_k=3, max_new_tokens=60)
    found = Generator(model, PromptLookupDrafter()).generate(PROMPTS * 3, generation_config=config, eos_ids=())
    assert sum(answer.stats.num_accepted_tokens for answer in found) > 10


def test_stale_prefixes_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: processors that do not see the last token of their prefix."""
    model = tiny_model("llama")
    settings: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.5, "no_repeat_ngram_size": 1}
    expected = answers(Generator(model), **settings)
    fresh = RowLaw.weights
    monkeypatch.setattr(RowLaw, "weights", lambda self, logits_V, prefix: fresh(self, logits_V, prefix[:-1]))
    assert answers(Generator(model), **settings) != expected


# ---------------------------------------------------------------- the law is transformers'


@pytest.mark.compat
@pytest.mark.parametrize("name", [name for name, settings in SETTINGS.items() if not settings["do_sample"]])
def test_greedy_settings_give_the_text_of_generate(name: str) -> None:
    model: Any = tiny_model("llama")
    config = GenerationConfig(max_new_tokens=24, eos_token_id=2, pad_token_id=0, **SETTINGS[name])
    for prompt, found in zip(PROMPTS, answers(helpful_generator(model, BeamTree(9)), **SETTINGS[name]), strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), generation_config=config
        )
        assert theirs[0, len(prompt) :].tolist() == found


@pytest.mark.parametrize("name", [name for name, settings in SETTINGS.items() if settings["do_sample"]])
def test_sampled_pairs_follow_the_law(name: str) -> None:
    """Two drafted tokens after one prompt, 1,500 times, against the product of transformers' processed laws."""
    model = tiny_model("llama")
    settings = {**SETTINGS[name], "top_k": 4}
    prompt, count = PROMPTS[0], 1500
    config = GenerationConfig(max_new_tokens=3, pad_token_id=0, **settings)
    generator = Generator(model, HeadsDrafter(model, random_heads(model, num_heads=2, num_layers=1), BeamTree(12)))
    found = Counter(
        tuple(answer.token_ids)
        for _ in range(count // 250)
        for answer in generator.generate([prompt] * 250, generation_config=config, eos_ids=(), seed=17 + _)
    )
    law = enumerated_law(model, config, prompt, depth=3)
    assert set(found) <= set(law)
    likely = {text: p for text, p in law.items() if p * count >= 5}
    chi_square = sum((found[text] - p * count) ** 2 / (p * count) for text, p in likely.items())
    assert chi_square < len(likely) + 5 * (2 * len(likely)) ** 0.5


def enumerated_law(model: Any, config: GenerationConfig, prompt: list[int], *, depth: int) -> dict[tuple[int, ...], float]:
    processors, sampled = base_model.logits_processors(model, config, prompt_length=len(prompt), max_new_tokens=depth, eos_ids=())
    assert sampled
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        grown: dict[tuple[int, ...], float] = {}
        for text, probability in law.items():
            ids: Any = torch.tensor([[*prompt, *text]])
            p_V = processors(ids, model(ids).logits[:, -1].float())[0].softmax(-1)
            grown |= {(*text, token): probability * float(p_V[token]) for token in p_V.nonzero()[:, 0].tolist()}
        law = grown
    return law


@pytest.mark.parametrize(("size", "spread"), [(97, 1.0), (5000, 3.0), (5000, 0.1)])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_without_a_full_sort_is_transformers_own(size: int, spread: float, top_p: float) -> None:
    scores = torch.randn(20, size, generator=torch.Generator().manual_seed(1)) * spread
    expected = TopPLogitsWarper(top_p)(torch.zeros(20, 1, dtype=torch.long), scores)
    found = torch.cat([top_p_cut(row[None], top_p) for row in scores])
    torch.testing.assert_close(found.softmax(-1), expected.softmax(-1), atol=2e-5, rtol=0)
    assert int((found.isfinite() != expected.isfinite()).sum()) <= 4  # rounding of cumulative sums at the cut-off


def test_top_p_reaches_past_the_tokens_looked_at_first() -> None:
    flat = torch.zeros(1, 4 * NUM_TOP)
    assert int(top_p_cut(flat, 0.5).isfinite().sum()) == 2 * NUM_TOP
    assert int(top_p_cut(flat, 0.75).isfinite().sum()) == 3 * NUM_TOP


@pytest.mark.parametrize("spread", [4.0, 2.5])
def test_no_step_sorts_the_vocabulary(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    topk = torch.Tensor.topk

    def counted(self: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        sizes.append(k)
        return topk(self, k, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "topk", counted)
    for name in ("sort", "argsort"):
        monkeypatch.setattr(torch.Tensor, name, None)
        monkeypatch.setattr(torch, name, None)
    vocab_size = 20_000
    config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=0.9, min_p=0.001)
    processors, _ = base_model.logits_processors(tiny_model("llama"), config, prompt_length=1, max_new_tokens=1, eos_ids=())
    scores = RowLaw(processors, seed=0).scores(spread * torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)), [1])
    assert 0 < int(scores.isfinite().sum()) <= max(sizes) < vocab_size / 2


# ---------------------------------------------------------------- seeds, limits, errors


def test_seeds_reproduce() -> None:
    generator = helpful_generator(tiny_model("llama"), BeamTree(6))
    first = answers(generator, seed=1, **SETTINGS["plain"])
    assert answers(generator, seed=1, **SETTINGS["plain"]) == first
    assert answers(generator, seed=2, **SETTINGS["plain"]) != first
    same = answers(generator, [PROMPTS[0]] * 3, seed=1, **SETTINGS["plain"])
    assert len(set(map(tuple, same))) == 3  # rows draw numbers of their own


def test_limits_and_end_tokens_of_the_settings_hold() -> None:
    model = tiny_model("llama")
    free = Generator(model).generate(PROMPTS[:1], max_new_tokens=20, eos_ids=())[0].token_ids
    config = GenerationConfig(max_new_tokens=7, eos_token_id=[free[3], 2])
    found = Generator(model).generate(PROMPTS[:1], generation_config=config)[0].token_ids
    assert found == free[: free.index(free[3]) + 1]
    assert len(Generator(model).generate(PROMPTS[:1], generation_config=GenerationConfig(max_new_tokens=7), eos_ids=())[0].token_ids) == 7


def test_max_length_of_the_settings_counts_the_prompt() -> None:
    generator = Generator(tiny_model("llama"))
    found = generator.generate(PROMPTS, generation_config=GenerationConfig(max_length=14), eos_ids=())
    assert [len(prompt) + len(answer.token_ids) for prompt, answer in zip(PROMPTS, found, strict=True)] == [14] * len(PROMPTS)
    with pytest.raises(ValueError, match="max_length"):
        generator.generate(PROMPTS, generation_config=GenerationConfig(max_length=9))
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        generator.generate(PROMPTS, max_new_tokens=0)


@pytest.mark.parametrize(
    "setting", [{"output_scores": True}, {"num_beams": 4}, {"guidance_scale": 1.5}, {"penalty_alpha": 0.6}, {"num_return_sequences": 2}]
)
def test_settings_that_cannot_be_honoured_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        answers(Generator(tiny_model("llama")), **setting)


def test_settings_that_leave_no_token_are_an_error() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="leave no token"):
        answers(Generator(model), suppress_tokens=list(range(base_model.vocab_size(model))))


def test_rows_that_have_ended_are_not_asked_what_comes_next() -> None:
    """Settings may have left them no token."""
    model, prompts = tiny_model("llama", vocab_size=12), [[2, 0, 3, 1], [*range(12)]]
    target = ProcessedTarget(
        model,
        GenerationConfig(do_sample=True, no_repeat_ngram_size=1, top_k=0),
        prompts,
        max_new_tokens=[8, 8],
        eos_ids=(),
        seed=0,
        drafter=NoDrafter(),
    )
    assert int(target.first(torch.zeros(2, 12), prompts, [True, False])[0]) not in prompts[0]
    with pytest.raises(ValueError, match="leave no token"):
        target.first(torch.zeros(2, 12), prompts)


WIDE = build_tree([*([rank] for rank in range(10)), *([rank, 0] for rank in range(10)), [0, 0, 0], [1, 0, 1]])


@pytest.mark.parametrize("verifier", ["greedy", "sample-and-match", "recursive-rejection", "traversal", "block", "token-rejection"])
def test_no_law_is_asked_for_behind_the_end_of_an_answer(verifier: Any) -> None:
    """No token may come twice, of twelve: after eight new ones to a prompt of four there is none left, and need not be."""
    model = tiny_model("llama", seed=1, vocab_size=12)
    settings = GenerationConfig(do_sample=verifier != "greedy", no_repeat_ngram_size=1, top_k=0)
    tree = chain(3) if verifier in ("block", "token-rejection") else WIDE
    generator = Generator(model, HeadsDrafter(model, random_heads(model, seed=1, num_heads=3), tree))
    options: dict[str, Any] = {"generation_config": settings, "verifier": "auto" if verifier == "greedy" else verifier}
    for seed in range(20):
        found = generator.generate([[2, 0, 3, 1]], max_new_tokens=8, eos_ids=(), seed=seed, **options)[0].token_ids
        assert sorted(found) == list(range(4, 12))
        ended = generator.generate([[2, 0, 3, 1]], max_new_tokens=40, eos_ids=(5, 6, 7, 8), seed=seed, **options)[0]
        assert ended.finish_reason == "eos" and len(set(ended.token_ids)) == len(ended.token_ids) <= 8
    if verifier in ("greedy", "sample-and-match"):
        plain = Generator(model).generate([[2, 0, 3, 1]], max_new_tokens=8, eos_ids=(), seed=19, generation_config=settings)
        assert plain[0].token_ids == found
    with pytest.raises(ValueError, match="leave no token"):
        generator.generate([[2, 0, 3, 1]], max_new_tokens=9, eos_ids=(), **options)


@pytest.mark.parametrize("sampled", [False, True])
def test_no_law_is_asked_for_behind_a_stop_string(sampled: bool) -> None:
    """Of six tokens none may come twice; the answer stops with the sixth, which all drafts hold."""
    model, tokenizer, allowed = tiny_model("llama"), tiny_tokenizer(), set(range(70, 76))
    suppressed = [token for token in range(base_model.vocab_size(model)) if token not in allowed]
    settings = GenerationConfig(do_sample=sampled, no_repeat_ngram_size=1, suppress_tokens=suppressed, top_k=0)
    options: dict[str, Any] = {"generation_config": settings, "eos_ids": (), "seed": 3}
    six = Generator(model).generate([[5, 6, 7]], max_new_tokens=6, **options)[0].token_ids
    drafter = ScriptedDrafter([[5, 6, 7, *six, 80, 80, 80, 80, 80]], depth=5, width=1)
    options |= {"max_new_tokens": 40, "stop": [tokenizer.decode(six[-1:])]}
    found = Generator(model, drafter, tokenizer=tokenizer).generate([[5, 6, 7]], **options)
    assert (found[0].token_ids, found[0].finish_reason) == (six, "stop") and set(six) == allowed


@pytest.mark.parametrize("temperature", [1e-40, 1e-44])
def test_a_temperature_at_which_logits_overflow_is_an_error(temperature: float) -> None:
    with pytest.raises(ValueError, match="the logits overflow at temperature 1e-4"):
        answers(Generator(tiny_model("llama")), do_sample=True, temperature=temperature)


def test_tokens_of_probability_zero_are_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    law = RowLaw(LogitsProcessorList(), seed=0)
    logits = torch.full((50,), -torch.inf)
    logits[[10, 30]] = 0.0
    for uniform in (0.0, 0.4999, 0.5, 1.0 - 1e-16):
        monkeypatch.setattr(target.torch, "rand", lambda *_, u=uniform, **__: torch.tensor(u, dtype=torch.float64))
        assert law.choose(logits, [1]) == (10 if uniform < 0.5 else 30)
