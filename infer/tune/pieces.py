"""Parts of a long measurement -> files that are kept until all of it is done, so that a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infer.output_file import write_text


class Pieces:
    """A folder in `parent` for the finished pieces of the one run that `settings` describe.

    Anything that a piece depends on belongs into the settings: other settings find other pieces.
    """

    def __init__(self, parent: Path, settings: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        self.folder = parent / f".tuning-{digest[:16]}"

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The piece `name`, as JSON gives it back: read where it is there, else measured and stored."""
        path = self.folder / f"{name}.json"
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            pass
        found = json.dumps(measure())
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(path, found)
        return json.loads(found)

    def remove(self) -> None:
        """Once everything is stored elsewhere."""
        shutil.rmtree(self.folder, ignore_errors=True)
