"""Base model with a LoRA adapter + draft heads, trained together (Medusa-2): packed tokens -> one loss.

Cai et al. 2024, arXiv 2401.10774, section 2.2.2: loss = loss of the base + share * loss of the heads. The share
acts where it matters, on the gradient that leaves the heads for the base: the heads' own parameters
always get their whole gradient, which AdamW scales by itself, so that a ramp of the share unsettles nothing.
"""

# B batch, T sequence, M = B * T, K heads, R supervised positions, N (position, slot) pairs, D hidden, V vocabulary

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from medusa_heads import base_model
from medusa_heads.adapter import Adapter
from train.headed_model import HeadedModel, HeadedOutput
from train.losses import LogitHead, Teacher, chunked_loss
from train.objectives import Objective


class TunedModel(HeadedModel):
    """Heads, and an adapter in the base. The base's own weights and its LM head never train."""

    def __init__(self, *arguments: Any, adapter: Adapter, distill: bool = True, **options: Any) -> None:
        """adapter: attached to the base. distill: the base is held to its own law with the adapter switched off, by KL; otherwise to
        the text, by cross-entropy."""
        super().__init__(*arguments, **options)
        for parameter in adapter.parameters():
            parameter.requires_grad_(True)
        self.adapter, self.distill = adapter, distill

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
        positions: Tensor,
        pair_position: Tensor,
        pair_slot: Tensor,
        targets: Tensor,
        slot_weights: Tensor,
        heads_share: float | None = None,
    ) -> HeadedOutput:
        """The loss of one micro-batch, as in HeadedModel.

        heads_share: what the heads' loss counts for the adapter, or None while the heads train alone.
        """
        inputs, pairs = (input_ids, position_ids, document_ids), (positions, pair_position, pair_slot, targets, slot_weights)
        if heads_share is None:
            output = self.heads_output(self.hidden_states(*inputs).flatten(0, 1), *pairs)
            zero = torch.stack([parameter.sum() for parameter in self.adapter.parameters()]).sum() * 0
            return output._replace(loss=output.loss + zero)  # data parallelism waits for a gradient of every parameter
        teacher_MD = self._untouched_states(*inputs) if self.distill else None
        hidden_MD = self.base_forward(*inputs).flatten(0, 1)
        output = self.heads_output(torch.lerp(hidden_MD.detach(), hidden_MD, heads_share), *pairs)
        base_loss = self._base_loss(hidden_MD, teacher_MD, positions, targets) * slot_weights[0]
        return output._replace(loss=output.loss + base_loss, base_loss=base_loss.detach())

    @torch.no_grad()
    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        return self.base_forward(input_ids, position_ids, document_ids)  # under autocast, which the adapter's float32 asks for

    def base_forward(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        with self.adapter.left_to_autocast() if torch.is_autocast_enabled(input_ids.device.type) else nullcontext():
            return super().base_forward(input_ids, position_ids, document_ids)

    def untouched_base(self) -> AbstractContextManager[None]:
        return self.adapter.off()

    def _untouched_states(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        with self.untouched_base():
            return self.hidden_states(input_ids, position_ids, document_ids).flatten(0, 1)

    def _base_loss(self, hidden_MD: Tensor, teacher_MD: Tensor | None, positions_R: Tensor, targets_N: Tensor) -> Tensor:
        """Summed over the positions whose next token is a target of slot 1 (positions + 1; slot 1's pairs come first), so
        that slot 1's weight, 1 / their count, is theirs too. All tokens of an answer but the first, its end included."""
        index_R, count = positions_R + 1, len(positions_R)
        weight_VD, bias_V = base_model.lm_head_parameters(self.base)
        head = LogitHead(weight_VD, bias_V, self.transform).to(hidden_MD.dtype)
        teacher = None if teacher_MD is None else Teacher(teacher_MD, index_R, head)
        objective = Objective("ce" if teacher is None else "kl")
        return chunked_loss(hidden_MD[index_R], head, targets_N[:count], objective=objective, teacher=teacher).losses.sum()
