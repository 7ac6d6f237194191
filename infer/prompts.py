"""A prompt file (JSONL or gz) -> prompts, and chat messages -> the token ids a model answers to."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from medusa_heads.json_text import parse_json

MAX_NAMED_LINES = 5  # of a file with many broken lines, so that the message stays readable


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt file. messages: the turns up to and including the first user turn; reference: the right
    answer to it, where the row has one."""

    id: str
    category: str
    messages: list[dict[str, str]]
    reference: str | None = None


def load_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file of rows {"id", "source", "category", "messages"}.

    Raises ValueError naming every broken line by number, also those beyond the limit.
    """
    prompts: list[Prompt] = []
    broken: list[str] = []
    for number, line in _lines(Path(path)):
        if not line.strip():
            continue
        try:
            prompts.append(_parse(line, number))
        except ValueError as error:
            broken.append(f"line {number} {error}")
    if broken:
        rest = f" and {len(broken) - MAX_NAMED_LINES} more" if len(broken) > MAX_NAMED_LINES else ""
        raise ValueError(f"{path}: {'; '.join(broken[:MAX_NAMED_LINES])}{rest}. Each line must be one JSON object with `messages`")
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit}: take at least 1 prompt")
    if not prompts:
        raise ValueError(f"--prompts {path} holds no prompts: give one JSON object with `messages` per line")
    return prompts[:limit]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except FileNotFoundError:
        raise ValueError(f"--prompts {path}: no such file") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path} cannot be read ({error}): is it whole, and JSONL or gzipped JSONL?") from None
    return enumerate(text.split("\n"), start=1)


def check_whole_characters(text: str, where: str) -> None:
    """Raises ValueError naming `where` for text that no tokenizer and no file takes: JSON may hold half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds half a surrogate pair ({error.reason}): the text was cut inside a character") from None


def _parse(line: str, number: int) -> Prompt:
    try:
        row = parse_json(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON ({error.msg})") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError("has no messages")
    kept: list[dict[str, str]] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or not isinstance(message.get("role"), str):
            raise ValueError("has a message without `role` and `content` strings")
        for part in ("role", "content"):
            check_whole_characters(message[part], part)
        kept.append({"role": message["role"], "content": message["content"]})
        if message["role"] == "user":
            prompt = Prompt(str(row.get("id", f"line-{number}")), str(row.get("category", "all")), kept, _reference(row.get("reference")))
            for part in ("id", "category"):
                check_whole_characters(getattr(prompt, part), part)
            return prompt
    raise ValueError("has no user turn")


def _reference(value: Any) -> str | None:
    """A string, or the first of a list with one for each turn."""
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, str) else None


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, as stored."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def encode_chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Chat messages -> the token ids after which the model answers.

    Raises ValueError when the tokenizer has no chat template, or one that refuses these messages or
    opens no answer, and for text cut inside a character.
    """
    for message in messages:
        check_whole_characters(message["content"], f"the {message['role']}'s message")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("--base: the model's tokenizer has no chat template: give a model tuned for chat")
    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        closed = tokenizer.apply_chat_template(list(messages), add_generation_prompt=False, tokenize=False)
        answered = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "x"}], tokenize=False)
        encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=True)
    except (TemplateError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the base model's chat template refuses these messages: {error}") from None
    # Some templates need no generation prompt because the user's turn already ends where the answer begins.
    if text == closed and not answered[len(text) :].lstrip().startswith("x"):
        raise ValueError("the base model's chat template has no generation prompt: it never opens the assistant's turn")
    return list(encoded["input_ids"])
