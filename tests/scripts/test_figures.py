"""The script behind the stated figures, on a few prompts written for the repository."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "scripts" / "demo_bench_prompts.jsonl"
OTHER_PROMPTS = ROOT / "scripts" / "demo_prompts.jsonl"


@pytest.mark.slow
def test_exact_and_accepting_on_two_prompts(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "figures.py"), "--mt-bench", str(PROMPTS), "--gsm8k", str(PROMPTS)]
    options = ["--output", str(tmp_path), "--limit-mt-bench", "2", "--limit-gsm8k", "1", "--max-new-tokens", "8"]
    result = subprocess.run([*command, *options, "--parts", "exact", "acceptance"], capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr
    exact = json.loads((tmp_path / "exact.json").read_text())["figures"]
    assert len(exact) == 5 and set(exact.values()) == {1.0}
    acceptance = json.loads((tmp_path / "acceptance.json").read_text())
    assert all(length > 1.2 for length in acceptance["figures"].values())
    assert json.loads((tmp_path / "exact.json").read_text())["num_prompts"] == 2
    again = [*command, *options, "--parts", "exact"]
    for change, named in ((["--limit-gsm8k", "2"], "limit_gsm8k"), (["--gsm8k", str(OTHER_PROMPTS)], "the content of gsm8k")):
        refused = subprocess.run([*again, *change], capture_output=True, text=True, timeout=100)
        assert refused.returncode == 2 and f"holds figures of other settings ({named})" in refused.stderr
