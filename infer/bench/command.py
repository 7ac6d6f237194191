"""A base model, heads and prompts -> speed, acceptance and equality of every way to decode, side by side."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import PreTrainedModel

from infer.bench.compare import compare
from infer.bench.drafter_rows import check_options, check_verifiable, describe_tree, drafter_names, load_all_heads, make_generators
from infer.bench.figures import Findings, document_rows, fastest_base
from infer.bench.html_report import answer_runs, write_html
from infer.bench.measure import Answer, make_batches, make_rows, measure
from infer.bench.profile_rows import profile_rows
from infer.bench.quality import check_judgeable, judge
from infer.bench.report import plot_benchmark, require_matplotlib
from infer.bench.rows import BenchRow, Decoding, GeneratorRow
from infer.bench.table import print_tables, row_label
from infer.commands import SamplingOptions
from infer.drafters.adaptive import AdaptiveDrafter
from infer.engine.packed_linear import decoding_copies, is_packed
from infer.generate import Generator
from infer.hardware import hardware
from infer.loading import Dtype, LoadedHeads, load_model
from infer.output_file import check_writable, write_text
from infer.prompts import Prompt, encode_chat, file_sha256, load_prompts
from medusa_heads import base_model
from medusa_heads.arguments import OPTIONAL, require_positive
from medusa_heads.quantization import Quantization
from medusa_heads.versions import commit, versions

PACKED = "packed float16 weights, float32 activations (FBGEMM)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(SamplingOptions):
    """Compare drafters with the base model on the same prompts, in one process.

    Rows base, base_compiled and transformers_generate (the base rows) always run; --drafters picks the
    others. After warm-up every row answers prompt by prompt in turn, so that a machine whose speed
    drifts slows all of them alike. With a --temperature all rows sample, under the same law.
    Prints tables and, as the last line, one JSON document.
    """

    prompts: Path
    """File of prompts (JSONL or .gz, rows with `messages`); the first user turn of each is answered."""
    base: str = "embedded"
    """Base model: `embedded`, a local folder or a hub id."""
    base_quantization: Quantization = "none"
    """Packs the base's weights into 8bit or 4bit (nf4), by bitsandbytes; heads serve the form that they were trained on."""
    revision: str | None = None
    """Revision of the base model on the hub."""
    heads: Annotated[tuple[str, ...], OPTIONAL] = ()
    """Heads: `pretrained`, `pretrained:NAME` or folders. Several give rows `heads`, `heads:<folder name>`, ...
    Default: `pretrained` with the embedded base."""
    limit: int | None = None
    """Take only the first N prompts."""
    max_new_tokens: int = 128
    """Longest answer in tokens."""
    dtype: Dtype | None = None
    """Number type of the base model and the heads; by default the base checkpoint's own."""
    device: str = "auto"
    """auto (CUDA where there is a device), cpu, cuda or cuda:N."""
    tree: str = "auto"
    """Of the heads: auto, tuned, chain, beam:N, static:N or FILE.json; N nodes besides the root. auto measures this
    machine and lets ALL drafters draft as much as pays, or nothing; with the others every row drafts all it can.
    tuned is what `medusa-heads tree` stored with the heads."""
    batch_size: int = 1
    """Prompts answered at once."""
    drafters: str = "prompt_lookup,heads"
    """Rows beside the base rows, separated by commas: prompt_lookup, suffix, early_exit, heads, draft_model."""
    draft_model: str | None = None
    """The small model of row draft_model: a folder or hub id; it must have the base's tokenizer."""
    seed: int = 0
    """Seeds what is drawn, and the order in which the rows take their turns at each prompt."""
    profile: bool = False
    """Also measure, on a few of the prompts again, where the time of a step goes."""
    quality: bool = False
    """Also count right answers where rows have a `reference`: final numbers (GSM8K), Python tests (MBPP). The latter RUN
    CODE THAT THE MODEL WROTE, in processes with limits but with your rights. Sampling adds rows typical:heads (lossy)."""
    json: Path | None = None
    """Also write the JSON document to this file."""
    plot: Path | None = None
    """Draw speed and acceptance into this PNG (needs the extra `plot`)."""
    html: Path | None = None
    """Write the generated texts, accepted runs coloured, to this HTML page."""

    def run(self) -> None:
        self._check()
        prompts = load_prompts(self.prompts, self.limit)
        if self.quality:
            check_judgeable(prompts, self.prompts)
        model, tokenizer = load_model(
            self.base, dtype=self.dtype, device=self.device, quantization=self.base_quantization, revision=self.revision
        )
        prompt_ids = [encode_chat(tokenizer, prompt.messages) for prompt in prompts]
        check_room(model, prompts, prompt_ids, self.max_new_tokens)
        batches = make_batches(prompt_ids, batch_size=self.batch_size, seed=self.seed)
        loaded, rows = self._rows(model, tokenizer)
        measured = measure(rows, batches, seed=self.seed, device=model.device)
        findings = Findings(
            compare(rows, measured.answers, batches),
            judge(prompts, decoded(tokenizer, measured.answers)) if self.quality else {},
            profile_rows(rows, batches) if self.profile else {},
            report_margins=model.dtype != torch.float32 and self.generation_config() is None,
        )
        rows_document = document_rows(measured, findings, prompts, rows)
        document = {
            "hardware": hardware(model.device),
            "versions": versions(),
            "commit": commit(),
            "prompts": {"file": str(self.prompts), "sha256": file_sha256(self.prompts), "num": len(prompts)},
            "settings": self._settings(model, rows, loaded),
            "fastest_base": fastest_base(rows_document),
            "rows": rows_document,
        }
        self._write(document, tokenizer, prompts, measured.answers)

    def _check(self) -> None:
        """Everything that can be refused before the work starts."""
        names = drafter_names(self.drafters)
        check_options(names, heads=self.heads, draft_model=self.draft_model)
        self.generation_config()
        check_verifiable(names, self.verifier, tree=self.tree, temperature=self.temperature)
        self.warn()
        require_positive(max_new_tokens=self.max_new_tokens, batch_size=self.batch_size)
        for option, path in (("--json", self.json), ("--plot", self.plot), ("--html", self.html)):
            if path is not None:
                check_writable(path, option)
        if self.plot is not None:
            require_matplotlib()

    def _rows(self, model: PreTrainedModel, tokenizer: Any) -> tuple[dict[str, LoadedHeads], list[BenchRow]]:
        """The heads in use, by row, and all rows."""
        names, copies = drafter_names(self.drafters), decoding_copies(model)
        loaded: dict[str, LoadedHeads] = {}
        if "heads" in names:
            loaded = load_all_heads(copies, self.heads, base=self.base, tree=self.tree, batch_size=self.batch_size)
        generators = make_generators(
            names,
            copies,
            loaded,
            tokenizer=tokenizer,
            draft_model=self.draft_model,
            batch_size=self.batch_size,
            adapt=self.tree == "auto",
        )
        eos_ids = tuple(base_model.end_of_sequence_ids(model, tokenizer))
        decoding = Decoding(self.max_new_tokens, eos_ids, self.generation_config(), self.batch_size)
        lossy: dict[str, Generator] = {}
        if self.quality and decoding.is_sampled and self.verifier != "typical":
            lossy = {row: Generator(heads.engine, heads.drafter()) for row, heads in loaded.items()}
        return loaded, make_rows(model, generators, decoding, verifier=self.verifier, lossy=lossy)

    def _settings(self, model: PreTrainedModel, rows: Sequence[BenchRow], loaded: dict[str, LoadedHeads]) -> dict[str, Any]:
        options = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        ours = [row for row in rows if isinstance(row, GeneratorRow)]
        decoding = ours[0].decoding
        return options | {
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "heads": list(self.heads),
            "drafters": drafter_names(self.drafters),
            "num_threads": torch.get_num_threads(),
            "eos_ids": list(decoding.eos_ids),
            "decoding": "sampled" if decoding.is_sampled else "greedy",
            "engine": {row.name: PACKED if is_packed(row.model) else "stock modules" for row in ours},
            "trees": {row: describe_tree(heads) for row, heads in loaded.items()},
            "step_seconds": {row.name: drafter.seconds for row in ours if isinstance(drafter := row.generator.drafter, AdaptiveDrafter)},
        }

    def _write(self, document: dict[str, Any], tokenizer: Any, prompts: Sequence[Prompt], answers: dict[str, list[Answer]]) -> None:
        print_tables(document)
        if self.plot is not None:
            plot_benchmark(document, self.plot)
        if self.html is not None:
            # those that draft; the others emit one token a forward
            shown = {row["drafter"]: row_label(row) for row in document["rows"] if row["num_drafted_tokens"]}
            entries = [
                answer_runs(tokenizer, row=label, prompt=prompt, token_ids=answer.token_ids, runs=answer.runs, stats=answer.stats)
                for index, prompt in enumerate(prompts)
                for label, answer in ((label, answers[row][index]) for row, label in shown.items())
            ]
            write_html(self.html, entries)
        line = json_module.dumps(document)
        if self.json is not None:
            write_text(self.json, line + "\n")
        print(line, flush=True)


def decoded(tokenizer: Any, answers: dict[str, list[Answer]]) -> dict[str, list[str]]:
    """The texts of the answers, by row."""
    return {row: [tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in own] for row, own in answers.items()}


def check_room(model: PreTrainedModel, prompts: Sequence[Prompt], prompt_ids: Sequence[list[int]], max_new_tokens: int) -> None:
    """Raises ValueError when a prompt and its longest answer do not fit the context."""
    room = base_model.max_length(model) - max_new_tokens
    if too_long := [f"{p.id} ({len(ids)} tokens)" for p, ids in zip(prompts, prompt_ids, strict=True) if len(ids) > room]:
        raise ValueError(
            f"--prompts: {', '.join(too_long[:5])} with --max-new-tokens {max_new_tokens} pass the context of "
            f"{base_model.max_length(model)} tokens: take them out or ask for fewer tokens"
        )
