"""Loading JSONL conversations: what is kept, and an error with file and line for what cannot be used."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from train.conversations import Conversation, read_conversations

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
GOOD = {"id": "one", "messages": [USER, ANSWER]}


def write(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def load_conversations(*arguments: Any, **options: Any) -> list[Conversation]:
    return list(read_conversations(*arguments, **options))


def test_rows_keep_their_id_and_get_file_and_line_without_one(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", GOOD, "", {"messages": [{"role": "system", "content": ""}, USER, ANSWER], "extra": 1}, {**GOOD, "id": 7}
    )
    one, two, three = load_conversations([path])
    assert (one.id, two.id, three.id) == ("one", "a.jsonl:3", "7")
    assert one.messages == (USER, ANSWER)
    assert [message["role"] for message in two.messages] == ["system", "user", "assistant"]
    assert one.input_ids is None and one.assistant_spans is None


def test_gz_and_plain_files_are_read_in_order_up_to_the_limit(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.jsonl", GOOD, {**GOOD, "id": "two"})
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps({**GOOD, "id": "três"}).encode()))
    assert [c.id for c in load_conversations([plain, str(packed)])] == ["one", "two", "três"]
    assert [c.id for c in load_conversations([packed, plain], limit=2)] == ["três", "one"]
    assert len(load_conversations([plain], limit=9)) == 2


def test_exact_tokens_are_kept_and_need_no_messages(tmp_path: Path) -> None:
    exact = {"id": "x", "input_ids": [5, 6, 7, 8], "assistant_spans": [[1, 2], [2, 4]]}
    path = write(tmp_path / "a.jsonl", exact, {**exact, "messages": [USER]}, {**GOOD, "input_ids": None})
    one, two, three = load_conversations([path])
    assert (one.messages, one.input_ids, one.assistant_spans) == ((), (5, 6, 7, 8), ((1, 2), (2, 4)))
    assert two.messages == (USER,)
    assert three.input_ids is None


BAD_ROWS: list[tuple[Any, str]] = [
    ('{"messages": [', "broken JSON"),
    ('{"messages": ' + "[" * 100_000, "nested too deeply"),
    ([1], "expected a JSON object"),
    ({"id": "x"}, "no `messages`"),
    ({"messages": "hi"}, "`messages` is str"),
    ({"messages": []}, "empty conversation"),
    ({"messages": [USER]}, "no assistant turn"),
    ({"messages": ["hi"]}, "message 1 is str"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "message 2 has role 'tool'"),
    ({"messages": [USER, {"role": "assistant", "content": [{"type": "text"}]}]}, "message 2 has a content of type list"),
    ({"messages": [USER, {"role": "assistant"}]}, "message 2 has a content of type NoneType"),
    ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', "surrogate"),
    ('{"id": "\\ud83d", "messages": [{"role": "assistant", "content": "x"}]}', "id holds half a surrogate"),
    ({**GOOD, "input_ids": [1, 2]}, "one is missing"),
    ({**GOOD, "input_ids": [], "assistant_spans": []}, "non-empty list of token ids"),
    ({**GOOD, "input_ids": [1, -2], "assistant_spans": []}, "non-empty list of token ids"),
    ({**GOOD, "input_ids": [1, 2.5], "assistant_spans": []}, "non-empty list of token ids"),
    ({**GOOD, "input_ids": [1, 2], "assistant_spans": [1, 2]}, "list of [start, end)"),
    ({**GOOD, "input_ids": [1, 2], "assistant_spans": [[1, 3]]}, "outside the 2 tokens"),
    ({**GOOD, "input_ids": [1, 2], "assistant_spans": [[1, 1]]}, "is empty"),
    ({**GOOD, "input_ids": [1, 2, 3], "assistant_spans": [[1, 3], [2, 3]]}, "out of order"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS, ids=[reason for _, reason in BAD_ROWS])
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: Any, reason: str) -> None:
    path = write(tmp_path / "bad.jsonl", GOOD, "", row, GOOD)
    with pytest.raises(ValueError) as caught:
        load_conversations([path])
    assert str(caught.value).startswith(f"{path}:3: ") and reason in str(caught.value)


def test_text_that_is_not_utf8_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"messages": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not UTF-8"):
        load_conversations([path])


def test_a_gz_file_cut_short_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(b"".join(json.dumps({**GOOD, "id": str(i)}).encode() + b"\n" for i in range(100)))
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz:\d+: the gzip file is damaged or cut short"):
        load_conversations([path])
    path.write_bytes(b"no gzip at all")
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz:1: the gzip file is damaged"):
        load_conversations([path])


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_a_file_without_rows_is_an_error(tmp_path: Path, content: str) -> None:
    good, empty = write(tmp_path / "a.jsonl", GOOD), tmp_path / "empty.jsonl"
    empty.write_text(content)
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no row"):
        load_conversations([good, empty])


def test_a_missing_file_and_a_limit_of_nothing_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*none\.jsonl"):
        load_conversations([tmp_path / "none.jsonl"])
    with pytest.raises(ValueError, match="limit is 0"):
        load_conversations([write(tmp_path / "a.jsonl", GOOD)], limit=0)
