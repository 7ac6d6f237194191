"""The options --base, --heads, --tree, --dtype, --device -> a loaded model, heads and their tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from infer.drafters import Drafter, NoDrafter
from infer.drafters.adaptive import adaptive
from infer.drafters.heads import HeadsDrafter, drawn_shape
from infer.engine.packed_heads import heads_for
from infer.engine.packed_linear import decoding_copies, fastest_copy
from infer.generate import Generator
from infer.tree import Tree, load_tree
from infer.tree_spec import BeamTree, parse_tree, tuned_tree
from infer.tune.auto_tree import choose_tree
from infer.tune.tuned_check import tuned_engine
from infer.verifiers import NO_DRAFTER, SampledShape, VerifierChoice, resolve_verifier
from medusa_heads import base_model
from medusa_heads.checkpoint import HeadsCheckpoint, load_heads
from medusa_heads.quantization import Quantization

Dtype = Literal["float32", "bfloat16", "float16"]
NO_HEADS = "none"
PRUDENT = 0.25  # share of the expected tokens beyond one per step that most text brings: a copy must pay even there


@dataclass(frozen=True, slots=True)
class LoadedHeads:
    """Heads with the tree they draft and the copy of the base model that decodes with them.
    curve: the measurement behind `--tree auto`, whose tree is the one to begin with; else empty."""

    checkpoint: HeadsCheckpoint
    engine: PreTrainedModel
    tree: Tree | BeamTree
    curve: list[dict[str, Any]]

    def drafter(self) -> Drafter:
        """A new one; with a curve, adaptive: it follows the text, up to the largest size that was measured."""
        static_nodes = self.checkpoint.static_nodes if self.curve else None  # `auto` may draw where that pays; beam:N is what was asked for
        drafter = HeadsDrafter.from_checkpoint(self.engine, self.checkpoint, self.tree, static_nodes=static_nodes)
        return adaptive(drafter, self.curve) if self.curve else drafter


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


def load_model(
    base: str, *, dtype: Dtype | None, device: str, quantization: Quantization = "none", revision: str | None = None
) -> tuple[PreTrainedModel, Any]:
    """The base model on its device and its tokenizer; dtype None keeps the checkpoint's own."""
    parsed = None if dtype is None else base_model.parse_dtype(dtype)
    return base_model.load_base(base, dtype=parsed, device=pick_device(device), quantization=quantization, revision=revision)


def default_heads(base: str, heads: str | None) -> str:
    """The `--heads` in effect: the shipped ones belong to the embedded base alone."""
    if heads is not None:
        return heads
    if base == "embedded":
        return "pretrained"
    base_model.check_exists(base)
    raise ValueError(f"--heads is needed for --base {base}: give a folder of heads trained for it, or `{NO_HEADS}` for plain decoding")


def check_heads_options(heads: str | None, *, tree: str, verifier: VerifierChoice, temperature: float) -> None:
    """Raises ValueError where it is known before anything is loaded that options do not go together."""
    if heads != NO_HEADS:
        check_tree_verifier(tree, verifier, temperature=temperature)
        return
    if tree != "auto":
        raise ValueError(f"--tree {tree} has no effect with --heads {NO_HEADS}, which drafts nothing: leave it out, or give heads")
    resolve_verifier(verifier, drafter=NO_DRAFTER, sampled_shape=None, temperature=temperature)


def check_tree_verifier(tree: str, verifier: VerifierChoice, *, temperature: float) -> None:
    """Raises ValueError where heads cannot draft for the verifier over this `--tree`; what static:N and tuned look
    like, and whether auto can draw, shows only when the heads are loaded."""
    kind = tree.partition(":")[0]
    if kind in ("static", "tuned"):
        return
    shape: SampledShape | None = None
    if kind == "auto":
        shape = "tree"
    elif kind != "beam":
        shape = "chain" if kind == "chain" else drawn_shape(load_tree(tree))
    resolve_verifier(verifier, drafter=HeadsDrafter.name, sampled_shape=shape, temperature=temperature)


def load_with_tree(
    name: str, copies: Sequence[PreTrainedModel], tree: str, *, batch_size: int = 1, engine: PreTrainedModel | None = None
) -> LoadedHeads:
    """Heads, the tree of a `--tree` argument and the fastest copy for it, both measured on this machine
    when the tree is `auto`.

    copies: the base model, which the heads are checked against, and equal models that may decode faster; engine: the
    one of them to take.
    """
    checkpoint = load_heads(name, copies[0])
    parsed = parse_tree(tree, checkpoint)
    if parsed is not None:
        if parsed.num_nodes >= (room := base_model.max_length(copies[0])):
            raise ValueError(
                f"--tree {tree}: {parsed.num_nodes} nodes and the root do not fit the context of {room} tokens: use fewer nodes"
            )
        if engine is None and tree == "tuned":
            engine = tuned_engine(tuned_tree(checkpoint)[1], copies, heads=checkpoint.folder, batch_size=batch_size)
        engine = engine or fastest_copy(copies, [batch_size * (parsed.num_nodes + 1)])
        return LoadedHeads(heads_for(checkpoint, engine), engine, parsed, [])
    found = []
    for copy in copies if engine is None else [engine]:
        heads = heads_for(checkpoint, copy)
        choice = choose_tree(copy, heads, batch_size=batch_size)
        found.append(LoadedHeads(heads, copy, choice.tree, choice.curve))
    return found[best_copy([heads.curve for heads in found], batch_size)]


def best_copy(curves: Sequence[Sequence[dict[str, Any]]], batch_size: int) -> int:
    """Of the curves measured on copies of the base, the index of the one with the most expected tokens per second
    among those that are no slower than the fastest plain decoding on text that the drafts hardly fit."""
    rows = [[row for row in curve if row["batch_size"] == batch_size] for curve in curves]
    plain = max(row["expected_tokens_per_second"] for own in rows for row in own if not row["num_nodes"])
    prudent = [max(row["expected_tokens_per_second"] * _prudent_share(row["expected_acceptance_length"]) for row in own) for own in rows]
    fast_enough = [index for index, speed in enumerate(prudent) if speed >= plain]
    return max(fast_enough, key=lambda index: max(row["expected_tokens_per_second"] for row in rows[index]))


def _prudent_share(length: float) -> float:
    return (1 + PRUDENT * (length - 1)) / length


def load_generator(
    base: str,
    heads: str | None,
    *,
    tree: str,
    dtype: Dtype | None,
    device: str,
    quantization: Quantization = "none",
    revision: str | None = None,
) -> tuple[Generator, Any]:
    """A generator for single conversations, with heads or (`--heads none`) without, and the tokenizer."""
    name = default_heads(base, heads)
    model, tokenizer = load_model(base, dtype=dtype, device=device, quantization=quantization, revision=revision)
    copies = decoding_copies(model)
    if name == NO_HEADS:
        return Generator(fastest_copy(copies, [1]), NoDrafter(), tokenizer=tokenizer), tokenizer
    loaded = load_with_tree(name, copies, tree)
    return Generator(loaded.engine, loaded.drafter(), tokenizer=tokenizer), tokenizer
