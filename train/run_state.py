"""A training run <-> its checkpoints: heads, optimizer, step, and what the run was made of.

Each checkpoint is a folder written under a temporary name and renamed, so that a kill at any moment
leaves whole checkpoints only. One that is damaged all the same (a full or failing disk) is passed over.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medusa_heads.replacing import replacing_folder


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as read. step: finished steps; state: `heads` and `optimizer`, on the CPU."""

    folder: Path
    step: int
    identity: dict[str, Any]
    state: dict[str, Any]


def checkpoint_folders(output_dir: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    folders = (output_dir / "checkpoints").glob("step-*")
    return sorted((f for f in folders if (f / "run.json").is_file()), key=lambda f: int(f.name.split("-")[1]))


def save_checkpoint(
    output_dir: Path, step: int, heads: nn.Module, optimizer: torch.optim.Optimizer, identity: dict[str, Any], keep: int
) -> None:
    """Writes checkpoints/step-<step> and deletes all but the newest `keep` up to it.

    Later ones are deleted too: the run went back to an earlier one because they are damaged.
    """
    written = output_dir / "checkpoints" / f"step-{step}"
    with replacing_folder(written) as work:
        torch.save({"heads": heads.state_dict(), "optimizer": optimizer.state_dict()}, work / "state.pt")
        (work / "run.json").write_text(json.dumps({"step": step, "identity": identity}, indent=1))
    folders = checkpoint_folders(output_dir)
    end = folders.index(written) + 1
    for folder in folders[: max(0, end - keep)] + folders[end:]:
        shutil.rmtree(folder, ignore_errors=True)


def newest_checkpoint(output_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that can be read, or None where there is none at all; and what is wrong with each newer one.

    Raises ValueError when there are checkpoints and none can be read.
    """
    damaged: list[str] = []
    for folder in reversed(checkpoint_folders(output_dir)):
        try:
            return read_checkpoint(folder), damaged
        except ValueError as error:
            damaged.append(str(error))
    if damaged:
        raise ValueError(f"cannot resume: {'; '.join(damaged)}. Choose another --output-dir, or pass --overwrite to start anew")
    return None, []


def read_checkpoint(folder: Path) -> Checkpoint:
    """Raises ValueError when a file of the checkpoint is missing or damaged."""
    try:
        run = json.loads((folder / "run.json").read_text())
        with zipfile.ZipFile(folder / "state.pt") as archive:
            if name := archive.testzip():  # torch reads numbers without looking at their checksums
                raise ValueError(f"wrong checksum of {name} in state.pt")
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        return Checkpoint(folder, int(run["step"]), dict(run["identity"]), {name: state[name] for name in ("heads", "optimizer")})
    except (OSError, EOFError, ValueError, TypeError, LookupError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"checkpoint {folder} is damaged ({reason})") from error


def restore(checkpoint: Checkpoint, heads: nn.Module, optimizer: torch.optim.Optimizer, identity: dict[str, Any]) -> None:
    """Puts the checkpoint's state into heads and optimizer.

    Raises ValueError naming every part of the run that is not what the checkpoint was made with.
    """
    saved = checkpoint.identity
    differing = [name for name in sorted(identity.keys() | saved.keys()) if identity.get(name) != saved.get(name)]
    if differing:
        changes = "; ".join(f"{name} was {saved.get(name)!r}, is {identity.get(name)!r}" for name in differing)
        raise ValueError(
            f"cannot resume from {checkpoint.folder}: {changes}. Restore these, choose another --output-dir, or pass --overwrite"
        )
    heads.load_state_dict(checkpoint.state["heads"])
    optimizer.load_state_dict(checkpoint.state["optimizer"])


def heads_digest(heads: nn.Module) -> str:
    """The start of a SHA-256 over every weight of the heads."""
    digest = hashlib.sha256()
    for name, weight in heads.named_parameters():
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
