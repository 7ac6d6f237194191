"""Draft heads <-> a folder: config.json, model.safetensors, measured acceptance, card and command.

Loading is strict: another base model, a missing or extra tensor or a wrong shape is an error that
says what differs. Saving writes to a temporary name and renames, so a folder is whole or absent.
"""

from __future__ import annotations

import copy
import json
import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from medusa_heads.config import HeadsConfig
from medusa_heads.fingerprint import fingerprint
from medusa_heads.heads import FAMILIES, MedusaHeads
from medusa_heads.json_text import parse_json
from medusa_heads.quantization import short_name
from medusa_heads.replacing import replacing_folder
from medusa_heads.versions import versions

PRETRAINED_DIR = Path(__file__).parent / "pretrained"
RECOMMENDED = "medusa"
VOCABULARY_FILE = "draft_vocabulary.json"
REMEASURE = "copy the checkpoint again, or delete this file and let `medusa-heads tree` measure anew"


@dataclass(frozen=True, slots=True)
class HeadsCheckpoint:
    """A loaded heads checkpoint.

    static_nodes: rank paths of the nodes worth drafting in a static tree, and how often each is right, in falling
    order; measured on validation text, empty when not measured. acceptance: expected acceptance length of the beam
    tree by number of nodes, likewise. draft_vocabulary: the token ids [V'] worth proposing, ascending, or None for all.
    """

    heads: MedusaHeads
    config: HeadsConfig
    folder: Path
    static_nodes: dict[tuple[int, ...], float] = field(default_factory=dict)
    acceptance: dict[int, float] = field(default_factory=dict)
    draft_vocabulary: Tensor | None = None


def resolve_heads(name: str) -> Path:
    """`pretrained`, `pretrained:NAME` or a folder -> the folder. Raises ValueError when absent."""
    kind, _, which = name.partition(":")
    if kind == "pretrained":
        folder = PRETRAINED_DIR / (which or RECOMMENDED)
        if not folder.is_dir():
            shipped = sorted(p.name for p in PRETRAINED_DIR.iterdir() if p.is_dir()) if PRETRAINED_DIR.is_dir() else []
            raise ValueError(f"--heads {name}: no such shipped heads; shipped are {', '.join(shipped) or 'none'}")
        return folder
    if not Path(name).is_dir():
        raise ValueError(f"--heads {name}: no such folder; give a folder written by medusa-heads, or `pretrained`")
    return Path(name)


def in_dtype(checkpoint: HeadsCheckpoint, dtype: torch.dtype) -> HeadsCheckpoint:
    """The same checkpoint with heads of this type, a copy where theirs is another."""
    if next(checkpoint.heads.parameters()).dtype == dtype:
        return checkpoint
    return replace(checkpoint, heads=copy.deepcopy(checkpoint.heads).to(dtype))


def load_heads(name: str | Path, model: PreTrainedModel, *, dtype: torch.dtype | None = None) -> HeadsCheckpoint:
    """Loads heads for `model` onto its device, in `dtype` (None: the model's).

    Raises ValueError when they were trained on another base or the files are not exactly what the
    config says.
    """
    folder = resolve_heads(str(name))
    config = HeadsConfig.from_file(folder / "config.json")
    if config.architecture not in FAMILIES:
        raise ValueError(f"{folder}: architecture {config.architecture!r} is not known here; known are {', '.join(FAMILIES)}")
    check_base_matches(config, model, folder)
    heads = FAMILIES[config.architecture](config)
    path = folder / "model.safetensors"
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: the checkpoint is incomplete, copy it again") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}): copy the checkpoint again") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or truncated ({error}): copy it again") from None
    check_tensors(tensors, dict(heads.named_parameters()), path)
    if bad := next((name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())), None):
        raise ValueError(f"{path}: tensor `{bad}` holds values that are not finite: the heads are damaged, copy or train them again")
    heads.load_state_dict(tensors)
    heads.requires_grad_(False)
    vocabulary = read_vocabulary(folder, config.vocab_size)
    num_proposed = config.vocab_size if vocabulary is None else len(vocabulary)
    static_nodes, acceptance = _read_measured(folder, num_heads=config.num_heads, num_proposed=num_proposed)
    return HeadsCheckpoint(
        heads=heads.to(device=model.device, dtype=dtype or model.dtype).eval(),
        config=config,
        folder=folder,
        static_nodes=static_nodes,
        acceptance=acceptance,
        draft_vocabulary=vocabulary,
    )


def _read_measured(folder: Path, *, num_heads: int, num_proposed: int) -> tuple[dict[tuple[int, ...], float], dict[int, float]]:
    """Nodes of static trees and acceptance length, empty where nothing was measured."""
    path = folder / "trees" / "measured.json"
    if not path.exists():
        return {}, {}
    try:
        found = parse_json(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): {REMEASURE}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): {REMEASURE}") from None
    try:
        nodes = {path_from_name(name): _number(share, least=0, most=1) for name, share in found.get("static_nodes", {}).items()}
        _check_paths(nodes, num_heads=num_heads, num_proposed=num_proposed)
        acceptance = {_count(n): _number(tau, least=1, most=int(n) + 1) for n, tau in found["acceptance_length"].items()}
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): expected `static_nodes`, a share of 0 to 1 per rank path such as `0,2`, and "
            f"`acceptance_length`, 1 or more per count of nodes; {REMEASURE}"
        ) from None
    return nodes, acceptance


def _check_paths(nodes: dict[tuple[int, ...], float], *, num_heads: int, num_proposed: int) -> None:
    """Raises ValueError unless every first part of the list, which stands in falling order, is a tree that these heads can fill."""
    known: set[tuple[int, ...]] = {()}
    for path in nodes:
        if len(path) > num_heads or not all(0 <= rank < num_proposed for rank in path):
            raise ValueError(f"node {path_name(path)!r} is beyond {num_heads} heads that propose {num_proposed} tokens")
        if path[:-1] not in known:
            raise ValueError(f"node {path_name(path)!r} stands before its parent")
        known.add(path)


def path_name(path: tuple[int, ...]) -> str:
    """A rank path as it stands in trees/measured.json: (0, 2) is `0,2`."""
    return ",".join(map(str, path))


def path_from_name(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split(",")))


def _count(name: str) -> int:
    if not 0 < (count := int(name)) < 2**31:
        raise ValueError(f"{name} is no number of nodes")
    return count


def _number(value: Any, *, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:  # NaN is no such number either
        raise ValueError(f"{value!r} is no number between {least} and {most}")
    return float(value)


def read_vocabulary(folder: Path, vocab_size: int) -> Tensor | None:
    """The draft vocabulary [V'] of a heads folder, or None where it has none. Raises ValueError when it is damaged."""
    path = folder / VOCABULARY_FILE
    if not path.exists():
        return None
    try:
        found = parse_json(path.read_text())
        ids = torch.tensor(found, dtype=torch.long)
        valid = (
            ids.dim() == 1
            and all(type(token) is int for token in found)
            and len(ids) > 0
            and bool((ids.diff() > 0).all())
            and int(ids[0]) >= 0
            and int(ids[-1]) < vocab_size
        )
    except (OSError, ValueError, TypeError, RuntimeError):
        valid = False
    if not valid:
        raise ValueError(f"{path} is damaged: expected ascending token ids below {vocab_size}; copy the checkpoint again")
    return ids


def check_base_matches(config: HeadsConfig, model: PreTrainedModel, folder: Path) -> None:
    """Raises ValueError naming what differs when the heads belong to another base model."""
    from medusa_heads import base_model

    for field_name, found in (("hidden_size", base_model.hidden_size(model)), ("vocab_size", base_model.vocab_size(model))):
        expected = getattr(config, field_name)
        if expected != found:
            raise ValueError(
                f"--heads {folder} were trained on {config.base_model or 'another base'} with {field_name} {expected}, "
                f"this base has {found}: give the base they were trained on"
            )
    if (found_print := fingerprint(model)) != config.base_fingerprint:
        if (adapter := folder / "adapter").is_dir():
            raise ValueError(
                f"--heads {folder} were trained together with an adapter and belong to the tuned base: write it with medusa-heads merge "
                f"--base {config.base_model or 'BASE'} --adapter {adapter} --output MERGED, and give --base MERGED"
            )
        if (given := short_name(model.config)) != config.base_quantization:
            wanted = config.base_quantization
            fix = "give it without --base-quantization" if wanted == "none" else f"give it with --base-quantization {wanted}"
            raise ValueError(
                f"--heads {folder} were trained on {config.base_model or 'another base'} quantised as: {wanted}, this base is quantised "
                f"as: {given}; {fix}, or train heads for this one"
            )
        raise ValueError(
            f"--heads {folder} were trained on other weights (base {config.base_model!r}, fingerprint "
            f"{config.base_fingerprint[:12]}..., this base {found_print[:12]}...): their drafts would seldom be accepted; "
            "give the base they were trained on, or train heads for this one"
        )


STORED_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_tensors(found: dict[str, Tensor], expected: dict[str, Any], path: Path) -> None:
    """Raises ValueError unless `found` holds exactly the expected names and shapes."""
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    shapes = [
        f"{name} is {list(found[name].shape)}, expected {list(expected[name].shape)}"
        for name in sorted(expected.keys() & found.keys())
        if found[name].shape != expected[name].shape
    ]
    kinds = [f"{name} is of type {found[name].dtype}" for name in sorted(found) if found[name].dtype not in STORED_TYPES]
    problems = [f"missing {name}" for name in missing] + [f"unexpected {name}" for name in extra] + shapes + kinds
    if problems:
        raise ValueError(f"{path} does not match its config.json: {'; '.join(problems)}")


def save_heads(
    heads: MedusaHeads,
    folder: str | Path,
    *,
    card: str,
    measured: dict[str, Any] | None = None,
    draft_vocabulary: Tensor | None = None,
    dtype: torch.dtype | None = None,
    command: list[str] | None = None,
) -> Path:
    """Writes a heads checkpoint, replacing what `folder` held only once the new one is whole.

    card: the README.md; draft_vocabulary: token ids to propose (None: all); measured: `static_nodes`
    and `acceptance_length` for trees/measured.json;
    dtype: storage type (None: the heads' own). Raises ValueError when `folder` cannot be written or
    holds files but no checkpoint.
    """
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()) and not _is_checkpoint(folder):
        raise ValueError(f"{folder} holds files that are not a heads checkpoint: choose another output folder")
    with replacing_folder(folder) as work:
        state = {name: p.detach().to(dtype or p.dtype).cpu().contiguous().clone() for name, p in heads.named_parameters()}
        save_file(state, work / "model.safetensors", metadata={"format": "pt"})
        (work / "config.json").write_text(heads.config.to_json())
        (work / "README.md").write_text(card, encoding="utf-8", errors="backslashreplace")  # as are bytes of a path that are no text
        (work / "train_command.txt").write_text(_command_text(command), encoding="utf-8", errors="backslashreplace")
        if draft_vocabulary is not None:
            (work / VOCABULARY_FILE).write_text(json.dumps(draft_vocabulary.tolist()) + "\n")
        if measured:
            (work / "trees").mkdir()
            (work / "trees" / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")
    return folder


def _is_checkpoint(folder: Path) -> bool:
    """Of heads: the folder of a model has a config.json too."""
    try:
        HeadsConfig.from_file(folder / "config.json")
    except ValueError:
        return False
    return True


def _command_text(command: list[str] | None) -> str:
    program = Path(sys.argv[0])
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    typed = shlex.join(command) if command else f"{name} {shlex.join(sys.argv[1:])}"
    lines = [typed, *(f"{package} {version}" for package, version in versions().items())]
    return "\n".join(lines) + "\n"
