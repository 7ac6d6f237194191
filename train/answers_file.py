"""Rows as they finish -> one JSONL file that is whole or absent, with a manifest, and survives being killed at any moment.

Rows go to `<output>.partial` behind a first line that holds the settings; a later run with the same
settings continues there. At the end they are written in the order of the prompts and renamed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from infer.output_file import check_writable, remove_leftovers, replacing_file, write_text
from medusa_heads.json_text import parse_json
from medusa_heads.lock import lock_output

ROWS_PER_SYNC = 32


class AnswersFile:
    """The output of one run. `done` maps the ids already answered to their place; use as a context manager."""

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        """Raises ValueError when the place cannot be written, or holds work made with other settings."""
        check_writable(output, "--output")
        self.output, self.settings = output, settings
        self.meta_path = output.with_name(output.name + ".meta.json")
        self.partial_path = output.with_name(output.name + ".partial")
        self.set_aside_path = output.with_name(output.name + ".set-aside.jsonl")
        self.done: dict[str, int] = {}
        self.is_finished, self.resumed = output.exists(), False
        self._file: BinaryIO | None = None
        self._end = self._unsynced = 0
        try:
            self._lock = lock_output(output, "--output")
            self._take_up()
        except OSError as error:  # files of another user, for one
            raise ValueError(f"--output {output}: {error.filename} cannot be used ({error.strerror}): choose another place") from None

    def __enter__(self) -> AnswersFile:
        if not self.is_finished:
            self._file = self.partial_path.open("ab")
            if not self._end:
                self._write({"settings": self.settings})
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # every row was flushed; what a full disk refused is refused once more
                self._file.close()
        self._lock.release()

    def append(self, row: dict[str, Any]) -> None:
        """Keeps a row: at once against a kill of the process, every 32 rows together against a loss of power."""
        place = self._end
        self._write(row)
        self.done[row["id"]] = place
        self._unsynced += 1
        if self._unsynced >= ROWS_PER_SYNC:
            self.flush()

    def flush(self) -> None:
        assert self._file is not None
        with self._explained():
            os.fsync(self._file.fileno())
        self._unsynced = 0

    def rows(self, ids: Iterable[str]) -> Iterator[dict[str, Any]]:
        """The rows kept of these conversations, in this order, one at a time."""
        return map(json.loads, self._lines(ids))

    def finish(self, ids: Iterable[str], meta: dict[str, Any], *, set_aside: Iterable[dict[str, Any]] = ()) -> None:
        """Writes the final file, its manifest first: what carries the final name is always complete.

        set_aside: the prompts without a usable answer, for a file of their own that can be answered later.
        """
        with self._explained(), replacing_file(self.output) as work:
            digest = _write_lines(work, self._lines(ids), is_packed=self.output.suffix == ".gz")
            left = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in set_aside)
            if left:
                write_text(self.set_aside_path, left)
            else:
                self.set_aside_path.unlink(missing_ok=True)
            manifest = {"file": self.output.name, "sha256": digest, "settings": self.settings} | meta
            write_text(self.meta_path, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        self.partial_path.unlink()
        self.is_finished = True

    def _write(self, row: dict[str, Any]) -> None:
        assert self._file is not None
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        with self._explained():
            self._file.write(line)
            self._file.flush()
        self._end += len(line)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns a full disk into an error for the user; what was kept before stays valid."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"--output {self.output} cannot be written ({reason}): make room; the same command continues") from None

    def _lines(self, ids: Iterable[str]) -> Iterator[bytes]:
        with self.partial_path.open("rb") as file:
            for row_id in ids:
                if (place := self.done.get(row_id)) is not None:
                    file.seek(place)
                    yield file.readline()

    def _take_up(self) -> None:
        """Goes on from what an earlier run left here, if anything."""
        for path in (self.output, self.meta_path, self.set_aside_path):
            remove_leftovers(path)
        if self.is_finished:
            if not self.meta_path.exists():
                raise ValueError(
                    f"--output {self.output} exists and was not made here (no {self.meta_path.name}): remove it or choose another name"
                )
            self._check(self._finished_settings(), self.output)
            self.partial_path.unlink(missing_ok=True)
        elif self.partial_path.exists():
            self._resume()

    def _finished_settings(self) -> dict[str, Any]:
        try:
            return _settings(parse_json(self.meta_path.read_bytes()))
        except ValueError:
            raise ValueError(
                f"{self.meta_path} is damaged (no settings in there), so what {self.output} was made with is unknown: remove both, "
                "or choose another --output"
            ) from None

    def _resume(self) -> None:
        """Reads the partial file; a last line that was cut off by a kill is dropped. One without answers is nobody's loss: it
        is started over where its settings are others."""
        settings: dict[str, Any] = {}
        with self.partial_path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    if number == 1:
                        settings = _settings(parse_json(line))
                    else:
                        self.done[_row_id(parse_json(line))] = self._end
                except ValueError:
                    raise ValueError(f"{self.partial_path}:{number} is damaged: remove the file to start over") from None
                self._end += len(line)
        if self.done:
            self._check(settings, self.partial_path)
        elif settings != self.settings:
            self._end = 0
        self.resumed = self._end > 0
        os.truncate(self.partial_path, self._end)

    def _check(self, found: dict[str, Any], path: Path) -> None:
        names = sorted(name for name in found.keys() | self.settings.keys() if found.get(name) != self.settings.get(name))
        if names:
            changes = "; ".join(f"{name} was {found.get(name)!r}, is now {self.settings.get(name)!r}" for name in names)
            raise ValueError(f"{path} was made with other settings ({changes}): restore them, remove the file, or choose another --output")


def _settings(found: Any) -> dict[str, Any]:
    """Of a manifest or a first line. Raises ValueError where there are none."""
    if isinstance(found, dict) and isinstance(found.get("settings"), dict):
        return found["settings"]
    raise ValueError("no settings")


def _row_id(row: Any) -> str:
    """Raises ValueError for what is no row of answers."""
    lists = ("input_ids", "assistant_spans", "finish_reasons")
    if isinstance(row, dict) and isinstance(row.get("id"), str) and all(isinstance(row.get(name), list) for name in lists):
        return row["id"]
    raise ValueError("no row of answers")


def count_rows(rows: Iterable[dict[str, Any]], *, num_turns: dict[str, int]) -> dict[str, Any]:
    """What a file of answers holds. num_turns: user turns of each conversation."""
    counts: Counter[str] = Counter({"conversations": 0, "answers": 0, "tokens": 0, "answer_tokens": 0, "cut_short_by_context": 0})
    finish_reasons: Counter[str] = Counter()
    tokens_from: Counter[str] = Counter()
    for row in rows:
        counts["conversations"] += 1
        counts["answers"] += len(row["assistant_spans"])
        counts["tokens"] += len(row["input_ids"])
        counts["answer_tokens"] += sum(end - start for start, end in row["assistant_spans"])
        counts["cut_short_by_context"] += len(row["assistant_spans"]) < num_turns[row["id"]]
        for name in ("other_template", "rewritten_turns"):
            counts[name] += row.get(name, 0)
        finish_reasons.update(row["finish_reasons"])
        tokens_from[row.get("tokens_from", "model")] += 1
    return {**counts, "finish_reasons": dict(finish_reasons), "tokens_from": dict(tokens_from)}


def _write_lines(path: Path, lines: Iterable[bytes], *, is_packed: bool) -> str:
    """Writes the lines, gzipped where asked, the same bytes at any time and under any name; returns their file's SHA-256."""
    with path.open("wb") as file:
        if is_packed:
            with gzip.GzipFile(fileobj=file, mode="wb", mtime=0, filename="") as packed:
                packed.writelines(lines)
        else:
            file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as written:
        return hashlib.file_digest(written, "sha256").hexdigest()
