"""Medusa-2: losses and gradients against a naive form, phases, resume, two processes, merging, exactness on the merged base."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.tree_spec import BeamTree
from medusa_heads import base_model
from medusa_heads.adapter import Adapter
from medusa_heads.checkpoint import load_heads
from medusa_heads.cli import main as command
from medusa_heads.fingerprint import fingerprint, weights_digest
from medusa_heads.merge import Merge, merged_base
from tests.tiny_models import tiny_model, tiny_tokenizer
from tests.train.medusa2_runs import make_trainer, result
from tests.train.training_runs import make_trainer as make_frozen_trainer
from train import trainer as trainer_module
from train.__main__ import main
from train.batch import make_batch
from train.packing import collate

WORDS = ("the", "cat", "sat", "on", "mat", "and", "dog", "ran", "to", "other", "side", "of", "house", "what", "is", "answer")


def randomise(adapter: Adapter) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter.parameters():
        parameter.data.normal_(std=0.1, generator=generator)


@pytest.mark.compat
@pytest.mark.parametrize("objective", ["distill", "data"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_loss_and_gradients_equal_the_naive_ones(tmp_path: Path, family: str, objective: str) -> None:
    """Full logits, the loss written out: base's loss + share * heads' loss for the adapter, the heads' loss alone for the heads."""
    trainer = make_trainer(tmp_path, family=family, lora_objective=objective)
    headed, share = trainer.headed, 0.3
    randomise(headed.adapter)
    with torch.no_grad():
        headed.heads.weight.normal_(std=0.3)
    tensors = make_batch(collate([trainer.rows[0], trainer.rows[1]]), 3).tensors
    weights = torch.tensor([0.01, 0.008, 0.0064])
    output = headed(**tensors, slot_weights=weights, heads_share=share)
    output.loss.backward()
    found = [[p.grad.clone() for p in part.parameters()] for part in (headed.adapter, headed.heads)]  # type: ignore[union-attr]
    headed.zero_grad()

    inputs = [tensors[name] for name in ("input_ids", "position_ids", "document_ids")]
    hidden = headed.base_forward(*inputs).flatten(0, 1)
    with torch.no_grad(), headed.adapter.off():
        untouched = base_model.compute_logits(headed.base, headed.base_forward(*inputs).flatten(0, 1))
    logits = base_model.compute_logits(headed.base, hidden)
    states = headed.heads.draft_states(hidden[tensors["positions"]])[tensors["pair_position"], tensors["pair_slot"]]
    losses = F.cross_entropy(base_model.compute_logits(headed.base, states), tensors["targets"], reduction="none")
    heads_loss = (losses * weights[tensors["pair_slot"]]).sum()
    at = tensors["positions"] + 1
    if objective == "distill":
        base_loss = F.kl_div(logits[at].log_softmax(-1), untouched[at].softmax(-1), reduction="sum") * weights[0]
    else:
        base_loss = F.cross_entropy(logits[at], inputs[0].flatten()[at + 1], reduction="sum") * weights[0]
    torch.testing.assert_close(output.loss, heads_loss + base_loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.base_loss, base_loss, atol=1e-5, rtol=1e-5)
    expected = torch.autograd.grad(base_loss + share * heads_loss, headed.adapter.parameters(), retain_graph=True)
    assert all(gradient.any() for gradient in expected)
    torch.testing.assert_close(found[0], list(expected), atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(found[1], list(torch.autograd.grad(heads_loss, list(headed.heads.parameters()))), atol=1e-5, rtol=1e-3)


def test_autocast_alone_casts_what_the_adapter_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bfloat16 base: loss and gradients are bit for bit those of peft's own casts, and less is kept for the gradient."""
    headed = (trainer := make_trainer(tmp_path)).headed
    randomise(headed.adapter)
    for weight in base_model.weight_tensors(headed.base).values():
        weight.data = weight.data.bfloat16()
    batch = make_batch(collate([trainer.rows[0], trainer.rows[1]]), 3).tensors | {"slot_weights": torch.ones(3)}

    def losses_and_kept() -> tuple[list[Tensor], int]:
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.data_ptr()] = tensor.nbytes
            return tensor

        headed.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = headed(**batch, heads_share=0.3).loss
        loss.backward()
        gradients: list[Any] = [p.grad for part in (headed.adapter, headed.heads) for p in part.parameters()]  # type: ignore[union-attr]
        return [loss.detach(), *(gradient.clone() for gradient in gradients)], sum(kept.values())

    ours, kept = losses_and_kept()
    monkeypatch.setattr(Adapter, "left_to_autocast", nullcontext)
    peft, kept_by_peft = losses_and_kept()
    assert len(ours) > 10 and all(torch.equal(a, b) for a, b in zip(ours, peft, strict=True))
    assert kept < 0.9 * kept_by_peft


def test_the_base_is_held_to_the_end_of_an_answer_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    tensors = make_batch(collate([trainer.rows[0]]), 3).tensors
    documents = [*tensors["document_ids"][0].tolist(), 0]
    ends = [i for i, d in enumerate(documents) if d and documents[i + 1] != d]
    assert ends and set(ends) <= set((tensors["positions"] + 2).tolist())


def test_the_adapter_has_its_turn_however_few_steps_there_are(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, lora_start_ratio=0.99)
    assert trainer.first_joint_step == trainer.num_steps - 1


def test_heads_go_first_and_the_base_stays(tmp_path: Path) -> None:
    """The adapter is untouched until its turn, trains then, at a rate of its own; the base's own weights keep every bit."""
    trainer = make_trainer(tmp_path)
    base, adapter = trainer.headed.base, trainer.headed.adapter
    own = {name: weight.clone() for name, weight in base_model.weight_tensors(base).items()}
    assert not any("lora_" in name for name in own) and len(own) == len(list(tiny_model("llama").parameters()))
    before = [p.detach().clone() for p in adapter.parameters()]
    first, seen = trainer.first_joint_step, []
    real = trainer._step

    def step(index: int, window: Any) -> Any:
        finished = real(index, window)
        seen.append(all(torch.equal(a, b) for a, b in zip(adapter.parameters(), before, strict=True)))
        return finished

    trainer._step = step  # type: ignore[method-assign,assignment]
    trainer.train()
    assert 0 < first < trainer.num_steps - 1
    assert seen == [True] * first + [False] * (trainer.num_steps - first)
    assert all(torch.equal(weight, own[name]) for name, weight in base_model.weight_tensors(base).items())
    heads_rate, rate = trainer.learning_rates(trainer.num_steps - 2)
    assert rate == pytest.approx(heads_rate / 4) and trainer.learning_rates(first - 1)[1] == 0
    slow = make_trainer(tmp_path / "slow", warmup_ratio=0.2)
    assert slow.learning_rates(first)[1] == pytest.approx(slow.learning_rates(first)[0] / 8)  # warms up over two steps of its own
    steps_of_adam = {int(trainer.optimizer.optimizer.state[p]["step"]) for p in adapter.parameters()}
    assert steps_of_adam == {trainer.num_steps - first}
    shares = [trainer.heads_share(index) for index in range(trainer.num_steps)]
    assert shares[:first] == [None] * first and shares[-1] == pytest.approx(0.01)
    joint = [share for share in shares if share is not None]
    assert joint == sorted(joint) and joint[0] > 0
    figures = trainer.figures  # type: ignore[attr-defined]
    assert "base_loss" not in figures[0] and figures[-1]["base_loss"] > 0 and figures[-1]["adapter/grad_norm"] > 0


def test_heads_and_adapter_are_clipped_apart(tmp_path: Path) -> None:
    """The large gradient of the one must not silence the other."""
    trainer = make_trainer(tmp_path, max_grad_norm=0.5)
    parts = (trainer.headed.adapter.parameters(), list(trainer.heads.parameters()))
    for parameters, size in zip(parts, (100.0, 1e-6), strict=True):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, size)
    trainer.clip_gradients(trainer.first_joint_step + 1)
    norms = [torch.cat([p.grad.flatten() for p in parameters]).norm() for parameters in parts]  # type: ignore[union-attr]
    assert norms[0] == pytest.approx(0.5, rel=1e-4)
    assert all((p.grad == 1e-6).all() for p in parts[1])  # type: ignore[union-attr]


def test_changed_base_is_caught(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    real = trainer._step

    def step(*args: Any) -> Any:
        next(iter(base_model.weight_tensors(trainer.headed.base).values())).data[0, 0] += 1e-3
        return real(*args)

    trainer._step = step  # type: ignore[method-assign,assignment]
    with pytest.raises(AssertionError, match="base model changed"):
        trainer.train()


def test_the_heads_loss_moves_the_base_towards_the_heads(tmp_path: Path) -> None:
    """Heads on a base that may move, a large share of their loss in it, fit better than on a frozen one; a smaller share moves it less."""
    options: dict[str, Any] = {"epochs": 8, "lora_start_ratio": 0.1, "lora_learning_rate": 0.01}
    frozen = make_frozen_trainer(tmp_path / "frozen", epochs=8)
    frozen.accelerator.log = lambda figures, step: figures_of_frozen.append(figures)  # type: ignore[method-assign]
    figures_of_frozen: list[dict[str, float]] = []
    free, held = (make_trainer(tmp_path / str(share), lora_heads_share=share, **options) for share in (5.0, 0.05))
    for trainer in (frozen, free, held):
        trainer.train()
    last = [figures_of_frozen[-1], free.figures[-1], held.figures[-1]]  # type: ignore[attr-defined]
    heads_loss = [sum(figures[f"slot{k}/loss"] for k in (1, 2, 3)) for figures in last]
    assert heads_loss[1] < heads_loss[0] - 0.1
    assert 0 < last[2]["base_loss"] < last[1]["base_loss"] / 2


class Killed(Exception):
    pass


@pytest.mark.parametrize("save_every", [2, 7], ids=["while heads train alone", "while both train"])
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_every: int) -> None:
    whole = make_trainer(tmp_path / "whole", save_every=save_every)
    assert (save_every < whole.first_joint_step) == (save_every == 2) and save_every < whole.num_steps
    whole.train()
    real = trainer_module.save_checkpoint

    def save_then_die(*args: Any, **options: Any) -> None:
        real(*args, **options)
        raise Killed

    monkeypatch.setattr(trainer_module, "save_checkpoint", save_then_die)
    with pytest.raises(Killed):
        make_trainer(tmp_path / "killed", save_every=save_every).train()
    monkeypatch.setattr(trainer_module, "save_checkpoint", real)
    resumed = make_trainer(tmp_path / "killed", save_every=save_every)
    for parameter in resumed.headed.adapter.parameters():
        parameter.data.zero_()  # the checkpoint alone brings the adapter back
    resumed.train()
    assert len(resumed.figures) == whole.num_steps - save_every  # type: ignore[attr-defined]
    for name, weight in result(whole)["weights"].items():
        assert torch.equal(weight, result(resumed)["weights"][name]), name
    with pytest.raises(ValueError, match=r"lora_rank was 4, is 5"):
        make_trainer(tmp_path / "killed", save_every=save_every, lora_rank=5).train()


def assert_same_run(a: dict[str, Any], b: dict[str, Any]) -> None:
    torch.testing.assert_close(torch.tensor(a["losses"]), torch.tensor(b["losses"]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a["weights"], b["weights"], atol=2e-5, rtol=1e-4)


@pytest.mark.distributed
def test_two_processes_equal_one(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    program = ["-m", "tests.train.medusa2_runs", str(tmp_path / "two.pt"), str(tmp_path / "two")]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, *launcher, *program], env=environment, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr
    two = torch.load(tmp_path / "two.pt")
    assert two["num_processes"] == 2 and "MULTI_CPU" in two["distributed_type"], "the run was not distributed"
    one = make_trainer(tmp_path / "one", batch_size=4)
    one.train()
    assert_same_run(two, result(one))
    other = make_trainer(tmp_path / "other", batch_size=4, lora_heads_share=0.1)
    other.train()
    with pytest.raises(AssertionError):  # control: the adapter's share shows
        assert_same_run(two, result(other))


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(tmp_path / "cache"))
    make_workspace(tmp_path)
    return tmp_path


def make_workspace(folder: Path) -> None:
    """A model whose embeddings are tied, its tokenizer and 30 conversations."""
    save_base(folder / "base")
    chooser = random.Random(0)
    with (folder / "data.jsonl").open("w") as file:
        for index in range(30):
            question, answer = (" ".join(chooser.choices(WORDS, k=12)) for _ in range(2))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"row-{index}", "messages": messages}) + "\n")


def save_base(folder: Path, family: str = "gemma2", dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    tiny_model(family, seed).to(dtype).save_pretrained(folder)  # type: ignore[arg-type]
    tiny_tokenizer().save_pretrained(folder)


def arguments(workspace: Path, *extra: str) -> list[str]:
    base = ["--base", str(workspace / "base"), "--data", str(workspace / "data.jsonl"), "--output-dir", str(workspace / "out")]
    sizes = ["--num-heads", "2", "--max-length", "128", "--pack-length", "128", "--batch-size", "2", "--num-workers", "0"]
    return [*base, *sizes, "--lora-rank", "4", "--learning-rate", "0.05", *extra]


def test_trains_merges_and_decodes_exactly(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`-m train`, then `medusa-heads merge`: heads load on the merged base alone, and its text with them is its own."""
    merged, out = workspace / "merged", workspace / "out"
    assert (
        main(
            arguments(
                workspace,
                "--held-out",
                "5",
                "--epochs",
                "2",
                "--num-validation-prompts",
                "1",
                "--draft-vocab-size",
                "60",
                "--lora-heads-share",
                "2",
            )
        )
        == 0
    )
    assert (out / "adapter" / "adapter_config.json").is_file() and (out / "trees" / "measured.json").is_file()
    merge = ["merge", "--base", str(workspace / "base"), "--adapter", str(out / "adapter")]
    assert command([*merge, "--output", str(merged)]) == 0
    model, tokenizer = base_model.load_base(str(merged))
    checkpoint = load_heads(out, model)
    card = (out / "README.md").read_text()
    assert checkpoint.config.base_fingerprint == fingerprint(model)
    assert f"tuned base alone: `{workspace / 'base'}`" in card and checkpoint.config.base_fingerprint in card and "--base MERGED" in card

    generator = Generator(model, HeadsDrafter(model, checkpoint.heads, BeamTree(8), draft_vocabulary=checkpoint.draft_vocabulary))
    prompts = [tokenizer.encode(text) for text in ("the cat sat on", "what is the answer", "a dog ran")]
    with_heads = generator.generate(prompts, max_new_tokens=24, eos_ids=())
    assert [a.token_ids for a in with_heads] == [a.token_ids for a in Generator(model).generate(prompts, max_new_tokens=24, eos_ids=())]

    untouched, _ = base_model.load_base(str(workspace / "base"))
    with pytest.raises(ValueError, match=r"medusa-heads merge --base \S+base --adapter \S+adapter --output MERGED"):
        load_heads(out, untouched)
    capsys.readouterr()
    assert command([*merge, "--output", str(merged)]) == 2
    assert "is not empty" in capsys.readouterr().err
    save_base(workspace / "other", seed=1)
    assert command(["merge", "--base", str(workspace / "other"), "--adapter", str(out / "adapter"), "--output", str(workspace / "x")]) == 2
    assert "give the --base" in capsys.readouterr().err and not (workspace / "x").exists()


@pytest.mark.compat
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.bfloat16), ("llama", torch.float16), ("gemma2", torch.float32), ("gpt2", torch.float32)]
)
def test_the_merged_model_is_the_tuned_one(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    save_base(tmp_path / "base", family, dtype)
    base, _ = base_model.load_base(str(tmp_path / "base"), dtype=torch.float32)
    adapter = Adapter.attach(base, rank=4, alpha=6)
    ids = torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    untouched = base_model.forward_hidden(base, ids)
    randomise(adapter)
    tuned = base_model.forward_hidden(base, ids)
    with adapter.off():
        assert torch.equal(base_model.forward_hidden(base, ids), untouched)
    adapter.save(tmp_path / "adapter", base_name="somewhere")
    Merge(base=str(tmp_path / "base"), adapter=tmp_path / "adapter", output=tmp_path / "merged").run()
    merged, _ = base_model.load_base(str(tmp_path / "merged"))
    assert merged.dtype == dtype and fingerprint(merged) == fingerprint(merged_base(str(tmp_path / "base"), tmp_path / "adapter")[0])
    assert {p.name for p in (tmp_path / "base").iterdir()} == {p.name for p in (tmp_path / "merged").iterdir()}
    names = [set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("base", "merged")]
    assert names[0] == names[1], "tied embeddings stay tied, and nothing of the adapter is left"
    exact = base_model.forward_hidden(merged.float(), ids)
    scale = (tuned - untouched).abs().max()
    assert (exact - tuned).abs().max() < scale * (1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_merging_rounds_as_exact_arithmetic(tmp_path: Path, dtype: torch.dtype) -> None:
    """A sum in float32 rounds otherwise, by machine and thread count: float64 decides."""
    save_base(tmp_path / "base", "llama", dtype)
    base, _ = base_model.load_base(str(tmp_path / "base"))
    adapter = Adapter.attach(base, rank=4)
    randomise(adapter)
    layer = base.model.layers[0].self_attn.q_proj  # type: ignore[union-attr,index,operator]
    parts: list[Tensor] = [t.detach().double() for t in (layer.base_layer.weight, layer.lora_B.default.weight, layer.lora_A.default.weight)]  # type: ignore[union-attr]
    expected = (parts[0] + parts[1] @ parts[2]).to(dtype)
    merged = adapter.merge()
    assert torch.equal(merged.model.layers[0].self_attn.q_proj.weight, expected)  # type: ignore[union-attr,index,operator]
    assert not any("lora" in name for name, _ in merged.named_parameters())


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["lm_head"], "LM head and input embedding are never adapted.*as here"),
        (["q_proj", "embed_tokens"], "'embed_tokens': LM head and input embedding are never adapted"),
        ([], "--lora-targets names no layer: leave it out for all-linear, or take some of down_proj"),
        (["norm"], "--lora-targets 'norm': not a linear layer; take some of down_proj"),
        (["q_proj", "self_attn"], "--lora-targets 'self_attn': not a linear layer"),
        (["q_prj"], "'q_prj', did you mean 'q_proj'|'q_prj'.*no such layer.*q_proj"),
    ],
)
def test_targets_that_cannot_be(targets: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Adapter.attach(tiny_model("gemma2"), rank=2, targets=targets)


def test_a_foreign_adapter_on_the_lm_head_is_refused(tmp_path: Path) -> None:
    save_base(tmp_path / "base")
    base, _ = base_model.load_base(str(tmp_path / "base"))
    Adapter.attach(base, rank=2, targets=["q_proj"]).save(tmp_path / "adapter", base_name="x")
    path = tmp_path / "adapter" / "adapter_config.json"
    written = json.loads(path.read_text())
    for foreign in ({"target_modules": ["q_proj", "lm_head"]}, {"target_modules": ".*lm_head"}):
        path.write_text(json.dumps(written | foreign))
        with pytest.raises(ValueError, match=r"--adapter .*LM head and input embedding are never adapted.*as here"):
            merged_base(str(tmp_path / "base"), tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"no adapter_config\.json there"):
        merged_base(str(tmp_path / "base"), tmp_path)


def test_an_adapter_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_base(tmp_path / "base", "llama")
    save_base(tmp_path / "other", "qwen3")
    base, _ = base_model.load_base(str(tmp_path / "base"))
    Adapter.attach(base, rank=2).save(tmp_path / "adapter", base_name="x")
    with pytest.raises(ValueError, match=r"adapter \S+ does not fit this base"):
        merged_base(str(tmp_path / "other"), tmp_path / "adapter")


def test_digest_of_the_base_is_that_without_an_adapter() -> None:
    """An adapter in place changes names, never weights."""
    model = tiny_model("llama")
    own = list(base_model.weight_tensors(model).values())
    adapter = Adapter.attach(model, rank=2)
    assert {id(w) for w in own} == {id(w) for w in base_model.weight_tensors(model).values()}
    before = weights_digest(model)
    randomise(adapter)
    assert weights_digest(model) == before
    own[-1].data.view(-1)[0] += 1
    assert weights_digest(model) != before
