"""Rank paths -> a static tree: parents, depths, ranks and the ancestor mask of its nodes.

A tree is written as Medusa writes it: a list of paths, each a list of ranks. [0] is the first
head's best token, [0, 2] the second head's third-best below it. The root (the token the base model
has already chosen) is node 0 and is not written.
"""

# N tree nodes including the root

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_heads.json_text import parse_json

Path_ = tuple[int, ...]

MAX_RANK = 2**31 - 1
MAX_NODES = 4096


@dataclass(frozen=True, slots=True)
class Tree:
    """A static tree. Nodes are ordered by depth, so a parent always precedes its children.

    paths: rank paths of the nodes 1..N-1; parents_N, depths_N, ranks_N: long, zeros at the root;
    ancestors_NN: bool, [n, m] is True where m is n or an ancestor of n.
    """

    paths: tuple[Path_, ...]
    parents_N: Tensor
    depths_N: Tensor
    ranks_N: Tensor
    ancestors_NN: Tensor

    @property
    def num_nodes(self) -> int:
        """Nodes besides the root."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)

    @property
    def max_rank(self) -> int:
        return max((rank for path in self.paths for rank in path), default=0)

    def check(self, *, num_heads: int, vocab_size: int) -> None:
        """Raises ValueError when the heads cannot fill this tree."""
        if self.depth > num_heads:
            raise ValueError(f"the tree is {self.depth} deep but the heads predict {num_heads} positions: use a tree of at most that depth")
        if self.max_rank >= vocab_size:
            raise ValueError(f"the tree names rank {self.max_rank}, but {vocab_size} tokens are proposed: use ranks below {vocab_size}")


def build_tree(paths: Iterable[Sequence[int]]) -> Tree:
    """Rank paths in any order -> a Tree. Raises ValueError on a hole, a repeat or a negative rank."""
    paths = list(paths)
    if len(paths) > MAX_NODES:
        raise ValueError(f"the tree has {len(paths)} nodes, and at most {MAX_NODES} can be verified in one forward: use fewer")
    ordered = sorted((tuple(int(rank) for rank in path) for path in paths), key=lambda path: (len(path), path))
    index: dict[Path_, int] = {(): 0}
    for path in ordered:
        if not path:
            raise ValueError("a tree path is empty: the root is implied, write only the nodes below it")
        if min(path) < 0:
            raise ValueError(f"tree path {list(path)} has a negative rank: ranks begin at 0")
        if max(path) > MAX_RANK:
            raise ValueError(f"tree path {list(path)} names a rank beyond any vocabulary")
        if path in index:
            raise ValueError(f"tree path {list(path)} is written twice: write it once")
        if path[:-1] not in index:
            raise ValueError(f"tree path {list(path)} has no parent: add {list(path[:-1])}")
        index[path] = len(index)
    parents = torch.tensor([0] + [index[path[:-1]] for path in ordered])
    return Tree(
        paths=tuple(ordered),
        parents_N=parents,
        depths_N=torch.tensor([0] + [len(path) for path in ordered]),
        ranks_N=torch.tensor([0] + [path[-1] for path in ordered]),
        ancestors_NN=ancestors_from_parents(parents[None], depth=max(map(len, ordered), default=0))[0],
    )


def ancestors_from_parents(parents_BN: Tensor, depth: int | None = None) -> Tensor:
    """parents_BN [B, N] (root: itself) -> ancestors [B, N, N], each node counted as its own.

    depth: the deepest node, when known; saves squarings.
    """
    num_nodes = parents_BN.shape[1]
    reach = torch.eye(num_nodes, device=parents_BN.device).expand(parents_BN.shape[0], -1, -1).clone()
    reach.scatter_(2, parents_BN[:, :, None], 1.0)
    covered = 1
    while covered < (depth if depth is not None else num_nodes - 1):
        reach = (reach @ reach).clamp_(max=1.0)
        covered *= 2
    return reach > 0


def checked_paths(values: Any) -> list[list[int]]:
    """What JSON holds -> rank paths. Raises ValueError where it is something else."""
    if not isinstance(values, list) or not all(isinstance(path, list) and all(type(rank) is int for rank in path) for path in values):
        raise ValueError("expected a list of rank paths such as [[0], [1], [0, 0]]")
    return values


def load_tree(path: str | Path) -> Tree:
    """Reads a tree from JSON: a list of rank paths, or an object with such a list under `choices`."""
    try:
        values = parse_json(Path(path).read_text())
    except FileNotFoundError:
        raise ValueError(f"--tree {path}: no such file; write auto, tuned, chain, beam:N, static:N or a JSON file of rank paths") from None
    except OSError as error:
        raise ValueError(f"--tree {path} cannot be read ({error.strerror}): give a JSON file of rank paths") from None
    except ValueError as error:  # not JSON, or not text at all
        raise ValueError(f"--tree {path} is not valid JSON: {error}") from None
    choices = values.get("choices") if isinstance(values, dict) else values
    if choices == []:
        raise ValueError(f"--tree {path} names no nodes: add some, or decode plainly with --heads none")
    try:
        return build_tree(checked_paths(choices))
    except ValueError as error:
        raise ValueError(f"--tree {path}: {error}") from None


def chain(depth: int) -> Tree:
    """The single path of best tokens."""
    return build_tree([(0,) * (d + 1) for d in range(depth)])
