"""What `medusa-heads tree` measured -> a table, and a picture of the curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infer.bench.report import require_matplotlib
from infer.output_file import replacing_file

STYLES = {"beam": "-", "static": "--"}


def print_tuning(document: dict[str, Any]) -> None:
    """Tokens per second by tree and context of the copy of the base that was chosen; the choice is marked."""
    choice, settings = document["choice"], document["settings"]
    speeds = {
        (row["kind"], row["num_nodes"], row["context"]): row["expected_tokens_per_second"] for row in _chosen_engine(document, "curve")
    }
    table = Table(title=f"expected tokens per second, batch {settings['batch_size']}, {settings['num_positions']} positions")
    for heading in ("tree", "acceptance length", *(f"context {context}" for context in settings["contexts"]), "all contexts"):
        table.add_column(heading, justify="right")
    for row in _chosen_engine(document, "summary"):
        kind, num_nodes = row["kind"], row["num_nodes"]
        chosen = (kind, num_nodes) == (choice["kind"], choice["num_nodes"])
        table.add_row(
            tree_name(row) + (" *" if chosen else ""),
            f"{row['expected_acceptance_length']:.2f}",
            *(f"{speeds[kind, num_nodes, context]:.1f}" for context in settings["contexts"]),
            f"{row['expected_tokens_per_second']:.1f}",
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(f"* chosen: {tree_name(choice)}, {choice['expected_tokens_per_second']:.1f} tokens/s expected", markup=False)


def tree_name(row: dict[str, Any]) -> str:
    return f"{row['kind']}:{row['num_nodes']}" if row["num_nodes"] else "no tree"


def _chosen_engine(document: dict[str, Any], part: str) -> list[dict[str, Any]]:
    return [row for row in document[part] if row["engine"] == document["choice"]["engine"]]


def plot_tuning(document: dict[str, Any], path: Path) -> None:
    """Draws the document of `tree` into the PNG `path`."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    speed_axes, time_axes, acceptance_axes = figure.subplots(1, 3)
    draw_curves(speed_axes, document, lambda row: row["expected_tokens_per_second"])
    choice = document["choice"]
    speed_axes.axvline(choice["num_nodes"], color="gray", linewidth=0.8)
    speed_axes.set_title(f"tokens per second (chosen: {tree_name(choice)})", fontsize=10)
    draw_curves(time_axes, document, lambda row: 1000 * (row["draft_s"] + row["forward_s"]))
    time_axes.set_title("milliseconds per step", fontsize=10)
    draw_acceptance(acceptance_axes, document)
    settings = document["settings"]
    place = document["hardware"]["gpu"] or document["hardware"]["cpu"]
    figure.suptitle(f"{settings['base']}, {settings['dtype']}, batch {settings['batch_size']}, {place}", fontsize=10)
    with replacing_file(path) as work:
        figure.savefig(work, dpi=150, format="png")


def draw_curves(axes: Any, document: dict[str, Any], value: Any) -> None:
    """One line per kind of tree and context, over the nodes."""
    rows = _chosen_engine(document, "curve")
    for index, context in enumerate(document["settings"]["contexts"]):
        for kind, style in STYLES.items():
            points = [(row["num_nodes"], value(row)) for row in rows if (row["kind"], row["context"]) == (kind, context)]
            if points:
                axes.plot(*zip(*points, strict=True), style, color=f"C{index}", marker=".", label=f"{kind}, context {context}")
    axes.set_xlabel("nodes besides the root")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def draw_acceptance(axes: Any, document: dict[str, Any]) -> None:
    """Expected acceptance length over the nodes, one line per kind of tree."""
    rows = _chosen_engine(document, "summary")
    for kind, style in STYLES.items():
        points = [(row["num_nodes"], row["expected_acceptance_length"]) for row in rows if row["kind"] == kind]
        if points:
            axes.plot(*zip(*points, strict=True), style, marker=".", label=kind)
    axes.set_xlabel("nodes besides the root")
    axes.set_title("expected acceptance length", fontsize=10)
    axes.legend(fontsize=8)
