"""Prompts and answers up to the model's limit: read in chunks as in one piece, ended at the limit, refused beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from infer.drafters.heads import HeadsDrafter
from infer.drafters.suffix import SuffixDrafter
from infer.generate import Generator
from infer.kv_cache import KVCache
from infer.tree_forward import prefill, tree_forward
from infer.tree_spec import BeamTree
from medusa_heads import base_model
from tests.infer.scripted_drafter import ScriptedDrafter
from tests.infer.test_generate import base_answer, prompts
from tests.infer.test_tree_forward import EXACT, new_cache, random_draft, tree_error
from tests.random_heads import random_heads
from tests.tiny_models import CONTEXT, WINDOW, tiny_model

LIMITS = {"gpt2": 64, "llama": CONTEXT, "mistral_window": CONTEXT, "gemma3": CONTEXT, "phi3": CONTEXT}
ROOM = 9  # tokens left to the longest prompt


def hidden_of(model: PreTrainedModel, texts: Sequence[list[int]]) -> Tensor:
    """Last hidden states after the texts, from one plain forward each."""
    return torch.stack([base_model.forward_hidden(model, torch.tensor([text]))[0, -1] for text in texts])


def unlike(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@torch.inference_mode()
@pytest.mark.parametrize("family", LIMITS)
def test_prefill_in_chunks_equals_one_shot_up_to_the_limit(family: str) -> None:
    model, limit = tiny_model(family), LIMITS[family]
    texts = prompts((limit - ROOM, 3 * WINDOW, limit // 2, 1))
    expected = hidden_of(model, texts)
    for chunk in (limit // 5, limit):
        cache = new_cache(model, 4, limit)
        assert unlike(prefill(model, texts, cache, chunk=chunk), expected) < EXACT
        assert cache.lengths == [len(text) for text in texts]
    candidates = random_draft("beam", 4, seed=0)
    assert tree_error(model, candidates, texts, tree_forward(model, candidates, cache)) < EXACT


@torch.inference_mode()
@pytest.mark.parametrize("family", LIMITS)
def test_a_chunk_that_loses_a_token_is_caught(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the equality above must be able to fail."""
    model, keep = tiny_model(family), KVCache.keep
    text = prompts((30,))
    monkeypatch.setattr(KVCache, "keep", lambda cache, path_BP, counts: keep(cache, path_BP, [count - 1 for count in counts]))
    assert unlike(prefill(model, text, new_cache(model, 1), chunk=10), hidden_of(model, text)) > 100 * EXACT


@pytest.fixture
def positions_seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The highest position of every forward."""
    seen: list[int] = []
    forward = base_model.forward_hidden

    def watched(model: PreTrainedModel, input_ids: Tensor, **options: Any) -> Tensor:
        if options.get("position_ids") is not None:
            seen.append(int(options["position_ids"].max()))
        return forward(model, input_ids, **options)

    monkeypatch.setattr(base_model, "forward_hidden", watched)
    return seen


@pytest.mark.parametrize("family", LIMITS)
def test_answers_end_at_the_limit(family: str, positions_seen: list[int]) -> None:
    """The longest row stops the others' drafting near the limit, and nothing else of theirs."""
    model, limit = tiny_model(family), LIMITS[family]
    texts = prompts((limit - ROOM, 2 * WINDOW))
    answers = [base_answer(model, text, count) for text, count in zip(texts, (ROOM, 2 * ROOM), strict=True)]
    oracle = ScriptedDrafter([text + answer for text, answer in zip(texts, answers, strict=True)])
    for drafter in (oracle, HeadsDrafter(model, random_heads(model), BeamTree(32)), SuffixDrafter()):
        found = Generator(model, drafter).generate(texts, max_new_tokens=2 * ROOM)
        assert [g.token_ids for g in found] == answers
        assert [g.finish_reason for g in found] == ["length" if len(answer) in (ROOM, 2 * ROOM) else "eos" for answer in answers]
    assert max(positions_seen) < limit


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 3 * CONTEXT])
def test_a_prompt_that_leaves_no_room_is_refused(length: int) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=rf"prompt 1 has {length} tokens and the model's context ends at {CONTEXT}: shorten the prompt"):
        Generator(model).generate(prompts((5, length)))
    (last,) = Generator(model).generate(prompts((CONTEXT - 1,)), max_new_tokens=5)
    assert len(last.token_ids) == 1 and last.finish_reason == "length"


def test_prompts_of_several_chunks_of_the_usual_size() -> None:
    model = tiny_model("llama")
    model.config.max_position_embeddings = 2600
    texts = prompts((2590, 1024, 1025, 40))
    answers = [base_answer(model, text, 10) for text in texts]
    oracle = ScriptedDrafter([text + answer for text, answer in zip(texts, answers, strict=True)], right=0.8)
    assert [g.token_ids for g in Generator(model, oracle).generate(texts, max_new_tokens=10)] == answers


@pytest.mark.parametrize("family", ["mistral_window", "gemma3", "gpt_oss"])
def test_answers_far_beyond_the_window(family: str) -> None:
    model, texts = tiny_model(family, seed=1), prompts((20 * WINDOW, WINDOW - 1, 2))
    answers = [base_answer(model, text, 3 * WINDOW) for text in texts]
    oracle = ScriptedDrafter([text + answer for text, answer in zip(texts, answers, strict=True)], right=0.9, depth=WINDOW)
    for drafter in (oracle, HeadsDrafter(model, random_heads(model), BeamTree(8))):
        assert [g.token_ids for g in Generator(model, drafter).generate(texts, max_new_tokens=3 * WINDOW)] == answers
