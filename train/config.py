"""A YAML file and command-line flags -> TrainConfig: every option of training heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from medusa_heads.config import HeadsConfig
from medusa_heads.quantization import Quantization
from medusa_heads.suggest import suggest
from train.command_line import parse_command
from train.run_config import RunConfig, require

OBJECTIVES = ("ce", "kl", "tv", "lk", "ce_l1")  # train/objectives.py
SLOT_WEIGHTS = ("decay", "uniform", "d_pace")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(RunConfig):
    """Train draft heads on a frozen base model."""

    base_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the frozen base: auto is bfloat16 on a GPU and float32 on a CPU."""
    base_quantization: Quantization = "none"
    """Packs the base's weights into 8bit or 4bit (nf4), by bitsandbytes; the heads belong to the base in this form. With lora_rank
    (QLoRA) they belong to the unquantised base with the adapter merged in."""
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

    objective: str = "ce"
    """What a slot is trained for, with p the base's law there, q the head's and x the token that follows: `ce` -log q(x); `kl`
    sum p log(p / q); `tv` 1 - sum min(p, q), the share of sampled drafts that is refused; `lk` lam kl + (1 - lam) tv with
    lam = exp(-lk_eta sum min(p, q)) (arXiv 2602.23881); `ce_l1` .1 ce + .9 sum |p - q| (DSpark). All but ce run the lm_head once more."""
    lk_eta: float = 10.0
    """How fast `lk` turns from kl to tv as the laws come to agree."""
    slot_weights: str = "decay"
    """What slot k's loss counts: `decay` slot_decay ** (k - 1); `uniform` 1; `d_pace` at every position what the slot adds to the
    expected length of the accepted draft there (arXiv 2605.18810)."""
    slot_decay: float = 0.8
    """The base of `--slot-weights decay`."""

    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""

    lora_rank: int = 0
    """Medusa-2: rank of a LoRA adapter in the base, trained together with the heads; 0 leaves the base as it is. The heads then serve
    the tuned base, which `medusa-heads merge` writes, and no other."""
    lora_alpha: float | None = None
    """The adapter acts times lora_alpha / lora_rank. None: lora_rank."""
    lora_targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Layers to adapt, by the ends of their names (q_proj v_proj), or all-linear: all but the LM head, which is never adapted."""
    lora_learning_rate: float | None = None
    """Peak learning rate of the adapter. None: a quarter of learning_rate."""
    lora_start_ratio: float = 0.1
    """Share of the steps in which the heads train alone, before the adapter joins."""
    lora_objective: Literal["distill", "data"] = "distill"
    """What holds the base to itself: distill, by KL, to its own law with the adapter switched off; data, by cross-entropy, to the text."""
    lora_heads_share: float | None = None
    """What the heads' loss counts for the adapter at the end; it grows from 0 as a quarter of a sine. None: .01 (distill), .2 (data)."""
    validate_every: int = 0
    """Optimizer steps between validations: the decoder answers the validation prompts with the heads as they are, and counts how many
    tokens a base forward gives. 0: only at the end."""
    validation_prompts: str | None = None
    """Prompts to answer at a validation: a file of rows as for `medusa-heads regenerate`. None: those of the held-out conversations."""
    num_validation_prompts: int = 32
    """How many of them, spread evenly."""
    validation_tree: str = "beam:16"
    """Tree of the validation: chain, beam:N or a JSON file of rank paths."""
    keep: Literal["best", "last"] = "best"
    """Which heads become the finished ones: `best`, of the validations whose acceptance is within a standard error of the longest (paired,
    over the prompts) those of the last; or `last`, those of the last step."""
    patience: int = 0
    """Stop after this many validations in a row without a longer acceptance. 0: never."""

    hidden_states: Literal["online", "device", "disk"] = "online"
    """Where the frozen base's hidden states come from: online runs the base in every step. The others run it once over the data, before
    the first step: device holds the states on the GPU (without one, in main memory) of every process; disk keeps them in
    hidden_states_dir. `medusa-heads estimate` says what each costs."""
    hidden_states_dir: str | None = None
    """Folder of the states of `--hidden-states disk`, which all processes share; later runs on the same base and data read them again."""

    NOT_IN_SCHEDULE: ClassVar[frozenset[str]] = RunConfig.NOT_IN_SCHEDULE | {
        "hidden_states_dir",
        "validate_every",
        "validation_prompts",
        "num_validation_prompts",
        "keep",
        "patience",
    }

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        require(self.draft_vocab_size is None or self.draft_vocab_size > 1, "draft_vocab_size", "must be at least 2")
        require(0.01 <= self.slot_decay <= 1, "slot_decay", "must lie in [0.01, 1]")
        require(self.num_validation_prompts > 0, "num_validation_prompts", "must be above 0")
        has_prompts = self.held_out or self.validation or self.validation_prompts
        require(has_prompts or not self.validate_every, "validate_every", "no prompts: add --held-out N or --validation-prompts FILE")
        require(self.validate_every or not self.patience, "patience", "nothing to wait for: add --validate-every N")
        for name in ("validate_every", "patience", "lk_eta", "lora_rank"):
            require(getattr(self, name) >= 0, name, "must be 0 or more")
        _require_known(self.objective, OBJECTIVES, "objective")
        _require_known(self.slot_weights, SLOT_WEIGHTS, "slot_weights")
        for name in ("lora_alpha", "lora_learning_rate", "lora_heads_share"):
            require(getattr(self, name) is None or getattr(self, name) > 0, name, "must be above 0")
        require(0 <= self.lora_start_ratio < 1, "lora_start_ratio", "must lie in [0, 1)")
        own_and_few = self.own_lm_head and self.draft_vocab_size
        require(not own_and_few, "draft_vocab_size", "own LM heads are trained over all tokens: leave it or --own-lm-head out")
        self._check_hidden_states()
        self.heads_config()  # raises on num_heads or num_layers below 1

    def _check_hidden_states(self) -> None:
        require(
            not self.lora_rank or self.hidden_states == "online",
            "hidden_states",
            f"{self.hidden_states} stores the states of a frozen base, and lora_rank {self.lora_rank} trains it: use --hidden-states "
            "online, or --lora-rank 0",
        )
        needs_folder = self.hidden_states == "disk"
        require(self.hidden_states_dir or not needs_folder, "hidden_states", "disk needs a folder: add --hidden-states-dir FOLDER")
        require(needs_folder or not self.hidden_states_dir, "hidden_states_dir", "goes with --hidden-states disk alone: leave it out")
        if self.hidden_states_dir:
            folder, output = Path(self.hidden_states_dir).resolve(), Path(self.output_dir).resolve()
            require(
                folder != output and not any(folder.is_relative_to(output / name) for name in ("checkpoints", "previous")),
                "hidden_states_dir",
                f"{self.hidden_states_dir} is where --output-dir {self.output_dir} keeps its own files: choose another folder",
            )

    def heads_config(self) -> HeadsConfig:
        return HeadsConfig(
            architecture=self.architecture,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            own_lm_head=self.own_lm_head,
            base_model=self.base,
            base_revision=self.revision,
            base_quantization=self.base_quantization,
        )

    def inputs(self) -> dict[str, list[str]]:
        further = {name: getattr(self, name) for name in ("validation_prompts", "init_heads", "hidden_states_dir")}
        return {**RunConfig.inputs(self), **{name: [path] for name, path in further.items() if path}}


def _require_known(value: str, known: tuple[str, ...], name: str) -> None:
    require(value in known, name, f"unknown {value!r}{suggest(value, known)}; known are {', '.join(known)}")


def parse_config(argv: list[str]) -> TrainConfig:
    """`[--config FILE] [flags]` -> TrainConfig; flags win over the file wherever they stand."""
    return parse_command(TrainConfig, argv, prog="accelerate launch --quiet -m train --config FILE")
