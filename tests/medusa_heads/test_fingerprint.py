"""Fingerprint and weights digest: equal for equal weights, different for others."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from medusa_heads import base_model
from medusa_heads.fingerprint import fingerprint, weights_digest
from tests.tiny_models import FAMILIES, tiny_model


def _next_float(weight: torch.Tensor, index: int) -> None:
    """Moves one element by one unit in the last place."""
    integer = {4: torch.int32, 2: torch.int16}[weight.element_size()]
    weight.data.view(-1)[index : index + 1].view(integer).add_(1)


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_and_bfloat16_loads_have_one_fingerprint(family: str) -> None:
    model = tiny_model(family)
    rounded = copy.deepcopy(model).bfloat16()
    assert fingerprint(model) == fingerprint(rounded) == fingerprint(rounded.float())
    assert fingerprint(model) != fingerprint(tiny_model(family, seed=1))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_other_weights_have_another_fingerprint(family: str) -> None:
    """Whichever matrix it is, as a merged adapter may change any of them."""
    model = tiny_model(family)
    before = fingerprint(model)
    matrices = [weight for weight in base_model.weight_tensors(model).values() if weight.dim() > 1]
    assert len(matrices) > 8
    for weight in matrices:
        saved = weight.data.clone()
        weight.data.mul_(1.01)
        assert fingerprint(model) != before
        weight.data.copy_(saved)
    assert fingerprint(model) == before


@pytest.mark.parametrize("field", ["sliding_window", "num_hidden_layers", "logit_scale"])
def test_another_config_has_another_fingerprint(field: str) -> None:
    model = tiny_model("llama")
    before = fingerprint(model)
    setattr(model.config, field, 7)
    assert fingerprint(model) != before


def _elements(model: PreTrainedModel) -> list[tuple[str, int]]:
    return [(name, index) for name, weight in base_model.weight_tensors(model).items() for index in {0, 1, weight.numel() - 1}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_digest_sees_one_unit_in_the_last_place_anywhere(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)  # type: ignore[arg-type]
    before = weights_digest(model)
    digests = {before}
    for name, index in _elements(model):
        weight = base_model.weight_tensors(model)[name]
        saved = weight.data.clone()
        _next_float(weight, index)
        digests.add(weights_digest(model))
        weight.data.copy_(saved)
    assert len(digests) == 1 + len(_elements(model))
    assert weights_digest(model) == before


def test_the_digest_sees_elements_that_change_places() -> None:
    model = tiny_model("llama")
    before = weights_digest(model)
    weight = base_model.lm_head_parameters(model)[0]
    weight.data[0], weight.data[1] = weight.data[1].clone(), weight.data[0].clone()
    assert weights_digest(model) != before


def test_the_digest_sees_the_odd_bytes_at_the_end() -> None:
    model = tiny_model("gpt2", vocab_size=301).bfloat16()
    model.transformer.odd = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))  # type: ignore[assignment,union-attr]
    before = weights_digest(model)
    _next_float(model.transformer.odd, 2)  # type: ignore[arg-type,union-attr]
    assert weights_digest(model) != before


def test_the_digest_is_that_of_the_values_wherever_they_lie() -> None:
    """Weights of a sharded base may follow one another at any place in one memory."""
    model = tiny_model("llama").bfloat16()
    before = weights_digest(model)
    memory = torch.zeros(1 + sum(weight.numel() + 1 for weight in model.parameters()), dtype=torch.bfloat16)
    start = 1
    for weight in model.parameters():
        place = memory[start : start + weight.numel()].view(weight.shape)
        place.copy_(weight)
        weight.data = place
        start += weight.numel() + 1
    assert weights_digest(model) == before
