"""Which models can carry draft heads and verify a tree; all others are refused with the reason."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from medusa_heads.base_model.forward import cache_keyword, compute_logits, forward_hidden
from medusa_heads.base_model.parts import decoder, lm_head, vocab_size
from medusa_heads.quantization import quantization_of

TREE_ATTENTION = "grouped_tree"  # the name of infer/engine/tree_attention.py among transformers' attention functions


def check_config(config: Any) -> None:
    """Raises ValueError with the reason when a model of this config cannot carry draft heads."""
    name = getattr(config, "model_type", "this model")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; draft heads need a decoder-only causal language model")
    text = config.get_text_config()
    if "local" in (getattr(text, "attention_layers", None) or ()):
        raise ValueError(
            f"{name} cuts its local attention by places in the cache, not by positions: trees and batches would read other tokens"
        )
    if getattr(text, "keep_window_size", None):
        raise ValueError(
            f"{name} keeps those keys of its cache that score highest: what it sees of a text would depend on the tree beside it"
        )
    stateful = sorted({t for t in getattr(text, "layer_types", None) or () if t not in ("full_attention", "sliding_attention")})
    if stateful:
        raise ValueError(
            f"{name} has layers of type {', '.join(stateful)}: their state cannot branch over a tree of candidates, "
            "so several continuations cannot be verified in one forward; choose a model whose layers are all attention"
        )


def check_base(model: PreTrainedModel) -> None:
    """Raises ValueError with the reason when `model` cannot be used: flash attention, no LM head,
    logits that this adapter does not reproduce from the last hidden state."""
    check_config(model.config)
    name = model.config.model_type
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager", TREE_ATTENTION):
        raise ValueError(
            f"attention implementation {attention!r} cannot take the mask of a candidate tree; "
            "load the base model with attn_implementation='sdpa' (or 'eager')"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no output embeddings (lm_head): load it with AutoModelForCausalLM")
    _check_lm_head(model)
    forward = inspect.signature(decoder(model).forward).parameters
    if cache_keyword(model) not in forward or "position_ids" not in forward:
        raise ValueError(f"{name}'s forward takes no key-value cache and position_ids: its state cannot branch over a tree of candidates")
    probe = torch.tensor([[1, 2, 3, 5]], device=model.device) % vocab_size(model)
    with torch.no_grad():
        expected = model(input_ids=probe, use_cache=False).logits
        found = compute_logits(model, forward_hidden(model, probe))
    if not bool(expected.isfinite().all()):
        raise ValueError(
            f"{name} gives logits that are not finite: its weights are damaged, or overflow in {expected.dtype}: try another --dtype"
        )
    tolerance = 1e-4 if expected.dtype == torch.float32 else 0.05
    if found.shape != expected.shape or not torch.allclose(
        found.float(), expected.float(), rtol=tolerance, atol=tolerance * float(expected.abs().max())
    ):
        raise ValueError(
            f"{name} computes its logits from something other than its last hidden state and the scalings known here "
            "(final_logit_softcapping, logit_scale, logits_scaling): draft heads cannot share its lm_head"
        )


def _check_lm_head(model: PreTrainedModel) -> None:
    """Raises ValueError where the LM head, which heads share and losses read, is packed."""
    module = lm_head(model)
    weight = getattr(module, "weight", None)
    of_packed_kind = type(module).__module__.startswith("bitsandbytes")  # whatever its weight: one tied to the embedding is plain
    if of_packed_kind or weight is None or not weight.is_floating_point():
        raise ValueError(
            f"the LM head of this {model.config.model_type} is quantised ({quantization_of(model.config)}), and draft heads need its plain "
            "weight: quantise the model again without it, as transformers does unless told otherwise (llm_int8_skip_modules=['lm_head'])"
        )
