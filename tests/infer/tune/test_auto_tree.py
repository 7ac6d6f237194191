"""`--tree auto`: the arithmetic of the choice, and the measurement on a tiny model."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from infer.drafters.heads import HeadsDrafter
from infer.tree_spec import BeamTree
from infer.tune import auto_tree
from infer.tune.auto_tree import SIZES, StepTime, best_size, choose_tree, expected_length, measure_steps
from medusa_heads.checkpoint import HeadsCheckpoint
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import create_heads
from tests.tiny_models import tiny_model

MODEL = tiny_model("llama")


def checkpoint(acceptance: dict[int, float] | None = None) -> HeadsCheckpoint:
    heads = create_heads(HeadsConfig(num_heads=3), MODEL)
    return HeadsCheckpoint(heads, heads.config, Path("heads"), acceptance=acceptance or {})


def test_expected_length_interpolates_over_log_nodes() -> None:
    measured = {3: 2.0, 15: 3.0}
    assert expected_length(measured, 0) == 1.0
    assert expected_length(measured, 3) == 2.0
    assert expected_length(measured, 1) == pytest.approx(1.5)  # log 2 is half of log 4
    assert expected_length(measured, 7) == pytest.approx(2.5)  # log 8 is half-way from log 4 to log 16
    assert expected_length(measured, 64) == 3.0


def test_best_size_is_the_most_tokens_per_second() -> None:
    lengths = {0: 1.0, 4: 2.0, 8: 2.2}
    assert best_size([StepTime(0, 0.0, 1.0), StepTime(4, 0.1, 1.1), StepTime(8, 0.1, 1.15)], lengths) == 8
    assert best_size([StepTime(0, 0.0, 1.0), StepTime(4, 0.1, 1.1), StepTime(8, 0.1, 1.3)], lengths) == 4
    assert best_size([StepTime(0, 0.0, 1.0), StepTime(4, 1.0, 1.1), StepTime(8, 1.0, 1.3)], lengths) == 0


def test_draft_time_counts() -> None:
    lengths = {0: 1.0, 4: 1.5}
    assert best_size([StepTime(0, 0.0, 1.0), StepTime(4, 0.0, 1.2)], lengths) == 4
    assert best_size([StepTime(0, 0.0, 1.0), StepTime(4, 0.4, 1.2)], lengths) == 0


def test_heads_that_are_never_right_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_taking(monkeypatch, {size: 1 + size / 100 for size in SIZES})
    assert choose_tree(MODEL, checkpoint({64: 1.0}), batch_size=2, context=32).tree == BeamTree(0)


def test_heads_that_are_often_right_are_used() -> None:
    choice = choose_tree(MODEL, checkpoint({4: 1000.0, 64: 1000.0}), batch_size=2, context=32)
    assert choice.tree.num_nodes >= 1
    at_two = [row for row in choice.curve if row["batch_size"] == 2]
    assert choice.tree.num_nodes == max(at_two, key=lambda row: row["expected_tokens_per_second"])["num_nodes"]
    assert all(row["acceptance_measured"] for row in choice.curve)


def test_curves_follow_from_their_parts_for_the_batch_and_for_its_last_row() -> None:
    curve = choose_tree(MODEL, checkpoint(), batch_size=2, context=32).curve
    assert [row["batch_size"] for row in curve if not row["num_nodes"]] == [1, 2]
    for row in curve:
        seconds = row["draft_s"] + row["forward_s"]
        assert row["expected_tokens_per_second"] == pytest.approx(row["batch_size"] * row["expected_acceptance_length"] / seconds)
        assert not row["acceptance_measured"]
        assert row["expected_acceptance_length"] == expected_length(auto_tree.DEFAULT_ACCEPTANCE, row["num_nodes"])


def steps_taking(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
    monkeypatch.setattr(auto_tree, "_time_step", lambda model, drafter, cache: (0.0, seconds[drafter.max_nodes]))


def test_sizes_ruled_out_by_latency_alone_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {size: min(1.0 + size, 2.0) for size in SIZES}
    steps_taking(monkeypatch, {size: 1.0 if size <= 8 else 10.0 if size <= 16 else math.nan for size in SIZES})
    tried = measure_steps(MODEL, checkpoint(), lengths, batch_size=1, context=16)
    assert [step.num_nodes for step in tried] == [0, 1, 2, 3, 5, 8, 11]


def test_all_sizes_are_tried_where_latency_is_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_taking(monkeypatch, dict.fromkeys(SIZES, 1.0))
    tried = measure_steps(MODEL, checkpoint(), {size: 1.0 + size for size in SIZES}, batch_size=1, context=16)
    assert [(step.num_nodes, step.total_s) for step in tried] == [(size, 1.0) for size in SIZES]


def test_what_else_the_machine_does_changes_no_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step but one in three is disturbed."""
    calls = itertools.count()

    def step(model: object, drafter: HeadsDrafter, cache: object) -> tuple[float, float]:
        disturbed = 1.0 if next(calls) % 3 else 0.0
        return 0.5 + disturbed, 1.0 + drafter.max_nodes / 100 + disturbed

    monkeypatch.setattr(auto_tree, "_time_step", step)
    for found in measure_steps(MODEL, checkpoint(), dict.fromkeys((0, 1, 2, 3), 2.0), batch_size=1, context=16):
        assert (found.draft_s, found.forward_s) == (0.5, 1.0 + found.num_nodes / 100)


def test_context_shorter_than_asked_for() -> None:
    """GPT-2's tiny context holds less than the default measurement context and the largest tree."""
    model = tiny_model("gpt2")
    heads = create_heads(HeadsConfig(num_heads=2), model)
    choice = choose_tree(model, replace(checkpoint(), heads=heads, config=heads.config), batch_size=1)
    assert choice.curve
