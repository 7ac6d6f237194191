"""A model -> its parts, their sizes and weights."""

# D hidden, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa_heads.quantization import quantization_of


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores for each token: heads x key_dim and heads x value_dim."""

    num_heads: int
    key_dim: int
    value_dim: int


def text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config()


def name_or_path(model: PreTrainedModel) -> str:
    """The hub id or folder the model was loaded from, or an empty string."""
    return str(getattr(model, "name_or_path", "") or "")


def decoder(model: PreTrainedModel) -> nn.Module:
    """The model without its LM head."""
    return model.get_decoder()


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer layers, in order: the longest module list of the decoder."""
    return max((list(m) for m in decoder(model).modules() if isinstance(m, nn.ModuleList)), key=len)


def lm_head(model: PreTrainedModel) -> nn.Module:
    """The output embedding module, [D] -> [V]."""
    return model.get_output_embeddings()  # type: ignore[return-value]


def lm_head_parameters(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """The weight [V, D] and bias [V] or None of the output embedding."""
    module = lm_head(model)
    return module.weight, getattr(module, "bias", None)  # type: ignore[return-value]


def hidden_size(model: PreTrainedModel) -> int:
    """D, the width of the last hidden state (the input of lm_head)."""
    return lm_head(model).in_features  # type: ignore[return-value]


def vocab_size(model: PreTrainedModel) -> int:
    """V, the number of logits."""
    return lm_head(model).out_features  # type: ignore[return-value]


def max_length(model: PreTrainedModel) -> int:
    """The longest sequence the model's positions allow, in tokens.

    For LongRoPE, where it changes its frequencies: beyond, the longest row of a forward decides how every
    row's positions are rotated, so that chunks, batches and trees would differ from plain decoding.
    """
    config = text_config(model)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    limit = next((int(value) for name in names if (value := getattr(config, name, None))), 1 << 30)
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = (rope, *(part for part in rope.values() if isinstance(part, dict)))  # one for all layers, or one for each of their types
    return min(limit, *(int(r["original_max_position_embeddings"]) for r in ropes if r.get("rope_type") == "longrope"), 1 << 30)


def sliding_windows(model: PreTrainedModel) -> tuple[dict[str, int | None], bool]:
    """The attention windows of the layers.

    Returns ({layer type: window in tokens or None for full attention}, whether forward wants one
    mask per layer type).
    """
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    types = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if not types:
        return {"sliding_attention": window} if window else {"full_attention": None}, False
    windows = {t: (window if t == "sliding_attention" else None) for t in types}
    return windows, len(types) > 1


def weight_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Named weights of the base, tied ones once, and what unpacks packed ones; an adapter in it, which trains, is none of them."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    if quantization_of(model.config):
        known = {id(weight) for weight in weights.values()}
        weights |= {name: value for name, value in model.state_dict(keep_vars=True).items() if id(value) not in known}
    return {name: weight for name, weight in weights.items() if ".lora_" not in name}
