"""Names of verifiers: what `auto` takes, what is refused and why, and what reaches the drafter."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from infer import verifiers
from infer.candidates import Candidates, chain_candidates
from infer.drafters import Drafter, DraftSampling
from infer.drafters.heads import HeadsDrafter
from infer.drafters.prompt_lookup import PromptLookupDrafter
from infer.generate import Generator
from infer.tree import Tree, build_tree, chain
from infer.tree_spec import BeamTree
from infer.verifiers import SHAPE_NEEDED, BestVerifier, VerifierChoice, check_verifier, is_lossless, resolve_verifier, verdict
from infer.verify_sampled import DraftTree
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model

CHOICES: tuple[VerifierChoice, ...] = get_args(VerifierChoice)
PROMPTS = [[5, 6, 7, 8], [11, 12, 5, 9, 5]]
BUSHY = build_tree([[0], [1], [0, 0], [1, 0]])
SAMPLED = GenerationConfig(do_sample=True, temperature=0.8, top_k=0, max_new_tokens=12)


def heads_generator(model: PreTrainedModel, tree: Tree | BeamTree) -> Generator:
    return Generator(model, HeadsDrafter(model, random_heads(model), tree))


def token_ids(generator: Generator, verifier: VerifierChoice, *, seed: int = 0) -> list[list[int]]:
    found = generator.generate(PROMPTS, generation_config=SAMPLED, eos_ids=(), seed=seed, verifier=verifier)
    assert {answer.lossless for answer in found} == {verifier != "typical"}
    return [answer.token_ids for answer in found]


def test_auto_is_exact_and_takes_what_the_drafter_can() -> None:
    assert resolve_verifier("auto", drafter="unmeasured", sampled_shape="tree", temperature=1.0) == "sample-and-match"
    assert len({(best.drafter, best.shape, best.temperature, best.batch_size) for best in verifiers.AUTO}) == len(verifiers.AUTO)
    for best in verifiers.AUTO:
        cell: dict[str, Any] = dict(
            drafter=best.drafter, sampled_shape=best.shape, temperature=best.temperature, batch_size=best.batch_size
        )
        assert is_lossless(best.verifier) and resolve_verifier(best.verifier, **cell) == best.verifier
        assert resolve_verifier("auto", **cell) == best.verifier
        assert resolve_verifier("auto", **cell | dict(sampled_shape=None)) == "sample-and-match"
        assert resolve_verifier("auto", **cell | dict(temperature=0.0)) == "sample-and-match"
    assert [choice for choice in CHOICES if not is_lossless(choice)] == ["typical"]


def test_auto_takes_the_nearest_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [(0.7, 1, "sample-and-match"), (0.7, 8, "token-rejection"), (1.0, 1, "block"), (1.0, 8, "traversal")]
    rows = tuple(BestVerifier("draft_model", "chain", temperature, rows, best) for temperature, rows, best in table)  # type: ignore[arg-type]
    monkeypatch.setattr(verifiers, "AUTO", rows)

    def auto(temperature: float, batch_size: int) -> VerifierChoice:
        return resolve_verifier("auto", drafter="draft_model", sampled_shape="chain", temperature=temperature, batch_size=batch_size)

    assert [auto(temperature, rows) for temperature, rows, _ in table] == [best for _, _, best in table]
    assert [auto(0.8, 2), auto(0.2, 3), auto(0.9, 2), auto(5.0, 100)] == [best for _, _, best in table]  # 3 is nearer to 8, as a ratio
    monkeypatch.setattr(verifiers, "AUTO", (rows[0], rows[3]))
    assert auto(0.7, 8) == "sample-and-match" and auto(1.0, 1) == "traversal"  # the temperature comes first


def test_auto_is_told_the_temperature_and_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One measurement asks for what the drafter was not made for; the text shows which one was nearest."""
    model = tiny_model("llama")
    generator = heads_generator(model, chain(3))
    nearest: tuple[tuple[int, VerifierChoice], ...] = ((1, "sample-and-match"), (2, "block"))
    for rows, best in nearest:
        table = [BestVerifier("heads", "chain", 0.8, 2, "block"), BestVerifier("heads", "chain", 0.8, 1, "sample-and-match")]
        monkeypatch.setattr(verifiers, "AUTO", (*table, BestVerifier("heads", "chain", 3.0, rows, "token-rejection")))
        options: dict[str, Any] = dict(generation_config=SAMPLED, eos_ids=(), seed=2)
        found = generator.generate(PROMPTS[:rows], **options)
        assert found == generator.generate(PROMPTS[:rows], **options, verifier=best)
        assert found != generator.generate(PROMPTS[:rows], **options, verifier="token-rejection")


@pytest.mark.parametrize("verifier", CHOICES)
def test_greedy_decoding_takes_no_sampled_verifier(verifier: VerifierChoice) -> None:
    generator = heads_generator(tiny_model("llama"), chain(3))
    penalties = GenerationConfig(do_sample=False, repetition_penalty=1.2, max_new_tokens=4)
    for config in (None, penalties):
        if verifier in ("auto", "sample-and-match"):
            generator.generate(PROMPTS, generation_config=config, max_new_tokens=4, verifier=verifier)
            continue
        with pytest.raises(ValueError, match=f"--verifier {verifier} is for sampling.*--temperature above 0"):
            generator.generate(PROMPTS, generation_config=config, max_new_tokens=4, verifier=verifier)


@pytest.mark.parametrize("verifier", SHAPE_NEEDED)
def test_drafters_that_cannot_draw_are_refused(verifier: VerifierChoice) -> None:
    model = tiny_model("llama")
    for generator in (heads_generator(model, BeamTree(6)), Generator(model, PromptLookupDrafter())):
        with pytest.raises(ValueError, match=f"--verifier {verifier} needs drafts that are drawn.*--tree chain"):
            token_ids(generator, verifier)
    if SHAPE_NEEDED[verifier] == "chain":
        with pytest.raises(ValueError, match=f"--verifier {verifier} is for chains, and the `heads` drafter .*--tree chain"):
            token_ids(heads_generator(model, BUSHY), verifier)


def test_unknown_names_are_refused() -> None:
    wrong: Any = "medusa"
    with pytest.raises(ValueError, match=r"--verifier medusa: write one of auto, sample-and-match, .*typical"):
        check_verifier(wrong, greedy=False)


@pytest.mark.parametrize("verifier", [choice for choice in CHOICES if choice != "auto"])
def test_seeds_reproduce_and_rows_draw_for_themselves(verifier: VerifierChoice) -> None:
    model = tiny_model("llama")
    generator = heads_generator(model, chain(3) if SHAPE_NEEDED.get(verifier) == "chain" else BUSHY)
    found = token_ids(generator, verifier, seed=3)
    assert token_ids(generator, verifier, seed=3) == found != token_ids(generator, verifier, seed=4)
    alone = generator.generate(PROMPTS[:1], generation_config=SAMPLED, eos_ids=(), seed=3, verifier=verifier)
    assert alone[0].token_ids == found[0]  # what shares the batch changes nothing


def test_on_a_chain_the_verifiers_of_trees_are_those_of_chains() -> None:
    generator = heads_generator(tiny_model("llama"), chain(3))
    assert token_ids(generator, "recursive-rejection") == token_ids(generator, "token-rejection")


def test_a_new_batch_is_not_drawn_unless_it_asks() -> None:
    model = tiny_model("llama")
    drafter = HeadsDrafter(model, random_heads(model), BUSHY)
    root_B, hidden_BD = torch.tensor([5]), torch.randn(1, 32)
    drafter.start(PROMPTS[:1])
    expected = drafter.propose(root_B, hidden_BD, PROMPTS[:1])
    drafter.sample(DraftSampling(temperature=2.0, seeds=(0,)))
    drawn = drafter.propose(root_B, hidden_BD, PROMPTS[:1])
    assert drawn.draft_laws is not None and not torch.equal(drawn.tokens_BN, expected.tokens_BN)
    drafter.start(PROMPTS[:1])
    found = drafter.propose(root_B, hidden_BD, PROMPTS[:1])
    assert found.draft_laws is None and torch.equal(found.tokens_BN, expected.tokens_BN)


def test_a_beam_drafter_with_nodes_draws_over_the_static_tree_of_its_size() -> None:
    model, nodes = tiny_model("llama"), {(0,): 0.5, (1,): 0.3, (0, 0): 0.2, (0, 1): 0.1}
    heads = random_heads(model)
    root_B, hidden_BD = torch.tensor([5]), torch.randn(1, 32)
    drafter, static = HeadsDrafter(model, heads, BeamTree(4), static_nodes=nodes), HeadsDrafter(model, heads, build_tree([*nodes][:3]))
    assert HeadsDrafter(model, heads, BeamTree(4)).sampled_shape is None and drafter.sampled_shape == "tree"
    for each in (drafter, static):
        each.start(PROMPTS[:1])
    chosen = drafter.propose(root_B, hidden_BD, PROMPTS[:1])
    assert chosen.num_nodes == 4 and chosen.draft_laws is None
    drafter.resize(3)
    for each in (drafter, static):
        each.sample(DraftSampling(temperature=1.0, seeds=(7,)))
    drawn, expected = drafter.propose(root_B, hidden_BD, PROMPTS[:1]), static.propose(root_B, hidden_BD, PROMPTS[:1])
    assert torch.equal(drawn.tokens_BN, expected.tokens_BN) and torch.equal(drawn.parents_BN, expected.parents_BN)
    assert drawn.draft_laws is not None and len(drawn.draft_laws.law_of_node) == 4
    drafter.resize(4)
    assert drafter.propose(root_B, hidden_BD, PROMPTS[:1]).num_nodes == 4


class DrawingDrafter(Drafter):
    """A chain drawn from one fixed law over the whole vocabulary, as a draft model would return it."""

    name = "drawing"
    max_nodes = 2
    sampled_shape = "chain"

    def __init__(self, law_V: Tensor) -> None:
        self.law_V = law_V
        self.observed: list[tuple[list[int], list[bool]]] = []

    def start(self, prompts: list[list[int]]) -> None:
        pass

    def sample(self, sampling: DraftSampling) -> None:
        self.sampling = sampling
        self.generators = [torch.Generator().manual_seed(seed) for seed in sampling.seeds]

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        drafted_BC = torch.stack([torch.multinomial(self.law_V, 2, replacement=True, generator=g) for g in self.generators])
        return chain_candidates(root_B, drafted_BC, laws_BCV=self.law_V.expand(len(root_B), 2, -1))

    def observe(self, lengths: list[int], running: list[bool]) -> None:
        self.observed.append((lengths, running))


def test_a_drafter_is_told_how_to_draw_and_what_came_of_it() -> None:
    model = tiny_model("llama", vocab_size=8)
    drafter = DrawingDrafter(torch.full((8,), 1 / 8))
    found = Generator(model, drafter).generate(
        [[3, 4], [5]], generation_config=SAMPLED, eos_ids=(), seed=5, max_new_tokens=20, verifier="block"
    )
    assert drafter.sampling.temperature == pytest.approx(0.8) and len(set(drafter.sampling.seeds)) == 2
    for row, answer in enumerate(found):
        lengths = [lengths[row] for lengths, running in drafter.observed if running[row]]
        assert sum(lengths) == answer.stats.num_accepted_tokens > 0 and len(lengths) == answer.stats.num_steps
    assert drafter.observed[-1][1].count(True) >= 1


def test_typical_acceptance_reads_the_law_of_the_settings() -> None:
    """Lossy, so its texts are others than sampling's; at a temperature near 0 it accepts the argmax alone."""
    model = tiny_model("llama")
    generator = heads_generator(model, BUSHY)
    cold = GenerationConfig(do_sample=True, temperature=1e-4, max_new_tokens=12)
    greedy = [answer.token_ids for answer in generator.generate(PROMPTS, max_new_tokens=12, eos_ids=())]
    found = generator.generate(PROMPTS, generation_config=cold, eos_ids=(), verifier="typical")
    assert [answer.token_ids for answer in found] == greedy


def test_auto_is_settled_before_a_tree_is_judged() -> None:
    with pytest.raises(AssertionError):
        verdict("auto", DraftTree((0,), (0,)), [], [], None, replace=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["typical", "block"])
def test_nothing_drafted_is_nothing_verified(name: VerifierChoice) -> None:
    with pytest.raises(ValueError, match="nothing is drafted here"):
        resolve_verifier(name, drafter="base", sampled_shape=None, temperature=1.0)
    assert resolve_verifier("auto", drafter="base", sampled_shape=None, temperature=1.0) == "sample-and-match"
