"""Rows out of JSONL, JSON arrays, Parquet files and data sets of the hub: the same rows, and errors that name source and row."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tests.tiny_models import tiny_tokenizer
from train.conversations import read_conversations
from train.prompt_rows import load_prompt_rows
from train.row_source import content_sha256, is_hub_name, read_rows, short_name
from train.tokenized_data import tokenize_dataset

ROWS: list[dict[str, Any]] = [
    {"id": str(i), "messages": [{"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": f"the cat {i}"}]}
    for i in range(3)
]


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that `datasets` reads as owner/name, so that no network is needed; and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    parquet(tmp_path / "owner" / "name" / "train.parquet", ROWS)
    parquet(tmp_path / "owner" / "name" / "test.parquet", ROWS[:1])
    return tmp_path


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    lines, array = "".join(json.dumps(row) + "\n" for row in ROWS), json.dumps(ROWS, indent=1)
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.json").write_text("\ufeff \n" + array)
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(array.encode()))
    (tmp_path / "e.json").write_text(lines)
    parquet(tmp_path / "f.parquet", ROWS)
    for name in ("a.jsonl", "b.jsonl.gz", "c.json", "d.json.gz", "e.json", "f.parquet"):
        found = list(read_rows(tmp_path / name))
        assert [row.row for row in found] == ROWS, name
        assert [row.where for row in found] == [f"{tmp_path / name}:{number}" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.json", b'[{"a": 1},\n {"a": }]', r"a\.json: broken JSON \(Expecting value at line 2, column 8\)"),
        ("a.json", b'[{"a": 1}, 7]', r"a\.json:2: expected a JSON object with `messages`, found int"),
        ("a.json", b'["\xff"]', r"a\.json: not UTF-8"),
        ("a.json", b'[{"a": ' + b"9" * 5000 + b"}]", r"a\.json: broken JSON \(Exceeds the limit \(4300 digits\)"),
        ("a.jsonl", b'{"a": 1}\n{"a": ' + b"9" * 5000 + b"}", r"a\.jsonl:2: broken JSON \(Exceeds the limit \(4300 digits\)"),
        ("a.json.gz", gzip.compress(b"[" + b'{"a": 1},' * 9000 + b"]")[:-20], r"a\.json\.gz: it is damaged or cut short"),
        ("a.parquet", b"PAR1 and nothing", r"a\.parquet:1: the Parquet file is damaged"),
        ("none.parquet", None, r"cannot read .*none\.parquet: no such file"),
        ("none.json", None, r"cannot read .*none\.json: No such file"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, data: bytes | None, message: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        list(read_rows(tmp_path / name))


def test_a_blank_line_behind_a_byte_order_mark_is_blank(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf\r\n{"a": 1}\r\n')
    assert [(row.row, row.number) for row in read_rows(tmp_path / "a.jsonl")] == [({"a": 1}, 2)]


def test_what_is_a_file_and_what_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert is_hub_name("owner/name") and is_hub_name("owner/name:test") and is_hub_name("hf:name")
    assert not any(map(is_hub_name, ("data/rows.jsonl", "data/rows.json.gz", "data/rows.parquet", "rows", "/a/b", "../a/b", "a/b/c")))
    (tmp_path / "data" / "rows").write_text("")
    assert not is_hub_name("data/rows"), "a file that exists is a file"
    assert (short_name("hf:owner/name:test"), short_name(tmp_path / "x.jsonl")) == ("owner/name:test", "x.jsonl")


def test_a_data_set_of_the_hub_for_training_and_for_prompts(hub: Path) -> None:
    assert [row.row for row in read_rows("hf:owner/name")] == ROWS
    assert [row.row for row in read_rows("hf:owner/name:test")] == ROWS[:1]
    assert [prompt.turns[0][0]["content"] for prompt in load_prompt_rows(["hf:owner/name"])] == ["hello 0", "hello 1", "hello 2"]
    assert [conversation.id for conversation in read_conversations(["hf:owner/name"], limit=2)] == ["0", "1"]
    rows, counts = tokenize_dataset(["hf:owner/name"], tiny_tokenizer(), max_length=64, cache_dir=hub / "tokens")
    assert counts.rows == 3 and list(rows["id"]) == ["0", "1", "2"]


def test_the_key_of_a_source_is_its_content(hub: Path) -> None:
    before = content_sha256("hf:owner/name")
    assert content_sha256("hf:owner/name") == before != content_sha256("hf:owner/name:test")
    parquet(hub / "owner" / "name" / "train.parquet", ROWS[::-1])
    assert content_sha256("hf:owner/name") != before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:nobody/nothing-here", r"cannot read hf:nobody/nothing-here: (?i:.*offline.*)Give a JSONL, JSON or Parquet file"),
        ("nobody/nothing-here", r"cannot read nobody/nothing-here: no such file, and as a data set on the hub: "),
        ("hf:owner/name:nowhere", r'cannot read hf:owner/name:nowhere: Unknown split "nowhere"'),
        ("hf:owner/name/odd", r"cannot read hf:owner/name/odd: .*odd"),
        ("hf:a/b/c/d", r"expected hf:owner/name\[/config\]\[:split\]"),
    ],
)
def test_a_data_set_that_is_not_there_is_a_clear_error(hub: Path, name: str, message: str) -> None:
    """The suite runs with HF_HUB_OFFLINE=1: nothing may ask the network."""
    with pytest.raises(ValueError, match=message):
        list(read_rows(name))
