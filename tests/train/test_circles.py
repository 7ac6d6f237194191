"""Where an answer goes in circles."""

from __future__ import annotations

import random

import pytest

from train.circles import SPAN, circle_end


def first_repetition(ids: list[int]) -> int | None:
    """By definition, trying every end and period."""
    for end in range(len(ids) + 1):
        for period in range(1, end):
            length = max(period, SPAN)
            if end >= length + period and ids[end - length : end] == ids[end - length - period : end - period]:
                return end
    return None


@pytest.mark.parametrize("period", [1, 5, SPAN - 1, SPAN, SPAN + 1, 70])
def test_an_answer_is_kept_up_to_the_end_of_its_first_repetition(period: int) -> None:
    start, block = list(range(1000, 1011)), list(range(period))
    ids = start + block * (2 * SPAN + 4)
    assert circle_end(ids) == first_repetition(ids[: 11 + 3 * max(period, SPAN)]) == 11 + period + max(period, SPAN)


def test_what_is_said_once_or_is_short_is_no_circle() -> None:
    block = list(range(50))
    assert circle_end([]) is None
    assert circle_end(block * 2) == 100
    assert circle_end((block * 2)[:-1]) is None
    assert circle_end([*block, 99, *block]) is None, "a repetition further on is no circle"
    assert circle_end([*range(8)] * 3 + [*range(100, 160)]) is None, "two repetitions of eight tokens are fewer than 24"


def test_found_where_the_definition_says() -> None:
    chooser, found = random.Random(0), 0
    for _ in range(300):
        blocks = [[chooser.randrange(40) for _ in range(chooser.choice((3, 11, 30)))] for _ in range(3)]
        ids = [token for _ in range(8) for token in chooser.choice(blocks) * chooser.choice((1, 1, 2, 9))]
        expected, end = first_repetition(ids), circle_end(ids)
        assert (end is None) == (expected is None)
        if end is not None and expected is not None:
            assert expected <= end <= expected + SPAN
            found += 1
    assert 50 < found < 300


def test_a_phrase_that_returns_within_the_sentence_hides_no_circle() -> None:
    phrase = list(range(SPAN))
    block = [*phrase, 100, *phrase, 101, 102]
    assert first_repetition(block * 4) == 2 * len(block)
    end = circle_end(block * 4)
    assert end is not None and 2 * len(block) <= end <= 3 * len(block)
