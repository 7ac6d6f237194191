"""Files and data sets of the hub -> conversations, checked; every error names its source and row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.prompts import check_whole_characters
from train.row_shapes import DataFormat, detect_shape, with_messages
from train.row_source import NumberedRow, read_rows, short_name

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row of data.

    messages: dicts with `role` and `content`; may be empty when exact tokens are given.
    input_ids: the exact token ids of the conversation as the base model saw and produced them.
    assistant_spans: [start, end) indices into input_ids of the tokens the base model itself produced.
    """

    id: str
    messages: tuple[dict[str, str], ...]
    input_ids: tuple[int, ...] | None = None
    assistant_spans: tuple[tuple[int, int], ...] | None = None


def read_conversations(
    sources: Sequence[str | Path], *, limit: int | None = None, data_format: DataFormat = "auto"
) -> Iterator[Conversation]:
    """The rows of all sources (see row_source) in order, at most `limit` in total.

    data_format: the shape of the rows; auto takes the shape of the first row for its whole file.
    Raises ValueError naming source and row for a row that is no conversation to train on, and for a
    source that is missing, damaged or without a row.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}: it must be at least 1")
    count = 0
    for source in sources:
        shape, is_empty = data_format, True
        for found in read_rows(source):
            if count == limit:
                return
            if shape == "auto":
                shape = detect_shape(found.row, found.where)
            is_empty = False
            count += 1
            yield parse_row(found, source=source, shape=shape)
        if is_empty:
            raise ValueError(f"{source} holds no row: expected conversations, one JSON object with `messages` each")


def parse_row(found: NumberedRow, *, source: str | Path, shape: DataFormat) -> Conversation:
    """One row -> a conversation. Raises ValueError with `<source>:<number>:` and the reason."""
    row, where = with_messages(found.row, shape, found.where), found.where
    input_ids, spans = _exact_tokens(row, where)
    messages = _messages(row, where, optional=input_ids is not None)
    identity = f"{short_name(source)}:{found.number}" if row.get("id") is None else str(row["id"])
    check_whole_characters(identity, f"{where}: id")
    return Conversation(identity, messages, input_ids, spans)


def _messages(row: dict[str, Any], where: str, *, optional: bool) -> tuple[dict[str, str], ...]:
    messages = row.get("messages")
    if messages is None:
        if optional:
            return ()
        raise ValueError(f"{where}: no `messages`; expected a list of {{role, content}}")
    if not isinstance(messages, list):
        raise ValueError(f"{where}: `messages` is {type(messages).__name__}, not a list of {{role, content}}")
    if not messages and not optional:
        raise ValueError(f"{where}: empty conversation (`messages` is an empty list)")
    checked = tuple(_message(message, f"{where}: message {index}") for index, message in enumerate(messages, start=1))
    if not optional and all(message["role"] != "assistant" for message in checked):
        raise ValueError(f"{where}: no assistant turn, so nothing to train on; let the base answer first with `medusa-heads regenerate`")
    return checked


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {type(message).__name__}, not an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"{where} has role {role!r}; known are {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"{where} has a content of type {type(content).__name__}; only text (a string) can be used")
    check_whole_characters(content, where)
    return {"role": role, "content": content}


def _exact_tokens(row: dict[str, Any], where: str) -> tuple[tuple[int, ...] | None, tuple[tuple[int, int], ...] | None]:
    ids, spans = row.get("input_ids"), row.get("assistant_spans")
    if ids is None and spans is None:
        return None, None
    if ids is None or spans is None:
        raise ValueError(f"{where}: `input_ids` and `assistant_spans` come together; one is missing")
    if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise ValueError(f"{where}: `input_ids` must be a non-empty list of token ids")
    position, checked = 0, []
    for span in spans if isinstance(spans, list) else [spans]:
        if not isinstance(span, list) or len(span) != 2 or not all(type(edge) is int for edge in span):
            raise ValueError(f"{where}: `assistant_spans` must be a list of [start, end) token indices, found {span!r}")
        if not position <= span[0] < span[1] <= len(ids):
            raise ValueError(f"{where}: assistant span {span} is empty, out of order or outside the {len(ids)} tokens")
        position = span[1]
        checked.append((span[0], span[1]))
    return tuple(ids), tuple(checked)
