"""DeepSpeed's ZeRO, through accelerate: the optimizer state of the heads is shared out; under ZeRO-3 also the frozen base, and the heads.

The engine averages and clips gradients and steps AdamW on float32 heads. Whatever leaves it is whole: gradients whose norms are logged,
heads and optimizer state of a checkpoint, which is the same file as under any other strategy.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor, nn

from medusa_heads import base_model
from train.batch import TrainBatch
from train.headed_model import HeadedModel

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's names


def is_asked_for() -> bool:
    """Whether accelerate's launcher was told to use DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def check_possible() -> None:
    """Raises ValueError where the launcher asked for DeepSpeed and it is not installed, or has no device."""
    if not is_asked_for():
        return
    if os.environ.get("ACCELERATE_USE_CPU", "false").lower() != "true" and not torch.accelerator.is_available():
        raise ValueError("DeepSpeed: there is no GPU, and each process would train alone; on a CPU set ACCELERATE_USE_CPU=true")
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            "DeepSpeed is not installed; pip install 'medusa-heads[deepspeed]', or launch with configs/accelerate/fsdp2.yaml, which "
            "shards the base too, or ddp.yaml"
        )


def refuse(what: str, *, instead: str = "ddp.yaml, or fsdp2.yaml for a base to be sharded") -> None:
    """Raises ValueError where the launcher asked for DeepSpeed. instead: files to launch with."""
    if is_asked_for():
        raise ValueError(f"{what} under DeepSpeed; launch with configs/accelerate/{instead}")


def stage(accelerator: Accelerator) -> int:
    """2 or 3 under DeepSpeed, otherwise 0."""
    return accelerator.state.deepspeed_plugin.zero_stage if accelerator.distributed_type == DistributedType.DEEPSPEED else 0


def start(accelerator: Accelerator) -> None:
    """Sees to it that DeepSpeed happens where the launcher asked for it. Raises ValueError for settings that do not work here."""
    import deepspeed

    state = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:  # where accelerate passes over it without a word
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does; the operation would have to be compiled
        PartialState().distributed_type = state.distributed_type = DistributedType.DEEPSPEED
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision("no")
        plugin.select(_from_accelerator_state=True)
        state.deepspeed_plugins = plugin
    check_settings(state.deepspeed_plugin)
    base_model.load_whole()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


def check_settings(plugin: DeepSpeedPlugin) -> None:
    """Raises ValueError naming a setting that does not work here and the one that does."""
    settings = plugin.deepspeed_config
    if plugin.zero_stage not in (2, 3):
        raise ValueError(f"zero_stage: {plugin.zero_stage} is not supported; set it to 2 or 3, or launch with configs/accelerate/ddp.yaml")
    for name in ("offload_optimizer", "offload_param"):
        if settings["zero_optimization"].get(name, {}).get("device", "none") != "none":
            raise ValueError(f"{name}_device: offloading is not supported; set it to none, and take more GPUs where the base does not fit")
    for name in ("bf16", "fp16"):
        if settings.get(name, {}).get("enabled") is True:
            raise ValueError(f"{name}: would take the heads' float32 from them; leave it out, the base's type decides (see base_dtype)")
    for name in ("optimizer", "scheduler"):
        if name in settings:
            raise ValueError(f"{name}: is set by the options of python -m train; leave it out of the DeepSpeed config")


def share_out(accelerator: Accelerator, model: HeadedModel, *, batch_size: int, max_grad_norm: float) -> None:
    """Tells the engine what the trainer's options are and, under ZeRO-3, shares out the base, layer by layer the unit that is gathered."""
    import deepspeed

    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    settings.pop("train_batch_size", None)
    settings["zero_optimization"]["reduce_bucket_size"] = sum(parameter.numel() for parameter in model.heads.parameters())
    settings |= {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": 1,  # of losses that need no further division
        "gradient_clipping": max_grad_norm,
    }
    dtype = model.base.dtype  # the engine switches off any autocast but its own
    settings["torch_autocast"] = {"enabled": dtype != torch.float32, "dtype": str(dtype).removeprefix("torch.")}
    if stage(accelerator) == 3:
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # a layer is gathered at once: small weights cost nothing
        layers = {type(layer) for layer in base_model.decoder_layers(model.base)}
        deepspeed.utils.set_z3_leaf_modules(model.base, list(layers))
        deepspeed.zero.Init(module=model.base, config_dict_or_path=settings)
        model.to(accelerator.device)  # the heads, and buffers; what is shared out is there


class ZeroOptimizer:
    """What a trainer asks of an AdamW optimizer, of the one that the engine runs on shares of the heads."""

    def __init__(self, engine: Any, model: HeadedModel, nothing: TrainBatch) -> None:
        """nothing: a batch without tokens. By a step over it, at a learning rate of 0, DeepSpeed makes the moments."""
        self.engine, self.heads = engine, model.heads
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = 0.0
        weights = torch.zeros(model.heads.config.num_heads, device=engine.device)
        backward(engine, engine(**nothing.to(engine.device).tensors, slot_weights=weights).loss, last=True)
        self.step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        self._set_steps(0)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.engine.optimizer.param_groups

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The engine has done it in its step."""

    def state_dict(self) -> dict[str, Any]:
        """AdamW's own, of whole heads, on the CPU. Every process takes part."""
        from deepspeed.utils import safe_get_full_optimizer_state

        parameters = list(self.heads.parameters())
        state = {}
        for index, parameter in enumerate(parameters):
            moments = {name: safe_get_full_optimizer_state(parameter, name).cpu() for name in MOMENTS}
            state[index] = {"step": self._steps()[0].cpu().clone()} | moments
        groups = [
            {name: value for name, value in group.items() if name != "params"} | {"params": list(state)} for group in self.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes this process's share of the moments, and of the heads' weights, which have to be whole."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        for index, parameter in enumerate(self.heads.parameters()):
            safe_set_full_fp32_param(parameter, parameter.detach())
            for name in MOMENTS:
                safe_set_full_optimizer_state(parameter, saved["state"][index][name].to(parameter.device), name)
        self._set_steps(float(saved["state"][0]["step"]))

    def _steps(self) -> list[Tensor]:
        return [state["step"] for state in self.engine.basic_optimizer.state.values()]

    def _set_steps(self, number: float) -> None:
        for step in self._steps():
            step.fill_(number)


def prepare(accelerator: Accelerator, model: HeadedModel, optimizer: torch.optim.Optimizer, nothing: TrainBatch) -> tuple[Any, Any]:
    """The engine, and what stands for its optimizer."""
    import deepspeed

    engine, _ = accelerator.prepare(model, optimizer)
    if stage(accelerator) == 3:  # used by the model itself, past the modules that hold them
        for parameter in (*model.heads.parameters(), *base_model.lm_head(model.base).parameters()):
            deepspeed.zero.register_external_parameter(model, parameter)
    return engine, ZeroOptimizer(engine, model, nothing)


def backward(engine: Any, loss: Tensor, *, last: bool) -> None:
    """last: of an accumulation window."""
    engine.set_gradient_accumulation_boundary(last)
    engine.backward(loss)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Averaged over all processes and whole, after the last backward of a window. Every process takes part."""
    from deepspeed.utils import safe_get_full_grad

    return {name: safe_get_full_grad(parameter) for name, parameter in module.named_parameters()}


@contextmanager
def whole(parameters: Iterable[nn.Parameter], *, changed: bool = False) -> Iterator[None]:
    """Within the block no parameter is shared out; all processes enter and leave it together. changed: they keep what the first one
    makes of them."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0 if changed else None):
        yield


@contextmanager
def kept_whole(accelerator: Accelerator, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """As `whole`, where modules run that would let go of the parameters after it; each process as many as it likes, if they gather
    nothing else."""
    parameters = list(parameters)
    assert accelerator.deepspeed_engine_wrapped is not None
    coordinator = accelerator.deepspeed_engine_wrapped.engine.optimizer.parameter_offload.get_param_coordinator()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()  # of the order of modules in a training step, which it would find different between processes
    with whole(parameters):
        for parameter in parameters:
            parameter.is_external_param = True  # type: ignore[attr-defined]  # DeepSpeed's word for what a module does not let go
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.is_external_param = False  # type: ignore[attr-defined]
