"""The cost twin's script, on a tiny model in the place of the embedded one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_heads import base_model
from medusa_heads.checkpoint import load_heads, save_heads
from medusa_heads.config import HeadsConfig
from medusa_heads.cost_twin import widen
from medusa_heads.heads import create_heads
from tests.medusa_heads.test_cost_twin import target
from tests.tiny_models import tiny_model, tiny_tokenizer

PATH = Path(__file__).resolve().parents[2] / "scripts" / "make_cost_twin.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    specification = importlib.util.spec_from_file_location("make_cost_twin", PATH)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(__import__("sys").modules, "make_cost_twin", module)
    specification.loader.exec_module(module)
    twin = widen(tiny_model("llama"), target(), dtype=torch.bfloat16)
    monkeypatch.setattr(module, "load_twin", lambda device: (twin, tiny_tokenizer()))
    return module


def test_twin_and_heads_are_written_and_belong_together(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_model("llama")
    heads = create_heads(HeadsConfig(num_heads=2), source)
    save_heads(heads, tmp_path / "heads", card="", measured={"static_nodes": {"0": 0.5, "0,0": 0.25}, "acceptance_length": {"1": 1.5}})
    with monkeypatch.context() as patch:
        patch.setattr(base_model, "load_base", lambda *_, **__: (source, None))
        script.MakeCostTwin(output=tmp_path / "model", heads=str(tmp_path / "heads"), heads_output=tmp_path / "wide", device="cpu").run()
    model, tokenizer = base_model.load_base(str(tmp_path / "model"))
    assert model.dtype == torch.bfloat16 and len(tokenizer) == 300
    checkpoint = load_heads(tmp_path / "wide", model)
    assert (checkpoint.config.hidden_size, checkpoint.config.base_model) == (90, "twin")
    assert checkpoint.acceptance == {1: 1.5} and checkpoint.static_nodes == {(0,): 0.5, (0, 0): 0.25}


def test_outputs_are_refused_before_the_work(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, one folder for both, and either where something lies."""
    monkeypatch.setattr(script, "load_twin", lambda device: pytest.fail("the twin was built"))
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied/file").touch()
    for outputs in ({}, {"output": tmp_path / "new", "heads_output": tmp_path / "new"}):
        with pytest.raises(ValueError, match="give --output, --heads-output or both, each a folder of its own"):
            script.MakeCostTwin(**outputs).run()
    for option in ("output", "heads_output"):
        with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} .*occupied is not empty: choose another folder"):
            script.MakeCostTwin(**{option: tmp_path / "occupied"}).run()
