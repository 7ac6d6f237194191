"""`generate` and `chat` on a tiny model: the streamed text is the plain greedy answer."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from infer import commands, loading
from infer.drafters.heads import HeadsDrafter
from infer.generate import Generator
from infer.prompts import encode_chat
from infer.tree import chain
from medusa_heads.base_model import load_base
from medusa_heads.checkpoint import load_heads, save_heads
from medusa_heads.cli import main
from medusa_heads.config import HeadsConfig
from medusa_heads.heads import create_heads
from tests.tiny_models import tiny_model, tiny_tokenizer

MODEL, TOKENIZER = tiny_model("llama"), tiny_tokenizer()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A saved base and saved heads."""
    root = tmp_path_factory.mktemp("commands")
    MODEL.save_pretrained(root / "base")
    TOKENIZER.save_pretrained(root / "base")
    heads = create_heads(HeadsConfig(num_heads=2), MODEL)
    torch.nn.init.normal_(heads.weight)
    save_heads(heads, root / "heads", card="random")
    return str(root / "base"), str(root / "heads")


def plain_answer(messages: list[tuple[str, str]], max_new_tokens: int = 12) -> str:
    ids = encode_chat(TOKENIZER, [{"role": role, "content": content} for role, content in messages])
    return Generator(MODEL, tokenizer=TOKENIZER).generate([ids], max_new_tokens=max_new_tokens)[0].text


def run(folders: tuple[str, str], command: str, *options: str, heads: str | None = None) -> int:
    base, saved = folders
    tree = [] if heads == "none" else ["--tree", "beam:4"]
    return main([command, "--base", base, "--heads", heads or saved, *tree, "--max-new-tokens", "12", *options])


@pytest.mark.parametrize("heads", [None, "none"])
def test_generate_prints_the_greedy_answer(folders: tuple[str, str], capsys: pytest.CaptureFixture[str], heads: str | None) -> None:
    assert run(folders, "generate", "--prompt", "hello", "--system", "be kind", heads=heads) == 0
    assert capsys.readouterr().out == plain_answer([("system", "be kind"), ("user", "hello")]) + "\n"


def test_generate_reads_standard_input(
    folders: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat"))
    assert run(folders, "generate", "--prompt", "-", "--show-stats") == 0
    captured = capsys.readouterr()
    assert captured.out == plain_answer([("user", "the cat")]) + "\n"
    assert "12 tokens" in captured.err and "tokens per forward" in captured.err and "ended by length" in captured.err


@pytest.mark.parametrize("verifier", ["block", "typical"])
def test_the_verifier_of_sampled_drafts(
    folders: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verifier: str
) -> None:
    options = ["--tree", "chain", "--temperature", "0.8", "--seed", "3", "--verifier", verifier]
    base, saved = folders
    assert main(["generate", "--base", base, "--heads", saved, "--max-new-tokens", "12", "--prompt", "hello", *options]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("--verifier typical is lossy") == (verifier == "typical")
    model, _ = load_base(base)
    generator = Generator(model, HeadsDrafter(model, load_heads(saved, model).heads, chain(2)), tokenizer=TOKENIZER)
    config = GenerationConfig(do_sample=True, temperature=0.8, top_k=0, top_p=1.0, min_p=0.0)
    ids = encode_chat(TOKENIZER, [{"role": "user", "content": "hello"}])
    (answer,) = generator.generate([ids], max_new_tokens=12, generation_config=config, seed=3, verifier=verifier)  # type: ignore[arg-type]
    assert captured.out == answer.text + "\n" and answer.lossless == (verifier == "block")

    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["chat", "--base", base, "--heads", saved, "--max-new-tokens", "12", *options]) == 0
    captured = capsys.readouterr()
    assert captured.out == answer.text + "\n" and captured.err.count("--verifier typical is lossy") == (verifier == "typical")


def test_stop_string_is_cut_off(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    answer = plain_answer([("user", "hello")])
    stop = answer[4:7]
    assert run(folders, "generate", "--prompt", "hello", "--stop", stop) == 0
    assert capsys.readouterr().out == answer[: answer.index(stop)] + "\n"


def test_text_is_streamed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *values, **_: pieces.append("".join(values)))
    ids = encode_chat(TOKENIZER, [{"role": "user", "content": "hello"}])
    answer = commands.stream(Generator(MODEL, tokenizer=TOKENIZER), ids, max_new_tokens=12, stop=())
    assert "".join(pieces) == answer.text == plain_answer([("user", "hello")])
    assert sum(map(bool, pieces)) > 3


def test_interrupt_keeps_what_was_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    generator = Generator(MODEL, tokenizer=TOKENIZER)
    steps = generator.steps

    def interrupted(*args: object, **kwargs: object) -> object:
        for number, step in enumerate(steps(*args, **kwargs)):  # type: ignore[arg-type]
            if number == 8:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(generator, "steps", interrupted)
    ids = encode_chat(TOKENIZER, [{"role": "user", "content": "hello"}])
    answer = commands.stream(generator, ids, max_new_tokens=12, stop=())
    assert answer.finish_reason == "interrupted" and answer.num_tokens == 8
    assert answer.text and plain_answer([("user", "hello")]).startswith(answer.text)
    assert capsys.readouterr().out == answer.text + "\n"


def test_chat_remembers_resets_and_quits(
    folders: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nthe dog\n/reset\nthe dog\n/quit\nnever asked\n"))
    assert run(folders, "chat") == 0
    captured = capsys.readouterr()
    first = plain_answer([("user", "hello")])
    second = plain_answer([("user", "hello"), ("assistant", first), ("user", "the dog")])
    third = plain_answer([("user", "the dog")])
    assert second != third
    assert captured.out == f"{first}\n{second}\n{third}\n"
    assert captured.err.count("tokens per forward") == 3


def test_chat_ends_with_its_input(folders: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    assert run(folders, "chat", "--system", "be kind") == 0
    assert capsys.readouterr().out == plain_answer([("system", "be kind"), ("user", "hello")]) + "\n"


def test_chat_survives_a_message_beyond_the_context(
    folders: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x " * 600 + "\nhello\n"))
    assert run(folders, "chat") == 0
    captured = capsys.readouterr()
    assert captured.out == plain_answer([("user", "hello")]) + "\n"  # the long message is not in the conversation
    assert "the model's context ends at 512" in captured.err and "/reset" in captured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "x " * 600], "the model's context ends at 512"),
        (["--prompt", "  "], "--prompt is empty"),
        (["--prompt", "a", "--stop", ""], "a stop string is empty"),
        (["--prompt", "a", "--device", "nowhere"], "--device nowhere"),
        (["--prompt", "a", "--device", "cuda:99"], "--device cuda:99"),
        (["--prompt", "a", "--device", "meta"], "--device meta: torch cannot compute"),
        (["--prompt", "a", "--device", "xla"], "--device xla: torch cannot compute"),
        (["--prompt", "cut \udcff"], "the user's message holds half a surrogate pair"),
        (["--prompt", "a", "--stop", "x", "--stop", "y"], "--stop is given 2 times"),
        (["--prompt", "a", "--verifier", "typical"], "--verifier typical is for sampling"),
        (["--prompt", "a", "--verifier", "traversal", "--temperature", "1"], "--verifier traversal needs drafts that are drawn"),
    ],
)
def test_bad_input_is_one_line(folders: tuple[str, str], capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert run(folders, "generate", *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tree", "static:2", "--temperature", "1", "--verifier", "block"], "--verifier block is for chains"),
        (["--tree", "static:2", "--temperature", "inf"], "--temperature inf: give a finite number"),
        (["--tree", "static:2", "--temperature", "1e-40"], "--temperature 1e-40: must be 0 (greedy), or 0.001 and more"),
        (["--tree", "beam:4", "--stop", ""], "a stop string is empty"),
        (["--tree", "beam:4", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--tree", "beam:4", "--system", "x " * 600], "the model's context ends at 512"),
    ],
)
def test_chat_tells_before_the_first_turn_what_no_message_can_mend(
    folders: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    heads = load_heads(folders[1], MODEL).heads
    save_heads(heads, tmp_path / "heads", card="", measured={"static_nodes": {"0": 0.5, "1": 0.2}, "acceptance_length": {}})
    monkeypatch.setattr(commands, "read_line", lambda: pytest.fail("no message is to be read"))
    assert main(["chat", "--base", folders[0], "--heads", str(tmp_path / "heads"), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("command", [["generate", "--prompt", "a"], ["chat"]])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", "none", "--tree", "beam:4"], "--tree beam:4 has no effect with --heads none, which drafts nothing: leave it out"),
        (["--heads", "none", "--temperature", "1", "--verifier", "block"], "--verifier block: nothing is drafted here"),
        (["--heads", "h", "--temperature", "1", "--verifier", "block"], "--verifier block is for chains"),
        (["--heads", "h", "--temperature", "1", "--verifier", "traversal", "--tree", "beam:8"], "needs drafts that are drawn"),
        (["--heads", "h", "--temperature", "1", "--verifier", "block", "--tree", "BUSHY"], "--verifier block is for chains"),
        (["--heads", "h", "--tree", "/nowhere.json"], "--tree /nowhere.json: no such file"),
        ([], "--heads is needed for --base"),
    ],
)
def test_conflicts_are_told_before_anything_is_loaded(
    command: list[str],
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "load_model", lambda *args, **kwargs: pytest.fail("nothing is to be loaded"))
    (tmp_path / "bushy.json").write_text("[[0], [1]]")
    options = [str(tmp_path / "bushy.json") if option == "BUSHY" else option for option in options]
    assert main([*command, "--base", "some/base", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_heads_are_needed_for_another_base(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--base", folders[0], "--prompt", "a"]) == 2
    assert "--heads is needed" in capsys.readouterr().err
