"""Packed rows -> accumulation windows: which rows each process reads at each optimizer step.

The global order depends on the seed and the epoch alone, and a step's rows are dealt out to
processes and micro-batches, so one process with eight micro-batches and eight with one see the same
steps. Any step can be reached directly, which is what makes a resumed run the same run.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from train.batch import TrainBatch, make_batch
from train.packing import PackedDataset, RowsOrEmpty, collate


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """How num_rows packed rows are dealt out. A short last window is filled with empty packs."""

    num_rows: int
    batch_size: int
    accumulation: int
    num_processes: int
    process_index: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_processes > self.num_rows:
            raise ValueError(
                f"{self.num_processes} processes have {self.num_rows} packed rows to share, so some would have none: launch fewer "
                "(--num_processes of accelerate launch), lower pack_length, or give more data"
            )

    @property
    def rows_per_step(self) -> int:
        return self.batch_size * self.accumulation * self.num_processes

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_rows // self.rows_per_step)

    def micro_batches(self, step: int) -> list[list[int]]:
        """Row indices of this process's micro-batches at `step`; -1 stands for an empty pack."""
        epoch, within = divmod(step, self.steps_per_epoch)
        order = _epoch_order(self.num_rows, self.seed * 1_000_003 + epoch)
        rows = order[within * self.rows_per_step : (within + 1) * self.rows_per_step]
        rows += [-1] * (self.rows_per_step - len(rows))
        size = self.batch_size
        starts = [(m * self.num_processes + self.process_index) * size for m in range(self.accumulation)]
        return [rows[start : start + size] for start in starts]

    def rows_read(self, first_step: int, num_steps: int) -> set[int]:
        """Rows that this process reads from `first_step` on."""
        rows: set[int] = set()
        for step in range(first_step, num_steps):
            rows.update(row for batch in self.micro_batches(step) for row in batch if row >= 0)
            if len(rows) == self.num_rows:
                break
        return rows


@functools.lru_cache(maxsize=2)
def _epoch_order(num_rows: int, seed: int) -> list[int]:
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed)).tolist()  # type: ignore[no-any-return]


class _Batches:
    """The batch sampler of the data loader: micro-batches from a first step on."""

    def __init__(self, plan: WindowPlan, first_step: int, num_steps: int) -> None:
        self.plan, self.first_step, self.num_steps = plan, first_step, num_steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first_step, self.num_steps):
            yield from self.plan.micro_batches(step)

    def __len__(self) -> int:
        return (self.num_steps - self.first_step) * self.plan.accumulation


class _Collate:
    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads

    def __call__(self, items: list[dict[str, Any]]) -> TrainBatch:
        return make_batch(collate(items), self.num_heads)


def usable_workers(wanted: int) -> int:
    """No more than there are cores for: more hinder each other, and torch warns of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(wanted, cores)


def windows(
    rows: PackedDataset,
    plan: WindowPlan,
    *,
    num_heads: int,
    first_step: int,
    num_steps: int,
    num_workers: int,
    pin_memory: bool = False,
) -> Iterator[list[TrainBatch]]:
    """Accumulation windows of this process from `first_step` on, loaded ahead by workers.

    pin_memory: keeps them where a copy to a GPU does not make the host wait.
    """
    loader: DataLoader[Any] = DataLoader(
        RowsOrEmpty(rows),
        batch_sampler=_Batches(plan, first_step, num_steps),  # type: ignore[arg-type]
        collate_fn=_Collate(num_heads),
        num_workers=(num_loaders := usable_workers(num_workers)),
        prefetch_factor=4 if num_loaders else None,
        persistent_workers=False,
        pin_memory=pin_memory,
    )
    return in_windows(loader, plan.accumulation)


def in_windows(batches: Iterable[TrainBatch], accumulation: int) -> Iterator[list[TrainBatch]]:
    window: list[TrainBatch] = []
    for batch in batches:
        window.append(batch)
        if len(window) == accumulation:
            yield window
            window = []
