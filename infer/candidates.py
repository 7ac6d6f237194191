"""Draft logits -> tokens on a tree: over a static tree, or over the per-step beam tree."""

# B batch, K heads, V vocabulary, N tree nodes including the root, W beam width, C chain length

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infer.draft_laws import DraftLaws
from infer.tree import Tree, ancestors_from_parents

FILLER = 0  # drafted where a row has less to propose than the longest; verified like any other token


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens on a tree, ready to be verified in one forward.

    tokens_BN: node 0 is the root, the token the base model has already chosen; parents_BN: index of
    each node's parent, the root's its own; depths_BN; ancestors_BNN: True where m is n or above it.
    A parent always precedes its children. The structural tensors may have a batch of 1 when every
    row has the same tree. max_depth: no node is deeper.

    draft_laws: None where the tokens were chosen (the likeliest, a copy of earlier text); where they were
    drawn, what they were drawn from. Siblings then stand in the order in which they were drawn.
    num_real: nodes of each row besides the root and the fillers, which come last; None where there are no fillers.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    depths_BN: Tensor
    ancestors_BNN: Tensor
    max_depth: int
    draft_laws: DraftLaws | None = None
    num_real: tuple[int, ...] | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes besides the root."""
        return self.tokens_BN.shape[1] - 1

    @property
    def num_drafted(self) -> tuple[int, ...]:
        """What each row proposes: its nodes besides the root and the fillers."""
        return self.num_real if self.num_real is not None else (self.num_nodes,) * len(self.tokens_BN)

    @staticmethod
    def root_only(root_B: Tensor) -> Candidates:
        """Nothing drafted: plain decoding."""
        zeros = torch.zeros(1, 1, dtype=torch.long, device=root_B.device)
        return Candidates(root_B[:, None], zeros, zeros, torch.ones(1, 1, 1, dtype=torch.bool, device=root_B.device), 0)


def static_candidates(root_B: Tensor, draft_logits_BKV: Tensor, tree: Tree, *, vocabulary: Tensor | None = None) -> Candidates:
    """Fills a static tree: the node at path (r1, .., rd) gets head d's token of rank rd.

    vocabulary: the token ids that the V logits stand for; None where they are 0 .. V - 1.
    """
    if not tree.num_nodes:
        return Candidates.root_only(root_B)
    tree = tree_on(tree, root_B.device)
    top_BKR = draft_logits_BKV[:, : tree.depth].topk(tree.max_rank + 1, dim=-1).indices
    drafted_BN = top_BKR[:, tree.depths_N[1:] - 1, tree.ranks_N[1:]]
    if vocabulary is not None:
        drafted_BN = vocabulary[drafted_BN]
    return Candidates(
        torch.cat([root_B[:, None], drafted_BN], dim=1),
        tree.parents_N[None],
        tree.depths_N[None],
        tree.ancestors_NN[None],
        tree.depth,
    )


def tree_on(tree: Tree, device: torch.device) -> Tree:
    """`tree` with its tensors on `device`."""
    if tree.parents_N.device == device:
        return tree
    return Tree(tree.paths, *(t.to(device) for t in (tree.parents_N, tree.depths_N, tree.ranks_N, tree.ancestors_NN)))


def beam_candidates(
    root_B: Tensor, draft_logits_BKV: Tensor, num_nodes: int, width: int = 20, *, vocabulary: Tensor | None = None
) -> Candidates:
    """The per-step beam tree (EAGLE-2, arXiv 2406.16858; OPT-Tree, arXiv 2406.17276).

    Depth by depth, the best `width` paths by cumulative log q are extended by each head's best
    `width` tokens; of all paths scored, the best `num_nodes` are kept. A path never scores above its
    prefix, so what is kept is always a tree. Shapes depend on K, width and num_nodes alone. On a CPU a
    beam at least as wide as the tree, which is then the best of all trees, is found best-first instead:
    a few nodes cost less that way than tensors of all paths.
    vocabulary: the token ids that the V logits stand for; None where they are 0 .. V - 1.
    """
    width = min(width, num_nodes, draft_logits_BKV.shape[-1])
    if width == 0:
        return Candidates.root_only(root_B)
    top_logits, tokens_BKW = draft_logits_BKV.float().topk(width, dim=-1)
    if vocabulary is not None:
        tokens_BKW = vocabulary[tokens_BKW]
    log_q_BKW = top_logits - draft_logits_BKV.float().logsumexp(-1, keepdim=True)
    log_q_BKW = log_q_BKW.nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # a score that is no number must not pass a finite parent's
    if width == num_nodes and root_B.device.type == "cpu":
        return best_first_candidates(root_B, log_q_BKW, tokens_BKW)
    return fixed_shape_candidates(root_B, log_q_BKW, tokens_BKW, num_nodes)


def fixed_shape_candidates(root_B: Tensor, log_q_BKW: Tensor, tokens_BKW: Tensor, num_nodes: int) -> Candidates:
    """The beam tree from each head's best W tokens, by tensors whose shapes no score changes."""
    batch, num_heads, width = log_q_BKW.shape
    # Pool index p of a path: depth 1 holds W of them, every further depth W * W (parent, token).
    scores, pool_tokens, pool_parents = [log_q_BKW[:, 0]], [tokens_BKW[:, 0]], [torch.full_like(tokens_BKW[:, 0], -1)]
    frontier_scores, frontier_pool = log_q_BKW[:, 0], torch.arange(width, device=root_B.device).expand(batch, -1)
    pool_size = width
    for k in range(1, num_heads):
        extended_BWW = frontier_scores[:, :, None] + log_q_BKW[:, k, None, :]
        scores.append(extended_BWW.flatten(1))
        pool_tokens.append(tokens_BKW[:, k, None, :].expand(-1, width, -1).flatten(1))
        pool_parents.append(frontier_pool[:, :, None].expand(-1, -1, width).flatten(1))
        if k + 1 < num_heads:
            frontier_scores, best = scores[-1].topk(width, dim=-1)
            frontier_pool = pool_size + best
        pool_size += width * width
    scores_BP, tokens_BP, parents_BP = torch.cat(scores, 1), torch.cat(pool_tokens, 1), torch.cat(pool_parents, 1)

    # A stable sort keeps a prefix before its extension when their scores tie.
    num_nodes = min(num_nodes, pool_size)
    kept_BN = scores_BP.sort(dim=-1, descending=True, stable=True).indices[:, :num_nodes]
    kept_BN = kept_BN.sort(dim=-1).values  # pool order is depth order
    slot_BP = torch.zeros(batch, pool_size + 1, dtype=torch.long, device=root_B.device)
    slot_BP.scatter_(1, kept_BN, torch.arange(1, num_nodes + 1, device=root_B.device).expand(batch, -1))
    slot_BP[:, pool_size] = 0  # parent -1 is the root
    parents_BN = slot_BP.gather(1, parents_BP.gather(1, kept_BN) % (pool_size + 1))
    depths_BN = 1 + (kept_BN - width).div(width * width, rounding_mode="floor").add(1).clamp(min=0)
    zero = torch.zeros(batch, 1, dtype=torch.long, device=root_B.device)
    parents_BN, depths_BN = torch.cat([zero, parents_BN], 1), torch.cat([zero, depths_BN], 1)
    return Candidates(
        torch.cat([root_B[:, None], tokens_BP.gather(1, kept_BN)], 1),
        parents_BN,
        depths_BN,
        ancestors_from_parents(parents_BN, depth=num_heads),
        num_heads,
    )


def best_first_candidates(root_B: Tensor, log_q_BKW: Tensor, tokens_BKW: Tensor) -> Candidates:
    """The W best paths of all that each head's best W tokens form, by a heap; log_q_BKW falls along W."""
    rows = zip(log_q_BKW.tolist(), tokens_BKW.tolist(), strict=True)
    return tree_candidates(root_B, [[(tokens[depth - 1][rank], parent) for parent, depth, rank in _best_first(q)] for q, tokens in rows])


def tree_candidates(root_B: Tensor, trees: Sequence[Sequence[tuple[int, int]]]) -> Candidates:
    """One tree per row: token and parent of every node, parents first, the root being node 0. A row with fewer nodes than the
    largest gets a chain of fillers below its last node (a leaf, so that no two siblings are alike)."""
    size = max(map(len, trees))
    tokens, parents, depths, ancestors = [], [], [], []
    for root, tree in zip(root_B.tolist(), trees, strict=True):
        nodes = [(root, 0), *tree, *((FILLER, node) for node in range(len(tree), size))]
        row_depths, above = [0], [[True] + [False] * size]
        for index, (_, parent) in enumerate(nodes[1:], start=1):
            row_depths.append(row_depths[parent] + 1)
            above.append(above[parent].copy())
            above[index][index] = True
        tokens.append([token for token, _ in nodes])
        parents.append([parent for _, parent in nodes])
        depths.append(row_depths)
        ancestors.append(above)
    device = root_B.device
    return Candidates(
        torch.tensor(tokens, device=device),
        torch.tensor(parents, device=device),
        torch.tensor(depths, device=device),
        torch.tensor(ancestors, device=device),
        max(map(max, depths)),
        num_real=tuple(map(len, trees)),
    )


def _best_first(log_q: Sequence[Sequence[float]]) -> list[tuple[int, int, int]]:
    """log_q [K][W], falling along W -> parent, depth and rank of the W best paths, best first; the root is node 0."""
    num_heads, num_nodes = len(log_q), len(log_q[0])
    open_paths = [(-log_q[0][0], 1, 0, 0, 0.0)]  # minus its score, depth, parent, rank, minus its parent's score
    nodes: list[tuple[int, int, int]] = []
    while len(nodes) < num_nodes:
        cost, depth, parent, rank, above = heapq.heappop(open_paths)
        nodes.append((parent, depth, rank))
        if rank + 1 < num_nodes:
            heapq.heappush(open_paths, (above - log_q[depth - 1][rank + 1], depth, parent, rank + 1, above))
        if depth < num_heads:
            heapq.heappush(open_paths, (cost - log_q[depth][0], depth + 1, len(nodes), 0, cost))
    return nodes


def chain_candidates(
    root_B: Tensor, drafted_BC: Tensor, *, laws_BCV: Tensor | None = None, num_drafted: tuple[int, ...] | None = None
) -> Candidates:
    """A chain of drafted tokens [B, C] below each root. laws_BCV: probabilities that each was drawn from, None
    where they were chosen. num_drafted: how many are no fillers, None: all of them."""
    length = drafted_BC.shape[1]
    steps = torch.arange(length + 1, device=root_B.device)
    return Candidates(
        torch.cat([root_B[:, None], drafted_BC], dim=1),
        (steps - 1).clamp(min=0)[None],
        steps[None],
        torch.ones(length + 1, length + 1, dtype=torch.bool, device=root_B.device).tril()[None],
        length,
        None if laws_BCV is None else DraftLaws(laws_BCV, law_of_node=tuple(range(length + 1))),
        num_drafted,
    )
