"""--output-dir -> a folder that this run alone writes into, earlier heads kept in `previous`."""

from __future__ import annotations

import os
import shutil
from fnmatch import fnmatch
from pathlib import Path

from filelock import FileLock

from medusa_heads.lock import lock_output
from medusa_heads.replacing import remove_abandoned
from train.run_config import RunConfig

MOVING = ".previous"  # becomes `previous` once all earlier files are in it
WRITTEN = (  # names of what runs write, of heads and of draft models with their tokenizers; whatever else lies there is somebody else's
    *("checkpoints", "finished", "adapter", "trees", "history.*", "README.md", "train_command.txt"),
    *("draft_vocabulary.json", "draft_model.json", "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "chat_template.jinja", "added_tokens.json", "vocab.*", "merges.txt"),
)


def claim_output(output: Path, config: RunConfig) -> FileLock | None:
    """Refuses, before any work, to replace finished heads or to write where it cannot or where another run does.

    Returns the lock that the first process holds on the folder while it runs.
    """
    if config.overwrite:
        refuse_inputs_within(output, config)
    elif (output / "config.json").exists():
        raise ValueError(f"--output-dir {output} already holds finished heads: choose another folder, or pass --overwrite to replace them")
    if os.environ.get("RANK", "0") != "0":
        return None
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
        lock = lock_output(output.resolve(), "--output-dir")
        remove_abandoned(output / "checkpoints", ".step-")
        if config.overwrite or (output / MOVING).exists():
            set_aside(output, config.project)
        return lock
    except OSError as error:
        raise ValueError(f"--output-dir {output} cannot be written ({error.strerror}): choose another folder") from None


def refuse_inputs_within(output: Path, config: RunConfig) -> None:
    """Raises ValueError when something that the run reads lies in the folder whose files --overwrite moves away."""
    for name, paths in config.inputs().items():
        for path in paths:
            if Path(path).exists() and Path(path).resolve().is_relative_to(output.resolve()):
                raise ValueError(
                    f"{name}: {path} lies in --output-dir {output}, whose files --overwrite moves away: move it, or choose another folder"
                )


def set_aside(output: Path, project: str) -> None:
    """Moves earlier heads and checkpoints into `previous`, so that nothing of them mixes with the new ones and
    a killed run resumes from its own checkpoints (without --overwrite). Killed itself, it is finished by the next start.

    What no run wrote stays: `previous` is deleted the next time. project: the name of a tracker's folder.
    """
    moving, previous = output / MOVING, output / "previous"
    earlier = [path for path in output.iterdir() if path.name == project or any(fnmatch(path.name, name) for name in WRITTEN)]
    if not earlier and not moving.exists():
        return
    moving.mkdir(exist_ok=True)
    for path in sorted(earlier, key=lambda p: p.name != "config.json"):  # config.json first: it marks the folder as whole
        path.rename(moving / path.name)
    shutil.rmtree(previous, ignore_errors=True)
    moving.rename(previous)
