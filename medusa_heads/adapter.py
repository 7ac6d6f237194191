"""A base model + a LoRA adapter (peft): attached, switched off, stored as a folder, merged into weights of the base's own kind."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper, get_peft_model_state_dict, load_peft_weights
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from medusa_heads import base_model
from medusa_heads.replacing import replacing_folder
from medusa_heads.suggest import suggest

ADAPTER_DIR = "adapter"  # beside the heads that were trained with it
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OSError, RuntimeError, SafetensorError)  # what peft raises for bad files
ALL_LINEAR = "all-linear"  # peft's own word: every linear layer but the LM head


class Adapter:
    """An adapter that acts inside `base`, which stays a plain PreTrainedModel for everyone else. Not a module: what it trains
    are parameters of the base's own layers."""

    def __init__(self, model: PeftModel) -> None:
        self.model = model
        self.layers = [module for module in model.modules() if isinstance(module, LoraLayer)]

    @classmethod
    def attach(cls, base: PreTrainedModel, *, rank: int, alpha: float | None = None, targets: Sequence[str] = (ALL_LINEAR,)) -> Adapter:
        """A new adapter, float32, that does nothing yet. It scales by alpha / rank; None: alpha = rank.

        targets: ends of the names of linear layers, or `all-linear`. Raises ValueError on unknown ones and on the LM head.
        """
        check_targets(base, targets)
        names = ALL_LINEAR if ALL_LINEAR in targets else list(targets)
        options: dict[str, Any] = {"r": rank, "lora_alpha": rank if alpha is None else alpha, "target_modules": names, "lora_dropout": 0.0}
        with _without_advice():
            return cls(get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options)))  # type: ignore[arg-type]

    @classmethod
    def load(cls, base: PreTrainedModel, folder: Path) -> Adapter:
        """Raises ValueError when the folder holds no LoRA adapter that fits, or one that adapts the LM head."""
        if not (folder / "adapter_config.json").is_file():
            raise ValueError(f"--adapter {folder}: no adapter_config.json there; give the folder `{ADAPTER_DIR}` of heads trained with one")
        check_kind(folder)
        tied = _tied(base)
        try:
            model = _put_in(base, folder)
            if any(isinstance(m, LoraLayer | ModulesToSaveWrapper) for m in (base_model.lm_head(base), base.get_input_embeddings())):
                raise ValueError(f"--adapter {folder}: {_never_adapted(tied)}")
            if problem := _what_is_missing(model, folder):
                raise ValueError(_does_not_fit(folder, problem))
        except ValueError:
            _withdraw(base)
            raise
        return cls(model)

    def parameters(self) -> list[nn.Parameter]:
        """What it trains, in the order of the base's layers."""
        return [p for name, p in self.model.named_parameters() if "lora_" in name]

    @contextmanager
    def off(self) -> Iterator[None]:
        """The untouched base within the block."""
        self.model.base_model.disable_adapter_layers()  # type: ignore[operator]
        try:
            yield
        finally:
            self.model.base_model.enable_adapter_layers()  # type: ignore[operator]

    @contextmanager
    def left_to_autocast(self) -> Iterator[None]:
        """Under autocast: peft would copy every layer's input to float32, the adapter's type, and autocast back again, to be kept for
        the gradient; within the block autocast meets the input itself. The same numbers, fewer and smaller copies."""
        for layer in self.layers:
            layer.cast_input_dtype_enabled = False
        try:
            yield
        finally:
            for layer in self.layers:
                layer.cast_input_dtype_enabled = True

    def save(self, folder: Path, *, base_name: str) -> None:
        """peft's own format. base_name: the base it belongs to, for the record."""
        self.model.peft_config["default"].base_model_name_or_path = base_name
        with _without_advice(), replacing_folder(folder) as work:
            self.model.save_pretrained(str(work), save_embedding_layers=False)  # `auto` would ask the hub about the vocabulary
            (work / "README.md").write_text(ADAPTER_CARD.format(base=base_name))

    def merge(self) -> PreTrainedModel:
        """The base with the adapter in its weights, of their own dtype, and no trace of the adapter.

        The sum is made in float64, so that every machine rounds it to the same weights, which heads are checked against.
        """
        for layer in self.layers:
            dtype = next(layer.get_base_layer().parameters()).dtype
            layer.double()  # type: ignore[attr-defined]
            try:
                layer.merge()  # type: ignore[attr-defined]
            except RuntimeError as error:
                raise ValueError(f"the adapter cannot be merged into the base's weights ({_one_line(error)})") from error
            layer.get_base_layer().to(dtype)
        merged = self.model.base_model.unload()  # type: ignore[operator]
        merged.__dict__.pop("peft_config", None)
        merged.name_or_path = ""  # its weights are not those of the files it came from
        return merged  # type: ignore[no-any-return]


def check_kind(folder: Path) -> None:
    """Raises ValueError for what is not LoRA, or does more than add to the weights of its layers."""
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except UNREADABLE as error:
        raise ValueError(f"--adapter {folder}: its adapter_config.json cannot be read ({_one_line(error)})") from error
    if not isinstance(config, LoraConfig):
        raise ValueError(f"--adapter {folder} is of type {config.peft_type}: only LoRA can be merged here")
    for option in ("trainable_token_indices", "layer_replication", "alora_invocation_tokens"):
        if getattr(config, option, None):
            raise ValueError(f"--adapter {folder} has {option}, which cannot be merged here: only what LoRA adds to linear layers can")


def _put_in(base: PreTrainedModel, folder: Path) -> PeftModel:
    try:
        with _without_advice():
            return PeftModel.from_pretrained(base, str(folder))
    except UNREADABLE as error:
        raise ValueError(_does_not_fit(folder, _one_line(error))) from error


def _does_not_fit(folder: Path, reason: str) -> str:
    return f"--adapter {folder} does not fit this base ({reason}): give the base it was trained on, or copy it again"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _withdraw(base: PreTrainedModel) -> None:
    """The base as it was before peft put its layers in."""
    for name, module in list(base.named_modules()):
        original = module.get_base_layer() if isinstance(module, BaseTunerLayer) else getattr(module, "original_module", None)
        if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper) and original is not None:
            base.set_submodule(name, original)
    base.__dict__.pop("peft_config", None)


def _what_is_missing(model: PeftModel, folder: Path) -> str | None:
    """peft loads what fits and passes over the rest."""
    stored, expected = load_peft_weights(str(folder), device="cpu"), get_peft_model_state_dict(model, save_embedding_layers=False)
    if differing := sorted(stored.keys() ^ expected.keys()):
        return f"{differing[0]} is in {'the file' if differing[0] in stored else 'the model'} alone"
    return next((f"{name} holds values that are not finite" for name, tensor in stored.items() if not tensor.isfinite().all()), None)


ADAPTER_CARD = """---
base_model: "{base}"
library_name: peft
---

A LoRA adapter for `{base}`, trained together with the draft heads in the folder above. These are lossless with respect to the base
with this adapter merged in, and to nothing else:

    medusa-heads merge --base {base} --adapter THIS_FOLDER --output MERGED
"""


@contextmanager
def _without_advice() -> Iterator[None]:
    """peft's warnings are about what it sets right itself (the layout of GPT-2's layers) or what transformers renamed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_targets(base: PreTrainedModel, targets: Sequence[str]) -> None:
    """Raises ValueError when there is no target, or one is no linear layer of the base, or is its LM head or its input embedding."""
    modules = {name: module for name, module in base.named_modules() if name}
    layers = {name: module for name, module in modules.items() if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"}
    linear = sorted({name.rpartition(".")[2] for name in layers})
    if not targets:
        raise ValueError(f"--lora-targets names no layer: leave it out for {ALL_LINEAR}, or take some of {', '.join(linear)}")
    frozen = {id(base_model.lm_head(base)), id(base.get_input_embeddings())}
    for target in targets:
        matched = [module for name, module in modules.items() if name == target or name.endswith(f".{target}")]
        if target == ALL_LINEAR:
            continue
        if not matched:
            raise ValueError(
                f"--lora-targets {target!r}{suggest(target, linear)}: no such layer in the base; known are {ALL_LINEAR}, "
                f"{', '.join(linear)}"
            )
        if any(id(module) in frozen for module in matched):
            raise ValueError(f"--lora-targets {target!r}: {_never_adapted(_tied(base))}. Leave it out")
        if any(module not in layers.values() for module in matched):
            raise ValueError(f"--lora-targets {target!r}: not a linear layer; take some of {', '.join(linear)}")


def _never_adapted(tied: bool) -> str:
    return (
        "LM head and input embedding are never adapted: the draft heads share the LM head, frozen, and where the two are tied "
        f"(tie_word_embeddings), as {'here' if tied else 'in many models'}, an adapter on one cannot be merged without changing the other"
    )


def _tied(base: PreTrainedModel) -> bool:
    return base_model.lm_head_parameters(base)[0] is getattr(base.get_input_embeddings(), "weight", None)
