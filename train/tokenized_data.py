"""Files and data sets of the hub -> tokenised conversations as one Arrow data set, kept under a key of their content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
from datasets.arrow_writer import ArrowWriter

from medusa_heads.json_text import parse_json
from medusa_heads.replacing import scratch_folder
from train.circles import circle_end
from train.conversations import Conversation, read_conversations
from train.row_shapes import DataFormat
from train.row_source import content_sha256, short_name
from train.tokenization import TokenizedRow, check_template, tokenize_conversation

CACHE_VERSION = 3
"""Raised with every change, here or in the tokenization, that gives other tokens or masks."""

ROWS_PER_PROCESS = 5000

INPUT_FEATURES = datasets.Features(
    {
        "id": datasets.Value("string"),
        "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
        "input_ids": datasets.List(datasets.Value("int32")),
        "assistant_spans": datasets.List(datasets.List(datasets.Value("int32"))),
    }
)
OUTPUT_FEATURES = datasets.Features(
    {
        "id": datasets.Value("string"),
        "input_ids": datasets.List(datasets.Value("int32")),
        "assistant_mask": datasets.List(datasets.Value("bool")),
        "cut": datasets.Value("bool"),
        "circles": datasets.Value("bool"),
        "num_tokens": datasets.Value("int32"),
        "num_supervised": datasets.Value("int32"),
        "has_slot": datasets.Value("bool"),
    }
)


@dataclass(frozen=True, slots=True)
class DataCounts:
    """rows: kept; skipped: without a supervised slot; cut: at max_length, and circles: with an answer that goes in circles, of all
    rows read; tokens and supervised_tokens: of the rows kept."""

    rows: int
    skipped: int
    cut: int
    circles: int
    tokens: int
    supervised_tokens: int

    @property
    def supervised_rate(self) -> float:
        return self.supervised_tokens / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        return (
            f"{self.rows:,} conversations, {self.tokens:,} tokens, {self.supervised_tokens:,} supervised ({self.supervised_rate:.1%}); "
            f"{self.cut:,} cut at max_length, {self.circles:,} go in circles, {self.skipped:,} skipped without a supervised slot"
        )


def tokenize_dataset(
    sources: Sequence[str | Path],
    tokenizer: Any,
    *,
    max_length: int,
    cut_circles: bool = False,
    limit: int | None = None,
    data_format: DataFormat = "auto",
    cache_dir: Path | None = None,
    num_proc: int | None = None,
) -> tuple[datasets.Dataset, DataCounts]:
    """All conversations of the sources (see row_source), tokenised: a dataset with columns id, input_ids, assistant_mask.

    Conversations longer than max_length are cut at the right, with cut_circles before that behind the first repetition of an
    answer that goes in circles. Rows in which no slot is supervised, which takes two supervised tokens in a row, are left out.
    With cache_dir all lies on disk, and the result is kept there under a hash of everything it depends on; without, in memory.
    num_proc: None takes one process per 5,000 conversations, at most one per core.
    Raises ValueError for unusable sources (see read_conversations) and when nothing is left to train on.
    """
    if max_length < 2:
        raise ValueError(f"max_length is {max_length}: it must be at least 2")
    if cache_dir is None:
        with tempfile.TemporaryDirectory() as scratch:
            conversations = _as_arrow(sources, tokenizer, limit, data_format, Path(scratch), in_memory=True)
            return _kept(_map(conversations, tokenizer, max_length, cut_circles, num_proc, file=None), sources, max_length)
    folder = cache_dir / _cache_key(sources, tokenizer, max_length, cut_circles, limit, data_format)
    if (kept := _read_cache(folder)) is None:
        shutil.rmtree(folder, ignore_errors=True)
        _prepare(folder, sources, tokenizer, max_length, cut_circles, limit, data_format, num_proc)
        kept = _read_cache(folder)
    assert kept is not None, f"{folder} cannot be read back"
    return kept


def _read_cache(folder: Path) -> tuple[datasets.Dataset, DataCounts] | None:
    """None where nothing is kept, or what is kept is damaged: a loss of power or a clean-up of old files does that."""
    try:
        rows, counts = datasets.load_from_disk(str(folder / "rows")), DataCounts(**parse_json((folder / "counts.json").read_text()))
    except (OSError, ValueError, TypeError, LookupError, pyarrow.ArrowException):
        return None
    return (rows, counts) if len(rows) == counts.rows else None


def _prepare(
    folder: Path,
    sources: Sequence[str | Path],
    tokenizer: Any,
    max_length: int,
    cut_circles: bool,
    limit: int | None,
    data_format: DataFormat,
    num_proc: int | None,
) -> None:
    """Writes rows and counts to a temporary folder and renames it; another process may have been faster."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(folder.parent, ".preparing-") as scratch:
            conversations = _as_arrow(sources, tokenizer, limit, data_format, scratch, in_memory=False)
            tokenized = _map(conversations, tokenizer, max_length, cut_circles, num_proc, file=scratch / "all.arrow")
            rows, counts = _kept(tokenized, sources, max_length)
            work = scratch / folder.name
            rows.save_to_disk(str(work / "rows"))
            (work / "counts.json").write_text(json.dumps(asdict(counts)))
            if folder.name != _cache_key(sources, tokenizer, max_length, cut_circles, limit, data_format):
                names = ", ".join(map(str, sources))
                raise ValueError(f"data: {names} changed while it was read: start again once nothing writes to it any more")
            try:
                work.rename(folder)
            except OSError:
                assert folder.exists(), f"{folder} could not be written"
    except OSError as error:
        raise ValueError(f"cannot write the data cache in {folder.parent}: {error}") from None


def _as_arrow(
    sources: Sequence[str | Path], tokenizer: Any, limit: int | None, data_format: DataFormat, scratch: Path, *, in_memory: bool
) -> datasets.Dataset:
    """The conversations as one Arrow file in `scratch`, row by row: data may be larger than memory."""
    path, is_checked = scratch / "conversations.arrow", False
    writer = ArrowWriter(features=INPUT_FEATURES, path=str(path))
    for conversation in read_conversations(sources, limit=limit, data_format=data_format):
        if conversation.input_ids is None and not is_checked:
            check_template(tokenizer)
            is_checked = True
        writer.write(asdict(conversation))
    writer.finalize()
    return datasets.Dataset.from_file(str(path), in_memory=in_memory)


def _map(
    conversations: datasets.Dataset, tokenizer: Any, max_length: int, cut_circles: bool, num_proc: int | None, *, file: Path | None
) -> datasets.Dataset:
    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        tokenized = tokenize_conversation(Conversation(**row), tokenizer)
        circles = _circles(tokenized)
        end = min(max_length, circles) if circles and cut_circles else max_length
        ids, mask = tokenized.input_ids[:end], tokenized.assistant_mask[:end]
        return {
            "id": row["id"],
            "input_ids": ids,
            "assistant_mask": mask,
            "cut": len(tokenized.input_ids) > max_length == end,
            "circles": circles is not None,
            "num_tokens": len(ids),
            "num_supervised": sum(mask),
            "has_slot": any(a and b for a, b in pairwise(mask[1:])),  # the first token has none before it to predict it
        }

    return conversations.map(
        tokenize,
        remove_columns=["messages", "assistant_spans"],
        features=OUTPUT_FEATURES,
        num_proc=num_proc or _num_processes(len(conversations)),
        keep_in_memory=file is None,
        cache_file_name=None if file is None else str(file),
        load_from_cache_file=False,
        new_fingerprint=hashlib.sha256(os.urandom(16)).hexdigest()[:16],  # our own cache decides what is the same
        desc="tokenizing",
    )


def _circles(row: TokenizedRow) -> int | None:
    """Where the first answer that goes in circles has done so once, in tokens of the conversation."""
    start = 0
    for supervised, run in groupby(row.assistant_mask):
        length = len(list(run))
        if supervised and (end := circle_end(row.input_ids[start : start + length])):
            return start + end
        start += length
    return None


def _num_processes(num_rows: int) -> int | None:
    processes = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, num_rows // ROWS_PER_PROCESS)
    return processes if processes > 1 else None


def _kept(rows: datasets.Dataset, sources: Sequence[str | Path], max_length: int) -> tuple[datasets.Dataset, DataCounts]:
    """The rows with something to train on, and the counts. Raises ValueError when there is none."""
    facts = rows.select_columns(["cut", "circles", "num_tokens", "num_supervised", "has_slot"]).with_format("numpy")[:]
    has_slot = facts["has_slot"].astype(bool)
    counts = DataCounts(
        rows=int(has_slot.sum()),
        skipped=int((~has_slot).sum()),
        cut=int(facts["cut"].sum()),
        circles=int(facts["circles"].sum()),
        tokens=int(facts["num_tokens"][has_slot].sum()),
        supervised_tokens=int(facts["num_supervised"][has_slot].sum()),
    )
    if not counts.rows:
        raise ValueError(_nothing_to_train_on(sources, counts, max_length))
    return rows.select(np.flatnonzero(has_slot)).select_columns(["id", "input_ids", "assistant_mask"]), counts


def _nothing_to_train_on(sources: Sequence[str | Path], counts: DataCounts, max_length: int) -> str:
    names = ", ".join(map(str, sources))
    if counts.cut:
        reason = f"{counts.cut} of them were cut at max_length {max_length} before their first answer: raise max_length"
    else:
        reason = (
            "their assistant spans are empty or of single tokens (a slot needs two in a row): check `assistant_spans` in the rows "
            "and what `{% generation %}` encloses in the template"
        )
    return f"{names}: all labels masked, none of {counts.skipped} conversations has a supervised slot; {reason}"


def _cache_key(
    sources: Sequence[str | Path], tokenizer: Any, max_length: int, cut_circles: bool, limit: int | None, data_format: DataFormat
) -> str:
    settings = (CACHE_VERSION, max_length, cut_circles, limit, data_format, tokenizer.chat_template, tokenizer.special_tokens_map)
    digest = hashlib.sha256(repr(settings).encode())
    if getattr(tokenizer, "is_fast", False):
        digest.update(tokenizer.backend_tokenizer.to_str().encode())
    for source in sources:
        digest.update(f"{short_name(source)}:{content_sha256(source)}".encode())
    return digest.hexdigest()[:32]
