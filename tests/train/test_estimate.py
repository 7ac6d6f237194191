"""What `estimate` counts against what steps then take: weights and operations exactly, the rest within bounds."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from medusa_heads import base_model, cli
from medusa_heads.checkpoint import save_heads
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import create_heads
from tests.tiny_models import TURN_END, tiny_model, tiny_tokenizer
from tests.train.live_bytes import LiveBytes
from train import calibration
from train import estimate as estimates
from train.batch import TrainBatch, make_batch
from train.calibration import Calibration, Calibrations, base_config, empty_base, measure_steps, without_tokens
from train.config import parse_config
from train.cost_model import BaseSize, BatchSize, HeadsSize, activation_bytes, count_base, count_heads, disk_bytes, memory, step_flops
from train.cost_rows import MODES, exchange_bytes
from train.estimate import Estimate, estimate, largest_batch
from train.headed_model import HeadedModel
from train.objectives import Objective
from train.packing import PackedBatch


def full_batch(num_rows: int, length: int, num_heads: int, vocab_size: int) -> TrainBatch:
    """Random tokens, everything supervised."""
    ids = torch.randint(0, vocab_size, (num_rows, length))
    positions = torch.arange(length).expand(num_rows, -1).contiguous()
    return make_batch(
        PackedBatch(ids, positions, torch.ones_like(ids), (length - 2 - positions).clamp(0, num_heads), [["row"]] * num_rows), num_heads
    )


def headed(
    *, vocab_size: int = 500, heads: HeadsConfig | None = None, objective: str = "ce", attention: str = "sdpa", width: int = 64
) -> tuple[HeadedModel, BaseSize, HeadsSize]:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab_size,
    )
    base = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    model = HeadedModel(base, create_heads(heads or HeadsConfig(num_heads=3), base), objective=Objective(objective))
    size = count_base(base)
    has_teacher = Objective(objective).needs_teacher
    return model, size, count_heads(model.heads.config, size, draft_vocab_size=None, has_teacher=has_teacher)


def test_weights_gradients_and_optimizer_are_counted_exactly() -> None:
    for heads_config in (HeadsConfig(num_heads=3), HeadsConfig(num_heads=2, num_layers=3), HeadsConfig(num_heads=2, own_lm_head=True)):
        model, base, heads = headed(heads=heads_config)
        optimizer = torch.optim.AdamW(model.heads.parameters())
        model(**full_batch(1, 16, heads.num_heads, 500).tensors, slot_weights=torch.ones(heads.num_heads)).loss.backward()
        optimizer.step()
        parts = memory(base, heads, activations=0, num_processes=1, strategy="ddp")
        assert parts.base == sum(weight.nbytes for weight in model.base.parameters())
        assert parts.heads == sum(weight.nbytes for weight in model.heads.parameters())
        assert parts.gradients == sum(weight.grad.nbytes for weight in model.heads.parameters() if weight.grad is not None)
        states = [value for state in optimizer.state.values() for name, value in state.items() if name.startswith("exp_avg")]
        assert parts.optimizer == sum(value.nbytes for value in states)
        assert parts.gathered == 0 and parts.total == parts.base + parts.heads + parts.gradients + parts.optimizer


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_base_is_counted_without_its_weights(family: str) -> None:
    model = tiny_model(family)
    assert count_base(empty_base(model.config, dtype=torch.float32, device="meta")) == count_base(model)
    half = count_base(empty_base(model.config, dtype=torch.bfloat16, device="meta"))
    assert (half.bytes * 2, half.layer_bytes * 2, half.value_size) == (count_base(model).bytes, count_base(model).layer_bytes, 2)


def test_what_sharding_leaves_on_a_rank() -> None:
    _, base, heads = headed()
    parts: dict[str, Any] = {name: memory(base, heads, activations=7, num_processes=4, strategy=name) for name in ("ddp", "fsdp2")}
    assert parts["ddp"].base == base.bytes and parts["fsdp2"].base == base.bytes // 4
    assert parts["ddp"].optimizer == parts["fsdp2"].optimizer == 8 * heads.num_weights
    assert parts["fsdp2"].gathered == base.outside_bytes + 2 * base.layer_bytes
    assert parts["ddp"].activations == 7
    assert exchange_bytes(base, heads, 4, "ddp", 2) == 0.75 * 8 * heads.num_weights
    assert exchange_bytes(base, heads, 4, "fsdp2", 2) == 0.75 * (2 * base.bytes + 8 * heads.num_weights)
    assert exchange_bytes(base, heads, 4, "fsdp2", 2, runs_base=False) == 0.75 * (2 * base.outside_bytes + 8 * heads.num_weights)


@pytest.mark.parametrize(("objective", "own_lm_head"), [("ce", False), ("kl", False), ("ce", True), ("kl", True)])
def test_operations_are_counted_exactly(objective: str, own_lm_head: bool) -> None:
    config = HeadsConfig(num_heads=3, num_layers=2, own_lm_head=own_lm_head)
    model, base, heads = headed(objective=objective, heads=config, attention="eager")
    batch = full_batch(2, 32, 3, 500)
    of_base, of_heads = step_flops(base, heads, largest_batch([batch]))
    for tensors, expected in ((batch.tensors, of_base + of_heads), (without_tokens(batch, model.base).tensors, of_heads)):
        with FlopCounterMode(display=False) as counter:
            model(**tensors, slot_weights=torch.ones(3)).loss.backward()
        assert expected == counter.get_total_flops()


@pytest.mark.parametrize(
    ("vocab_size", "num_rows", "length", "num_layers", "objective", "own_lm_head"),
    [
        (2000, 4, 128, 2, "ce", False),
        (2000, 2, 128, 1, "kl", False),
        (500, 2, 256, 4, "ce", False),
        (12000, 4, 256, 1, "ce", False),  # several chunks
        (500, 4, 128, 1, "ce", True),
        (50, 8, 128, 8, "ce", False),  # the states of the blocks are the most
        (50, 4, 512, 1, "ce", False),  # the base's forward is the most
    ],
)
def test_activations_are_within_a_fifth(
    vocab_size: int, num_rows: int, length: int, num_layers: int, objective: str, own_lm_head: bool
) -> None:
    heads_config = HeadsConfig(num_heads=3, num_layers=num_layers, own_lm_head=own_lm_head)
    model, base, heads = headed(vocab_size=vocab_size, heads=heads_config, objective=objective)
    batch = full_batch(num_rows, length, 3, vocab_size)
    for stored_states in (False, True):
        tensors = without_tokens(batch, model.base).tensors if stored_states else batch.tensors
        hidden = [tensors["hidden_MD"]] if stored_states else []
        model.zero_grad()
        with LiveBytes(*model.parameters(), *model.buffers(), *tensors.values()) as live:
            output = model(**tensors, slot_weights=torch.ones(3))
            forward = live.peak
            output.loss.backward()
        found = max(forward, live.peak - 4 * heads.num_weights) + sum(tensor.nbytes for tensor in hidden)
        expected = activation_bytes(base, heads, largest_batch([batch]), device_type="cpu", stored_states=stored_states)
        assert 0.8 < expected / found < 1.2, f"expected {expected}, found {found}, stored states: {stored_states}"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, its tokenizer, 60 conversations and a YAML of training options."""
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(tmp_path / "cache"))
    config = copy.deepcopy(tiny_model("llama").config)
    config.num_hidden_layers, config.eos_token_id = 12, TURN_END
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    with (tmp_path / "data.jsonl").open("w") as file:
        for index in range(60):
            messages = [
                {"role": "user", "content": "the cat"},
                {"role": "assistant", "content": "the dog ran on the mat " * (3 + index % 5)},
            ]
            file.write(json.dumps({"id": f"row-{index}", "messages": messages}) + "\n")
    options = f"base: {tmp_path / 'base'}\ndata: [{tmp_path / 'data.jsonl'}]\noutput_dir: {tmp_path / 'out'}\n"
    (tmp_path / "run.yaml").write_text(options + "max_length: 128\npack_length: 128\nbatch_size: 4\nepochs: 3\nnum_workers: 0\n")
    return tmp_path


def arguments(workspace: Path, *extra: str) -> list[str]:
    return ["estimate", "--config", str(workspace / "run.yaml"), *extra]


def test_the_command_prints_a_table_and_json(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(workspace, "--num-processes", "2", "--num-heads", "3", "--hardware", "h100")) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])
    assert all([line["strategy"] for line in found[mode]] == ["ddp", "fsdp2"] for mode in MODES)
    assert all(captured.err.count(mode) >= 2 for mode in ("online", "device", "disk"))
    assert found["heads"]["num_heads"] == 3 and found["base"]["dtype"] == "bfloat16" and found["hardware"] == {"gpu": "h100"}
    assert "GB per rank" in captured.err and "fsdp2" in captured.err
    assert not (workspace / "out").exists(), "nothing was started"


def test_estimated_steps_and_seconds_are_those_of_the_run(workspace: Path) -> None:
    """Time from 2 and 6 layers for 12; a loose bound, since the machine may be busy with other things."""
    from train.__main__ import run

    found = estimate(Estimate(**vars_of(parse_config(arguments(workspace)[1:])), device="cpu"))
    line = found["online"][0]
    assert line["strategy"] == "single" and line["fits"]
    folder = run(parse_config([*arguments(workspace)[1:], "--save-every", "1"]))
    steps = sorted(int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("step-*"))
    assert steps[-1] == found["num_steps"]
    base = AutoModelForCausalLM.from_pretrained(workspace / "base", dtype=torch.float32).requires_grad_(False)
    model = HeadedModel(base, create_heads(HeadsConfig(num_heads=4), base))
    batch = full_batch(4, 128, 4, 300)
    measured = measure_steps(model, [batch] * 6, torch.device("cpu"))
    assert 0.1 < line["step_seconds"] / measured.seconds < 10
    checkpoint = sum(path.stat().st_size for path in (folder / "checkpoints").rglob("state.pt")) / len(steps)
    size = count_base(base)
    heads = count_heads(HeadsConfig(num_heads=4), size, draft_vocab_size=None, has_teacher=False)
    assert disk_bytes(heads, keep_checkpoints=2) == pytest.approx(4 * checkpoint + 4 * heads.num_weights, rel=0.2)


def test_stored_states_are_counted_exactly(workspace: Path) -> None:
    """On disk what the run writes there, on the device what it holds; and the base is paid once, not in every step."""
    from train.__main__ import run

    found = estimate(Estimate(**vars_of(parse_config(arguments(workspace)[1:])), hardware="h100", num_processes=1))
    online, device, disk = (found[mode][0] for mode in MODES)
    run(parse_config([*arguments(workspace)[1:], "--hidden-states", "disk", "--hidden-states-dir", str(workspace / "states")]))
    written = sum(path.stat().st_size for path in (workspace / "states").glob("*.bin")) // 2  # the CPU's float32 for bfloat16
    assert disk["disk_bytes"] - online["disk_bytes"] == written == device["memory_bytes"]["states"] > 0
    assert online["memory_bytes"]["states"] == disk["memory_bytes"]["states"] == 0 and online["making_seconds"] == 0
    flops, speed = found["flops_per_micro_batch"], 0.35 * 989e12
    assert device["step_seconds"] == pytest.approx(flops["heads"] / speed)
    assert device["making_seconds"] == pytest.approx(-(-found["data"]["packed_rows"] // 4) * flops["base"] / speed)
    assert device["hours"] * 3600 == pytest.approx(device["making_seconds"] + found["num_steps"] * device["step_seconds"])
    assert disk["making_seconds"] >= 2 * written / 1e9 and disk["step_seconds"] >= device["step_seconds"]


def test_each_of_several_processes_holds_what_it_reads(workspace: Path) -> None:
    options = vars_of(parse_config(arguments(workspace)[1:])) | {"hardware": "h100", "batch_size": 1, "epochs": 1.0}
    one, two = (estimate(Estimate(**options, num_processes=n))["device"][0]["memory_bytes"]["states"] for n in (1, 2))
    assert one / 2 <= two < 0.8 * one


def test_time_is_a_straight_line_in_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of 12 layers only 2 and 6 are run; the time of one with few layers is measured as it is."""

    depths: list[int] = []

    def measured(model: HeadedModel, batches: Any, device: torch.device) -> Calibration:
        depths.append(len(base_model.decoder_layers(model.base)))
        return Calibration(1.0 + 0.25 * depths[-1], 99)

    monkeypatch.setattr(calibration, "measure_steps", measured)
    monkeypatch.setattr(calibration, "measure_forwards", lambda *arguments: measured(*arguments).seconds - 1)
    for num_layers, seconds in ((12, 4.0), (3, 1.75)):
        config = LlamaConfig(num_hidden_layers=num_layers, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=100)
        settings: dict[str, Any] = dict(dtype=torch.float32, device=torch.device("cpu"), objective=Objective(), d_pace=False)
        found = calibration.calibrate(config, HeadsConfig(), [], draft_vocab_size=None, **settings)
        assert (found.online.seconds, found.online.activation_bytes, found.forward_seconds) == (seconds, 99, seconds - 1)
        assert found.stored.seconds == 1.0 + 0.25 * depths[-1], "not a matter of the layers"
    assert depths == [2, 2, 6, 6, 6, 3, 3, 3]


def vars_of(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def test_a_named_card_is_a_matter_of_arithmetic(workspace: Path) -> None:
    slow, fast = (
        estimate(Estimate(**vars_of(parse_config(arguments(workspace)[1:])), hardware=card))["online"][0] for card in ("a100-80gb", "h100")
    )
    assert slow["hours"] / fast["hours"] == pytest.approx(989 / 312)
    assert slow["memory_bytes"] == fast["memory_bytes"]


@pytest.mark.parametrize(("option", "counted"), [(None, 20), (30, 30)])
def test_initial_heads_bring_their_draft_vocabulary(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, option: int | None, counted: int
) -> None:
    """Counted as well as measured; an own one goes before it, as in training."""
    base = AutoModelForCausalLM.from_pretrained(workspace / "base")
    heads = create_heads(HeadsConfig(num_heads=2), base)
    save_heads(heads, workspace / "heads", card="", draft_vocabulary=torch.arange(5, 25))
    options = vars_of(parse_config(arguments(workspace)[1:])) | {"init_heads": str(workspace / "heads"), "draft_vocab_size": option}
    found = estimate(Estimate(**options, hardware="h100"))
    plain = estimate(Estimate(**options | {"init_heads": None, "num_heads": 2, "draft_vocab_size": counted}, hardware="h100"))
    assert found["heads"]["draft_vocab_size"] == counted
    assert found["heads"] == plain["heads"] and found["flops_per_micro_batch"] == plain["flops_per_micro_batch"]
    measured: list[Any] = []

    def calibrated(*_: Any, draft_vocab_size: int | None, **__: Any) -> Calibrations:
        measured.append(draft_vocab_size)
        return Calibrations(Calibration(1.0, None), Calibration(1.0, None), 1.0)

    monkeypatch.setattr(estimates, "calibrate", calibrated)
    estimate(Estimate(**options, device="cpu"))
    assert measured == [counted]


def test_the_twin_is_counted_as_what_it_is() -> None:
    size = count_base(empty_base(base_config("twin"), dtype=torch.bfloat16, device="meta"))
    assert (size.num_layers, size.hidden_size, round(size.bytes / 1e9, 1)) == (32, 4096, 14.8)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--hardware", "h10"), "--hardware: unknown 'h10' (did you mean 'h100'?)"),
        (("--num-processes", "0"), "num_processes: must be above 0"),
        (("--lora-rank", "8"), "lora_rank: an adapter is not counted here"),
        (("--base", "nowhere/at/all"), "--base"),
        (("--max-length", "513", "--pack-length", "513"), "max_length: 513 is beyond the base model's context of 512 tokens"),
    ],
)
def test_what_cannot_be_estimated_names_its_option(
    workspace: Path, capsys: pytest.CaptureFixture[str], extra: tuple[str, ...], message: str
) -> None:
    try:
        status: object = cli.main(arguments(workspace, *extra))
    except SystemExit as error:  # refused while parsing
        status = error.code
    assert status == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_data_of_another_model_are_refused_as_in_training(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"id": "foreign", "input_ids": [5, 300, 7], "assistant_spans": [[1, 3]]}
    (workspace / "data.jsonl").write_text(json.dumps(row) + "\n")
    assert cli.main(arguments(workspace)) == 2 and "conversation foreign holds token id 300" in capsys.readouterr().err


def test_experts_are_measured_not_assumed(workspace: Path) -> None:
    tiny_model("mixtral").save_pretrained(workspace / "base")
    options = vars_of(parse_config(arguments(workspace)[1:]))
    with pytest.raises(ValueError, match="mixture of experts are not counted"):
        estimate(Estimate(**options, hardware="h100"))


def test_batch_sizes_are_the_largest_met() -> None:
    assert largest_batch([full_batch(2, 32, 3, 50), full_batch(1, 64, 3, 50)]) == BatchSize(2, 64, 62, 3 * 62 - 3)
