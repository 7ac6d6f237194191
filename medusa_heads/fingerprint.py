"""A base model -> a SHA-256 that changes when the weights that heads depend on change."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from medusa_heads import base_model
from medusa_heads.quantization import quantization_of

CONFIG_FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "sliding_window",
)
NUM_SAMPLED_ROWS = 16


def _sampled_rows(weight: Tensor) -> Tensor:
    rows_ND = weight.detach().view(-1, weight.shape[-1]) if weight.dim() > 1 else weight.detach()
    indices = torch.linspace(0, len(rows_ND) - 1, NUM_SAMPLED_ROWS, dtype=torch.float64).round().long()
    return rows_ND[indices.to(weight.device)].to(torch.bfloat16).cpu()


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 over the config fields that matter and fixed sampled rows, cast to bfloat16, of every
    matrix: an adapter on any of them, merged, makes another base.

    The cast makes the digest the same whether the base is loaded in float32 or bfloat16. For a
    quantised base the method stands in for the packed matrices, which devices need not round alike, and the norms
    and biases are read. float16 rounds otherwise than bfloat16, so a base in float16 is read again from its files.
    """
    quantization = quantization_of(model.config)
    if model.dtype == torch.float16:
        model = base_model.stored_weights(model)
    config = base_model.text_config(model)
    fields = {name: getattr(config, name, None) for name in CONFIG_FIELDS} | {"quantization": quantization}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    weights: dict[str, Tensor] = {
        name: weight for name, weight in model.named_parameters() if weight.is_floating_point() and ".lora_" not in name
    }
    sampled = {name: weight for name, weight in weights.items() if (weight.dim() == 1) == bool(quantization)}
    sampled["lm_head"] = base_model.lm_head_parameters(model)[0]
    for name in sorted(sampled):
        digest.update(name.encode())
        digest.update(_sampled_rows(sampled[name]).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def weights_digest(model: PreTrainedModel) -> int:
    """A 64-bit checksum of every bit of every base weight: equal before and after training.

    Position-weighted integer sums, so it runs where the weights live and costs one pass over them. Of a sharded base: of the
    share that this process holds.
    """
    total = 0
    for index, (_, weight) in enumerate(sorted(base_model.weight_tensors(model).items())):
        share = weight.to_local() if isinstance(weight, DTensor) else getattr(weight, "ds_tensor", weight)  # FSDP2, ZeRO-3
        flat = share.detach().contiguous().view(-1).view(torch.uint8)
        if flat.storage_offset() % 4:  # shards that lie one behind the other
            flat = flat.clone()
        words = flat[: flat.numel() // 4 * 4].view(torch.int32)
        for start in range(0, words.numel(), 1 << 24):
            chunk = words[start : start + (1 << 24)].long()
            positions = torch.arange(start + 1, start + 1 + chunk.numel(), device=chunk.device)
            total = (total * 1_000_003 + int((chunk * positions).sum()) + index) % (1 << 64)
        total = (total * 1_000_003 + int(flat[flat.numel() // 4 * 4 :].long().sum())) % (1 << 64)
    return total
