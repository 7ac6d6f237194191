"""A reduced draft vocabulary: cheaper drafts over the same candidates, the same text, kept with the heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer.drafters.heads import HeadsDrafter
from infer.engine.packed_linear import packed_copy
from infer.generate import Generator
from infer.tree import Tree, build_tree
from infer.tree_spec import BeamTree
from medusa_heads.checkpoint import load_heads, save_heads
from tests.random_heads import random_heads
from tests.tiny_models import VOCAB_SIZE, tiny_model

VOCABULARY = torch.arange(3, VOCAB_SIZE, 4)
TREES = [BeamTree(12), BeamTree(2), build_tree([[0], [1], [0, 0], [0, 3]])]


def setup(family: str = "llama", *, own_lm_head: bool = False) -> tuple[Any, Any]:
    model = tiny_model(family)
    return model, random_heads(model, num_heads=3, num_layers=1, own_lm_head=own_lm_head)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("own_lm_head", [False, True])
def test_proposes_what_masked_full_logits_would(tree: Tree | BeamTree, family: str, own_lm_head: bool) -> None:
    model, heads = setup(family, own_lm_head=own_lm_head)
    hidden, root = torch.randn(2, 32), torch.tensor([5, 6])
    reduced = HeadsDrafter(model, heads, tree, draft_vocabulary=VOCABULARY)
    full = HeadsDrafter(model, heads, tree)
    outside = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    outside[VOCABULARY] = False
    logits = full.draft_logits
    full.draft_logits = lambda hidden_BD, reach: logits(hidden_BD, reach).masked_fill(outside, -torch.inf)  # type: ignore[assignment,method-assign,misc]
    found, expected = reduced.propose(root, hidden, []), full.propose(root, hidden, [])
    assert torch.equal(found.tokens_BN, expected.tokens_BN) and torch.equal(found.parents_BN, expected.parents_BN)
    assert torch.isin(found.tokens_BN[:, 1:], VOCABULARY).all()


@pytest.mark.parametrize("tree", TREES)
def test_text_is_the_base_models_own(tree: Tree | BeamTree) -> None:
    model, heads = setup()
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    drafted = Generator(model, HeadsDrafter(model, heads, tree, draft_vocabulary=VOCABULARY)).generate(prompts, max_new_tokens=20)
    assert [g.token_ids for g in drafted] == [g.token_ids for g in Generator(model).generate(prompts, max_new_tokens=20)]


def test_packed_lm_head_rows() -> None:
    model, heads = setup()
    packed = packed_copy(model.to(torch.bfloat16))
    hidden = torch.randn(2, 32)
    full = HeadsDrafter(packed, heads, BeamTree(8)).draft_logits(hidden)
    reduced = HeadsDrafter(packed, heads, BeamTree(8), draft_vocabulary=VOCABULARY).draft_logits(hidden)
    torch.testing.assert_close(reduced, full[..., VOCABULARY], atol=1e-4, rtol=1e-4)


def test_is_kept_with_the_heads(tmp_path: Path) -> None:
    model, heads = setup()
    save_heads(heads, tmp_path / "heads", card="card", draft_vocabulary=VOCABULARY)
    found = load_heads(tmp_path / "heads", model).draft_vocabulary
    assert found is not None and torch.equal(found, VOCABULARY)
    for damaged in ("[3, 2]", "[1, 400]", "[-1, 2]", "{}", "[]", "[1,", "[1.0, 2.0]", "[true]", "[" * 100_000):
        (tmp_path / "heads" / "draft_vocabulary.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"draft_vocabulary\.json is damaged"):
            load_heads(tmp_path / "heads", model)
    (tmp_path / "heads" / "draft_vocabulary.json").unlink()
    (tmp_path / "heads" / "draft_vocabulary.json").mkdir()
    with pytest.raises(ValueError, match=r"draft_vocabulary\.json is damaged"):
        load_heads(tmp_path / "heads", model)
