"""The base's own first layers, final norm and LM head -> a short greedy chain (self-speculation).

Zhang et al. 2023, Draft & Verify, arXiv 2309.08168; Elhoushi et al. 2024, LayerSkip, arXiv 2404.16710.
"""

# B batch, C chain length, D hidden, V vocabulary

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infer.candidates import Candidates, chain_candidates
from infer.drafters import Drafter
from infer.kv_cache import KVCache
from infer.tree_forward import forward_over_cache, prefill
from medusa_heads import base_model
from medusa_heads.first_layers import first_layers

NUM_DRAFT_TOKENS = 4


class EarlyExitDrafter(Drafter):
    """Drafts num_draft_tokens greedy tokens with the base's first num_layers layers, sharing its weights.

    A base that was not trained to predict from its middle layers gains little: their states are not what
    its LM head was fitted to, so most drafts are rejected. num_layers: None takes half of the layers.

    The draft model has a key-value cache of its own. Between two proposals it holds what was fed last; a
    proposal first drops from it whatever did not become text, so drafts always follow accepted tokens.
    """

    name = "early_exit"

    def __init__(self, model: PreTrainedModel, num_layers: int | None = None, num_draft_tokens: int = NUM_DRAFT_TOKENS) -> None:
        """Raises ValueError when the model has no such first layers, or they cannot run alone."""
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens {num_draft_tokens} must be at least 1")
        if num_layers is None:
            num_layers = max(1, len(base_model.decoder_layers(model)) // 2)
        self.model = first_layers(model, num_layers)
        self.num_draft_tokens = num_draft_tokens
        self.layer_shapes = base_model.cache_layer_shapes(self.model)
        self.max_length = base_model.max_length(model)
        self.cache: KVCache | None = None
        self.fed: list[list[int]] = []  # what was drafted and fed after the text of the last proposal
        self.fed_from: list[int] = []  # the length of that text

    @property
    def max_nodes(self) -> int:
        return self.num_draft_tokens

    @torch.inference_mode()
    def start(self, prompts: list[list[int]]) -> None:
        room = max(map(len, prompts)) + self.num_draft_tokens + 1
        self.cache = KVCache(self.layer_shapes, len(prompts), room, dtype=self.model.dtype, device=self.model.device)
        self.fed, self.fed_from = [[] for _ in prompts], [0] * len(prompts)

    @torch.inference_mode()
    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        assert self.cache is not None, "start comes first"
        kept = [self._num_valid(row, text) for row, text in enumerate(texts)]
        unread = [text[count:] for text, count in zip(texts, kept, strict=True)]
        chain_length = min(self.num_draft_tokens, self.max_length - max(map(len, texts)))
        if chain_length < 1 or max(kept) + max(map(len, unread)) > self.max_length:  # the last positions of the context
            return Candidates.root_only(root_B)
        self.cache.truncate(kept)
        drafted_BC = self._draft(prefill(self.model, unread, self.cache), chain_length)
        self.fed, self.fed_from = drafted_BC[:, :-1].tolist(), [len(text) for text in texts]
        return chain_candidates(root_B, drafted_BC)

    def _num_valid(self, row: int, text: list[int]) -> int:
        """How many of the row's cached tokens are text; never all of it, since its last token is read anew
        for its hidden state (a row that has ended brings nothing else)."""
        count = self.fed_from[row]
        for token, true in zip(self.fed[row], text[count:], strict=False):
            if token != true:
                break
            count += 1
        return min(count, len(text) - 1)

    def _draft(self, hidden_BD: Tensor, chain_length: int) -> Tensor:
        """The greedy chain [B, C] after the cached text; its last token is not fed."""
        assert self.cache is not None
        batch, device = len(hidden_BD), hidden_BD.device
        alone_BNN = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
        first_BN = torch.zeros(batch, 1, dtype=torch.long, device=device)
        drafted = [base_model.compute_logits(self.model, hidden_BD).argmax(-1)]
        while len(drafted) < chain_length:
            hidden_BD = forward_over_cache(self.model, drafted[-1][:, None], first_BN[:1], alone_BNN, self.cache)[:, 0]
            self.cache.keep(first_BN, [1] * batch)
            drafted.append(base_model.compute_logits(self.model, hidden_BD).argmax(-1))
        return torch.stack(drafted, dim=1)
