"""A YAML file and command-line flags -> DraftModelConfig: every option of distilling a draft model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from medusa_heads.arguments import OPTIONAL
from train.command_line import parse_command
from train.config import TrainConfig
from train.row_shapes import DataFormat

NOT_IN_SCHEDULE = frozenset(
    ("output_dir", "validation", "save_every", "keep_checkpoints", "log_every", "log_with", "project", "num_workers", "overwrite")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig:
    """Make a draft model of a base model's own first layers and distil the base into it."""

    output_dir: str
    """Folder of the finished draft model; checkpoints lie in its subfolder `checkpoints`."""
    data: list[str]
    """Conversations, best answered by the base itself (medusa-heads regenerate): JSONL, JSON (each also gzipped) or Parquet files,
    or data sets of the hub as hf:owner/name[/config][:split]."""
    layers: int
    """Layers of the draft model: the base's first ones, with its embedding, final norm and lm_head. Few: drafting must be cheap."""
    data_format: DataFormat = "auto"
    """Shape of the rows of `data`: messages, sharegpt (`conversations`) or alpaca (`instruction`); auto goes by a file's first row."""
    validation: Annotated[list[str], OPTIONAL] = field(default_factory=list)
    """Files of held-out conversations: how well the draft model agrees with the base is measured on them at the end."""
    held_out: int = 0
    """Keep this many conversations of `data` out of training for validation: those whose id has the lowest SHA-256."""

    base: str = "embedded"
    """Base model: `embedded`, a local folder or a hub id."""
    revision: str | None = None
    """Revision of the base model on the hub."""
    base_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the frozen base, and of the finished draft model: auto is bfloat16 on a GPU and float32 on a CPU."""
    train_embeddings: bool = False
    """Train the draft's token embedding and lm_head too; they are the base's own otherwise."""

    learning_rate: float = 5e-4
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    warmup_ratio: float = 0.05
    """Share of the steps that warm up linearly; cosine decay to zero follows."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    epochs: float = 1.0
    """Passes over the data."""
    max_steps: int | None = None
    """Stop the schedule after this many optimizer steps, whatever `epochs` says."""
    batch_size: int = 8
    """Packed rows per process and micro-batch."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step."""
    max_length: int = 1024
    """Conversations are cut to this many tokens."""
    cut_circles: bool = False
    """Cut a conversation where an answer has said the same twice in a row, 24 tokens or more: what follows teaches little but to go
    on in circles. How many do is printed either way."""
    pack_length: int = 1024
    """Tokens in a packed row, at least max_length."""
    limit: int | None = None
    """Use only the first N conversations."""
    seed: int = 0
    """Order of the packed rows."""

    save_every: int = 200
    """Optimizer steps between checkpoints."""
    keep_checkpoints: int = 2
    """Older checkpoints are deleted."""
    log_every: int = 10
    """Optimizer steps between log lines."""
    log_with: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    """Tracker. WANDB_MODE=offline keeps wandb on this machine."""
    project: str = "medusa-heads"
    """Project name in the tracker."""
    num_workers: int = 2
    """Processes that load packed rows ahead; 0 loads in the training process."""
    overwrite: bool = False
    """Start anew although output_dir holds checkpoints or a finished draft model."""

    def __post_init__(self) -> None:
        self.as_heads_run()  # raises on what is wrong in the options that both share
        if self.layers < 1:
            raise ValueError(f"layers: {self.layers} must be above 0")

    def as_heads_run(self) -> TrainConfig:
        """A training run of heads on the same data: what prepares data and output folders reads."""
        shared = {f.name for f in dataclasses.fields(TrainConfig)} & {f.name for f in dataclasses.fields(self)}
        return TrainConfig(**{name: getattr(self, name) for name in shared})

    def schedule_dict(self) -> dict[str, Any]:
        """The options a resumed run must share with the one it continues."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in NOT_IN_SCHEDULE}


def parse_config(argv: list[str]) -> DraftModelConfig:
    """`[--config FILE] [flags]` -> DraftModelConfig; flags win over the file wherever they stand."""
    return parse_command(DraftModelConfig, argv, prog="accelerate launch --quiet -m train.draft_model --config FILE")
