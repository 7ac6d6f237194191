"""A training run's options -> what it will cost: memory per rank, disk, tokens per second and hours; nothing is started.

Each with the base in every step, and from hidden states stored on the device or on disk. Memory and
operations are counted (cost_model.py); time is measured on this device by a few real steps
(calibration.py), or assumed from a named card's data sheet.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from infer.hardware import hardware
from infer.loading import pick_device
from medusa_heads import base_model
from medusa_heads.checkpoint import read_vocabulary, resolve_heads
from medusa_heads.config import HeadsConfig
from medusa_heads.suggest import suggest
from train.batch import TrainBatch, make_batch
from train.calibration import WARM_UP_STEPS, Calibration, Calibrations, base_config, calibrate, empty_base
from train.config import TrainConfig
from train.cost_model import (
    STRATEGIES,
    BaseSize,
    BatchSize,
    HeadsSize,
    activation_bytes,
    count_base,
    count_heads,
    disk_bytes,
    forward_bytes,
    step_flops,
)
from train.cost_rows import DISK_BYTES_PER_SECOND, EXCHANGE_BYTES_PER_SECOND, MODES, Run, row
from train.objectives import Objective
from train.packing import PackedDataset, collate
from train.schedule import number_of_steps
from train.state_maker import index_states
from train.training_data import check_fits_base, prepare_data
from train.windows import WindowPlan

UTILISATION = 0.35  # share of a card's peak that matrix products are assumed to reach where nothing was measured
MEASURED_STEPS = 5


@dataclass(frozen=True, slots=True)
class Card:
    """A card's data sheet: bytes of memory, dense 16-bit operations per second."""

    memory_bytes: float
    flops: float


CARDS = {
    "rtx-4090": Card(24e9, 165e12),
    "l40s": Card(48e9, 362e12),
    "a100-40gb": Card(40e9, 312e12),
    "a100-80gb": Card(80e9, 312e12),
    "h100": Card(80e9, 989e12),
    "h200": Card(141e9, 989e12),
    "b200": Card(180e9, 2250e12),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(TrainConfig):
    """Print what a training run will cost, before anything starts: the options are those of training."""

    num_processes: int = 1
    """Devices the run will use, one process each."""
    hardware: str = "measured"
    """`measured`: time a few real steps on this device; or assume a card: rtx-4090, l40s, a100-40gb, a100-80gb, h100, h200, b200."""
    device: str = "auto"
    """Where steps are measured: auto is a GPU where there is one."""

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        if self.num_processes < 1:
            raise ValueError("num_processes: must be above 0")
        if self.hardware != "measured" and self.hardware not in CARDS:
            known = ("measured", *CARDS)
            raise ValueError(f"--hardware: unknown {self.hardware!r}{suggest(self.hardware, known)}; known are {', '.join(known)}")

        if self.lora_rank:
            raise ValueError("lora_rank: an adapter is not counted here; estimate with --lora-rank 0, a lower bound")
        if self.base_quantization != "none":
            raise ValueError(
                "base_quantization: packed weights are not counted here; estimate without it, an upper bound of memory (of a 16-bit base's "
                "layers 8bit leaves half, 4bit a quarter) and a lower bound of time"
            )

    def run(self) -> None:
        found = estimate(self)
        print_table(found)
        print(json.dumps(found))


def estimate(config: Estimate) -> dict[str, Any]:
    """Plain numbers; bytes, seconds and hours as the names say. Memory is what torch allocates (a CUDA context and its
    allocator's gaps come on top), hours are those of the steps (validation comes on top)."""
    rows, validation_rows, counts = prepare_data(config)
    device = pick_device(config.device)
    device_type = device.type if config.hardware == "measured" else "cuda"
    dtype = chosen_dtype(config.base_dtype, device_type)
    model_config = base_config(config.base, revision=config.revision)
    empty = empty_base(model_config, dtype=dtype, device="meta")
    check_fits_base(empty, rows, validation_rows, max_length=config.max_length)
    base = count_base(empty)
    heads_config, draft_vocab_size = heads_to_train(config)
    heads = count_heads(
        heads_config,
        base,
        draft_vocab_size=draft_vocab_size,
        has_teacher=Objective(config.objective).needs_teacher,
    )
    packed = PackedDataset(rows, pack_length=config.pack_length, num_heads=heads.num_heads)
    plan = WindowPlan(len(packed), config.batch_size, config.gradient_accumulation_steps, config.num_processes, 0, config.seed)
    num_steps = number_of_steps(config.epochs, plan.steps_per_epoch, config.max_steps)
    batches = sample_batches(packed, plan, heads.num_heads)
    batch = largest_batch(batches)
    if config.hardware == "measured":
        found = calibrate(
            model_config,
            heads_config,
            batches,
            dtype=dtype,
            device=device,
            objective=Objective(config.objective, config.lk_eta),
            d_pace=config.slot_weights == "d_pace",
            draft_vocab_size=draft_vocab_size,
        )
        machine = hardware(device)
        capacity = machine["gpu_memory_bytes"] or machine["ram_bytes"]
    else:
        refuse_experts(model_config, config.hardware)
        card = CARDS[config.hardware]
        found, capacity, machine = assumed(card, *step_flops(base, heads, batch)), card.memory_bytes, {"gpu": config.hardware}
    run = Run(
        base,
        heads,
        with_counted_bytes(found, base, heads, batch, device_type),
        plan,
        num_steps,
        sum(b.num_response_tokens for b in batches) / len(batches),
        *state_bytes(packed, plan, num_steps, base),
        disk_bytes(heads, keep_checkpoints=config.keep_checkpoints) + data_bytes(rows),
        capacity,
    )
    strategies = ("ddp",) if config.num_processes == 1 else STRATEGIES
    several = config.num_processes > 1
    return {
        "base": {"name": config.base, "dtype": str(dtype).removeprefix("torch."), **asdict(base)},
        "heads": asdict(heads),
        "data": {"counts": str(counts), "packed_rows": len(packed)},
        "num_processes": config.num_processes,
        "num_steps": num_steps,
        "hardware": machine,
        "how": "measured" if config.hardware == "measured" else f"assumed: {UTILISATION:.0%} of peak",
        "flops_per_micro_batch": dict(zip(("base", "heads"), step_flops(base, heads, batch), strict=True)),
        "assumed_exchange_bytes_per_second": EXCHANGE_BYTES_PER_SECOND if several else None,
        "assumed_disk_bytes_per_second": DISK_BYTES_PER_SECOND,
        "device_bytes": capacity,
        **{mode: [row(run, mode, strategy) for strategy in strategies] for mode in MODES},
    }


def assumed(card: Card, base_flops: int, heads_flops: int) -> Calibrations:
    speed = UTILISATION * card.flops
    return Calibrations(Calibration((base_flops + heads_flops) / speed, None), Calibration(heads_flops / speed, None), base_flops / speed)


def with_counted_bytes(found: Calibrations, base: BaseSize, heads: HeadsSize, batch: BatchSize, device_type: str) -> Calibrations:
    """Bytes of a step that were not measured are counted. The base's forward runs over stored states too, once."""
    online = found.online.activation_bytes or activation_bytes(base, heads, batch, device_type=device_type)
    stored = found.stored.activation_bytes
    if stored is None:
        stored = activation_bytes(base, heads, batch, device_type=device_type, stored_states=True)
    else:
        stored += batch.num_positions * base.hidden_size * base.value_size  # the states themselves lay there before the measured step
    return replace(
        found,
        online=replace(found.online, activation_bytes=online),
        stored=replace(found.stored, activation_bytes=max(stored, forward_bytes(base, batch))),
    )


def state_bytes(packed: PackedDataset, plan: WindowPlan, num_steps: int, base: BaseSize) -> tuple[int, int]:
    """Bytes of all rows' hidden states, and of the most that one process reads."""
    index, state = index_states(packed), base.hidden_size * base.value_size
    read = [replace(plan, process_index=process).rows_read(0, num_steps) for process in range(plan.num_processes)]
    return state * index.num_states(range(len(packed))), state * max(index.num_states(rows) for rows in read)


def chosen_dtype(name: str, device_type: str) -> torch.dtype:
    """As training chooses: auto is bfloat16 on a GPU and float32 on a CPU."""
    return base_model.parse_dtype(("bfloat16" if device_type == "cuda" else "float32") if name == "auto" else name)


def heads_to_train(config: TrainConfig) -> tuple[HeadsConfig, int | None]:
    """Fresh heads, or those of `init_heads`: their config, and how many tokens they are trained over (None: all)."""
    if config.init_heads is None:
        return config.heads_config(), config.draft_vocab_size
    folder = resolve_heads(config.init_heads)
    heads_config = HeadsConfig.from_file(folder / "config.json")
    vocabulary = read_vocabulary(folder, heads_config.vocab_size)
    return heads_config, config.draft_vocab_size or (None if vocabulary is None else len(vocabulary))


def sample_batches(packed: PackedDataset, plan: WindowPlan, num_heads: int) -> list[TrainBatch]:
    """The run's own first micro-batches, repeated where it has fewer than are measured."""
    batches: list[TrainBatch] = []
    step = 0
    while len(batches) < WARM_UP_STEPS + MEASURED_STEPS:
        for indices in plan.micro_batches(step % plan.steps_per_epoch):
            if (full := [index for index in indices if index >= 0]) and len(batches) < WARM_UP_STEPS + MEASURED_STEPS:
                batches.append(make_batch(collate([packed[index] for index in full]), num_heads))
        step += 1
    return batches


def largest_batch(batches: list[TrainBatch]) -> BatchSize:
    """The most of everything over the batches."""
    shapes = [batch.tensors["input_ids"].shape for batch in batches]
    return BatchSize(
        max(shape[0] for shape in shapes),
        max(shape[1] for shape in shapes),
        max(len(batch.tensors["positions"]) for batch in batches),
        max(len(batch.tensors["targets"]) for batch in batches),
    )


def data_bytes(rows: Any) -> int:
    """What the prepared data take on the disk already."""
    return sum(Path(file["filename"]).stat().st_size for file in rows.cache_files if Path(file["filename"]).is_file())


def refuse_experts(config: Any, name: str) -> None:
    text = config.get_text_config()
    if any(getattr(text, option, None) for option in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ValueError(f"--hardware {name}: operations of a mixture of experts are not counted here; use --hardware measured")


def print_table(found: dict[str, Any]) -> None:
    """The table for people, on stderr: the JSON line alone is stdout's. from: where hidden states come from; heads: weights,
    gradients and optimizer; states: hidden states held on the device; step: what lives only during a step, with whole copies of
    sharded or exchanged weights."""
    title = f"{found['num_steps']} steps, {found['num_processes']} device(s), {found['how']}; GB per rank, response tokens/s in all"
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1))
    for column in ("from", "strategy", "total", "base", "heads", "states", "step", "fits", "tokens/s", "hours"):
        table.add_column(column, justify="left" if column in ("from", "strategy") else "right", no_wrap=True)
    for mode in MODES:
        for line in found[mode]:
            table.add_row(mode, line["strategy"], *_cells(line))
    console = Console(file=sys.stderr)
    console.print(table)
    online, disk = found["online"][0]["disk_bytes"], found["disk"][0]["disk_bytes"]
    console.print(
        f"disk: {online / 1e9:.2f} GB of prepared data, checkpoints and heads, {(disk - online) / 1e9:.2f} GB of hidden states where they "
        f"lie there; {found['data']['counts']}",
        soft_wrap=True,
    )


def _cells(line: dict[str, Any]) -> list[str]:
    parts = line["memory_bytes"]
    heads, step = parts["heads"] + parts["gradients"] + parts["optimizer"], parts["gathered"] + parts["activations"]
    gigabytes = [f"{value / 1e9:.2f}" for value in (parts["total"], parts["base"], heads, parts["states"], step)]
    fits = {True: "yes", False: "no", None: "?"}[line["fits"]]
    return [*gigabytes, fits, f"{line['response_tokens_per_second']:,.0f}", f"{line['hours']:.2f}"]
