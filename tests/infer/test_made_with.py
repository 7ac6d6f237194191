"""The record of what results depend on: what changes it, and what a folder that holds others says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infer.made_with import made_with, refuse_other_settings, settle


def test_options_files_and_the_weights_of_a_local_base_count(tmp_path: Path) -> None:
    base, prompts = tmp_path / "base", tmp_path / "prompts.jsonl"
    base.mkdir()
    for path in (prompts, base / "a.safetensors", base / "b.bin", base / "README.md"):
        path.write_text("before")
    options = {"base": str(base), "limit": 3, "trees": ("chain",), "config": prompts}
    record = made_with(options, {"prompts": prompts})
    assert record["settings"] == options | {"trees": ["chain"], "config": str(prompts)}
    assert list(record["sha256"]) == ["prompts", "base/a.safetensors", "base/b.bin"]
    more = record | {"figures": 1}
    refuse_other_settings(tmp_path, more, json.loads(json.dumps(record)))
    (base / "README.md").write_text("after")
    assert made_with(options, {"prompts": prompts}) == record
    for path, name in ((prompts, "prompts"), (base / "b.bin", "base/b.bin")):
        path.write_text("after")
        with pytest.raises(ValueError, match=rf"--output .* \(limit, the content of {name}\): choose another folder"):
            refuse_other_settings(tmp_path, more, made_with(options | {"limit": 4}, {"prompts": prompts}))
        path.write_text("before")
    assert not made_with({"base": "embedded"}, {})["sha256"]


def test_a_folder_holds_one_record_once_it_was_begun(tmp_path: Path) -> None:
    first, second = (made_with({"base": name}, {}) for name in ("x", "y"))
    settle(tmp_path / "out", first, begun=False)
    settle(tmp_path / "out", second, begun=False)  # the first was a mistake
    settle(tmp_path / "out", second, begun=True)
    with pytest.raises(ValueError, match=r"--output .*out holds results of other settings \(base\)"):
        settle(tmp_path / "out", first, begun=True)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--output .* cannot be written"):
        settle(tmp_path / "file", first, begun=False)
