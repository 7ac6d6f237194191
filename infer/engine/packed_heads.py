"""Draft heads -> the same heads with packed layers, for a base model whose layers are packed.

A draft reads every weight of its heads once, from memory: packed float16 is half of float32. Only what is
drafted can change by the rounding, never what is accepted.
"""

# R rows, K heads, D hidden, V vocabulary

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from infer.engine.packed_linear import FLOAT16_MAX, PackedLinear
from medusa_heads.heads import DraftHeads
from medusa_heads.heads.medusa import MedusaHeads


def packed_heads(heads: DraftHeads) -> DraftHeads:
    """A packed copy of a family that has one and whose weights are float16 numbers; else the heads themselves."""
    if isinstance(heads, MedusaHeads) and all(bool(p.abs().max() < FLOAT16_MAX) for p in heads.parameters()):
        return PackedMedusaHeads(heads)
    return heads


class PackedMedusaHeads(nn.Module):
    """MedusaHeads, one packed layer per head and block."""

    def __init__(self, heads: MedusaHeads) -> None:
        super().__init__()
        self.config = heads.config
        self.blocks = nn.ModuleList(
            nn.ModuleList(PackedLinear(weight, bias) for weight, bias in zip(heads.weight[:, k], heads.bias[:, k], strict=True))
            for k in range(heads.config.num_heads)
        )
        own = () if heads.lm_head is None else heads.lm_head.unbind()
        self.lm_heads = nn.ModuleList(PackedLinear(weight_VD, None) for weight_VD in own)

    def draft_states(self, hidden_RD: Tensor, num_heads: int | None = None) -> Tensor:
        """As MedusaHeads.draft_states."""
        return torch.stack([_residual(blocks, hidden_RD) for blocks in self.blocks[:num_heads]], dim=1)

    def own_logits(self, draft_states_RKD: Tensor) -> Tensor | None:
        """As MedusaHeads.own_logits."""
        if not len(self.lm_heads):
            return None
        return torch.stack([self.lm_heads[k](states_RD) for k, states_RD in enumerate(draft_states_RKD.unbind(1))], dim=1)


def _residual(blocks: nn.Module, states_RD: Tensor) -> Tensor:
    for block in blocks.children():
        states_RD = F.silu(block(states_RD), inplace=True).add_(states_RD)
    return states_RD
