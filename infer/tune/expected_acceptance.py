"""Draft logits and the base's own next tokens -> rank accuracies and expected acceptance lengths.

Uses the decoder's own tree builder on true prefixes, so no tree has to be decoded. Figures are means
over positions drawn evenly; decoding visits hard positions more often, so its acceptance comes out
some per cent lower.
"""

# R positions, K heads, V vocabulary, N tree nodes

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from infer.candidates import beam_candidates
from infer.tree import Tree
from infer.tree_builders import static_tree
from infer.verify import accept_matching

NODE_COUNTS = (1, 2, 4, 8, 16, 32, 64)
NUM_RANKS = 32


@dataclass(frozen=True, slots=True)
class Measured:
    """rank_accuracy: [K][32], how often head k's token of rank r is true given that the path above
    lies within the ranks; acceptance_length: expected tokens per step by nodes of the beam tree, the
    bonus token included; top1: [K]; num_positions: how many were measured; ranks_RK: the rank of the
    true token at every position, long."""

    rank_accuracy: list[list[float]]
    acceptance_length: dict[int, float]
    top1: list[float]
    num_positions: int
    ranks_RK: Tensor = field(repr=False, compare=False)

    def as_exact_dict(self) -> dict[str, Any]:
        """All of it, as plain values for JSON."""
        lengths = {str(n): tau for n, tau in self.acceptance_length.items()}
        return {
            "rank_accuracy": self.rank_accuracy,
            "acceptance_length": lengths,
            "top1": self.top1,
            "num_positions": self.num_positions,
            "ranks": self.ranks_RK.tolist(),
        }

    @staticmethod
    def from_exact_dict(values: dict[str, Any]) -> Measured:
        lengths = {int(n): tau for n, tau in values["acceptance_length"].items()}
        return Measured(values["rank_accuracy"], lengths, values["top1"], values["num_positions"], torch.tensor(values["ranks"]))

    def as_dict(self) -> dict[str, Any]:
        """What is stored beside the heads: rounded, without the positions."""
        return {
            "rank_accuracy": [[round(a, 5) for a in row] for row in self.rank_accuracy],
            "acceptance_length": {str(n): round(tau, 4) for n, tau in self.acceptance_length.items()},
            "top1": [round(a, 4) for a in self.top1],
            "num_positions": self.num_positions,
            "convention": "positions drawn evenly from held-out answers of the base; bonus token included",
        }


def measure_positions(chunks: Iterable[tuple[Tensor, Tensor, Tensor]], *, draft_vocabulary: Tensor | None = None) -> Measured | None:
    """Measures on chunks of (draft logits [R, K, V], true tokens after the root [R, K], root [R]); None without a position.

    draft_vocabulary: only these tokens are proposed, as in decoding.
    """
    ranks: list[Tensor] = []
    accepted = dict.fromkeys(NODE_COUNTS, 0)
    for logits_RKV, truth_RK, root_R in chunks:
        if draft_vocabulary is not None:
            outside = torch.ones(logits_RKV.shape[-1], dtype=torch.bool, device=logits_RKV.device)
            outside[draft_vocabulary.to(outside.device)] = False
            logits_RKV = logits_RKV.masked_fill(outside, -torch.inf)
        ranks.append((logits_RKV > logits_RKV.gather(2, truth_RK[:, :, None])).sum(-1).cpu())
        for num_nodes in NODE_COUNTS:
            accepted[num_nodes] += int(_accepted(root_R, logits_RKV, truth_RK, num_nodes).sum())
    if not ranks:
        return None
    ranks_RK = torch.cat(ranks)
    total = len(ranks_RK)
    return Measured(
        rank_accuracy(ranks_RK),
        {n: 1 + count / total for n, count in accepted.items()},
        (ranks_RK == 0).double().mean(0).tolist(),
        total,
        ranks_RK,
    )


def rank_accuracy(ranks_RK: Tensor) -> list[list[float]]:
    """Ranks of the true tokens -> [K][32], how often each rank is the true one where the path above lies within the ranks."""
    accuracy = []
    for k in range(ranks_RK.shape[1]):
        reached_R = (ranks_RK[:, :k] < NUM_RANKS).all(1)
        found_R = ranks_RK[reached_R, k]
        hits = torch.bincount(found_R[found_R < NUM_RANKS], minlength=NUM_RANKS).double()
        accuracy.append((hits / max(1, len(found_R))).tolist())
    return accuracy


def static_length(ranks_RK: Tensor, tree: Tree) -> float:
    """Mean acceptance length of a static tree over positions, the bonus token included: no independence of the heads is assumed."""
    accepted = sum(int((ranks_RK[:, : len(path)] == torch.tensor(path)).all(1).sum()) for path in tree.paths)
    return 1 + accepted / len(ranks_RK)


def held_out_static_length(ranks_RK: Tensor, num_nodes: int, *, num_ranks: int = NUM_RANKS) -> float:
    """Expected acceptance length of a static tree of `num_nodes` nodes, built on one half of the positions
    and counted on the other, both ways: a tree fitted to the very positions would flatter itself.

    num_ranks: ranks beyond it are not used (the vocabulary's size, where that is smaller).
    """
    halves = ranks_RK.tensor_split(2)
    trees = [static_tree([row[:num_ranks] for row in rank_accuracy(half)], num_nodes) for half in halves]
    return sum(len(half) * static_length(half, tree) for half, tree in zip(halves, reversed(trees), strict=True)) / len(ranks_RK)


def _accepted(root_R: Tensor, logits_RKV: Tensor, truth_RK: Tensor, num_nodes: int) -> Tensor:
    candidates = beam_candidates(root_R, logits_RKV, num_nodes)
    path_RK = torch.cat([root_R[:, None], truth_RK], 1)
    truth_RN = path_RK.gather(1, candidates.depths_BN.expand_as(candidates.tokens_BN))
    return accept_matching(candidates.tokens_BN == truth_RN, truth_RN, candidates).length_B
