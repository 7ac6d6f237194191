"""What goes wrong in a training run ends soon, says why, and costs no checkpoint: full disks, dying processes, unfit options."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from medusa_heads.lock import lock_output
from tests.train.test_main import arguments, refusal, workspace  # noqa: F401
from tests.train.training_runs import make_trainer, rows
from train import run_state
from train.__main__ import pick_precision
from train.history import FILE_NAME
from train.run_state import checkpoint_folders, newest_checkpoint
from train.windows import WindowPlan

SOON, STARTUP = 60, 120  # seconds


class FullDisk:
    """A file that takes `room` bytes and no more."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *details: object) -> None:
        self.file.close()


@pytest.mark.parametrize(("name", "room"), [("state.pt", 0), ("state.pt", 3000), ("run.json", 10)])
def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, room: int) -> None:
    """No half checkpoint, the reason in the error, and the run goes on from the earlier one to the same weights."""
    whole = make_trainer(tmp_path / "whole", save_every=3)
    whole.train()
    output = tmp_path / "full"
    real = Path.open

    def open_path(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = real(self, mode, *args, **options)
        return FullDisk(file, room) if "w" in mode and self.name == name and checkpoint_folders(output) else file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_path)
        patch.setattr(Path, "write_text", lambda self, text, **options: self.open("w").write(text))
        with pytest.raises(ValueError, match=r"cannot write to .*step-6 .*No space left on device.*make room and start again"):
            make_trainer(output, save_every=3).train()
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-3"]
    resumed = make_trainer(output, save_every=3)
    resumed.train()
    assert torch.equal(resumed.heads.weight, whole.heads.weight)


def test_a_disk_that_refuses_within_a_file_is_told_from_torch(tmp_path: Path) -> None:
    """/dev/full is a disk without room; torch.save by name calls it `unexpected pos`."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(OSError, match="No space left on device"):
        run_state._write_state({"weight": torch.zeros(100_000)}, Path("/dev/full"))


def test_a_history_that_cannot_be_written_ends_the_run_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, save_every=2)
    real = Path.open

    def open_path(self: Path, *args: Any, **options: Any) -> Any:
        file = real(self, *args, **options)
        return FullDisk(file, 10) if self.name == FILE_NAME and checkpoint_folders(tmp_path) else file

    monkeypatch.setattr(Path, "open", open_path)
    with pytest.raises(ValueError, match=r"history\.jsonl \(No space left on device\): make room and start again"):
        trainer.train()
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["step-2"]


def test_another_world_size_is_explained(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=1).train()
    other = make_trainer(tmp_path, max_steps=1)
    real = other.identity
    other.identity = lambda: real() | {"num_processes": 4}  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match=r"cannot resume from .*step-1: num_processes was 1, is 4\. Restore these.*--output-dir.*--overwrite"
    ):
        other.train()


def test_more_processes_than_rows_are_refused() -> None:
    WindowPlan(3, 1, 1, 3, 0, seed=0)
    with pytest.raises(ValueError, match=r"4 processes have 3 packed rows to share.*--num_processes"):
        WindowPlan(3, 1, 1, 4, 0, seed=0)


def test_answers_too_short_for_the_last_head_are_refused(tmp_path: Path) -> None:
    def answers(length: int) -> datasets.Dataset:
        mask = [False] * 4 + [True] * length
        return datasets.Dataset.from_dict(
            {"input_ids": [[5] * len(mask)] * 8, "assistant_mask": [mask] * 8, "id": [str(i) for i in range(8)]}
        )

    with pytest.raises(ValueError, match=r"no answer in the data has 4 tokens, so head 3 would learn nothing.*num_heads"):
        make_trainer(tmp_path, dataset=answers(3), max_steps=1).train()
    make_trainer(tmp_path, dataset=answers(4), max_steps=1).train()


def test_precision_that_the_device_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_precision("auto") == "float32" and pick_precision("bfloat16") == "bfloat16"
    with pytest.raises(ValueError, match=r"--base-dtype float16: .* needs a GPU"):
        pick_precision("float16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert pick_precision("auto") == "float32" and pick_precision("float16") == "float16"
    with pytest.raises(ValueError, match=r"--base-dtype bfloat16: Tesla T4 cannot .*float16 or float32"):
        pick_precision("bfloat16")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert pick_precision("auto") == "bfloat16"


def test_validation_options_without_prompts_are_refused(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert "validate_every: no prompts: add --held-out N" in refusal(workspace, capsys, "--validate-every", "5")
    assert "patience: nothing to wait for: add --validate-every N" in refusal(workspace, capsys, "--patience", "2", "--held-out", "2")
    assert "nowhere.jsonl" in refusal(workspace, capsys, "--validate-every", "5", "--validation-prompts", "nowhere.jsonl")


def environment(workspace: Path, **more: str) -> dict[str, str]:  # noqa: F811
    return os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "MEDUSA_HEADS_CACHE": str(workspace / "cache")} | more


OPTIONS = ("--max-steps", "6", "--save-every", "2", "--held-out", "5", "--validate-every", "2")


@pytest.mark.distributed
def test_a_dying_process_takes_the_others_with_it(workspace: Path) -> None:  # noqa: F811
    """Two processes that nobody watches: one vanishes, the other fails and frees the folder. Launched again, they go on
    from the checkpoint; one raises, and the launcher ends both."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    options = arguments(workspace, "--max-steps", "6", "--save-every", "2", "--held-out", "5", "--validate-every", "2")
    command = [sys.executable, "-m", "tests.train.faulty_run", "exit", "3", *options]
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(command, env=environment(workspace, RANK=rank, LOCAL_RANK=rank, **launched), stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    assert processes[1].wait(timeout=STARTUP) == 9
    _, errors = processes[0].communicate(timeout=SOON)
    assert processes[0].returncode == 1 and "another process of this run has ended" in errors
    lock_output((workspace / "out").resolve(), "--output-dir").release()
    assert [folder.name for folder in checkpoint_folders(workspace / "out")] == ["step-2"]

    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    again = [sys.executable, *launcher, "-m", "tests.train.faulty_run", "raise", "5", *options]
    failed = subprocess.run(again, env=environment(workspace), capture_output=True, text=True, timeout=STARTUP + SOON)
    assert failed.returncode != 0 and "this process dies" in failed.stderr and "resuming from" in failed.stdout
    lock_output((workspace / "out").resolve(), "--output-dir").release()
    checkpoint, damaged = newest_checkpoint(workspace / "out")
    assert checkpoint is not None and checkpoint.step == 4 and not damaged


def test_no_row_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 processes have 0 packed rows"):
        make_trainer(tmp_path, dataset=rows(1).select([]))
