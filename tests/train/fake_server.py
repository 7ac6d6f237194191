"""A chat server in a thread that answers, or misbehaves, as a test says."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


@dataclass
class Reply:
    """data: JSON, or raw bytes. cut: bytes missing at the end although the header announces them; drop: hang up without a word; drip:
    seconds before every byte."""

    data: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: int = 0
    drop: bool = False
    drip: float = 0.0


@dataclass
class FakeServer:
    """respond: a request's body and how often the same body came before -> the reply. requests: bodies and keys as they came."""

    respond: Callable[[Body, int], Reply]
    models: Any = None
    requests: list[tuple[Body, str | None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def take(self, body: Body, key: str | None) -> Reply:
        with self.lock:
            before = sum(earlier == body for earlier, _ in self.requests)
            self.requests.append((body, key))
        return self.respond(body, before)


def completion(text: Any, *, finish_reason: Any = "stop", prompt_ids: Any = None, **choice: Any) -> Reply:
    message = {"role": "assistant", "content": text}
    reply = {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason, **choice}]}
    return Reply(reply if prompt_ids is None else reply | {"prompt_token_ids": prompt_ids})


@contextmanager
def serving(respond: Callable[[Body, int], Reply], *, models: Any = None) -> Iterator[FakeServer]:
    server, over = FakeServer(respond, models), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(Reply({"error": "no such page"}, 404) if server.models is None else Reply(server.models))

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions", self.path
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(server.take(body, self.headers.get("Authorization")))

        def _send(self, reply: Reply) -> None:
            if reply.drop:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            data = reply.data if isinstance(reply.data, bytes) else json.dumps(reply.data).encode()
            self.send_response(reply.status)
            for name, value in (reply.headers | {"Content-Length": str(len(data))}).items():
                self.send_header(name, value)
            self.end_headers()
            while reply.drip and data and not over.wait(reply.drip):
                self.wfile.write(data[:1])
                data = data[1:]
            self.wfile.write(data[: len(data) - reply.cut])
            self.close_connection = reply.cut > 0

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:  # clients that gave up
            pass

    with Quiet(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            over.set()
            http.shutdown()
            thread.join()
