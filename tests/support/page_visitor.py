"""Somebody who looks at the page, without a browser."""

from __future__ import annotations

import json
import re
import time
from html import unescape
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlencode

from kombu_toc import TimeoutCenter

from .http_server import HttpServer, Reply

FORM = {"content-type": "application/x-www-form-urlencoded"}


class Visitor:
    """Somebody with a browser: it has the cookies that it was given, and sends forms as they are
    on the page."""

    def __init__(self, server: HttpServer, root: str = "/page", **headers: str) -> None:
        self.server = server
        self.root = root
        self.cookies: dict[str, str] = {}
        self.headers = headers
        self.proof = ""

    @property
    def center(self) -> TimeoutCenter:
        """Of the broker of its server, where a fixture has one."""
        return self.server.center  # type: ignore[no-any-return]

    @property
    def session(self) -> str:
        """The cookie of the session."""
        return next(one for name, one in self.cookies.items() if "session" in name)

    def get(self, view: str, **headers: str) -> Reply:
        reply = self.server.get(f"{self.root}/{view}", headers={**self.sent_along(), **headers})
        return self._kept(reply)

    def post(self, view: str, proof: str | None = None, **fields: Any) -> Reply:
        """Send a form, and go where its answer leads."""
        pairs = [
            (name, one)
            for name, value in fields.items()
            for one in (value if isinstance(value, list) else [value])
        ]
        body = urlencode([("form", self.proof if proof is None else proof), *pairs])
        return self._post(view, body)

    def send(self, shown: Reply, button: str, *chosen: str) -> Reply:
        """Press a button of the first form that has it, as a browser does, with what the form has.

        shown: the page
        chosen: the labels of boxes that are checked
        """
        forms = _Forms()
        forms.feed(shown.body.decode())
        form = next(one for one in forms.found if button in one.buttons)
        pairs = list(form.fields)
        pairs += [pair for label, *pair in form.boxes if label in chosen]
        if form.buttons[button]:
            pairs.append(("act", form.buttons[button]))
        # A browser sends each end of a line as CR LF.
        sent = urlencode([(name, re.sub("\r\n|\r|\n", "\r\n", said)) for name, said in pairs])
        if form.method == "get":
            return self.get(f"{form.action}?{sent}")
        return self._post(form.action, sent)

    def _post(self, view: str, body: str) -> Reply:
        sent = {**self.sent_along(), **FORM}
        path = f"{self.root}/{view}"
        return self._kept(self.server.ask("POST", path, raw=body.encode(), headers=sent))

    def follow(self, reply: Reply) -> Reply:
        assert reply.status == 303, reply
        return self.get(reply.headers["location"].removeprefix("./"))

    def sign_in(self, secret: str) -> Reply:
        self.get("login")
        reply = self.post("login", token=secret)
        if reply.status == 303:
            self.get("")
        return reply

    def sent_along(self) -> dict[str, str]:
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


class _Form:
    def __init__(self, method: str, action: str) -> None:
        self.method, self.action = method, action
        self.fields: list[tuple[str, str]] = []
        #: label, name, value
        self.boxes: list[tuple[str, str, str]] = []
        #: text -> value
        self.buttons: dict[str, str] = {}


class _Forms(HTMLParser):
    """The forms of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[_Form] = []
        self._button: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attrs}
        if tag == "form":
            self.found.append(_Form(said.get("method", "get"), said["action"]))
        elif tag == "button":
            self._button = said.get("value", "")
        elif tag == "input" and "name" in said:
            form, value = self.found[-1], said.get("value", "")
            if said.get("type") == "checkbox":
                form.boxes.append((said.get("aria-label", ""), said["name"], value))
            else:
                form.fields.append((said["name"], value))

    def handle_data(self, data: str) -> None:
        if self._button is not None:
            self.found[-1].buttons[data.strip()] = self._button
            self._button = None


def wait_for(visitor: Visitor, view: str, text: str, seconds: float = 20) -> str:
    """What a view shows, as soon as it has this text.

    seconds: how long that may take. A look is shown ten times as long as it took
    """
    deadline = time.monotonic() + seconds
    while text not in (shown := unescape(visitor.get(view).body.decode())):
        assert time.monotonic() < deadline, shown
        time.sleep(0.1)
    return shown


def audit(center: TimeoutCenter) -> list[Any]:
    """The audit log, the earliest first: who, what, queue, which, how many."""
    return [json.loads(fields[b"e"]) for _, fields in center.client.xrange(center.keys.audit)]
