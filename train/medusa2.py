"""Trainer of heads and adapter together: heads first, then both, each at its own learning rate (Medusa-2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa_heads.adapter import ADAPTER_DIR, Adapter
from medusa_heads.fingerprint import fingerprint
from medusa_heads.heads import MedusaHeads
from medusa_heads.merge import merged_base
from medusa_heads.quantization import quantization_of
from train.config import TrainConfig
from train.finished_step import FinishedStep
from train.headed_model import HeadedModel
from train.trainer import Trainer
from train.tuned_model import TunedModel

HEADS_SHARE = {"distill": 0.01, "data": 0.2}  # of the Medusa paper, section 2.2.2 and its code
HEADS_OVER_BASE = 4  # how many times the adapter's learning rate the heads' is


class Medusa2Trainer(Trainer):
    """Of a TunedModel. The adapter stands still for `lora_start_ratio` of the steps."""

    headed: TunedModel

    @property
    def first_joint_step(self) -> int:
        return min(round(self.config.lora_start_ratio * self.num_steps), self.num_steps - 1)

    @property
    def trained(self) -> nn.Module:
        """The very parameters of heads and adapter, for checkpoints."""
        return nn.ModuleDict({"heads": self.heads, "adapter": nn.ParameterList(self.headed.adapter.parameters())})

    def parameter_groups(self, model: HeadedModel) -> list[dict[str, Any]]:
        assert isinstance(model, TunedModel)
        return [*super().parameter_groups(model), {"params": model.adapter.parameters()}]

    def learning_rates(self, step: int) -> list[float]:
        """Of heads and adapter. The adapter's warms up when its turn comes, then keeps its ratio to the heads'."""
        heads = self.learning_rate(step)
        ratio = (self.config.lora_learning_rate or self.config.learning_rate / HEADS_OVER_BASE) / self.config.learning_rate
        warmup = max(1, round(self.config.warmup_ratio * self.num_steps))
        joined = max(0, step + 1 - self.first_joint_step)
        return [heads, heads * ratio * min(1.0, joined / warmup)]

    def heads_share(self, step: int) -> float | None:
        """A quarter of a sine, from the step at which the adapter joins to the last one; None before."""
        if step < self.first_joint_step:
            return None
        peak = self.config.lora_heads_share
        peak = HEADS_SHARE[self.config.lora_objective] if peak is None else peak
        return peak * math.sin(math.pi / 2 * (step + 1 - self.first_joint_step) / (self.num_steps - self.first_joint_step))

    def forward_options(self, step: int) -> dict[str, Any]:
        return {"heads_share": self.heads_share(step)}

    def clip_gradients(self, step: int) -> Tensor | None:
        """Each part to a norm of its own: the heads' gradients are far larger. Returns the adapter's."""
        super().clip_gradients(step)
        parameters = self.headed.adapter.parameters()
        if self.heads_share(step) is None:
            for parameter in parameters:
                parameter.grad = None  # AdamW's moments of the adapter begin when it does
            return None
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
        if step == self.first_joint_step:
            assert norm != 0, "the adapter received no gradient in its first step"
        return norm

    def further_figures(self, history: list[FinishedStep]) -> dict[str, float]:
        last = history[-1]
        figures = {"adapter/learning_rate": self.learning_rates(last.step)[1], "adapter/heads_share": self.heads_share(last.step) or 0.0}
        if last.adapter_norm is not None:
            figures["adapter/grad_norm"] = last.adapter_norm.item()
        losses = [output.base_loss for finished in history for output in finished.outputs if output.base_loss is not None]
        if len(losses) == sum(len(finished.outputs) for finished in history):  # all of them joint steps: equal on every process
            figures["base_loss"] = self.accelerator.reduce(torch.stack(losses).sum(), reduction="mean").item() / len(history)
        return figures


def tuned_model(config: TrainConfig) -> Callable[..., TunedModel]:
    """The options `lora_*` -> what takes a HeadedModel's arguments and makes it one with a new adapter."""

    def make(base: PreTrainedModel, heads: MedusaHeads, **options: Any) -> TunedModel:
        if config.base_quantization == "none" and (packed := quantization_of(base.config)):
            raise ValueError(
                f"lora_rank: --base {config.base} is quantised ({packed}), and no adapter can be merged into packed weights: give the "
                "model it was made from, with --base-quantization 4bit where it should be packed while training"
            )
        adapter = Adapter.attach(base, rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets)
        return TunedModel(base, heads, adapter=adapter, distill=config.lora_objective == "distill", **options)

    return make


def save_adapter(trainer: Trainer, output: Path) -> str:
    """Writes output/adapter and returns the fingerprint of the base with it merged in, made by the code of `medusa-heads merge`."""
    assert isinstance(trainer, Medusa2Trainer)
    config = trainer.config
    trainer.headed.adapter.save(output / ADAPTER_DIR, base_name=config.base)
    return fingerprint(merged_base(config.base, output / ADAPTER_DIR, revision=config.revision)[0])
