"""Sampled verification enumerated in rational arithmetic: the emitted text has exactly the law of plain sampling."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from infer.candidates import Candidates
from infer.draws import Draws
from infer.tree import ancestors_from_parents
from infer.verify import verify_greedy
from infer.verify_sampled import (
    DraftTree,
    Laws,
    block_verification,
    recursive_rejection,
    sample_and_match,
    token_rejection,
    traversal,
    typical_acceptance,
)
from tests.infer.exact_enumeration import (
    Model,
    Shape,
    continued,
    draw_tree,
    emitted,
    enumerate_law,
    mean_length,
    random_model,
    text_law,
)

Verifier = Callable[[DraftTree, Laws, Laws, Draws], tuple[list[int], int]]
CHAIN: Shape = ((((),),),)
SHAPES: dict[str, Shape] = {"wide": ((), (), ()), "uneven": (((),), ()), "bushy": (((), ()), ((),)), "chain": CHAIN}
FIXED_TREE = DraftTree((0, 2, 0, 1, 0, 0, 1), (0, 0, 0, 1, 1, 2, 3))
TWINS = DraftTree((0, 2, 2, 1, 1), (0, 0, 0, 2, 1))


def matched(tree: DraftTree, p: Laws, q: Laws, draws: Draws) -> tuple[list[int], int]:
    return sample_and_match(tree, p, draws)


def typical(tree: DraftTree, p: Laws, q: Laws, draws: Draws) -> tuple[list[int], int]:
    return typical_acceptance(tree, p, draws)


TREE_VERIFIERS: dict[str, Callable[..., tuple[list[int], int]]] = {"V4": recursive_rejection, "V5": traversal}
CASES = [
    pytest.param(verifier, shape, replace, id=f"{name}-{shape_name}-{'with' if replace else 'without'}")
    for shape_name, shape in SHAPES.items()
    for name, tree_verifier in TREE_VERIFIERS.items()
    for replace in (True, False)
    for verifier in [partial(tree_verifier, replace=replace)]
] + [
    pytest.param(token_rejection, CHAIN, True, id="V1"),
    pytest.param(block_verification, CHAIN, True, id="V2"),
    pytest.param(matched, SHAPES["uneven"], True, id="V3"),
]


def models(kind: str, seed: int, *, vocab: int = 3) -> tuple[Model, Model]:
    """p and q: all tokens possible; some impossible; or, on top of that, q equal to p at half of the texts."""
    p = random_model(seed, vocab=vocab, lowest=int(kind == "positive"))
    return p, random_model(1000 + seed, vocab=vocab, lowest=int(kind == "positive"), like=p if kind == "often equal" else None)


def texts_at(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[node] for node in tree.path_to(end)[1:]) for end in range(len(tree.tokens))]


def decode(
    verifier: Verifier,
    shape: Shape | DraftTree,
    p: Model,
    q: Model,
    *,
    replace: bool = True,
    tested_q: Model | None = None,
    off_by_one: bool = False,
) -> dict[tuple[int, ...], Any]:
    """The law of what one step emits, the draws of the tree included (a DraftTree is taken as it is)."""

    def program(draws: Draws) -> tuple[int, ...]:
        if isinstance(shape, DraftTree):
            tree = shape
            texts = texts_at(tree)
        else:
            tree, texts = draw_tree(shape, q, draws, replace=replace)
        read = [texts[parent] for parent in tree.parents] if off_by_one else texts
        return emitted(tree, verifier(tree, [p(text) for text in read], [(tested_q or q)(text) for text in texts], draws))

    return enumerate_law(program)


def is_exact(law: dict[tuple[int, ...], Any], p: Model) -> bool:
    """Whether plain sampling after what was emitted gives plain sampling as a whole."""
    length = max(map(len, law))
    return continued(law, p, length) == text_law(p, length)


@pytest.mark.parametrize("kind", ["positive", "zeros", "often equal"])
@pytest.mark.parametrize("verifier, shape, replace", CASES)
def test_the_law_is_that_of_plain_sampling(verifier: Verifier, shape: Shape, replace: bool, kind: str) -> None:
    for seed in range(1 if shape == SHAPES["bushy"] else 4):
        p, q = models(kind, seed, vocab=4 if shape == SHAPES["wide"] else 3)  # with 3 tokens, few rejections leave two
        law = decode(verifier, shape, p, q, replace=replace)
        assert sum(law.values()) == 1 and is_exact(law, p)


@pytest.mark.parametrize("kind", ["positive", "zeros"])
def test_sample_and_match_is_exact_on_fixed_trees(kind: str) -> None:
    for seed in range(5):
        p, q = models(kind, seed)
        law = decode(matched, FIXED_TREE, p, q)
        assert is_exact(law, p)
        assert mean_length(law) == 1 + sum(text_law(p, len(text))[text] for text in texts_at(FIXED_TREE)[1:])
        assert is_exact(decode(matched, TWINS, p, q), p)


@pytest.mark.parametrize("verifier, shape, replace", CASES)
def test_control_laws_of_the_parent_instead_of_the_node(verifier: Verifier, shape: Shape, replace: bool) -> None:
    p, q = models("positive", 0)
    assert not is_exact(decode(verifier, shape, p, q, replace=replace, off_by_one=True), p)


@pytest.mark.parametrize("verifier, shape, replace", [case for case in CASES if case.id != "V3"])
def test_control_another_q_than_the_one_drawn_from(verifier: Verifier, shape: Shape, replace: bool) -> None:
    p, q = models("positive", 0)
    assert not is_exact(decode(verifier, shape, p, q, replace=replace, tested_q=random_model(7)), p)


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("name", TREE_VERIFIERS)
def test_control_the_wrong_kind_of_replacement(name: str, replace: bool) -> None:
    wrong = partial(TREE_VERIFIERS[name], replace=not replace)
    cases = [models("positive", seed, vocab=4) for seed in range(4)]  # where a rejection leaves one token, any q will do
    assert not all(is_exact(decode(wrong, SHAPES["wide"], p, q, replace=replace), p) for p, q in cases)


def one_draw_per_path(tree: DraftTree, p: Laws, q: Laws, draws: Draws) -> tuple[list[int], int]:
    """Wrong on purpose: every root-to-leaf path draws its own tokens; the longest match wins."""
    best = [0]
    for leaf in (node for node in range(len(tree.tokens)) if not tree.children(node)):
        path = tree.path_to(leaf)
        length = next((i for i, (node, child) in enumerate(pairwise(path)) if draws.index(p[node]) != tree.tokens[child]), len(path) - 1)
        best = max(best, path[: length + 1], key=len)
    return best, draws.index(p[best[-1]])


@pytest.mark.parametrize("wrong", [one_draw_per_path, typical])
def test_control_lossy_verifiers(wrong: Verifier) -> None:
    for seed in range(3):
        p, q = models("positive", seed)
        assert not is_exact(decode(wrong, FIXED_TREE, p, q), p)


def test_block_verification_is_never_shorter_than_token_rejection() -> None:
    gains = []
    for seed in range(12):
        p, q = models("zeros" if seed % 2 else "positive", seed)
        gains.append(mean_length(decode(block_verification, CHAIN, p, q)) - mean_length(decode(token_rejection, CHAIN, p, q)))
    assert min(gains) >= 0 and sum(gains) > 0


@pytest.mark.parametrize("replace", [True, False])
def test_traversal_is_not_shorter_than_recursive_rejection(replace: bool) -> None:
    gains = []
    for seed in range(10):
        p, q = models("zeros" if seed % 2 else "positive", seed)
        laws = [decode(partial(verifier, replace=replace), SHAPES["uneven"], p, q, replace=replace) for verifier in TREE_VERIFIERS.values()]
        gains.append(mean_length(laws[1]) - mean_length(laws[0]))
    assert min(gains) >= 0 and sum(gains) > 0


def test_lengths_of_the_worked_example() -> None:
    """The example of arXiv 2403.10444: two tokens drafted by a model that does not look at the text."""
    p, q = (np.array([Fraction(a, 3), Fraction(b, 3), Fraction(0)]) for a, b in ((1, 2), (2, 1)))
    lengths = [mean_length(decode(v, (((),),), lambda text: p, lambda text: q)) - 1 for v in (token_rejection, block_verification)]
    assert lengths == [Fraction(10, 9), Fraction(11, 9)]


@pytest.mark.parametrize("replace", [True, False])
def test_on_a_chain_the_tree_verifiers_are_the_chain_verifiers(replace: bool) -> None:
    for seed in range(3):
        p, q = models("zeros", seed)
        assert decode(partial(recursive_rejection, replace=replace), CHAIN, p, q) == decode(token_rejection, CHAIN, p, q)
        assert decode(partial(traversal, replace=replace), CHAIN, p, q) == decode(block_verification, CHAIN, p, q)


def greedy(p: Model) -> Model:
    """Zero temperature: all probability on the most likely token, the lowest of several."""

    def law(text: tuple[int, ...]) -> Any:
        values = list(p(text))
        return np.array([Fraction(int(token == values.index(max(values)))) for token in range(len(values))])

    return law


@pytest.mark.parametrize("verifier, shape, replace", CASES)
def test_at_zero_temperature_the_text_is_the_greedy_one(verifier: Verifier, shape: Shape, replace: bool) -> None:
    p, q = models("positive", 5)
    law = decode(verifier, shape, greedy(p), q, replace=replace)
    assert is_exact(law, greedy(p))
    assert max(map(len, law)) > 1


def test_at_zero_temperature_sample_and_match_is_verify_greedy() -> None:
    parents_BN = torch.tensor([FIXED_TREE.parents])
    depths_BN = torch.tensor([[len(FIXED_TREE.path_to(node)) - 1 for node in range(7)]])
    candidates = Candidates(torch.tensor([FIXED_TREE.tokens]), parents_BN, depths_BN, ancestors_from_parents(parents_BN), 3)
    lengths = set()
    for seed in range(20):
        p = greedy(random_model(seed))
        texts = texts_at(FIXED_TREE)
        found = verify_greedy(torch.tensor([[int(np.argmax(p(text))) for text in texts]]), candidates)
        length = int(found.length_B)
        path = tuple(found.path_BP[0, 1 : length + 1].tolist())
        assert decode(matched, FIXED_TREE, p, p) == {tuple(FIXED_TREE.tokens[node] for node in path) + (int(found.bonus_B),): 1}
        lengths.add(length)
    assert lengths >= {0, 1, 2}
