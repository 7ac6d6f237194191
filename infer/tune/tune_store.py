"""What `medusa-heads tree` measured and chose -> files in the heads' folder or in a copy of it, and back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infer.output_file import write_text
from infer.tree_spec import TUNED_FILE
from infer.tune.expected_acceptance import Measured
from medusa_heads.json_text import parse_json
from medusa_heads.replacing import replacing_folder

MEASURED_FILE = "trees/measured.json"


def finished(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """The stored document, where it was measured under the same `facts`; None where it was not, or is damaged."""
    try:
        document = parse_json((folder / TUNED_FILE).read_text(encoding="utf-8"))
        known = {**facts, "settings": {name: document["settings"][name] for name in facts["settings"]}}
        same = known == facts and all(document[name] == facts[name] for name in facts if name != "settings")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return document if same and (folder / MEASURED_FILE).is_file() else None


def store(document: dict[str, Any], measured: Measured, folder: Path, output: Path | None) -> Path:
    """Writes acceptance and choice into the heads `folder`, or into a copy of it at `output`. Returns where they are."""
    if output is not None:
        with replacing_folder(output) as work:
            copy_heads(folder, work)
            _write(document, measured, work)
        return output
    try:
        _write(document, measured, folder)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}); --output DIR writes a copy of the heads with the tree") from None
    return folder


def copy_heads(folder: Path, target: Path) -> None:
    """The files of a heads checkpoint; not the training states that may lie beside them."""
    (target / "trees").mkdir()
    for path in (*folder.iterdir(), *folder.glob("trees/*.json")):
        if path.is_file() and path.suffix != ".lock":
            shutil.copyfile(path, target / path.relative_to(folder))


def _write(document: dict[str, Any], measured: Measured, folder: Path) -> None:
    (folder / "trees").mkdir(exist_ok=True)
    write_text(folder / MEASURED_FILE, json.dumps(measured.as_dict(), indent=1) + "\n")
    write_text(folder / TUNED_FILE, json.dumps(document, indent=1) + "\n")
