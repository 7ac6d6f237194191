"""The comparison of strategies: its runs in this process, its figures by hand, and what its CPU processes are told."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from safetensors.torch import save_file

from scripts import compare_sharding
from scripts.compare_sharding import MOST_GPUS, NUM_TEXTS, WORKER, CompareSharding, Run, launch_on_cpus, random_text, report, speed
from tests.train.test_main import workspace  # noqa: F401
from train.sharding import check_settings


def test_runs_are_compared(
    workspace: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each strategy alone in this process: the same run twice agrees; one whose learning rate differs does not, and fails the script."""
    more: list[str] = []

    real = subprocess.run

    def start(command: list[str], **options: Any) -> Any:
        if WORKER not in command:  # git, for the commit
            return real(command, **options)
        compare_sharding.work(*command[command.index(WORKER) + 1 :], *more)
        more.extend(further)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", start)
    sizes: dict[str, Any] = {"num_heads": 2, "pack_length": 64, "batch_size": 2, "steps": 15, "num_gpus": [1]}
    given: dict[str, Any] = {"base": str(workspace / "base"), "strategies": ["single", "ddp"], "options": "--num-workers 0"} | sizes
    further: list[str] = []
    CompareSharding(output=workspace / "same", **given).run()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["agree"] and [row["strategy"] for row in found["runs"]] == ["single", "ddp"]
    assert [row["largest_loss_difference"] for row in found["runs"]] == [0, 0] and found["alone"]["micro_batches"] == 1
    assert all(row["response_tokens_per_second"] > 0 and row["peak_bytes"] > 1e6 for row in found["runs"])
    further = ["--learning-rate", "0.1"]
    with pytest.raises(SystemExit):
        CompareSharding(output=workspace / "other", **given).run()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not found["agree"] and found["runs"][1]["largest_weight_difference"] > 0.01


@pytest.mark.parametrize("batch_size", [2, 24, 200])
def test_random_texts_fill_every_step(tmp_path: Path, batch_size: int) -> None:
    texts = len(random_text(tmp_path / "text.jsonl", 8, multiple_of=MOST_GPUS * batch_size).read_text().splitlines())
    assert texts >= NUM_TEXTS and all(texts % (batch_size * num_gpus) == 0 for num_gpus in (1, 2, 4, 8, 16))


def test_goes_on_with_the_run_that_failed(
    workspace: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second run fails behind its heads; what it left is set aside, and nothing else is trained again."""
    started: list[str] = []
    real = subprocess.run

    def start(command: list[str], **options: Any) -> Any:
        if WORKER not in command:
            return real(command, **options)
        process, *arguments = command[command.index(WORKER) + 1 :]
        started.append(Path(process).parent.name)
        compare_sharding.work(process, *arguments)
        if len(started) == 2:
            Path(f"{process}.0").unlink()
            return SimpleNamespace(returncode=1)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", start)
    sizes: dict[str, Any] = {"num_heads": 2, "pack_length": 64, "batch_size": 2, "steps": 3, "num_gpus": [1]}
    given = {"base": str(workspace / "base"), "data": [str(workspace / "data.jsonl")], "options": "--num-workers 0"} | sizes
    comparison = CompareSharding(output=workspace / "out", strategies=["single", "ddp"], **given)
    with pytest.raises(ValueError, match="ddp-1 ended with status 1, see above; the same command goes on from there"):
        comparison.run()
    comparison.run()
    comparison.run()
    assert started == ["single-1", "ddp-1", "ddp-1"] and (workspace / "out/ddp-1/previous").is_dir()
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads((workspace / "out/report.json").read_text()) and len(printed["runs"]) == 2
    with pytest.raises(ValueError, match=r"out holds results of other settings \(steps\)"):
        replace(comparison, steps=4).run()


def test_every_number_of_gpus_has_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses are compared at the same rows a step; the run whose speed is compared with happens once."""
    started: list[tuple[str, int, int]] = []
    compared: list[tuple[str, str, str]] = []
    monkeypatch.setattr(compare_sharding, "train", lambda _, run, *rest: started.append((run.name, run.num_processes, run.micro_batches)))

    def reported(_: Path, run: Run, *, reference: Run, alone: Run) -> dict[str, Any]:
        compared.append((run.name, reference.name, alone.name))
        return {"largest_loss_difference": 0.0}

    monkeypatch.setattr(compare_sharding, "report", reported)
    monkeypatch.setattr(compare_sharding, "logged", lambda output: [])
    monkeypatch.setattr(compare_sharding, "speed", lambda rows: 1.0)
    CompareSharding(num_gpus=[2, 4], strategies=["single", "ddp"], output=tmp_path).run()
    assert started == [("single-2", 1, 2), ("ddp-2", 2, 1), ("single-4", 1, 4), ("ddp-4", 4, 1), ("single-1", 1, 1)]
    assert [pair[1:] for pair in compared] == [(f"single-{count}", "single-1") for count in (2, 2, 4, 4)]
    assert json.loads(capsys.readouterr().out)["alone"] == {"strategy": "single", "micro_batches": 1, "response_tokens_per_second": 1.0}


def test_speed_leaves_the_first_third_out() -> None:
    """40 steps of 100 tokens in 100 s, then 80 in 20 s."""
    seconds = {20: 90, 40: 100, 60: 105, 80: 110, 100: 115, 120: 120}
    rows = [{"step": step, "response_tokens_per_second": 100 * step / passed} for step, passed in seconds.items()]
    assert speed(rows) == pytest.approx(8000 / 20)
    rows[2]["response_tokens_per_second"] = 1.0  # not where the clock starts
    assert speed(rows) == pytest.approx(8000 / 20)


def test_a_strategy_that_did_not_happen_is_no_result(tmp_path: Path) -> None:
    alone, single, sharded, zero = Run("single", 1), Run("single", 2), Run("fsdp2", 2), Run("zero3", 2)
    for run, kind in ((alone, "NO"), (single, "NO"), (sharded, "MULTI_CPU"), (zero, "DEEPSPEED-2")):
        (tmp_path / run.name).mkdir()
        facts = {"kind": kind, "hardware": "a machine", "num_processes": 2, "bytes": 1}
        (tmp_path / run.name / "process.0").write_text(json.dumps(facts))
        rows = [{"step": step, "loss": 1.0, "response_tokens_per_second": 1.0 + step} for step in (5, 10, 15)]
        (tmp_path / run.name / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        save_file({"weight": torch.ones(2)}, tmp_path / run.name / "model.safetensors")
    assert report(tmp_path, single, reference=single, alone=alone)["ran_as"] == "NO"
    with pytest.raises(AssertionError, match="fsdp2 ran as MULTI_CPU"):
        report(tmp_path, sharded, reference=single, alone=alone)
    with pytest.raises(AssertionError, match="zero3 ran as DEEPSPEED-2"):
        report(tmp_path, zero, reference=single, alone=alone)


def test_cpu_processes_are_told_what_the_launcher_would_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    launch_on_cpus("ddp", 2, environment)
    assert "ACCELERATE_USE_FSDP" not in environment
    launch_on_cpus("fsdp2", 2, environment)
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    monkeypatch.setattr(os, "environ", os.environ | environment)
    check_settings(FullyShardedDataParallelPlugin())
    command = launch_on_cpus("zero3", 2, environment)  # the launcher's own, whatever the device
    assert environment["DS_ACCELERATOR"] == "cpu" and command[0] == "accelerate.commands.launch" and command[2].endswith("zero3.yaml")
