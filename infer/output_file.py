"""Text -> a file that is whole or absent; and whether it can be written, known before long work."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_writable(path: Path, option: str) -> None:
    """Raises ValueError naming `option` when `path` cannot be written. Makes missing folders."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: give a file name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-"):
            pass
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written ({error.strerror}): choose another place") from None


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` that takes its place when the block succeeds. A link stays one: what it points to is replaced."""
    path = path.resolve()
    work = path.with_name(f".{path.name}-{os.getpid()}{path.suffix}")
    try:
        yield work
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """Removes what killed writers of `path` left beside it. For the holder of its lock alone: nobody may be writing it."""
    path = path.resolve()
    name = re.compile(rf"\.{re.escape(path.name)}-\d+{re.escape(path.suffix)}")
    for leftover in path.parent.iterdir():
        if name.fullmatch(leftover.name):
            leftover.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replacing_file(path) as work:
        work.write_text(text, encoding="utf-8")
