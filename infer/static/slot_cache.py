"""Keys and values of one forward -> fixed slots, at positions that live on the device.

Unlike `KVCache`, nothing here is known to the host: addresses and shapes never change between
decoding steps, which is what a CUDA graph asks for.
"""

# B slots, R refilled slots, H key-value heads, T prompt length, S key columns, C key or value width

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa_heads.base_model import LayerShape


class SlotCache(Cache):
    """A `transformers` cache of B slots with room for `capacity` tokens each.

    Prefill (`slots_R` set): a forward over R prompts, written at columns 0 .. T-1 of those slots.
    Decode (`slots_R` None): a forward over one token in every slot, written at column lengths_B[b];
    attention sees the first `key_length` columns.
    """

    def __init__(self, shapes: Sequence[LayerShape], lengths_B: Tensor, capacity: int, *, dtype: torch.dtype) -> None:
        """lengths_B: long [B], the write positions; the caller advances them in place."""
        self.lengths_B = lengths_B
        self.rows_B = torch.arange(len(lengths_B), device=lengths_B.device)
        self.capacity = self.key_length = capacity
        self.slots_R: Tensor | None = None
        super().__init__(layers=[_SlotLayer(self, shape, dtype) for shape in shapes])

    def select(self, slots_R: Tensor, lengths_R: Tensor) -> None:
        """Keeps only the given slots, in this order; addresses change."""
        self.lengths_B = lengths_R
        self.rows_B = torch.arange(len(slots_R), device=slots_R.device)
        for layer in self.layers:
            assert isinstance(layer, _SlotLayer) and layer.keys is not None and layer.values is not None
            layer.keys, layer.values = layer.keys[slots_R], layer.values[slots_R]


class _SlotLayer(CacheLayerMixin):
    """One layer of a SlotCache, under the interface transformers' attention calls."""

    is_sliding = False  # windows are cut by the mask, from positions
    is_croppable = False

    def __init__(self, cache: SlotCache, shape: LayerShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.cache = cache
        size = (len(cache.rows_B), shape.num_heads, cache.capacity)
        self.keys = torch.zeros(*size, shape.key_dim, dtype=dtype, device=cache.rows_B.device)
        self.values = torch.zeros(*size, shape.value_dim, dtype=dtype, device=cache.rows_B.device)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("the buffers are allocated with the cache")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cache = self.cache
        assert self.keys is not None and self.values is not None
        if cache.slots_R is not None:
            length = key_states.shape[2]
            self.keys[:, :, :length].index_copy_(0, cache.slots_R, key_states)
            self.values[:, :, :length].index_copy_(0, cache.slots_R, value_states)
            return key_states, value_states
        self.keys.transpose(1, 2)[cache.rows_B, cache.lengths_B] = key_states[:, :, 0]
        self.values.transpose(1, 2)[cache.rows_B, cache.lengths_B] = value_states[:, :, 0]
        return self.keys[:, :, : cache.key_length], self.values[:, :, : cache.key_length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.cache.slots_R is not None else self.cache.key_length), 0

    def get_seq_length(self) -> int:
        return 0  # a prefill starts empty; a decoding step brings its own mask and positions

    def get_max_length(self) -> int:
        return self.cache.capacity
