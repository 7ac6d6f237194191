"""What a drafter is: something that proposes candidates for the tokens after a root.

The decoding loop knows nothing else of it, so heads, prompt lookup, a draft model or early exit of
the base's own layers are the same to it. A drafter holds the state of one batch being decoded
(a context cache, n-gram tables); `start` begins a batch.
"""

# B batch, T prompt length, D hidden, P accepted path length

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from infer.candidates import Candidates
from infer.verifiers import NO_DRAFTER, SampledShape


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How the drafts of a batch are to be drawn. temperature: the request's own (above 0), by which draft
    logits are divided; seeds: one per row, for generators that nothing else draws from."""

    temperature: float
    seeds: tuple[int, ...]


class Drafter(Protocol):
    """A drafter derives from this class, says its name and size, and implements `start` and `propose`.

    That is all for drafts that are chosen, such as the likeliest tokens: those verified at temperature 0
    and by sample-and-match. A drafter that can also DRAW its drafts says so by `sampled_shape`; where a
    verifier asks for such drafts, `sample` follows `start`, and until the next `start` every `propose`
    returns candidates with `draft_laws`: the laws that the children of each node were drawn from, bit for
    bit (see draft_laws.py). Whether to draft a token at all may depend on what was drawn before
    it, never on the token itself.
    """

    name: str

    @property
    def max_nodes(self) -> int:
        """The most nodes besides the root that `propose` returns."""
        ...

    @property
    def sampled_shape(self) -> SampledShape | None:
        """What it can draw: chains, trees with several children, or (None) nothing."""
        return None

    def start(self, prompts: list[list[int]]) -> None:
        """Begins a batch of prompts (token ids)."""
        ...

    def sample(self, sampling: DraftSampling) -> None:
        """Until the next `start`, proposals are drawn."""
        raise AssertionError(f"{self.name} draws no drafts")

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        """Candidates below each root. hidden_BD: the base's last hidden state at the token before the
        root (the one the root was drawn from). texts: prompt and answer so far, root included."""
        ...

    @property
    def draws_by_default(self) -> bool:
        """Whether it may draw, where it can, without being asked to."""
        return True

    def resize(self, num_nodes: int) -> None:
        """From the next proposal on, at most num_nodes nodes besides the root: 1 up to the `max_nodes` of the last `start`.
        Drafters of one fixed shape need not be able to."""
        raise AssertionError(f"{self.name} drafts one size")

    def observe(self, lengths: list[int], running: list[bool]) -> None:
        """What became of the last proposal: drafted tokens accepted in each row, and which rows were still
        being decoded (the others' lengths mean nothing). Not called where the proposal was not verified, since it
        passed the end of the context."""
        return None


class NoDrafter(Drafter):
    """Drafts nothing: plain decoding through the same loop."""

    name = NO_DRAFTER
    max_nodes = 0

    def start(self, prompts: list[list[int]]) -> None:
        pass

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        return Candidates.root_only(root_B)
