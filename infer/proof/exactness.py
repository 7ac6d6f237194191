"""Prompts and the answers of any decoder -> the tokens that are not the base model's own greedy ones.

The reference knows nothing of trees, drafts or this project's cache: one plain forward of the model over
prompt and answer, in which every token must be the most likely one after all that stand before it.
"""

# T answer length, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from medusa_heads import base_model


@dataclass(frozen=True, slots=True)
class Difference:
    """position: in the answer; margin: how far the expected token's logit is above the emitted one's."""

    position: int
    emitted: int
    expected: int
    margin: float


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """smallest_margin: the least distance between the best and the second-best logit along the answer;
    wrong_end: why the answer should have been longer or shorter, or None."""

    num_tokens: int
    smallest_margin: float
    wrong_end: str | None
    differences: list[Difference] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        return not self.differences and self.wrong_end is None


@torch.inference_mode()
def check_answer(
    model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], *, max_new_tokens: int, eos_ids: Sequence[int]
) -> AnswerCheck:
    """Compares an answer with greedy decoding through one teacher-forced forward (ties: lowest id)."""
    read = torch.tensor([[*prompt, *answer[:-1]]], device=model.device)
    logits_TV = model(input_ids=read, use_cache=False).logits[0, len(prompt) - 1 :].float()
    best_T2 = logits_TV.topk(2, dim=-1).values
    emitted_T = torch.tensor(answer, device=model.device)
    expected_T = logits_TV.argmax(-1)
    margin_T = best_T2[:, 0] - logits_TV.gather(1, emitted_T[:, None])[:, 0]
    differences = [
        Difference(int(t), int(emitted_T[t]), int(expected_T[t]), float(margin_T[t])) for t in (emitted_T != expected_T).nonzero()[:, 0]
    ]
    smallest = float((best_T2[:, 0] - best_T2[:, 1]).min())
    return AnswerCheck(len(answer), smallest, wrong_end(answer, max_new_tokens, eos_ids), differences)


def wrong_end(answer: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int]) -> str | None:
    """Why an answer does not end where greedy decoding ends, or None."""
    if any(token in eos_ids for token in answer[:-1]):
        return "goes on after an end token"
    if len(answer) > max_new_tokens:
        return f"has {len(answer)} tokens, more than {max_new_tokens}"
    if len(answer) < max_new_tokens and answer[-1] not in eos_ids:
        return f"stops after {len(answer)} tokens without an end token"
    return None


def plain_answers(
    model: PreTrainedModel, tokenizer: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, eos_ids: tuple[int, ...]
) -> list[list[int]]:
    """transformers' own greedy `generate`, one token per forward, over one left-padded batch; end tokens included."""
    pad_id = eos_ids[0] if tokenizer.pad_token_id is None and eos_ids else tokenizer.pad_token_id or 0
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    found = base_model.generate_plainly(
        model, ids, mask, max_new_tokens=max_new_tokens, eos_ids=eos_ids, pad_id=pad_id, on_token=lambda: None
    )
    answers = found[:, longest:].tolist()
    ends = [next((i + 1 for i, token in enumerate(answer) if token in eos_ids), len(answer)) for answer in answers]
    return [answer[:end] for answer, end in zip(answers, ends, strict=True)]
