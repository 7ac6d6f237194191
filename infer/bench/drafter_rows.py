"""The names in --drafters -> a generator for every row of the benchmark, each on the copy of the base that is fastest for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from infer.drafters import Drafter, NoDrafter
from infer.drafters.draft_model import DRAFT_LENGTH, DraftModelDrafter, load_draft_model
from infer.drafters.early_exit import NUM_DRAFT_TOKENS, EarlyExitDrafter
from infer.drafters.prompt_lookup import PromptLookupDrafter
from infer.drafters.suffix import SuffixDrafter
from infer.engine.packed_linear import decoding_copies, fastest_copy
from infer.generate import Generator
from infer.loading import NO_HEADS, LoadedHeads, default_heads, load_with_tree
from infer.tree import Tree
from medusa_heads.suggest import suggest

DRAFTERS = ("prompt_lookup", "suffix", "early_exit", "heads", "draft_model")


def drafter_names(drafters: str) -> list[str]:
    """Names separated by commas, each once. Raises ValueError on one that is not in DRAFTERS."""
    names = list(dict.fromkeys(name.strip() for name in drafters.split(",") if name.strip()))
    for name in names:
        if name not in DRAFTERS:
            raise ValueError(f"--drafters: unknown drafter {name!r}{suggest(name, DRAFTERS)}; known are {', '.join(DRAFTERS)}")
    return names


def check_options(names: Sequence[str], *, heads: Sequence[str], draft_model: str | None) -> None:
    """Raises ValueError where a drafter and the option that it needs do not come together."""
    if NO_HEADS in heads:
        raise ValueError(f"--heads {NO_HEADS}: the base rows decode without heads; leave `heads` out of --drafters instead")
    if "draft_model" in names and draft_model is None:
        raise ValueError("--drafters draft_model needs --draft-model: a folder or hub id of a small model with the base's tokenizer")
    if draft_model is not None and "draft_model" not in names:
        raise ValueError(f"--draft-model {draft_model} drafts nothing here: add draft_model to --drafters")


def load_all_heads(
    copies: Sequence[PreTrainedModel], heads: Sequence[str], *, base: str, tree: str, batch_size: int
) -> dict[str, LoadedHeads]:
    """Heads with their trees, by row; without names the default ones of the base."""
    names = heads or (default_heads(base, None),)
    return {row: load_with_tree(name, copies, tree, batch_size=batch_size) for row, name in zip(heads_row_names(names), names, strict=True)}


def heads_row_names(heads: Sequence[str]) -> list[str]:
    """`heads` for the first, `heads:<folder name>` for the others, told apart by their parents' names
    where two folders are called alike."""
    names = ["heads"]
    for name in heads[1:]:
        path = Path(name)
        row = f"heads:{path.name}"
        names.append(row if row not in names else f"heads:{path.parent.name}/{path.name}")
    if len(set(names)) < len(names):
        raise ValueError(f"--heads {' '.join(heads)}: two folders of the same name; rename one")
    return names


def make_generators(
    names: Sequence[str],
    copies: Sequence[PreTrainedModel],
    loaded: dict[str, LoadedHeads],
    *,
    tokenizer: Any,
    draft_model: str | None,
    batch_size: int,
) -> dict[str, Generator]:
    """Row `base`, then one row per drafter (one per heads folder), in the order of `names`."""
    generators = {"base": Generator(fastest_copy(copies, [batch_size]), NoDrafter())}
    for name in names:
        match name:
            case "prompt_lookup" | "suffix":
                drafter = PromptLookupDrafter() if name == "prompt_lookup" else SuffixDrafter()
                sizes = [batch_size, batch_size * (drafter.max_nodes + 1)]  # they often have nothing to propose
                generators[name] = Generator(fastest_copy(copies, sizes), drafter)
            case "early_exit":  # its draft model is made of the same copy of the base that verifies
                engine = fastest_copy(copies, [batch_size, batch_size * (NUM_DRAFT_TOKENS + 1)])
                generators[name] = Generator(engine, EarlyExitDrafter(engine))
            case "heads":
                generators |= {row: Generator(heads.engine, heads.drafter()) for row, heads in loaded.items()}
            case "draft_model":
                assert draft_model is not None, "check_options comes first"
                engine = fastest_copy(copies, [batch_size * (DRAFT_LENGTH + 1)])
                generators[name] = Generator(engine, draft_model_drafter(draft_model, engine, copies[0], tokenizer, batch_size))
    return generators


def draft_model_drafter(path: str, engine: PreTrainedModel, base: PreTrainedModel, tokenizer: Any, batch_size: int) -> Drafter:
    """engine: the copy of `base` that verifies."""
    draft = load_draft_model(path, base, tokenizer)
    return DraftModelDrafter(engine, fastest_copy(decoding_copies(draft), [batch_size]))


def describe_tree(heads: LoadedHeads) -> dict[str, Any]:
    """The tree in use, for the record, and what `auto` measured."""
    kind = "static" if isinstance(heads.tree, Tree) else "beam"
    paths = {"paths": [list(path) for path in heads.tree.paths]} if isinstance(heads.tree, Tree) else {"width": heads.tree.width}
    return {"heads": str(heads.checkpoint.folder), "kind": kind, "num_nodes": heads.tree.num_nodes, **paths, "auto_curve": heads.curve}
