"""Fused RMSNorm: the modules of several families, what is left alone, and a whole packed model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infer.engine.fused_norm import FusedRMSNorm, fuse_norms, fused_norm
from tests.tiny_models import tiny_model

HIDDEN = torch.cat([torch.randn(3, 32), 1e-4 * torch.randn(2, 32), torch.zeros(1, 32)])


def norms(family: str) -> list[nn.Module]:
    return [module for module in tiny_model(family).modules() if type(module).__name__.endswith("RMSNorm")]


@pytest.mark.compat
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "phi3", "mixtral", "gpt_oss"])
def test_norms_of_every_kind_are_recognised_and_equal(family: str) -> None:
    found = norms(family)
    assert found
    for norm in found:
        weight: Any = norm.weight
        weight.add_(torch.randn_like(weight))
        fused = fused_norm(norm)
        assert fused is not None
        inputs = HIDDEN[:, : len(weight)]
        torch.testing.assert_close(fused(inputs), norm(inputs), rtol=1e-5, atol=1e-5)


class OddRMSNorm(nn.Module):
    """Not what its name says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32), requires_grad=False), 1e-6

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden - hidden.mean(-1, keepdim=True)) * torch.rsqrt(hidden.var(-1, keepdim=True) + self.eps) * self.weight


class EpsilonOutsideRMSNorm(OddRMSNorm):
    """Differs where inputs are small alone."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden / (hidden.square().mean(-1, keepdim=True).sqrt() + self.eps**0.5) * self.weight


def test_what_computes_something_else_is_left_alone() -> None:
    half = norms("llama")[0].to(torch.bfloat16)
    for other in (OddRMSNorm(), EpsilonOutsideRMSNorm(), nn.LayerNorm(32), half, FusedRMSNorm(torch.ones(32), 1e-6)):
        assert fused_norm(other) is None


def test_a_model_computes_the_same() -> None:
    model, fused = tiny_model("gemma2"), tiny_model("gemma2")
    fuse_norms(fused)
    assert sum(isinstance(module, FusedRMSNorm) for module in fused.modules()) == len(norms("gemma2")) == 9
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(fused(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
