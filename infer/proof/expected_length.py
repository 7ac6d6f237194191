"""Recorded decoding steps -> the acceptance length to be expected at each, recomputed without the tree path.

Under sample-and-match one token is drawn at every visited node, so a node is reached with the product of the
target law's probabilities along its path, and a step emits 1 + the sum of these over all nodes below the root,
on average. Here the law of a node comes from a plain forward over the step's text and the node's path.
"""

# R rows, T sequence, D hidden, M nodes whose law is read, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infer.candidates import Candidates
from infer.drafters import Drafter, DraftSampling
from infer.verifiers import SampledShape
from medusa_heads import base_model

TOKENS_PER_FORWARD = 16384

Law = Callable[[Tensor], Tensor]  # logits [M, V] -> probabilities [M, V]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One row's step. text: prompt and answer so far, the root's token last; tokens, parents: the tree, root
    first; length: tokens emitted before any cut, the one after the accepted path included."""

    text: list[int]
    tokens: list[int]
    parents: list[int]
    length: int


class RecordingDrafter(Drafter):
    """Proposes what another drafter proposes, and writes down what became of it."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.name = drafter, drafter.name
        self.steps: list[RecordedStep] = []
        self.proposed: tuple[list[list[int]], Candidates] | None = None

    @property
    def max_nodes(self) -> int:
        return self.drafter.max_nodes

    @property
    def sampled_shape(self) -> SampledShape | None:
        return self.drafter.sampled_shape

    def start(self, prompts: list[list[int]]) -> None:
        self.drafter.start(prompts)

    def sample(self, sampling: DraftSampling) -> None:
        self.drafter.sample(sampling)

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        candidates = self.drafter.propose(root_B, hidden_BD, texts)
        self.proposed = ([list(text) for text in texts], candidates)
        return candidates

    def observe(self, lengths: list[int], running: list[bool]) -> None:
        self.drafter.observe(lengths, running)
        assert self.proposed is not None
        texts, candidates = self.proposed
        tokens, parents = candidates.tokens_BN.tolist(), candidates.parents_BN.expand_as(candidates.tokens_BN).tolist()
        rows = zip(texts, tokens, parents, lengths, running, strict=True)
        self.steps += [RecordedStep(text, nodes, above, length + 1) for text, nodes, above, length, runs in rows if runs]


@dataclass(frozen=True, slots=True)
class _Reading:
    """One sequence to be read, and which of a step's nodes have their law at which of its positions."""

    step: int
    sequence: list[int]
    position_of: dict[int, int]


@torch.inference_mode()
def expected_lengths(model: PreTrainedModel, steps: Sequence[RecordedStep], law: Law) -> list[float]:
    """What sample-and-match emits on average on each step's tree, whatever was emitted."""
    reached = [[1.0] + [0.0] * (len(step.tokens) - 1) for step in steps]  # probability given that the parent is reached
    readings = [reading for index, step in enumerate(steps) for reading in readings_of(index, step)]
    for batch in batches(sorted(readings, key=lambda reading: len(reading.sequence))):
        laws_MV, places = laws_at(model, batch, law)
        children = [
            (m, index, child)
            for m, (index, node) in enumerate(places)
            for child in range(1, len(steps[index].tokens))
            if steps[index].parents[child] == node
        ]
        if children:
            rows, tokens = zip(*((m, steps[index].tokens[child]) for m, index, child in children), strict=True)
            for (_, index, child), p in zip(children, laws_MV[list(rows), list(tokens)].tolist(), strict=True):
                reached[index][child] = p
    for step, probabilities in zip(steps, reached, strict=True):
        for node in range(1, len(probabilities)):
            probabilities[node] *= probabilities[step.parents[node]]
    return [sum(probabilities) for probabilities in reached]


def readings_of(index: int, step: RecordedStep) -> Iterator[_Reading]:
    """Sequences that together end at, or pass through, every node with children: one for each such node that has
    none with children below it. A node's law is read from the first that passes."""
    inner = set(step.parents[1:])
    seen: set[int] = set()
    for last in sorted(inner - {step.parents[node] for node in inner - {0}}):
        path = [last]
        while path[-1]:
            path.append(step.parents[path[-1]])
        path.reverse()
        first = len(step.text) - 1
        yield _Reading(
            index,
            step.text + [step.tokens[node] for node in path[1:]],
            {node: first + depth for depth, node in enumerate(path) if node not in seen},
        )
        seen.update(path)


def batches(readings: Sequence[_Reading]) -> Iterator[list[_Reading]]:
    """In order, at most TOKENS_PER_FORWARD tokens together, padding included."""
    batch: list[_Reading] = []
    for reading in readings:
        if batch and len(reading.sequence) * (len(batch) + 1) > TOKENS_PER_FORWARD:
            yield batch
            batch = []
        batch.append(reading)
    if batch:
        yield batch


def laws_at(model: PreTrainedModel, batch: Sequence[_Reading], law: Law) -> tuple[Tensor, list[tuple[int, int]]]:
    """The laws [M, V] that one plain causal forward gives, and (step, node) of each."""
    longest = max(len(reading.sequence) for reading in batch)
    padded = [reading.sequence + [0] * (longest - len(reading.sequence)) for reading in batch]  # nothing sees what follows it
    hidden_RTD = base_model.forward_hidden(model, torch.tensor(padded, device=model.device))
    found = [(r, position, reading.step, node) for r, reading in enumerate(batch) for node, position in reading.position_of.items()]
    rows, positions, steps, nodes = (list(column) for column in zip(*found, strict=True))
    logits_MV = base_model.compute_logits(model, hidden_RTD[rows, positions]).float()
    return law(logits_MV), list(zip(steps, nodes, strict=True))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Emitted lengths against expected ones. The differences form a martingale, so they are uncorrelated and
    standard_error is that of their mean; deviation: the mean in standard errors."""

    num_steps: int
    mean_length: float
    length_standard_error: float
    mean_expected: float
    mean_difference: float
    standard_error: float

    @property
    def deviation(self) -> float:
        return self.mean_difference / self.standard_error if self.standard_error else 0.0 if not self.mean_difference else float("inf")


def compare(lengths: Sequence[int], expected: Sequence[float]) -> Comparison:
    """lengths: emitted at each step; expected: on average there."""
    differences = [length - mean for length, mean in zip(lengths, expected, strict=True)]
    return Comparison(len(lengths), mean(lengths), standard_error(lengths), mean(expected), mean(differences), standard_error(differences))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of uncorrelated values."""
    center = mean(values)
    return sqrt(sum((value - center) ** 2 for value in values) / max(len(values) - 1, 1) / len(values))
