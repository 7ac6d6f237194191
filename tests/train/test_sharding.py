"""Sharding strategies: every shipped accelerate file through accelerate's own parser; runs with a sharded base on two CPU processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file

from medusa_heads.checkpoint import load_heads
from medusa_heads.fingerprint import weights_digest
from medusa_heads.merge import merged_base
from tests.tiny_models import tiny_model
from tests.train import test_medusa2
from tests.train.sharded_run import KILLED_AT, RUNS
from tests.train.test_main import workspace  # noqa: F401
from train import zero
from train.__main__ import main
from train.draft_model import main as train_draft_model
from train.run_state import read_checkpoint
from train.sharding import check_settings, loading_device, share_out

FOLDER = Path(__file__).parents[2] / "configs" / "accelerate"
MEANING = {
    "single": (DistributedType.NO, 1, 1),
    "ddp": (DistributedType.MULTI_GPU, 2, 1),
    "fsdp2": (DistributedType.FSDP, 2, 1),
    "zero2": (DistributedType.DEEPSPEED, 2, 1),
    "zero3": (DistributedType.DEEPSPEED, 2, 1),
    "multi_node": (DistributedType.MULTI_GPU, 16, 2),
}


def test_every_strategy_has_its_file() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(MEANING)


@pytest.mark.parametrize("name", MEANING)
def test_accelerate_reads_what_the_file_says(name: str) -> None:
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    assert (config.distributed_type, config.num_processes, config.num_machines) == MEANING[name]
    assert config.mixed_precision == "no" and not config.use_cpu


@pytest.mark.parametrize("name", MEANING)
def test_every_key_is_an_option_of_the_launcher(name: str) -> None:
    """accelerate passes over a misspelt key without a word."""
    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    options = vars(launch_command_parser().parse_args(["script.py"]))
    elsewhere = {"compute_environment", "distributed_type", "use_cpu"}
    named = [*values, *values.pop("fsdp_config", {}), *values.pop("deepspeed_config", {})]
    assert not [key for key in named if key not in options and key not in elsewhere | {"fsdp_config", "deepspeed_config"}]


def test_fsdp2_shards_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file says what the code asks for; every other value of these keys is refused by name."""
    settings = load_config_from_file(str(FOLDER / "fsdp2.yaml")).fsdp_config
    assert settings["fsdp_reshard_after_forward"] is True
    for key, value in settings.items():
        monkeypatch.setenv(key.upper(), str(value).lower() if isinstance(value, bool) else str(value))
    check_settings(FullyShardedDataParallelPlugin())
    wrong = {"FSDP_OFFLOAD_PARAMS": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}
    for key, value in wrong.items():
        with monkeypatch.context() as patch:
            patch.setenv(key, value)
            with pytest.raises(ValueError, match=f"^{key.lower()}: .*set it to"):
                check_settings(FullyShardedDataParallelPlugin())
    for key in ("FSDP_VERSION", "FSDP_RESHARD_AFTER_FORWARD"):
        monkeypatch.delenv(key)
    with pytest.raises(ValueError, match="fsdp_version: 1 is not supported; set it to 2"):
        check_settings(FullyShardedDataParallelPlugin())


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_is_what_the_file_says(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """The files pass; settings that do not work are refused by name, from a DeepSpeed config too."""
    settings = load_config_from_file(str(FOLDER / f"zero{stage}.yaml")).deepspeed_config
    for key, value in settings.items():
        name = "ZERO3_INIT" if key == "zero3_init_flag" else key.upper()  # as the launcher does
        monkeypatch.setenv(f"ACCELERATE_DEEPSPEED_{name}", str(value).lower())
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision("no")
    assert plugin.zero_stage == stage and not plugin.zero3_init_flag
    zero.check_settings(plugin)
    for name in ("OFFLOAD_OPTIMIZER", "OFFLOAD_PARAM"):
        with monkeypatch.context() as patch:
            patch.setenv(f"ACCELERATE_DEEPSPEED_{name}_DEVICE", "cpu")
            with pytest.raises(ValueError, match=f"^{name.lower()}_device: .*set it to none"):
                zero.check_settings(DeepSpeedPlugin())
    with pytest.raises(ValueError, match=r"^zero_stage: 1 is not supported; set it to 2 or 3"):
        zero.check_settings(DeepSpeedPlugin(zero_stage=1))
    for name, section in {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}.items():
        with pytest.raises(ValueError, match=f"^{name}: .*leave it out"):
            zero.check_settings(DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": stage}, name: section}))


def test_what_deepspeed_cannot_do_is_refused_before_any_work(
    workspace: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")  # as accelerate's launcher does
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("train.__main__.prepare_data", lambda config: pytest.fail("too late"))
    monkeypatch.setattr("train.draft_model.prepare_data", lambda config: pytest.fail("too late"))

    def said(program: Callable[[list[str]], int], *more: str) -> str:
        sizes = ["--max-length", "64", "--pack-length", "64"]
        files = ["--base", str(workspace / "base"), "--data", str(workspace / "data.jsonl"), "--output-dir", str(workspace / "refused")]
        assert program([*files, *sizes, *more]) == 2
        return capsys.readouterr().err.strip()

    assert said(main).startswith("error: DeepSpeed: there is no GPU")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    found = {"deepspeed": False}
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: found[name] or None if name in found else real(name, *rest))
    assert said(main).startswith("error: DeepSpeed is not installed; pip install 'medusa-heads[deepspeed]', or")
    found["deepspeed"] = True
    way_out = "under DeepSpeed; launch with configs/accelerate/ddp.yaml"
    or_sharded = ", or fsdp2.yaml for a base to be sharded"
    assert said(main, "--lora-rank", "2") == f"error: lora_rank: an adapter does not train {way_out}{or_sharded}"
    assert said(train_draft_model, "--layers", "1") == f"error: a draft model does not train {way_out}"
    monkeypatch.setattr("train.__main__.pick_precision", lambda dtype: dtype)  # as where there is a GPU
    assert said(main, "--base-dtype", "float16").startswith("error: base_dtype: float16")


def test_what_cannot_be_sharded_is_refused_with_the_way_that_works(
    workspace: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fsdp: Any = SimpleNamespace(distributed_type=DistributedType.FSDP)
    assert loading_device(fsdp, quantization="none") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"base_quantization: packed weights cannot be sharded; .*ddp\.yaml"):
        loading_device(fsdp, quantization="4bit")
    quantised: Any = SimpleNamespace(base=SimpleNamespace(config=SimpleNamespace(quantization_config={})))
    with pytest.raises(ValueError, match=r"base: it is quantised.*ddp\.yaml"):
        share_out(fsdp, quantised, batch_size=1, max_grad_norm=1.0)
    monkeypatch.setattr("train.sharding.start_sharding", lambda accelerator: None)
    monkeypatch.setattr("train.sharding.is_sharded", lambda accelerator: True)
    options = ["--base", str(workspace / "base"), "--data", str(workspace / "data.jsonl"), "--output-dir", str(workspace / "draft")]
    assert train_draft_model([*options, "--max-length", "64", "--pack-length", "64", "--layers", "1"]) == 2
    assert "a draft model is trained on one GPU or data parallel" in capsys.readouterr().err


def options(workspace: Path, output: Path, num_processes: int) -> list[str]:  # noqa: F811
    """Of a run of `python -m train` with heads and adapter. AdamW steps by the learning rate however small a gradient is, and one that is
    hardly more than rounding differs between processes by some per cent: the rate keeps that within the tolerances below."""
    more = ("--max-steps", "3", "--held-out", "5", "--validate-every", "3", "--num-validation-prompts", "3", "--learning-rate", "0.005")
    return test_medusa2.arguments(workspace, *more, "--output-dir", str(output), "--batch-size", str(4 // num_processes))


IN_HALF = ("--lora-rank", "0", "--base-dtype", "bfloat16")  # under autocast; the heads stay float32


@dataclass(frozen=True, slots=True)
class TwoProcesses:
    """found: by process, the results of sharded_run.RUNS. folder: holds what the whole program was given, and `written` by it."""

    found: list[dict[str, Any]]
    folder: Path

    def of(self, run: str) -> tuple[Any, Any]:
        first, second = self.found
        return first[run], second[run]


def start_two(folder: Path, settings: dict[str, str], *more: str) -> TwoProcesses:
    """settings: what the launcher would set. more: options of the whole program."""
    test_medusa2.make_workspace(folder)
    program = ["tests.train.sharded_run", str(folder / "result"), str(folder), *options(folder, folder / "written", 2), *more]
    launcher = ["torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "MEDUSA_HEADS_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", *launcher, "-m", *program]
    result = subprocess.run(command, env=environment | settings, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return TwoProcesses([torch.load(f"{folder / 'result'}.{rank}") for rank in (0, 1)], folder)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> TwoProcesses:
    fsdp = {"FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    return start_two(tmp_path_factory.mktemp("two"), {"ACCELERATE_USE_FSDP": "true"} | fsdp)


@pytest.fixture(scope="module", params=[2, 3], ids=["zero2", "zero3"])
def under_zero(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TwoProcesses:
    pytest.importorskip("deepspeed")
    settings = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": str(request.param), "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false", "DS_ACCELERATOR": "cpu"}
    folder = tmp_path_factory.mktemp(f"zero{request.param}")
    return start_two(folder, {"ACCELERATE_USE_DEEPSPEED": "true"} | settings, *IN_HALF)


def assert_same_run(first: dict[str, Any], second: dict[str, Any], alone: dict[str, Any], weights: str, kind: str = "FSDP") -> None:
    """Two sharded processes came to the same weights, and to those of one whole process."""
    assert first["num_processes"] == 2 and kind in first["distributed_type"] and alone["num_processes"] == 1
    torch.testing.assert_close(torch.tensor(first["losses"]), torch.tensor(alone["losses"]), atol=1e-5, rtol=1e-5)
    for name, weight in alone[weights].items():
        assert torch.equal(first[weights][name], second[weights][name]) and first[weights][name].shape == weight.shape
        torch.testing.assert_close(first[weights][name], weight, atol=1e-5, rtol=1e-5)


def assert_the_base_is_sharded(first: dict[str, float], second: dict[str, float]) -> None:
    """shares: of every weight, by process. Halves of the base's own; heads and adapter whole."""
    for name in first:
        trains = name.startswith("heads.") or ".lora_" in name
        assert (first[name], second[name]) == ((1.0, 1.0) if trains else (0.5, 0.5)), name


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["shared", "own"])
def test_a_sharded_base_trains_the_same_heads(two_processes: TwoProcesses, tmp_path: Path, kind: str) -> None:
    """Half of every weight of the base and half of the rows each equal all of both; the base stays what it was, bit by bit."""
    first, second = two_processes.of(kind)
    alone = RUNS[kind](tmp_path, 1)
    assert_the_base_is_sharded(first["shares"], second["shares"])
    assert_same_run(first, second, alone, "heads")
    assert first["losses"][-1] < first["losses"][0] and first["base_unchanged"] and second["base_unchanged"]


@pytest.mark.distributed
def test_shards_that_all_see_are_gathered_by_copies(two_processes: TwoProcesses) -> None:
    """The same run to the last bit as where collectives gather; the base still in halves, and no weight of it in two places."""
    (first, second), (by_collectives, _) = two_processes.of("copied"), two_processes.of("shared")
    assert first["copies"] == second["copies"] == [True] * 3  # two layers, and what lies outside of them
    assert_the_base_is_sharded(first["shares"], second["shares"])
    assert first["inspected"] == second["inspected"] == (True, True)
    assert first["losses"] == by_collectives["losses"] and first["base_unchanged"] and second["base_unchanged"]
    assert all(torch.equal(weight, by_collectives["heads"][name]) for name, weight in first["heads"].items())


@pytest.mark.distributed
def test_padded_shards_are_gathered_by_copies_and_by_collectives_where_one_process_cannot(two_processes: TwoProcesses) -> None:
    copies = {"well": [True], "another layout": [False], "no room": []}
    for found in two_processes.of("uneven"):
        assert found == {kind: {"equal": [True, True], "copies": copies[kind]} for kind in copies}


@pytest.mark.distributed
def test_a_sharded_run_decodes_and_resumes(two_processes: TwoProcesses, tmp_path: Path) -> None:
    """What validation measures is what one process measures, prompts shared unevenly; a resumed run is the whole one bit for bit."""
    first, second = two_processes.of("validated")
    alone = RUNS["validated"](tmp_path, 1)
    assert_same_run(first, second, alone, "heads")
    assert first["before"] == alone["before"] != [] == second["before"]
    assert first["validations"] == second["validations"] == alone["validations"] and any(
        accepted for _, accepted in first["validations"][-1][1]
    )
    assert len(first["figures"]) == len(alone["figures"]) == 6
    for figures, expected in zip(first["figures"], alone["figures"], strict=True):
        assert figures == pytest.approx(expected, abs=1e-4)
    resumed = first["resumed"]
    assert resumed["losses"] == first["losses"][KILLED_AT:] and resumed["base_unchanged"]
    assert all(torch.equal(weight, first["heads"][name]) for name, weight in resumed["heads"].items())


@pytest.mark.distributed
def test_a_sharded_base_trains_the_same_adapter(two_processes: TwoProcesses, tmp_path: Path) -> None:
    first, second = two_processes.of("tuned")
    assert first["copies"] == second["copies"] == [True] * 3
    assert_the_base_is_sharded(first["shares"], second["shares"])
    assert_same_run(first, second, RUNS["tuned"](tmp_path, 1), "weights")


@pytest.mark.distributed
def test_a_broken_loss_names_its_conversations_without_waiting_for_others(two_processes: TwoProcesses) -> None:
    said = two_processes.of("broken")
    assert all("not finite at step 1, in a row of conversations 'conversation-" in text for text in said) and said[0] != said[1]


@pytest.mark.distributed
def test_heads_and_adapter_are_written_whole(two_processes: TwoProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m train`: the files of two sharded processes are those of one."""
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(two_processes.folder / "cache"))
    assert main(options(two_processes.folder, tmp_path, 1)) == 0
    written = two_processes.folder / "written"
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        torch.testing.assert_close(load_file(written / file), load_file(tmp_path / file), atol=1e-5, rtol=1e-5)
    two, one = (
        load_heads(folder, merged_base(str(two_processes.folder / "base"), folder / "adapter")[0]) for folder in (written, tmp_path)
    )
    assert two.acceptance == pytest.approx(one.acceptance, abs=1e-3) and two.acceptance[64] > 1
    assert replace(two.config, base_fingerprint="") == replace(one.config, base_fingerprint="")  # it knows the adapter's last bits


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["shared", "own"])
def test_zero_trains_the_same_heads(under_zero: TwoProcesses, tmp_path: Path, kind: str) -> None:
    """The optimizer state is in halves; under ZeRO-3 so is every weight of base and heads."""
    first, second = under_zero.of(kind)
    alone = RUNS[kind](tmp_path, 1)
    assert_same_run(first, second, alone, "heads", "DEEPSPEED")
    stage = int(under_zero.folder.name[len("zero")])
    assert first["zero_stage"] == stage and first["moments"] == second["moments"] == alone["moments"] / 2
    assert set(first["shares"].values()) == set(second["shares"].values()) == {0.5 if stage == 3 else 1.0}
    assert first["losses"][-1] < first["losses"][0] and first["base_unchanged"] and second["base_unchanged"]


@pytest.mark.distributed
def test_zero_decodes_saves_whole_checkpoints_and_resumes(under_zero: TwoProcesses, tmp_path: Path) -> None:
    """What validation measures is what one process measures; the checkpoint is the one of one process, optimizer state included; a
    resumed run is the whole one bit for bit."""
    first, second = under_zero.of("validated")
    alone = RUNS["validated"](tmp_path, 1)
    assert_same_run(first, second, alone, "heads", "DEEPSPEED")
    assert first["before"] == alone["before"] != [] == second["before"]
    assert first["validations"] == second["validations"] == alone["validations"] and any(
        accepted for _, accepted in first["validations"][-1][1]
    )
    for figures, expected in zip(first["figures"], alone["figures"], strict=True):
        assert figures == pytest.approx(expected, abs=1e-4)
    of_two, of_one = (read_checkpoint(folder / "checkpoints" / "step-4").state for folder in (under_zero.folder / "validated", tmp_path))
    assert of_two["optimizer"].pop("param_groups") == of_one["optimizer"].pop("param_groups")
    torch.testing.assert_close(of_two, dict(of_one), atol=1e-5, rtol=1e-5)
    resumed = first["resumed"]
    assert resumed["losses"] == first["losses"][KILLED_AT:] and resumed["base_unchanged"]
    assert all(torch.equal(weight, first["heads"][name]) for name, weight in resumed["heads"].items())


@pytest.mark.distributed
def test_zero_names_a_broken_loss_and_writes_heads_whole(under_zero: TwoProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = under_zero.of("broken")
    assert all("not finite at step 1, in" in text and "conversation-" in text for text in said) and said[0] != said[1]
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(under_zero.folder / "cache"))
    AcceleratorState._reset_state()  # another precision
    assert main([*options(under_zero.folder, tmp_path, 2), *IN_HALF, "--gradient-accumulation-steps", "2"]) == 0  # of the same sizes
    AcceleratorState._reset_state()
    two, one = (load_file(folder / "model.safetensors") for folder in (under_zero.folder / "written", tmp_path))
    assert two["weight"].dtype == torch.float32
    torch.testing.assert_close(two, one, atol=1e-5, rtol=1e-5)


def test_the_digest_of_a_zero3_base_is_of_its_share() -> None:
    base = tiny_model("llama")
    for weight in base.parameters():
        weight.ds_tensor, weight.data = weight.detach().flatten().clone(), torch.empty(0)  # type: ignore[attr-defined]
    before = weights_digest(base)
    base.get_input_embeddings().weight.ds_tensor[3] += 1  # type: ignore[operator,union-attr,index]
    assert weights_digest(base) != before
