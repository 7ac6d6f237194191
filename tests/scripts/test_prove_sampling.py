"""The proof of sampled acceptance on a tiny model: passes, fails for a corrupted verification, goes on after a kill."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import infer.verifiers
from infer.draws import Draws
from infer.generate import Generator
from infer.verify_sampled import DraftTree, Laws
from medusa_heads.checkpoint import save_heads
from medusa_heads.cli import run_command
from scripts.prove_sampling import ProveSampling
from tests.random_heads import random_heads, static_nodes
from tests.tiny_models import tiny_model, tiny_tokenizer

PROMPTS = Path(__file__).resolve().parents[2] / "scripts" / "exactness_prompts.jsonl"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, model = tmp_path_factory.mktemp("sampling"), tiny_model("llama")
    model.save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    save_heads(random_heads(model), folder / "heads", card="random", measured={"static_nodes": static_nodes(), "acceptance_length": {}})
    return {"base": str(folder / "base"), "heads": str(folder / "heads")}


def proof(folders: dict[str, Any], output: Path, **options: Any) -> ProveSampling:
    defaults: dict[str, Any] = {
        "num_prompts": 12,
        "num_steps": 40,
        "batch_size": 4,
        "max_new_tokens": 16,
        "trees": ("beam:8",),
        "device": "cpu",
    }
    return ProveSampling(prompts=(PROMPTS,), output=output, **(folders | defaults | options))


def test_all_verifiers_are_reported_and_sample_and_match_is_within(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--prompts", str(PROMPTS), "--output", str(tmp_path), "--base", folders["base"], "--heads", folders["heads"]]
    sizes = [
        "--num-prompts",
        "12",
        "--num-steps",
        "100",
        "--batch-size",
        "4",
        "--max-new-tokens",
        "16",
        "--trees",
        "beam:8",
        "--device",
        "cpu",
    ]
    assert run_command("scripts.prove_sampling:ProveSampling", files + sizes, prog="prove_sampling.py") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["num_outside"] == 0 and {"hardware", "date", "sha256", "settings"} <= set(found)
    assert json.loads((tmp_path / "sampling.json").read_text()) == found
    verifiers = ["sample-and-match", "token-rejection", "block", "recursive-rejection", "traversal"]
    assert [(c["verifier"], c["temperature"]) for c in found["cells"]] == [(v, t) for v in verifiers for t in (0.7, 1.0)]
    for cell in found["cells"]:
        assert cell["num_steps"] >= 100 and cell["standard_error"] > 0
        assert cell["within"] is (True if cell["verifier"] == "sample-and-match" else None)
        if cell["within"] is None:  # drafts that were drawn are accepted more often than random ones are met
            assert cell["mean_length"] > cell["mean_expected"]


def accept_the_first(tree: DraftTree, p: Laws, draws: Draws) -> tuple[list[int], int]:
    return [0, 1], draws.index(p[1])


def test_a_corrupted_verification_fails_the_proof(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the first draft of every step is accepted unseen."""
    monkeypatch.setattr(infer.verifiers, "sample_and_match", accept_the_first)
    assert proof(folders, tmp_path, drawn=()).run() == 1
    found = json.loads(capsys.readouterr().out)
    assert found["num_outside"] == 2 and all(cell["deviation"] > 3 and cell["mean_length"] == 2 for cell in found["cells"])


def test_a_killed_run_goes_on(folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = proof(folders, tmp_path, drawn=(), num_steps=20)
    generate, calls = Generator.generate, []

    def counted(self: Generator, *arguments: Any, **options: Any) -> Any:
        calls.append(options["generation_config"].temperature)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(self, *arguments, **options)

    monkeypatch.setattr(Generator, "generate", counted)
    with pytest.raises(KeyboardInterrupt):
        command.run()
    assert [path.name for path in (tmp_path / "cells").iterdir()] == ["0.7-0.95-sample-and-match-beam-8.json"]
    assert command.run() == 0 and calls == [0.7, 1.0, 1.0]
    assert replace(command, trees=("beam:8", "beam:16")).run() == 0 and len(calls) == 5, "only the new tree is decoded"
    with pytest.raises(ValueError, match=r"holds results of other settings \(seed\)"):
        replace(command, seed=1).run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_prompts": 13}, "--num-prompts 13, but --prompts hold 12"),
        ({"trees": ("auto",)}, "--trees auto is chosen by measurement"),
        ({"drawn": ("block", "typical")}, "--drawn typical: no exact verifier of drawn drafts; write some of token-rejection, block"),
        ({"num_steps": 1}, "--num-steps 1: a standard error needs at least 2"),
        ({"max_new_tokens": 480}, "--prompts hold one of .* tokens, and --max-new-tokens 480 leave room for 29"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str, folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        proof(folders, tmp_path, **options).run()
