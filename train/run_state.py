"""A training run <-> its checkpoints: heads, optimizer, step, and what the run was made of.

Each checkpoint is a folder written under a temporary name and renamed, so that a kill at any moment
leaves whole checkpoints only. One that is damaged all the same (a full or failing disk) is passed over.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from infer.acceptance_stats import influences, lengths, standard_error
from medusa_heads.json_text import parse_json
from medusa_heads.replacing import replacing_folder


class Measured(NamedTuple):
    """A validation: after how many steps, and the base forwards and accepted tokens of every prompt."""

    step: int
    counts: tuple[tuple[int, int], ...]

    @property
    def length(self) -> float:
        """Acceptance length; 1 where every answer is one token."""
        return float(lengths(np.array(self.counts)))

    def is_level_with(self, longest: Measured) -> bool:
        """Whether it is at most a standard error shorter, of the difference over the prompts."""
        apart = influences(np.array(longest.counts)) - influences(np.array(self.counts))
        return longest.length - self.length <= (standard_error(apart) or 0.0)


@dataclass(frozen=True, slots=True)
class Validations:
    """All so far, in order."""

    measured: tuple[Measured, ...] = ()

    def add(self, step: int, counts: tuple[tuple[int, int], ...]) -> Validations:
        return Validations((*self.measured, Measured(step, counts)))

    @property
    def best(self) -> Measured | None:
        """The last that is level with the longest: so small a difference is chance, and later heads have learnt from more."""
        return next((found for found in reversed(self.measured) if found.is_level_with(self.measured[self._longest])), None)

    @property
    def num_since_longest(self) -> int:
        return len(self.measured) - 1 - self._longest if self.measured else 0

    @property
    def _longest(self) -> int:
        """Its index, of equal ones the first."""
        return max(range(len(self.measured)), key=lambda index: self.measured[index].length)


NO_VALIDATIONS = Validations()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as read. step: finished steps; state: `heads`, `optimizer` and, in float16, `scaler`, on the CPU; validations: up
    to it."""

    folder: Path
    step: int
    identity: dict[str, Any]
    state: dict[str, Any]
    validations: Validations = NO_VALIDATIONS


def checkpoint_folders(output_dir: Path) -> list[Path]:
    """Whole checkpoints, oldest first. Folders with other names than step-<digits> are somebody else's."""
    folders = [f for f in (output_dir / "checkpoints").glob("step-*") if re.fullmatch("step-[0-9]+", f.name)]
    return sorted((f for f in folders if (f / "run.json").is_file()), key=lambda f: int(f.name.split("-")[1]))


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"step-{step}"


def save_checkpoint(
    output_dir: Path,
    step: int,
    state: dict[str, Any],
    identity: dict[str, Any],
    keep: int,
    *,
    validations: Validations = NO_VALIDATIONS,
) -> None:
    """Writes checkpoints/step-<step> and deletes all but the newest `keep` up to it, and the best one as each of these knows it.

    state: `heads` and `optimizer`, the state of each. Later checkpoints are deleted too: the run went back to an earlier one because
    they are damaged. Raises ValueError when it cannot be written; nothing is deleted then.
    """
    written = checkpoint_folder(output_dir, step)
    try:
        with replacing_folder(written) as work:
            _write_state(state, work / "state.pt")
            run = {"step": step, "identity": identity, "validations": validations.measured}
            (work / "run.json").write_text(json.dumps(run, indent=1))
    except ValueError as error:
        raise ValueError(f"{error}; or make room and start again: the run goes on from its last whole checkpoint") from error
    folders = checkpoint_folders(output_dir)
    end = folders.index(written) + 1
    newest = folders[max(0, end - keep) : end]
    kept = {*newest, *(checkpoint_folder(output_dir, best) for folder in newest if (best := _best_step(folder)) is not None)}
    for folder in folders:
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _write_state(state: dict[str, Any], path: Path) -> None:
    """torch.save, but an error of the disk stays an OSError that names its reason."""
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        raise OSError(str(error.__context__ or error)) from error


def _best_step(folder: Path) -> int | None:
    """The step of the best validation up to a checkpoint; None where there was none, or it cannot be read."""
    try:
        best = _read_validations(parse_json((folder / "run.json").read_text())).best
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None
    return best.step if best else None


def _read_validations(run: dict[str, Any]) -> Validations:
    found = ((int(step), tuple((int(steps), int(accepted)) for steps, accepted in counts)) for step, counts in run.get("validations", ()))
    return Validations(tuple(Measured(step, counts) for step, counts in found))


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
        run = parse_json((folder / "run.json").read_text())
        with zipfile.ZipFile(folder / "state.pt") as archive:
            if name := archive.testzip():  # torch reads numbers without looking at their checksums
                raise ValueError(f"wrong checksum of {name} in state.pt")
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        state = {name: state[name] for name in ("heads", "optimizer", *({"scaler"} & state.keys()))}
        return Checkpoint(folder, int(run["step"]), dict(run["identity"]), state, _read_validations(run))
    except (OSError, EOFError, ValueError, TypeError, LookupError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"checkpoint {folder} is damaged ({reason})") from error


def restore(checkpoint: Checkpoint, heads: nn.Module, optimizer: Any, identity: dict[str, Any]) -> None:
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
