"""Random draft heads for a tiny model, and made-up nodes for their static trees."""

from __future__ import annotations

from itertools import product
from math import prod

import torch
from transformers import PreTrainedModel

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import MedusaHeads, create_heads


def random_heads(
    model: PreTrainedModel, *, num_heads: int = 3, num_layers: int = 1, own_lm_head: bool = False, seed: int = 0
) -> MedusaHeads:
    """Frozen float32 heads for `model`; head and layer all differ, and nothing is zero, so that every tensor shows in the logits."""
    config = HeadsConfig(num_heads=num_heads, num_layers=num_layers, own_lm_head=own_lm_head, base_model="tiny")
    heads = create_heads(config, model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return heads.eval().requires_grad_(False)


def static_nodes(num_heads: int = 3, num_ranks: int = 4) -> dict[str, float]:
    """As in trees/measured.json: every path of these ranks, as if rank r were right half as often as r - 1 at every depth."""
    paths = [path for depth in range(1, num_heads + 1) for path in product(range(num_ranks), repeat=depth)]
    shares = {path: prod(0.5 ** (rank + 1) for rank in path) for path in paths}
    ordered = sorted(paths, key=lambda path: (-shares[path], len(path), path))
    return {",".join(map(str, path)): shares[path] for path in ordered}
