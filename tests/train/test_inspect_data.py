"""What `medusa-heads inspect-data` prints, with the tokenizer of a local folder alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medusa_heads.cli import main
from tests.tiny_models import tiny_tokenizer
from train.config import parse_config
from train.inspect_data import marked_text
from train.tokenized_data import tokenize_dataset
from train.training_data import prepare_data

ROW = {
    "id": "greeting [b]",
    "messages": [
        {"role": "user", "content": "Hi [red]there[/red] 🙂"},
        {"role": "assistant", "content": "Hello 🙂"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Bye"},
    ],
}
MARKED = (
    "<|im_start|>user\nHi [red]there[/red] 🙂<|im_end|>\n<|im_start|>assistant\n[[Hello 🙂<|im_end|>]]\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[[Bye<|im_end|>]]\n"
)


@pytest.fixture
def base(tmp_path: Path) -> str:
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({**ROW, "id": name}) + "\n" for name in (ROW["id"], "second", "third")))
    return str(path)


def test_rows_are_printed_with_supervised_spans_marked_and_counted(base: str, data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect-data", "--base", base, "--data", data, data, "--num-rows", "2"]) == 0
    output = capsys.readouterr().out
    assert output.count(MARKED) == 4, "two rows of each file"
    assert "greeting [b]" in output and "second" in output and "third" not in output
    tokenizer = tiny_tokenizer()
    answers = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("Hello 🙂<|im_end|>", "Bye<|im_end|>")]
    tokens = len(tokenizer(MARKED.replace("[[", "").replace("]]", ""), add_special_tokens=False)["input_ids"])
    per_slot = ", ".join(f"{k}: {3 * sum(max(n - k, 0) for n in answers)}" for k in range(1, 5))
    line = f"{data}: 3 conversations, {3 * tokens} tokens, {3 * sum(answers)} supervised"
    assert output.count(line) == 2 and output.count(f"; supervised positions per slot {per_slot}\n") == 2


def test_spans_are_coloured_on_a_terminal(data: str) -> None:
    tokenizer = tiny_tokenizer()
    rows, _ = tokenize_dataset([data], tokenizer, max_length=200)
    text = marked_text(rows[0]["input_ids"], rows[0]["assistant_mask"], tokenizer, colour=True)
    assert text.plain == MARKED.replace("[[", "").replace("]]", "")
    assert [text.plain[span.start : span.end] for span in text.spans] == ["Hello 🙂<|im_end|>", "Bye<|im_end|>"]


def test_max_length_cuts_and_is_counted(base: str, data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect-data", "--base", base, "--data", data, "--max-length", "60"]) == 0
    assert "3 cut at max_length, 0 go in circles, 0 skipped" in capsys.readouterr().out


def test_circles_are_cut_as_in_training(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "Cats can be allergic to it, and it is no food for them. "
    path = tmp_path / "circles.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": sentence * 9}]}))
    assert main(["inspect-data", "--base", base, "--data", str(path), "--cut-circles"]) == 0
    output = capsys.readouterr().out
    assert output.count(sentence.strip()) == 2 and "1 go in circles" in output
    common = ["--base", base, "--output-dir", str(tmp_path / "out"), "--data", str(path), "--validation", str(path)]
    for options, times in (([], 9), (["--cut-circles"], 2)):
        rows, validation, counts = prepare_data(parse_config([*common, *options]))
        assert counts.circles == 1
        for row in (rows[0], validation[0]):
            assert tiny_tokenizer().decode(row["input_ids"]).count(sentence.strip()) == times


def test_bad_input_is_one_line(base: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(ROW) + "\n{oops\n")
    assert main(["inspect-data", "--base", base, "--data", str(bad)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {bad}:2: broken JSON")
    assert main(["inspect-data", "--base", str(tmp_path / "none"), "--data", data]) == 2
    assert capsys.readouterr().err.startswith("error: --base")
    assert main(["inspect-data", "--base", "nobody/nothing", "--data", data]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --base 'nobody/nothing'") and "`hf download nobody/nothing`" in line
