"""Ranks of the true tokens in held-out answers -> nodes of static trees, those that are right most often first.

A node is right where the ranks of the true tokens begin with its path, so on these answers the acceptance length
of a static tree is counted, not modelled: 1 + the share of steps at which each of its nodes is right. No node is
right more often than its parent: the N nodes that are right most often are a tree, and no tree of N nodes has more.

Steps do not begin at every position. Decoding goes on behind what was accepted, so it meets hard positions more
often, and which ones depends on the tree: the tree and the positions are settled in turns.
"""

# R consecutive positions of an answer, K heads

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from infer.tree import Path_, Tree, build_tree

NUM_RANKS = 32
REFERENCE_NODES = 64  # of the tree that decides where steps begin: the order it gives also serves smaller trees
NUM_TURNS = 4


def best_nodes(runs_RK: Sequence[Tensor]) -> dict[Path_, float]:
    """Nodes, and how often each is right at the steps of a tree of REFERENCE_NODES of them, in falling order.

    runs_RK: per run of consecutive positions, the ranks of the K true tokens below each, long [R, K]. Of the orders
    met in NUM_TURNS turns it is the one whose tree decodes these very runs in the fewest steps.
    """
    nodes = node_shares(torch.cat(list(runs_RK)))
    found: list[tuple[float, dict[Path_, float]]] = []
    for _ in range(NUM_TURNS):
        accepted = accepted_in_runs(runs_RK, static_tree(nodes, min(REFERENCE_NODES, len(nodes))))
        steps_RK = torch.cat([run_RK[step_starts(accepted_R)] for run_RK, accepted_R in zip(runs_RK, accepted, strict=True)])
        nodes = node_shares(steps_RK)
        found.append((static_length(runs_RK, static_tree(nodes, min(REFERENCE_NODES, len(nodes)))), nodes))
    return max(found, key=lambda pair: pair[0])[1]


def node_shares(ranks_RK: Tensor) -> dict[Path_, float]:
    """How often every node that is ever right is right at these positions, in falling order, parents first among
    equals; ranks from NUM_RANKS on are left out."""
    shares: dict[Path_, float] = {}
    for depth in range(1, ranks_RK.shape[1] + 1):
        paths = ranks_RK[(ranks_RK[:, :depth] < NUM_RANKS).all(1), :depth]
        nodes, counts = paths.unique(dim=0, return_counts=True)
        shares |= {tuple(path): count / len(ranks_RK) for path, count in zip(nodes.tolist(), counts.tolist(), strict=True)}
    return dict(sorted(shares.items(), key=lambda node: (-node[1], len(node[0]), node[0])))


def static_tree(nodes: Mapping[Path_, float], num_nodes: int) -> Tree:
    """The first `num_nodes` of the nodes, which stand in falling order. Raises ValueError when there are not as many."""
    if len(nodes) < num_nodes:
        held = f"only {len(nodes)}" if nodes else "no"
        raise ValueError(
            f"--tree static:{num_nodes}: these heads come with {held} measured nodes: measure them with `medusa-heads tree`, "
            "or give beam:N or a JSON tree"
        )
    return build_tree(list(nodes)[:num_nodes])


def accepted_lengths(ranks_RK: Tensor, tree: Tree) -> Tensor:
    """Drafted tokens that a static tree gets accepted at each position, [R]."""
    right_PR = [(ranks_RK[:, : len(path)] == torch.tensor(path)).all(1) for path in tree.paths]
    return torch.stack(right_PR).sum(0) if right_PR else torch.zeros(len(ranks_RK), dtype=torch.long)


def accepted_in_runs(runs_RK: Sequence[Tensor], tree: Tree) -> Sequence[Tensor]:
    """The same per run."""
    return accepted_lengths(torch.cat(list(runs_RK)), tree).split([len(run_RK) for run_RK in runs_RK])


def step_starts(accepted_R: Tensor) -> list[int]:
    """The positions of a run at which decoding begins a step: the first one, and the one behind what each step emits,
    the accepted tokens and the bonus token."""
    accepted, starts, position = accepted_R.tolist(), [], 0
    while position < len(accepted):
        starts.append(position)
        position += accepted[position] + 1
    return starts


def decoded_length(accepted: Sequence[Tensor]) -> float:
    """Mean acceptance length, the bonus token included, over the steps of decoding runs of which each position's
    accepted tokens [R] are given."""
    steps = torch.cat([accepted_R[step_starts(accepted_R)] for accepted_R in accepted])
    return 1 + float(steps.double().mean())


def static_length(runs_RK: Sequence[Tensor], tree: Tree) -> float:
    """Mean acceptance length of decoding the runs with a static tree."""
    return decoded_length(accepted_in_runs(runs_RK, tree))


def expected_length(nodes: Mapping[Path_, float], tree: Tree) -> float:
    """Acceptance length of any static tree at the steps that the nodes were measured at; those not among them are never right."""
    return 1 + sum(nodes.get(path, 0.0) for path in tree.paths)
