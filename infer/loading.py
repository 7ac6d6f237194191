"""The options --base, --heads, --tree, --dtype, --device -> a loaded model, heads and their tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from infer.auto_tree import choose_tree
from infer.drafters import NoDrafter
from infer.drafters.heads import HeadsDrafter
from infer.engine.packed_linear import fastest_copy
from infer.generate import Generator
from infer.tree import Tree
from infer.tree_spec import BeamTree, parse_tree
from medusa_heads import base_model
from medusa_heads.checkpoint import HeadsCheckpoint, load_heads

Dtype = Literal["float32", "bfloat16", "float16"]
NO_HEADS = "none"


@dataclass(frozen=True, slots=True)
class LoadedHeads:
    """Heads with the tree they draft. curve: the measurement behind `--tree auto`, else empty."""

    checkpoint: HeadsCheckpoint
    tree: Tree | BeamTree
    curve: list[dict[str, Any]]

    def drafter(self, engine: PreTrainedModel) -> HeadsDrafter:
        return HeadsDrafter(engine, self.checkpoint.heads, self.tree, draft_vocabulary=self.checkpoint.draft_vocabulary)


def pick_device(name: str) -> torch.device:
    """`auto` (a CUDA device where there is one), or a torch device. Raises ValueError when absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: write auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices; use --device cpu")
    return device


def load_model(base: str, *, dtype: Dtype | None, device: str) -> tuple[PreTrainedModel, Any]:
    """The base model on its device and its tokenizer; dtype None keeps the checkpoint's own."""
    return base_model.load_base(base, dtype=None if dtype is None else base_model.parse_dtype(dtype), device=pick_device(device))


def default_heads(base: str, heads: str | None) -> str:
    """The `--heads` in effect: the shipped ones belong to the embedded base alone."""
    if heads is not None:
        return heads
    if base == "embedded":
        return "pretrained"
    raise ValueError(f"--heads is needed for --base {base}: give a folder of heads trained for it, or `{NO_HEADS}` for plain decoding")


def load_with_tree(name: str, model: PreTrainedModel, tree: str, *, engine: PreTrainedModel, batch_size: int = 1) -> LoadedHeads:
    """Heads and the tree of a `--tree` argument, measured on this machine when it is `auto`.

    model: what the heads are checked against; engine: what decodes, `model` or a faster copy of it.
    """
    checkpoint = load_heads(name, model, dtype=engine.dtype)
    parsed = parse_tree(tree, checkpoint)
    if parsed is not None:
        return LoadedHeads(checkpoint, parsed, [])
    choice = choose_tree(engine, checkpoint, batch_size=batch_size)
    return LoadedHeads(checkpoint, choice.tree, choice.curve)


def load_generator(base: str, heads: str | None, *, tree: str, dtype: Dtype | None, device: str) -> tuple[Generator, Any]:
    """A generator for single conversations, with heads or (`--heads none`) without, and the tokenizer."""
    model, tokenizer = load_model(base, dtype=dtype, device=device)
    engine = fastest_copy(model)
    name = default_heads(base, heads)
    drafter = NoDrafter() if name == NO_HEADS else load_with_tree(name, model, tree, engine=engine).drafter(engine)
    return Generator(engine, drafter, tokenizer=tokenizer), tokenizer
