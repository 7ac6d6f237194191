"""Target tokens at every tree node -> the accepted path and the bonus token, per row."""

# B batch, N tree nodes including the root, P longest path including the root

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infer.candidates import Candidates


@dataclass(frozen=True, slots=True)
class Verification:
    """What one forward over the tree decided.

    path_BP: node indices of the accepted path, from the root (node 0), padded with the last node;
    length_B: nodes on the path besides the root; bonus_B: the base model's own token after it.
    """

    path_BP: Tensor
    length_B: Tensor
    bonus_B: Tensor


def verify_greedy(target_BN: Tensor, candidates: Candidates) -> Verification:
    """Greedy verification: from the root, follow the child that is the target's argmax.

    target_BN: the base model's argmax at every node (lowest id on ties). Exactly the tokens that
    one-by-one greedy decoding emits.
    """
    matches_BN = candidates.tokens_BN == target_BN.gather(1, candidates.parents_BN.expand_as(target_BN))
    matches_BN[:, 0] = True
    return accept_matching(matches_BN, target_BN, candidates)


def accept_matching(matches_BN: Tensor, target_BN: Tensor, candidates: Candidates) -> Verification:
    """The deepest node whose whole path matches, given which nodes match their parent's target.

    Siblings hold different tokens, so at most one path matches at every depth.
    """
    ancestors_BNN = candidates.ancestors_BNN.expand(len(matches_BN), -1, -1)
    depths_BN = candidates.depths_BN.expand_as(matches_BN)
    accepted_BN = ~(ancestors_BNN & ~matches_BN[:, None, :]).any(-1)
    length_B, last_B = depths_BN.masked_fill(~accepted_BN, -1).max(dim=1)
    on_path_BN = ancestors_BNN[torch.arange(len(last_B), device=last_B.device), last_B]
    longest = candidates.max_depth
    path_BP = last_B[:, None].repeat(1, longest + 1)
    nodes_BN = torch.arange(matches_BN.shape[1], device=last_B.device).expand_as(depths_BN)
    slot_BN = torch.where(on_path_BN, depths_BN, longest + 1)  # nodes off the path go to a spare slot
    path_BP = torch.cat([path_BP, path_BP[:, :1]], 1).scatter_(1, slot_BN, nodes_BN)[:, : longest + 1]
    return Verification(path_BP, length_B, target_BN.gather(1, last_B[:, None])[:, 0])
