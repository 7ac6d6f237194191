"""Heads -> Medusa v1: config.json and medusa_lm_head.pt, one full output matrix per head.

Head i is blocks `{i}.{l}.linear` followed by the matrix `{i}.{num_layers}.weight` [V, D].
"""

# R rows (positions in the text), K heads, L layers, D hidden, V vocabulary

from __future__ import annotations

import io
import json
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from medusa_heads import base_model
from medusa_heads.formats import Probe
from medusa_heads.heads import MedusaHeads

WEIGHTS = "medusa_lm_head.pt"
FILES: tuple[str, ...] = ("config.json", WEIGHTS)
APPLIES_LOGIT_SCALE = False


def refusal(heads: MedusaHeads, model: PreTrainedModel) -> str | None:
    if heads.lm_head is None and base_model.lm_head_parameters(model)[1] is not None:
        return "the base model's lm_head has a bias, and the format's per-head output matrices have none"
    return None


def notes(heads: MedusaHeads, model: PreTrainedModel) -> list[str]:
    """What holds for these heads in the engines that read this format."""
    return block_notes(heads)


def block_notes(heads: MedusaHeads) -> list[str]:
    if heads.config.num_layers == 1:
        return []
    return [
        f"the original Medusa code shares one block among the {heads.config.num_layers} layers of a head and so keeps only the last; "
        "TensorRT-LLM and text-generation-inference keep them apart: use those, or train with num_layers 1"
    ]


def block_tensors(heads: MedusaHeads, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """`{i}.{l}.linear.weight` [D, D] and `.bias` [D] of every head and layer, with storage of their own."""
    tensors = {}
    for layer in range(heads.config.num_layers):
        for head in range(heads.config.num_heads):
            for name, stacked in (("weight", heads.weight), ("bias", heads.bias)):
                tensors[f"{head}.{layer}.linear.{name}"] = stacked[layer, head].detach().to(dtype).cpu().clone()
    return tensors


def config_json(heads: MedusaHeads, model: PreTrainedModel) -> dict[str, object]:
    """The counts as stored, and where the base comes from. No model_type and no architectures: some
    engines take their presence for a complete model."""
    return {
        "base_model_name_or_path": base_model.name_or_path(model) or heads.config.base_model,
        "medusa_num_heads": heads.config.num_heads,
        "medusa_num_layers": heads.config.num_layers,
    }


def export_heads(heads: MedusaHeads, model: PreTrainedModel, folder: Path, *, dtype: torch.dtype) -> None:
    """Writes FILES into `folder`; heads that share the base model's lm_head get a copy of it each."""
    tensors = block_tensors(heads, dtype=dtype)
    shared_VD = base_model.lm_head_parameters(model)[0]
    for head in range(heads.config.num_heads):
        matrix_VD = shared_VD if heads.lm_head is None else heads.lm_head[head]
        tensors[f"{head}.{heads.config.num_layers}.weight"] = matrix_VD.detach().to(dtype).cpu().clone()
    content = io.BytesIO()  # on a full disk torch.save raises no OSError
    torch.save(tensors, content)
    (folder / WEIGHTS).write_bytes(content.getbuffer())
    (folder / "config.json").write_text(json.dumps(config_json(heads, model), indent=2) + "\n")


def read_probe(folder: Path, base: PreTrainedModel) -> Probe:
    """The logits of the files, head by head and block by block; nothing is read from `base`."""
    config = json.loads((folder / "config.json").read_text())
    tensors = torch.load(folder / WEIGHTS, weights_only=True, map_location="cpu")
    num_layers = config["medusa_num_layers"]

    def one_head(head: int, x_RD: Tensor) -> Tensor:
        for layer in range(num_layers):
            x_RD = residual_block(x_RD, tensors[f"{head}.{layer}.linear.weight"], tensors[f"{head}.{layer}.linear.bias"])
        return x_RD @ tensors[f"{head}.{num_layers}.weight"].float().T

    return lambda hidden_RD: torch.stack([one_head(head, hidden_RD) for head in range(config["medusa_num_heads"])], dim=1)


def residual_block(x_RD: Tensor, weight_DD: Tensor, bias_D: Tensor) -> Tensor:
    """x + SiLU(linear(x)), the block of both Medusa versions."""
    return x_RD + F.silu(F.linear(x_RD, weight_DD.float(), bias_D.float()))
