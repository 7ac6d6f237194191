"""How many steps a run has, and the learning rate of each: linear warm-up, then cosine to zero."""

from __future__ import annotations

import math


def number_of_steps(epochs: float, steps_per_epoch: int, max_steps: int | None) -> int:
    """Of a whole run, at least one; max_steps wins over epochs."""
    return max_steps or max(1, math.ceil(epochs * steps_per_epoch - 1e-9))  # a float's 1.1 * 50 is a little more than 55


def warmup_cosine(step: int, num_steps: int, *, peak: float, warmup_ratio: float) -> float:
    """The rate of step 0 .. num_steps - 1, of which a share of warmup_ratio, at least one, warms up."""
    warmup = max(1, round(warmup_ratio * num_steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))
