"""What both ways of moving messages share: the order of the steps, and the account of what was
moved and what stays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from kombu import Connection

from ..client.urls import mask_password
from ..errors import ConfigurationError, ConsumersError
from ..transport.channel import Channel
from .broker import Broker

#: Messages that are written to one side, and then taken from the other, together.
BATCH = 200

#: Seconds for which a message is remembered that was written and not yet taken from where it was.
REMEMBER = 7 * 86400

#: Messages that are named of those that stay.
MAX_NAMED = 100

#: Told how many messages have been looked at, and of how many.
Progress = Callable[[int, int], None]


class Staying(NamedTuple):
    """A message that is left in the source."""

    place: str  #: the key it is in
    what: str  #: its task id or delivery tag, or how it begins
    reason: str


class Migrated(NamedTuple):
    """What was moved, or, of a dry run, what would be."""

    queues: dict[str, int]  #: queue -> how many
    unacknowledged: int  #: of these, how many a worker had
    scheduled: int  #: of these, how many are not due yet
    staying: int  #: how many are left in the source
    named: list[Staying]  #: the first of those
    skipped: dict[str, str]  #: key of a queue that is left as it is -> why
    unknown: list[str] = []
    refused: str = ""  #: of a dry run: why nothing would be moved
    dead: int = 0  #: of a way back: how many dead letters stay in the timeout center

    @property
    def moved(self) -> int:
        return sum(self.queues.values())


class Account:
    """Adds up what is moved and what stays.

    only: the queues that are moved; None for all
    dry_run: count, and change nothing
    """

    def __init__(self, only: Collection[str] | None, dry_run: bool) -> None:
        self.only = None if only is None else set(only)
        self.dry_run = dry_run
        self.moved: Counter[str] = Counter()
        self.unacknowledged = self.scheduled = self.staying = self.dead = 0
        self.named: list[Staying] = []
        self.skipped: dict[str, str] = {}

    def is_wanted(self, queue: str) -> bool:
        return self.only is None or queue in self.only

    def stays(self, place: str, what: str, reason: str) -> None:
        """A message is left where it is."""
        self.staying += 1
        if len(self.named) < MAX_NAMED:
            self.named.append(Staying(place, what, reason))

    def skip(self, queue: str, reason: str, messages: int = 0) -> None:
        """A queue, or its key, is left as it is, with so many messages that stay."""
        self.skipped[queue] = reason
        self.staying += messages

    def result(self, unknown: Iterable[str]) -> Migrated:
        """unknown: those of the queues that were named and that there are not"""
        return Migrated(
            dict(self.moved),
            self.unacknowledged,
            self.scheduled,
            self.staying,
            self.named,
            self.skipped,
            sorted(unknown),
            dead=self.dead,
        )


class Move(ABC):
    """Moves messages between a timeout center and a broker, one way.

    channel: of the timeout center
    """

    def __init__(self, channel: Channel, broker: Broker, account: Account) -> None:
        self.channel = channel
        self.center = channel.center
        self.broker = broker
        self.account = account

    @abstractmethod
    def check(self) -> None:
        """Make sure that both sides can be used; raises if not."""

    @abstractmethod
    def check_for_consumers(self) -> None:
        """Raises ConsumersError if somebody consumes from where messages are taken."""

    @abstractmethod
    def run(self, progress: Progress) -> Migrated:
        """Move everything."""


def carry_out(
    center: Connection,
    url: str,
    options: Mapping[str, Any] | None,
    make: Callable[[Channel, Broker], Move],
    *,
    dry_run: bool,
    force: bool,
    progress: Progress | None,
) -> Migrated:
    """Check, and then move.

    center: a connection to the timeout center
    url, options: the broker's, and its ``broker_transport_options``
    force: also while somebody consumes

    Raises ConsumersError if somebody does, ConfigurationError for a URL that cannot be used.
    """
    with center.channel() as channel:
        if not isinstance(channel, Channel):
            raise ConfigurationError(
                f"{mask_password(center.as_uri(include_password=True))} is not a timeout center: "
                "such a URL begins with toc+, as in toc+redis://localhost:6379/0"
            )
        broker = Broker(url, options or {})
        refused = ""
        try:
            move = make(channel, broker)
            move.check()
            if not force:
                try:
                    move.check_for_consumers()
                except ConsumersError as exc:
                    if not dry_run:
                        raise
                    refused = str(exc)
            found = move.run(progress or _tell_nobody)
            # Who migrates ends now, and may have no connection left when its process does.
            channel.center.metrics.send(channel.center)
            return found._replace(refused=refused)
        finally:
            broker.close()


def _tell_nobody(done: int, total: int) -> None:
    """No progress was asked for."""
