"""Answers with their times -> the rows of the benchmark document.

tokens_per_second = sum over prompts of (new tokens - 1) / sum of wall times after the first token.
"""

# T sequence, D hidden, V vocabulary

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from infer.acceptance_stats import AcceptanceStats
from infer.bench_rows import BatchAnswer, GeneratorRow
from infer.generate import Generator
from infer.prompts import Prompt
from medusa_heads import base_model

BASE_ROWS = ("base", "base_compiled", "transformers_generate")


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's answer by one row. decode_s: wall time after the first token; in a batch, the
    batch's, shared in proportion to the new tokens after the first."""

    token_ids: list[int]
    runs: list[int]
    stats: AcceptanceStats
    first_token_s: float
    prefill_s: float
    decode_s: float

    @property
    def num_timed_tokens(self) -> int:
        return len(self.token_ids) - 1


def split_batch(batch: BatchAnswer) -> list[Answer]:
    """The answers of a batch, its wall times shared out so that they sum to the batch's."""
    timed = [len(ids) - 1 for ids in batch.token_ids]
    total, size = sum(timed), len(timed)
    decode_s = batch.total_s - batch.first_token_s
    return [
        Answer(ids, runs, stats, batch.first_token_s, batch.first_token_s / size, decode_s * (n / total if total else 1 / size))
        for ids, runs, stats, n in zip(batch.token_ids, batch.runs, batch.stats, timed, strict=True)
    ]


def document_rows(
    answers: dict[str, list[Answer]],
    errors: dict[str, str],
    prompts: Sequence[Prompt],
    margins: dict[str, list[float | None]],
    peak_memory_bytes: dict[str, int | None],
    *,
    report_margins: bool,
) -> list[dict[str, Any]]:
    """One dict per row, in the order of `answers`, then the rows that could not run.

    margins: per row and prompt, None where the answer equals plain decoding's (see `compare`).
    """
    categories = {c: [i for i, p in enumerate(prompts) if p.category == c] for c in dict.fromkeys(p.category for p in prompts)}
    everything = range(len(prompts))
    rows: list[dict[str, Any]] = []
    for name in answers:
        figures = [_figures(name, answers, margins, chosen, report_margins=report_margins) for chosen in (everything, *categories.values())]
        by_category = dict(zip(categories, figures[1:], strict=True))
        rows.append({"drafter": name, **figures[0], "peak_memory_bytes": peak_memory_bytes[name], "by_category": by_category})
    keys = list(rows[0]) if rows else []
    return rows + [dict.fromkeys(keys) | {"drafter": name, "error": error} for name, error in errors.items()]


def _figures(
    name: str,
    answers: dict[str, list[Answer]],
    margins: dict[str, list[float | None]],
    chosen: Sequence[int],
    *,
    report_margins: bool,
) -> dict[str, Any]:
    own = [answers[name][i] for i in chosen]
    speed = tokens_per_second(own)
    base_speeds = {row: tokens_per_second([answers[row][i] for i in chosen]) for row in BASE_ROWS if row in answers}
    fastest = max((s for s in base_speeds.values() if s), default=None)
    different = [margins[name][i] for i in chosen]
    values = [margin for margin in different if margin is not None]
    stats = sum((answer.stats for answer in own), AcceptanceStats())
    return {
        "tokens_per_second": speed,
        "end_to_end_s": sum(answer.prefill_s + answer.decode_s for answer in own),
        "time_to_first_token_s": sum(answer.first_token_s for answer in own) / len(own),
        **stats.figures(),
        "num_prompts": len(own),
        "num_new_tokens": sum(len(answer.token_ids) for answer in own),
        "identical_outputs": sum(margin is None for margin in different) / len(own),
        "first_difference_margin": _summary(values) if values or report_margins else None,
        "speedup_vs_base": _ratio(speed, fastest),
        "speedup_vs_transformers_generate": _ratio(speed, base_speeds.get("transformers_generate")),
    }


def tokens_per_second(answers: Sequence[Answer]) -> float | None:
    """None where no answer has a second token."""
    num_tokens = sum(answer.num_timed_tokens for answer in answers)
    return num_tokens / sum(answer.decode_s for answer in answers) if num_tokens else None


def fastest_base(rows: Sequence[dict[str, Any]]) -> str | None:
    """The name of the base row with the most tokens per second."""
    speeds = {row["drafter"]: row["tokens_per_second"] for row in rows if row["drafter"] in BASE_ROWS and row["tokens_per_second"]}
    return max(speeds, key=lambda name: speeds[name]) if speeds else None


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if value and reference else None


def _summary(values: list[float]) -> dict[str, Any]:
    return {"values": values, "mean": sum(values) / len(values) if values else None, "max": max(values, default=None)}


def compare(
    generators: dict[str, Generator],
    answers: dict[str, list[Answer]],
    prompt_ids: Sequence[list[int]],
    *,
    batch_size: int,
    max_new_tokens: int,
    eos_ids: Sequence[int],
) -> dict[str, list[float | None]]:
    """Per row, where its answers part from plain decoding (see `first_difference_margins`).

    Plain decoding is row `base`; for a drafter on another copy of the model, whose half precision rounds
    otherwise, it is the same loop without a drafter on that copy, untimed: drafts alone are judged.
    """
    base = generators["base"]
    plain = {id(base.model): answers["base"]}
    margins = {}
    for name, own in answers.items():
        model = generators.get(name, base).model
        if id(model) not in plain:
            row = GeneratorRow(name, Generator(model), max_new_tokens=max_new_tokens, eos_ids=eos_ids)
            starts = tqdm(range(0, len(prompt_ids), batch_size), desc=f"plain decoding as {name} computes", file=sys.stderr)
            plain[id(model)] = [answer for i in starts for answer in split_batch(row.answer(prompt_ids[i : i + batch_size]))]
        margins[name] = first_difference_margins(model, prompt_ids, plain[id(model)], own)
    return margins


def first_difference_margins(
    model: PreTrainedModel, prompt_ids: Sequence[list[int]], base: Sequence[Answer], own: Sequence[Answer]
) -> list[float | None]:
    """Per prompt: None where both answers are equal, else the base model's margin where they part."""
    return [
        None if mine.token_ids == theirs.token_ids else first_difference_margin(model, prompt, theirs.token_ids, mine.token_ids)
        for prompt, theirs, mine in zip(prompt_ids, base, own, strict=True)
    ]


@torch.no_grad()
def first_difference_margin(model: PreTrainedModel, prompt: list[int], base: list[int], own: list[int]) -> float:
    """How far the two tokens at the first difference lie below the base model's best one, at most.

    Logits (LM head in float32) of one plain forward over the prompt and the common part of the two
    answers. For a near-tie that rounding decided, this is the gap between the two best tokens; a
    wrong token shows as a large margin.
    """
    common = next((i for i, (a, b) in enumerate(zip(base, own, strict=False)) if a != b), min(len(base), len(own)))
    parted = [answer[common] for answer in (base, own) if common < len(answer)]
    hidden_D = base_model.forward_hidden(model, torch.tensor([prompt + base[:common]], device=model.device))[0, -1]
    logits_V = base_model.float32_logits(model, hidden_D)
    return float(logits_V.max() - logits_V[parted].min())
