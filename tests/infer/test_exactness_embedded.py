"""The embedded model with random heads over a beam tree answers exactly what its own greedy generate does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.tree_spec import BeamTree
from medusa_heads.base_model import load_base
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import create_heads

PROMPTS = (
    "Name three fruits that are yellow.",
    "Write a short note to a neighbour about a lost cat.",
    "What is 17 plus 26? Explain each step.",
    "Give a Python function that reverses a string.",
)
NEW = 12

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base() -> Iterator[tuple[PreTrainedModel, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield load_base("embedded", dtype=torch.float32)
    torch.set_num_threads(threads)


@torch.inference_mode()
def base_answer(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    settings = GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=2, pad_token_id=2)
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)  # type: ignore[operator]
    return found[0, len(prompt) :].tolist()


def test_random_heads_change_no_token(base: tuple[PreTrainedModel, Any]) -> None:
    model, tokenizer = base
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    expected = [base_answer(model, prompt) for prompt in prompts]
    heads = create_heads(HeadsConfig(num_heads=4), model).requires_grad_(False)
    for parameter in heads.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.01)
    generator = Generator(model, HeadsDrafter(model, heads, BeamTree(16)), tokenizer=tokenizer)
    one_by_one = [generator.generate([prompt], max_new_tokens=NEW)[0] for prompt in prompts[:1]]
    together = generator.generate(prompts, max_new_tokens=NEW)
    assert [g.token_ids for g in together] == expected
    assert [g.token_ids for g in one_by_one] == expected[:1]
    assert [g.text for g in together] == [tokenizer.decode(answer, skip_special_tokens=True) for answer in expected]
    assert all(generation.stats.num_drafted_tokens == 16 * generation.stats.num_steps for generation in together)
