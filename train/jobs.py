"""Prompt rows -> the conversations to be answered: each once, those of this shard, greedy or sampled."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infer.static.sampling import Sampling
from train.chat_turns import ChatTurns, join
from train.prompt_rows import PromptRow


@dataclass(slots=True)
class Job:
    """One conversation to be answered. pieces: token ids before the first and between later answers.

    failure: why it is set aside. notes: further fields of its row.
    """

    id: str
    row: PromptRow
    pieces: list[list[int]]
    sampling: Sampling
    input_ids: list[int] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    failure: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def next_prompt(self) -> list[int]:
        return join(self.input_ids, self.pieces[len(self.spans)])

    def take(self, token_ids: list[int], finish_reason: str, *, prompt: list[int] | None = None) -> None:
        """Adds an answer. prompt: the token ids that it answers, where they are not those of next_prompt."""
        prompt = self.next_prompt() if prompt is None else prompt
        self.input_ids = prompt + token_ids
        self.spans.append([len(prompt), len(self.input_ids)])
        self.finish_reasons.append(finish_reason)

    def as_row(self, tokenizer: Any) -> dict[str, Any]:
        messages: list[dict[str, str]] = []
        for turn, (start, end) in zip(self.row.turns, self.spans, strict=False):
            messages.extend(turn)
            text = tokenizer.decode(self.input_ids[start:end], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
        return {
            "id": self.id,
            "source": self.row.source,
            "category": self.row.category,
            "messages": messages,
            "temperature": self.sampling.temperature,
            "finish_reasons": self.finish_reasons,
            "input_ids": self.input_ids,
            "assistant_spans": self.spans,
        } | self.notes

    def as_prompt_row(self) -> dict[str, Any]:
        """What is written when it is set aside: a row that can be answered another time."""
        messages = [message for turn in self.row.turns for message in turn]
        return {
            "id": self.id,
            "source": self.row.source,
            "category": self.row.category,
            "messages": messages,
            "reason": self.failure,
        }


def make_jobs(rows: Sequence[PromptRow], chat: ChatTurns, *, sampling: Sampling, samples: int, sampled_share: float) -> Iterator[Job]:
    """The conversations, in the order of the rows. The share that is sampled is chosen by the rows' ids and gets
    `samples` answers each; the others are answered once, greedily.

    Raises ValueError naming the row that the chat template refuses.
    """
    for row in rows:
        try:
            pieces = chat.pieces(row.turns)
        except ValueError as error:
            raise ValueError(f"{row.where}: {error}") from None
        of_row = sampling if _is_sampled(row.id, sampled_share) else replace(sampling, temperature=0.0)
        for job_id in _job_ids(row.id, samples, sampled_share):
            yield Job(job_id, row, pieces, of_row)


def check_ids(rows: Iterable[tuple[str, str]], *, samples: int, sampled_share: float) -> None:
    """Answers are kept by id. Raises ValueError where those of two rows would share one. rows: the id of each, and where it stands."""
    seen: dict[str, str] = {}
    for row_id, where in rows:
        for job_id in _job_ids(row_id, samples, sampled_share):
            if job_id in seen:
                raise ValueError(
                    f"{where}: the id {job_id!r} of its answer is also that of an answer to {seen[job_id]}; answers are kept by id, "
                    "so give it another id"
                )
            seen[job_id] = where


def without_duplicates(rows: Sequence[PromptRow]) -> list[PromptRow]:
    """The first row of each conversation; case and white space make no other one."""
    first: dict[bytes, PromptRow] = {}
    for row in rows:
        text = "\0".join(f"{message['role']} {normalised(message['content'])}" for turn in row.turns for message in turn)
        first.setdefault(hashlib.sha256(text.encode()).digest(), row)
    return list(first.values())


def normalised(text: str) -> str:
    return " ".join(text.casefold().split())


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count`: the rows whose id's SHA-256 says so, whatever the order and number of rows."""

    index: int = 0
    count: int = 1

    def holds(self, row_id: str) -> bool:
        return int(_fraction(f"shard:{row_id}") * self.count) == self.index

    def file(self, output: Path) -> Path:
        """`answers.jsonl.gz` -> `answers-00000-of-00004.jsonl.gz`; the name itself where there is one part."""
        if self.count == 1:
            return output
        stem, dot, suffixes = output.name.partition(".")
        return output.with_name(f"{stem}-{self.index:05d}-of-{self.count:05d}{dot}{suffixes}")


def pick_shard(text: str | None) -> Shard:
    """`I/N`; None takes the process's rank under a launcher (RANK, WORLD_SIZE). Raises ValueError for what is neither."""
    if text is None:
        return Shard(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"--shard {text}: write I/N with I from 0 to N - 1, as 0/4")
    return Shard(int(index), int(count))


def _job_ids(row_id: str, samples: int, sampled_share: float) -> list[str]:
    if samples == 1 or not _is_sampled(row_id, sampled_share):
        return [row_id]
    return [f"{row_id}#{sample}" for sample in range(samples)]


def _is_sampled(row_id: str, share: float) -> bool:
    return _fraction(f"sampled:{row_id}") < share


def _fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
