"""One query token per row, grouped heads, a cache of ragged rows -> attention that reads only what a row may see.

A masked sdpa reads every key column up to the longest row. This kernel finds the first and last visible
column of a row in its mask and reads what lies between. Imported only where Triton is there.
"""

# B batch, H key-value heads, G query heads per group, S key columns, C head width

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MASKED = tl.constexpr(-30000.0)  # additive masks hold 0 or the lowest number of their type


@triton.jit
def _attend(
    query,
    key,
    value,
    mask,
    output,
    scaling,
    num_columns,
    key_row,
    key_head,
    key_column,
    value_row,
    value_head,
    value_column,
    mask_row,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)

    first = num_columns
    end = 0
    for start in range(0, num_columns, SCAN):
        columns = start + tl.arange(0, SCAN)
        entries = tl.load(mask + row * mask_row + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32)
        visible = entries > MASKED
        first = tl.minimum(first, tl.min(tl.where(visible, columns, num_columns), 0))
        end = tl.maximum(end, tl.max(tl.where(visible, columns + 1, 0), 0))

    group = tl.arange(0, PADDED_GROUP)
    width = tl.arange(0, WIDTH)
    query_offsets = (row * num_heads + head) * GROUP * WIDTH + group[:, None] * WIDTH + width[None, :]
    queries = tl.load(query + query_offsets, mask=group[:, None] < GROUP, other=0.0)
    key_base = key + row * key_row + head * key_head
    value_base = value + row * value_row + head * value_head

    highest = tl.full([PADDED_GROUP], -1.0e30, tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    mixed = tl.zeros([PADDED_GROUP, WIDTH], tl.float32)
    for start in range(first // BLOCK * BLOCK, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        keys = tl.load(key_base + columns[:, None] * key_column + width[None, :], mask=inside[:, None], other=0.0)
        entries = tl.load(mask + row * mask_row + columns, mask=inside, other=float("-inf")).to(tl.float32)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling
        scores = tl.where(entries[None, :] > MASKED, scores + entries[None, :], float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp(highest - new_highest)
        weights = tl.exp(scores - new_highest[:, None])
        values = tl.load(value_base + columns[:, None] * value_column + width[None, :], mask=inside[:, None], other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        highest = new_highest
    tl.store(output + query_offsets, (mixed / total[:, None]).to(output.dtype.element_ty), mask=group[:, None] < GROUP)


def triton_kernel(query_BHGC: Tensor, key_BHSC: Tensor, value_BHSC: Tensor, mask_B11S: Tensor, scaling: float) -> Tensor:
    """Additive mask (0 or the type's lowest number), at least one visible column a row; [B, H, G, C] in and out.

    Raises ValueError for a head width that is no power of two, or differs between keys and values.
    """
    batch, heads, group, width = query_BHGC.shape
    if width & (width - 1) or width < 16 or value_BHSC.shape[3] != width or group > 64:
        raise ValueError(f"no kernel for {group} query heads of width {width}")
    assert key_BHSC.stride(3) == value_BHSC.stride(3) == mask_B11S.stride(3) == 1
    query_BHGC = query_BHGC.contiguous()
    output_BHGC = torch.empty_like(query_BHGC)
    _attend[(batch, heads)](
        query_BHGC,
        key_BHSC,
        value_BHSC,
        mask_B11S,
        output_BHGC,
        scaling,
        mask_B11S.shape[3],
        *key_BHSC.stride()[:3],
        *value_BHSC.stride()[:3],
        mask_B11S.stride(0),
        GROUP=group,
        PADDED_GROUP=max(16, triton.next_power_of_2(group)),
        WIDTH=width,
        BLOCK=64 if width <= 64 else 32,
        SCAN=1024,
        num_warps=4,
    )
    return output_BHGC
