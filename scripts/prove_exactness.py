"""Answers decoded with heads against the base model's own greedy ones, token for token, in float32.

    python scripts/prove_exactness.py --prompts mt_bench.jsonl gsm8k_test.jsonl.gz --device cuda --output outputs/exactness

The prompts go to the cells {trees} x {batch sizes} in rotation. The reference is one plain forward over each
answer: every token must be the argmax there. The first prompts are also decoded step by step by transformers'
`generate`. Every cell is stored when it is done; run again, only missing ones are decoded. The last line is
the result as JSON; the exit status is 1 if any token differs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from transformers import PreTrainedModel

from infer.acceptance_stats import AcceptanceStats
from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.hardware import hardware
from infer.output_file import write_text
from infer.prompts import Prompt, encode_chat
from infer.proof.cells import run_cells
from infer.proof.exactness import check_answer, plain_answers
from infer.proof.setup import load_in_float32, prompts_in_turn, settings_of
from infer.tree_spec import parse_tree
from medusa_heads import base_model
from medusa_heads.arguments import require_positive
from medusa_heads.checkpoint import HeadsCheckpoint
from medusa_heads.cli import run_command

PLAIN = "plain"
PLAIN_BATCH = 10  # prompts that `generate` decodes together


@dataclass(frozen=True, slots=True)
class ProveExactness:
    """Decode with heads and compare every token with the base model's own."""

    prompts: tuple[Path, ...]
    """Prompt files (JSONL or .gz); rows are taken from each in turn."""
    output: Path
    """Folder of the finished cells and the result."""
    base: str = "embedded"
    """Base model."""
    heads: str | None = None
    """Heads; by default the shipped ones with the embedded base."""
    trees: tuple[str, ...] = ("chain", "static:16", "beam:8", "beam:32", "beam:64")
    """Trees of the cells."""
    batch_sizes: tuple[int, ...] = (1, 3, 8)
    """Batch sizes of the cells."""
    num_prompts: int = 500
    """Prompts in all."""
    num_plain: int = 50
    """The first N are also decoded one token per forward."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    num_processes: int = 1
    """Processes that share the device; several make a GPU busy."""

    def run(self) -> int:
        self.chosen()
        require_positive(max_new_tokens=self.max_new_tokens, batch_sizes=min(self.batch_sizes, default=0))
        if "auto" in self.trees:
            raise ValueError("--trees auto is chosen by measurement: name the trees to prove, such as chain or beam:8")
        names = [*self.grid(), PLAIN]
        settings = settings_of({k: v for k, v in asdict(self).items() if k not in ("output", "num_processes")})
        *cells, plain = run_cells(self, names, self.output / "cells", settings=settings, num_processes=self.num_processes)
        document = self.document(cells, plain) | settings
        write_text(self.output / "exactness.json", json.dumps(document, indent=1) + "\n")
        print(json.dumps(document))
        return int(bool(document["num_different_tokens"] or document["num_wrong_ends"] or document["plain"]["num_different_answers"]))

    def grid(self) -> dict[str, tuple[str, int]]:
        """Tree and batch size of every cell, slow ones first, so that processes end together."""
        return {
            f"batch{size}_{re.sub(r'[^A-Za-z0-9]+', '-', tree)}": (tree, size) for size in sorted(self.batch_sizes) for tree in self.trees
        }

    def chosen(self) -> list[Prompt]:
        rows = prompts_in_turn(self.prompts, self.num_prompts)
        if not 0 <= self.num_plain <= self.num_prompts:
            raise ValueError(f"--num-plain {self.num_plain} must lie between 0 and the {self.num_prompts} of --num-prompts")
        return rows

    # -------------------------------------------------------------- in a worker process

    def cells(self, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        model, tokenizer, checkpoint = load_in_float32(self.base, self.heads, self.device)
        prompts = [encode_chat(tokenizer, prompt.messages) for prompt in self.chosen()]
        grid = self.grid()
        for name in names:
            if name == PLAIN:
                yield name, self.plain(model, tokenizer, prompts[: self.num_plain])
            else:
                own = range(list(grid).index(name), len(prompts), len(grid))
                yield name, self.cell(model, checkpoint, tokenizer, *grid[name], {index: prompts[index] for index in own})

    def plain(self, model: PreTrainedModel, tokenizer: Any, prompts: list[list[int]]) -> dict[str, Any]:
        eos_ids = base_model.end_of_sequence_ids(model, tokenizer)
        answers: list[list[int]] = []
        for start in range(0, len(prompts), PLAIN_BATCH):
            batch = prompts[start : start + PLAIN_BATCH]
            answers += plain_answers(model, tokenizer, batch, max_new_tokens=self.max_new_tokens, eos_ids=eos_ids)
        return {"answers": dict(enumerate(answers))}

    def cell(
        self, model: PreTrainedModel, checkpoint: HeadsCheckpoint, tokenizer: Any, tree: str, size: int, prompts: dict[int, list[int]]
    ) -> dict[str, Any]:
        """Decodes and checks one cell's prompts, keyed by their index."""
        parsed = parse_tree(tree, checkpoint)
        assert parsed is not None, "auto is refused"
        drafter = HeadsDrafter.from_checkpoint(model, checkpoint, parsed)
        generator, stats, answers = Generator(model, drafter, tokenizer=tokenizer), AcceptanceStats(), {}
        start, indices = perf_counter(), list(prompts)
        for first in range(0, len(indices), size):
            batch = indices[first : first + size]
            for index, found in zip(
                batch, generator.generate([prompts[i] for i in batch], max_new_tokens=self.max_new_tokens), strict=True
            ):
                answers[index], stats = found.token_ids, stats + found.stats
        seconds = perf_counter() - start
        eos_ids = base_model.end_of_sequence_ids(model, tokenizer)
        room = base_model.max_length(model)
        checks = {
            i: check_answer(model, prompts[i], answer, max_new_tokens=min(self.max_new_tokens, room - len(prompts[i])), eos_ids=eos_ids)
            for i, answer in answers.items()
        }
        return {
            "tree": tree,
            "batch_size": size,
            "num_prompts": len(answers),
            "num_tokens": sum(check.num_tokens for check in checks.values()),
            "mean_acceptance_length": stats.mean_acceptance_length,
            "seconds": seconds,
            "smallest_margin": min((check.smallest_margin for check in checks.values()), default=None),
            "differences": [{"prompt": i, **asdict(difference)} for i, check in checks.items() for difference in check.differences],
            "wrong_ends": [{"prompt": i, "answer": check.wrong_end} for i, check in checks.items() if check.wrong_end],
            "answers": answers,
            "hardware": hardware(model.device),
        }

    # -------------------------------------------------------------- the result

    def document(self, cells: list[dict[str, Any]], plain: dict[str, Any]) -> dict[str, Any]:
        answers = {index: answer for cell in cells for index, answer in cell["answers"].items()}
        different = [index for index, answer in plain["answers"].items() if answers[index] != answer]
        differences = [{**{k: cell[k] for k in ("tree", "batch_size")}, **row} for cell in cells for row in cell["differences"]]
        wrong_ends = [row for cell in cells for row in cell["wrong_ends"]]
        kept = ("tree", "batch_size", "num_prompts", "num_tokens", "mean_acceptance_length", "seconds", "smallest_margin")
        rows = [{k: cell[k] for k in kept} | {"num_different_tokens": len(cell["differences"])} for cell in cells]
        return {
            "num_prompts": len(answers),
            "num_tokens": sum(cell["num_tokens"] for cell in cells),
            "num_different_tokens": len(differences),
            "num_wrong_ends": len(wrong_ends),
            "smallest_margin": min(cell["smallest_margin"] for cell in cells if cell["num_prompts"]),
            "plain": {"num_prompts": len(plain["answers"]), "num_different_answers": len(different), "different": different},
            "differences": differences,
            "wrong_ends": wrong_ends,
            "cells": rows,
            "hardware": cells[0]["hardware"],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }


if __name__ == "__main__":
    raise SystemExit(run_command("__main__:ProveExactness", sys.argv[1:], prog="prove_exactness.py"))
