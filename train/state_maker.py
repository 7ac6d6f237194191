"""Packed rows + frozen base -> the hidden states that heads learn from, row by row, and an index of the tokens they need.

Stored are the supervised positions of a row, and the one after each run of them, which a teacher's law
needs. They lie row by row, so that a row is one slice. A family that reads other positions changes
`kept_positions`, and nothing else here.
"""

# P packed rows, S stored states, B rows of T tokens, D hidden, K heads

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

from medusa_heads import base_model
from train.headed_model import HeadedModel
from train.packing import PackedDataset, RowsOrEmpty, collate, num_supervised_slots
from train.windows import usable_workers


def kept_positions(num_slots: Tensor) -> Tensor:
    """Supervised slots per position [.., T] of packed rows -> whether the position's state is stored [.., T]."""
    kept = num_slots > 0
    kept[..., 1:] |= num_slots[..., :-1] > 0  # slots are 0 at the end of a document, so this stays within it
    return kept


@dataclass(frozen=True, slots=True)
class StateIndex:
    """All that training needs of the tokens, of every stored state: the token after it (int32) and its supervised slots (int16), [S].
    Row p has states bounds_P1[p] to bounds_P1[p + 1]."""

    bounds_P1: Tensor
    next_tokens_S: Tensor
    num_slots_S: Tensor

    @property
    def lengths_P(self) -> Tensor:
        return self.bounds_P1.diff()

    def num_states(self, rows: Iterable[int]) -> int:
        return int(self.lengths_P[list(rows)].sum())


def index_states(rows: PackedDataset) -> StateIndex:
    """One pass over the tokens, a thousand documents at a time."""
    parts = []
    for table in rows.documents.select_columns(["input_ids", "assistant_mask"]).with_format("arrow").iter(1000):
        lengths = pyarrow.compute.list_value_length(table["input_ids"]).to_numpy()
        ids, mask = (pyarrow.compute.list_flatten(table[name]).to_numpy() for name in ("input_ids", "assistant_mask"))
        parts.append(_kept_of_documents(lengths, ids, mask, rows.num_heads))
    counts, next_tokens, num_slots = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    order = torch.tensor([document for pack in rows.packs for document in pack])
    in_order_S = ranges((counts.cumsum(0) - counts)[order], counts[order])
    row_ends = torch.tensor([len(pack) for pack in rows.packs]).cumsum(0)
    bounds_P1 = torch.cat([torch.zeros(1, dtype=torch.long), counts[order].cumsum(0)[row_ends - 1]])
    return StateIndex(bounds_P1, next_tokens[in_order_S], num_slots[in_order_S])


def _kept_of_documents(lengths: np.ndarray, ids: np.ndarray, mask: np.ndarray, num_heads: int) -> tuple[np.ndarray, ...]:
    """Of documents one after the other: stored states of each; and of every state the token after it and its supervised slots."""
    ends = lengths.cumsum()
    ids, mask = np.insert(ids, ends, 0), np.insert(mask.astype(bool), ends, False)  # a token between documents, which ends every run
    ends = ends + np.arange(len(ends))
    slots = num_supervised_slots(mask, num_heads)
    slots[ends] = 0
    is_kept = kept_positions(slots).numpy()
    kept = is_kept.nonzero()[0]
    counts = np.diff(is_kept.cumsum()[ends], prepend=0)
    return counts, ids[kept + 1].astype(np.int32), slots.numpy()[kept].astype(np.int16)


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """start, start + 1 .. start + length - 1 of each pair, one after the other."""
    ends = lengths.cumsum(0)
    return torch.arange(int(lengths.sum())) + (starts - ends + lengths).repeat_interleave(lengths)


@dataclass(frozen=True, slots=True)
class StateMaker:
    """Runs the base over packed rows. Rows are always taken in the same groups, because how many go through
    the base at once changes the last bits of their states, and a resumed run must meet the same ones."""

    headed: HeadedModel
    rows: PackedDataset
    index: StateIndex
    accelerator: Accelerator
    batch_size: int
    num_workers: int

    @property
    def dtype(self) -> torch.dtype:
        return self.headed.base.dtype

    @property
    def hidden_size(self) -> int:
        return base_model.hidden_size(self.headed.base)

    def groups(self, first: int, last: int) -> list[list[int]]:
        """Rows first .. last - 1 in groups that go through the base at once."""
        return [list(range(start, min(start + self.batch_size, last))) for start in range(first, last, self.batch_size)]

    def make(self, groups: Sequence[list[int]]) -> Iterator[Tensor]:
        """States [S, D] of one group after the other, on the device; rows are loaded ahead. -1 is an empty pack."""
        loader: DataLoader[Any] = DataLoader(
            RowsOrEmpty(self.rows),
            batch_sampler=groups,  # type: ignore[arg-type]
            collate_fn=collate,
            num_workers=usable_workers(self.num_workers),
        )
        for packed in loader:
            kept_S = kept_positions(packed.num_slots).flatten().nonzero()[:, 0].to(self.accelerator.device)
            inputs = (packed.input_ids, packed.position_ids, packed.document_ids)
            hidden_BTD = self.headed.hidden_states(*(part.to(self.accelerator.device) for part in inputs))
            yield hidden_BTD.flatten(0, 1)[kept_S].to(self.dtype)
