"""Tiny random bases of five architectures, with random heads, in folders: what the proofs at full size run on besides the real model.

python -m tests.save_tiny_models outputs/tiny
python scripts/prove_exactness.py --base outputs/tiny/gemma3/base --heads outputs/tiny/gemma3/heads --prompts FILES --output outputs/gemma3
"""

from __future__ import annotations

import sys
from pathlib import Path

from medusa_heads.checkpoint import save_heads
from tests.random_heads import random_heads, static_nodes
from tests.tiny_models import tiny_model, tiny_tokenizer

FAMILIES = ("llama", "mistral_window", "gemma2", "gemma3", "phi3")
CONTEXT = 8192  # so that benchmark prompts fit: the tokenizer knows few long pieces


def save_tiny_model(family: str, folder: Path, *, context: int | None = None) -> dict[str, str]:
    """Writes folder/base and folder/heads; returns their places as the options of a proof."""
    model = tiny_model(family)
    if context is not None:
        model.config.max_position_embeddings = context  # rotary positions have no table that ends
    model.save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    save_heads(random_heads(model), folder / "heads", card="random", measured={"static_nodes": static_nodes(), "acceptance_length": {}})
    return {"base": str(folder / "base"), "heads": str(folder / "heads")}


if __name__ == "__main__":
    for name in FAMILIES:
        print(save_tiny_model(name, Path(sys.argv[1]) / name, context=CONTEXT))
