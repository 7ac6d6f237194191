"""Token ids -> hidden states -> logits, and the masks and caches on the way."""

# B batch, T sequence, S key length, D hidden, V vocabulary

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer

from medusa_heads.base_model.parts import LayerShape, decoder, lm_head, lm_head_parameters, sliding_windows, text_config

AttentionMask = Tensor | dict[str, Tensor]


def forward_hidden(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    attention_mask: AttentionMask | None = None,
    position_ids: Tensor | None = None,
    cache: Cache | None = None,
) -> Tensor:
    """One forward of the base without its LM head.

    input_ids: [B, T]; attention_mask: None (causal), or additive [B, 1, T, S], or one such mask per
    layer type (see `additive_masks`); position_ids: [B, T].
    Returns the last hidden state after the final norm, [B, T, D].
    """
    keywords: dict[str, Any] = {"use_cache": cache is not None}
    if cache is not None:
        keywords[cache_keyword(model)] = cache
    if attention_mask is not None:
        keywords["attention_mask"] = attention_mask
    if position_ids is not None:
        keywords["position_ids"] = position_ids
    return decoder(model)(input_ids=input_ids, **keywords).last_hidden_state


def cache_keyword(model: PreTrainedModel) -> str:
    """`cache` from transformers 5.24, `past_key_values` before; read from the signature."""
    return "cache" if "cache" in inspect.signature(decoder(model).forward).parameters else "past_key_values"


def compute_logits(model: PreTrainedModel, hidden_states: Tensor) -> Tensor:
    """Last hidden states [..., D] -> the model's logits [..., V], every scaling included."""
    return logit_transform(model)(lm_head(model)(hidden_states))


def float32_logits(model: PreTrainedModel, hidden_states: Tensor) -> Tensor:
    """Like `compute_logits`, the LM head in float32 whatever the model's dtype: [..., D] -> [..., V]."""
    weight, bias = lm_head_parameters(model)
    logits = nn.functional.linear(hidden_states.float(), weight.float(), None if bias is None else bias.float())
    return logit_transform(model)(logits)


def logit_transform(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """What the model does to its logits after the LM head: the identity for most.

    Multiplied by `logit_scale` (Cohere), divided by `logits_scaling` (Granite), or
    cap * tanh(logits / cap) with cap = `final_logit_softcapping` (Gemma).
    """
    config = text_config(model)
    scale = getattr(config, "logit_scale", None)
    division = getattr(config, "logits_scaling", None)
    cap = getattr(config, "final_logit_softcapping", None)

    def transform(logits: Tensor) -> Tensor:
        if scale is not None:
            logits = logits * scale
        if division is not None:
            logits = logits / division
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    return transform


def logit_scale_and_cap(model: PreTrainedModel) -> tuple[float, float | None]:
    """What `logit_transform` does, as numbers: (factor on the logits, soft cap or None)."""
    config = text_config(model)
    scale = getattr(config, "logit_scale", None)
    division = getattr(config, "logits_scaling", None)
    cap = getattr(config, "final_logit_softcapping", None)
    return (1.0 if scale is None else float(scale)) / (1.0 if division is None else float(division)), cap


def additive_masks(model: PreTrainedModel, allowed_BTS: Tensor, query_positions_BT: Tensor, key_positions_BS: Tensor) -> AttentionMask:
    """Boolean attention -> the additive mask(s) the model's forward takes.

    allowed_BTS: True where query t may see key s, windows aside; positions are token positions in
    the text, from which sliding windows are cut (a key is visible while query - key < window).
    Additive in the model's dtype because eager attention silently adds a boolean mask as 0 / 1.
    """
    windows, per_type = sliding_windows(model)
    dtype = model.dtype

    def additive(window: int | None) -> Tensor:
        visible = allowed_BTS
        if window is not None:
            visible = visible & (query_positions_BT[:, :, None] - key_positions_BS[:, None, :] < window)
        zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return zeros.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]

    masks = {layer_type: additive(window) for layer_type, window in windows.items()}
    return masks if per_type else next(iter(masks.values()))


@torch.no_grad()
def cache_layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """The key-value shape of every layer, read from the cache of a one-token forward.

    Raises ValueError when a layer stores something other than keys and values of its own.
    """
    cache = DynamicCache()
    forward_hidden(model, torch.ones(1, 1, dtype=torch.long, device=model.device), cache=cache)
    shapes = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4 or keys.shape[2] != 1:
            raise ValueError(
                f"layer {index} of {model.config.model_type} keeps no plain keys and values in its cache: "
                "its state cannot branch over a tree of candidates"
            )
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3]))
    return shapes


def static_cache(model: PreTrainedModel, capacity: int) -> Cache:
    """A cache of `capacity` tokens in every layer, at addresses that never move: what torch.compile
    and CUDA graphs need. Layers are full ones; sliding windows are cut by the mask."""
    return Cache(layers=[StaticLayer(max_cache_len=capacity) for _ in cache_layer_shapes(model)])


def synchronize(model: PreTrainedModel) -> None:
    """Waits until the model's device has finished what it was given; for timing."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
