"""New content of a folder -> put in its place once it is whole and on the disk; what killed runs left is removed."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

LOCK_NAME = "in-use.lock"


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A fresh folder that takes the name `folder` when the block succeeds, and is gone when it does not.

    A link stays one: what it points to is replaced. Raises ValueError when it cannot be written, also for an OSError of the block (a full
    disk, for one).
    """
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose another output folder")
    prefix = f".{folder.name}-writing-"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for scratch in abandoned(folder.parent, prefix):
            _put_back(scratch / "previous", folder)
        with scratch_folder(folder.parent, prefix) as scratch:
            work = scratch / "new"
            work.mkdir()
            yield work
            _make_readable_and_sync(work)
            try:
                if folder.exists():
                    folder.rename(scratch / "previous")
                work.rename(folder)
            finally:
                _put_back(scratch / "previous", folder)
            _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write to {folder} ({error}): choose another output folder") from error


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder in `parent` that is gone afterwards. Those of killed runs with the same prefix are removed first."""
    remove_abandoned(parent, prefix)
    scratch = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    try:
        with FileLock(scratch / LOCK_NAME):  # ends with the process, however that ends
            yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def refuse_occupied(folder: Path, option: str = "--output") -> None:
    """Raises ValueError naming `option` when something lies where it is to be written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{option} {folder} is not empty: choose another folder")
    if folder.is_mount():
        raise ValueError(f"{option} {folder} is a mount point, and cannot be replaced by what is written: choose a folder in it")


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes the scratch folders in `parent` whose process is dead."""
    for scratch in abandoned(parent, prefix):
        shutil.rmtree(scratch, ignore_errors=True)


def abandoned(parent: Path, prefix: str) -> Iterator[Path]:
    """The scratch folders in `parent` whose process is dead, each locked until the next one is asked for.

    One without a lock is passed over: its process may be about to take it.
    """
    for path in sorted(parent.glob(f"{glob.escape(prefix)}*/{LOCK_NAME}")):
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):  # in use, or removed by another run just now
            continue
        try:
            yield path.parent
        finally:
            lock.release()


def _put_back(previous: Path, folder: Path) -> None:
    """Undoes the first of the two renames where the second did not happen."""
    if previous.is_dir() and not folder.exists():
        previous.rename(folder)


def _make_readable_and_sync(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        if path.is_file():  # safetensors keeps its files to the owner; the folder knows what the user wants
            path.chmod(folder.stat().st_mode & 0o666)
        _sync(path)


def _sync(path: Path) -> None:
    """Waits until the file or folder is on the disk, so that no power cut can leave its name without its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
