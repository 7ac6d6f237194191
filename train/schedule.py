"""A step of a run -> its learning rate: linear warm-up, then cosine to zero."""

from __future__ import annotations

import math


def warmup_cosine(step: int, num_steps: int, *, peak: float, warmup_ratio: float) -> float:
    """The rate of step 0 .. num_steps - 1, of which a share of warmup_ratio, at least one, warms up."""
    warmup = max(1, round(warmup_ratio * num_steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))
