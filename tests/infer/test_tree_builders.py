"""The static tree builder against brute force, and `--tree` arguments."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infer.tree import Tree, build_tree
from infer.tree_builders import expected_length, static_tree
from infer.tree_spec import BeamTree, parse_tree

accuracy = st.floats(0.0, 1.0, allow_nan=False)


def brute_force(rank_accuracy: list[list[float]], num_nodes: int) -> float:
    """The best expected length of any prefix-closed set of `num_nodes` paths."""
    paths = [p for d in range(1, len(rank_accuracy) + 1) for p in itertools.product(*(range(len(row)) for row in rank_accuracy[:d]))]
    best = 0.0
    for chosen in itertools.combinations(paths, min(num_nodes, len(paths))):
        if all(len(p) == 1 or p[:-1] in chosen for p in chosen):
            best = max(best, expected_length(rank_accuracy, build_tree(chosen)))
    return best


@given(
    rank_accuracy=st.integers(1, 3).flatmap(lambda k: st.lists(st.lists(accuracy, min_size=2, max_size=2), min_size=k, max_size=k)),
    num_nodes=st.integers(1, 5),
)
def test_no_other_tree_of_this_size_is_better(rank_accuracy: list[list[float]], num_nodes: int) -> None:
    tree = static_tree(rank_accuracy, num_nodes)
    assert tree.num_nodes == min(num_nodes, sum(2 ** (d + 1) for d in range(len(rank_accuracy))))
    assert expected_length(rank_accuracy, tree) == pytest.approx(brute_force(rank_accuracy, num_nodes))


def test_expected_length_by_hand() -> None:
    tree = build_tree([[0], [1], [0, 0]])
    assert expected_length([[0.6, 0.2], [0.5, 0.1]], tree) == pytest.approx(1 + 0.6 + 0.2 + 0.6 * 0.5)


def test_a_better_later_rank_comes_first() -> None:
    assert static_tree([[0.1, 0.5]], 1).paths == ((1,),)


def test_unmeasured_accuracies_are_refused() -> None:
    with pytest.raises(ValueError, match="static:N needs rank accuracies"):
        static_tree([], 8)


def checkpoint(num_heads: int = 3) -> Any:
    config = SimpleNamespace(num_heads=num_heads, vocab_size=50)
    return SimpleNamespace(config=config, rank_accuracy=[[0.5, 0.2]] * num_heads, draft_vocabulary=torch.arange(20))


def test_tree_arguments() -> None:
    assert parse_tree("auto", checkpoint()) is None
    assert parse_tree("beam:16", checkpoint()) == BeamTree(16)
    found = parse_tree("chain", checkpoint())
    assert isinstance(found, Tree) and found.paths == ((0,), (0, 0), (0, 0, 0))
    found = parse_tree("static:5", checkpoint())
    assert isinstance(found, Tree) and found.num_nodes == 5


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
