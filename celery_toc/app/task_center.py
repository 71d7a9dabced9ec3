"""The timeout center of an app: what is in it is shown, and moved, as Celery's tasks."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from functools import cached_property
from typing import TYPE_CHECKING, Any

from celery.utils.time import maybe_make_aware
from kombu.message import Message
from kombu.serialization import prepare_accept_content

import kombu_toc

if TYPE_CHECKING:
    from celery import Celery, Signature


#: Messages of a topic that are read at a time where they may not all be wanted.
PAGE = 50


class Task:
    """A message of a timeout center, read as a task.

    found: where it is, and in what state
    headers, properties: as they were sent; empty if the message cannot be read
    problem: why it, or its arguments, cannot be read; otherwise empty

    The body is decoded when it is first asked for, and only if the app accepts its content type,
    as in a worker.
    """

    def __init__(self, app: Celery, found: kombu_toc.Found | kombu_toc.Cancelled) -> None:
        self.app = app
        self.found = found
        self.problem = ""
        try:
            content = kombu_toc.unpack(found.body, found.id)
        except kombu_toc.EnvelopeError as exc:
            self.problem = str(exc)
            content = {"headers": {}, "properties": {}, "body": b""}
        self.headers: dict[str, Any] = content["headers"]
        self.properties: dict[str, Any] = content["properties"]
        #: as it was sent, before any decoding
        self.body: bytes = content["body"]
        self.content_type: str | None = content.get("content-type")
        self.content_encoding: str | None = content.get("content-encoding")

    def __repr__(self) -> str:
        return f"<Task: {self.name}[{self.id}] {self.found.state} in {self.found.topic}>"

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
        if found.state != kombu_toc.WAITING or not found.time_us:
            return None
        return datetime.fromtimestamp(found.time_us / 1e6, timezone.utc)

    @cached_property
    def payload(self) -> Any:
        """The decoded body; None if it cannot be decoded, or if the app does not accept it."""
        if self.content_type is None and not self.body:
            return None
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
                message._reraise_error()
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


class TaskCenter(kombu_toc.TimeoutCenter):
    """The timeout center of an app's broker, which :func:`celery_toc.timeout_center` returns.

    Its operations are those of :class:`kombu_toc.TimeoutCenter`; times may be given as Celery
    has them, and a predicate is asked about a :class:`Task`.
    """

    def __init__(self, app: Celery, center: kombu_toc.TimeoutCenter) -> None:
        super().__init__(
            center.client,
            center.keys.prefix,
            steps=center.steps,
            slots=center.slots,
            limits=center.limits,
            wait_replicas=center.wait_replicas,
            wait_timeout=center.wait_timeout,
            metrics=center.metrics,
        )
        self.app = app

    def task(self, found: kombu_toc.Found | kombu_toc.Cancelled) -> Task:
        """A message read as a task."""
        return Task(self.app, found)

    def tasks(self, found: Iterable[kombu_toc.Found]) -> list[Task]:
        """Messages read as tasks."""
        return [self.task(one) for one in found]

    _shown: Callable[..., Task] = task

    def scheduled(self, topics: Iterable[str], limit: int) -> Iterator[Task]:
        """The tasks of these topics that wait for their time, the soonest first.

        limit: how many at most
        """
        seconds, rest = self.client.time()
        # A little more than what is read of one topic is read of each of the others.
        page = max(min(limit, PAGE), 1)

        def waiting(topic: str) -> Iterator[kombu_toc.Found]:
            after = None
            while True:
                found = self.scan(
                    topic,
                    state=kombu_toc.WAITING,
                    since=seconds + rest / 1e6,
                    where=lambda task: task.name is not None,
                    limit=page,
                    after=after,
                )
                yield from found.messages
                after = found.after
                if after is None:
                    return

        soonest = heapq.merge(*map(waiting, topics), key=lambda found: found.time_us)
        return map(self.task, itertools.islice(soonest, limit))

    def ensure_task(self, task: Signature, *, task_id: str, **options: Any) -> bool:
        """Send a task unless there is one of this id, waiting, in flight or dead.

        task: its signature
        options: as of ``apply_async``: ``countdown``, ``eta``, ``queue``, ...

        Returns whether it was sent. Of several that try at the same time, with the same queue
        and the same slot basis or none, one does. One that has been acknowledged is not there
        any more, and Celery acknowledges a task when it starts, unless ``acks_late`` is set.
        """
        if self.get(task_id):
            return False
        try:
            task.apply_async(task_id=task_id, **{kombu_toc.ENSURE: True}, **options)
        except kombu_toc.AlreadyThereError:
            return False
        return True

    def reschedule(  # type: ignore[override]
        self,
        task_id: str,
        *,
        eta: datetime | float | None = None,
        countdown: float | None = None,
        at: float | None = None,
        delay: float | None = None,
        topic: str | None = None,
        basis: str | None = None,
    ) -> list[kombu_toc.Rescheduled]:
        """Give a waiting task another time; without one it is due now.

        eta: a datetime, one without time zone as Celery takes it, or seconds since the epoch
        countdown: seconds from now by Redis's clock

        Otherwise as :meth:`kombu_toc.TimeoutCenter.reschedule`, whose `at` and `delay` may be
        used instead.
        """
        if isinstance(eta, datetime):
            eta = maybe_make_aware(eta, self.app.timezone).timestamp()
        return super().reschedule(
            task_id,
            at=at if eta is None else eta,
            delay=delay if countdown is None else countdown,
            topic=topic,
            basis=basis,
        )
