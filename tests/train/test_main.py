"""`python -m train` end to end on a tiny saved model: heads, resume after kill -9, trackers, refusals."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.tree_builders import static_tree
from medusa_heads import base_model
from medusa_heads.checkpoint import load_heads
from medusa_heads.lock import lock_output
from medusa_heads.replacing import LOCK_NAME
from tests.tiny_models import tiny_model, tiny_tokenizer
from train.__main__ import main, run
from train.config import parse_config
from train.history import ACCEPTANCE, FILE_NAME, read_history
from train.run_state import checkpoint_folders
from train.training_data import check_token_ids, split_by_id

WORDS = ("the", "cat", "sat", "on", "mat", "and", "dog", "ran", "to", "other", "side", "of", "house", "what", "is", "answer")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, its tokenizer and 40 conversations."""
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(tmp_path / "cache"))
    tiny_model("llama").save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    chooser = random.Random(0)
    with (tmp_path / "data.jsonl").open("w") as file:
        for index in range(40):
            question, answer = (" ".join(chooser.choices(WORDS, k=12)) for _ in range(2))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"row-{index}", "messages": messages}) + "\n")
    return tmp_path


def arguments(workspace: Path, *extra: str) -> list[str]:
    base = ["--base", str(workspace / "base"), "--data", str(workspace / "data.jsonl"), "--output-dir", str(workspace / "out")]
    sizes = ["--num-heads", "2", "--max-length", "128", "--pack-length", "128", "--batch-size", "2", "--num-workers", "0"]
    return [*base, *sizes, "--log-every", "1", *extra]


def test_the_card_says_which_heads_were_chosen(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The written heads are those of the best validation, or the last with `--keep last`."""
    prompts = workspace / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"messages": [{"role": "user", "content": f"the cat {word}"}]}) + "\n" for word in WORDS))
    lengths = iter([150, 180, 170, 150, 180, 170])
    monkeypatch.setattr("train.acceptance.decode", lambda *args, **options: torch.tensor([[100, next(lengths) - 100]] * 4))
    options = ("--max-steps", "3", "--validate-every", "1", "--validation-prompts", str(prompts), "--num-validation-prompts", "4")
    model, _ = base_model.load_base(str(workspace / "base"), dtype=torch.float32)
    written = {}
    for keep in ("best", "last"):
        run(parse_config(arguments(workspace, *options, "--keep", keep, "--overwrite")))
        written[keep] = load_heads(workspace / "out", model).heads.weight
        card = (workspace / "out" / "README.md").read_text()
        assert "decoded on validation (4 prompts, beam:16, up to 64 new tokens, greedy)" in card
        assert f"| chosen step | {2 if keep == 'best' else 3} |" in card
        assert "| acceptance length of the best | 1.8 (step 2) |" in card and "| acceptance length of the last | 1.7 (step 3) |" in card
    state = {step: torch.load(workspace / "out" / "checkpoints" / f"step-{step}" / "state.pt")["heads"]["weight"] for step in (2, 3)}
    assert torch.equal(written["best"], state[2]) and torch.equal(written["last"], state[3]) and not torch.equal(state[2], state[3])
    assert (workspace / "out" / "history.png").exists() and "picture of the run" in capsys.readouterr().out


def test_without_matplotlib_there_is_a_word_and_no_picture(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run(parse_config(arguments(workspace, "--max-steps", "1")))
    assert "no picture of the run: drawing a picture needs matplotlib" in capsys.readouterr().err
    assert (workspace / "out" / "config.json").exists() and not (workspace / "out" / "history.png").exists()


def test_a_tracker_that_does_not_start_or_end(workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.tracking import TensorBoardTracker

    def fail(*args: object, **options: object) -> None:
        raise ConnectionError("nobody listens")

    options = ("--max-steps", "1", "--log-with", "tensorboard")
    with monkeypatch.context() as patch:
        patch.setattr("accelerate.Accelerator.init_trackers", fail)
        assert "--log-with tensorboard does not start (ConnectionError('nobody listens'))" in refusal(workspace, capsys, *options)
    monkeypatch.setattr(TensorBoardTracker, "finish", fail)
    assert main(arguments(workspace, *options)) == 0
    assert "warning: the tracker failed (ConnectionError('nobody listens'))" in capsys.readouterr().err


@pytest.mark.compat
def test_trains_measures_and_writes_heads_that_decode(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--held-out", "5", "--epochs", "2", "--learning-rate", "0.01", "--draft-vocab-size", "20")
    monkeypatch.setattr(sys, "argv", ["somewhere/train/__main__.py", *arguments(workspace, *options)])
    assert main() == 0
    model, tokenizer = base_model.load_base(str(workspace / "base"), dtype=torch.float32)
    checkpoint = load_heads(workspace / "out", model)
    assert checkpoint.config.num_heads == 2 and set(checkpoint.acceptance) == {1, 2, 4, 8, 16, 32, 64}
    assert checkpoint.draft_vocabulary is not None and len(checkpoint.draft_vocabulary) <= 20
    assert set(tokenizer.encode("the cat sat")[:2]) & set(checkpoint.draft_vocabulary.tolist())
    assert len(checkpoint.static_nodes) > 6 and checkpoint.acceptance[64] >= checkpoint.acceptance[1] >= 1
    card = (workspace / "out" / "README.md").read_text()
    assert "5" in card and sum(f"row-{i}" in card for i in range(40)) >= 5, "the card lists the held-out conversations"
    command = (workspace / "out" / "train_command.txt").read_text().splitlines()[0]
    assert command.startswith("python -m train --base") and "--held-out 5" in command
    generator = Generator(model, HeadsDrafter(model, checkpoint.heads, static_tree(checkpoint.static_nodes, 6)), tokenizer=tokenizer)
    prompt = tokenizer.encode("the cat sat on")
    assert (
        generator.generate([prompt], max_new_tokens=20)[0].token_ids == Generator(model).generate([prompt], max_new_tokens=20)[0].token_ids
    )
    assert main(arguments(workspace)) == 2
    assert "already holds finished heads" in capsys.readouterr().err


def test_fine_tunes_existing_heads(workspace: Path) -> None:
    run(parse_config(arguments(workspace, "--max-steps", "3")))
    first = torch.load(checkpoint_folders(workspace / "out")[-1] / "state.pt")["heads"]
    tuned = [*arguments(workspace, "--max-steps", "1", "--init-heads", str(workspace / "out"), "--learning-rate", "1e-9")]
    tuned[tuned.index("--output-dir") + 1] = str(workspace / "tuned")
    run(parse_config(tuned))
    second = torch.load(checkpoint_folders(workspace / "tuned")[-1] / "state.pt")["heads"]
    assert torch.allclose(first["weight"], second["weight"], atol=1e-6) and first["weight"].abs().sum() > 0


def start(workspace: Path, *extra: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MEDUSA_HEADS_CACHE": str(workspace / "cache")}
    command = [sys.executable, "-m", "train", *arguments(workspace, *extra)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_heads(workspace: Path) -> None:
    options = ("--epochs", "16", "--save-every", "10", "--learning-rate", "0.01", "--held-out", "5", "--validate-every", "40")
    process = start(workspace, *options)
    deadline = time.monotonic() + 120
    while not checkpoint_folders(workspace / "out") and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert checkpoint_folders(workspace / "out"), "no checkpoint appeared"
    assert not (workspace / "out" / "config.json").exists(), "the run ended before it was killed"
    resumed = start(workspace, *options)
    output, _ = resumed.communicate(timeout=180)
    assert resumed.returncode == 0 and "resuming from" in output, output
    whole = arguments(workspace, *options)
    whole[whole.index("--output-dir") + 1] = str(workspace / "whole")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run(parse_config(whole))
    torch.set_num_threads(threads)
    model, _ = base_model.load_base(str(workspace / "base"), dtype=torch.float32)
    a, b = load_heads(workspace / "out", model).heads, load_heads(workspace / "whole", model).heads
    assert torch.equal(a.weight, b.weight) and torch.equal(a.bias, b.bias)
    histories = [read_history(workspace / name / FILE_NAME) for name in ("out", "whole")]
    for row in (row for rows in histories for row in rows):
        row.pop("response_tokens_per_second", None)
    assert histories[0] == histories[1] and sum(ACCEPTANCE in row for row in histories[0]) == math.ceil(histories[0][-1]["step"] / 40)


def test_wandb_offline(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(workspace / "wandb"), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    (workspace / "wandb").mkdir()
    run(parse_config(arguments(workspace, "--max-steps", "2", "--log-with", "wandb")))
    assert list((workspace / "wandb").rglob("*.wandb")), "no offline run was written"


def test_wandb_is_imported_only_when_chosen(workspace: Path) -> None:
    code = "import sys; from train.__main__ import main; status = main(sys.argv[1:]); sys.exit(10 if 'wandb' in sys.modules else status)"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MEDUSA_HEADS_CACHE": str(workspace / "cache")}
    command = [sys.executable, "-c", code, *arguments(workspace, "--max-steps", "1")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"exit status {result.returncode} (10: wandb was imported)\n{result.stderr}"


@pytest.mark.distributed
def test_two_processes_train_measure_and_write(workspace: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "MEDUSA_HEADS_CACHE": str(workspace / "cache")}
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [sys.executable, *launcher, "-m", "train", *arguments(workspace, "--max-steps", "2", "--held-out", "5")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
    model, _ = base_model.load_base(str(workspace / "base"), dtype=torch.float32)
    assert load_heads(workspace / "out", model).acceptance


def test_tensorboard_takes_the_options(workspace: Path) -> None:
    pytest.importorskip("tensorboard")
    run(parse_config(arguments(workspace, "--max-steps", "2", "--log-with", "tensorboard")))
    assert list((workspace / "out").rglob("events.out.tfevents*"))


def test_overwrite_leaves_nothing_of_the_earlier_heads(workspace: Path) -> None:
    run(parse_config(arguments(workspace, "--max-steps", "2", "--held-out", "5", "--draft-vocab-size", "20")))
    written = {path.name for path in (workspace / "out").iterdir()}
    run(parse_config(arguments(workspace, "--max-steps", "1", "--overwrite")))
    assert {path.name for path in (workspace / "out" / "previous").iterdir()} == written
    model, _ = base_model.load_base(str(workspace / "base"), dtype=torch.float32)
    now, before = load_heads(workspace / "out", model), load_heads(workspace / "out" / "previous", model)
    assert now.draft_vocabulary is None and not now.static_nodes
    assert before.draft_vocabulary is not None and before.static_nodes


def test_overwrite_keeps_what_no_run_wrote(workspace: Path) -> None:
    """The folder of all runs, named by mistake: what it moved the first time it deleted the second time."""
    out = workspace / "out"
    for name in ("other-run/config.json", "notes.txt", "tree.json"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("[[0]]")
    options = ("--max-steps", "1", "--overwrite", "--held-out", "5", "--validation-tree", str(out / "tree.json"))
    for _ in range(3):
        run(parse_config(arguments(workspace, *options)))
    assert all((out / name).exists() for name in ("other-run/config.json", "notes.txt", "tree.json"))
    assert (out / "previous" / "config.json").exists() and not (out / "previous" / "previous").exists()


@pytest.mark.parametrize("name", ["data", "init_heads"])
def test_overwrite_moves_nothing_that_the_run_reads(workspace: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    run(parse_config(arguments(workspace, "--max-steps", "1")))
    (inside := workspace / "out" / "data.jsonl").write_text((workspace / "data.jsonl").read_text())
    path = {"data": inside, "init_heads": workspace / "out"}[name]
    options = arguments(workspace, "--overwrite", "--init-heads", str(path) if name == "init_heads" else "None")
    assert main([*options[:3], str(path) if name == "data" else options[3], *options[4:]]) == 2
    found = " ".join(capsys.readouterr().err.split())
    assert f"{name}: {path} lies in --output-dir" in found and "--overwrite moves away" in found
    assert inside.exists() and (workspace / "out" / "config.json").exists()


def test_a_move_that_was_killed_is_finished_by_the_next_start(workspace: Path) -> None:
    """Else the run would go on from checkpoints of the one before, and write its heads as its own."""
    run(parse_config(arguments(workspace, "--max-steps", "2")))
    (workspace / "out" / ".previous").mkdir()
    (workspace / "out" / "config.json").rename(workspace / "out" / ".previous" / "config.json")
    run(parse_config(arguments(workspace, "--max-steps", "2", "--seed", "1")))
    earlier = workspace / "out" / "previous"
    assert (earlier / "config.json").exists() and checkpoint_folders(earlier) and not (workspace / "out" / ".previous").exists()


def test_interrupted_in_one_line(workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("train.trainer.Trainer.train", interrupted)
    assert main(arguments(workspace)) == 130 and "interrupted: the same command" in capsys.readouterr().err


def test_accelerates_variable_for_accumulation_changes_nothing(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are divided by what a window holds; accelerate would divide them again."""
    found = []
    for value in ("1", "1000"):
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", value)
        run(parse_config(arguments(workspace, "--max-steps", "2", "--overwrite")))
        found.append((workspace / "out" / "model.safetensors").read_bytes())
    assert found[0] == found[1]


def test_options_of_an_adapter_need_one(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "lora_targets: there is no adapter" in refusal(workspace, capsys, "--lora-targets", "q_proj")
    assert "lora_alpha: there is no adapter" in refusal(workspace, capsys, "--lora-alpha", "2")


def test_validation_rows_of_another_model_are_refused_before_training(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"id": "v", "input_ids": [5, 6, 99_999, 7, 8], "assistant_spans": [[1, 5]]}
    (workspace / "validation.jsonl").write_text(json.dumps(row) + "\n")
    found = refusal(workspace, capsys, "--max-steps", "1", "--validation", str(workspace / "validation.jsonl"))
    assert "conversation v holds token id 99999" in found


def test_a_first_window_without_a_target_to_propose(workspace: Path) -> None:
    """Its last head has no loss there, and no gradient; nothing is wrong."""
    with (workspace / "rare.jsonl").open("w") as file:
        for index in range(30):
            ids = [5, 6, 7, 40, 41, *((50 + index, 60 + index) if index % 2 else (42,))]
            file.write(json.dumps({"id": f"v{index}", "input_ids": ids, "assistant_spans": [[3, len(ids)]]}) + "\n")
    options = (
        "--num-heads",
        "3",
        "--max-length",
        "8",
        "--pack-length",
        "8",
        "--batch-size",
        "1",
        "--draft-vocab-size",
        "3",
        "--max-steps",
        "1",
    )
    for seed in range(6):
        given = arguments(workspace, *options, "--overwrite", "--seed", str(seed))
        run(parse_config([*given[:3], str(workspace / "rare.jsonl"), *given[4:]]))


def test_validation_too_short_to_measure_costs_nothing_but_the_figures(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a"}]}
    (workspace / "short.jsonl").write_text(json.dumps(short) + "\n")
    assert main(arguments(workspace, "--max-steps", "1", "--validation", str(workspace / "short.jsonl"))) == 0
    assert "without measured acceptance" in capsys.readouterr().err and (workspace / "out" / "config.json").exists()


def test_two_runs_into_one_folder_are_refused(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = lock_output((workspace / "out").resolve(), "--output-dir")
    assert "another run is writing there" in refusal(workspace, capsys)
    lock.release()
    assert main(arguments(workspace, "--max-steps", "1")) == 0


def test_what_killed_runs_left_in_the_output_is_removed(workspace: Path) -> None:
    left = [workspace / "out" / name for name in (".finished-writing-x", "checkpoints/.step-77-writing-x")]
    for path in left:
        (path / "new").mkdir(parents=True)
        (path / LOCK_NAME).touch()
    run(parse_config(arguments(workspace, "--max-steps", "1")))
    assert not any(path.exists() for path in left)
    assert not [path for path in (workspace / "out").rglob(".*") if "writing" in path.name]


def test_heads_load_on_the_base_in_any_type(workspace: Path) -> None:
    run(parse_config(arguments(workspace, "--max-steps", "1")))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model, _ = base_model.load_base(str(workspace / "base"), dtype=dtype)
        assert load_heads(workspace / "out", model).heads.weight.dtype == dtype


def refusal(workspace: Path, capsys: pytest.CaptureFixture[str], *extra: str) -> str:
    """What is printed for options that are refused, line breaks removed."""
    try:
        status: object = main(arguments(workspace, *extra))
    except SystemExit as error:  # refused while parsing
        status = error.code
    assert status == 2
    return " ".join(capsys.readouterr().err.split())


def test_refusals_name_the_option(workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "num_heads is 0" in refusal(workspace, capsys, "--num-heads", "0")
    assert "cannot be written" in refusal(workspace, capsys, "--output-dir", str(workspace / "data.jsonl" / "x"))
    assert "tokenizer could not be loaded" in refusal(workspace, capsys, "--base", str(workspace / "nope"))
    assert "held_out" in refusal(workspace, capsys, "--held-out", "40")
    assert "beyond the base model's context" in refusal(workspace, capsys, "--max-length", "2000", "--pack-length", "2000")
    assert "draft_vocab_size: own LM heads" in refusal(workspace, capsys, "--own-lm-head", "--draft-vocab-size", "20")
    assert "pack_length" in refusal(workspace, capsys, "--pack-length", "16")
    assert "architecture 'medussa'" in refusal(workspace, capsys, "--architecture", "medussa")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'medusa-heads[trackio]'" in refusal(workspace, capsys, "--log-with", "trackio")


def test_a_data_cache_that_cannot_be_locked_is_explained(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workspace / "cache" / "tokenized" / "prepare.lock").mkdir(parents=True)  # as good as a lock of somebody else
    assert "cannot write the data cache" in (found := refusal(workspace, capsys)) and "MEDUSA_HEADS_CACHE" in found


def test_unknown_tracker_is_a_usage_error(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "mlflow" in refusal(workspace, capsys, "--log-with", "mlflow")


def test_split_depends_on_ids_alone() -> None:
    import datasets

    rows: Any = datasets.Dataset.from_dict({"id": [f"r{i}" for i in range(20)], "x": list(range(20))})
    _, held = split_by_id(rows, 6)
    _, again = split_by_id(rows.shuffle(seed=3), 6)
    assert sorted(held["id"]) == sorted(again["id"]) and len(held) == 6
    train, held = split_by_id(rows, 6)
    assert not set(train["id"]) & set(held["id"]) and len(train) == 14


@pytest.mark.parametrize("num_held_out", [1, 4, 6])
def test_samples_of_one_prompt_are_never_on_both_sides(num_held_out: int) -> None:
    rows: Any = datasets.Dataset.from_dict({"id": [f"r{i}#{sample}" for i in range(10) for sample in range(3)]})
    train, held = (part["id"] for part in split_by_id(rows, num_held_out))
    assert len(held) == num_held_out and 27 - num_held_out < len(train) <= 30 - num_held_out
    assert not {name.split("#")[0] for name in train} & {name.split("#")[0] for name in held}


def test_token_ids_of_another_model_are_named() -> None:
    rows = datasets.Dataset.from_dict({"id": ["a", "b"], "input_ids": [[1, 2], [3, 99_999, 4]]})
    check_token_ids(rows, 100_000)
    with pytest.raises(ValueError, match="conversation b holds token id 99999, and the base has 300 tokens: it was answered by"):
        check_token_ids(rows, 300)
