"""Targets that receive, and notifiers as processes of their own, for tests."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from . import nursery

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Received(NamedTuple):
    """A request as a target has received it."""

    path: str
    headers: dict[str, str]
    body: bytes
    at: float  #: monotonic seconds

    @property
    def id(self) -> str:
        return self.headers["toc-id"]


#: What a target answers: a status, headers, and bytes.
Reply = tuple[int, Mapping[str, str], bytes]

OK: Reply = (204, {}, b"")


class Target:
    """A server that keeps what it is sent.

    answer: what it answers to a request; it may wait first
    context: for TLS
    """

    def __init__(
        self, answer: Callable[[Received], Reply] = lambda _: OK, context: Any = None
    ) -> None:
        self.received: queue.Queue[Received] = queue.Queue()
        #: requests whose answers have been sent
        self.answered: queue.Queue[Received] = queue.Queue()
        self.connections = 0
        target = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                target.connections += 1
                super().setup()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): said for name, said in self.headers.items()}
                got = Received(self.path, headers, body, time.monotonic())
                target.received.put(got)
                status, said, content = answer(got)
                self.send_response(status)
                for name, value in said.items():
                    self.send_header(name, value)
                if status != 204:
                    self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                target.answered.put(got)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 512

            def handle_error(self, *_: Any) -> None:
                pass  # a notifier that was killed, or gave up waiting

        self._server = Server(("127.0.0.1", 0), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.port}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def next(self, timeout: float = 30) -> Received:
        """The next request."""
        return self.received.get(timeout=timeout)

    def take(self, number: int) -> list[Received]:
        """So many requests."""
        return [self.next() for _ in range(number)]


def signatures(got: Received, secret: str = SECRET) -> bool:
    """Whether one of the signatures of a request is by this secret, as the specification says."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{got.headers['webhook-id']}.{got.headers['webhook-timestamp']}.".encode() + got.body
    made = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return f"v1,{made}" in got.headers["webhook-signature"].split(" ")


class NotifierProcess(nursery.Program):
    """``python -m kombu_toc.notify``, or another command line, as a process of its own.

    secrets: the lines of its secrets; None: it signs nothing
    """

    def __init__(
        self,
        broker: str,
        *options: str,
        secrets: str | None = f"* {SECRET}",
        command: tuple[str, ...] = ("-m", "kombu_toc.notify"),
        environment: Mapping[str, str] | None = None,
        allow: str = "127.0.0.0/8",
    ) -> None:
        said = {"TOC_NOTIFY_SECRETS": secrets} if secrets is not None else {}
        unsigned = ("--unsigned",) if secrets is None else ()
        allowed = ("--allow", allow) if allow else ()
        super().__init__(
            (*command, *allowed, *unsigned, *options),
            {"TOC_NOTIFY_BROKER": broker, **said, **(environment or {})},
            "Sending what is due",
        )

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """In this block it does nothing."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)
