"""A run that is not the one it would continue is refused, whatever changed; what only steers the run may change."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from tests.train.test_main import arguments, workspace  # noqa: F401
from tests.train.training_runs import make_trainer
from train import __main__ as program
from train.history import FILE_NAME, PLOT_NAME
from train.run_state import checkpoint_folders
from train.trainer import Trainer

CHANGES: dict[str, Any] = {
    "batch_size": 4,
    "gradient_accumulation_steps": 2,
    "epochs": 3.0,
    "seed": 1,
    "max_grad_norm": 0.5,
    "weight_decay": 0.1,
    "warmup_ratio": 0.1,
    "slot_decay": 0.5,
    "base_dtype": "bfloat16",
    "max_steps": 50,
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    make_trainer(folder, save_every=1).train()
    return folder


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_that_shapes_the_heads_is_compared(begun: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"cannot resume from .*\b{name} was .*, is {CHANGES[name]!r}"):
        make_trainer(begun, **{name: CHANGES[name]}).train()


def test_a_folder_that_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    """Somebody's copy of a good checkpoint, say."""
    make_trainer(tmp_path, max_steps=2, save_every=1, keep_checkpoints=2).train()
    newest = tmp_path / "checkpoints" / "step-2"
    for name in ("step-best", "step-2-copy", "step-"):
        shutil.copytree(newest, newest.with_name(name))
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["step-1", "step-2"]


def test_another_base_under_the_same_name_is_found(begun: Path) -> None:
    with pytest.raises(ValueError, match=r"base_fingerprint was '\w+', is '\w+'"):
        make_trainer(begun, family="mistral_window").train()


def test_what_only_steers_the_run_may_change(begun: Path) -> None:
    steering: dict[str, Any] = dict(save_every=3, keep_checkpoints=1, log_every=5, log_with="tensorboard", project="other", num_workers=1)
    make_trainer(begun, **steering).train()


def test_killed_over_the_picture_the_run_draws_it_the_next_time(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Finished heads are refused, so whatever is written after them is lost to a kill."""
    options, out = arguments(workspace, "--max-steps", "1"), workspace / "out"
    real = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if target.name == PLOT_NAME:
            raise SystemExit(9)
        return real(self, target)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Path, "replace", killed)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        program.main(options)
    assert list(out.glob(".history.png-*"))
    monkeypatch.setattr(os, "getpid", lambda: 7)
    assert program.main(options) == 0
    assert (out / PLOT_NAME).exists() and (out / "config.json").exists() and not list(out.glob(".history.png-*"))


def test_a_disk_that_fills_up_under_the_finished_heads_costs_no_step(
    workspace: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All steps are done, the heads are not written: the same command writes them, and trains and decodes nothing again."""
    options, out = (
        arguments(workspace, "--max-steps", "2", "--held-out", "5", "--validate-every", "1", "--save-every", "1"),
        workspace / "out",
    )

    def full(*_: Any, **__: Any) -> None:
        raise ValueError("cannot write to finished (No space left on device)")

    with monkeypatch.context() as patch:
        patch.setattr(program, "save_heads", full)
        assert program.main(options) == 2
    assert "No space left on device" in capsys.readouterr().err and not (out / "config.json").exists()
    before = (out / FILE_NAME).read_text()

    def again(*_: Any, **__: Any) -> None:
        raise AssertionError("this was done before")

    def no_room(output_dir: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("train.history.plot_history", no_room)  # still too full for a picture
    monkeypatch.setattr(Trainer, "_step", again)
    monkeypatch.setattr(Trainer, "_validate", again)
    left: list[bool] = []
    monkeypatch.setattr(AcceleratorState, "destroy_process_group", lambda self, group=None: left.append(True))
    assert program.main(options) == 0
    assert left == [True], "a process group that is still there at exit may wait for the others"
    assert load_file(out / "model.safetensors")["weight"].any() and (out / FILE_NAME).read_text() == before
    assert "no picture of the run: [Errno 28] No space left on device" in capsys.readouterr().err
    assert "| chosen step |" in (out / "README.md").read_text()
