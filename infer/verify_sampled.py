"""One row's drafted tree and the laws at its nodes -> the accepted path and the token after it, when tokens are sampled.

Pure functions; all randomness comes through `Draws`. The arithmetic is generic: laws are torch vectors
when decoding and object arrays of Fractions when the very same code is enumerated exactly.

p[node]: the target law [V] of the token after `node`, summing to 1. q[node]: the law [V] from which the
children of `node` were drawn, bit for bit; not read at leaves. Both are read lazily: p only at nodes that
can still be accepted. Every verifier returns (path, bonus): the accepted nodes from the root, which is
always accepted, and the token emitted after the last of them.
"""

# V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from infer.draws import Draws, Law


class Laws(Protocol):
    """One law per node: a list, a tensor [N, V], or something that computes a law when it is asked for."""

    def __getitem__(self, node: int, /) -> Law: ...


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The drafted tokens of one row. Node 0 is the root, its own parent, whose token is already emitted;
    a parent precedes its children, and siblings stand in the order in which they were drawn."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) and self.parents[0] == 0
        assert all(0 <= parent < node for node, parent in enumerate(self.parents[1:], 1))

    @staticmethod
    def chain(tokens: tuple[int, ...]) -> DraftTree:
        """The root's token and a chain of drafted ones below it."""
        return DraftTree(tokens, tuple(max(node - 1, 0) for node in range(len(tokens))))

    @property
    def is_chain(self) -> bool:
        return self.parents[1:] == tuple(range(len(self.parents) - 1))

    def children(self, node: int) -> list[int]:
        return [child for child in range(node + 1, len(self.parents)) if self.parents[child] == node]

    def path_to(self, node: int) -> list[int]:
        path = [node]
        while path[-1]:
            path.append(self.parents[path[-1]])
        return path[::-1]


def token_rejection(tree: DraftTree, p: Laws, q: Laws, draws: Draws) -> tuple[list[int], int]:
    """V1, chains: a token is accepted with probability min(1, p/q), else replaced by one from [p - q]+ (exact).

    Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
    """
    assert tree.is_chain
    for node, token in enumerate(tree.tokens[1:]):
        law, draft = p[node], q[node]
        if not draws.accept(ratio(law[token], draft[token])):
            return tree.path_to(node), draws.index(residual(law, draft))
    last = len(tree.tokens) - 1
    return tree.path_to(last), draws.index(p[last])


def block_verification(tree: DraftTree, p: Laws, q: Laws, draws: Draws) -> tuple[list[int], int]:
    """V2, chains: the longest prefix whose own draw succeeds, over the joint ratios P_i (exact).

    Never shorter than V1 on average. Sun et al., arXiv 2403.10444. The draws are made from the end, so
    that the first success is the longest prefix.
    """
    assert tree.is_chain
    joint: list[Any] = [1]
    for node, token in enumerate(tree.tokens[1:]):
        reached = ratio(joint[-1] * p[node][token], q[node][token])
        if not reached:
            break  # nothing from here on can be accepted
        joint.append(reached)
    for node in range(len(joint) - 1, -1, -1):
        accepted, law = joint[node], p[node]
        if node < len(tree.tokens) - 1:
            accepted, law = after_rejection(accepted, law, q[node])
        if not node or draws.accept(accepted):
            break
    return tree.path_to(node), draws.index(law)


def sample_and_match(tree: DraftTree, p: Laws, draws: Draws) -> tuple[list[int], int]:
    """V3, any tree, made for those that do not depend on chance: one token is drawn at every visited node; if
    a child holds it the walk goes there, else it is the bonus token (exact: every emitted token is such a draw).

    Of children that hold the same token, the first is taken.
    """
    path = [0]
    while True:
        token = draws.index(p[path[-1]])
        child = next((child for child in tree.children(path[-1]) if tree.tokens[child] == token), None)
        if child is None:
            return path, token
        path.append(child)


def recursive_rejection(tree: DraftTree, p: Laws, q: Laws, draws: Draws, *, replace: bool) -> tuple[list[int], int]:
    """V4, sampled trees: at each node the children are tried in turn against what is left of p (exact).

    replace: whether the children of a node were drawn with replacement. SpecInfer, arXiv 2305.09781
    (with), and Jeon et al., arXiv 2402.14160 (without). V1 on a chain.
    """
    path: list[int] = [0]
    while True:
        child, law = try_children(tree, path[-1], p, q, draws, replace=replace)
        if child is None:
            return path, draws.index(law)
        path.append(child)


def try_children(tree: DraftTree, node: int, p: Laws, q: Laws, draws: Draws, *, replace: bool) -> tuple[int | None, Law]:
    """The accepted child, or None and the law of the token to emit instead."""
    law, children = p[node], tree.children(node)
    draft = q[node] if children else law
    for child in children:
        token = tree.tokens[child]
        if draws.accept(ratio(law[token], draft[token])):
            return child, law
        law = residual(law, draft)
        if not replace:
            draft = without(draft, token)
    return None, law


def traversal(tree: DraftTree, p: Laws, q: Laws, draws: Draws, *, replace: bool) -> tuple[list[int], int]:
    """V5, sampled trees: leaves first; a node is accepted, by its path's joint ratio, when nothing below it is (exact).

    replace: whether the children of a node were drawn with replacement. Weng et al., arXiv 2505.12398.
    V2 on a chain.
    """

    def visit(node: int, reached: Any) -> tuple[list[int], int] | None:
        """What is accepted at or below `node`. reached: the probability left to it."""
        if not reached:
            return None  # every probability below is 0 too
        law, children = p[node], tree.children(node)
        draft = q[node] if children else law
        for child in children:
            token = tree.tokens[child]
            found = visit(child, ratio(reached * law[token], draft[token]))
            if found:
                return found
            reached, law = after_rejection(reached, law, draft)
            if not replace:
                draft = without(draft, token)
        return (tree.path_to(node), draws.index(law)) if not node or draws.accept(reached) else None

    found = visit(0, 1)
    assert found is not None  # the root is accepted without a draw
    return found


def typical_acceptance(tree: DraftTree, p: Laws, draws: Draws, *, epsilon: float = 0.09, delta: float = 0.3) -> tuple[list[int], int]:
    """V6, any tree, LOSSY: the output does not have the law p. Accepts whatever the target finds likely enough.

    A node is accepted below an accepted parent if p > min(epsilon, delta * exp(-entropy of p)); the longest
    path wins, then the likeliest. Medusa, arXiv 2401.10774.
    """
    likelihood = {0: (0, 1.0)}  # of accepted nodes: depth, probability of the path
    for node in range(len(tree.tokens)):
        children = tree.children(node)
        if node not in likelihood or not children:
            continue
        law, (depth, probability) = p[node], likelihood[node]
        threshold = min(epsilon, delta * float((law**law).prod()))  # exp(-entropy) is the product of p^p
        for child in children:
            p_child = float(law[tree.tokens[child]])
            if p_child > threshold:
                likelihood[child] = (depth + 1, probability * p_child)
    last = max(likelihood, key=likelihood.__getitem__)
    return tree.path_to(last), draws.index(p[last])


def ratio(target: Any, draft: Any) -> Any:
    """min(1, target / draft); a token of no target probability is never accepted, whatever the draft says."""
    return target / draft if target < draft else int(target > 0)


def positive_part(law: Law, draft: Law) -> Law:
    return (law - draft) * (law > draft)


def residual(law: Law, draft: Law) -> Law:
    """norm([law - draft]+). Where nothing is left, by rounding alone, `law` itself."""
    rest = positive_part(law, draft)
    total = rest.sum()
    return rest / total if total > 0 else law


def after_rejection(reached: Any, law: Law, draft: Law) -> tuple[Any, Law]:
    """The joint ratio and the law of a node, one of whose children was drawn from `draft` and rejected."""
    rest = positive_part(reached * law, draft)
    total = rest.sum()
    missing = total + (1 - reached)  # summed the other way, rounding could make it less than the total
    return (total / missing if missing > 0 else 1), (rest / total if total > 0 else law)


def without(draft: Law, token: int) -> Law:
    """The law of the next draw without replacement: zeros when nothing is left to draw."""
    rest = draft * 1  # a copy
    rest[token] = 0
    total = rest.sum()
    return rest / total if total > 0 else rest
