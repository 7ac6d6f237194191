"""A place that is written to -> a lock on it, so that two runs never write to one output."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout


def lock_output(path: Path, option: str) -> FileLock:
    """Locks the output at `path` until the lock is released or the process ends, however it ends.

    Raises ValueError naming `option` when another process holds it.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"{option} {path}: another run is writing there; wait for it, or choose another place") from None
    return lock
