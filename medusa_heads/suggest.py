"""Unknown names -> an error message that suggests the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or an empty string when nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def unknown_keys_error(given: Iterable[str], known: Iterable[str], where: str) -> str | None:
    """The message naming every unknown key in `given`, or None when all are known."""
    known = list(known)
    unknown = [key for key in given if key not in known]
    if not unknown:
        return None
    return f"{where}: unknown " + ", ".join(f"key {key!r}{suggest(key, known)}" for key in unknown)
