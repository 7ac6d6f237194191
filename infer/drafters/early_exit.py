"""The base's own first layers, final norm and LM head -> a short chain (self-speculation).

Zhang et al. 2023, Draft & Verify, arXiv 2309.08168; Elhoushi et al. 2024, LayerSkip, arXiv 2404.16710.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from infer.drafters.draft_model import DraftModelDrafter
from medusa_heads import base_model
from medusa_heads.first_layers import first_layers

NUM_DRAFT_TOKENS = 4


class EarlyExitDrafter(DraftModelDrafter):
    """Drafts num_draft_tokens tokens with the base's first num_layers layers, sharing its weights.

    A base that was not trained to predict from its middle layers gains little: their states are not what
    its LM head was fitted to, so most drafts are rejected. num_layers: None takes half of the layers.
    """

    name = "early_exit"

    def __init__(self, model: PreTrainedModel, num_layers: int | None = None, num_draft_tokens: int = NUM_DRAFT_TOKENS) -> None:
        """Raises ValueError when the model has no such first layers, or they cannot run alone."""
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens {num_draft_tokens} must be at least 1")
        if num_layers is None:
            num_layers = max(1, len(base_model.decoder_layers(model)) // 2)
        super().__init__(model, first_layers(model, num_layers), length=num_draft_tokens)
