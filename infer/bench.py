"""A base model, heads and prompts -> speed, acceptance and equality of every way to decode, side by side."""

from __future__ import annotations

import json as json_module
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from infer import bench_table
from infer.bench_figures import Answer, compare, document_rows, fastest_base, split_batch
from infer.bench_rows import BenchRow, GeneratorRow, TransformersRow
from infer.compiled_base import CompiledBase
from infer.drafters import NoDrafter
from infer.drafters.early_exit import NUM_DRAFT_TOKENS, EarlyExitDrafter
from infer.drafters.prompt_lookup import PromptLookupDrafter
from infer.drafters.suffix import SuffixDrafter
from infer.engine.packed_linear import decoding_copies, fastest_copy, is_packed
from infer.generate import Generator
from infer.hardware import hardware
from infer.html_report import answer_runs, write_html
from infer.loading import NO_HEADS, Dtype, LoadedHeads, default_heads, load_model, load_with_tree
from infer.output_file import check_writable, write_text
from infer.prompts import Prompt, encode_chat, file_sha256, load_prompts
from infer.report import plot_benchmark, require_matplotlib
from infer.tree import Tree
from medusa_heads import base_model
from medusa_heads.suggest import suggest
from medusa_heads.versions import commit, versions

DRAFTERS = ("prompt_lookup", "suffix", "early_exit", "heads")
PACKED = "packed float16 weights, float32 activations (FBGEMM)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Compare drafters with the base model on the same prompts, in one process.

    Rows base, base_compiled and transformers_generate (the base rows) always run; --drafters picks the
    others. After warm-up every row answers prompt by prompt in turn, so that a machine whose speed
    drifts slows all of them alike. Prints a table and, as the last line, one JSON document.
    """

    prompts: Path
    """File of prompts (JSONL or .gz, rows with `messages`); the first user turn of each is answered."""
    base: str = "embedded"
    """Base model: `embedded`, a local folder or a hub id."""
    heads: tuple[str, ...] = ()
    """Heads: `pretrained`, `pretrained:NAME` or folders. Several give rows `heads`, `heads:<folder name>`, ..."""
    limit: int | None = None
    """Take only the first N prompts."""
    max_new_tokens: int = 128
    """Longest answer in tokens."""
    dtype: Dtype | None = None
    """Number type of the base model and the heads; by default the base checkpoint's own."""
    device: str = "auto"
    """auto (CUDA where there is a device), cpu, cuda or cuda:N."""
    tree: str = "auto"
    """auto, tuned, chain, beam:N, static:N or FILE.json; N nodes besides the root. auto measures this machine,
    tuned is what `medusa-heads tree` stored with the heads."""
    batch_size: int = 1
    """Prompts answered at once."""
    drafters: str = "prompt_lookup,heads"
    """Rows beside the base rows, separated by commas: prompt_lookup, suffix, early_exit, heads."""
    seed: int = 0
    """Seeds the order in which the rows take their turns at each prompt."""
    json: Path | None = None
    """Also write the JSON document to this file."""
    plot: Path | None = None
    """Draw speed and acceptance into this PNG (needs the extra `plot`)."""
    html: Path | None = None
    """Write the generated texts, accepted runs coloured, to this HTML page."""

    def run(self) -> None:
        self._check()
        prompts = load_prompts(self.prompts, self.limit)
        model, tokenizer = load_model(self.base, dtype=self.dtype, device=self.device)
        prompt_ids = [encode_chat(tokenizer, prompt.messages) for prompt in prompts]
        check_room(model, prompts, prompt_ids, self.max_new_tokens)
        eos_ids = base_model.end_of_sequence_ids(model, tokenizer)
        copies = decoding_copies(model)
        loaded = self._load_heads(copies)
        generators = self._generators(copies, loaded)
        rows = make_rows(model, generators, max_new_tokens=self.max_new_tokens, eos_ids=eos_ids)
        answers, errors, memory = measure(rows, prompt_ids, batch_size=self.batch_size, seed=self.seed, device=model.device)
        margins = compare(generators, answers, prompt_ids, batch_size=self.batch_size, max_new_tokens=self.max_new_tokens, eos_ids=eos_ids)
        low_precision = model.dtype != torch.float32
        rows_document = document_rows(answers, errors, prompts, margins, memory, report_margins=low_precision)
        document = {
            "hardware": hardware(model.device),
            "versions": versions(),
            "commit": commit(),
            "prompts": {"file": str(self.prompts), "sha256": file_sha256(self.prompts), "num": len(prompts)},
            "settings": self._settings(model, generators, loaded, eos_ids),
            "fastest_base": fastest_base(rows_document),
            "rows": rows_document,
        }
        self._write(document, tokenizer, prompts, answers)

    def _check(self) -> None:
        """Everything that can be refused before the work starts."""
        for name in self._drafter_names():
            if name not in DRAFTERS:
                raise ValueError(f"--drafters: unknown drafter {name!r}{suggest(name, DRAFTERS)}; known are {', '.join(DRAFTERS)}")
        if NO_HEADS in self.heads:
            raise ValueError(f"--heads {NO_HEADS}: the base rows decode without heads; leave `heads` out of --drafters instead")
        for option, value in (("--max-new-tokens", self.max_new_tokens), ("--batch-size", self.batch_size)):
            if value < 1:
                raise ValueError(f"{option} {value}: must be at least 1")
        for option, path in (("--json", self.json), ("--plot", self.plot), ("--html", self.html)):
            if path is not None:
                check_writable(path, option)
        if self.plot is not None:
            require_matplotlib()

    def _drafter_names(self) -> list[str]:
        return [name.strip() for name in self.drafters.split(",") if name.strip()]

    def _load_heads(self, copies: Sequence[PreTrainedModel]) -> dict[str, LoadedHeads]:
        if "heads" not in self._drafter_names():
            return {}
        names = self.heads or (default_heads(self.base, None),)
        return {
            row: load_with_tree(name, copies, self.tree, batch_size=self.batch_size)
            for row, name in zip(heads_row_names(names), names, strict=True)
        }

    def _generators(self, copies: Sequence[PreTrainedModel], loaded: dict[str, LoadedHeads]) -> dict[str, Generator]:
        """Row `base` and one row per drafter, each on the copy of the base model that is fastest for it."""
        generators = {"base": Generator(fastest_copy(copies, [self.batch_size]), NoDrafter())}
        for name in self._drafter_names():
            if name in ("prompt_lookup", "suffix"):
                drafter = PromptLookupDrafter() if name == "prompt_lookup" else SuffixDrafter()
                sizes = [self.batch_size, self.batch_size * (drafter.max_nodes + 1)]  # they often have nothing to propose
                generators[name] = Generator(fastest_copy(copies, sizes), drafter)
            elif name == "early_exit":
                generators[name] = early_exit_generator(copies, self.batch_size)
            elif name == "heads":
                generators |= {row: Generator(heads.engine, heads.drafter()) for row, heads in loaded.items()}
        return generators

    def _settings(
        self, model: PreTrainedModel, generators: dict[str, Generator], loaded: dict[str, LoadedHeads], eos_ids: Sequence[int]
    ) -> dict[str, Any]:
        options = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return options | {
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "heads": list(self.heads),
            "drafters": self._drafter_names(),
            "num_threads": torch.get_num_threads(),
            "eos_ids": list(eos_ids),
            "decoding": "greedy",
            "engine": {name: PACKED if is_packed(generator.model) else "stock modules" for name, generator in generators.items()},
            "trees": {row: describe_tree(heads) for row, heads in loaded.items()},
        }

    def _write(self, document: dict[str, Any], tokenizer: Any, prompts: Sequence[Prompt], answers: dict[str, list[Answer]]) -> None:
        bench_table.print_table(document)
        if self.plot is not None:
            plot_benchmark(document, self.plot)
        if self.html is not None:
            entries = [
                answer_runs(tokenizer, row=row, prompt=prompt, token_ids=answer.token_ids, runs=answer.runs, stats=answer.stats)
                for index, prompt in enumerate(prompts)
                for row, answer in ((row, own[index]) for row, own in answers.items() if row in self._shown_rows(answers))
            ]
            write_html(self.html, entries)
        line = json_module.dumps(document)
        if self.json is not None:
            write_text(self.json, line + "\n")
        print(line, flush=True)

    def _shown_rows(self, answers: dict[str, list[Answer]]) -> list[str]:
        """The rows of the HTML page: those that draft, the others emit one token a forward."""
        return [row for row, own in answers.items() if any(answer.stats.num_drafted_tokens for answer in own)]


def early_exit_generator(copies: Sequence[PreTrainedModel], batch_size: int) -> Generator:
    """Early exit, its draft model made of the same copy of the base that verifies."""
    fastest = fastest_copy(copies, [batch_size, batch_size * (NUM_DRAFT_TOKENS + 1)])
    return Generator(fastest, EarlyExitDrafter(fastest))


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


def describe_tree(heads: LoadedHeads) -> dict[str, Any]:
    """The tree in use, for the record, and what `auto` measured."""
    kind = "static" if isinstance(heads.tree, Tree) else "beam"
    paths = {"paths": [list(path) for path in heads.tree.paths]} if isinstance(heads.tree, Tree) else {"width": heads.tree.width}
    return {"heads": str(heads.checkpoint.folder), "kind": kind, "num_nodes": heads.tree.num_nodes, **paths, "auto_curve": heads.curve}


def check_room(model: PreTrainedModel, prompts: Sequence[Prompt], prompt_ids: Sequence[list[int]], max_new_tokens: int) -> None:
    """Raises ValueError when a prompt and its longest answer do not fit the context."""
    room = base_model.max_length(model) - max_new_tokens
    if too_long := [f"{p.id} ({len(ids)} tokens)" for p, ids in zip(prompts, prompt_ids, strict=True) if len(ids) > room]:
        raise ValueError(
            f"--prompts: {', '.join(too_long[:5])} with --max-new-tokens {max_new_tokens} pass the context of "
            f"{base_model.max_length(model)} tokens: take them out or ask for fewer tokens"
        )


def make_rows(model: PreTrainedModel, generators: dict[str, Generator], *, max_new_tokens: int, eos_ids: Sequence[int]) -> list[BenchRow]:
    """The three base rows, then one row per drafter."""
    plain, *ours = [GeneratorRow(name, generator, max_new_tokens=max_new_tokens, eos_ids=eos_ids) for name, generator in generators.items()]
    compiled = CompiledBase(model, max_new_tokens=max_new_tokens, eos_ids=eos_ids)
    peer = TransformersRow(model, max_new_tokens=max_new_tokens, eos_ids=eos_ids)
    return [plain, compiled, peer, *ours]


def measure(
    rows: Sequence[BenchRow], prompt_ids: Sequence[list[int]], *, batch_size: int, seed: int, device: torch.device
) -> tuple[dict[str, list[Answer]], dict[str, str], dict[str, int | None]]:
    """Warms every row up, then lets them answer batch by batch, taking turns in a seeded random order.

    Returns answers, errors (rows that could not be compiled) and peak device memory, by row name.
    """
    batches = [prompt_ids[i : i + batch_size] for i in range(0, len(prompt_ids), batch_size)]
    running, errors = warm_up(rows, batches)
    answers: dict[str, list[Answer]] = {row.name: [] for row in running}
    memory: dict[str, int | None] = {row.name: None for row in running}
    shuffler = random.Random(seed)
    for batch in tqdm(batches, desc="bench", unit="prompt" if batch_size == 1 else "batch", file=sys.stderr):
        for row in shuffler.sample(running, len(running)):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            answers[row.name] += split_batch(row.answer(batch))
            if device.type == "cuda":
                memory[row.name] = max(memory[row.name] or 0, torch.cuda.max_memory_allocated(device))
    return answers, errors, memory


def warm_up(rows: Sequence[BenchRow], batches: Sequence[Sequence[list[int]]]) -> tuple[list[BenchRow], dict[str, str]]:
    """The rows that run, and why the others do not: only `base_compiled` may fail, for want of a compiler."""
    running: list[BenchRow] = []
    errors: dict[str, str] = {}
    for row in rows:
        print(f"warming up {row.name} ...", file=sys.stderr, flush=True)
        try:
            row.warm_up(batches)
            running.append(row)
        except RuntimeError as error:
            if not isinstance(row, CompiledBase):
                raise
            errors[row.name] = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return running, errors
