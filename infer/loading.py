"""The options --base, --heads, --tree, --dtype, --device -> a loaded model, heads and their tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from infer.auto_tree import choose_tree
from infer.drafters import NoDrafter
from infer.drafters.heads import HeadsDrafter
from infer.engine.packed_linear import decoding_copies, fastest_copy
from infer.generate import Generator
from infer.tree import Tree
from infer.tree_spec import BeamTree, parse_tree
from medusa_heads import base_model
from medusa_heads.checkpoint import HeadsCheckpoint, in_dtype, load_heads

Dtype = Literal["float32", "bfloat16", "float16"]
NO_HEADS = "none"


@dataclass(frozen=True, slots=True)
class LoadedHeads:
    """Heads with the tree they draft and the copy of the base model that decodes with them.
    curve: the measurement behind `--tree auto`, else empty."""

    checkpoint: HeadsCheckpoint
    engine: PreTrainedModel
    tree: Tree | BeamTree
    curve: list[dict[str, Any]]

    def drafter(self) -> HeadsDrafter:
        return HeadsDrafter(self.engine, self.checkpoint.heads, self.tree, draft_vocabulary=self.checkpoint.draft_vocabulary)


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
    if device.type not in ("cpu", "cuda"):
        try:
            torch.zeros(1, device=device).item()  # `meta` holds no numbers, the others may be missing here
        except (RuntimeError, AssertionError, ImportError):
            raise ValueError(f"--device {name}: torch cannot compute on such a device here; use --device cpu") from None
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


def load_with_tree(name: str, copies: Sequence[PreTrainedModel], tree: str, *, batch_size: int = 1) -> LoadedHeads:
    """Heads, the tree of a `--tree` argument and the fastest copy for it, both measured on this machine
    when the tree is `auto`.

    copies: the base model, which the heads are checked against, and equal models that may decode faster.
    """
    checkpoint = load_heads(name, copies[0])
    parsed = parse_tree(tree, checkpoint)
    if parsed is not None:
        engine = fastest_copy(copies, [batch_size * (parsed.num_nodes + 1)])
        return LoadedHeads(in_dtype(checkpoint, engine.dtype), engine, parsed, [])
    found = []
    for engine in copies:
        heads = in_dtype(checkpoint, engine.dtype)
        choice = choose_tree(engine, heads, batch_size=batch_size)
        found.append(LoadedHeads(heads, engine, choice.tree, choice.curve))
    return max(found, key=lambda heads: max(row["expected_tokens_per_second"] for row in heads.curve))


def load_generator(base: str, heads: str | None, *, tree: str, dtype: Dtype | None, device: str) -> tuple[Generator, Any]:
    """A generator for single conversations, with heads or (`--heads none`) without, and the tokenizer."""
    model, tokenizer = load_model(base, dtype=dtype, device=device)
    copies, name = decoding_copies(model), default_heads(base, heads)
    if name == NO_HEADS:
        return Generator(fastest_copy(copies, [1]), NoDrafter(), tokenizer=tokenizer), tokenizer
    loaded = load_with_tree(name, copies, tree)
    return Generator(loaded.engine, loaded.drafter(), tokenizer=tokenizer), tokenizer
