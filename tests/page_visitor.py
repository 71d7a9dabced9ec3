"""Somebody who looks at the page, without a browser."""

from __future__ import annotations

import json
import re
import time
from html import unescape
from typing import Any
from urllib.parse import urlencode

from kombu_toc import TimeoutCenter

from .http_server import HttpServer, Reply

FORM = {"content-type": "application/x-www-form-urlencoded"}


class Visitor:
    """Somebody with a browser: it has the cookies that it was given, and sends forms as they are
    on the page."""

    def __init__(self, server: HttpServer, **headers: str) -> None:
        self.server = server
        self.cookies: dict[str, str] = {}
        self.headers = headers
        self.proof = ""

    @property
    def session(self) -> str:
        """The cookie of the session."""
        return next(one for name, one in self.cookies.items() if "session" in name)

    def get(self, view: str, **headers: str) -> Reply:
        reply = self.server.get(f"/page/{view}", headers={**self._sent(), **headers})
        return self._kept(reply)

    def post(self, view: str, proof: str | None = None, **fields: Any) -> Reply:
        """Send a form, and go where its answer leads."""
        pairs = [
            (name, one)
            for name, value in fields.items()
            for one in (value if isinstance(value, list) else [value])
        ]
        body = urlencode([("form", self.proof if proof is None else proof), *pairs])
        reply = self.server.ask(
            "POST", f"/page/{view}", raw=body.encode(), headers={**self._sent(), **FORM}
        )
        return self._kept(reply)

    def follow(self, reply: Reply) -> Reply:
        assert reply.status == 303, reply
        return self.get(reply.headers["location"].removeprefix("./"))

    def sign_in(self, secret: str) -> Reply:
        self.get("login")
        reply = self.post("login", token=secret)
        if reply.status == 303:
            self.get("")
        return reply

    def _sent(self) -> dict[str, str]:
        said = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        return {**self.headers, **({"cookie": said} if said else {})}

    def _kept(self, reply: Reply) -> Reply:
        if found := reply.headers.get("set-cookie"):
            name, _, value = found.partition(";")[0].partition("=")
            self.cookies[name] = value
            if not value:
                del self.cookies[name]
        if found := re.search(rb'name="form" value="(\w+)"', reply.body):
            self.proof = found[1].decode()
        return reply


def wait_for(visitor: Visitor, view: str, text: str, seconds: float = 20) -> str:
    """What a view shows, as soon as it has this text.

    seconds: how long that may take. A look is shown ten times as long as it took
    """
    deadline = time.monotonic() + seconds
    while text not in (shown := unescape(visitor.get(view).body.decode())):
        assert time.monotonic() < deadline, shown
        time.sleep(0.05)
    return shown


def audit(center: TimeoutCenter) -> list[Any]:
    """The audit log, the earliest first: who, what, queue, which, how many."""
    return [json.loads(fields[b"e"]) for _, fields in center.client.xrange(center.keys.audit)]
