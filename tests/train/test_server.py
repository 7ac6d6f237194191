"""One answer of a server that times out, fails, answers garbage, or cuts its answers."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import requests

from infer.static.sampling import Sampling
from tests.train.fake_server import Body, Reply, completion, serving
from train.server import ChatServer, Unanswered, api_key_from, base_url

MESSAGES = [{"role": "user", "content": "Hi"}]
GOOD = completion("Hello")


def client(url: str, **options: Any) -> ChatServer:
    return ChatServer(url, "m", **({"num_tokens": 100, "attempts": 3, "backoff": 0.001, "timeout": 5.0} | options))


def ask(server: ChatServer, sampling: Sampling | None = None) -> Any:
    return server.answer(MESSAGES, sampling=sampling or Sampling(), max_tokens=7, seed=5)


def test_what_is_asked_and_what_is_kept() -> None:
    exact = completion("Hello", finish_reason="length", prompt_ids=[1, 2], token_ids=[3, 4])
    with serving(lambda *_: exact, models={"data": [{"id": "m", "max_model_len": 64}]}) as fake:
        server = client(fake.url, api_key="secret")
        answer = ask(server)
        ask(server, Sampling(temperature=0.5, top_p=0.9, top_k=3))
    assert (answer.text, answer.finish_reason, answer.token_ids, answer.prompt_ids) == ("Hello", "length", [3, 4], [1, 2])
    assert server.context == 64 and server.url == fake.url + "/v1"
    (greedy, key), (sampled, _) = fake.requests
    assert key == "Bearer secret"
    common = {"model": "m", "messages": MESSAGES, "max_tokens": 7, "stream": False, "return_token_ids": True}
    assert greedy == common | {"temperature": 0.0, "top_p": 1.0}
    assert sampled == common | {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 5}


BAD_REPLIES: list[tuple[Any, str]] = [
    (Reply({"error": "busy"}, 503), "status 503"),
    (Reply({"error": "slow down"}, 429), "status 429"),
    (Reply(b"", drop=True), "the connection failed"),
    (Reply(GOOD.data, cut=9), "the connection failed"),
    (Reply(b'{"choices": [{"mess'), "garbage: broken JSON"),
    (Reply(b"[" * 200_000), "garbage: broken JSON"),
    (Reply(b"\xff"), "garbage: broken JSON"),
    (Reply([1]), "garbage: no choices"),
    (Reply({}), "garbage: no choices"),
    (Reply({"choices": []}), "garbage: no choices"),
    (Reply({"choices": {"0": "x"}}), "garbage: no choices"),
    (Reply({"choices": [{"finish_reason": "stop"}]}), "garbage: no choices with a message"),
    (Reply({}, 302, {"Location": "http://[nowhere"}), "the connection failed: Invalid IPv6 URL"),
    (completion(7), "garbage: the content is of type int"),
    (completion([{"type": "text", "text": "x"}]), "garbage: the content is of type list"),
    (completion("x", finish_reason=None), "garbage: finish_reason None"),
    (completion("x", finish_reason=["stop"]), "garbage: finish_reason"),
    (completion("x", finish_reason="content_filter"), "garbage: finish_reason 'content_filter'"),
    (completion(""), "garbage: an empty answer"),
    (completion(" \n"), "garbage: an empty answer"),
    (completion(None), "garbage: an empty answer"),
    (completion("\ufffd\ufffd", finish_reason="length"), "garbage: an empty answer"),
    (completion("\ud800"), "garbage: the answer holds half a surrogate pair"),
    (completion("x", token_ids=[]), "garbage: token_ids is no list of token ids"),
    (completion("x", token_ids=[1, True]), "garbage: token_ids is no list of token ids"),
    (completion("x", token_ids=[1, -1]), "garbage: token_ids is no list of token ids"),
    (completion("x", token_ids="12"), "garbage: token_ids is no list of token ids"),
    (completion("x", token_ids=[1, 100]), "garbage: token_ids holds 100, but the tokenizer of --base has 100 tokens"),
    (completion("x", token_ids=[1], prompt_ids=[1.5]), "garbage: prompt_token_ids is no list"),
    (Reply({"choices": [{"message": {"content": "x", "reasoning": "so"}, "finish_reason": "stop"}]}), "without reasoning and tool parsers"),
]


@pytest.mark.parametrize(("reply", "reason"), BAD_REPLIES, ids=[f"{i}-{reason}" for i, (_, reason) in enumerate(BAD_REPLIES)])
def test_bad_replies_are_tried_again_and_never_kept(reply: Reply, reason: str) -> None:
    with serving(lambda body, before: reply if before < 2 else GOOD) as fake:
        assert ask(client(fake.url)).text == "Hello" and len(fake.requests) == 3
        with pytest.raises(Unanswered) as caught:
            fake.requests.clear()
            ask(client(fake.url, attempts=2))
        assert reason in str(caught.value) and str(caught.value).endswith("(2 attempts)") and len(fake.requests) == 2


def test_a_server_that_says_nothing_times_out() -> None:
    def respond(body: Body, before: int) -> Reply:
        time.sleep(0 if before else 0.5)
        return GOOD

    with serving(respond) as fake:
        assert ask(client(fake.url, timeout=0.1)).text == "Hello" and len(fake.requests) == 2
        fake.requests.clear()
        with pytest.raises(Unanswered, match=r"no answer within 0\.1 seconds \(1 attempts\)"):
            ask(client(fake.url, timeout=0.1, attempts=1))


def test_a_server_that_sends_a_byte_now_and_then_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.server.CONNECT_TIMEOUT", 0.2)
    with serving(lambda body, before: replace(GOOD, drip=0.0 if before else 0.1)) as fake:
        assert ask(client(fake.url, timeout=0.3)).text == "Hello" and len(fake.requests) == 2


def test_waiting_grows_and_heeds_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    headers = [
        {},
        {},
        {"Retry-After": "17"},
        {"Retry-After": "9999"},
        {"Retry-After": "Sat, 28 Nov 2026 00:00:00 GMT"},
        {"Retry-After": "\u00b2"},
    ]
    with serving(lambda body, before: Reply({}, 503, headers[before]) if before < 6 else GOOD) as fake:
        ask(client(fake.url, attempts=7, backoff=1.0))
    assert all(2**i / 2 <= waits[i] <= 2**i for i in (0, 1, 4, 5)) and waits[2:4] == [17.0, 60.0]


def test_a_cut_answer_is_kept_as_such() -> None:
    with serving(lambda *_: completion("Hello wor\ufffd", finish_reason="length")) as fake:
        answer = ask(client(fake.url))
    assert (answer.text, answer.finish_reason) == ("Hello wor", "length")


def test_a_server_without_token_ids_is_asked_without() -> None:
    def respond(body: Body, before: int) -> Reply:
        return Reply({"error": "Unrecognized request argument: return_token_ids"}, 400) if "return_token_ids" in body else GOOD

    with serving(respond) as fake:
        server = client(fake.url)
        ask(server)
        ask(server)
    assert ["return_token_ids" in body for body, _ in fake.requests] == [True, False, False]


@pytest.mark.parametrize("later", [Reply({"detail": [{"msg": "blocked"}]}, 422), Reply({}, 503)], ids=["refused", "busy"])
def test_a_refusal_that_repeats_the_request_turns_no_token_ids_off(later: Reply) -> None:
    def respond(body: Body, before: int) -> Reply:
        if body["messages"] != MESSAGES:
            return GOOD
        return Reply({"detail": [{"msg": "blocked", "input": body}]}, 422) if "return_token_ids" in body else later

    with serving(respond) as fake:
        server = client(fake.url)
        with pytest.raises(Unanswered, match=r"blocked|status 503: .* \(3 attempts\)"):
            ask(server)
        assert ["return_token_ids" in body for body, _ in fake.requests][:2] == [True, False]
        server.answer([{"role": "user", "content": "Bye"}], sampling=Sampling(), max_tokens=7, seed=5)
    assert server.asks_ids and "return_token_ids" in fake.requests[-1][0]


def test_a_refusal_is_not_repeated() -> None:
    with (
        serving(lambda *_: Reply({"message": "roles must alternate"}, 400)) as fake,
        pytest.raises(Unanswered, match="alternate") as caught,
    ):
        ask(client(fake.url))
    assert not caught.value.is_too_long and len(fake.requests) == 1


LONGEST = "This model's maximum context length is 64 tokens"
ECHO = {"messages": [{"role": "user", "content": LONGEST}]}


@pytest.mark.parametrize(
    ("error", "is_too_long"),
    [
        ({"object": "error", "message": LONGEST, "code": 400}, True),
        ({"error": {"message": LONGEST, "type": "BadRequestError"}}, True),
        ({"error": "the prompt is longer than the context length"}, True),
        ({"error": {"message": "the request exceeds the available context size", "type": "exceed_context_size_error"}}, True),
        ({"detail": [{"msg": LONGEST, "input": 3}]}, True),
        (LONGEST.encode(), True),
        ({"error": {"message": "blocked out of context"}}, False),
        ({"detail": [{"msg": "blocked", "input": ECHO}]}, False),
        ({"error": {"message": "blocked", "request": ECHO}}, False),
        ([[1], None], False),
    ],
)
def test_only_the_servers_own_words_tell_that_a_conversation_is_too_long(error: Any, is_too_long: bool) -> None:
    with serving(lambda *_: Reply(error, 400)) as fake, pytest.raises(Unanswered) as caught:
        ask(client(fake.url))
    assert caught.value.is_too_long == is_too_long and len(fake.requests) == 1


@pytest.mark.parametrize(
    ("status", "option"), [(401, "--server-key-env"), (403, "--server-key-env"), (404, "check --server"), (405, "--server")]
)
def test_what_no_request_can_mend_names_its_option(status: int, option: str) -> None:
    with serving(lambda *_: Reply({"error": "no"}, status)) as fake, pytest.raises(ValueError, match=option):
        ask(client(fake.url))


def test_the_server_is_checked_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda *_: GOOD, models={"data": [{"id": "other"}]}) as fake, pytest.raises(ValueError, match="it has other"):
        client(fake.url)
    with serving(lambda *_: GOOD, models={"data": "?"}) as fake:
        assert client(fake.url).context is None
    with pytest.raises(ValueError, match=r"--server .* cannot be reached"):
        client("http://127.0.0.1:9/v1")


def test_no_key_is_taken_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests.sessions, "get_netrc_auth", lambda *_: ("user", "password"))
    with serving(lambda *_: GOOD) as fake:
        ask(client(fake.url))
    assert fake.requests[0][1] is None


@pytest.mark.parametrize("key", ["secret\n", "sec\tret", "se\u0441ret"])
def test_what_is_no_key_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("KEY", key)
    with pytest.raises(ValueError, match="--server-key-env KEY: it holds a line break or another character") as caught:
        api_key_from("KEY")
    assert "ret" not in str(caught.value)


def test_addresses() -> None:
    assert base_url("http://h:8000") == base_url("http://h:8000/v1/") == base_url("http://h:8000/v1/chat/completions") == "http://h:8000/v1"
    assert base_url("https://h/openai/v1") == "https://h/openai/v1"
    for bad in ("h:8000", "localhost", "ftp://h", "http://"):
        with pytest.raises(ValueError, match="--server"):
            base_url(bad)
    with pytest.raises(ValueError, match="--server-key-env") as caught:
        base_url("http://me:secret@h")
    assert "secret" not in str(caught.value)
