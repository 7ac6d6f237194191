"""The script that compares exact verifiers, on a tiny base: which ways it runs, its figures, and what is best."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from infer.acceptance_stats import AcceptanceStats
from infer.bench.measure import Answer
from infer.verifiers import BestVerifier
from medusa_heads.checkpoint import save_heads
from medusa_heads.cli import run_command
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model, tiny_tokenizer

PATH = Path(__file__).resolve().parents[2] / "scripts/compare_verifiers.py"
CHAIN = ["sample-and-match", "token-rejection", "block"]
TREE = ["sample-and-match", "recursive-rejection", "traversal"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_verifiers", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare_verifiers", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, seed in (("base", 0), ("draft", 1)):
        tiny_model("llama", seed=seed).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    save_heads(random_heads(tiny_model("llama")), tmp_path / "heads", card="")
    (tmp_path / "bushy.json").write_text("[[0], [1], [0, 0]]")
    rows = [{"id": str(i), "messages": [{"role": "user", "content": text}]} for i, text in enumerate(("hello", "the cat", "how"))]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {"--base": "base", "--heads": "heads", "--draft-model": "draft", "--prompts": "prompts.jsonl", "--json": "out.json"}
    return [word for option, name in paths.items() for word in (option, str(tmp_path / name))]


def run(files: list[str], *options: str) -> int:
    return run_command("compare_verifiers:CompareVerifiers", [*files, *options], prog="compare_verifiers.py")


def test_every_way_is_run_and_the_best_are_named(
    script: ModuleType, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bushy = str(tmp_path / "bushy.json")
    options = ["--drafters", "heads", "draft_model", "suffix", "--trees", "chain", "beam:4", bushy]
    assert run(files, *options, "--batch-sizes", "2", "--max-new-tokens", "6") == 0
    document = json.loads((tmp_path / "out.json").read_text())
    rows = document["rows"]
    expected = [("base", "none", "sample-and-match")]
    expected += [("heads", "chain", verifier) for verifier in CHAIN] + [("heads", "beam:4", "sample-and-match")]
    expected += [("heads", bushy, verifier) for verifier in TREE]
    expected += [("draft_model", "its own", verifier) for verifier in CHAIN] + [("suffix", "its own", "sample-and-match")]
    assert [(row["drafter"], row["tree"], row["verifier"]) for row in rows] == 2 * expected
    assert [(row["temperature"], row["top_p"]) for row in rows] == [(0.7, 0.95)] * len(expected) + [(1.0, 1.0)] * len(expected)
    assert all(row["mean_acceptance_length"] >= 1 and row["step_s"] > 0 and row["tokens_per_second"] > 0 for row in rows)
    assert rows[0]["speedup_vs_plain"] == rows[0]["mean_acceptance_length"] == 1
    assert rows[3]["shape"] == "chain" and rows[4]["shape"] is None and rows[5]["shape"] == "tree"
    drawing = (("heads", "chain"), ("heads", "tree"), ("draft_model", "chain"))
    cells = {(row["drafter"], row["shape"], row["temperature"], row["batch_size"]) for row in document["auto"]}
    assert cells == {(*way, temperature, 2) for way in drawing for temperature in (0.7, 1)}
    assert len(document["best"]) == 6 and document["prompts"]["num"] == 3
    printed = capsys.readouterr().out
    assert all(repr(BestVerifier(**best)) in printed for best in document["auto"])


def test_the_fastest_is_best_in_its_own_cell(script: ModuleType) -> None:
    def row(drafter: str, verifier: str, shape: str | None, temperature: float, speed: float) -> dict[str, Any]:
        where = {"drafter": drafter, "temperature": temperature, "top_p": 1.0, "batch_size": 1}
        return where | {"verifier": verifier, "shape": shape, "tree": str(shape), "tokens_per_second": speed}

    rows = [
        row("base", "sample-and-match", None, 1.0, 99.0),
        row("heads", "sample-and-match", None, 1.0, 30.0),
        row("heads", "block", "chain", 1.0, 20.0),
        row("heads", "sample-and-match", "chain", 1.0, 10.0),
        row("heads", "block", "chain", 0.7, 10.0),
        row("heads", "sample-and-match", "chain", 0.7, 20.0),
        row("heads", "traversal", "tree", 0.7, 25.0),
    ]
    assert script.best_by_shape(rows) == [
        BestVerifier("heads", "chain", 0.7, 1, "sample-and-match"),
        BestVerifier("heads", "chain", 1.0, 1, "block"),
        BestVerifier("heads", "tree", 0.7, 1, "traversal"),
    ]
    assert script.best_rows(rows) == [rows[6], rows[1]]


def test_a_step_of_a_batch_is_that_of_its_longest_row(script: ModuleType) -> None:
    """Two batches: 4 and 3 forwards, 2 s and 1.5 s in all."""
    shares = [(4, 4, 1.5), (2, 6, 0.5), (3, 3, 1.5)]
    answers = [Answer([0] * 9, [], AcceptanceStats(num_steps=n, num_accepted_tokens=a), 0.1, 0.1, s, 0.1) for n, a, s in shares]
    found = script.figures(answers, 2, 10.0)
    assert found["step_s"] == 0.5 and found["mean_acceptance_length"] == pytest.approx(1 + 13 / 9)
    assert found["tokens_per_second"] == pytest.approx(24 / 3.5) and found["speedup_vs_plain"] == pytest.approx(2.4 / 3.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperatures", "0.7"], "--top-ps has 2 values and --temperatures 1"),
        (["--temperatures", "0", "1"], "--temperatures 0.0: greedy decoding has one verifier"),
        (["--trees", "auto"], "--trees auto changes its size"),
        (["--drafters", "heads"], "drafts nothing here: add draft_model to --drafters"),
        (["--drafters", "draft_modl"], "unknown drafter 'draft_modl'"),
    ],
)
def test_bad_input_is_one_line(
    script: ModuleType, files: list[str], capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    drafters = [] if "--drafters" in options else ["--drafters", "draft_model"]
    assert run(files, *drafters, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
