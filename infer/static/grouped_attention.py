"""One query token per row and grouped key-value heads -> attention that reads the cache once.

Where a mask is given, transformers repeats keys and values for every query head before sdpa (up to
5.23): at one query token that multiplies the memory traffic of decoding. Here the query heads of one
group become the query rows of their key-value head. Registered through transformers' public
AttentionInterface; anything but a masked single-token query goes to its own sdpa function.
"""

# B batch, Q query heads, H key-value heads, G query heads per group, S key columns, C head width

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from medusa_heads import base_model

logger = logging.getLogger(__name__)
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def sdpa_kernel(query_BHGC: Tensor, key_BHSC: Tensor, value_BHSC: Tensor, mask_B11S: Tensor, scaling: float) -> Tensor:
    """Additive mask, [B, H, G, C] in and out."""
    return F.scaled_dot_product_attention(query_BHGC, key_BHSC, value_BHSC, attn_mask=mask_B11S, scale=scaling)


def matmul_kernel(query_BHGC: Tensor, key_BHSC: Tensor, value_BHSC: Tensor, mask_B11S: Tensor, scaling: float) -> Tensor:
    """The same as two batched matrix products around a float32 softmax."""
    batch, heads, group, _ = query_BHGC.shape
    query, key, value = query_BHGC.flatten(0, 1), key_BHSC.flatten(0, 1), value_BHSC.flatten(0, 1)
    if query.is_cuda and query.dtype != torch.float32:
        scores = torch.bmm(query, key.transpose(1, 2), out_dtype=torch.float32)
    else:
        scores = torch.bmm(query, key.transpose(1, 2))
    scores = scores.view(batch, heads, group, -1) * scaling + mask_B11S
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(weights.flatten(0, 1), value).view(batch, heads, group, -1)


KERNELS: dict[str, Kernel] = {"grouped_sdpa": sdpa_kernel, "grouped_matmul": matmul_kernel}


def available_kernels(device: torch.device) -> dict[str, Kernel]:
    """KERNELS, and the Triton one on a GPU whose torch brings Triton."""
    if device.type != "cuda":
        return KERNELS
    try:
        from infer.static.triton_attention import triton_kernel
    except ImportError:
        return KERNELS
    return KERNELS | {"grouped_triton": triton_kernel}


def _attention_function(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    """The kernel under the signature that transformers calls."""
    sdpa = AttentionInterface()["sdpa"]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        plain = options.get("position_bias") is None and options.get("softcap") is None and options.get("s_aux") is None
        if attention_mask is None or attention_mask.shape[1] != 1 or query.shape[2] != 1 or not plain:
            return sdpa(module, query, key, value, attention_mask, **options)
        batch, heads, _, width = query.shape
        grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
        output = kernel(grouped, key, value, attention_mask, options.get("scaling") or width**-0.5)
        return output.reshape(batch, 1, heads, value.shape[3]), None

    return attend


@contextmanager
def grouped_attention(model: PreTrainedModel, *, batch_size: int, key_length: int) -> Iterator[str]:
    """Sets the fastest kernel on `model` and restores its own afterwards. Yields the name in use.

    The model keeps what it has when it does not use sdpa, has no grouped heads, or caps its scores.
    """
    config, own = base_model.text_config(model), model.config._attn_implementation
    group = (getattr(config, "num_attention_heads", 1) or 1) // (getattr(config, "num_key_value_heads", None) or 1)
    if own != "sdpa" or group < 2 or getattr(config, "attn_logit_softcapping", None):
        yield own
        return
    kernels = available_kernels(model.device)
    name = fastest_kernel(model, kernels, group, batch_size, key_length) if model.device.type == "cuda" else "grouped_sdpa"
    AttentionInterface.register(name, _attention_function(kernels[name]))
    AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])
    model.set_attn_implementation(name)
    try:
        yield name
    finally:
        model.set_attn_implementation(own)


@torch.inference_mode()
def fastest_kernel(model: PreTrainedModel, kernels: dict[str, Kernel], group: int, batch_size: int, key_length: int) -> str:
    """Times the kernels on rows of the real shapes, half full; one that fails or strays from float32 is out."""
    shape = base_model.cache_layer_shapes(model)[0]
    key_length = -(-key_length // 128) * 128

    def random(num_heads: int, length: int, width: int) -> Tensor:
        return torch.randn(batch_size, num_heads, length, width, dtype=model.dtype, device=model.device)

    query = random(shape.num_heads, group, shape.key_dim)
    key, value = random(shape.num_heads, key_length, shape.key_dim), random(shape.num_heads, key_length, shape.value_dim)
    mask = torch.zeros(batch_size, 1, 1, key_length, dtype=model.dtype, device=model.device)
    mask[..., key_length // 2 :] = torch.finfo(model.dtype).min
    mask[0, ..., 1:] = torch.finfo(model.dtype).min  # an idle slot
    tensors, scaling = (query, key, value, mask), shape.key_dim**-0.5
    exact = sdpa_kernel(query[:4].float(), key[:4].float(), value[:4].float(), mask[:4].float(), scaling)
    seconds: dict[str, float] = {}
    for name, kernel in kernels.items():
        try:
            found = kernel(*tensors, scaling)
            if (found[:4].float() - exact).abs().max() < 0.03:
                seconds[name] = _time(kernel, tensors, scaling)
        except Exception as error:  # a compiler's own error types: whatever goes wrong, another kernel does the work
            logger.info("attention kernel %s is not usable here: %s", name, error)
    logger.info("attention kernels, seconds per ten calls: %s", seconds)
    return min(seconds, key=seconds.__getitem__) if seconds else "grouped_sdpa"


def _time(kernel: Kernel, tensors: tuple[Tensor, Tensor, Tensor, Tensor], scaling: float) -> float:
    kernel(*tensors, scaling)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        kernel(*tensors, scaling)
    torch.cuda.synchronize()
    return time.perf_counter() - start
