"""One small training run on a tiny random model: shared by the trainer's tests, also run as a process.

As a process: `python -m tests.train.training_runs OUT.pt FOLDER KEY=VALUE..`, each rank of `torchrun`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator

from medusa_heads.heads import create_heads
from tests.tiny_models import tiny_model
from train.config import TrainConfig
from train.headed_model import HeadedModel
from train.objectives import Objective
from train.packing import PackedDataset
from train.trainer import Trainer

PACK_LENGTH = 64


def rows(count: int = 24, seed: int = 0) -> datasets.Dataset:
    """Random conversations of 8 to 40 tokens, the last three quarters supervised."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for index in range(count):
        length = int(torch.randint(8, 41, (1,), generator=generator))
        ids = torch.randint(3, 300, (length,), generator=generator).tolist()
        documents.append({"input_ids": ids, "assistant_mask": [i >= length // 4 for i in range(length)], "id": f"conversation-{index}"})
    return datasets.Dataset.from_list(documents)


def make_trainer(
    output: Path, *, dataset: datasets.Dataset | None = None, family: str = "llama", seed_heads: int | None = None, **options: Any
) -> Trainer:
    """seed_heads: draws the heads' first weights instead of the zeros of a fresh run."""
    defaults: dict[str, Any] = {"num_heads": 3, "batch_size": 2, "epochs": 2, "learning_rate": 0.01, "num_workers": 0, "log_every": 1}
    config = TrainConfig(output_dir=str(output), data=["unused"], max_length=PACK_LENGTH, pack_length=PACK_LENGTH, **(defaults | options))
    base = tiny_model(family)
    heads = create_heads(config.heads_config(), base)
    if seed_heads is not None:
        torch.nn.init.normal_(heads.weight, std=0.1, generator=torch.Generator().manual_seed(seed_heads))
    packed = PackedDataset(dataset if dataset is not None else rows(), pack_length=PACK_LENGTH, num_heads=config.num_heads)
    headed = HeadedModel(base, heads, objective=Objective(config.objective, config.lk_eta), d_pace=config.slot_weights == "d_pace")
    trainer = Trainer(config, headed, packed, Accelerator(cpu=True))
    trainer.losses = []  # type: ignore[attr-defined]
    trainer.accelerator.log = lambda figures, step: trainer.losses.extend([figures["loss"]] if "loss" in figures else [])  # type: ignore[attr-defined,method-assign]
    return trainer


def result(trainer: Trainer) -> dict[str, Any]:
    return {
        "losses": trainer.losses,  # type: ignore[attr-defined]
        "heads": {name: p.detach().clone() for name, p in trainer.heads.named_parameters()},
        "num_processes": trainer.accelerator.num_processes,
        "distributed_type": str(trainer.accelerator.distributed_type),
    }


def main(out: str, folder: str, *pairs: str) -> None:
    options: dict[str, Any] = {key: int(value) if value.isdigit() else value for key, value in (pair.split("=") for pair in pairs)}
    trainer = make_trainer(Path(folder), **options)
    trainer.train()
    if trainer.accelerator.is_main_process:
        torch.save(result(trainer), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
