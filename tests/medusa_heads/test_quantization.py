"""Bases in 8 and 4 bits: what is packed, that tokens do not depend on their neighbours, fingerprint and digest, texts, errors."""

from __future__ import annotations

import copy
import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from infer.drafters.heads import HeadsDrafter
from infer.engine.packed_linear import decoding_copies
from infer.generate import Generator
from infer.tree_spec import BeamTree
from medusa_heads import base_model
from medusa_heads.adapter import Adapter
from medusa_heads.checkpoint import load_heads, save_heads
from medusa_heads.fingerprint import fingerprint, weights_digest
from medusa_heads.quantization import Int8Linear, Quantization, quantization_of
from tests.quantised import QUANTIZATIONS, needs_bitsandbytes, save_quantised, save_tiny_base
from tests.random_heads import random_heads

IDS = torch.tensor([[5, 9, 200, 31, 7, 150, 64, 12, 88, 3]])


def load(base: str, quantization: Any = "none", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return base_model.load_base(base, dtype=dtype, quantization=quantization)[0]


# ------------------------------------------------------------ what needs no bitsandbytes


def test_without_bitsandbytes_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_tiny_base(tmp_path / "base")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for quantization in QUANTIZATIONS:
        with pytest.raises(ValueError, match=rf"in {quantization} need .* pip install 'medusa-heads\[bitsandbytes\]', or leave"):
            load(base, quantization)
    mark_as_quantised(tmp_path / "base", {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"})
    with pytest.raises(ValueError, match=r"in 4bit fp4 need .*medusa-heads\[bitsandbytes\]', or give the unquantised model"):
        load(base)


def test_a_quantised_base_is_not_quantised_again(tmp_path: Path) -> None:
    base = save_tiny_base(tmp_path / "base")
    mark_as_quantised(tmp_path / "base", {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match=r"quantised already \(gptq\): leave --base-quantization out"):
        load(base, "8bit")


def mark_as_quantised(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_products_and_their_gradients(dtype: torch.dtype) -> None:
    plain = nn.Linear(32, 20).to(dtype)
    scales = plain.weight.detach().float().abs().amax(1)
    packed = (plain.weight.detach().float() * 127 / scales[:, None]).round().to(torch.int8)
    weight, state = nn.Parameter(packed, requires_grad=False), SimpleNamespace(SCB=scales)
    layer = SimpleNamespace(in_features=32, out_features=20, weight=weight, state=state, bias=plain.bias)
    unpacked = (packed.float() * scales[:, None] / 127).to(dtype)
    inputs = torch.randn(2, 3, 32, dtype=dtype)
    found_inputs, expected_inputs = (inputs.clone().requires_grad_() for _ in range(2))
    found, expected = Int8Linear(layer)(found_inputs), F.linear(expected_inputs, unpacked, plain.bias)
    gradient = torch.randn_like(expected)
    torch.autograd.backward([found, expected], [gradient, gradient])
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found_inputs.grad, expected_inputs.grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(unpacked, plain.weight, rtol=0, atol=float(scales.max()) / 100)


# ------------------------------------------------------------ models


@needs_bitsandbytes
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_layers_are_packed_and_a_token_does_not_see_its_neighbours(tmp_path: Path, family: str, quantization: Quantization) -> None:
    """Embeddings and LM head stay, also tied (gemma2, gpt2); hidden states of a prefix are those of the whole."""
    base = save_tiny_base(tmp_path / "base", family)
    plain, model = load(base), load(base, quantization)
    assert str(quantization_of(model.config)).startswith(quantization) and quantization_of(plain.config) is None
    assert torch.equal(base_model.lm_head_parameters(model)[0], base_model.lm_head_parameters(plain)[0])
    tied = base_model.lm_head_parameters(plain)[0] is plain.get_input_embeddings().weight
    assert tied == (family != "llama") == (base_model.lm_head_parameters(model)[0] is model.get_input_embeddings().weight)
    packed = [w for layer in base_model.decoder_layers(model) for w in layer.parameters() if w.dtype in (torch.int8, torch.uint8)]
    assert len(packed) == sum(w.dim() == 2 for layer in base_model.decoder_layers(plain) for w in layer.parameters()) > 0

    with torch.no_grad():
        whole, expected = (base_model.forward_hidden(m, IDS) for m in (model, plain))
        for length in (1, 4, 9):
            torch.testing.assert_close(base_model.forward_hidden(model, IDS[:, :length]), whole[:, :length], rtol=1e-4, atol=1e-4)
    error = float((whole - expected).norm() / expected.norm())
    assert 0 < error < (0.1 if quantization == "8bit" else 0.5), error


@needs_bitsandbytes
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_greedy_text_with_heads_is_the_quantised_bases_own(tmp_path: Path, quantization: Quantization) -> None:
    model = load(save_tiny_base(tmp_path / "base"), quantization)
    prompts = [[5, 9, 200], [31, 7, 150, 64, 12]]
    drafter = HeadsDrafter(model, random_heads(model), BeamTree(8))
    found = [answer.token_ids for answer in Generator(model, drafter).generate(prompts, max_new_tokens=24, eos_ids=())]
    assert found == [answer.token_ids for answer in Generator(model).generate(prompts, max_new_tokens=24, eos_ids=())]
    for prompt, answer in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        own = base_model.generate_plainly(model, ids, torch.ones_like(ids), max_new_tokens=24, eos_ids=(), pad_id=0, on_token=lambda: None)
        assert own[0, len(prompt) :].tolist() == answer


@needs_bitsandbytes
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_faster_copies_leave_packed_weights_alone(tmp_path: Path, quantization: Quantization) -> None:
    model = load(save_tiny_base(tmp_path / "base"), quantization, torch.bfloat16)
    (fast,) = decoding_copies(model)
    assert [type(m) for m in fast.modules()] == [type(m) for m in model.modules()]
    own, copied = base_model.weight_tensors(model), base_model.weight_tensors(fast)
    assert all(copied[name].data_ptr() == weight.data_ptr() for name, weight in model.named_parameters()) and own.keys() == copied.keys()
    assert torch.equal(base_model.forward_hidden(fast, IDS), base_model.forward_hidden(model, IDS))


@needs_bitsandbytes
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_one_fingerprint_in_every_type_and_from_every_folder(tmp_path: Path, quantization: Quantization) -> None:
    base = save_tiny_base(tmp_path / "base", "gemma2")
    model = load(base, quantization)
    own = fingerprint(model)
    assert own == fingerprint(load(base, quantization, torch.bfloat16)) == fingerprint(load(base, quantization, torch.float16))
    saved = load(save_quantised(base, tmp_path / "saved", quantization))
    assert own == fingerprint(saved) and weights_digest(model) == weights_digest(saved)
    assert torch.equal(model(IDS).logits, saved(IDS).logits)
    others: list[Quantization] = [other for other in ("none", "8bit", "4bit") if other != quantization]  # type: ignore[misc]
    assert own not in {fingerprint(load(base, other)) for other in others}
    norm = next(w for n, w in base_model.decoder_layers(model)[0].named_parameters() if "layernorm" in n)
    norm.data.add_(0.1)
    assert fingerprint(model) != own


@needs_bitsandbytes
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_digest_sees_packed_weights_and_what_unpacks_them(tmp_path: Path, quantization: Quantization) -> None:
    model = load(save_tiny_base(tmp_path / "base"), quantization)
    before = weights_digest(model)
    model(IDS)
    assert weights_digest(model) == before
    layer: Any = model.get_submodule("model.layers.1.mlp.down_proj")
    parts: list[torch.Tensor] = [layer.weight.data]
    if quantization == "8bit":
        parts.append(layer.SCB)
    else:
        state = layer.weight.quant_state
        parts += [state.absmax, state.code, state.state2.absmax, state.state2.code]
    for part in parts:
        first = part.view(-1)[:1].view(torch.uint8)[:1]
        first.bitwise_xor_(1)
        assert weights_digest(model) != before
        first.bitwise_xor_(1)
    assert weights_digest(model) == before


@needs_bitsandbytes
def test_a_cpu_with_avx512_does_not_pack_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There bitsandbytes rounds weights to bfloat16 at the first forward, and gradients no longer flow through them."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    model = load(save_tiny_base(tmp_path / "base"), "4bit")
    layer: Any = model.get_submodule("model.layers.0.mlp.up_proj")
    inputs = torch.randn(3, 64)
    before, outputs = weights_digest(model), layer(inputs)
    torch.testing.assert_close(layer(inputs.requires_grad_()), outputs, rtol=1e-5, atol=1e-5)
    layer(inputs).sum().backward()
    assert weights_digest(model) == before and inputs.grad is not None and bool(inputs.grad.any())


@needs_bitsandbytes
@pytest.mark.parametrize("wrong", [False, True])
def test_rows_that_are_unpacked_wrongly_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    """Rows of 32 weights, half a block: whatever this CPU does with them, here they are unpacked right, or wrongly."""
    from bitsandbytes.functional import dequantize_4bit

    def unpack(packed: torch.Tensor, state: Any) -> torch.Tensor:
        in_one_row = copy.copy(state)
        in_one_row.shape = torch.Size([state.shape.numel()])
        return dequantize_4bit(packed, in_one_row).reshape(state.shape) * (2 if wrong and len(state.shape) == 2 else 1)

    monkeypatch.setattr("bitsandbytes.functional.dequantize_4bit", unpack)
    base = save_tiny_base(tmp_path / "base", width=32)
    message = r"unpacks model\.layers\.0\.self_attn\.q_proj wrongly, .* rows of 32 weights"
    with pytest.raises(ValueError, match=message) if wrong else nullcontext():
        load(base, "4bit")


@needs_bitsandbytes
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_quantised_lm_head_is_refused(tmp_path: Path, family: str, quantization: str) -> None:
    base = save_tiny_base(tmp_path / "base", family)
    saved = save_quantised(base, tmp_path / "saved", quantization, llm_int8_skip_modules=["no_such_layer"])
    with pytest.raises(ValueError, match=rf"LM head of this {family} is quantised \({quantization}.*llm_int8_skip_modules=\['lm_head'\]"):
        load(saved)


@needs_bitsandbytes
def test_a_device_without_the_kernels_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(Int8Linear, "forward", forward)
    base = save_tiny_base(tmp_path / "base")
    with pytest.raises(ValueError, match=r"layers in 8bit do not compute on cpu here \(no kernel\): choose another device, or give"):
        load(base, "8bit")


@needs_bitsandbytes
def test_targets_of_an_adapter_are_named_in_packed_layers_too(tmp_path: Path) -> None:
    for quantization in QUANTIZATIONS:
        with pytest.raises(ValueError, match=r"'q_prj'.*no such layer.*q_proj"):
            Adapter.attach(load(save_tiny_base(tmp_path / "base"), quantization), rank=2, targets=["q_prj"])


@needs_bitsandbytes
def test_heads_say_how_their_base_was_quantised(tmp_path: Path) -> None:
    base = save_tiny_base(tmp_path / "base")
    models = {name: load(base, name) for name in ("none", "8bit", "4bit")}
    for name, model in models.items():
        heads = random_heads(model)
        heads.config = type(heads.config).from_dict({**json.loads(heads.config.to_json()), "base_quantization": name})
        folder = save_heads(heads, tmp_path / name, card="")
        assert load_heads(folder, model).config.base_quantization == name
        fix = "give it without --base-quantization" if name == "none" else f"give it with --base-quantization {name}"
        for other in models.keys() - {name}:
            with pytest.raises(ValueError, match=f"quantised as: {name}, this base is quantised as: {other}; {fix}"):
                load_heads(folder, models[other])
