"""A revoke that removes: the message is deleted from the broker, and the task's result is
marked REVOKED, before any worker is told."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from celery import Celery, signals, states
from celery.app.task import Context
from celery.utils.functional import maybe_list
from celery.utils.log import get_logger

import kombu_toc

from ..compat import control
from .task import Task, TaskCenter

# -- what follows when the message of a revoked task was removed
#
# The task's result is marked REVOKED, the signal ``task_revoked`` is sent, and workers list the
# task among the revoked ones.

#: States of a result that does not exist yet, or of a task that no worker executes: the same as in
#: Celery's own `revoke`.
_NOT_BEGUN = frozenset((states.PENDING, states.RECEIVED, states.RETRY, states.REJECTED))

#: Environment variables and defaults: how many revoked ids are remembered, and for how many
#: seconds. The same as in celery.worker.state, which only a worker has to import.
_REVOKES_MAX = ("CELERY_WORKER_REVOKES_MAX", 50_000)
_REVOKE_EXPIRES = ("CELERY_WORKER_REVOKE_EXPIRES", 10_800.0)


def remember_revoked(center: TaskCenter, ids: Iterable[str]) -> None:
    """Have workers list these tasks among the revoked ones."""
    center.notes.remember_cancelled(
        ids, most=int(_setting(*_REVOKES_MAX)), seconds=_setting(*_REVOKE_EXPIRES)
    )


def mark_revoked(app: Celery, task: Task, *, only_if_not_begun: bool = False) -> bool:
    """Mark the result of a task as REVOKED, and send ``task_revoked``; its message is removed.

    only_if_not_begun: do nothing if the result says that a worker has begun the task

    Returns whether that was done. A message that is no task, or that cannot be read, has no
    result. Raises whatever the result backend raises.
    """
    if task.name is None:
        return False
    # celery.worker.request.Request._announce_revoked does the same in a worker.
    kind = app.tasks.get(task.name)
    if kind is None:  # this process does not know the task: the app's own settings hold
        kind = app.Task()
        kind.name = task.name
    context = _context(task)
    backend = kind.backend
    if only_if_not_begun and backend.get_state(task.id) not in _NOT_BEGUN:
        return False
    ignored = context.ignore_result
    if ignored is None:
        ignored = kind.ignore_result
    backend.mark_as_revoked(
        task.id,
        "revoked",
        request=context,
        store_result=not ignored or kind.store_errors_even_if_ignored,
    )
    signals.task_revoked.send(
        sender=kind, request=context, terminated=False, signum=None, expired=False
    )
    return True


def _setting(name: str, default: float) -> float:
    return float(os.environ.get(name, default))


def _context(task: Task) -> Context:
    """The request of a task, as a worker would make it from the message."""
    info = task.properties.get("delivery_info") or {}
    fields = {
        "ignore_result": None,
        **task.fields,
        "properties": task.properties,
        "reply_to": task.properties.get("reply_to"),
        "correlation_id": task.properties.get("correlation_id"),
        "hostname": socket.gethostname(),
        "delivery_info": {
            "exchange": info.get("exchange"),
            "routing_key": info.get("routing_key"),
            "priority": task.properties.get("priority"),
            "redelivered": False,
        },
        **task.embedded,
        "args": task.args,
        "kwargs": task.kwargs,
    }
    return Context(fields)


# -- A revoke that removes
#
# Active with the broker's URL; the transport option ``toc_revoke_removes`` turns it off. It hooks
# into the broadcast of remote control commands, so it covers ``AsyncResult.revoke``,
# ``GroupResult.revoke``, ``app.control.revoke`` and ``revoke_by_stamped_headers``,
# ``celery control revoke``, and Flower.
#
# Celery's own broadcast follows, unless no worker needs it. An id is left out of the broadcast if
# all of this holds: a message with it was removed; that message was never delivered, and its task
# never retried; no other message has the id. Then no worker can have seen the task. In every other
# case (the task is in flight, or runs and is acknowledged already, or is not sent yet) the workers
# remember the id, as with every broker. They also do if the task is to be terminated, if a reply is
# wanted, and for stamped headers. A revoke that names its workers removes nothing.

logger = get_logger(__name__)

#: Sends a command to the workers; takes its arguments.
Send = Callable[[Any], Any]


# -- the hook


def install() -> None:
    """Have every app whose broker is ours remove what it revokes."""
    control.install_revoke_removes(_on_broadcast)


def _on_broadcast(
    app: Celery, connection: Any, command: str, arguments: Any, reply: bool, send: Send
) -> Any:
    revoke = _COMMANDS.get(command)
    if revoke is None or not _removes(connection):
        return send(arguments)
    center = TaskCenter(app, connection.transport.center)
    return revoke(Revocation(center, connection.connection_errors), arguments or {}, reply, send)


def _removes(connection: Any) -> bool:
    cls = connection.get_transport_cls() if connection is not None else None
    if not (isinstance(cls, type) and issubclass(cls, kombu_toc.Transport)):
        return False
    return bool(connection.transport.settings.toc_revoke_removes)


# -- the commands


def _revoke(revocation: Revocation, arguments: Any, reply: bool, send: Send) -> Any:
    ids = [id for id in maybe_list(arguments.get("task_id")) or () if isinstance(id, str)]
    done = revocation.unless_it_fails(lambda: revocation.by_id(ids))
    if not done or reply or arguments.get("terminate"):
        return send(arguments)
    rest = [id for id in maybe_list(arguments["task_id"]) if id not in done]
    return send({**arguments, "task_id": rest}) if rest else None


def _revoke_stamped(revocation: Revocation, arguments: Any, reply: bool, send: Send) -> Any:
    # Workers first: it may take a while to read all waiting messages.
    result = send(arguments)
    headers = arguments.get("headers")
    if isinstance(headers, (list, tuple)):  # as `celery control` gives them
        headers = dict(header.split("=", 1) for header in headers if "=" in header)
    if isinstance(headers, Mapping) and headers:
        revocation.unless_it_fails(lambda: revocation.by_stamps(headers))
    return result


_COMMANDS: dict[str, Callable[[Revocation, Any, bool, Send], Any]] = {
    "revoke": _revoke,
    "revoke_by_stamped_headers": _revoke_stamped,
}


class Revocation(NamedTuple):
    """One revoke, on one connection.

    broken: the errors of a connection that broke
    """

    center: TaskCenter
    broken: tuple[type[Exception], ...]

    def unless_it_fails(self, remove: Callable[[], Any]) -> Any:
        """Return what `remove` returns; None if it raises: then Celery's own revoke must do."""
        try:
            return remove()
        except Exception as exc:
            logger.warning("Revoked tasks may still wait in the broker: %r", exc, exc_info=True)
            return None

    def _retry_once(self, operation: Callable[[], Any]) -> Any:
        """A connection that was idle for long may have been cut."""
        try:
            return operation()
        except self.broken:
            return operation()

    def by_id(self, ids: list[str]) -> set[str]:
        """Remove the waiting messages with these ids; return the ids that no worker must hear."""
        if not ids:
            return set()
        center = self.center
        there = self._retry_once(lambda: center.get(ids))
        if not there:
            return set()
        # No second look-up: only where the first has found something.
        before = {(one.topic, one.id): one for one in there}
        lost_reply = False
        try:
            done = center.cancel(there, dead=False, revoked=True)
        except self.broken:
            lost_reply = True
            done = center.cancel(there, dead=False, revoked=True)
        # A message that is gone from where it waited may have been moved to another slot meanwhile.
        for topic, id in _waiting(before) - {(one.topic, one.id) for one in done}:
            done += center.cancel(id, topic=topic, dead=False, revoked=True)
        self._remember(one for one in done if one.deleted)
        found: dict[str, list[bool]] = {id: [] for id in ids}
        for one in done:
            id = one.id if one.id in found else one.id.rpartition("#")[0]
            found[id].append(one.deleted and self._mark(one))
            found[id].append(not one.tried)
        if lost_reply:
            # What was found and is gone was removed by the call whose reply was lost, unless
            # it has become due in that moment.
            for key in _waiting(before) - {(one.topic, one.id) for one in done}:
                self._mark(before[key], only_if_not_begun=True)
        return {id for id, sure in found.items() if sure and all(sure)}

    def by_stamps(self, headers: Mapping[str, Any]) -> None:
        """Remove the waiting messages that have one of these stamps."""
        wanted = {name: set(_stamps(value)) for name, value in headers.items()}

        def has_one(task: Task) -> bool:
            return any(
                not wanted[name].isdisjoint(_stamps(value))
                for name, value in task.stamps.items()
                if name in wanted
            )

        after: str | None = None
        while True:
            page = self._retry_once(
                partial(self.center.scan, state=kombu_toc.WAITING, where=has_one, after=after)
            )
            done = self.center.cancel(page.messages, dead=False, revoked=True)
            self._remember(one for one in done if one.deleted)
            for one in done:
                if one.deleted:
                    self._mark(one)
            after = page.after
            if after is None:
                return

    def _remember(self, removed: Iterable[kombu_toc.Cancelled]) -> None:
        """Have workers list these as revoked: no worker knows anything of them."""
        try:
            remember_revoked(self.center, [self.center.task(one).id for one in removed])
        except Exception as exc:  # they are revoked all the same
            logger.warning("Revoked tasks are not listed as such: %r", exc)

    def _mark(
        self, found: kombu_toc.Found | kombu_toc.Cancelled, *, only_if_not_begun: bool = False
    ) -> bool:
        """Mark the result of a task whose message is removed.

        Returns whether it is certain that no worker has had, or has, the task.
        """
        # The app itself revokes it: its chord is told, whatever its message is made of, as a worker
        # would tell it.
        task = self.center.task(found, decode="app")
        logger.info("Removed revoked task: %s[%s]", task.name, task.id)
        try:
            marked = mark_revoked(self.center.app, task, only_if_not_begun=only_if_not_begun)
        except Exception as exc:  # a result backend that cannot be reached
            logger.warning("Cannot mark task %s as revoked: %r", task.id, exc, exc_info=True)
            return False
        return marked and not task.retries and not task.problem


def _waiting(found: Mapping[tuple[str, str], kombu_toc.Found]) -> set[tuple[str, str]]:
    return {key for key, one in found.items() if one.state == kombu_toc.WAITING}


def _stamps(value: Any) -> Iterator[Any]:
    """The stamps of a header, which may be one or several."""
    several = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    for one in value if several else (value,):
        try:
            hash(one)
        except TypeError:
            one = repr(one)
        yield one
