"""A message of a timeout center, read as a task of Celery's."""

from __future__ import annotations

from datetime import datetime, timezone
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from kombu.message import Message
from kombu.serialization import prepare_accept_content

import kombu_toc

if TYPE_CHECKING:
    from celery import Celery


class Task:
    """A message of a timeout center, read as a task.

    found: where it is, and in what state; or how it was delivered
    headers, properties: as they were sent; empty if the message cannot be read
    problem: why it, or its arguments, cannot be read; otherwise empty
    decode: ``"app"``: as a worker of this app decodes it, whatever it runs and however large it
        grows; only for messages that nobody else can write

    The body is decoded when it is first asked for: JSON, msgpack if it is installed, and text, up
    to a mebibyte.
    """

    def __init__(
        self,
        app: Celery,
        found: kombu_toc.Found | kombu_toc.Cancelled | kombu_toc.Delivery,
        *,
        decode: Literal["safe", "app"] = "safe",
    ) -> None:
        if decode not in ("safe", "app"):
            raise ValueError(f"decode is 'safe' or 'app', not {decode!r}")
        self.app = app
        self.found = found
        self.problem = ""
        self._as_app = decode == "app"
        try:
            if self._as_app:
                content = kombu_toc.unpack(found.body, found.id)
            else:
                content, self.problem = kombu_toc.look(found.body, found.id)
        except kombu_toc.EnvelopeError as exc:
            self.problem = str(exc)
            content = {"headers": {}, "properties": {}, "body": b""}
        self.headers: dict[str, Any] = content["headers"]
        self.properties: dict[str, Any] = content["properties"]
        #: as it was sent, before any decoding; empty if it is too large to be shown
        self.body: bytes = content["body"]
        self.content_type: str | None = content.get("content-type")
        self.content_encoding: str | None = content.get("content-encoding")

    def __repr__(self) -> str:
        found = self.found
        state = kombu_toc.IN_FLIGHT if isinstance(found, kombu_toc.Delivery) else found.state
        return f"<Task: {self.name}[{self.id}] {state} in {found.topic}>"

    @property
    def fields(self) -> dict[str, Any]:
        """What protocol 1 has in the body, and protocol 2 in the headers."""
        if "task" in self.headers:
            return self.headers
        return self.payload if isinstance(self.payload, dict) else {}

    @property
    def id(self) -> str:
        """The task's; a message that shares it with another is found under a longer one."""
        return self.fields.get("id") or self.headers.get("id") or self.found.id

    @property
    def name(self) -> str | None:
        return self.fields.get("task")

    @property
    def retries(self) -> int:
        """How often the task has been retried: as Celery counts, not the broker."""
        return self.fields.get("retries") or 0

    @property
    def eta(self) -> datetime | None:
        """When it is due by the broker, which may have been told another time since it was sent;
        None of what is not waiting, or is due at once."""
        found = self.found
        if not isinstance(found, kombu_toc.Found) or found.state != kombu_toc.WAITING:
            return None
        if not found.time_us:
            return None
        return datetime.fromtimestamp(found.time_us / 1e6, timezone.utc)

    @cached_property
    def payload(self) -> Any:
        """The decoded body; None if it cannot be, or is not, decoded."""
        if self.problem or (self.content_type is None and not self.body):
            return None
        if not self._as_app:
            content = kombu_toc.read_content(
                {
                    "headers": self.headers,
                    "content-type": self.content_type,
                    "content-encoding": self.content_encoding,
                    "body": self.body,
                }
            )
            self.problem = content.problem
            return content.value
        try:
            message = Message(
                body=self.body,
                headers=self.headers,
                properties=self.properties,
                content_type=self.content_type,
                content_encoding=self.content_encoding,
                accept=prepare_accept_content(self.app.conf.accept_content),
            )
            if message.errors:
                error: Any = message.errors[0][1]
                raise error
            return message.decode()
        except Exception as exc:  # whatever a decoder raises
            self.problem = f"{type(exc).__name__}: {exc}"
            return None

    @property
    def args(self) -> Any:
        """The positional arguments; if they cannot be decoded, how the sender wrote them."""
        payload = self.payload
        if isinstance(payload, dict):
            return payload.get("args", [])
        if isinstance(payload, (list, tuple)) and len(payload) == 3:
            return payload[0]
        return self.headers.get("argsrepr")

    @property
    def kwargs(self) -> Any:
        """The keyword arguments; if they cannot be decoded, how the sender wrote them."""
        payload = self.payload
        if isinstance(payload, dict):
            return payload.get("kwargs", {})
        if isinstance(payload, (list, tuple)) and len(payload) == 3:
            return payload[1]
        return self.headers.get("kwargsrepr")

    @property
    def embedded(self) -> dict[str, Any]:
        """What else Celery sends along: ``callbacks``, ``errbacks``, ``chain``, ``chord``."""
        payload = self.payload
        if isinstance(payload, dict):
            return payload
        if isinstance(payload, (list, tuple)) and len(payload) == 3:
            return payload[2] or {}
        return {}

    @property
    def stamps(self) -> dict[str, Any]:
        """The stamps it was sent with, by header."""
        stamps = self.headers.get("stamps") or {}
        return {
            name: stamps[name]
            for name in self.headers.get("stamped_headers") or ()
            if name in stamps
        }
