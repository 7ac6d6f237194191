"""A batch of prompts -> answers with their wall times, by each way of decoding that `bench` compares."""

# B batch, T sequence

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel

from infer.acceptance_stats import AcceptanceStats
from infer.generate import Generator
from infer.stage_timer import StageTimer
from infer.verifiers import VerifierChoice, is_lossless, resolve_verifier
from medusa_heads import base_model

NUM_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Decoding:
    """What all rows are asked for. generation_config: None is greedy, else settings of transformers' `generate`."""

    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    generation_config: GenerationConfig | None = None
    batch_size: int = 1

    @property
    def is_sampled(self) -> bool:
        return self.generation_config is not None and bool(self.generation_config.do_sample)

    @property
    def temperature(self) -> float:
        """0 for greedy decoding."""
        config = self.generation_config
        return float(config.temperature or 1.0) if config is not None and config.do_sample else 0.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts (token ids) that are answered at once, and what fixes the tokens drawn for them."""

    prompts: list[list[int]]
    seed: int = 0


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
    """is_exact: in float32 its answers are those of plain decoding under the same seed, token for token."""

    name: str
    model: PreTrainedModel
    is_exact: bool

    def warm_up(self, batches: Iterable[Batch]) -> None:
        """Runs what would otherwise be set up (compiled, allocated) inside the measurement."""
        ...

    def answer(self, batch: Batch) -> BatchAnswer: ...


class GeneratorRow:
    """Our own decoding loop with one drafter. verifier: the one that runs where tokens are drawn."""

    def __init__(self, name: str, generator: Generator, decoding: Decoding, *, verifier: VerifierChoice = "auto") -> None:
        """Raises ValueError where the drafter cannot serve the verifier."""
        drafter = generator.drafter
        self.name, self.generator, self.model, self.decoding = name, generator, generator.model, decoding
        self.verifier = resolve_verifier(
            verifier,
            drafter=drafter.name,
            sampled_shape=drafter.sampled_shape,
            draws_by_default=drafter.draws_by_default,
            temperature=decoding.temperature,
            batch_size=decoding.batch_size,
        )
        self.is_exact = self.verifier == "sample-and-match"
        self.is_lossless = is_lossless(self.verifier)

    def warm_up(self, batches: Iterable[Batch]) -> None:
        self._decode(next(iter(batches)), min(NUM_WARM_UP_TOKENS, self.decoding.max_new_tokens))

    def answer(self, batch: Batch, *, timer: StageTimer | None = None) -> BatchAnswer:
        """timer: adds up the seconds of the stages of a step; waiting for a GPU, it slows it down."""
        return self._decode(batch, self.decoding.max_new_tokens, timer)

    def _decode(self, batch: Batch, max_new_tokens: int, timer: StageTimer | None = None) -> BatchAnswer:
        stats = [AcceptanceStats() for _ in batch.prompts]
        runs: list[list[int]] = [[] for _ in batch.prompts]
        token_ids: list[list[int]] = [[] for _ in batch.prompts]
        first_token_s = 0.0
        base_model.synchronize(self.model)
        start = time.perf_counter()
        for step in self.generator.steps(
            batch.prompts,
            max_new_tokens=max_new_tokens,
            eos_ids=self.decoding.eos_ids,
            generation_config=self.decoding.generation_config,
            seed=batch.seed,
            verifier=self.verifier,
            stats=stats,
            timer=timer,
        ):
            first_token_s = first_token_s or time.perf_counter() - start
            for run, row, new in zip(runs, token_ids, step.new_tokens, strict=True):
                run.extend([len(new)] if new else [])
                row.extend(new)
        base_model.synchronize(self.model)
        return BatchAnswer(token_ids, runs, stats, first_token_s, time.perf_counter() - start)


class TransformersRow:
    """transformers' `generate`, greedy with its defaults or under the settings; a batch is left-padded."""

    name = "transformers_generate"

    def __init__(self, model: PreTrainedModel, decoding: Decoding) -> None:
        self.model, self.decoding = model, decoding
        self.is_exact = not decoding.is_sampled  # it draws from a generator of its own

    def warm_up(self, batches: Iterable[Batch]) -> None:
        self._decode(next(iter(batches)), min(NUM_WARM_UP_TOKENS, self.decoding.max_new_tokens))

    def answer(self, batch: Batch) -> BatchAnswer:
        return self._decode(batch, self.decoding.max_new_tokens)

    def _decode(self, batch: Batch, max_new_tokens: int) -> BatchAnswer:
        device = self.model.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(batch.seed)
            return self._generate(batch.prompts, max_new_tokens)

    def _generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> BatchAnswer:
        eos_ids = self.decoding.eos_ids
        longest, pad_id = max(map(len, prompts)), eos_ids[0] if eos_ids else 0
        first_token_s = 0.0

        def on_token() -> None:
            nonlocal first_token_s
            if not first_token_s:
                base_model.synchronize(self.model)
                first_token_s = time.perf_counter() - start

        base_model.synchronize(self.model)
        start = time.perf_counter()
        ids_BT = torch.tensor([[pad_id] * (longest - len(row)) + list(row) for row in prompts], device=self.model.device)
        mask_BT = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=self.model.device)
        output_BT = base_model.generate_plainly(
            self.model,
            ids_BT,
            mask_BT,
            max_new_tokens=max_new_tokens,
            eos_ids=eos_ids,
            pad_id=pad_id,
            on_token=on_token,
            generation_config=self.decoding.generation_config,
        )
        answers = [cut_answer(row, frozenset(eos_ids)) for row in output_BT[:, longest:].tolist()]
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
