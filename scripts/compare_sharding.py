"""Training on one GPU, data parallel and with a sharded base: the same losses and heads? How fast, in how much memory?

    python scripts/compare_sharding.py --num-gpus 2 --data answers.jsonl.gz
    python scripts/compare_sharding.py --num-gpus 2 --base twin --strategies single fsdp2 --batch-size 16 --steps 20
    python scripts/compare_sharding.py --num-gpus 2 --strategies single zero2 zero3

Every run is `python -m train` under one of configs/accelerate, at the same batch per GPU. The first strategy runs twice: with as many
micro-batches a step as the others have processes, so that all see the same rows at every step, which is what losses are compared
with; and with one micro-batch a step, which is what speeds are compared with. Without --data the text is random. Without a GPU the
processes are CPU ones, over gloo. Prints one JSON line, and exits with 1 where losses differ by more than --tolerance.
"""

from __future__ import annotations

import json
import os
import platform
import random
import resource
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
import yaml
from safetensors.torch import load_file

from medusa_heads.versions import commit, versions
from train.history import FILE_NAME, read_history

CONFIGS = Path(__file__).parents[1] / "configs" / "accelerate"
ALONE = "alone"  # the run that speeds are compared with
WORKER = "worker"  # the first argument of the processes that this script starts
LOG_EVERY = 5
ZERO_STAGES = {"zero2": 2, "zero3": 3}
WORDS = ("the", "cat", "sat", "on", "mat", "and", "dog", "ran", "to", "other", "side", "of", "house", "what", "is", "answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSharding:
    """Compare the strategies of configs/accelerate on this machine."""

    num_gpus: int = 2
    """GPUs, or CPU processes, of every run but the one on a single GPU."""
    strategies: list[Literal["single", "ddp", "fsdp2", "zero2", "zero3"]] = field(default_factory=lambda: ["single", "ddp", "fsdp2"])
    """Which to run; the first is what the others are compared with. zero2 and zero3 need DeepSpeed."""
    base: str = "embedded"
    """Base model."""
    data: list[str] = field(default_factory=list)
    """Conversations; none: random words."""
    batch_size: int = 32
    """Packed rows per GPU and micro-batch."""
    pack_length: int = 512
    """Tokens in a packed row."""
    num_heads: int = 4
    """K."""
    steps: int = 60
    """Optimizer steps of each run; the first third is not timed."""
    options: str = ""
    """Further options of python -m train, as --options="--base-dtype float32"."""
    tolerance: float = 1e-3
    """How far the losses of a step may lie apart."""

    def run(self) -> None:
        found: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as folder:
            data = self.data or [str(random_text(Path(folder) / "text.jsonl", self))]
            for strategy in self.strategies:
                print(f"{strategy} ...", file=sys.stderr, flush=True)
                train(self, strategy, data, Path(folder))
            reference = self.strategies[0]
            print(f"{reference}, one micro-batch a step ...", file=sys.stderr, flush=True)
            train(self, reference, data, Path(folder), name=ALONE, micro_batches=1)
            for strategy in self.strategies:
                found.append(report(Path(folder), strategy, reference))
            alone = {"strategy": reference, "micro_batches": 1, "response_tokens_per_second": speed(logged(Path(folder) / ALONE))}
        on_gpu = torch.cuda.is_available()
        hardware = torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine()
        settings = {name: getattr(self, name) for name in ("base", "batch_size", "pack_length", "num_heads", "steps", "options")}
        about = {"hardware": hardware, "settings": settings, "versions": versions(), "commit": commit()}
        agree = all(row["largest_loss_difference"] < self.tolerance for row in found)
        print(json.dumps(about | {"agree": agree, "alone": alone, "runs": found}))
        if not agree:
            sys.exit(1)


def random_text(path: Path, settings: CompareSharding) -> Path:
    """Enough conversations, each longer than a packed row."""
    chooser = random.Random(0)
    rows = min(2000, settings.steps * settings.batch_size * settings.num_gpus)
    with path.open("w") as file:
        for index in range(rows):
            question, answer = (" ".join(chooser.choices(WORDS, k=count)) for count in (4, settings.pack_length))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"text-{index}", "messages": messages}) + "\n")
    return path


def train(
    settings: CompareSharding, strategy: str, data: list[str], folder: Path, *, name: str | None = None, micro_batches: int | None = None
) -> None:
    """Runs a strategy into folder/<name or strategy>. Raises subprocess.CalledProcessError when it fails."""
    name = name or strategy
    num_processes = 1 if strategy == "single" else settings.num_gpus
    options: dict[str, Any] = {
        "base": settings.base,
        "output-dir": folder / name,
        "batch-size": settings.batch_size,
        "gradient-accumulation-steps": micro_batches or settings.num_gpus // num_processes,
        "num-heads": settings.num_heads,
        "max-length": settings.pack_length,
        "pack-length": settings.pack_length,
        "max-steps": settings.steps,
        "save-every": settings.steps,
        "log-every": LOG_EVERY,
    }
    arguments = [str(part) for option, value in options.items() for part in (f"--{option}", value)]
    program = [__file__, WORKER, str(folder / f"{name}.peak"), "--data", *data, *arguments, *shlex.split(settings.options)]
    launcher, environment = launch_on_gpus if torch.cuda.is_available() else launch_on_cpus, os.environ.copy()
    command = launcher(strategy, num_processes, environment)
    subprocess.run([sys.executable, "-m", *command, *program], env=environment, check=True, stdout=sys.stderr)


def launch_on_gpus(strategy: str, num_processes: int, environment: dict[str, str]) -> list[str]:
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    config = ["--config_file", str(CONFIGS / f"{strategy}.yaml"), "--num_processes", str(num_processes)]
    return ["accelerate.commands.launch", *config, "--num_cpu_threads_per_process", str(threads)]


def launch_on_cpus(strategy: str, num_processes: int, environment: dict[str, str]) -> list[str]:
    """accelerate's own launcher starts one process there, and passes over FSDP; but for DeepSpeed."""
    environment["ACCELERATE_USE_CPU"] = "true"
    environment.setdefault("OMP_NUM_THREADS", "1")
    if strategy in ZERO_STAGES:
        environment["DS_ACCELERATOR"] = "cpu"
        return launch_on_gpus(strategy, num_processes, environment)
    if fsdp := yaml.safe_load((CONFIGS / f"{strategy}.yaml").read_text()).get("fsdp_config"):
        environment |= {"ACCELERATE_USE_FSDP": "true"} | {key.upper(): str(value) for key, value in fsdp.items()}
    return ["torch.distributed.run", "--nproc_per_node", str(num_processes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]


def work(peak: str, *arguments: str) -> None:
    """One process of a run: `python -m train`, and then what strategy it ran under and how much memory it took at most."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    from train.__main__ import run
    from train.config import parse_config

    run(parse_config(list(arguments)))
    on_gpu = torch.cuda.is_available()
    most = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    state = PartialState()
    kind = state.distributed_type.value
    if kind == "DEEPSPEED":
        kind += f"-{AcceleratorState().deepspeed_plugin.deepspeed_config['zero_optimization']['stage']}"
    Path(f"{peak}.{state.process_index}").write_text(json.dumps({"kind": kind, "num_processes": state.num_processes, "bytes": most}))


def report(folder: Path, strategy: str, reference: str) -> dict[str, Any]:
    """What a strategy came to, beside the reference."""
    processes = [json.loads(path.read_text()) for path in folder.glob(f"{strategy}.peak.*")]
    kind, sharded = processes[0]["kind"], {"fsdp2": "FSDP"} | {name: f"DEEPSPEED-{stage}" for name, stage in ZERO_STAGES.items()}
    assert kind == sharded[strategy] if strategy in sharded else kind not in sharded.values(), f"{strategy} ran as {kind}"
    losses, of_reference = ([row["loss"] for row in logged(folder / name)] for name in (strategy, reference))
    heads, expected = (load_file(folder / name / "model.safetensors") for name in (strategy, reference))
    return {
        "strategy": strategy,
        "ran_as": kind,
        "num_gpus": processes[0]["num_processes"],
        "response_tokens_per_second": speed(logged(folder / strategy)),
        "speed_up": speed(logged(folder / strategy)) / speed(logged(folder / ALONE)),
        "peak_bytes": max(process["bytes"] for process in processes),
        "last_loss": losses[-1],
        "largest_loss_difference": max(abs(a - b) for a, b in zip(losses, of_reference, strict=True)),
        "largest_weight_difference": max(float((heads[name] - weight).abs().max()) for name, weight in expected.items()),
    }


def logged(output: Path) -> list[dict[str, Any]]:
    return [row for row in read_history(output / FILE_NAME) if "loss" in row]


def speed(rows: list[dict[str, Any]]) -> float:
    """Response tokens per second after the first third of the steps. A row knows the mean v since the start, so its n steps of t
    tokens took n t / v seconds; t cancels."""
    first, last = rows[len(rows) // 3], rows[-1]
    mean_first, mean_last = first["response_tokens_per_second"], last["response_tokens_per_second"]
    return (last["step"] - first["step"]) / (last["step"] / mean_last - first["step"] / mean_first)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(*sys.argv[2:])
    else:
        tyro.cli(CompareSharding).run()
