"""Probabilities -> decisions: the only source of randomness of sampled drafts and their verification."""

# V vocabulary, B batch, M laws per row, W entries of a law, C draws from a law

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Law(Protocol):
    """A vector [V] of probabilities: a torch tensor, or a numpy object array of Fractions."""

    def __getitem__(self, index: Any, /) -> Any: ...
    def __setitem__(self, index: Any, value: Any, /) -> None: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __rmul__(self, other: Any, /) -> Any: ...
    def __truediv__(self, other: Any, /) -> Any: ...
    def __pow__(self, other: Any, /) -> Any: ...
    def __gt__(self, other: Any, /) -> Any: ...
    def sum(self) -> Any: ...


class Draws(Protocol):
    """The only source of randomness."""

    def accept(self, probability: Any) -> bool:
        """True with this probability."""
        ...

    def index(self, weights: Law) -> int:
        """An index drawn in proportion to the weights, never one of weight 0."""
        ...


class MostLikely:
    """No chance at all: the largest weight, the lowest index on ties."""

    def accept(self, probability: Any) -> bool:
        return bool(probability >= 1)

    def index(self, weights: Law) -> int:
        assert isinstance(weights, Tensor)
        return int(weights.argmax())


class GeneratorDraws:
    """Draws from a generator on the CPU: reproducible under its seed, the laws may lie on any device."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def accept(self, probability: Any) -> bool:
        return self.uniform() < float(probability)

    def index(self, weights: Law) -> int:
        assert isinstance(weights, Tensor)
        cumulative_V = weights.cumsum(-1, dtype=torch.float64)  # float32 would lose rare tokens
        # right=True never lands on a weight of 0, and in float64 a uniform number times the total stays below the total
        return int(torch.searchsorted(cumulative_V, self.uniform() * cumulative_V[-1], right=True))

    def uniform(self) -> float:
        """In [0, 1)."""
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))


def draw_in_order(laws_BMW: Tensor, count: int, generators: Sequence[torch.Generator]) -> Tensor:
    """The first `count` entries [B, M, C] drawn from every law one after the other without replacement.

    An exponential race: entry i arrives after a time of rate law[i], and the order of arrival is that of
    such draws (Efraimidis and Spirakis 2006; Kool et al., arXiv 1903.06059, in other words). Every law
    must have `count` entries above 0. generators: one per row, on the CPU.
    """
    times = [torch.empty(laws_BMW.shape[1:], dtype=torch.float64).exponential_(generator=generator) for generator in generators]
    return (laws_BMW.double() / torch.stack(times).to(laws_BMW.device)).topk(count, dim=-1).indices
