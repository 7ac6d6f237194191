"""Distilling a draft model: naive loss and gradients, accumulation, two processes, resume, refusals; exact on a CPU."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import TensorBoardTracker
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, SmolLM3Config

from infer.drafters.draft_model import DraftModelDrafter, load_draft_model
from infer.generate import Generator
from medusa_heads import base_model
from medusa_heads.fingerprint import fingerprint
from medusa_heads.first_layers import copy_first_layers, first_layers
from tests.tiny_models import ARCHITECTURES, FAMILIES, tiny_model, tiny_tokenizer
from tests.train.draft_model_runs import make_trainer, result
from tests.train.test_process_faults import LOST, fail_with
from tests.train.training_runs import rows
from train import draft_model as program
from train import draft_model_trainer as trainer_module
from train import losses
from train.batch import make_batch
from train.draft_model import main, run
from train.draft_model_config import parse_config
from train.draft_model_loss import DistilledModel
from train.draft_model_trainer import DraftModelTrainer
from train.history import FILE_NAME, read_history
from train.packing import PackedDataset, collate
from train.run_state import checkpoint_folders

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]])


def assert_same_run(a: dict[str, Any], b: dict[str, Any], tolerance: float) -> None:
    torch.testing.assert_close(torch.tensor(a["losses"]), torch.tensor(b["losses"]), atol=tolerance, rtol=tolerance)
    for name in a["weights"].keys() | b["weights"].keys():
        torch.testing.assert_close(a["weights"][name], b["weights"][name], atol=tolerance, rtol=tolerance)


@pytest.mark.compat
@pytest.mark.parametrize("family", (*FAMILIES, *ARCHITECTURES))
def test_copied_layers_stand_alone(tmp_path: Path, family: str) -> None:
    """Saved and loaded again, they are what the base computes with its later layers left out."""
    model = tiny_model(family)
    copied = copy_first_layers(model, 1)
    assert not {p.data_ptr() for p in copied.parameters()} & {p.data_ptr() for p in model.parameters()}
    copied.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert base_model.text_config(loaded).num_hidden_layers == 1 and len(base_model.decoder_layers(loaded)) == 1
    assert len(getattr(loaded.config, "layer_types", None) or [0]) == 1
    assert torch.equal(loaded(input_ids=IDS).logits, first_layers(model, 1)(input_ids=IDS).logits)


def test_what_a_config_lists_by_layer_is_cut() -> None:
    sizes: dict[str, Any] = dict(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=60, pad_token_id=2
    )
    config = SmolLM3Config(num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0], eos_token_id=[1, 2, 3, 4], **sizes)
    copied = copy_first_layers(AutoModelForCausalLM.from_config(config).eval(), 3)
    assert copied.config.no_rope_layers == [1, 0, 1] and len(copied.config.layer_types) == 3
    assert copied.config.eos_token_id == [1, 2, 3, 4], "this list has nothing to do with layers"


def naive_loss(distilled: DistilledModel, data: Any) -> tuple[torch.Tensor, int]:
    """KL from full logits of one conversation after the other, after answer tokens that answer tokens follow."""
    total, count = torch.zeros(()), 0
    for row in data:
        ids, mask = torch.tensor([row["input_ids"]]), row["assistant_mask"]
        with torch.no_grad():
            p = distilled.base(input_ids=ids).logits[0].softmax(-1)
        log_q = distilled.draft(input_ids=ids).logits[0].log_softmax(-1)
        for t in range(1, ids.shape[1] - 1):
            if mask[t] and mask[t + 1]:
                total, count = total + F.kl_div(log_q[t], p[t], reduction="sum"), count + 1
    return total, count


@pytest.mark.compat
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral_window", "gpt2"])
@pytest.mark.parametrize("train_embeddings", [False, True])
def test_loss_and_gradients_equal_the_naive_ones(family: str, train_embeddings: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "chunk_rows", lambda *_: 7)
    base = tiny_model(family)
    distilled = DistilledModel(base, copy_first_layers(base, 1), train_embeddings=train_embeddings)
    distilled.train()  # changes nothing: GPT-2 would drop units out
    data = rows(5)
    packed = PackedDataset(data, pack_length=64, num_heads=1)
    batch = make_batch(collate([packed[i] for i in range(len(packed))]), 1)
    found = []
    for naive in (True, False):
        loss = naive_loss(distilled, data)[0] if naive else distilled(**batch.tensors)[0]
        distilled.zero_grad()
        loss.backward()
        found.append((loss.detach(), {name: p.grad.clone() for name, p in distilled.trained().items()}))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    for name, gradient in found[0][1].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[1][1][name] / scale, gradient / scale, atol=1e-5, rtol=1e-5)
    assert batch.num_response_tokens == naive_loss(distilled, data)[1]
    assert any(name.endswith(("embed_tokens/weight", "wte/weight")) for name in found[0][1]) == train_embeddings
    assert all(p.grad is None for p in base.parameters())


def test_accumulation_equals_one_large_batch(tmp_path: Path) -> None:
    large, small = make_trainer(tmp_path / "a", batch_size=8), make_trainer(tmp_path / "b", batch_size=1, gradient_accumulation_steps=8)
    large.train()
    small.train()
    assert_same_run(result(large), result(small), 1e-5)


def test_the_draft_model_comes_to_agree_with_the_base(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, dataset=rows(8), epochs=40, learning_rate=0.02, log_every=1)
    trainer.train()
    assert trainer.losses[-1] < 0.3 * trainer.losses[0]  # type: ignore[attr-defined]
    frozen = [base_model.lm_head(trainer.distilled.draft).weight, trainer.distilled.draft.get_input_embeddings().weight]
    own = [base_model.lm_head(trainer.distilled.base).weight, trainer.distilled.base.get_input_embeddings().weight]
    assert all(map(torch.equal, frozen, own))  # type: ignore[arg-type]


@pytest.mark.distributed
def test_two_processes_equal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [
        sys.executable,
        *launcher,
        "-m",
        "tests.train.draft_model_runs",
        str(tmp_path / "two.pt"),
        str(tmp_path / "two"),
        "batch_size=2",
    ]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert process.returncode == 0, process.stderr
    two = torch.load(tmp_path / "two.pt")
    assert two["num_processes"] == 2, "the run was not distributed"
    one = make_trainer(tmp_path / "one", batch_size=4)
    one.train()
    assert_same_run(two, result(one), 1e-5)
    monkeypatch.setattr(trainer_module, "window_counts", lambda window: torch.tensor([10]))  # control: another normalisation
    other = make_trainer(tmp_path / "other", batch_size=4)
    other.train()
    with pytest.raises(AssertionError):
        assert_same_run(two, result(other), 1e-5)


def test_resume_refuses_another_run_and_says_what_changed(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_every=2, max_steps=2).train()
    with pytest.raises(ValueError, match=r"train_embeddings was False, is True"):
        make_trainer(tmp_path, save_every=2, max_steps=2, train_embeddings=True).train()


def test_changed_base_is_caught(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    real = trainer._step

    def step(*arguments: Any) -> Any:
        next(trainer.distilled.base.parameters()).data[0, 0] += 1e-3
        return real(*arguments)

    trainer._step = step  # type: ignore[method-assign,assignment]
    with pytest.raises(AssertionError, match="base model changed"):
        trainer.train()


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=6, save_every=2, log_every=10)
    real, broken = trainer._step, 3

    def step(number: int, window: Any) -> Any:
        if number == broken:
            next(iter(trainer.trained.values())).data.fill_(float("nan"))
        return real(number, window)

    trainer._step = step  # type: ignore[method-assign,assignment]
    with pytest.raises(ValueError, match="not finite at step 3 to 4: lower learning_rate"):
        trainer.train()
    (kept,) = checkpoint_folders(tmp_path)
    assert kept.name == "step-2" and all(weight.isfinite().all() for weight in torch.load(kept / "state.pt")["heads"].values())


def test_a_lost_tracker_costs_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures are in the file, each step's once although the run was stopped between checkpoints and resumed."""
    options: dict[str, Any] = dict(max_steps=4, save_every=2)
    stopped, whole = make_trainer(tmp_path, **options), make_trainer(tmp_path, **options)
    real = stopped._step

    def step(number: int, window: Any) -> Any:
        if number == 3:
            raise KeyboardInterrupt
        return real(number, window)

    def log(figures: dict[str, float], step: int) -> None:
        raise ConnectionError("no route to the tracker")

    stopped._step = step  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    whole.accelerator.log = log  # type: ignore[method-assign]
    whole.train()
    warnings = [line for line in capsys.readouterr().err.splitlines() if "tracker" in line]
    assert len(warnings) == 1 and "no route" in warnings[0]
    rows = read_history(tmp_path / FILE_NAME)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and all(row["kl"] > 0 for row in rows)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its tokenizer and 30 of its own greedy answers."""
    folder = tmp_path_factory.mktemp("draft-model")
    model, tokenizer, chooser = tiny_model("gemma2"), tiny_tokenizer(), random.Random(0)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    with (folder / "data.jsonl").open("w") as file:
        for index in range(30):
            question, answer = (" ".join(chooser.choices(("the", "cat", "sat", "on", "mat", "dog", "house"), k=12)) for _ in range(2))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"row-{index}", "messages": messages}) + "\n")
    return folder


def arguments(workspace: Path, output: str, *extra: str) -> list[str]:
    paths = ["--base", str(workspace / "base"), "--data", str(workspace / "data.jsonl"), "--output-dir", str(workspace / output)]
    sizes = ["--max-length", "128", "--pack-length", "128", "--batch-size", "2", "--num-workers", "0", "--learning-rate", "0.01"]
    return [*paths, *sizes, "--layers", "1", *extra]


def test_writes_a_draft_model_that_decodes(workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(workspace / "cache"))
    monkeypatch.setattr(sys, "argv", ["train/draft_model.py", *arguments(workspace, "out", "--max-steps", "3", "--held-out", "5")])
    assert main() == 0
    model, tokenizer = base_model.load_base(str(workspace / "base"))
    draft = load_draft_model(workspace / "out", model, tokenizer)
    record = json.loads((workspace / "out" / "draft_model.json").read_text())
    assert record["base_fingerprint"] == fingerprint(model) and "--held-out 5" in record["command"] and len(record["validation_ids"]) == 5
    assert record["versions"]["torch"] == torch.__version__ and 0 < record["measured"]["overlap"] < 1
    assert torch.equal(base_model.lm_head_parameters(draft)[0], base_model.lm_head_parameters(model)[0])
    assert base_model.lm_head(draft).weight is draft.get_input_embeddings().weight, "tied embeddings stay tied"
    last = torch.load(checkpoint_folders(workspace / "out")[-1] / "state.pt")["heads"]
    assert last and all(torch.equal(draft.state_dict()[name.replace("/", ".")], weight) for name, weight in last.items())
    prompts = [tokenizer.encode("the cat sat on the mat dog house"), tokenizer.encode("house dog the")]
    found, expected = (g.generate(prompts, max_new_tokens=9) for g in (Generator(model, DraftModelDrafter(model, draft)), Generator(model)))
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]
    assert not [path for path in (workspace / "out").rglob("*") if "writing" in path.name or path.name == "finished"]
    assert main() == 2
    assert "already holds a finished model" in capsys.readouterr().err


def test_overwrite_moves_all_that_a_run_wrote(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(workspace / "cache"))
    run(parse_config(arguments(workspace, "overwritten", "--max-steps", "1")))
    written = {path.name for path in (workspace / "overwritten").iterdir()}
    run(parse_config(arguments(workspace, "overwritten", "--max-steps", "1", "--seed", "1", "--overwrite")))
    assert {path.name for path in (workspace / "overwritten" / "previous").iterdir()} == written


def test_a_tracker_that_does_not_start_or_end(workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(workspace / "cache"))
    options = arguments(workspace, "tracked", "--max-steps", "1", "--log-with", "tensorboard")

    def fail(*args: object, **options: object) -> None:
        raise ConnectionError("nobody listens")

    with monkeypatch.context() as patch:
        patch.setattr("accelerate.Accelerator.init_trackers", fail)
        assert main(options) == 2
    assert "--log-with tensorboard does not start (ConnectionError('nobody listens'))" in capsys.readouterr().err
    monkeypatch.setattr(TensorBoardTracker, "finish", fail)
    assert main(options) == 0
    assert "warning: the tracker failed (ConnectionError('nobody listens'))" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--data", "--validation"])
def test_token_ids_of_another_model_are_named(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Those of held-out rows before training, not at its end."""
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(workspace / "cache"))
    monkeypatch.setattr(DraftModelTrainer, "train", lambda self: pytest.fail("too late"))
    row = {"id": "foreign", "input_ids": [5] * 6 + [400] * 10, "assistant_spans": [[6, 16]]}
    (workspace / "foreign.jsonl").write_text(json.dumps(row) + "\n")
    data = ["--data", str(workspace / "data.jsonl"), "--validation", str(workspace / "data.jsonl")]
    data[data.index(option) + 1] = str(workspace / "foreign.jsonl")
    others = arguments(workspace, "foreign")
    del others[(at := others.index("--data")) : at + 2]
    assert main([*others, *data]) == 2
    assert "conversation foreign holds token id 400, and the base has 300 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("error", LOST, ids=["NCCL", "store", "gloo"])
def test_a_lost_process_is_one_line(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    fail_with(monkeypatch, error, of=program)
    assert main(arguments(workspace, "out")) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "another process of this run has ended" in line and "goes on from the last checkpoint" in line
    fail_with(monkeypatch, RuntimeError("mat1 and mat2 shapes cannot be multiplied"), of=program)
    with pytest.raises(RuntimeError, match="mat1"):
        main(arguments(workspace, "out"))


def test_an_interrupted_run_says_how_it_goes_on(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, KeyboardInterrupt(), of=program)
    assert main(arguments(workspace, "out")) == 130
    assert capsys.readouterr().err == "\ninterrupted: the same command, without --overwrite, goes on from the last checkpoint\n"


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(workspace / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = ("--max-steps", "60", "--save-every", "4", "--train-embeddings")
    process = subprocess.Popen(
        [sys.executable, "-m", "train.draft_model", *arguments(workspace, "killed", *options)], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not checkpoint_folders(workspace / "killed") and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert checkpoint_folders(workspace / "killed") and not (workspace / "killed" / "config.json").exists()
    states = []
    for output in ("killed", "whole"):
        run(parse_config(arguments(workspace, output, *options)))
        states.append(AutoModelForCausalLM.from_pretrained(workspace / output).state_dict())
    assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items())


REFUSED = {
    "layers: 0 must be above 0": ("--layers", "0"),
    "layers: 2 is no saving, the base model has 2": ("--layers", "2"),
    "unknown key 'layer' (did you mean 'layers'?)": ("--config", "typo.yaml"),
    "batch_size: must be above 0": ("--batch-size", "0"),
    "its tokenizer could not be loaded": ("--base", "nowhere"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_name_the_option(
    message: str, workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(workspace / "cache"))
    monkeypatch.chdir(workspace)
    Path("typo.yaml").write_text("layer: 2\n")
    try:
        status: object = main(arguments(workspace, "refused", *REFUSED[message]))
    except SystemExit as error:  # refused while parsing
        status = error.code
    assert status == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_shipped_configuration_is_read() -> None:
    config = parse_config(["--config", "configs/train/smollm2_draft_model.yaml", "--layers", "3"])
    assert (config.base, config.layers, config.held_out) == ("embedded", 3, 300)
