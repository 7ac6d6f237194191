"""Draft logits and the base's own next tokens -> the best nodes of static trees, and acceptance lengths.

Uses the decoder's own tree builder on true prefixes, so no tree has to be decoded: positions come in runs of
consecutive ones, and stepping through a run from accepted token to accepted token is what greedy decoding does there.
"""

# R consecutive positions, K heads, V proposed tokens, N tree nodes

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from infer.candidates import beam_candidates
from infer.tree import Path_
from infer.tree_builders import NUM_RANKS, accepted_in_runs, best_nodes, decoded_length, static_tree
from infer.tune.replay import matched_lengths
from medusa_heads.checkpoint import path_from_name, path_name

NODE_COUNTS = (1, 2, 4, 8, 16, 32, 64)
RUN = 64  # consecutive positions of an answer that are measured together
NUM_POSITIONS = 40_000  # fewer leave the order of a static tree's last nodes to chance
NUM_STORED = 512  # nodes


@dataclass(frozen=True, slots=True)
class Measured:
    """static_nodes: the nodes of static trees (tree_builders.best_nodes); acceptance_length: tokens per step by nodes of
    the beam tree, the bonus token included; top1: [K], over all positions; num_positions: how many were measured;
    runs_RK: per run of consecutive positions, the ranks of the true tokens, long."""

    static_nodes: dict[Path_, float]
    acceptance_length: dict[int, float]
    top1: list[float]
    num_positions: int
    runs_RK: list[Tensor] = field(repr=False, compare=False)

    def as_exact_dict(self) -> dict[str, Any]:
        """All of it, as plain values for JSON."""
        return {
            "static_nodes": {path_name(path): share for path, share in self.static_nodes.items()},
            "acceptance_length": {str(n): tau for n, tau in self.acceptance_length.items()},
            "top1": self.top1,
            "num_positions": self.num_positions,
            "runs": [run_RK.tolist() for run_RK in self.runs_RK],
        }

    @staticmethod
    def from_exact_dict(values: dict[str, Any]) -> Measured:
        nodes = {path_from_name(name): share for name, share in values["static_nodes"].items()}
        lengths = {int(n): tau for n, tau in values["acceptance_length"].items()}
        return Measured(nodes, lengths, values["top1"], values["num_positions"], [torch.tensor(run) for run in values["runs"]])

    def as_dict(self) -> dict[str, Any]:
        """What is stored beside the heads: rounded, without the positions."""
        return {
            "static_nodes": {path_name(path): round(share, 5) for path, share in islice(self.static_nodes.items(), NUM_STORED)},
            "acceptance_length": {str(n): round(tau, 4) for n, tau in self.acceptance_length.items()},
            "top1": [round(a, 4) for a in self.top1],
            "num_positions": self.num_positions,
            "convention": f"held-out answers of the base, decoded in runs of up to {RUN} positions; bonus token included",
        }


def measure_runs(runs: Iterable[tuple[Tensor, Tensor, Tensor]], *, draft_vocabulary: Tensor | None = None) -> Measured | None:
    """Measures on runs of consecutive positions of an answer; None without one.

    runs: draft logits over the proposed tokens [R, K, V], true tokens after the root [R, K], root [R].
    draft_vocabulary: the token ids [V] that are proposed, ascending; None for all.
    """
    ranks: list[Tensor] = []
    accepted: dict[int, list[Tensor]] = {n: [] for n in NODE_COUNTS}
    for logits_RKV, truth_RK, root_R in runs:
        ranks.append(true_ranks(logits_RKV, truth_RK, draft_vocabulary).cpu())
        for num_nodes in NODE_COUNTS:
            candidates = beam_candidates(root_R, logits_RKV, num_nodes, vocabulary=draft_vocabulary)
            accepted[num_nodes].append(matched_lengths(candidates, truth_RK).cpu())
    if not ranks:
        return None
    ranks_RK = torch.cat(ranks)
    return Measured(
        best_nodes(ranks),
        {n: decoded_length(lengths) for n, lengths in accepted.items()},
        (ranks_RK == 0).double().mean(0).tolist(),
        len(ranks_RK),
        ranks,
    )


def true_ranks(logits_RKV: Tensor, truth_RK: Tensor, vocabulary: Tensor | None) -> Tensor:
    """How many proposed tokens each head finds likelier than the true one, [R, K]; where that is not proposed, a rank
    that no tree holds."""
    size = logits_RKV.shape[-1]
    index_RK, proposed_RK = truth_RK, torch.ones_like(truth_RK, dtype=torch.bool)
    if vocabulary is not None:
        vocabulary = vocabulary.to(truth_RK.device)
        index_RK = torch.searchsorted(vocabulary, truth_RK).clamp(max=size - 1)
        proposed_RK = vocabulary[index_RK] == truth_RK
    return (logits_RKV > logits_RKV.gather(2, index_RK[:, :, None])).sum(-1).where(proposed_RK, max(size, NUM_RANKS))


def split_runs(positions: Tensor, *, keep: float, generator: torch.Generator) -> Iterator[Tensor]:
    """Ascending positions -> runs of at most RUN consecutive ones, each kept with probability `keep`."""
    breaks = (positions.diff() != 1).nonzero()[:, 0] + 1
    for stretch in positions.tensor_split(breaks.tolist()):
        for run in stretch.split(RUN):
            if len(run) and float(torch.rand((), generator=generator)) < keep:
                yield run


def held_out_static_lengths(runs_RK: Sequence[Tensor], sizes: Iterable[int]) -> dict[int, float]:
    """Acceptance length of static trees by size, each built on one half of the runs and decoded on the other, both
    ways: a tree fitted to the very positions would flatter itself. Sizes that a half has too few nodes for are left out."""
    middle = len(runs_RK) // 2
    first, second = runs_RK[:middle], runs_RK[middle:]
    if not first:
        return {}
    pairs = [(best_nodes(first), second), (best_nodes(second), first)]
    lengths = {}
    for size in sizes:
        if all(len(nodes) >= size for nodes, _ in pairs):
            trees = [(static_tree(nodes, size), runs) for nodes, runs in pairs]
            lengths[size] = decoded_length([accepted_R for tree, runs in trees for accepted_R in accepted_in_runs(runs, tree)])
    return lengths
