"""Chunked cross-entropy equals the naive one, values and gradients, whatever the chunk size."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from train import losses

N, D, V = 37, 12, 53


def inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    states = torch.randn(N, D, requires_grad=True)
    weight = torch.randn(V, D, requires_grad=True)
    return states, weight, torch.randn(V), torch.randint(0, V, (N,)), torch.rand(N)


def softcap(logits: torch.Tensor) -> torch.Tensor:
    return torch.tanh(logits / 3.0) * 3.0


@pytest.mark.parametrize("transform", [None, softcap])
@pytest.mark.parametrize("rows", [1, 5, 37, 100])
def test_equals_naive_loss_and_gradients(monkeypatch: pytest.MonkeyPatch, transform: losses.Transform | None, rows: int) -> None:
    monkeypatch.setattr(losses, "chunk_rows", lambda device, vocab: rows)
    states, weight, bias, targets, weights = inputs()
    logits = states @ weight.t() + bias
    naive = F.cross_entropy(transform(logits) if transform else logits, targets, reduction="none")
    expected = torch.autograd.grad((naive * weights).sum() * 1.7, [states, weight])

    loss, per_pair, ranks = losses.chunked_cross_entropy(states, weight, targets, weights, bias_V=bias, transform=transform)
    found = torch.autograd.grad(loss * 1.7, [states, weight])

    torch.testing.assert_close(per_pair, naive.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loss, (naive * weights).sum(), atol=1e-5, rtol=1e-5)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert torch.equal(ranks, (logits > logits.gather(1, targets[:, None])).sum(-1))


def test_frozen_weight_gets_no_gradient() -> None:
    states, weight, _, targets, weights = inputs()
    loss, _, _ = losses.chunked_cross_entropy(states, weight.detach(), targets, weights)
    loss.backward()
    assert states.grad is not None and states.grad.abs().sum() > 0


def test_no_pairs_still_gives_zero_gradients() -> None:
    states = torch.randn(0, D, requires_grad=True)
    loss, _, _ = losses.chunked_cross_entropy(states, torch.randn(V, D), torch.zeros(0, dtype=torch.long), torch.zeros(0))
    loss.backward()
    assert loss.item() == 0 and states.grad is not None and states.grad.shape == (0, D)


def test_bfloat16_states_are_scored_in_float32() -> None:
    states, weight, _, targets, weights = inputs()
    half = states.detach().bfloat16().requires_grad_()
    loss, _, _ = losses.chunked_cross_entropy(half, weight.detach().bfloat16(), targets, weights)
    reference, _, _ = losses.chunked_cross_entropy(half.detach().float(), weight.detach().bfloat16().float(), targets, weights)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - reference.item()) < 0.02 * abs(reference.item())
