"""Draft heads -> the same heads with packed layers, for a base model whose layers are packed.

Drafting for one text reads every weight of its heads once, from memory, and hardly multiplies: packed float16 is half of float32,
and one product per layer for all heads costs less than one per head and layer, though it also multiplies each head's state with the
others' weights. Only what is drafted can change by the rounding, never what is accepted.
"""

# R rows, K heads, D hidden, V vocabulary

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from infer.engine.packed_linear import FLOAT16_MAX, PackedLinear, is_packed
from medusa_heads.checkpoint import HeadsCheckpoint, in_dtype
from medusa_heads.heads.medusa import MedusaHeads


def heads_for(checkpoint: HeadsCheckpoint, model: PreTrainedModel) -> HeadsCheckpoint:
    """The checkpoint with heads in the model's type, and medusa heads packed where its layers are and their weights fit float16: made
    once, for all drafters on this copy of the base."""
    checkpoint = in_dtype(checkpoint, model.dtype)
    heads = checkpoint.heads
    if type(heads) is not MedusaHeads or not is_packed(model) or any(bool(p.abs().max() > FLOAT16_MAX) for p in heads.parameters()):
        return checkpoint
    return replace(checkpoint, heads=PackedMedusaHeads(heads))


class PackedMedusaHeads(MedusaHeads):
    """Shares the parameters of heads that no longer train, and packs them for single texts; several rows share what is read, and go
    through the heads as they are."""

    def __init__(self, heads: MedusaHeads) -> None:
        nn.Module.__init__(self)
        self.config, self.weight, self.bias, self.lm_head = heads.config, heads.weight, heads.bias, heads.lm_head
        self.packed: dict[int, list[PackedLinear]] = {}  # by number of heads asked for, packed when first asked for
        own = () if heads.lm_head is None else heads.lm_head.unbind()
        self.packed_lm_heads = [PackedLinear(weight_VD, None) for weight_VD in own]

    def draft_states(self, hidden_RD: Tensor, num_heads: int | None = None) -> Tensor:
        if len(hidden_RD) > 1:
            return super().draft_states(hidden_RD, num_heads)
        count = self.config.num_heads if num_heads is None else min(num_heads, self.config.num_heads)
        states_KD = hidden_RD.expand(count, -1)
        for layer in self._layers(count):
            products_KKD = layer(states_KD).unflatten(1, (count, -1))  # of every state with every head's weight
            states_KD = F.silu(products_KKD.diagonal().t()).add_(states_KD)
        return states_KD[None]

    def own_logits(self, draft_states_RKD: Tensor) -> Tensor | None:
        if self.lm_head is None:
            return None
        return torch.stack([self.packed_lm_heads[k](states_RD) for k, states_RD in enumerate(draft_states_RKD.unbind(1))], dim=1)

    def _layers(self, num_heads: int) -> list[PackedLinear]:
        if num_heads not in self.packed:
            parts = zip(self.weight[:, :num_heads], self.bias[:, :num_heads], strict=True)
            self.packed[num_heads] = [PackedLinear(weight_KDD.flatten(0, 1), bias_KD.flatten()) for weight_KDD, bias_KD in parts]
        return self.packed[num_heads]
