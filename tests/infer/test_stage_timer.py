"""Seconds per stage of real decoding; what is not timed is not slowed."""

from __future__ import annotations

import time

import pytest
import torch

from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.stage_timer import STAGES, NoTimer, StageTimer
from infer.tree_spec import BeamTree
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model


def test_decoding_is_timed_stage_by_stage() -> None:
    model = tiny_model("llama")
    generator = Generator(model, HeadsDrafter(model, random_heads(model), BeamTree(6)))
    timer = StageTimer(model.device)
    start, num_steps, waited = time.perf_counter(), 0, 0.0
    for _ in generator.steps([[5, 6, 7]], max_new_tokens=10, eos_ids=(), timer=timer):
        num_steps += 1
        time.sleep(0.01)  # the caller's own time
        waited += 0.01
    total = time.perf_counter() - start
    assert {stage: timer.counts[stage] for stage in STAGES if stage != "other"} == dict.fromkeys(
        ("draft", "forward", "logits", "verify", "compact"), num_steps - 1
    )
    assert all(timer.seconds[stage] > 0 for stage in STAGES)
    assert timer.seconds["forward"] > timer.seconds["compact"]
    assert sum(timer.seconds.values()) <= total - waited


def test_the_device_is_waited_for_only_when_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    cuda = torch.device("cuda")
    with StageTimer(cuda).stage("draft"):
        pass
    assert waits == [cuda, cuda]
    with NoTimer().stage("draft"):
        pass
    with StageTimer(torch.device("cpu")).stage("draft"):
        pass
    assert len(waits) == 2


def test_a_stage_that_fails_is_counted() -> None:
    timer = StageTimer(torch.device("cpu"))
    with pytest.raises(KeyError), timer.stage("verify"):
        raise KeyError
    assert timer.counts["verify"] == 1
