"""Exports: the exact files, the logits of our heads through each engine's own arithmetic, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa_heads import base_model, cli
from medusa_heads.checkpoint import save_heads
from medusa_heads.formats import medusa_v1, vllm
from medusa_heads.formats.export import TARGETS, compare, engine_logits, export, own_logits, probe_hidden_states
from medusa_heads.heads import MedusaHeads
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model, tiny_tokenizer

# R rows, K heads, V vocabulary

ALL = tuple(TARGETS)


def _export(heads: MedusaHeads, model: PreTrainedModel, folder: Path, to: str, dtype: torch.dtype = torch.float32) -> list[str]:
    return export(heads, model, folder, to=to, dtype=dtype, tokenizer=tiny_tokenizer())


def _tensors(folder: Path) -> dict[str, Tensor]:
    [path] = [path for path in folder.iterdir() if path.name != "config.json"]
    return torch.load(path, weights_only=True) if path.suffix == ".pt" else load_file(path)


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("own", [False, True])
def test_medusa_v1_files(tmp_path: Path, own: bool) -> None:
    model = tiny_model("llama")
    heads = random_heads(model, num_layers=2, own_lm_head=own)
    _export(heads, model, tmp_path / "out", "medusa-v1")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "medusa_lm_head.pt"}
    assert _config(tmp_path / "out") == {"base_model_name_or_path": "tiny", "medusa_num_heads": 3, "medusa_num_layers": 2}
    tensors = _tensors(tmp_path / "out")
    blocks = {f"{i}.{layer}.linear.{name}" for i in range(3) for layer in range(2) for name in ("weight", "bias")}
    assert tensors.keys() == blocks | {f"{i}.2.weight" for i in range(3)}
    assert torch.equal(tensors["2.1.linear.weight"], heads.weight[1, 2]) and torch.equal(tensors["2.1.linear.bias"], heads.bias[1, 2])
    matrix = base_model.lm_head_parameters(model)[0] if heads.lm_head is None else heads.lm_head[1]
    assert torch.equal(tensors["1.2.weight"], matrix)
    assert len({t.untyped_storage().data_ptr() for t in tensors.values()}) == len(tensors)


def test_medusa_v2_files(tmp_path: Path) -> None:
    model = tiny_model("llama")
    heads = random_heads(model)
    _export(heads, model, tmp_path / "out", "medusa-v2")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "medusa_lm_head.safetensors"}
    expected = {"base_model_name_or_path": "tiny", "medusa_num_heads": 3, "medusa_num_layers": 1, "version": "2"}
    assert _config(tmp_path / "out") == expected
    tensors = _tensors(tmp_path / "out")
    assert tensors.keys() == {f"{i}.0.linear.{name}" for i in range(3) for name in ("weight", "bias")}
    assert torch.equal(tensors["1.0.linear.weight"], heads.weight[0, 1])


@pytest.mark.parametrize("own", [False, True])
def test_vllm_files(tmp_path: Path, own: bool) -> None:
    model = tiny_model("llama")
    heads = random_heads(model, num_layers=2, own_lm_head=own)
    _export(heads, model, tmp_path / "out", "vllm", torch.bfloat16)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    assert _config(tmp_path / "out") == {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": 32,
        "vocab_size": 300,
        "truncated_vocab_size": 300,
        "num_heads": 3,
        "num_hidden_layers": 2,
        "medusa_fc_bias": True,
        "original_lm_head": not own,
        "logit_scale": 1.0,
        "max_position_embeddings": 512,
    }
    tensors = _tensors(tmp_path / "out")
    blocks = {f"blocks.{i}.layers.{layer}.{name}" for i in range(3) for layer in range(2) for name in ("weight", "bias")}
    assert tensors.keys() == blocks | {f"lm_heads.{i}.weight" for i in range(3 if own else 1)}
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["blocks.2.layers.1.bias"], heads.bias[1, 2].bfloat16())


# ---------------------------------------------------------------- logits


class _Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


def test_modules_built_from_the_v1_description_give_our_logits(tmp_path: Path) -> None:
    model = tiny_model("llama")
    heads = random_heads(model, num_layers=2)
    _export(heads, model, tmp_path / "out", "medusa-v1")
    modules = nn.ModuleList(nn.Sequential(_Block(32), _Block(32), nn.Linear(32, 300, bias=False)) for _ in range(3))
    modules.load_state_dict(_tensors(tmp_path / "out"))
    hidden_RD = torch.randn(5, 32)
    expected_RKV = base_model.compute_logits(model, heads.draft_states(hidden_RD))
    assert torch.allclose(torch.stack([m(hidden_RD) for m in modules], dim=1), expected_RKV, atol=1e-4)


@pytest.mark.compat
@pytest.mark.parametrize("to", ALL)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float32), ("llama", torch.float16), *((family, torch.bfloat16) for family in ("llama", "qwen3", "gemma2", "gpt2"))],
)
def test_the_files_give_our_logits(tmp_path: Path, to: str, family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family)
    heads = random_heads(model, num_layers=2)
    lines = _export(heads, model, tmp_path / "out", to, dtype)
    assert lines[0].startswith("wrote ") and "first choice as in the checkpoint for" in lines[1]
    hidden_RD = probe_hidden_states(model, None)
    found_RKV = engine_logits(TARGETS[to].read_probe(tmp_path / "out", model), heads, model, TARGETS[to], hidden_RD)
    exact_RKV = base_model.compute_logits(model, heads.draft_states(hidden_RD))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
    assert float((found_RKV - exact_RKV).abs().max()) <= tolerance * float(exact_RKV.abs().max())


@pytest.mark.parametrize("to", ["medusa-v1", "vllm"])
def test_own_lm_heads_give_our_logits_from_the_files_alone(tmp_path: Path, to: str) -> None:
    model = tiny_model("gemma2")
    heads = random_heads(model, own_lm_head=True)
    lines = _export(heads, model, tmp_path / "out", to)
    assert not any("soft cap" in line for line in lines)
    hidden_RD = torch.randn(5, 32)
    found_RKV = TARGETS[to].read_probe(tmp_path / "out", tiny_model("gemma2", seed=9))(hidden_RD)
    assert torch.allclose(found_RKV, own_logits(heads, model, hidden_RD, dtype=torch.float32), atol=1e-4)


def test_soft_cap_is_named_and_keeps_the_order(tmp_path: Path) -> None:
    model = tiny_model("gemma2")
    heads = random_heads(model)
    for to in ALL:
        assert any(
            "soft cap 5" in line and "order of the drafted tokens is unchanged" in line for line in _export(heads, model, tmp_path / to, to)
        )
    hidden_RD = 0.1 * torch.randn(20, 32)
    plain_RKV = TARGETS["vllm"].read_probe(tmp_path / "vllm", model)(hidden_RD)
    assert torch.equal(plain_RKV.argmax(-1), base_model.compute_logits(model, heads.draft_states(hidden_RD)).argmax(-1))


def test_logit_scale_goes_to_vllm_and_is_named_elsewhere(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.logit_scale = 0.25
    model.config.logits_scaling = 2.0
    heads = random_heads(model)
    assert not any("factor" in line for line in _export(heads, model, tmp_path / "vllm", "vllm"))
    assert _config(tmp_path / "vllm")["logit_scale"] == 0.125
    hidden_RD = torch.randn(5, 32)
    found_RKV = TARGETS["vllm"].read_probe(tmp_path / "vllm", model)(hidden_RD)
    assert torch.allclose(found_RKV, base_model.compute_logits(model, heads.draft_states(hidden_RD)), atol=1e-4)
    assert any("factor 0.125" in line for line in _export(heads, model, tmp_path / "v1", "medusa-v1"))


# ---------------------------------------------------------------- wrong files are noticed


@pytest.mark.parametrize(
    ("to", "damage"),
    [
        ("vllm", lambda config, tensors: config.update(medusa_fc_bias=False)),
        ("vllm", lambda config, tensors: config.update(num_attention_heads=2)),
        ("vllm", lambda config, tensors: config.update(logit_scale=0.5)),
        ("vllm", lambda config, tensors: tensors.pop("lm_heads.0.weight")),
        ("vllm", lambda config, tensors: tensors.update({"medusa.0": tensors.pop("blocks.0.layers.0.weight")})),
        ("medusa-v1", lambda config, tensors: config.update(medusa_num_heads=2)),
        ("medusa-v1", lambda config, tensors: tensors["0.0.linear.bias"].zero_()),
        ("medusa-v2", lambda config, tensors: tensors.update({"0.0.linear.bias": tensors["1.0.linear.bias"].clone()})),
    ],
)
def test_a_file_that_an_engine_would_misread_fails_the_comparison(tmp_path: Path, to: str, damage: Any) -> None:
    from safetensors.torch import save_file

    model = tiny_model("llama")
    heads = random_heads(model)
    folder = tmp_path / "out"
    _export(heads, model, folder, to)
    hidden_RD = probe_hidden_states(model, None)
    compare(heads, model, TARGETS[to], folder, dtype=torch.float32, hidden_RD=hidden_RD)
    config, tensors = _config(folder), _tensors(folder)
    damage(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / TARGETS[to].FILES[1]
    torch.save(tensors, path) if path.suffix == ".pt" else save_file(tensors, path)
    with pytest.raises(ValueError, match="export check failed"):
        compare(heads, model, TARGETS[to], folder, dtype=torch.float32, hidden_RD=hidden_RD)


def test_a_failed_comparison_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    heads = random_heads(model)
    _export(heads, model, tmp_path / "out", "vllm")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    other = random_heads(model, seed=3)

    def wrong(written: MedusaHeads, *args: Any, export_heads: Any = vllm.export_heads, **options: Any) -> None:
        export_heads(other, *args, **options)

    monkeypatch.setattr(vllm, "export_heads", wrong)
    for name in ("out", "fresh"):
        with pytest.raises(ValueError, match="export check failed"):
            _export(heads, model, tmp_path / name, "vllm")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ---------------------------------------------------------------- refusals


def test_own_lm_heads_do_not_fit_v2(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"--to medusa-v2: these heads have an lm_head of their own.*use --to medusa-v1"):
        _export(random_heads(model, own_lm_head=True), model, tmp_path / "out", "medusa-v2")
    assert not (tmp_path / "out").exists()


def test_an_lm_head_bias_fits_v2_only(tmp_path: Path) -> None:
    model = tiny_model("llama")
    base_model.lm_head(model).bias = nn.Parameter(torch.randn(300))  # type: ignore[assignment]
    heads = random_heads(model)
    for to in ("medusa-v1", "vllm"):
        with pytest.raises(ValueError, match="lm_head has a bias"):
            _export(heads, model, tmp_path / to, to)
    _export(heads, model, tmp_path / "v2", "medusa-v2")
    _export(random_heads(model, own_lm_head=True), model, tmp_path / "vllm", "vllm")


def test_several_layers_come_with_a_note(tmp_path: Path) -> None:
    model = tiny_model("llama")
    assert any("shares one block" in line for line in _export(random_heads(model, num_layers=2), model, tmp_path / "a", "medusa-v1"))
    assert not any("shares one block" in line for line in _export(random_heads(model), model, tmp_path / "b", "medusa-v1"))


def test_only_an_earlier_export_is_overwritten(tmp_path: Path) -> None:
    model = tiny_model("llama")
    heads = random_heads(model)
    folder = tmp_path / "out"
    folder.mkdir()
    for to in ALL:  # empty, then each over the one before
        _export(heads, model, folder, to)
    assert {path.name for path in folder.iterdir()} == set(vllm.FILES)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"not an earlier export \(notes.txt\): choose a new folder"):
        _export(heads, model, folder, "vllm")
    ours = save_heads(heads, tmp_path / "heads", card="")
    with pytest.raises(ValueError, match="not an earlier export"):
        _export(heads, model, ours, "vllm")
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()  # now it has the names of an export
    with pytest.raises(ValueError, match=r"not an earlier export \(config.json, model.safetensors\)"):
        _export(heads, model, tmp_path / "model", "vllm")
    with pytest.raises(ValueError, match="is a file"):
        _export(heads, model, folder / "notes.txt", "vllm")


# ---------------------------------------------------------------- command


@pytest.fixture
def base_folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.compat
@pytest.mark.parametrize("to", ALL)
def test_the_command_exports(tmp_path: Path, base_folder: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = base_model.load_base(str(base_folder))
    save_heads(random_heads(model), tmp_path / "heads", card="")
    arguments = ["export", "--base", str(base_folder), "--heads", str(tmp_path / "heads"), "--to", to, "--output", str(tmp_path / "out")]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "logits differ by at most" in printed and "first choice as in the checkpoint for" in printed
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(TARGETS[to].FILES)
    if to != "vllm":
        assert _config(tmp_path / "out")["base_model_name_or_path"] == str(base_folder)
    assert {tensor.dtype for tensor in _tensors(tmp_path / "out").values()} == {torch.bfloat16}


def test_the_command_refuses_heads_of_another_base(tmp_path: Path, base_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_heads(random_heads(tiny_model("llama", seed=1)), tmp_path / "heads", card="")
    arguments = [
        "export",
        "--base",
        str(base_folder),
        "--heads",
        str(tmp_path / "heads"),
        "--to",
        "vllm",
        "--output",
        str(tmp_path / "out"),
    ]
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: --heads ")
    assert not (tmp_path / "out").exists()


def test_the_base_in_a_v1_config_falls_back_to_the_name_in_the_heads() -> None:
    model = tiny_model("llama")
    assert medusa_v1.config_json(random_heads(model), model)["base_model_name_or_path"] == "tiny"
