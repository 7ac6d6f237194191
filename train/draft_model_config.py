"""A YAML file and command-line flags -> DraftModelConfig: every option of distilling a draft model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from train.command_line import parse_command
from train.run_config import RunConfig, require


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig(RunConfig):
    """Make a draft model of a base model's own first layers and distil the base into it."""

    layers: int
    """Layers of the draft model: the base's first ones, with its embedding, final norm and lm_head. Few: drafting must be cheap."""
    base_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the frozen base, and of the finished draft model: auto is bfloat16 on a GPU and float32 on a CPU."""
    train_embeddings: bool = False
    """Train the draft's token embedding and lm_head too; they are the base's own otherwise."""
    learning_rate: float = 5e-4
    """Peak learning rate of AdamW."""

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        require(self.layers > 0, "layers", f"{self.layers} must be above 0")


def parse_config(argv: list[str]) -> DraftModelConfig:
    """`[--config FILE] [flags]` -> DraftModelConfig; flags win over the file wherever they stand."""
    return parse_command(DraftModelConfig, argv, prog="accelerate launch --quiet -m train.draft_model --config FILE")
