"""Candidates: static filling, and the per-step beam tree against plain-Python references."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infer.candidates import (
    Candidates,
    beam_candidates,
    best_first_candidates,
    chain_candidates,
    fixed_shape_candidates,
    static_candidates,
    tree_on,
)
from infer.tree import ancestors_from_parents, build_tree, chain

ROOT = 7


class Node(NamedTuple):
    score: float
    path: tuple[int, ...]  # token ids below the root


def log_softmax(logits_KV: Tensor) -> list[list[float]]:
    return logits_KV.double().log_softmax(-1).tolist()


def reference_pool(log_q: list[list[float]], num_nodes: int, width: int) -> list[Node]:
    """Every path the beam scores: depth by depth, the best `width` paths by the best `width` tokens."""
    width = min(width, num_nodes, len(log_q[0]))
    frontier, pool = [Node(0.0, ())], []
    for head in log_q:
        tokens = sorted(range(len(head)), key=lambda v: -head[v])[:width]
        extended = [Node(above.score + head[v], (*above.path, v)) for above in frontier for v in tokens]
        pool += extended
        frontier = sorted(extended, key=lambda node: -node.score)[:width]
    return pool


def best_first(log_q: list[list[float]], num_nodes: int) -> list[float]:
    """Scores of the best `num_nodes` paths of all, by a heap over (path, next sibling, first child)."""
    order = [sorted(range(len(head)), key=lambda v: -head[v]) for head in log_q]
    heap: list[tuple[float, tuple[int, ...], float]] = [(-log_q[0][order[0][0]], (0,), 0.0)]
    found: list[float] = []
    while heap and len(found) < num_nodes:
        negative, path, above = heapq.heappop(heap)
        found.append(-negative)
        depth, rank = len(path), path[-1] + 1
        if rank < len(order[depth - 1]):
            heapq.heappush(heap, (-(above + log_q[depth - 1][order[depth - 1][rank]]), (*path[:-1], rank), above))
        if depth < len(log_q):
            heapq.heappush(heap, (negative - log_q[depth][order[depth][0]], (*path, 0), -negative))
    return found


def token_paths(candidates: Candidates, row: int) -> list[tuple[int, ...]]:
    """Token ids from below the root to each node 1.., read through the parents."""
    tokens, parents = candidates.tokens_BN[row].tolist(), candidates.parents_BN.expand_as(candidates.tokens_BN)[row].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        assert parents[node] < node, "a parent precedes its children"
        paths.append((*paths[parents[node]], tokens[node]))
    return paths[1:]


def check_structure(candidates: Candidates, num_heads: int) -> None:
    batch, num_nodes = candidates.tokens_BN.shape
    depths = candidates.depths_BN.expand(batch, -1).tolist()
    for row in range(batch):
        paths = token_paths(candidates, row)
        assert len(set(paths)) == len(paths), "siblings hold different tokens"
        assert depths[row] == [0, *map(len, paths)]
    assert max(map(max, depths)) <= candidates.max_depth <= num_heads
    assert torch.equal(candidates.ancestors_BNN, ancestors_from_parents(candidates.parents_BN))
    assert candidates.num_nodes == num_nodes - 1


def score_of(path: tuple[int, ...], log_q: list[list[float]]) -> float:
    return sum(log_q[depth][token] for depth, token in enumerate(path))


sizes = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 20), st.integers(1, 9), st.integers(0, 10_000))


@given(sizes=sizes)
def test_beam_equals_the_reference(sizes: tuple[int, int, int, int, int]) -> None:
    num_heads, width, num_nodes, vocab, seed = sizes
    logits_BKV = torch.randn(2, num_heads, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    candidates = beam_candidates(torch.tensor([ROOT, ROOT + 1]), logits_BKV, num_nodes, width)
    check_structure(candidates, num_heads)
    assert candidates.tokens_BN[:, 0].tolist() == [ROOT, ROOT + 1]
    for row in range(2):
        pool = reference_pool(log_softmax(logits_BKV[row]), num_nodes, width)
        best = sorted(pool, key=lambda node: -node.score)[:num_nodes]
        assert set(token_paths(candidates, row)) == {node.path for node in best}


@given(sizes=sizes)
def test_beam_with_ties_keeps_best_scores_and_is_a_tree(sizes: tuple[int, int, int, int, int]) -> None:
    num_heads, width, num_nodes, vocab, seed = sizes
    logits_BKV = torch.randint(0, 3, (2, num_heads, vocab), generator=torch.Generator().manual_seed(seed)).float()
    candidates = beam_candidates(torch.tensor([ROOT, ROOT]), logits_BKV, num_nodes, width)
    check_structure(candidates, num_heads)
    for row in range(2):
        log_q = log_softmax(logits_BKV[row])
        found = sorted((score_of(path, log_q) for path in token_paths(candidates, row)), reverse=True)
        expected = sorted((node.score for node in reference_pool(log_q, num_nodes, width)), reverse=True)[:num_nodes]
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("sharpest", [1e4, 1e38])
def test_beam_stays_a_tree_when_a_prefix_and_its_extension_tie(sharpest: float) -> None:
    """A head that is certain adds log q = 0: the extension scores exactly as high as its prefix."""
    logits_BKV = torch.zeros(1, 4, 6)
    logits_BKV[0, :, 3] = sharpest
    candidates = beam_candidates(torch.tensor([ROOT]), logits_BKV, 4, 2)
    check_structure(candidates, 4)
    assert token_paths(candidates, 0) == [(3,), (3, 3), (3, 3, 3), (3, 3, 3, 3)]


@given(
    num_heads=st.integers(1, 4),
    num_nodes=st.integers(1, 16),
    spare=st.integers(0, 3),
    vocab=st.integers(16, 24),
    seed=st.integers(0, 10_000),
)
def test_beam_as_wide_as_the_tree_is_the_best_first_optimum(num_heads: int, num_nodes: int, spare: int, vocab: int, seed: int) -> None:
    logits_BKV = torch.randn(1, num_heads, vocab, generator=torch.Generator().manual_seed(seed))
    candidates = beam_candidates(torch.tensor([ROOT]), logits_BKV, num_nodes, num_nodes + spare)
    log_q = log_softmax(logits_BKV[0])
    found = sorted((score_of(path, log_q) for path in token_paths(candidates, 0)), reverse=True)
    assert found == pytest.approx(best_first(log_q, num_nodes), abs=1e-5)


@given(num_heads=st.integers(1, 5), num_nodes=st.integers(1, 12), batch=st.integers(1, 3), seed=st.integers(0, 10_000))
def test_the_heap_and_the_tensors_of_fixed_shape_find_the_same_tree(num_heads: int, num_nodes: int, batch: int, seed: int) -> None:
    logits_BKV = torch.randn(batch, num_heads, 24, generator=torch.Generator().manual_seed(seed))
    log_q_BKW, tokens_BKW = logits_BKV.log_softmax(-1).topk(num_nodes)
    roots = torch.arange(batch)
    found = [best_first_candidates(roots, log_q_BKW, tokens_BKW), fixed_shape_candidates(roots, log_q_BKW, tokens_BKW, num_nodes)]
    for candidates in found:
        check_structure(candidates, num_heads)
        assert candidates.tokens_BN[:, 0].tolist() == roots.tolist()
    for row in range(batch):
        heap, tensors = (set(token_paths(candidates, row)) for candidates in found)
        assert heap == tensors


def test_the_heap_lists_the_best_path_first() -> None:
    logits_BKV = torch.randn(1, 3, 20, generator=torch.Generator().manual_seed(1))
    candidates = beam_candidates(torch.tensor([ROOT]), logits_BKV, 9)
    scores = [score_of(path, log_softmax(logits_BKV[0])) for path in token_paths(candidates, 0)]
    assert scores == sorted(scores, reverse=True)


@given(bad=st.sampled_from(["nan", "inf", "-inf", "huge"]), which=st.integers(0, 3), everywhere=st.booleans(), seed=st.integers(0, 10_000))
def test_heads_that_give_no_numbers_still_draft_a_tree(bad: str, which: int, everywhere: bool, seed: int) -> None:
    """On the fixed shapes (more nodes than the beam is wide) and by the heap."""
    generator = torch.Generator().manual_seed(seed)
    logits_BKV = torch.randn(2, 4, 40, generator=generator)
    value = 3e38 if bad == "huge" else float(bad)
    spots = torch.ones(2, 40, dtype=torch.bool) if everywhere else torch.rand(2, 40, generator=generator) < 0.3
    logits_BKV[:, which] = logits_BKV[:, which].masked_fill(spots, value)
    for num_nodes, width in ((24, 6), (6, 6)):
        check_structure(beam_candidates(torch.tensor([ROOT, ROOT]), logits_BKV, num_nodes, width), 4)


def test_a_beam_that_is_too_narrow_is_told_from_the_optimum() -> None:
    """Control: the comparison above must be able to fail."""
    logits_BKV = torch.randn(1, 2, 12, generator=torch.Generator().manual_seed(3))
    narrow = beam_candidates(torch.tensor([ROOT]), logits_BKV, 8, 2)
    log_q = log_softmax(logits_BKV[0])
    found = sorted((score_of(path, log_q) for path in token_paths(narrow, 0)), reverse=True)
    assert found != pytest.approx(best_first(log_q, 8), abs=1e-5)


def test_beam_of_no_nodes_is_the_root_alone() -> None:
    candidates = beam_candidates(torch.tensor([4, 5]), torch.randn(2, 3, 9), 0)
    assert candidates.num_nodes == 0 and candidates.tokens_BN.tolist() == [[4], [5]]


def test_beam_shapes_do_not_depend_on_the_values() -> None:
    flat = beam_candidates(torch.tensor([1]), torch.zeros(1, 3, 20), 12, 5)
    sharp = beam_candidates(torch.tensor([1]), torch.randn(1, 3, 20) * 50, 12, 5)
    assert flat.tokens_BN.shape == sharp.tokens_BN.shape and flat.max_depth == sharp.max_depth == 3


def test_half_precision_logits_are_scored_in_float32() -> None:
    logits_BKV = (torch.randn(1, 3, 50, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    half, full = (beam_candidates(torch.tensor([1]), x, 20, 8) for x in (logits_BKV, logits_BKV.float()))
    assert token_paths(half, 0) == token_paths(full, 0)


def test_static_nodes_get_the_token_of_their_rank_and_depth() -> None:
    logits_BKV = torch.randn(3, 3, 11)
    tree = build_tree([[0], [4], [0, 2], [4, 0], [0, 2, 1]])
    candidates = static_candidates(torch.tensor([1, 2, 3]), logits_BKV, tree)
    check_structure(candidates, 3)
    for row in range(3):
        order = [sorted(range(11), key=lambda v, k=k: -logits_BKV[row, k, v].item()) for k in range(3)]  # type: ignore[misc]
        expected = [tuple(order[d][rank] for d, rank in enumerate(path)) for path in tree.paths]
        assert token_paths(candidates, row) == expected


def test_static_chain_shallower_than_the_heads() -> None:
    logits_BKV = torch.randn(2, 4, 11)
    candidates = static_candidates(torch.tensor([1, 2]), logits_BKV, chain(2))
    assert candidates.tokens_BN[:, 1:].tolist() == logits_BKV[:, :2].argmax(-1).tolist()
    assert candidates.max_depth == 2


def test_static_tree_without_nodes_is_the_root_alone() -> None:
    assert static_candidates(torch.tensor([3]), torch.randn(1, 2, 5), chain(0)).tokens_BN.tolist() == [[3]]


def test_chain_candidates() -> None:
    candidates = chain_candidates(torch.tensor([9, 8]), torch.tensor([[1, 2], [1, 1]]))
    check_structure(candidates, 2)
    assert [token_paths(candidates, row) for row in range(2)] == [[(1,), (1, 2)], [(1,), (1, 1)]]


def test_moving_a_tree_to_its_own_device_changes_nothing() -> None:
    tree = chain(2)
    assert tree_on(tree, torch.device("cpu")) is tree
    assert tree_on(tree, torch.device("meta")).ancestors_NN.device.type == "meta"
