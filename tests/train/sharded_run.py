"""Training runs with a sharded base, over gloo; in one process the same runs with a whole one.

As a process: `python -m tests.train.sharded_run OUT FOLDER [options of python -m train]`, each rank of `torchrun`, under what the launcher
sets for accelerate's FSDP2 or DeepSpeed. The last run is the whole program with these options.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from tests.tiny_models import tiny_model
from tests.train import medusa2_runs
from tests.train.training_runs import PACK_LENGTH, make_trainer, rows
from train import peer_shards, zero
from train.__main__ import main as train
from train.acceptance import Validation, decode
from train.history import read_history
from train.packing import PackedDataset
from train.peer_shards import PeerGather
from train.run_state import checkpoint_folder
from train.sharding import in_lock_step, start_sharding, whole
from train.trainer import Trainer

ROWS = 8  # in an optimizer step, over all processes
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]  # not a multiple of the processes
KILLED_AT = 2
NUMBERS = itertools.count()  # the same in all processes


def plain(
    folder: Path, num_processes: int, own_lm_head: bool = False, inspect: Callable[[nn.Module], Any] = lambda headed: None
) -> dict[str, Any]:
    """Two micro-batches a step; gradients are clipped. inspect: looks at the model before and after."""
    sizes: dict[str, Any] = {"batch_size": ROWS // num_processes // 2, "gradient_accumulation_steps": 2}
    trainer = make_trainer(folder, own_lm_head=own_lm_head, objective="kl", seed_heads=0, max_grad_norm=0.05, num_layers=2, **sizes)
    shares, before = {name: share(weight) for name, weight in trainer.headed.named_parameters()}, inspect(trainer.headed)
    trainer.train()
    return outcome(trainer) | {"shares": shares, "moments": num_moments(trainer), "inspected": (before, inspect(trainer.headed))}


def copied(folder: Path, num_processes: int) -> dict[str, Any]:
    """As `plain`, every layer gathered by copies from memory that both processes see."""
    with SharedFiles(folder.parent) as files:
        found = plain(folder, num_processes, inspect=files.hold_all_shards)
        return found | {"copies": files.gathers_by_copies}


def uneven(folder: Path, num_processes: int) -> dict[str, Any]:
    """Weights of 5 rows and of 1, whose shards are padded for two processes, and copies that one of them cannot make."""
    kinds = ("well", "another layout", "no room")
    return {kind: uneven_layers(folder, num_processes, fails="" if PartialState().is_main_process else kind) for kind in kinds}


def uneven_layers(folder: Path, num_processes: int, *, fails: str) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).requires_grad_(False)
    inputs = torch.randn(4, 3)
    wanted, in_order, equal = layers(inputs), peer_shards._own_parameters, []
    with SharedFiles(folder.parent) as files:
        if fails == "another layout":
            files.patch.setattr(peer_shards, "_own_parameters", lambda unit: reversed(list(in_order(unit))))
        files.is_full = fails == "no room"
        if num_processes > 1:
            fully_shard(layers, mesh=init_device_mesh("cpu", (num_processes,)))
            peer_shards.share_shards(Accelerator(cpu=True), layers, memory=files)
        for _ in range(2):
            equal.append(torch.equal(layers(inputs), wanted))
            if isinstance(layers, FSDPModule):
                layers.reshard()
        return {"equal": equal, "copies": files.gathers_by_copies}


class SharedFiles:
    """Within the block shards lie in files that all processes map, as GPUs of one host map each other's memory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.patch, self.gathers, self.is_full = folder, pytest.MonkeyPatch(), list[PeerGather](), False

    def __enter__(self) -> SharedFiles:
        def gather(shards: list[Tensor]) -> PeerGather:
            self.gathers.append(PeerGather(shards))
            return self.gathers[-1]

        self.patch.setattr(peer_shards, "PeerGather", gather)
        self.patch.setattr("train.sharding.share_shards", partial(peer_shards.share_shards, memory=self))
        return self

    def __exit__(self, *exception: object) -> None:
        self.patch.undo()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.number = next(NUMBERS)
        if self.is_full:
            raise torch.OutOfMemoryError("no room")
        return self.file(PartialState().process_index, numel, dtype)

    def exchange(self, own: Tensor, group: ProcessGroup) -> list[Tensor]:
        return [own if rank == group.rank() else self.file(rank, own.numel(), own.dtype) for rank in range(group.size())]

    def file(self, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.from_file(str(self.folder / f"shard-{self.number}-{rank}"), shared=True, size=numel, dtype=dtype)

    def hold_all_shards(self, headed: nn.Module) -> bool:
        """Whether every shard of the base, as FSDP2 keeps it too, is in these files and nowhere else."""
        own = {gather.shards[PartialState().process_index].untyped_storage().data_ptr() for gather in self.gathers if gather.shards}
        groups: list[Any] = [unit._get_fsdp_state()._fsdp_param_group for unit in headed.modules() if isinstance(unit, FSDPModule)]
        kept = [parameter._sharded_param_data for group in groups for parameter in group.fsdp_params]
        with torch.no_grad():
            shards = [weight.to_local() for weight in headed.parameters() if isinstance(weight, DTensor)]
        return len(kept) == len(shards) and {shard.untyped_storage().data_ptr() for shard in [*shards, *kept]} == own

    @property
    def gathers_by_copies(self) -> list[bool]:
        """Of every unit."""
        return [gather.is_checked and gather.shards is not None for gather in self.gathers]


def validated(folder: Path, num_processes: int) -> dict[str, Any]:
    """Decodes before and while it trains; killed after a checkpoint and resumed."""
    answers = PackedDataset(rows(4, seed=7), pack_length=PACK_LENGTH, num_heads=3)
    options: dict[str, Any] = {
        "batch_size": ROWS // num_processes,
        "seed_heads": 0,
        "save_every": KILLED_AT,
        "keep_checkpoints": 9,
        "validate_every": 2,
        "held_out": 1,
    }
    trainer = make_trainer(folder, **options)
    before: list[list[int]] = []
    with in_lock_step(trainer.accelerator, trainer.headed):
        if trainer.accelerator.is_main_process:
            before = decode(trainer.headed, Validation(PROMPTS[:1], (2,))).tolist()
    trainer.train(Validation(PROMPTS, (2,), answers=answers))
    if trainer.accelerator.is_main_process:
        for step in range(KILLED_AT + 1, trainer.num_steps + 1):
            shutil.rmtree(checkpoint_folder(folder, step), ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    resumed = make_trainer(folder, **options)
    resumed.train(Validation(PROMPTS, (2,), answers=answers))
    figures = [{name: value for name, value in row.items() if "second" not in name} for row in read_history(folder / "history.jsonl")]
    measured = {"before": before, "figures": figures, "validations": [tuple(found) for found in trainer.validations.measured]}
    return outcome(trainer) | {"resumed": outcome(resumed)} | measured


def tuned(folder: Path, num_processes: int) -> dict[str, Any]:
    """Gathered by copies, for the backward pass too."""
    with SharedFiles(folder.parent) as files:
        trainer = medusa2_runs.make_trainer(folder, batch_size=ROWS // num_processes)
        shares = {name: share(weight) for name, weight in trainer.headed.named_parameters()}
        trainer.train()
        return medusa2_runs.result(trainer) | {"shares": shares, "copies": files.gathers_by_copies}


def broken(folder: Path, num_processes: int) -> str:
    """What is said of a loss that is not a number."""
    trainer = make_trainer(folder, batch_size=ROWS // num_processes)
    with torch.no_grad():
        weight: Tensor = trainer.headed.base.get_input_embeddings().weight  # type: ignore[operator,union-attr,assignment]
        getattr(weight, "ds_tensor", weight).fill_(float("nan"))
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return "nothing"


RUNS: dict[str, Callable[[Path, int], Any]] = {
    "shared": plain,
    "copied": copied,
    "uneven": uneven,
    "own": lambda folder, num_processes: plain(folder, num_processes, own_lm_head=True),
    "validated": validated,
    "tuned": tuned,
    "broken": broken,
}
OF_FSDP = ("copied", "uneven", "tuned")


def share(weight: Tensor) -> float:
    """The part of a weight that this process holds; padding included."""
    if hasattr(weight, "ds_tensor"):  # ZeRO-3
        return weight.ds_tensor.numel() / weight.ds_numel if weight.numel() == 0 else 1.0  # type: ignore[attr-defined]
    return weight.to_local().numel() / weight.numel() if isinstance(weight, DTensor) else 1.0


def num_moments(trainer: Trainer) -> int:
    """How many weights this process holds AdamW's first moment of."""
    optimizer = trainer.optimizer.engine.basic_optimizer if zero.stage(trainer.accelerator) else trainer.optimizer.optimizer
    return sum(state["exp_avg"].numel() for state in optimizer.state.values())


def outcome(trainer: Trainer) -> dict[str, Any]:
    with whole(trainer.accelerator, trainer.headed):
        base = {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in trainer.headed.base.named_parameters()}
        return {
            "losses": trainer.losses,  # type: ignore[attr-defined]
            "heads": {name: p.detach().clone() for name, p in trainer.heads.named_parameters()},
            "base_unchanged": all(torch.equal(base[name], weight) for name, weight in tiny_model("llama").named_parameters()),
            "num_processes": trainer.accelerator.num_processes,
            "distributed_type": trainer.accelerator.distributed_type.value,
            "zero_stage": zero.stage(trainer.accelerator),
        }


def main(out: str, folder: str, *options: str) -> int:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    start_sharding(accelerator)
    runs = {name: run for name, run in RUNS.items() if name not in OF_FSDP or not zero.stage(accelerator)}
    found = {name: run(Path(folder) / name, accelerator.num_processes) for name, run in runs.items()}
    torch.save(found, f"{out}.{accelerator.process_index}")
    return train(list(options))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
