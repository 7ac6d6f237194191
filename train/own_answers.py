"""Conversations -> the same, answered turn by turn by the base model on this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from infer.static.sampling import Sampling
from infer.static.static_generate import StaticGenerator, default_batch_size
from medusa_heads import base_model
from train.jobs import Job

SMALLEST_CAPACITY = 256


@dataclass(slots=True)
class OwnAnswers:
    """batch_size: conversations at once; None: what the device holds."""

    model: PreTrainedModel
    eos_ids: Sequence[int]
    max_new_tokens: int
    batch_size: int | None
    found: dict[str, Any] = field(default_factory=dict)

    def answers(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Every job, as it finishes; one whose prompt fills the context comes back without an answer."""
        context = base_model.max_length(self.model)
        fitting = [job for job in jobs if len(job.pieces[0]) < context]
        yield from (job for job in jobs if len(job.pieces[0]) >= context)
        for capacity, sampling, group in by_capacity(fitting, self.max_new_tokens, context):
            generator = StaticGenerator(
                self.model,
                max_new_tokens=self.max_new_tokens,
                eos_ids=self.eos_ids,
                batch_size=self.batch_size or default_batch_size(self.model, capacity),
                capacity=capacity,
                sampling=sampling,
            )
            yield from finished_jobs(generator, group)
            self.found = {"attention": generator.attention, "batch_size": self.batch_size or default_batch_size(self.model, capacity)}

    def facts(self) -> dict[str, Any]:
        return self.found


def finished_jobs(generator: StaticGenerator, jobs: Sequence[Job]) -> Iterator[Job]:
    """Runs conversations turn by turn; one whose next turn no longer fits ends there."""
    by_key = {(job.id, 0): job for job in jobs}
    for key, job in by_key.items():
        generator.add(key, job.next_prompt())
    for answer in generator.run():
        job = by_key.pop(answer.key)  # type: ignore[call-overload]
        job.take(answer.token_ids, answer.finish_reason)
        answered = len(job.spans)
        if answered < len(job.pieces) and len(prompt := job.next_prompt()) < generator.room:
            by_key[(job.id, answered)] = job
            generator.add((job.id, answered), prompt)
        else:
            yield job


def by_capacity(jobs: Sequence[Job], max_new_tokens: int, context: int) -> list[tuple[int, Sampling, list[Job]]]:
    """Groups conversations by the room they may need, in powers of two, the largest first, and by how they are sampled:
    a few long ones must not make every slot large."""

    def need(job: Job) -> int:
        return sum(map(len, job.pieces)) + max_new_tokens * len(job.pieces)

    groups: dict[tuple[int, Sampling], list[Job]] = defaultdict(list)
    for job in jobs:
        capacity = SMALLEST_CAPACITY
        while capacity < need(job):
            capacity *= 2
        groups[capacity, job.sampling].append(job)
    largest_first = sorted(groups.items(), key=lambda item: (item[0][0], item[0][1].temperature), reverse=True)
    return [(min(max(map(need, group)), context), sampling, group) for (_, sampling), group in largest_first]
