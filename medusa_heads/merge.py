"""A base model + the adapter its heads were trained with -> the tuned base as a stand-alone model in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from medusa_heads import base_model
from medusa_heads.adapter import Adapter
from medusa_heads.config import HeadsConfig
from medusa_heads.fingerprint import fingerprint
from medusa_heads.quantization import quantization_of
from medusa_heads.replacing import refuse_occupied, replacing_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Write a base model with a LoRA adapter merged in (Medusa-2), as a model that stands alone."""

    adapter: Path
    """The adapter: the folder `adapter` beside heads trained with `--lora-rank`, or any LoRA adapter of peft."""
    output: Path
    """Folder of the tuned base, for `--base`; it must be empty or absent."""
    base: str = "embedded"
    """The base model the adapter was trained on, unquantised."""
    revision: str | None = None
    """Revision of the base model on the hub."""

    def run(self) -> None:
        refuse_occupied(self.output)
        model, tokenizer = merged_base(self.base, self.adapter, revision=self.revision)
        check_heads_beside(self.adapter, model)
        with replacing_folder(self.output) as work:
            model.save_pretrained(work)
            try:
                tokenizer.save_pretrained(work)
            except Exception as error:  # on a full disk it raises no OSError
                raise OSError(f"the tokenizer cannot be saved: {error}") from error
        print(f"the tuned base, fingerprint {fingerprint(model)}, is written to {self.output}")


def merged_base(base: str, adapter: Path, *, revision: str | None = None) -> tuple[PreTrainedModel, Any]:
    """The base of `--base` in the type of its files, on the CPU, with the adapter merged in; and its tokenizer."""
    model, tokenizer = base_model.load_base(base, revision=revision)
    if quantization_of(model.config):
        raise ValueError(f"--base {base} is quantised, and nothing can be merged into its packed weights: give the unquantised model")
    return Adapter.load(model, adapter).merge(), tokenizer


def check_heads_beside(adapter: Path, merged: PreTrainedModel) -> None:
    """Raises ValueError when heads lie in the folder of the adapter and belong to other merged weights."""
    try:
        config = HeadsConfig.from_file(adapter.resolve().parent / "config.json")
    except ValueError:
        return  # an adapter that lies elsewhere
    if (found := fingerprint(merged)) != config.base_fingerprint:
        raise ValueError(
            f"the heads beside --adapter {adapter} were trained for weights with fingerprint {config.base_fingerprint[:12]}..., "
            f"merging gives {found[:12]}...: give the --base (and --revision) that the adapter was trained on"
        )
