"""A benchmark document -> tables for people, and plain words on what was slower than the base."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from infer.bench.figures import BASE_ROWS
from infer.stage_timer import STAGES

MIN_WIDTH = 140  # a table written to a file is not squeezed to 80 columns


def print_tables(document: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=MIN_WIDTH, highlight=False)
    for table in tables(document):
        console.print(table, soft_wrap=False)
    for line in remarks(document):
        console.print(line, markup=False, soft_wrap=True)


def tables(document: dict[str, Any]) -> list[Table]:
    """Speed and acceptance; then by category, quality and profile where there is something to show."""
    rows = [row for row in document["rows"] if not row.get("error")]
    found = [speed_table(document)]
    if len(categories(rows)) > 1:
        found.append(category_table(rows))
    if any(row["quality"] for row in rows):
        found.append(quality_table(rows))
    if any(row["profile"] for row in rows):
        found.append(profile_table(rows))
    return found


def new_table(title: str, *headings: str) -> Table:
    """The first column names what a line is about, the others hold figures."""
    table = Table(title=title)
    table.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    return table


def row_label(row: dict[str, Any]) -> str:
    """A row's name, marked where its text does not follow the base model's own law."""
    return row["drafter"] + (" (lossy)" if row.get("lossless") is False else "")


def number(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else format(value, spec) + unit


def milliseconds(seconds: float | None) -> str:
    return number(None if seconds is None else 1000 * seconds, ".1f", " ms")


def speed_table(document: dict[str, Any]) -> Table:
    settings, prompts = document["settings"], document["prompts"]
    title = f"{prompts['num']} prompts, {settings['dtype']}, {settings['device']}, batch {settings['batch_size']}, {settings['decoding']}"
    table = new_table(
        title,
        "row",
        "tokens/s",
        "x fastest base",
        "x generate",
        "per token",
        "first token",
        "acceptance length",
        "drafts accepted",
        "same answers",
    )
    for row in document["rows"]:
        table.add_row(
            row_label(row),
            number(row["tokens_per_second"], ".1f"),
            number(row["speedup_vs_base"], ".2f"),
            number(row["speedup_vs_transformers_generate"], ".2f"),
            milliseconds(row["time_per_token_s"]),
            milliseconds(row["time_to_first_token_s"]),
            number(row["mean_acceptance_length"], ".2f"),
            number(row["draft_acceptance_rate"], ".1%"),
            number(row["identical_outputs"], ".1%"),
        )
    return table


def categories(rows: list[dict[str, Any]]) -> list[str]:
    return list(rows[0]["by_category"]) if rows else []


def category_table(rows: list[dict[str, Any]]) -> Table:
    """Speed-ups of the rows that draft, by category."""
    drafting = [row for row in rows if row["drafter"] not in BASE_ROWS]
    table = new_table("x fastest base, by category (slower: speculation does not pay there)", "category", *map(row_label, drafting))
    for category in categories(rows):
        table.add_row(category, *(speedup(row["by_category"][category]["speedup_vs_base"]) for row in drafting))
    return table


def speedup(value: float | None) -> str:
    return number(value, ".2f", " slower" if value is not None and value < 1 else "")


def quality_table(rows: list[dict[str, Any]]) -> Table:
    """What was accepted and rejected, how long it took and how much of it was right, on the same prompts."""
    kinds = {row["quality"]["kind"] for row in rows if row["quality"]}
    table = new_table(
        f"quality ({', '.join(sorted(kinds))})", "row", "accepted", "rejected", "per token", "first token", "tokens/s", "right", "accuracy"
    )
    for row in rows:
        quality = row["quality"]
        table.add_row(
            row_label(row),
            number(row["num_accepted_tokens"], "d"),
            number(row["num_rejected_tokens"], "d"),
            milliseconds(row["time_per_token_s"]),
            milliseconds(row["time_to_first_token_s"]),
            number(row["tokens_per_second"], ".1f"),
            f"{quality['num_right']} of {quality['num']}" if quality else "-",
            number(quality["accuracy"] if quality else None, ".1%"),
        )
    return table


def profile_table(rows: list[dict[str, Any]]) -> Table:
    """Milliseconds of a step by stage. Outside the forward: all but the base's layers and its LM head (`logits`)."""
    table = new_table("ms per step", "row", *STAGES, "total", "outside the base forward", "with the LM head")
    for row in rows:
        profile = row["profile"]
        if profile and profile["num_steps"]:
            table.add_row(
                row_label(row),
                *(number(profile["ms_per_step"][stage], ".2f") for stage in STAGES),
                number(profile["ms_per_step_total"], ".2f"),
                number(profile["share_outside_base_forward"], ".1%"),
                number(profile["share_outside_base_layers"], ".1%"),
            )
    return table


def remarks(document: dict[str, Any]) -> list[str]:
    """What a reader of the tables must not overlook."""
    lines = []
    for row in document["rows"]:
        name, same, margin = row["drafter"], row["identical_outputs"], row["first_difference_margin"]
        if row.get("error"):
            lines.append(f"{name} did not run and does not count as a base: {row['error']}")
        elif name not in BASE_ROWS and row["speedup_vs_base"] is not None:
            lines += slower_lines(row, document["fastest_base"])
        if row.get("lossless") is False:
            lines.append(f"{name} is lossy: its text does not follow the base model's own law")
        if same is not None and same < 1:
            margins = f", first at margins up to {margin['max']:.4f} in the logits" if margin and margin["values"] else ""
            lines.append(f"{name}: {round((1 - same) * row['num_prompts'])} answers differ from plain decoding's{margins}")
    drafted = {row["drafter"]: row["num_drafted_tokens"] for row in document["rows"]}
    for name in document["settings"]["step_seconds"]:
        if drafted[name] == 0:
            lines.append(f"{name} drafted nothing: with --tree auto nothing that it could draft here beats plain decoding")
    if document["settings"].get("quality") and document["settings"]["decoding"] == "greedy":
        lines.append("typical acceptance (lossy) exists for sampling only: give --temperature to see its quality as well")
    return lines


def slower_lines(row: dict[str, Any], fastest: str) -> list[str]:
    """Where a drafter loses against the fastest base row: altogether, and in which categories."""
    name, speedup = row["drafter"], row["speedup_vs_base"]
    if speedup < 1:
        return [f"slower than the base: {name} has {speedup:.2f} times the tokens/s of {fastest}"]
    losses = {category: figures["speedup_vs_base"] for category, figures in row["by_category"].items()}
    named = [f"{category} ({value:.2f} times)" for category, value in losses.items() if value is not None and value < 1]
    return [f"slower than the base in some categories: {name} in {', '.join(named)}"] if named else []
