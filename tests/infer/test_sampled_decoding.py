"""Every exact verifier through the whole decoder: the law of its texts is plain sampling's, by chi-square, and broken decoders are seen."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

import infer.generate
import infer.target
from infer.candidates import Candidates
from infer.draft_laws import RowDraftLaws
from infer.drafters.heads import HeadsDrafter
from infer.draws import Draws
from infer.generate import Generator
from infer.kv_cache import KVCache
from infer.stage_timer import StageTimer
from infer.tree import Tree, build_tree, chain
from infer.tree_forward import tree_forward
from infer.verifiers import VerifierChoice
from infer.verify_sampled import DraftTree, Laws
from medusa_heads import base_model
from tests.infer.test_verify_sampled_float import tail_of_chi_square
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model

VOCAB, LENGTH = 4, 4
MODEL = tiny_model("llama", vocab_size=VOCAB)
HEADS = random_heads(MODEL, num_heads=3)
PROMPT = [3]  # short, so that every later token counts
WIDE = build_tree([[0], [1], [2], [3]])  # the whole vocabulary: something is always accepted
BUSHY = build_tree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]])
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top-k 3": {"temperature": 1.2, "top_k": 3},
}
DRAWN: list[tuple[VerifierChoice, Tree]] = [
    ("token-rejection", chain(3)),
    ("block", chain(3)),
    ("recursive-rejection", BUSHY),
    ("traversal", BUSHY),
]
EXACT: list[tuple[VerifierChoice, Tree]] = [("sample-and-match", BUSHY), *DRAWN]


def config_of(settings: dict[str, Any], length: int = LENGTH) -> GenerationConfig:
    return GenerationConfig(do_sample=True, max_new_tokens=length, pad_token_id=0, **({"top_k": 0} | settings))


def sampled_texts(verifier: VerifierChoice, tree: Tree, settings: dict[str, Any], *, num_rows: int) -> Counter[tuple[int, ...]]:
    generator = Generator(MODEL, HeadsDrafter(MODEL, HEADS, tree))
    found = generator.generate([PROMPT] * num_rows, generation_config=config_of(settings), eos_ids=(), seed=1, verifier=verifier)
    assert all(answer.lossless for answer in found)
    assert sum(answer.stats.num_accepted_tokens for answer in found) > num_rows / 2, "drafts are accepted"
    return Counter(tuple(answer.token_ids) for answer in found)


def plain_law(settings: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Of the first LENGTH tokens, from plain forwards over every prefix."""
    processors, _ = base_model.logits_processors(MODEL, config_of(settings), prompt_length=len(PROMPT), max_new_tokens=LENGTH, eos_ids=())
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        ids: Any = torch.tensor([[*PROMPT, *text] for text in law])
        p_RV = processors(ids, MODEL(ids).logits[:, -1].float()).softmax(-1)
        law = {(*text, token): law[text] * float(p_V[token]) for text, p_V in zip(law, p_RV, strict=True) for token in range(VOCAB)}
    return {text: probability for text, probability in law.items() if probability}


def tail(verifier: VerifierChoice, tree: Tree, settings: dict[str, Any], *, num_rows: int = 500) -> float:
    """The p-value of the texts; 0 where one of them is impossible."""
    observed, law = sampled_texts(verifier, tree, settings, num_rows=num_rows), plain_law(settings)
    return tail_of_chi_square(observed, law) if observed.keys() <= law.keys() else 0.0


def seen(verifier: VerifierChoice, tree: Tree) -> bool:
    """Whether few texts suffice to see that their law is another one."""
    return tail(verifier, tree, SETTINGS["temperature 1"]) < 1e-6


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("verifier", "tree"), EXACT, ids=[verifier for verifier, _ in EXACT])
def test_texts_have_the_law_of_plain_sampling(verifier: VerifierChoice, tree: Tree, name: str) -> None:
    assert tail(verifier, tree, SETTINGS[name]) > 1e-3


# ---------------------------------------------------------------- controls: what must be seen


@pytest.mark.parametrize(("verifier", "tree"), DRAWN, ids=[verifier for verifier, _ in DRAWN])
def test_control_a_draft_law_that_was_not_drawn_from(verifier: VerifierChoice, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    read = RowDraftLaws.__getitem__

    def sharper(self: RowDraftLaws, node: int, /) -> Tensor:
        return (read(self, node).log() * 3).softmax(-1)

    monkeypatch.setattr(RowDraftLaws, "__getitem__", sharper)
    assert seen(verifier, tree)


def one_draw_per_path(verifier: VerifierChoice, tree: DraftTree, p: Laws, q: Laws, draws: Draws, *, replace: bool) -> tuple[list[int], int]:
    """Every path matched against draws of its own; the longest wins."""
    best = [0]
    for leaf in range(len(tree.tokens)):
        path = tree.path_to(leaf)
        matched = list(itertools.takewhile(lambda pair: draws.index(p[pair[0]]) == tree.tokens[pair[1]], itertools.pairwise(path)))
        if len(matched) + 1 > len(best):
            best = path[: len(matched) + 1]
    return best, draws.index(p[best[-1]])


def test_control_one_draw_per_path_instead_of_per_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer.target, "verdict", one_draw_per_path)
    assert seen("sample-and-match", BUSHY)


def one_position_too_far(model: PreTrainedModel, candidates: Candidates, cache: KVCache, *, timer: StageTimer) -> tuple[Tensor, Tensor]:
    return tree_forward(model, replace(candidates, depths_BN=candidates.depths_BN + 1), cache)


def first_nodes_kept(keep: Callable[..., None]) -> Callable[[KVCache, Tensor, Sequence[int]], None]:
    return lambda cache, path_BP, counts: keep(cache, torch.arange(path_BP.shape[1]).expand_as(path_BP), counts)


@pytest.mark.parametrize(("verifier", "tree"), EXACT, ids=[verifier for verifier, _ in EXACT])
def test_control_positions_off_by_one(verifier: VerifierChoice, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer.generate, "tree_forward", one_position_too_far)
    assert seen(verifier, tree)


@pytest.mark.parametrize("verifier", ["sample-and-match", "recursive-rejection", "traversal"])
def test_control_a_stale_cache_row(verifier: VerifierChoice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "keep", first_nodes_kept(KVCache.keep))
    assert seen(verifier, WIDE)
