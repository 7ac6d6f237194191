"""Sampled acceptance against its expectation, step by step, in float32.

    python scripts/prove_sampling.py --prompts mt_bench.jsonl gsm8k_test.jsonl.gz --device cuda --output outputs/sampling

Under sample-and-match a step emits 1 + the sum, over the nodes below the root, of the target law's probabilities
along the node's path, on average. These are recomputed for every step's own text and tree by plain forwards
and transformers' own logits processors; the mean of (emitted before any cut - expected) must lie within 3 standard
errors of 0. The other exact verifiers, on drafts drawn at random, are reported beside what sample-and-match would
give on the same drafts. Every cell is stored when it is done. The last line is the result as JSON; the exit
status is 1 if a mean lies outside.
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

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.hardware import hardware
from infer.output_file import write_text
from infer.prompts import encode_chat
from infer.proof.cells import run_cells
from infer.proof.expected_length import Law, RecordingDrafter, compare, expected_lengths
from infer.proof.setup import load_in_float32, prompts_in_turn, settings_of
from infer.tree_spec import parse_tree
from infer.verifiers import VerifierChoice
from medusa_heads import base_model
from medusa_heads.arguments import require_positive
from medusa_heads.checkpoint import HeadsCheckpoint
from medusa_heads.cli import run_command

PROVEN: VerifierChoice = "sample-and-match"
DRAWN: tuple[tuple[VerifierChoice, str], ...] = (
    ("token-rejection", "chain"),
    ("block", "chain"),
    ("recursive-rejection", "static:8"),
    ("traversal", "static:8"),
)
LAWS = ((0.7, 0.95), (1.0, 1.0))  # temperature, top-p
MOST_DEVIATION = 3.0  # standard errors


@dataclass(frozen=True, slots=True)
class ProveSampling:
    """Decode with heads, sampling, and compare the acceptance length with its expectation."""

    prompts: tuple[Path, ...]
    """Prompt files (JSONL or .gz); rows are taken from each in turn."""
    output: Path
    """Folder of the finished cells and the result."""
    base: str = "embedded"
    """Base model."""
    heads: str | None = None
    """Heads; by default the shipped ones with the embedded base."""
    trees: tuple[str, ...] = ("beam:8",)
    """Trees that sample-and-match is proven on."""
    drawn: tuple[VerifierChoice, ...] = tuple(verifier for verifier, _ in DRAWN)
    """Verifiers of drawn drafts to report too, on chain and static:8."""
    num_prompts: int = 100
    """Prompts in all, answered again and again until there are enough steps."""
    num_steps: int = 5000
    """Least number of steps of each cell, counted per row."""
    batch_size: int = 16
    """Answers decoded together."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""
    seed: int = 0
    """Fixes what is drawn."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    num_processes: int = 1
    """Processes that share the device; several make a GPU busy."""

    def run(self) -> int:
        prompts_in_turn(self.prompts, self.num_prompts)
        require_positive(max_new_tokens=self.max_new_tokens, batch_size=self.batch_size)
        if "auto" in self.trees:
            raise ValueError("--trees auto is chosen by measurement: name the trees, such as chain or beam:8")
        drawn = [verifier for verifier, _ in DRAWN]
        if unknown := set(self.drawn) - set(drawn):
            raise ValueError(f"--drawn {', '.join(sorted(unknown))}: no exact verifier of drawn drafts; write some of {', '.join(drawn)}")
        if self.num_steps < 2:
            raise ValueError(f"--num-steps {self.num_steps}: a standard error needs at least 2")
        settings = settings_of({k: v for k, v in asdict(self).items() if k not in ("output", "num_processes", "trees", "drawn")})
        cells = run_cells(self, list(self.grid()), self.output / "cells", settings=settings, num_processes=self.num_processes)
        document = {
            "num_outside": sum(cell["within"] is False for cell in cells),
            "most_deviation": MOST_DEVIATION,
            "cells": [{k: v for k, v in cell.items() if k != "hardware"} for cell in cells],
            **settings,
            "hardware": cells[0]["hardware"],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        write_text(self.output / "sampling.json", json.dumps(document, indent=1) + "\n")
        print(json.dumps(document))
        return int(document["num_outside"] > 0)

    def grid(self) -> dict[str, tuple[float, float, VerifierChoice, str]]:
        """Temperature, top-p, verifier and tree of every cell."""
        runs = [(PROVEN, tree) for tree in self.trees] + [run for run in DRAWN if run[0] in self.drawn]
        cells = [(temperature, top_p, verifier, tree) for verifier, tree in runs for temperature, top_p in LAWS]
        return {re.sub(r"[^A-Za-z0-9.]+", "-", "_".join(map(str, cell))): cell for cell in cells}

    # -------------------------------------------------------------- in a worker process

    def cells(self, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        model, tokenizer, checkpoint = load_in_float32(self.base, self.heads, self.device)
        prompts = [encode_chat(tokenizer, prompt.messages) for prompt in prompts_in_turn(self.prompts, self.num_prompts)]
        room = base_model.max_length(model) - self.max_new_tokens - checkpoint.config.num_heads  # at the limit trees are not verified
        if (longest := max(map(len, prompts))) > room:
            raise ValueError(
                f"--prompts hold one of {longest} tokens, and --max-new-tokens {self.max_new_tokens} leave room for {room}: "
                "take it out, or lower --max-new-tokens"
            )
        for name in names:
            yield name, self.cell(model, checkpoint, tokenizer, prompts, *self.grid()[name])

    def cell(
        self,
        model: PreTrainedModel,
        checkpoint: HeadsCheckpoint,
        tokenizer: Any,
        prompts: list[list[int]],
        temperature: float,
        top_p: float,
        verifier: VerifierChoice,
        tree: str,
    ) -> dict[str, Any]:
        parsed = parse_tree(tree, checkpoint)
        assert parsed is not None, "auto is refused"
        recorder = RecordingDrafter(HeadsDrafter.from_checkpoint(model, checkpoint, parsed))
        generator = Generator(model, recorder, tokenizer=tokenizer)
        settings = GenerationConfig(do_sample=True, temperature=temperature, top_p=top_p, top_k=0)
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "generation_config": settings, "verifier": verifier}
        start = perf_counter()
        for seed, batch in enumerate(self.endless(prompts), start=self.seed):
            generator.generate(batch, seed=seed, **options)
            if len(recorder.steps) >= self.num_steps:
                break
        decoded = perf_counter()
        expected = expected_lengths(model, recorder.steps, target_law(model, settings))
        found = compare([step.length for step in recorder.steps], expected)
        return {
            "verifier": verifier,
            "tree": tree,
            "temperature": temperature,
            "top_p": top_p,
            **asdict(found),
            "deviation": found.deviation,
            "within": abs(found.deviation) <= MOST_DEVIATION if verifier == PROVEN else None,
            "seconds": {"decoding": decoded - start, "recomputing": perf_counter() - decoded},
            "hardware": hardware(model.device),
        }

    def endless(self, prompts: list[list[int]]) -> Iterator[list[list[int]]]:
        """Batches of the prompts, round and round."""
        first = 0
        while True:
            yield [prompts[(first + i) % len(prompts)] for i in range(self.batch_size)]
            first += self.batch_size


def target_law(model: PreTrainedModel, settings: GenerationConfig) -> Law:
    """transformers' own processors and a softmax. For settings that do not look at the prefix."""
    processors, _ = base_model.logits_processors(model, settings, prompt_length=1, max_new_tokens=1, eos_ids=())

    def law(logits_MV: Tensor) -> Tensor:
        no_prefix = torch.zeros(len(logits_MV), 1, dtype=torch.long, device=logits_MV.device)
        return processors(no_prefix, logits_MV).softmax(-1)  # type: ignore[arg-type]

    return law


if __name__ == "__main__":
    raise SystemExit(run_command("__main__:ProveSampling", sys.argv[1:], prog="prove_sampling.py"))
