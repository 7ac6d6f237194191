"""Packed draft heads: the states and logits of the heads they were packed from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from infer.drafters.heads import HeadsDrafter
from infer.engine.packed_heads import PackedMedusaHeads, heads_for
from infer.engine.packed_linear import FLOAT16_MAX, can_pack, packed_copy
from infer.tree_spec import BeamTree
from medusa_heads.checkpoint import HeadsCheckpoint
from medusa_heads.heads.medusa import MedusaHeads
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model

MODEL = tiny_model("llama").bfloat16()
pytestmark = pytest.mark.skipif(not can_pack(MODEL), reason="FBGEMM does not run here")


def float16_heads(*, own_lm_head: bool = False) -> MedusaHeads:
    """Random heads whose weights are float16 numbers, so that packing rounds nothing."""
    return random_heads(MODEL, num_heads=3, num_layers=2, own_lm_head=own_lm_head).half().float()


def hidden(rows: int) -> Tensor:
    return torch.randn(rows, MODEL.config.hidden_size, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("num_heads", [None, 1, 2, 3, 9])
@pytest.mark.parametrize("rows", [1, 5])
def test_draft_states_are_those_of_the_heads(num_heads: int | None, rows: int) -> None:
    heads = float16_heads()
    packed = PackedMedusaHeads(heads)
    torch.testing.assert_close(packed.draft_states(hidden(rows), num_heads), heads.draft_states(hidden(rows), num_heads))
    assert packed.own_logits(heads.draft_states(hidden(rows))) is None


@pytest.mark.parametrize("num_heads", [1, 3])
def test_own_logits_are_those_of_the_heads(num_heads: int) -> None:
    heads = float16_heads(own_lm_head=True)
    states_RKD = heads.draft_states(hidden(4), num_heads)
    own, packed = heads.own_logits(states_RKD), PackedMedusaHeads(heads).own_logits(states_RKD)
    assert own is not None and packed is not None and packed.shape == own.shape
    torch.testing.assert_close(packed, own, atol=1e-4, rtol=1e-4)


def test_only_the_heads_of_a_packed_base_are_packed() -> None:
    heads = float16_heads()
    checkpoint = HeadsCheckpoint(heads, heads.config, Path("heads"))
    plain, packed = heads_for(checkpoint, MODEL), heads_for(checkpoint, packed_copy(MODEL))
    assert type(plain.heads) is MedusaHeads and plain.heads.weight.dtype == torch.bfloat16
    assert isinstance(packed.heads, PackedMedusaHeads) and packed.heads.weight is heads.weight


def test_drafters_on_one_copy_share_what_is_packed() -> None:
    heads = float16_heads()
    model = packed_copy(MODEL)
    checkpoint = heads_for(HeadsCheckpoint(heads, heads.config, Path("heads")), model)
    first = HeadsDrafter.from_checkpoint(model, checkpoint, BeamTree(2))
    second = HeadsDrafter.from_checkpoint(model, checkpoint, BeamTree(2)).with_tree(BeamTree(3))
    assert isinstance(checkpoint.heads, PackedMedusaHeads) and not checkpoint.heads.packed
    for drafter, counts in ((first, {2}), (second, {2, 3}), (first, {2, 3})):
        drafter.propose(torch.tensor([5]), hidden(1), [])
        assert set(checkpoint.heads.packed) == counts
    assert (first.max_nodes, second.max_nodes) == (2, 3)


def test_weights_beyond_float16_stay_as_they_are() -> None:
    heads = float16_heads()
    heads.weight.data[0, 0, 0, 0] = 2 * FLOAT16_MAX
    assert heads_for(HeadsCheckpoint(heads, heads.config, Path("heads")), packed_copy(MODEL)).heads is heads
