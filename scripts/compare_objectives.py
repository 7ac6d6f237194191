"""Objectives x slot weights x seeds -> heads trained alike, and the acceptance length of each: which loss wins.

    python scripts/compare_objectives.py --data answers.jsonl.gz --validation prompts.jsonl --bench mt_bench.jsonl gsm8k_test.jsonl.gz \\
        --config configs/train/smollm2_medusa.yaml --max-steps 600 --device cuda --output outputs/objectives

Every run is one `accelerate launch -m train`; its checkpoint is chosen by acceptance on the validation prompts. Then the chosen
and the last checkpoint meet every file, in float32:

T=0        greedy, beam tree of 16 nodes, as in the validations
T=1        sampled, the same tree: a draft is accepted where the base's own draw is on it
T=1 drawn  drafts drawn from the heads, a chain, block verification: what `tv` is made for

The base writes the texts once, and each checkpoint's steps are read off them; where drafts are drawn, the steps to be expected over all
that may be drawn and accepted (infer/tune/replay.py). So all heads meet the same texts, and differ by what they learnt alone.

The same command goes on where it stopped, and takes further objectives, slot weights and seeds into the same folder. The last
line printed, and OUTPUT/report.json, is one JSON document.
"""

# S seeds, P prompts of a file; a count is (base forwards, accepted tokens) of a prompt

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from infer.acceptance_stats import influences, lengths, standard_error
from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.hardware import hardware
from infer.loading import load_model
from infer.made_with import made_with, settle
from infer.output_file import write_text
from infer.prompts import encode_chat, load_prompts
from infer.tree_spec import parse_tree
from infer.tune.answer_acceptance import text_hidden_states
from infer.tune.replay import expected_replay, replay
from medusa_heads import base_model
from medusa_heads.arguments import require_positive
from medusa_heads.checkpoint import HeadsCheckpoint, load_heads
from medusa_heads.versions import commit, versions
from train.acceptance import spread
from train.config import OBJECTIVES, SLOT_WEIGHTS
from train.run_state import newest_checkpoint

LAUNCHER = ("-m", "accelerate.commands.launch", "--config_file", str(Path(__file__).parents[1] / "configs/accelerate/single.yaml"))
SAMPLED = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)


class Condition(NamedTuple):
    tree: str
    sampled: bool
    """Whether the base's own text is drawn, at T = 1."""
    drawn: bool
    """Whether drafts are."""


CONDITIONS = {
    "T=0": Condition("beam:16", sampled=False, drawn=False),
    "T=1": Condition("beam:16", sampled=True, drawn=False),
    "T=1 drawn": Condition("chain", sampled=True, drawn=True),
}
NUM_VALIDATIONS, BATCH_SIZE = 6, 80


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareObjectives:
    data: list[str]
    """Conversations answered by the base, as for `-m train`."""
    validation: Path
    """Prompts by which checkpoints are chosen (JSONL or .gz)."""
    bench: list[Path]
    """Further prompt files; the winner is the best on these."""
    output: Path
    """Folder of the runs and the report."""
    max_steps: int
    """Optimizer steps of every run; the time all takes is in proportion."""
    config: Path | None = None
    """YAML file of further options of the training."""
    base: str = "embedded"
    """Base model."""
    objectives: tuple[str, ...] = OBJECTIVES
    """What is compared: each `--objective` of `-m train` ..."""
    slot_weights: tuple[str, ...] = ("decay",)
    """... with each of these slot weights (decay, uniform, d_pace) ..."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """... and each of these seeds, which order the data."""
    limit: int = 80
    """At most this many prompts of each file, spread evenly."""
    max_new_tokens: int = 128
    """New tokens of an answer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train and decode."""

    def run(self) -> None:
        base_model.quiet_transformers()
        for option, given, known in (("--objectives", self.objectives, OBJECTIVES), ("--slot-weights", self.slot_weights, SLOT_WEIGHTS)):
            if unknown := set(given) - set(known):
                raise ValueError(f"{option} {', '.join(unknown)}: write some of {', '.join(known)}")
        require_positive(max_steps=self.max_steps, limit=self.limit, max_new_tokens=self.max_new_tokens)
        settings = self.checked_settings()
        model, tokenizer = load_model(self.base, dtype="float32", device=self.device)
        chats = {str(path): load_prompts(path) for path in (self.validation, *self.bench)}
        prompts = {file: [encode_chat(tokenizer, c[i].messages) for i in spread(len(c), self.limit)] for file, c in chats.items()}
        heads = [f"{objective}-{weights}" for objective, weights in product(self.objectives, self.slot_weights)]
        found: dict[str, list[Any]] = {name: [] for name in heads}
        for seed, name in tqdm([*product(self.seeds, heads)], desc="runs", unit="run", file=sys.stderr):
            self.train(name, seed)
            found[name].append(self.decoded(self.output / f"{name}-seed{seed}", model, prompts))
        report = make_report(found, bench=[*map(str, self.bench)])
        print_report(report)
        report |= settings | {"hardware": hardware(model.device), "versions": versions(), "commit": commit()}
        write_text(self.output / "report.json", json.dumps(report) + "\n")
        print(json.dumps(report))

    def checked_settings(self) -> dict[str, Any]:
        """What all runs of a folder share. Raises ValueError when it was begun with others."""
        free = ("output", "objectives", "slot_weights", "seeds", "device")
        options = {name: value for name, value in asdict(self).items() if name not in free}
        files = {"--validation": [self.validation], "--bench": self.bench, "--config": [self.config] if self.config else []}
        if absent := next((f"{option} {path}" for option, paths in files.items() for path in paths if not path.is_file()), None):
            raise ValueError(f"{absent}: no such file")
        data = [Path(path) for path in self.data if Path(path).is_file()]
        settings = made_with(options, {str(path): path for path in itertools.chain(data, *files.values())})
        settle(self.output, settings, begun=any(self.output.glob("*/history.jsonl")))
        return settings

    def train(self, heads: str, seed: int) -> None:
        output, (objective, _, slot_weights) = self.output / f"{heads}-seed{seed}", heads.rpartition("-")
        if (output / "config.json").exists():
            return
        options = dict(objective=objective, slot_weights=slot_weights, seed=seed, base=self.base, output_dir=output)
        options |= dict(max_steps=self.max_steps, validate_every=max(1, self.max_steps // NUM_VALIDATIONS), keep="best")
        options |= dict(validation_prompts=self.validation, validation_tree=CONDITIONS["T=0"].tree)
        flags = [f"--{option.replace('_', '-')}={value}" for option, value in options.items()]
        launcher = [*LAUNCHER, "--num_cpu_threads_per_process", str(torch.get_num_threads()), *["--cpu"] * (self.device == "cpu")]
        config = ["--config", str(self.config)] if self.config else []
        command = [sys.executable, *launcher, "-m", "train", *config, "--data", *self.data, *flags]
        if status := subprocess.run(command, stdout=sys.stderr).returncode:
            raise ValueError(f"training {output.name} ended with status {status}, see above; the same command goes on from there")

    def decoded(self, run: Path, model: PreTrainedModel, prompts: dict[str, list[list[int]]]) -> dict[str, Any]:
        """`steps`, and the counts of the checkpoints `chosen` and `last` of a run; made once."""
        path = run / "decoded.json"
        if not path.exists():
            checkpoint, (newest, _) = load_heads(run, model), newest_checkpoint(run)
            assert newest is not None and newest.validations.best is not None
            steps = {"chosen": newest.validations.best.step, "last": newest.step}
            found = {"steps": steps, "chosen": self.counts(checkpoint, model, prompts)}
            checkpoint.heads.load_state_dict(newest.state["heads"])
            found["last"] = found["chosen"] if steps["chosen"] == steps["last"] else self.counts(checkpoint, model, prompts)
            write_text(path, json.dumps(found))
        return dict(json.loads(path.read_text()))

    def counts(self, heads: HeadsCheckpoint, model: PreTrainedModel, prompts: dict[str, list[list[int]]]) -> dict[str, dict[str, Any]]:
        """[condition][file]: steps and accepted tokens of every prompt."""
        found: dict[str, dict[str, Any]] = {}
        depth = heads.config.num_heads
        limits = dict[str, Any](max_new_tokens=self.max_new_tokens, eos_ids=base_model.end_of_sequence_ids(model))
        for (name, condition), file in product(CONDITIONS.items(), prompts):
            parsed = parse_tree(condition.tree, heads)
            assert parsed is not None
            drafter, counts = HeadsDrafter.from_checkpoint(model, heads, parsed), []
            for text in own_texts(model, file, condition.sampled, tuple(map(tuple, prompts[file])), self.max_new_tokens + depth - 1):
                if condition.drawn:
                    counts.append(expected_replay(drafter, *text, temperature=1.0, **limits))
                else:
                    stats = replay(drafter, *text, depth=depth, **limits)
                    counts.append((stats.num_steps, stats.num_accepted_tokens))
            found.setdefault(name, {})[file] = counts
        return found


@functools.cache
def own_texts(
    model: PreTrainedModel, file: str, sampled: bool, prompts: tuple[tuple[int, ...], ...], num_tokens: int
) -> list[tuple[torch.Tensor, list[int], list[int]]]:
    """Of each prompt: the hidden states [T, D] of prompt and answer, the prompt, and what the base writes, on beyond its end tokens.

    Raises ValueError for an answer that the context has no room for.
    """
    starts = tqdm(range(0, len(prompts), BATCH_SIZE), desc=f"{Path(file).name}, T={int(sampled)}", unit="batch", file=sys.stderr)
    options: dict[str, Any] = {"generation_config": SAMPLED if sampled else None, "max_new_tokens": num_tokens, "eos_ids": ()}
    answers = [answer for i in starts for answer in Generator(model).generate(prompts[i : i + BATCH_SIZE], seed=i, **options)]
    texts = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if len(answer.token_ids) < num_tokens:
            raise ValueError(f"{file}: prompt {index} and {num_tokens} tokens do not fit the base's context: lower --max-new-tokens")
        texts.append((text_hidden_states(model, [*prompt, *answer.token_ids]), list(prompt), answer.token_ids))
    return texts


def make_report(found: dict[str, list[Any]], *, bench: list[str]) -> dict[str, Any]:
    """found: heads -> what was decoded, by seed. Standard errors are over seeds, but of chosen - last: over prompts, the seeds averaged."""
    rows: list[dict[str, Any]] = []
    for condition, (heads, runs) in product(CONDITIONS, found.items()):
        for file in runs[0]["chosen"][condition]:
            chosen, last = (np.array([run[kind][condition][file] for run in runs], float) for kind in ("chosen", "last"))
            by_seed, gap = lengths(chosen), lengths(chosen) - lengths(last)
            row = {"heads": heads, "condition": condition, "file": file, "by_seed": by_seed.tolist(), "mean": by_seed.mean()}
            row |= {"standard_error": standard_error(by_seed), "last": lengths(last).mean(), "chosen_minus_last": gap.mean()}
            rows.append(row | {"its_standard_error": standard_error((influences(chosen) - influences(last)).mean(0))})
    benched = [row for row in rows if row["file"] in bench]
    below = [row for row in benched if row["chosen_minus_last"] < -2 * (row["its_standard_error"] or np.inf)]
    ranking = {c: ranked([row for row in benched if row["condition"] == c]) for c in CONDITIONS}
    return {"rows": rows, "ranking": ranking, "chosen_below_last": below}


def ranked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Heads by their mean over the files, the best first, and how far each is behind it, seed by seed."""
    names = dict.fromkeys(row["heads"] for row in rows)
    score_S = {name: np.mean([row["by_seed"] for row in rows if row["heads"] == name], axis=0) for name in names}
    order = sorted(names, key=lambda name: -score_S[name].mean())
    behind_S = {name: score_S[order[0]] - score_S[name] for name in order}
    return [{"heads": n, "mean": score_S[n].mean(), "behind": g.mean(), "standard_error": standard_error(g)} for n, g in behind_S.items()]


def print_report(report: dict[str, Any]) -> None:
    table = Table("heads", "condition", "file", "chosen, by seed", "mean", "last", "chosen - last")
    for row in report["rows"]:
        by_seed, means = "  ".join(f"{value:.3f}" for value in row["by_seed"]), plus_minus(row["mean"], row["standard_error"])
        moved = plus_minus(row["chosen_minus_last"], row["its_standard_error"])
        table.add_row(row["heads"], row["condition"], Path(row["file"]).name, by_seed, means, f"{row['last']:.3f}", moved)
    console = Console(width=160, highlight=False)
    console.print(table)
    for condition, places in report["ranking"].items():
        behind = (f"{p['heads']} {p['mean']:.3f} (-{plus_minus(p['behind'], p['standard_error'])})" for p in places[1:])
        then = "; then ".join([f"{places[0]['heads']} {places[0]['mean']:.3f} wins", *filter(None, [", ".join(behind)])])
        console.print(f"{condition}, mean of the bench files: {then}")
    print(f"chosen more than two standard errors below last on a bench file: {len(report['chosen_below_last'])} rows")


def plus_minus(value: float, error: float | None) -> str:
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


if __name__ == "__main__":
    try:
        tyro.cli(CompareObjectives).run()
    except ValueError as error:
        sys.exit(f"error: {error}")
