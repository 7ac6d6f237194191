"""The chunked objectives equal the naive ones on full logits, values and gradients, whatever the chunk size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.train.naive_objectives import naive_loss
from train import losses
from train.losses import LogitHead, Teacher, chunked_loss
from train.objectives import Objective, Transform

N, M, D, V = 37, 41, 12, 53
OBJECTIVES = [Objective("ce"), Objective("kl"), Objective("tv"), Objective("lk"), Objective("lk", lk_eta=3.0), Objective("ce_l1")]
SOFTCAP = Transform(scale=0.7, cap=3.0)


def apply(transform: Transform, logits: Tensor) -> Tensor:
    logits = logits * transform.scale
    return logits if transform.cap is None else torch.tanh(logits / transform.cap) * transform.cap


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """States, the head's weight and bias, targets, and what each pair weighs: some of them nothing."""
    torch.manual_seed(1)
    states = torch.randn(N, D, requires_grad=True)
    weight = torch.randn(V, D, requires_grad=True)
    return states, weight, torch.randn(V), torch.randint(0, V, (N,)), torch.rand(N) * (torch.arange(N) % 5 > 0)


def teacher(transform: Transform) -> Teacher:
    head = LogitHead(torch.randn(V, D), torch.randn(V), transform)
    return Teacher(torch.randn(M, D), torch.randint(0, M, (N,)), head)


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("transform", [Transform(), SOFTCAP], ids=["plain", "softcap"])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 37, 100])
def test_equals_naive_loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch, objective: Objective, transform: Transform, trainable: bool, rows: int
) -> None:
    monkeypatch.setattr(losses, "chunk_rows", lambda device, vocab: rows)
    states, weight, bias, targets, weights = inputs()
    weight = weight if trainable else weight.detach()
    wanted = [states, weight] if trainable else [states]
    base = teacher(SOFTCAP)
    scores = apply(transform, states @ weight.t() + bias)
    base_scores = apply(SOFTCAP, base.head.logits(base.states_MD[base.index_N]))
    per_pair = naive_loss(objective, scores, targets, base_scores)
    expected = torch.autograd.grad((per_pair * weights).sum() * 1.7, wanted)

    head = LogitHead(weight, bias, transform)
    found = chunked_loss(states, head, targets, objective=objective, teacher=base if objective.needs_teacher else None)
    gradients = torch.autograd.grad((found.losses * weights).sum() * 1.7, wanted)

    torch.testing.assert_close(found.losses, per_pair, atol=1e-5, rtol=1e-5)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert torch.equal(gradients[0][weights == 0], torch.zeros(8, D))
    assert torch.equal(found.ranks, (scores > scores.gather(1, targets[:, None])).sum(-1))
    torch.testing.assert_close(found.log_probs, scores.log_softmax(-1).gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    overlap = torch.minimum(base_scores.softmax(-1), scores.softmax(-1)).sum(-1)
    torch.testing.assert_close(found.overlaps, overlap if objective.needs_teacher else torch.zeros(N), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_the_base_itself_as_draft_costs_nothing_but_cross_entropy(objective: Objective) -> None:
    """q = p: the least of every divergence, where its gradient vanishes."""
    states, weight, bias, targets, _ = inputs()
    head = LogitHead(weight.detach(), bias)
    base = Teacher(states.detach(), torch.arange(N), head)
    found = chunked_loss(states, head, targets, objective=objective, teacher=base if objective.needs_teacher else None)
    share = {"ce": 1.0, "ce_l1": 0.1}.get(objective.name, 0.0)
    torch.testing.assert_close(found.losses.detach(), -share * found.log_probs, atol=1e-5, rtol=1e-5)
    if share == 0:
        gradient = torch.autograd.grad(found.losses.sum(), states)[0]
        torch.testing.assert_close(gradient, torch.zeros(N, D), atol=1e-5, rtol=0)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_logits_far_apart_stay_finite(objective: Objective) -> None:
    """A law with all its weight on one token, against one with all on another: exp underflows, the loss does not."""
    states, weight, _, targets, _ = inputs()
    head = LogitHead(weight.detach() * 200)
    base = Teacher(-states.detach(), torch.arange(N), head)
    found = chunked_loss(states, head, targets, objective=objective, teacher=base if objective.needs_teacher else None)
    gradient = torch.autograd.grad(found.losses.sum(), states)[0]
    assert found.losses.isfinite().all() and gradient.isfinite().all()


def test_frozen_weight_gets_no_gradient() -> None:
    states, weight, _, targets, _ = inputs()
    chunked_loss(states, LogitHead(weight.detach()), targets).losses.sum().backward()
    assert states.grad is not None and states.grad.abs().sum() > 0
    assert weight.grad is None


@pytest.mark.parametrize("trainable", [False, True])
def test_no_pairs_still_gives_zero_gradients(trainable: bool) -> None:
    states, weight = torch.randn(0, D, requires_grad=True), torch.randn(V, D, requires_grad=trainable)
    loss = chunked_loss(states, LogitHead(weight), torch.zeros(0, dtype=torch.long)).losses.sum()
    gradients = torch.autograd.grad(loss, [states, weight] if trainable else [states])
    assert loss.item() == 0 and gradients[0].shape == (0, D)
    assert not trainable or torch.equal(gradients[1], torch.zeros(V, D))


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("objective", [Objective("ce"), Objective("lk")], ids=str)
def test_bfloat16_states_are_scored_in_float32(objective: Objective, trainable: bool) -> None:
    states, weight, _, targets, weights = inputs()
    rounded, base = weight.detach().bfloat16(), teacher(Transform()) if objective.needs_teacher else None
    found, gradients = {}, {}
    for dtype in (torch.bfloat16, torch.float32):
        half = states.detach().bfloat16().to(dtype).requires_grad_()
        own = rounded.float().requires_grad_(trainable)  # float32 masters under bfloat16 states
        found[dtype] = chunked_loss(half, LogitHead(own), targets, objective=objective, teacher=base)
        wanted = [half, own] if trainable else [half]
        gradients[dtype] = torch.autograd.grad((found[dtype].losses * weights).sum(), wanted)
    assert found[torch.bfloat16].losses.dtype == torch.float32
    torch.testing.assert_close(found[torch.bfloat16].losses, found[torch.float32].losses, atol=0.05, rtol=0.02)
    for a, b, dtype in zip(gradients[torch.bfloat16], gradients[torch.float32], (torch.bfloat16, torch.float32), strict=False):
        assert a.dtype == dtype
        torch.testing.assert_close(a.float(), b, atol=0.05, rtol=0.02)


def test_a_second_backward_is_refused() -> None:
    """The stored gradient is scaled in place: using it twice must fail, not be wrong."""
    states, weight, _, targets, _ = inputs()
    loss = chunked_loss(states, LogitHead(weight.detach()), targets).losses.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
