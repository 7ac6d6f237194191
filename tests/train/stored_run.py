"""A small training run from stored hidden states: shared by their tests, also run as a process.

As a process: `python -m tests.train.stored_run FOLDER`, each rank of `torchrun`, also under what the launcher sets for accelerate's
FSDP2; both kinds of store in turn.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from tests.train.training_runs import make_trainer, result
from train import state_manifest
from train.sharding import start_sharding
from train.trainer import Trainer


def stored(tmp_path: Path, where: str, *, name: str = "run", **options: Any) -> Trainer:
    folder: dict[str, Any] = {"hidden_states_dir": str(tmp_path / "states")} if where == "disk" else {}
    return make_trainer(tmp_path / name, hidden_states=where, **folder, **options)


def count_rows_made(trainer: Trainer) -> list[int]:
    """Grows by the number of rows of every forward of the base, empty packs aside."""
    counts: list[int] = []
    real = trainer.headed.hidden_states
    trainer.headed.hidden_states = lambda ids, *rest: (counts.append(int(ids.any(1).sum())), real(ids, *rest))[1]  # type: ignore[method-assign,assignment,func-returns-value]
    return counts


def main(folder: str) -> None:
    start_sharding(Accelerator(cpu=True))
    state_manifest.SHARD_BYTES = 100 * 32 * 4
    for where in ("device", "disk"):
        trainer = stored(Path(folder), where, name=where, batch_size=2, objective="kl", epochs=3)
        made = count_rows_made(trainer)
        trainer.train()
        torch.save(result(trainer) | {"rows_made": sum(made)}, f"{folder}/{where}-{trainer.accelerator.process_index}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
