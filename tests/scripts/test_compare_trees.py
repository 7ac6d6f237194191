"""The script that compares trees, on a tiny base; and the tree of Medusa that comes with it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import tyro

from infer.tree import load_tree
from medusa_heads.checkpoint import save_heads
from tests.random_heads import random_heads, static_nodes
from tests.tiny_models import tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def test_medusas_tree_has_63_nodes_and_needs_four_heads() -> None:
    tree = load_tree(ROOT / "scripts/mc_sim_7b_63.json")
    assert (tree.num_nodes, tree.depth, tree.max_rank) == (63, 4, 9)


def test_trees_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("compare_trees", ROOT / "scripts/compare_trees.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare_trees", script)
    spec.loader.exec_module(script)
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    measured = {"static_nodes": static_nodes(4), "acceptance_length": {"4": 1.8, "64": 2.5}}
    save_heads(random_heads(model, num_heads=4), tmp_path / "heads", card="", measured=measured)
    questions = [{"id": str(i), "messages": [{"role": "user", "content": text}]} for i, text in enumerate(("hello", "the cat", "how"))]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    files = ["--base", str(tmp_path / "base"), "--heads", str(tmp_path / "heads"), "--prompts", str(tmp_path / "prompts.jsonl")]
    trees = ["--trees", str(ROOT / "scripts/mc_sim_7b_63.json"), "static:63", "beam:4", "none", "chain"]
    options = ["--batch-size", "2", "--max-new-tokens", "12", "--json", str(tmp_path / "out.json")]
    tyro.cli(script.CompareTrees, args=[*files, *trees, *options]).run()
    medusa, static, beam, none, chain = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert medusa["num_nodes"] == static["num_nodes"] == medusa["nodes_per_step"] == 63
    assert medusa["expected_acceptance_length"] < static["expected_acceptance_length"]
    assert beam["expected_acceptance_length"] == 1.8 and chain["num_nodes"] == 4 and none["acceptance_length"] == 1.0
    assert {row["identical_outputs"] for row in (medusa, static, beam, none, chain)} == {1.0}
    assert medusa["speed_ratio"] == 1.0 and none["tokens_per_second"] > 0
