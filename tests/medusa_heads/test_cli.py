"""The command itself: what is refused before a subcommand runs, and a reader that leaves early."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest

from medusa_heads import cli
from medusa_heads.arguments import OPTIONAL
from train.config import parse_config
from train.draft_model_config import parse_config as parse_draft_model_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """Prints its options."""

    heads: Annotated[tuple[str, ...], OPTIONAL] = ()
    """Several values."""
    num_rows: int = 1
    """One value."""

    def run(self) -> None:
        print(*self.heads, self.num_rows)


@pytest.fixture(autouse=True)
def _echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "echo", (f"{__name__}:Echo", "print"))


@pytest.mark.parametrize("twice", [["--heads", "a", "--heads", "b"], ["--heads=a", "--num-rows", "2", "--heads", "b", "c"]])
def test_a_list_given_twice_is_refused(capsys: pytest.CaptureFixture[str], twice: list[str]) -> None:
    assert cli.main(["echo", *twice]) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: --heads is given 2 times: give it once, with all its values behind it (--heads A B)\n"
    assert not captured.out


def test_one_list_and_repeated_single_values_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["echo", "--heads", "a", "b", "--num-rows", "2", "--num_rows", "3"]) == 0
    assert capsys.readouterr().out == "a b 3\n"


@pytest.mark.parametrize("command", [*cli.COMMANDS, "train", "train.draft_model"])
def test_help_shows_no_empty_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    parse = {"train": parse_config, "train.draft_model": parse_draft_model_config}.get(command)
    with pytest.raises(SystemExit):
        parse(["--help"]) if parse else cli.main([command, "--help"])
    shown = capsys.readouterr().out
    assert "usage:" in shown and "(default: )" not in shown


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "versions", lambda: {"python": "3.11.7", "medusa-heads": "1.2.3"})
    for commit, expected in (("0f3a-dirty", "medusa-heads 1.2.3 (commit 0f3a-dirty)\n"), (None, "medusa-heads 1.2.3\n")):
        monkeypatch.setattr(cli, "commit", lambda commit=commit: commit)
        assert cli.main(["--version"]) == 0
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize("arguments", [["--help"], ["inspect-data", "--help"]])
def test_a_reader_that_leaves_early_gets_no_traceback(arguments: list[str]) -> None:
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    try:
        command = [sys.executable, "-m", "medusa_heads.cli", *arguments]
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        ended = subprocess.run(command, stdout=writing_end, stderr=subprocess.PIPE, cwd=Path(cli.__file__).parents[1], env=buffered)
    finally:
        os.close(writing_end)
    assert (ended.returncode, ended.stderr) == (141, b"")
