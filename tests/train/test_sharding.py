"""Sharding strategies: every shipped accelerate file through accelerate's own parser; a sharded base on two CPU processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType

from tests.train.sharded_run import run
from train.__main__ import refuse_sharding

FOLDER = Path(__file__).parents[2] / "configs" / "accelerate"
MEANING = {
    "single": (DistributedType.NO, 1, 1),
    "ddp": (DistributedType.MULTI_GPU, 2, 1),
    "multi_node": (DistributedType.MULTI_GPU, 16, 2),
}


def test_every_strategy_has_its_file() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(MEANING)


@pytest.mark.parametrize("name", MEANING)
def test_accelerate_reads_what_the_file_says(name: str) -> None:
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    assert (config.distributed_type, config.num_processes, config.num_machines) == MEANING[name]
    assert config.mixed_precision == "no" and not config.use_cpu


@pytest.mark.parametrize("name", MEANING)
def test_every_key_is_an_option_of_the_launcher(name: str) -> None:
    """accelerate passes over a misspelt key without a word."""
    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    options = vars(launch_command_parser().parse_args(["script.py"]))
    elsewhere = {"compute_environment", "distributed_type", "use_cpu"}
    assert not [key for key in values if key not in options and key not in elsewhere]


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED])
def test_sharded_training_is_refused_with_the_way_that_works(kind: DistributedType) -> None:
    with pytest.raises(ValueError, match=r"(?i)FSDP|DEEPSPEED.*ddp\.yaml"):
        refuse_sharding(kind)
    refuse_sharding(DistributedType.MULTI_GPU)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[bool, Any]]:
    out = tmp_path_factory.mktemp("sharded") / "result"
    rendezvous = ["--nproc_per_node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "-m", "tests.train.sharded_run", str(out)]
    result = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return [torch.load(f"{out}.{rank}") for rank in (0, 1)]


@pytest.mark.distributed
@pytest.mark.parametrize("own_lm_head", [False, True])
def test_a_sharded_base_trains_the_same_heads(two_processes: list[dict[bool, Any]], own_lm_head: bool) -> None:
    """Two processes with half of every weight and half of the rows each equal one with all of both."""
    alone = run(0, 1, own_lm_head)
    first, second = (found[own_lm_head] for found in two_processes)
    assert first["num_processes"] == 2 and alone["num_processes"] == 1
    shares = [(first["local_share"][name], second["local_share"][name]) for name in alone["local_share"]]
    assert all(a + b == 1 for a, b in shares) and shares.count((0.5, 0.5)) > len(shares) - 2  # really sharded; K = 3 is uneven
    assert set(alone["local_share"].values()) == {1.0}
    torch.testing.assert_close(torch.tensor(first["losses"]), torch.tensor(alone["losses"]), atol=1e-5, rtol=1e-5)
    assert first["losses"][-1] < first["losses"][0]
    for name, weight in alone["heads"].items():
        assert torch.equal(first["heads"][name], second["heads"][name])  # whole on both
        torch.testing.assert_close(first["heads"][name], weight, atol=1e-5, rtol=1e-5)
    assert alone["base_unchanged"] and first["base_unchanged"]
