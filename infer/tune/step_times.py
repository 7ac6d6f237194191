"""A drafter on a copy of the base -> seconds of its steps on this machine, by size and rows: the curve of `adaptive`.

For drafters whose acceptance nobody measured beforehand; heads have curves of their own (tune/auto_tree.py).
"""

# B batch, D hidden

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from infer.candidates import Candidates, chain_candidates
from infer.drafters import Drafter
from infer.kv_cache import KVCache
from infer.tree_forward import tree_forward
from infer.tune.auto_tree import StepTime
from infer.verify import verify_greedy
from medusa_heads import base_model

NUM_ROUNDS = 5
TIME_LIMIT_S = 4.0
CONTEXT = 256  # cached tokens a row
DRAFTER_CONTEXT = 64  # a draft model reads it first, so it is short
PERIOD = 32  # of the text that lookups are timed on: it repeats itself, longer than any of their drafts
# Share of tokens accepted after accepted ones, to begin with. What happens soon corrects the level of the curve, not its
# shape: near 1, a short chain that is accepted to its end makes longer ones worth drafting.
CHAIN_RATE = 0.9

Seconds = dict[int, dict[int, float]]  # by rows, then by nodes besides the root


def sizes_up_to(max_nodes: int) -> list[int]:
    """Nothing, powers of two, and max_nodes."""
    return sorted({0, max_nodes, *(2**power for power in range(max_nodes.bit_length()))})


def expected_length(num_nodes: int) -> float:
    """Tokens per step of a chain whose every token is accepted with probability CHAIN_RATE after accepted ones."""
    return sum(CHAIN_RATE**depth for depth in range(num_nodes + 1))


def step_curve(drafter: Drafter, model: PreTrainedModel, forward_s: Seconds) -> list[dict[str, Any]]:
    """Rows of `StepTime.figures` for every size of the drafter. forward_s: see `measure_forwards`."""
    curve: list[dict[str, Any]] = []
    for num_rows, by_nodes in forward_s.items():
        sizes = sizes_up_to(drafter.max_nodes)
        draft_s = measure_drafts(drafter, model, sizes, num_rows=num_rows)
        steps = [StepTime(size, draft_s[size], by_nodes[size]) for size in sizes]
        curve += [step.figures(expected_length(step.num_nodes), num_rows) for step in steps]
    return curve


@torch.inference_mode()
def measure_forwards(model: PreTrainedModel, sizes: Sequence[int], *, batch_size: int) -> Seconds:
    """Seconds of one verified forward over chains of `sizes` nodes: for one row, since the rows of a batch end one
    after the other, and for batch_size rows."""
    return {num_rows: _measure_rows(model, sizes, num_rows) for num_rows in sorted({1, batch_size})}


def _measure_rows(model: PreTrainedModel, sizes: Sequence[int], num_rows: int) -> dict[int, float]:
    room = max(sizes) + 1
    context = max(1, min(CONTEXT, base_model.max_length(model) - room))
    cache = KVCache(base_model.cache_layer_shapes(model), num_rows, context + room, dtype=model.dtype, device=model.device)
    cache.lengths = [context] * num_rows  # zeros stand for real keys and values: they cost the same
    root_B = torch.zeros(num_rows, dtype=torch.long, device=model.device)

    def step(size: int) -> None:
        chain_BC = root_B[:, None].expand(-1, size)
        candidates = chain_candidates(root_B, chain_BC) if size else Candidates.root_only(root_B)
        logits_BNV, _ = tree_forward(model, candidates, cache)
        verify_greedy(logits_BNV.argmax(-1), candidates)

    return least_seconds(model, step, sizes)


@torch.inference_mode()
def measure_drafts(drafter: Drafter, model: PreTrainedModel, sizes: Sequence[int], *, num_rows: int) -> dict[int, float]:
    """Seconds of proposing `sizes` nodes a row; 0 for none. Leaves the drafter at its largest size."""
    context = max(2, min(DRAFTER_CONTEXT, base_model.max_length(model) - max(sizes) - 1))
    text = [index % PERIOD % base_model.vocab_size(model) for index in range(context)]
    root_B = torch.full((num_rows,), text[-1], dtype=torch.long, device=model.device)
    hidden_BD = torch.zeros(num_rows, base_model.hidden_size(model), dtype=model.dtype, device=model.device)
    drafter.start([text[:-1]] * num_rows)

    def step(size: int) -> None:
        drafter.resize(size)
        drafter.propose(root_B, hidden_BD, [list(text) for _ in range(num_rows)])

    drafted = [size for size in sizes if size]
    seconds = least_seconds(model, step, drafted)
    drafter.resize(max(drafted))
    return {0: 0.0} | seconds


def least_seconds(model: PreTrainedModel, step: Callable[[int], None], sizes: Sequence[int]) -> dict[int, float]:
    """Seconds of the fastest step(size), after a first call that sets things up: what else a machine does only adds to them. The
    sizes take turns, so that one that slows down for long slows all of them."""
    samples: Mapping[int, list[float]] = {size: [] for size in sizes}
    started = time.perf_counter()
    for round_ in range(NUM_ROUNDS):
        for size in sizes:
            if not round_:
                step(size)
            base_model.synchronize(model)
            start = time.perf_counter()
            step(size)
            base_model.synchronize(model)
            samples[size].append(time.perf_counter() - start)
        if time.perf_counter() - started > TIME_LIMIT_S:
            break
    return {size: min(times) for size, times in samples.items()}
