"""What Medusa-2 cost the base: perplexities of the untouched and of the tuned base on the same texts.

    python scripts/medusa2_report.py --tuned MERGED --answers answers.jsonl.gz --held-out 300 \\
        --references gsm8k_test.jsonl.gz --output outputs/medusa2/report.json

answers     held-out answers of the untouched base: how far the tuned one has moved from its law
references  right answers: whether it has become worse at the task

Every supervised token counts once; perplexity is exp of the mean of -log p, in float32 from the LM head on. Where references end
in `#### NUMBER`, as GSM8K's do, both models also answer those prompts greedily, and the share of right answers is counted.
Acceptance: scripts/figures.py.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from tqdm import tqdm
from transformers import PreTrainedModel

from infer.bench.quality import is_right, quality_kind
from infer.generate import Generator
from infer.hardware import hardware
from infer.loading import Dtype, pick_device
from infer.output_file import check_writable, write_text
from infer.prompts import Prompt, encode_chat, file_sha256, load_prompts
from medusa_heads import base_model
from medusa_heads.arguments import require_positive
from medusa_heads.fingerprint import fingerprint
from medusa_heads.versions import commit, versions
from train.conversations import Conversation, read_conversations
from train.tokenization import TokenizedRow, tokenize_conversation
from train.tokenized_data import tokenize_dataset
from train.training_data import split_by_id

CHUNK = 256  # positions whose logits are met at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Medusa2Report:
    tuned: str
    """The tuned base: the folder written by `medusa-heads merge`."""
    output: Path
    """JSON file of the figures."""
    answers: list[str]
    """Conversations answered by the untouched base."""
    references: Path | None = None
    """Prompts with a `reference` each (GSM8K), or conversations: right answers."""
    base: str = "embedded"
    """The untouched base."""
    revision: str | None = None
    """Its revision on the hub."""
    held_out: int | None = None
    """Only the conversations that training with this --held-out keeps out of the same files. None: all."""
    limit: int | None = None
    """At most this many texts of each kind."""
    max_length: int = 1024
    """Texts are cut to this many tokens."""
    max_new_tokens: int = 384
    """New tokens of an answer to be judged."""
    batch_size: int = 32
    """Prompts answered at once."""
    dtype: Dtype = "float32"
    """Type of both models."""
    device: str = "auto"
    """auto, cpu or cuda."""

    def run(self) -> None:
        base_model.quiet_transformers()
        sizes = {"max_length": self.max_length, "max_new_tokens": self.max_new_tokens, "batch_size": self.batch_size}
        require_positive(limit=self.limit, **sizes)
        check_writable(self.output, "--output")
        if not (Path(self.tuned) / "config.json").is_file():
            raise ValueError(f"--tuned {self.tuned}: no model there; give the folder that `medusa-heads merge` wrote")
        texts, questions = self.texts(), self.questions()
        models = {"untouched": self.base, "tuned": self.tuned}
        found: dict[str, dict[str, float]] = {kind: {} for kind in texts}
        prints, right = {}, {}
        for name, folder in models.items():
            model, _ = self.load(folder)
            prints[name] = fingerprint(model)
            for kind, rows in texts.items():
                found[kind][name] = perplexity(model, rows, f"{name}, {kind}")
            del model
        for kind, pair in found.items():
            pair["change_percent"] = 100 * (pair["tuned"] / pair["untouched"] - 1)
            print(f"{kind}: {pair['untouched']:.4f} untouched, {pair['tuned']:.4f} tuned, {pair['change_percent']:+.2f} %", flush=True)
        for name, folder in models.items() if questions else ():  # answering takes far longer
            right[name] = self.share_right(*self.load(folder), questions, name)
            print(f"{name}: {right[name]:.1%} of {len(questions)} answers right", flush=True)
        figures = {"fingerprints": prints, "perplexity": found, "right_answers": right, "num_questions": len(questions)}
        write_text(self.output, json.dumps(self.facts(texts) | figures, indent=1) + "\n")

    def load(self, name: str) -> tuple[PreTrainedModel, Any]:
        revision = self.revision if name == self.base else None
        dtype = base_model.parse_dtype(self.dtype)
        return base_model.load_base(name, dtype=dtype, device=pick_device(self.device), revision=revision)

    def texts(self) -> dict[str, list[TokenizedRow]]:
        """Token ids and masks of both kinds, by the untouched base's tokenizer."""
        tokenizer = base_model.load_tokenizer(self.base, revision=self.revision)
        rows, _ = tokenize_dataset(self.answers, tokenizer, max_length=self.max_length)
        if self.held_out is not None:
            rows = split_by_id(rows, self.held_out)[1]
        rows = rows.select(range(min(len(rows), self.limit or len(rows))))
        texts = {"answers": [TokenizedRow(row["input_ids"], row["assistant_mask"]) for row in rows]}
        if self.references is not None:
            found = [tokenize_conversation(c, tokenizer) for c in reference_conversations(self.references)[: self.limit]]
            texts["references"] = [TokenizedRow(r.input_ids[: self.max_length], r.assistant_mask[: self.max_length]) for r in found]
        return texts

    def questions(self) -> list[Prompt]:
        """The prompts whose right answer is a number."""
        if self.references is None:
            return []
        return [prompt for prompt in load_prompts(self.references, self.limit) if quality_kind(prompt) == "final_number"]

    def share_right(self, model: PreTrainedModel, tokenizer: Any, questions: Sequence[Prompt], label: str) -> float:
        generator, num_right = Generator(model, tokenizer=tokenizer), 0
        for start in tqdm(range(0, len(questions), self.batch_size), desc=f"{label}, answering", unit="batch", file=sys.stderr):
            part = questions[start : start + self.batch_size]
            answers = generator.generate([encode_chat(tokenizer, p.messages) for p in part], max_new_tokens=self.max_new_tokens)
            num_right += sum(bool(is_right(prompt, answer.text)) for prompt, answer in zip(part, answers, strict=True))
        return num_right / len(questions)

    def facts(self, texts: dict[str, list[TokenizedRow]]) -> dict[str, Any]:
        options = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        files = [*map(Path, self.answers)] + ([self.references] if self.references else [])
        return {
            "settings": options,
            "texts": {kind: len(rows) for kind, rows in texts.items()},
            "sha256": {file.name: file_sha256(file) for file in files if file.is_file()},
            "hardware": hardware(pick_device(self.device)),
            "versions": versions(),
            "commit": commit(),
        }


def reference_conversations(path: Path) -> list[Conversation]:
    """The rows with a `reference` as conversations that end in it; where there is none, the file's own conversations."""
    prompts = [prompt for prompt in load_prompts(path) if prompt.reference]
    if not prompts:
        return list(read_conversations([path]))
    return [Conversation(p.id, (*p.messages, {"role": "assistant", "content": p.reference or ""})) for p in prompts]


@torch.inference_mode()
def perplexity(model: PreTrainedModel, rows: Sequence[TokenizedRow], label: str) -> float:
    """exp of the mean of -log p over the supervised tokens of all rows."""
    total, count = 0.0, 0
    for row in tqdm(rows, desc=label, unit="text", file=sys.stderr):
        room = base_model.max_length(model)
        ids = torch.tensor(row.input_ids[:room], device=model.device)
        at = torch.tensor(row.assistant_mask[1:room], device=model.device).nonzero()[:, 0]  # where the next token is supervised
        hidden = base_model.forward_hidden(model, ids[None])[0]
        for part in at.split(CHUNK):
            logits = base_model.float32_logits(model, hidden[part])
            total += float(torch.nn.functional.cross_entropy(logits, ids[part + 1], reduction="sum"))
        count += len(at)
    if not count:
        raise ValueError(f"{label}: no text holds a token of an answer")
    return math.exp(total / count)


if __name__ == "__main__":
    try:
        tyro.cli(Medusa2Report).run()
    except ValueError as error:
        sys.exit(f"error: {error}")
