"""The comparison of objectives: its errors and verdicts by hand, and two runs of a tiny model through the real launcher."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tyro

from infer.acceptance_stats import AcceptanceStats
from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.prompts import encode_chat, load_prompts
from infer.tree_spec import BeamTree
from medusa_heads import base_model
from medusa_heads.checkpoint import HeadsCheckpoint, load_heads, save_heads
from scripts import compare_objectives
from scripts.compare_objectives import CONDITIONS, CompareObjectives, make_report, print_report
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model, tiny_tokenizer
from train.__main__ import main
from train.run_state import Validations, save_checkpoint

WORDS = ("the", "cat", "sat", "on", "mat", "and", "dog", "ran", "to", "other", "side", "of", "house", "what", "is", "answer")
TRAINING = "num_heads: 2\nmax_length: 64\npack_length: 64\nbatch_size: 2\nnum_workers: 0\nlearning_rate: 0.05\nlog_every: 100\n"

Counts = list[tuple[int, int]]  # base forwards and accepted tokens of each prompt


def run_of(chosen: Counts, last: Counts) -> dict[str, Any]:
    """A run that found these counts under every condition, on a validation file too."""
    return {
        kind: {c: {"bench": counts, "validation": [(1, 9)]} for c in CONDITIONS} for kind, counts in (("chosen", chosen), ("last", last))
    }


def test_the_report_ranks_and_finds_a_choice_that_fell_behind(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = [(10, 20), (10, 22), (10, 18)], [(10, 10), (10, 11), (10, 9)]
    runs = {"ce-decay": [run_of(bad, [(10, 12), (10, 12), (10, 12)]), run_of(bad, bad)], "kl-decay": [run_of(good, good), run_of(bad, bad)]}
    report = make_report(runs, bench=["bench"])
    first, second = report["ranking"]["T=1"]
    assert (first["heads"], first["mean"], first["behind"]) == ("kl-decay", pytest.approx(2.5), 0)
    assert (second["heads"], second["mean"], second["behind"], second["standard_error"]) == ("ce-decay", 2.0, 0.5, pytest.approx(0.5))
    row = next(r for r in report["rows"] if (r["heads"], r["condition"], r["file"]) == ("ce-decay", "T=0", "bench"))
    assert row["by_seed"] == [2.0, 2.0] and row["standard_error"] == 0 and row["last"] == pytest.approx(2.1)
    assert row["chosen_minus_last"] == pytest.approx(-0.1) and row["its_standard_error"] == pytest.approx(0.05 / math.sqrt(3))
    assert {r["heads"] for r in report["chosen_below_last"]} == {"ce-decay"} and len(report["chosen_below_last"]) == 3
    runs["ce-decay"][0] = run_of(bad, [(10, 10), (10, 14), (10, 8)])  # as often above as below
    assert not make_report(runs, bench=["bench"])["chosen_below_last"]
    print_report(report)
    shown = capsys.readouterr().out
    assert "T=0, mean of the bench files: kl-decay 2.500 wins; then ce-decay 2.000 (-0.500 ± 0.500)" in shown and ": 3 rows" in shown


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line for a tiny base, 24 conversations, and two files of prompts."""
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(tmp_path / "cache"))
    tiny_model("llama").save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    chooser = random.Random(0)
    texts = [[" ".join(chooser.choices(WORDS, k=6)) for _ in range(2)] for _ in range(24)]
    rows = [[{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)] for pair in texts]
    for name, part in {"data": rows, "validation": [row[:1] for row in rows[:3]], "bench": [row[:1] for row in rows[3:8]]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"id": str(i), "messages": row}) + "\n" for i, row in enumerate(part)))
    (tmp_path / "training.yaml").write_text(TRAINING)
    given = {name: tmp_path / f"{name}.jsonl" for name in ("data", "validation", "bench")}
    given |= {"base": tmp_path / "base", "config": tmp_path / "training.yaml", "output": tmp_path / "out"}
    options = ["--max-steps", "4", "--max-new-tokens", "8", "--device", "cpu", "--limit", "4", "--seeds", "0"]
    return [*(word for name, path in given.items() for word in (f"--{name}", str(path))), *options]


def test_the_last_heads_are_those_of_the_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And both are decoded only where the choice was another one."""
    model = tiny_model("llama")
    chosen, last = (random_heads(model, seed=seed) for seed in (1, 2))
    save_heads(chosen, tmp_path, card="")
    state = {"heads": last.state_dict(), "optimizer": {}}
    decoded: list[torch.Tensor] = []

    def counts(self: CompareObjectives, checkpoint: HeadsCheckpoint, *_: Any) -> int:
        decoded.append(checkpoint.heads.weight.clone())
        return len(decoded)

    monkeypatch.setattr(CompareObjectives, "counts", counts)
    command = CompareObjectives(data=[], validation=tmp_path, bench=[], output=tmp_path, max_steps=6)
    save_checkpoint(tmp_path, 6, state, {}, 1, validations=Validations().add(3, ((10, 5),)).add(6, ((10, 4),)))
    for _ in range(2):  # the second time it is read
        assert command.decoded(tmp_path, model, {}) == {"steps": {"chosen": 3, "last": 6}, "chosen": 1, "last": 2}
    assert len(decoded) == 2 and torch.equal(decoded[0], chosen.weight) and torch.equal(decoded[1], last.weight)
    (tmp_path / "decoded.json").unlink()
    save_checkpoint(tmp_path, 6, state, {}, 1, validations=Validations().add(3, ((10, 3),)).add(6, ((10, 4),)))
    assert command.decoded(tmp_path, model, {}) == {"steps": {"chosen": 6, "last": 6}, "chosen": 3, "last": 3}


@pytest.mark.slow
def test_trains_decodes_and_repeats_nothing(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first objective by the real launcher, the second in this process."""
    out = tmp_path / "out"
    tyro.cli(CompareObjectives, args=[*arguments, "--objectives", "ce"]).run()
    before = {path: path.stat().st_mtime_ns for path in (out / "ce-decay-seed0").iterdir()}
    commands: list[list[str]] = []

    def train(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=main(command[command.index("train") + 1 :]))

    monkeypatch.setattr(compare_objectives, "subprocess", SimpleNamespace(run=train))
    capfd.readouterr()
    tyro.cli(CompareObjectives, args=[*arguments, "--objectives", "ce", "tv"]).run()
    printed = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert printed == json.loads((out / "report.json").read_text())
    assert len(commands) == 1 and "--objective=tv" in commands[0] and {path: path.stat().st_mtime_ns for path in before} == before
    rows = {(row["heads"], row["condition"], Path(row["file"]).name): row for row in printed["rows"]}
    assert {key[0] for key in rows} == {"ce-decay", "tv-decay"} and len(rows) == 2 * 3 * 2 and set(printed["ranking"]) == set(CONDITIONS)

    model, tokenizer = base_model.load_base(str(tmp_path / "base"))
    prompts = [encode_chat(tokenizer, prompt.messages) for prompt in load_prompts(tmp_path / "bench.jsonl", 4)]
    generator = Generator(model, HeadsDrafter(model, load_heads(out / "tv-decay-seed0", model).heads, BeamTree(16)))
    stats = sum((answer.stats for answer in generator.generate(prompts, max_new_tokens=8)), AcceptanceStats())
    assert rows["tv-decay", "T=0", "bench.jsonl"]["by_seed"] == [stats.mean_acceptance_length]

    with pytest.raises(ValueError, match=r"--output .*out holds results of other settings \(max_new_tokens\)"):
        tyro.cli(CompareObjectives, args=[*arguments, "--max-new-tokens", "9"]).run()


def test_a_run_that_fails_is_named(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    failing = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=2))
    monkeypatch.setattr(compare_objectives, "subprocess", failing)
    with pytest.raises(ValueError, match="training ce-decay-seed0 ended with status 2"):
        tyro.cli(CompareObjectives, args=arguments).run()


def test_a_folder_holds_one_data_set_once_training_began(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then, a mistyped option is mended by the right one."""

    def begin(command: list[str], **_: Any) -> SimpleNamespace:
        (tmp_path / "out/ce-decay-seed0").mkdir(exist_ok=True)
        (tmp_path / "out/ce-decay-seed0/history.jsonl").touch()
        return SimpleNamespace(returncode=2)

    monkeypatch.setattr(compare_objectives, "subprocess", SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=2)))
    for steps in ("5", "4"):  # the first by mistake
        with pytest.raises(ValueError, match="ended with status 2"):
            tyro.cli(CompareObjectives, args=[*arguments, "--max-steps", steps]).run()
    monkeypatch.setattr(compare_objectives, "subprocess", SimpleNamespace(run=begin))
    with pytest.raises(ValueError, match="ended with status 2"):
        tyro.cli(CompareObjectives, args=arguments).run()
    (tmp_path / "data.jsonl").write_text((tmp_path / "data.jsonl").read_text() * 2)
    with pytest.raises(ValueError, match=r"holds results of other settings \(the content of .*data\.jsonl\)"):
        tyro.cli(CompareObjectives, args=arguments).run()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--objectives", "kll", "--objectives kll: write some of ce, kl"),
        ("--slot-weights", "even", "--slot-weights even: write some of decay"),
        ("--validation", "absent.jsonl", "--validation absent.jsonl: no such file"),
    ],
)
def test_wrong_names_are_told_before_any_training(arguments: list[str], option: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tyro.cli(CompareObjectives, args=[*arguments, option, value]).run()
