"""Validation prompts + heads in training -> acceptance lengths, decoded by the very decoder that will serve the heads."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.tree import Tree
from infer.tree_spec import BeamTree, parse_tree
from medusa_heads import base_model
from medusa_heads.checkpoint import HeadsCheckpoint
from medusa_heads.heads import MedusaHeads
from train.chat_turns import ChatTurns
from train.config import TrainConfig
from train.evaluate import measure
from train.headed_model import HeadedModel
from train.packing import PackedDataset
from train.prompt_rows import load_prompt_rows

MAX_NEW_TOKENS = 64
BATCH_SIZE = 16
NUM_POSITIONS = 2000


@dataclass(frozen=True, slots=True)
class Validation:
    """What acceptance is measured on. prompts: token ids; eos_ids: end an answer; tree: a `--tree` argument;
    answers: conversations answered by the base for the expected acceptance length, or None."""

    prompts: list[list[int]]
    eos_ids: tuple[int, ...]
    tree: str = "beam:16"
    answers: PackedDataset | None = None

    @property
    def key(self) -> str:
        """The start of a SHA-256 over the prompts: lengths measured on others do not compare."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16]


def make_validation(config: TrainConfig, answers: Dataset | None, model: PreTrainedModel, tokenizer: Any) -> Validation | None:
    """answers: held-out conversations, tokenised. None without these and without a file of prompts.

    Raises ValueError when no prompt fits into the model's context.
    """
    if answers is not None:
        answers = answers.select(spread(len(answers), config.num_validation_prompts))
    if config.validation_prompts:
        prompts = prompts_of_file(config.validation_prompts, tokenizer, config.num_validation_prompts)
    elif answers is not None:
        prompts = prompts_of_answers(answers)
    else:
        return None
    longest = base_model.max_length(model) - 1
    if not (fitting := [prompt for prompt in prompts if 0 < len(prompt) <= longest]):
        raise ValueError(
            f"validation: none of {len(prompts)} prompts has 1 to {longest} tokens, as the base model's context asks; give others"
        )
    rows = None if answers is None else PackedDataset(answers, pack_length=config.pack_length, num_heads=config.num_heads)
    return Validation(fitting, base_model.end_of_sequence_ids(model, tokenizer), config.validation_tree, rows)


def spread(count: int, wanted: int) -> list[int]:
    """At most `wanted` indices below `count`, spread evenly: files are often sorted by source."""
    wanted = min(wanted, count)
    return [index * count // wanted for index in range(wanted)]


def prompts_of_answers(answers: Dataset) -> list[list[int]]:
    """Tokenised conversations -> the tokens before each one's first supervised span; those that begin with it have none."""
    rows = answers.select_columns(["input_ids", "assistant_mask"])
    return [list(row["input_ids"])[:start] for row in rows if any(row["assistant_mask"]) and (start := row["assistant_mask"].index(True))]


def prompts_of_file(path: str | Path, tokenizer: Any, wanted: int) -> list[list[int]]:
    """Rows as for `medusa-heads regenerate` -> token ids before the first answer of at most `wanted` of them."""
    rows = load_prompt_rows([path])
    if not rows:
        raise ValueError(f"--validation-prompts {path} holds no prompt")
    chat = ChatTurns(tokenizer)
    return [chat.pieces(rows[index].turns[:1])[0] for index in spread(len(rows), wanted)]


def pick_tree(spec: str, headed: HeadedModel) -> Tree | BeamTree:
    """Raises ValueError for a tree that needs what heads in training do not have, or is deeper than they are."""
    if spec in ("auto", "tuned") or spec.startswith("static:"):
        raise ValueError(f"--validation-tree {spec} needs finished heads: give chain, beam:N or a JSON file of rank paths")
    heads = headed.heads
    try:
        tree = parse_tree(spec, HeadsCheckpoint(heads, heads.config, Path(), draft_vocabulary=headed.draft_vocabulary))
    except ValueError as error:
        raise ValueError(f"--validation-tree: {error}") from None
    assert tree is not None
    return tree


def decode(headed: HeadedModel, validation: Validation, *, part: int = 0, num_parts: int = 1) -> Tensor:
    """Answers every num_parts-th prompt from `part` on, greedily: [P, 2], the base forwards and accepted tokens of each, 0 of the others.

    The heads decode in the base's type, as they do when loaded from a finished checkpoint.
    """
    model, counts_P2 = headed.base, torch.zeros(len(validation.prompts), 2, dtype=torch.long)
    mine = range(part, len(validation.prompts), num_parts)
    if not mine:
        return counts_P2
    heads = copy_heads(headed.heads).to(model.dtype).eval()
    drafter = HeadsDrafter(model, heads, pick_tree(validation.tree, headed), draft_vocabulary=headed.draft_vocabulary)
    generator = Generator(model, drafter)
    for start in range(0, len(mine), BATCH_SIZE):
        batch = mine[start : start + BATCH_SIZE]
        answers = generator.generate([validation.prompts[i] for i in batch], max_new_tokens=MAX_NEW_TOKENS, eos_ids=validation.eos_ids)
        for index, answer in zip(batch, answers, strict=True):
            counts_P2[index] = torch.tensor([answer.stats.num_steps, answer.stats.num_accepted_tokens])
    return counts_P2


def copy_heads(heads: MedusaHeads) -> MedusaHeads:
    """By its weights: what a sharding strategy has hung on the module stays behind."""
    copied = type(heads)(heads.config).to(heads.weight.device)
    copied.load_state_dict(heads.state_dict())
    return copied


def expected_length(headed: HeadedModel, validation: Validation) -> float | None:
    """The expected acceptance length of the beam tree of 16 nodes (train/evaluate.py); None without answers long enough."""
    if validation.answers is None:
        return None
    try:
        measured = measure(headed, validation.answers, draft_vocabulary=headed.draft_vocabulary, num_positions=NUM_POSITIONS)
    except ValueError:
        return None
    return measured.acceptance_length[16]
