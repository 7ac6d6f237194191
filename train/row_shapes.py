"""A row in ShareGPT or Alpaca shape -> the same row with `messages`, a list of {role, content}."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

DataFormat = Literal["auto", "messages", "sharegpt", "alpaca"]

SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
}


def detect_shape(row: dict[str, Any], where: str) -> DataFormat:
    """The shape of a file, by the fields of its first row. Raises ValueError when it is none of the known ones."""
    filled = {name for name, value in row.items() if value is not None}
    if filled & {"messages", "input_ids", "assistant_spans"}:
        return "messages"
    if "conversations" in filled:
        return "sharegpt"
    if "instruction" in filled:
        return "alpaca"
    raise ValueError(
        f"{where}: no `messages` (a list of {{role, content}}), no `conversations` (ShareGPT) and no `instruction` (Alpaca); "
        f"the row has {', '.join(sorted(row)) or 'no fields'}: rename a field, or convert the file to one of these shapes"
    )


def with_messages(row: dict[str, Any], shape: DataFormat, where: str) -> dict[str, Any]:
    """The row with `messages` in the place of the shape's own fields; the reader of messages checks them.

    Raises ValueError naming the field that is missing or of the wrong type.
    """
    return row if shape == "messages" else row | {"messages": SHAPES[shape](row, where)}


def _from_sharegpt(row: dict[str, Any], where: str) -> list[Any]:
    turns = row.get("conversations")
    if not isinstance(turns, list):
        found = "no `conversations`" if turns is None else f"`conversations` is {type(turns).__name__}"
        raise ValueError(f"{where}: {found}; expected a list of {{from, value}}, as in ShareGPT (other shapes: --data-format)")
    return _system(row, where) + [_turn(turn, f"{where}: turn {number}") for number, turn in enumerate(turns, start=1)]


def _turn(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise ValueError(f"{where} is {type(turn).__name__}, not an object with `from` and `value`")
    speaker, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise ValueError(f"{where} is from {speaker!r}; known are {', '.join(SPEAKERS)}")
    return {"role": SPEAKERS[speaker], "content": text}


def _from_alpaca(row: dict[str, Any], where: str) -> list[Any]:
    for name in ("instruction", "input", "output"):
        if not isinstance(row.get(name, ""), str | None):
            raise ValueError(f"{where}: `{name}` is {type(row[name]).__name__}, not text")
    question = "\n\n".join(part for part in (row.get("instruction"), row.get("input")) if part and part.strip())
    if not question:
        raise ValueError(f"{where}: no `instruction`, as in Alpaca, or an empty one (other shapes: --data-format)")
    answer = [] if row.get("output") is None else [{"role": "assistant", "content": row["output"]}]
    return [*_system(row, where), {"role": "user", "content": question}, *answer]


def _system(row: dict[str, Any], where: str) -> list[Any]:
    """Some files keep the system message beside the turns."""
    text = row.get("system")
    if not isinstance(text, str | None):
        raise ValueError(f"{where}: `system` is {type(text).__name__}, not text")
    return [{"role": "system", "content": text}] if text else []


SHAPES: dict[str, Callable[[dict[str, Any], str], list[Any]]] = {"sharegpt": _from_sharegpt, "alpaca": _from_alpaca}
