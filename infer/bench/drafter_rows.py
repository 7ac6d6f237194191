"""The names in --drafters -> a generator for every row of the benchmark, each on the copy of the base that is fastest for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from infer.drafters import Drafter, NoDrafter
from infer.drafters.adaptive import adaptive
from infer.drafters.draft_model import DraftModelDrafter, load_draft_model
from infer.drafters.early_exit import EarlyExitDrafter
from infer.drafters.prompt_lookup import PromptLookupDrafter
from infer.drafters.suffix import SuffixDrafter
from infer.engine.packed_linear import decoding_copies, fastest_copy
from infer.generate import Generator
from infer.loading import NO_HEADS, LoadedHeads, best_copy, check_tree_verifier, default_heads, load_with_tree
from infer.tree import Tree
from infer.tune.step_times import Seconds, measure_forwards, sizes_up_to, step_curve
from infer.verifiers import SampledShape, VerifierChoice, resolve_verifier
from medusa_heads.checkpoint import resolve_heads
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
    if heads and "heads" not in names:
        raise ValueError(f"--heads {' '.join(heads)} draft nothing here: add heads to --drafters")
    if "draft_model" in names and draft_model is None:
        raise ValueError("--drafters draft_model needs --draft-model: a folder or hub id of a small model with the base's tokenizer")
    if draft_model is not None and "draft_model" not in names:
        raise ValueError(f"--draft-model {draft_model} drafts nothing here: add draft_model to --drafters")


def check_verifiable(names: Sequence[str], verifier: VerifierChoice, *, tree: str, temperature: float) -> None:
    """Raises ValueError where it is known before anything is loaded that a drafter cannot serve the verifier."""
    for name in names:
        try:
            if name == "heads":
                check_tree_verifier(tree, verifier, temperature=temperature)
            else:
                shape: SampledShape | None = "chain" if name in ("draft_model", "early_exit") else None
                resolve_verifier(verifier, drafter=name, sampled_shape=shape, temperature=temperature)
        except ValueError as error:
            raise ValueError(f"{error}; or leave {name} out of --drafters") from None


def load_all_heads(
    copies: Sequence[PreTrainedModel], heads: Sequence[str], *, base: str, tree: str, batch_size: int
) -> dict[str, LoadedHeads]:
    """Heads with their trees, by row; without names the default ones of the base. The copy of the base that is the fastest
    for the first decodes with all, so that heads are compared and not copies."""
    names = heads or (default_heads(base, None),)
    for name in names:
        resolve_heads(name)
    loaded: dict[str, LoadedHeads] = {}
    for row, name in zip(heads_row_names(names), names, strict=True):
        print(f"loading {row}, and timing what they cost on this machine ...", file=sys.stderr, flush=True)
        engine = next(iter(loaded.values())).engine if loaded else None
        loaded[row] = load_with_tree(name, copies, tree, batch_size=batch_size, engine=engine)
    return loaded


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
    adapt: bool,
) -> dict[str, Generator]:
    """Row `base`, then one row per drafter (one per heads folder), in the order of `names`.

    adapt: the drafters besides the heads, whose trees say it for them, draft as much as pays (drafters/adaptive.py);
    else always as much as they can.
    """
    builders = {name: drafter_builder(name, copies[0], tokenizer, draft_model, batch_size) for name in names if name != "heads"}
    max_nodes = {name: build(copies[0]).max_nodes for name, build in builders.items()}
    forwards: list[Seconds] = []
    if adapt and builders:
        sizes = sorted({size for most in max_nodes.values() for size in sizes_up_to(most)})
        forwards = [measure_forwards(copy, sizes, batch_size=batch_size) for copy in copies]
    generators = {"base": Generator(fastest_copy(copies, [batch_size]), NoDrafter())}
    for name in names:
        if name == "heads":
            generators |= {row: Generator(heads.engine, heads.drafter()) for row, heads in loaded.items()}
        elif adapt:
            generators[name] = adaptive_generator(builders[name], copies, forwards, batch_size)
        else:
            engine = fastest_copy(copies, [batch_size, batch_size * (max_nodes[name] + 1)])  # nothing to propose, and all it can
            generators[name] = Generator(engine, builders[name](engine))
    return generators


def drafter_builder(
    name: str, base: PreTrainedModel, tokenizer: Any, draft_model: str | None, batch_size: int
) -> Callable[[PreTrainedModel], Drafter]:
    """What makes the drafter for the copy of the base that verifies."""
    match name:
        case "prompt_lookup":
            return lambda engine: PromptLookupDrafter()
        case "suffix":
            return lambda engine: SuffixDrafter()
        case "early_exit":  # its draft model is made of the same copy
            return EarlyExitDrafter
        case _:
            assert name == "draft_model" and draft_model is not None, "check_options comes first"
            draft = fastest_copy(decoding_copies(load_draft_model(draft_model, base, tokenizer)), [batch_size])
            return lambda engine: DraftModelDrafter(engine, draft)


def adaptive_generator(
    build: Callable[[PreTrainedModel], Drafter], copies: Sequence[PreTrainedModel], forwards: Sequence[Seconds], batch_size: int
) -> Generator:
    """The drafter on the copy of the base that is fastest for it, and never slower than plain decoding where it does not pay."""
    drafters = [build(copy) for copy in copies]
    curves = [step_curve(*measured) for measured in zip(drafters, copies, forwards, strict=True)]
    best = best_copy(curves, batch_size)
    return Generator(copies[best], adaptive(drafters[best], curves[best]))


def describe_tree(heads: LoadedHeads) -> dict[str, Any]:
    """The tree in use, for the record, and what `auto` measured."""
    kind = "static" if isinstance(heads.tree, Tree) else "beam"
    paths = {"paths": [list(path) for path in heads.tree.paths]} if isinstance(heads.tree, Tree) else {"width": heads.tree.width}
    return {"heads": str(heads.checkpoint.folder), "kind": kind, "num_nodes": heads.tree.num_nodes, **paths, "auto_curve": heads.curve}
