"""Packed rows on the host -> what one training forward needs, indices included.

The supervised (position, slot) pairs are listed here, on the host, so that the forward on the
device never waits to learn how many there are.
"""

# B batch, T sequence, K heads, R positions with at least one supervised slot, N (position, slot) pairs,
# S stored hidden states, M of them in a micro-batch, D hidden

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from train.packing import PackedBatch, PackedDataset


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
        return replace(self, tensors={name: t.to(device, non_blocking=True) for name, t in self.tensors.items()})

    def pin_memory(self) -> TrainBatch:
        """A copy from which `to` does not make the host wait; the data loader calls it by this name."""
        return replace(self, tensors={name: t.pin_memory() for name, t in self.tensors.items()})

    def row_of_pair(self, pair: int) -> int:
        """The packed row that a (position, slot) pair lies in."""
        flat = int(self.tensors["positions"][self.tensors["pair_position"][pair]])
        return flat // self.tensors["input_ids"].shape[1]

    def documents_of_row(self, row: int) -> list[tuple[str, Tensor]]:
        """(conversation id, token ids) of every document in a packed row, in order."""
        ids, documents = self.tensors["input_ids"][row], self.tensors["document_ids"][row]
        return [(name, ids[documents == number]) for number, name in enumerate(self.row_ids[row], start=1)]


@dataclass(frozen=True, slots=True)
class CachedBatch(TrainBatch):
    """A micro-batch of hidden states made earlier. In place of the tokens, tensors hold hidden_MD [M, D], the stored states of the
    rows one after the other; positions are indices into M. While `resident_SD`, all states on the device, is given they hold
    state_index [M] into it instead, and `to` takes the states. rows: numbers in `packed`; row_ends: their ends in M."""

    packed: PackedDataset
    rows: list[int]
    row_ends: Tensor
    resident_SD: Tensor | None = None

    def to(self, device: torch.device) -> TrainBatch:
        moved = {name: t.to(device, non_blocking=True) for name, t in self.tensors.items()}
        if self.resident_SD is not None:
            moved["hidden_MD"] = self.resident_SD[moved.pop("state_index")]
        return replace(self, tensors=moved, resident_SD=None)

    def row_of_pair(self, pair: int) -> int:
        state = self.tensors["positions"][self.tensors["pair_position"][pair]]
        return int(torch.searchsorted(self.row_ends, state.cpu(), right=True))

    def documents_of_row(self, row: int) -> list[tuple[str, Tensor]]:
        item = self.packed[self.rows[row]]
        return [(name, item["input_ids"][item["document_ids"] == number]) for number, name in enumerate(item["row_ids"], start=1)]


def make_batch(packed: PackedBatch, num_heads: int) -> TrainBatch:
    """Lists the supervised pairs of a packed batch, slot by slot."""
    pairs, counts = supervised_pairs(packed.num_slots.flatten(), num_heads)
    tensors = {
        "input_ids": packed.input_ids,
        "position_ids": packed.position_ids,
        "document_ids": packed.document_ids,
        **pairs,
        "targets": packed.input_ids.flatten()[pairs["positions"][pairs["pair_position"]] + pairs["pair_slot"] + 2],
    }
    return TrainBatch(tensors, counts, packed.row_ids)


def supervised_pairs(num_slots_M: Tensor, num_heads: int) -> tuple[dict[str, Tensor], Tensor]:
    """Supervised slots at each of M positions -> positions [R], pair_position [N] and pair_slot [N], slot by slot; pairs per slot [K]."""
    positions_R = (num_slots_M > 0).nonzero()[:, 0]
    slots_R = num_slots_M[positions_R]
    of_slot = [(slots_R > k).nonzero()[:, 0] for k in range(num_heads)]
    counts_K = torch.tensor([len(indices) for indices in of_slot])
    pair_slot_N = torch.arange(num_heads).repeat_interleave(counts_K)
    return {"positions": positions_R, "pair_position": torch.cat(of_slot), "pair_slot": pair_slot_N}, counts_K


def window_counts(batches: Sequence[TrainBatch]) -> Tensor:
    """Supervised pairs per slot over an accumulation window, [K]."""
    return torch.stack([batch.slot_counts for batch in batches]).sum(0)
