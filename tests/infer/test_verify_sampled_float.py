"""Sampled verification as it decodes, on float32 tensors: against the exact enumeration, by chi-square, and on random trees."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from infer.draws import GeneratorDraws
from infer.verify_sampled import (
    DraftTree,
    after_rejection,
    block_verification,
    ratio,
    residual,
    sample_and_match,
    token_rejection,
    typical_acceptance,
    without,
)
from tests.infer.exact_enumeration import Model, Shape, draw_tree, emitted, text_law
from tests.infer.test_verify_sampled import CASES, TREE_VERIFIERS, Verifier, decode, matched, models, typical

FEW_CASES = [case for case in CASES if "uneven" in str(case.id) or case.id in ("V1", "V2", "V3")]
ANY_TREE: dict[str, Verifier] = {
    "V3": matched,
    "V6": typical,
    **{
        f"{name} {'with' if replace else 'without'}": partial(verifier, replace=replace)
        for name, verifier in TREE_VERIFIERS.items()
        for replace in (True, False)
    },
}
CHAINS: dict[str, Verifier] = {"V1": token_rejection, "V2": block_verification}


def in_float32(model: Model) -> Model:
    return lambda text: torch.tensor([float(probability) for probability in model(text)])


@pytest.mark.parametrize("kind", ["positive", "zeros", "often equal"])
@pytest.mark.parametrize("verifier, shape, replace", FEW_CASES)
def test_float32_branches_have_the_exact_probabilities(verifier: Verifier, shape: Shape, replace: bool, kind: str) -> None:
    p, q = models(kind, 3)
    exact = decode(verifier, shape, p, q, replace=replace)
    rounded = decode(verifier, shape, in_float32(p), in_float32(q), replace=replace)
    for text in exact.keys() | rounded.keys():
        assert float(rounded.get(text, 0)) == pytest.approx(float(exact.get(text, 0)), abs=1e-6)
        assert all(p(text[:i])[token] > 0 for i, token in enumerate(text))  # whatever rounding does


def truncated_model(seed: int, *, temperature: float, top_k: int, vocab: int = 6) -> Model:
    """Softmax of random logits over temperature, of which the top_k remain."""
    generator = torch.Generator().manual_seed(seed)

    def law() -> Tensor:
        logits_V = torch.randn(vocab, generator=generator) / temperature
        return torch.softmax(logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], -torch.inf), -1)

    return {text: law() for length in range(4) for text in product(range(vocab), repeat=length)}.__getitem__


def tail_of_chi_square(observed: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """The p-value of the counts; texts that are expected fewer than 5 times are one cell."""
    total = observed.total()
    assert all(law[text] > 0 for text in observed)
    cells = [(observed[text], total * weight) for text, weight in law.items() if total * weight >= 5]
    cells.append((total - sum(count for count, _ in cells), total - sum(mean for _, mean in cells)))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells if mean > 0.5)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)))


def sampled_tail(verifier: Verifier, shape: Shape, p: Model, q: Model, *, replace: bool, off_by_one: bool = False) -> float:
    """The p-value of the first two tokens of 500 texts."""
    draws = GeneratorDraws(torch.Generator().manual_seed(0))
    observed: Counter[tuple[int, ...]] = Counter()
    for _ in range(500):
        tree, texts = draw_tree(shape, q, draws, replace=replace)
        read = [texts[parent] for parent in tree.parents] if off_by_one else texts
        text = emitted(tree, verifier(tree, [p(text) for text in read], [q(text) for text in texts], draws))
        observed[text[:2] if len(text) > 1 else text + (draws.index(p(text)),)] += 1
    return tail_of_chi_square(observed, {text: float(weight) for text, weight in text_law(p, 2).items()})


@pytest.mark.parametrize("temperature, top_k", [(1.0, 6), (0.7, 4)])
@pytest.mark.parametrize("verifier, shape, replace", FEW_CASES)
def test_chi_square_of_two_tokens(verifier: Verifier, shape: Shape, replace: bool, temperature: float, top_k: int) -> None:
    p, q = (truncated_model(seed, temperature=temperature, top_k=top_k) for seed in (1, 2))
    assert sampled_tail(verifier, shape, p, q, replace=replace) > 1e-3


@pytest.mark.parametrize("verifier, shape, replace", FEW_CASES)
def test_control_chi_square_sees_laws_of_the_wrong_node(verifier: Verifier, shape: Shape, replace: bool) -> None:
    p, q = (truncated_model(seed, temperature=1.0, top_k=6) for seed in (1, 2))
    assert sampled_tail(verifier, shape, p, q, replace=replace, off_by_one=True) < 1e-6


def random_laws(generator: torch.Generator, num_nodes: int, vocab: int) -> Tensor:
    """Random laws [N, V], many entries 0, some laws with all probability on one token."""
    weights_NV = torch.rand(num_nodes, vocab, generator=generator) * (torch.rand(num_nodes, vocab, generator=generator) < 0.6)
    weights_NV[torch.arange(num_nodes), torch.randint(vocab, (num_nodes,), generator=generator)] += 0.1
    return weights_NV / weights_NV.sum(-1, keepdim=True)


@given(num_nodes=st.integers(1, 12), vocab=st.integers(2, 5), seed=st.integers(0, 100_000))
def test_any_tree_gives_a_possible_text_and_seeds_reproduce_it(num_nodes: int, vocab: int, seed: int) -> None:
    """The tree need not come from q: a careless drafter loses exactness, never emits an impossible token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (num_nodes,), generator=generator).tolist()
    parents = [0] + [int(torch.randint(node, (), generator=generator)) for node in range(1, num_nodes)]
    tree, chain = DraftTree(tuple(tokens), tuple(parents)), DraftTree.chain(tuple(tokens))
    p_NV, q_NV = random_laws(generator, num_nodes, vocab), random_laws(generator, num_nodes, vocab)
    for verifier, drafted in [(v, chain) for v in CHAINS.values()] + [(v, tree) for v in ANY_TREE.values()]:
        verdict = verifier(drafted, p_NV, q_NV, GeneratorDraws(torch.Generator().manual_seed(seed)))
        assert verdict == verifier(drafted, p_NV, q_NV, GeneratorDraws(torch.Generator().manual_seed(seed)))
        path, _ = verdict
        for node, token in zip(path, emitted(drafted, verdict), strict=True):
            assert p_NV[node, token] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_laws_accept_everything(dtype: torch.dtype) -> None:
    laws_NV = random_laws(torch.Generator().manual_seed(0), 5, 6).to(dtype)
    draws = GeneratorDraws(torch.Generator().manual_seed(1))
    for _ in range(20):
        tree = DraftTree.chain((0, *(draws.index(laws_NV[node]) for node in range(4))))
        for verifier in (CHAINS["V1"], CHAINS["V2"], ANY_TREE["V4 without"], ANY_TREE["V5 without"]):
            path, bonus = verifier(tree, laws_NV, laws_NV[:4], draws)  # q is not read at the leaf
            assert path == [0, 1, 2, 3, 4] and laws_NV[4, bonus] > 0


def test_only_nodes_that_can_be_accepted_are_read() -> None:
    """p may be computed on demand: below a token of target probability 0 it never is."""
    p = {0: torch.tensor([0.0, 1.0, 0.0])}
    q = [torch.tensor([1.0, 0.0, 0.0])] * 3
    tree = DraftTree.chain((0, 0, 0, 0))
    draws = GeneratorDraws(torch.Generator().manual_seed(0))
    for verifier in (CHAINS | ANY_TREE).values():
        assert verifier(tree, p, q, draws) == ([0], 1)


def test_sample_and_match_takes_the_first_of_twins() -> None:
    p = [torch.tensor([0.0, 1.0])] * 4
    assert sample_and_match(DraftTree((0, 1, 1, 1), (0, 0, 0, 2)), p, GeneratorDraws(torch.Generator().manual_seed(0))) == ([0, 1], 1)


def test_arithmetic_where_nothing_is_left() -> None:
    law, other = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    assert ratio(law[2], law[2]) == 0 and ratio(law[0], law[2]) == 1 and ratio(law[2], law[0]) == 0
    assert residual(law, law) is law and (residual(law, other) - law).sum() == 0
    assert after_rejection(1, law, law) == (1, law)
    reached, left = after_rejection(torch.tensor(0.5), law, law)
    assert reached == 0 and left is law
    assert without(other, 2).sum() == 0 and without(law, 0)[1] == 1
    assert other[2] == 1 and law[0] == 0.5  # inputs are left alone


def test_generator_draws_follow_the_weights_and_skip_zeros() -> None:
    draws = GeneratorDraws(torch.Generator().manual_seed(0))
    weights_V = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0])  # need not sum to 1
    counts = torch.bincount(torch.tensor([draws.index(weights_V) for _ in range(4000)]), minlength=5)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0] and abs(int(counts[3]) - 3000) < 4 * 27.4
    assert abs(sum(draws.accept(torch.tensor(0.25)) for _ in range(4000)) - 1000) < 4 * 27.4
    assert not any(draws.accept(0) for _ in range(100)) and all(draws.accept(1) for _ in range(100))

    draws.uniform = lambda: 0.0  # type: ignore[method-assign]
    assert draws.index(weights_V) == 1 and not draws.accept(0)
    draws.uniform = lambda: 1 - 2**-53  # type: ignore[method-assign]  # the largest that torch.rand gives
    assert all(draws.index(scale * weights_V) == 3 for scale in torch.linspace(0.01, 5, 300)) and draws.accept(1)


def test_typical_acceptance_takes_the_longest_then_the_likeliest_path() -> None:
    flat_V, sure_V = torch.full((10,), 0.1), torch.tensor([0.91] + [0.01] * 9)
    tree, mirrored = DraftTree((0, 3, 4, 0, 5), (0, 0, 0, 1, 2)), DraftTree((0, 4, 3, 5, 0), (0, 0, 0, 1, 2))
    draws = GeneratorDraws(torch.Generator().manual_seed(0))
    assert typical_acceptance(tree, [flat_V, sure_V, flat_V, sure_V, sure_V], draws)[0] == [0, 1, 3]  # .91 against .1
    assert typical_acceptance(mirrored, [flat_V, flat_V, sure_V, sure_V, sure_V], draws)[0] == [0, 2, 4]
    assert typical_acceptance(tree, [flat_V, flat_V, sure_V, sure_V, sure_V], draws)[0] == [0, 1, 3]  # .01 is below .09
    assert typical_acceptance(tree, [sure_V] * 5, draws)[0] == [0]
    assert typical_acceptance(tree, [sure_V] * 5, draws, epsilon=0.005)[0] == [0, 1, 3]


def test_the_entropy_threshold_holds_in_float32_at_a_real_vocabulary() -> None:
    law_V = torch.softmax(3 * torch.randn(50_000, generator=torch.Generator().manual_seed(0)), -1)
    threshold = 0.3 * float((-torch.special.entr(law_V.double()).sum()).exp())
    assert threshold < 0.09
    below = int(law_V.masked_fill(law_V > 0.999 * threshold, 0).argmax())
    above = int(law_V.masked_fill(law_V < 1.001 * threshold, 1).argmin())
    assert law_V[above] < 1.05 * law_V[below]
    draws = GeneratorDraws(torch.Generator().manual_seed(0))
    assert typical_acceptance(DraftTree((0, below, above), (0, 0, 0)), [law_V] * 3, draws)[0] == [0, 2]
    assert typical_acceptance(DraftTree.chain((0, below)), [law_V] * 2, draws)[0] == [0]
