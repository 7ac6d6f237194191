"""One small distillation of a tiny random model: shared by the trainer's tests, also run as a process.

As a process: `python -m tests.train.draft_model_runs OUT.pt FOLDER KEY=VALUE..`, each rank of `torchrun`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator

from medusa_heads.first_layers import copy_first_layers
from tests.tiny_models import tiny_model
from tests.train.training_runs import PACK_LENGTH, rows
from train.draft_model_config import DraftModelConfig
from train.draft_model_loss import DistilledModel
from train.draft_model_trainer import DraftModelTrainer
from train.packing import PackedDataset


def make_trainer(output: Path, *, dataset: datasets.Dataset | None = None, family: str = "llama", **options: Any) -> DraftModelTrainer:
    """A run whose `losses` are the mean KL of each step."""
    defaults: dict[str, Any] = {"layers": 1, "batch_size": 2, "epochs": 2, "learning_rate": 2e-3, "num_workers": 0, "log_every": 1}
    sizes = {"max_length": PACK_LENGTH, "pack_length": PACK_LENGTH}
    config = DraftModelConfig(output_dir=str(output), data=["unused"], **(defaults | sizes | options))
    base = tiny_model(family)
    distilled = DistilledModel(base, copy_first_layers(base, config.layers), train_embeddings=config.train_embeddings)
    packed = PackedDataset(dataset if dataset is not None else rows(), pack_length=PACK_LENGTH, num_heads=1)
    trainer = DraftModelTrainer(config, distilled, packed, Accelerator(cpu=True))
    trainer.losses = []  # type: ignore[attr-defined]
    trainer.accelerator.log = lambda figures, step: trainer.losses.append(figures["kl"])  # type: ignore[attr-defined,method-assign]
    return trainer


def result(trainer: DraftModelTrainer) -> dict[str, Any]:
    return {
        "losses": trainer.losses,  # type: ignore[attr-defined]
        "weights": {name: p.detach().clone() for name, p in trainer.trained.items()},
        "num_processes": trainer.accelerator.num_processes,
    }


def main(out: str, folder: str, *pairs: str) -> None:
    options: dict[str, Any] = {key: int(value) for key, value in (pair.split("=") for pair in pairs)}
    trainer = make_trainer(Path(folder), **options)
    trainer.train()
    if trainer.accelerator.is_main_process:
        torch.save(result(trainer), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
