"""Foreign formats of draft heads: one file each, ours -> their files, and their files -> logits."""

# R rows (positions in the text), K heads, D hidden, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from medusa_heads.heads import MedusaHeads

Probe = Callable[[Tensor], Tensor]
"""Hidden states [R, D] -> logits [R, K, V], float32, as the engine computes them."""


class Format(Protocol):
    """What each format file offers.

    FILES: names it writes. APPLIES_LOGIT_SCALE: its engine multiplies draft logits by the base model's factor.
    `refusal`: why these heads cannot be written, or None. `notes`: what the user should know.
    `export_heads`: writes FILES into a folder. `read_probe`: the logits that the engine makes of them,
    computed from the files (and the base's LM head where the format leaves it there) and never from our heads.
    """

    FILES: tuple[str, ...]
    APPLIES_LOGIT_SCALE: bool

    def refusal(self, heads: MedusaHeads, model: PreTrainedModel) -> str | None: ...

    def notes(self, heads: MedusaHeads, model: PreTrainedModel) -> list[str]: ...

    def export_heads(self, heads: MedusaHeads, model: PreTrainedModel, folder: Path, *, dtype: torch.dtype) -> None: ...

    def read_probe(self, folder: Path, base: PreTrainedModel) -> Probe: ...
