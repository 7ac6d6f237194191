"""Prompt lookup proposes what followed the latest occurrence of the longest matching tail."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from infer.candidates import FILLER, Candidates
from infer.drafters.prompt_lookup import PromptLookupDrafter
from infer.generate import Generator
from tests.tiny_models import tiny_model


def draft(text: list[int], num_draft_tokens: int = 10, max_ngram: int = 3) -> list[int]:
    return drafts([text], num_draft_tokens, max_ngram)[0]


def drafts(texts: list[list[int]], num_draft_tokens: int = 10, max_ngram: int = 3) -> list[list[int]]:
    candidates = propose(texts, num_draft_tokens, max_ngram)
    return candidates.tokens_BN[:, 1:].tolist()


def propose(texts: list[list[int]], num_draft_tokens: int = 10, max_ngram: int = 3) -> Candidates:
    drafter = PromptLookupDrafter(num_draft_tokens, max_ngram)
    drafter.start([text[:1] for text in texts])
    roots = torch.tensor([text[-1] for text in texts])
    candidates = drafter.propose(roots, torch.zeros(len(texts), 4), texts)
    assert candidates.tokens_BN[:, 0].tolist() == roots.tolist()
    return candidates


def reference(text: list[int], num_draft_tokens: int, max_ngram: int) -> list[int]:
    """The definition, by brute force."""
    for size in range(min(max_ngram, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                return text[end : end + num_draft_tokens]
    return []


def test_longest_match_before_latest() -> None:
    assert draft([1, 2, 3, 50, 9, 3, 60, 1, 2, 3], num_draft_tokens=2) == [50, 9]


def test_latest_of_equal_matches() -> None:
    assert draft([5, 10, 5, 20, 5], num_draft_tokens=1) == [20]


def test_nothing_found_drafts_nothing() -> None:
    assert draft([1, 2, 3, 4]) == []
    assert draft([7]) == []


def test_ragged_rows_are_filled() -> None:
    texts = [[1, 8, 8, 8, 1], [1, 2, 1], [3, 4, 5]]
    assert drafts(texts, num_draft_tokens=3) == [[8, 8, 8], [2, 1, FILLER], [FILLER] * 3]
    assert propose(texts, num_draft_tokens=3).num_drafted == (3, 2, 0)
    assert propose(texts[:1] * 2, num_draft_tokens=3).num_drafted == (3, 3)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 4), st.integers(1, 30))
def test_equals_definition_while_the_text_grows(text: list[int], num_draft_tokens: int, max_ngram: int, start: int) -> None:
    drafter = PromptLookupDrafter(num_draft_tokens, max_ngram)
    drafter.start([text[:start]])
    for length in range(min(start, len(text)), len(text) + 1):
        candidates = drafter.propose(torch.tensor([text[length - 1]]), torch.zeros(1, 4), [text[:length]])
        assert candidates.tokens_BN[0, 1:].tolist() == reference(text[:length], num_draft_tokens, max_ngram)


def test_two_batches_do_not_share_tables() -> None:
    drafter = PromptLookupDrafter()
    drafter.start([[1, 2, 1, 3]])
    drafter.propose(torch.tensor([3]), torch.zeros(1, 4), [[1, 2, 1, 3]])
    drafter.start([[1]])
    assert drafter.propose(torch.tensor([1]), torch.zeros(1, 4), [[1]]).num_nodes == 0


def test_answers_are_the_models_own() -> None:
    model = tiny_model("llama")
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 3, 4], [20, 20, 20, 20, 20]]
    plain = Generator(model).generate(prompts, max_new_tokens=40)
    looked_up = Generator(model, PromptLookupDrafter()).generate(prompts, max_new_tokens=40)
    assert [a.token_ids for a in looked_up] == [a.token_ids for a in plain]
    assert sum(a.stats.num_drafted_tokens for a in looked_up) > 0
