"""What a drafter is: something that proposes candidates for the tokens after a root.

The decoding loop knows nothing else of it, so heads, prompt lookup, a draft model or early exit of
the base's own layers are the same to it. A drafter holds the state of one batch being decoded
(a context cache, n-gram tables); `start` begins a batch.
"""

# B batch, T prompt length, D hidden, P accepted path length

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from infer.candidates import Candidates


class Drafter(Protocol):
    name: str

    @property
    def max_nodes(self) -> int:
        """The most nodes besides the root that `propose` returns."""
        ...

    def start(self, prompts: list[list[int]]) -> None:
        """Begins a batch of prompts (token ids)."""
        ...

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        """Candidates below each root. hidden_BD: the base's last hidden state at the token before the
        root (the one the root was drawn from). texts: prompt and answer so far, root included."""
        ...


class NoDrafter:
    """Drafts nothing: plain decoding through the same loop."""

    name = "base"
    max_nodes = 0

    def start(self, prompts: list[list[int]]) -> None:
        pass

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        return Candidates.root_only(root_B)
