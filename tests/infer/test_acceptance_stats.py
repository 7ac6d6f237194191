"""Acceptance figures against counts made by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from infer.acceptance_stats import AcceptanceStats, influences, lengths, standard_error


def recorded(*accepted: int, drafted: int = 5) -> AcceptanceStats:
    stats = AcceptanceStats()
    for num_accepted in accepted:
        stats.record(drafted, num_accepted)
    return stats


def test_figures_by_hand() -> None:
    figures = recorded(0, 2, 1, 3).figures()
    assert figures == {
        "mean_acceptance_length": 2.5,  # (1 + 3 + 2 + 4) / 4, bonus tokens included
        "acceptance_by_depth": [0.75, 0.5, 0.25],
        "acceptance_by_depth_conditional": [0.75, pytest.approx(2 / 3), 0.5],
        "num_steps": 4,
        "num_drafted_tokens": 20,
        "num_accepted_tokens": 6,
        "num_rejected_tokens": 14,
        "draft_acceptance_rate": 0.3,
    }


def test_depths_sum_to_the_accepted_tokens() -> None:
    stats = recorded(0, 2, 1, 3, 3)
    assert sum(stats.accepted_at_depth) == stats.num_accepted_tokens == 9


def test_never_accepted() -> None:
    figures = recorded(0, 0).figures()
    assert figures["mean_acceptance_length"] == 1.0 and figures["acceptance_by_depth"] == [] and figures["draft_acceptance_rate"] == 0.0


def test_plain_decoding_drafts_nothing() -> None:
    figures = recorded(0, 0, drafted=0).figures()
    assert figures["mean_acceptance_length"] == 1.0 and figures["draft_acceptance_rate"] is None


def test_no_steps() -> None:
    figures = AcceptanceStats().figures()
    assert figures["mean_acceptance_length"] is None and figures["num_steps"] == 0 and figures["acceptance_by_depth_conditional"] == []


def test_sum_equals_recording_everything_in_one() -> None:
    assert recorded(0, 2) + recorded(3, 1, 1) == recorded(0, 2, 3, 1, 1)
    assert sum([recorded(1), recorded(0, 4)], AcceptanceStats()) == recorded(1, 0, 4)


def test_adding_leaves_the_terms_alone() -> None:
    first, second = recorded(1), recorded(2)
    _ = first + second
    assert first == recorded(1) and second == recorded(2)


def test_the_error_of_a_length_is_that_of_a_ratio_of_sums() -> None:
    """The delta method against throwing prompts out at random: the spread of lengths over many resamplings."""
    counts = [(10, 12), (20, 10), (5, 9), (30, 31), (12, 2), (8, 16), (25, 20), (14, 14), (9, 1), (18, 27)]
    one_seed = np.array([counts], float)
    assert lengths(one_seed) == pytest.approx([1 + 142 / 151]) and influences(one_seed).sum() == pytest.approx(0)
    chooser = random.Random(0)
    found = lengths(np.array([chooser.choices(counts, k=10) for _ in range(4000)], float))
    assert standard_error(influences(one_seed)[0]) == pytest.approx(found.std(), rel=0.12)
    assert standard_error([2.0, 4.0, 6.0]) == pytest.approx(2 / math.sqrt(3)) and standard_error([1.0]) is None
