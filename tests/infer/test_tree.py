"""Rank paths -> trees: structure, and every way in which written paths can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from infer.tree import ancestors_from_parents, build_tree, chain, load_tree


def test_nodes_are_ordered_by_depth_whatever_the_written_order() -> None:
    tree = build_tree([[0, 1], [2], [0, 1, 3], [0]])
    assert tree.paths == ((0,), (2,), (0, 1), (0, 1, 3))
    assert tree.parents_N.tolist() == [0, 0, 0, 1, 3]
    assert tree.depths_N.tolist() == [0, 1, 1, 2, 3]
    assert tree.ranks_N.tolist() == [0, 0, 2, 1, 3]
    assert (tree.num_nodes, tree.depth, tree.max_rank) == (4, 3, 3)


def test_ancestors_are_the_nodes_on_the_path() -> None:
    tree = build_tree([[0], [1], [0, 0], [1, 0], [1, 0, 2]])
    found = [[m for m in range(6) if tree.ancestors_NN[n, m]] for n in range(6)]
    assert found == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 4, 5]]


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 9, 33])
def test_ancestors_of_random_trees_equal_a_walk_to_the_root(num_nodes: int) -> None:
    generator = torch.Generator().manual_seed(num_nodes)
    parents = [[0] + [int(torch.randint(0, n, (), generator=generator)) for n in range(1, num_nodes)] for _ in range(3)]
    expected = torch.eye(num_nodes, dtype=torch.bool).repeat(3, 1, 1)
    for row, row_parents in enumerate(parents):
        for node in range(num_nodes):
            above = node
            while above:
                above = row_parents[above]
                expected[row, node, above] = True
    assert torch.equal(ancestors_from_parents(torch.tensor(parents)), expected)


@pytest.mark.parametrize("depth", range(1, 18))
def test_known_depth_is_enough_squarings(depth: int) -> None:
    parents = torch.tensor([[0, *range(depth)]])
    assert torch.equal(ancestors_from_parents(parents, depth=depth)[0], torch.ones(depth + 1, depth + 1, dtype=torch.bool).tril())


def test_chain() -> None:
    assert chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    assert chain(0).num_nodes == 0 and chain(0).depth == 0 and chain(0).ancestors_NN.tolist() == [[True]]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [1, 0]], r"\[1, 0\] has no parent: add \[1\]"),
        ([[0], [0, 0, 0]], r"\[0, 0, 0\] has no parent: add \[0, 0\]"),
        ([[0], [1], [0]], r"\[0\] is written twice"),
        ([[0], [-1]], r"\[-1\] has a negative rank"),
        ([[10**22]], "names a rank beyond any vocabulary"),
        ([[0], []], "path is empty"),
    ],
)
def test_wrong_paths_are_refused(paths: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tree(paths)


def test_a_tree_deeper_than_the_heads_or_wider_than_the_vocabulary_is_refused() -> None:
    tree = build_tree([[0], [0, 7], [0, 7, 0]])
    tree.check(num_heads=3, vocab_size=8)
    with pytest.raises(ValueError, match=r"3.*2"):
        tree.check(num_heads=2, vocab_size=8)
    with pytest.raises(ValueError, match="rank 7"):
        tree.check(num_heads=3, vocab_size=7)


def test_json_list_and_object_are_read(tmp_path: Path) -> None:
    paths = [[0], [1], [0, 0]]
    (tmp_path / "list.json").write_text(json.dumps(paths))
    (tmp_path / "object.json").write_text(json.dumps({"choices": paths, "note": "any"}))
    assert load_tree(tmp_path / "list.json").paths == load_tree(tmp_path / "object.json").paths == ((0,), (1,), (0, 0))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[0], [1", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("5", "expected a list of rank paths"),
        ('{"paths": [[0]]}', "expected a list of rank paths"),
        ("[0, 1]", "expected a list of rank paths"),
        ('[[0], ["1"]]', "expected a list of rank paths"),
        ("[[0], [0.5]]", "expected a list of rank paths"),
        ("[[0], [true]]", "expected a list of rank paths"),
        ("[[0], [1, 1]]", "has no parent"),
        ("[[0], [0]]", "twice"),
        ("[[0], [-2]]", "negative"),
    ],
)
def test_wrong_json_is_refused_with_the_reason(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "tree.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_tree(path)
    assert "--tree" in str(error.value)


def test_missing_file_names_the_other_choices(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file; write auto, tuned, chain, beam:N"):
        load_tree(tmp_path / "none.json")


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load_tree(tmp_path)
    (tmp_path / "binary.json").write_bytes(bytes(range(128, 256)))
    with pytest.raises(ValueError, match="not valid JSON"):
        load_tree(tmp_path / "binary.json")


def test_a_tree_without_nodes_or_with_thousands_is_refused_at_once(tmp_path: Path) -> None:
    for choices, problem in (([], "names no nodes"), ([[rank] for rank in range(9000)], "9000 nodes, and at most 4096")):
        (tmp_path / "tree.json").write_text(json.dumps(choices))
        with pytest.raises(ValueError, match=problem):
            load_tree(tmp_path / "tree.json")
