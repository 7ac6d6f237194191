"""A base model -> the shapes of its cache, after a probe that a tree forward equals plain ones."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from infer.kv_cache import KVCache
from infer.tree import build_tree
from infer.tree_forward import forward_over_cache, prefill
from medusa_heads import base_model
from medusa_heads.base_model import LayerShape

PROBE_TREE = build_tree([[0], [1], [0, 0], [1, 0]])


@torch.inference_mode()
def check_tree_support(model: PreTrainedModel) -> list[LayerShape]:
    """The shape of every cache layer. Raises ValueError when the model's hidden states over a small
    tree differ from those of plain forwards over its paths: then its attention does not honour the
    tree mask or the positions (ALiBi biases, recurrent state, block-sparse attention)."""
    shapes = base_model.cache_layer_shapes(model)
    vocab = base_model.vocab_size(model)
    prompt = [(7 * i + 3) % vocab for i in range(6)]
    nodes = [(11 * i + 5) % vocab for i in range(PROBE_TREE.num_nodes + 1)]
    device = model.device
    cache = KVCache(shapes, 1, 16, dtype=model.dtype, device=device)
    prefill(model, [prompt], cache)
    tree = forward_over_cache(
        model, torch.tensor([nodes], device=device), PROBE_TREE.depths_N[None].to(device), PROBE_TREE.ancestors_NN[None].to(device), cache
    )[0]
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    for leaf in (3, 4):
        path = [n for n in range(len(nodes)) if PROBE_TREE.ancestors_NN[leaf, n]]
        plain = base_model.forward_hidden(model, torch.tensor([prompt + [nodes[n] for n in path]], device=device))[0, -len(path) :]
        error = (tree[path] - plain).abs().max() / plain.abs().max()
        if not error <= tolerance:
            raise ValueError(
                f"{model.config.model_type} gives other hidden states over a tree of candidates than over its paths "
                f"(relative error {float(error):.1e}): its attention does not honour a "
                "tree mask with positions, so it cannot be verified in one forward"
            )
    return shapes
