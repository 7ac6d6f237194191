"""Rows and prompts -> timed answers: every row warmed up, then taking turns at each batch."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from infer.acceptance_stats import AcceptanceStats
from infer.bench.compiled_base import CompiledBase
from infer.bench.rows import Batch, BatchAnswer, BenchRow, Decoding, GeneratorRow, TransformersRow
from infer.generate import Generator
from infer.target import row_seed
from infer.verifiers import VerifierChoice

LOSSY_PREFIX = "typical:"


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's answer by one row. decode_s: wall time after the first token; in a batch, the batch's, shared in
    proportion to the new tokens after the first. token_s: seconds between two tokens, as its reader sees them."""

    token_ids: list[int]
    runs: list[int]
    stats: AcceptanceStats
    first_token_s: float
    prefill_s: float
    decode_s: float
    token_s: float

    @property
    def num_timed_tokens(self) -> int:
        return len(self.token_ids) - 1


@dataclass(frozen=True, slots=True)
class Measured:
    """By row: its answers, one per prompt; why it did not run (rows that could not be compiled); peak device memory."""

    answers: dict[str, list[Answer]]
    errors: dict[str, str]
    peak_memory_bytes: dict[str, int | None]


def split_batch(batch: BatchAnswer) -> list[Answer]:
    """The answers of a batch, its wall times shared out so that they sum to the batch's."""
    timed = [len(ids) - 1 for ids in batch.token_ids]
    total, size = sum(timed), len(timed)
    decode_s = batch.total_s - batch.first_token_s
    token_s = decode_s / max(1, *timed)  # the longest answer's; the shorter ones came no faster
    return [
        Answer(ids, runs, stats, batch.first_token_s, batch.first_token_s / size, decode_s * (n / total if total else 1 / size), token_s)
        for ids, runs, stats, n in zip(batch.token_ids, batch.runs, batch.stats, timed, strict=True)
    ]


def make_batches(prompt_ids: Sequence[list[int]], *, batch_size: int, seed: int) -> list[Batch]:
    """Prompts in order, each batch with a seed of its own, the same for every row."""
    starts = range(0, len(prompt_ids), batch_size)
    return [Batch(list(prompt_ids[start : start + batch_size]), row_seed(seed, f"prompt {start}")) for start in starts]


def make_rows(
    model: PreTrainedModel,
    generators: dict[str, Generator],
    decoding: Decoding,
    *,
    verifier: VerifierChoice = "auto",
    lossy: dict[str, Generator] | None = None,
) -> list[BenchRow]:
    """The three base rows, then one row per drafter, then those of `lossy`, verified by V6 typical.

    lossy: generators of their own, since a drafter may learn from what is accepted.

    Raises ValueError naming the drafter that cannot serve the verifier.
    """
    plain = GeneratorRow("base", generators["base"], decoding)
    rows: list[BenchRow] = [plain, CompiledBase(model, decoding), TransformersRow(model, decoding)]
    for name, generator in generators.items():
        if name == "base":
            continue
        try:
            rows.append(GeneratorRow(name, generator, decoding, verifier=verifier))
        except ValueError as error:
            raise ValueError(f"{error}; or leave {name} out of --drafters") from None
    return rows + [GeneratorRow(LOSSY_PREFIX + name, generator, decoding, verifier="typical") for name, generator in (lossy or {}).items()]


def measure(rows: Sequence[BenchRow], batches: Sequence[Batch], *, seed: int, device: torch.device) -> Measured:
    """Warms every row up, then lets them answer batch by batch, taking turns in a seeded random order."""
    running, errors = warm_up(rows, batches)
    answers: dict[str, list[Answer]] = {row.name: [] for row in running}
    memory: dict[str, int | None] = {row.name: None for row in running}
    shuffler = random.Random(seed)
    unit = "prompt" if all(len(batch.prompts) == 1 for batch in batches) else "batch"
    for batch in tqdm(batches, desc="bench", unit=unit, file=sys.stderr):
        for row in shuffler.sample(running, len(running)):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            answers[row.name] += split_batch(row.answer(batch))
            if device.type == "cuda":
                memory[row.name] = max(memory[row.name] or 0, torch.cuda.max_memory_allocated(device))
    return Measured(answers, errors, memory)


def warm_up(rows: Sequence[BenchRow], batches: Sequence[Batch]) -> tuple[list[BenchRow], dict[str, str]]:
    """The rows that run, and why the others do not: only `base_compiled` may fail, for want of a compiler."""
    running: list[BenchRow] = []
    errors: dict[str, str] = {}
    for row in rows:
        compiles = " (compiled first, which takes a minute or more)" if isinstance(row, CompiledBase) else ""
        print(f"warming up {row.name}{compiles} ...", file=sys.stderr, flush=True)
        try:
            row.warm_up(batches)
            running.append(row)
        except RuntimeError as error:
            if not isinstance(row, CompiledBase):
                raise
            errors[row.name] = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return running, errors
