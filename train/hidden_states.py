"""Packed rows + frozen base -> accumulation windows: with the base run in every step, or its hidden states made once before the first."""

# P packed rows, S stored states, M of them in a micro-batch, D hidden

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from train.batch import CachedBatch, TrainBatch, supervised_pairs
from train.config import TrainConfig
from train.headed_model import HeadedModel
from train.packing import PackedDataset
from train.sharding import in_lock_step
from train.state_maker import StateIndex, StateMaker, index_states, ranges
from train.state_shards import open_states
from train.windows import WindowPlan, in_windows, windows


class StateStore(Protocol):
    """Where made states lie: those of some rows, one row after the other, as part of a micro-batch."""

    def fill(self, batch: CachedBatch) -> CachedBatch: ...


def cached_batch(packed: PackedDataset, index: StateIndex, store: StateStore, rows: Sequence[int]) -> CachedBatch:
    """The micro-batch of these rows (-1: an empty pack): the same positions, pairs and targets as from their tokens."""
    rows = [row for row in rows if row >= 0]
    lengths = index.lengths_P[rows]
    states_M = ranges(index.bounds_P1[rows], lengths)
    pairs, counts_K = supervised_pairs(index.num_slots_S[states_M], packed.num_heads)
    at_N = pairs["positions"][pairs["pair_position"]] + pairs["pair_slot"] + 1  # the state before the target, in the same run
    pairs["targets"] = index.next_tokens_S[states_M[at_N]].long()
    return store.fill(CachedBatch(pairs, counts_K, [], packed, rows, lengths.cumsum(0)))


@dataclass(frozen=True, slots=True)
class ResidentStates:
    """States on the device. starts_P: where those of row p begin, -1 where they are not held."""

    states_SD: Tensor
    starts_P: Tensor
    lengths_P: Tensor

    def put(self, rows: Sequence[int], part_SD: Tensor) -> None:
        """Keeps what is to be held of the states of `rows`, one row after the other; an empty pack has none."""
        end = 0
        for row in rows:
            if row >= 0:
                start, length = int(self.starts_P[row]), int(self.lengths_P[row])
                if start >= 0:
                    self.states_SD[start : start + length] = part_SD[end : end + length]
                end += length

    def fill(self, batch: CachedBatch) -> CachedBatch:
        index_M = ranges(self.starts_P[batch.rows], self.lengths_P[batch.rows])
        return replace(batch, tensors=batch.tensors | {"state_index": index_M}, resident_SD=self.states_SD)


def hold_states(maker: StateMaker, plan: WindowPlan, *, first_step: int, num_steps: int) -> ResidentStates:
    """Makes the states of all rows that are still to be read, each once, and keeps those that this process reads.

    Raises ValueError when they do not fit on the device.
    """
    accelerator = maker.accelerator
    of_process = [replace(plan, process_index=p).rows_read(first_step, num_steps) for p in range(plan.num_processes)]
    held = _room_for(maker, sorted(of_process[plan.process_index]))
    read: set[int] = set().union(*of_process)
    groups = [group for group in maker.groups(0, plan.num_rows) if not read.isdisjoint(group)]
    groups += [[-1]] * (-len(groups) % plan.num_processes)  # every process takes part in every exchange
    bar = tqdm(total=len(groups), desc="hidden states", unit="forward", disable=not accelerator.is_main_process)
    with in_lock_step(accelerator, maker.headed):
        for number, own_SD in enumerate(maker.make(groups[plan.process_index :: plan.num_processes])):
            of_round = groups[number * plan.num_processes :][: plan.num_processes]
            counts = [maker.index.num_states(row for row in group if row >= 0) for group in of_round]
            for group, part_SD in zip(of_round, exchanged(accelerator, own_SD, counts), strict=True):
                held.put(group, part_SD)
                bar.update()
    bar.close()
    return held


def _room_for(maker: StateMaker, rows: list[int]) -> ResidentStates:
    lengths_P = maker.index.lengths_P
    starts_P, num_states = torch.full_like(lengths_P, -1), maker.index.num_states(rows)
    starts_P[rows] = lengths_P[rows].cumsum(0) - lengths_P[rows]
    try:
        states_SD = torch.empty(num_states, maker.hidden_size, dtype=maker.dtype, device=maker.accelerator.device)
    except torch.OutOfMemoryError:
        gigabytes = num_states * maker.hidden_size * maker.dtype.itemsize / 1e9
        raise ValueError(
            f"hidden_states: device has no room for {gigabytes:.1f} GB of states; use --hidden-states disk or online, or lower limit"
        ) from None
    return ResidentStates(states_SD, starts_P, lengths_P)


def exchanged(accelerator: Accelerator, own_SD: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Every process's states of one round, given how many each has."""
    assert len(own_SD) == counts[accelerator.process_index]
    if len(counts) == 1:
        return [own_SD]
    padded_SD = own_SD.new_zeros(max(counts), own_SD.shape[1])
    padded_SD[: len(own_SD)] = own_SD
    parts = accelerator.gather(padded_SD).split(max(counts))  # type: ignore[union-attr]
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


def loaded_ahead(make: Callable[[list[int]], TrainBatch], items: Iterable[list[int]], num_threads: int) -> Iterator[TrainBatch]:
    """make(item) of every item in order, by threads that stay two batches each ahead."""
    if not num_threads:
        yield from map(make, items)
        return
    waiting: deque[Future[TrainBatch]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="states") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(make, item))
                if len(waiting) > 2 * num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def training_windows(
    config: TrainConfig,
    headed: HeadedModel,
    rows: PackedDataset,
    plan: WindowPlan,
    accelerator: Accelerator,
    *,
    first_step: int,
    num_steps: int,
) -> Iterator[list[TrainBatch]]:
    """This process's windows from `first_step` on. States that are to be stored are made, or opened, before it returns."""
    on_gpu = accelerator.device.type == "cuda"
    if config.hidden_states == "online" or first_step >= num_steps:
        return windows(
            rows,
            plan,
            num_heads=rows.num_heads,
            first_step=first_step,
            num_steps=num_steps,
            num_workers=config.num_workers,
            pin_memory=on_gpu,
        )
    index = index_states(rows)
    maker = StateMaker(headed, rows, index, accelerator, config.batch_size, config.num_workers)
    store: StateStore
    if config.hidden_states == "device":
        store = hold_states(maker, plan, first_step=first_step, num_steps=num_steps)
    else:
        assert config.hidden_states_dir is not None
        store = open_states(Path(config.hidden_states_dir), maker)

    def make(numbers: list[int]) -> TrainBatch:
        batch = cached_batch(rows, index, store, numbers)
        return batch.pin_memory() if on_gpu else batch

    numbers = (batch for step in range(first_step, num_steps) for batch in plan.micro_batches(step))
    return in_windows(loaded_ahead(make, numbers, config.num_workers), plan.accumulation)
