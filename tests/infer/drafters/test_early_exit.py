"""Early exit drafts the greedy chain of the base's first layers on accepted tokens, and changes no token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from infer.candidates import Candidates
from infer.drafters.early_exit import EarlyExitDrafter
from infer.generate import Generator
from medusa_heads import base_model
from medusa_heads.first_layers import first_layers
from tests.tiny_models import tiny_model

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 5], [30, 31, 32, 33, 34, 35, 36, 30, 31]]
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 5}
FAMILIES = ("llama", "qwen3", "gemma3")


class CheckedDrafter(EarlyExitDrafter):
    """Compares every proposal with the chain computed without a cache, by code of its own."""

    num_checked = 0

    def propose(self, root_B: Tensor, hidden_BD: Tensor, texts: list[list[int]]) -> Candidates:
        candidates = super().propose(root_B, hidden_BD, texts)
        for text, tokens, runs in zip(texts, candidates.tokens_BN.tolist(), self.running, strict=True):
            if not runs:
                continue
            assert tokens[1:] == naive_chain(self.reference, text, candidates.num_nodes)
            self.num_checked += 1
        return candidates

    reference: PreTrainedModel


def naive_chain(model: PreTrainedModel, text: list[int], length: int) -> list[int]:
    tokens = list(text)
    for _ in range(length):
        tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(text) :]


def truncated_reference(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A deep copy of the model with its later layers deleted."""
    model = copy.deepcopy(model)
    inner = base_model.decoder(model)
    inner.layers = nn.ModuleList(list(inner.layers)[:num_layers])  # type: ignore[arg-type]
    model.config.num_hidden_layers = num_layers
    return model


def near_model(family: str) -> PreTrainedModel:
    """A model whose second layer adds little, so that drafts of the first are sometimes right, sometimes wrong."""
    model = tiny_model(family)
    for name, weight in base_model.decoder_layers(model)[1].named_parameters():
        if "o_proj" in name or "down_proj" in name or "post_" in name:
            weight.data.mul_(0.3)
    return model


@pytest.mark.compat
@pytest.mark.parametrize("settings", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_token_and_are_the_naive_chain(family: str, settings: dict[str, Any] | None) -> None:
    """One row and three; the rows of a batch accept different lengths and end at different steps."""
    model = near_model(family)
    config = None if settings is None else GenerationConfig(pad_token_id=0, **settings)
    drafter = CheckedDrafter(model, 1, num_draft_tokens=3)
    drafter.reference = truncated_reference(model, 1)
    answers = []
    for prompts, place in ((PROMPTS[:1], None), (PROMPTS, 15)):
        free = Generator(model).generate(prompts, max_new_tokens=24, eos_ids=(), generation_config=config, seed=3)
        eos = () if place is None else (free[0].token_ids[place],)
        expected = Generator(model).generate(prompts, max_new_tokens=24, eos_ids=eos, generation_config=config, seed=3)
        found = Generator(model, drafter).generate(prompts, max_new_tokens=24, eos_ids=eos, generation_config=config, seed=3)
        assert [a.token_ids for a in found] == [a.token_ids for a in expected]
        answers += found
    accepted, drafted = (sum(getattr(a.stats, f"num_{which}_tokens") for a in answers) for which in ("accepted", "drafted"))
    assert 0 < accepted < drafted, "both accepted and rejected drafts must have been followed"
    assert drafter.num_checked > 20


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2"])
def test_all_layers_are_always_right(family: str) -> None:
    model = tiny_model(family)
    found = Generator(model, EarlyExitDrafter(model, 2, num_draft_tokens=4)).generate(PROMPTS, max_new_tokens=26, eos_ids=())
    assert all(a.stats.num_accepted_tokens == a.stats.num_drafted_tokens > 0 for a in found)
    assert all(a.runs == [1, 5, 5, 5, 5, 5] for a in found)


def test_text_that_went_on_without_drafts_leaves_nothing_stale() -> None:
    """Several tokens that were never drafted follow one proposal: drafting may have been skipped meanwhile."""
    model = tiny_model("llama")
    drafter = CheckedDrafter(model, 1, num_draft_tokens=4)
    drafter.reference = truncated_reference(model, 1)
    drafter.start(PROMPTS)
    texts = PROMPTS
    for added in ([3], [44, 45, 46, 47, 48, 49], [50], [51, 52, 53]):
        texts = [[*text, *added] for text in texts]
        drafter.propose(torch.tensor([text[-1] for text in texts]), torch.zeros(3, 32), texts)


def test_no_position_beyond_the_context_is_read() -> None:
    """A long row and one with much unread text do not fit one forward over 64 positions."""
    drafter = EarlyExitDrafter(tiny_model("gpt2"), 1)
    drafter.start([[7], [8]])
    for lengths, num_drafted in (((58, 3), 4), ((59, 40), 0)):
        texts = [[7] * lengths[0], [8] * lengths[1]]
        assert drafter.propose(torch.tensor([7, 8]), torch.zeros(2, 32), texts).num_nodes == num_drafted


def test_the_context_may_end_while_drafting() -> None:
    model = tiny_model("gpt2")
    prompts = [[7] * 40, [9, 8, 7], [3] * 62]
    expected = Generator(model).generate(prompts, max_new_tokens=70, eos_ids=())
    found = Generator(model, EarlyExitDrafter(model, 1)).generate(prompts, max_new_tokens=70, eos_ids=())
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]


@pytest.mark.compat
@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "gpt2"])
def test_first_layers_share_weights_and_leave_the_model_alone(family: str) -> None:
    model = tiny_model(family)
    before, config, ids = list(map(id, model.modules())), model.config.to_dict(), torch.tensor([PROMPTS[0]])
    logits = model(input_ids=ids).logits
    first = first_layers(model, 1)
    assert len(base_model.decoder_layers(first)) == 1 and base_model.text_config(first).num_hidden_layers == 1
    assert {id(p) for p in first.parameters()} <= {id(p) for p in model.parameters()}
    assert list(map(id, model.modules())) == before and model.config.to_dict() == config
    assert torch.equal(model(input_ids=ids).logits, logits) and not torch.equal(first(input_ids=ids).logits, logits)
    assert torch.equal(first_layers(model, 2)(input_ids=ids).logits, logits)


@pytest.mark.parametrize("num_layers", [0, 3])
def test_layers_that_do_not_exist_are_refused(num_layers: int) -> None:
    with pytest.raises(ValueError, match=f"num_layers {num_layers}: llama has 2 layers"):
        EarlyExitDrafter(tiny_model("llama"), num_layers)


def test_layers_that_do_not_run_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")

    def whole(*args: Any, **keywords: Any) -> Any:
        raise IndexError("layer 1 is missing")

    shape = base_model.forward_hidden
    monkeypatch.setattr(base_model, "forward_hidden", lambda m, *a, **k: shape(m, *a, **k) if m is model else whole())
    with pytest.raises(ValueError, match="do not run without the others: layer 1 is missing"):
        first_layers(model, 1)
