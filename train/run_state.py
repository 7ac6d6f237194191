"""A training run <-> its checkpoints: heads, optimizer, step, and what the run was made of.

Each checkpoint is a folder written under a temporary name and renamed, so that a kill at any moment
leaves whole checkpoints only.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from medusa_heads.checkpoint import replacing_folder
from medusa_heads.heads import MedusaHeads


def checkpoint_folders(output_dir: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    folders = (output_dir / "checkpoints").glob("step-*")
    return sorted((f for f in folders if (f / "run.json").is_file()), key=lambda f: int(f.name.split("-")[1]))


def save_checkpoint(
    output_dir: Path, step: int, heads: MedusaHeads, optimizer: torch.optim.Optimizer, identity: dict[str, Any], keep: int
) -> None:
    """Writes checkpoints/step-<step> and deletes all but the newest `keep`."""
    with replacing_folder(output_dir / "checkpoints" / f"step-{step}") as work:
        torch.save({"heads": heads.state_dict(), "optimizer": optimizer.state_dict()}, work / "state.pt")
        (work / "run.json").write_text(json.dumps({"step": step, "identity": identity}, indent=1))
    for folder in checkpoint_folders(output_dir)[:-keep]:
        shutil.rmtree(folder, ignore_errors=True)


def load_checkpoint(folder: Path, heads: MedusaHeads, optimizer: torch.optim.Optimizer, identity: dict[str, Any]) -> int:
    """Restores heads and optimizer; returns the number of finished steps.

    Raises ValueError naming every part of the run that is not what the checkpoint was made with.
    """
    run = json.loads((folder / "run.json").read_text())
    saved = run["identity"]
    differing = [name for name in sorted(identity.keys() | saved.keys()) if identity.get(name) != saved.get(name)]
    if differing:
        changes = "; ".join(f"{name} was {saved.get(name)!r}, is {identity.get(name)!r}" for name in differing)
        raise ValueError(f"cannot resume from {folder}: {changes}. Restore these, choose another --output-dir, or pass --overwrite")
    device = next(heads.parameters()).device
    state = torch.load(folder / "state.pt", map_location=device, weights_only=True)
    heads.load_state_dict(state["heads"])
    optimizer.load_state_dict(state["optimizer"])
    return int(run["step"])
