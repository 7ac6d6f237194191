"""The options of a proof -> its prompts, the models in full float32, and what its result depends on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from infer.loading import default_heads, pick_device
from infer.made_with import made_with
from infer.prompts import Prompt, load_prompts
from medusa_heads import base_model
from medusa_heads.checkpoint import HeadsCheckpoint, in_dtype, load_heads, resolve_heads
from medusa_heads.versions import commit, versions


def prompts_in_turn(paths: Sequence[Path], num_prompts: int) -> list[Prompt]:
    """The first `num_prompts`, one of each file in turn. Raises ValueError when there are too few."""
    files = [load_prompts(path) for path in paths]
    rows = [prompt for prompt in chain(*zip_longest(*files)) if prompt is not None]
    if not 1 <= num_prompts <= len(rows):
        raise ValueError(f"--num-prompts {num_prompts}, but --prompts hold {len(rows)}: ask for fewer or give more files")
    return rows[:num_prompts]


def load_in_float32(base: str, heads: str | None, device: str) -> tuple[PreTrainedModel, Any, HeadsCheckpoint]:
    """Base, tokenizer and heads. Products are in float32 whatever the environment asks for (TF32 keeps 10 bits)."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    model, tokenizer = base_model.load_base(base, dtype=torch.float32, device=pick_device(device))
    return model, tokenizer, in_dtype(load_heads(default_heads(base, heads), model), torch.float32)


def settings_of(options: dict[str, Any]) -> dict[str, Any]:
    """Options, code, and what files hold: prompts, heads, trees, a local base."""
    heads = resolve_heads(default_heads(options["base"], options["heads"])) / "model.safetensors"
    trees = [Path(tree) for tree in options.get("trees", ()) if tree.endswith(".json")]
    files = {str(path): path for path in (*options["prompts"], heads, *trees) if path.is_file()}
    return made_with(options | {"dtype": "float32", "versions": versions(), "commit": commit()}, files)
