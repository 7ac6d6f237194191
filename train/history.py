"""Figures of a training run -> history.jsonl, the tracker, and a picture at the end.

A line of history.jsonl holds `step` and the figures known after it: of training (loss, slot1/top1, ...)
or of a validation (validation/acceptance_length, ...).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from infer.output_file import remove_leftovers, replacing_file, write_text
from medusa_heads.json_text import parse_json

FILE_NAME = "history.jsonl"
PLOT_NAME = "history.png"
ACCEPTANCE = "validation/acceptance_length"
EXPECTED = "validation/expected_acceptance_length"


class History:
    """Keeps what is logged. Every process may call it; the main one writes."""

    def __init__(self, output_dir: Path, accelerator: Accelerator) -> None:
        self.path, self.accelerator = output_dir / FILE_NAME, accelerator
        self.tracker_failed = False

    def go_back(self, step: int) -> None:
        """Drops what is beyond `step`, and a line that a kill cut short: the resumed run writes these again.

        Raises ValueError when the file cannot be written.
        """
        if not self.accelerator.is_main_process:
            return
        with self._explained():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self.path.exists():
                return
            remove_leftovers(self.path)
            rows = [row for row in read_history(self.path) if row["step"] <= step]
            write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def record(self, figures: dict[str, float], step: int) -> None:
        """Raises ValueError when the file cannot be written. A tracker that fails costs a warning, once: the file has the figures."""
        if not self.accelerator.is_main_process:
            return
        row = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        with self._explained(), self.path.open("a") as file:
            file.write(json.dumps({"step": step} | row) + "\n")
        try:
            self.accelerator.log(figures, step=step)
        except Exception as error:  # whatever it is, hours of training are not thrown away for it
            self._tell_once(error)

    def finish(self) -> None:
        """Lets the tracker end its run."""
        for tracker in self.accelerator.trackers:
            try:
                tracker.finish()
            except Exception as error:
                self._tell_once(error)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns a full disk into an error for the user."""
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"cannot write to {self.path} ({error.strerror}): make room and start again, the run goes on from its last checkpoint"
            ) from error

    def _tell_once(self, error: Exception) -> None:
        if not self.tracker_failed:
            print(f"warning: the tracker failed ({error!r}): the run goes on, {self.path} has the figures", file=sys.stderr)
        self.tracker_failed = True


def read_history(path: Path) -> list[dict[str, Any]]:
    """The rows of a history.jsonl; a last line that was cut short is left out."""
    rows = []
    for line in path.read_text(errors="replace").split("\n")[:-1]:
        try:
            row = parse_json(line)
        except ValueError:  # cut by a full disk
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def plot_history(output_dir: Path) -> Path:
    """Draws history.jsonl into history.png: loss, what slots get right, acceptance. Raises ValueError without matplotlib."""
    from infer.bench.report import require_matplotlib

    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_history(output_dir / FILE_NAME)
    slots = [name.removesuffix("/top1") for name in rows[0] if name.endswith("/top1")] if rows else []
    overlaps = {f"{slot}/overlap": f"{slot} overlap" for slot in slots}
    acceptance = {ACCEPTANCE: "decoded", EXPECTED: "expected"}
    validated = any(row.get(name) is not None for row in rows for name in acceptance)
    figure = Figure(figsize=(14 if validated else 9.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, slot_axes, *acceptance_axes = figure.subplots(1, 3 if validated else 2)
    _draw(loss_axes, rows, {"loss": "loss"}, "loss, summed over slots")
    _draw(slot_axes, rows, {f"{slot}/top1": f"{slot} top-1" for slot in slots}, "share of positions where a slot is right")
    _draw(slot_axes, rows, overlaps, "share of positions where a slot is right", style=":")
    for axes in acceptance_axes:
        _draw(axes, rows, acceptance, "acceptance length on validation", style="o-")
    path = output_dir / PLOT_NAME
    remove_leftovers(path)
    with replacing_file(path) as work:
        figure.savefig(work, dpi=120, format="png")
    return path


def _draw(axes: Any, rows: list[dict[str, Any]], lines: dict[str, str], title: str, *, style: str = "-") -> None:
    """One line per figure that was logged."""
    for name, label in lines.items():
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("optimizer step")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)
