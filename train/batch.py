"""Packed rows on the host -> what one training forward needs, indices included.

The supervised (position, slot) pairs are listed here, on the host, so that the forward on the
device never waits to learn how many there are.
"""

# B batch, T sequence, K heads, R positions with at least one supervised slot, N (position, slot) pairs

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from train.packing import PackedBatch


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One micro-batch. tensors: keyword arguments of HeadedModel.forward, all long:
    input_ids, position_ids, document_ids [B, T]; positions [R] flat indices into B * T; pair_position
    [N] into R; pair_slot [N] from 0; targets [N]. slot_counts: pairs per slot [K]; row_ids[b]: the
    conversations in row b, by document id - 1."""

    tensors: dict[str, Tensor]
    slot_counts: Tensor
    row_ids: list[list[str]]

    @property
    def num_response_tokens(self) -> int:
        """Positions with a supervised first slot."""
        return int(self.slot_counts[0])

    def to(self, device: torch.device) -> TrainBatch:
        moved = {name: t.to(device, non_blocking=True) for name, t in self.tensors.items()}
        return TrainBatch(moved, self.slot_counts, self.row_ids)

    def pin(self) -> TrainBatch:
        return TrainBatch({name: t.pin_memory() for name, t in self.tensors.items()}, self.slot_counts, self.row_ids)

    def row_of_pair(self, pair: int) -> int:
        """The packed row that a (position, slot) pair lies in."""
        flat = int(self.tensors["positions"][self.tensors["pair_position"][pair]])
        return flat // self.tensors["input_ids"].shape[1]

    def documents_of_row(self, row: int) -> list[tuple[str, Tensor]]:
        """(conversation id, token ids) of every document in a packed row, in order."""
        ids, documents = self.tensors["input_ids"][row], self.tensors["document_ids"][row]
        return [(name, ids[documents == number]) for number, name in enumerate(self.row_ids[row], start=1)]


def make_batch(packed: PackedBatch, num_heads: int) -> TrainBatch:
    """Lists the supervised pairs of a packed batch, slot by slot."""
    num_slots = packed.num_slots.flatten()
    positions = (num_slots > 0).nonzero()[:, 0]
    slots = num_slots[positions]
    ids = packed.input_ids.flatten()
    pair_position, pair_slot, targets, counts = [], [], [], []
    for k in range(num_heads):
        supervised = (slots > k).nonzero()[:, 0]
        pair_position.append(supervised)
        pair_slot.append(torch.full_like(supervised, k))
        targets.append(ids[positions[supervised] + k + 2])
        counts.append(len(supervised))
    tensors = {
        "input_ids": packed.input_ids,
        "position_ids": packed.position_ids,
        "document_ids": packed.document_ids,
        "positions": positions,
        "pair_position": torch.cat(pair_position),
        "pair_slot": torch.cat(pair_slot),
        "targets": torch.cat(targets),
    }
    return TrainBatch(tensors, torch.tensor(counts), packed.row_ids)


def window_counts(batches: Sequence[TrainBatch]) -> Tensor:
    """Supervised pairs per slot over an accumulation window, [K]."""
    return torch.stack([batch.slot_counts for batch in batches]).sum(0)
