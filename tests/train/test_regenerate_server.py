"""regenerate --server: every turn from the server, exact tokens, what fails set aside, and nothing asked twice after kill -9."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import TURN_END, tiny_tokenizer
from tests.train.fake_server import Body, FakeServer, Reply, completion, serving
from train import regenerate
from train.chat_turns import ChatTurns
from train.prompt_rows import load_prompt_rows
from train.regenerate import Regenerate
from train.server import ChatServer

PROMPTS: list[dict[str, Any]] = [
    {"id": "one", "source": "s", "messages": [{"role": "user", "content": "the cat sat"}]},
    {
        "id": "two",
        "messages": [
            {"role": "system", "content": "hello"},
            {"role": "user", "content": "what is it"},
            {"role": "assistant", "content": "an old answer"},
            {"role": "user", "content": "the dog ran"},
        ],
    },
    *({"id": f"n{i}", "messages": [{"role": "user", "content": f"how are you {i}"}]} for i in range(6)),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", PROMPTS)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regenerate, "ChatServer", functools.partial(ChatServer, backoff=0.001, attempts=3))


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(base: str, output: Path, prompts: Path, fake: FakeServer, **options: Any) -> Regenerate:
    defaults: dict[str, Any] = {"server": fake.url, "server_model": "m", "concurrency": 3, "max_new_tokens": 12}
    return Regenerate(base=base, output=output, prompts=(str(prompts),), **(defaults | options))


def meta(output: Path) -> dict[str, Any]:
    return json.loads(output.with_name(output.name + ".meta.json").read_text())


def text_for(body: Body) -> str:
    return f"the answer to {body['messages'][-1]['content']}"


def rendered(body: Body) -> list[int]:
    tokenizer: Any = tiny_tokenizer()
    return tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)["input_ids"]


def encoded(text: str) -> list[int]:
    tokenizer: Any = tiny_tokenizer()
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def exactly(body: Body, before: int) -> Reply:
    """As vLLM answers when asked for token ids."""
    text = text_for(body)
    return completion(text, prompt_ids=rendered(body), token_ids=[*encoded(text), TURN_END])


def as_text(body: Body, before: int) -> Reply:
    return completion(text_for(body))


# ---------------------------------------------------------------- what is kept


def test_every_turn_is_asked_with_the_servers_own_answers_before(base: str, prompts: Path, tmp_path: Path) -> None:
    with serving(exactly) as fake:
        command(base, tmp_path / "o.jsonl", prompts, fake).run()
    rows = read(tmp_path / "o.jsonl")
    assert [row["id"] for row in rows] == [row["id"] for row in PROMPTS] and len(fake.requests) == len(PROMPTS) + 1
    two = next(row for row in rows if row["id"] == "two")
    assert [m["content"] for m in two["messages"]] == [
        *("hello", "what is it", "the answer to what is it", "the dog ran", "the answer to the dog ran"),
    ]
    second = next(body for body, _ in fake.requests if len(body["messages"]) == 4)
    assert second["messages"] == two["messages"][:-1], "the old answer is not shown"
    (a, b), (c, d) = two["assistant_spans"]
    assert two["input_ids"][:c] == rendered(second) and two["input_ids"][:a] == rendered({"messages": two["messages"][:2]})
    assert two["input_ids"][a:b] == [*encoded("the answer to what is it"), TURN_END]
    assert two["input_ids"][c:d] == [*encoded("the answer to the dog ran"), TURN_END] and d == len(two["input_ids"])
    assert meta(tmp_path / "o.jsonl")["counts"]["tokens_from"] == {"server": len(PROMPTS)}


def test_a_server_that_gives_text_gives_the_same_rows(base: str, prompts: Path, tmp_path: Path) -> None:
    for name, respond in (("ids", exactly), ("text", as_text)):
        with serving(respond) as fake:
            command(base, tmp_path / name, prompts, fake).run()
    with_ids, with_text = read(tmp_path / "ids"), read(tmp_path / "text")
    assert {row.pop("tokens_from") for row in with_text} == {"template"} and not any(row.pop("other_template") for row in with_ids)
    assert with_text == [{name: value for name, value in row.items() if name != "tokens_from"} for row in with_ids]


@pytest.mark.parametrize(("respond", "lacking"), [(exactly, 0), (as_text, len(PROMPTS)), ("the dog ran", 1)])
def test_token_ids_that_are_not_the_servers_are_told_once(
    base: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], respond: Any, lacking: int
) -> None:
    """One answer without its ids (here the second of `two`) is enough."""

    def some(body: Body, before: int) -> Reply:
        return (as_text if body["messages"][-1]["content"] == respond else exactly)(body, before)

    with serving(some if isinstance(respond, str) else respond) as fake:
        command(base, tmp_path / "o.jsonl", prompts, fake).run()
    warning = f"warning: the server returned no token ids for answers of {lacking} of {len(PROMPTS)} conversations"
    assert capsys.readouterr().err.count(warning) == (1 if lacking else 0)
    assert meta(tmp_path / "o.jsonl")["counts"]["tokens_from"].get("template", 0) == lacking


def test_an_answer_cut_by_the_server_ends_without_an_end_of_turn(base: str, prompts: Path, tmp_path: Path) -> None:
    with serving(lambda body, before: completion("the answer to", finish_reason="length")) as fake:
        command(base, tmp_path / "o.jsonl", prompts, fake).run()
    rows = read(tmp_path / "o.jsonl")
    for row in rows:
        assert row["finish_reasons"] == ["length"] * len(row["assistant_spans"])
        assert all(row["input_ids"][start:end] == encoded("the answer to") for start, end in row["assistant_spans"])
    assert rows[1]["input_ids"][rows[1]["assistant_spans"][0][1]] == TURN_END, "between turns it stands, but is not the model's"
    assert meta(tmp_path / "o.jsonl")["counts"]["finish_reasons"] == {"length": len(PROMPTS) + 1}


def test_token_ids_that_decode_to_the_same_text_are_kept_as_they_are(base: str, prompts: Path, tmp_path: Path) -> None:
    """Single characters: no tokenizer would choose these tokens, and the server's next prompt holds others."""
    odd = [token for character in "the" for token in encoded(character)]
    assert odd != encoded("the")
    with serving(lambda body, _: completion("the", prompt_ids=rendered(body), token_ids=[*odd, TURN_END])) as fake:
        command(base, tmp_path / "o.jsonl", prompts, fake).run()
    rows = read(tmp_path / "o.jsonl")
    assert all(row["input_ids"][start:end] == [*odd, TURN_END] for row in rows for start, end in row["assistant_spans"])
    assert [row.get("rewritten_turns", 0) for row in rows[:3]] == [0, 1, 0]
    pieces = ChatTurns(tiny_tokenizer()).pieces(load_prompt_rows([prompts])[1].turns)
    assert rows[1]["input_ids"] == [*pieces[0], *odd, TURN_END, *pieces[1][1:], *odd, TURN_END]


def test_another_template_on_the_server_is_counted_and_its_tokens_kept(
    base: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thinking = encoded("think")
    with serving(lambda body, _: completion("the", prompt_ids=rendered(body) + thinking, token_ids=[50, TURN_END])) as fake:
        command(base, tmp_path / "o.jsonl", prompts, fake).run()
    row = read(tmp_path / "o.jsonl")[0]
    assert row["input_ids"] == rendered({"messages": PROMPTS[0]["messages"]}) + thinking + [50, TURN_END]
    assert meta(tmp_path / "o.jsonl")["counts"]["other_template"] == len(PROMPTS)
    assert f"the server rendered {len(PROMPTS)} conversations otherwise than the chat template" in capsys.readouterr().err


def test_seeds_differ_by_conversation_and_turn_and_settings_are_passed_on(base: str, prompts: Path, tmp_path: Path) -> None:
    options = {"temperature": 0.8, "top_p": 0.9, "samples": 2, "seed": 3}
    with serving(as_text) as fake:
        command(base, tmp_path / "a.jsonl", prompts, fake, **options).run()
        command(base, tmp_path / "b.jsonl", prompts, fake, **options, concurrency=1).run()
    seeds = [body["seed"] for body, _ in fake.requests]
    count = 2 * (len(PROMPTS) + 1)
    assert len(set(seeds)) == count and sorted(seeds[:count]) == sorted(seeds[count:])
    assert {(body["temperature"], body["top_p"], body["max_tokens"]) for body, _ in fake.requests} == {(0.8, 0.9, 12)}
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_conversations_end_where_the_servers_context_does(base: str, tmp_path: Path) -> None:
    turn = {"role": "user", "content": "x" * 60}
    rows = [{"id": "long", "messages": [{"role": "user", "content": "x" * 200}]}, {"id": "turns", "messages": [turn] * 4}]
    with serving(exactly, models={"data": [{"id": "m", "max_model_len": 200}]}) as fake:
        command(base, tmp_path / "o.jsonl", write(tmp_path / "p.jsonl", rows), fake, max_new_tokens=140).run()
    [row] = read(tmp_path / "o.jsonl")
    counts = meta(tmp_path / "o.jsonl")["counts"]
    assert row["id"] == "turns" and 1 <= len(row["assistant_spans"]) < 4
    assert counts["skipped_too_long"] == ["long"] and counts["cut_short_by_context"] == 1 and counts["set_aside"] == 0
    assert all(len(rendered(body)) + body["max_tokens"] <= 200 for body, _ in fake.requests)


# ---------------------------------------------------------------- what fails


def test_what_the_server_cannot_answer_is_set_aside_and_can_be_answered_later(
    base: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def respond(body: Body, before: int) -> Reply:
        if body["messages"][-1]["content"] == "the dog ran":  # the second turn of `two`: its first answer is not kept either
            return Reply(b'{"choices": [{"mess')
        return as_text(body, before) if before else Reply({}, 500)

    with serving(respond) as fake:
        command(base, tmp_path / "o.jsonl", prompts, fake).run()
    assert [row["id"] for row in read(tmp_path / "o.jsonl")] == [row["id"] for row in PROMPTS if row["id"] != "two"]
    assert meta(tmp_path / "o.jsonl")["counts"]["set_aside"] == 1
    assert "1 conversations got no usable answer" in capsys.readouterr().err
    aside = tmp_path / "o.jsonl.set-aside.jsonl"
    [left] = read(aside)
    assert left["id"] == "two" and left["reason"].startswith("garbage: broken JSON") and left["reason"].endswith("(3 attempts)")
    with serving(as_text) as fake:
        command(base, tmp_path / "later.jsonl", aside, fake).run()
    [row] = read(tmp_path / "later.jsonl")
    assert row["id"] == "two" and len(row["assistant_spans"]) == 2


def test_a_server_that_fails_for_all_stops_the_run_and_the_same_command_continues(base: str, tmp_path: Path) -> None:
    rows = [{"id": str(i), "messages": [{"role": "user", "content": f"the cat {i}"}]} for i in range(60)]
    prompts, output = write(tmp_path / "p.jsonl", rows), tmp_path / "o.jsonl"
    with (
        serving(
            lambda body, before: as_text(body, before) if body["messages"][-1]["content"] in ("the cat 0", "the cat 1") else Reply({}, 503)
        ) as fake,
        pytest.raises(ValueError, match=r"no usable answer to the last 16 conversations; the last one: status 503.*continues"),
    ):
        command(base, output, prompts, fake, concurrency=1).run()
    assert not output.exists() and not (tmp_path / "o.jsonl.set-aside.jsonl").exists()
    with serving(as_text) as healed:
        command(base, output, prompts, healed).run()
    assert len(read(output)) == 60 and len(healed.requests) == 58, "the two answered ones are not asked again"


def test_no_answer_at_all_is_an_error(base: str, prompts: Path, tmp_path: Path) -> None:
    with serving(lambda *_: Reply({"error": "roles"}, 400)) as fake, pytest.raises(ValueError, match=r"none of 8 .*status 400"):
        command(base, tmp_path / "o.jsonl", prompts, fake).run()
    assert not (tmp_path / "o.jsonl").exists()


def test_the_key_comes_from_the_named_variable_and_is_written_nowhere(
    base: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "very-secret")
    with serving(as_text) as fake:
        command(base, tmp_path / "o.jsonl", prompts, fake, server_key_env="THE_KEY").run()
        assert {key for _, key in fake.requests} == {"Bearer very-secret"}
        assert not any(b"very-secret" in path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
        with pytest.raises(ValueError, match="--server-key-env NO_KEY: this environment variable is empty"):
            command(base, tmp_path / "p.jsonl", prompts, fake, server_key_env="NO_KEY").run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server": "localhost:8000"}, "--server localhost:8000: give an address"),
        ({"server": None}, "belong to --server URL, which is missing"),
        ({"self_prompts": 3}, "--self-prompts needs the model on this machine"),
        ({"concurrency": 0}, "--concurrency 0"),
        ({"server_model": "other"}, "--server-model other: not served at .* it has m"),
    ],
)
def test_impossible_options_are_refused(base: str, prompts: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with serving(as_text, models={"data": [{"id": "m"}]}) as fake, pytest.raises(ValueError, match=message):
        command(base, tmp_path / "o.jsonl", prompts, fake, **options).run()


# ---------------------------------------------------------------- kill -9


def test_kill_9_and_the_same_command_again(base: str, prompts: Path, tmp_path: Path) -> None:
    """The process is killed while the server holds back all but some answers; what was finished is never asked again."""
    output, is_open = tmp_path / "o.jsonl", [False]

    def respond(body: Body, before: int) -> Reply:
        while not is_open[0] and body["messages"][-1]["content"] in ("how are you 4", "how are you 5"):
            time.sleep(0.01)
        return exactly(body, before)

    with serving(respond) as fake:
        command(base, tmp_path / "whole.jsonl", write(tmp_path / "prompts.jsonl", PROMPTS[:6]), fake).run()
        write(prompts, PROMPTS)
        arguments = ["--base", base, "--output", str(output), "--prompts", str(prompts), "--server", fake.url, "--server-model", "m"]
        arguments += ["--max-new-tokens", "12", "--concurrency", "3"]
        process = subprocess.Popen([sys.executable, "-m", "medusa_heads.cli", "regenerate", *arguments], stderr=subprocess.DEVNULL)
        partial = tmp_path / "o.jsonl.partial"
        deadline = time.monotonic() + 120
        while not (partial.exists() and partial.read_bytes().count(b"\n") == 7):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        is_open[0] = True
        fake.requests.clear()
        command(base, output, prompts, fake).run()
    assert sorted(body["messages"][-1]["content"] for body, _ in fake.requests) == ["how are you 4", "how are you 5"]
    rows = read(output)
    assert rows[:6] == read(tmp_path / "whole.jsonl") and [row["id"] for row in rows] == [row["id"] for row in PROMPTS]
    assert not partial.exists()
