"""Prompts with a right answer, and the texts that a row gave -> which texts are right.

Two kinds of prompt can be judged, told apart by what they hold. `final_number`: the reference ends in `#### N`
(as GSM8K's do); right is a text whose last number is N. `tests`: there is a reference, and the prompt ends in
Python `assert` lines (as MBPP's do); right is a text whose code passes them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal

from tqdm import tqdm

from infer.bench.run_answer import passes
from infer.prompts import Prompt

QualityKind = Literal["final_number", "tests"]
REFERENCE_NUMBER = re.compile(r"####\s*(.+)")
# A minus sign after a digit, letter or bracket is a subtraction; commas count where they part thousands.
NUMBER = re.compile(r"((?<![\w)\]])[-\u2212])?\$?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
CODE_BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("python", "python3", "py", "")


def quality_kind(prompt: Prompt) -> QualityKind | None:
    """How answers to this prompt are judged; None where they cannot be."""
    if prompt.reference is None:
        return None
    if reference_number(prompt.reference) is not None:
        return "final_number"
    return "tests" if prompt_tests(prompt) else None


def check_judgeable(prompts: Sequence[Prompt], file: object) -> None:
    """Raises ValueError when no prompt can be judged."""
    if not any(map(quality_kind, prompts)):
        raise ValueError(
            f"--quality: no prompt taken from {file} can be judged: rows need a `reference` that ends in `#### NUMBER`, or a "
            "`reference` beside a message that ends in Python assert lines"
        )


def judge(prompts: Sequence[Prompt], texts: dict[str, list[str]]) -> dict[str, list[bool | None]]:
    """Per row, which of its texts (one per prompt) are right; None where a prompt cannot be judged.

    Runs code that the model wrote (see run_answer.py). A text that several rows gave is judged once.
    """
    known: dict[tuple[int, str], bool | None] = {}
    wanted = [(index, text) for own in texts.values() for index, text in enumerate(own)]
    for index, text in tqdm(dict.fromkeys(wanted), desc="judging answers", unit="answer", file=sys.stderr):
        known[index, text] = is_right(prompts[index], text)
    return {row: [known[index, text] for index, text in enumerate(own)] for row, own in texts.items()}


def is_right(prompt: Prompt, text: str) -> bool | None:
    match quality_kind(prompt):
        case "final_number":
            assert prompt.reference is not None
            return last_number(text) == reference_number(prompt.reference)
        case "tests":
            return passes(python_code(text), prompt_tests(prompt))
        case _:
            return None


def quality_figures(prompts: Sequence[Prompt], right: Sequence[bool | None]) -> dict[str, Any] | None:
    """The key `quality` of a row: how many of the prompts that can be judged were answered rightly; None without any.
    kind: of these prompts, joined by `+` where there are both."""
    judged = [answer for answer in right if answer is not None]
    if not judged:
        return None
    kinds = sorted({kind for prompt in prompts if (kind := quality_kind(prompt))})
    return {"kind": "+".join(kinds), "num": len(judged), "num_right": sum(judged), "accuracy": sum(judged) / len(judged)}


def reference_number(reference: str) -> Decimal | None:
    """The number after the last `####`."""
    marked = REFERENCE_NUMBER.findall(reference)
    return last_number(marked[-1]) if marked else None


def last_number(text: str) -> Decimal | None:
    """The last number of a text, without currency signs, commas between thousands and a full stop after it."""
    found = NUMBER.findall(text)
    if not found:
        return None
    sign, digits = found[-1]
    return Decimal(digits.replace(",", "")) * (-1 if sign else 1)


def prompt_tests(prompt: Prompt) -> str:
    """The Python from the first `assert` line of the user's message to its end; empty where there is none."""
    lines = prompt.messages[-1]["content"].splitlines()
    first = next((index for index, line in enumerate(lines) if line.startswith("assert ")), len(lines))
    tests = "\n".join(lines[first:])
    try:
        ast.parse(tests)
    except (SyntaxError, ValueError):
        return ""
    return tests


def python_code(text: str) -> str:
    """The first fenced block of Python or of no named language, up to the end where the answer was cut inside it;
    without one the whole text."""
    return next((code for language, code in CODE_BLOCK.findall(text) if language.lower() in PYTHON), text)
