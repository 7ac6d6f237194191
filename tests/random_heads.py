"""Random draft heads for a tiny model: nothing is zero, so that every tensor shows in the logits."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import MedusaHeads, create_heads


def random_heads(
    model: PreTrainedModel, *, num_heads: int = 3, num_layers: int = 1, own_lm_head: bool = False, seed: int = 0
) -> MedusaHeads:
    """Frozen float32 heads for `model`; head and layer all differ."""
    config = HeadsConfig(num_heads=num_heads, num_layers=num_layers, own_lm_head=own_lm_head, base_model="tiny")
    heads = create_heads(config, model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return heads.eval().requires_grad_(False)
