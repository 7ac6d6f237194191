"""Heads -> Medusa v2: config.json and medusa_lm_head.safetensors, blocks only; the base's lm_head serves every head."""

# R rows (positions in the text), K heads, D hidden, V vocabulary

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from medusa_heads import base_model
from medusa_heads.formats import Probe
from medusa_heads.formats.medusa_v1 import block_notes, block_tensors, config_json, residual_block
from medusa_heads.heads import MedusaHeads

WEIGHTS = "medusa_lm_head.safetensors"
FILES: tuple[str, ...] = ("config.json", WEIGHTS)
APPLIES_LOGIT_SCALE = False


def refusal(heads: MedusaHeads, model: PreTrainedModel) -> str | None:
    if heads.lm_head is not None:
        return "these heads have an lm_head of their own, and the format has room for blocks only: use --to medusa-v1 or --to vllm"
    return None


def notes(heads: MedusaHeads, model: PreTrainedModel) -> list[str]:
    """What holds for these heads in the engines that read this format."""
    return block_notes(heads)


def export_heads(heads: MedusaHeads, model: PreTrainedModel, folder: Path, *, dtype: torch.dtype) -> None:
    """Writes FILES into `folder`."""
    save_file(block_tensors(heads, dtype=dtype), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json(heads, model) | {"version": "2"}, indent=2) + "\n")


def read_probe(folder: Path, base: PreTrainedModel) -> Probe:
    """The logits of the files through the LM head of `base`, held in the type of the files as the engine holds it."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / WEIGHTS)
    weight_VD, bias_V = base_model.lm_head_parameters(base)
    dtype = tensors["0.0.linear.weight"].dtype
    matrix_VD = weight_VD.to(dtype).float().cpu()
    offset_V = None if bias_V is None else bias_V.to(dtype).float().cpu()

    def one_head(head: int, x_RD: Tensor) -> Tensor:
        for layer in range(config["medusa_num_layers"]):
            x_RD = residual_block(x_RD, tensors[f"{head}.{layer}.linear.weight"], tensors[f"{head}.{layer}.linear.bias"])
        return F.linear(x_RD, matrix_VD, offset_V)

    return lambda hidden_RD: torch.stack([one_head(head, hidden_RD) for head in range(config["medusa_num_heads"])], dim=1)
