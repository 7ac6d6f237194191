"""Model cards: valid front matter, only what was given, and code that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from medusa_heads import base_model
from medusa_heads.checkpoint import save_heads
from medusa_heads.config import HeadsConfig
from medusa_heads.model_card import model_card
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model, tiny_tokenizer

CONFIG = HeadsConfig(
    num_heads=3, hidden_size=32, vocab_size=300, base_model='owner/na"me: x', base_revision="main", base_fingerprint="f00d"
)
MEASURED: dict[str, Any] = {
    "hardware": "2 CPU cores",
    "acceptance_length": {16: 1.9, 64: 2.1},
    "slot_accuracy": [[0.5, 0.25], [0.3]],
    "decoded": [{"prompts": "a|b", "mean_acceptance_length": 2.0}, {"prompts": "c", "tree": "beam:16"}],
}


def _card(**changes: Any) -> str:
    options: dict[str, Any] = dict(
        base_license="apache-2.0", data={"files": ["a.jsonl", "b.jsonl"]}, recipe={"lr": 1e-3}, measured=MEASURED
    )
    return model_card(CONFIG, **(options | changes))


def test_front_matter() -> None:
    _, front, _ = _card().split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": 'owner/na"me: x',
        "tags": ["medusa", "speculative-decoding", "draft-heads"],
        "license": "apache-2.0",
        "library_name": "medusa-heads",
    }
    assert "license" not in yaml.safe_load(_card(base_license=None).split("---\n", 2)[1])


def test_everything_given_is_printed() -> None:
    card = _card(validation_ids=["v1", "v2"], limits="English only.")
    for text in (
        "`f00d`",
        "revision `main`",
        "- files: a.jsonl, b.jsonl",
        "- lr: 0.001",
        "- hardware: 2 CPU cores",
        "| 16 | 1.9 |\n| 64 | 2.1 |",
        "|  | 1 | 2 |\n| --- | --- | --- |\n| 1 | 0.5 | 0.25 |\n| 2 | 0.3 |  |",
        "| prompts | mean acceptance length | tree |\n| --- | --- | --- |\n| a\\|b | 2 |  |\n| c |  | beam:16 |",
        "2 rows held out of training:\n\nv1, v2",
        "English only.",
    ):
        assert text in card, text


def test_the_revision_of_the_base_is_part_of_every_way_to_load_it() -> None:
    assert ', revision="main")' in _card() and " --revision main --heads" in _card()


def test_what_is_not_given_is_named_as_unknown() -> None:
    card = model_card(HeadsConfig(), base_license=None, data={}, recipe={}, measured={})
    assert card.count("Not recorded.") == 2 and "Not measured." in card and "`not recorded`" in card
    assert "validation rows" not in card and "None" not in card and "base_model" not in card.split("---\n", 2)[1]


def test_empty_parts_print_no_table() -> None:
    assert "## Measured acceptance\n\nNot measured." in _card(measured={"acceptance_length": {}, "static_nodes": {}})


def test_the_code_in_the_card_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    model, _ = base_model.load_base(str(tmp_path / "base"))
    config = HeadsConfig(base_model=str(tmp_path / "base"))
    save_heads(random_heads(model), tmp_path / "heads", card="")
    card = model_card(config, base_license=None, data={}, recipe={}, measured={})
    code = card.split("```python\n")[1].split("```")[0].replace("PATH/TO/THIS/FOLDER", str(tmp_path / "heads"))
    code = code.replace("generate([prompt])", "generate([prompt], max_new_tokens=8)")
    exec(code, {})
    assert capsys.readouterr().out.strip()
