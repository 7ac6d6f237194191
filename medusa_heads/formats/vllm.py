"""Heads -> vLLM's `medusa` drafter: config.json and model.safetensors.

Names that vLLM does not know are skipped there without a word and its drafts are then never accepted,
so both files are checked by a reader that loads as vLLM does.
"""

# R rows (positions in the text), K heads, D hidden, V vocabulary

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa_heads import base_model
from medusa_heads.formats import Probe
from medusa_heads.heads import MedusaHeads

WEIGHTS = "model.safetensors"
FILES: tuple[str, ...] = ("config.json", WEIGHTS)
APPLIES_LOGIT_SCALE = True


def refusal(heads: MedusaHeads, model: PreTrainedModel) -> str | None:
    if heads.lm_head is None and base_model.lm_head_parameters(model)[1] is not None:
        return "the base model's lm_head has a bias, and vLLM's draft lm_head has none"
    return None


def notes(heads: MedusaHeads, model: PreTrainedModel) -> list[str]:
    """How to serve the folder."""
    return [f'serve with --speculative-config \'{{"method": "medusa", "model": DIR, "num_speculative_tokens": {heads.config.num_heads}}}\'']


def export_heads(heads: MedusaHeads, model: PreTrainedModel, folder: Path, *, dtype: torch.dtype) -> None:
    """Writes FILES into `folder`. A shared lm_head is stored once, as `lm_heads.0.weight`."""
    config, shared = heads.config, heads.lm_head is None
    tensors = {}
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = heads.weight[layer, head]
            tensors[f"blocks.{head}.layers.{layer}.bias"] = heads.bias[layer, head]
    if heads.lm_head is None:
        tensors["lm_heads.0.weight"] = base_model.lm_head_parameters(model)[0]
    else:
        tensors |= {f"lm_heads.{head}.weight": heads.lm_head[head] for head in range(config.num_heads)}
    own = {name: tensor.detach().to(dtype).cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(own, folder / WEIGHTS, metadata={"format": "pt"})
    values = {
        # Any further key with "num" and "heads" in its name would overwrite num_heads there.
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": shared,
        "logit_scale": base_model.logit_scale_and_cap(model)[0] if shared else 1.0,
        "max_position_embeddings": base_model.max_length(model),
    }
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


class _Stack(nn.Module):
    """One head of vLLM's drafter: linear layers with a residual around each."""

    def __init__(self, hidden_size: int, num_layers: int, *, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(num_layers))

    def forward(self, x_RD: Tensor) -> Tensor:
        for layer in self.layers:
            x_RD = x_RD + nn.functional.silu(layer(x_RD))
        return x_RD


class _Drafter(nn.Module):
    """The parameters vLLM makes from config.json; names that match none of them are skipped, as there."""

    def __init__(self, config: dict[str, object]) -> None:
        super().__init__()
        hidden_size, vocab_size, num_heads = (int(str(config[key])) for key in ("hidden_size", "truncated_vocab_size", "num_heads"))
        bias = bool(config.get("medusa_fc_bias", False))
        self.num_heads = num_heads
        self.blocks = nn.ModuleList(_Stack(hidden_size, int(str(config["num_hidden_layers"])), bias=bias) for _ in range(num_heads))
        num_matrices = 1 if config.get("original_lm_head", False) else num_heads
        self.lm_heads = nn.ModuleList(nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(num_matrices))
        self.scale = float(str(config.get("logit_scale", 1.0)))

    def forward(self, hidden_RD: Tensor) -> Tensor:
        logits = [self.lm_heads[i % len(self.lm_heads)](block(hidden_RD)) for i, block in enumerate(self.blocks)]
        return torch.stack(logits, dim=1) * self.scale


def _config_as_read(values: dict[str, object]) -> dict[str, object]:
    """vLLM renames every key that holds `num` and `heads`, or `num` and `layers`; the last one wins."""
    for key in list(values):
        if "num" in key and "heads" in key:
            values["num_heads"] = values.pop(key)
        elif "num" in key and "layers" in key:
            values["num_hidden_layers"] = values.pop(key)
    return values


@torch.no_grad()
def read_probe(folder: Path, base: PreTrainedModel) -> Probe:
    """The logits of the files; nothing is read from `base`. Weights no tensor fills stay NaN and so show."""
    drafter = _Drafter(_config_as_read(json.loads((folder / "config.json").read_text())))
    for parameter in drafter.parameters():
        parameter.fill_(float("nan"))
    parameters = dict(drafter.named_parameters())
    for name, tensor in load_file(folder / WEIGHTS).items():
        if name in parameters:
            parameters[name].copy_(tensor)
    return drafter.requires_grad_(False)
