"""Medusa heads: hidden state -> K draft states, one stack of residual blocks per future position.

Cai et al. 2024, arXiv 2401.10774, section 2.1: r_k = h + SiLU(W_k h + b_k), W_k and b_k zero at the
start, so that every head first proposes the base model's own next-token law.
"""

# R rows (positions in the text), K heads, D hidden, V vocabulary

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_heads.config import HeadsConfig
from medusa_heads.suggest import unknown_keys_error


class MedusaHeads(nn.Module):
    """K independent heads. The blocks of all heads lie in one tensor per layer, so that one batched
    matmul runs every head: `weight` [L, K, D, D] and `bias` [L, K, D], never shared between heads or
    layers. With `own_lm_head`, `lm_head` is [K, V, D]."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        if error := unknown_keys_error(config.options, (), where="medusa heads options"):
            raise ValueError(error)
        self.config = config
        shape = (config.num_layers, config.num_heads, config.hidden_size)
        self.weight = nn.Parameter(torch.zeros(*shape, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(*shape))
        self.lm_head = nn.Parameter(torch.zeros(config.num_heads, config.vocab_size, config.hidden_size)) if config.own_lm_head else None

    @torch.no_grad()
    def initialize(self, lm_head_VD: Tensor) -> None:
        """Zero blocks; an own LM head starts as a copy of the base model's."""
        self.weight.zero_()
        self.bias.zero_()
        if self.lm_head is not None:
            self.lm_head.copy_(lm_head_VD.expand_as(self.lm_head))

    def draft_states(self, hidden_RD: Tensor, num_heads: int | None = None) -> Tensor:
        """hidden_RD: last hidden states [R, D] -> draft states [R, K, D]; num_heads: of the first heads alone."""
        num_heads = self.config.num_heads if num_heads is None else min(num_heads, self.config.num_heads)
        states_KRD = hidden_RD.expand(num_heads, *hidden_RD.shape)
        for weight_KDD, bias_KD in zip(self.weight[:, :num_heads], self.bias[:, :num_heads], strict=True):
            states_KRD = states_KRD + F.silu(torch.baddbmm(bias_KD[:, None], states_KRD, weight_KDD.transpose(1, 2)))
        return states_KRD.transpose(0, 1)

    def own_logits(self, draft_states_RKD: Tensor) -> Tensor | None:
        """Logits [R, K, V] of the own LM heads, or None with the shared one."""
        if self.lm_head is None:
            return None
        lm_head_KVD = self.lm_head[: draft_states_RKD.shape[1]]
        return torch.einsum("rkd,kvd->rkv", draft_states_RKD, lm_head_KVD.to(draft_states_RKD.dtype))
