"""Trained heads on held-out answers of the base -> rank accuracies and expected acceptance lengths.

Uses the decoder's own tree builder on true prefixes, so it needs one base forward per row. Figures
are means over positions drawn evenly; decoding visits hard positions more often, so its acceptance
comes out some per cent lower.
"""

# R positions, K heads, V vocabulary, N tree nodes

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infer.candidates import beam_candidates
from infer.verify import accept_matching
from medusa_heads import base_model
from train.headed_model import HeadedModel
from train.packing import PackedDataset, collate

NODE_COUNTS = (1, 2, 4, 8, 16, 32, 64)
NUM_RANKS = 32


@dataclass(frozen=True, slots=True)
class Measured:
    """rank_accuracy: [K][32], how often head k's token of rank r is true given that the path above
    lies within the ranks; acceptance_length: expected tokens per step by nodes of the beam tree, the
    bonus token included; top1: [K]; num_positions: how many were measured."""

    rank_accuracy: list[list[float]]
    acceptance_length: dict[int, float]
    top1: list[float]
    num_positions: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "rank_accuracy": [[round(a, 5) for a in row] for row in self.rank_accuracy],
            "acceptance_length": {str(n): round(tau, 4) for n, tau in self.acceptance_length.items()},
            "top1": [round(a, 4) for a in self.top1],
            "num_positions": self.num_positions,
            "convention": "positions drawn evenly from held-out answers of the base; bonus token included",
        }


@torch.inference_mode()
def measure(
    model: HeadedModel, rows: PackedDataset, *, draft_vocabulary: Tensor | None = None, num_positions: int = 8000, seed: int = 0
) -> Measured:
    """Measures on up to `num_positions` positions whose next K + 1 tokens are all the base's own.

    draft_vocabulary: only these tokens are proposed, as in decoding.
    """
    num_heads = model.heads.config.num_heads
    hits = torch.zeros(num_heads, NUM_RANKS, dtype=torch.float64)
    reached = torch.zeros(num_heads, dtype=torch.float64)
    accepted = dict.fromkeys(NODE_COUNTS, 0)
    top1 = torch.zeros(num_heads, dtype=torch.float64)
    total = 0
    for hidden_RD, truth_RK, root_R in _positions(model, rows, num_positions, seed):
        logits_RKV = _draft_logits(model, hidden_RD)
        if draft_vocabulary is not None:
            outside = torch.ones(logits_RKV.shape[-1], dtype=torch.bool, device=logits_RKV.device)
            outside[draft_vocabulary.to(outside.device)] = False
            logits_RKV = logits_RKV.masked_fill(outside, -torch.inf)
        ranks_RK = (logits_RKV > logits_RKV.gather(2, truth_RK[:, :, None])).sum(-1).cpu()
        on_path_R = torch.ones(len(ranks_RK), dtype=torch.bool)
        for k in range(num_heads):
            ranks_R = ranks_RK[on_path_R, k]
            reached[k] += len(ranks_R)
            hits[k] += torch.bincount(ranks_R[ranks_R < NUM_RANKS], minlength=NUM_RANKS)
            top1[k] += int((ranks_RK[:, k] == 0).sum())
            on_path_R &= ranks_RK[:, k] < NUM_RANKS
        for num_nodes in NODE_COUNTS:
            accepted[num_nodes] += int(_accepted(root_R, logits_RKV, truth_RK, num_nodes).sum())
        total += len(root_R)
    if not total:
        raise ValueError(f"validation holds no answer of {num_heads + 1} tokens or more: give longer answers of the base model")
    return Measured(
        (hits / reached.clamp(min=1)[:, None]).tolist(),
        {n: 1 + count / total for n, count in accepted.items()},
        (top1 / total).tolist(),
        total,
    )


def _draft_logits(model: HeadedModel, hidden_RD: Tensor) -> Tensor:
    states_RKD = model.heads.draft_states(hidden_RD.to(model.heads.weight.dtype))
    own = model.heads.own_logits(states_RKD)
    return own if own is not None else base_model.compute_logits(model.base, states_RKD.to(hidden_RD.dtype))


def _accepted(root_R: Tensor, logits_RKV: Tensor, truth_RK: Tensor, num_nodes: int) -> Tensor:
    candidates = beam_candidates(root_R, logits_RKV, num_nodes)
    path_RK = torch.cat([root_R[:, None], truth_RK], 1)
    truth_RN = path_RK.gather(1, candidates.depths_BN.expand_as(candidates.tokens_BN))
    return accept_matching(candidates.tokens_BN == truth_RN, truth_RN, candidates).length_B


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
