"""The figures this project states for its shipped heads, measured again on the files given.

    python scripts/figures.py --mt-bench mt_bench.jsonl --gsm8k gsm8k_test.jsonl.gz --output outputs/figures

exact       float32: share of answers equal to plain decoding, with the shipped heads on all MT-Bench
            prompts, and on samples with random heads and with heads that are never right
acceptance  mean acceptance length, decoded, over the beam tree and the static tree of 64 nodes
speed       `medusa-heads bench` in bfloat16: tokens/s beside the fastest base row of the same run

First user turns, greedy. Each part, of speed each prompt file, writes its JSON when it is done and is not repeated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from infer.acceptance_stats import AcceptanceStats
from infer.bench.command import Bench
from infer.drafters import Drafter
from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.hardware import hardware
from infer.made_with import made_with, refuse_other_settings
from infer.output_file import check_writable, write_text
from infer.prompts import encode_chat, load_prompts
from infer.tree_spec import BeamTree, parse_tree
from medusa_heads import base_model
from medusa_heads.arguments import require_positive
from medusa_heads.checkpoint import load_heads, resolve_heads
from medusa_heads.cli import run_command
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import create_heads
from medusa_heads.versions import commit, versions

NUM_NODES = 64
NUM_CONTROL_PROMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    mt_bench: Path
    """MT-Bench prompts (JSONL or .gz)."""
    gsm8k: Path
    """GSM8K test prompts (JSONL or .gz)."""
    output: Path
    """Folder of the JSON files."""
    base: str = "embedded"
    """Base model."""
    heads: str = "pretrained"
    """Heads to measure."""
    parts: tuple[Literal["exact", "acceptance", "speed"], ...] = ("exact", "acceptance", "speed")
    """Which parts to run."""
    limit_mt_bench: int = 80
    """The first N prompts of MT-Bench."""
    limit_gsm8k: int = 100
    """The first N prompts of GSM8K."""
    max_new_tokens: int = 128
    """New tokens of an answer."""
    device: str = "cpu"
    """Where to measure: cpu or cuda."""
    batch_size: int = 1
    """Prompts answered at once in the parts exact and acceptance."""

    def run(self) -> None:
        base_model.quiet_transformers()
        limits = {f"limit_{name}": limit for name, limit in self.limits().items()}
        require_positive(**limits, max_new_tokens=self.max_new_tokens, batch_size=self.batch_size)
        for option, path in (("--mt-bench", self.mt_bench), ("--gsm8k", self.gsm8k)):
            if not path.is_file():
                raise ValueError(f"{option} {path}: no such file")
        made = self.made_with()
        pieces: dict[str, Callable[[], dict[str, Any]]] = {"exact": self.exact, "acceptance": self.acceptance}
        pieces |= {f"speed_{name}": partial(self.speed, name) for name in self.files()}
        files = {self.output / f"{name}.json": measure for name, measure in pieces.items() if name.partition("_")[0] in self.parts}
        for path in files:
            check_writable(path, "--output")
            if path.exists():
                refuse_other_settings(self.output, json.loads(path.read_text()), made)
        for path, measure in files.items():
            if not path.exists():
                write_text(path, json.dumps(measure() | made | self.facts(), indent=1) + "\n")
            print(f"{path.stem}: {json.dumps(json.loads(path.read_text())['figures'])}")

    def made_with(self) -> dict[str, Any]:
        free = ("output", "parts", *self.files())
        options = {name: value for name, value in asdict(self).items() if name not in free}
        return made_with(options, self.files() | {"heads": resolve_heads(self.heads) / "model.safetensors"})

    def facts(self) -> dict[str, Any]:
        return {"hardware": hardware(torch.device(self.device)), "versions": versions(), "commit": commit()}

    def files(self) -> dict[str, Path]:
        return {"mt_bench": self.mt_bench, "gsm8k": self.gsm8k}

    def limits(self) -> dict[str, int]:
        return {"mt_bench": self.limit_mt_bench, "gsm8k": self.limit_gsm8k}

    def prompts(self, name: str, tokenizer: Any) -> list[list[int]]:
        return [encode_chat(tokenizer, prompt.messages) for prompt in load_prompts(self.files()[name], self.limits()[name])]

    def exact(self) -> dict[str, Any]:
        """Answers with heads against plain decoding, token for token."""
        model, tokenizer = base_model.load_base(self.base, dtype=torch.float32, device=self.device)
        prompts = self.prompts("mt_bench", tokenizer)
        plain = self.answers(model, None, prompts, "plain")[0]
        figures: dict[str, float] = {}
        for name, drafter in self.drafters(model).items():
            for num_nodes in (16, NUM_NODES) if name != "shipped" else (16,):
                share = prompts if name == "shipped" else prompts[:NUM_CONTROL_PROMPTS]
                found = self.answers(model, drafter.with_tree(BeamTree(num_nodes)), share, f"{name} beam:{num_nodes}")[0]
                figures[f"{name} beam:{num_nodes}"] = sum(a == b for a, b in zip(found, plain, strict=False)) / len(share)
        return {"figures": figures, "num_prompts": len(prompts), "num_control_prompts": min(NUM_CONTROL_PROMPTS, len(prompts))}

    def drafters(self, model: PreTrainedModel) -> dict[str, HeadsDrafter]:
        """The shipped heads; heads with random blocks; heads whose favourite is the base's least likely token."""
        wild = create_heads(HeadsConfig(num_heads=4), model).requires_grad_(False)
        wild.weight.normal_(std=0.2)
        wrong = create_heads(replace(HeadsConfig(num_heads=2), own_lm_head=True), model).requires_grad_(False)
        assert wrong.lm_head is not None
        wrong.lm_head.neg_()
        controls = {"random": wild, "never right": wrong}
        shipped = HeadsDrafter.from_checkpoint(model, load_heads(self.heads, model), BeamTree(16))
        return {"shipped": shipped} | {name: HeadsDrafter(model, heads, BeamTree(16)) for name, heads in controls.items()}

    def acceptance(self) -> dict[str, Any]:
        """Decoded acceptance lengths over trees of 64 nodes."""
        model, tokenizer = base_model.load_base(self.base, dtype=torch.float32, device=self.device)
        checkpoint = load_heads(self.heads, model)
        figures, counts = {}, {}
        for name in self.files():
            prompts = self.prompts(name, tokenizer)
            for spec in (f"beam:{NUM_NODES}", f"static:{NUM_NODES}"):
                tree = parse_tree(spec, checkpoint)
                assert tree is not None
                stats = self.answers(model, HeadsDrafter.from_checkpoint(model, checkpoint, tree), prompts, f"{name} {spec}")[1]
                figures[f"{name} {spec}"] = stats.mean_acceptance_length
                counts[f"{name} {spec}"] = stats.figures()
        return {"figures": figures, "counts": counts}

    def answers(
        self, model: PreTrainedModel, drafter: Drafter | None, prompts: list[list[int]], label: str
    ) -> tuple[list[list[int]], AcceptanceStats]:
        generator = Generator(model, drafter)
        token_ids, stats = [], AcceptanceStats()
        for start in tqdm(range(0, len(prompts), self.batch_size), desc=label, unit="batch", file=sys.stderr):
            for answer in generator.generate(prompts[start : start + self.batch_size], max_new_tokens=self.max_new_tokens):
                token_ids.append(answer.token_ids)
                stats = stats + answer.stats
        return token_ids, stats

    def speed(self, name: str) -> dict[str, Any]:
        """`medusa-heads bench` in bfloat16 on one of the files, tree chosen for this machine."""
        out = self.output / f"bench_{name}.json"
        Bench(
            prompts=self.files()[name],
            base=self.base,
            heads=(self.heads,),
            limit=self.limits()[name],
            max_new_tokens=self.max_new_tokens,
            dtype="bfloat16",
            device=self.device,
            json=out,
        ).run()
        document = json.loads(out.read_text())
        rows = {row["drafter"]: row for row in document["rows"]}
        figures: dict[str, Any] = {"tokens_per_second": {d: row["tokens_per_second"] for d, row in rows.items()}}
        figures |= {key: rows["heads"][key] for key in ("speedup_vs_base", "speedup_vs_transformers_generate")}
        return {"figures": figures, "bench": document}


if __name__ == "__main__":
    raise SystemExit(run_command("__main__:Figures", sys.argv[1:], prog="figures.py"))
