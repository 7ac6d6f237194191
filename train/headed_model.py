"""Frozen base model + draft heads as ONE module: packed tokens -> loss and per-slot statistics.

One module because every sharding strategy of accelerate prepares one model and one optimizer.
"""

# B batch, T sequence, M = B * T, K heads, R supervised positions, N (position, slot) pairs, D hidden, V vocabulary

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa_heads import base_model
from medusa_heads.heads import MedusaHeads
from medusa_heads.quantization import quantization_of
from train.losses import LogitHead, PairLosses, Teacher, chunked_loss
from train.objectives import Objective, Transform, d_pace_weights
from train.replayed_forward import ReplayedForward

TOP = (1, 2, 5)


class HeadedOutput(NamedTuple):
    """loss: scalar; slot_loss_K: summed loss per slot, unweighted; slot_overlap_K: summed overlap with
    the base's law per slot (0 where the objective needs no such law); slot_hits_KT: pairs whose target
    is among the top 1, 2, 5; first_bad_pair: index of the first pair with a loss that is not finite, or
    -1. base_loss: the part of `loss` that holds a base under tuning to itself (train/tuned_model.py). All on the device,
    detached but for `loss`."""

    loss: Tensor
    slot_loss_K: Tensor
    slot_overlap_K: Tensor
    slot_hits_KT: Tensor
    first_bad_pair: Tensor
    base_loss: Tensor | None = None


class HeadedModel(nn.Module):
    """A base model that never trains and heads that do."""

    def __init__(
        self,
        base: PreTrainedModel,
        heads: MedusaHeads,
        *,
        draft_vocabulary: Tensor | None = None,
        objective: Objective | None = None,
        d_pace: bool = False,
    ) -> None:
        """draft_vocabulary: the only tokens that heads on the shared lm_head are to propose, ascending, or None
        for all. Both laws are over these, and a pair whose target is not among them has no loss and counts as a miss.
        objective: by default cross-entropy. d_pace: slots weigh by D-PACE, on top of `slot_weights`."""
        super().__init__()
        base.requires_grad_(False)
        base.eval()
        self.base, self.heads = base, heads
        self.objective, self.d_pace = objective or Objective(), d_pace
        self.transform = Transform(*base_model.logit_scale_and_cap(base))
        self.replayed = ReplayedForward()
        self.replays = base.device.type == "cuda" and not quantization_of(base.config)  # whose kernels may wait for the host
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

    def untouched_base(self) -> AbstractContextManager[None]:
        """Within the block the base is without what trains in it."""
        return nullcontext()

    @torch.no_grad()
    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        """Last hidden states [B, T, D] of packed rows, those that decoding sees; a token sees its own document alone."""
        with torch.autocast(input_ids.device.type, enabled=False):  # in half it would run what the base runs in float32, as routers
            return self.base_forward(input_ids, position_ids, document_ids)

    def step_states(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        """`hidden_states` as a training step takes them: a CUDA graph's, where there is one, which the next call overwrites."""
        inputs = input_ids, position_ids, document_ids
        return self.replayed(self.hidden_states, *inputs) if self.replays else self.hidden_states(*inputs)

    def base_forward(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        """`hidden_states` through which gradients flow into whatever trains in the base."""
        steps = torch.arange(input_ids.shape[1], device=input_ids.device)
        allowed_BTT = (document_ids[:, :, None] == document_ids[:, None, :]) & (steps[:, None] >= steps)
        mask = base_model.additive_masks(self.base, allowed_BTT, position_ids, position_ids)
        return base_model.forward_hidden(self.base, input_ids, attention_mask=mask, position_ids=position_ids)

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        hidden_MD: Tensor | None = None,
        *,
        positions: Tensor,
        pair_position: Tensor,
        pair_slot: Tensor,
        targets: Tensor,
        slot_weights: Tensor,
    ) -> HeadedOutput:
        """The loss of one micro-batch (shapes: train/batch.py): of tokens, or of hidden states made earlier.

        slot_weights: [K], what one pair of each slot weighs: slot weight / its global count.
        """
        if hidden_MD is None:
            assert input_ids is not None and position_ids is not None and document_ids is not None
            hidden_MD = self.step_states(input_ids, position_ids, document_ids).flatten(0, 1)
        return self.heads_output(hidden_MD, positions, pair_position, pair_slot, targets, slot_weights)

    def heads_output(
        self, hidden_MD: Tensor, positions: Tensor, pair_position: Tensor, pair_slot: Tensor, targets: Tensor, slot_weights: Tensor
    ) -> HeadedOutput:
        """The heads' loss, given the base's hidden states of all tokens."""
        states_RKD = self.heads.draft_states(hidden_MD[positions])
        rows_N = pair_slot * len(positions) + pair_position  # one index, the gradient of which needs no sorting, as that of two does
        states_ND = states_RKD.transpose(0, 1).flatten(0, 1).index_select(0, rows_N).to(hidden_MD.dtype)
        head = self._base_head().to(hidden_MD.dtype)
        teacher = None
        if self.objective.needs_teacher:  # slot k (here from 0) of position t guesses what the base's state at t + k + 1 knows
            teacher = Teacher(hidden_MD.detach(), positions[pair_position] + pair_slot + 1, head)
        pairs = self._pairs(states_ND, head, targets, pair_slot, teacher)
        weights_N = slot_weights[pair_slot]
        if self.d_pace:
            num_heads = self.heads.config.num_heads
            weights_N = weights_N * d_pace_weights(
                pairs.log_probs, pair_position, pair_slot, num_positions=len(positions), num_heads=num_heads
            )
        return HeadedOutput((pairs.losses * weights_N).sum(), *self._statistics(pairs, pair_slot), _first_bad(pairs.losses))

    def _base_head(self) -> LogitHead:
        """The base's LM head, over the draft vocabulary alone where there is one."""
        weight_VD, bias_V = base_model.lm_head_parameters(self.base)
        if self.draft_vocabulary is not None:
            weight_VD, bias_V = weight_VD[self.draft_vocabulary], None if bias_V is None else bias_V[self.draft_vocabulary]
        return LogitHead(weight_VD, bias_V, self.transform)

    def _pairs(self, states_ND: Tensor, head: LogitHead, targets_N: Tensor, pair_slot_N: Tensor, teacher: Teacher | None) -> PairLosses:
        if self.heads.lm_head is not None:
            return self._pairs_of_own_heads(states_ND, targets_N, pair_slot_N, teacher)
        if self.draft_index_V is None:
            return chunked_loss(states_ND, head, targets_N, objective=self.objective, teacher=teacher)
        index_N = self.draft_index_V[targets_N]
        inside_N = index_N >= 0
        pairs = chunked_loss(states_ND, head, index_N.clamp(min=0), objective=self.objective, teacher=teacher)
        return PairLosses(
            pairs.losses * inside_N,
            pairs.log_probs.masked_fill(~inside_N, -torch.inf),
            pairs.ranks.masked_fill(~inside_N, len(self.draft_index_V)),
            pairs.overlaps * inside_N,
        )

    def _pairs_of_own_heads(self, states_ND: Tensor, targets_N: Tensor, pair_slot_N: Tensor, teacher: Teacher | None) -> PairLosses:
        assert self.heads.lm_head is not None
        parts: list[PairLosses] = []
        start = 0
        for k, count in enumerate(torch.bincount(pair_slot_N, minlength=self.heads.config.num_heads).tolist()):
            part = slice(start, start + count)  # pairs are listed slot by slot
            start += count
            of_slot = None if teacher is None else replace(teacher, index_N=teacher.index_N[part])
            head = LogitHead(self.heads.lm_head[k])
            parts.append(chunked_loss(states_ND[part], head, targets_N[part], objective=self.objective, teacher=of_slot))
        return PairLosses(*(torch.cat(values) for values in zip(*parts, strict=True)))

    def _statistics(self, pairs: PairLosses, pair_slot_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums per slot of losses [K], overlaps [K] and hits [K, T]."""
        hits_NT = torch.stack([pairs.ranks < top for top in TOP], 1).float()  # a tensor of TOP would make the host wait
        values_NX = torch.cat([pairs.losses.detach()[:, None], pairs.overlaps[:, None], hits_NT], 1)
        sums_KX = values_NX.new_zeros(self.heads.config.num_heads, values_NX.shape[1]).index_add_(0, pair_slot_N, values_NX)
        return sums_KX[:, 0], sums_KX[:, 1], sums_KX[:, 2:]


def _first_bad(losses_N: Tensor) -> Tensor:
    """The index of the first loss that is not finite, or -1; no wait for the device."""
    if not len(losses_N):
        return torch.tensor(-1, device=losses_N.device)
    bad_N = ~losses_N.isfinite()
    return torch.where(bad_N.any(), bad_N.int().argmax(), -1)
