"""Supervised slots against their definition, packing without loss, and batches."""

# B batch, T sequence, K heads

from __future__ import annotations

import time
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train.packing import PackedDataset, collate, empty_pack, num_supervised_slots, pack, slot_counts

K = 3


def defined_slots(mask_T: list[bool], document_T: list[int], num_heads: int) -> list[int]:
    """The definition, position by position: slot k iff tokens t + 1 .. t + 1 + k are assistant tokens of t's document."""

    def supervised(t: int, k: int) -> bool:
        tokens = range(t + 1, t + k + 2)
        return tokens.stop <= len(mask_T) and all(mask_T[j] and document_T[j] == document_T[t] for j in tokens)

    return [sum(supervised(t, k) for k in range(1, num_heads + 1)) for t in range(len(mask_T))]


def random_documents(lengths: list[int], seed: int = 0) -> datasets.Dataset:
    generator = np.random.default_rng(seed)
    return datasets.Dataset.from_dict(
        {
            "id": [f"c{i}" for i in range(len(lengths))],
            "input_ids": [generator.integers(1, 97, n).tolist() for n in lengths],
            "assistant_mask": [(generator.random(n) < 0.7).tolist() for n in lengths],
        }
    )


def test_slots_of_a_written_out_example() -> None:
    # tokens:  p  p  a  a  a  a  u  a  a
    mask_T = [False, False, True, True, True, True, False, True, True]
    assert num_supervised_slots(torch.tensor(mask_T), K).tolist() == [0, 3, 2, 1, 0, 0, 1, 0, 0]
    assert num_supervised_slots(np.array(mask_T), 2).tolist() == [0, 2, 2, 1, 0, 0, 1, 0, 0]
    assert num_supervised_slots(torch.tensor([], dtype=torch.bool), K).tolist() == []


@given(st.lists(st.booleans(), max_size=24), st.integers(1, 5))
def test_slots_equal_the_definition(mask_T: list[bool], num_heads: int) -> None:
    slots_T = num_supervised_slots(mask_T, num_heads)
    assert slots_T.dtype == torch.long
    assert slots_T.tolist() == defined_slots(mask_T, [1] * len(mask_T), num_heads)


def test_slot_counts() -> None:
    assert slot_counts(torch.tensor([[0, 3, 2], [1, 0, 3]]), 4).tolist() == [4, 3, 2, 0]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 64))
def test_packing_loses_and_splits_nothing(lengths: list[int], pack_length: int) -> None:
    rows = pack(lengths, pack_length)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[document] for document in row) <= pack_length for row in rows)
    assert rows == pack(list(lengths), pack_length)


def test_packing_is_tight_and_fast() -> None:
    assert sorted(map(sorted, pack([5, 3, 7, 5, 2, 8], 10))) == [[0, 3], [1, 2], [4, 5]]
    lengths = np.random.default_rng(0).integers(20, 1000, 100_000).tolist()
    start = time.perf_counter()
    rows = pack(lengths, 1024)
    assert time.perf_counter() - start < 10
    assert sum(lengths) / (len(rows) * 1024) > 0.98


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="11 tokens is longer than pack_length 10"):
        pack([3, 11], 10)


def used(item: dict[str, Any]) -> int:
    return int((item["document_ids"] > 0).sum())


@pytest.fixture(scope="module")
def documents() -> datasets.Dataset:
    return random_documents([9, 30, 4, 17, 12, 1, 22, 30, 5])


def test_no_conversation_is_lost_duplicated_or_changed(documents: datasets.Dataset) -> None:
    packed, found = PackedDataset(documents, 32, K), {}
    for index in range(len(packed)):
        item = packed[index]
        assert all(item[name].shape == (32,) for name in ("input_ids", "position_ids", "document_ids", "num_slots"))
        for document, name in enumerate(item["row_ids"], start=1):
            chosen = item["document_ids"] == document
            assert name not in found
            found[name] = item["input_ids"][chosen].tolist()
            assert item["position_ids"][chosen].tolist() == list(range(int(chosen.sum())))
        padding = item["document_ids"] == 0
        assert not padding[: used(item)].any()
        assert not any(item[name][padding].any() for name in ("input_ids", "position_ids", "num_slots"))
    assert found == {row["id"]: row["input_ids"] for row in documents}


def test_no_slot_crosses_documents(documents: datasets.Dataset) -> None:
    packed, masks = PackedDataset(documents, 32, K), {row["id"]: row["assistant_mask"] for row in documents}
    crossing = 0
    for item in (packed[index] for index in range(len(packed))):
        mask_T = [m for name in item["row_ids"] for m in masks[name]]
        document_T: list[int] = item["document_ids"].tolist()
        expected = defined_slots(mask_T, document_T[: len(mask_T)], K)
        assert item["num_slots"].tolist()[: len(mask_T)] == expected
        crossing += defined_slots(mask_T, [1] * len(mask_T), K) != expected
    assert crossing > 0, "the control: without document borders the slots differ"


def test_content_key_depends_on_tokens_masks_and_order(documents: datasets.Dataset) -> None:
    key = PackedDataset(documents, 32, K).content_key
    assert key == PackedDataset(documents, 64, 1).content_key
    other_mask = documents.map(lambda row: {"assistant_mask": [not m for m in row["assistant_mask"]]})
    others = [documents.select(range(len(documents) - 1)), documents.select(list(range(len(documents)))[::-1]), other_mask]
    assert len({key, *(PackedDataset(other, 32, K).content_key for other in others)}) == 4


@pytest.mark.parametrize(("longest", "expected"), [(30, 64), (64, 64), (65, 128)])
def test_collate_trims_to_a_multiple_of_64(longest: int, expected: int) -> None:
    items = [PackedDataset(random_documents([longest]), 127, K)[0], empty_pack()]
    batch = collate(items)
    kept = min(127, expected)
    tensors = {name: getattr(batch, name) for name in ("input_ids", "position_ids", "document_ids", "num_slots")}
    for name, tensor_BT in tensors.items():
        assert tensor_BT.shape == (2, expected) and tensor_BT.dtype == torch.long
        assert torch.equal(tensor_BT[0, :kept], items[0][name][:kept]) and not tensor_BT[1].any()
    assert batch.input_ids.count_nonzero() == longest, "no token is 0 here, so none was trimmed"
    assert batch.row_ids == [["c0"], []]


def test_a_batch_of_empty_packs_supervises_nothing() -> None:
    batch = collate([empty_pack(), empty_pack()])
    assert batch.input_ids.shape == (2, 64) and batch.row_ids == [[], []]
    assert slot_counts(batch.num_slots, K).tolist() == [0, 0, 0]
