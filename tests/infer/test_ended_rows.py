"""Rows of a batch end one after the other: forwards shrink, and every answer is the one it would have been alone."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from transformers import GenerationConfig

import infer.tree_forward
from infer.drafters import Drafter
from infer.drafters.early_exit import EarlyExitDrafter
from infer.drafters.heads import HeadsDrafter
from infer.drafters.suffix import SuffixDrafter
from infer.generate import Generator
from infer.kv_cache import KVCache
from infer.tree_spec import BeamTree
from tests.infer.test_generate import answers_of, oracle, prompts
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model

LENGTHS = (11, 4, 19, 7)
LIMITS = (9, 30, 3, 17)  # new tokens of each row


@pytest.fixture
def batch_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every forward."""
    sizes: list[int] = []
    real = infer.tree_forward.forward_over_cache

    def recorded(model: Any, tokens_BN: Tensor, *rest: Any) -> Tensor:
        sizes.append(len(tokens_BN))
        return real(model, tokens_BN, *rest)

    monkeypatch.setattr(infer.tree_forward, "forward_over_cache", recorded)
    return sizes


def end_tokens(answers: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """A token of each answer, at its limit or earlier, as end token; and the answers cut there."""
    eos = [answer[limit - 1] for answer, limit in zip(answers, LIMITS, strict=True)]
    return eos, [answer[: next(i for i, token in enumerate(answer) if token in eos) + 1] for answer in answers]


@pytest.mark.parametrize("family", ["llama", "mistral_window", "gemma2", "gpt2"])
def test_answers_equal_those_given_alone(family: str, batch_sizes: list[int]) -> None:
    model, texts = tiny_model(family), prompts(LENGTHS)
    answers = answers_of(model, texts, max(LIMITS))
    eos, expected = end_tokens(answers)
    drafters: list[Drafter | None] = [None, oracle(texts, answers, right=0.7), HeadsDrafter(model, random_heads(model), BeamTree(8))]
    if family == "llama":
        drafters += [SuffixDrafter(min_match=1), EarlyExitDrafter(model, 1)]
    for drafter in drafters:
        generator = Generator(model, drafter)
        batch_sizes.clear()
        found = generator.generate(texts, max_new_tokens=max(LIMITS), eos_ids=eos)
        assert [g.token_ids for g in found] == expected
        assert [g.stats.num_steps for g in found] == [len(g.runs) - 1 for g in found]
        if drafter is None:
            steps = [len(answer) - 1 for answer in expected]
            assert batch_sizes == [4] + [sum(step < count for count in steps) for step in range(max(steps))]
        assert min(batch_sizes) < 4


def test_sampled_answers_equal_those_given_without_drafts(batch_sizes: list[int]) -> None:
    model, texts = tiny_model("qwen3"), prompts(LENGTHS)
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=0, top_p=0.9)
    plain = Generator(model).generate(texts, max_new_tokens=max(LIMITS), eos_ids=(), generation_config=config, seed=3)
    eos, expected = end_tokens([g.token_ids for g in plain])
    drafter = HeadsDrafter(model, random_heads(model), BeamTree(8))
    found = Generator(model, drafter).generate(texts, max_new_tokens=max(LIMITS), eos_ids=eos, generation_config=config, seed=3)
    assert [g.token_ids for g in found] == expected and min(batch_sizes) == 1


def test_a_row_in_the_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the row that moves into the gap brings nothing with it."""
    model, texts = tiny_model("llama"), prompts(LENGTHS)
    eos, expected = end_tokens(answers_of(model, texts, max(LIMITS)))
    real = KVCache.let_go

    def forgetful(cache: KVCache, running: list[bool]) -> None:
        kept = {shape: tuple(buffer.clone() for buffer in pair) for shape, pair in cache.buffers.items()}
        real(cache, running)
        for shape, pair in cache.buffers.items():
            for buffer, old in zip(pair, kept[shape], strict=True):
                buffer.copy_(old[:, : buffer.shape[1]])

    monkeypatch.setattr(KVCache, "let_go", forgetful)
    found = Generator(model).generate(texts, max_new_tokens=max(LIMITS), eos_ids=eos)
    assert [g.token_ids for g in found] != expected
