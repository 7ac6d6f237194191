"""Token ids of an answer -> where it goes in circles: greedy answers of small models often end in one sentence, again and again."""

from __future__ import annotations

from collections.abc import Sequence

SPAN = 24
"""Tokens that must come again before it counts: shorter repetitions belong to tables, lists and refrains."""


def circle_end(ids: Sequence[int]) -> int | None:
    """How long the answer is at the end of its first repetition: where its last max(p, SPAN) tokens are those p before them, so that
    a sentence has been said twice. None: it says nothing twice in a row. Takes time in proportion to len(ids)."""
    ends: dict[tuple[int, ...], int] = {}
    period = run = 0
    for end in range(SPAN, len(ids) + 1):
        span = tuple(ids[end - SPAN : end])
        if period and ids[end - 1] == ids[end - 1 - period]:
            run += 1
        else:
            period, run = end - ends.get(span, end), SPAN
        if period and run >= period:
            return end
        ends[span] = end
    return None
