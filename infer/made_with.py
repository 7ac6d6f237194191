"""Options and files -> the record of what results depend on, stored with them; results of another record are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infer.output_file import check_writable, write_text
from infer.prompts import file_sha256

WEIGHTS = (".safetensors", ".bin")


def made_with(options: Mapping[str, Any], files: Mapping[str, Path]) -> dict[str, Any]:
    """The options as `settings` and the `sha256` of the files, by name; as JSON gives them back.

    options: what results depend on, `base` among it: where that is a local folder, its weights are files too.
    """
    weights = {f"base/{path.name}": path for path in sorted(Path(options["base"]).glob("*")) if path.suffix in WEIGHTS}
    digests = {name: file_sha256(path) for name, path in {**files, **weights}.items()}
    return dict(json.loads(json.dumps({"settings": options, "sha256": digests}, default=str)))


def refuse_other_settings(output: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError naming what differs when results in the folder --output, stored with the record `before`, are not of `now`."""
    kinds = (("settings", ""), ("sha256", "the content of "))
    changed = [words + name for kind, words in kinds for name, value in now[kind].items() if before.get(kind, {}).get(name) != value]
    if changed:
        raise ValueError(f"--output {output} holds results of other settings ({', '.join(changed)}): choose another folder")


def settle(output: Path, record: Mapping[str, Any], *, begun: bool) -> None:
    """Stores the record that all results in the folder --output share. begun: whether there are any; without, nothing depends on an
    earlier record. Raises ValueError as `refuse_other_settings` does, and when the folder cannot be written."""
    path = output / "settings.json"
    check_writable(path, "--output")
    if begun and path.exists():
        refuse_other_settings(output, json.loads(path.read_text()), record)
    write_text(path, json.dumps(record))
