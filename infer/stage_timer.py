"""A decoding loop -> seconds per stage: draft, forward, logits, verify, compact, other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

Stage = Literal["draft", "forward", "logits", "verify", "compact", "other"]
STAGES: tuple[Stage, ...] = get_args(Stage)


class StageTimer:
    """Adds up wall time. On a CUDA device it waits for the device at both ends of a stage, so decoding is slower
    while it is timed. seconds: of each stage; counts: how many times it was entered."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)
        self.counts: dict[Stage, int] = dict.fromkeys(STAGES, 0)

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Times a block; stages do not nest."""
        start = self._now()
        try:
            yield
        finally:
            self.seconds[name] += self._now() - start
            self.counts[name] += 1

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class NoTimer(StageTimer):
    """Times nothing and waits for nothing."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        yield
