"""Draft states -> the objective of each (position, slot) pair, with logits only in chunks.

N pairs never materialise [N, V]: each chunk of rows goes through the LM head, its loss and the
gradient of its states are made by hand in the forward pass, and the logits are dropped. A teacher's
logits are made again from the base's hidden states in the same chunk. With a frozen LM head no
[V, D] gradient is made; a trainable one gets its gradient in the backward pass, from logits computed
a second time, so that no [V, D] gradient waits for it.
"""

# N (position, slot) pairs, C pairs in a chunk, M hidden states, D hidden, V vocabulary

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from train.objectives import ChunkLoss, Objective, Transform, fused_chunk_loss, plain_chunk_loss

CHUNK_BYTES = {"cuda": 1 << 29, "cpu": 1 << 26}
PAIR_DTYPES = (torch.float32, torch.float32, torch.long, torch.float32)  # of PairLosses


@dataclass(frozen=True, slots=True)
class LogitHead:
    """How states become logits: transform(states weight^T + bias)."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    transform: Transform = field(default_factory=Transform)

    def logits(self, states_CD: Tensor) -> Tensor:
        """[C, V], before the transform."""
        return F.linear(states_CD, self.weight_VD, self.bias_V)

    def to(self, dtype: torch.dtype) -> LogitHead:
        return replace(self, weight_VD=self.weight_VD.to(dtype), bias_V=None if self.bias_V is None else self.bias_V.to(dtype))


@dataclass(frozen=True, slots=True)
class Teacher:
    """The base's law for each pair: its hidden states, the row of them that is each pair's, its LM head (in their dtype)."""

    states_MD: Tensor
    index_N: Tensor
    head: LogitHead

    def logits(self, part: slice) -> Tensor:
        """[C, V], before the transform."""
        return self.head.logits(self.states_MD[self.index_N[part]])


class PairLosses(NamedTuple):
    """Of each pair, [N]: losses, through which gradients flow; and without gradients log_probs (log q of
    the target), ranks (logits above the target's, 0 the best) and overlaps (sum min(p, q); 0 without a teacher)."""

    losses: Tensor
    log_probs: Tensor
    ranks: Tensor
    overlaps: Tensor


def chunked_loss(
    states_ND: Tensor, head: LogitHead, targets_N: Tensor, *, objective: Objective | None = None, teacher: Teacher | None = None
) -> PairLosses:
    """The objective (by default cross-entropy) of every pair, in float32.

    Gradients flow to `states_ND`, and to the head's weight where it requires them.
    """
    objective = objective or Objective()
    assert objective.needs_teacher == (teacher is not None)
    with torch.autocast(states_ND.device.type, enabled=False):
        return PairLosses(*_ChunkedLoss.apply(states_ND, head.weight_VD, head, targets_N, objective, teacher))  # type: ignore[no-untyped-call]


def chunk_rows(device: torch.device, vocab_size: int) -> int:
    """Pairs per chunk: float32 logits of half a gigabyte on a GPU, 64 MB on a CPU."""
    return max(16, CHUNK_BYTES.get(device.type, 1 << 26) // (4 * vocab_size))


def _chunks(
    states_ND: Tensor, head: LogitHead, targets_N: Tensor, objective: Objective, teacher: Teacher | None
) -> Iterator[tuple[slice, ChunkLoss]]:
    """The loss of one chunk after the other; a teacher's logits take half of the room."""
    make = fused_chunk_loss if states_ND.device.type == "cuda" else plain_chunk_loss
    loss_of = make(objective, head.transform, None if teacher is None else teacher.head.transform)
    step = chunk_rows(states_ND.device, len(head.weight_VD) * (1 if teacher is None else 2))
    for start in range(0, len(states_ND), step):
        part = slice(start, start + step)
        teacher_CV = None if teacher is None else teacher.logits(part)
        yield part, loss_of(head.logits(states_ND[part]), targets_N[part], teacher_CV)


class _ChunkedLoss(torch.autograd.Function):
    """`weight_VD` is `head.weight_VD`, named once more because autograd sees tensors among the arguments alone."""

    @staticmethod
    def forward(
        ctx: Any,
        states_ND: Tensor,
        weight_VD: Tensor,
        head: LogitHead,
        targets_N: Tensor,
        objective: Objective,
        teacher: Teacher | None,
    ) -> tuple[Tensor, ...]:
        needs_states, needs_weight = ctx.needs_input_grad[:2]
        head = head.to(states_ND.dtype)
        pairs = PairLosses(*(torch.empty(len(states_ND), dtype=dtype, device=states_ND.device) for dtype in PAIR_DTYPES))
        grad_states = torch.empty_like(states_ND) if needs_states and not needs_weight else None
        for part, chunk in _chunks(states_ND, head, targets_N, objective, teacher):
            for values_N, values_C in zip(pairs, chunk, strict=False):
                values_N[part] = values_C
            if grad_states is not None:
                grad_states[part] = chunk.grad @ head.weight_VD
        if needs_weight:
            ctx.save_for_backward(states_ND, weight_VD, targets_N)
            ctx.rest = head.bias_V, head.transform, objective, teacher
        else:
            ctx.save_for_backward(grad_states)
        ctx.mark_non_differentiable(*pairs[1:])
        return tuple(pairs)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, weights_N: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """weights_N: what a pair's loss counts in the whole, known only now."""
        weights_N1 = weights_N[:, None]
        if len(ctx.saved_tensors) == 1:
            (grad_states,) = ctx.saved_tensors
            if grad_states is not None:
                grad_states.mul_(weights_N1)  # in place: a product of its own would be float32, twice the room
            return grad_states, None, None, None, None, None
        states_ND, weight_VD, targets_N = ctx.saved_tensors
        bias_V, transform, objective, teacher = ctx.rest
        head = LogitHead(weight_VD, bias_V, transform).to(states_ND.dtype)
        grad_states, grad_weight = torch.empty_like(states_ND), torch.zeros_like(weight_VD, dtype=torch.float32)
        with torch.autocast(states_ND.device.type, enabled=False):
            for part, chunk in _chunks(states_ND, head, targets_N, objective, teacher):
                grad_states[part] = (chunk.grad @ head.weight_VD) * weights_N1[part]
                grad_weight += chunk.grad.t() @ (states_ND[part] * weights_N1[part]).to(states_ND.dtype)
        return grad_states, grad_weight.to(weight_VD.dtype), None, None, None, None
