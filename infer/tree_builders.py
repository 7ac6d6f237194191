"""Measured rank accuracies -> the static tree of N nodes with the longest expected acceptance."""

# K heads, R ranks

from __future__ import annotations

import heapq
from collections.abc import Sequence

from infer.tree import Tree, build_tree


def static_tree(rank_accuracy_KR: Sequence[Sequence[float]], num_nodes: int) -> Tree:
    """The best static tree of `num_nodes` nodes besides the root.

    rank_accuracy_KR[k][r]: how often head k + 1's token of rank r is the true one, given that the
    path above it is. A node's worth is the product along its path, and a child is never worth more
    than its parent or its better sibling, so taking the best open node each time is optimal.
    Raises ValueError when no accuracies were measured.
    """
    if not rank_accuracy_KR:
        raise ValueError(
            "--tree static:N needs rank accuracies, which this heads checkpoint does not hold: "
            "train it with validation prompts, or give a JSON tree or beam:N"
        )
    # Ranks in falling order of accuracy per head; a measured curve need not fall monotonically.
    order = [sorted(range(len(row)), key=lambda r, row=row: -row[r]) for row in rank_accuracy_KR]  # type: ignore[misc]
    paths: list[tuple[int, ...]] = []
    open_nodes: list[tuple[float, tuple[int, ...], float]] = []

    def push(prefix: tuple[int, ...], prefix_worth: float, position: int) -> None:
        depth = len(prefix)
        if depth < len(order) and position < len(order[depth]):
            rank = order[depth][position]
            heapq.heappush(open_nodes, (-prefix_worth * rank_accuracy_KR[depth][rank], (*prefix, position), prefix_worth))

    push((), 1.0, 0)
    while open_nodes and len(paths) < num_nodes:
        negative_worth, path, prefix_worth = heapq.heappop(open_nodes)
        paths.append(path)
        push(path[:-1], prefix_worth, path[-1] + 1)
        push(path, -negative_worth, 0)
    return build_tree([tuple(order[d][p] for d, p in enumerate(path)) for path in paths])


def expected_length(rank_accuracy_KR: Sequence[Sequence[float]], tree: Tree) -> float:
    """Expected acceptance length of a static tree, bonus token included."""
    total = 1.0
    for path in tree.paths:
        worth = 1.0
        for depth, rank in enumerate(path):
            worth *= rank_accuracy_KR[depth][rank]
        total += worth
    return total
