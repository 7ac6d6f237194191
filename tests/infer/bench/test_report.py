"""The picture and the page: what they show is what the document and the runs say."""

from __future__ import annotations

import builtins
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from infer.acceptance_stats import AcceptanceStats
from infer.bench.html_report import Entry, answer_runs, write_html
from infer.bench.report import draw_acceptance, draw_speeds, plot_benchmark, require_matplotlib
from infer.prompts import Prompt
from tests.tiny_models import tiny_tokenizer


def row(name: str, speed: float | None, by_depth: list[float]) -> dict[str, Any]:
    return {
        "drafter": name,
        "lossless": name != "typical:heads",
        "tokens_per_second": speed,
        "speedup_vs_base": speed and speed / 20,
        "num_drafted_tokens": None if speed is None else 10 * len(by_depth),
        "acceptance_by_depth": by_depth,
        "mean_acceptance_length": 1 + sum(by_depth),
    }


DOCUMENT: dict[str, Any] = {
    "hardware": {"gpu": None, "cpu": "a processor"},
    "prompts": {"num": 2},
    "settings": {"base": "embedded", "dtype": "float32", "batch_size": 1},
    "rows": [
        row("base", 20.0, []),
        row("base_compiled", None, []),
        row("prompt_lookup", 25.0, [0.25]),
        row("heads", 40.0, [0.5, 0.25]),
        row("typical:heads", 50.0, [0.75]),
    ],
}


def axes() -> Any:
    from matplotlib.figure import Figure

    return Figure().add_subplot()


def test_one_bar_per_row_that_ran() -> None:
    drawn = axes()
    draw_speeds(drawn, DOCUMENT)
    assert [bar.get_width() for bar in drawn.patches] == [20.0, 25.0, 40.0, 50.0]
    assert [label.get_text() for label in drawn.get_yticklabels()] == ["base", "prompt_lookup", "heads", "typical:heads (lossy)"]
    assert [text.get_text() for text in drawn.texts] == ["20.0  (×1.00)", "25.0  (×1.25)", "40.0  (×2.00)", "50.0  (×2.50)"]


def test_one_line_per_drafter() -> None:
    drawn = axes()
    draw_acceptance(drawn, DOCUMENT)
    assert {line.get_label(): list(line.get_ydata()) for line in drawn.lines} == {
        "prompt_lookup (length 1.25)": [0.25, 0.0],
        "heads (length 1.75)": [0.5, 0.25],
        "typical:heads (lossy) (length 1.75)": [0.75, 0.0],
    }


def test_picture_is_a_png(tmp_path: Path) -> None:
    plot_benchmark(DOCUMENT, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert [p.name for p in tmp_path.iterdir()] == ["p.png"]


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"medusa-heads\[plot\]"):
        require_matplotlib()


class Page(HTMLParser):
    """Collects (class, title, text) of the spans of every answer, and remote addresses."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.spans: list[tuple[str, str, str]] = []
        self.in_answer = False
        self.remote = re.findall(r"(?:src|href)\s*=", html)
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        values = dict(attributes)
        self.in_answer |= values.get("class") == "answer"
        if tag == "span" and self.in_answer:
            self.spans.append((values["class"], values["title"], ""))

    def handle_endtag(self, tag: str) -> None:
        self.in_answer &= tag != "div"

    def handle_data(self, data: str) -> None:
        if self.in_answer and self.spans:
            self.spans[-1] = (*self.spans[-1][:2], self.spans[-1][2] + data)


def test_page_tints_runs_and_escapes_text(tmp_path: Path) -> None:
    hostile = "<script>alert('x')</script> & \"quotes\""
    runs = [(1, "a"), (3, hostile), (2, " b"), (1, "c"), (2, "d")]
    write_html(tmp_path / "p.html", [Entry("<id>", "heads", hostile, runs, 2.5)])
    html = (tmp_path / "p.html").read_text()
    page = Page(html)
    assert [kind for kind, _, _ in page.spans] == ["one", "t0", "t1", "one", "t2"]
    assert [title for _, title, _ in page.spans] == ["1 token", "3 tokens", "2 tokens", "1 token", "2 tokens"]
    assert "".join(text for _, _, text in page.spans) == "".join(text for _, text in runs)
    assert "<script" not in html and "<id>" not in html
    assert not page.remote
    assert "mean acceptance length 2.50" in html and "9 tokens in 5 forwards" in html
    assert "prefers-color-scheme: dark" in html


def test_rows_of_one_prompt_share_a_section(tmp_path: Path) -> None:
    entries = [Entry("one", "heads", "p", [(1, "a")], None), Entry("one", "prompt_lookup", "p", [(1, "a")], None)]
    write_html(tmp_path / "p.html", [*entries, Entry("two", "heads", "q", [(1, "a")], None)])
    assert (tmp_path / "p.html").read_text().count("<section>") == 2


def test_character_split_over_runs_belongs_to_the_later_run() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("é!", add_special_tokens=False)["input_ids"]
    assert len(ids) == 3  # two bytes of one character, then "!"
    prompt = Prompt("id", "writing", [{"role": "user", "content": "say é"}])
    entry = answer_runs(tokenizer, row="heads", prompt=prompt, token_ids=ids, runs=[1, 2], stats=AcceptanceStats())
    assert entry.runs == [(1, ""), (2, "é!")]
    assert entry.title == "id (writing)" and entry.prompt == "say é"
