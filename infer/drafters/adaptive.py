"""A drafter, and what steps cost on this machine -> at every step the number of nodes that pays on the text at hand.

    tokens per second(n) = rows * (1 + min(n, q * (tau_n - 1))) / T(rows, n)

tau_n: expected acceptance length of n nodes on average text; T: seconds of one step over `rows` running rows,
measured beforehand; q: how many of the tokens expected so were accepted lately, exponentially weighted. The n
with the most tokens per second is drafted; 0 is plain decoding, for which the drafter is not even asked.

Plain decoding says nothing about drafts, so after a pause a few steps draft again. Every pause in vain doubles
the next one; a trial that pays ends them. Nothing here reads a clock or draws a number: the same texts in the
same order, with the same T, give the same steps. Only what is drafted changes, never what is accepted.
"""

# B batch, D hidden

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from infer.candidates import Candidates
from infer.drafters import Drafter, DraftSampling
from infer.verifiers import SampledShape

MEMORY = 48  # drafts after which an observation has lost 63 % of its weight
PRIOR = 4.0  # accepted tokens that the expectation counts for at the beginning
FIRST_PAUSE, LONGEST_PAUSE = 8, 256  # steps of plain decoding between trials
TRIAL = 4  # drafts of a trial
BEST_CASE = 2.0  # q of text that suits the drafts: a size that would not pay even there is not tried
LEAST_EXPECTED = 1e-9  # tokens: drafts of which nothing is expected leave 0
TRIAL_PRIOR = 2.0  # expected tokens that all before a trial count for: few, since the text may have changed


def adaptive(drafter: Drafter, curve: Sequence[Mapping[str, Any]]) -> AdaptiveDrafter:
    """The drafter over the sizes that were measured. curve: rows as `StepTime.figures` gives them, for some numbers of rows."""
    seconds: dict[int, dict[int, float]] = {}
    for row in curve:
        seconds.setdefault(row["batch_size"], {})[row["num_nodes"]] = row["draft_s"] + row["forward_s"]
    return AdaptiveDrafter(drafter, lengths={row["num_nodes"]: row["expected_acceptance_length"] for row in curve}, seconds=seconds)


class AdaptiveDrafter(Drafter):
    """Lets `drafter` draft as many nodes per row as give the most tokens per second, or none.

    lengths: tau_n by number of nodes, 0 left out or 1. seconds: T by rows, then by nodes, 0 included; between two
    numbers of rows T is interpolated, for the sizes that both have. What was learnt is kept from batch to batch.
    """

    def __init__(self, drafter: Drafter, *, lengths: Mapping[int, float], seconds: Mapping[int, Mapping[int, float]]) -> None:
        assert seconds and all(0 in by_nodes for by_nodes in seconds.values())
        self.name, self.drafter = drafter.name, drafter
        self.gains = {size: length - 1 for size, length in lengths.items()} | {0: 0.0}
        self.seconds = {rows: dict(seconds[rows]) for rows in sorted(seconds)}
        self.accepted = self.expected = PRIOR
        self.pause, self.next_pause, self.trial = 0, FIRST_PAUSE, 0
        self.num_rows, self.asked = 1, False  # running rows; whether the drafter made the last proposal
        self.drafted: tuple[int, ...] = ()  # what each row of the last proposal drafted

    @property
    def draws_by_default(self) -> bool:
        return self.drafter.draws_by_default

    @property
    def max_nodes(self) -> int:
        return max(size for by_nodes in self.seconds.values() for size in by_nodes)

    @property
    def sampled_shape(self) -> SampledShape | None:
        return self.drafter.sampled_shape

    def start(self, prompts: list[list[int]]) -> None:
        self.num_rows = len(prompts)
        if self.max_nodes:
            self.drafter.resize(self.max_nodes)
        self.drafter.start(prompts)

    def sample(self, sampling: DraftSampling) -> None:
        self.drafter.sample(sampling)

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        size = self._next_size()
        self.asked = size > 0
        if self.asked:
            self.drafter.resize(size)
            candidates = self.drafter.propose(root_B, hidden_BD, texts)
        else:
            candidates = Candidates.root_only(root_B)
        self.drafted = candidates.num_drafted
        return candidates

    def observe(self, lengths: list[int], running: list[bool]) -> None:
        self.num_rows = sum(running)
        if self.asked:
            self.drafter.observe(lengths, running)
        if not any(self.drafted):
            return
        self.trial = max(0, self.trial - 1)
        rows = [(size, length) for size, length, runs in zip(self.drafted, lengths, running, strict=True) if runs and size]
        kept = (1 - 1 / MEMORY) ** len(rows)
        self.accepted = kept * self.accepted + sum(length for _, length in rows)
        self.expected = max(kept * self.expected + sum(self._gain(size) for size, _ in rows), LEAST_EXPECTED)

    def _gain(self, num_drafted: int) -> float:
        """Tokens expected to be accepted of so many; a drafter may have less to propose than any size that was measured."""
        return self.gains[max(size for size in self.gains if size <= num_drafted)]

    def _next_size(self) -> int:
        if self.pause:
            self.pause -= 1
            return 0
        by_nodes = self.step_seconds(self.num_rows)
        if self.trial:
            worth_trying = [n for n in by_nodes if n and self._speed(n, by_nodes[n], BEST_CASE) > 1 / by_nodes[0]]
            return self._best(by_nodes, worth_trying) if worth_trying else 0
        if size := self._best(by_nodes, by_nodes):
            self.next_pause = FIRST_PAUSE
            return size
        weight = min(1.0, TRIAL_PRIOR / self.expected)
        self.accepted, self.expected = weight * self.accepted, weight * self.expected
        self.pause, self.trial = self.next_pause - 1, TRIAL
        self.next_pause = min(2 * self.next_pause, LONGEST_PAUSE)
        return 0

    def _best(self, by_nodes: Mapping[int, float], sizes: Iterable[int]) -> int:
        """The size with the most expected tokens per second; the smaller one on a tie."""
        q = self.accepted / self.expected
        return max(sizes, key=lambda size: (self._speed(size, by_nodes[size], q), -size))

    def _speed(self, size: int, seconds: float, q: float) -> float:
        """Tokens per second and row."""
        return (1 + min(size, q * self.gains[size])) / seconds

    def step_seconds(self, num_rows: int) -> dict[int, float]:
        """T by nodes for this many running rows; beyond the measured numbers of rows, the nearest one's."""
        below = max((rows for rows in self.seconds if rows <= num_rows), default=min(self.seconds))
        above = min((rows for rows in self.seconds if rows >= num_rows), default=below)
        if above <= below:
            return self.seconds[below]
        share = (num_rows - below) / (above - below)
        low, high = self.seconds[below], self.seconds[above]
        return {size: low[size] + share * (high[size] - low[size]) for size in low if size in high}
