"""JSON text -> its value; whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """json.loads. Raises json.JSONDecodeError, a ValueError, also for text nested deeper than Python's parser goes, for numbers longer
    than it reads and for bytes that are no text."""
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise json.JSONDecodeError(str(error).partition(";")[0], "", 0) from None
