"""Counts of drafting and accepting, under vLLM's names, and the figures made from them.

mean_acceptance_length = 1 + num_accepted_tokens / num_steps: tokens per base forward, the base
model's own (bonus) token included, counted before an answer is cut at its end or limit.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class AcceptanceStats:
    """num_steps: verification forwards per row; num_drafted_tokens: tree nodes without the root."""

    num_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at_depth: list[int] = field(default_factory=list)

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """One verification step of one row."""
        self.num_steps += 1
        self.num_drafted_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        self.accepted_at_depth += [0] * (num_accepted - len(self.accepted_at_depth))
        for depth in range(num_accepted):
            self.accepted_at_depth[depth] += 1

    def __add__(self, other: AcceptanceStats) -> AcceptanceStats:
        depth = max(len(self.accepted_at_depth), len(other.accepted_at_depth))
        padded = [s.accepted_at_depth + [0] * (depth - len(s.accepted_at_depth)) for s in (self, other)]
        return AcceptanceStats(
            self.num_steps + other.num_steps,
            self.num_drafted_tokens + other.num_drafted_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            [a + b for a, b in zip(*padded, strict=True)],
        )

    @property
    def mean_acceptance_length(self) -> float | None:
        return 1 + self.num_accepted_tokens / self.num_steps if self.num_steps else None

    def figures(self) -> dict[str, Any]:
        """The counts and what is derived from them, as `bench` reports them."""
        steps, drafted = self.num_steps, self.num_drafted_tokens
        reached = [steps, *self.accepted_at_depth]
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_by_depth": [n / steps for n in self.accepted_at_depth] if steps else [],
            "acceptance_by_depth_conditional": [n / before if before else 0.0 for before, n in itertools.pairwise(reached)],
            "num_steps": steps,
            "num_drafted_tokens": drafted,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_rejected_tokens": drafted - self.num_accepted_tokens,
            "draft_acceptance_rate": self.num_accepted_tokens / drafted if drafted else None,
        }


# ---------------------------------------------------------------- steps and accepted tokens of each of P prompts: [.., P, 2]


def lengths(counts_P2: Any) -> Any:
    """Mean acceptance lengths, [..]."""
    return 1 + counts_P2[..., 1].sum(-1) / counts_P2[..., 0].sum(-1).clip(1)


def influences(counts_P2: Any) -> Any:
    """[.., P], such that the standard error of their mean is that of the length, a ratio of sums (delta method)."""
    steps_P, accepted_P = counts_P2[..., 0], counts_P2[..., 1]
    return (accepted_P - (lengths(counts_P2)[..., None] - 1) * steps_P) / steps_P.mean(-1, keepdims=True).clip(1e-9)


def standard_error(values: Any) -> float | None:
    """Of the mean; None for a single value."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
