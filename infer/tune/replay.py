"""A text that the base writes itself, and a drafter -> the steps that decoding it would take, without decoding it.

Drafts change neither greedy text nor, in float32 and under sample-and-match, text drawn under a seed. So one plain decoding gives the
text for all heads, and where each would have stopped is read off it: the trees of all positions are drafted in one batch.
"""

# T tokens of prompt and answer, R positions of the answer, N tree nodes

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from infer.acceptance_stats import AcceptanceStats
from infer.candidates import Candidates
from infer.drafters import Drafter
from infer.verify import accept_matching

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
