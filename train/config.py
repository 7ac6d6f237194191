"""A YAML file and command-line flags -> TrainConfig: every option of a training run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from medusa_heads.arguments import refuse_repeated_lists
from medusa_heads.config import HeadsConfig
from medusa_heads.suggest import unknown_keys_error


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Train draft heads on a frozen base model."""

    output_dir: str
    """Folder of the finished heads; checkpoints lie in its subfolder `checkpoints`."""
    data: list[str]
    """JSONL or JSONL.gz files of conversations, best answered by the base itself (medusa-heads regenerate)."""
    validation: list[str] = field(default_factory=list)
    """Files of held-out conversations: acceptance is measured on them at the end, for trees and the card."""
    held_out: int = 0
    """Keep this many conversations of `data` out of training for validation: those whose id has the lowest SHA-256."""

    base: str = "embedded"
    """Base model: `embedded`, a local folder or a hub id."""
    revision: str | None = None
    """Revision of the base model on the hub."""
    base_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the frozen base: auto is bfloat16 on a GPU and float32 on a CPU."""
    init_heads: str | None = None
    """Start from these heads (a folder, or `pretrained`) instead of fresh ones; they set the architecture."""

    architecture: str = "medusa"
    """Head family."""
    num_heads: int = 4
    """K, future positions proposed besides the base's own next token."""
    num_layers: int = 1
    """Residual blocks per head."""
    own_lm_head: bool = False
    """A trainable output matrix per head instead of the base's frozen lm_head."""

    draft_vocab_size: int | None = None
    """Train on, and propose, only this many tokens, the most frequent in the supervised text: cheaper training and drafts, the
    same law of the output. None: all."""

    slot_decay: float = 0.8
    """Weight of slot k's loss is slot_decay ** (k - 1)."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    warmup_ratio: float = 0.05
    """Share of the steps that warm up linearly; cosine decay to zero follows."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm over all heads."""
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
    """Start anew although output_dir holds checkpoints or finished heads."""

    def __post_init__(self) -> None:
        _require(self.data, "data", "name at least one JSONL file")
        for name in ("epochs", "batch_size", "gradient_accumulation_steps", "save_every", "keep_checkpoints", "log_every", "max_length"):
            _require(getattr(self, name) > 0, name, "must be above 0")
        _require(self.pack_length >= self.max_length, "pack_length", f"{self.pack_length} is below max_length {self.max_length}")
        for name in ("max_steps", "limit", "draft_vocab_size"):
            _require(getattr(self, name) is None or getattr(self, name) > 0, name, "must be above 0")
        _require(0 <= self.warmup_ratio < 1, "warmup_ratio", "must lie in [0, 1)")
        _require(0 < self.slot_decay <= 1, "slot_decay", "must lie in (0, 1]")
        for name in ("learning_rate", "max_grad_norm"):
            _require(getattr(self, name) > 0, name, "must be above 0")
        for name in ("held_out", "weight_decay", "num_workers"):
            _require(getattr(self, name) >= 0, name, "must be 0 or more")
        _require(0 <= self.seed < 2**32, "seed", "must lie in [0, 2**32)")
        self.heads_config()  # raises on num_heads or num_layers below 1

    def heads_config(self) -> HeadsConfig:
        return HeadsConfig(
            architecture=self.architecture,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            own_lm_head=self.own_lm_head,
            base_model=self.base,
            base_revision=self.revision,
        )

    def schedule_dict(self) -> dict[str, Any]:
        """The options a resumed run must share with the one it continues."""
        free = {
            "output_dir",
            "save_every",
            "keep_checkpoints",
            "log_every",
            "log_with",
            "project",
            "num_workers",
            "overwrite",
            "validation",
        }
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in free}


def _require(condition: object, name: str, problem: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {problem}")


def yaml_arguments(path: str | Path) -> list[str]:
    """A YAML file -> the command-line arguments it stands for.

    Raises ValueError on unknown keys, with a suggestion, and on anything but a flat mapping.
    """
    try:
        values = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise ValueError(f"--config {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config {path}: expected `option: value` lines")
    if problem := unknown_keys_error(values, [f.name for f in dataclasses.fields(TrainConfig)], where=f"--config {path}"):
        raise ValueError(problem)
    arguments: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if value is None:  # as if it were not written
            continue
        if any(isinstance(part, (dict, list)) for part in (value if isinstance(value, list) else [value])):
            raise ValueError(f"--config {path}: {name} must be a plain value or a list of plain values")
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            arguments += [flag, *map(str, value)]
        else:
            arguments.append(f"{flag}={value}")
    return arguments


def parse_config(argv: list[str]) -> TrainConfig:
    """`[--config FILE] [flags]` -> TrainConfig; flags win over the file wherever they stand."""
    import tyro

    arguments = [part for argument in argv for part in (argument.split("=", 1) if argument.startswith("--config=") else [argument])]
    from_file: list[str] = []
    while "--config" in arguments:
        at = arguments.index("--config")
        if at + 1 == len(arguments):
            raise ValueError("--config needs a file name")
        from_file += yaml_arguments(arguments[at + 1])
        del arguments[at : at + 2]
    refuse_repeated_lists(TrainConfig, arguments)
    return tyro.cli(TrainConfig, args=from_file + arguments, prog="accelerate launch -m train --config FILE")
