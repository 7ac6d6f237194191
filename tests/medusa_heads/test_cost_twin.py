"""The cost twin computes what its source computes: logits, greedy text, drafts; and nothing dead is silently zero."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from medusa_heads import base_model
from medusa_heads.config import HeadsConfig
from medusa_heads.cost_twin import twin_7b_config, widen, widen_heads
from medusa_heads.fingerprint import fingerprint
from medusa_heads.heads import MedusaHeads, create_heads
from tests.tiny_models import tiny_model

SIZES: dict[str, Any] = dict(hidden_size=90, num_hidden_layers=4, num_attention_heads=9, num_key_value_heads=3, head_dim=16)


def target(**changes: Any) -> LlamaConfig:
    """Wider in every size: 3 groups of 3 heads of 16 for the source's 2 of 2 of 8, and two layers more."""
    return LlamaConfig(**(SIZES | dict(intermediate_size=112) | changes))


def source(rope: dict[str, Any] | None = None, *, tied: bool = True) -> PreTrainedModel:
    """A tiny Llama whose norms and head differ from their first values."""
    config = copy.deepcopy(tiny_model("llama").config)
    config.tie_word_embeddings = tied
    config.rope_parameters = rope or {"rope_type": "default", "rope_theta": 500.0}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 2.0)
    return model.eval().requires_grad_(False)


def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return base_model.compute_logits(model, base_model.forward_hidden(model, ids))


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Up to the rounding of sums in another order."""
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


LLAMA3: dict[str, Any] = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


@pytest.mark.compat
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rope", [None, dict(rope_type="linear", factor=4.0, rope_theta=500.0), LLAMA3 | dict(rope_theta=500.0)])
def test_the_twin_computes_the_same_logits(tied: bool, rope: dict[str, Any] | None) -> None:
    model = source(rope, tied=tied)
    twin = widen(model, target())
    ids = torch.randint(0, 300, (2, 100))
    assert_same(logits(twin, ids), logits(model, ids))
    assert not base_model.forward_hidden(twin, ids)[..., 32:].any()


def test_greedy_text_is_the_source_s() -> None:
    model = source()
    twin = widen(model, target())
    ids = torch.randint(3, 300, (4, 12))
    settings: dict[str, Any] = dict(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(twin.generate(ids, **settings), model.generate(ids, **settings))  # type: ignore[operator]


def test_what_may_be_anything_is_random() -> None:
    """A weight that need not be zero is nowhere zero: only these have zeros, and the norms none."""
    twin = widen(source(), target())
    zeros = {name for name, weight in twin.named_parameters() if not weight.all()} - {"lm_head.weight"}  # a real row is zero there
    leading_out = {f"model.layers.{i}.{name}.weight" for i in range(4) for name in ("self_attn.o_proj", "mlp.down_proj")}
    assert zeros == leading_out | {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)} | {"model.embed_tokens.weight"}
    assert base_model.lm_head_parameters(twin)[0][:, 32:].all()
    query = dict(twin.named_parameters())["model.layers.0.self_attn.q_proj.weight"]
    dead = (query == 0).all(1)
    assert int(dead.sum()) == 4 * 8 and not (query[~dead] == 0).any()  # half of each of the four real heads, and of no dead one


def test_the_twin_is_the_same_every_time_in_every_type() -> None:
    model = source()
    twins = [widen(model, target()), widen(model, target()), widen(model, target(), dtype=torch.bfloat16)]
    assert len({fingerprint(twin) for twin in twins}) == 1
    assert twins[2].dtype == torch.bfloat16
    for name, weight in twins[0].named_parameters():
        assert torch.equal(weight, dict(twins[1].named_parameters())[name])
        assert torch.equal(weight.bfloat16(), dict(twins[2].named_parameters())[name])


@pytest.mark.parametrize("own_lm_head", [False, True])
def test_widened_heads_draft_the_same(own_lm_head: bool) -> None:
    model = source()
    twin = widen(model, target())
    heads = create_heads(HeadsConfig(num_heads=3, num_layers=2, own_lm_head=own_lm_head), model)
    for weight in heads.parameters():
        weight.data.normal_(std=0.3)
    widened = widen_heads(heads, twin)
    ids = torch.randint(0, 300, (1, 30))

    def drafts(base: PreTrainedModel, drafter: MedusaHeads) -> Tensor:
        states = drafter.draft_states(base_model.forward_hidden(base, ids)[0])
        own = drafter.own_logits(states)
        return base_model.compute_logits(base, states) if own is None else own

    with torch.no_grad():
        assert_same(drafts(twin, widened), drafts(model, heads))
    assert widened.config.base_fingerprint == fingerprint(twin) and widened.config.hidden_size == 90
    assert widened.weight[..., :32, :].all() and not widened.weight[..., 32:, :].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_size=18), "hidden_size: the target's 18 is below the source's 32"),
        (dict(num_hidden_layers=1), "num_hidden_layers"),
        (dict(num_attention_heads=3), "query heads per key-value head: the target's 1 is below the source's 2"),
        (dict(head_dim=12), "head_dim: the target's 12 is no multiple of the source's 8"),
    ],
)
def test_a_target_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        widen(source(), target(**changes))


def test_models_that_cannot_be_widened_are_refused() -> None:
    with pytest.raises(ValueError, match="a gpt2 model cannot be widened"):
        widen(tiny_model("gpt2"), target())
    model = source()
    model.config.rope_parameters["rope_type"] = "yarn"
    with pytest.raises(ValueError, match="'yarn' depends on the size of a head"):
        widen(model, target())


def test_the_7b_twin_has_the_size_it_is_for() -> None:
    from medusa_heads.cost_twin import twin_config

    config = copy.deepcopy(source().config)
    config.vocab_size = 49_152
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(twin_config(config, twin_7b_config()), dtype=torch.bfloat16)
    assert round(sum(weight.nbytes for weight in twin.parameters()) / 1e9, 1) == 14.8


@pytest.mark.slow
def test_the_embedded_model_and_its_heads_widened() -> None:
    """Real text: a small target with the embedded model's own sizes below it."""
    from infer.drafters.heads import HeadsDrafter
    from infer.generate import Generator
    from infer.tree_spec import BeamTree
    from medusa_heads.checkpoint import load_heads

    model, tokenizer = base_model.load_base("embedded", dtype=torch.float32)
    sizes: dict[str, Any] = dict(hidden_size=600, num_hidden_layers=31, num_attention_heads=12, num_key_value_heads=3, head_dim=128)
    twin = widen(model, LlamaConfig(**sizes, intermediate_size=1536))
    checkpoint = load_heads("pretrained", model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why is the sky blue?"}], add_generation_prompt=True, return_dict=False
    )
    answers = []
    for base, heads in ((model, checkpoint.heads), (twin, widen_heads(checkpoint.heads, twin))):
        drafter = HeadsDrafter(base, heads, BeamTree(4), draft_vocabulary=checkpoint.draft_vocabulary)
        answers.append(Generator(base, drafter, tokenizer=tokenizer).generate([prompt], max_new_tokens=6)[0])
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].runs == answers[1].runs and max(answers[0].runs) > 1
