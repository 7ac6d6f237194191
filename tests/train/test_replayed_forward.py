"""A forward replayed for shapes that come again; without a GPU, graphs are played by calling it once more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch import Tensor

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import create_heads
from tests.tiny_models import tiny_model
from tests.train import test_estimate
from train.headed_model import HeadedModel
from train.replayed_forward import MOST_GRAPHS, SEEN_BEFORE, Forward, Graph, ReplayedForward
from train.sharding import share_out

CAPTURE = "train.replayed_forward.capture_graph"


def doubled_sum(a: Tensor, b: Tensor) -> Tensor:
    return 2 * (a + b)


def played(forward: Forward, inputs: list[Tensor]) -> Graph:
    result = forward(*inputs)

    def replay() -> None:
        result.copy_(forward(*inputs))

    return Graph(inputs, result, replay)


def test_every_call_gives_the_result_of_its_own_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CAPTURE, played)
    replayed = ReplayedForward()
    for number in range(3 * SEEN_BEFORE):
        for length in (2, 3):
            inputs = torch.full((length,), float(number)), torch.arange(float(length))
            assert torch.equal(replayed(doubled_sum, *inputs), doubled_sum(*inputs))
    assert len(replayed.graphs) == 2


def captured_lengths(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of calls with inputs of these lengths, in the order in which they were captured."""
    captured: list[int] = []

    def noted(forward: Forward, inputs: list[Tensor]) -> Graph:
        captured.append(len(inputs[0]))
        return played(forward, inputs)

    monkeypatch.setattr(CAPTURE, noted)
    replayed = ReplayedForward()
    for length in lengths:
        replayed(doubled_sum, torch.ones(length), torch.ones(length))
    return captured


def test_a_short_batch_at_the_end_of_every_epoch_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert captured_lengths(10 * [8, 8, 8, 8, 3], monkeypatch) == [8]


def test_no_more_than_a_few_shapes_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [length for length in range(1, MOST_GRAPHS + 3) for _ in range(4**length)]  # each then is most of all calls so far
    assert captured_lengths(lengths, monkeypatch) == list(range(1, MOST_GRAPHS + 1))


def test_what_cannot_be_captured_runs_as_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(forward: Forward, inputs: list[Tensor]) -> Graph:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CAPTURE, fails)
    replayed = ReplayedForward()
    for number in range(3 * SEEN_BEFORE):
        assert replayed(doubled_sum, torch.tensor([1.0]), torch.tensor([float(number)])).item() == 2 + 2 * number
    assert capsys.readouterr().err.count("the base runs without a CUDA graph") == 1


@pytest.mark.parametrize("own_lm_head", [False, True])
def test_steps_from_graphs_have_the_gradients_of_steps_without(own_lm_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches a step; the states of the first are overwritten by those of the second."""
    heads = HeadsConfig(num_heads=3, num_layers=2, own_lm_head=own_lm_head)
    model, _, _ = test_estimate.headed(heads=heads, objective="kl")
    monkeypatch.setattr(CAPTURE, played)
    for _ in range(SEEN_BEFORE):
        found = []
        batches = [test_estimate.full_batch(2, 32, 3, 500) for _ in range(2)]
        for model.replays in (True, False):
            model.zero_grad()
            for batch in batches:
                model(**batch.tensors, slot_weights=torch.ones(3)).loss.backward()
            found.append([weight.grad for weight in model.heads.parameters()])
        assert all(torch.equal(replayed, plain) for replayed, plain in zip(*found, strict=True))
    assert len(model.replayed.graphs) == 1


def test_only_a_whole_base_on_a_gpu_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_model("llama")
    heads = create_heads(HeadsConfig(num_heads=2), base)
    assert not HeadedModel(base, heads).replays
    monkeypatch.setattr(type(base), "device", property(lambda self: torch.device("cuda")))
    model = HeadedModel(base, heads)
    kinds = {DistributedType.NO: True, DistributedType.MULTI_GPU: True, DistributedType.FSDP: False, DistributedType.DEEPSPEED: False}
    monkeypatch.setattr("train.zero.share_out", lambda *arguments, **options: None)
    for kind, expected in kinds.items():
        model.replays = True
        state = SimpleNamespace(fsdp_plugin=SimpleNamespace(), deepspeed_plugin=SimpleNamespace(zero_stage=2))
        accelerator: Any = SimpleNamespace(distributed_type=kind, device=torch.device("cpu"), state=state)
        share_out(accelerator, model, batch_size=1, max_grad_norm=1.0)
        assert model.replays is expected, kind
    base.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    assert not HeadedModel(base, heads).replays


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_graphs_of_a_base_change_nothing() -> None:
    base = tiny_model("llama").to("cuda")  # type: ignore[arg-type]
    headed, generator = HeadedModel(base, create_heads(HeadsConfig(num_heads=2), base)), torch.Generator().manual_seed(0)
    for number in range(6 * SEEN_BEFORE):
        length = (64, 128)[number % 2]
        ids = torch.randint(0, 256, (3, length), generator=generator).cuda()
        positions = torch.arange(length, device="cuda").expand(3, -1).contiguous()
        documents = 1 + (positions > 5 + number).long()
        found = headed.replayed(headed.hidden_states, ids, positions, documents)
        assert torch.equal(found, headed.hidden_states(ids, positions, documents))
    assert len(headed.replayed.graphs) == 2


def waits(a: Tensor) -> Tensor:
    return a * a.sum().item()


def takes_a_fifth(a: Tensor) -> Tensor:
    return torch.zeros(torch.cuda.mem_get_info()[0] // 5, dtype=torch.uint8, device="cuda")[:1] + a


@pytest.mark.gpu
@pytest.mark.parametrize(("forward", "reason"), [(waits, "synchronizing"), (takes_a_fifth, "it keeps")])
def test_a_forward_that_no_graph_can_stand_for_runs_as_it_is(forward: Forward, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    replayed = ReplayedForward()
    for _ in range(3 * SEEN_BEFORE):
        assert torch.equal(replayed(forward, a := torch.rand(2, device="cuda")), forward(a))
    assert not replayed.graphs and reason in capsys.readouterr().err
