"""The text so far -> a tree of what followed the longest tail that occurred before, likeliest first.

Suffix automaton: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text".
Drafting from suffix counts: Oliaro et al., SuffixDecoding, arXiv 2411.04975.
"""

# B batch, N tree nodes including the root, D hidden

from __future__ import annotations

import heapq
from collections.abc import Sequence

from torch import Tensor

from infer.candidates import Candidates, tree_candidates
from infer.drafters import Drafter

ROOT = 0  # the automaton's state of the empty string
Node = tuple[int, int]  # token, index of the parent (0 is the candidates' root)


class SuffixDrafter(Drafter):
    """Proposes the continuations that the text's longest repeated tail had before, as a tree.

    num_nodes: most nodes besides the root, taken in falling order of how often they followed (ties: the
    shallower, then the later seen); min_match: shortest tail, in tokens, that is believed; max_match: no
    more of the tail than this is compared, which bounds the work of a token. Every row has counts of its
    own, over its prompt and answer.
    """

    name = "suffix"

    def __init__(self, num_nodes: int = 16, min_match: int = 2, max_match: int = 32) -> None:
        if num_nodes < 1 or not 1 <= min_match <= max_match:
            raise ValueError(
                f"num_nodes {num_nodes} must be at least 1, and min_match {min_match} between 1 and max_match {max_match}: change them"
            )
        self.num_nodes, self.min_match, self.max_match = num_nodes, min_match, max_match
        self.rows: list[SuffixCounts] = []

    @property
    def max_nodes(self) -> int:
        return self.num_nodes

    def resize(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes

    def start(self, prompts: list[list[int]]) -> None:
        self.rows = [SuffixCounts(self.max_match + self.num_nodes) for _ in prompts]

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        trees = [self._tree(counts, text) for counts, text in zip(self.rows, texts, strict=True)]
        if not max(map(len, trees)):
            return Candidates.root_only(root_B)
        return tree_candidates(root_B, trees)

    def _tree(self, counts: SuffixCounts, text: Sequence[int]) -> list[Node]:
        for token in text[counts.num_tokens :]:
            counts.extend(token)
        state, length = counts.repeated_tail(self.max_match)
        return counts.likeliest(state, self.num_nodes) if length >= self.min_match else []


class SuffixCounts:
    """A suffix automaton of one growing text that knows how often, and where last, each substring of at most
    `max_length` tokens ended.

    A state stands for all substrings that end at the same places: the suffixes of its longest one that are
    longer than the longest one of its link. Growing by a token costs amortised O(1) for the automaton and at
    most `max_length` additions for the counts.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.num_tokens = 0
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        self.last_end = [0]
        self.whole = ROOT  # state of the whole text
        self.tail = ROOT  # state of its last max_length tokens

    def extend(self, token: int) -> None:
        """Appends one token to the text."""
        self.num_tokens += 1
        new = self._add_state({}, link=ROOT, length=self.num_tokens, count=0)
        state = self.whole
        while state != -1 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state != -1:
            self.link[new] = self._exactly_after(state, token)
        self.whole = new
        self._count(token)

    def _exactly_after(self, state: int, token: int) -> int:
        """The state whose longest string is `state`'s longest and `token`, split off where it has longer ones."""
        found = self.next[state][token]
        if self.length[found] == self.length[state] + 1:
            return found
        split = self._add_state(dict(self.next[found]), link=self.link[found], length=self.length[state] + 1, count=self.count[found])
        self.last_end[split] = self.last_end[found]
        self.link[found] = split
        while state != -1 and self.next[state].get(token) == found:
            self.next[state][token] = split
            state = self.link[state]
        return split

    def _count(self, token: int) -> None:
        """One more end for every suffix of the text, the ones longer than max_length left out."""
        self.tail = self._shortened(self.next[self.tail][token], self.max_length)
        state = self.tail
        while state != ROOT:
            self.count[state] += 1
            self.last_end[state] = self.num_tokens
            state = self.link[state]

    def _shortened(self, state: int, length: int) -> int:
        """The state of the last `length` tokens of `state`'s strings; `state` itself where they are shorter."""
        while self.length[self.link[state]] >= length:
            state = self.link[state]
        return state

    def _add_state(self, following: dict[int, int], *, link: int, length: int, count: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        self.last_end.append(0)
        return len(self.next) - 1

    def repeated_tail(self, max_match: int) -> tuple[int, int]:
        """The state and length of the longest tail, of at most max_match tokens, that also ended earlier."""
        state = self.tail if self.count[self.tail] > 1 else max(self.link[self.tail], ROOT)
        if state != ROOT:
            state = self._shortened(state, max_match)
        return state, min(self.length[state], max_match)

    def likeliest(self, state: int, num_nodes: int) -> list[Node]:
        """At most num_nodes continuations of `state`, the most frequent first; parents precede children.

        A continuation never occurs more often than its prefix, so taking the best open one is optimal.
        """
        nodes: list[Node] = []
        open_nodes: list[tuple[int, int, int, int, int, int]] = []

        def open_children(parent_state: int, parent: int, depth: int) -> None:
            for token, child in self.next[parent_state].items():
                heapq.heappush(open_nodes, (-self.count[child], depth, -self.last_end[child], token, child, parent))

        open_children(state, 0, 1)
        while open_nodes and len(nodes) < num_nodes:
            _, depth, _, token, child, parent = heapq.heappop(open_nodes)
            nodes.append((token, parent))
            open_children(child, len(nodes), depth + 1)
        return nodes
