"""More architectures: trees, ragged batches and training are exact on them too; those that cannot branch are refused."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BartConfig,
    BloomConfig,
    FalconH1Config,
    JambaConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    RwkvConfig,
    T5Config,
)

import infer.generate
from infer.candidates import Candidates
from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.kv_cache import KVCache
from infer.tree import build_tree
from infer.tree_forward import prefill, tree_forward
from infer.tree_spec import BeamTree
from medusa_heads import base_model
from tests.infer.scripted_drafter import ScriptedDrafter
from tests.infer.test_generate import answers_of, base_answer, prompts
from tests.infer.test_tree_forward import EXACT, accept_some, new_cache, random_draft, tree_error
from tests.random_heads import random_heads
from tests.tiny_models import ARCHITECTURES, COMMON, CONTEXT, VOCAB_SIZE, tiny_model
from tests.train.training_runs import make_trainer

NEW = 16
STATIC = build_tree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


@torch.inference_mode()
@pytest.mark.compat
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_tree_equals_its_paths(family: str) -> None:
    model, texts = tiny_model(family), prompts()
    cache = new_cache(model, 3)
    prefill(model, texts, cache, chunk=8)
    candidates = random_draft("static", 3, seed=0)
    assert tree_error(model, candidates, texts, tree_forward(model, candidates, cache)) < EXACT
    accept_some(candidates, cache, texts, [9, 0, 4])
    windowed = base_model.sliding_windows(model)[0].get("sliding_attention") is not None
    candidates = random_draft("deep" if windowed else "beam", 3, seed=9)  # deeper than the window
    assert tree_error(model, candidates, texts, tree_forward(model, candidates, cache)) < EXACT


@pytest.mark.compat
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_ragged_batch_with_heads_equals_plain_decoding_one_by_one(family: str) -> None:
    """Experts too: which ones a token goes to depends on nothing else in the batch or the tree."""
    model, texts = tiny_model(family), prompts()
    expected = answers_of(model, texts, NEW)
    drafters = [HeadsDrafter(model, random_heads(model), tree) for tree in (STATIC, BeamTree(16))]
    true_texts = [text + answer for text, answer in zip(texts, expected, strict=True)]
    for drafter in (*drafters, ScriptedDrafter(true_texts, right=0.7)):
        found = Generator(model, drafter).generate(texts, max_new_tokens=NEW)
        assert [generation.token_ids for generation in found] == expected, drafter


def positions_off_by_one(model: PreTrainedModel, candidates: Candidates, cache: KVCache, **options: Any) -> tuple[Tensor, Tensor]:
    shifted = replace(candidates, depths_BN=candidates.depths_BN + (candidates.depths_BN > 1).long())
    return tree_forward(model, shifted, cache, **options)


def blind(model: PreTrainedModel, candidates: Candidates, cache: KVCache, **options: Any) -> tuple[Tensor, Tensor]:
    """Nodes see the prefix and themselves alone."""
    alone = torch.eye(candidates.num_nodes + 1, dtype=torch.bool)[None]
    return tree_forward(model, replace(candidates, ancestors_BNN=alone), cache, **options)


@pytest.mark.parametrize("corruption", [positions_off_by_one, blind])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_wrong_tree_forward_changes_the_text(family: str, corruption: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the equality above must be able to fail."""
    model, texts = tiny_model(family), prompts()
    answers = answers_of(model, texts, NEW)
    monkeypatch.setattr(infer.generate, "tree_forward", corruption)
    oracle = ScriptedDrafter([text + answer for text, answer in zip(texts, answers, strict=True)])
    assert [g.token_ids for g in Generator(model, oracle).generate(texts, max_new_tokens=NEW)] != answers


@pytest.mark.compat
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_training_step_runs_and_trains_every_head(family: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, family=family, max_steps=1, warmup_ratio=0.0)
    trainer.train()
    (loss,) = trainer.losses  # type: ignore[attr-defined]
    assert math.isfinite(loss) and all(weight.any() for weight in trainer.heads.weight)


@pytest.mark.compat
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_packed_documents_have_the_hidden_states_they_have_alone(family: str, tmp_path: Path) -> None:
    model = make_trainer(tmp_path, family=family).model
    documents = prompts((11, 20))
    ids = torch.tensor([documents[0] + documents[1]])
    positions = torch.cat([torch.arange(11), torch.arange(20)])[None]
    packed = model.hidden_states(ids, positions, (torch.arange(31) >= 11).long()[None])[0]  # type: ignore[operator]
    alone = torch.cat([base_model.forward_hidden(tiny_model(family), torch.tensor([document]))[0] for document in documents])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- LongRoPE


def long_rope_model(original: int) -> PreTrainedModel:
    """Phi-3 whose rotation changes for all positions once a forward goes beyond `original` tokens."""
    config = copy.deepcopy(tiny_model("phi3").config)
    config.original_max_position_embeddings = original
    factors = dict(short_factor=[1.0, 1.5], long_factor=[3.0, 9.0], original_max_position_embeddings=original)
    config.rope_parameters = dict(rope_type="longrope", rope_theta=10_000.0, partial_rotary_factor=0.5, **factors)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


@pytest.mark.compat
def test_long_rope_ends_where_its_frequencies_change() -> None:
    """A row near that length must not turn the other rows' positions, nor its own before they are text."""
    model = long_rope_model(40)
    assert base_model.max_length(model) == 40 < CONTEXT
    texts = prompts((33, 5))
    expected = [base_answer(model, texts[0], 7), base_answer(model, texts[1], NEW)]
    heads = HeadsDrafter(model, random_heads(model), BeamTree(16))
    found = Generator(model, heads).generate(texts, max_new_tokens=NEW)
    assert [g.token_ids for g in found] == expected
    with pytest.raises(ValueError, match="prompt 0 has 40 tokens and the model's context ends at 40"):
        Generator(model).generate(prompts((40,)))


# ---------------------------------------------------------------- refusals

SMALL: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, vocab_size=VOCAB_SIZE)
REFUSED: dict[str, PreTrainedConfig] = {
    "qwen3_next": Qwen3NextConfig(**COMMON, vocab_size=VOCAB_SIZE),
    "jamba": JambaConfig(**COMMON, vocab_size=VOCAB_SIZE, num_experts=2),
    "mamba": MambaConfig(**SMALL),
    "mamba2": Mamba2Config(**SMALL, num_heads=4, head_dim=16, n_groups=1),
    "falcon_h1": FalconH1Config(**COMMON, vocab_size=VOCAB_SIZE),
    "bamba": BambaConfig(**COMMON, vocab_size=VOCAB_SIZE, mamba_n_heads=8, mamba_d_head=8, attn_layer_indices=[1]),
    "lfm2": Lfm2Config(**COMMON, vocab_size=VOCAB_SIZE, layer_types=["conv", "full_attention"]),
    "rwkv": RwkvConfig(**SMALL),
    "bloom": BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCAB_SIZE),
}


@pytest.mark.compat
@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_state_cannot_branch_are_refused_with_the_reason(name: str) -> None:
    model = AutoModelForCausalLM.from_config(copy.deepcopy(REFUSED[name])).eval()
    with pytest.raises(ValueError, match="state cannot branch over a tree of candidates"):
        Generator(model)


@pytest.mark.parametrize("config", [T5Config(), BartConfig()], ids=["t5", "bart"])
def test_encoder_decoders_are_refused(config: PreTrainedConfig) -> None:
    with pytest.raises(ValueError, match="is an encoder-decoder; draft heads need a decoder-only causal language model"):
        base_model.check_config(config)
