"""The options that every training run has, of heads and of draft models."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from medusa_heads.arguments import OPTIONAL
from train.row_shapes import DataFormat

MOST_EPOCHS, MOST_TOKENS = 10**6, 2**24  # beyond any use, and short of what counters and memory can hold


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a training run reads, in which order and how often, and what it leaves."""

    output_dir: str
    """Folder of what is trained; checkpoints lie in its subfolder `checkpoints`."""
    data: list[str]
    """Conversations, best answered by the base itself (medusa-heads regenerate): JSONL, JSON (each also gzipped) or Parquet files,
    or data sets of the hub as hf:owner/name[/config][:split]."""
    data_format: DataFormat = "auto"
    """Shape of the rows of `data`: messages, sharegpt (`conversations`) or alpaca (`instruction`); auto goes by a file's first row."""
    validation: Annotated[list[str], OPTIONAL] = field(default_factory=list)
    """Files of held-out conversations: what is trained is measured on them at the end."""
    held_out: int = 0
    """Keep this many conversations of `data` out of training for validation: those whose id has the lowest SHA-256."""
    limit: int | None = None
    """Use only the first N conversations."""
    max_length: int = 1024
    """Conversations are cut to this many tokens."""
    cut_circles: bool = False
    """Cut a conversation where an answer has said the same twice in a row, 24 tokens or more: what follows teaches little but to go
    on in circles. How many do is printed either way."""
    pack_length: int = 1024
    """Tokens in a packed row, at least max_length."""

    base: str = "embedded"
    """Base model: `embedded`, a local folder or a hub id."""
    revision: str | None = None
    """Revision of the base model on the hub."""

    learning_rate: float
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
    seed: int = 0
    """Order of the packed rows."""

    save_every: int = 200
    """Optimizer steps between checkpoints."""
    keep_checkpoints: int = 2
    """Older checkpoints are deleted, but for the best one where validations choose it."""
    log_every: int = 10
    """Optimizer steps between log lines."""
    log_with: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    """Tracker. WANDB_MODE=offline keeps wandb on this machine."""
    project: str = "medusa-heads"
    """Project name in the tracker."""
    num_workers: int = 2
    """Processes that load packed rows ahead (of stored hidden states: threads); 0 loads in the training process."""
    overwrite: bool = False
    """Start anew although output_dir holds checkpoints or something finished."""

    NOT_IN_SCHEDULE: ClassVar[frozenset[str]] = frozenset(
        ("output_dir", "validation", "save_every", "keep_checkpoints", "log_every", "log_with", "project", "num_workers", "overwrite")
    )
    """Options in which a resumed run may differ from the one it continues."""

    def __post_init__(self) -> None:
        """Raises ValueError naming an option whose value means nothing."""
        for name, value in dataclasses.asdict(self).items():
            require(not isinstance(value, float) or math.isfinite(value), name, f"{value} is no finite number")
        require(self.data, "data", "name at least one JSONL file")
        for name in ("epochs", "batch_size", "gradient_accumulation_steps", "save_every", "keep_checkpoints", "log_every", "max_length"):
            require(getattr(self, name) > 0, name, "must be above 0")
        require(self.epochs <= MOST_EPOCHS, "epochs", f"must be at most {MOST_EPOCHS:,}")
        require(self.pack_length >= self.max_length, "pack_length", f"{self.pack_length} is below max_length {self.max_length}")
        require(self.pack_length <= MOST_TOKENS, "pack_length", f"must be at most {MOST_TOKENS:,}")
        for name in ("max_steps", "limit"):
            require(getattr(self, name) is None or getattr(self, name) > 0, name, "must be above 0")
        require(0 <= self.warmup_ratio < 1, "warmup_ratio", "must lie in [0, 1)")
        for name in ("learning_rate", "max_grad_norm"):
            require(getattr(self, name) > 0, name, "must be above 0")
        for name in ("held_out", "weight_decay", "num_workers"):
            require(getattr(self, name) >= 0, name, "must be 0 or more")
        require(0 <= self.seed < 2**32, "seed", "must lie in [0, 2**32)")

    def inputs(self) -> dict[str, list[str]]:
        """What the run reads, by option: files, folders and names of the hub."""
        return {"base": [self.base], "data": self.data, "validation": self.validation}

    def schedule_dict(self) -> dict[str, Any]:
        """The options a resumed run must share with the one it continues."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in self.NOT_IN_SCHEDULE}


def require(condition: object, name: str, problem: str) -> None:
    """Raises ValueError about the option where the condition does not hold."""
    if not condition:
        raise ValueError(f"{name}: {problem}")
