"""A benchmark document -> a picture: tokens per second side by side, acceptance by depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infer.bench.table import row_label
from infer.output_file import replacing_file


def require_matplotlib() -> None:
    """Raises ValueError naming the extra when matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("drawing a picture needs matplotlib: pip install 'medusa-heads[plot]'") from None


def plot_benchmark(document: dict[str, Any], path: Path) -> None:
    """Draws the document of `bench` into the PNG `path`."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    speed_axes, acceptance_axes = figure.subplots(1, 2)
    draw_speeds(speed_axes, document)
    draw_acceptance(acceptance_axes, document)
    settings, prompts = document["settings"], document["prompts"]
    place = document["hardware"]["gpu"] or document["hardware"]["cpu"]
    figure.suptitle(
        f"{settings['base']}, {prompts['num']} prompts, {settings['dtype']}, batch {settings['batch_size']}, {place}", fontsize=10
    )
    with replacing_file(path) as work:
        figure.savefig(work, dpi=150, format="png")


def draw_speeds(axes: Any, document: dict[str, Any]) -> None:
    """One bar per row that ran; rows that draft stand out."""
    rows = [row for row in document["rows"] if row["tokens_per_second"]]
    colours = ["tab:orange" if row["num_drafted_tokens"] else "tab:gray" for row in rows]
    bars = axes.barh([row_label(row) for row in rows], [row["tokens_per_second"] for row in rows], color=colours)
    axes.bar_label(bars, labels=[_bar_label(row) for row in rows], padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.4)  # room for the labels
    axes.set_xlabel("tokens per second after the first")
    axes.set_title("speed (× fastest base row)", fontsize=10)


def _bar_label(row: dict[str, Any]) -> str:
    speedup = row["speedup_vs_base"]
    return f"{row['tokens_per_second']:.1f}" + (f"  (×{speedup:.2f})" if speedup else "")


def draw_acceptance(axes: Any, document: dict[str, Any]) -> None:
    """One line per drafter: the share of steps in which depth d was accepted."""
    rows = [row for row in document["rows"] if row["num_drafted_tokens"]]
    deepest = max((len(row["acceptance_by_depth"]) for row in rows), default=0)
    for row in rows:
        shares = row["acceptance_by_depth"] + [0.0] * (deepest - len(row["acceptance_by_depth"]))
        axes.plot(range(1, deepest + 1), shares, marker="o", label=f"{row_label(row)} (length {row['mean_acceptance_length']:.2f})")
    if rows:
        axes.legend(fontsize=9)
        axes.set_xticks(range(1, deepest + 1))
    axes.set_ylim(0, 1)
    axes.set_xlabel("depth in the tree")
    axes.set_ylabel("share of steps")
    axes.set_title("accepted at depth", fontsize=10)
