"""A drafter that knows the true answers and proposes as much of them as it is told to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.candidates import Candidates
from infer.drafters import Drafter
from infer.tree import ancestors_from_parents
from tests.tiny_models import VOCAB_SIZE


class ScriptedDrafter(Drafter):
    """Below every node of the true path lie `width` children; one of them is true with probability `right`.

    answers: the whole true texts, prompt included, one per row. right = 1 is an oracle, 0 is never
    right. The true child's place among its siblings, and the distractors, are random.
    """

    name = "scripted"

    def __init__(self, answers: Sequence[Sequence[int]], *, depth: int = 4, width: int = 3, right: float = 1.0, seed: int = 0) -> None:
        self.answers, self.depth, self.width, self.right = answers, depth, width, right
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def max_nodes(self) -> int:
        return self.depth * self.width

    def resize(self, num_nodes: int) -> None:
        self.depth = num_nodes // self.width

    def start(self, prompts: list[list[int]]) -> None:
        assert len(prompts) == len(self.answers)

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        if len(texts) == 1:  # in a batch, the roots of rows that have ended mean nothing
            assert texts[0][-1] == int(root_B), "the text ends with the root"
        rows = [self._row(text, answer) for text, answer in zip(texts, self.answers, strict=True)]
        tokens_BN = torch.tensor([[root, *tokens] for root, (tokens, _) in zip(root_B.tolist(), rows, strict=True)])
        parents_BN = torch.tensor([[0, *parents] for _, parents in rows])
        depths_BN = torch.tensor([0] + [d + 1 for d in range(self.depth) for _ in range(self.width)])[None]
        return Candidates(tokens_BN, parents_BN, depths_BN, ancestors_from_parents(parents_BN), self.depth)

    def _row(self, text: Sequence[int], answer: Sequence[int]) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        parent = 0
        for depth in range(self.depth):
            position = len(text) + depth
            true = answer[position] if position < len(answer) else None
            siblings = [t for t in self._random_order(VOCAB_SIZE) if t != true][: self.width]
            place = self._random_order(self.width)[0]
            if true is not None and torch.rand((), generator=self.generator) < self.right:
                siblings[place] = true
            parents += [parent] * self.width
            tokens += siblings
            parent = depth * self.width + place + 1
        return tokens, parents

    def _random_order(self, count: int) -> list[int]:
        return torch.randperm(count, generator=self.generator).tolist()
