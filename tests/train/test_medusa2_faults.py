"""Medusa-2, what a run could quietly get wrong: the ramp, the two rates, the adapter's scale, adapters on what is never adapted."""

from __future__ import annotations

import contextlib
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.tree_spec import BeamTree
from medusa_heads import base_model
from medusa_heads.adapter import Adapter
from medusa_heads.merge import merged_base
from tests.tiny_models import tiny_model, tiny_tokenizer
from tests.train.medusa2_runs import make_trainer
from train import acceptance
from train.acceptance import Validation


def test_the_heads_share_grows_as_a_quarter_of_a_sine(tmp_path: Path) -> None:
    """From nothing, at the step before the adapter joins, to its peak at the last step; and each step's forward gets its own."""
    trainer = make_trainer(tmp_path, lora_heads_share=0.4, lora_start_ratio=0.25, max_steps=12)
    assert [trainer.forward_options(step) for step in range(3)] == [{"heads_share": None}] * 3
    shares = [trainer.forward_options(step)["heads_share"] for step in range(3, 12)]
    assert shares == pytest.approx([0.4 * math.sin(math.pi / 2 * joined / 9) for joined in range(1, 10)])
    assert shares[0] < 0.2 * shares[-1], "a constant share is no ramp"


@pytest.mark.parametrize(("given", "ratio"), [(None, 0.25), (0.003, 0.3)])
def test_the_adapter_has_the_learning_rate_that_was_asked_for(tmp_path: Path, given: float | None, ratio: float) -> None:
    trainer = make_trainer(tmp_path, lora_learning_rate=given, lora_start_ratio=0.25, max_steps=8, learning_rate=0.01)
    heads, adapter = trainer.learning_rates(5)
    assert adapter == pytest.approx(ratio * heads) and 0 < heads < 0.01
    trainer.train()
    groups = trainer.optimizer.optimizer.param_groups
    used = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    heads, adapter = trainer.learning_rates(7)
    assert {used[id(parameter)] for parameter in trainer.heads.parameters()} == {heads}
    assert {used[id(parameter)] for parameter in trainer.headed.adapter.parameters()} == {adapter} and adapter < heads


def test_the_best_adapter_comes_back_with_the_best_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written pair is the one that was decoded together, while the last one had moved on."""
    lengths = iter([1.2, 1.7, 1.5])
    monkeypatch.setattr(acceptance, "decode", lambda *_, **__: torch.tensor([[100, round(100 * next(lengths)) - 100]]))
    trainer = make_trainer(tmp_path, held_out=1, validate_every=2, max_steps=6, lora_start_ratio=0.0, lora_learning_rate=0.01)
    after: dict[int, dict[str, torch.Tensor]] = {}
    validate = trainer._validate

    def noting(step: int) -> None:
        validate(step)
        after[step] = {name: parameter.detach().clone() for name, parameter in trainer.trained.named_parameters()}

    trainer._validate = noting  # type: ignore[method-assign]
    trainer.train(Validation([[3, 4, 5]], ()))
    assert trainer.take_best() == 4 and not any(torch.equal(after[4][name], after[6][name]) for name in after[4])
    assert all(torch.equal(parameter, after[4][name]) for name, parameter in trainer.trained.named_parameters())


@pytest.mark.parametrize("is_on", [True, False])
def test_validation_decodes_the_tuned_base(tmp_path: Path, is_on: bool) -> None:
    """The adapter is what the heads will serve with: its text, not the untouched base's."""
    trainer = make_trainer(tmp_path)
    for parameter in trainer.headed.adapter.parameters():
        parameter.data.normal_(std=0.3)
    trainer.heads.weight.data.normal_(std=0.3)
    prompts = [[3, 4, 5], [6, 7, 8, 9], [10, 11]]
    drafter = HeadsDrafter(trainer.headed.base, trainer.heads, BeamTree(16))
    with contextlib.nullcontext() if is_on else trainer.headed.adapter.off():
        answers = Generator(trainer.headed.base, drafter).generate(prompts, max_new_tokens=acceptance.MAX_NEW_TOKENS, eos_ids=())
    found = acceptance.decode(trainer.headed, Validation(prompts, ()))
    assert (found.tolist() == [[answer.stats.num_steps, answer.stats.num_accepted_tokens] for answer in answers]) == is_on


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (10.0, 2.5)])
def test_the_adapter_acts_times_alpha_over_rank(tmp_path: Path, alpha: float | None, scale: float) -> None:
    trainer = make_trainer(tmp_path, lora_rank=4, lora_alpha=alpha)
    layers: Any = base_model.decoder_layers(trainer.headed.base)
    layer = layers[0].self_attn.q_proj
    layer.lora_B.default.weight.data.normal_()
    x = torch.randn(5, 32)
    added = x @ layer.lora_A.default.weight.T @ layer.lora_B.default.weight.T
    torch.testing.assert_close(layer(x) - layer.base_layer(x), scale * added, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, value: None if ".layers.1." in name else (name, value), "is in the model alone"),
        (lambda name, value: (name.replace(".layers.1.", ".layers.7."), value), "is in the (file|model) alone"),
        (lambda name, value: (name, value * float("nan")), "not finite"),
    ],
    ids=["a layer is missing", "of a deeper base", "not finite"],
)
def test_an_adapter_is_merged_whole_or_not_at_all(tmp_path: Path, change: Any, message: str) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    Adapter.attach(tiny_model("llama"), rank=2, targets=["q_proj"]).save(tmp_path / "adapter", base_name="b")
    merged_base(str(tmp_path / "base"), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(dict(filter(None, (change(*item) for item in load_file(file).items()))), file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"--adapter .* does not fit this base \(.*{message}"):
        merged_base(str(tmp_path / "base"), tmp_path / "adapter")


@pytest.mark.parametrize(
    "foreign",
    [{"target_modules": ["embed_tokens"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}],
    ids=["LoRA on the embedding", "a copy of the LM head"],
)
def test_foreign_adapters_on_what_is_never_adapted(tmp_path: Path, foreign: dict[str, Any]) -> None:
    """Tied embeddings: merged, each of these would leave embedding and LM head two different matrices."""
    tiny_model("gemma2").save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own advice against it
        adapted = get_peft_model(tiny_model("gemma2"), LoraConfig(task_type="CAUSAL_LM", r=2, **foreign))
        adapted.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=r"--adapter .*LM head and input embedding are never adapted.*as here"):
        merged_base(str(tmp_path / "base"), tmp_path / "adapter")


@pytest.mark.parametrize(
    ("foreign", "option"),
    [({"trainable_token_indices": [1, 5]}, "trainable_token_indices"), ({"layer_replication": [[0, 2], [0, 1]]}, "layer_replication")],
)
def test_adapters_that_do_more_than_add_are_refused(tmp_path: Path, foreign: dict[str, Any], option: str) -> None:
    """Merged, these would lose what they do beside."""
    model = get_peft_model(tiny_model("llama"), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], **foreign))
    model.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=f"--adapter .* has {option}, which cannot be merged here"):
        Adapter.load(tiny_model("llama"), tmp_path / "adapter")


@pytest.mark.parametrize(
    "foreign", [{"target_modules": ["q_proj", "lm_head"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}]
)
def test_a_refused_adapter_leaves_no_trace(tmp_path: Path, foreign: dict[str, Any]) -> None:
    base, ids = tiny_model("llama"), torch.tensor([[3, 4, 5]])
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False, **foreign))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    before, names = base(input_ids=ids).logits, [name for name, _ in base.named_modules()]
    with pytest.raises(ValueError, match="LM head and input embedding are never adapted"):
        Adapter.load(base, tmp_path / "adapter")
    assert torch.equal(base(input_ids=ids).logits, before) and [name for name, _ in base.named_modules()] == names
    assert not hasattr(base, "peft_config")
    (tmp_path / "adapter/adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="does not fit this base"):
        Adapter.load(base, tmp_path / "adapter")
    assert [name for name, _ in base.named_modules()] == names
