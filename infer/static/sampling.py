"""Logits and random numbers -> tokens: temperature, top-k, top-p."""

# R rows, V vocabulary, N new tokens

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_TEMPERATURE = 1e-3  # logits divided by less could overflow


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn: greedy at temperature 0; top_k 0 and top_p 1 switch those filters off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature and not LEAST_TEMPERATURE <= self.temperature < math.inf:  # NaN is none of these
            raise ValueError(f"--temperature {self.temperature}: must be 0, which is greedy, or at least {LEAST_TEMPERATURE:g} and finite")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p} is not in (0, 1]; 1 keeps every token")
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k} is negative; 0 keeps every token")


def target_law(logits_RV: Tensor, sampling: Sampling) -> Tensor:
    """The unnormalised probabilities that sampling draws from, float32 [R, V].

    Temperature first, then top-k, then top-p on what is left, as transformers orders them.
    """
    law_RV = torch.softmax(logits_RV.float() / sampling.temperature, -1)
    if 0 < sampling.top_k < law_RV.shape[1]:
        smallest_R1 = law_RV.topk(sampling.top_k, -1).values[:, -1:]
        law_RV = law_RV.masked_fill(law_RV < smallest_R1, 0)
    if sampling.top_p < 1:
        sorted_RV, order_RV = law_RV.sort(-1, descending=True)
        before_RV = sorted_RV.cumsum(-1) - sorted_RV
        sorted_RV = sorted_RV.masked_fill(before_RV >= sampling.top_p * sorted_RV.sum(-1, keepdim=True), 0)
        law_RV = torch.zeros_like(sorted_RV).scatter(1, order_RV, sorted_RV)
    return law_RV


def choose_tokens(logits_RV: Tensor, sampling: Sampling, uniform_R: Tensor | None = None) -> Tensor:
    """The most likely token, or the one at which the cumulative law passes uniform_R in [0, 1): long [R]."""
    if not sampling.temperature:
        return logits_RV.argmax(-1)
    assert uniform_R is not None
    cumulative_RV = target_law(logits_RV, sampling).cumsum(-1, dtype=torch.float64)  # float32 would lose rare tokens
    threshold_R1 = cumulative_RV[:, -1:] * uniform_R[:, None]
    return torch.searchsorted(cumulative_RV, threshold_R1, right=True)[:, 0].clamp(max=logits_RV.shape[1] - 1)


def uniform_numbers(sampling: Sampling, key: object, count: int) -> Tensor:
    """`count` random numbers in [0, 1) that depend on the seed and `str(key)` alone; none when greedy."""
    if not sampling.temperature:
        return torch.zeros(0)
    digest = hashlib.sha256(f"{sampling.seed}/{key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.rand(count, generator=generator)
