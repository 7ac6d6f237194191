"""Answers -> where they part from plain decoding, and how near a tie the base model was there."""

# T sequence, D hidden, V vocabulary

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from infer.bench.measure import Answer, split_batch
from infer.bench.rows import Batch, BenchRow, GeneratorRow
from infer.generate import Generator
from medusa_heads import base_model


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that is not plain decoding's. margin: see `first_difference_margin`; None where logits alone did not
    decide (draws, penalties)."""

    margin: float | None


Differences = dict[str, list[Difference | None]]


def compare(rows: Sequence[BenchRow], answers: dict[str, list[Answer]], batches: Sequence[Batch]) -> Differences:
    """Per row whose answers should be those of plain decoding under the same seeds, and per prompt: None where they
    are. Rows that draw their tokens otherwise are left out, the law is all that they share.

    Plain decoding is row `base`; for a drafter on another copy of the model, whose half precision rounds
    otherwise, it is the same loop without a drafter on that copy, untimed: drafts alone are judged. The two other
    base rows are judged by row `base`.
    """
    base = next(row for row in rows if row.name == "base")
    assert isinstance(base, GeneratorRow)
    plain = {id(base.model): answers["base"]}
    prompt_ids = [prompt for batch in batches for prompt in batch.prompts]
    found: Differences = {}
    for row in rows:
        if row.name not in answers or not row.is_exact:
            continue
        model = row.model if isinstance(row, GeneratorRow) else base.model
        if id(model) not in plain:
            alone = GeneratorRow(row.name, Generator(model), base.decoding)
            turns = tqdm(batches, desc=f"plain decoding as {row.name} computes", file=sys.stderr)
            plain[id(model)] = [answer for batch in turns for answer in split_batch(alone.answer(batch))]
        by_logits = base.decoding.generation_config is None
        found[row.name] = differences(model, prompt_ids, plain[id(model)], answers[row.name], by_logits=by_logits)
    return found


def differences(
    model: PreTrainedModel, prompt_ids: Sequence[list[int]], base: Sequence[Answer], own: Sequence[Answer], *, by_logits: bool
) -> list[Difference | None]:
    """Per prompt: None where both answers are equal. by_logits: whether the largest logit decided every token."""
    return [
        None
        if mine.token_ids == theirs.token_ids
        else Difference(first_difference_margin(model, prompt, theirs.token_ids, mine.token_ids) if by_logits else None)
        for prompt, theirs, mine in zip(prompt_ids, base, own, strict=True)
    ]


@torch.no_grad()
def first_difference_margin(model: PreTrainedModel, prompt: list[int], base: list[int], own: list[int]) -> float:
    """How far the two tokens at the first difference lie below the base model's best one, at most.

    Logits (LM head in float32) of one plain forward over the prompt and the common part of the two
    answers. For a near-tie that rounding decided, this is the gap between the two best tokens; a
    wrong token shows as a large margin.
    """
    common = next((i for i, (a, b) in enumerate(zip(base, own, strict=False)) if a != b), min(len(base), len(own)))
    parted = [answer[common] for answer in (base, own) if common < len(answer)]
    hidden_D = base_model.forward_hidden(model, torch.tensor([prompt + base[:common]], device=model.device))[0, -1]
    logits_V = base_model.float32_logits(model, hidden_D)
    return float(logits_V.max() - logits_V[parted].min())
