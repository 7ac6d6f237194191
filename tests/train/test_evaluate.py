"""What training measures on packed rows is what `medusa-heads tree` measures on the same answers."""

from __future__ import annotations

import datasets
import pytest
import torch

from infer.generate import Generator
from infer.tune.answer_acceptance import measure_acceptance
from medusa_heads.checkpoint import load_heads, save_heads
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model
from train.evaluate import measure
from train.headed_model import HeadedModel
from train.packing import PackedDataset

NUM_HEADS, PROMPT, ANSWER = 2, 6, 20


@pytest.mark.parametrize("vocabulary", [None, torch.arange(0, 300, 2)])
def test_packed_rows_give_what_single_answers_give(tmp_path_factory: pytest.TempPathFactory, vocabulary: torch.Tensor | None) -> None:
    model, generator = tiny_model("llama"), torch.Generator().manual_seed(3)
    heads = random_heads(model, num_heads=NUM_HEADS)
    prompts = torch.randint(3, 300, (8, PROMPT), generator=generator).tolist()
    answers = [answer.token_ids for answer in Generator(model).generate(prompts, max_new_tokens=ANSWER, eos_ids=())]
    folder = save_heads(heads, tmp_path_factory.mktemp("heads") / "heads", card="", draft_vocabulary=vocabulary)
    single = measure_acceptance(model, load_heads(folder, model), prompts, answers)
    rows = {
        "input_ids": [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)],
        "assistant_mask": [[False] * PROMPT + [True] * ANSWER] * len(prompts),
        "id": [str(i) for i in range(len(prompts))],
    }
    packed = PackedDataset(datasets.Dataset.from_dict(rows), pack_length=64, num_heads=NUM_HEADS)
    measured = measure(HeadedModel(model, heads, draft_vocabulary=vocabulary), packed, draft_vocabulary=vocabulary)
    assert sorted(run.tolist() for run in measured.runs_RK) == sorted(run.tolist() for run in single.runs_RK)
    assert measured.num_positions == len(prompts) * (ANSWER - NUM_HEADS)
    assert measured.static_nodes == single.static_nodes
    assert measured.acceptance_length == pytest.approx(single.acceptance_length)
