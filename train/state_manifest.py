"""What stored hidden states are made for <-> manifest.json beside them: the base, tokenizer, template, data and type; shards, checksums."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from medusa_heads.json_text import parse_json
from train.state_maker import StateIndex, StateMaker

VERSION = 1
"""Raised with every change of what is stored, or of how rows are packed."""

SHARD_BYTES = 256 << 20
OPTION = "--hidden-states-dir"
MADE_FOR = {  # what the states depend on, in words
    "version": "another version of medusa-heads",
    "base": "another base model",
    "dtype": "another --base-dtype",
    "tokenizer": "another tokenizer",
    "chat_template": "another chat template",
    "data": "other data (or max_length, cut_circles, limit, held_out)",
    "pack_length": "another pack_length",
}


def tokenizer_keys(tokenizer: Any) -> dict[str, str]:
    """SHA-256 of a tokenizer, padding and truncation aside, and of its chat template."""
    if getattr(tokenizer, "is_fast", False):
        content = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    else:
        content = tokenizer.get_vocab()
    return {"tokenizer": _sha256(json.dumps(content, sort_keys=True)), "chat_template": _sha256(str(tokenizer.chat_template))}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Shard:
    """The states of rows first_row .. first_row + num_rows - 1, [num_states, D]."""

    file: str
    first_row: int
    num_rows: int
    num_states: int


def plan_shards(index: StateIndex, state_bytes: int) -> list[Shard]:
    """Whole rows, of SHARD_BYTES or a little more each."""
    shards: list[Shard] = []
    first, num_states, lengths = 0, 0, index.lengths_P.tolist()
    for row, length in enumerate(lengths):
        num_states += length
        if num_states * state_bytes >= SHARD_BYTES or row + 1 == len(lengths):
            shards.append(Shard(f"states-{len(shards):05d}.bin", first, row + 1 - first, num_states))
            first, num_states = row + 1, 0
    return shards


@dataclass(frozen=True, slots=True)
class Manifest:
    """made_for: the keys of MADE_FOR. sha256: of the shards by file, once all are finished."""

    made_for: dict[str, Any]
    hidden_size: int
    shards: list[Shard]
    sha256: dict[str, str]

    @classmethod
    def new(cls, maker: StateMaker) -> Manifest:
        made_for = {
            "version": VERSION,
            "base": maker.headed.heads.config.base_fingerprint,
            "dtype": str(maker.dtype).removeprefix("torch."),
            **{name: maker.rows.tokenizer_keys.get(name) for name in ("tokenizer", "chat_template")},
            "data": maker.rows.content_key,
            "pack_length": maker.rows.pack_length,
        }
        return cls(made_for, maker.hidden_size, plan_shards(maker.index, maker.hidden_size * maker.dtype.itemsize), {})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        try:
            values = parse_json((folder / "manifest.json").read_text())
            shards = [Shard(**shard) for shard in values["shards"]]
            return cls(dict(values["made_for"]), int(values["hidden_size"]), shards, dict(values["sha256"]))
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ValueError(
                f"{OPTION} {folder}: manifest.json cannot be read ({error}): choose another folder, or delete this one"
            ) from None

    def write(self, folder: Path) -> None:
        write_whole(folder / "manifest.json", (json.dumps(asdict(self), indent=1) + "\n").encode())

    def checksum(self, folder: Path, shard: Shard) -> str | None:
        """Of a finished shard; None of one that has to be made."""
        checksum_file = beside(folder / shard.file)
        if not (folder / shard.file).exists():
            return None
        return checksum_file.read_text().split()[0] if checksum_file.exists() else self.sha256.get(shard.file)

    def is_complete(self, folder: Path) -> bool:
        """Not while a checksum lies beside a shard that was made anew, which the manifest does not know yet."""
        files = [folder / shard.file for shard in self.shards]
        return all(file.exists() and file.name in self.sha256 and not beside(file).exists() for file in files)

    def refuse_foreign(self, folder: Path, wanted: Manifest) -> None:
        """Raises ValueError naming everything that the states here were made with and this run does not have."""
        others = [
            f"{words} (there {str(self.made_for.get(name))[:16]}, here {str(wanted.made_for[name])[:16]})"
            for name, words in MADE_FOR.items()
            if self.made_for.get(name) != wanted.made_for[name]
        ]
        if others:
            raise ValueError(
                f"{OPTION} {folder} holds hidden states made for {' and '.join(others)}: choose another folder, or delete this one"
            )


def beside(path: Path) -> Path:
    return path.with_suffix(".sha256")


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Under a temporary name first. Raises ValueError naming the reason when it cannot be written."""
    work = path.with_name(f".{path.name}.writing")
    try:
        with work.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        work.rename(path)
    except OSError as error:
        work.unlink(missing_ok=True)
        raise ValueError(
            f"{OPTION}: {path} cannot be written ({error.strerror}): make room and start again, finished shards are kept; or choose "
            "another folder"
        ) from error
