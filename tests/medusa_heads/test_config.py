"""HeadsConfig: what is stored comes back, and everything else is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medusa_heads.config import FORMAT_VERSION, HeadsConfig


def test_round_trip(tmp_path: Path) -> None:
    config = HeadsConfig(num_heads=5, num_layers=2, hidden_size=8, vocab_size=11, own_lm_head=True, base_model="b", base_revision="r")
    (tmp_path / "config.json").write_text(config.to_json())
    assert HeadsConfig.from_file(tmp_path / "config.json") == config


@pytest.mark.parametrize("name", ["num_heads", "num_layers"])
@pytest.mark.parametrize("value", [0, -1])
def test_counts_below_one_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}.*set {name} to 1 or more"):
        HeadsConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_head": 3}, "unknown key 'num_head' \\(did you mean 'num_heads'\\?\\)"),
        ({"format_version": FORMAT_VERSION + 1}, "format_version 2.*upgrade medusa-heads"),
        ({"format_version": None}, "is this a medusa-heads checkpoint"),
        ({"num_heads": "3"}, "num_heads is '3', of the wrong type"),
        ({"num_heads": 4.0}, "num_heads is 4.0, of the wrong type"),
        ({"num_layers": True}, "num_layers is True, of the wrong type"),
        ({"options": None}, "options is None, of the wrong type"),
        ({"base_fingerprint": 5}, "base_fingerprint is 5, of the wrong type"),
        ({"architecture": ["medusa"]}, "of the wrong type"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_heads": 10**12}, "num_heads is 1000000000000; at most 1024"),
        ({"num_layers": 10**30}, "num_layers is 1.*; at most 1024"),
    ],
)
def test_bad_values_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadsConfig.from_dict({"format_version": FORMAT_VERSION} | values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no config.json in"),
        (b'{"num_heads": 3', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1]", "no JSON object"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        HeadsConfig.from_file(tmp_path / "config.json")


def test_json_names_its_format_version() -> None:
    assert json.loads(HeadsConfig().to_json())["format_version"] == FORMAT_VERSION
