"""Files and data sets of the hub -> checked rows of user turns to answer; every error names source and row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.prompts import check_whole_characters
from train.chat_turns import Message
from train.row_shapes import DataFormat, detect_shape, with_messages
from train.row_source import NumberedRow, read_rows, short_name

SUFFIX = re.compile(r"\.(jsonl|json|parquet)(\.gz)?$")


@dataclass(frozen=True, slots=True)
class PromptRow:
    """turns: the messages before each answer, one tuple per user turn; where: `<source>:<number>`."""

    id: str
    source: str
    category: str
    turns: tuple[tuple[Message, ...], ...]
    where: str


def load_prompt_rows(sources: Sequence[str | Path], *, limit: int | None = None, data_format: DataFormat = "auto") -> list[PromptRow]:
    """All rows of all sources (see row_source) in order, at most `limit`; rows beyond the limit are not read.

    data_format: the shape of the rows; auto takes the shape of the first row for its whole file.
    Raises ValueError naming source and row for a broken row, and for an id that two rows share.
    """
    rows: list[PromptRow] = []
    seen: dict[str, str] = {}
    for source in sources:
        shape = data_format
        for found in read_rows(source):
            if len(rows) == limit:
                return rows
            if shape == "auto":
                shape = detect_shape(found.row, found.where)
            row = parse_prompt_row(found, source=source, shape=shape)
            if row.id in seen:
                raise ValueError(
                    f"{row.where}: id {row.id!r} is already that of {seen[row.id]}; answers are kept by id, so give it another"
                )
            seen[row.id] = row.where
            rows.append(row)
    return rows


def parse_prompt_row(found: NumberedRow, *, source: str | Path, shape: DataFormat) -> PromptRow:
    """One row -> its user turns. Assistant turns are dropped: the model answers anew."""
    row, where = with_messages(found.row, shape, found.where), found.where
    messages = row.get("messages")
    if not isinstance(messages, list):
        raise ValueError(f"{where}: expected a JSON object with `messages`, a list of {{role, content}}")
    if not messages:
        raise ValueError(f"{where}: empty conversation (no messages)")
    turns = _turns([_message(message, f"{where}: message {index}") for index, message in enumerate(messages, start=1)])
    if not turns:
        raise ValueError(f"{where}: no user turn, so nothing to answer")
    name, identity = short_name(source), row.get("id")
    parsed = PromptRow(
        id=f"{name}:{found.number}" if identity is None else str(identity),
        source=str(row.get("source") or SUFFIX.sub("", name)),
        category=str(row.get("category") or ""),
        turns=turns,
        where=where,
    )
    for part in ("id", "source", "category"):
        check_whole_characters(getattr(parsed, part), f"{where}: {part}")
    return parsed


def _turns(messages: list[Message]) -> tuple[tuple[Message, ...], ...]:
    turns: list[tuple[Message, ...]] = []
    pending: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            pending.append(message)
        if message["role"] == "user":
            turns.append(tuple(pending))
            pending = []
    return tuple(turns)


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ("system", "user", "assistant"):
        raise ValueError(f"{where} is not {{role, content}} with role system, user or assistant")
    content = message.get("content")
    if not isinstance(content, str):
        raise ValueError(f"{where} has a content of type {type(content).__name__}; only text (a string) can be used")
    if message["role"] == "user" and not content.strip():
        raise ValueError(f"{where}: the user says nothing (empty content)")
    check_whole_characters(content, where)
    return {"role": message["role"], "content": content}
