"""Greedy verification against a walk from the root in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infer.candidates import Candidates, chain_candidates
from infer.tree import ancestors_from_parents
from infer.verify import verify_greedy


def random_candidates(batch: int, num_nodes: int, vocab: int, generator: torch.Generator) -> Candidates:
    """Random trees whose siblings hold different tokens, a different one in every row."""
    tokens, parents, depths = [], [], []
    for _ in range(batch):
        row_tokens, row_parents, row_depths = [int(torch.randint(0, vocab, (), generator=generator))], [0], [0]
        while len(row_tokens) < num_nodes:
            parent = int(torch.randint(0, len(row_tokens), (), generator=generator))
            siblings = {t for t, p in zip(row_tokens[1:], row_parents[1:], strict=True) if p == parent}
            free = [v for v in range(vocab) if v not in siblings]
            if free:
                row_tokens.append(free[int(torch.randint(0, len(free), (), generator=generator))])
                row_parents.append(parent)
                row_depths.append(row_depths[parent] + 1)
        tokens.append(row_tokens)
        parents.append(row_parents)
        depths.append(row_depths)
    parents_BN = torch.tensor(parents)
    return Candidates(torch.tensor(tokens), parents_BN, torch.tensor(depths), ancestors_from_parents(parents_BN), max(map(max, depths)))


def walk(tokens: list[int], parents: list[int], target: list[int]) -> list[int]:
    """From the root to the child that holds the target, until there is none."""
    path = [0]
    while True:
        matching = [n for n in range(1, len(tokens)) if parents[n] == path[-1] and tokens[n] == target[path[-1]]]
        if not matching:
            return path
        path.append(matching[0])


@given(batch=st.integers(1, 3), num_nodes=st.integers(1, 14), vocab=st.integers(2, 4), seed=st.integers(0, 100_000))
def test_accepted_path_is_the_walk_from_the_root(batch: int, num_nodes: int, vocab: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    candidates = random_candidates(batch, num_nodes, vocab, generator)
    target_BN = torch.randint(0, vocab, (batch, num_nodes), generator=generator)
    found = verify_greedy(target_BN, candidates)
    assert found.path_BP.shape == (batch, candidates.max_depth + 1)
    for row in range(batch):
        path = walk(candidates.tokens_BN[row].tolist(), candidates.parents_BN[row].tolist(), target_BN[row].tolist())
        assert found.length_B[row] == len(path) - 1
        assert found.path_BP[row].tolist() == path + [path[-1]] * (candidates.max_depth + 1 - len(path))
        assert found.bonus_B[row] == target_BN[row, path[-1]]


def test_a_match_below_a_mismatch_is_not_accepted() -> None:
    candidates = chain_candidates(torch.tensor([5]), torch.tensor([[1, 2, 3]]))
    found = verify_greedy(torch.tensor([[9, 2, 3, 4]]), candidates)  # node 1 is wrong, 2 and 3 match their parents
    assert found.length_B.tolist() == [0] and found.bonus_B.tolist() == [9]


@pytest.mark.parametrize("right", range(4))
def test_chains_are_accepted_up_to_the_first_wrong_token(right: int) -> None:
    candidates = chain_candidates(torch.tensor([5, 5]), torch.tensor([[1, 2, 3], [0, 0, 0]]))
    target = [1, 2, 3, 4]
    target[right] = 8
    found = verify_greedy(torch.tensor([target, [7, 7, 7, 7]]), candidates)
    assert found.length_B.tolist() == [right, 0] and found.bonus_B.tolist() == [8, 7]
    assert found.path_BP[0].tolist() == list(range(right + 1)) + [right] * (3 - right)


def test_a_root_alone_gives_its_bonus_token() -> None:
    found = verify_greedy(torch.tensor([[3], [4]]), Candidates.root_only(torch.tensor([1, 2])))
    assert found.path_BP.tolist() == [[0], [0]] and found.length_B.tolist() == [0, 0] and found.bonus_B.tolist() == [3, 4]


def test_the_root_is_accepted_whatever_its_own_target_is() -> None:
    candidates = chain_candidates(torch.tensor([2]), torch.tensor([[6]]))
    assert verify_greedy(torch.tensor([[6, 2]]), candidates).length_B.tolist() == [1]
