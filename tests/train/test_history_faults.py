"""What a run tells about itself, against figures made the long way: its log, its acceptance over processes, its picture."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import base_model
from tests.train.training_runs import make_trainer, rows
from train import acceptance
from train.acceptance import Validation
from train.history import ACCEPTANCE, EXPECTED, FILE_NAME, plot_history, read_history

K = 3


def naive_figures(trainer: Any) -> dict[str, float]:
    """Of each slot, the means over its supervised positions: KL, overlap with the base's law, hits among the best 1, 2 and 5."""
    found: dict[str, list[float]] = {}
    for row in rows():
        ids = torch.tensor([row["input_ids"]])
        hidden = base_model.forward_hidden(trainer.headed.base, ids)[0]
        own = base_model.compute_logits(trainer.headed.base, hidden)
        drafts = base_model.compute_logits(trainer.headed.base, trainer.heads.draft_states(hidden))
        for t in range(ids.shape[1]):
            for k in range(1, K + 1):
                if t + 1 + k < ids.shape[1] and all(row["assistant_mask"][t + 1 : t + 2 + k]):
                    p, q = own[t + k].softmax(-1), drafts[t, k - 1].softmax(-1)
                    found.setdefault(f"slot{k}/loss", []).append(float((p * (p / q).log()).sum()))
                    found.setdefault(f"slot{k}/overlap", []).append(float(torch.minimum(p, q).sum()))
                    for n in (1, 2, 5):
                        found.setdefault(f"slot{k}/top{n}", []).append(float(ids[0, t + 1 + k] in drafts[t, k - 1].topk(n).indices))
    return {name: sum(values) / len(values) for name, values in found.items()}


@torch.no_grad()
def test_the_log_holds_the_naive_figures(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, objective="kl", max_steps=1, batch_size=32, seed_heads=1)
    expected = naive_figures(trainer)
    assert len(expected) == K * 5 and expected["slot1/top1"] < expected["slot1/top2"] < expected["slot1/top5"]
    with torch.enable_grad():
        trainer.train()
    [logged] = read_history(tmp_path / FILE_NAME)
    assert {name: logged[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert logged["loss"] == pytest.approx(sum(0.8 ** (k - 1) * expected[f"slot{k}/loss"] for k in range(1, K + 1)), rel=1e-4)


def test_acceptance_counts_what_every_process_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that each judged by their own prompts would disagree on when to stop, and wait for each other for ever."""
    trainer = make_trainer(tmp_path)
    trainer.validation = Validation([[3, 4], [5]], ())
    monkeypatch.setattr(acceptance, "decode", lambda *_, **__: torch.tensor([[10, 4], [0, 0]]))
    monkeypatch.setattr(acceptance, "expected_length", lambda *_, **__: None)
    elsewhere = torch.tensor([[0, 0], [30, 32]])

    def reduce(counts: Tensor, reduction: str) -> Tensor:
        assert reduction == "sum"
        return counts + elsewhere

    monkeypatch.setattr(trainer.accelerator, "reduce", reduce)
    trainer._validate(7)
    assert trainer.validations.measured == ((7, ((10, 4), (30, 32))),)
    assert read_history(tmp_path / FILE_NAME) == [{"step": 7, ACCEPTANCE: 1.9}]


def test_a_disk_full_at_the_start_of_a_resumed_run_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The history is cut back to the checkpoint then; what it held stays."""
    make_trainer(tmp_path, max_steps=2, save_every=1).train()
    before = (tmp_path / FILE_NAME).read_text()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ValueError, match=r"history\.jsonl \(No space left on device\): make room and start again"):
        make_trainer(tmp_path, max_steps=2, save_every=1).train()
    assert (tmp_path / FILE_NAME).read_text() == before and [path.name for path in tmp_path.glob("*history*")] == [FILE_NAME]


def test_a_figure_that_is_not_finite_is_null(tmp_path: Path) -> None:
    """JSON knows no NaN: a reader of another language must not stumble over the file."""
    make_trainer(tmp_path).history.record({"loss": float("nan"), "slot1/loss": float("inf"), "learning_rate": 0.5}, 3)
    [line] = (tmp_path / FILE_NAME).read_text().splitlines()
    found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found == {"step": 3, "loss": None, "slot1/loss": None, "learning_rate": 0.5}


def test_what_a_failing_disk_left_of_the_history_is_passed_over(tmp_path: Path) -> None:
    row = b'{"step": 1, "loss": 1.0}\n'
    (tmp_path / FILE_NAME).write_bytes(row + b"\xff\xfe\n" + b"\0" * 9 + b"\n" + row)
    make_trainer(tmp_path).history.go_back(1)
    assert (tmp_path / FILE_NAME).read_bytes() == row + row


def test_the_picture_shows_every_figure_over_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    logged = [
        {"step": step, "loss": 4.0 / step, "slot1/top1": step / 10, "slot1/overlap": step / 8, "slot2/top1": step / 20} for step in (2, 4)
    ]
    measured = [{"step": 2, ACCEPTANCE: 1.2, EXPECTED: 1.3}, {"step": 4, ACCEPTANCE: 1.7, EXPECTED: None}]
    (tmp_path / FILE_NAME).write_text("".join(json.dumps(row) + "\n" for row in (*logged, *measured)))
    drawn: list[Any] = []
    save = figure.savefig

    def noting(self: Any, *args: Any, **options: Any) -> None:
        drawn.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(figure, "savefig", noting)
    plot_history(tmp_path)
    lines = {line.get_label(): [tuple(map(float, p)) for p in line.get_xydata()] for axes in drawn[0].axes for line in axes.get_lines()}
    assert lines == {
        "loss": [(2, 2.0), (4, 1.0)],
        "slot1 top-1": [(2, 0.2), (4, 0.4)],
        "slot2 top-1": [(2, 0.1), (4, 0.2)],
        "slot1 overlap": [(2, 0.25), (4, 0.5)],
        "decoded": [(2, 1.2), (4, 1.7)],
        "expected": [(2, 1.3)],
    }
    assert all(axes.get_legend() is not None for axes in drawn[0].axes)
