"""Training on one GPU, data parallel and with a sharded base: the same losses and heads? How fast, in how much memory?

    python scripts/compare_sharding.py --num-gpus 2 4 --data answers.jsonl.gz --output outputs/sharding
    python scripts/compare_sharding.py --num-gpus 2 --base twin --strategies single fsdp2 --batch-size 16 --steps 20 --output outputs/twin
    python scripts/compare_sharding.py --num-gpus 2 --strategies single zero2 zero3 --output outputs/zero

Every run is `python -m train` under one of configs/accelerate, at the same batch per GPU. For every number of GPUs a single one runs
with as many micro-batches a step, so that all see the same rows at every step, which is what losses are compared with; once, it runs
with one micro-batch a step, which is what speeds are compared with. Without --data the text is random. Without a GPU the processes are
CPU ones, over gloo. The last line printed, and OUTPUT/report.json, is one JSON document; exits with 1 where losses differ by more than
--tolerance. The same command goes on where it stopped, and takes further strategies and numbers of GPUs into the same folder.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from safetensors.torch import load_file

from infer.hardware import cpu_name
from infer.made_with import made_with, settle
from infer.output_file import write_text
from medusa_heads.arguments import OPTIONAL, require_positive
from medusa_heads.cli import run_command
from medusa_heads.versions import commit, versions
from train.history import FILE_NAME, read_history

CONFIGS = Path(__file__).parents[1] / "configs" / "accelerate"
WORKER = "worker"  # the first argument of the processes that this script starts
PROCESS = "process"  # the file that each of them leaves in the folder of its run, a number behind it
NUM_TEXTS = 2000  # at least, where texts are random
MOST_GPUS = 16  # the texts of an epoch fill the steps of 1, 2, 4, 8 or 16
LOG_EVERY = 20  # as in configs/train: to log, the host waits for the device
Strategy = Literal["single", "ddp", "fsdp2", "zero2", "zero3"]
ZERO_STAGES = {"zero2": 2, "zero3": 3}
WORDS = ("the", "cat", "sat", "on", "mat", "and", "dog", "ran", "to", "other", "side", "of", "house", "what", "is", "answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSharding:
    """Compare the strategies of configs/accelerate on this machine."""

    output: Path
    """Folder of the runs and the report."""
    num_gpus: list[int] = field(default_factory=lambda: [2])
    """GPUs, or CPU processes, of every run but those on a single GPU; several numbers: one comparison for each."""
    strategies: list[Strategy] = field(default_factory=lambda: ["single", "ddp", "fsdp2"])
    """Which to run; the first is what the others are compared with. zero2 and zero3 need DeepSpeed."""
    base: str = "embedded"
    """Base model."""
    data: Annotated[list[str], OPTIONAL] = field(default_factory=list)
    """Conversations; none: random words."""
    batch_size: int = 32
    """Packed rows per GPU and micro-batch."""
    pack_length: int = 512
    """Tokens in a packed row."""
    num_heads: int = 4
    """K."""
    steps: int = 120
    """Optimizer steps of each run, at least 2; the first third is not timed."""
    options: str = ""
    """Further options of python -m train, as --options="--base-dtype float32"."""
    tolerance: float = 1e-3
    """How far the losses of a step may lie apart."""

    def run(self) -> None:
        sizes = {"batch_size": self.batch_size, "pack_length": self.pack_length, "num_heads": self.num_heads}
        require_positive(num_gpus=min(self.num_gpus, default=0), **sizes)
        if self.steps < 2:
            raise ValueError(f"--steps {self.steps}: at least 2, the first third is not timed")
        if ZERO_STAGES.keys() & set(self.strategies) and not find_spec("deepspeed"):
            raise ValueError("--strategies zero2 and zero3 need DeepSpeed: pip install deepspeed, or leave them out")
        runs = list(dict.fromkeys(Run(strategy, count) for count in self.num_gpus for strategy in self.strategies))
        first = self.strategies[0]
        alone = Run(first, 1) if first == "single" else runs[0]
        settings = self.checked_settings()
        data = self.data or [str(random_text(self.output / "text.jsonl", self.pack_length, multiple_of=MOST_GPUS * self.batch_size))]
        for run in dict.fromkeys([*runs, alone]):
            train(self, run, data)
        found = [report(self.output, run, reference=Run(first, run.num_gpus), alone=alone) for run in runs]
        base_speed = {"micro_batches": alone.micro_batches, "response_tokens_per_second": speed(logged(self.output / alone.name))}
        agree = all(row["largest_loss_difference"] < self.tolerance for row in found)
        facts = settings | {"versions": versions(), "commit": commit()}
        document = json.dumps(facts | {"agree": agree, "alone": {"strategy": first} | base_speed, "runs": found})
        write_text(self.output / "report.json", document + "\n")
        print(document)
        if not agree:
            sys.exit(1)

    def checked_settings(self) -> dict[str, Any]:
        """What all runs of a folder share. Raises ValueError when it was begun with others."""
        free = ("output", "num_gpus", "strategies", "tolerance")
        options = {name: value for name, value in asdict(self).items() if name not in free}
        settings = made_with(options, {path: Path(path) for path in self.data if Path(path).is_file()})
        settle(self.output, settings, begun=any(self.output.glob(f"*/{FILE_NAME}")))
        return settings


@dataclass(frozen=True, slots=True)
class Run:
    """A strategy over the rows that `num_gpus` GPUs take in a step; a single GPU takes them in as many micro-batches."""

    strategy: Strategy
    num_gpus: int

    @property
    def name(self) -> str:
        return f"{self.strategy}-{self.num_gpus}"

    @property
    def num_processes(self) -> int:
        return 1 if self.strategy == "single" else self.num_gpus

    @property
    def micro_batches(self) -> int:
        return self.num_gpus // self.num_processes


def random_text(path: Path, pack_length: int, *, multiple_of: int) -> Path:
    """Conversations, each longer than a packed row."""
    chooser = random.Random(0)
    with path.open("w") as file:
        for index in range(-(-NUM_TEXTS // multiple_of) * multiple_of):
            question, answer = (" ".join(chooser.choices(WORDS, k=count)) for count in (4, pack_length))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"text-{index}", "messages": messages}) + "\n")
    return path


def train(settings: CompareSharding, run: Run, data: list[str]) -> None:
    """Runs a strategy into OUTPUT/<name>, if it has not run yet. Raises ValueError when it fails."""
    folder = settings.output / run.name
    if len(of_processes(folder)) == run.num_processes:
        return
    print(f"{run.name} ...", file=sys.stderr, flush=True)
    options: dict[str, Any] = {
        "base": settings.base,
        "output-dir": folder,
        "batch-size": settings.batch_size,
        "gradient-accumulation-steps": run.micro_batches,
        "num-heads": settings.num_heads,
        "max-length": settings.pack_length,
        "pack-length": settings.pack_length,
        "max-steps": settings.steps,
        "save-every": settings.steps,
        "log-every": max(1, min(LOG_EVERY, settings.steps // 3)),  # a row in each third: speed leaves the first one out
    }
    arguments = [str(part) for option, value in options.items() for part in (f"--{option}", value)]
    arguments.append("--overwrite")  # what was cut short begins anew: a speed is that of one piece
    program = [__file__, WORKER, str(folder / PROCESS), "--data", *data, *arguments, *shlex.split(settings.options)]
    launcher, environment = launch_on_gpus if torch.cuda.is_available() else launch_on_cpus, os.environ.copy()
    command = launcher(run.strategy, run.num_processes, environment)
    if status := subprocess.run([sys.executable, "-m", *command, *program], env=environment, stdout=sys.stderr).returncode:
        raise ValueError(f"{run.name} ended with status {status}, see above; the same command goes on from there")


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


def work(path: str, *arguments: str) -> None:
    """One process of a run: `python -m train`, and then what strategy it ran under, where, and how much memory it took at most."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    from train import peer_shards, replayed_forward
    from train.__main__ import run
    from train.config import parse_config

    run(parse_config(list(arguments)))
    on_gpu = torch.cuda.is_available()
    most = (
        torch.cuda.max_memory_allocated() + peer_shards.bytes_shared + replayed_forward.bytes_kept
        if on_gpu
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    state = PartialState()
    kind = state.distributed_type.value
    if kind == "DEEPSPEED":
        kind += f"-{AcceleratorState().deepspeed_plugin.deepspeed_config['zero_optimization']['stage']}"
    name = torch.cuda.get_device_name() if on_gpu else cpu_name()
    facts = {"kind": kind, "hardware": name, "num_processes": state.num_processes, "bytes": most}
    write_text(Path(f"{path}.{state.process_index}"), json.dumps(facts))


def of_processes(folder: Path) -> list[dict[str, Any]]:
    """What each process of a run left when it was done."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{PROCESS}.*"))]


def report(folder: Path, run: Run, *, reference: Run, alone: Run) -> dict[str, Any]:
    """What a run came to: its losses and heads beside the reference's, its speed beside that of one GPU alone."""
    processes = of_processes(folder / run.name)
    kind, sharded = processes[0]["kind"], {"fsdp2": "FSDP"} | {name: f"DEEPSPEED-{stage}" for name, stage in ZERO_STAGES.items()}
    assert kind == sharded[run.strategy] if run.strategy in sharded else kind not in sharded.values(), f"{run.strategy} ran as {kind}"
    losses, of_reference = ([row["loss"] for row in logged(folder / name)] for name in (run.name, reference.name))
    heads, expected = (load_file(folder / name / "model.safetensors") for name in (run.name, reference.name))
    return {
        "strategy": run.strategy,
        "ran_as": kind,
        "hardware": processes[0]["hardware"],
        "num_gpus": processes[0]["num_processes"],
        "micro_batches": run.micro_batches,
        "response_tokens_per_second": speed(logged(folder / run.name)),
        "speed_up": speed(logged(folder / run.name)) / speed(logged(folder / alone.name)),
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
    first, last = rows[(len(rows) - 1) // 3], rows[-1]
    mean_first, mean_last = first["response_tokens_per_second"], last["response_tokens_per_second"]
    return (last["step"] - first["step"]) / (last["step"] / mean_last - first["step"] / mean_first)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(*sys.argv[2:])
    else:
        raise SystemExit(run_command("__main__:CompareSharding", sys.argv[1:], prog="compare_sharding.py"))
