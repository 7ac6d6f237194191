"""Training on bases in 8 and 4 bits, with an adapter and without; what the finished heads then load on."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from medusa_heads import base_model
from medusa_heads.checkpoint import load_heads
from medusa_heads.cli import main as command
from tests.quantised import QUANTIZATIONS, needs_bitsandbytes, save_quantised, save_tiny_base
from train.__main__ import main
from train.estimate import Estimate

WORDS = ("the", "cat", "sat", "on", "mat", "and", "dog", "ran", "to", "other", "side", "of", "house", "what", "is", "answer")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with tied embeddings and 20 conversations."""
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(tmp_path / "cache"))
    save_tiny_base(tmp_path / "base", "gemma2")
    chooser = random.Random(0)
    with (tmp_path / "data.jsonl").open("w") as file:
        for index in range(20):
            question, answer = (" ".join(chooser.choices(WORDS, k=12)) for _ in range(2))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"row-{index}", "messages": messages}) + "\n")
    return tmp_path


def train(workspace: Path, *extra: str, base: str = "base") -> int:
    """Exit status of a run of a few steps with a validation in it."""
    files = ["--base", str(workspace / base), "--data", str(workspace / "data.jsonl"), "--output-dir", str(workspace / "out")]
    sizes = ["--num-heads", "2", "--max-length", "128", "--pack-length", "128", "--batch-size", "2", "--num-workers", "0"]
    validation = ["--held-out", "4", "--num-validation-prompts", "1", "--validate-every", "2", "--validation-tree", "beam:4"]
    return main([*files, *sizes, *validation, "--max-steps", "4", "--learning-rate", "0.05", *extra])


@needs_bitsandbytes
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_heads_of_a_packed_base(workspace: Path, quantization: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They decode on the base in this form, whoever packed it, and on no other."""
    base, out = str(workspace / "base"), workspace / "out"
    assert train(workspace, "--base-quantization", quantization) == 0
    assert f"--base-quantization {quantization} --heads" in (card := (out / "README.md").read_text())
    assert f'quantization="{quantization}"' in card and f"packed into {quantization} by bitsandbytes" in card
    saved = save_quantised(base, workspace / "saved", quantization)
    heads = load_heads(out, base_model.load_base(saved)[0]).heads
    assert bool(heads.weight.any())

    generate = ["generate", "--prompt", "the cat", "--max-new-tokens", "16"]
    packed = ["--base", base, "--base-quantization", quantization]
    texts = []
    for options in ([*packed, "--heads", str(out), "--tree", "beam:4"], [*packed, "--heads", "none"]):
        capsys.readouterr()
        assert command([*generate, *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""
    assert command([*generate, "--base", base, "--heads", str(out)]) == 2
    assert f"give it with --base-quantization {quantization}" in capsys.readouterr().err


@needs_bitsandbytes
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_an_adapter_beside_packed_weights_is_merged_into_plain_ones(workspace: Path, quantization: str) -> None:
    base, out, merged = str(workspace / "base"), workspace / "out", workspace / "merged"
    assert train(workspace, "--base-quantization", quantization, "--lora-rank", "4") == 0
    assert command(["merge", "--base", base, "--adapter", str(out / "adapter"), "--output", str(merged)]) == 0
    model, _ = base_model.load_base(str(merged))
    assert load_heads(out, model).config.base_quantization == "none"
    weights, plain = (base_model.weight_tensors(m) for m in (model, base_model.load_base(base)[0]))
    assert any(not torch.equal(weights[name], plain[name]) for name in plain)
    card = (out / "README.md").read_text()
    assert "--base-quantization" not in card and f"measured on: the base in {quantization} with the adapter" in card


@needs_bitsandbytes
def test_a_base_quantised_in_its_files(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = save_quantised(str(workspace / "base"), workspace / "saved", "4bit")
    assert train(workspace, "--lora-rank", "4", base="saved") == 2
    assert "no adapter can be merged into packed weights: give the model it was made from" in capsys.readouterr().err
    assert train(workspace, "--base-quantization", "4bit", base="saved") == 2
    assert "quantised already (4bit nf4 double): leave --base-quantization out" in capsys.readouterr().err
    assert train(workspace, base="saved") == 0
    load_heads(workspace / "out", base_model.load_base(saved)[0])
    assert command(["merge", "--base", saved, "--adapter", str(workspace / "none"), "--output", str(workspace / "merged")]) == 2
    assert "give the unquantised model" in capsys.readouterr().err


@needs_bitsandbytes
def test_another_packing_is_another_run(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(workspace, "--base-quantization", "4bit", "--max-steps", "2") == 0
    (workspace / "out" / "config.json").unlink()
    assert train(workspace, "--base-quantization", "8bit", "--max-steps", "2") == 2
    error = capsys.readouterr().err
    assert "base_quantization was '4bit', is '8bit'" in error and "base_fingerprint was" in error


def test_estimate_does_not_count_packed_weights() -> None:
    with pytest.raises(ValueError, match="base_quantization: packed weights are not counted here; estimate without it"):
        Estimate(output_dir="o", data=["d"], base_quantization="4bit")


def test_without_bitsandbytes_training_says_so(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("medusa_heads.quantization.BITSANDBYTES", "no_such_package")
    assert train(workspace, "--base-quantization", "8bit", "--max-steps", "2") == 2
    assert "pip install 'medusa-heads[bitsandbytes]'" in capsys.readouterr().err
