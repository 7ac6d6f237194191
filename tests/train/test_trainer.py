"""The trainer: naive gradients, accumulation, two processes, resume, faults; exact on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional as F

from medusa_heads import base_model
from medusa_heads.config import HeadsConfig
from medusa_heads.fingerprint import weights_digest
from medusa_heads.heads import create_heads
from tests.tiny_models import tiny_model
from tests.train import training_runs
from tests.train.training_runs import make_trainer, result, rows
from train import trainer as trainer_module
from train.batch import make_batch
from train.headed_model import HeadedModel
from train.history import FILE_NAME, read_history
from train.packing import PackedDataset, collate
from train.run_state import checkpoint_folders, save_checkpoint
from train.schedule import number_of_steps
from train.trainer import Trainer


def assert_same_run(a: dict[str, Any], b: dict[str, Any], tolerance: float) -> None:
    assert len(a["losses"]) == len(b["losses"])
    torch.testing.assert_close(torch.tensor(a["losses"]), torch.tensor(b["losses"]), atol=tolerance, rtol=tolerance)
    for name in a["heads"]:
        torch.testing.assert_close(a["heads"][name], b["heads"][name], atol=tolerance, rtol=tolerance)


@pytest.mark.compat
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral_window"])
@pytest.mark.parametrize("own_lm_head", [False, True])
def test_loss_equals_one_document_at_a_time(tmp_path: Path, family: str, own_lm_head: bool) -> None:
    """Packed and chunked equals: every document alone, full logits, loss written out."""
    trainer = make_trainer(tmp_path, family=family, own_lm_head=own_lm_head)
    headed, num_heads = trainer.headed, trainer.num_heads
    with torch.no_grad():
        headed.heads.weight.normal_(std=0.3)
    data = rows(6)
    total, count = torch.zeros(num_heads), torch.zeros(num_heads)
    for row in data:
        ids = torch.tensor([row["input_ids"]])
        hidden = base_model.forward_hidden(headed.base, ids)[0]
        states = headed.heads.draft_states(hidden)
        own = headed.heads.own_logits(states)
        logits = own if own is not None else base_model.compute_logits(headed.base, states)
        for t in range(ids.shape[1]):
            for k in range(1, num_heads + 1):
                if t + 1 + k < ids.shape[1] and all(row["assistant_mask"][t + 1 : t + 2 + k]):
                    total[k - 1] += F.cross_entropy(logits[t, k - 1][None], ids[0, t + 1 + k][None])
                    count[k - 1] += 1
    packed = trainer.rows.__class__(data, pack_length=64, num_heads=num_heads)
    batch = make_batch(collate([packed[i] for i in range(len(packed))]), num_heads)
    assert torch.equal(batch.slot_counts, count.long())
    output = headed(**batch.tensors, slot_weights=1 / count)
    torch.testing.assert_close(output.slot_loss_K, total, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(output.loss, (total / count).sum(), atol=1e-5, rtol=1e-5)


def test_loss_over_a_draft_vocabulary(tmp_path: Path) -> None:
    """The law is over the vocabulary's rows alone; targets outside have no loss and count as misses."""
    trainer = make_trainer(tmp_path)
    base, num_heads = trainer.headed.base, trainer.num_heads
    with torch.no_grad():
        trainer.heads.weight.normal_(std=0.3)
    vocabulary = torch.arange(3, 300, 2)
    headed = HeadedModel(base, trainer.heads, draft_vocabulary=vocabulary)
    batch = make_batch(collate([trainer.rows[0]]), num_heads)
    tensors = batch.tensors
    hidden = headed.hidden_states(tensors["input_ids"], tensors["position_ids"], tensors["document_ids"])[0]
    states = trainer.heads.draft_states(hidden[tensors["positions"]])[tensors["pair_position"], tensors["pair_slot"]]
    scores = base_model.compute_logits(base, states)[:, vocabulary]
    inside = torch.isin(tensors["targets"], vocabulary)
    assert inside.any() and not inside.all()
    places = torch.searchsorted(vocabulary, tensors["targets"][inside])
    losses = torch.zeros(len(inside)).index_put((inside.nonzero()[:, 0],), F.cross_entropy(scores[inside], places, reduction="none"))
    weights = torch.tensor([1.0, 0.5, 0.25])
    output = headed(**tensors, slot_weights=weights)
    torch.testing.assert_close(output.loss, (losses * weights[tensors["pair_slot"]]).sum(), atol=1e-4, rtol=1e-5)
    hits = (scores.argmax(-1) == torch.searchsorted(vocabulary, tensors["targets"]).clamp(max=len(vocabulary) - 1)) & inside
    assert output.slot_hits_KT[:, 0].sum() == hits.sum()
    torch.testing.assert_close(output.slot_loss_K.sum(), losses.sum(), atol=1e-3, rtol=1e-5)


@torch.no_grad()
def test_a_base_in_half_trains_heads_on_the_states_that_decoding_sees() -> None:
    """It picks experts in float32, which autocast, there for the heads, would do in half."""
    base = tiny_model("deepseek_v3").bfloat16()
    headed = HeadedModel(base, create_heads(HeadsConfig(num_heads=2), base))
    batch = make_batch(collate([PackedDataset(rows(1), pack_length=64, num_heads=2)[0]]), 2)
    inputs = [batch.tensors[name] for name in ("input_ids", "position_ids", "document_ids")]
    with torch.autocast("cpu", torch.bfloat16):
        trained = headed.hidden_states(*inputs)
        assert not torch.equal(headed.base_forward(*inputs), trained)
    ids = inputs[0][:, : int((inputs[2] == 1).sum())]
    torch.testing.assert_close(trained[:, : ids.shape[1]], base_model.forward_hidden(base, ids), atol=0.02, rtol=0.02)
    assert torch.equal(headed.base_forward(*inputs), trained)


def test_accumulation_equals_one_large_batch(tmp_path: Path) -> None:
    large, small = make_trainer(tmp_path / "a", batch_size=8), make_trainer(tmp_path / "b", batch_size=1, gradient_accumulation_steps=8)
    large.train()
    small.train()
    assert_same_run(result(large), result(small), 1e-5)


def launch(tmp_path: Path, name: str, num_processes: int, **options: int | str) -> dict[str, Any]:
    out = tmp_path / f"{name}.pt"
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_processes), *rendezvous, "-m"]
    pairs = [f"{key}={value}" for key, value in options.items()]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, "tests.train.training_runs", str(out), str(tmp_path / name), *pairs],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr
    return torch.load(out)


@pytest.mark.distributed
@pytest.mark.parametrize("options", [{}, {"objective": "lk", "slot_weights": "d_pace"}], ids=["ce-decay", "lk-d_pace"])
def test_two_processes_equal_one(tmp_path: Path, options: dict[str, Any]) -> None:
    two = launch(tmp_path, "two", 2, batch_size=2, **options)
    assert two["num_processes"] == 2 and "MULTI_CPU" in two["distributed_type"], "the run was not distributed"
    one = make_trainer(tmp_path / "one", batch_size=4, **options)
    one.train()
    assert_same_run(two, result(one), 1e-5)


@pytest.mark.distributed
def test_two_processes_differ_where_a_rank_counts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: per-process normalisation is a different run, so the test above can fail."""
    two = launch(tmp_path, "two", 2, batch_size=2)
    monkeypatch.setattr(trainer_module, "window_counts", lambda window: torch.full((3,), 10))
    one = make_trainer(tmp_path / "one", batch_size=4)
    one.train()
    with pytest.raises(AssertionError):
        assert_same_run(two, result(one), 1e-5)


class Killed(Exception):
    pass


def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_trainer(tmp_path / "whole", save_every=3)
    whole.train()

    killed = make_trainer(tmp_path / "killed", save_every=3)
    real = trainer_module.save_checkpoint
    calls = []

    def save_then_die(*args: Any, **options: Any) -> None:
        real(*args, **options)
        calls.append(args)
        if len(calls) == 2:
            raise Killed

    monkeypatch.setattr(trainer_module, "save_checkpoint", save_then_die)
    with pytest.raises(Killed):
        killed.train()
    monkeypatch.setattr(trainer_module, "save_checkpoint", real)
    resumed = make_trainer(tmp_path / "killed", save_every=3)
    resumed.train()
    assert len(resumed.losses) == whole.num_steps - 6  # type: ignore[attr-defined]
    for name, weight in whole.heads.named_parameters():
        assert torch.equal(weight, dict(resumed.heads.named_parameters())[name])


def test_resume_refuses_another_run_and_says_what_changed(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_every=2).train()
    with pytest.raises(ValueError, match=r"learning_rate was 0\.01, is 0\.02"):
        make_trainer(tmp_path, save_every=2, learning_rate=0.02).train()
    with pytest.raises(ValueError, match="data_content was"):
        make_trainer(tmp_path, save_every=2, dataset=rows(seed=5)).train()
    with pytest.raises(ValueError, match=r"lk_eta was 10\.0, is 3\.0; objective was 'ce', is 'lk'; slot_weights was 'decay', is 'd_pace'"):
        make_trainer(tmp_path, save_every=2, objective="lk", lk_eta=3.0, slot_weights="d_pace").train()


def damage_state(folder: Path, kept: int) -> None:
    path = folder / "state.pt"
    path.write_bytes(path.read_bytes()[:kept])


def flip_a_byte_of_the_weights(folder: Path) -> None:
    weight = torch.load(folder / "state.pt")["heads"]["weight"].numpy().tobytes()
    data = bytearray((folder / "state.pt").read_bytes())
    data[data.index(weight) + 5] ^= 0xFF
    (folder / "state.pt").write_bytes(data)


DAMAGES = {
    "truncated": lambda folder: damage_state(folder, 3000),
    "last byte gone": lambda folder: damage_state(folder, -1),
    "empty": lambda folder: damage_state(folder, 0),
    "flipped": flip_a_byte_of_the_weights,
    "missing": lambda folder: (folder / "state.pt").unlink(),
    "run.json": lambda folder: (folder / "run.json").write_text('{"step": 9'),
    "not a run": lambda folder: (folder / "run.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any) -> None:
    whole = make_trainer(tmp_path, save_every=3)
    whole.train()
    before, newest = checkpoint_folders(tmp_path)
    damage(newest)
    capsys.readouterr()
    resumed = make_trainer(tmp_path, save_every=3)
    resumed.train()
    assert len(resumed.losses) == int(newest.name.split("-")[1]) - int(before.name.split("-")[1])  # type: ignore[attr-defined]
    for name, weight in whole.heads.named_parameters():
        assert torch.equal(weight, dict(resumed.heads.named_parameters())[name])
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"warning: checkpoint {newest} is damaged (") and warnings[0].endswith(f"going back to {before.name}")


def test_a_damaged_checkpoint_costs_no_good_one(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_every=3)
    trainer.train()
    good, newest = checkpoint_folders(tmp_path)
    damage_state(newest, 0)
    step = int(good.name.split("-")[1])
    state = {"heads": trainer.heads.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    save_checkpoint(tmp_path, step, state, trainer.identity(), 1)
    assert checkpoint_folders(tmp_path) == [good]


def test_without_a_usable_checkpoint_the_run_is_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_every=3).train()
    for folder in checkpoint_folders(tmp_path):
        damage_state(folder, 100)
    with pytest.raises(ValueError, match=r"cannot resume: .*step-\d+ is damaged.*; .*step-\d+ is damaged.*--overwrite"):
        make_trainer(tmp_path, save_every=3).train()


def test_resume_refuses_other_initial_heads(tmp_path: Path) -> None:
    """Fine-tuning names the heads it starts from; the folder of that name may hold others by now."""
    make_trainer(tmp_path, save_every=2, init_heads="somewhere", seed_heads=1).train()
    with pytest.raises(ValueError, match=r"init_heads_weights was '\w{16}', is '\w{16}'"):
        make_trainer(tmp_path, save_every=2, init_heads="somewhere", seed_heads=2).train()
    make_trainer(tmp_path, save_every=2, init_heads="somewhere", seed_heads=1).train()


def test_half_written_checkpoint_is_not_used(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_every=3, keep_checkpoints=1).train()
    assert len(checkpoint_folders(tmp_path)) == 1
    newest = checkpoint_folders(tmp_path)[-1]
    (newest.parent / ".step-99-writing-x").mkdir()
    (newest.parent / "step-99").mkdir()
    assert checkpoint_folders(tmp_path)[-1] == newest


def test_base_is_untouched_and_every_head_learns(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    before = weights_digest(trainer.headed.base)
    trainer.train()
    assert weights_digest(trainer.headed.base) == before
    assert (trainer.heads.weight.detach().abs().sum((0, 2, 3)) > 0).all()


def test_changed_base_is_caught(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    real = trainer._step

    def step(*args: Any) -> Any:
        next(trainer.headed.base.parameters()).data[0, 0] += 1e-3
        return real(*args)

    trainer._step = step  # type: ignore[method-assign,assignment]
    with pytest.raises(AssertionError, match="base model changed"):
        trainer.train()


def test_silent_head_is_caught(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    real = trainer.headed.heads.draft_states
    trainer.headed.heads.draft_states = lambda h, n=None: torch.cat([real(h)[:, :2], real(h)[:, 2:].detach()], 1)  # type: ignore[method-assign,assignment,misc]
    with pytest.raises(AssertionError, match=r"heads \[3\] received no gradient"):
        trainer.train()


@pytest.mark.parametrize(("epochs", "steps_per_epoch", "steps"), [(1.1, 50, 55), (0.28, 25, 7), (2.2, 25, 55), (0.01, 20, 1), (1.5, 3, 5)])
def test_epochs_are_decimal_numbers(epochs: float, steps_per_epoch: int, steps: int) -> None:
    assert number_of_steps(epochs, steps_per_epoch, None) == steps


def test_heads_that_weigh_next_to_nothing_do_learn(tmp_path: Path) -> None:
    """The squares of their gradients are beyond float32."""
    make_trainer(tmp_path, num_heads=12, slot_decay=0.01, epochs=1).train()


def make_half_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, scale: float, **options: Any) -> Trainer:
    """As on a GPU in float16: losses are scaled, gradients unscaled, and a step whose gradient overflows is left out."""

    def accelerator(**arguments: Any) -> Accelerator:
        made = Accelerator(**arguments)
        made.scaler, made.native_amp = torch.amp.GradScaler("cpu", init_scale=scale), True  # type: ignore[assignment]
        made.autocast = lambda: torch.autocast("cpu", torch.float16)  # type: ignore[method-assign,assignment]
        return made

    monkeypatch.setattr(Accelerator, "mixed_precision", property(lambda self: "fp16"))
    monkeypatch.setattr(training_runs, "Accelerator", accelerator)
    monkeypatch.setattr(training_runs, "tiny_model", lambda family: tiny_model(family).half())
    return make_trainer(tmp_path, **options)


def test_float16_scales_losses_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_half_trainer(tmp_path / "half", monkeypatch, scale=2.0**14)
    trainer.train()
    monkeypatch.undo()
    (full := make_trainer(tmp_path / "full")).train()
    half_norms, norms = (
        [row["slot1/grad_norm"] for row in read_history(tmp_path / name / FILE_NAME) if "loss" in row] for name in ("half", "full")
    )
    assert half_norms == pytest.approx(norms, rel=0.1)
    assert trainer.losses == pytest.approx(full.losses, rel=0.02)  # type: ignore[attr-defined]


def test_float16_leaves_out_a_step_that_overflows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_half_trainer(tmp_path, monkeypatch, scale=2.0**40)
    trainer.train()
    scale = trainer.accelerator.scaler.get_scale()  # type: ignore[union-attr]
    assert scale < 2.0**40 and all(weight.isfinite().all() for weight in trainer.heads.parameters())
    resumed = make_half_trainer(tmp_path, monkeypatch, scale=2.0**40)
    resumed._resume()
    assert resumed.accelerator.scaler.get_scale() == scale  # type: ignore[union-attr]


def test_nan_names_the_conversation_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    victim = 7  # a token that only this conversation will hold
    data = rows()
    ids = [[victim if token == victim and index != 5 else token for token in row["input_ids"]] for index, row in enumerate(data)]
    ids = [[8 if token == victim else token for token in row] for row in ids]
    ids[5][-4] = victim
    data = data.remove_columns("input_ids").add_column("input_ids", ids)  # type: ignore[call-arg]
    trainer = make_trainer(tmp_path, save_every=2, batch_size=1, dataset=data)
    embeddings = trainer.headed.base.get_input_embeddings()
    embeddings.weight.data[victim] = float("nan")  # type: ignore[index,operator,union-attr]
    with pytest.raises(ValueError, match="conversation-5"):
        trainer.train()
    for folder in checkpoint_folders(tmp_path):
        state = torch.load(folder / "state.pt")
        assert all(t.isfinite().all() for t in state["heads"].values())


@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_the_log_holds_the_trained_loss_and_the_overlap(tmp_path: Path, objective: str) -> None:
    """loss: what is optimised, slot weights included; overlap: a share, where the objective knows the base's law."""
    trainer = make_trainer(tmp_path, objective=objective, slot_weights="uniform", max_steps=2)
    logged: list[dict[str, float]] = []
    trainer.accelerator.log = lambda figures, step: logged.append(figures)  # type: ignore[method-assign]
    trainer.train()
    for figures in logged:
        assert figures["loss"] == pytest.approx(sum(figures[f"slot{k}/loss"] for k in (1, 2, 3)), rel=1e-5)
        overlaps = [figures[f"slot{k}/overlap"] for k in (1, 2, 3) if f"slot{k}/overlap" in figures]
        assert len(overlaps) == (3 if objective == "kl" else 0) and all(0 < overlap < 1 for overlap in overlaps)


@pytest.mark.parametrize("objective", ["kl", "tv", "lk", "ce_l1"])
def test_every_divergence_trains_towards_the_base(tmp_path: Path, objective: str) -> None:
    trainer = make_trainer(tmp_path, objective=objective, epochs=12)
    overlaps: list[float] = []
    trainer.accelerator.log = lambda figures, step: overlaps.append(figures["slot1/overlap"])  # type: ignore[method-assign]
    trainer.train()
    assert overlaps[-1] > overlaps[0] + 0.03
