"""A base model with grouped key-value heads -> the same model, sharing every weight, that attends without repeating them.

Under a mask, transformers repeats keys and values for every query head before sdpa: for a tree that
is a copy of the whole cache, layer by layer, at every step. Here the query heads of one group become
query rows of their key-value head. Registered through transformers' public AttentionInterface.
"""

# B batch, Q query heads, H key-value heads, G query heads per group, N query tokens, S keys, C head width

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from medusa_heads import base_model

MAX_QUERIES = 128  # beyond, repeating the mask costs more than repeating keys and values


def with_tree_attention(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares weights with `model` and leaves it as it is; `model` itself where it does not use
    sdpa, has no grouped heads, or caps its scores."""
    config = base_model.text_config(model)
    num_heads = getattr(config, "num_attention_heads", None) or 1
    grouped = (getattr(config, "num_key_value_heads", None) or num_heads) < num_heads
    if model.config._attn_implementation != "sdpa" or not grouped or getattr(config, "attn_logit_softcapping", None):
        return model
    AttentionInterface.register(base_model.TREE_ATTENTION, attend)
    AttentionMaskInterface.register(base_model.TREE_ATTENTION, AttentionMaskInterface()["sdpa"])
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, memo=shared)
    copied.set_attn_implementation(base_model.TREE_ATTENTION)
    return copied


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """query [B, Q, N, C], key and value [B, H, S, C], additive mask [B, 1, N, S] -> [B, N, Q, C]."""
    batch, num_queries, length, width = query.shape
    plain = all(options.get(name) is None for name in ("position_bias", "softcap", "s_aux"))
    if attention_mask is None or attention_mask.shape[1] != 1 or length > MAX_QUERIES or not plain:
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **options)
    group = num_queries // key.shape[1]
    output = F.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], group * length, width),
        key,
        value,
        attn_mask=_for_groups(attention_mask, group),
        scale=options.get("scaling"),
    )
    return output.reshape(batch, num_queries, length, value.shape[3]).transpose(1, 2).contiguous(), None


def _for_groups(mask_B1NS: Tensor, group: int) -> Tensor:
    """The mask of every query of a group, [B, 1, G * N, S]. Kept on the given one, which all layers of a forward share."""
    if mask_B1NS.shape[2] == 1:
        return mask_B1NS.expand(-1, -1, group, -1)
    kept: Tensor | None = getattr(mask_B1NS, "for_groups", None)
    if kept is None or kept.shape[2] != group * mask_B1NS.shape[2]:  # layers may differ in their number of heads
        kept = mask_B1NS.for_groups = mask_B1NS.repeat(1, 1, group, 1)  # type: ignore[attr-defined]
    return kept
