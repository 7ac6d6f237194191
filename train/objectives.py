"""Draft logits, and the base's own logits at the same place -> loss, figures and gradient of each pair.

Written out by hand, so that a chunk of logits is met once and dropped. p is the base's law, q the
draft's, x the next token; both laws are in float32.

    ce     -log q(x)                                          Medusa, arXiv 2401.10774
    kl     sum p log(p / q)
    tv     1 - sum min(p, q)                                  the share of sampled drafts that is refused
    lk     lam kl + (1 - lam) tv, lam = exp(-eta alpha)       LK hybrid, arXiv 2602.23881
    ce_l1  .1 ce + .9 sum |p - q|                             DSpark (DeepSpec)

alpha = sum min(p, q), the overlap: the chance that a draft drawn from q is accepted. In lam it is
each pair's own and no gradient flows through it.
"""

# C pairs in a chunk, N pairs, R positions, K heads, V vocabulary

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Objective:
    """name: one of the above. lk_eta: how fast `lk` turns from kl to tv as the overlap grows."""

    name: str = "ce"
    lk_eta: float = 10.0

    @property
    def needs_teacher(self) -> bool:
        return self.name != "ce"


@dataclass(frozen=True, slots=True)
class Transform:
    """What a model does to its logits after the LM head: times `scale`, then cap * tanh(logits / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, logits_CV: Tensor) -> Tensor:
        scores_CV = logits_CV.float()
        if self.scale != 1.0:
            scores_CV = scores_CV * self.scale
        return scores_CV if self.cap is None else torch.tanh(scores_CV / self.cap) * self.cap

    def lead_back(self, grad_CV: Tensor, scores_CV: Tensor) -> Tensor:
        """Gradient at the transformed logits `scores_CV` -> gradient at the logits."""
        if self.cap is not None:
            grad_CV = grad_CV * (1 - (scores_CV / self.cap) ** 2)
        return grad_CV if self.scale == 1.0 else grad_CV * self.scale


class ChunkLoss(NamedTuple):
    """Of each pair: losses, log_probs (log q of the target), overlaps (0 without a teacher), all
    float32 [C]; ranks (logits above the target's) [C]; grad, d loss / d logits [C, V] in their dtype."""

    losses: Tensor
    log_probs: Tensor
    ranks: Tensor
    overlaps: Tensor
    grad: Tensor


def chunk_loss(
    objective: Objective,
    transform: Transform,
    teacher_transform: Transform | None,
    logits_CV: Tensor,
    targets_C: Tensor,
    teacher_logits_CV: Tensor | None,
) -> ChunkLoss:
    """One chunk's losses and gradient. The teacher is given iff the objective needs one."""
    scores_CV = transform.apply(logits_CV)
    log_sum_C1 = scores_CV.logsumexp(-1, keepdim=True)
    target_C1 = scores_CV.gather(1, targets_C[:, None])
    log_probs_C1 = target_C1 - log_sum_C1
    ranks_C = (scores_CV > target_C1).sum(-1, dtype=torch.int32)  # half the time of long on a CPU
    if teacher_logits_CV is None or teacher_transform is None:
        assert not objective.needs_teacher
        losses_C1, overlaps_C1 = -log_probs_C1, torch.zeros_like(log_probs_C1)
        grad_CV = _less_one_at(targets_C, (scores_CV - log_sum_C1).exp_())
    else:
        teacher_CV = teacher_transform.apply(teacher_logits_CV)
        log_p_CV = teacher_CV - teacher_CV.logsumexp(-1, keepdim=True)
        losses_C1, overlaps_C1, grad_CV = _against_teacher(objective, log_p_CV, scores_CV - log_sum_C1, log_probs_C1, targets_C)
    grad_CV = transform.lead_back(grad_CV, scores_CV).to(logits_CV.dtype)
    return ChunkLoss(losses_C1[:, 0], log_probs_C1[:, 0], ranks_C, overlaps_C1[:, 0], grad_CV)


def _against_teacher(
    objective: Objective, log_p_CV: Tensor, log_q_CV: Tensor, log_probs_C1: Tensor, targets_C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [C, 1], overlaps [C, 1] and d loss / d scores [C, V]."""
    p_CV, q_CV = log_p_CV.exp(), log_q_CV.exp()
    overlaps_C1 = torch.minimum(p_CV, q_CV).sum(-1, keepdim=True)
    if objective.name == "kl":
        return _kl(p_CV, log_p_CV, log_q_CV), overlaps_C1, q_CV - p_CV
    tv_grad_CV = _tv_gradient(p_CV, q_CV)
    if objective.name == "tv":
        return 1 - overlaps_C1, overlaps_C1, tv_grad_CV
    if objective.name == "lk":
        lam_C1 = torch.exp(-objective.lk_eta * overlaps_C1)
        losses_C1 = lam_C1 * _kl(p_CV, log_p_CV, log_q_CV) + (1 - lam_C1) * (1 - overlaps_C1)
        return losses_C1, overlaps_C1, lam_C1 * (q_CV - p_CV) + (1 - lam_C1) * tv_grad_CV
    assert objective.name == "ce_l1", objective.name
    losses_C1 = 1.8 * (1 - overlaps_C1) - 0.1 * log_probs_C1  # sum |p - q| = 2 tv
    return losses_C1, overlaps_C1, 1.8 * tv_grad_CV + 0.1 * _less_one_at(targets_C, q_CV)


def _less_one_at(targets_C: Tensor, q_CV: Tensor) -> Tensor:
    """q less the law that is 1 at the target; q is not needed any more."""
    if torch.compiler.is_compiling():  # fused into the pass over q
        return q_CV - (torch.arange(q_CV.shape[1], device=q_CV.device) == targets_C[:, None]).float()
    return q_CV.scatter_add_(1, targets_C[:, None], q_CV.new_full((len(q_CV), 1), -1.0))


def _kl(p_CV: Tensor, log_p_CV: Tensor, log_q_CV: Tensor) -> Tensor:
    return (p_CV * (log_p_CV - log_q_CV)).sum(-1, keepdim=True)


def _tv_gradient(p_CV: Tensor, q_CV: Tensor) -> Tensor:
    """d tv / d q is -1 where q < p; the softmax leads it back to the scores."""
    short_CV = torch.where(q_CV < p_CV, q_CV, 0.0)
    return q_CV * short_CV.sum(-1, keepdim=True) - short_CV


LossOfChunk = Callable[[Tensor, Tensor, Tensor | None], ChunkLoss]  # logits, targets, teacher's logits


def plain_chunk_loss(objective: Objective, transform: Transform, teacher_transform: Transform | None) -> LossOfChunk:
    return functools.partial(chunk_loss, objective, transform, teacher_transform)


@functools.cache
def fused_chunk_loss(objective: Objective, transform: Transform, teacher_transform: Transform | None) -> LossOfChunk:
    """The passes over [C, V] fused by torch.compile: on a GPU memory traffic is their cost."""

    def fused(logits_CV: Tensor, targets_C: Tensor, teacher_logits_CV: Tensor | None) -> ChunkLoss:
        return chunk_loss(objective, transform, teacher_transform, logits_CV, targets_C, teacher_logits_CV)

    return torch.compile(fused, dynamic=True)


def d_pace_weights(log_probs_N: Tensor, pair_position_N: Tensor, pair_slot_N: Tensor, *, num_positions: int, num_heads: int) -> Tensor:
    """D-PACE (arXiv 2605.18810): what each pair counts for the expected length of the accepted draft, [N].

    With s_i = (q_i(x) + 1) / 2, slot k of a position weighs the sum over its slots m >= k of
    s_1 .. s_m. A slot without a pair counts as q = 0: nothing that heads may propose is right there.
    """
    shape = (num_positions, num_heads)
    s_RK = torch.full(shape, 0.5, device=log_probs_N.device)
    s_RK[pair_position_N, pair_slot_N] = (log_probs_N.exp() + 1) / 2
    paired_RK = torch.zeros(shape, device=log_probs_N.device)
    paired_RK[pair_position_N, pair_slot_N] = 1
    reached_RK = s_RK.cumprod(1) * paired_RK
    return reached_RK.flip(1).cumsum(1).flip(1)[pair_position_N, pair_slot_N]
