"""A text that the base writes itself, and a drafter -> the steps that decoding it would take, without decoding it.

Drafts change neither greedy text nor, in float32 and under sample-and-match, text drawn under a seed. So one plain decoding gives the
text for all heads, and where each would have stopped is read off it: the trees of all positions are drafted in one batch.

Drafts that are drawn change the text but not its law. Given a text, how far a step goes is left to chance, and `expected_replay` takes
the mean over it: over texts the counts have the mean of decoding's, without the noise of its drafts and acceptances.
"""

# T tokens of prompt and answer, R positions of the answer, N tree nodes, K depth

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from infer.acceptance_stats import AcceptanceStats
from infer.candidates import Candidates
from infer.drafters import Drafter
from infer.drafters.heads import HeadsDrafter
from infer.sampled_candidates import draft_law
from infer.tree import Tree
from infer.verify import accept_matching
from medusa_heads import base_model

CHUNK = 256  # positions drafted at once


@torch.inference_mode()
def replay(
    drafter: Drafter,
    hidden_TD: Tensor,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    depth: int,
    max_new_tokens: int,
    eos_ids: Collection[int],
) -> AcceptanceStats:
    """The counts of `generate([prompt], max_new_tokens=...)` with this drafter.

    hidden_TD: last hidden states of prompt and answer (tune/answer_acceptance.py). depth: of the drafter's trees. answer: the base's
    own, written on beyond its end tokens, max_new_tokens + depth - 1 tokens: what is accepted beyond the end counts too.
    """
    assert len(answer) >= max_new_tokens + depth - 1, "the last step looks beyond the limit"
    roots_R = torch.arange(max_new_tokens - 1, device=hidden_TD.device)  # a step begins where at least one more token is wanted
    text_T = torch.tensor([*prompt, *answer], device=hidden_TD.device)
    drafter.start([list(prompt)])
    lengths: list[int] = []
    for part_R in roots_R.split(CHUNK) if len(roots_R) else ():
        at_R = part_R + len(prompt)
        candidates = drafter.propose(text_T[at_R], hidden_TD[at_R - 1], [])
        truth_RK = torch.stack([text_T[at_R + 1 + k] for k in range(depth)], 1)
        lengths += matched_lengths(candidates, truth_RK).tolist()
    stats, end = AcceptanceStats(), 1  # tokens emitted, the first by the prefill
    while end < max_new_tokens and not any(token in eos_ids for token in answer[:end]):
        accepted = lengths[end - 1]
        stats.record(candidates.num_nodes, accepted)
        end += accepted + 1
    return stats


def matched_lengths(candidates: Candidates, truth_RK: Tensor) -> Tensor:
    """How deep each row's tree goes along the true tokens after its root, [R]."""
    path_RK = torch.cat([candidates.tokens_BN[:, :1], truth_RK], 1)
    truth_RN = path_RK.gather(1, candidates.depths_BN.expand_as(candidates.tokens_BN))
    return accept_matching(candidates.tokens_BN == truth_RN, truth_RN, candidates).length_B


@torch.inference_mode()
def expected_replay(
    drafter: HeadsDrafter,
    hidden_TD: Tensor,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    temperature: float,
    max_new_tokens: int,
    eos_ids: Collection[int],
) -> tuple[float, float]:
    """Steps and accepted tokens to be expected of decoding this answer, drafts drawn over the drafter's chain, block verification.

    As `replay`, with an answer drawn at this temperature, and K the depth of the chain.
    """
    assert isinstance(drafter.tree, Tree) and drafter.tree.depth == drafter.tree.num_nodes, "block verification is for chains"
    depth = drafter.tree.depth
    assert len(answer) >= max_new_tokens + depth - 1, "the last step looks beyond the limit"
    text_T = torch.tensor([*prompt, *answer], device=hidden_TD.device)
    reached: list[list[float]] = []
    roots_R = torch.arange(len(prompt), len(prompt) + max_new_tokens - 1, device=hidden_TD.device)
    for part_R in roots_R.split(CHUNK) if len(roots_R) else ():
        truth_RK = torch.stack([text_T[part_R + 1 + k] for k in range(depth)], 1)
        last = int(part_R[-1]) + depth  # logits at i are for token i + 1
        logits_PV = base_model.compute_logits(drafter.model, hidden_TD[int(part_R[0]) : last]).float()
        target_P = (logits_PV / temperature).softmax(-1).gather(1, text_T[int(part_R[0]) + 1 : last + 1, None])[:, 0]
        target_RK = target_P.unfold(0, depth, 1)
        laws_RKW, tokens_RKW = draft_law(
            drafter.draft_logits(hidden_TD[part_R - 1], depth), 1, temperature=temperature, vocabulary=drafter.vocabulary
        )
        draft_RK = (laws_RKW * (tokens_RKW == truth_RK[..., None])).sum(-1)
        reached += block_acceptance(target_RK, draft_RK).tolist()
    ended = next((i for i, token in enumerate(answer, 1) if token in eos_ids), len(answer))
    steps, accepted = [0.0] * (max_new_tokens + depth + 1), [0.0] * (max_new_tokens + depth + 1)  # from here on, by tokens emitted
    for end in range(min(ended, max_new_tokens) - 1, 0, -1):
        at_least = [1.0, *reached[end - 1], 0.0]
        chances = [more - most for more, most in itertools.pairwise(at_least)]
        steps[end] = 1 + sum(chance * steps[end + length + 1] for length, chance in enumerate(chances))
        accepted[end] = sum(chance * (length + accepted[end + length + 1]) for length, chance in enumerate(chances))
    return steps[1], accepted[1]


def block_acceptance(target_RK: Tensor, draft_RK: Tensor) -> Tensor:
    """The chance [R, K] that block verification accepts the first k tokens, given that these are what is emitted.

    target_RK, draft_RK: the probabilities of the tokens, each after those before it. A prefix x is drafted with probability q(x) and then
    reached with P(x) = min(P(x before its last token) p / q, 1), so it is accepted and emitted with q(x) P(x), and emitted with p(x).
    The quotient is the least of 1 and of q / p over all its prefixes.
    """
    return (draft_RK.double() / target_RK.double()).cumprod(-1).cummin(-1).values.clamp_max(1)
