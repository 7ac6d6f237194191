"""Generators that share one model, advanced in any order or by several threads: each decodes as if it were alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from infer.drafters.early_exit import EarlyExitDrafter
from infer.drafters.heads import HeadsDrafter
from infer.drafters.prompt_lookup import PromptLookupDrafter
from infer.drafters.suffix import SuffixDrafter
from infer.engine.packed_linear import can_pack, packed_copy
from infer.generate import Generator, Step
from infer.tree import chain
from infer.tree_spec import BeamTree
from tests.infer.test_generate import base_answer, prompts
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model

NEW = 12
FAMILIES = ("gemma3", "qwen3_moe")
SAMPLED = GenerationConfig(do_sample=True, temperature=0.8, top_p=0.9)
Request = Callable[[], Iterator[Step]]


def requests(model: PreTrainedModel) -> list[Request]:
    """Greedy and sampled batches of several sizes, with every kind of drafter, all on `model`."""
    heads = random_heads(model)
    drafter = HeadsDrafter(model, heads, BeamTree(8))
    generators = [
        Generator(model, drafter),
        Generator(model, drafter),  # heads keep nothing between greedy steps, so they may serve two requests at once
        Generator(model, HeadsDrafter(model, heads, chain(3))),
        Generator(model, PromptLookupDrafter(max_ngram=1)),
        Generator(model, SuffixDrafter(min_match=1)),
        Generator(model, EarlyExitDrafter(model)),
        Generator(model),
    ]

    def request(index: int, generator: Generator) -> Request:
        texts = prompts((11, 4, 19)[: 1 + index % 3], seed=index)
        settings = SAMPLED if index % 2 else None
        return lambda: generator.steps(texts, max_new_tokens=NEW, eos_ids=(), generation_config=settings, seed=index)

    return [request(index, generator) for index, generator in enumerate(generators)]


def answers(steps: Iterator[Step]) -> list[list[int]]:
    rows = [step.rows for step in steps][-1]
    return [row.token_ids for row in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_interleaved_steps_give_what_each_gives_alone(family: str) -> None:
    model = tiny_model(family)
    together = requests(model)
    alone = [answers(request()) for request in together]
    assert alone[0] == [base_answer(model, text, NEW) for text in prompts((11,), seed=0)]
    running = dict(enumerate(request() for request in together))
    found: list[list[list[int]]] = [[] for _ in running]
    order = torch.Generator().manual_seed(3)
    while running:
        index = list(running)[int(torch.randint(len(running), (1,), generator=order))]
        step = next(running[index], None)
        if step is None:
            del running[index]
        else:
            found[index] = [list(row.token_ids) for row in step.rows]
    assert found == alone


def test_an_abandoned_request_leaves_nothing_behind() -> None:
    together = requests(tiny_model("llama"))
    alone = [answers(request()) for request in together]
    for request in together:
        steps = request()
        next(steps), next(steps)  # and no more
    del steps
    assert [answers(request()) for request in together] == alone


def test_one_generator_decodes_one_batch_at_a_time() -> None:
    """A second batch is refused while the first is between steps, which goes on undisturbed, and taken once that has ended."""
    model = tiny_model("llama")
    generator = Generator(model, HeadsDrafter(model, random_heads(model), chain(3)))

    def request(index: int) -> Iterator[Step]:
        texts = prompts((11, 4)[: 1 + index], seed=index)
        return generator.steps(texts, max_new_tokens=NEW, eos_ids=(), generation_config=SAMPLED, verifier="block", seed=index)

    alone = [answers(request(0)), answers(request(1))]
    first, second = request(0), request(1)
    next(first)
    with pytest.raises(ValueError, match=r"still decoding another batch: go to the end of its steps\(\) or close\(\) them"):
        next(second)
    assert answers(first) == alone[0] and answers(request(1)) == alone[1]
    closed = request(0)
    next(closed)
    closed.close()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="prompt 0 has no tokens"):
        generator.generate([[]])
    assert answers(request(1)) == alone[1]


def test_threads_on_one_model() -> None:
    model = tiny_model("gemma3")
    alone = [answers(request()) for request in requests(model)]
    with ThreadPoolExecutor(4) as pool:  # a drafter may know one batch only: requests of their own
        assert list(pool.map(lambda request: answers(request()), requests(model))) == alone


@pytest.mark.skipif(not can_pack(tiny_model("llama").bfloat16()), reason="FBGEMM does not run here")
def test_threads_on_one_packed_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers joined into one product must not meet another thread's."""
    model, heads = packed_copy(tiny_model("llama").bfloat16()), random_heads(tiny_model("llama"))
    texts = [[5 + index, 6, 7, 8 + index] for index in range(6)]

    def answer(text: list[int]) -> list[int]:
        generator = Generator(model, HeadsDrafter(model, heads, BeamTree(8)))
        return generator.generate([text], max_new_tokens=40, eos_ids=())[0].token_ids

    alone = [answer(text) for text in texts]
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(6) as pool:
            for _ in range(8):
                assert list(pool.map(answer, texts)) == alone
    finally:
        sys.setswitchinterval(interval)


def test_a_cache_shared_between_requests_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: state kept in one place for two requests must show."""
    model, texts = tiny_model("llama"), prompts((11, 9))
    generators = [Generator(model), Generator(model)]
    alone = [answers(g.steps([text], max_new_tokens=NEW, eos_ids=())) for g, text in zip(generators, texts, strict=True)]
    shared = generators[0]._new_cache(texts[:1], NEW)
    monkeypatch.setattr(Generator, "_new_cache", lambda self, texts, limit: shared)
    runs = [g.steps([text], max_new_tokens=NEW, eos_ids=()) for g, text in zip(generators, texts, strict=True)]
    *_, last = zip(*runs, strict=True)  # one step of each in turn
    assert [[step.rows[0].token_ids] for step in last] != alone
