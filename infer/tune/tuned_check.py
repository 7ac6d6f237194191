"""A stored tuned tree and this run -> the copy of the base it was measured on, and a warning where anything else differs."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from infer.engine.packed_linear import is_packed
from infer.hardware import hardware


def engine_name(model: PreTrainedModel) -> str:
    return "packed" if is_packed(model) else "stock"


def tuned_engine(document: Mapping[str, Any], copies: Sequence[PreTrainedModel], *, heads: Path, batch_size: int) -> PreTrainedModel | None:
    """The copy that the tree was chosen for, None where there is none like it.

    Warns on standard error, naming the command to run again, when the tree was measured on another machine, with
    other threads, in another number type, for another batch size, or on such a copy: another tree may be faster here.
    """
    engines = {engine_name(copy): copy for copy in copies}
    wanted = document["choice"].get("engine")
    model = copies[0]
    here = conditions(hardware(model.device), str(model.dtype).removeprefix("torch."), batch_size)
    settings = document.get("settings", {})
    there = conditions(document.get("hardware", {}), settings.get("dtype"), settings.get("batch_size"))
    found = {**here, "layers": wanted if wanted in engines else "/".join(engines)}
    stored = {**there, "layers": wanted}
    if different := [f"{name} {stored.get(name)}, here {value}" for name, value in found.items() if stored.get(name) != value]:
        print(
            f"warning: --tree tuned was measured with {'; '.join(different)}. Another tree may be faster: give --tree auto, "
            f"or measure again with `{tune_command(document, model, heads=heads, batch_size=batch_size)}`",
            file=sys.stderr,
        )
    return engines.get(wanted)


def conditions(machine: Mapping[str, Any], dtype: str | None, batch_size: int | None) -> dict[str, Any]:
    """What step times depend on, besides the base model and its layers."""
    place = {"GPU": machine["gpu"]} if machine.get("gpu") else {"CPU": machine.get("cpu"), "threads": machine.get("num_threads")}
    return {**place, "dtype": dtype, "batch size": batch_size}


def tune_command(document: Mapping[str, Any], model: PreTrainedModel, *, heads: Path, batch_size: int) -> str:
    """`medusa-heads tree` with the prompts and the base of the stored tree, under the conditions of this run."""
    settings = document.get("settings", {})
    options = {
        "base": settings.get("base", "BASE"),
        "base-quantization": settings.get("base_quantization"),
        "revision": settings.get("revision"),
        "heads": heads,
        "prompts": settings.get("prompts") or document.get("prompts", {}).get("file", "PROMPTS"),
        "limit": settings.get("limit"),
        "max-new-tokens": settings.get("max_new_tokens"),
        "batch-size": batch_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device,
    }
    given = [(f"--{name}", str(value)) for name, value in options.items() if value is not None]
    return shlex.join(["medusa-heads", "tree", *itertools.chain(*given)])
