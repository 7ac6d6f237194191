"""Frozen base model + draft heads as ONE module: packed tokens -> loss and per-slot statistics.

One module because every sharding strategy of accelerate prepares one model and one optimizer.
"""

# B batch, T sequence, K heads, R supervised positions, N (position, slot) pairs, D hidden, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa_heads import base_model
from medusa_heads.heads import MedusaHeads
from train.losses import chunked_cross_entropy

TOP = (1, 2, 5)


@dataclass(slots=True)
class HeadedOutput:
    """loss: scalar; slot_loss_K: summed cross-entropy per slot; slot_hits_KT: pairs whose target is
    among the top 1, 2, 5; first_bad_pair: index of the first pair with a loss that is not finite, or
    -1. All on the device, detached but for `loss`."""

    loss: Tensor
    slot_loss_K: Tensor
    slot_hits_KT: Tensor
    first_bad_pair: Tensor


class HeadedModel(nn.Module):
    """A base model that never trains and heads that do."""

    def __init__(self, base: PreTrainedModel, heads: MedusaHeads, *, draft_vocabulary: Tensor | None = None) -> None:
        """draft_vocabulary: the only tokens that heads on the shared lm_head are to propose, ascending, or None
        for all. Their law is over these, and a pair whose target is not among them has no loss and counts as a miss."""
        super().__init__()
        base.requires_grad_(False)
        base.eval()
        self.base, self.heads = base, heads
        transform = base_model.logit_transform(base)
        probe = torch.tensor([-2.0, 0.5, 3.0])
        self.transform = None if torch.equal(transform(probe), probe) else transform
        self.draft_vocabulary: Tensor | None
        self.draft_index_V: Tensor | None  # place of a token in the draft vocabulary, -1 outside
        if draft_vocabulary is not None and heads.lm_head is None:
            draft_vocabulary = draft_vocabulary.to(base.device)
            index_V = torch.full((base_model.vocab_size(base),), -1, device=base.device)
            index_V[draft_vocabulary] = torch.arange(len(draft_vocabulary), device=base.device)
            self.register_buffer("draft_vocabulary", draft_vocabulary, persistent=False)
            self.register_buffer("draft_index_V", index_V, persistent=False)
        else:
            self.draft_vocabulary = self.draft_index_V = None

    @property
    def config(self) -> Any:
        """The base model's config, which sharding strategies ask for."""
        return self.base.config

    def train(self, mode: bool = True) -> HeadedModel:
        """The base stays in eval mode: no dropout in the hidden states that serving will see."""
        super().train(mode)
        self.base.eval()
        return self

    @torch.no_grad()
    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        """Last hidden states [B, T, D] of packed rows; a token sees its own document alone."""
        steps = torch.arange(input_ids.shape[1], device=input_ids.device)
        allowed_BTT = (document_ids[:, :, None] == document_ids[:, None, :]) & (steps[:, None] >= steps)
        mask = base_model.additive_masks(self.base, allowed_BTT, position_ids, position_ids)
        return base_model.forward_hidden(self.base, input_ids, attention_mask=mask, position_ids=position_ids)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
        positions: Tensor,
        pair_position: Tensor,
        pair_slot: Tensor,
        targets: Tensor,
        slot_weights: Tensor,
    ) -> HeadedOutput:
        """The loss of one micro-batch (shapes: train/batch.py).

        slot_weights: [K], what one pair of each slot weighs: slot weight / its global count.
        """
        hidden_BTD = self.hidden_states(input_ids, position_ids, document_ids)
        states_RKD = self.heads.draft_states(hidden_BTD.flatten(0, 1)[positions])
        states_ND = states_RKD[pair_position, pair_slot].to(hidden_BTD.dtype)
        weights_N = slot_weights[pair_slot]
        loss, losses_N, ranks_N = self._loss(states_ND, targets, weights_N, pair_slot)
        return HeadedOutput(loss, *self._statistics(losses_N, ranks_N, pair_slot), _first_bad(losses_N))

    def _loss(self, states_ND: Tensor, targets_N: Tensor, weights_N: Tensor, pair_slot_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.heads.lm_head is None:
            weight_VD, bias_V = base_model.lm_head_parameters(self.base)
            if self.draft_vocabulary is None or self.draft_index_V is None:
                return chunked_cross_entropy(states_ND, weight_VD, targets_N, weights_N, bias_V=bias_V, transform=self.transform)
            index_N = self.draft_index_V[targets_N]
            inside_N = index_N >= 0
            loss, losses_N, ranks_N = chunked_cross_entropy(
                states_ND,
                weight_VD[self.draft_vocabulary],
                index_N.clamp(min=0),
                weights_N * inside_N,
                bias_V=None if bias_V is None else bias_V[self.draft_vocabulary],
                transform=self.transform,
            )
            return loss, losses_N * inside_N, torch.where(inside_N, ranks_N, len(self.draft_index_V))
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        start = 0
        for k, count in enumerate(torch.bincount(pair_slot_N, minlength=self.heads.config.num_heads).tolist()):
            part = slice(start, start + count)  # pairs are listed slot by slot
            start += count
            parts.append(chunked_cross_entropy(states_ND[part], self.heads.lm_head[k], targets_N[part], weights_N[part]))
        losses, per_pair, ranks = zip(*parts, strict=True)
        return torch.stack(losses).sum(), torch.cat(per_pair), torch.cat(ranks)

    def _statistics(self, losses_N: Tensor, ranks_N: Tensor, pair_slot_N: Tensor) -> tuple[Tensor, Tensor]:
        num_heads = self.heads.config.num_heads
        slot_loss_K = torch.zeros(num_heads, device=losses_N.device).index_add_(0, pair_slot_N, losses_N)
        hits_NT = (ranks_N[:, None] < torch.tensor(TOP, device=ranks_N.device)).float()
        return slot_loss_K, torch.zeros(num_heads, len(TOP), device=losses_N.device).index_add_(0, pair_slot_N, hits_NT)


def _first_bad(losses_N: Tensor) -> Tensor:
    """The index of the first loss that is not finite, or -1; no wait for the device."""
    if not len(losses_N):
        return torch.tensor(-1, device=losses_N.device)
    bad_N = ~losses_N.isfinite()
    return torch.where(bad_N.any(), bad_N.int().argmax(), -1)
