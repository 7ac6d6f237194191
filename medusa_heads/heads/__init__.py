"""Draft-head families: what each must offer, and the registry by name.

A family is an `nn.Module` whose parameters are the heads alone (never the base model's). It turns
hidden states into draft states, whose logits come from the base model's frozen LM head unless the
family owns a matrix. Families that condition on the previous token or carry a context cache read
them from the arguments of `forward` and from the state they return; parallel families ignore both.
"""

# R rows (positions in the text), K heads, D hidden, V vocabulary

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from transformers import PreTrainedModel

from medusa_heads import base_model
from medusa_heads.config import HeadsConfig
from medusa_heads.heads.medusa import MedusaHeads
from medusa_heads.suggest import suggest


@runtime_checkable
class DraftHeads(Protocol):
    """What the trainer, the drafter and the exporters need from a family of heads.

    `draft_states(hidden_RD, num_heads)` -> [R, K, D], the input of the LM head for each future position, or for the first
    num_heads of them (None: all).
    `own_logits(draft_states_RKD)` -> [R, K, V], or None where the base model's LM head makes them.
    """

    config: HeadsConfig

    def draft_states(self, hidden_RD: Tensor, num_heads: int | None = None) -> Tensor: ...

    def own_logits(self, draft_states_RKD: Tensor) -> Tensor | None: ...

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any: ...


FAMILIES: dict[str, type[MedusaHeads]] = {"medusa": MedusaHeads}


def create_heads(config: HeadsConfig, model: PreTrainedModel) -> MedusaHeads:
    """New heads for `model`, float32, on its device, initialised to propose the base model's own
    next-token law at every position. Raises ValueError on an unknown family or option."""
    from dataclasses import replace

    from medusa_heads.fingerprint import fingerprint

    if config.architecture not in FAMILIES:
        raise ValueError(
            f"unknown heads architecture {config.architecture!r}{suggest(config.architecture, FAMILIES)}: known are {', '.join(FAMILIES)}"
        )
    config = replace(
        config,
        hidden_size=base_model.hidden_size(model),
        vocab_size=base_model.vocab_size(model),
        base_fingerprint=config.base_fingerprint or fingerprint(model),
    )
    heads = FAMILIES[config.architecture](config)
    heads.initialize(base_model.lm_head_parameters(model)[0])
    return heads.to(model.device)
