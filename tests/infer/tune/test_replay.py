"""Steps read off a text against steps counted while decoding it; their expectation against exact enumeration and many decodings."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from infer.drafters.heads import HeadsDrafter
from infer.draws import Draws
from infer.generate import Generator
from infer.tree import Tree, build_tree, chain
from infer.tree_spec import BeamTree
from infer.tune.answer_acceptance import text_hidden_states
from infer.tune.replay import block_acceptance, expected_replay, replay
from infer.verify_sampled import block_verification
from tests.infer.exact_enumeration import Model, draw_tree, emitted, enumerate_law, random_model
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


@pytest.mark.parametrize("lowest", [0, 1])
def test_the_chance_of_a_prefix_is_that_of_block_verification(lowest: int) -> None:
    """Every way that drafting and verifying a chain of three can go, in rational arithmetic; lowest 0: with impossible tokens."""
    for seed in range(6):
        p, q = random_model(seed, lowest=lowest), random_model(100 + seed, lowest=lowest)

        def step(draws: Draws, p: Model = p, q: Model = q) -> tuple[int, ...]:
            tree, texts = draw_tree((((),),), q, draws, replace=True)
            return emitted(tree, block_verification(tree, [p(text) for text in texts], [q(text) for text in texts], draws))

        law = enumerate_law(step)
        for text in product(range(3), repeat=2):
            target, draft = ([model(text[:i])[text[i]] for i in range(2)] for model in (p, q))
            if not all(target):
                continue
            chances = block_acceptance(torch.tensor([[*map(float, target)]]), torch.tensor([[*map(float, draft)]]))[0].tolist()
            for length, chance in enumerate(chances, 1):
                both = sum(weight for found, weight in law.items() if len(found) > length and found[:length] == text[:length])
                assert both / prod(target[:length], start=Fraction(1)) == pytest.approx(chance, abs=1e-6)


def test_expected_counts_are_the_means_of_decoding() -> None:
    """Over 500 texts each: the means differ by less than four standard errors."""
    model = tiny_model("llama")
    drafter = HeadsDrafter(model, random_heads(model, num_heads=NUM_HEADS), chain(NUM_HEADS))
    prompts, settings = [PROMPTS[0]] * 500, dict[str, Any](generation_config=LAW, eos_ids=())
    plain = Generator(model).generate(prompts, max_new_tokens=LIMIT + NUM_HEADS - 1, seed=10, **settings)
    texts = [(text_hidden_states(model, [*PROMPTS[0], *row.token_ids]), PROMPTS[0], row.token_ids) for row in plain]
    expected = [expected_replay(drafter, *text, temperature=1.0, max_new_tokens=LIMIT, eos_ids=(5,)) for text in texts]
    answers = Generator(model, drafter).generate(
        prompts, max_new_tokens=LIMIT, seed=200, **settings | {"eos_ids": (5,), "verifier": "block"}
    )
    decoded = [(answer.stats.num_steps, answer.stats.num_accepted_tokens) for answer in answers]
    gap, variance = np.mean(expected, 0) - np.mean(decoded, 0), (np.var(expected, 0) + np.var(decoded, 0)) / len(decoded)
    assert (abs(gap) < 4 * variance**0.5).all() and np.mean(decoded, 0)[1] > 1
    assert expected_replay(drafter, *texts[0], temperature=1.0, max_new_tokens=1, eos_ids=()) == (0, 0)
