"""Sizes that a script cannot work with are refused by the option's name, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.compare_objectives import CompareObjectives
from scripts.compare_sharding import CompareSharding
from scripts.compare_trees import CompareTrees
from scripts.compare_verifiers import CompareVerifiers
from scripts.figures import Figures
from scripts.medusa2_report import Medusa2Report
from scripts.prove_exactness import ProveExactness
from scripts.prove_sampling import ProveSampling

PROMPTS = Path(__file__).resolve().parents[2] / "scripts" / "exactness_prompts.jsonl"
NEEDED: dict[type[Any], dict[str, Any]] = {
    CompareObjectives: {"data": ["x"], "validation": PROMPTS, "bench": [PROMPTS], "max_steps": 1},
    CompareSharding: {},
    CompareTrees: {},
    CompareVerifiers: {"prompts": PROMPTS},
    Figures: {"mt_bench": PROMPTS, "gsm8k": PROMPTS},
    Medusa2Report: {"tuned": "x", "answers": ["x"]},
    ProveExactness: {"prompts": (PROMPTS,), "num_prompts": 1, "num_plain": 1},
    ProveSampling: {"prompts": (PROMPTS,), "num_prompts": 1},
}


@pytest.mark.parametrize(
    ("script", "size", "given"),
    [
        (CompareObjectives, "max-new-tokens", 0),
        (CompareSharding, "batch-size", 0),
        (CompareSharding, "num-gpus", [2, 0]),
        (CompareTrees, "batch-size", -1),
        (CompareVerifiers, "batch-sizes", (1, 0)),
        (CompareVerifiers, "batch-sizes", ()),
        (Figures, "batch-size", 0),
        (Figures, "limit-gsm8k", 0),
        (Medusa2Report, "batch-size", 0),
        (Medusa2Report, "limit", 0),
        (ProveExactness, "batch-sizes", (1, -1)),
        (ProveSampling, "batch-size", 0),
    ],
)
def test_sizes_below_one_are_refused_by_name(script: type[Any], size: str, given: Any, tmp_path: Path) -> None:
    output = {"output": tmp_path / "out"} if "output" in script.__dataclass_fields__ else {}
    with pytest.raises(ValueError, match=f"--{size} (0|-1): must be at least 1"):
        script(**{"base": str(tmp_path / "nowhere"), size.replace("-", "_"): given} | output | NEEDED[script]).run()
