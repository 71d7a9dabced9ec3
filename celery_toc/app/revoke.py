"""A revoke that removes: the message is taken out of the broker at once, and the task's result
marked REVOKED, before any worker is told.

Active with the broker's URL; the transport option ``toc_revoke_removes`` turns it off. It hooks
into the broadcast, so that it covers ``AsyncResult.revoke``, ``GroupResult.revoke``,
``app.control.revoke`` and ``revoke_by_stamped_headers``, ``celery control revoke``, and Flower.

Celery's own broadcast follows unless it would tell nobody anything. It is left out for an id of
which a message was removed that no worker can have seen: one that has never been delivered, of a
task that was not retried, while no other message has the id. Whatever else the id may stand for
(a task that is in flight, or runs and is acknowledged already, or is not sent yet), the workers
remember it, as with every broker. So they do if the task is to be terminated, if a reply is
wanted, and for stamped headers. A revoke that names its workers is left to them alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from celery import signals, states
from celery.app.control import Control
from celery.app.task import Context
from celery.utils.functional import maybe_list
from celery.utils.log import get_logger
from kombu.pidbox import Mailbox

import kombu_toc

from .task import Task
from .task_center import TaskCenter

if TYPE_CHECKING:
    from celery import Celery

logger = get_logger(__name__)

#: States of a result that is not there yet, and of a task that nobody executes: as Celery's own
#: `revoke` has them.
_NOT_BEGUN = frozenset((states.PENDING, states.RECEIVED, states.RETRY, states.REJECTED))


def install() -> None:
    """Have every app whose broker is ours remove what it revokes."""
    # On the classes, because a process may use its control before it asks for a transport: it
    # then looks up both of these once it has a connection.
    Control.mailbox = property(_mailbox, _set_mailbox)
    broadcast = Mailbox._broadcast

    @wraps(broadcast)
    def _broadcast(
        self: Any,
        command: str,
        arguments: Any = None,
        destination: Any = None,
        reply: bool = False,
        *args: Any,
        **options: Any,
    ) -> Any:
        def tell(arguments: Any) -> Any:
            return broadcast(self, command, arguments, destination, reply, *args, **options)

        app = getattr(self, "revoking_app", None)
        revoke = _COMMANDS.get(command)
        addressed = destination or options.get("pattern")
        if revoke is None or app is None or addressed or not _removes(self.connection):
            return tell(arguments)
        center = TaskCenter(app, self.connection.transport.center)
        return revoke(_Revoking(center, self.connection), arguments or {}, bool(reply), tell)

    Mailbox._broadcast = _broadcast


def _mailbox(control: Any) -> Any:
    try:
        mailbox = vars(control)["mailbox"]
    except KeyError:
        raise AttributeError("mailbox") from None
    # Copied along when it is bound to a connection.
    mailbox.revoking_app = control.app
    return mailbox


def _set_mailbox(control: Any, mailbox: Any) -> None:
    vars(control)["mailbox"] = mailbox


def _removes(connection: Any) -> bool:
    cls = connection.get_transport_cls() if connection is not None else None
    if not (isinstance(cls, type) and issubclass(cls, kombu_toc.Transport)):
        return False
    return connection.transport.settings.toc_revoke_removes


def _revoke(revoking: _Revoking, arguments: Any, reply: bool, tell: Callable[..., Any]) -> Any:
    ids = [id for id in maybe_list(arguments.get("task_id")) or () if isinstance(id, str)]
    done = revoking.unless_it_fails(lambda: revoking.by_id(ids))
    if not done or reply or arguments.get("terminate"):
        return tell(arguments)
    rest = [id for id in maybe_list(arguments["task_id"]) if id not in done]
    return tell({**arguments, "task_id": rest}) if rest else None


def _revoke_stamped(
    revoking: _Revoking, arguments: Any, reply: bool, tell: Callable[..., Any]
) -> Any:
    # Workers first: it may take a while to look at everything that waits.
    result = tell(arguments)
    headers = arguments.get("headers")
    if isinstance(headers, (list, tuple)):  # as `celery control` gives them
        headers = dict(header.split("=", 1) for header in headers if "=" in header)
    if isinstance(headers, Mapping) and headers:
        revoking.unless_it_fails(lambda: revoking.by_stamps(headers))
    return result


_COMMANDS: dict[str, Callable[..., Any]] = {
    "revoke": _revoke,
    "revoke_by_stamped_headers": _revoke_stamped,
}


#: How many revoked ids are remembered, and for how many seconds: as celery.worker.state has it,
#: which is not imported here, for only a worker needs it.
_REVOKES_MAX = ("CELERY_WORKER_REVOKES_MAX", 50_000)
_REVOKE_EXPIRES = ("CELERY_WORKER_REVOKE_EXPIRES", 10_800.0)


class _Revoking:
    """One revoke, on one connection."""

    def __init__(self, center: TaskCenter, connection: Any) -> None:
        self.app = center.app
        self.center = center
        self._broken = connection.connection_errors

    def unless_it_fails(self, remove: Callable[[], Any]) -> Any:
        """What it returns; None if the broker does not let it: then this is Celery's revoke."""
        try:
            return remove()
        except Exception as exc:
            logger.warning("Revoked tasks may still wait in the broker: %r", exc, exc_info=True)
            return None

    def _twice(self, operation: Callable[[], Any]) -> Any:
        """As a connection that was idle for long may have been cut."""
        try:
            return operation()
        except self._broken:
            return operation()

    def by_id(self, ids: list[str]) -> set[str]:
        """Remove what waits under these ids; return those that no worker need be told of."""
        if not ids:
            return set()
        center = self.center
        there = self._twice(lambda: center.get(ids))
        if not there:
            return set()
        # No second look-up: only where the first has found something.
        before = {(one.topic, one.id): one for one in there}
        lost_reply = False
        try:
            done = center.cancel_found(there, dead=False)
        except self._broken:
            lost_reply = True
            done = center.cancel_found(there, dead=False)
        # What is gone from where it waited may have been moved to another slot in that moment.
        for topic, id in _waiting(before) - {(one.topic, one.id) for one in done}:
            done += center.cancel(id, topic=topic, dead=False)
        self._remember(one for one in done if one.deleted)
        found: dict[str, list[bool]] = {id: [] for id in ids}
        for one in done:
            id = one.id if one.id in found else one.id.rpartition("#")[0]
            found[id].append(self._mark(center.task(one)) if one.deleted else False)
            found[id].append(not one.tried)
        if lost_reply:
            # What was there and is gone was removed by the call whose reply was lost, unless
            # it has become due in that moment.
            for key in _waiting(before) - {(one.topic, one.id) for one in done}:
                self._mark(center.task(before[key]), only_if_not_begun=True)
        return {id for id, sure in found.items() if sure and all(sure)}

    def by_stamps(self, headers: Mapping[str, Any]) -> None:
        """Remove what waits and bears one of these stamps."""
        wanted = {name: set(_stamps(value)) for name, value in headers.items()}

        def bears(task: Task) -> bool:
            return any(
                not wanted[name].isdisjoint(_stamps(value))
                for name, value in task.stamps.items()
                if name in wanted
            )

        after = None
        while True:
            page = self._twice(
                lambda after=after: self.center.scan(
                    state=kombu_toc.WAITING, where=bears, after=after
                )
            )
            done = self.center.cancel_found(page.messages, dead=False)
            self._remember(one for one in done if one.deleted)
            for one in done:
                if one.deleted:
                    self._mark(self.center.task(one))
            after = page.after
            if after is None:
                return

    def _remember(self, removed: Iterable[kombu_toc.Cancelled]) -> None:
        """Have workers tell of them that they are revoked: by now they know nothing of these."""
        try:
            remember_revoked(self.center, [self.center.task(one).id for one in removed])
        except Exception as exc:  # they are revoked all the same
            logger.warning("Revoked tasks are not listed as such: %r", exc)

    def _mark(self, task: Task, *, only_if_not_begun: bool = False) -> bool:
        """Do for a task whose message is removed what a worker does that discards it.

        Returns whether it is certain that no worker has had, or has, the task.
        """
        logger.info("Removed revoked task: %s[%s]", task.name, task.id)
        try:
            marked = mark_revoked(self.app, task, only_if_not_begun=only_if_not_begun)
        except Exception as exc:  # a result backend that cannot be reached
            logger.warning("Cannot mark task %s as revoked: %r", task.id, exc, exc_info=True)
            return False
        return marked and not task.retries and not task.problem


def remember_revoked(center: TaskCenter, ids: Iterable[str]) -> None:
    """Have workers list tasks among the revoked ones."""
    center.remember_cancelled(
        ids, most=int(_setting(*_REVOKES_MAX)), seconds=_setting(*_REVOKE_EXPIRES)
    )


def mark_revoked(app: Celery, task: Task, *, only_if_not_begun: bool = False) -> bool:
    """Mark the result of a task whose message is removed as REVOKED, and send ``task_revoked``.

    only_if_not_begun: not if its result says that a worker has begun it

    Returns whether that was done; a message that is no task, or that nobody can read, has no
    result. Raises whatever the result backend does.
    """
    if task.name is None:
        return False
    # celery.worker.request.Request._announce_revoked, in the place of the sender.
    kind = app.tasks.get(task.name)
    if kind is None:  # not known here: with the app's own settings
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


def _waiting(found: Mapping[tuple[str, str], kombu_toc.Found]) -> set[tuple[str, str]]:
    return {key for key, one in found.items() if one.state == kombu_toc.WAITING}


def _context(task: Task) -> Context:
    """The request of a task, as a worker would make it of the message."""
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


def _stamps(value: Any) -> Iterator[Any]:
    """The stamps of a header, which may be one or several."""
    several = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    for one in value if several else (value,):
        try:
            hash(one)
        except TypeError:
            one = repr(one)
        yield one
