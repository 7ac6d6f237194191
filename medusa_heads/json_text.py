"""JSON text -> its value; whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """json.loads. Raises json.JSONDecodeError, a ValueError, also for text nested deeper than Python's parser goes."""
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
