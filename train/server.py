"""Chat messages -> one answer of an OpenAI-compatible server, checked; retried where the server fails or answers garbage."""

from __future__ import annotations

import os
import random
import re
import time
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Never
from urllib.parse import urlsplit

import requests

from infer.prompts import check_whole_characters
from infer.static.sampling import Sampling
from medusa_heads.json_text import parse_json

ENDPOINT = "/chat/completions"
CONNECT_TIMEOUT, READ_TIMEOUT = 10.0, 600.0  # seconds; the answer of a large model arrives in one piece
LONGEST_WAIT = 60.0
BUSY = (408, 409, 425, 429)
ITS_WORDS = ("error", "message", "detail", "msg")  # the fields of a refusal that hold them
TOO_LONG = re.compile(r"maximum context|context[ _-](length|size|window)", re.IGNORECASE)
FINISH_REASONS = {"stop": "eos", "length": "length"}


class Unanswered(Exception):
    """The server gave no usable answer to these messages. is_too_long: because they exceed its context."""

    def __init__(self, reason: str, *, is_too_long: bool = False) -> None:
        super().__init__(reason)
        self.is_too_long = is_too_long


class _TryAgain(Exception):
    """wait: seconds that the server asked for."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class _WithoutIds(_TryAgain):
    """The refusal names return_token_ids: the server does not know the field, or repeats a request that it refuses for another reason."""


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """finish_reason: `eos` or `length`. token_ids and prompt_ids: exactly those of the server, where it returns them."""

    text: str
    finish_reason: str
    token_ids: list[int] | None
    prompt_ids: list[int] | None


@dataclass(slots=True)
class ChatServer:
    """A model behind a server. num_tokens: size of its vocabulary; context: the most tokens of a conversation, where the server says.

    asks_ids: whether answers are asked for with their token ids, which vLLM (0.10.2 and newer) returns; a server
    that answers only without the field is not asked again. Safe to use from many threads.
    """

    url: str
    model: str
    num_tokens: int
    api_key: str | None = None
    concurrency: int = 1
    attempts: int = 8
    backoff: float = 1.0
    timeout: float = READ_TIMEOUT
    context: int | None = None
    asks_ids: bool = True
    session: requests.Session = field(default_factory=requests.Session)

    def __post_init__(self) -> None:
        """Raises ValueError naming --server or --server-model for what cannot work."""
        self.url = base_url(self.url)
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=self.concurrency)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, adapter)
        self.session.auth = self._authorize  # ours alone: none from ~/.netrc
        self._check_model()

    def answer(self, messages: list[dict[str, str]], *, sampling: Sampling, max_tokens: int, seed: int) -> ServedAnswer:
        """The next assistant message. Raises Unanswered after several attempts or a refusal, ValueError where no request can work."""
        body: dict[str, Any] = {"model": self.model, "messages": messages, "max_tokens": max_tokens, "stream": False}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        body |= {"top_k": sampling.top_k} if sampling.top_k else {}
        body |= {"seed": seed} if sampling.temperature else {}
        asks_ids = self.asks_ids
        for attempt in range(self.attempts):
            try:
                answer = self._attempt(body | ({"return_token_ids": True} if asks_ids else {}))
            except _TryAgain as failure:
                reason, asks_ids = str(failure), asks_ids and not isinstance(failure, _WithoutIds)
                if attempt + 1 < self.attempts:
                    pause = self.backoff * 2**attempt * random.uniform(0.5, 1.0)
                    time.sleep(min(LONGEST_WAIT, max(failure.wait, pause)))
                continue
            if not asks_ids:
                self.asks_ids = False
            return answer
        raise Unanswered(f"{reason} ({self.attempts} attempts)")

    def _attempt(self, body: dict[str, Any]) -> ServedAnswer:
        try:
            response = self._request("POST", ENDPOINT, self.timeout, json=body)
        except requests.Timeout:
            raise _TryAgain(f"no answer within {self.timeout:g} seconds") from None
        except (requests.RequestException, ValueError) as error:  # refused, reset, a body that breaks off, a redirection to nowhere
            raise _TryAgain(f"the connection failed: {_short(str(error))}") from None
        if response.status_code != 200:
            self._refused(response, body)
        try:
            reply = parse_json(response.content)
        except ValueError as error:
            raise _TryAgain(f"garbage: broken JSON ({_short(str(error))})") from None
        return parse_answer(reply, num_tokens=self.num_tokens)

    def _request(self, method: str, path: str, timeout: float, **body: Any) -> requests.Response:
        """Raises requests.Timeout when the reply is not whole in time. What requests takes as its time is that of every single wait, which
        a server that sends a byte now and then would never let pass: it goes on in a thread that nobody waits for."""
        outcome: SimpleQueue[requests.Response | Exception] = SimpleQueue()

        def ask() -> None:
            try:
                outcome.put(self.session.request(method, self.url + path, timeout=(CONNECT_TIMEOUT, timeout), **body))
            except Exception as error:
                outcome.put(error)

        Thread(target=ask, daemon=True).start()
        try:
            found = outcome.get(timeout=CONNECT_TIMEOUT + timeout)
        except Empty:
            raise requests.Timeout(f"no whole reply within {CONNECT_TIMEOUT + timeout:g} seconds") from None
        if isinstance(found, Exception):
            raise found
        return found

    def _refused(self, response: requests.Response, body: dict[str, Any]) -> Never:
        status, text = response.status_code, _short(response.text)
        if status in BUSY or status >= 500:
            raise _TryAgain(f"status {status}: {text}", _seconds(response.headers.get("Retry-After")))
        if status in (401, 403):
            raise ValueError(
                f"--server {self.url} refuses the key (status {status}): name the variable that holds it with --server-key-env"
            )
        if status in (404, 405):
            raise ValueError(f"--server {self.url} has no {ENDPOINT} for {self.model!r} (status {status}: {text}): check --server")
        if "return_token_ids" in body and "return_token_ids" in response.text:
            raise _WithoutIds(f"status {status}: {text}")
        raise Unanswered(f"status {status}: {text}", is_too_long=TOO_LONG.search(_own_words(response)) is not None)

    def _check_model(self) -> None:
        """Asks which models there are; a server that does not list them is trusted."""
        try:
            response = self._request("GET", "/models", CONNECT_TIMEOUT)
        except requests.RequestException as error:
            reason = _reason(error)
            raise ValueError(f"--server {self.url} cannot be reached ({reason}): start it, or correct the address") from None
        if response.status_code in (401, 403):
            self._refused(response, {})
        try:
            models = {model["id"]: model for model in parse_json(response.content)["data"]} if response.status_code == 200 else {}
        except (ValueError, KeyError, TypeError):
            return
        if models and self.model not in models:
            raise ValueError(f"--server-model {self.model}: not served at {self.url}; it has {', '.join(map(str, models))}")
        context = models.get(self.model, {}).get("max_model_len")
        self.context = context if type(context) is int and context > 0 else None

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.api_key is not None:
            request.headers["Authorization"] = f"Bearer {self.api_key}"
        return request


def base_url(url: str) -> str:
    """`http://host:8000`, with or without /v1 or the endpoint itself -> the address that endpoints are added to."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--server {url}: give an address such as http://localhost:8000/v1")
    if parts.username or parts.password:
        raise ValueError("--server: no user and password in the address; put a key into a variable and name it with --server-key-env")
    path = parts.path.rstrip("/").removesuffix(ENDPOINT)
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def api_key_from(variable: str | None) -> str | None:
    """The key in an environment variable. Raises ValueError when it is named and is empty, absent or no key; the message never holds it."""
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise ValueError(f"--server-key-env {variable}: this environment variable is empty; it must hold the server's key")
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"--server-key-env {variable}: it holds a line break or another character that no key has; it must hold the key alone"
        )
    return key


def parse_answer(reply: Any, *, num_tokens: int) -> ServedAnswer:
    """The JSON of a chat completion -> the answer; raises _TryAgain for anything that cannot be trained on."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise _TryAgain("garbage: no choices with a message")
    text, finish_reason = message.get("content"), choice.get("finish_reason")
    if text is not None and not isinstance(text, str):
        raise _TryAgain(f"garbage: the content is of type {type(text).__name__}")
    if not isinstance(finish_reason, str) or finish_reason not in FINISH_REASONS:
        raise _TryAgain(f"garbage: finish_reason {finish_reason!r} is neither `stop` nor `length`")
    token_ids = _token_ids(choice, "token_ids", num_tokens)
    if token_ids is None:
        text = _whole_text(message, is_cut=finish_reason == "length")
    return ServedAnswer(text or "", FINISH_REASONS[finish_reason], token_ids, _token_ids(reply, "prompt_token_ids", num_tokens))


def _token_ids(holder: dict[str, Any], name: str, num_tokens: int) -> list[int] | None:
    ids = holder.get(name)
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise _TryAgain(f"garbage: {name} is no list of token ids")
    if max(ids) >= num_tokens:
        raise _TryAgain(f"garbage: {name} holds {max(ids)}, but the tokenizer of --base has {num_tokens} tokens: another model is served")
    return ids


def _whole_text(message: dict[str, Any], *, is_cut: bool) -> str:
    """The text of an answer without token ids: it must be all that the model wrote."""
    if message.get("reasoning") or message.get("reasoning_content") or message.get("tool_calls"):
        raise _TryAgain("garbage: part of the answer is missing from the content; start the server without reasoning and tool parsers")
    text = message.get("content") or ""
    if is_cut:
        text = text.rstrip("\ufffd")  # the bytes of a character whose last token is missing
    if not text.strip():
        raise _TryAgain("garbage: an empty answer")
    try:
        check_whole_characters(text, "the answer")
    except ValueError as error:
        raise _TryAgain(f"garbage: {error}") from None
    return text


def _own_words(response: requests.Response) -> str:
    """What the server says about a request that it refuses, without the request itself, which some repeat in their replies."""
    try:
        parts = [parse_json(response.content)]
    except ValueError:
        return response.text
    words = []
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            words.append(part)
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += [part[name] for name in ITS_WORDS if name in part]
    return " ".join(words)


def _seconds(header: str | None) -> float:
    """A Retry-After header in seconds; dates are left to our own waiting."""
    return float(header) if header is not None and header.isdecimal() else 0.0


def _reason(error: BaseException) -> str:
    """What the operating system said, where it said something."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        inner = inner.__cause__ or inner.__context__
    return _short(str(error))


def _short(text: str) -> str:
    return " ".join(text.split())[:200]
