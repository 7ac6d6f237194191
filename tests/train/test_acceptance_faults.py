"""Acceptance in the loop, what it must not touch or overlook: the heads in training, and all that it was told to decode with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.tree import Tree, chain
from infer.tree_spec import BeamTree
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model
from tests.train.training_runs import make_trainer
from train import acceptance
from train.acceptance import Validation, decode
from train.headed_model import HeadedModel

PROMPTS = [[3, 4, 5], [6, 7, 8, 9], [10, 11]]
TREES: dict[str, Tree | BeamTree] = {"chain": chain(3), "beam:4": BeamTree(4)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_leaves_the_heads_in_training_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Float32 masters, rounded to the base's type for decoding, must not stay rounded; and training mode stays on."""
    monkeypatch.setattr(acceptance, "MAX_NEW_TOKENS", 4)
    headed = make_trainer(tmp_path, seed_heads=1).headed.train()
    headed.base.to(dtype)  # type: ignore[arg-type]
    before = headed.heads.weight.detach().clone()
    assert not torch.equal(before, before.bfloat16().float())
    decode(headed, Validation(PROMPTS, ()))
    assert headed.heads.weight.dtype == torch.float32 and torch.equal(headed.heads.weight, before)
    assert headed.heads.training and headed.heads.weight.requires_grad and not headed.base.training


@pytest.mark.parametrize("tree", TREES)
def test_tree_vocabulary_and_end_of_answers_are_those_given(monkeypatch: pytest.MonkeyPatch, tree: str) -> None:
    monkeypatch.setattr(acceptance, "MAX_NEW_TOKENS", 12)
    model, vocabulary = tiny_model("llama"), torch.arange(3, 300, 2)
    heads = random_heads(model)
    plain = Generator(model).generate(PROMPTS, max_new_tokens=12, eos_ids=())
    end = (plain[0].token_ids[4],)
    found, proposals, sizes = {}, [], []

    def noting(base: Any, of_heads: Any, tree: Tree | BeamTree, *, draft_vocabulary: torch.Tensor | None) -> HeadsDrafter:
        proposals.append(draft_vocabulary)
        sizes.append(tree.num_nodes)
        return HeadsDrafter(base, of_heads, tree, draft_vocabulary=draft_vocabulary)

    monkeypatch.setattr(acceptance, "HeadsDrafter", noting)
    for proposed in (None, vocabulary):
        for eos in ((), end):
            generator = Generator(model, HeadsDrafter(model, heads, TREES[tree], draft_vocabulary=proposed))
            answers = generator.generate(PROMPTS, max_new_tokens=12, eos_ids=eos)
            counts_P2 = decode(HeadedModel(model, heads, draft_vocabulary=proposed), Validation(PROMPTS, eos, tree))
            assert counts_P2.tolist() == [[answer.stats.num_steps, answer.stats.num_accepted_tokens] for answer in answers]
            found[proposed is None, eos] = int(counts_P2[:, 0].sum())
    assert [None if ids is None else ids.tolist() for ids in proposals] == [None, None, vocabulary.tolist(), vocabulary.tolist()]
    assert found[True, ()] > found[True, end]
    assert sizes == [TREES[tree].num_nodes] * 4
