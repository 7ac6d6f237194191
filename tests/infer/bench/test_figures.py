"""The figures of `bench` on known tokens and times: every one is checked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from infer.acceptance_stats import AcceptanceStats
from infer.bench.compare import Difference, differences, first_difference_margin
from infer.bench.figures import Findings, document_rows, fastest_base
from infer.bench.measure import Answer, Measured, split_batch
from infer.bench.profile_rows import profile_figures
from infer.bench.rows import BatchAnswer
from infer.bench.table import remarks, row_label
from infer.generate import Generator
from infer.prompts import Prompt
from infer.stage_timer import Stage, StageTimer
from tests.tiny_models import tiny_model


def answer(num_tokens: int, decode_s: float, *, first_s: float = 0.5, accepted: Sequence[int] = ()) -> Answer:
    stats = AcceptanceStats()
    for num_accepted in accepted:
        stats.record(4, num_accepted)
    token_s = decode_s / max(1, num_tokens - 1)
    return Answer(list(range(num_tokens)), [1] * num_tokens, stats, first_s, first_s, decode_s, token_s)


@dataclass
class NamedRow:
    """A row that is only described."""

    name: str
    model: Any = None
    is_exact: bool = True

    def warm_up(self, batches: Any) -> None: ...

    def answer(self, batch: Any) -> Any: ...


PROMPTS = [Prompt("a", "x", []), Prompt("b", "y", []), Prompt("c", "x", [])]
SAME: list[float | None] = [None, None, None]


def rows_of(answers: dict[str, list[Answer]], *, report_margins: bool = False, **margins: list[float | None]) -> dict[str, Any]:
    found = {
        name: [None if margin is None else Difference(margin) for margin in margins.get(name, SAME)] for name in answers if name != "drawn"
    }
    findings = Findings(found, report_margins=report_margins)
    rows = document_rows(Measured(answers, {}, dict.fromkeys(answers)), findings, PROMPTS, [NamedRow(name) for name in answers])
    return {row["drafter"]: row for row in rows}


def test_tokens_per_second_leaves_out_first_tokens() -> None:
    rows = rows_of(
        {"base": [answer(11, 1.0), answer(21, 1.0), answer(1, 0.0)], "heads": [answer(11, 0.5), answer(21, 0.25), answer(1, 0.0)]}
    )
    assert rows["base"]["tokens_per_second"] == 15.0
    assert rows["heads"]["tokens_per_second"] == 40.0
    assert rows["heads"]["speedup_vs_base"] == pytest.approx(40 / 15)
    assert rows["heads"]["end_to_end_s"] == pytest.approx(0.75 + 3 * 0.5)
    assert rows["heads"]["time_to_first_token_s"] == 0.5
    assert rows["heads"]["by_category"]["x"]["tokens_per_second"] == 20.0
    assert rows["heads"]["by_category"]["y"]["tokens_per_second"] == 80.0
    assert rows["heads"]["by_category"]["y"]["speedup_vs_base"] == 4.0
    assert list(rows["base"]["by_category"]) == ["x", "y"]


def test_speedup_is_against_the_fastest_base_row() -> None:
    speeds = {"base": 1.0, "base_compiled": 0.5, "transformers_generate": 2.0, "heads": 0.25}
    rows = rows_of({name: [answer(11, seconds)] * 3 for name, seconds in speeds.items()})
    assert fastest_base(list(rows.values())) == "base_compiled"
    assert rows["heads"]["speedup_vs_base"] == 2.0
    assert rows["heads"]["speedup_vs_transformers_generate"] == 8.0
    assert rows["transformers_generate"]["speedup_vs_base"] == 0.25


def test_acceptance_figures_are_summed_over_prompts() -> None:
    own = [answer(3, 1.0, accepted=[2, 0]), answer(3, 1.0, accepted=[1]), answer(3, 1.0, accepted=[1])]
    row = rows_of({"base": [answer(3, 1.0)] * 3, "heads": own})["heads"]
    assert (row["num_steps"], row["num_drafted_tokens"], row["num_accepted_tokens"], row["num_rejected_tokens"]) == (4, 16, 4, 12)
    assert row["mean_acceptance_length"] == 2.0
    assert row["acceptance_by_depth"] == [0.75, 0.25]
    assert row["acceptance_by_depth_conditional"] == [0.75, pytest.approx(1 / 3)]
    assert row["draft_acceptance_rate"] == 0.25
    assert row["by_category"]["y"]["acceptance_by_depth"] == [1.0]


def test_differing_answers_are_counted_with_their_margins() -> None:
    answers = {"base": [answer(3, 1.0)] * 3, "heads": [answer(3, 1.0)] * 3}
    row = rows_of(answers, report_margins=True, heads=[0.25, None, 0.5])["heads"]
    assert row["identical_outputs"] == pytest.approx(1 / 3)
    assert row["first_difference_margin"] == {"values": [0.25, 0.5], "mean": 0.375, "max": 0.5}
    assert row["by_category"]["y"]["identical_outputs"] == 1.0
    assert rows_of(answers, report_margins=True)["heads"]["first_difference_margin"] == {"values": [], "mean": None, "max": None}
    assert rows_of(answers)["heads"]["first_difference_margin"] is None
    assert rows_of(answers, heads=[0.25, None, None])["heads"]["first_difference_margin"]["max"] == 0.25  # never hidden in float32


def test_a_batch_shares_its_time_by_tokens() -> None:
    stats = [AcceptanceStats() for _ in range(3)]
    answers = split_batch(BatchAnswer([[1] * 11, [1] * 31, [1]], [[], [], []], stats, first_token_s=0.3, total_s=2.3))
    assert [a.decode_s for a in answers] == pytest.approx([0.5, 1.5, 0.0])
    assert sum(a.prefill_s + a.decode_s for a in answers) == pytest.approx(2.3)
    assert [a.first_token_s for a in answers] == [0.3] * 3
    assert [a.token_s for a in answers] == pytest.approx([2.0 / 30] * 3)  # what a reader waits, whichever answer is read


def test_time_per_token_is_the_readers() -> None:
    alone = rows_of({"base": [answer(11, 1.0), answer(21, 1.0), answer(1, 0.0)]})["base"]
    assert alone["time_per_token_s"] == pytest.approx(1 / alone["tokens_per_second"])
    stats = [AcceptanceStats() for _ in range(3)]
    together = rows_of({"base": split_batch(BatchAnswer([[1] * 11] * 3, [[]] * 3, stats, first_token_s=0.5, total_s=1.5))})["base"]
    assert together["tokens_per_second"] == pytest.approx(30.0) and together["time_per_token_s"] == pytest.approx(0.1)


def test_margin_is_the_models_own_gap_where_answers_part() -> None:
    model, prompt = tiny_model("gemma2"), [5, 6, 7]
    base = Generator(model).generate([prompt], max_new_tokens=6, eos_ids=())[0].token_ids
    logits = model(torch.tensor([prompt + base[:2]])).logits[0, -1]
    other = int(logits.topk(5).indices[4])
    wrong = base[:2] + [other] + base[:3]
    assert first_difference_margin(model, prompt, base, wrong) == pytest.approx(float(logits.max() - logits[other]), rel=1e-4)
    same, different = replace(answer(0, 1.0), token_ids=base), replace(answer(0, 1.0), token_ids=wrong)
    found = differences(model, [prompt, prompt], [same, same], [same, different], by_logits=True)
    assert found[0] is None and found[1] is not None and found[1].margin is not None and found[1].margin > 0
    assert differences(model, [prompt], [same], [different], by_logits=False) == [Difference(None)]  # a draw decided, no margin tells


def test_rows_with_draws_of_their_own_are_not_compared() -> None:
    row = rows_of({"base": [answer(3, 1.0)] * 3, "drawn": [answer(3, 1.0)] * 3})["drawn"]
    assert row["identical_outputs"] is None and row["first_difference_margin"] is None
    assert row["by_category"]["x"]["identical_outputs"] is None


def test_losing_to_the_base_is_said() -> None:
    rows = rows_of(
        {"base": [answer(11, 1.0)] * 3, "heads": [answer(11, 0.5), answer(11, 1.25), answer(11, 0.5)], "slow": [answer(11, 2.0)] * 3}
    )
    lines = remarks({"rows": list(rows.values()), "fastest_base": "base", "settings": {"step_seconds": {}, "decoding": "greedy"}})
    assert lines == [
        "slower than the base in some categories: heads in y (0.80 times)",
        "slower than the base: slow has 0.50 times the tokens/s of base",
    ]


def test_quality_counts_the_prompts_that_can_be_judged() -> None:
    answers = {"base": [answer(3, 1.0)] * 3, "heads": [answer(3, 1.0)] * 3}
    judged = [replace(PROMPTS[0], reference="#### 1"), PROMPTS[1], replace(PROMPTS[2], reference="#### 2")]
    findings = Findings({}, {"base": [True, None, False], "heads": [False, None, False]})
    rows = document_rows(Measured(answers, {}, dict.fromkeys(answers)), findings, judged, [NamedRow("base"), NamedRow("heads")])
    assert rows[0]["quality"] == {"kind": "final_number", "num": 2, "num_right": 1, "accuracy": 0.5}
    assert rows[1]["quality"]["num_right"] == 0
    assert rows[0]["by_category"]["x"]["quality"]["num"] == 2 and rows[0]["by_category"]["y"]["quality"] is None


def test_lossy_rows_are_marked() -> None:
    row = {"drafter": "typical:heads", "lossless": False}
    assert row_label(row) == "typical:heads (lossy)" and row_label(row | {"lossless": True}) == "typical:heads"


def test_profile_by_hand() -> None:
    timer = StageTimer(torch.device("cpu"))
    seconds: dict[Stage, float] = {"draft": 0.1, "forward": 1.0, "logits": 0.4, "verify": 0.2, "compact": 0.05, "other": 0.05}
    timer.seconds.update(seconds)
    timer.counts["forward"] = 10
    figures = profile_figures(timer, 2.0, num_prompts=3)  # 0.2 s of the loop were in no stage
    assert figures["ms_per_step"] == pytest.approx(
        {"draft": 10.0, "forward": 100.0, "logits": 40.0, "verify": 20.0, "compact": 5.0, "other": 25.0}
    )
    assert figures["ms_per_step_total"] == pytest.approx(200.0) and figures["num_steps"] == 10 and figures["num_prompts"] == 3
    assert figures["share_outside_base_forward"] == pytest.approx(0.3)
    assert figures["share_outside_base_layers"] == pytest.approx(0.5)
    assert profile_figures(StageTimer(torch.device("cpu")), 0.0, num_prompts=1)["ms_per_step"] is None


def test_rows_that_adapted_to_nothing_are_named() -> None:
    rows = rows_of({"base": [answer(11, 1.0)] * 3, "heads": [answer(11, 0.9)] * 3, "heads:b": [answer(11, 0.9, accepted=[1])] * 3})
    settings = {"step_seconds": {"heads": {}, "heads:b": {}}, "decoding": "greedy"}
    lines = remarks({"rows": list(rows.values()), "fastest_base": "base", "settings": settings})
    assert lines == ["heads drafted nothing: with --tree auto nothing that it could draft here beats plain decoding"]
