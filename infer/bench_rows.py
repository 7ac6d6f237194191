"""A batch of prompts -> answers with their wall times, by each way of decoding that `bench` compares."""

# B batch, T sequence

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from infer.acceptance_stats import AcceptanceStats
from infer.generate import Generator
from medusa_heads import base_model

NUM_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What one way of decoding made of a batch.

    token_ids: new tokens per row, the end token included; runs: tokens per base forward, per row;
    first_token_s: wall time until every row's first token, total_s: until the last token of all.
    """

    token_ids: list[list[int]]
    runs: list[list[int]]
    stats: list[AcceptanceStats]
    first_token_s: float
    total_s: float


class BenchRow(Protocol):
    name: str

    def warm_up(self, batches: Iterable[Sequence[Sequence[int]]]) -> None:
        """Runs what would otherwise be set up (compiled, allocated) inside the measurement."""
        ...

    def answer(self, batch: Sequence[Sequence[int]]) -> BatchAnswer: ...


class GeneratorRow:
    """Our own decoding loop with one drafter."""

    def __init__(self, name: str, generator: Generator, *, max_new_tokens: int, eos_ids: Sequence[int]) -> None:
        self.name, self.generator, self.max_new_tokens, self.eos_ids = name, generator, max_new_tokens, tuple(eos_ids)

    def warm_up(self, batches: Iterable[Sequence[Sequence[int]]]) -> None:
        self._decode(next(iter(batches)), min(NUM_WARM_UP_TOKENS, self.max_new_tokens))

    def answer(self, batch: Sequence[Sequence[int]]) -> BatchAnswer:
        return self._decode(batch, self.max_new_tokens)

    def _decode(self, batch: Sequence[Sequence[int]], max_new_tokens: int) -> BatchAnswer:
        stats = [AcceptanceStats() for _ in batch]
        runs: list[list[int]] = [[] for _ in batch]
        token_ids: list[list[int]] = [[] for _ in batch]
        first_token_s = 0.0
        base_model.synchronize(self.generator.model)
        start = time.perf_counter()
        for step in self.generator.steps(batch, max_new_tokens=max_new_tokens, eos_ids=self.eos_ids, stats=stats):
            first_token_s = first_token_s or time.perf_counter() - start
            for run, row, new in zip(runs, token_ids, step.new_tokens, strict=True):
                run.extend([len(new)] if new else [])
                row.extend(new)
        base_model.synchronize(self.generator.model)
        return BatchAnswer(token_ids, runs, stats, first_token_s, time.perf_counter() - start)


class TransformersRow:
    """`model.generate(do_sample=False)` with its defaults; a batch is left-padded."""

    name = "transformers_generate"

    def __init__(self, model: PreTrainedModel, *, max_new_tokens: int, eos_ids: Sequence[int]) -> None:
        self.model, self.max_new_tokens, self.eos_ids = model, max_new_tokens, tuple(eos_ids)

    def warm_up(self, batches: Iterable[Sequence[Sequence[int]]]) -> None:
        self._decode(next(iter(batches)), min(NUM_WARM_UP_TOKENS, self.max_new_tokens))

    def answer(self, batch: Sequence[Sequence[int]]) -> BatchAnswer:
        return self._decode(batch, self.max_new_tokens)

    def _decode(self, batch: Sequence[Sequence[int]], max_new_tokens: int) -> BatchAnswer:
        longest, pad_id = max(map(len, batch)), self.eos_ids[0] if self.eos_ids else 0
        first_token_s = 0.0

        def on_token() -> None:
            nonlocal first_token_s
            if not first_token_s:
                base_model.synchronize(self.model)
                first_token_s = time.perf_counter() - start

        base_model.synchronize(self.model)
        start = time.perf_counter()
        ids_BT = torch.tensor([[pad_id] * (longest - len(row)) + list(row) for row in batch], device=self.model.device)
        mask_BT = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch], device=self.model.device)
        output_BT = base_model.generate_plainly(
            self.model, ids_BT, mask_BT, max_new_tokens=max_new_tokens, eos_ids=self.eos_ids, pad_id=pad_id, on_token=on_token
        )
        answers = [cut_answer(row, frozenset(self.eos_ids)) for row in output_BT[:, longest:].tolist()]
        total_s = time.perf_counter() - start
        return BatchAnswer(answers, [[1] * len(a) for a in answers], [plain_stats(a) for a in answers], first_token_s, total_s)


def cut_answer(token_ids: Sequence[int], eos_ids: frozenset[int]) -> list[int]:
    """Tokens up to and including the first end token."""
    for index, token in enumerate(token_ids):
        if token in eos_ids:
            return list(token_ids[: index + 1])
    return list(token_ids)


def plain_stats(token_ids: Sequence[int]) -> AcceptanceStats:
    """The counts of one-token-per-forward decoding: a step for every token after the first."""
    return AcceptanceStats(num_steps=len(token_ids) - 1)
