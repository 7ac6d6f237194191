"""A base sharded over processes, through accelerate by FSDP2 or DeepSpeed (train/zero.py), and decoding with it in lock-step.

Under FSDP2 every process holds a share of the frozen base, and all of what trains. Heads, and an adapter, are small beside a base that
has to be sharded. Whole everywhere, they are measured, saved and resumed as under any other strategy; what that takes is the mean of
their gradients, once a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, is_torch_version
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from medusa_heads import base_model
from medusa_heads.quantization import Quantization, quantization_of
from train import zero
from train.batch import TrainBatch, make_batch
from train.headed_model import HeadedModel
from train.packing import collate, empty_pack
from train.peer_shards import share_shards


def is_sharded(accelerator: Accelerator) -> bool:
    return is_fsdp(accelerator) or zero.stage(accelerator) == 3


def is_fsdp(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.FSDP


def start_sharding(accelerator: Accelerator) -> None:
    """Sees to it that FSDP2 or DeepSpeed happens as this project needs it, where the launcher asked for it.

    Raises ValueError for settings of them that do not work here.
    """
    if zero.is_asked_for():
        zero.start(accelerator)
        return
    state = accelerator.state
    asked_for = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if asked_for and state.distributed_type == DistributedType.MULTI_CPU:  # where accelerate passes over it without a word
        PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
    if is_fsdp(accelerator):
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


def share_out(accelerator: Accelerator, model: HeadedModel, *, batch_size: int, max_grad_norm: float) -> None:
    """Says what `prepare` is to shard: every layer of the base is a unit, the rest of the base another. What trains moves to the device,
    and FSDP2 passes over it. To be called before the optimizer is made. Raises ValueError for a quantised base."""
    if is_sharded(accelerator) and quantization_of(model.base.config):
        raise ValueError("base: it is quantised, and packed weights cannot be sharded; launch with configs/accelerate/ddp.yaml")
    if is_fsdp(accelerator) or zero.stage(accelerator):
        model.replays = False  # layers are gathered within the forward, or weights belong to an engine
    if zero.stage(accelerator):
        zero.share_out(accelerator, model, batch_size=batch_size, max_grad_norm=max_grad_norm)
    if not is_fsdp(accelerator):
        return
    modules = [module for module in model.modules() if any(p.requires_grad for p in module.parameters(recurse=False))]
    for module in modules:
        module.to(accelerator.device)
    plugin = accelerator.state.fsdp_plugin
    plugin.ignored_modules = modules
    plugin.transformer_cls_names_to_wrap = sorted({type(layer).__name__ for layer in base_model.decoder_layers(model.base)})


def prepare(accelerator: Accelerator, model: HeadedModel, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """The model to be called, and what stands for the optimizer."""
    if zero.stage(accelerator):
        return zero.prepare(accelerator, model, optimizer, _nothing(model))
    prepared = accelerator.prepare(model, optimizer)
    if is_fsdp(accelerator):
        share_shards(accelerator, prepared[0])
    return prepared


def backward(accelerator: Accelerator, model: nn.Module, loss: torch.Tensor, *, last: bool) -> None:
    """model: as prepared. last: of an accumulation window."""
    if zero.stage(accelerator):
        zero.backward(model, loss, last=last)
    else:
        accelerator.backward(loss)


def average_gradients(accelerator: Accelerator, parameters: Iterable[nn.Parameter]) -> None:
    """Over all processes, where the strategy does not do it for what it passes over."""
    if not is_fsdp(accelerator):
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")  # type: ignore[assignment]


def gradients(accelerator: Accelerator, module: nn.Module) -> dict[str, torch.Tensor]:
    """Of what trains in it, averaged, by name. Every process takes part."""
    if zero.stage(accelerator):
        return zero.gradients(module)
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def clip_gradients(accelerator: Accelerator, parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """DeepSpeed's engine clips in its step."""
    if not zero.stage(accelerator):
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)  # what trains is whole everywhere; accelerate's would unscale it once more


def whole(accelerator: Accelerator, module: nn.Module, *, changed: bool = False) -> AbstractContextManager[None]:
    """Within the block what trains is whole in every process; all enter and leave it together. changed: it is written to, in each alike."""
    return zero.whole(module.parameters(), changed=changed) if zero.stage(accelerator) else nullcontext()


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

    def announce(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        _sum(accelerator, 1)

    with _root_gathered(accelerator, model):
        hook = base_model.decoder(model.base).register_forward_pre_hook(announce)
        try:
            yield
        finally:
            hook.remove()
        token = torch.zeros(1, 1, dtype=torch.long, device=accelerator.device)
        with torch.no_grad():
            while _sum(accelerator, 0) > 0:
                base_model.forward_hidden(model.base, token)


@contextmanager
def _root_gathered(accelerator: Accelerator, model: HeadedModel) -> Iterator[None]:
    """Makes whole what no layer holds: embeddings, final norm, LM head; and heads."""
    if zero.stage(accelerator):
        in_layers = {parameter for layer in base_model.decoder_layers(model.base) for parameter in layer.parameters()}
        with zero.kept_whole(accelerator, [parameter for parameter in model.parameters() if parameter not in in_layers]):
            yield
    else:
        _gather_root(accelerator, model)
        yield
        reshard(model)


@torch.no_grad()
def _gather_root(accelerator: Accelerator, model: HeadedModel) -> None:
    """By a forward of the whole model over nothing, because from the first forward that FSDP sees it learns what the root is."""
    nothing = _nothing(model).to(accelerator.device)
    with accelerator.autocast():
        model(**nothing.tensors, slot_weights=torch.zeros(model.heads.config.num_heads, device=accelerator.device))


def _nothing(model: HeadedModel) -> TrainBatch:
    return make_batch(collate([empty_pack()]), model.heads.config.num_heads)


def _sum(accelerator: Accelerator, value: int) -> torch.Tensor:
    return accelerator.reduce(torch.tensor(value, device=accelerator.device), reduction="sum")  # type: ignore[return-value]
