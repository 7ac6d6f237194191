"""The cost twin and heads for it, as folders.

python scripts/make_cost_twin.py --heads-output outputs/twin_heads    # then: bench --base twin --heads outputs/twin_heads
python scripts/make_cost_twin.py --output outputs/twin                # 14.8 GB, for other engines: --base twin needs no files
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro

from infer.loading import pick_device
from medusa_heads import base_model
from medusa_heads.checkpoint import load_heads, path_name, save_heads
from medusa_heads.cost_twin import load_twin, widen_heads
from medusa_heads.model_card import model_card
from medusa_heads.replacing import refuse_occupied, replacing_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeCostTwin:
    """Write the embedded model, its heads, or both, at the cost of a 7B model."""

    output: Path | None = None
    """Folder for the model (bfloat16) and its tokenizer; it must be empty or absent."""
    heads: str = "pretrained"
    """Heads of the embedded model to widen."""
    heads_output: Path | None = None
    """Folder for the widened heads (bfloat16); it must be empty or absent."""
    device: str = "auto"
    """Where the twin is built: auto is a GPU where there is one."""

    def run(self) -> None:
        if self.output == self.heads_output:
            raise ValueError("give --output, --heads-output or both, each a folder of its own")
        for option, written in (("--output", self.output), ("--heads-output", self.heads_output)):
            if written is not None:
                refuse_occupied(written, option)
        device = pick_device(self.device)
        twin, tokenizer = load_twin(device=device)
        if self.output is not None:
            with replacing_folder(self.output) as folder:
                twin.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
            print(f"model written to {self.output}")
        if self.heads_output is not None:
            source, _ = base_model.load_base("embedded", dtype=torch.float32, device=device)
            checkpoint = load_heads(self.heads, source, dtype=torch.bfloat16)
            heads = widen_heads(checkpoint.heads, twin)
            heads.config = replace(heads.config, base_model="twin")
            card = model_card(heads.config, base_license="apache-2.0", data={}, recipe={"widened_from": self.heads}, measured={})
            nodes = {path_name(path): share for path, share in checkpoint.static_nodes.items()}
            measured = {"static_nodes": nodes, "acceptance_length": checkpoint.acceptance}
            save_heads(heads, self.heads_output, card=card, measured=measured, draft_vocabulary=checkpoint.draft_vocabulary)
            print(f"heads written to {self.heads_output}")


if __name__ == "__main__":
    try:
        tyro.cli(MakeCostTwin).run()
    except ValueError as error:
        sys.exit(f"error: {error}")
