"""Right answers: numbers out of texts, code out of texts, and model-written code in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from infer.bench import quality
from infer.bench.quality import is_right, judge, last_number, prompt_tests, python_code, quality_kind, reference_number
from infer.bench.run_answer import passes
from infer.prompts import Prompt, load_prompts

PROMPTS = load_prompts(Path(__file__).with_name("quality_prompts.jsonl"))
TESTS = "assert double(2) == 4\nassert double(0) == 0"
DOUBLE = "def double(n):\n    return 2 * n\n"


def test_kinds_are_told_by_what_a_row_holds() -> None:
    assert [quality_kind(prompt) for prompt in PROMPTS] == ["final_number", "final_number", "tests", None, None]
    code = PROMPTS[2]
    assert prompt_tests(code) == "assert double_all([1, 2]) == [2, 4]\nassert double_all([]) == []"
    assert quality_kind(Prompt("a", "b", code.messages)) is None  # tests, but nobody says that they can be passed
    broken = [{"role": "user", "content": "Pass this:\nassert f(1 ==\nplease"}]
    assert quality_kind(Prompt("a", "b", broken, "def f(n): ...")) is None


def test_the_reference_of_the_first_turn_counts(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "user", "content": "2 + 2?"}]}
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(row | {"reference": value}) for value in (["#### 2", "#### 4"], "#### 2", None, [], 2)))
    assert [prompt.reference for prompt in load_prompts(path)] == ["#### 2", "#### 2", None, None, None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("So 3 + 4 = 7.", 7),
        ("They cost $1,250.50 in all.", "1250.50"),
        ("It is 12,345,678!", 12345678),
        ("Pick 1,2,3", 3),
        ("the temperature is -6 degrees", -6),
        ("he owes −$20", -20),
        ("10-4 and so (5)-3", 3),
        ("a discount of .5", ".5"),
        (r"\boxed{18}", 18),
        ("about 15%.", 15),
        ("**42**", 42),
        ("2024, then", 2024),
        ("none at all", None),
    ],
)
def test_last_number(text: str, expected: Any) -> None:
    assert last_number(text) == (None if expected is None else Decimal(expected))


def test_numbers_are_compared_as_numbers() -> None:
    assert is_right(PROMPTS[1], "The answer is 1250.00.") is True
    assert is_right(PROMPTS[1], "The answer is $1,250, not $1,350.") is False  # the last one counts
    assert is_right(PROMPTS[0], "I do not know") is False
    assert reference_number("4 * 5 = 20\n#### 20") == 20 and reference_number("20") is None


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Sure:\n```python\nx = 1\n```\nand\n```python\nx = 2\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```bash\npip install x\n```\n```py\nx = 1\n```", "x = 1\n"),
        ("```python\ndef f():\n    return 1", "def f():\n    return 1"),  # cut at the limit
        ("def f(): return 1", "def f(): return 1"),
    ],
)
def test_code_is_found_in_a_text(text: str, code: str) -> None:
    assert python_code(text) == code


def test_right_and_wrong_code() -> None:
    assert passes(DOUBLE, TESTS)
    assert not passes("def double(n):\n    return n + 2\n", TESTS)
    assert not passes("def double(n)", TESTS)
    assert not passes("", TESTS)
    assert passes(DOUBLE + "if __name__ == '__main__':\n    raise SystemExit(1)", TESTS)  # a demonstration is not the answer
    assert passes(DOUBLE + "print('é' * 10_000_000)\n", TESTS)


@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "import os; os._exit(0)", "input()", "quit()"])
def test_leaving_early_passes_nothing(code: str) -> None:
    assert not passes(f"{DOUBLE}{code}\n", TESTS)


def test_endless_code_and_its_children_are_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = f"import subprocess\nopen({str(pid_file)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\n"
    start = time.monotonic()
    assert not passes(child + "while True: pass\n", TESTS, time_limit_s=1.5)
    assert time.monotonic() - start < 10
    for _ in range(50):
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid_file.read_text()], capture_output=True, text=True).stdout.strip()
        if not state or state.startswith("Z"):
            return
        time.sleep(0.1)
    pytest.fail(f"the child still runs ({state})")


def test_memory_and_files_are_limited() -> None:
    assert not passes(DOUBLE + "import mmap\nmmap.mmap(-1, 2 << 30)\n", TESTS)  # costs no time where it is allowed
    assert not passes(DOUBLE + "open('big', 'wb').write(bytes(2 << 20))\n", TESTS)
    assert passes(DOUBLE + "open('small', 'wb').write(bytes(1 << 10))\n", TESTS)


def test_code_runs_in_a_folder_and_environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    here = set(os.listdir())
    code = f"{DOUBLE}import os\nopen('left', 'w').close()\nassert os.getcwd() != {os.getcwd()!r} and 'A_SECRET' not in os.environ\n"
    assert passes(code, TESTS)
    assert set(os.listdir()) == here


def test_equal_texts_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []

    def looks_right(code: str, tests: str) -> bool:
        judged.append(code)
        return "2 *" in code

    monkeypatch.setattr(quality, "passes", looks_right)
    good, bad = "def double_all(n): return [2 * x for x in n]", "def double_all(n): return n"
    texts = {"base": ["22", "7", good, "Paris", "x"], "heads": ["22", "7", good, "Rome", "y"], "typical:heads": ["21", "1250", bad, "", ""]}
    assert judge(PROMPTS, texts) == {
        "base": [True, False, True, None, None],
        "heads": [True, False, True, None, None],
        "typical:heads": [False, True, False, None, None],
    }
    assert judged == [good, bad]
