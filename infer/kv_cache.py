"""One preallocated key-value cache for all layers: rows of different lengths, in-place compaction.

Row b holds its tokens at 0 .. lengths[b] - 1. A forward over N new tokens writes them at
lengths[b] .. lengths[b] + N - 1 without moving the length; `keep` then moves the accepted ones
together and advances the length, which drops the rest. Lengths live on the host, so nothing waits
for the device.
"""

# B batch, L layers, H key-value heads, S capacity, C key or value width, N new tokens, P path length

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa_heads.base_model import LayerShape

BUCKET = 256


class KVCache(Cache):
    """A `transformers` cache whose layers are views of buffers shared by all layers of one shape."""

    def __init__(self, shapes: Sequence[LayerShape], batch_size: int, capacity: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Room for `capacity` tokens a row, rounded up to whole buckets of 256 and grown on demand."""
        self.shapes = list(shapes)
        self.lengths = [0] * batch_size
        self.dtype, self.device = dtype, torch.device(device)
        self.capacity = 0
        self.buffers: dict[LayerShape, tuple[Tensor, Tensor]] = {}
        self._write_BN: Tensor | None = None
        self._write_start = 0
        self._key_length = 0
        self.views = [_LayerView(self, index) for index in range(len(self.shapes))]
        super().__init__(layers=list(self.views))
        self.reserve(capacity)

    def reserve(self, capacity: int) -> None:
        """Grows the buffers to hold at least `capacity` tokens a row; what is stored stays."""
        if capacity <= self.capacity:
            return
        capacity = -(-capacity // BUCKET) * BUCKET
        for shape in dict.fromkeys(self.shapes):
            members = [i for i, s in enumerate(self.shapes) if s == shape]
            grown = []
            for which, width in enumerate((shape.key_dim, shape.value_dim)):
                buffer = torch.zeros(
                    len(members), len(self.lengths), shape.num_heads, capacity, width, dtype=self.dtype, device=self.device
                )
                if shape in self.buffers:
                    buffer[..., : self.capacity, :] = self.buffers[shape][which]
                grown.append(buffer)
            self.buffers[shape] = (grown[0], grown[1])
            for position, index in enumerate(members):
                layer = self.views[index]
                layer.keys, layer.values = grown[0][position], grown[1][position]
        self.capacity = capacity

    def begin(self, num_new: int) -> int:
        """Announces a forward over `num_new` tokens a row. Returns the key length S it will see."""
        self._key_length = max(self.lengths) + num_new
        self.reserve(self._key_length)
        if min(self.lengths) == max(self.lengths):
            self._write_start, self._write_BN = self.lengths[0], None
        else:
            starts = torch.tensor(self.lengths, device=self.device)
            self._write_BN = starts[:, None] + torch.arange(num_new, device=self.device)
        return self._key_length

    def keep(self, path_BP: Tensor, counts: Sequence[int]) -> None:
        """Keeps, of the tokens written last, those at indices path_BP[b, : counts[b]], in order.

        path_BP: long [B, P] indices into the last forward's tokens, the root (0) first.
        """
        path_length = max(counts)
        path_BP = path_BP[:, :path_length]
        in_place = torch.arange(path_length, device=path_BP.device)
        if path_length and not bool((path_BP == in_place).all()):
            rows_B1 = torch.arange(len(self.lengths), device=self.device)[:, None]
            starts_B1 = torch.tensor(self.lengths, device=self.device)[:, None]
            for buffers in self.buffers.values():
                for buffer in buffers:
                    by_row = buffer.permute(1, 3, 0, 2, 4)  # [B, S, L, H, C], a view
                    by_row[rows_B1, starts_B1 + in_place] = by_row[rows_B1, starts_B1 + path_BP]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forgets everything from `lengths[b]` on in row b."""
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=True))
        self.lengths = list(lengths)


class _LayerView(CacheLayerMixin):
    """One layer of a KVCache, under the interface transformers' attention calls."""

    is_sliding = False  # windows are cut by the mask, from positions
    is_croppable = False

    def __init__(self, cache: KVCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("the buffers are allocated with the cache")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cache = self.cache
        assert self.keys is not None and self.values is not None
        if cache._write_BN is None:
            start, num_new = cache._write_start, key_states.shape[2]
            self.keys[:, :, start : start + num_new] = key_states
            self.values[:, :, start : start + num_new] = value_states
        else:
            rows = torch.arange(len(cache.lengths), device=key_states.device)[:, None]
            self.keys.transpose(1, 2)[rows, cache._write_BN] = key_states.transpose(1, 2)
            self.values.transpose(1, 2)[rows, cache._write_BN] = value_states.transpose(1, 2)
        return self.keys[:, :, : cache._key_length], self.values[:, :, : cache._key_length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache._key_length, 0

    def get_seq_length(self) -> int:
        return max(self.cache.lengths)

    def get_max_length(self) -> int:
        return self.cache.capacity
