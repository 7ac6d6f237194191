"""Objectives through the whole headed model, D-PACE weights, and the fused form of a chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import base_model
from tests.train.naive_objectives import naive_d_pace, naive_loss
from tests.train.training_runs import make_trainer, rows
from train import objectives
from train.batch import make_batch
from train.headed_model import HeadedModel
from train.objectives import Objective, Transform, chunk_loss, d_pace_weights, fused_chunk_loss
from train.packing import PackedDataset, collate

OBJECTIVES = [Objective("ce"), Objective("kl"), Objective("tv"), Objective("lk", lk_eta=2.0), Objective("ce_l1")]
VARIANTS: dict[str, dict[str, Any]] = {"shared": {}, "own_lm_head": {"own_lm_head": True}, "draft_vocabulary": {}}


def naive_headed_loss(headed: HeadedModel, data: Any, slot_weights: Tensor, vocabulary: Tensor) -> tuple[Tensor, Tensor]:
    """Every document alone, full logits, every pair by itself: the weighted loss, and the overlap summed per slot."""
    num_heads = headed.heads.config.num_heads
    total, overlaps = torch.zeros(()), torch.zeros(num_heads)
    for row in data:
        ids = torch.tensor(row["input_ids"])
        hidden = base_model.forward_hidden(headed.base, ids[None])[0].detach()
        states = headed.heads.draft_states(hidden)
        own = headed.heads.own_logits(states)
        drafts = (own if own is not None else base_model.compute_logits(headed.base, states))[..., vocabulary]
        teachers = base_model.compute_logits(headed.base, hidden)[..., vocabulary]
        for t in range(len(ids)):
            losses, probabilities = [], []
            for k in range(1, num_heads + 1):
                if t + 1 + k >= len(ids) or not all(row["assistant_mask"][t + 1 : t + 2 + k]):
                    break
                place = (vocabulary == ids[t + 1 + k]).nonzero()[:, 0]
                scores, teacher = drafts[t, k - 1][None], teachers[t + k][None]
                if len(place):
                    losses.append(naive_loss(headed.objective, scores, place, teacher)[0])
                    probabilities.append(scores.softmax(-1)[0, place].item())
                    overlaps[k - 1] += torch.minimum(scores.softmax(-1), teacher.softmax(-1)).sum().item()
                else:
                    losses.append(torch.zeros(()))
                    probabilities.append(0.0)
            weights = naive_d_pace(probabilities) if headed.d_pace else [1.0] * len(losses)
            total = total + sum(loss * w * slot_weights[k] for k, (loss, w) in enumerate(zip(losses, weights, strict=True)))
    return total, overlaps


@pytest.mark.parametrize("d_pace", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_equals_one_pair_at_a_time(tmp_path: Path, objective: Objective, variant: str, d_pace: bool) -> None:
    """Loss, gradient of the heads and overlaps, on a base with a soft cap (Gemma 2)."""
    trainer = make_trainer(tmp_path, family="gemma2", seed_heads=1, **VARIANTS[variant])
    size = base_model.vocab_size(trainer.headed.base)
    vocabulary = torch.arange(3, size, 2) if variant == "draft_vocabulary" else None
    headed = HeadedModel(trainer.headed.base, trainer.heads, draft_vocabulary=vocabulary, objective=objective, d_pace=d_pace)
    data, slot_weights = rows(4), torch.tensor([0.02, 0.01, 0.005])
    packed = PackedDataset(data, pack_length=64, num_heads=3)
    batch = make_batch(collate([packed[i] for i in range(len(packed))]), 3)

    expected, overlaps = naive_headed_loss(headed, data, slot_weights, vocabulary if vocabulary is not None else torch.arange(size))
    output = headed(**batch.tensors, slot_weights=slot_weights)
    wanted = list(headed.heads.parameters())
    torch.testing.assert_close(output.loss, expected, atol=1e-5, rtol=1e-5)
    for a, b in zip(torch.autograd.grad(output.loss, wanted), torch.autograd.grad(expected, wanted), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(output.slot_overlap_K, overlaps if objective.needs_teacher else torch.zeros(3), atol=1e-3, rtol=1e-5)


def test_d_pace_weighs_by_the_expected_length() -> None:
    """Positions with three, two, no and one of three slots; and one whose middle slot has no pair."""
    log_probs = torch.tensor([0.9, 0.5, 0.1, 0.3, 0.8, 1.0, 0.7, 0.2]).log()
    position = torch.tensor([0, 0, 0, 1, 1, 3, 4, 4])
    slot = torch.tensor([0, 1, 2, 0, 1, 0, 0, 2])
    expected = naive_d_pace([0.9, 0.5, 0.1]) + naive_d_pace([0.3, 0.8]) + naive_d_pace([1.0])
    skipped = 0.85 * 0.5 * 0.6
    expected += [0.85 + skipped, skipped]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    found = d_pace_weights(log_probs[order], position[order], slot[order], num_positions=5, num_heads=3)
    torch.testing.assert_close(found, torch.tensor(expected)[order], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("cap", [None, 3.0])
def test_a_chunk_is_one_graph_and_fused_means_the_same(monkeypatch: pytest.MonkeyPatch, objective: Objective, cap: float | None) -> None:
    """The graph that is compiled on a GPU, run here operation by operation, for two sizes of chunk."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, **options, backend="eager", fullgraph=True))
    objectives.fused_chunk_loss.cache_clear()
    torch.compiler.reset()  # variants of one function: a process compiles no more than eight
    torch.manual_seed(0)
    transform, teacher_transform = Transform(0.5, cap), Transform(cap=cap) if objective.needs_teacher else None
    for size in (5, 9):
        logits, targets = torch.randn(size, 31).bfloat16(), torch.randint(0, 31, (size,))
        teacher = torch.randn(size, 31).bfloat16() if objective.needs_teacher else None
        fused = fused_chunk_loss(objective, transform, teacher_transform)(logits, targets, teacher)
        for a, b in zip(fused, chunk_loss(objective, transform, teacher_transform, logits, targets, teacher), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b)
    objectives.fused_chunk_loss.cache_clear()
