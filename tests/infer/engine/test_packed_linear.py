"""Packed linear layers: the same function up to float16 weights, on a copy, chosen only where faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer import loading
from infer.bench.compare import first_difference_margin
from infer.drafters.heads import HeadsDrafter
from infer.engine import packed_linear
from infer.engine.packed_linear import can_pack, decoding_copies, fastest_copy, is_packed, packed_copy
from infer.generate import Generator
from infer.tree_spec import BeamTree
from infer.tune.auto_tree import TreeChoice
from medusa_heads import base_model
from medusa_heads.checkpoint import save_heads
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="this torch has no FBGEMM")


def curve_row(num_nodes: int, speed: float, length: float) -> dict[str, Any]:
    return {"batch_size": 1, "num_nodes": num_nodes, "expected_tokens_per_second": speed, "expected_acceptance_length": length}


def half(family: str) -> Any:
    return tiny_model(family).to(torch.bfloat16)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen2", "phi3", "gpt_neox", "mixtral"])
def test_packed_copy_computes_the_same_logits(family: str) -> None:
    model = half(family)
    exact = half(family).float()
    packed = packed_copy(model)
    ids = torch.randint(3, 300, (2, 9))
    found = base_model.compute_logits(packed, base_model.forward_hidden(packed, ids))
    expected = base_model.compute_logits(exact, base_model.forward_hidden(exact, ids))
    assert is_packed(packed) and not is_packed(model) and model.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_layers_with_the_same_input_are_one_product() -> None:
    """In any order, for another input in between, made once for each, and with nothing kept in the model."""
    attention = half("qwen2").model.layers[0].self_attn  # with biases
    linears = [attention.q_proj, attention.k_proj, attention.v_proj]
    packed_linear._join_linears(attention)
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    product = parts[0].product
    assert all(part.product is product for part in parts)
    first, second = torch.randn(2, 5, linears[0].in_features), torch.randn(2, 5, linears[0].in_features)
    for part, inputs in ((0, first), (2, second), (1, first), (0, second), (1, second), (2, first), (2, first), (0, first), (1, first)):
        expected = torch.nn.functional.linear(inputs, linears[part].weight.float(), linears[part].bias.float())
        torch.testing.assert_close(parts[part](inputs), expected, atol=1e-4, rtol=1e-4)
    assert first.product[1] is not second.product[1] and first.product[0] is second.product[0] is product  # type: ignore[attr-defined]
    kept = first.product[1]  # type: ignore[attr-defined]
    assert all(part(first).data_ptr() in range(kept.data_ptr(), kept.data_ptr() + 4 * kept.numel()) for part in parts)
    assert not any(isinstance(value, torch.Tensor) for value in vars(product).values())


def test_packed_decoding_with_heads_equals_packed_plain_decoding() -> None:
    model = half("llama")
    packed = packed_copy(model)
    heads = random_heads(model, num_heads=3, num_layers=1).to(packed.dtype)
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    plain = Generator(packed).generate(prompts, max_new_tokens=24)
    drafted = Generator(packed, HeadsDrafter(packed, heads, BeamTree(8))).generate(prompts, max_new_tokens=24)
    assert [g.token_ids for g in plain] == [g.token_ids for g in drafted]


def test_float32_and_overflowing_weights_are_not_packed() -> None:
    assert not can_pack(tiny_model("llama"))
    model = half("llama")
    assert can_pack(model)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e6
    assert not can_pack(model)


@pytest.mark.parametrize("packed_is_faster", [True, False])
def test_the_faster_one_is_chosen(monkeypatch: pytest.MonkeyPatch, packed_is_faster: bool) -> None:
    monkeypatch.setattr(packed_linear, "step_seconds", lambda model, n: 1.0 if is_packed(model) == packed_is_faster else 2.0)
    model = half("llama")
    chosen = fastest_copy(decoding_copies(model), [1])
    assert is_packed(chosen) == packed_is_faster
    assert packed_is_faster or chosen.lm_head.weight is model.lm_head.weight


def test_the_fastest_copy_depends_on_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed layers win on single tokens, stock ones on trees, as with AVX512-BF16."""
    monkeypatch.setattr(packed_linear, "step_seconds", lambda model, n: 0.1 * n if is_packed(model) else 1.0)
    copies = decoding_copies(half("llama"))
    assert [is_packed(fastest_copy(copies, [n])) for n in (1, 9, 33)] == [True, True, False]
    assert not is_packed(fastest_copy(copies, [1, 33]))


def test_a_model_that_cannot_be_packed_is_its_only_copy() -> None:
    model = tiny_model("gpt2")
    assert decoding_copies(model)[0] is model and fastest_copy([model], [1]) is model
    assert len(decoding_copies(tiny_model("llama"))) == 1


def test_heads_run_on_the_copy_with_the_most_tokens_per_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = half("llama")
    save_heads(random_heads(model, num_heads=3, num_layers=1), tmp_path / "heads", card="")
    copies = decoding_copies(model)
    for packed_gain, expected in ((2.0, True), (0.5, False)):

        def choose(engine: Any, checkpoint: Any, batch_size: int, gain: float = packed_gain) -> TreeChoice:
            speeds = {0: 0.5, 3: gain if is_packed(engine) else 1.0}
            return TreeChoice(BeamTree(3), [curve_row(n, v, 2.0 if n else 1.0) for n, v in speeds.items()])

        monkeypatch.setattr(loading, "choose_tree", choose)
        loaded = loading.load_with_tree(str(tmp_path / "heads"), copies, "auto")
        assert is_packed(loaded.engine) == expected
        assert next(loaded.checkpoint.heads.parameters()).dtype == loaded.engine.dtype
    monkeypatch.setattr(packed_linear, "step_seconds", lambda model, n: 0.1 * n if is_packed(model) else 1.0)
    assert [is_packed(loading.load_with_tree(str(tmp_path / "heads"), copies, tree).engine) for tree in ("beam:4", "beam:32")] == [
        True,
        False,
    ]


@pytest.mark.parametrize("bias", [True, False])
def test_weights_come_back_as_they_were_packed(bias: bool) -> None:
    linear = torch.nn.Linear(24, 40, bias=bias)
    linear.weight.data = linear.weight.data.bfloat16().float()
    packed = packed_linear.PackedLinear(linear.weight, linear.bias)
    assert torch.equal(packed.weight, linear.weight)
    assert packed.bias is None if not bias else torch.equal(packed.bias, linear.bias)  # type: ignore[arg-type]


def test_the_margin_of_a_first_difference_can_be_measured_on_packed_weights() -> None:
    exact = half("llama").float()
    found = first_difference_margin(packed_copy(half("llama")), [5, 6, 7], [8, 9], [8, 10])
    assert found == pytest.approx(first_difference_margin(exact, [5, 6, 7], [8, 9], [8, 10]), abs=1e-3)
