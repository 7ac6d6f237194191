"""Answers with their times -> the rows of the benchmark document.

tokens_per_second = sum over prompts of (new tokens - 1) / sum of wall times after the first token.
time_per_token_s = seconds between two tokens as the reader of one answer sees them, averaged over tokens; at batch 1
one over the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.acceptance_stats import AcceptanceStats
from infer.bench.compare import Difference, Differences
from infer.bench.measure import Answer, Measured
from infer.bench.quality import quality_figures
from infer.bench.rows import BenchRow, GeneratorRow
from infer.prompts import Prompt

BASE_ROWS = ("base", "base_compiled", "transformers_generate")


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found out about the answers after the clock stopped, by row. differences: see `compare`; right: per
    prompt, see `judge`; profiles: see `profile_rows`. report_margins: also where nothing differs."""

    differences: Differences
    right: dict[str, list[bool | None]] = field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
    report_margins: bool = False


def document_rows(measured: Measured, findings: Findings, prompts: Sequence[Prompt], rows: Sequence[BenchRow]) -> list[dict[str, Any]]:
    """One dict per row, in the order of the answers, then the rows that could not run."""
    categories = {c: [i for i, p in enumerate(prompts) if p.category == c] for c in dict.fromkeys(p.category for p in prompts)}
    described = {row.name: describe_row(row) for row in rows}
    document: list[dict[str, Any]] = []
    for name in measured.answers:
        figures = [_figures(name, measured, findings, prompts, chosen) for chosen in (range(len(prompts)), *categories.values())]
        document.append(
            {
                "drafter": name,
                **described[name],
                **figures[0],
                "profile": findings.profiles.get(name),
                "peak_memory_bytes": measured.peak_memory_bytes[name],
                "by_category": dict(zip(categories, figures[1:], strict=True)),
            }
        )
    keys = list(document[0]) if document else []
    return document + [dict.fromkeys(keys) | {"drafter": name, "error": error} for name, error in measured.errors.items()]


def describe_row(row: BenchRow) -> dict[str, Any]:
    """verifier: what judged the drafts (sample-and-match: greedy ones too, by the argmax), None where nothing is drafted; lossless:
    whether the text has the base's own law."""
    drafts = isinstance(row, GeneratorRow) and row.generator.drafter.max_nodes > 0
    return {
        "verifier": row.verifier if drafts and isinstance(row, GeneratorRow) else None,
        "lossless": row.is_lossless if isinstance(row, GeneratorRow) else True,
    }


def _figures(name: str, measured: Measured, findings: Findings, prompts: Sequence[Prompt], chosen: Sequence[int]) -> dict[str, Any]:
    own = [measured.answers[name][i] for i in chosen]
    speed = tokens_per_second(own)
    base_speeds = {row: tokens_per_second([measured.answers[row][i] for i in chosen]) for row in BASE_ROWS if row in measured.answers}
    fastest = max((s for s in base_speeds.values() if s), default=None)
    stats = sum((answer.stats for answer in own), AcceptanceStats())
    right = findings.right.get(name)
    return {
        "tokens_per_second": speed,
        "end_to_end_s": sum(answer.prefill_s + answer.decode_s for answer in own),
        "time_to_first_token_s": sum(answer.first_token_s for answer in own) / len(own),
        "time_per_token_s": time_per_token(own),
        **stats.figures(),
        "num_prompts": len(own),
        "num_new_tokens": sum(len(answer.token_ids) for answer in own),
        **_equality(findings, name, chosen),
        "speedup_vs_base": _ratio(speed, fastest),
        "speedup_vs_transformers_generate": _ratio(speed, base_speeds.get("transformers_generate")),
        "quality": quality_figures([prompts[i] for i in chosen], [right[i] for i in chosen]) if right else None,
    }


def _equality(findings: Findings, name: str, chosen: Sequence[int]) -> dict[str, Any]:
    """None for a row that draws its tokens otherwise than plain decoding."""
    if name not in findings.differences:
        return {"identical_outputs": None, "first_difference_margin": None}
    different: list[Difference | None] = [findings.differences[name][i] for i in chosen]
    margins = [difference.margin for difference in different if difference is not None and difference.margin is not None]
    return {
        "identical_outputs": sum(difference is None for difference in different) / len(different),
        "first_difference_margin": _summary(margins) if margins or findings.report_margins else None,
    }


def tokens_per_second(answers: Sequence[Answer]) -> float | None:
    """None where no answer has a second token."""
    num_tokens = sum(answer.num_timed_tokens for answer in answers)
    return num_tokens / sum(answer.decode_s for answer in answers) if num_tokens else None


def time_per_token(answers: Sequence[Answer]) -> float | None:
    """None where no answer has a second token."""
    num_tokens = sum(answer.num_timed_tokens for answer in answers)
    return sum(answer.num_timed_tokens * answer.token_s for answer in answers) / num_tokens if num_tokens else None


def fastest_base(rows: Sequence[dict[str, Any]]) -> str | None:
    """The name of the base row with the most tokens per second."""
    speeds = {row["drafter"]: row["tokens_per_second"] for row in rows if row["drafter"] in BASE_ROWS and row["tokens_per_second"]}
    return max(speeds, key=lambda name: speeds[name]) if speeds else None


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if value and reference else None


def _summary(values: list[float]) -> dict[str, Any]:
    return {"values": values, "mean": sum(values) / len(values) if values else None, "max": max(values, default=None)}
