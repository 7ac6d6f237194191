"""A `--tree` argument -> the tree a drafter uses.

chain          the K best tokens, one below the other
beam:N         N nodes chosen anew at every step by the per-depth beam
static:N       N nodes chosen once: those that were right most often on validation text
FILE.json      a static tree of rank paths
tuned          the tree that `medusa-heads tree` chose for these heads and stored with them
auto           the beam tree whose size gives the most tokens per second on this machine, chosen anew at every
               step by how much was accepted lately (drafters/adaptive.py); none where nothing pays
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infer.tree import Tree, build_tree, chain, checked_paths, load_tree
from infer.tree_builders import static_tree
from medusa_heads.checkpoint import HeadsCheckpoint
from medusa_heads.json_text import parse_json

BEAM_WIDTH = 20
TUNED_FILE = "trees/tuned.json"


@dataclass(frozen=True, slots=True)
class BeamTree:
    """The per-step beam tree: `num_nodes` nodes besides the root out of beams of `width`."""

    num_nodes: int
    width: int = BEAM_WIDTH

    def __post_init__(self) -> None:
        if self.num_nodes < 0 or self.width < 1:
            raise ValueError(f"a beam tree of {self.num_nodes} nodes, {self.width} wide: it has 0 nodes or more and is at least 1 wide")


def most_beam_nodes(checkpoint: HeadsCheckpoint) -> int:
    """What the beams can score: width paths, then width squared per further depth."""
    return BEAM_WIDTH + (checkpoint.config.num_heads - 1) * BEAM_WIDTH**2


def beam_tree(num_nodes: int, checkpoint: HeadsCheckpoint) -> BeamTree:
    """Raises ValueError beyond what the beams can score."""
    most = most_beam_nodes(checkpoint)
    if num_nodes > most:
        raise ValueError(
            f"--tree beam:{num_nodes}: {checkpoint.config.num_heads} heads and beams of {BEAM_WIDTH} give at most {most} nodes"
        )
    return BeamTree(num_nodes)


def tuned_tree(checkpoint: HeadsCheckpoint) -> tuple[Tree | BeamTree, dict[str, Any]]:
    """The tree stored in the heads checkpoint, and the document that says how it was chosen.

    Raises ValueError when there is none or its file is damaged.
    """
    path = checkpoint.folder / TUNED_FILE
    try:
        document = parse_json(path.read_text())
        _check_facts(document)
        return _stored_tree(document["choice"], checkpoint), document
    except FileNotFoundError:
        raise ValueError(
            f"--tree tuned: {checkpoint.folder} holds no tuned tree: run `medusa-heads tree` for these heads first, or give --tree auto"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"--tree tuned: {path} is damaged ({error}): run `medusa-heads tree` again") from None


def _check_facts(document: dict[str, Any]) -> None:
    """What says where the tree was measured: a part may be absent, but is no other thing."""
    for name, text in (("hardware", None), ("settings", "base"), ("prompts", "file")):
        part = document.get(name, {})
        if not isinstance(part, dict) or (text and not isinstance(part.get(text, ""), str)):
            raise ValueError(f"{name} is {part!r}, not what `medusa-heads tree` writes")
    if not isinstance(engine := document["choice"].get("engine", ""), str):
        raise ValueError(f"engine is {engine!r}, not a name")


def _stored_tree(choice: dict[str, Any], checkpoint: HeadsCheckpoint) -> Tree | BeamTree:
    if choice["kind"] == "static":
        tree = build_tree(checked_paths(choice["paths"]))
        tree.check(num_heads=checkpoint.config.num_heads, vocab_size=num_proposed(checkpoint))
        return tree
    num_nodes = choice["num_nodes"]
    if choice["kind"] != "beam" or type(num_nodes) is not int or num_nodes < 0:
        raise ValueError(f"kind {choice['kind']!r} with {num_nodes!r} nodes is no tree")
    return beam_tree(num_nodes, checkpoint)


def parse_tree(spec: str, checkpoint: HeadsCheckpoint) -> Tree | BeamTree | None:
    """Reads a `--tree` argument; None means `auto`, to be settled by measurement.

    Raises ValueError naming what is wrong, also for a tree deeper than the heads.
    """
    kind, _, argument = spec.partition(":")
    if spec == "auto":
        return None
    if spec == "tuned":
        return tuned_tree(checkpoint)[0]
    if spec == "chain":
        return chain(checkpoint.config.num_heads)
    if kind in ("beam", "static"):
        if not argument.isdecimal() or int(argument) < 1:
            raise ValueError(f"--tree {spec}: write {kind}:N with N >= 1 nodes besides the root")
        return beam_tree(int(argument), checkpoint) if kind == "beam" else static_tree(checkpoint.static_nodes, int(argument))
    tree = load_tree(spec)
    try:
        tree.check(num_heads=checkpoint.config.num_heads, vocab_size=num_proposed(checkpoint))
    except ValueError as error:
        raise ValueError(f"--tree {spec}: {error}") from None
    return tree


def num_proposed(checkpoint: HeadsCheckpoint) -> int:
    """How many different tokens the heads propose."""
    vocabulary = checkpoint.draft_vocabulary
    return checkpoint.config.vocab_size if vocabulary is None else len(vocabulary)
