"""The adapter: logits from the last hidden state are the model's own, and models that cannot work are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    CohereConfig,
    DynamicCache,
    Gemma3TextConfig,
    GenerationConfig,
    GPTNeoXConfig,
    GraniteConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from medusa_heads import base_model
from tests.tiny_models import COMMON, FAMILIES, tiny_model, tiny_tokenizer

VOCAB_SIZE = 97
OTHERS: dict[str, PreTrainedConfig] = {
    "gemma3_soft_cap": Gemma3TextConfig(**COMMON, vocab_size=VOCAB_SIZE, head_dim=8, sliding_window=8, final_logit_softcapping=3.0),
    "cohere": CohereConfig(**COMMON, vocab_size=VOCAB_SIZE, logit_scale=0.25),
    "granite": GraniteConfig(**COMMON, vocab_size=VOCAB_SIZE, logits_scaling=8.0),
    "gpt_neox": GPTNeoXConfig(**{k: v for k, v in COMMON.items() if k != "num_key_value_heads"}, vocab_size=VOCAB_SIZE),
}
SCALED = {"gemma2": (1.0, 5.0), "gemma3_soft_cap": (1.0, 3.0), "cohere": (0.25, None), "granite": (0.125, None)}
NAMES = (*FAMILIES, *OTHERS)


def _model(name: str) -> PreTrainedModel:
    if name in FAMILIES:
        return tiny_model(name, vocab_size=VOCAB_SIZE)
    return AutoModelForCausalLM.from_config(copy.deepcopy(OTHERS[name])).eval().requires_grad_(False)


@pytest.mark.compat
@pytest.mark.parametrize("name", NAMES)
def test_logits_from_the_last_hidden_state_are_the_models_own(name: str) -> None:
    model = _model(name)
    base_model.check_base(model)
    input_ids = torch.randint(3, VOCAB_SIZE, (2, 20))  # longer than the windows of 8
    expected = model(input_ids=input_ids).logits
    hidden_states = base_model.forward_hidden(model, input_ids)
    assert torch.equal(base_model.compute_logits(model, hidden_states), expected)
    if name in SCALED:  # without its scaling it is not
        assert not torch.allclose(base_model.lm_head(model)(hidden_states), expected, atol=1e-3)
    assert (hidden_states.shape[-1], expected.shape[-1]) == (base_model.hidden_size(model), base_model.vocab_size(model))


@pytest.mark.parametrize("name", NAMES)
def test_scale_and_cap_are_the_transform(name: str) -> None:
    model = _model(name)
    scale, cap = base_model.logit_scale_and_cap(model)
    assert (scale, cap) == SCALED.get(name, (1.0, None))
    logits = torch.linspace(-20, 20, 50)
    expected = logits * scale if cap is None else torch.tanh(logits * scale / cap) * cap
    assert torch.allclose(base_model.logit_transform(model)(logits), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.compat
@pytest.mark.parametrize("name", NAMES)
def test_layers_and_what_they_cache(name: str) -> None:
    model = _model(name)
    assert len(base_model.decoder_layers(model)) == 2
    num_heads = 4 if name in ("gpt2", "gpt_neox") else 2
    width = 16 if name == "qwen3" else 8
    assert base_model.cache_layer_shapes(model) == [base_model.LayerShape(num_heads, width, width)] * 2


@pytest.mark.compat
def test_a_cached_forward_continues_the_text() -> None:
    model = tiny_model("llama")
    input_ids = torch.randint(3, 300, (1, 9))
    cache = DynamicCache()
    base_model.forward_hidden(model, input_ids[:, :6], cache=cache)
    last = base_model.forward_hidden(model, input_ids[:, 6:], cache=cache, position_ids=torch.arange(6, 9)[None])
    assert torch.allclose(last, base_model.forward_hidden(model, input_ids)[:, 6:], atol=1e-5)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("t5", {}, "t5 is an encoder-decoder"),
        ("gpt_neo", {}, "gpt_neo cuts its local attention by places in the cache"),
        ("llama", {"keep_window_size": 8}, "llama keeps those keys of its cache that score highest"),
        ("qwen3_next", {"num_hidden_layers": 4}, "layers of type linear_attention: their state cannot branch"),
        ("llama", {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2}, "layers of type linear_attention"),
    ],
)
def test_configs_that_cannot_carry_heads_are_refused(model_type: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        base_model.check_config(AutoConfig.for_model(model_type, **options))


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|sdpa"])
def test_attention_without_free_masks_is_refused(name: str) -> None:
    model = tiny_model("llama")
    model.config._attn_implementation_internal = name
    with pytest.raises(ValueError, match="cannot take the mask of a candidate tree; load the base model with attn_implementation='sdpa'"):
        base_model.check_base(model)


def test_a_model_without_an_lm_head_is_refused() -> None:
    with pytest.raises(ValueError, match="no output embeddings"):
        base_model.check_base(AutoModel.from_config(copy.deepcopy(tiny_model("llama").config)).eval())


class _Counting(nn.Linear):
    """An LM head whose output is no function of the hidden state alone."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def test_logits_of_an_unknown_function_are_refused() -> None:
    model = tiny_model("llama")
    head = _Counting(32, 300, bias=False).requires_grad_(False)
    head.weight.copy_(base_model.lm_head_parameters(model)[0])
    model.set_output_embeddings(head)
    with pytest.raises(ValueError, match="computes its logits from something other than its last hidden state"):
        base_model.check_base(model)


def test_an_unknown_scaling_is_refused() -> None:
    model = _model("granite")
    model.config.logits_scaling = 1.0  # the adapter now believes that nothing follows the LM head
    model.forward = _times(model.forward, 1 / 8)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="computes its logits from something other"):
        base_model.check_base(model)


def _times(forward: Any, factor: float) -> Any:
    def scaled(*args: Any, **options: Any) -> Any:
        output = forward(*args, **options)
        output.logits = output.logits * factor
        return output

    return scaled


# ---------------------------------------------------------------- loading


def test_load_base_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder; give a local folder, a hub id"):
        base_model.load_base(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"--base .*: no config\.json in this folder: give the folder of a model"):
        base_model.load_base(str(tmp_path))
    with pytest.raises(ValueError, match="--dtype 'int8' is not one of float32, bfloat16, float16"):
        base_model.parse_dtype("int8")


def test_a_hub_id_that_is_not_in_the_cache_is_one_line_with_the_ways_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for load in (base_model.load_base, base_model.load_tokenizer):
        with pytest.raises(
            ValueError, match=r"^--base 'some/base'.*HF_HUB_OFFLINE .*: run `hf download some/base`.*or give a local folder$"
        ):
            load("some/base")
        with pytest.raises(ValueError) as caught:
            load(str(tmp_path))
        assert "hf download" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_truncated_weight_file_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model, _ = base_model.load_base(str(tmp_path), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not any(p.requires_grad for p in model.parameters())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged or truncated"):
        base_model.load_base(str(tmp_path))


@pytest.mark.compat
@pytest.mark.parametrize("absent", ["model.layers.1.", "lm_head."])
def test_files_without_some_weights_are_refused(tmp_path: Path, absent: str) -> None:
    """transformers would fill them with random numbers."""
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if not name.startswith(absent)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"its files hold no {absent.replace('.', '[.]')}\S+.*: give a whole causal language model"):
        base_model.load_base(str(tmp_path))


@pytest.mark.parametrize(("name", "content"), [("pytorch_model.bin", "version https://git-lfs"), ("model.safetensors.index.json", "{}")])
def test_files_of_another_kind_are_one_line(tmp_path: Path, name: str, content: str) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r"--base .*copy or download them again"):
        base_model.load_base(str(tmp_path))


def test_long_rope_of_one_type_of_layers_ends_the_context() -> None:
    model = tiny_model("llama")
    model.config.rope_parameters = {
        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 20},
        "sliding_attention": {"rope_type": "default"},
    }
    assert base_model.max_length(model) == 20


def test_generate_takes_settings_that_name_what_the_call_decides() -> None:
    model, ids = tiny_model("llama"), torch.tensor([[3, 4, 5]])
    settings = GenerationConfig(max_new_tokens=3, eos_token_id=7, pad_token_id=1)
    options: dict[str, Any] = dict(max_new_tokens=6, eos_ids=(), pad_id=0, on_token=lambda: None)
    found = base_model.generate_plainly(model, ids, torch.ones_like(ids), **options, generation_config=settings)
    assert torch.equal(found, base_model.generate_plainly(model, ids, torch.ones_like(ids), **options)) and found.shape == (1, 9)
