"""The name of a file or of a data set on the hub -> its rows as JSON objects, numbered; every error names both."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import datasets
import pyarrow
import pyarrow.parquet

from medusa_heads.json_text import parse_json

HUB_PREFIX = "hf:"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?")
FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".gz")
KNOWN_SOURCES = "a JSONL, JSON or Parquet file, or a data set on the hub as hf:owner/name[/config][:split]"


@dataclass(frozen=True, slots=True)
class NumberedRow:
    """number: of the line in a JSONL file, else of the row, from 1; where: `<source>:<number>`, for errors."""

    row: dict[str, Any]
    number: int
    where: str


def read_rows(source: str | Path) -> Iterator[NumberedRow]:
    """All rows in order; blank lines are skipped.

    Raises ValueError naming source and row for what cannot be read or is no JSON object.
    """
    name = str(source)
    for number, row in _hub_rows(name) if is_hub_name(name) else _file_rows(Path(source)):
        where = f"{name}:{number}"
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected a JSON object with `messages`, found {type(row).__name__}")
        yield NumberedRow(row, number, where)


def is_hub_name(name: str) -> bool:
    """`hf:...`, or owner/name where no such file exists and the name is not that of a data file."""
    if name.startswith(HUB_PREFIX):
        return True
    return HUB_ID.fullmatch(name) is not None and not name.endswith(FILE_SUFFIXES) and not Path(name).exists()


def short_name(source: str | Path) -> str:
    """What stands for the source in the ids of rows that have none: the file's name, or the hub id."""
    name = str(source)
    return name.removeprefix(HUB_PREFIX) if is_hub_name(name) else Path(name).name


def content_sha256(source: str | Path) -> str:
    """SHA-256 of the stored bytes: of the file, or of the data set's Arrow files on this machine."""
    name = str(source)
    paths = [entry["filename"] for entry in _load_hub(name).cache_files] if is_hub_name(name) else [name]
    digests = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


# ---------------------------------------------------------------- files


def _file_rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.name.endswith(".parquet"):
        return _parquet_rows(path)
    if path.name.endswith((".json", ".json.gz")) and _starts_an_array(path):
        return _array_rows(path)
    return _line_rows(path)


def _line_rows(path: Path) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if (text := line.decode("utf-8-sig" if number == 1 else "utf-8")).strip():
                    yield number, _parse(text, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}:{number}: not UTF-8 text ({error})") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}:{number + 1}: the gzip file is damaged or cut short ({error}); copy it again") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}. Give {KNOWN_SOURCES}") from None


def _array_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows of one JSON array, as ShareGPT and Alpaca were published."""
    try:
        with _open(path) as file:
            text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path}: it is damaged or cut short ({error}); copy it again") from None
    return enumerate(_parse(text, str(path)), start=1)


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except FileNotFoundError:
        raise ValueError(f"cannot read {path}: no such file") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}:{number + 1}: the Parquet file is damaged or cut short ({error}); copy it again") from None


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _starts_an_array(path: Path) -> bool:
    try:
        with _open(path) as file:
            return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    except (OSError, EOFError, zlib.error):
        return False  # the reader of lines says what is wrong


def _parse(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{where}: broken JSON ({error.msg} at {place})") from None


# ---------------------------------------------------------------- the hub


def _hub_rows(name: str) -> Iterator[tuple[int, Any]]:
    return enumerate(_load_hub(name), start=1)


def _load_hub(name: str) -> datasets.Dataset:
    """The data set, downloaded once into the library's own cache; from there alone with HF_HUB_OFFLINE=1."""
    place, _, split = name.removeprefix(HUB_PREFIX).partition(":")
    parts = place.split("/")
    if not 1 <= len(parts) <= 3 or not all(parts):
        raise ValueError(f"{name}: expected hf:owner/name[/config][:split]")
    try:
        return datasets.load_dataset("/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split=split or "train")
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = "" if name.startswith(HUB_PREFIX) else "no such file, and as a data set on the hub: "
        raise ValueError(f"cannot read {name}: {hint}{reason}. Give {KNOWN_SOURCES}") from None
