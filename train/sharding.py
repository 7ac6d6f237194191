"""FSDP2, through accelerate: every process holds a share of the frozen base, and all of what trains.

Heads, and an adapter, are small beside a base that has to be sharded. Whole everywhere, they are measured, saved and resumed as under
any other strategy; what that takes is the mean of their gradients, once a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, is_torch_version
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from medusa_heads import base_model
from medusa_heads.quantization import Quantization, quantization_of
from train.batch import make_batch
from train.headed_model import HeadedModel
from train.packing import collate, empty_pack


def is_sharded(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.FSDP


def refuse_deepspeed() -> None:
    """Raises ValueError where the launcher asked for DeepSpeed; before an Accelerator is made, which wants it installed."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise ValueError(
            "training under DeepSpeed is not supported. Instead of ZeRO-3 launch with --config_file configs/accelerate/fsdp2.yaml, which "
            "shards the base too; instead of ZeRO-2 with ddp.yaml: what that would shard, the optimizer state of the heads, is small"
        )


def start_sharding(accelerator: Accelerator) -> None:
    """Sees to it that FSDP2 happens as this project needs it, where the launcher asked for it.

    Raises ValueError for settings of FSDP that do not work here.
    """
    state = accelerator.state
    asked_for = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if asked_for and state.distributed_type == DistributedType.MULTI_CPU:  # where accelerate passes over it without a word
        PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
    if is_sharded(accelerator):
        check_settings(state.fsdp_plugin)
        state.fsdp_plugin.mixed_precision_policy = None  # the base keeps its type, heads their float32; autocast does the rest


def check_settings(plugin: FullyShardedDataParallelPlugin) -> None:
    """Raises ValueError naming a setting that does not work here and the one that does."""
    if plugin.fsdp_version != 2:
        raise ValueError("fsdp_version: 1 is not supported; set it to 2, as configs/accelerate/fsdp2.yaml does")
    if plugin.cpu_ram_efficient_loading:
        raise ValueError("fsdp_cpu_ram_efficient_loading: every process checks the base that it loads; set it to false")
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ValueError("fsdp_offload_params: is not supported; set it to false, and take more GPUs where the base does not fit")
    if plugin.auto_wrap_policy is None:
        raise ValueError("fsdp_auto_wrap_policy: NO_WRAP gathers the whole base at once; set it to TRANSFORMER_BASED_WRAP")
    if not is_torch_version(">=", "2.7"):
        raise ValueError(f"FSDP: torch {torch.__version__} cannot leave the heads whole; install torch 2.7 or newer")


def loading_device(accelerator: Accelerator, *, quantization: Quantization) -> torch.device:
    """Where a process loads the base: one to be sharded, which may fit no GPU, into main memory; its share leaves it layer by layer."""
    if not is_sharded(accelerator):
        return accelerator.device
    if quantization != "none":
        raise ValueError("base_quantization: packed weights cannot be sharded; launch with configs/accelerate/ddp.yaml, or leave it out")
    return torch.device("cpu")


def share_out(accelerator: Accelerator, model: HeadedModel) -> None:
    """Says what `prepare` is to shard: every layer of the base is a unit, the rest of the base another; what trains is none, and moves
    to the device. To be called before the optimizer is made. Raises ValueError for a quantised base."""
    if not is_sharded(accelerator):
        return
    if quantization_of(model.base.config):
        raise ValueError("base: it is quantised, and packed weights cannot be sharded; launch with configs/accelerate/ddp.yaml")
    modules = [module for module in model.modules() if any(p.requires_grad for p in module.parameters(recurse=False))]
    for module in modules:
        module.to(accelerator.device)
    plugin = accelerator.state.fsdp_plugin
    plugin.ignored_modules = modules
    plugin.transformer_cls_names_to_wrap = sorted({type(layer).__name__ for layer in base_model.decoder_layers(model.base)})


def average_gradients(accelerator: Accelerator, parameters: Iterable[nn.Parameter]) -> None:
    """Over all processes, where the strategy does not do it for what it passes over."""
    if not is_sharded(accelerator):
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")  # type: ignore[assignment]


def reshard(model: nn.Module) -> None:
    """Lets go of what the last forward gathered and no layer holds: embeddings, final norm, LM head."""
    if isinstance(model, FSDPModule):
        model.reshard()


@contextmanager
def in_lock_step(accelerator: Accelerator, model: HeadedModel) -> Iterator[None]:
    """Within the block each process runs the base by itself, as often as it likes or not at all; all enter and leave it together.

    The layers of a sharded base are gathered by all processes at once. So every forward of the base waits for one of each other process,
    and whoever is done keeps running it on a single token until all are.
    """
    if not is_sharded(accelerator):
        yield
        return
    _gather_root(accelerator, model)

    def announce(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        _sum(accelerator, 1)

    hook = base_model.decoder(model.base).register_forward_pre_hook(announce)
    try:
        yield
    finally:
        hook.remove()
    token = torch.zeros(1, 1, dtype=torch.long, device=accelerator.device)
    with torch.no_grad():
        while _sum(accelerator, 0) > 0:
            base_model.forward_hidden(model.base, token)
    reshard(model)


@torch.no_grad()
def _gather_root(accelerator: Accelerator, model: HeadedModel) -> None:
    """Makes whole what no layer holds: embeddings, final norm, LM head. By a forward of the whole model over nothing, because from the
    first forward that FSDP sees it learns what the root is."""
    num_heads = model.heads.config.num_heads
    nothing = make_batch(collate([empty_pack()]), num_heads).to(accelerator.device)
    with accelerator.autocast():
        model(**nothing.tensors, slot_weights=torch.zeros(num_heads, device=accelerator.device))


def _sum(accelerator: Accelerator, value: int) -> torch.Tensor:
    return accelerator.reduce(torch.tensor(value, device=accelerator.device), reduction="sum")  # type: ignore[return-value]
