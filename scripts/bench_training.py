"""Our training step, from tokens and from stored hidden states, against a straightforward one: tokens/s and memory.

    python scripts/bench_training.py --base embedded --rows 64 --length 512 --num-heads 4
    python scripts/bench_training.py --base embedded --rows 64 --length 512 --num-heads 4 --draft-vocab-size 12288

All run the same heads, AdamW and rows of random tokens, every position supervised, in one process. `online` and `device` take their
batches from the trainer's own loader, with the base in every step or with its hidden states on the device from the start. The
straightforward loop computes K times [B, T, V] logits and lets autograd differentiate torch's cross-entropy. `base_forward` is the base
alone on the same batches, below which no online step can get. On a GPU `online` and it launch the base as one CUDA graph, as training does,
and the other loops kernel by kernel, which costs them nothing while rows are many. `liger`, if asked for, takes Liger-Kernel's fused linear
cross-entropy for our loss (a GPU, `pip install liger-kernel`); it ranks no targets, which ours does for the accuracies of slots. Prints
one JSON line.
"""

from __future__ import annotations

import json
import platform
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from medusa_heads import base_model
from medusa_heads.cli import run_command
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import create_heads
from medusa_heads.versions import commit, versions
from train import replayed_forward
from train.batch import TrainBatch
from train.config import TrainConfig
from train.headed_model import HeadedModel
from train.hidden_states import training_windows
from train.packing import PackedDataset
from train.windows import WindowPlan

WARM_UP_STEPS = 3


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
    draft_vocab_size: int | None = None
    """Tokens that are proposed, and drawn; None: all."""
    steps: int = 20
    """Timed steps, after 3 of warm-up."""
    num_batches: int = 4
    """Different batches, met in turn."""
    num_workers: int = 2
    """Processes or threads that load ahead."""
    which: tuple[Literal["online", "device", "base_forward", "all_logits", "liger"], ...] = (
        "online",
        "device",
        "base_forward",
        "all_logits",
    )
    """Which loops to run; one alone makes peak memory on a CPU its own."""

    def run(self) -> None:
        accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
        device = accelerator.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        base_model.quiet_transformers()
        if min(self.rows, self.steps, self.num_heads, self.num_batches) < 1 or self.length <= self.num_heads + 1:
            raise ValueError("--rows, --steps, --num-heads and --num-batches must be at least 1, --length more than --num-heads + 1")
        if "liger" in self.which and not find_spec("liger_kernel"):
            raise ValueError("--which liger: pip install liger-kernel, or leave it out")
        model, _ = base_model.load_base(self.base, dtype=dtype, device=device)
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= base_model.vocab_size(model):
            raise ValueError(f"--draft-vocab-size {self.draft_vocab_size}: the base has {base_model.vocab_size(model)} tokens")
        packed = self.packed(base_model.vocab_size(model))
        found: dict[str, Any] = {}
        for name in self.which:
            torch.manual_seed(0)
            vocabulary = None if self.draft_vocab_size is None else torch.arange(self.draft_vocab_size)
            heads = create_heads(HeadsConfig(num_heads=self.num_heads), model)
            headed = HeadedModel(model, heads, draft_vocabulary=vocabulary)
            started = time.perf_counter()
            batches = self.batches(headed, packed, accelerator, "device" if name == "device" else "online")
            _wait(device)
            seconds = time.perf_counter() - started
            step = {"all_logits": all_logits, "base_forward": base_forward, "liger": liger}.get(name, ours)
            try:
                found[name] = self.measure(step, headed, batches, accelerator) | {"seconds_before_the_first_step": seconds}
            except torch.OutOfMemoryError as error:  # all logits at once need tens of gigabytes; the other rows count all the same
                print(f"{name}: {error}", file=sys.stderr)
        for name, other in (("online", "all_logits"), ("online", "liger"), ("device", "online"), ("online", "base_forward")):
            if name in found and other in found:
                found[f"speed_ratio_{name}_to_{other}"] = found[name]["tokens_per_second"] / found[other]["tokens_per_second"]
                if device.type == "cuda":
                    found[f"memory_ratio_{name}_to_{other}"] = found[name]["peak_bytes"] / found[other]["peak_bytes"]
        hardware = (
            torch.cuda.get_device_name()
            if device.type == "cuda"
            else f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
        )
        settings = {name: getattr(self, name) for name in ("rows", "length", "num_heads", "draft_vocab_size", "steps", "num_workers")}
        settings["dtype"] = str(dtype)
        print(json.dumps({"hardware": hardware, "settings": settings, "versions": versions(), "commit": commit(), **found}), flush=True)

    def packed(self, vocab_size: int) -> PackedDataset:
        """Rows of one document each; all tokens but the first are an answer."""
        shape = (self.rows * self.num_batches, self.length)
        ids = torch.randint(0, self.draft_vocab_size or vocab_size, shape, generator=torch.Generator().manual_seed(0))
        mask = [False] + [True] * (self.length - 1)
        names = [f"row-{index}" for index in range(len(ids))]
        rows = datasets.Dataset.from_dict({"id": names, "input_ids": ids.tolist(), "assistant_mask": [mask] * len(ids)})
        return PackedDataset(rows, self.length, self.num_heads)

    def batches(self, headed: HeadedModel, packed: PackedDataset, accelerator: Accelerator, mode: Any) -> Iterator[list[TrainBatch]]:
        config = TrainConfig(
            output_dir="", data=["random"], hidden_states=mode, batch_size=self.rows, num_workers=self.num_workers, num_heads=self.num_heads
        )
        plan = WindowPlan(len(packed), self.rows, 1, 1, 0, 0)
        return training_windows(config, headed, packed, plan, accelerator, first_step=0, num_steps=self.steps + WARM_UP_STEPS)

    def measure(
        self, step: Callable[..., Tensor], headed: HeadedModel, batches: Iterator[list[TrainBatch]], accelerator: Accelerator
    ) -> dict[str, Any]:
        device, on_gpu = accelerator.device, accelerator.device.type == "cuda"
        optimizer = torch.optim.AdamW(headed.heads.parameters(), lr=1e-4, fused=on_gpu)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        start, loss, kept_before = 0.0, torch.zeros(()), replayed_forward.bytes_kept
        weights_K = torch.zeros(self.num_heads, device=device)
        with warnings.catch_warnings(record=True) as waits:
            for index, (batch,) in enumerate(batches):
                if index == 0:
                    weights_K = 1 / batch.slot_counts.to(device)  # the same in every batch
                if index == WARM_UP_STEPS:
                    _wait(device)
                    start = time.perf_counter()
                    _warn_of_host_waits(on_gpu)
                with accelerator.autocast():
                    loss = step(headed, batch.to(device), weights_K)
                if loss.requires_grad:
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
        _wait(device)
        seconds = (time.perf_counter() - start) / self.steps
        kept = replayed_forward.bytes_kept - kept_before
        peak = torch.cuda.max_memory_allocated() + kept if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "seconds_per_step": seconds,
            "tokens_per_second": self.rows * self.length / seconds,
            "peak_bytes": peak,
            "host_waits_per_step": sum("synchroniz" in str(wait.message) for wait in waits) / self.steps if on_gpu else None,
            "loss": float(loss.detach()),
        }


def ours(headed: HeadedModel, batch: TrainBatch, weights_K: Tensor) -> Tensor:
    return headed(**batch.tensors, slot_weights=weights_K).loss  # type: ignore[no-any-return]


def base_forward(headed: HeadedModel, batch: TrainBatch, weights_K: Tensor) -> Tensor:
    inputs = (batch.tensors[name] for name in ("input_ids", "position_ids", "document_ids"))
    return headed.step_states(*inputs).sum()


def all_logits(headed: HeadedModel, batch: TrainBatch, weights_K: Tensor) -> Tensor:
    ids = batch.tensors["input_ids"]
    with torch.no_grad():
        hidden = base_model.forward_hidden(headed.base, ids)
    states = headed.heads.draft_states(hidden.flatten(0, 1)).unflatten(0, ids.shape).to(hidden.dtype)  # [B, T, K, D]
    weight_VD, bias_V = base_model.lm_head_parameters(headed.base)
    if headed.draft_vocabulary is not None:  # the tokens are drawn from its first rows
        num_tokens = len(headed.draft_vocabulary)
        weight_VD, bias_V = weight_VD[:num_tokens], None if bias_V is None else bias_V[:num_tokens]
    transform = base_model.logit_transform(headed.base)
    logits = [transform(F.linear(states_BTD, weight_VD, bias_V)) for states_BTD in states.unbind(2)]  # K times [B, T, V], all at once
    total = hidden.new_zeros((), dtype=torch.float32)
    for k, logits_BTV in enumerate(logits):
        shift = k + 2
        total = total + F.cross_entropy(logits_BTV[:, :-shift].flatten(0, 1).float(), ids[:, shift:].flatten())
    return total


def liger(headed: HeadedModel, batch: TrainBatch, weights_K: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as FusedLoss

    ids = batch.tensors["input_ids"]
    with torch.no_grad():
        hidden = base_model.forward_hidden(headed.base, ids)
    states = headed.heads.draft_states(hidden.flatten(0, 1)).unflatten(0, ids.shape).to(hidden.dtype)  # [B, T, K, D]
    weight = base_model.lm_head(headed.base).weight
    if headed.draft_vocabulary is not None:
        weight = weight[: len(headed.draft_vocabulary)]  # the tokens are drawn from its first rows
    total = hidden.new_zeros((), dtype=torch.float32)
    for k in range(states.shape[2]):
        shift = k + 2
        states_ND, targets_N = states[:, :-shift, k].flatten(0, 1), ids[:, shift:].flatten()
        total = total + FusedLoss.apply(states_ND, weight, targets_N)[0]
    return total


def _warn_of_host_waits(on_gpu: bool) -> None:
    """From here on every wait of the host for the GPU is a warning, which `measure` counts."""
    if on_gpu:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    raise SystemExit(run_command("__main__:BenchTraining", sys.argv[1:], prog="bench_training.py"))
