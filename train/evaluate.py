"""Trained heads on held-out answers of the base -> rank accuracies and expected acceptance lengths.

Needs one base forward per row of packed answers; infer/tune/expected_acceptance.py says what the figures are.
"""

# R positions, K heads, V vocabulary

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from infer.tune.expected_acceptance import Measured, measure_positions
from medusa_heads import base_model
from train.headed_model import HeadedModel
from train.packing import PackedDataset, collate


@torch.inference_mode()
def measure(
    model: HeadedModel, rows: PackedDataset, *, draft_vocabulary: Tensor | None = None, num_positions: int = 8000, seed: int = 0
) -> Measured:
    """Measures on up to `num_positions` positions whose next K + 1 tokens are all the base's own.

    draft_vocabulary: only these tokens are proposed, as in decoding.
    """
    positions = _positions(model, rows, num_positions, seed)
    chunks = ((_draft_logits(model, hidden_RD), truth_RK, root_R) for hidden_RD, truth_RK, root_R in positions)
    measured = measure_positions(chunks, draft_vocabulary=draft_vocabulary)
    if measured is None:
        longest = model.heads.config.num_heads + 1
        raise ValueError(f"validation holds no answer of {longest} tokens or more: give longer answers of the base model")
    return measured


def _draft_logits(model: HeadedModel, hidden_RD: Tensor) -> Tensor:
    states_RKD = model.heads.draft_states(hidden_RD.to(model.heads.weight.dtype))
    own = model.heads.own_logits(states_RKD)
    return own if own is not None else base_model.compute_logits(model.base, states_RKD.to(hidden_RD.dtype))


def _positions(model: HeadedModel, rows: PackedDataset, num_positions: int, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Hidden states [R, D], the K true tokens after the root [R, K] and the root [R], in chunks."""
    num_heads = model.heads.config.num_heads
    device = model.heads.weight.device
    chunk = 64 if device.type == "cuda" else 16
    full = sum(int((rows[i]["num_slots"] == num_heads).sum()) for i in range(len(rows)))
    keep = min(1.0, num_positions / max(1, full))
    generator = torch.Generator().manual_seed(seed)
    for index in range(len(rows)):
        packed = collate([rows[index]])
        chosen = (packed.num_slots[0] == num_heads) & (torch.rand(packed.num_slots.shape[1], generator=generator) < keep)
        positions = chosen.nonzero()[:, 0]
        if not len(positions):
            continue
        inputs = [t.to(device) for t in (packed.input_ids, packed.position_ids, packed.document_ids)]
        hidden_TD = model.hidden_states(*inputs)[0]
        for part in positions.to(device).split(chunk):
            ids = inputs[0][0]
            truth = torch.stack([ids[part + 2 + k] for k in range(num_heads)], 1)
            yield hidden_TD[part], truth, ids[part + 1]
