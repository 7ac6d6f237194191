"""Prompts and the base's own answers -> where the heads would have been right there.

One base forward per answer, without training code: the texts are read as decoding reads a prompt.
"""

# R positions, K heads, D hidden, T tokens of a text

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from infer.drafters.heads import HeadsDrafter
from infer.kv_cache import KVCache
from infer.tree_forward import forward_over_cache
from infer.tree_spec import BeamTree
from infer.tune.expected_acceptance import NUM_POSITIONS, Measured, measure_runs, split_runs
from medusa_heads import base_model
from medusa_heads.checkpoint import HeadsCheckpoint

MIN_POSITIONS = 100  # fewer say nothing about any tree
CHUNK_TOKENS = 1024


@torch.inference_mode()
def measure_acceptance(
    model: PreTrainedModel,
    checkpoint: HeadsCheckpoint,
    prompt_ids: Sequence[list[int]],
    answers: Sequence[list[int]],
    *,
    num_positions: int = NUM_POSITIONS,
) -> Measured:
    """Nodes of static trees and acceptance on about `num_positions` positions, in runs drawn evenly from the answers.

    Raises ValueError when the answers hold fewer than MIN_POSITIONS positions with K + 1 tokens after them.
    """
    num_heads = checkpoint.config.num_heads
    available = sum(max(0, len(answer_ids) - num_heads) for answer_ids in answers)
    if available < MIN_POSITIONS:
        raise ValueError(
            f"--prompts: the answers give {available} positions to measure on, at least {MIN_POSITIONS} are needed: "
            "give more prompts or a larger --max-new-tokens"
        )
    drafter = HeadsDrafter.from_checkpoint(model, checkpoint, BeamTree(num_heads))
    positions = _runs(model, num_heads, prompt_ids, answers, keep=min(1.0, num_positions / available))
    runs = ((drafter.draft_logits(hidden_RD), truth_RK, root_R) for hidden_RD, truth_RK, root_R in positions)
    measured = measure_runs(runs, draft_vocabulary=drafter.vocabulary)
    assert measured is not None
    return measured


def _runs(
    model: PreTrainedModel, num_heads: int, prompt_ids: Sequence[list[int]], answers: Sequence[list[int]], *, keep: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Hidden states [R, D], the K true tokens after the root [R, K] and the root [R], per run of consecutive positions."""
    generator = torch.Generator().manual_seed(0)
    pairs = list(zip(prompt_ids, answers, strict=True))
    for prompt, answer_ids in tqdm(pairs, desc="acceptance", file=sys.stderr):
        roots = torch.arange(len(prompt), len(prompt) + max(0, len(answer_ids) - num_heads))
        runs = list(split_runs(roots, keep=keep, generator=generator))
        if not runs:
            continue
        hidden_TD = text_hidden_states(model, [*prompt, *answer_ids])
        text_T = torch.tensor([*prompt, *answer_ids], device=model.device)
        for run in runs:
            run = run.to(model.device)
            yield hidden_TD[run - 1], torch.stack([text_T[run + 1 + k] for k in range(num_heads)], 1), text_T[run]


def text_hidden_states(model: PreTrainedModel, text: list[int]) -> Tensor:
    """Last hidden states [T, D] of one text, read as decoding reads a prompt."""
    cache = KVCache(base_model.cache_layer_shapes(model), 1, len(text), dtype=model.dtype, device=model.device)
    pieces = []
    for piece_1N in torch.tensor([text], device=model.device).split(CHUNK_TOKENS, dim=1):
        steps = torch.arange(piece_1N.shape[1], device=model.device)
        pieces.append(forward_over_cache(model, piece_1N, steps[None], (steps[:, None] >= steps)[None], cache)[0])
        cache.keep(steps[None], [len(steps)])
    return torch.cat(pieces)
