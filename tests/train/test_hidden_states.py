"""Training from stored hidden states: the same run as with the base in every step, whatever is killed, damaged or foreign."""

# S stored states, M of a micro-batch, N pairs, D hidden

from __future__ import annotations

import copy
import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from tests.tiny_models import tiny_tokenizer
from tests.train.stored_run import count_rows_made, stored
from tests.train.test_main import arguments, refusal, workspace  # noqa: F401
from tests.train.test_trainer import Killed, assert_same_run
from tests.train.training_runs import PACK_LENGTH, make_trainer, result, rows
from train import state_manifest, state_shards
from train import trainer as trainer_module
from train.__main__ import run
from train.batch import make_batch
from train.config import TrainConfig, parse_config
from train.hidden_states import cached_batch, hold_states
from train.packing import PackedDataset, collate
from train.state_maker import StateMaker, index_states, ranges
from train.state_manifest import Manifest, tokenizer_keys
from train.state_shards import open_states, write_shard
from train.trainer import Trainer

STORES = ("device", "disk")


def two_turns(count: int = 14) -> datasets.Dataset:
    """Conversations of two answers each, one of them now and then of a single token, or at the very start."""
    generator = torch.Generator().manual_seed(3)
    documents = []
    for index in range(count):
        masks = [index % 3 == 0] * 3, [False] * 4, [True] * (1 + index % 5), [False] * 2, [True] * (3 + index % 7)
        mask = [value for part in masks for value in part]
        ids = torch.randint(3, 300, (len(mask),), generator=generator).tolist()
        documents.append({"input_ids": ids, "assistant_mask": mask, "id": f"conversation-{index}"})
    return datasets.Dataset.from_list(documents)


def maker_of(trainer: Trainer) -> StateMaker:
    index = index_states(trainer.rows)
    return StateMaker(trainer.headed, trainer.rows, index, trainer.accelerator, trainer.config.batch_size, 0)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows or so in a shard."""
    monkeypatch.setattr(state_manifest, "SHARD_BYTES", 100 * 32 * 4)


# ---------------------------------------------------------------- the same run


@pytest.mark.parametrize("where", STORES)
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "num_workers": 2},
        {"objective": "kl"},
        {"objective": "lk", "slot_weights": "d_pace", "family": "gemma2"},
        {"objective": "ce_l1", "own_lm_head": True},
    ],
    ids=["ce", "kl", "lk", "own"],
)
@pytest.mark.usefixtures("small_shards")
def test_stored_states_train_the_same_heads(tmp_path: Path, where: str, options: dict[str, Any]) -> None:
    """Over two epochs, the last windows of which are short; and the base runs over each row once."""
    online = make_trainer(tmp_path / "online", dataset=two_turns(), **options)
    online.train()
    trainer = stored(tmp_path, where, dataset=two_turns(), **options)
    made = count_rows_made(trainer)
    trainer.train()
    assert sum(made) == len(trainer.rows) and len(trainer.rows) % 4
    assert len(online.losses) == trainer.num_steps > 3  # type: ignore[attr-defined]
    assert_same_run(result(online), result(trainer), 1e-5)


def test_a_micro_batch_is_that_of_the_tokens(tmp_path: Path) -> None:
    """Pairs and targets exactly, hidden states to rounding, rows and conversations for the error of a loss that is not finite."""
    trainer = make_trainer(tmp_path, dataset=two_turns(), batch_size=3)
    maker = maker_of(trainer)
    store = hold_states(maker, trainer.plan, first_step=0, num_steps=trainer.num_steps)
    numbers = [2, 0, -1, 1]
    cached = cached_batch(trainer.rows, maker.index, store, numbers).to(torch.device("cpu"))
    tokens = make_batch(collate([trainer.rows[number] for number in numbers if number >= 0]), 3)
    assert torch.equal(cached.slot_counts, tokens.slot_counts) and len(tokens.tensors["targets"]) > 100
    for name in ("pair_position", "pair_slot", "targets"):
        assert torch.equal(cached.tensors[name], tokens.tensors[name])
    inputs = [tokens.tensors[name] for name in ("input_ids", "position_ids", "document_ids")]
    hidden_MD = trainer.headed.hidden_states(*inputs).flatten(0, 1)
    for offset in (0, 1):  # of the position itself, and of the next one, which a teacher's law needs
        found, wanted = cached.tensors["hidden_MD"][cached.tensors["positions"] + offset], hidden_MD[tokens.tensors["positions"] + offset]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    needed = {position + offset for position in tokens.tensors["positions"].tolist() for offset in (0, 1)}
    assert len(cached.tensors["hidden_MD"]) == len(needed), "nothing but what is needed"
    found_rows, true_rows = ([batch.row_of_pair(pair) for pair in range(len(tokens.tensors["targets"]))] for batch in (cached, tokens))
    assert found_rows == true_rows and set(true_rows) == {0, 1, 2}
    for row in range(3):
        ours, theirs = cached.documents_of_row(row), tokens.documents_of_row(row)
        assert [name for name, _ in ours] == [name for name, _ in theirs]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))


def test_ranges() -> None:
    assert ranges(torch.tensor([7, 3, 0]), torch.tensor([2, 0, 3])).tolist() == [7, 8, 0, 1, 2]
    assert ranges(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long)).tolist() == []


@pytest.mark.parametrize("where", STORES)
def test_half_a_base_is_stored_by_half(tmp_path: Path, where: str) -> None:
    """States in the base's own type; the run then is the online one to the rounding of that type."""
    trainers = {}
    for name, place in (("online", "online"), ("stored", where)):
        trainer = stored(tmp_path, place, name=name, epochs=1)
        trainer.headed.base.bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            trainer.train()
        trainers[name] = result(trainer)
    torch.testing.assert_close(
        torch.tensor(trainers["online"]["losses"]), torch.tensor(trainers["stored"]["losses"]), atol=0.02, rtol=0.005
    )
    if where == "disk":
        num_states = index_states(trainer.rows).num_states(range(len(trainer.rows)))
        assert sum(path.stat().st_size for path in (tmp_path / "states").glob("*.bin")) == num_states * 32 * 2


@pytest.mark.parametrize("where", STORES)
def test_a_loss_that_is_not_finite_names_the_conversation(tmp_path: Path, where: str) -> None:
    victim, data = 7, rows()
    ids = [[8 if token == victim else token for token in row["input_ids"]] for row in data]
    ids[5][-4] = victim
    trainer = stored(tmp_path, where, batch_size=1, dataset=data.remove_columns("input_ids").add_column("input_ids", ids))  # type: ignore[call-arg]
    trainer.headed.base.get_input_embeddings().weight.data[victim] = float("nan")  # type: ignore[index,operator,union-attr]
    with pytest.raises(ValueError, match="in conversation 'conversation-5'"):
        trainer.train()


@pytest.mark.distributed
def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Each makes rows of its own, and reads what the other made."""
    rendezvous = ["--nproc_per_node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "-m", "tests.train.stored_run", str(tmp_path)]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    launched = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert launched.returncode == 0, launched.stderr
    one = make_trainer(tmp_path / "one", batch_size=4, objective="kl", epochs=3)
    one.train()
    for where in STORES:
        first, second = (torch.load(tmp_path / f"{where}-{rank}.pt") for rank in (0, 1))
        assert first["num_processes"] == 2 and "MULTI_CPU" in first["distributed_type"], "the run was not distributed"
        num_rows = len(one.rows)
        assert first["rows_made"] + second["rows_made"] == num_rows > first["rows_made"] > 0, "each made a part"
        assert_same_run(first, result(one), 1e-5)


def test_a_process_holds_only_what_it_reads(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, epochs=1)
    plan = replace(trainer.plan, num_processes=2)
    lengths_P = index_states(trainer.rows).lengths_P
    held = [replace(plan, process_index=process).rows_read(0, plan.steps_per_epoch) for process in (0, 1)]
    assert held[0] | held[1] == set(range(len(trainer.rows))) and not held[0] & held[1]
    assert trainer.plan.rows_read(0, 10**12) == held[0] | held[1], "found without walking through all steps"
    later = trainer.plan.rows_read(2, trainer.num_steps)
    store = hold_states(maker_of(trainer), trainer.plan, first_step=2, num_steps=trainer.num_steps)
    assert len(store.states_SD) == int(lengths_P[sorted(later)].sum()) < int(lengths_P.sum())


# ---------------------------------------------------------------- kills


@pytest.mark.parametrize("where", STORES)
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = stored(tmp_path, where, name="whole", epochs=1, batch_size=3)
    whole.train()
    real, calls = trainer_module.save_checkpoint, []

    def save_then_die(*args: Any, **options: Any) -> None:
        real(*args, **options)
        calls.append(args)
        raise Killed

    monkeypatch.setattr(trainer_module, "save_checkpoint", save_then_die)
    with pytest.raises(Killed):
        stored(tmp_path, where, name="killed", epochs=1, batch_size=3, save_every=2).train()
    monkeypatch.setattr(trainer_module, "save_checkpoint", real)
    resumed = stored(tmp_path, where, name="killed", epochs=1, batch_size=3, save_every=2)
    resumed.train()
    assert 0 < len(resumed.losses) == whole.num_steps - 2  # type: ignore[attr-defined]
    for name, weight in whole.heads.named_parameters():
        assert torch.equal(weight, dict(resumed.heads.named_parameters())[name])


def test_rows_go_through_the_base_in_the_same_groups_after_a_resume(tmp_path: Path) -> None:
    """In others the last bits of their states would be others."""
    seen: dict[int, list[torch.Tensor]] = {}
    for first_step in (0, 3):
        trainer = make_trainer(tmp_path / str(first_step), epochs=1, batch_size=3)
        seen[first_step] = []
        real = trainer.headed.hidden_states
        trainer.headed.hidden_states = lambda ids, *rest, to=seen[first_step], real=real: (to.append(ids), real(ids, *rest))[1]  # type: ignore[assignment,func-returns-value,method-assign]
        hold_states(maker_of(trainer), trainer.plan, first_step=first_step, num_steps=trainer.num_steps)
    assert len(trainer.rows) > len(trainer.plan.rows_read(3, trainer.num_steps)) > 0
    for ids in seen[3]:
        assert any(torch.equal(ids, other) for other in seen[0])


@pytest.mark.usefixtures("small_shards")
def test_a_cache_killed_between_shards_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished shards are not made again, half a file counts for nothing, and the result is that of one go."""
    folder, real = tmp_path / "states", state_shards.write_shard
    whole = open_states(tmp_path / "whole", maker_of(make_trainer(tmp_path / "a")))
    folder.mkdir()
    (folder / ".manifest.json.writing").write_text('{"made')  # killed before, too

    def write_two(path: Path, states_SD: torch.Tensor) -> None:
        if path.name == "states-00002.bin":
            (folder / ".states-00002.bin.writing").write_bytes(b"half")
            raise Killed
        real(path, states_SD)

    monkeypatch.setattr(state_shards, "write_shard", write_two)
    with pytest.raises(Killed):
        open_states(folder, maker_of(make_trainer(tmp_path / "b")))
    monkeypatch.setattr(state_shards, "write_shard", real)
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.bin")}
    assert sorted(before) == ["states-00000.bin", "states-00001.bin"]
    trainer = make_trainer(tmp_path / "c")
    made = count_rows_made(trainer)
    store = open_states(folder, maker_of(trainer))
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    assert len(shards) > 3 and sum(made) == sum(shard["num_rows"] for shard in shards[2:])
    assert all((folder / name).stat().st_mtime_ns == at for name, at in before.items())
    assert all(torch.equal(a, b) for a, b in zip(store.shards, whole.shards, strict=True))
    assert {path.suffix for path in folder.iterdir()} == {".json", ".bin"}


@pytest.mark.usefixtures("small_shards")
def test_a_cache_killed_behind_its_last_shard_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*arguments: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(state_shards, "_finish", die)
        open_states(tmp_path / "states", maker_of(make_trainer(tmp_path / "a")))
    trainer = make_trainer(tmp_path / "b")
    made = count_rows_made(trainer)
    open_states(tmp_path / "states", maker_of(trainer))
    assert made == [] and json.loads((tmp_path / "states" / "manifest.json").read_text())["sha256"]


@pytest.mark.usefixtures("small_shards")
def test_a_full_disk_keeps_finished_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, real, calls = tmp_path / "states", os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 5:  # the manifest, two files of the first shard, one of the second
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"states-00001\.bin cannot be written \(No space left.*make room and start again"):
        open_states(folder, maker_of(make_trainer(tmp_path / "a")))
    assert [path.name for path in folder.glob("*.bin")] == ["states-00000.bin"] and not list(folder.glob(".*"))
    trainer = make_trainer(tmp_path / "b")
    made = count_rows_made(trainer)
    open_states(folder, maker_of(trainer))
    assert 0 < sum(made) < len(trainer.rows)


def test_states_that_do_not_fit_on_the_device_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(ValueError, match=r"hidden_states: device has no room for \d+\.\d GB of states; use --hidden-states disk or online"):
        stored(tmp_path, "device").train()


def test_kill_9_while_the_cache_is_made(workspace: Path) -> None:  # noqa: F811
    """A real process; its whole shards stay as they are and the run ends like an undisturbed one."""
    folder = workspace / "states"
    options = ["--hidden-states", "disk", "--hidden-states-dir", str(folder)]
    slow = (
        "import sys, time; from train import state_manifest, state_shards, __main__ as main\n"
        "state_manifest.SHARD_BYTES = 1; write = state_shards.write_shard\n"
        "state_shards.write_shard = lambda *args: (write(*args), time.sleep(1))\nsys.exit(main.main(sys.argv[1:]))"
    )
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    process = subprocess.Popen([sys.executable, "-c", slow, *arguments(workspace, *options)], env=environment, stderr=subprocess.DEVNULL)
    end = time.time() + 60
    while not (folder / "states-00000.bin").exists() and time.time() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.bin")}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert 0 < len(before) < len(manifest["shards"]) and not manifest["sha256"]
    run(parse_config(arguments(workspace, *options)))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(json.loads((folder / "manifest.json").read_text())["sha256"]) == len(manifest["shards"])


# ---------------------------------------------------------------- refusals


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped": flip,
    "short": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.usefixtures("small_shards")
def test_a_damaged_shard_is_refused_and_made_anew_alone(tmp_path: Path, damage: Any) -> None:
    folder = tmp_path / "states"
    whole = [shard.clone() for shard in open_states(folder, maker_of(make_trainer(tmp_path / "a"))).shards]
    victim = folder / "states-00001.bin"
    damage(victim)
    trainer = make_trainer(tmp_path / "b")
    with pytest.raises(ValueError, match=r"states-00001\.bin is damaged .*delete this file and start again"):
        open_states(folder, maker_of(trainer))
    victim.unlink()
    made = count_rows_made(trainer)
    store = open_states(folder, maker_of(trainer))
    assert sum(made) == json.loads((folder / "manifest.json").read_text())["shards"][1]["num_rows"]
    assert all(torch.equal(a, b) for a, b in zip(store.shards, whole, strict=True))


def other_tokenizer(trainer: Trainer) -> None:
    trainer.rows.tokenizer_keys["tokenizer"] = "another"


def other_template(trainer: Trainer) -> None:
    trainer.rows.tokenizer_keys["chat_template"] = "another"


def other_base(trainer: Trainer) -> None:
    trainer.heads.config = replace(trainer.heads.config, base_fingerprint="another")


def shorter_rows(trainer: Trainer) -> None:
    trainer.rows = PackedDataset(rows(), pack_length=48, num_heads=3, tokenizer_keys=trainer.rows.tokenizer_keys)


FOREIGN: dict[str, tuple[Any, str]] = {
    "base": (other_base, "another base model"),
    "dtype": (lambda trainer: trainer.headed.base.bfloat16(), r"another --base-dtype \(there float32, here bfloat16\)"),
    "tokenizer": (other_tokenizer, "another tokenizer"),
    "template": (other_template, "another chat template"),
    "data": (lambda trainer: setattr(trainer, "rows", PackedDataset(rows(seed=1), PACK_LENGTH, 3)), "other data"),
    "pack_length": (shorter_rows, r"another pack_length \(there 64, here 48\)"),
}


@pytest.mark.parametrize(("change", "message"), FOREIGN.values(), ids=FOREIGN.keys())
def test_a_cache_made_for_something_else_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    def trainer(name: str) -> Trainer:
        made = make_trainer(tmp_path / name)
        made.rows.tokenizer_keys |= tokenizer_keys(tiny_tokenizer())
        return made

    folder = tmp_path / "states"
    open_states(folder, maker_of(trainer("a")))
    open_states(folder, maker_of(trainer("b")))  # control: the same again is welcome
    foreign = trainer("c")
    change(foreign)
    with pytest.raises(ValueError, match=rf"holds hidden states made for .*{message}.*: choose another folder, or delete this one"):
        open_states(folder, maker_of(foreign))


def test_a_shard_made_anew_is_entered_after_a_kill(tmp_path: Path) -> None:
    """Its checksum lies beside it while the manifest holds that of the shard before."""
    folder, maker = tmp_path / "states", maker_of(make_trainer(tmp_path / "run"))
    open_states(folder, maker)
    shard = folder / Manifest.read(folder).shards[0].file
    write_shard(shard, torch.from_numpy(np.fromfile(shard, dtype=np.uint8)) ^ 1)
    open_states(folder, maker)
    assert not shard.with_suffix(".sha256").exists()


def test_the_keys_of_a_tokenizer() -> None:
    keys, other = tokenizer_keys(tiny_tokenizer()), copy.deepcopy(tiny_tokenizer())
    other("the cat", padding="max_length", max_length=9, truncation=True)
    assert tokenizer_keys(other) == keys, "how it was last called is not what it is"
    other.chat_template += " "
    assert tokenizer_keys(other)["tokenizer"] == keys["tokenizer"] and tokenizer_keys(other) != keys
    other.add_tokens(["<new>"])
    assert tokenizer_keys(other)["tokenizer"] != keys["tokenizer"]


def test_a_run_refuses_the_cache_of_another_template(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """The command passes its tokenizer on: the very same tokens under another template are other data, and both are named."""
    options = ("--hidden-states", "disk", "--hidden-states-dir", str(workspace / "states"), "--max-steps", "1")
    run(parse_config(arguments(workspace, *options)))
    template = workspace / "base" / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another #}")
    found = refusal(workspace, capsys, *options, "--overwrite")
    assert "made for another chat template (there" in found and "another tokenizer" not in found
    assert str(workspace / "states") in found


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    maker = maker_of(make_trainer(tmp_path / "run"))
    for name, message in (
        ("other", "holds other files and no manifest"),
        ("file", "cannot be written"),
        ("file/below", "cannot be written"),
    ):
        with pytest.raises(ValueError, match=rf"--hidden-states-dir .*{message}"):
            open_states(tmp_path / name, maker)
    assert (tmp_path / "other" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_states": "device", "lora_rank": 4}, r"hidden_states: device .*lora_rank 4 .*--hidden-states online, or --lora-rank 0"),
        ({"hidden_states": "disk"}, "hidden_states: disk needs a folder: add --hidden-states-dir"),
        ({"hidden_states_dir": "x"}, "hidden_states_dir: goes with --hidden-states disk alone"),
        ({"hidden_states": "disk", "hidden_states_dir": "out"}, "hidden_states_dir: out is where --output-dir out keeps its own files"),
        ({"hidden_states": "disk", "hidden_states_dir": "out/checkpoints/x"}, "keeps its own files"),
    ],
)
def test_options_that_do_not_fit_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(output_dir="out", data=["x"], **options)
