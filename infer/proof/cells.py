"""A measurement in named cells -> one JSON file per cell: finished ones are not repeated, several run at a time."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from infer.made_with import refuse_other_settings
from infer.output_file import write_text
from medusa_heads.arguments import require_positive

POLL_SECONDS = 0.2


class Work(Protocol):
    """What fills cells. Sent to the worker processes, so it must be picklable."""

    def cells(self, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Loads what it needs once, then yields (name, result) for each of `names`."""
        ...


def run_cells(work: Work, names: Sequence[str], folder: Path, *, settings: dict[str, Any], num_processes: int = 1) -> list[dict[str, Any]]:
    """The results of all cells, in the order of `names`; those stored in `folder` already are only read.

    settings: what the results depend on (made_with.py), stored with each. num_processes: on a GPU a step is bound by its launch
    from Python, so several processes share one. Raises ValueError where `folder` holds results of others.
    """
    require_positive(num_processes=num_processes)
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not is_finished(folder / f"{name}.json", settings)]
    with tqdm(total=len(names), initial=len(names) - len(missing), unit="cell", file=sys.stderr) as bar:
        if num_processes == 1:
            for _ in store_cells(work, missing, folder, settings):
                bar.update()
        elif missing:
            run_processes(work, missing, folder, settings, num_processes, bar)
    return [json.loads((folder / f"{name}.json").read_text())["result"] for name in names]


def is_finished(path: Path, settings: dict[str, Any]) -> bool:
    if not path.exists():
        return False
    refuse_other_settings(path.parent, json.loads(path.read_text()), settings)
    return True


def store_cells(work: Work, names: Sequence[str], folder: Path, settings: dict[str, Any]) -> Iterator[str]:
    if names:
        for name, result in work.cells(names):
            write_text(folder / f"{name}.json", json.dumps(settings | {"result": result}) + "\n")
            yield name


def run_share(work: Work, names: Sequence[str], folder: Path, settings: dict[str, Any]) -> None:
    """One worker process."""
    from medusa_heads.base_model import quiet_transformers

    quiet_transformers()
    for _ in store_cells(work, names, folder, settings):
        pass


def run_processes(work: Work, missing: Sequence[str], folder: Path, settings: dict[str, Any], num_processes: int, bar: tqdm) -> None:
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    shares = [missing[first::num_processes] for first in range(min(num_processes, len(missing)))]
    processes = [context.Process(target=run_share, args=(work, share, folder, settings), daemon=True) for share in shares]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        bar.update(bar.total - sum(not (folder / f"{name}.json").exists() for name in missing) - bar.n)
        time.sleep(POLL_SECONDS)
    bar.update(bar.total - bar.n)
    failed = [share for share, process in zip(shares, processes, strict=True) if process.exitcode]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(shares)} worker processes failed, see above; run again to go on")
