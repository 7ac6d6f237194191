"""Prompt files (JSONL or gz) -> checked rows of user turns to answer; every error names file and line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.prompts import check_whole_characters
from train.chat_turns import Message
from train.conversations import read_lines


@dataclass(frozen=True, slots=True)
class PromptRow:
    """turns: the messages before each answer, one tuple per user turn; where: `<file>:<line>`."""

    id: str
    source: str
    category: str
    turns: tuple[tuple[Message, ...], ...]
    where: str


def load_prompt_rows(paths: Sequence[Path], *, limit: int | None = None) -> list[PromptRow]:
    """All rows of all files in order, at most `limit`; blank lines are skipped, lines beyond the limit not read.

    Raises ValueError naming file and line for a broken row, and for an id that two rows share.
    """
    rows: list[PromptRow] = []
    seen: dict[str, str] = {}
    for path in paths:
        for number, line in read_lines(path):
            if len(rows) == limit:
                return rows
            row = parse_prompt_row(line, path=path, number=number)
            if row.id in seen:
                raise ValueError(
                    f"{row.where}: id {row.id!r} is already that of {seen[row.id]}; answers are kept by id, so give it another"
                )
            seen[row.id] = row.where
            rows.append(row)
    return rows


def parse_prompt_row(line: str, *, path: Path, number: int) -> PromptRow:
    """One JSON line -> its user turns. Assistant turns are dropped: the model answers anew."""
    where = f"{path}:{number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: broken JSON ({error.msg} at column {error.colno})") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list):
        raise ValueError(f"{where}: expected a JSON object with `messages`, a list of {{role, content}}")
    if not messages:
        raise ValueError(f"{where}: empty conversation (`messages` is an empty list)")
    turns = _turns([_message(message, f"{where}: message {index}") for index, message in enumerate(messages, start=1)])
    if not turns:
        raise ValueError(f"{where}: no user turn, so nothing to answer")
    identity = row.get("id")
    parsed = PromptRow(
        id=f"{path.name}:{number}" if identity is None else str(identity),
        source=str(row.get("source") or path.name.removesuffix(".gz").removesuffix(".jsonl")),
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
