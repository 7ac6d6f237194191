"""The proof of exactness: passes for an exact decoder, fails for a corrupted one, goes on after a kill."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.candidates import Candidates
from infer.generate import Generator
from infer.proof.exactness import check_answer, plain_answers, wrong_end
from infer.proof.setup import settings_of
from infer.target import GreedyTarget
from infer.verify import Verification
from medusa_heads.cli import run_command
from scripts.prove_exactness import ProveExactness
from tests.infer.test_generate import base_answer, prompts
from tests.save_tiny_models import FAMILIES, save_tiny_model
from tests.tiny_models import tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "scripts" / "exactness_prompts.jsonl"
MORE_PROMPTS = (PROMPTS, ROOT / "scripts" / "demo_prompts.jsonl", ROOT / "scripts" / "demo_bench_prompts.jsonl")
NUM_PROMPTS = 12


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of tiny bases with heads, made when asked for."""

    def save(family: str) -> dict[str, str]:
        return save_tiny_model(family, tmp_path_factory.mktemp("exactness") / family)

    return save


def proof(folders: dict[str, Any], output: Path, **options: Any) -> ProveExactness:
    defaults: dict[str, Any] = {"prompts": (PROMPTS,), "num_prompts": NUM_PROMPTS, "num_plain": 4, "max_new_tokens": 12, "device": "cpu"}
    return ProveExactness(output=output, **(folders | defaults | options))


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_differs(family: str, saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five trees, three batch sizes; the windows of 8 tokens are far shorter than the prompts."""
    command = proof(saved(family), tmp_path, prompts=MORE_PROMPTS, num_prompts=42)
    assert command.run() == 0
    found = last_line(capsys)
    assert found["num_prompts"] == 42 and found["num_tokens"] > 300
    assert (found["num_different_tokens"], found["num_wrong_ends"], found["differences"]) == (0, 0, [])
    assert found["plain"] == {"num_prompts": 4, "num_different_answers": 0, "different": []}
    assert {(cell["tree"], cell["batch_size"]) for cell in found["cells"]} == {(t, s) for t in command.trees for s in (1, 3, 8)}
    assert sum(cell["num_prompts"] for cell in found["cells"]) == 42
    assert {"hardware", "date", "sha256"} <= set(found) and {"versions", "commit", "dtype"} <= set(found["settings"])
    assert json.loads((tmp_path / "exactness.json").read_text()) == found


class WrongOnce:
    """Greedy verification whose bonus token is off by one in a single step."""

    def __init__(self, step: int) -> None:
        self.steps_left, self.verify = step, GreedyTarget.verify

    def __call__(
        self, target: GreedyTarget, logits_BNV: Tensor, candidates: Candidates, texts: Sequence[Sequence[int]], running: Sequence[bool]
    ) -> Verification:
        found = self.verify(target, logits_BNV, candidates, texts, running)
        self.steps_left -= 1
        return replace(found, bonus_B=(found.bonus_B + 1) % logits_BNV.shape[-1]) if not self.steps_left else found


def test_one_wrong_step_is_reported(
    saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a single corrupted verification must fail the proof."""
    wrong = WrongOnce(step=3)
    monkeypatch.setattr(GreedyTarget, "verify", lambda *arguments: wrong(*arguments))
    assert proof(saved("llama"), tmp_path, trees=("beam:8",), batch_sizes=(1,)).run() == 1
    found = last_line(capsys)
    assert found["num_different_tokens"] == 1 and found["plain"]["num_different_answers"] == 1
    (difference,) = found["differences"]
    assert difference["emitted"] == (difference["expected"] + 1) % 300 and difference["margin"] > 0
    assert (difference["prompt"], difference["tree"]) == (0, "beam:8")


def test_a_killed_run_goes_on(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = proof(saved("llama"), tmp_path, trees=("chain", "beam:8"), batch_sizes=(1,), num_prompts=6)
    generate, calls = Generator.generate, []

    def counted(self: Generator, *arguments: Any, **options: Any) -> Any:
        calls.append(self)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return generate(self, *arguments, **options)

    monkeypatch.setattr(Generator, "generate", counted)
    with pytest.raises(KeyboardInterrupt):
        command.run()
    assert sorted(path.name for path in (tmp_path / "cells").iterdir()) == ["batch1_chain.json"]
    assert command.run() == 0 and len(calls) == 5 + 3, "the first cell's three prompts are not decoded again"
    found = last_line(capsys)
    assert command.run() == 0 and len(calls) == 5 + 3
    again = last_line(capsys)
    assert again["num_prompts"] == 6 and {k: v for k, v in again.items() if k != "date"} == {k: v for k, v in found.items() if k != "date"}
    with pytest.raises(ValueError, match=r"holds results of other settings \(max_new_tokens\): choose another folder"):
        replace(command, max_new_tokens=5).run()


@pytest.mark.slow
def test_several_processes_share_the_cells(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = saved("qwen3")
    cells = ["--trees", "beam:8", "--batch-sizes", "1", "3", "--num-prompts", "8", "--num-plain", "2", "--max-new-tokens", "8"]
    files = ["--prompts", str(PROMPTS), "--output", str(tmp_path), "--base", folders["base"], "--heads", folders["heads"]]
    command = [*files, *cells, "--device", "cpu", "--num-processes", "2"]
    assert run_command("scripts.prove_exactness:ProveExactness", command, prog="prove_exactness.py") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["num_prompts"] == 8 and found["num_different_tokens"] == 0 and "3/3" in captured.err


def test_cells_belong_to_files_in_their_order_and_to_what_base_heads_and_trees_hold(tmp_path: Path) -> None:
    names = {name: tmp_path / name / "same.json" for name in ("a", "b", "tree")} | {
        kind: tmp_path / kind / "model.safetensors" for kind in ("base", "heads")
    }
    for name, path in names.items():
        path.parent.mkdir()
        path.write_text(name)
    (tmp_path / "heads/config.json").write_text("{}")
    folders = {kind: str(tmp_path / kind) for kind in ("base", "heads")}
    options = folders | {"trees": [str(names["tree"])], "prompts": [names["a"], names["b"]]}
    first = settings_of(options)
    assert settings_of(options) == first != settings_of(options | {"prompts": [names["b"], names["a"]]})
    for path in names.values():
        before = path.read_text()
        path.write_text("changed")
        assert settings_of(options) != first
        path.write_text(before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_prompts": 13}, "--num-prompts 13, but --prompts hold 12: ask for fewer or give more files"),
        ({"num_plain": 13}, "--num-plain 13 must lie between 0 and the 12 of --num-prompts"),
        ({"trees": ("auto",)}, "--trees auto is chosen by measurement: name the trees"),
        ({"num_processes": 0, "heads": "pretrained"}, "--num-processes 0: must be at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        proof({"base": "unused", "heads": "unused"}, tmp_path, **options).run()


# ---------------------------------------------------------------- the reference itself


def test_the_reference_finds_every_wrong_token() -> None:
    model, (prompt,) = tiny_model("gemma3"), prompts((11,))
    answer = base_answer(model, prompt, 10)
    limits: dict[str, Any] = {"max_new_tokens": 10, "eos_ids": ()}
    right = check_answer(model, prompt, answer, **limits)
    assert right.is_exact and right.num_tokens == 10 and right.smallest_margin > 0
    for place in range(10):
        wrong = [*answer[:place], (answer[place] + 1) % 300, *answer[place + 1 :]]
        first = check_answer(model, prompt, wrong, **limits).differences[0]
        assert (first.position, first.emitted, first.expected) == (place, wrong[place], answer[place]) and first.margin > 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [([5, 2], None), ([5, 6, 7], None), ([5, 6, 2], None), ([5, 2, 7], "goes on"), ([5], "stops after 1"), ([5, 6, 7, 8], "more than 3")],
)
def test_where_an_answer_must_end(answer: list[int], message: str | None) -> None:
    found = wrong_end(answer, 3, (2,))
    assert found is None if message is None else found is not None and message in found


@torch.inference_mode()
@pytest.mark.compat
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_plain_answers_are_those_of_generate_one_by_one(family: str) -> None:
    model, texts = tiny_model(family), prompts()
    eos = base_answer(model, texts[0], 16, eos=77)[4]
    expected = [base_answer(model, text, 16, eos=eos) for text in texts]
    assert plain_answers(model, tiny_tokenizer(), texts, max_new_tokens=16, eos_ids=(eos,)) == expected
    assert min(map(len, expected)) < 16


@pytest.mark.slow
def test_the_shipped_heads_on_a_few_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"trees": ("beam:8",), "batch_sizes": (3,), "num_prompts": 3, "num_plain": 1}
    assert proof({"base": "embedded"}, tmp_path, **options).run() == 0
    found = last_line(capsys)
    assert found["num_tokens"] > 20 and found["cells"][0]["mean_acceptance_length"] > 1.2
