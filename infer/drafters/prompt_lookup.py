"""The text so far -> a chain copied from where its last tokens occurred before (prompt lookup).

Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding.
"""

# B batch, C chain length, D hidden

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.candidates import FILLER, Candidates, chain_candidates
from infer.drafters import Drafter


class PromptLookupDrafter(Drafter):
    """Proposes what followed the latest earlier occurrence of the text's last tokens.

    num_draft_tokens: longest chain; max_ngram: how many last tokens must match, fewer where that many
    do not occur. Tables of where each n-gram ended are kept per row, so a step costs nothing that
    grows with the text.
    """

    name = "prompt_lookup"

    def __init__(self, num_draft_tokens: int = 10, max_ngram: int = 3) -> None:
        if num_draft_tokens < 1 or max_ngram < 1:
            raise ValueError(f"num_draft_tokens {num_draft_tokens} and max_ngram {max_ngram} must be at least 1")
        self.num_draft_tokens, self.max_ngram = num_draft_tokens, max_ngram
        self.tables: list[_NgramTable] = []

    @property
    def max_nodes(self) -> int:
        return self.num_draft_tokens

    def resize(self, num_nodes: int) -> None:
        self.num_draft_tokens = num_nodes

    def start(self, prompts: list[list[int]]) -> None:
        self.tables = [_NgramTable(self.max_ngram) for _ in prompts]

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        drafts = [table.lookup(text, self.num_draft_tokens) for table, text in zip(self.tables, texts, strict=True)]
        longest = max(map(len, drafts))
        if not longest:
            return Candidates.root_only(root_B)
        padded = [draft + [FILLER] * (longest - len(draft)) for draft in drafts]
        return chain_candidates(root_B, torch.tensor(padded, device=root_B.device), num_drafted=tuple(map(len, drafts)))


class _NgramTable:
    """Where each n-gram of one growing text last ended, the text's own tail left out."""

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.num_indexed = 0
        self.end_of: dict[tuple[int, ...], int] = {}

    def lookup(self, text: Sequence[int], num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens that followed the latest earlier occurrence of the longest matching tail."""
        for end in range(self.num_indexed + 1, len(text)):
            for size in range(1, min(self.max_ngram, end) + 1):
                self.end_of[tuple(text[end - size : end])] = end
        self.num_indexed = max(self.num_indexed, len(text) - 1)
        for size in range(min(self.max_ngram, len(text) - 1), 0, -1):
            if (found := self.end_of.get(tuple(text[-size:]))) is not None:
                return list(text[found : found + num_tokens])
        return []
