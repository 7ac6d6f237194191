"""Heads checkpoints: bit-equal round trip, strict loading, atomic saving."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer.tree_spec import parse_tree
from medusa_heads import base_model
from medusa_heads.checkpoint import load_heads, resolve_heads, save_heads
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    heads = random_heads(tiny_model("llama"), num_layers=2)
    measured = {"static_nodes": {"0": 0.5, "0,2": 0.2}, "acceptance_length": {16: 1.5}}
    return save_heads(heads, tmp_path / "heads", card="# card\n", measured=measured, command=["train", "--lr", "1"])


@pytest.mark.compat
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("own_lm_head", [False, True])
def test_logits_survive_the_round_trip_bit_for_bit(tmp_path: Path, family: str, own_lm_head: bool) -> None:
    model = tiny_model(family)
    heads = random_heads(model, num_layers=2, own_lm_head=own_lm_head)
    loaded = load_heads(save_heads(heads, tmp_path / "heads", card=""), model).heads
    hidden_RD = base_model.forward_hidden(model, torch.arange(3, 20)[None])[0]
    states_RKD = heads.draft_states(hidden_RD)
    assert torch.equal(states_RKD, loaded.draft_states(hidden_RD))
    own_RKV = heads.own_logits(states_RKD)
    if own_RKV is None:
        assert loaded.own_logits(states_RKD) is None
    else:
        assert torch.equal(own_RKV, loaded.own_logits(states_RKD))  # type: ignore[arg-type]
    assert not any(p.requires_grad for p in loaded.parameters())


def test_everything_written_is_read(folder: Path) -> None:
    checkpoint = load_heads(folder, tiny_model("llama"))
    assert (checkpoint.static_nodes, checkpoint.acceptance) == ({(0,): 0.5, (0, 2): 0.2}, {16: 1.5})
    assert (folder / "README.md").read_text() == "# card\n"
    assert (folder / "train_command.txt").read_text().startswith("train --lr 1\npython 3")
    assert not list(folder.parent.glob(".*"))
    assert {oct(path.stat().st_mode & 0o777) for path in folder.rglob("*") if path.is_file()} == {"0o644"}


def test_storage_and_loading_types(tmp_path: Path) -> None:
    model = tiny_model("llama")
    heads = random_heads(model)
    folder = save_heads(heads, tmp_path / "heads", card="", dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert load_heads(folder, model).heads.weight.dtype == torch.float32
    assert load_heads(folder, model, dtype=torch.bfloat16).heads.weight.dtype == torch.bfloat16
    assert torch.equal(load_heads(folder, model).heads.weight, heads.weight.bfloat16().float())


def test_another_base_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="trained on other weights"):
        load_heads(folder, tiny_model("llama", seed=1))
    with pytest.raises(ValueError, match="with vocab_size 300, this base has 200"):
        load_heads(folder, tiny_model("llama", vocab_size=200))
    with pytest.raises(ValueError, match="trained on other weights"):
        load_heads(folder, tiny_model("mistral_window"))


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["bias"]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head"] = torch.zeros(3, 300, 32)


def _reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["bias"] = tensors["bias"][:, :2].clone()


def _retype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["bias"] = tensors["bias"].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop, "missing bias$"),
        (_add, "unexpected lm_head$"),
        (_reshape, r"bias is \[2, 2, 32\], expected \[2, 3, 32\]$"),
        (_retype, "bias is of type torch.float8_e4m3fn$"),
    ],
)
def test_other_tensors_than_the_config_says_are_refused(
    folder: Path, damage: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_heads(folder, tiny_model("llama"))


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_a_truncated_weight_file_is_refused(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged or truncated"):
        load_heads(folder, tiny_model("llama"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(folder: Path, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["bias"][0, 0, 0] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor `bias` holds values that are not finite"):
        load_heads(folder, tiny_model("llama"))


def test_a_base_whose_logits_are_not_finite_is_refused() -> None:
    model = tiny_model("llama")
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(ValueError, match="logits that are not finite"):
        base_model.check_base(model)


def test_missing_and_broken_files_are_refused(folder: Path) -> None:
    model = tiny_model("llama")
    (folder / "trees" / "measured.json").write_text("{")
    with pytest.raises(ValueError, match=r"measured.json is not valid JSON"):
        load_heads(folder, model)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors is missing"):
        load_heads(folder, model)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="no config"):
        load_heads(folder, model)


@pytest.mark.parametrize(
    "content",
    [
        *([], 3, None, {"static_nodes": 0.5}, {"static_nodes": [0.5]}, {"static_nodes": {"0": "high"}}, {"static_nodes": {"zero": 0.5}}),
        *({"acceptance_length": [1.5]}, {"acceptance_length": {"many": 1.5}}, {"acceptance_length": {"16": [1.5]}}),
        *({"acceptance_length": {"16": "1.5"}}, {"acceptance_length": {"16": True}}),
        *({"acceptance_length": {"16": length}} for length in (0, 0.5, -1.5, 18, math.nan, math.inf)),
        *({"acceptance_length": {size: 1.5}} for size in ("0", str(10**30), str(10**400))),
        *({"acceptance_length": {"-3": 1.5}}, {"acceptance_length": {}, "static_nodes": {"0": -0.5}}, {}, {"static_nodes": {"0": 0.5}}),
        *({"acceptance_length": {}, "static_nodes": {"0": share}} for share in (1.5, math.nan)),
        *({"acceptance_length": {}, "static_nodes": {path: 0.5}} for path in ("-1", "1000000", "0,0")),
        {"acceptance_length": {}, "static_nodes": {"0,0": 0.5, "0": 0.5}},
        {"acceptance_length": {}, "static_nodes": dict.fromkeys(("0", "0,0", "0,0,0", "0,0,0,0"), 0.5)},
    ],
)
def test_measurements_of_another_shape_are_refused(folder: Path, content: object) -> None:
    (folder / "trees" / "measured.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"measured.json is damaged \(.*\): expected `static_nodes`.*`medusa-heads tree` measure anew"):
        load_heads(folder, tiny_model("llama"))


def test_measurements_of_before_static_nodes_still_load(folder: Path) -> None:
    (folder / "trees" / "measured.json").write_text(json.dumps({"rank_accuracy": [[0.5, 0.2]], "acceptance_length": {"16": 1.5}}))
    checkpoint = load_heads(folder, tiny_model("llama"))
    assert (checkpoint.static_nodes, checkpoint.acceptance) == ({}, {16: 1.5})
    with pytest.raises(ValueError, match="static:4: these heads come with no measured nodes: measure them with `medusa-heads tree`"):
        parse_tree("static:4", checkpoint)


def test_unknown_families_and_options_are_refused(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"architecture": "hydra"}))
    with pytest.raises(ValueError, match="architecture 'hydra' is not known here; known are medusa"):
        load_heads(folder, tiny_model("llama"))
    (folder / "config.json").write_text(json.dumps(values | {"options": {"rank": 8}}))
    with pytest.raises(ValueError, match="unknown key 'rank'"):
        load_heads(folder, tiny_model("llama"))


def test_names_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        resolve_heads(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="no such shipped heads"):
        resolve_heads("pretrained:absent")


def test_an_interrupted_save_leaves_the_old_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def interrupt(command: list[str] | None) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("medusa_heads.checkpoint._command_text", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_heads(random_heads(tiny_model("llama"), seed=5), folder, card="other")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["heads"]


def test_saving_replaces_the_whole_folder(folder: Path) -> None:
    heads = random_heads(tiny_model("llama"), seed=5)
    save_heads(heads, folder, card="new")
    assert not (folder / "trees").exists()
    assert torch.equal(load_heads(folder, tiny_model("llama")).heads.weight, heads.weight)
    assert [path.name for path in folder.parent.iterdir()] == ["heads"]


def test_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    heads = random_heads(tiny_model("llama"))
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "heads"):
        with pytest.raises(ValueError, match="choose another output folder"):
            save_heads(heads, output, card="")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("mine")
    tiny_model("llama").save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="not a heads checkpoint"):
        save_heads(heads, tmp_path / "base", card="")
    with pytest.raises(ValueError, match="not a heads checkpoint"):
        save_heads(heads, tmp_path / "work", card="")
    assert (tmp_path / "file").read_text() == (tmp_path / "work" / "thesis.txt").read_text() == "mine"
