"""Measured step times and expected acceptance -> the beam tree that gives the most tokens per second.

tokens per second of N nodes = batch * expected acceptance length(N) / (draft + forward seconds(N)).
N = 0 is plain decoding: it wins where speculation gains nothing, so that heads never slow a model.
"""

# B batch, D hidden

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from infer.drafters.heads import HeadsDrafter
from infer.kv_cache import KVCache
from infer.tree import Tree
from infer.tree_forward import tree_forward
from infer.tree_spec import BeamTree
from infer.verify import verify_greedy
from medusa_heads import base_model
from medusa_heads.checkpoint import HeadsCheckpoint

SIZES = (0, 1, 2, 3, 5, 8, 11, 16, 24, 32, 48, 64)  # with the root, 5 and 11 fill the six rows of an AVX2 matmul kernel
NUM_ROUNDS = 10
TIME_LIMIT_S = 6.0
HOPELESS = 1.5  # times slower than the best size so far, at the most tokens any size could give
# Trained medusa heads of a 135M chat model on mixed text; stands in for heads whose acceptance was never measured.
DEFAULT_ACCEPTANCE: Mapping[int, float] = {1: 1.39, 4: 1.7, 8: 1.87, 16: 2.0, 32: 2.15, 64: 2.25}
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one decoding step over a tree of `num_nodes` nodes besides the root."""

    num_nodes: int
    draft_s: float
    forward_s: float

    @property
    def total_s(self) -> float:
        return self.draft_s + self.forward_s

    def figures(self, acceptance_length: float, batch_size: int) -> dict[str, Any]:
        """The row of a curve, as plain values for JSON: this step and the tokens per second it gives."""
        return {
            "batch_size": batch_size,
            "num_nodes": self.num_nodes,
            "draft_s": self.draft_s,
            "forward_s": self.forward_s,
            "expected_acceptance_length": acceptance_length,
            "expected_tokens_per_second": batch_size * acceptance_length / self.total_s,
        }


@dataclass(frozen=True, slots=True)
class TreeChoice:
    """The chosen tree and, per size tried, what the choice was made from (plain values for JSON): for the
    batch size asked for and, since rows of a batch end one after the other, for one row."""

    tree: BeamTree
    curve: list[dict[str, Any]]


def choose_tree(model: PreTrainedModel, checkpoint: HeadsCheckpoint, *, batch_size: int = 1, context: int = 256) -> TreeChoice:
    """Measures this machine and picks the size of the beam tree; takes some six seconds per number of rows.

    context: cached tokens per row during the measurement.
    """
    acceptance = checkpoint.acceptance or DEFAULT_ACCEPTANCE
    lengths = {size: expected_length(acceptance, size) for size in SIZES}
    measured = bool(checkpoint.acceptance)
    curve: list[dict[str, Any]] = []
    for rows in sorted({1, batch_size}):
        times = measure_steps(model, checkpoint, lengths, batch_size=rows, context=context)
        curve += [step.figures(lengths[step.num_nodes], rows) | {"acceptance_measured": measured} for step in times]
    return TreeChoice(BeamTree(best_size(times, lengths)), curve)


def expected_length(acceptance: Mapping[int, float], num_nodes: int) -> float:
    """Expected acceptance length of a beam tree, interpolated over log(1 + nodes) from 1 at no nodes;
    beyond the largest measured size, that size's."""
    sizes = [0, *sorted(acceptance)]
    values = [1.0, *(acceptance[size] for size in sizes[1:])]
    return float(np.interp(np.log1p(num_nodes), np.log1p(sizes), values))


def best_size(times: Sequence[StepTime], lengths: Mapping[int, float]) -> int:
    """The size with the most tokens per second; the smaller one on a tie."""
    return max(times, key=lambda step: (lengths[step.num_nodes] / step.total_s, -step.num_nodes)).num_nodes


def measure_steps(
    model: PreTrainedModel, checkpoint: HeadsCheckpoint, lengths: Mapping[int, float], *, batch_size: int, context: int
) -> list[StepTime]:
    """Step times of beam trees in growing order of size, up to where latency alone rules out more nodes."""
    trees = {size: BeamTree(size) for size in sorted(lengths)}
    times = measure_trees(model, checkpoint, trees, lengths, batch_size=batch_size, context=context)
    return list(times.values())


@torch.inference_mode()
def measure_trees(
    model: PreTrainedModel,
    checkpoint: HeadsCheckpoint,
    trees: Mapping[Key, Tree | BeamTree],
    lengths: Mapping[Key, float],
    *,
    batch_size: int,
    context: int,
    time_limit_s: float = TIME_LIMIT_S,
) -> dict[Key, StepTime]:
    """Step times of `trees`, given in growing order of size, up to where latency alone rules out more nodes.

    lengths: expected acceptance length of every tree. The fastest draft and the fastest forward of each count: what
    else a machine does only adds to them. The trees take turns, so that one that slows down for long slows all of them.
    """
    context = min(context, longest_context(model, trees))
    room = context + _most_nodes(trees) + 1
    cache = KVCache(base_model.cache_layer_shapes(model), batch_size, room, dtype=model.dtype, device=model.device)
    cache.lengths = [context] * batch_size  # zeros stand for real keys and values: they cost the same
    drafter = HeadsDrafter.from_checkpoint(model, checkpoint, BeamTree(0))
    drafters = {key: drafter.with_tree(tree) for key, tree in trees.items()}
    samples: dict[Key, list[tuple[float, float]]] = {key: [] for key in trees}
    longest = max(lengths[key] for key in trees)
    started = time.perf_counter()
    for round_ in range(NUM_ROUNDS):
        fastest = 0.0
        for key in list(samples):
            if not round_:
                _time_step(model, drafters[key], cache)  # the first call of a shape sets things up
            samples[key].append(_time_step(model, drafters[key], cache))
            seconds = sum(samples[key][-1])
            fastest = max(fastest, lengths[key] / seconds)
            if not round_ and longest / seconds < fastest / HOPELESS and _hopeless(model, drafters[key], cache, longest, fastest):
                samples = {tried: times for tried, times in samples.items() if times}
                break
        if time.perf_counter() - started > time_limit_s:
            break
    return {key: StepTime(trees[key].num_nodes, min(d for d, _ in times), min(f for _, f in times)) for key, times in samples.items()}


def longest_context(model: PreTrainedModel, trees: Mapping[Key, Tree | BeamTree]) -> int:
    """The most cached tokens beside which every one of `trees` fits the model's context; at least 1."""
    return max(1, base_model.max_length(model) - _most_nodes(trees) - 1)


def _most_nodes(trees: Mapping[Key, Tree | BeamTree]) -> int:
    return max(tree.num_nodes for tree in trees.values())


def _hopeless(model: PreTrainedModel, drafter: HeadsDrafter, cache: KVCache, longest: float, fastest: float) -> bool:
    """Whether a size is too slow even if it accepted as much as the largest tree; asked again
    twice, since a single slow sample may be the machine's."""
    return longest / min(sum(_time_step(model, drafter, cache)) for _ in range(2)) < fastest / HOPELESS


def _time_step(model: PreTrainedModel, drafter: HeadsDrafter, cache: KVCache) -> tuple[float, float]:
    """Seconds of drafting and of the forward with verification, on an arbitrary hidden state."""
    batch = len(cache.lengths)
    hidden_BD = torch.linspace(-1, 1, base_model.hidden_size(model), device=model.device, dtype=model.dtype).expand(batch, -1)
    root_B = torch.zeros(batch, dtype=torch.long, device=model.device)
    base_model.synchronize(model)
    start = time.perf_counter()
    candidates = drafter.propose(root_B, hidden_BD, [])
    base_model.synchronize(model)
    drafted = time.perf_counter()
    logits_BNV, _ = tree_forward(model, candidates, cache)
    verify_greedy(logits_BNV.argmax(-1), candidates)
    base_model.synchronize(model)
    return drafted - start, time.perf_counter() - drafted
