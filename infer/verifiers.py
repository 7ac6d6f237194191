"""The name of a verifier -> the one that runs, or why it cannot; and its verdict on one row's tree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from infer.draws import Draws
from infer.verify_sampled import (
    DraftTree,
    Laws,
    block_verification,
    recursive_rejection,
    sample_and_match,
    token_rejection,
    traversal,
    typical_acceptance,
)

VerifierChoice = Literal["auto", "sample-and-match", "token-rejection", "block", "recursive-rejection", "traversal", "typical"]
SampledShape = Literal["chain", "tree"]


@dataclass(frozen=True, slots=True)
class BestVerifier:
    """A measurement: for drafts of this shape, at this temperature and batch size, the exact verifier with the most tokens
    per second (scripts/compare_verifiers.py prints them)."""

    drafter: str
    shape: SampledShape
    temperature: float
    batch_size: int
    verifier: VerifierChoice


# What `auto` runs when tokens are drawn: the nearest measurement of the drafter and what it can draw; sample-and-match for
# what was never measured and for drafters that draw nothing, or nothing unless asked to.
AUTO = (
    BestVerifier("heads", "chain", 0.7, 1, "block"),
    BestVerifier("heads", "chain", 1.0, 1, "block"),
    BestVerifier("heads", "tree", 0.7, 1, "traversal"),
    BestVerifier("heads", "tree", 1.0, 1, "recursive-rejection"),
    BestVerifier("draft_model", "chain", 1.0, 1, "block"),
)
SHAPE_NEEDED: dict[VerifierChoice, SampledShape] = {
    "token-rejection": "chain",
    "block": "chain",
    "recursive-rejection": "tree",
    "traversal": "tree",
}
NO_DRAFTER = "base"
LOSSY: tuple[VerifierChoice, ...] = ("typical",)


def needs_drawn_drafts(verifier: VerifierChoice) -> bool:
    return verifier in SHAPE_NEEDED


def is_lossless(verifier: VerifierChoice) -> bool:
    """Whether the text has the base model's own law."""
    return verifier not in LOSSY


def resolve_verifier(
    verifier: VerifierChoice,
    *,
    drafter: str,
    sampled_shape: SampledShape | None,
    temperature: float,
    batch_size: int = 1,
    draws_by_default: bool = True,
) -> VerifierChoice:
    """The verifier to run. drafter: its name; sampled_shape: what it can draw; temperature: 0 for greedy decoding;
    draws_by_default: whether `auto` may have it draw.

    Raises ValueError when the verifier is unknown, or impossible with greedy decoding or with this drafter.
    """
    check_verifier(verifier, greedy=not temperature)
    if not math.isfinite(temperature):
        raise ValueError(f"--temperature {temperature}: give a finite number; 0 takes the most likely token")
    if verifier == "auto":
        if not draws_by_default:
            return "sample-and-match"
        return best_verifier(drafter, sampled_shape, temperature=temperature, batch_size=batch_size)
    if drafter == NO_DRAFTER and verifier != "sample-and-match":
        raise ValueError(f"--verifier {verifier}: nothing is drafted here, so nothing is verified: leave it out, or give heads")
    needed = SHAPE_NEEDED.get(verifier)
    if needed and sampled_shape is None:
        trees = "chain" if needed == "chain" else "chain, static:N, FILE.json, or auto with measured heads"
        raise ValueError(
            f"--verifier {verifier} needs drafts that are drawn at random, and the `{drafter}` drafter chooses its own here: "
            f"with heads give --tree {trees}, or else --verifier sample-and-match"
        )
    if needed == "chain" and sampled_shape == "tree":
        raise ValueError(
            f"--verifier {verifier} is for chains, and the `{drafter}` drafter draws trees here: give --tree chain, or --verifier traversal"
        )
    return verifier


def best_verifier(drafter: str, sampled_shape: SampledShape | None, *, temperature: float, batch_size: int) -> VerifierChoice:
    """That of the measurement with the nearest temperature, and of those the nearest batch size."""
    measured = [best for best in AUTO if (best.drafter, best.shape) == (drafter, sampled_shape)]
    if not measured or not temperature:
        return "sample-and-match"

    def distance(best: BestVerifier) -> tuple[float, float]:
        return abs(math.log(best.temperature / temperature)), abs(math.log(best.batch_size / batch_size))

    return min(measured, key=distance).verifier


def check_verifier(verifier: VerifierChoice, *, greedy: bool) -> None:
    """What can be said before a drafter is known. Raises ValueError as `resolve_verifier` does."""
    if verifier not in get_args(VerifierChoice):
        raise ValueError(f"--verifier {verifier}: write one of {', '.join(get_args(VerifierChoice))}")
    if greedy and verifier not in ("auto", "sample-and-match"):
        raise ValueError(
            f"--verifier {verifier} is for sampling, and greedy decoding draws nothing: set --temperature above 0 "
            "(do_sample in Python), or leave --verifier out"
        )


def verdict(verifier: VerifierChoice, tree: DraftTree, p: Laws, q: Laws, draws: Draws, *, replace: bool) -> tuple[list[int], int]:
    """The accepted path and the token after it. q: read only by verifiers that need drawn drafts, as is replace."""
    match verifier:
        case "sample-and-match":
            return sample_and_match(tree, p, draws)
        case "token-rejection":
            return token_rejection(tree, p, q, draws)
        case "block":
            return block_verification(tree, p, q, draws)
        case "recursive-rejection":
            return recursive_rejection(tree, p, q, draws, replace=replace)
        case "traversal":
            return traversal(tree, p, q, draws, replace=replace)
        case "typical":
            return typical_acceptance(tree, p, draws)
        case "auto":
            raise AssertionError("resolve_verifier comes first")
