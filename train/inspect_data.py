"""Data -> decoded training rows with the supervised tokens coloured, and counts per source."""

# K heads

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import datasets
import torch
from rich.console import Console
from rich.text import Text

from medusa_heads import base_model
from train.packing import num_supervised_slots, slot_counts
from train.row_shapes import DataFormat
from train.row_source import short_name
from train.tokenized_data import tokenize_dataset

NUM_SLOTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectData:
    """Print decoded training rows with their supervised tokens marked, and counts per file."""

    data: tuple[str, ...]
    """Conversations: JSONL, JSON (each also gzipped) or Parquet files, or data sets of the hub as hf:owner/name[/config][:split]."""
    data_format: DataFormat = "auto"
    """Shape of the rows: messages, sharegpt (`conversations`) or alpaca (`instruction`); auto goes by a file's first row."""
    base: str = "embedded"
    """Base model whose tokenizer and chat template are used: `embedded`, a local folder or a hub id."""
    revision: str | None = None
    """Its revision on the hub."""
    num_rows: int = 3
    """Rows to print of each."""
    max_length: int = 2048
    """Conversations are cut to this many tokens."""
    cut_circles: bool = False
    """Cut them where an answer has said the same twice in a row, as training with this option does."""

    def run(self) -> None:
        """Raises ValueError for unusable sources and when one has no supervised slot."""
        if not self.data:
            raise ValueError("--data: name at least one file")
        if self.num_rows < 0:
            raise ValueError(f"--num-rows {self.num_rows}: it must be 0 or more")
        console = Console(soft_wrap=True, highlight=False)
        tokenizer = base_model.load_tokenizer(self.base, revision=self.revision)
        summary = []
        for source in self.data:
            options = dict[str, Any](max_length=self.max_length, cut_circles=self.cut_circles, data_format=self.data_format)
            rows, counts = tokenize_dataset([source], tokenizer, **options)
            for row in rows.select(range(min(self.num_rows, len(rows)))):
                console.rule(Text(f"{short_name(source)}  {row['id']}"), style="dim")
                console.print(marked_text(row["input_ids"], row["assistant_mask"], tokenizer, colour=_shows_colour(console)))
            per_slot = ", ".join(f"{k}: {count:,}" for k, count in enumerate(file_slot_counts(rows), start=1))
            summary.append(f"{source}: {counts}; supervised positions per slot {per_slot}")
        console.print("\n".join(summary), markup=False)


def marked_text(input_ids: list[int], assistant_mask: list[bool], tokenizer: Any, *, colour: bool) -> Text:
    """The decoded row; supervised spans are coloured, or stand between [[ and ]]."""
    text = Text()
    for piece, supervised in decoded_spans(input_ids, assistant_mask, tokenizer):
        text.append(f"[[{piece}]]" if supervised and not colour else piece, style="bold black on green" if supervised and colour else "")
    return text


def decoded_spans(input_ids: list[int], assistant_mask: list[bool], tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """Runs of equal mask with their text, cut out of the whole row's text: a tokenizer may treat
    the first token of what it decodes in its own way."""
    end, shown = 0, 0
    for supervised, run in groupby(assistant_mask):
        end += len(list(run))
        text = tokenizer.decode(input_ids[:end])
        yield text[shown:], supervised
        shown = len(text)


def file_slot_counts(rows: datasets.Dataset) -> list[int]:
    """Supervised positions per slot over all rows, [K]."""
    counts_K = torch.zeros(NUM_SLOTS, dtype=torch.long)
    for mask in rows.with_format("numpy")["assistant_mask"]:
        counts_K += slot_counts(num_supervised_slots(mask, NUM_SLOTS), NUM_SLOTS)
    return counts_K.tolist()


def _shows_colour(console: Console) -> bool:
    return console.is_terminal and not console.no_color
