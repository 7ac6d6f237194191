"""Our training step against a straightforward one that materialises all logits: tokens/s and memory.

    python scripts/bench_training.py --base embedded --rows 32 --length 512 --num-heads 4

Both run the same frozen base forward, heads, AdamW and batch of random tokens, every position
supervised, in one process. The straightforward loop computes [K, B, T, V] logits and lets autograd
differentiate torch's cross-entropy. Prints one JSON line.
"""

from __future__ import annotations

import json
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.nn import functional as F

from medusa_heads import base_model
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import create_heads
from medusa_heads.versions import commit, versions
from train.batch import make_batch
from train.headed_model import HeadedModel
from train.packing import PackedBatch


@dataclass(frozen=True, slots=True)
class BenchTraining:
    base: str = "embedded"
    """Base model."""
    rows: int = 32
    """Rows in the batch."""
    length: int = 512
    """Tokens in a row."""
    num_heads: int = 4
    """K."""
    steps: int = 20
    """Timed steps, after 3 of warm-up."""
    which: tuple[str, ...] = ("ours", "all_logits")
    """Which loops to run; one alone makes peak memory on a CPU its own."""

    def run(self) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        base_model.quiet_transformers()
        model, _ = base_model.load_base(self.base, dtype=dtype, device=device)
        found: dict[str, Any] = {}
        for name in self.which:
            torch.manual_seed(0)
            headed = HeadedModel(model, create_heads(HeadsConfig(num_heads=self.num_heads), model))
            step = {"ours": ours, "all_logits": all_logits}[name]
            found[name] = self.measure(lambda headed=headed, step=step: step(headed, self.batch(model, device)), headed, device)
        if len(found) == 2:
            found["speed_ratio"] = found["ours"]["tokens_per_second"] / found["all_logits"]["tokens_per_second"]
            if device.type == "cuda":
                found["memory_ratio"] = found["ours"]["peak_bytes"] / found["all_logits"]["peak_bytes"]
        hardware = (
            torch.cuda.get_device_name()
            if device.type == "cuda"
            else f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
        )
        settings = {"rows": self.rows, "length": self.length, "num_heads": self.num_heads, "steps": self.steps, "dtype": str(dtype)}
        print(json.dumps({"hardware": hardware, "settings": settings, "versions": versions(), "commit": commit(), **found}))

    def batch(self, model: Any, device: torch.device) -> PackedBatch:
        ids = torch.randint(0, base_model.vocab_size(model), (self.rows, self.length), generator=torch.Generator().manual_seed(0))
        positions = torch.arange(self.length).expand(self.rows, -1).contiguous()
        num_slots = (self.length - 2 - positions).clamp(0, self.num_heads)
        return PackedBatch(ids, positions, torch.ones_like(ids), num_slots, [["row"]] * self.rows)

    def measure(self, step: Callable[[], Tensor], headed: HeadedModel, device: torch.device) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(headed.heads.parameters(), lr=1e-4, fused=device.type == "cuda")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start, loss = 0.0, None
        for index in range(self.steps + 3):
            if index == 3:
                _wait(device)
                start = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = step()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        _wait(device)
        seconds = (time.perf_counter() - start) / self.steps
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "seconds_per_step": seconds,
            "tokens_per_second": self.rows * self.length / seconds,
            "peak_bytes": peak,
            "loss": float(loss),
        }


def ours(headed: HeadedModel, packed: PackedBatch) -> Tensor:
    batch = make_batch(packed, headed.heads.config.num_heads).to(headed.base.device)
    weights = 1.0 / batch.slot_counts.to(headed.base.device)
    return headed(**batch.tensors, slot_weights=weights).loss


def all_logits(headed: HeadedModel, packed: PackedBatch) -> Tensor:
    ids = packed.input_ids.to(headed.base.device)
    with torch.no_grad():
        hidden = base_model.forward_hidden(headed.base, ids)
    states = headed.heads.draft_states(hidden.flatten(0, 1)).unflatten(0, ids.shape)
    logits = base_model.compute_logits(headed.base, states.to(hidden.dtype)).movedim(2, 0)  # [K, B, T, V]
    total = logits.new_zeros((), dtype=torch.float32)
    for k, logits_BTV in enumerate(logits):
        shift = k + 2
        total = total + F.cross_entropy(logits_BTV[:, :-shift].flatten(0, 1).float(), ids[:, shift:].flatten())
    return total


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    tyro.cli(BenchTraining).run()
