"""Trained heads on held-out answers of the base -> the best nodes of static trees, and acceptance lengths.

Needs one base forward per row of packed answers; infer/tune/expected_acceptance.py says what the figures are.
"""

# R positions, K heads, V vocabulary

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from infer.tune.expected_acceptance import NUM_POSITIONS, Measured, measure_runs, split_runs
from medusa_heads import base_model
from train.headed_model import HeadedModel
from train.packing import PackedDataset, collate


@torch.inference_mode()
def measure(
    model: HeadedModel, rows: PackedDataset, *, draft_vocabulary: Tensor | None = None, num_positions: int = NUM_POSITIONS, seed: int = 0
) -> Measured:
    """Measures on about `num_positions` positions whose next K + 1 tokens are all the base's own.

    draft_vocabulary: only these tokens are proposed, as in decoding; ascending.
    """
    vocabulary = None if draft_vocabulary is None else draft_vocabulary.to(model.heads.weight.device)
    positions = _runs(model, rows, num_positions, seed)
    runs = ((_draft_logits(model, hidden_RD, vocabulary), truth_RK, root_R) for hidden_RD, truth_RK, root_R in positions)
    measured = measure_runs(runs, draft_vocabulary=vocabulary)
    if measured is None:
        longest = model.heads.config.num_heads + 1
        raise ValueError(f"validation holds no answer of {longest} tokens or more: give longer answers of the base model")
    return measured


def _draft_logits(model: HeadedModel, hidden_RD: Tensor, vocabulary: Tensor | None) -> Tensor:
    states_RKD = model.heads.draft_states(hidden_RD.to(model.heads.weight.dtype))
    own = model.heads.own_logits(states_RKD)
    logits_RKV = own if own is not None else base_model.compute_logits(model.base, states_RKD.to(hidden_RD.dtype))
    return logits_RKV if vocabulary is None else logits_RKV[..., vocabulary]


def _runs(model: HeadedModel, rows: PackedDataset, num_positions: int, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Hidden states [R, D], the K true tokens after the root [R, K] and the root [R], per run of consecutive positions."""
    num_heads = model.heads.config.num_heads
    device = model.heads.weight.device
    full = sum(int((rows[i]["num_slots"] == num_heads).sum()) for i in range(len(rows)))
    keep = min(1.0, num_positions / max(1, full))
    generator = torch.Generator().manual_seed(seed)
    for index in range(len(rows)):
        packed = collate([rows[index]])
        positions = (packed.num_slots[0] == num_heads).nonzero()[:, 0]
        runs = list(split_runs(positions, keep=keep, generator=generator))
        if not runs:
            continue
        inputs = [t.to(device) for t in (packed.input_ids, packed.position_ids, packed.document_ids)]
        hidden_TD = model.hidden_states(*inputs)[0]
        ids = inputs[0][0]
        for run in runs:
            run = run.to(device)
            yield hidden_TD[run], torch.stack([ids[run + 2 + k] for k in range(num_heads)], 1), ids[run + 1]
