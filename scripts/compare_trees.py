"""Trees for the same heads -> expected and decoded acceptance, and tokens per second, side by side.

    python scripts/compare_trees.py                                              # expected acceptance alone
    python scripts/compare_trees.py --prompts gsm8k_test.jsonl.gz --limit 10     # and decoded, with speeds
    python scripts/compare_trees.py --prompts FILE --batch-size 8 --trees none auto beam:5
    python scripts/compare_trees.py --prompts FILE --random-heads --trees none auto

The first tree is what the others are compared with. `none` is plain decoding; every fixed tree is speculation
forced on. mc_sim_7b_63.json is the tree of Medusa's 7B heads. Greedy; prompts are answered in turns.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from infer.acceptance_stats import AcceptanceStats
from infer.bench.figures import tokens_per_second
from infer.bench.measure import Answer, make_batches, measure
from infer.bench.rows import Decoding, GeneratorRow
from infer.engine.packed_linear import decoding_copies, fastest_copy
from infer.generate import Generator
from infer.hardware import hardware
from infer.loading import Dtype, load_model, load_with_tree
from infer.output_file import check_writable, write_text
from infer.prompts import encode_chat, file_sha256, load_prompts
from infer.tree import Tree
from infer.tree_builders import expected_length
from infer.tree_spec import parse_tree
from infer.tune.auto_tree import expected_length as expected_beam_length
from infer.tune.tuned_check import engine_name
from medusa_heads import base_model
from medusa_heads.arguments import require_positive
from medusa_heads.checkpoint import HeadsCheckpoint, load_heads, save_heads
from medusa_heads.cli import run_command
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import create_heads
from medusa_heads.versions import commit, versions

PLAIN = "none"
MEDUSA_TREE = str(Path(__file__).parent / "mc_sim_7b_63.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareTrees:
    """Compare trees for the same heads."""

    trees: tuple[str, ...] = (MEDUSA_TREE, "static:63", "auto")
    """`none`, or what --tree takes."""
    prompts: Path | None = None
    """Prompts to decode (JSONL or .gz); without them only expected acceptance is shown."""
    base: str = "embedded"
    """Base model."""
    heads: str = "pretrained"
    """Heads."""
    random_heads: bool = False
    """Take heads of random weights instead, which are never right."""
    limit: int | None = None
    """Take only the first N prompts."""
    max_new_tokens: int = 128
    """Longest answer in tokens."""
    batch_size: int = 1
    """Prompts answered at once."""
    dtype: Dtype | None = None
    """Number type; by default the base checkpoint's own."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: Path | None = None
    """Also write the figures to this file."""

    @torch.inference_mode()
    def run(self) -> None:
        base_model.quiet_transformers()
        require_positive(limit=self.limit, max_new_tokens=self.max_new_tokens, batch_size=self.batch_size)
        if self.json is not None:
            check_writable(self.json, "--json")
        model, tokenizer = load_model(self.base, dtype=self.dtype, device=self.device)
        with self.heads_folder(model) as heads:
            rows = expected(load_heads(heads, model), self.trees)
            if self.prompts is not None:
                prompt_ids = [encode_chat(tokenizer, prompt.messages) for prompt in load_prompts(self.prompts, self.limit)]
                decoded = self.decode(model, tokenizer, heads, prompt_ids)
                rows = [row | found for row, found in zip(rows, decoded, strict=True)]
        print_rows(rows)
        if self.json is not None:
            facts: dict[str, Any] = {"hardware": hardware(model.device), "versions": versions()}
            facts |= {"commit": commit(), "dtype": str(model.dtype)}
            facts |= {"batch_size": self.batch_size, "max_new_tokens": self.max_new_tokens}
            if self.prompts is not None:
                facts["prompts"] = {"file": str(self.prompts), "sha256": file_sha256(self.prompts), "num": len(prompt_ids)}
            write_text(self.json, json.dumps({"rows": rows, **facts}, indent=1) + "\n")

    @contextmanager
    def heads_folder(self, model: PreTrainedModel) -> Iterator[str]:
        if not self.random_heads:
            yield self.heads
            return
        heads = create_heads(HeadsConfig(num_heads=4), model).requires_grad_(False)
        for parameter in heads.parameters():
            parameter.normal_(std=0.2)
        with tempfile.TemporaryDirectory() as folder:
            yield str(save_heads(heads, Path(folder) / "random", card="random weights"))

    def decode(self, model: PreTrainedModel, tokenizer: Any, heads: str, prompt_ids: list[list[int]]) -> list[dict[str, Any]]:
        """Decoded acceptance and speed of every tree, and whether its answers are the first one's."""
        decoding = Decoding(self.max_new_tokens, base_model.end_of_sequence_ids(model, tokenizer))
        copies = decoding_copies(model)
        rows = []
        for spec in self.trees:
            if spec == PLAIN:
                generator = Generator(fastest_copy(copies, [self.batch_size]))
            else:
                loaded = load_with_tree(heads, copies, spec, batch_size=self.batch_size)
                print(f"{spec}: begins with {loaded.tree.num_nodes} nodes, {engine_name(loaded.engine)} layers", file=sys.stderr)
                generator = Generator(loaded.engine, loaded.drafter())
            rows.append(GeneratorRow(spec, generator, decoding))
        batches = make_batches(prompt_ids, batch_size=self.batch_size, seed=0)
        answers = measure(rows, batches, seed=0, device=model.device).answers
        first = answers[self.trees[0]]
        return [figures(answers[spec], first) for spec in self.trees]


def expected(checkpoint: HeadsCheckpoint, trees: Sequence[str]) -> list[dict[str, Any]]:
    """Nodes and expected acceptance length on the held-out answers whose figures are stored with the heads: of static
    trees at the steps that `static:N` was chosen at, which flatters it a little."""
    rows = []
    for spec in trees:
        tree = None if spec == PLAIN else parse_tree(spec, checkpoint)
        length = None
        if isinstance(tree, Tree):
            length = expected_length(checkpoint.static_nodes, tree) if checkpoint.static_nodes else None
        elif tree is not None and checkpoint.acceptance:
            length = expected_beam_length(checkpoint.acceptance, tree.num_nodes)
        rows.append({"tree": spec, "num_nodes": None if tree is None else tree.num_nodes, "expected_acceptance_length": length})
    return rows


def figures(answers: Sequence[Answer], first: Sequence[Answer]) -> dict[str, Any]:
    speed, reference = tokens_per_second(answers), tokens_per_second(first)
    stats = sum((answer.stats for answer in answers), AcceptanceStats())
    same = sum(own.token_ids == theirs.token_ids for own, theirs in zip(answers, first, strict=True))
    return {
        "acceptance_length": stats.mean_acceptance_length,
        "nodes_per_step": stats.num_drafted_tokens / stats.num_steps if stats.num_steps else None,
        "tokens_per_second": speed,
        "speed_ratio": speed / reference if speed and reference else None,
        "identical_outputs": same / len(answers),
    }


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    table = Table()
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="left" if name == "tree" else "right")
    for row in rows:
        values = [Path(value).stem if name == "tree" else value for name, value in row.items()]
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value) for value in values))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    raise SystemExit(run_command("__main__:CompareTrees", sys.argv[1:], prog="compare_trees.py"))
