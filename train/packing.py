"""Tokenised conversations -> packed rows of one length, with the number of supervised slots per position.

Slot k of position t (the hidden state that predicts t + 1 by itself) is supervised iff the tokens
t + 1 .. t + 1 + k all lie in the assistant mask of one document. So a position needs one number:
how many slots, from the first, are supervised there.
"""

# B batch, T sequence, K heads

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

PADDING_MULTIPLE = 64


def num_supervised_slots(assistant_mask: Tensor | np.ndarray | Sequence[bool], num_heads: int) -> Tensor:
    """assistant_mask [T] of ONE document -> supervised slots per position [T] (long, 0 .. num_heads).

    Position t may lie before the mask: the last prompt token predicts the first answer token.
    """
    mask_T = torch.as_tensor(assistant_mask, dtype=torch.bool)
    length = len(mask_T)
    positions_T = torch.arange(length)
    masked_out_T = torch.where(mask_T, length, positions_T)
    next_masked_out_T = masked_out_T.flip(0).cummin(0).values.flip(0)
    run_T = next_masked_out_T - positions_T
    return torch.cat([run_T[1:], run_T.new_zeros(min(length, 1))]).sub(1).clamp(0, num_heads)


def slot_counts(num_slots: Tensor, num_heads: int) -> Tensor:
    """Supervised slots per position, of any shape -> supervised positions per slot, [K] long."""
    return torch.stack([(num_slots >= slot).sum() for slot in range(1, num_heads + 1)])


def pack(lengths: Sequence[int], pack_length: int) -> list[list[int]]:
    """Best-fit decreasing: document indices per row, at most pack_length tokens each, none split.

    The longest document goes first, each into the fullest row it fits in. Deterministic.
    Raises ValueError when a document is longer than a row.
    """
    rows: list[list[int]] = []
    spaces: list[int] = []  # distinct free spaces, ascending
    rows_with: dict[int, list[int]] = {}

    def add(row: int, space: int) -> None:
        if space not in rows_with:
            insort(spaces, space)
            rows_with[space] = []
        rows_with[space].append(row)

    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = int(lengths[document])
        if length > pack_length:
            raise ValueError(f"a conversation of {length} tokens is longer than pack_length {pack_length}: raise it or lower max_length")
        index = bisect_left(spaces, length)
        if index == len(spaces):
            rows.append([document])
            add(len(rows) - 1, pack_length - length)
            continue
        space = spaces[index]
        row = rows_with[space].pop()
        if not rows_with[space]:
            del rows_with[space], spaces[index]
        rows[row].append(document)
        add(row, space - length)
    return rows


class PackedDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of pack_length tokens made of whole documents.

    Items: input_ids [T] (padded with 0), position_ids [T] (from 0 in every document), document_ids
    [T] (from 1; 0 is padding), num_slots [T] (0 on padding), all long with T = pack_length, and
    row_ids, the conversation of each document in order.
    content_key: SHA-256 over all tokens and masks in order. tokenizer_keys: digests of what made the
    tokens of the text (train/state_manifest.py), where known.
    """

    def __init__(
        self, dataset: datasets.Dataset, pack_length: int, num_heads: int, *, tokenizer_keys: dict[str, str] | None = None
    ) -> None:
        self.tokenizer_keys = tokenizer_keys or {}
        self.documents = dataset.with_format("numpy", columns=["input_ids", "assistant_mask"], output_all_columns=True)
        self.pack_length, self.num_heads = pack_length, num_heads
        lengths, self.content_key = _scan(dataset)
        self.packs = pack(lengths, pack_length)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item: dict[str, Any] = empty_pack(self.pack_length)
        start = 0
        documents = self.documents[self.packs[index]]  # at once: one by one takes four times as long
        item["row_ids"] = list(documents["id"])
        for number, (ids, mask) in enumerate(zip(documents["input_ids"], documents["assistant_mask"], strict=True), start=1):
            end = start + len(ids)
            item["input_ids"][start:end] = torch.from_numpy(np.array(ids, dtype=np.int64))
            item["position_ids"][start:end] = torch.arange(end - start)
            item["document_ids"][start:end] = number
            item["num_slots"][start:end] = num_supervised_slots(np.array(mask), self.num_heads)
            start = end
        return item


def _scan(dataset: datasets.Dataset) -> tuple[list[int], str]:
    """Document lengths and a hash of all documents, read in arrow batches."""
    digest, lengths = hashlib.sha256(), []
    for batch in dataset.select_columns(["input_ids", "assistant_mask"]).with_format("numpy").iter(1000):
        for ids, mask in zip(batch["input_ids"], batch["assistant_mask"], strict=True):
            lengths.append(len(ids))
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(np.asarray(ids, dtype="<i4").tobytes())
            digest.update(np.packbits(np.asarray(mask, dtype=bool)).tobytes())
    return lengths, digest.hexdigest()


def empty_pack(length: int = PADDING_MULTIPLE) -> dict[str, Any]:
    """An item of padding alone: nothing supervised. Fills a last, short accumulation window."""
    names = ("input_ids", "position_ids", "document_ids", "num_slots")
    return {name: torch.zeros(length, dtype=torch.long) for name in names} | {"row_ids": []}


class RowsOrEmpty(torch.utils.data.Dataset[dict[str, Any]]):
    """Packed rows, and an empty pack as row -1."""

    def __init__(self, rows: PackedDataset) -> None:
        self.rows = rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index] if index >= 0 else empty_pack()


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Stacked items: four [B, T] long tensors; row_ids[b][d - 1] is the conversation of document d in row b."""

    input_ids: Tensor
    position_ids: Tensor
    document_ids: Tensor
    num_slots: Tensor
    row_ids: list[list[str]]


def collate(items: Sequence[dict[str, Any]]) -> PackedBatch:
    """Stacks items; T is the longest used length, rounded up to a multiple of 64."""
    used = max(int((item["document_ids"] > 0).sum()) for item in items)
    length = max(1, -(-used // PADDING_MULTIPLE)) * PADDING_MULTIPLE

    def stacked(name: str) -> Tensor:
        out_BT = torch.zeros(len(items), length, dtype=torch.long)
        for row_T, item in zip(out_BT, items, strict=True):
            values = item[name][:length]
            row_T[: len(values)] = values
        return out_BT

    return PackedBatch(
        stacked("input_ids"), stacked("position_ids"), stacked("document_ids"), stacked("num_slots"), [item["row_ids"] for item in items]
    )
