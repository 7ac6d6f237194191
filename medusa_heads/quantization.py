"""A base model in 8 or 4 bits, by bitsandbytes: how it is loaded, what it is called, and layers that treat every token alike.

LLM.int8 rounds activations to 8 bits as well, but for columns that it picks by all tokens of a forward: the hidden states of the embedded
model's tokens then differ by 2 to 20 % with what is beside them, where a wrong attention mask makes 11 to 30 %, and no draft could be
verified. So 8-bit weights are multiplied here with activations as they are. bitsandbytes' 4-bit layers do so themselves.
"""

from __future__ import annotations

import copy
import importlib.util
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BitsAndBytesConfig, PreTrainedModel

Quantization = Literal["none", "8bit", "4bit"]
BITSANDBYTES = "bitsandbytes"


def quantization_of(config: Any) -> str | None:
    """What a model's config says of its weights: `4bit nf4 double`, `8bit`, another method's name, or None."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    values = settings if isinstance(settings, dict) else settings.to_dict()
    method = values.get("quant_method")
    method = str(getattr(method, "value", method))
    if method != BITSANDBYTES:
        return method
    if values.get("load_in_8bit"):
        return "8bit"
    return f"4bit {values.get('bnb_4bit_quant_type')}{' double' if values.get('bnb_4bit_use_double_quant') else ''}"


def short_name(config: Any) -> str:
    """`8bit`, `4bit`, another method's name, or `none`: to be compared with a Quantization."""
    return (quantization_of(config) or "none").split()[0]


def loading_options(config: Any, quantization: Quantization, *, device: str | torch.device) -> dict[str, Any]:
    """What `from_pretrained` needs for packed weights, which are made on their device and never moved; empty without any.

    config: that of the files. Raises ValueError when they are quantised already, or bitsandbytes is not installed.
    """
    stored = quantization_of(config)
    if quantization == "none" and stored is None:
        return {}
    if quantization != "none" and stored is not None:
        raise ValueError(f"it is quantised already ({stored}): leave --base-quantization out")
    by_bitsandbytes = stored is None or stored.startswith(("8bit", "4bit"))
    if by_bitsandbytes and importlib.util.find_spec(BITSANDBYTES) is None:
        way_out = "leave --base-quantization out" if stored is None else "give the unquantised model"
        raise ValueError(
            f"weights in {stored or quantization} need the package bitsandbytes, which is not installed: "
            f"pip install 'medusa-heads[bitsandbytes]', or {way_out}"
        )
    options: dict[str, Any] = {"device_map": {"": torch.device(device)}}
    if quantization == "8bit":
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    elif quantization == "4bit":
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    return options


def settle(model: PreTrainedModel) -> None:
    """Makes the layers of a model loaded in 8 or 4 bits compute in its own type, for every token as if it were alone, in place.

    Raises ValueError where bitsandbytes unpacks a layer's weights wrongly on this device.
    """
    if short_name(model.config) not in ("8bit", "4bit"):
        return
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Linear8bitLt) and child.weight.dtype == torch.int8:  # not tied to an embedding
                setattr(parent, name, Int8Linear(child))
            elif isinstance(child, Linear4bit):
                _check_unpacking(f"{path}.{name}".lstrip("."), child)
                child.compute_dtype, child.compute_type_is_set = model.dtype, True
                # On a CPU with AVX512-BF16 the first forward would pack weights anew, rounded to bfloat16 and without gradients.
                child.support_avx512bf16_for_cpu = False


def _check_unpacking(name: str, layer: Any) -> None:
    """Blocks of 4-bit weights run on from row to row. With AVX-512, bitsandbytes (0.50.2) begins one with every row: other scales."""
    from bitsandbytes.functional import dequantize_4bit

    packed, state = layer.weight.data, getattr(layer.weight, "quant_state", None)
    if state is None or layer.in_features % state.blocksize == 0:  # None: tied to an embedding
        return
    in_one_row = copy.copy(state)
    in_one_row.shape = torch.Size([state.shape.numel()])
    found, expected = (dequantize_4bit(packed, s).flatten().float() for s in (state, in_one_row))
    if not torch.allclose(found, expected, rtol=0.02, atol=0):  # a 16-bit type rounds, and which kernel runs goes by the shape
        raise ValueError(
            f"4bit: on this CPU bitsandbytes unpacks {name} wrongly, because its rows of {layer.in_features} weights are no multiple of "
            f"its blocks of {state.blocksize}; use a GPU, or the base in 8 bits or unquantised"
        )


class Int8Linear(nn.Linear):
    """Weights of 8 bits, each row with its scale; activations, sums and outputs in the type of the input."""

    def __init__(self, layer: Any) -> None:
        """layer: bitsandbytes' Linear8bitLt, with weights that are quantised."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scales = getattr(layer.weight, "SCB", None)
        scales = layer.state.SCB if scales is None else scales  # where its first forward moves them
        self.weight = nn.Parameter(layer.weight.data, requires_grad=False)
        self.register_buffer("SCB", scales)  # bitsandbytes' name: the largest value of a row, which 127 stands for
        self.SCB: Tensor
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return _Int8Product.apply(input, self.weight, self.SCB, self.bias)  # type: ignore[no-any-return,no-untyped-call]


class _Int8Product(torch.autograd.Function):
    """Unpacks the weight in each direction: autograd would keep it, unpacked, for the way back."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scales)
        return F.linear(inputs, _unpacked(weight, scales, inputs.dtype), None if bias is None else bias.to(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        weight, scales = ctx.saved_tensors
        return gradient @ _unpacked(weight, scales, gradient.dtype), None, None, None


def _unpacked(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).mul_((scales / 127)[:, None])
