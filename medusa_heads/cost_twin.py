"""A small Llama -> the same function at the size of a large one: real text and acceptance at a large model's cost.

The residual stream of the source lives in the first D dimensions of the target's and the others stay zero;
every real unit keeps its inputs and outputs, dead units lead nowhere. All that may be anything is random,
so that no kernel meets convenient zeros. Heads are widened the same way.
"""

# d, D hidden of source and target; rows and columns of a weight are outputs and inputs

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from medusa_heads import base_model
from medusa_heads.fingerprint import fingerprint
from medusa_heads.heads import FAMILIES, MedusaHeads

NOISE_LENGTH = 1_000_003  # a prime, so that no two rows of a matrix are alike
NOISE_STD = 0.02
ROPE_TYPES = ("default", "linear", "llama3")  # those that look at each frequency alone


def twin_7b_config() -> LlamaConfig:
    """The sizes of Llama 3 8B; the vocabulary comes from the source (7.4 billion weights with SmolLM2's)."""
    return LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=14336
    )


def load_twin(*, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> tuple[PreTrainedModel, Any]:
    """The embedded model at the cost of a 7B one (bfloat16 by default: 14.8 GB), frozen, and its tokenizer.

    Built layer by layer on `device`, in seconds on a GPU; the same weights on every device.
    """
    source, tokenizer = base_model.load_base("embedded", dtype=torch.float32, device=device)
    return widen(source, twin_7b_config(), dtype=dtype or torch.bfloat16), tokenizer


@torch.no_grad()
def widen(model: PreTrainedModel, target_config: LlamaConfig, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model with the sizes of `target_config` that computes the function of `model`, up to rounding.

    Vocabulary, RoPE, context, special tokens and activation are the source's; embeddings are untied. The
    result lies on the device of `model`, frozen, in `dtype` (None: the model's).
    Raises ValueError naming what does not fit.
    """
    config = twin_config(model.config, target_config)
    plan = _Plan(model.config, config, model.device)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config, dtype=dtype or model.dtype)
    source = model.state_dict()  # names tied weights twice
    noise = _Noise(model.device)
    weights = {name: torch.empty_like(weight, device=model.device) for name, weight in shapes.named_parameters()}
    for name, weight in weights.items():
        plan.fill(weight, name, source.get(name), noise)
    twin: PreTrainedModel = type(shapes).from_pretrained(  # takes the tensors as they are: no random start, no second copy
        None,
        config=config,
        state_dict=weights,
        dtype=dtype or model.dtype,
        attn_implementation=model.config._attn_implementation,
        device_map={"": model.device},
    )
    twin.name_or_path = twin.config._name_or_path = ""  # there are no files of it
    twin.generation_config = copy.deepcopy(model.generation_config)
    twin.eval().requires_grad_(False)
    base_model.check_base(twin)
    return twin


@torch.no_grad()
def widen_heads(heads: MedusaHeads, twin: PreTrainedModel) -> MedusaHeads:
    """Heads of the source -> heads of its twin that propose the same tokens, in the type of `heads`, frozen.

    Rows and biases beyond the source's are zero, so that draft states, like hidden states, are zero there.
    """
    source, width = heads.config.hidden_size, base_model.hidden_size(twin)
    config = replace(heads.config, hidden_size=width, base_model="", base_revision=None, base_fingerprint=fingerprint(twin))
    noise = _Noise(heads.weight.device)
    widened = FAMILIES[config.architecture](config).to(device=heads.weight.device, dtype=heads.weight.dtype)
    noise.fill(widened.weight[..., :source, source:])
    widened.weight[..., :source, :source] = heads.weight
    widened.bias[..., :source] = heads.bias
    if widened.lm_head is not None and heads.lm_head is not None:
        noise.fill(widened.lm_head)
        widened.lm_head[..., :source] = heads.lm_head
    return widened.requires_grad_(False)


def twin_config(source: Any, target: LlamaConfig) -> LlamaConfig:
    """The target's sizes with all else from the source. Raises ValueError naming what does not fit."""
    if source.model_type != "llama" or source.attention_bias or source.mlp_bias:
        raise ValueError(f"a {source.model_type} model cannot be widened: only a Llama without biases can")
    rope = source.rope_parameters.get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise ValueError(f"RoPE of type {rope!r} depends on the size of a head: only {', '.join(ROPE_TYPES)} can be widened")
    for name in ("hidden_size", "num_hidden_layers", "intermediate_size", "num_key_value_heads", "head_dim"):
        if getattr(target, name) < getattr(source, name):
            raise ValueError(f"{name}: the target's {getattr(target, name)} is below the source's {getattr(source, name)}")
    if _group(target) < _group(source):
        raise ValueError(f"query heads per key-value head: the target's {_group(target)} is below the source's {_group(source)}")
    if target.head_dim % source.head_dim:
        raise ValueError(f"head_dim: the target's {target.head_dim} is no multiple of the source's {source.head_dim}")
    config = copy.deepcopy(source)
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
        setattr(config, name, getattr(target, name))
    config.tie_word_embeddings = False
    config.rms_norm_eps = source.rms_norm_eps * source.hidden_size / config.hidden_size  # the mean square runs over more dimensions
    return LlamaConfig(**config.to_dict())


def _group(config: Any) -> int:
    return config.num_attention_heads // config.num_key_value_heads


class _Noise:
    """The same random numbers on every device, exact in bfloat16 and therefore in every type: one list, read round and round."""

    def __init__(self, device: torch.device) -> None:
        values = torch.randn(NOISE_LENGTH, generator=torch.Generator().manual_seed(0)) * NOISE_STD
        self.values, self.start = values.bfloat16().to(device), 0

    def fill(self, weight: Tensor) -> None:
        """Fills `weight`, going on in the list where the last call stopped."""
        count = weight.numel()
        repeated = self.values.roll(-self.start).repeat(-(-count // NOISE_LENGTH))[:count]
        weight.copy_(repeated.view(weight.shape))
        self.start = (self.start + count) % NOISE_LENGTH


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a source weight lies in the target's: rows, columns (None for a vector), its factor; what must be zero."""

    rows: Tensor
    columns: Tensor | None = None
    factor: float = 1.0
    zero: bool = False  # all but the source's own entries
    zero_rows: Tensor | None = None


class _Plan:
    """The place of every weight of a Llama, by the name of its module."""

    def __init__(self, source: Any, target: Any, device: torch.device) -> None:
        hidden = torch.arange(source.hidden_size, device=device)
        units = torch.arange(source.intermediate_size, device=device)
        tokens = torch.arange(source.vocab_size, device=device)
        ratio = target.head_dim // source.head_dim
        # Frequency i of n lies at i * ratio of n * ratio; both halves of a rotated pair move the same way.
        dims = torch.arange(source.head_dim, device=device) * ratio
        real = torch.arange(source.num_attention_heads, device=device)
        real_heads = real // _group(source) * _group(target) + real % _group(source)
        queries = (real_heads[:, None] * target.head_dim + dims).flatten()
        keys = (torch.arange(source.num_key_value_heads, device=device)[:, None] * target.head_dim + dims).flatten()
        of_real_heads = (real_heads[:, None] * target.head_dim + torch.arange(target.head_dim, device=device)).flatten()
        dead_queries = of_real_heads[~torch.isin(of_real_heads, queries)]
        norm = _Place(hidden, factor=math.sqrt(source.hidden_size / target.hidden_size))
        self.places = {
            "embed_tokens": _Place(tokens, hidden, zero=True),
            "lm_head": _Place(tokens, hidden),
            # scores are divided by the square root of the head's size; dead dimensions of a real head add nothing to them
            "q_proj": _Place(queries, hidden, factor=math.sqrt(ratio), zero_rows=dead_queries),
            "k_proj": _Place(keys, hidden),
            "v_proj": _Place(keys, hidden),
            "o_proj": _Place(hidden, queries, zero=True),
            "gate_proj": _Place(units, hidden),
            "up_proj": _Place(units, hidden),
            "down_proj": _Place(hidden, units, zero=True),
            "input_layernorm": norm,
            "post_attention_layernorm": norm,
            "norm": norm,
        }

    def fill(self, weight: Tensor, name: str, source: Tensor | None, noise: _Noise) -> None:
        """source: None for a weight of an added layer, which must leave the residual stream alone."""
        place = self.places[name.split(".")[-2]]
        if place.zero:
            weight.zero_()
        else:
            noise.fill(weight)
        if source is None:
            return
        if place.zero_rows is not None:
            weight[place.zero_rows] = 0
        scaled = (source.float() * place.factor).to(weight.dtype)
        if place.columns is None:
            weight[place.rows] = scaled
        else:
            weight[place.rows[:, None], place.columns] = scaled
