"""A forward over a tree equals plain forwards over its paths, on every family; corruptions are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import infer.kv_cache
from infer.candidates import Candidates, beam_candidates, static_candidates
from infer.kv_cache import KVCache
from infer.tree import build_tree
from infer.tree_forward import prefill, tree_forward
from infer.tree_support import check_tree_support
from medusa_heads import base_model
from tests.tiny_models import FAMILIES, VOCAB_SIZE, WINDOW, tiny_model

EXACT = 2e-5  # of the largest value; float32 sums in another order
BACKENDS = [(family, None) for family in FAMILIES] + [(f, "eager") for f in FAMILIES if f != "gemma2"]
LENGTHS = (13, 5, 19)  # around the window of 8
STATIC = build_tree([[0], [1], [3], [0, 0], [0, 2], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 5], [0, 0, 1, 0]])
# A path longer than the window, with a sibling before every node of it, so that depth and index part.
DEEP = build_tree([path for d in range(WINDOW + 3) for path in ([1] * d + [0], [1] * (d + 1))])


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def random_draft(kind: str, batch: int, seed: int) -> Candidates:
    generator = torch.Generator().manual_seed(seed)
    logits_BKV = torch.randn(batch, WINDOW + 3, VOCAB_SIZE, generator=generator)
    root_B = torch.randint(0, VOCAB_SIZE, (batch,), generator=generator)
    if kind == "beam":
        return beam_candidates(root_B, logits_BKV[:, :4], 24, 6)
    return static_candidates(root_B, logits_BKV, DEEP if kind == "deep" else STATIC)


def path_to(candidates: Candidates, row: int, node: int) -> list[int]:
    parents = candidates.parents_BN.expand_as(candidates.tokens_BN)[row].tolist()
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


def new_cache(model: PreTrainedModel, batch: int, capacity: int = 64) -> KVCache:
    return KVCache(base_model.cache_layer_shapes(model), batch, capacity, dtype=model.dtype, device=model.device)


def tree_error(model: PreTrainedModel, candidates: Candidates, texts: list[list[int]], outputs: tuple[Tensor, Tensor]) -> float:
    """The largest relative difference of logits and hidden states from plain forwards over every path."""
    worst = 0.0
    for row, text in enumerate(texts):
        for node in range(candidates.tokens_BN.shape[1]):
            path = path_to(candidates, row, node)
            tokens = torch.tensor([text + candidates.tokens_BN[row, path].tolist()])
            plain = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
            for found, expected in zip(outputs, (plain.logits, plain.hidden_states[-1]), strict=True):
                difference = (found[row, node] - expected[0, -1]).abs().max() / expected.abs().max()
                worst = max(worst, float(difference))
    return worst


def accept_some(candidates: Candidates, cache: KVCache, texts: list[list[int]], nodes: list[int]) -> None:
    """Keeps the path to nodes[b] in row b, as verification would."""
    paths = [path_to(candidates, row, node) for row, node in enumerate(nodes)]
    longest = max(map(len, paths))
    cache.keep(torch.tensor([path + [path[-1]] * (longest - len(path)) for path in paths]), [len(path) for path in paths])
    for row, path in enumerate(paths):
        texts[row] += candidates.tokens_BN[row, path].tolist()


@torch.inference_mode()
@pytest.mark.compat
@pytest.mark.parametrize("kind", ["static", "beam", "deep"])
@pytest.mark.parametrize(("family", "attention"), BACKENDS)
def test_tree_equals_paths_over_several_steps(family: str, attention: str | None, kind: str) -> None:
    model, texts = tiny_model(family, attention=attention), prompts()
    cache = new_cache(model, 3)
    prefill(model, texts, cache)
    for step, nodes in enumerate(([9, 0, 4], [2, 10, 0])):
        candidates = random_draft(kind, 3, seed=step)
        outputs = tree_forward(model, candidates, cache)
        assert tree_error(model, candidates, texts, outputs) < EXACT
        accept_some(candidates, cache, texts, nodes)
    assert cache.lengths == [len(text) for text in texts]
    candidates = random_draft(kind, 3, seed=9)
    assert tree_error(model, candidates, texts, tree_forward(model, candidates, cache)) < EXACT


def shift_positions(candidates: Candidates) -> Candidates:
    return replace(candidates, depths_BN=candidates.depths_BN + (candidates.depths_BN > 1).long())


def drop_an_ancestor(candidates: Candidates) -> Candidates:
    """The deepest node no longer sees its parent."""
    node = int(candidates.depths_BN[0].argmax())
    ancestors = candidates.ancestors_BNN.clone()
    ancestors[0, node, candidates.parents_BN[0, node]] = False
    return replace(candidates, ancestors_BNN=ancestors)


def show_a_sibling(candidates: Candidates) -> Candidates:
    ancestors = candidates.ancestors_BNN.clone()
    ancestors[0, 2, 1] = True
    return replace(candidates, ancestors_BNN=ancestors)


@torch.inference_mode()
@pytest.mark.parametrize("corrupt", [shift_positions, drop_an_ancestor, show_a_sibling])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_corrupted_tree_is_caught(family: str, corrupt: Callable[[Candidates], Candidates]) -> None:
    """Control: positions off by one, a missing ancestor or a visible sibling must show."""
    model, texts = tiny_model(family), prompts()
    cache = new_cache(model, 3)
    prefill(model, texts, cache)
    candidates = random_draft("beam", 3, seed=0)
    assert tree_error(model, candidates, texts, tree_forward(model, corrupt(candidates), cache)) > 100 * EXACT


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stale_cache_row_is_caught(family: str) -> None:
    """Control: a cache that kept another node than the accepted one must show."""
    model, texts = tiny_model(family), prompts()
    cache = new_cache(model, 3)
    prefill(model, texts, cache)
    candidates = random_draft("static", 3, seed=0)
    tree_forward(model, candidates, cache)
    kept_texts = [list(text) for text in texts]
    accept_some(candidates, cache, kept_texts, [5, 2, 2])
    accepted = [text + candidates.tokens_BN[row, path_to(candidates, row, 4)].tolist() for row, text in enumerate(texts)]
    accepted[1:] = kept_texts[1:]
    assert len(accepted[0]) == cache.lengths[0]
    following = random_draft("static", 3, seed=1)
    outputs = tree_forward(model, following, cache)
    assert tree_error(model, following, kept_texts, outputs) < EXACT
    assert tree_error(model, following, accepted, outputs) > 100 * EXACT


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_equals_one_shot(family: str) -> None:
    model, texts = tiny_model(family), prompts((40, 7, 16))
    expected = [base_model.forward_hidden(model, torch.tensor([text]))[0, -1] for text in texts]
    for chunk in (1, 7, 16, 1024):
        cache = new_cache(model, 3)
        hidden_BD = prefill(model, texts, cache, chunk=chunk)
        assert cache.lengths == [40, 7, 16]
        torch.testing.assert_close(hidden_BD, torch.stack(expected), rtol=1e-4, atol=1e-4)
        candidates = random_draft("beam", 3, seed=chunk)
        assert tree_error(model, candidates, texts, tree_forward(model, candidates, cache)) < EXACT


@torch.inference_mode()
def test_cache_growth_over_bucket_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer.kv_cache, "BUCKET", 8)
    model, texts = tiny_model("llama"), prompts()
    cache = new_cache(model, 3, capacity=1)
    prefill(model, texts, cache, chunk=6)
    capacities = set()
    for step in range(8):
        candidates = random_draft("static", 3, seed=step)
        outputs = tree_forward(model, candidates, cache)
        capacities.add(cache.capacity)
        accept_some(candidates, cache, texts, [9, 7, 0])
    assert len(capacities) >= 3
    candidates = random_draft("static", 3, seed=99)
    outputs = tree_forward(model, candidates, cache)
    assert tree_error(model, candidates, texts, outputs) < EXACT


@pytest.mark.compat
@pytest.mark.parametrize(("family", "attention"), BACKENDS)
def test_supported_models_pass_the_probe(family: str, attention: str | None) -> None:
    model = tiny_model(family, attention=attention)
    shapes = check_tree_support(model)
    assert len(shapes) == 2 and all(shape.num_heads == (4 if family == "gpt2" else 2) for shape in shapes)


def test_a_model_that_ignores_positions_or_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    forward = base_model.forward_hidden

    def without_positions(model: PreTrainedModel, input_ids: Tensor, *, position_ids: Tensor | None = None, **keywords: object) -> Tensor:
        if position_ids is not None:
            position_ids = position_ids[:, :1] + torch.arange(position_ids.shape[1])
        return forward(model, input_ids, position_ids=position_ids, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(base_model, "forward_hidden", without_positions)
    with pytest.raises(ValueError, match="does not honour a tree mask"):
        check_tree_support(model)
