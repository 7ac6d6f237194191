"""Drawn drafts: their law is the one they carry, siblings in order of drawing, and a row's drafts are its seed's alone."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
import torch
from torch import Tensor

from infer.candidates import Candidates, chain_candidates
from infer.draft_laws import DraftLaws
from infer.draws import draw_in_order
from infer.sampled_candidates import NUM_DRAWN_FROM, sampled_candidates
from infer.tree import Tree, build_tree, chain
from tests.infer.test_verify_sampled_float import tail_of_chi_square

BUSHY = build_tree([[0], [2], [5], [0, 0], [0, 1], [2, 0], [0, 1, 0]])


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def logits(batch: int, heads: int = 3, vocab: int = 6, seed: int = 0) -> Tensor:
    return 2 * torch.randn(batch, heads, vocab, generator=torch.Generator().manual_seed(seed))


def draw(
    logits_BKV: Tensor, tree: Tree, *, temperature: float = 1.0, seeds: tuple[int, ...] = (), vocabulary: Tensor | None = None
) -> Candidates:
    batch = len(logits_BKV)
    return sampled_candidates(
        torch.arange(batch),
        logits_BKV,
        tree,
        temperature=temperature,
        generators=generators(*(seeds or range(batch))),
        vocabulary=vocabulary,
    )


def laws_of(candidates: Candidates) -> DraftLaws:
    assert candidates.draft_laws is not None
    return candidates.draft_laws


def test_the_shape_is_the_trees_and_siblings_differ() -> None:
    found = draw(logits(40), BUSHY)
    assert torch.equal(found.parents_BN[0], BUSHY.parents_N) and torch.equal(found.depths_BN[0], BUSHY.depths_N)
    assert torch.equal(found.ancestors_BNN[0], BUSHY.ancestors_NN) and found.max_depth == 3
    assert found.tokens_BN[:, 0].tolist() == list(range(40))
    for parent in (0, 1):
        siblings_BN = found.tokens_BN[:, [n for n in range(1, 8) if int(BUSHY.parents_N[n]) == parent]]
        assert all(len(set(row)) == siblings_BN.shape[1] > 1 for row in siblings_BN.tolist())
    assert laws_of(found).law_of_node == (0, 1, 1, 1, 2, 2, 2, 3) and not laws_of(found).replace


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_siblings_follow_the_law_they_carry_in_order(temperature: float) -> None:
    """Three children without replacement: q(a) q(b) / (1 - q(a)) q(c) / (1 - q(a) - q(b))."""
    count = 4000
    found = draw(logits(1).expand(count, -1, -1), build_tree([[0], [1], [2], [0, 0]]), temperature=temperature)
    q = laws_of(found).row(0, vocab_size=6)[0].double()
    torch.testing.assert_close(q.float(), (logits(1)[0, 0] / temperature).softmax(-1))
    law: dict[tuple[int, ...], float] = {
        (a, b, c): float(q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b])) for a, b, c in permutations(range(6), 3)
    }
    assert tail_of_chi_square(Counter(map(tuple, found.tokens_BN[:, 1:4].tolist())), law) > 1e-3
    below = laws_of(found).row(0, vocab_size=6)[1]
    pairs = Counter(map(tuple, found.tokens_BN[:, [1, 4]].tolist()))  # parallel heads: no slot knows another's token
    assert tail_of_chi_square(pairs, {(a, d): float(q[a] * below[d]) for a in range(6) for d in range(6)}) > 1e-3


def test_nodes_of_one_depth_draw_for_themselves() -> None:
    found = draw(torch.zeros(300, 2, 6), build_tree([[0], [1], [0, 0], [1, 0]]))
    alike = int((found.tokens_BN[:, 3] == found.tokens_BN[:, 4]).sum())
    assert abs(alike - 50) < 5 * (300 * 5 / 36) ** 0.5


def test_a_row_drafts_what_its_seed_says_whatever_its_batch() -> None:
    logits_BKV = logits(5)
    together = draw(logits_BKV, BUSHY, seeds=(9, 8, 7, 6, 5))
    assert torch.equal(together.tokens_BN, draw(logits_BKV, BUSHY, seeds=(9, 8, 7, 6, 5)).tokens_BN)
    assert not torch.equal(together.tokens_BN, draw(logits_BKV, BUSHY, seeds=(1, 2, 3, 4, 5)).tokens_BN)
    for row, seed in enumerate((9, 8, 7, 6, 5)):
        alone = draw(logits_BKV[row : row + 1], BUSHY, seeds=(seed,))
        assert torch.equal(alone.tokens_BN[0, 1:], together.tokens_BN[row, 1:])


def test_a_draft_vocabulary_gives_token_ids() -> None:
    vocabulary = torch.tensor([40, 3, 17, 8, 25, 11])
    plain, named = draw(logits(8), BUSHY), draw(logits(8), BUSHY, vocabulary=vocabulary)
    assert torch.equal(vocabulary[plain.tokens_BN[:, 1:]], named.tokens_BN[:, 1:])
    for node in range(7):
        law_V = laws_of(named).row(3, vocab_size=50)[node]
        assert torch.equal(law_V[vocabulary], laws_of(plain).row(3, vocab_size=6)[node]) and law_V.shape == (50,)
        assert set(law_V.nonzero()[:, 0].tolist()) == set(vocabulary.tolist())


def test_only_the_most_likely_tokens_are_drawn_from() -> None:
    logits_BKV = logits(3, vocab=500)
    law_V = laws_of(draw(logits_BKV, chain(3))).row(1, vocab_size=500)[2]
    expected = logits_BKV[1, 2].topk(NUM_DRAWN_FROM)
    assert set(law_V.nonzero()[:, 0].tolist()) == set(expected.indices.tolist())
    torch.testing.assert_close(law_V[expected.indices], expected.values.softmax(-1))


def test_a_law_of_one_sure_token_still_has_enough_to_draw() -> None:
    logits_BKV = torch.full((2, 1, 6), -1e4)
    logits_BKV[:, :, 4] = 0.0
    found = draw(logits_BKV, build_tree([[rank] for rank in range(6)]))
    assert all(row[0] == 4 and sorted(row) == list(range(6)) for row in found.tokens_BN[:, 1:].tolist())
    assert (laws_of(found).row(0, vocab_size=6)[0] > 0).all()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_laws_of_logits_that_are_no_numbers_are_laws(value: float) -> None:
    """One that is not would accept whatever was drafted."""
    some, every = logits(4), torch.full_like(logits(4), value)
    some[:, :, :3] = value
    for broken in (some, every):
        laws = laws_of(draw(broken, BUSHY)).laws_BMW
        assert laws.isfinite().all() and torch.allclose(laws.sum(-1), torch.ones(laws.shape[:-1]))


def test_no_nodes_are_plain_decoding() -> None:
    assert draw(logits(2), chain(0)).num_nodes == 0


def test_chains_carry_whole_laws() -> None:
    """What a draft model returns: q [B, C, V], node n's child drawn from the n-th."""
    laws_BCV = torch.rand(2, 3, 10).softmax(-1)
    found = chain_candidates(torch.tensor([1, 2]), torch.tensor([[3, 4, 5], [6, 7, 8]]), laws_BCV=laws_BCV)
    row = laws_of(found).row(1, vocab_size=12)  # a base whose vocabulary is padded
    for node in range(3):
        assert torch.equal(row[node], torch.cat([laws_BCV[1, node], torch.zeros(2)]))
    assert chain_candidates(torch.tensor([1]), torch.tensor([[3]])).draft_laws is None


def test_rare_entries_are_drawn_at_their_rate() -> None:
    """Entries of 1e-9 and 1e-10 beside a sure one: once that is drawn, what is left of 1 would be rounding alone."""
    laws_BMW = torch.tensor([1.0, 1e-9, 1e-10]).expand(1, 3000, -1)
    order_MC = draw_in_order(laws_BMW, 2, generators(0))[0]
    assert (order_MC[:, 0] == 0).all() and abs(int((order_MC[:, 1] == 1).sum()) - 3000 / 1.1) < 5 * (3000 * 0.1 / 1.21) ** 0.5
