"""A folder is replaced whole or not at all; what killed writers left goes, what a live one holds stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_heads import replacing
from medusa_heads.replacing import refuse_occupied, remove_abandoned, replacing_folder, scratch_folder

WRITER = """
import os, signal, sys
from pathlib import Path
from medusa_heads import replacing

where = sys.argv[2]
rename = Path.rename

def rename_then_die(path, target):
    done = rename(path, target)
    if Path(target).name == where:
        os.kill(os.getpid(), signal.SIGKILL)
    return done

Path.rename = rename_then_die
with replacing.replacing_folder(Path(sys.argv[1])) as work:
    (work / "text").write_text("new")
    if where == "writing":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def content(parent: Path) -> dict[str, str]:
    return {str(path.relative_to(parent)): path.read_text() for path in parent.rglob("*") if path.is_file()}


def killed_writer(folder: Path, where: str) -> None:
    root = Path(replacing.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", WRITER, str(folder), where], cwd=root).returncode == -9
    assert [path for path in folder.parent.iterdir() if path != folder], "nothing was left behind: the test shows nothing"


@pytest.mark.parametrize("where", ["writing", "previous", "heads"])
def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path, where: str) -> None:
    folder = tmp_path / "heads"
    folder.mkdir()
    (folder / "text").write_text("old")
    killed_writer(folder, where)
    with pytest.raises(KeyboardInterrupt), replacing_folder(folder):
        raise KeyboardInterrupt
    assert content(tmp_path) == {"heads/text": "new" if where == "heads" else "old"}  # also killed between the two renames
    assert list(tmp_path.iterdir()) == [folder]


def test_a_live_writer_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    with replacing_folder(folder) as slow:
        (slow / "text").write_text("slow")
        with replacing_folder(folder) as fast:
            (fast / "text").write_text("fast")
        remove_abandoned(tmp_path, ".heads-")
        assert content(tmp_path)["heads/text"] == "fast" and (slow / "text").read_text() == "slow"
    assert content(tmp_path) == {"heads/text": "slow"}


def test_only_names_with_the_prefix_are_removed(tmp_path: Path) -> None:
    for name in (".a[1]-writing-x", ".a1-writing-x", "a[1]-writing-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / replacing.LOCK_NAME).touch()
    with scratch_folder(tmp_path, ".a[1]-writing-") as scratch:
        assert sorted(path.name for path in tmp_path.iterdir() if path != scratch) == [".a1-writing-x", "a[1]-writing-x"]
    assert not scratch.exists()


def test_a_failing_rename_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "text").write_text("old")
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ValueError, match="Input/output error"), replacing_folder(tmp_path / "heads") as work:
        (work / "text").write_text("new")
    assert content(tmp_path) == {"heads/text": "old"}


def test_everything_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    at_rename: list[set[int]] = []
    fsync, rename = os.fsync, Path.rename

    def note_sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        at_rename.append(set(synced))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    with replacing_folder(tmp_path / "heads") as work:
        (work / "trees").mkdir()
        (work / "trees" / "a").write_text("a")
        (work / "b").write_text("b")
    written = {path.stat().st_ino for path in (tmp_path / "heads", *(tmp_path / "heads").rglob("*"))}
    assert len(written) == 4 and written <= at_rename[0]
    assert tmp_path.stat().st_ino in synced - at_rename[0]


def test_a_full_disk_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No space left"), replacing_folder(tmp_path / "heads"):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with replacing_folder(tmp_path / "heads") as work:
            (work / "trees").mkdir()
            for name in ("model.safetensors", "trees/measured.json"):
                (work / name).write_text("")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "heads", tmp_path / "heads/trees")} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "heads").rglob("*.*")} == {0o600}


def test_a_link_goes_on_pointing_to_the_new_content(tmp_path: Path) -> None:
    (tmp_path / "large" / "heads").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "large" / "heads")
    with replacing_folder(tmp_path / "link") as work:
        (work / "config.json").write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "large/heads/config.json").read_text() == "new"


def test_a_mount_point_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with pytest.raises(ValueError, match=r"is a mount point.*choose a folder in it"):
        refuse_occupied(tmp_path)
    refuse_occupied(tmp_path / "heads")
