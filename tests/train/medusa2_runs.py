"""One small run of heads and adapter on a tiny random model: shared by the tests, also run as a process (as training_runs.py is)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator

from medusa_heads.heads import create_heads
from tests.tiny_models import tiny_model
from tests.train.training_runs import PACK_LENGTH, rows
from train.config import TrainConfig
from train.medusa2 import Medusa2Trainer, tuned_model
from train.objectives import Objective
from train.packing import PackedDataset


def make_trainer(output: Path, *, dataset: datasets.Dataset | None = None, family: str = "llama", **options: Any) -> Medusa2Trainer:
    defaults: dict[str, Any] = {"num_heads": 3, "batch_size": 2, "epochs": 2, "learning_rate": 0.01, "num_workers": 0, "log_every": 1}
    lora: dict[str, Any] = {"lora_rank": 4, "lora_start_ratio": 0.34}
    sizes: dict[str, Any] = {"max_length": PACK_LENGTH, "pack_length": PACK_LENGTH}
    config = TrainConfig(output_dir=str(output), data=["unused"], **(sizes | defaults | lora | options))
    base = tiny_model(family)
    heads = create_heads(config.heads_config(), base)
    torch.manual_seed(0)  # peft draws the adapter's first weights
    model = tuned_model(config)(base, heads, objective=Objective(config.objective, config.lk_eta))
    packed = PackedDataset(rows() if dataset is None else dataset, pack_length=PACK_LENGTH, num_heads=3)
    trainer = Medusa2Trainer(config, model, packed, Accelerator(cpu=True))
    trainer.figures = []  # type: ignore[attr-defined]
    trainer.accelerator.log = lambda figures, step: trainer.figures.append(figures)  # type: ignore[attr-defined,method-assign]
    return trainer


def result(trainer: Medusa2Trainer) -> dict[str, Any]:
    return {
        "losses": [figures["loss"] for figures in trainer.figures],  # type: ignore[attr-defined]
        "weights": {name: p.detach().clone() for name, p in trainer.trained.named_parameters()},
        "num_processes": trainer.accelerator.num_processes,
        "distributed_type": str(trainer.accelerator.distributed_type),
    }


def main(out: str, folder: str) -> None:
    trainer = make_trainer(Path(folder), batch_size=2)
    trainer.train()
    if trainer.accelerator.is_main_process:
        torch.save(result(trainer), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
