"""Answers with the runs their base forwards emitted -> a self-contained HTML page, runs tinted in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from infer.acceptance_stats import AcceptanceStats
from infer.output_file import write_text
from infer.prompts import Prompt
from infer.stopping import IncrementalDetokenizer

NUM_TINTS = 4

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1b1b; --quiet: #666; --line: #ddd;
  --tint0: #cfe8ff; --tint1: #ffe3bf; --tint2: #d4f2d0; --tint3: #f1d7f7; }
@media (prefers-color-scheme: dark) { :root { --page: #16181c; --ink: #e6e6e6; --quiet: #9a9a9a; --line: #33373d;
  --tint0: #1f4a6e; --tint1: #6b4a1c; --tint2: #26552a; --tint3: #55336b; } }
body { background: var(--page); color: var(--ink); font: 16px/1.6 system-ui, sans-serif;
  max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
section { border-top: 1px solid var(--line); padding: .5rem 0 1rem; }
h2 { font-size: 1rem; margin: .5rem 0; }
.quiet { color: var(--quiet); font-size: .9rem; }
.prompt, .answer { white-space: pre-wrap; overflow-wrap: anywhere; }
.prompt { color: var(--quiet); }
.answer span, .legend span { border-radius: 3px; }
.one { border-bottom: 1px dotted var(--quiet); }
""" + "".join(f".t{i} {{ background: var(--tint{i}); }}\n" for i in range(NUM_TINTS))


@dataclass(frozen=True, slots=True)
class Entry:
    """One answer. runs: (number of tokens, text) of each base forward, in order."""

    title: str
    row: str
    prompt: str
    runs: list[tuple[int, str]]
    mean_acceptance_length: float | None


def answer_runs(
    tokenizer: Any, *, row: str, prompt: Prompt, token_ids: Sequence[int], runs: Sequence[int], stats: AcceptanceStats
) -> Entry:
    """An answer's tokens and run lengths -> its text in runs; a character begun in one run and ended
    in the next belongs to the next."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces: list[tuple[int, str]] = []
    start = 0
    for length in runs:
        text = "".join(detokenizer.push(token) for token in token_ids[start : start + length])
        start += length
        pieces.append((length, text + (detokenizer.flush() if start >= len(token_ids) else "")))
    return Entry(f"{prompt.id} ({prompt.category})", row, prompt.messages[-1]["content"], pieces, stats.mean_acceptance_length)


def write_html(path: Path, entries: Sequence[Entry]) -> None:
    """Writes the page; nothing in it is fetched from elsewhere."""
    body = "\n".join(_section(list(group)) for _, group in groupby(entries, key=lambda entry: (entry.title, entry.prompt)))
    write_text(
        path,
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Accepted runs</title><style>{STYLE}</style></head><body>\n<h1>Accepted runs</h1>\n{_legend()}\n{body}\n</body></html>\n",
    )


def _legend() -> str:
    return (
        "<p class=legend>Every coloured run was emitted by <b>one</b> forward of the base model: the drafted tokens it accepted and "
        "its own next token, such as <span class=t0> these four tokens here</span><span class=t1> and then three</span>. "
        "<span class=one>Underlined</span> text came one token at a time. Hover over a run "
        "for its length. The colours alternate and mean nothing else.</p>"
    )


def _section(entries: Sequence[Entry]) -> str:
    """One prompt with its answers."""
    answers = "".join(_answer(entry) for entry in entries)
    return f"<section><h2>{escape(entries[0].title)}</h2><div class=prompt>{escape(entries[0].prompt)}</div>{answers}</section>"


def _answer(entry: Entry) -> str:
    spans = []
    num_runs = 0
    for length, text in entry.runs:
        kind = "one" if length == 1 else f"t{num_runs % NUM_TINTS}"
        num_runs += length > 1
        spans.append(f"<span class={kind} title='{length} token{'s' if length > 1 else ''}'>{escape(text)}</span>")
    tau = entry.mean_acceptance_length
    mean = f"mean acceptance length {tau:.2f}" if tau is not None else "one forward"
    num_tokens = sum(n for n, _ in entry.runs)
    return (
        f"<p class=quiet>{escape(entry.row)}: {num_tokens} tokens in {len(entry.runs)} forwards, {mean}</p>"
        f"<div class=answer>{''.join(spans)}</div>"
    )
