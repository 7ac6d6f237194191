"""Any tree, vocabulary, draft vocabulary, end tokens and ties: what every verifier emits through the whole decoder."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, PreTrainedModel

from infer.drafters.heads import HeadsDrafter
from infer.generate import Generation, Generator
from infer.target import RowLaw
from infer.tree import Path_, Tree, build_tree
from infer.verifiers import SHAPE_NEEDED, VerifierChoice
from medusa_heads import base_model
from medusa_heads.heads import MedusaHeads
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model

NUM_HEADS, NEW = 3, 9


@dataclass(frozen=True)
class Case:
    """tied: that many tokens have logits of exactly 0 everywhere; drafted: the draft vocabulary, None for all."""

    vocab: int
    tied: int
    tree: tuple[Path_, ...]
    drafted: tuple[int, ...] | None
    eos: frozenset[int]
    prompts: tuple[tuple[int, ...], ...]
    seed: int


@st.composite
def paths(draw: st.DrawFn, *, num_tokens: int, chain: bool) -> tuple[Path_, ...]:
    """A tree that heads can fill; siblings are numbered from 0."""
    grown: list[Path_] = [()]
    for _ in range(draw(st.integers(0, NUM_HEADS if chain else 9))):
        wide = 1 if chain else num_tokens
        open_nodes = [p for p in grown if len(p) < NUM_HEADS and sum(len(c) == len(p) + 1 and c[:-1] == p for c in grown) < wide]
        if not open_nodes:
            break
        parent = draw(st.sampled_from(open_nodes))
        grown.append((*parent, sum(len(c) == len(parent) + 1 and c[:-1] == parent for c in grown)))
    return tuple(grown[1:])


@st.composite
def cases(draw: st.DrawFn, *, chain: bool = False) -> Case:
    vocab = draw(st.sampled_from([4, 7, 12]))
    token = st.integers(0, vocab - 1)
    drafted = draw(st.none() | st.sets(token, min_size=2).map(sorted).map(tuple))
    return Case(
        vocab,
        draw(st.sampled_from([0, 0, 2, vocab])),
        draw(paths(num_tokens=vocab if drafted is None else len(drafted), chain=chain)),
        drafted,
        draw(st.frozensets(token, max_size=2)),
        tuple(draw(st.lists(st.lists(token, min_size=1, max_size=5).map(tuple), min_size=1, max_size=3))),
        draw(st.integers(0, 1000)),
    )


@functools.cache
def built(vocab: int, tied: int) -> tuple[PreTrainedModel, MedusaHeads]:
    model = tiny_model("llama", vocab_size=vocab)
    model.get_output_embeddings().weight[torch.arange(vocab - tied, vocab)] = 0.0  # type: ignore[index,operator,union-attr]
    return model, random_heads(model, num_heads=NUM_HEADS)


@functools.cache
def plain(vocab: int, tied: int) -> Generator:
    return Generator(built(vocab, tied)[0])


def decoder(case: Case) -> Generator:
    model, heads = built(case.vocab, case.tied)
    tree: Tree = build_tree(case.tree)
    drafted = None if case.drafted is None else torch.tensor(case.drafted)
    return Generator(model, HeadsDrafter(model, heads, tree, draft_vocabulary=drafted))


def generate(generator: Generator, case: Case, config: GenerationConfig | None, verifier: VerifierChoice = "auto") -> list[Generation]:
    return generator.generate(
        case.prompts, max_new_tokens=NEW, eos_ids=sorted(case.eos), generation_config=config, seed=case.seed, verifier=verifier
    )


def check_ends_and_counts(case: Case, answers: list[Generation]) -> None:
    for answer in answers:
        ends = [place for place, token in enumerate(answer.token_ids) if token in case.eos]
        assert ends in ([], [len(answer.token_ids) - 1])
        assert answer.finish_reason == ("eos" if ends else "length") and (ends or len(answer.token_ids) == NEW)
        assert sum(answer.runs) == len(answer.token_ids) and max(answer.runs) <= 1 + NUM_HEADS
        assert answer.stats.num_drafted_tokens == len(case.tree) * answer.stats.num_steps
        assert answer.stats.num_accepted_tokens + 1 + answer.stats.num_steps >= len(answer.token_ids)


@given(case=cases(), sampled=st.sampled_from([None, {"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.8}, {"top_k": 2}]))
@settings(max_examples=40)
def test_greedy_and_sample_and_match_emit_the_tokens_of_plain_decoding(case: Case, sampled: dict[str, Any] | None) -> None:
    config = None if sampled is None else GenerationConfig(do_sample=True, **({"top_k": 0} | sampled))
    found, expected = generate(decoder(case), case, config, "sample-and-match"), generate(plain(case.vocab, case.tied), case, config)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    check_ends_and_counts(case, found)


@given(
    data=st.data(),
    verifier=st.sampled_from([*SHAPE_NEEDED, "typical"]),
    truncation=st.sampled_from([{"top_k": 2}, {"top_k": 0, "top_p": 0.7}, {"top_k": 3, "temperature": 1.5}]),
)
@settings(max_examples=40)
def test_sampled_verifiers_emit_possible_tokens_and_end_where_plain_decoding_would(
    data: st.DataObject, verifier: VerifierChoice, truncation: dict[str, Any]
) -> None:
    case = data.draw(cases(chain=SHAPE_NEEDED.get(verifier) == "chain"))
    config = GenerationConfig(do_sample=True, **truncation)
    answers = generate(decoder(case), case, config, verifier)
    check_ends_and_counts(case, answers)
    model, _ = built(case.vocab, case.tied)
    for prompt, answer in zip(case.prompts, answers, strict=True):
        processors, _ = base_model.logits_processors(model, config, prompt_length=len(prompt), max_new_tokens=NEW, eos_ids=())
        text = [*prompt, *answer.token_ids]
        logits_TV = model(torch.tensor([text])).logits[0]  # type: ignore[operator]
        for place in range(len(prompt), len(text)):
            assert RowLaw(processors, seed=0).scores(logits_TV[place - 1], text[:place])[text[place]] > -torch.inf
