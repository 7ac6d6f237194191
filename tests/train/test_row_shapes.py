"""ShareGPT and Alpaca rows become the messages they mean, detected or named, for training and for prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from train.conversations import read_conversations
from train.prompt_rows import load_prompt_rows
from train.row_shapes import DataFormat

Row = dict[str, Any]
SHAREGPT: Row = {
    "id": "s",
    "system": "Be brief.",
    "conversations": [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
        {"role": "user", "content": "Bye"},
        {"from": "gpt", "value": "Bye!"},
    ],
}
ALPACA: Row = {"instruction": "Translate.", "input": "chat", "output": "cat"}


def write(path: Path, *rows: Row) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, data_format: DataFormat = "auto") -> list[list[tuple[str, str]]]:
    return [[(m["role"], m["content"]) for m in c.messages] for c in read_conversations([path], data_format=data_format)]


def test_shapes_are_told_by_the_first_row_of_each_file(tmp_path: Path) -> None:
    system = ("system", "Be brief.")
    sharegpt = [system, ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "Bye!")]
    alpaca = [("user", "Translate.\n\nchat"), ("assistant", "cat")]
    one, two = write(tmp_path / "s.jsonl", SHAREGPT), write(tmp_path / "a.jsonl", ALPACA, {**ALPACA, "input": "", "system": "Be brief."})
    assert read(one) == [sharegpt]
    assert read(two) == [alpaca, [system, ("user", "Translate."), ("assistant", "cat")]]
    assert [c.id for c in read_conversations([one, two])] == ["s", "a.jsonl:1", "a.jsonl:2"]


def test_a_named_shape_wins(tmp_path: Path) -> None:
    both = write(tmp_path / "b.jsonl", {**SHAREGPT, **ALPACA})
    assert [len(messages) for messages in read(both) + read(both, "alpaca")] == [5, 3]
    with pytest.raises(ValueError, match=r"b\.jsonl:1: no `messages`"):
        read(both, "messages")


def test_prompts_take_the_same_shapes_and_need_no_answer(tmp_path: Path) -> None:
    alone = {"instruction": "Translate.", "input": "chat", "output": None}
    share, alpaca = load_prompt_rows([write(tmp_path / "s.jsonl", SHAREGPT), write(tmp_path / "a.jsonl", alone)])
    assert [[m["content"] for m in turn] for turn in share.turns] == [["Be brief.", "Hi"], ["Bye"]]
    assert (alpaca.id, alpaca.source, [m["content"] for m in alpaca.turns[0]]) == ("a.jsonl:1", "a", ["Translate.\n\nchat"])
    with pytest.raises(ValueError, match=r"a\.jsonl:1: no assistant turn.*medusa-heads regenerate"):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("first", "row", "message"),
    [
        (SHAREGPT, ALPACA, "2: no `conversations`; expected a list of {from, value}, as in ShareGPT"),
        (SHAREGPT, {"conversations": "hi"}, "2: `conversations` is str"),
        (SHAREGPT, {"conversations": ["hi"]}, "2: turn 1 is str, not an object"),
        (SHAREGPT, {"conversations": [{"from": "tool", "value": "x"}]}, "2: turn 1 is from 'tool'; known are system, human"),
        (SHAREGPT, {"conversations": [{"from": ["x"], "value": "x"}]}, "2: turn 1 is from ['x']"),
        (SHAREGPT, {"conversations": [{"from": "gpt"}]}, "2: message 1 has a content of type NoneType"),
        (SHAREGPT, {"conversations": []}, "2: empty conversation"),
        (SHAREGPT, {**SHAREGPT, "system": 3}, "2: `system` is int"),
        (ALPACA, SHAREGPT, "2: no `instruction`, as in Alpaca"),
        (ALPACA, {**ALPACA, "instruction": " ", "input": ""}, "2: no `instruction`, as in Alpaca, or an empty one"),
        (ALPACA, {**ALPACA, "output": ["cat"]}, "2: `output` is list, not text"),
        ({"prompt": "x", "text": "y"}, ALPACA, "1: no `messages` (a list of {role, content}), no `conversations` (ShareGPT)"),
        ({"prompt": "x", "text": "y"}, ALPACA, "the row has prompt, text"),
    ],
)
def test_rows_of_no_use_are_named(tmp_path: Path, first: Row, row: Row, message: str) -> None:
    path = write(tmp_path / "x.jsonl", first, row)
    with pytest.raises(ValueError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:") and message in str(caught.value)
