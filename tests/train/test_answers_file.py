"""Files beside the answers that were damaged or written by something else: one line that names the file and the fix."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest

from train.answers_file import AnswersFile

SETTINGS = {"base": "b"}
ROW: dict[str, Any] = {"id": "a", "input_ids": [1, 2], "assistant_spans": [[1, 2]], "finish_reasons": ["eos"]}


def opened(output: Path) -> AnswersFile:
    with AnswersFile(output, SETTINGS) as answers:
        return answers


@pytest.mark.parametrize("manifest", [b"{}", b"[]", b"5", b"x", b"", b"\xff", b'{"settings": [1]}', b'{"settings": null}'])
def test_a_manifest_without_settings_is_named(tmp_path: Path, manifest: bytes) -> None:
    output = tmp_path / "o.jsonl"
    output.write_text("")
    (tmp_path / "o.jsonl.meta.json").write_bytes(manifest)
    with pytest.raises(ValueError, match=rf"{re.escape(str(output))}\.meta\.json is damaged .*: remove both, or choose another --output"):
        opened(output)
    (tmp_path / "o.jsonl.meta.json").write_text(json.dumps({"settings": SETTINGS}))
    assert opened(output).is_finished


WRONG_FIRST_LINES: list[Any] = [5, None, "x", [], {}, {"x": 1}, {"settings": 1}, ROW]
WRONG_ROWS: list[Any] = [5, None, "x", [], {}, {"x": 1}, {"id": "a"}, {"settings": SETTINGS}, ROW | {"id": 3}, ROW | {"input_ids": 3}]
WRONG_ROWS += [ROW | {"assistant_spans": None}, {name: ROW[name] for name in ("id", "input_ids", "assistant_spans")}]


@pytest.mark.parametrize(("line", "number"), [(line, 1) for line in WRONG_FIRST_LINES] + [(line, 3) for line in WRONG_ROWS])
def test_a_partial_file_of_another_shape_is_named_and_kept(tmp_path: Path, line: Any, number: int) -> None:
    output, partial = tmp_path / "o.jsonl", tmp_path / "o.jsonl.partial"
    lines = [{"settings": SETTINGS}, ROW, ROW | {"id": "b"}]
    partial.write_text("".join(json.dumps(part) + "\n" for part in [*lines[: number - 1], line, *lines[number:]]))
    before = partial.read_bytes()
    with pytest.raises(ValueError, match=rf"{re.escape(str(partial))}:{number} is damaged: remove the file to start over"):
        opened(output)
    assert partial.read_bytes() == before
    partial.write_text("".join(json.dumps(part) + "\n" for part in lines))
    assert list(opened(output).done) == ["a", "b"]


def test_a_full_disk_is_one_error_and_what_was_kept_goes_on(tmp_path: Path) -> None:
    """The file itself refuses the rest of a row, and again when it is closed."""
    output, limits = tmp_path / "o.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, limits[1]))
        with pytest.raises(ValueError, match=r"--output .* cannot be written \(.*\): make room"), AnswersFile(output, SETTINGS) as answers:
            for number in range(20):
                answers.append(ROW | {"id": str(number)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(opened(output).done) == [str(number) for number in range(len(answers.done))] != []


@pytest.mark.parametrize("name", ["o.jsonl.partial", ".o.jsonl.lock"])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, name: str) -> None:
    """Somebody else's, say."""
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=rf"--output .*{re.escape(name)} cannot be used \(.*\): choose another place"):
        opened(tmp_path / "o.jsonl")


def test_an_output_that_is_a_link_stays_one(tmp_path: Path) -> None:
    """To a larger disk, say."""
    (tmp_path / "large").mkdir()
    (link := tmp_path / "o.jsonl").symlink_to(target := tmp_path / "large" / "there.jsonl")
    (left := tmp_path / "large" / ".there.jsonl-77.jsonl").touch()
    with AnswersFile(link, SETTINGS) as answers:
        answers.append(ROW)
        answers.finish(["a"], {})
    assert link.is_symlink() and json.loads(target.read_text()) == ROW and not left.exists()
    assert opened(link).is_finished
