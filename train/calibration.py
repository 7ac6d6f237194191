"""A few real training steps on this device, over a base of few layers -> seconds and bytes of steps with all of them, and with none.

No weights are needed, so that a base of any size is measured in seconds: time is a straight line in the number of layers.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from medusa_heads import base_model
from medusa_heads.config import HeadsConfig
from medusa_heads.cost_twin import twin_7b_config, twin_config
from medusa_heads.heads import create_heads
from medusa_heads.quantization import quantization_of
from train import replayed_forward
from train.batch import TrainBatch
from train.headed_model import HeadedModel
from train.objectives import Objective
from train.replayed_forward import SEEN_BEFORE

DEPTHS = (2, 6)
WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class Calibration:
    """seconds: a micro-batch, backward and optimizer step included. activation_bytes: the most a step adds to what lies
    in memory before it, where the device counts it (CUDA)."""

    seconds: float
    activation_bytes: int | None


@dataclass(frozen=True, slots=True)
class Calibrations:
    """A step with the base in it, a step from stored hidden states, and the seconds of the base's forward alone."""

    online: Calibration
    stored: Calibration
    forward_seconds: float


def base_config(base: str, *, revision: str | None = None) -> Any:
    """The config behind `--base`, no weights read. Raises ValueError when there is none, or the base is quantised."""
    if base == "twin":
        return twin_config(base_config("embedded"), twin_7b_config())
    try:
        config = AutoConfig.from_pretrained(base_model.base_path(base), revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(f"--base {base!r} could not be loaded: {error}") from error
    base_model.check_config(config)
    if quantization_of(config):
        raise ValueError(f"--base {base!r} is quantised: its cost cannot be counted; estimate for the model it was made from")
    return config


def empty_base(config: Any, *, dtype: torch.dtype, device: str | torch.device, num_layers: int | None = None) -> PreTrainedModel:
    """A model of this config, cut to `num_layers`, with weights that mean nothing (on `meta`: with none)."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if num_layers is not None:
        for name, value in list(vars(text).items()):
            if isinstance(value, (list, tuple)) and len(value) == text.num_hidden_layers:
                setattr(text, name, value[:num_layers])  # what is listed layer by layer
        text.num_hidden_layers = num_layers
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def calibrate(
    config: Any,
    heads_config: HeadsConfig,
    batches: Sequence[TrainBatch],
    *,
    dtype: torch.dtype,
    device: torch.device,
    objective: Objective,
    d_pace: bool,
    draft_vocab_size: int | None,
) -> Calibrations:
    """batches: micro-batches of the run; the first ones warm up, time is the mean over the others.

    Raises ValueError when a step does not fit on the device.
    """
    num_layers = config.get_text_config().num_hidden_layers
    few, more = DEPTHS
    depths = DEPTHS if num_layers > more else (num_layers,)
    online, forwards = [], []
    for depth in depths:
        base = empty_base(config, dtype=dtype, device=device, num_layers=depth)
        heads = create_heads(heads_config, base)
        vocabulary = None if draft_vocab_size is None else torch.arange(min(draft_vocab_size, base_model.vocab_size(base)))
        headed = HeadedModel(base, heads, draft_vocabulary=vocabulary, objective=objective, d_pace=d_pace)
        try:
            online.append(measure_steps(headed, batches, device))
            forwards.append(measure_forwards(headed, batches, device))
            if depth == depths[-1]:  # the same at every depth
                stored = measure_steps(headed, [without_tokens(batch, base) for batch in batches], device)
        except torch.OutOfMemoryError:
            num_rows, length = batches[0].tensors["input_ids"].shape
            raise ValueError(
                f"batch_size: a step of {num_rows} rows of {length} tokens does not fit on this device; lower batch_size or pack_length"
            ) from None
    rest = (num_layers - depths[-1]) / (more - few)

    def with_all_layers(seconds: Sequence[float]) -> float:
        return seconds[-1] + max(0.0, seconds[-1] - seconds[0]) * rest

    whole = replace(online[-1], seconds=with_all_layers([step.seconds for step in online]))
    return Calibrations(whole, stored, with_all_layers(forwards))


def without_tokens(batch: TrainBatch, base: PreTrainedModel) -> TrainBatch:
    """The same supervised pairs over hidden states that mean nothing, packed as stored ones are, on the base's device."""
    names = ("positions", "pair_position", "pair_slot", "targets")
    tensors = {name: batch.tensors[name].to(base.device) for name in names}
    num_positions, num_heads = len(tensors["positions"]), len(batch.slot_counts)
    tensors["positions"] = torch.arange(num_positions, device=base.device)
    tensors["hidden_MD"] = torch.randn(num_positions + num_heads, base_model.hidden_size(base), dtype=base.dtype, device=base.device)
    return replace(batch, tensors=tensors)


@torch.no_grad()
def measure_forwards(headed: HeadedModel, batches: Sequence[TrainBatch], device: torch.device) -> float:
    """Seconds of the base's forward over a micro-batch."""

    def forward(batch: TrainBatch) -> None:
        tensors = batch.to(device).tensors
        headed.hidden_states(tensors["input_ids"], tensors["position_ids"], tensors["document_ids"])

    return mean_seconds(forward, batches, headed.base)


def measure_steps(headed: HeadedModel, batches: Sequence[TrainBatch], device: torch.device) -> Calibration:
    """Steps as the trainer makes them, one micro-batch each."""
    on_gpu, half = device.type == "cuda", headed.base.dtype != torch.float32
    optimizer = torch.optim.AdamW(headed.heads.parameters(), lr=0.0, fused=on_gpu)
    before, kept_before = 0, replayed_forward.bytes_kept

    def step(batch: TrainBatch) -> None:
        weights_K = 1 / batch.slot_counts.clamp(min=1).to(device)
        with torch.autocast(device.type, headed.base.dtype, enabled=half):
            loss = headed(**batch.to(device).tensors, slot_weights=weights_K).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(headed.heads.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def watch_memory() -> None:
        nonlocal before
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)

    seconds = mean_seconds(step, batches, headed.base, warmed_up=watch_memory if on_gpu else None)
    if not on_gpu:
        return Calibration(seconds, None)
    gradients = sum(weight.nbytes for weight in headed.heads.parameters())
    kept = replayed_forward.bytes_kept - kept_before
    return Calibration(seconds, max(0, torch.cuda.max_memory_allocated(device) - before - gradients) + kept)


def mean_seconds(
    work: Callable[[TrainBatch], None], batches: Sequence[TrainBatch], base: PreTrainedModel, *, warmed_up: Callable[[], None] | None = None
) -> float:
    """Over the batches after the first WARM_UP_STEPS. A GPU meets all of them before, until their forwards are graphs: kernels are chosen
    and memory is set aside anew for every shape, which took longer than the steps themselves."""
    assert len(batches) > WARM_UP_STEPS
    for batch in [*batches] * (SEEN_BEFORE + 1) if base.device.type == "cuda" else batches[:WARM_UP_STEPS]:
        work(batch)
    base_model.synchronize(base)
    if warmed_up:
        warmed_up()
    started = time.perf_counter()
    for batch in batches[WARM_UP_STEPS:]:
        work(batch)
    base_model.synchronize(base)
    return (time.perf_counter() - started) / (len(batches) - WARM_UP_STEPS)
