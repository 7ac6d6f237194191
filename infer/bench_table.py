"""A benchmark document -> a table for people, and plain words on what was slower than the base."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from infer.bench_figures import BASE_ROWS

MIN_WIDTH = 120  # a table written to a file is not squeezed to 80 columns


def print_table(document: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=MIN_WIDTH, highlight=False)
    console.print(_table(document), soft_wrap=False)
    for line in remarks(document):
        console.print(line, markup=False, soft_wrap=True)


def _table(document: dict[str, Any]) -> Table:
    settings, prompts = document["settings"], document["prompts"]
    table = Table(title=f"{prompts['num']} prompts, {settings['dtype']}, {settings['device']}, batch {settings['batch_size']}")
    table.add_column("row", no_wrap=True)
    for heading in ("tokens/s", "x fastest base", "x generate", "first token", "acceptance length", "drafts accepted", "same answers"):
        table.add_column(heading, justify="right")
    for row in document["rows"]:
        table.add_row(
            row["drafter"],
            _number(row["tokens_per_second"], ".1f"),
            _number(row["speedup_vs_base"], ".2f"),
            _number(row["speedup_vs_transformers_generate"], ".2f"),
            _number(row["time_to_first_token_s"], ".3f") + " s",
            _number(row["mean_acceptance_length"], ".2f"),
            _number(row["draft_acceptance_rate"], ".1%"),
            _number(row["identical_outputs"], ".1%"),
        )
    return table


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def remarks(document: dict[str, Any]) -> list[str]:
    """What a reader of the table must not overlook."""
    lines = []
    for row in document["rows"]:
        name, speedup, margin = row["drafter"], row["speedup_vs_base"], row["first_difference_margin"]
        if row.get("error"):
            lines.append(f"{name} did not run and does not count as a base: {row['error']}")
        elif name not in BASE_ROWS and speedup is not None:
            lines += slower_lines(row, document["fastest_base"])
        if margin and margin["values"]:
            lines.append(
                f"{name}: {len(margin['values'])} answers differ from base's, first at margins up to {margin['max']:.4f} in the logits"
            )
    for name, tree in document["settings"]["trees"].items():
        if not tree["num_nodes"]:
            lines.append(f"{name}: --tree auto found no tree that beats plain decoding here, so nothing was drafted")
    return lines


def slower_lines(row: dict[str, Any], fastest: str) -> list[str]:
    """Where a drafter loses against the fastest base row: altogether, or in some categories."""
    name, speedup = row["drafter"], row["speedup_vs_base"]
    if speedup < 1:
        return [f"slower than the base: {name} has {speedup:.2f} times the tokens/s of {fastest}"]
    losses = {category: figures["speedup_vs_base"] for category, figures in row["by_category"].items()}
    named = [f"{category} ({value:.2f} times)" for category, value in losses.items() if value is not None and value < 1]
    return [f"slower than the base in some categories: {name} in {', '.join(named)}"] if named else []
