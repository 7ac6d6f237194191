"""Draft states -> weighted cross-entropy against the next tokens, with logits only in chunks.

The loss of N (position, slot) pairs never materialises [N, V]: each chunk of rows goes through the
LM head, its loss and the gradient of its states are computed by hand in the forward pass, and the
logits are dropped. With a frozen LM head no [V, D] gradient is made.
"""

# N (position, slot) pairs, C pairs in a chunk, D hidden, V vocabulary

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Transform = Callable[[Tensor], Tensor]
CHUNK_BYTES = {"cuda": 1 << 29, "cpu": 1 << 26}


def chunk_rows(device: torch.device, vocab_size: int) -> int:
    """Pairs per chunk: float32 logits of half a gigabyte on a GPU, 64 MB on a CPU."""
    return max(16, CHUNK_BYTES.get(device.type, 1 << 26) // (4 * vocab_size))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        weights_N: Tensor,
        transform: Transform | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses_N = torch.empty(len(states_ND), dtype=torch.float32, device=states_ND.device)
        ranks_N = torch.empty(len(states_ND), dtype=torch.long, device=states_ND.device)
        needs_states, needs_weight = ctx.needs_input_grad[:2]
        grad_states = torch.empty_like(states_ND) if needs_states else None
        grad_weight = torch.zeros(weight_VD.shape, dtype=torch.float32, device=weight_VD.device) if needs_weight else None
        weight_VD = weight_VD.to(states_ND.dtype)
        loss_of_chunk = _transformed_chunk(transform) if transform is not None else _plain_chunk(states_ND.device)
        step = chunk_rows(states_ND.device, len(weight_VD))
        for start in range(0, len(states_ND), step):
            part = slice(start, start + step)
            logits_CV = torch.nn.functional.linear(states_ND[part], weight_VD, bias_V)
            losses_N[part], ranks_N[part], grad_CV = loss_of_chunk(logits_CV, targets_N[part], weights_N[part])
            if grad_states is not None:
                grad_states[part] = grad_CV @ weight_VD
            if grad_weight is not None:
                grad_weight += grad_CV.t() @ states_ND[part]
        ctx.save_for_backward(grad_states, grad_weight)
        ctx.mark_non_differentiable(losses_N, ranks_N)
        return (losses_N * weights_N).sum(), losses_N, ranks_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        scale = gradients[0]
        scaled = [g * scale.to(g.dtype) if g is not None else None for g in (grad_states, grad_weight)]
        return (*scaled, None, None, None, None)


ChunkLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _loss_of_chunk(logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [C], rank of the target [C] and weight * d loss / d logits [C, V], computed in float32."""
    scores_CV = logits_CV.float()
    target_C1 = scores_CV.gather(1, targets_C[:, None])
    log_sum_C1 = scores_CV.logsumexp(-1, keepdim=True)
    ranks_C = (scores_CV > target_C1).sum(-1)
    hit_CV = torch.arange(scores_CV.shape[1], device=scores_CV.device) == targets_C[:, None]
    grad_CV = ((scores_CV - log_sum_C1).exp() - hit_CV.float()) * weights_C[:, None]
    return (log_sum_C1 - target_C1)[:, 0], ranks_C, grad_CV.to(logits_CV.dtype)


@functools.cache
def _compiled_chunk() -> ChunkLoss:
    return torch.compile(_loss_of_chunk, dynamic=True)


def _plain_chunk(device: torch.device) -> ChunkLoss:
    """On a GPU the chunk's passes over [C, V] are fused by torch.compile: memory traffic is their cost."""
    return _compiled_chunk() if device.type == "cuda" else _loss_of_chunk


def _transformed_chunk(transform: Transform) -> ChunkLoss:
    """The same behind a transform of the logits, through which autograd leads back."""

    def loss_of_chunk(logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            raw_CV = logits_CV.float().requires_grad_()
            transformed_CV = transform(raw_CV)
        losses_C, ranks_C, grad_CV = _loss_of_chunk(transformed_CV.detach(), targets_C, weights_C)
        return losses_C, ranks_C, torch.autograd.grad(transformed_CV, raw_CV, grad_CV)[0].to(logits_CV.dtype)

    return loss_of_chunk


def chunked_cross_entropy(
    states_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    transform: Transform | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of weights_N * CE(transform(states W^T + bias), targets), in float32.

    Returns (loss, loss of each pair [N], rank of each target among its logits [N], 0 the best).
    Gradients flow to `states_ND`, and to `weight_VD` where it requires them.
    """
    with torch.autocast(states_ND.device.type, enabled=False):
        if bias_V is not None:
            bias_V = bias_V.to(states_ND.dtype)
        return _ChunkedCrossEntropy.apply(states_ND, weight_VD, bias_V, targets_N, weights_N, transform)  # type: ignore[no-any-return,no-untyped-call]
