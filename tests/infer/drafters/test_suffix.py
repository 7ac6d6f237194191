"""The suffix drafter proposes what followed the longest repeated tail, by exact counts, and changes no token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from infer.candidates import FILLER
from infer.drafters.suffix import SuffixCounts, SuffixDrafter
from infer.generate import Generator
from tests.tiny_models import tiny_model

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 3, 4], [20, 20, 20, 20, 20]]
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.5, "top_k": 3}
SMALL_TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def drafted_paths(drafter: SuffixDrafter, texts: list[list[int]]) -> list[list[tuple[int, ...]]]:
    """Per row, the token path of every node besides the root."""
    roots = torch.tensor([text[-1] for text in texts])
    candidates = drafter.propose(roots, torch.zeros(len(texts), 4), texts)
    assert candidates.tokens_BN[:, 0].tolist() == roots.tolist()
    parents, tokens = candidates.parents_BN.expand(len(texts), -1).tolist(), candidates.tokens_BN.tolist()
    rows = []
    for row in range(len(texts)):
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, candidates.num_nodes + 1):
            assert parents[row][node] < node
            paths.append((*paths[parents[row][node]], tokens[row][node]))
            ancestors = candidates.ancestors_BNN[row, node]
            assert candidates.depths_BN[row, node] == ancestors.sum() - 1 == len(paths[-1]) <= candidates.max_depth
        assert len(set(paths)) == len(paths), "siblings hold different tokens"
        rows.append(paths[1:])
    return rows


def ends(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where `part` ends in `text`, by brute force."""
    return [end for end in range(len(part), len(text) + 1) if list(text[end - len(part) : end]) == list(part)]


def reference(text: list[int], num_nodes: int, min_match: int, max_match: int) -> list[tuple[int, ...]]:
    """The definition by brute force: all continuations sorted by count, depth, latest end, last token."""
    for size in range(min(max_match, len(text) - 1), min_match - 1, -1):
        tail = text[-size:]
        if len(ends(text, tail)) > 1:
            break
    else:
        return []
    paths = {tuple(text[end : end + depth]) for end in ends(text, tail)[:-1] for depth in range(1, num_nodes + 1)}
    paths = {path for path in paths if ends(text, [*tail, *path])}

    def rank(path: tuple[int, ...]) -> tuple[int, int, int, int]:
        found = ends(text, [*tail, *path])
        return -len(found), len(path), -found[-1], path[-1]

    return sorted(paths, key=rank)[:num_nodes]


def test_more_frequent_continuations_come_first() -> None:
    drafter = SuffixDrafter(num_nodes=3)
    drafter.start([[]])
    text = [1, 2, 30, 40, 1, 2, 50, 1, 2, 30, 41, 1, 2]
    assert drafted_paths(drafter, [text]) == [[(30,), (50,), (30, 41)]]


def test_short_matches_are_not_believed() -> None:
    drafter = SuffixDrafter(min_match=2)
    drafter.start([[]])
    assert drafted_paths(drafter, [[7, 8, 9, 3, 7]]) == [[]]
    assert drafted_paths(drafter, [[7, 8, 9, 3, 7, 8]])[0][:2] == [(9,), (9, 3)]


def test_ragged_rows_are_filled_below_a_leaf() -> None:
    drafter = SuffixDrafter(num_nodes=4, min_match=1)
    drafter.start([[], [], []])
    rows = drafted_paths(drafter, [[1, 8, 9, 1, 7, 1], [2, 2], [3, 4, 5]])
    assert rows[0] == [(7,), (8,), (7, 1), (8, 9)]
    assert rows[1] == [(2,), (2, FILLER), (2, FILLER, FILLER), (2, FILLER, FILLER, FILLER)]
    assert rows[2] == [(FILLER,) * depth for depth in range(1, 5)]
    assert drafter.propose(torch.tensor([1, 2, 5]), torch.zeros(3, 4), [[1, 8, 9, 1, 7, 1], [2, 2], [3, 4, 5]]).num_drafted == (4, 1, 0)


@given(SMALL_TEXTS, st.integers(1, 6), st.integers(1, 3), st.integers(0, 4), st.integers(1, 4))
def test_equals_the_definition_while_the_text_grows(text: list[int], num_nodes: int, min_match: int, more: int, stride: int) -> None:
    drafter = SuffixDrafter(num_nodes, min_match, min_match + more)
    drafter.start([text[:1]])
    for length in range(1, len(text) + 1, stride):
        assert drafted_paths(drafter, [text[:length]]) == [reference(text[:length], num_nodes, min_match, min_match + more)]


@given(SMALL_TEXTS, st.integers(1, 6))
def test_counts_are_those_of_a_search(text: list[int], max_length: int) -> None:
    """Every substring of at most max_length tokens, after every token."""
    counts = SuffixCounts(max_length)
    for length, token in enumerate(text, start=1):
        counts.extend(token)
        for start in range(length):
            part = text[start : min(start + max_length, length)]
            state = 0
            for t in part:
                state = counts.next[state][t]
            assert (counts.count[state], counts.last_end[state]) == (len(found := ends(text[:length], part)), found[-1])


def test_two_batches_do_not_share_counts() -> None:
    drafter = SuffixDrafter(min_match=1)
    drafter.start([[]])
    drafted_paths(drafter, [[1, 2, 1]])
    drafter.start([[]])
    assert drafted_paths(drafter, [[1]]) == [[]]


@pytest.mark.parametrize("settings", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_drafts_change_no_token(family: str, settings: dict[str, Any] | None) -> None:
    """One row and three; the rows of a batch end at different steps."""
    model = tiny_model(family)
    config = None if settings is None else GenerationConfig(pad_token_id=0, **settings)
    plain, drafted = Generator(model), Generator(model, SuffixDrafter(num_nodes=8, min_match=1))
    num_drafted = 0
    for prompts, place in ((PROMPTS[:1], None), (PROMPTS, 12)):
        free = plain.generate(prompts, max_new_tokens=40, eos_ids=(), generation_config=config, seed=3)
        eos = () if place is None else (free[-1].token_ids[place],)
        expected = plain.generate(prompts, max_new_tokens=40, eos_ids=eos, generation_config=config, seed=3)
        found = drafted.generate(prompts, max_new_tokens=40, eos_ids=eos, generation_config=config, seed=3)
        assert [a.token_ids for a in found] == [a.token_ids for a in expected]
        num_drafted += sum(a.stats.num_drafted_tokens for a in found)
    assert num_drafted > 0


def test_repeated_text_is_accepted() -> None:
    """A tiny model soon repeats itself; its loops are found."""
    found = Generator(tiny_model("llama"), SuffixDrafter()).generate(PROMPTS, max_new_tokens=80, eos_ids=())
    assert sum(a.stats.num_accepted_tokens for a in found) > 20


@pytest.mark.parametrize("options", [{"num_nodes": 0}, {"min_match": 0}, {"min_match": 5, "max_match": 4}])
def test_senseless_sizes_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="num_nodes"):
        SuffixDrafter(**options)
