"""The script behind the stated figures, on a few prompts written for the repository."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from infer.bench.command import Bench
from medusa_heads.checkpoint import save_heads
from scripts.figures import Figures
from tests.random_heads import random_heads
from tests.tiny_models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "scripts" / "demo_bench_prompts.jsonl"
OTHER_PROMPTS = ROOT / "scripts" / "demo_prompts.jsonl"


@pytest.fixture
def figures(tmp_path: Path) -> Figures:
    """Of a tiny base."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    save_heads(random_heads(model), tmp_path / "heads", card="")
    base, heads = str(tmp_path / "base"), str(tmp_path / "heads")
    return Figures(mt_bench=PROMPTS, gsm8k=OTHER_PROMPTS, base=base, heads=heads, output=tmp_path / "figures")


def test_figures_belong_to_the_weights_of_a_local_base(figures: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figures, "acceptance", lambda self: {"figures": {}})
    command = replace(figures, parts=("acceptance",))
    command.run()
    command.run()
    tiny_model("llama", 1).save_pretrained(figures.base)
    with pytest.raises(ValueError, match=r"holds results of other settings \(the content of base/model.safetensors\)"):
        command.run()


def test_speed_goes_on_with_the_file_that_failed(
    figures: Figures, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every file is measured once, on the device asked for, of which the figures are."""
    started: list[tuple[Path, int | None, str]] = []

    def bench(command: Bench) -> None:
        assert command.json is not None
        started.append((command.prompts, command.limit, command.device))
        if len(started) == 2:
            raise ValueError("the second bench failed")
        row = {"drafter": "heads", "tokens_per_second": 5.0, "speedup_vs_base": 2.0, "speedup_vs_transformers_generate": 3.0}
        command.json.write_text(json.dumps({"rows": [row]}))

    monkeypatch.setattr(Bench, "run", bench)
    command = replace(figures, parts=("speed",))
    with pytest.raises(ValueError, match="the second bench failed"):
        command.run()
    command.run()
    assert started == [(PROMPTS, 80, "cpu"), (OTHER_PROMPTS, 100, "cpu"), (OTHER_PROMPTS, 100, "cpu")]
    shown = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    found = {"tokens_per_second": {"heads": 5.0}, "speedup_vs_base": 2.0, "speedup_vs_transformers_generate": 3.0}
    assert {name: json.loads(line) for name, line in shown.items()} == {"speed_mt_bench": found, "speed_gsm8k": found}
    with pytest.raises(ValueError, match=r"holds results of other settings \(device\)"):
        replace(command, device="cuda").run()


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
        assert refused.returncode == 2 and f"holds results of other settings ({named})" in refused.stderr
