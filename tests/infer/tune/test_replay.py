"""Steps read off a text against steps counted while decoding it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.tree import Tree, build_tree, chain
from infer.tree_spec import BeamTree
from infer.tune.answer_acceptance import text_hidden_states
from infer.tune.replay import replay
from tests.random_heads import random_heads
from tests.tiny_models import VOCAB_SIZE, tiny_model

LAW = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
SAMPLED = {"generation_config": LAW, "seed": 5, "verifier": "sample-and-match"}
PROMPTS = [[3, 9, 4], [7] * 11, [1, 2, 3, 4, 5, 6]]
NUM_HEADS, LIMIT = 3, 24


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", [BeamTree(6), BeamTree(40), chain(3), build_tree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])])
def test_counts_are_those_of_decoding(tree: Tree | BeamTree, settings: dict[str, Any]) -> None:
    model = tiny_model("llama")
    drafter = HeadsDrafter(model, random_heads(model, num_heads=NUM_HEADS), tree)
    answers = Generator(model).generate(PROMPTS, max_new_tokens=LIMIT + NUM_HEADS - 1, eos_ids=(), **settings)
    texts = [(text_hidden_states(model, [*p, *a.token_ids]), p, a.token_ids) for p, a in zip(PROMPTS, answers, strict=True)]
    total = 0
    for eos_ids, limit in (((), LIMIT), ((), 1), (tuple(range(0, VOCAB_SIZE, 7)), LIMIT)):
        decoded = Generator(model, drafter).generate(PROMPTS, max_new_tokens=limit, eos_ids=eos_ids, **settings)
        for text, found in zip(texts, decoded, strict=True):
            assert replay(drafter, *text, depth=NUM_HEADS, max_new_tokens=limit, eos_ids=eos_ids) == found.stats
            total += found.stats.num_accepted_tokens
    assert total, "a test in which nothing is accepted proves little"


def test_a_text_that_ends_too_early_is_an_error() -> None:
    model = tiny_model("llama")
    drafter = HeadsDrafter(model, random_heads(model, num_heads=NUM_HEADS), BeamTree(6))
    with pytest.raises(AssertionError, match="looks beyond the limit"):
        replay(drafter, torch.zeros(8, 32), [1], [2] * 7, depth=NUM_HEADS, max_new_tokens=6, eos_ids=())
