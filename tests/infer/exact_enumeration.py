"""A random program -> the law of its outcome, by running it once per branch; and tiny models to run it on."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise, product
from math import prod
from typing import Any, TypeVar

import numpy as np

from infer.draws import Draws
from infer.verify_sampled import DraftTree

Outcome = TypeVar("Outcome")
Shape = tuple[Any, ...]  # of a tree: the shapes below each of a node's children
Model = Callable[[tuple[int, ...]], Any]  # the text so far -> the law of the next token
ROOT = 0  # the root's token is emitted already; texts begin after it


class Branches:
    """Draws that follow `script`, then take the first possible branch and note the others."""

    def __init__(self, script: tuple[int, ...], weight: Any) -> None:
        self.script, self.weight = script, weight
        self.taken: tuple[int, ...] = ()
        self.others: list[tuple[tuple[int, ...], Any]] = []

    def accept(self, probability: Any) -> bool:
        assert 0 <= probability <= 1
        return bool(self.choose([1 - probability, probability]))

    def index(self, weights: Any) -> int:
        total = weights.sum()
        assert total > 0
        return self.choose([weight / total for weight in weights])

    def choose(self, probabilities: Sequence[Any]) -> int:
        if len(self.taken) < len(self.script):
            choice = self.script[len(self.taken)]
        else:
            choice, *others = [value for value, probability in enumerate(probabilities) if probability > 0]
            self.others += [(self.taken + (other,), self.weight * probabilities[other]) for other in others]
            self.weight = self.weight * probabilities[choice]
        self.taken += (choice,)
        return choice


def enumerate_law(program: Callable[[Draws], Outcome]) -> dict[Outcome, Any]:
    """The probability of every outcome: exact where the program computes in Fractions."""
    law: dict[Outcome, Any] = defaultdict(int)
    pending: list[tuple[tuple[int, ...], Any]] = [((), 1)]
    while pending:
        draws = Branches(*pending.pop())
        outcome = program(draws)
        law[outcome] = draws.weight + law[outcome]
        pending += draws.others
    return dict(law)


def random_model(seed: int, *, vocab: int = 3, lowest: int = 1, like: Model | None = None, depth: int = 3) -> Model:
    """Laws with weights from `lowest` to 5, 0 giving tokens of probability 0; at every other text that of `like`, if given."""
    rng = random.Random(seed)
    laws: dict[tuple[int, ...], Any] = {}
    for text in (text for length in range(depth + 1) for text in product(range(vocab), repeat=length)):
        weights = [rng.randint(lowest, 5) for _ in range(vocab)]
        weights[rng.randrange(vocab)] += not any(weights)
        laws[text] = np.array([Fraction(weight, sum(weights)) for weight in weights])
        if like is not None and rng.random() < 0.5:
            laws[text] = like(text)
    return laws.__getitem__


def draw_tree(shape: Shape, q: Model, draws: Draws, *, replace: bool) -> tuple[DraftTree, list[tuple[int, ...]]]:
    """A tree of that shape whose children are drawn from q, fewer where none are left to draw; and the text at each node."""
    tokens, parents, shapes = [ROOT], [0], [shape]
    texts: list[tuple[int, ...]] = [()]
    for node, below in enumerate(shapes):  # grows while it runs
        left = q(texts[node]) * 1
        for child_shape in below:
            if not left.sum() > 0:
                break
            token = draws.index(left)
            tokens.append(token)
            parents.append(node)
            texts.append(texts[node] + (token,))
            shapes.append(child_shape)
            if not replace:
                left[token] = 0
    return DraftTree(tuple(tokens), tuple(parents)), texts


def emitted(tree: DraftTree, verdict: tuple[list[int], int]) -> tuple[int, ...]:
    path, bonus = verdict
    assert path[0] == 0 and all(tree.parents[child] == parent for parent, child in pairwise(path))
    return tuple(tree.tokens[node] for node in path[1:]) + (bonus,)


def text_law(p: Model, length: int) -> dict[tuple[int, ...], Fraction]:
    """Plain sampling: the law of the first `length` tokens."""
    return {text: prod(p(text[:i])[text[i]] for i in range(length)) for text in product(range(len(p(()))), repeat=length)}


def continued(law: dict[tuple[int, ...], Any], p: Model, length: int) -> dict[tuple[int, ...], Any]:
    """The law of the first `length` tokens when plain sampling goes on after what was emitted."""
    return {
        text: sum(law.get(text[:n], 0) * prod(p(text[:i])[text[i]] for i in range(n, length)) for n in range(1, length + 1))
        for text in product(range(len(p(()))), repeat=length)
    }


def mean_length(law: dict[tuple[int, ...], Any]) -> Any:
    """Tokens emitted per forward, the bonus included."""
    return sum(len(text) * weight for text, weight in law.items())
