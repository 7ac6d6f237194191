"""Steps of a HeadedModel whose frozen base is sharded by `fully_shard`: what FSDP2 does, on CPU processes.

As a process: `python -m tests.train.sharded_run OUT.pt`, each rank of `torchrun`; alone it is one process, nothing sharded.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from medusa_heads import base_model
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import create_heads
from tests.tiny_models import tiny_model
from tests.train.training_runs import PACK_LENGTH, rows
from train.batch import make_batch, window_counts
from train.headed_model import HeadedModel
from train.objectives import Objective
from train.packing import PackedDataset, collate
from train.windows import WindowPlan

NUM_HEADS, NUM_STEPS, ROWS = 3, 4, 4


def make_model(own_lm_head: bool) -> HeadedModel:
    base = tiny_model("llama")
    heads = create_heads(HeadsConfig(num_heads=NUM_HEADS, num_layers=2, own_lm_head=own_lm_head), base)
    nn.init.normal_(heads.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    return HeadedModel(base, heads, objective=Objective("kl"))


def shard(model: HeadedModel) -> None:
    """One unit per layer of the base, and the root with all else: embedding, LM head, heads."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in base_model.decoder_layers(model.base):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def whole(weight: Tensor) -> Tensor:
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()


def run(rank: int, num_processes: int, own_lm_head: bool) -> dict[str, Any]:
    model = make_model(own_lm_head)
    before = copy.deepcopy(model.base.state_dict())
    if num_processes > 1:
        shard(model)
    optimizer = torch.optim.AdamW(model.heads.parameters(), lr=0.01)
    packed = PackedDataset(rows(), pack_length=PACK_LENGTH, num_heads=NUM_HEADS)
    plan = WindowPlan(len(packed), ROWS // num_processes, 1, num_processes, rank, 0)
    losses = []
    for step in range(NUM_STEPS):
        batches = [make_batch(collate([packed[row] for row in part]), NUM_HEADS) for part in plan.micro_batches(step)]
        counts_K = window_counts(batches)
        if num_processes > 1:
            dist.all_reduce(counts_K)
        output = model(**batches[0].tensors, slot_weights=num_processes / counts_K)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = output.loss.detach() / num_processes
        if num_processes > 1:
            dist.all_reduce(loss)
        losses.append(float(loss))
    return {
        "losses": losses,
        "heads": {name: whole(weight) for name, weight in model.heads.named_parameters()},
        "base_unchanged": all(torch.equal(whole(weight), before[name]) for name, weight in model.base.named_parameters()),
        "num_processes": num_processes,
        "local_share": {n: w.to_local().numel() / w.numel() if isinstance(w, DTensor) else 1.0 for n, w in model.named_parameters()},
    }


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_processes = dist.get_rank(), dist.get_world_size()
    torch.save({own: run(rank, num_processes, own) for own in (False, True)}, f"{out}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
