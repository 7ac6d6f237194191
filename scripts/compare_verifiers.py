"""Exact verifiers for sampled drafts -> acceptance length, step time and tokens per second, and the best of them.

    python scripts/compare_verifiers.py --prompts gsm8k_test.jsonl.gz --limit 10
    python scripts/compare_verifiers.py --prompts FILE --drafters heads draft_model early_exit --draft-model FOLDER \
        --batch-sizes 1 8 --device cuda --json verifiers.json

For every temperature and batch size each drafter runs each exact verifier over each of its trees that the verifier
permits; the ways take turns at every prompt. The best of each drafter and shape of drafts that can be drawn are printed
as rows of AUTO in infer/verifiers.py; `over all trees` is the best of a drafter whatever its tree.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, PreTrainedModel

from infer.acceptance_stats import AcceptanceStats
from infer.bench.drafter_rows import check_options, drafter_builder, drafter_names
from infer.bench.figures import tokens_per_second
from infer.bench.measure import Answer, make_batches, measure
from infer.bench.rows import Decoding, GeneratorRow
from infer.drafters.heads import HeadsDrafter
from infer.engine.packed_heads import heads_for
from infer.engine.packed_linear import decoding_copies, fastest_copy
from infer.generate import Generator
from infer.hardware import hardware
from infer.loading import Dtype, load_model
from infer.output_file import check_writable, write_text
from infer.prompts import encode_chat, file_sha256, load_prompts
from infer.tree_spec import parse_tree
from infer.verifiers import NO_DRAFTER, SHAPE_NEEDED, BestVerifier, SampledShape, VerifierChoice, is_lossless
from medusa_heads import base_model
from medusa_heads.arguments import require_positive
from medusa_heads.checkpoint import load_heads
from medusa_heads.cli import run_command
from medusa_heads.versions import commit, versions

OWN_TREE = "its own"  # of the drafters besides the heads


@dataclass(frozen=True, slots=True)
class Way:
    """A drafter over one of its trees and a verifier that it can serve."""

    drafter: str
    tree: str
    verifier: VerifierChoice
    generator: Generator

    @property
    def name(self) -> str:
        return f"{self.drafter} {self.tree} {self.verifier}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareVerifiers:
    """Compare exact verifiers for sampled drafts."""

    prompts: Path
    """Prompts to decode (JSONL or .gz)."""
    base: str = "embedded"
    """Base model."""
    heads: str = "pretrained"
    """Heads of the drafter `heads`."""
    drafters: tuple[str, ...] = ("heads", "early_exit")
    """heads, draft_model, early_exit, prompt_lookup, suffix."""
    draft_model: str | None = None
    """The small model of the drafter draft_model."""
    trees: tuple[str, ...] = ("chain", "beam:16", "static:16")
    """Trees of the heads, as --tree takes them but for auto; the other drafters have one each."""
    temperatures: tuple[float, ...] = (0.7, 1.0)
    """Temperatures, all above 0."""
    top_ps: tuple[float, ...] = (0.95, 1.0)
    """--top-p beside each temperature."""
    batch_sizes: tuple[int, ...] = (1,)
    """Numbers of prompts answered at once."""
    limit: int | None = None
    """Take only the first N prompts."""
    max_new_tokens: int = 64
    """Longest answer in tokens."""
    dtype: Dtype | None = None
    """Number type; by default the base checkpoint's own."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    seed: int = 0
    """Seeds what is drawn."""
    json: Path | None = None
    """Also write the figures to this file."""

    def run(self) -> None:
        self.check()
        model, tokenizer = load_model(self.base, dtype=self.dtype, device=self.device)
        prompt_ids = [encode_chat(tokenizer, prompt.messages) for prompt in load_prompts(self.prompts, self.limit)]
        eos_ids = tuple(base_model.end_of_sequence_ids(model, tokenizer))
        rows: list[dict[str, Any]] = []
        for batch_size in self.batch_sizes:
            ways = list(self.ways(model, tokenizer, batch_size))
            for temperature, top_p in zip(self.temperatures, self.top_ps, strict=True):
                config = GenerationConfig(do_sample=True, temperature=temperature, top_p=top_p, top_k=0)
                rows += self.measure(ways, prompt_ids, Decoding(self.max_new_tokens, eos_ids, config, batch_size))
        print_rows(rows)
        auto, overall = best_by_shape(rows), best_rows(rows)
        for best in auto:
            print(best)
        for row in overall:
            print(f"over all trees, {cell_name(row)}: {row['verifier']} over {row['tree']}, {row['tokens_per_second']:.1f} tokens/s")
        if self.json is not None:
            prompts = {"file": str(self.prompts), "sha256": file_sha256(self.prompts), "num": len(prompt_ids)}
            facts = {
                "hardware": hardware(model.device),
                "versions": versions(),
                "commit": commit(),
                "prompts": prompts,
                "max_new_tokens": self.max_new_tokens,
            }
            facts |= {"dtype": str(model.dtype).removeprefix("torch."), "seed": self.seed}
            found = {"rows": rows, "auto": [asdict(best) for best in auto], "best": overall}
            write_text(self.json, json.dumps(found | facts, indent=1) + "\n")

    def check(self) -> None:
        drafter_names(",".join(self.drafters))  # refuses unknown ones
        check_options(self.drafters, heads=(self.heads,) if "heads" in self.drafters else (), draft_model=self.draft_model)
        require_positive(limit=self.limit, max_new_tokens=self.max_new_tokens, batch_sizes=min(self.batch_sizes, default=0))
        if len(self.temperatures) != len(self.top_ps):
            raise ValueError(f"--top-ps has {len(self.top_ps)} values and --temperatures {len(self.temperatures)}: give one for each")
        if min(self.temperatures) <= 0:
            raise ValueError(f"--temperatures {min(self.temperatures)}: greedy decoding has one verifier; give temperatures above 0")
        if "auto" in self.trees:
            raise ValueError("--trees auto changes its size while it is measured: name the trees")
        if self.json is not None:
            check_writable(self.json, "--json")

    def ways(self, model: PreTrainedModel, tokenizer: Any, batch_size: int) -> Iterator[Way]:
        """Plain decoding, then every drafter with its trees and the verifiers that they permit."""
        copies = decoding_copies(model)
        yield Way(NO_DRAFTER, "none", "sample-and-match", Generator(fastest_copy(copies, [batch_size])))
        for name in self.drafters:
            for tree in self.trees if name == "heads" else (OWN_TREE,):
                generator = self.generator(name, tree, copies, tokenizer, batch_size)
                for verifier in permitted(generator.drafter.sampled_shape):
                    yield Way(name, tree, verifier, generator)

    def generator(self, name: str, tree: str, copies: Sequence[PreTrainedModel], tokenizer: Any, batch_size: int) -> Generator:
        if name != "heads":
            build = drafter_builder(name, copies[0], tokenizer, self.draft_model, batch_size)
            engine = fastest_copy(copies, [batch_size * (build(copies[0]).max_nodes + 1)])
            return Generator(engine, build(engine))
        checkpoint = load_heads(self.heads, copies[0])
        parsed = parse_tree(tree, checkpoint)
        assert parsed is not None, "auto was refused"
        engine = fastest_copy(copies, [batch_size * (parsed.num_nodes + 1)])
        heads = heads_for(checkpoint, engine)
        return Generator(engine, HeadsDrafter.from_checkpoint(engine, heads, parsed))

    def measure(self, ways: Sequence[Way], prompt_ids: Sequence[list[int]], decoding: Decoding) -> list[dict[str, Any]]:
        """One row of figures per way."""
        rows = [GeneratorRow(way.name, way.generator, decoding, verifier=way.verifier) for way in ways]
        batches = make_batches(prompt_ids, batch_size=decoding.batch_size, seed=self.seed)
        answers = measure(rows, batches, seed=self.seed, device=rows[0].model.device).answers
        config = decoding.generation_config
        assert config is not None
        cell = {"temperature": config.temperature, "top_p": config.top_p, "batch_size": decoding.batch_size}
        plain = tokens_per_second(answers[rows[0].name])
        return [
            {"drafter": way.drafter, **cell, "tree": way.tree, "shape": way.generator.drafter.sampled_shape, "verifier": way.verifier}
            | figures(answers[way.name], decoding.batch_size, plain)
            for way in ways
        ]


def permitted(shape: SampledShape | None) -> list[VerifierChoice]:
    """The exact verifiers of drafts of this shape. Those of trees are left out on chains: there recursive rejection is
    token rejection, and traversal block verification."""
    exact = [verifier for verifier in get_args(VerifierChoice) if verifier != "auto" and is_lossless(verifier)]
    return [verifier for verifier in exact if SHAPE_NEEDED.get(verifier) in (None, shape)]


def figures(answers: Sequence[Answer], batch_size: int, plain: float | None) -> dict[str, Any]:
    """step_s: seconds after the first token over forwards; those of a batch are those of its longest row."""
    stats = sum((answer.stats for answer in answers), AcceptanceStats())
    steps = [answer.stats.num_steps for answer in answers]
    num_forwards = sum(max(steps[start : start + batch_size]) for start in range(0, len(steps), batch_size))
    speed = tokens_per_second(answers)
    return {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "step_s": sum(answer.decode_s for answer in answers) / num_forwards if num_forwards else None,
        "tokens_per_second": speed,
        "speedup_vs_plain": speed / plain if speed and plain else None,
    }


def cell_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["drafter"], row["temperature"], row["top_p"], row["batch_size"]


def cell_name(row: dict[str, Any]) -> str:
    return f"{row['drafter']} at temperature {row['temperature']}, batch {row['batch_size']}"


def best_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The row with the most tokens per second of each drafter, temperature and batch size."""
    drafting = sorted((row for row in rows if row["drafter"] != NO_DRAFTER and row["tokens_per_second"]), key=cell_of)
    return [max(cell, key=lambda row: row["tokens_per_second"]) for _, cell in groupby(drafting, key=cell_of)]


def best_by_shape(rows: Sequence[dict[str, Any]]) -> list[BestVerifier]:
    """Rows of AUTO: the best verifier of each drafter, shape that it can draw, temperature and batch size."""
    found = []
    for shape in ("chain", "tree"):
        best = best_rows([row for row in rows if row["shape"] == shape])
        found += [BestVerifier(row["drafter"], row["shape"], row["temperature"], row["batch_size"], row["verifier"]) for row in best]
    return found


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    table = Table()
    for name in (name for name in rows[0] if name != "shape"):
        table.add_column(name.replace("_", " "), justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        values = [Path(value).name if name == "tree" else value for name, value in row.items() if name != "shape"]
        table.add_row(*("-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
    Console(highlight=False, width=180).print(table)


if __name__ == "__main__":
    raise SystemExit(run_command("__main__:CompareVerifiers", sys.argv[1:], prog="compare_verifiers.py"))
