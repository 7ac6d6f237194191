"""What one micro-batch costs -> the cost of a whole run, with the base in every step or from stored hidden states, per strategy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from train.calibration import Calibrations
from train.cost_model import BaseSize, HeadsSize, Memory, memory
from train.windows import WindowPlan

MODES = ("online", "device", "disk")  # of --hidden-states
EXCHANGE_BYTES_PER_SECOND = 150e9  # assumed between GPUs of one host
DISK_BYTES_PER_SECOND = 1e9  # assumed of a cache of hidden states, for all processes together


@dataclass(frozen=True, slots=True)
class Run:
    """What the rows of the table are made of. response_tokens: of a micro-batch; all_states, held_states: bytes of all rows' hidden
    states, and of those that one process reads; disk: bytes without them."""

    base: BaseSize
    heads: HeadsSize
    times: Calibrations
    plan: WindowPlan
    num_steps: int
    response_tokens: float
    all_states: int
    held_states: int
    disk: int
    capacity: float | None


def row(run: Run, mode: str, strategy: str) -> dict[str, Any]:
    """The cost of one of MODES under one strategy."""
    online, plan = mode == "online", run.plan
    step = run.times.online if online else run.times.stored
    assert step.activation_bytes is not None
    parts: Memory = memory(run.base, run.heads, activations=step.activation_bytes, num_processes=plan.num_processes, strategy=strategy)
    parts = replace(parts, states=run.held_states if mode == "device" else 0)
    exchanged = exchange_bytes(run.base, run.heads, plan.num_processes, strategy, plan.accumulation, runs_base=online)
    step_seconds = step.seconds * plan.accumulation + exchanged / EXCHANGE_BYTES_PER_SECOND
    if mode == "disk":
        step_seconds = max(step_seconds, run.all_states / plan.steps_per_epoch / DISK_BYTES_PER_SECOND)  # whichever waits for the other
    once = 0.0 if online else making_seconds(run, strategy, on_disk=mode == "disk")
    return {
        "strategy": "single" if plan.num_processes == 1 else strategy,
        "memory_bytes": asdict(parts) | {"total": parts.total},
        "fits": None if run.capacity is None else parts.total < 0.95 * run.capacity,
        "disk_bytes": run.disk + (run.all_states if mode == "disk" else 0),
        "making_seconds": once,
        "step_seconds": step_seconds,
        "response_tokens_per_second": run.response_tokens * plan.accumulation * plan.num_processes / step_seconds,
        "hours": (once + run.num_steps * step_seconds) / 3600,
    }


def making_seconds(run: Run, strategy: str, *, on_disk: bool) -> float:
    """The base once over all rows; on disk they are written meanwhile, and then read once to be checked."""
    gathered = run.base.bytes * (1 - 1 / run.plan.num_processes) if strategy == "fsdp2" else 0.0
    num_forwards = -(-run.plan.num_rows // (run.plan.batch_size * run.plan.num_processes))
    forwards = num_forwards * (run.times.forward_seconds + gathered / EXCHANGE_BYTES_PER_SECOND)
    through_disk = run.all_states / DISK_BYTES_PER_SECOND
    return max(forwards, through_disk) + through_disk if on_disk else forwards


def exchange_bytes(
    base: BaseSize, heads: HeadsSize, num_processes: int, strategy: str, micro_batches: int, *, runs_base: bool = True
) -> float:
    """What a rank receives in an optimizer step: gradients of the heads, twice (a ring), and a sharded base at every forward, or of
    it what lies in no layer."""
    share = (num_processes - 1) / num_processes
    gathered = (base.bytes if runs_base else base.outside_bytes) * micro_batches if strategy == "fsdp2" else 0
    return share * (gathered + 2 * 4 * heads.num_weights)
