"""The cache against plain lists: ragged writes, compaction, growth, layers of different shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import infer.kv_cache
from infer.kv_cache import KVCache
from medusa_heads.base_model import LayerShape

SHAPES = [LayerShape(2, 4, 4), LayerShape(1, 3, 5), LayerShape(2, 4, 4)]
Stored = list[list[list[Tensor]]]  # [layer][row] -> one vector [H * (key + value)] per token


def new_cache(batch: int, capacity: int = 1) -> KVCache:
    return KVCache(SHAPES, batch, capacity, dtype=torch.float32, device=torch.device("cpu"))


def empty(batch: int) -> Stored:
    return [[[] for _ in range(batch)] for _ in SHAPES]


def flat(keys_BHSC: Tensor, values_BHSC: Tensor, row: int, position: int) -> Tensor:
    return torch.cat([keys_BHSC[row, :, position].flatten(), values_BHSC[row, :, position].flatten()])


def write(cache: KVCache, stored: Stored, num_new: int) -> Stored:
    """Writes random tokens as a forward would; checks what attention sees; returns the new vectors."""
    batch = len(cache.rows)
    key_length = cache.begin(num_new)
    assert key_length == max(cache.held_lengths) + num_new == cache.views[0].get_mask_sizes(num_new)[0]
    new: Stored = []
    for index, shape in enumerate(SHAPES):
        keys = torch.randn(batch, shape.num_heads, num_new, shape.key_dim)
        values = torch.randn(batch, shape.num_heads, num_new, shape.value_dim)
        seen_keys, seen_values = cache.update(keys, values, index)
        assert seen_keys.shape[2] == seen_values.shape[2] == key_length
        new.append([[flat(keys, values, row, n) for n in range(num_new)] for row in range(batch)])
        for row in range(batch):
            expected = stored[index][row] + new[index][row]
            found = [flat(seen_keys, seen_values, row, position) for position in range(len(expected))]
            assert torch.equal(torch.stack(found), torch.stack(expected)), f"layer {index}, row {row}"
    return new


def random_path(num_new: int, generator: torch.Generator) -> list[int]:
    """Node indices of a path: the root first, rising."""
    chosen = torch.rand(num_new, generator=generator) < 0.4
    return [0] + [n for n in range(1, num_new) if chosen[n]]


@pytest.mark.parametrize(("batch", "seed"), [(1, 0), (3, 1), (4, 2)])
def test_random_steps_equal_plain_lists(batch: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer.kv_cache, "BUCKET", 8)
    generator = torch.Generator().manual_seed(seed)
    cache, stored = new_cache(batch), empty(batch)
    for _ in range(12):
        num_new = int(torch.randint(1, 10, (), generator=generator))
        new = write(cache, stored, num_new)
        paths = [random_path(num_new, generator) for _ in range(batch)]
        counts = [int(torch.randint(0, len(path) + 1, (), generator=generator)) for path in paths]
        longest = max(map(len, paths))
        cache.keep(torch.tensor([path + [path[-1]] * (longest - len(path)) for path in paths]), counts)
        for layer, new_layer in zip(stored, new, strict=True):
            for row in range(batch):
                layer[row] += [new_layer[row][n] for n in paths[row][: counts[row]]]
        assert cache.lengths == [len(row) for row in stored[0]]
    assert cache.capacity > 8 and cache.capacity % 8 == 0, "grown over several buckets"


def test_keeping_other_nodes_is_noticed() -> None:
    """Control: the comparison must see a stale row."""
    cache, stored = new_cache(1), empty(1)
    new = write(cache, stored, 4)
    cache.keep(torch.tensor([[0, 1]]), [2])
    with pytest.raises(AssertionError, match="layer 0, row 0"):
        write(cache, [[[layer[0][0], layer[0][2]]] for layer in new], 1)


def held(stored: Stored, cache: KVCache) -> Stored:
    """What is stored of the rows that the cache holds, in its order."""
    return [[layer[row] for row in cache.rows] for layer in stored]


@pytest.mark.parametrize("order", [[1, 3, 0], [0, 1, 2], [3, 2, 1], [2, 0, 3]])
def test_rows_let_go_of_leave_the_others_as_they_were(order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows of different lengths; one after the other ends, the buffers grow in between."""
    monkeypatch.setattr(infer.kv_cache, "BUCKET", 8)
    cache, stored, running = new_cache(4), empty(4), [True] * 4
    for step in range(4):
        for _ in range(2):
            new = write(cache, held(stored, cache), 5)
            counts = [(row + step) % 5 + 1 if running[row] else 0 for row in range(4)]
            paths = [([0, *range(5 - count + 1, 5)] * 5)[:5] if count else [0] * 5 for count in counts]
            cache.keep(torch.tensor(paths), counts)
            for layer, new_layer in zip(stored, new, strict=True):
                for place, row in enumerate(cache.rows):
                    layer[row] += [new_layer[place][n] for n in paths[row][: counts[row]]]
            assert cache.lengths == [len(row) for row in stored[0]]
        if step < 3:
            running[order[step]] = False
            cache.let_go(running)
            assert sorted(cache.rows) == [row for row in range(4) if running[row]]
    assert cache.held_lengths == [cache.lengths[row] for row in cache.rows] and cache.views[0].keys is not None
    assert len(cache.views[0].keys) == 1 and cache.get_seq_length() == cache.held_lengths[0]
    with pytest.raises(AssertionError, match="let go of"):
        cache.keep(torch.zeros(4, 1, dtype=torch.long), [1] * 4)


def test_truncate_forgets_the_end() -> None:
    cache, stored = new_cache(2), empty(2)
    new = write(cache, stored, 5)
    cache.keep(torch.arange(5).expand(2, -1), [5, 3])
    cache.truncate([2, 3])
    assert cache.lengths == [2, 3] and cache.get_seq_length() == 3
    write(cache, [[layer[0][:2], layer[1][:3]] for layer in new], 2)
    with pytest.raises(AssertionError):
        cache.truncate([3, 3])


def test_growth_keeps_what_is_stored_and_rounds_to_buckets() -> None:
    cache, stored = new_cache(2, capacity=200), empty(2)
    assert cache.capacity == infer.kv_cache.BUCKET == 256
    new = write(cache, stored, 250)
    cache.keep(torch.arange(250).expand(2, -1), [250, 249])
    write(cache, [[layer[0], layer[1][:249]] for layer in new], 7)
    assert cache.capacity == 512


def test_layers_of_one_shape_share_one_buffer() -> None:
    """What makes the compaction one gather per shape instead of one per layer."""
    cache = new_cache(1)
    assert len(cache.buffers) == 2
    keys = [layer.keys for layer in cache.views]
    assert keys[0] is not None and keys[2] is not None and keys[0].untyped_storage().data_ptr() == keys[2].untyped_storage().data_ptr()
