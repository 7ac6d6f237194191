"""The static tree builder against brute force, stepping through answers by hand, and `--tree` arguments."""

# R consecutive positions, K heads

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infer import tree_builders
from infer.tree import Tree, build_tree
from infer.tree_builders import (
    accepted_lengths,
    best_nodes,
    decoded_length,
    expected_length,
    node_shares,
    static_length,
    static_tree,
    step_starts,
)
from infer.tree_spec import BeamTree, parse_tree


def ranks(max_heads: int = 3, num_ranks: int = 3) -> st.SearchStrategy[list[list[int]]]:
    row = lambda heads: st.lists(st.integers(0, num_ranks - 1), min_size=heads, max_size=heads)  # noqa: E731
    return st.integers(1, max_heads).flatmap(lambda heads: st.lists(row(heads), min_size=1, max_size=12))


def depth_by_hand(row: list[int], paths: set[tuple[int, ...]]) -> int:
    """Accepted tokens at one position: down from the root, as long as the true token is drafted."""
    depth = 0
    while depth < len(row) and tuple(row[: depth + 1]) in paths:
        depth += 1
    return depth


def every_tree(num_heads: int, num_ranks: int, num_nodes: int) -> list[set[tuple[int, ...]]]:
    paths = [path for depth in range(1, num_heads + 1) for path in itertools.product(range(num_ranks), repeat=depth)]
    chosen = map(set, itertools.combinations(paths, num_nodes))
    return [tree for tree in chosen if all(len(path) == 1 or path[:-1] in tree for path in tree)]


@given(sample=ranks(max_heads=3, num_ranks=2), num_nodes=st.integers(1, 4))
def test_no_other_tree_of_this_size_is_right_more_often(sample: list[list[int]], num_nodes: int) -> None:
    nodes = node_shares(torch.tensor(sample))
    num_nodes = min(num_nodes, len(nodes))
    tree = static_tree(nodes, num_nodes)
    accepted = sum(depth_by_hand(row, set(tree.paths)) for row in sample)
    assert accepted == max(sum(depth_by_hand(row, other) for row in sample) for other in every_tree(len(sample[0]), 2, num_nodes))
    assert expected_length(nodes, tree) == pytest.approx(1 + accepted / len(sample))
    assert accepted_lengths(torch.tensor(sample), tree).tolist() == [depth_by_hand(row, set(tree.paths)) for row in sample]


def test_nodes_stand_parents_first_and_rare_ranks_are_left_out() -> None:
    nodes = node_shares(torch.tensor([[1, 0], [1, 0], [0, 40], [50, 0]]))
    assert list(nodes.items()) == [((1,), 0.5), ((1, 0), 0.5), ((0,), 0.25)]


def test_counts_know_what_accuracies_per_head_do_not() -> None:
    """Either head's best token is right at half of the positions, but never both: the product would promise a quarter."""
    nodes = node_shares(torch.tensor([[0, 1], [0, 1], [1, 0], [1, 0]]))
    assert (0, 0) not in nodes and expected_length(nodes, build_tree([[0], [0, 0], [1]])) == 2.0


@given(sample=ranks(), num_nodes=st.integers(0, 6))
def test_steps_are_those_of_decoding(sample: list[list[int]], num_nodes: int) -> None:
    tree = static_tree(nodes := node_shares(torch.tensor(sample)), min(num_nodes, len(nodes)))
    position, emitted, starts = 0, [], []
    while position < len(sample):
        starts.append(position)
        emitted.append(1 + depth_by_hand(sample[position], set(tree.paths)))
        position += emitted[-1]
    accepted = accepted_lengths(torch.tensor(sample), tree)
    assert step_starts(accepted) == starts
    assert decoded_length([accepted]) == static_length([torch.tensor(sample)], tree) == pytest.approx(sum(emitted) / len(emitted))


def test_positions_that_decoding_skips_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is right only behind rank 0, where a step has just accepted; so rank 2, which is rarer, is worth more."""
    monkeypatch.setattr(tree_builders, "REFERENCE_NODES", 1)
    run = torch.tensor([[0], [1], [0], [1], [2]] * 4)
    assert node_shares(run) == {(0,): 0.4, (1,): 0.4, (2,): 0.2}
    assert best_nodes([run]) == {(0,): pytest.approx(2 / 3), (2,): pytest.approx(1 / 3)}


def test_the_order_that_decodes_fastest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    runs = [(torch.rand(12, 3, generator=generator) ** 2 * 4).long() for _ in range(4)]
    monkeypatch.setattr(tree_builders, "REFERENCE_NODES", 6)
    lengths: list[float] = []
    real = static_length

    def noted(runs_RK: Sequence[torch.Tensor], tree: Tree) -> float:
        lengths.append(real(runs_RK, tree))
        return lengths[-1]

    monkeypatch.setattr(tree_builders, "static_length", noted)
    nodes = best_nodes(runs)
    assert len(lengths) == tree_builders.NUM_TURNS and lengths[-1] < max(lengths)
    assert real(runs, static_tree(nodes, 6)) == max(lengths)


@pytest.mark.parametrize(("nodes", "held"), [({}, "no"), ({(0,): 0.5}, "only 1")])
def test_too_few_measured_nodes_are_refused(nodes: dict[tuple[int, ...], float], held: str) -> None:
    with pytest.raises(ValueError, match=f"--tree static:8: these heads come with {held} measured nodes: measure them with `medusa-heads"):
        static_tree(nodes, 8)


def checkpoint(num_heads: int = 3) -> Any:
    config = SimpleNamespace(num_heads=num_heads, vocab_size=50)
    nodes = node_shares(torch.tensor(list(itertools.product(range(2), repeat=num_heads))))
    return SimpleNamespace(config=config, static_nodes=nodes, draft_vocabulary=torch.arange(20))


def test_tree_arguments() -> None:
    assert parse_tree("auto", checkpoint()) is None
    assert parse_tree("beam:16", checkpoint()) == BeamTree(16)
    found = parse_tree("chain", checkpoint())
    assert isinstance(found, Tree) and found.paths == ((0,), (0, 0), (0, 0, 0))
    found = parse_tree("static:5", checkpoint())
    assert isinstance(found, Tree) and found.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0))


@pytest.mark.parametrize("spec", ["beam:0", "beam:", "static:x", "beam:-3", "beam", "static:1.5"])
def test_wrong_node_counts_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="N >= 1"):
        parse_tree(spec, checkpoint())


def test_a_file_deeper_than_the_heads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[[0], [0, 0], [0, 0, 0]]")
    assert isinstance(parse_tree(str(path), checkpoint(3)), Tree)
    with pytest.raises(ValueError, match=r"--tree .*deep.json: the tree is 3 deep but the heads predict 2 positions"):
        parse_tree(str(path), checkpoint(2))


def test_a_rank_beyond_the_proposed_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wide.json"
    path.write_text("[[0], [19]]")
    assert isinstance(parse_tree(str(path), checkpoint()), Tree)
    path.write_text("[[0], [20]]")
    with pytest.raises(ValueError, match=r"--tree .*wide.json: the tree names rank 20, but 20 tokens are proposed: use ranks below 20"):
        parse_tree(str(path), checkpoint())
