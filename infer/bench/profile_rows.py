"""Rows of our own loop and a few prompts -> where the time of a step goes, by stage.

A pass of its own, so that the timed one carries no timers. The prefill and the first token are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from infer.bench.rows import Batch, BenchRow, GeneratorRow
from infer.stage_timer import STAGES, Stage, StageTimer

NUM_BATCHES = 4
BASE_STAGES: tuple[Stage, ...] = ("forward", "logits")  # the base model's layers, and its LM head over the nodes


def profile_rows(rows: Sequence[BenchRow], batches: Sequence[Batch]) -> dict[str, dict[str, Any]]:
    """The key `profile` of every row of our own loop, over NUM_BATCHES batches spread over the file."""
    chosen = list(batches[:: -(-len(batches) // NUM_BATCHES)])
    profiled = [row for row in rows if isinstance(row, GeneratorRow)]
    timers = {row.name: StageTimer(row.model.device) for row in profiled}
    walls = dict.fromkeys(timers, 0.0)
    for batch in tqdm(chosen, desc="profile", file=sys.stderr):
        for row in profiled:
            answer = row.answer(batch, timer=timers[row.name])
            walls[row.name] += answer.total_s - answer.first_token_s
    num_prompts = sum(len(batch.prompts) for batch in chosen)
    return {name: profile_figures(timer, walls[name], num_prompts=num_prompts) for name, timer in timers.items()}


def profile_figures(timer: StageTimer, wall_s: float, *, num_prompts: int) -> dict[str, Any]:
    """Milliseconds per step (of a whole batch) by stage, and shares of the step.

    What no stage timed, the loop itself, counts as `other`. Outside the base forward is all but BASE_STAGES:
    drafting with the LM head of its slots, verifying, keeping the cache, Python. num_steps: base forwards after the prefills.
    """
    steps = timer.counts["forward"]
    seconds = dict(timer.seconds)
    seconds["other"] += max(0.0, wall_s - sum(seconds.values()))
    total = sum(seconds.values())
    outside = total - sum(seconds[stage] for stage in BASE_STAGES)
    return {
        "num_prompts": num_prompts,
        "num_steps": steps,
        "ms_per_step": {stage: 1000 * seconds[stage] / steps for stage in STAGES} if steps else None,
        "ms_per_step_total": 1000 * total / steps if steps else None,
        "share_outside_base_forward": outside / total if steps else None,
        "share_outside_base_layers": (outside + seconds["logits"]) / total if steps else None,
    }
