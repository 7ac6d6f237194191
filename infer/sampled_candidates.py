"""Draft logits -> tokens drawn on a tree of a fixed shape, with the laws that they were drawn from."""

# B batch, K heads, V vocabulary, N tree nodes including the root, M nodes that have children, W most likely tokens, C most children

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.candidates import Candidates, tree_on
from infer.draft_laws import DraftLaws, finite
from infer.draws import draw_in_order
from infer.tree import Tree

NUM_DRAWN_FROM = 64  # most likely tokens of a slot; the tail would hardly be accepted, and costs a random number each
LEAST_PROBABILITY = 1e-12  # so that no law runs out of tokens to draw


def sampled_candidates(
    root_B: Tensor,
    draft_logits_BKV: Tensor,
    tree: Tree,
    *,
    temperature: float,
    generators: Sequence[torch.Generator],
    vocabulary: Tensor | None = None,
) -> Candidates:
    """The children of every node at depth d are drawn from head d + 1's law, one after the other without replacement.

    Of the tree only its shape counts; ranks order siblings. generators: one per row, on the CPU, so that
    what a row drafts does not depend on its batch. vocabulary: the token ids that the V logits stand for;
    None where they are 0 .. V - 1.
    """
    if not tree.num_nodes:
        return Candidates.root_only(root_B)
    tree = tree_on(tree, root_B.device)
    parents_M, parent_index_N, place_N = sibling_places(tree)
    num_children = int(place_N.max()) + 1
    laws_BKW, tokens_BKW = draft_law(draft_logits_BKV[:, : tree.depth], num_children, temperature=temperature, vocabulary=vocabulary)
    depths_M = tree.depths_N[parents_M]
    order_BMC = draw_in_order(laws_BKW[:, depths_M], num_children, generators)
    drawn_BMC = tokens_BKW[:, depths_M].gather(2, order_BMC)
    return Candidates(
        torch.cat([root_B[:, None], drawn_BMC[:, parent_index_N, place_N]], dim=1),
        tree.parents_N[None],
        tree.depths_N[None],
        tree.ancestors_NN[None],
        tree.depth,
        DraftLaws(laws_BKW, law_of_node=tuple(tree.depths_N.tolist()), tokens_BMW=tokens_BKW),
    )


def draft_law(
    draft_logits_BKV: Tensor, num_children: int, *, temperature: float, vocabulary: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The law that children are drawn from, softmax of the logits of the NUM_DRAWN_FROM most likely tokens over the temperature: its
    probabilities and token ids, both [B, K, W]. num_children: it has at least as many entries."""
    width = min(max(NUM_DRAWN_FROM, num_children), draft_logits_BKV.shape[-1])
    top_BKW, tokens_BKW = draft_logits_BKV.float().topk(width, dim=-1)
    if vocabulary is not None:
        tokens_BKW = vocabulary[tokens_BKW]
    laws_BKW = finite(top_BKW / temperature).softmax(-1).clamp_min(LEAST_PROBABILITY)
    return laws_BKW / laws_BKW.sum(-1, keepdim=True), tokens_BKW


def sibling_places(tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes that have children [M]; and of every node but the root: the place of its parent among those, and its
    own place among its siblings."""
    parents_M, parent_index_N = tree.parents_N[1:].unique(return_inverse=True)
    same_NN = parent_index_N[:, None] == parent_index_N
    return parents_M, parent_index_N, same_NN.tril(-1).sum(1)
