"""Drawn drafts carry what they were drawn from: the q of sampled verification, read node by node."""

# B batch, M laws per row, W entries of a law, V vocabulary

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGE = 1e30  # of logits, in float32


def finite(logits: Tensor) -> Tensor:
    """Logits that have a softmax: a law that holds what is no number could not be told from the one that drafts were drawn from."""
    return logits.nan_to_num(nan=-LARGE, posinf=LARGE, neginf=-LARGE).clamp(-LARGE, LARGE)


@dataclass(frozen=True, slots=True)
class DraftLaws:
    """The laws that drafts were drawn from, bit for bit: after temperature, truncation and rounding.

    laws_BMW: probabilities, each law summing to 1 up to rounding. law_of_node: the children of node n were
    drawn, one after the other, from law law_of_node[n] (what stands there for leaves is not read); every
    node drew for itself, also where nodes share a law. tokens_BMW: the token ids of the W entries, no id
    twice in a law, in any shape that expands to [B, M, W]; None where entry i is token i (W may be less
    than the base's vocabulary, not more). replace: whether siblings were drawn with replacement, so that
    they may hold the same token; without it, each law has an entry above 0 for every child.
    """

    laws_BMW: Tensor
    law_of_node: tuple[int, ...]
    tokens_BMW: Tensor | None = None
    replace: bool = False

    def row(self, row: int, *, vocab_size: int) -> RowDraftLaws:
        return RowDraftLaws(self, row, vocab_size)


@dataclass(frozen=True, slots=True)
class RowDraftLaws:
    """The draft laws [V] of one row by node, spread over the base's vocabulary when they are asked for."""

    laws: DraftLaws
    row: int
    vocab_size: int

    def __getitem__(self, node: int, /) -> Tensor:
        index = self.laws.law_of_node[node]
        law_W = self.laws.laws_BMW[self.row, index]
        spread_V = torch.zeros(self.vocab_size, dtype=law_W.dtype, device=law_W.device)
        if self.laws.tokens_BMW is None:
            spread_V[: len(law_W)] = law_W
            return spread_V
        return spread_V.scatter_(0, self.laws.tokens_BMW.expand_as(self.laws.laws_BMW)[self.row, index], law_W)
