"""A half-precision base model on a CPU -> the same model with packed linear layers, where that pays.

PyTorch multiplies bfloat16 matrices of a few rows slowly on CPUs without AVX512-BF16: eight rows cost
eight times one row. FBGEMM keeps the weights packed as float16 and converts them on the way into
float32 multiply-adds, so a tree of candidates costs little more than one token. Activations become
float32. Weights of a bfloat16 model convert without loss as long as they are normal float16 numbers.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from infer.engine.fused_norm import fuse_norms
from infer.engine.tree_attention import with_tree_attention
from medusa_heads import base_model
from medusa_heads.quantization import quantization_of

FLOAT16_MAX = 65504.0
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # siblings that transformers' modules give the same tensor


class PackedLinear(nn.Module):
    """A linear layer whose weight lives in FBGEMM's packed float16 layout; float32 in and out."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = _prepack(weight.detach().float(), bias.detach().float() if bias is not None else None)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return torch.ops.quantized.linear_dynamic_fp16(inputs, self.packed)

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], unpacked anew at every access: for reference computations, not for decoding."""
        return torch.ops.quantized.linear_unpack_fp16(self.packed)[0]

    @property
    def bias(self) -> Tensor | None:
        return torch.ops.quantized.linear_unpack_fp16(self.packed)[1]


class _Product:
    """Layers that read the same input, multiplied as one matrix: a call of FBGEMM costs 28 us before it multiplies."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.layer = PackedLinear(weight, torch.cat(biases) if biases else None)

    def part(self, inputs: Tensor, start: int, end: int) -> Tensor:
        """Columns start .. end - 1 of the product. It is kept on `inputs`, and goes with them: threads may share the model."""
        kept: tuple[_Product, Tensor] | None = getattr(inputs, "product", None)
        if kept is None or kept[0] is not self:
            kept = inputs.product = (self, self.layer(inputs))  # type: ignore[attr-defined]
        return kept[1][..., start:end]


class _PartOfProduct(nn.Module):
    def __init__(self, product: _Product, start: int, out_features: int) -> None:
        super().__init__()
        self.product, self.start, self.out_features = product, start, out_features
        self.in_features = product.layer.in_features

    def forward(self, inputs: Tensor) -> Tensor:
        return self.product.part(inputs, self.start, self.start + self.out_features)


def _join_linears(parent: nn.Module) -> None:
    for names in SAME_INPUT:
        linears = [linear for name in names if type(linear := getattr(parent, name, None)) is nn.Linear]
        same_kind = {(linear.in_features, linear.bias is None) for linear in linears}
        if len(linears) < len(names) or len(same_kind) > 1:
            continue
        product, start = _Product(linears), 0
        for name, linear in zip(names, linears, strict=True):
            setattr(parent, name, _PartOfProduct(product, start, linear.out_features))
            start += linear.out_features


def lm_head_rows(lm_head: nn.Module, token_ids: Tensor) -> nn.Module:
    """The rows of an LM head that score the given tokens, as a layer of the same kind."""
    weight, bias = lm_head.weight, getattr(lm_head, "bias", None)
    assert isinstance(weight, Tensor)
    weight, bias = weight.detach()[token_ids], bias.detach()[token_ids] if bias is not None else None
    if isinstance(lm_head, PackedLinear):
        return PackedLinear(weight, bias)
    rows = nn.Linear(weight.shape[1], len(token_ids), bias=bias is not None, device="meta")
    rows.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        rows.bias = nn.Parameter(bias, requires_grad=False)
    return rows


def _prepack(weight: Tensor, bias: Tensor | None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ops.quantized.linear_prepack_fp16(weight, bias)


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the layers could be packed: a half-precision model on a CPU that FBGEMM runs on, not packed otherwise already."""
    if model.device.type != "cpu" or model.dtype not in (torch.bfloat16, torch.float16) or quantization_of(model.config):
        return False
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    return (
        bool(linears)
        and "fbgemm" in torch.backends.quantized.supported_engines
        and all(bool(linear.weight.abs().max() < FLOAT16_MAX) for linear in linears)
    )


def packed_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` with packed linear layers and everything else in float32."""
    linears = {id(m.weight) for m in model.modules() if type(m) is nn.Linear}
    # The linear weights are packed from the original: the copy need not hold them a second time.
    shared = {id(p): p for p in model.parameters() if id(p) in linears}
    copied = copy.deepcopy(model, memo=dict(shared))
    for parent in list(copied.modules()):
        _join_linears(parent)
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child.weight, child.bias))
    for module in copied.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().float(), requires_grad=False))
    fuse_norms(copied)
    return copied


def decoding_copies(model: PreTrainedModel) -> list[PreTrainedModel]:
    """`model` with its own weights and, where it can be packed, a packed copy: what to choose the fastest from.
    Both attend to grouped heads without repeating them; `model` itself is left as it is."""
    fast = with_tree_attention(model)
    return [fast, packed_copy(fast)] if can_pack(model) else [fast]


def fastest_copy(copies: Sequence[PreTrainedModel], num_tokens: Sequence[int]) -> PreTrainedModel:
    """The copy with the shortest forwards over each of `num_tokens` tokens on this machine (measured in
    about a second). Which one that is depends on them: AVX512-BF16 favours the stock layers on large
    trees and the packed ones on single tokens."""
    if len(copies) == 1:
        return copies[0]
    return min(copies, key=lambda copy_: sum(step_seconds(copy_, n) for n in num_tokens))


def is_packed(model: PreTrainedModel) -> bool:
    return any(isinstance(module, PackedLinear) for module in model.modules())


@torch.inference_mode()
def step_seconds(model: PreTrainedModel, num_tokens: int, repeats: int = 5) -> float:
    """Least seconds of one forward over `num_tokens` tokens, logits included."""
    tokens = torch.arange(num_tokens, device=model.device)[None] % base_model.vocab_size(model)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        base_model.compute_logits(model, base_model.forward_hidden(model, tokens))
        times.append(time.perf_counter() - start)
    return min(times[1:])
