"""A server of the HTTP API as a process of its own, and a small client, for tests."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import nursery


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class HttpServer(nursery.Program):
    """``python -m kombu_toc.http``, or another command line that takes ``--port``.

    token: what requests are sent with unless they say
    """

    #: of its broker, where a fixture has one
    center: Any = None

    def __init__(
        self,
        broker: str,
        *options: str,
        environment: Mapping[str, str] | None = None,
        command: tuple[str, ...] = ("-m", "kombu_toc.http"),
        token: str = "",
    ) -> None:
        self.token = token
        super().__init__(
            (*command, "--port", "0", *options),
            {"TOC_HTTP_BROKER": broker, **(environment or {})},
            "Listening at http",
        )
        self.port = int(self.said[-1].rpartition(":")[2])
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self, how: signal.Signals = signal.SIGTERM) -> str:
        """End it; returns what it has said since it began."""
        before = len(self.said)
        self.end(how)
        return "\n".join(self.said[before:])

    def connect(self, timeout: float = 60) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(
        self,
        method: str,
        path: str,
        document: Any = None,
        *,
        raw: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        over: http.client.HTTPConnection | None = None,
    ) -> Reply:
        """Send a request; a document is sent as JSON."""
        sent = dict(headers or {})
        if document is not None:
            raw = json.dumps(document).encode()
            sent.setdefault("content-type", "application/json")
        if self.token:
            sent.setdefault("authorization", f"Bearer {self.token}")
        connection = over or self.connect()
        try:
            connection.request(method, path, body=raw, headers=sent)
            reply = connection.getresponse()
            found = {name.lower(): value for name, value in reply.getheaders()}
            return Reply(reply.status, found, reply.read())
        finally:
            if over is None:
                connection.close()

    def raw(self, sent: bytes) -> Reply:
        """What is answered to these bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as raw:
            raw.sendall(sent)
            reply = http.client.HTTPResponse(raw)
            reply.begin()
            found = {name.lower(): value for name, value in reply.getheaders()}
            return Reply(reply.status, found, reply.read())

    def get(self, path: str, **how: Any) -> Reply:
        return self.ask("GET", path, **how)

    def post(self, path: str, document: Any = None, **how: Any) -> Reply:
        return self.ask("POST", path, document, **how)


def with_tokens(broker: str, *options: str, lines: str) -> HttpServer:
    return HttpServer(broker, *options, environment={"TOC_HTTP_TOKENS": lines})


#: A program that has the API and the page mounted in another application.
MOUNTED = """
import socket, sys, uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from kombu_toc.http import api_for

app = Starlette(routes=[Mount(one, api_for({broker!r})) for one in {places!r}])
listening = socket.create_server(("127.0.0.1", 0))
port = listening.getsockname()[1]
print(f"Listening at http://127.0.0.1:{{port}}", file=sys.stderr, flush=True)
uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off")).run(sockets=[listening])
"""


def mounted(folder: Path, broker: str, *places: str) -> HttpServer:
    """An application that has it below each of these places."""
    program = folder / "mounted.py"
    program.write_text(MOUNTED.format(broker=broker, places=places))
    return HttpServer(broker, command=(str(program),))


def peak_of(pid: int) -> int:
    """Bytes of memory that a process has had at most."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10
