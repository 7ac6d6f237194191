"""Attention over grouped heads gives what transformers' own gives, on a copy that shares every weight."""

from __future__ import annotations

import pytest
import torch

from infer.engine import tree_attention
from infer.engine.tree_attention import with_tree_attention
from infer.generate import Generator
from medusa_heads import base_model
from tests.tiny_models import tiny_model


@pytest.mark.compat
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_window"])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_same_hidden_states_under_a_mask(family: str, num_tokens: int) -> None:
    model = tiny_model(family)
    fast = with_tree_attention(model)
    assert fast is not model and fast.config._attn_implementation == base_model.TREE_ATTENTION
    assert model.config._attn_implementation == "sdpa", "the given model is left as it is"
    assert all(a is b for a, b in zip(model.parameters(), fast.parameters(), strict=True)), "no weight is copied"
    ids = torch.randint(3, 97, (2, num_tokens))
    allowed = torch.rand(2, num_tokens, num_tokens) < 0.5
    allowed |= torch.eye(num_tokens, dtype=torch.bool)
    positions = torch.arange(num_tokens).expand(2, -1)
    mask = base_model.additive_masks(model, allowed, positions, positions)
    found, expected = (base_model.forward_hidden(m, ids, attention_mask=mask, position_ids=positions) for m in (fast, model))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.compat
def test_every_masked_forward_takes_the_grouped_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the test above would also pass if transformers' own function were called."""
    model = tiny_model("llama")
    expected = Generator(model).generate([[5, 6, 7], [8, 9, 10, 11]], max_new_tokens=8)
    fast = with_tree_attention(model)
    monkeypatch.setattr(tree_attention, "MAX_QUERIES", 10**9)
    monkeypatch.setattr("transformers.integrations.sdpa_attention.repeat_kv", lambda *_: pytest.fail("keys were repeated"))
    found = Generator(fast).generate([[5, 6, 7], [8, 9, 10, 11]], max_new_tokens=8)
    assert [f.token_ids for f in found] == [e.token_ids for e in expected]


def test_models_without_grouped_heads_or_sdpa_stay_themselves() -> None:
    assert with_tree_attention(model := tiny_model("gpt2")) is model
    eager = tiny_model("llama")
    eager.set_attn_implementation("eager")
    assert with_tree_attention(eager) is eager


def test_layers_with_other_groups_share_a_mask() -> None:
    """The grouped mask is kept on the given one, but not for a layer that has other groups."""
    module, mask = torch.nn.Module(), torch.zeros(1, 1, 3, 5).masked_fill_(torch.rand(1, 1, 3, 5) < 0.3, torch.finfo(torch.float32).min)
    for num_heads in (2, 4, 2):
        query, key, value = torch.randn(1, 8, 3, 16), torch.randn(1, num_heads, 5, 16), torch.randn(1, num_heads, 5, 16)
        found, _ = tree_attention.attend(module, query, key, value, mask)
        keys, values = (t.repeat_interleave(8 // num_heads, dim=1) for t in (key, value))
        expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask).transpose(1, 2)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
