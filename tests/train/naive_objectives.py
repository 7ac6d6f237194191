"""The objectives written down plainly on full logits, for autograd to differentiate: what the tests compare with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from train.objectives import Objective


def naive_loss(objective: Objective, scores: Tensor, targets: Tensor, teacher_scores: Tensor) -> Tensor:
    """scores and teacher_scores [N, V], targets [N] -> the loss of each pair [N]."""
    p, q = teacher_scores.softmax(-1).detach(), scores.softmax(-1)
    cross_entropy = F.cross_entropy(scores, targets, reduction="none")
    kl = (p * (p.log() - q.log())).sum(-1)
    tv = 1 - torch.minimum(p, q).sum(-1)
    lam = torch.exp(-objective.lk_eta * (1 - tv).detach())
    return {
        "ce": cross_entropy,
        "kl": kl,
        "tv": tv,
        "lk": lam * kl + (1 - lam) * tv,
        "ce_l1": 0.1 * cross_entropy + 0.9 * (p - q).abs().sum(-1),
    }[objective.name]


def naive_d_pace(target_probabilities: list[float]) -> list[float]:
    """q_i(x) of the slots of one position, from the first -> what each of them weighs."""
    chain = [1.0]
    for q in target_probabilities:
        chain.append(chain[-1] * (0.5 * q + 0.5))
    return [sum(chain[k:]) for k in range(1, len(chain))]
