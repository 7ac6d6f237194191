"""Rows as they finish -> one JSONL file that is whole or absent, and survives being killed at any moment.

Rows go to `<output>.partial` behind a first line that holds the settings; a later run with the same
settings continues there. At the end they are written in the order of the prompts and renamed.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from infer.output_file import check_writable, remove_leftovers, replacing_file, write_text
from medusa_heads.lock import lock_output

ROWS_PER_FLUSH = 32


class AnswersFile:
    """The output of one run. `done` holds the ids already answered; use as a context manager."""

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        """Raises ValueError when the place cannot be written, or holds work made with other settings."""
        check_writable(output, "--output")
        self.output, self.settings = output, settings
        self.meta_path = output.with_name(output.name + ".meta.json")
        self.partial_path = output.with_name(output.name + ".partial")
        self.done: set[str] = set()
        self.is_finished, self.resumed = output.exists(), False
        self._file: BinaryIO | None = None
        self._unflushed = 0
        output.parent.mkdir(parents=True, exist_ok=True)
        self._lock = lock_output(output, "--output")
        for path in (self.output, self.meta_path):
            remove_leftovers(path)
        if self.is_finished:
            if not self.meta_path.exists():
                raise ValueError(
                    f"--output {output} exists and was not made here (no {self.meta_path.name}): remove it or choose another name"
                )
            self._check(json.loads(self.meta_path.read_text(encoding="utf-8"))["settings"], output)
            self.partial_path.unlink(missing_ok=True)
        elif self.partial_path.exists():
            self._resume()

    def __enter__(self) -> AnswersFile:
        if not self.is_finished:
            begun = self.partial_path.exists()
            self._file = self.partial_path.open("ab")
            if not begun:
                self._file.write(_line({"settings": self.settings}))
                self._file.flush()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()
        self._lock.release()

    def append(self, row: dict[str, Any]) -> None:
        """Keeps a row; every 32 rows reach the disk together."""
        assert self._file is not None
        self._file.write(_line(row))
        self.done.add(row["id"])
        self._unflushed += 1
        if self._unflushed >= ROWS_PER_FLUSH:
            self.flush()

    def flush(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._unflushed = 0

    def rows(self) -> list[dict[str, Any]]:
        """The rows kept so far."""
        if self._file is not None:
            self.flush()
        return [json.loads(line) for line in self.partial_path.read_bytes().splitlines()[1:]]

    def finish(self, rows: Sequence[dict[str, Any]], meta: dict[str, Any]) -> None:
        """Writes the final file, its meta data first: what carries the final name is always complete."""
        write_text(self.meta_path, json.dumps({"settings": self.settings} | meta, indent=2, ensure_ascii=False) + "\n")
        data = b"".join(map(_line, rows))
        with replacing_file(self.output) as work:
            work.write_bytes(_gzipped(data) if self.output.suffix == ".gz" else data)
        self.partial_path.unlink()
        self.is_finished = True

    def _resume(self) -> None:
        """Reads the partial file; a last line that was cut off by a kill is dropped."""
        data = self.partial_path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            self.partial_path.unlink()
            return
        rows = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                rows.append(json.loads(line))
            except ValueError:
                raise ValueError(f"{self.partial_path}:{number} is damaged: remove the file to start over") from None
        self._check(rows[0].get("settings", {}), self.partial_path)
        self.done, self.resumed = {row["id"] for row in rows[1:]}, True
        if len(whole) < len(data):
            os.truncate(self.partial_path, len(whole))

    def _check(self, found: dict[str, Any], path: Path) -> None:
        names = sorted(name for name in found.keys() | self.settings.keys() if found.get(name) != self.settings.get(name))
        if names:
            changes = "; ".join(f"{name} was {found.get(name)!r}, is now {self.settings.get(name)!r}" for name in names)
            raise ValueError(f"{path} was made with other settings ({changes}): restore them, remove the file, or choose another --output")


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _gzipped(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, filename="") as file:
        file.write(data)
    return buffer.getvalue()
