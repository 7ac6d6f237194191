"""A base model, its heads and prompts -> the tree with the most tokens per second on this machine, stored with the heads.

tokens per second of a tree = batch * expected acceptance length / mean step seconds over the contexts.
The acceptance is measured on the base's own answers, the step times on zeros in the cache. What has been
answered and measured is kept until the choice is stored: a run that was killed goes on where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel

from infer.bench.command import check_room
from infer.bench.report import require_matplotlib
from infer.engine.packed_heads import heads_for
from infer.engine.packed_linear import decoding_copies, fastest_copy
from infer.generate import Generator
from infer.hardware import hardware
from infer.loading import Dtype, default_heads, load_model
from infer.output_file import check_writable
from infer.prompts import encode_chat, file_sha256, load_prompts
from infer.tree import Tree
from infer.tree_builders import static_tree
from infer.tree_spec import TUNED_FILE, BeamTree, most_beam_nodes
from infer.tune.answer_acceptance import measure_acceptance
from infer.tune.auto_tree import SIZES, expected_length, longest_context, measure_trees
from infer.tune.expected_acceptance import Measured, held_out_static_lengths
from infer.tune.pieces import Pieces
from infer.tune.tune_report import plot_tuning, print_tuning
from infer.tune.tune_store import finished, store
from infer.tune.tuned_check import engine_name
from medusa_heads.arguments import require_positive
from medusa_heads.checkpoint import HeadsCheckpoint, load_heads, resolve_heads
from medusa_heads.quantization import Quantization
from medusa_heads.versions import commit, versions

CONTEXTS = (128, 512, 2048)
TIME_LIMIT_S = 20.0  # per context and copy of the base: two kinds of trees take turns

Key = tuple[str, int]  # kind and number of nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneTree:
    """Choose the tree with the most tokens per second on this machine and store it with the heads.

    The base answers the prompts; what the heads would have drafted there gives the acceptance, this
    machine the step times. `--tree tuned` then uses the choice. A run that was killed goes on where it was.
    """

    prompts: Path
    """File of prompts (JSONL or .gz, rows with `messages`) that the heads were not trained on."""
    base: str = "embedded"
    """Base model: `embedded`, a local folder or a hub id."""
    base_quantization: Quantization = "none"
    """Packs the base's weights into 8bit or 4bit (nf4), by bitsandbytes; heads serve the form that they were trained on."""
    revision: str | None = None
    """Revision of the base model on the hub."""
    heads: str | None = None
    """Heads: `pretrained`, `pretrained:NAME` or a folder. Default: the shipped ones, for the embedded base."""
    limit: int | None = None
    """Take only the first N prompts."""
    batch_size: int = 1
    """Prompts answered at once, while measuring and later."""
    max_new_tokens: int = 128
    """Longest answer in tokens."""
    dtype: Dtype | None = None
    """Number type of the base model and the heads; by default the base checkpoint's own."""
    device: str = "auto"
    """auto (CUDA where there is a device), cpu, cuda or cuda:N."""
    output: Path | None = None
    """Write a copy of the heads with the tree to this new folder; by default the tree is stored in the heads' own."""
    plot: Path | None = None
    """Draw the measured curves into this PNG (needs the extra `plot`)."""

    def run(self) -> None:
        name = default_heads(self.base, self.heads)
        folder = resolve_heads(name)
        self._check(folder)
        prompts = load_prompts(self.prompts, self.limit)
        model, tokenizer = load_model(
            self.base, dtype=self.dtype, device=self.device, quantization=self.base_quantization, revision=self.revision
        )
        checkpoint = load_heads(name, model)
        prompt_ids = [encode_chat(tokenizer, prompt.messages) for prompt in prompts]
        check_room(model, prompts, prompt_ids, self.max_new_tokens)
        copies = decoding_copies(model)
        facts: dict[str, Any] = {
            "sha256": {"heads": file_sha256(folder / "model.safetensors"), "base": checkpoint.config.base_fingerprint},
            "settings": {
                "base": self.base,
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": str(model.device),
                "batch_size": self.batch_size,
                "max_new_tokens": self.max_new_tokens,
            },
            "hardware": hardware(model.device),
            "versions": versions(),
            "prompts": {"file": self.prompts.name, "sha256": file_sha256(self.prompts), "num": len(prompts)},
        }
        if self.output is None and (document := finished(folder, facts)) is not None:
            self._report(document)
            print(f"already measured: remove {folder / TUNED_FILE} to measure again")
            return
        pieces = Pieces(folder / "trees" if self.output is None else self.output.parent, facts)
        answers = collect_answers(pieces, copies, prompt_ids, batch_size=self.batch_size, max_new_tokens=self.max_new_tokens)
        acceptance = pieces.get("acceptance", lambda: measure_acceptance(model, checkpoint, prompt_ids, answers).as_exact_dict())
        measured = Measured.from_exact_dict(acceptance)
        trees, lengths = candidate_trees(checkpoint, measured)
        contexts = sorted({min(context, longest_context(model, trees)) for context in CONTEXTS})
        curve = measure_curve(pieces, copies, checkpoint, trees, lengths, batch_size=self.batch_size, contexts=contexts)
        summary = summarize(curve)
        best = best_row(summary)
        document = {
            "choice": {**best, **describe(trees[best["kind"], best["num_nodes"]])},
            "summary": summary,
            "curve": curve,
            **facts,
            "settings": {**facts["settings"], **self._command(), "contexts": contexts, "num_positions": measured.num_positions},
            "commit": commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        stored = store(document, measured, folder, self.output)
        pieces.remove()
        self._report(document)
        print(f"stored in {stored / TUNED_FILE}: decode with --heads {stored} --tree tuned")

    def _command(self) -> dict[str, Any]:
        """Options that the facts hold in another form: with them the same can be measured again elsewhere."""
        names = ("base_quantization", "revision", "limit")
        return {name: getattr(self, name) for name in names} | {"prompts": str(self.prompts)}

    def _report(self, document: dict[str, Any]) -> None:
        print_tuning(document)
        if self.plot is not None:
            plot_tuning(document, self.plot)

    def _check(self, folder: Path) -> None:
        """Everything that can be refused before the work starts."""
        require_positive(max_new_tokens=self.max_new_tokens, batch_size=self.batch_size)
        if self.output is None:
            try:
                check_writable(folder / TUNED_FILE, "--heads")
            except ValueError as error:
                raise ValueError(f"{error}; --output DIR writes a copy of the heads with the tree") from None
        elif self.output.exists() and not (self.output.is_dir() and not any(self.output.iterdir())):
            raise ValueError(f"--output {self.output} is there already: give a new folder for the copy of the heads")
        else:
            check_writable(self.output / "config.json", "--output")
        if self.plot is not None:
            require_matplotlib()
            check_writable(self.plot, "--plot")


def collect_answers(
    pieces: Pieces, copies: Sequence[PreTrainedModel], prompt_ids: Sequence[list[int]], *, batch_size: int, max_new_tokens: int
) -> list[list[int]]:
    """The base's own greedy answers, as token ids; a piece is a batch."""
    generator = Generator(fastest_copy(copies, [batch_size]))

    def answer(start: int) -> list[list[int]]:
        batch = generator.generate(prompt_ids[start : start + batch_size], max_new_tokens=max_new_tokens)
        return [generation.token_ids for generation in batch]

    answers: list[list[int]] = []
    for start in tqdm(range(0, len(prompt_ids), batch_size), desc="answers of the base", file=sys.stderr):
        answers += pieces.get(f"answers-{start}", lambda start=start: answer(start))  # type: ignore[misc]
    return answers


def candidate_trees(checkpoint: HeadsCheckpoint, measured: Measured) -> tuple[dict[Key, Tree | BeamTree], dict[Key, float]]:
    """Plain decoding (a beam of no nodes), then beam and static trees in growing size, with their expected acceptance lengths."""
    static_lengths = held_out_static_lengths(measured.runs_RK, [size for size in SIZES if size])
    trees: dict[Key, Tree | BeamTree] = {}
    lengths: dict[Key, float] = {}
    for size in SIZES:
        if size <= most_beam_nodes(checkpoint):
            trees["beam", size] = BeamTree(size)
            lengths["beam", size] = expected_length(measured.acceptance_length, size)
        if size in static_lengths and size <= len(measured.static_nodes):
            trees["static", size] = static_tree(measured.static_nodes, size)
            lengths["static", size] = static_lengths[size]
    return trees, lengths


def measure_curve(
    pieces: Pieces,
    copies: Sequence[PreTrainedModel],
    checkpoint: HeadsCheckpoint,
    trees: Mapping[Key, Tree | BeamTree],
    lengths: Mapping[Key, float],
    *,
    batch_size: int,
    contexts: Sequence[int],
) -> list[dict[str, Any]]:
    """One row per copy of the base, context and tree: step times and the tokens per second they give. A piece is
    a copy at one context."""

    def measure(engine: PreTrainedModel, context: int) -> list[dict[str, Any]]:
        heads = heads_for(checkpoint, engine)
        times = measure_trees(engine, heads, trees, lengths, batch_size=batch_size, context=context, time_limit_s=TIME_LIMIT_S)
        common = {"engine": engine_name(engine), "context": context}
        return [{**common, "kind": key[0], **step.figures(lengths[key], batch_size)} for key, step in times.items()]

    rows: list[dict[str, Any]] = []
    parts = [(engine, context) for engine in copies for context in contexts]
    for engine, context in tqdm(parts, desc="step times", unit="context", file=sys.stderr):
        name = f"times-{engine_name(engine)}-{context}"
        rows += pieces.get(name, lambda engine=engine, context=context: measure(engine, context))  # type: ignore[misc]
    return rows


def summarize(curve: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The curve over contexts: as many tokens at every context, so step times are averaged, not speeds.

    Trees that latency ruled out at one context are left out.
    """
    contexts = {row["context"] for row in curve}
    groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for row in curve:
        groups.setdefault((row["engine"], row["kind"], row["num_nodes"]), []).append(row)
    return [
        {
            "engine": engine,
            "kind": kind,
            "num_nodes": num_nodes,
            "expected_acceptance_length": rows[0]["expected_acceptance_length"],
            "expected_tokens_per_second": 1 / mean(1 / row["expected_tokens_per_second"] for row in rows),
        }
        for (engine, kind, num_nodes), rows in groups.items()
        if len(rows) == len(contexts)
    ]


def best_row(summary: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row with the most tokens per second; the smaller tree on a tie."""
    return max(summary, key=lambda row: (row["expected_tokens_per_second"], -row["num_nodes"]))


def describe(tree: Tree | BeamTree) -> dict[str, Any]:
    """What `--tree tuned` needs to build the tree again."""
    return {"paths": [list(path) for path in tree.paths]} if isinstance(tree, Tree) else {"width": tree.width}
