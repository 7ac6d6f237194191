"""Options of a training run: YAML, then flags; every shipped YAML loads, every mistake names its fix."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from train.command_line import parse_command, yaml_arguments
from train.config import TrainConfig, parse_config
from train.draft_model_config import DraftModelConfig

CONFIGS = Path(__file__).parents[2] / "configs"
TRAIN_FILES = sorted((CONFIGS / "train").glob("*.yaml"))
ACCELERATE_FILES = sorted((CONFIGS / "accelerate").glob("*.yaml"))


def write(folder: Path, text: str) -> str:
    (folder / "run.yaml").write_text(text)
    return str(folder / "run.yaml")


def test_there_are_shipped_files() -> None:
    assert TRAIN_FILES and ACCELERATE_FILES


@pytest.mark.parametrize("path", TRAIN_FILES, ids=lambda path: path.name)
def test_every_shipped_training_file_means_what_it_says(path: Path) -> None:
    command = DraftModelConfig if "draft_model" in path.name else TrainConfig
    config = parse_command(command, ["--config", str(path)], prog="train")
    for name, value in yaml.safe_load(path.read_text()).items():
        assert getattr(config, name) == value


@pytest.mark.parametrize("path", ACCELERATE_FILES, ids=lambda path: path.name)
def test_every_shipped_accelerate_file_loads(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert config.num_processes == yaml.safe_load(path.read_text())["num_processes"]


def test_defaults_hold_where_nothing_is_said(tmp_path: Path) -> None:
    file = write(tmp_path, "output_dir: out\ndata: [a.jsonl]\n")
    assert parse_config(["--config", file]) == TrainConfig(output_dir="out", data=["a.jsonl"])


FLAGS = ["--data", "c.jsonl", "--seed", "7", "--no-own-lm-head"]


@pytest.mark.parametrize("flags_first", [True, False])
@pytest.mark.parametrize(
    "flags", [FLAGS, ["--no-own-lm-head", "--seed=7", "--data", "c.jsonl"], ["--seed", "7", "--no-own_lm_head", "--data=c.jsonl"]]
)
def test_flags_win_over_the_file_in_any_order(tmp_path: Path, flags: list[str], flags_first: bool) -> None:
    file = ["--config", write(tmp_path, "output_dir: out\ndata: [a.jsonl, b.jsonl]\nown_lm_head: true\nseed: 3\nepochs: 2\n")]
    config = parse_config(flags + file if flags_first else file + flags)
    assert (config.data, config.seed, config.own_lm_head, config.epochs) == (["c.jsonl"], 7, False, 2)


def test_a_list_flag_may_hold_several_values(tmp_path: Path) -> None:
    file = write(tmp_path, "output_dir: out\ndata: [a.jsonl]\n")
    assert parse_config(["--data", "x.jsonl", "y.jsonl", "--config", file]).data == ["x.jsonl", "y.jsonl"]


def test_a_list_flag_given_twice_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "output_dir: out\ndata: [a.jsonl]\n")
    with pytest.raises(ValueError, match=r"--data is given 2 times.*--data A B"):
        parse_config(["--data", "x.jsonl", "--config", file, "--data=y.jsonl"])


@pytest.mark.parametrize("value", ["true", "false", "True", "FALSE"])
def test_bool_options_can_be_set_either_way(tmp_path: Path, value: str) -> None:
    file = write(tmp_path, f"output_dir: out\ndata: [a.jsonl]\nown_lm_head: {value}\n")
    assert parse_config(["--config", file]).own_lm_head is (value.lower() == "true")
    assert parse_config(["--config", file, "--own-lm-head"]).own_lm_head
    assert not parse_config(["--config", file, "--no-own-lm-head"]).own_lm_head


def test_a_switch_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--config", write(tmp_path, "output_dir: out\ndata: [a.jsonl]\nown_lm_head: 1\n")])


def test_numbers_without_a_point_are_numbers(tmp_path: Path) -> None:
    file = write(tmp_path, "output_dir: out\ndata: [a.jsonl]\nlearning_rate: 5e-4\n")
    assert parse_config(["--config", file]).learning_rate == 5e-4


def test_none_takes_back_what_the_file_sets(tmp_path: Path) -> None:
    file = write(tmp_path, "output_dir: out\ndata: [a.jsonl]\ninit_heads: pretrained\nlimit: null\n")
    assert parse_config(["--config", file]).init_heads == "pretrained"
    assert parse_config(["--config", file, "--init-heads", "None"]).init_heads is None
    assert parse_config(["--config", file]).limit is None


def test_a_later_file_wins_over_an_earlier_one(tmp_path: Path) -> None:
    first = write(tmp_path, "output_dir: out\ndata: [a.jsonl]\nseed: 1\n")
    (tmp_path / "second.yaml").write_text("seed: 2\n")
    assert parse_config(["--config", first, "--config", str(tmp_path / "second.yaml")]).seed == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "learning_rat.*did you mean 'learning_rate'"),
        ("- a\n- b", "expected `option: value` lines"),
        ("a: [", "not valid YAML"),
        ("a: " + "[" * 20_000, "not valid YAML"),
        ("seed: !!int x", "--config .* is not valid YAML"),
        ("project: !!timestamp x", "--config .* is not valid YAML"),
        ("on: 1", "unknown key 'on'$"),
        ("1: 2", "unknown key '1'$"),
        ("null: 3", "unknown key 'null'$"),
        ("seed: 1\nlimit: 3\nseed: 2", "not valid YAML: seed is given twice"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        yaml_arguments(TrainConfig, write(tmp_path, text))


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--config nowhere.yaml: no such file"):
        parse_config(["--config", "nowhere.yaml"])
    with pytest.raises(ValueError, match="--config needs a file name"):
        parse_config(["--config"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_heads", 0), ("epochs", 0), ("max_steps", 0), ("held_out", -1), ("slot_decay", 0.0), ("learning_rate", 0.0)),
        *(("max_grad_norm", 0.0), ("max_grad_norm", -1.0), ("lk_eta", -1.0), ("weight_decay", -0.1), ("num_workers", -1), ("limit", 0)),
        *(("seed", -1), ("seed", 2**32), ("draft_vocab_size", 1), ("slot_decay", 1e-300), ("num_heads", 10**12)),
        *((name, value) for name in ("epochs", "learning_rate", "lora_alpha", "lk_eta") for value in (math.nan, math.inf)),
        ("epochs", 1e308),
        ("pack_length", 10**12),
    ],
)
def test_impossible_values_name_their_option(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        TrainConfig(output_dir="out", data=["a.jsonl"], **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("objective", "ce_l2", "objective: unknown 'ce_l2' \\(did you mean 'ce_l1'\\?\\); known are ce, kl, tv, lk, ce_l1"),
        ("slot_weights", "dpace", "slot_weights: unknown 'dpace' \\(did you mean 'd_pace'\\?\\); known are decay, uniform, d_pace"),
    ],
)
def test_unknown_names_bring_a_suggestion(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(output_dir="out", data=["a.jsonl"], **{name: value})  # type: ignore[arg-type]


def test_a_row_must_hold_a_whole_conversation() -> None:
    with pytest.raises(ValueError, match="pack_length: 512 is below max_length 1024"):
        TrainConfig(output_dir="out", data=["a.jsonl"], pack_length=512)


@pytest.mark.parametrize("value", ["0123", "'0123'", "1_000", "1.10", "2024-13-45", "on", "7", "[0123]"])
def test_text_is_taken_as_it_is_written(tmp_path: Path, value: str) -> None:
    """YAML reads the first one, a commit, as the octal of 83."""
    name, written = ("data" if value[0] == "[" else "revision"), value.strip("'[]")
    config = parse_config(["--config", write(tmp_path, f"output_dir: out\n{name}: {value}\n" + ("" if name == "data" else "data: [d]\n"))])
    assert getattr(config, name) == ([written] if name == "data" else written)


@pytest.mark.parametrize("value", ["{a: 1}", "[[1]]", "[{a: 1}]"])
def test_nested_values_are_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "c.yaml").write_text(f"output_dir: x\ndata: {value}\n")
    with pytest.raises(ValueError, match="data must be a plain value or a list"):
        parse_config(["--config", str(tmp_path / "c.yaml")])


def test_null_is_as_if_not_written(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("output_dir: x\ndata: [d]\nmax_steps: null\nbase: null\n")
    config = parse_config([f"--config={tmp_path / 'c.yaml'}"])
    assert config.max_steps is None and config.base == "embedded"
    (tmp_path / "c.yaml").write_text("output_dir: null\ndata: [d]\n")
    with pytest.raises(SystemExit):
        parse_config(["--config", str(tmp_path / "c.yaml")])


def test_the_error_of_a_run_is_the_last_thing_the_launcher_shows(tmp_path: Path) -> None:
    """As the README starts it."""
    lines = (CONFIGS.parent / "README.md").read_text().splitlines()
    words = next(line for line in lines if line.strip().startswith("accelerate launch") and "-m train " in line).split()
    options = words[2 : words.index("train") + 1]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, "--config", str(tmp_path / "nowhere.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=CONFIGS.parent, timeout=120)
    assert ended.returncode and ended.stderr.splitlines()[-1] == f"error: --config {tmp_path / 'nowhere.yaml'}: no such file"
