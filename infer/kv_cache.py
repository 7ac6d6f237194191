"""One preallocated key-value cache for all layers: rows of different lengths, in-place compaction.

Row b holds its tokens at 0 .. lengths[b] - 1. A forward over N new tokens writes them at
lengths[b] .. lengths[b] + N - 1 without moving the length; `keep` then moves the accepted ones
together and advances the length, which drops the rest. Lengths live on the host; `keep` waits for the
device once, to see whether anything moves. Rows that have ended can be let go of: the others then lie side by side, and forwards
run over them alone.
"""

# B batch, R rows still held, L layers, H key-value heads, S capacity, C key or value width, N new tokens, P path length

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
        self.rows = list(range(batch_size))  # rows of the batch in the order in which they lie in the buffers
        self.dtype, self.device = dtype, torch.device(device)
        self.capacity = 0
        self.buffers: dict[LayerShape, tuple[Tensor, Tensor]] = {}
        self._write_RN: Tensor | None = None  # None: every row's new tokens are the last of its keys
        self._places_R1: Tensor | None = None
        self.views = [_LayerView(self, index) for index in range(len(self.shapes))]
        super().__init__(layers=list(self.views))
        self.reserve(capacity)
        self._show(0)

    def reserve(self, capacity: int) -> None:
        """Grows the buffers to hold at least `capacity` tokens a row; what is stored stays."""
        if capacity <= self.capacity:
            return
        capacity = -(-capacity // BUCKET) * BUCKET
        for shape in dict.fromkeys(self.shapes):
            members = [i for i, s in enumerate(self.shapes) if s == shape]
            grown = []
            for which, width in enumerate((shape.key_dim, shape.value_dim)):
                buffer = torch.zeros(len(members), len(self.rows), shape.num_heads, capacity, width, dtype=self.dtype, device=self.device)
                if shape in self.buffers:
                    buffer[..., : self.capacity, :] = self.buffers[shape][which]
                grown.append(buffer)
            self.buffers[shape] = (grown[0], grown[1])
        self.capacity = capacity

    def _show(self, key_length: int) -> None:
        """Points the layers at their parts of the buffers, up to what the next forward sees."""
        for shape, (keys, values) in self.buffers.items():
            members = [view for view, own in zip(self.views, self.shapes, strict=True) if own == shape]
            keys, values = keys[..., :key_length, :], values[..., :key_length, :]
            for position, view in enumerate(members):
                view.keys, view.values = keys[position], values[position]

    def let_go(self, running: Sequence[bool]) -> None:
        """Forgets the rows that are not `running`; at least one must be. They keep their places in `lengths`, and
        `keep` must keep nothing of them. Costs a copy of the row that moves into the gap."""
        if all(running[row] for row in self.rows):
            return
        for place in reversed(range(len(self.rows))):
            if running[self.rows[place]]:
                continue
            moved = self.rows.pop()
            if place < len(self.rows):
                self.rows[place] = moved
                for buffers in self.buffers.values():
                    for buffer in buffers:
                        buffer[:, place, :, : self.lengths[moved]] = buffer[:, len(self.rows), :, : self.lengths[moved]]
        assert self.rows, "one row runs"
        held = len(self.rows)
        self.buffers = {shape: (keys[:, :held], values[:, :held]) for shape, (keys, values) in self.buffers.items()}

    @property
    def held_lengths(self) -> list[int]:
        """Lengths of the rows still held, in the order of `rows`."""
        return [self.lengths[row] for row in self.rows]

    def begin(self, num_new: int) -> int:
        """Announces a forward over `num_new` tokens a row. Returns the key length S it will see."""
        lengths = self.held_lengths
        key_length = max(lengths) + num_new
        self.reserve(key_length)
        self._show(key_length)
        if min(lengths) == max(lengths):
            self._write_RN = None
        else:
            self._write_RN = torch.tensor(lengths, device=self.device)[:, None] + torch.arange(num_new, device=self.device)
            self._places_R1 = torch.arange(len(lengths), device=self.device)[:, None]
        return key_length

    def keep(self, path_BP: Tensor, counts: Sequence[int]) -> None:
        """Keeps, of the tokens written last, those at indices path_BP[b, : counts[b]], in order.

        path_BP: long [B, P] indices into the last forward's tokens, the root (0) first.
        """
        path_length = max(counts)
        path_RP = path_BP[:, :path_length]
        if len(self.rows) < len(counts):
            assert not any(count for row, count in enumerate(counts) if row not in self.rows), "these rows were let go of"
            path_RP = path_RP[self.rows]
        in_place = torch.arange(path_length, device=path_BP.device)
        if path_length and not bool((path_RP == in_place).all()):
            places_R1 = torch.arange(len(self.rows), device=self.device)[:, None]
            starts_R1 = torch.tensor(self.held_lengths, device=self.device)[:, None]
            for buffers in self.buffers.values():
                for buffer in buffers:
                    by_row = buffer.permute(1, 3, 0, 2, 4)  # [R, S, L, H, C], a view
                    by_row[places_R1, starts_R1 + in_place] = by_row[places_R1, starts_R1 + path_RP]
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
        if cache._write_RN is None:
            self.keys[:, :, -key_states.shape[2] :] = key_states
            self.values[:, :, -key_states.shape[2] :] = value_states
        else:
            assert cache._places_R1 is not None
            self.keys.transpose(1, 2)[cache._places_R1, cache._write_RN] = key_states.transpose(1, 2)
            self.values.transpose(1, 2)[cache._places_R1, cache._write_RN] = value_states.transpose(1, 2)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        assert self.keys is not None
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return max(self.cache.held_lengths)

    def get_max_length(self) -> int:
        return self.cache.capacity
