"""The end of another process is told from an error of one's own, which keeps its traceback; and precision follows the device in use."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from accelerate import Accelerator
from torch.distributed import DistBackendError, DistNetworkError

from tests.train.test_main import arguments
from tests.train.training_runs import make_trainer
from train import __main__ as program
from train.acceptance import Validation

LOST = [
    DistBackendError("NCCL communicator was aborted on rank 0"),
    DistNetworkError("The client socket has timed out"),
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5000"),
]


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException, *, of: ModuleType = program) -> None:
    """of: the program whose runs end so."""

    def run(config: object) -> Path:
        raise error

    monkeypatch.setattr(of, "run", run)


@pytest.mark.parametrize("error", LOST, ids=["NCCL", "store", "gloo"])
def test_a_lost_process_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    fail_with(monkeypatch, error)
    assert program.main(arguments(tmp_path)) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert (
        "another process of this run has ended" in line and str(error).split("]")[0] in line and "goes on from the last checkpoint" in line
    )


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), torch.OutOfMemoryError("CUDA out of memory")])
def test_an_error_of_ones_own_is_no_lost_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    fail_with(monkeypatch, error)
    with pytest.raises(RuntimeError, match=str(error)):
        program.main(arguments(tmp_path))


def test_a_run_on_the_cpu_of_a_machine_with_a_gpu_is_judged_by_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch --cpu` says so by this variable."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert program.pick_precision("auto") == "bfloat16" and program.pick_precision("float16") == "float16"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert program.pick_precision("auto") == "float32" and program.pick_precision("bfloat16") == "bfloat16"
    with pytest.raises(ValueError, match=r"--base-dtype float16: .* needs a GPU"):
        program.pick_precision("float16")


def test_a_precision_the_device_lacks_ends_a_run_before_it_loads_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` itself asks, not only the tests."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(program, "prepare_data", lambda config: (None, None, None))
    monkeypatch.setattr(program, "make_accelerator", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(ValueError, match="--base-dtype float16"):
        program.run(program.parse_config(arguments(tmp_path, "--base-dtype", "float16")))


@pytest.mark.parametrize("is_main", [True, False])
def test_only_the_first_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_main: bool) -> None:
    """Two that write one checkpoint at once leave neither's."""
    monkeypatch.setattr(Accelerator, "is_main_process", property(lambda self: is_main))
    trainer = make_trainer(tmp_path, max_steps=2, save_every=1, held_out=1, validate_every=1)
    trainer.train(Validation([[3, 4, 5]], ()))
    assert len(trainer.validations.measured) == 2
    assert {path.name for path in tmp_path.iterdir()} == ({"checkpoints", "history.jsonl"} if is_main else set())
