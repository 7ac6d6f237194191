"""Hidden states <-> a folder of memory-mapped shards: what they were made for and their checksums lie in its manifest.

    manifest.json         made_for, dtype, the shards and, when all are there, the SHA-256 of each
    states-00000.bin      states [S, D] of some rows, one row after the other, in the base's own type
    states-00000.sha256   beside a shard, until the manifest holds it

A shard is written under a temporary name and renamed behind its checksum, so a kill at any moment leaves
whole shards only, and none of these is made again.
"""

# P packed rows, S stored states, M of them in a micro-batch, D hidden

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from filelock import FileLock
from torch import Tensor
from tqdm import tqdm

from medusa_heads.lock import lock_output
from train.batch import CachedBatch
from train.sharding import in_lock_step
from train.state_maker import StateMaker
from train.state_manifest import OPTION, Manifest, Shard, beside, write_whole


def open_states(folder: Path, maker: StateMaker) -> StateShards:
    """Makes what is missing of the cache, each process its part, and checks the whole.

    The folder must be one that all processes see. Raises ValueError for states made for something else, for damaged ones
    and for a folder that cannot be written.
    """
    accelerator = maker.accelerator
    lock = _claim(folder, maker) if accelerator.is_main_process else None
    try:
        if broadcast_object_list([lock is not None])[0]:
            _complete(folder, maker)
    finally:
        if lock is not None:
            lock.release()
    manifest = Manifest.read(folder)
    verify(folder, manifest, maker)
    accelerator.wait_for_everyone()  # nobody trains on while another finds damage
    return StateShards.mapped(folder, manifest, maker)


def _claim(folder: Path, maker: StateMaker) -> FileLock | None:
    """The first process's part: compares or writes the manifest. Returns the lock under which the cache is to be completed, or None
    where it is complete."""
    wanted, lock = Manifest.new(maker), None
    path = folder / "manifest.json"
    try:
        if not (path.exists() and Manifest.read(folder).is_complete(folder)):
            folder.mkdir(parents=True, exist_ok=True)
            lock = lock_output(folder.resolve(), OPTION)
            for left in folder.glob(".*.writing"):
                left.unlink()
        if not path.exists():
            if any(folder.iterdir()):
                raise ValueError(f"{OPTION} {folder} holds other files and no manifest.json: choose another folder")
            wanted.write(folder)
    except OSError as error:
        raise ValueError(f"{OPTION} {folder} cannot be written ({error.strerror}): choose another folder") from None
    Manifest.read(folder).refuse_foreign(folder, wanted)
    return lock


def _complete(folder: Path, maker: StateMaker) -> None:
    """Makes the missing shards, each process its part of them, and writes the manifest with all checksums."""
    accelerator, manifest = maker.accelerator, Manifest.read(folder)
    missing = [shard for shard in manifest.shards if manifest.checksum(folder, shard) is None]
    missing = broadcast_object_list([missing])[0]  # as the first process finds them: others may look later
    with in_lock_step(accelerator, maker.headed):
        make_shards(folder, maker, missing[accelerator.process_index :: accelerator.num_processes])
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        _finish(folder, manifest)
    accelerator.wait_for_everyone()


def make_shards(folder: Path, maker: StateMaker, shards: Sequence[Shard]) -> None:
    """One after the other; while one is written, the base runs for the next."""
    groups = [maker.groups(shard.first_row, shard.first_row + shard.num_rows) for shard in shards]
    made = maker.make([group for of_shard in groups for group in of_shard])
    bar = tqdm(total=sum(s.num_rows for s in shards), desc="hidden states", unit="row", disable=not maker.accelerator.is_main_process)
    with ThreadPoolExecutor(1) as writer:
        writing: Future[None] | None = None
        for shard, of_shard in zip(shards, groups, strict=True):
            states_SD = torch.empty(shard.num_states, maker.hidden_size, dtype=maker.dtype)
            end = 0
            for group in of_shard:
                part_SD = next(made)
                states_SD[end : end + len(part_SD)] = part_SD
                end += len(part_SD)
                bar.update(len(group))
            assert end == shard.num_states
            if writing is not None:
                writing.result()
            writing = writer.submit(write_shard, folder / shard.file, states_SD)
        if writing is not None:
            writing.result()
    bar.close()


def write_shard(path: Path, states_SD: Tensor) -> None:
    """The checksum first: a shard without one would not be known to be whole."""
    data = states_SD.view(torch.uint8).numpy().data
    write_whole(beside(path), f"{hashlib.sha256(data).hexdigest()}  {path.name}\n".encode())
    write_whole(path, data)


def _finish(folder: Path, manifest: Manifest) -> None:
    """Moves the checksums into the manifest."""
    found = {shard.file: manifest.checksum(folder, shard) for shard in manifest.shards}
    if absent := [file for file, checksum in found.items() if checksum is None]:
        raise ValueError(f"{OPTION} {folder}: {absent[0]} is not there after it was made: the folder must be one that all processes share")
    replace(manifest, sha256={file: checksum for file, checksum in found.items() if checksum}).write(folder)
    for shard in manifest.shards:
        beside(folder / shard.file).unlink(missing_ok=True)


def verify(folder: Path, manifest: Manifest, maker: StateMaker) -> None:
    """Size of every shard; checksum of this process's part, in threads. Raises ValueError naming the damaged file."""
    accelerator, state_bytes = maker.accelerator, manifest.hidden_size * maker.dtype.itemsize
    for shard in manifest.shards:
        path = folder / shard.file
        if not path.exists() or path.stat().st_size != shard.num_states * state_bytes:
            raise _damaged(path, "it is not there or not of its size")
    own = manifest.shards[accelerator.process_index :: accelerator.num_processes]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda shard: _file_sha256(folder / shard.file), own)
        for shard, digest in zip(
            own, tqdm(digests, total=len(own), desc="checking", unit="shard", disable=not accelerator.is_main_process), strict=True
        ):
            if digest != manifest.sha256[shard.file]:
                raise _damaged(folder / shard.file, "its checksum differs")


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{OPTION}: {path} is damaged ({reason}): delete this file and start again; it alone is made anew")


@dataclass(frozen=True, slots=True)
class StateShards:
    """Memory-mapped shards. Row p is lengths_P[p] states of shard shard_P[p] from start_P[p] on."""

    shards: list[Tensor]
    shard_P: list[int]
    start_P: list[int]
    lengths_P: list[int]
    pin_memory: bool

    @classmethod
    def mapped(cls, folder: Path, manifest: Manifest, maker: StateMaker) -> StateShards:
        shards, shard_P, start_P = [], [], []
        bounds_P1 = maker.index.bounds_P1.tolist()
        for number, shard in enumerate(manifest.shards):
            count = shard.num_states * manifest.hidden_size
            shards.append(torch.from_file(str(folder / shard.file), size=count, dtype=maker.dtype).view(-1, manifest.hidden_size))
            for row in range(shard.first_row, shard.first_row + shard.num_rows):
                shard_P.append(number)
                start_P.append(bounds_P1[row] - bounds_P1[shard.first_row])
        return cls(shards, shard_P, start_P, maker.index.lengths_P.tolist(), maker.accelerator.device.type == "cuda")

    def fill(self, batch: CachedBatch) -> CachedBatch:
        total, first = sum(self.lengths_P[row] for row in batch.rows), self.shards[0]
        hidden_MD = torch.empty(total, first.shape[1], dtype=first.dtype, pin_memory=self.pin_memory)
        end = 0
        for row in batch.rows:
            start, length = self.start_P[row], self.lengths_P[row]
            hidden_MD[end : end + length] = self.shards[self.shard_P[row]][start : start + length]
            end += length
        return replace(batch, tensors=batch.tensors | {"hidden_MD": hidden_MD})
