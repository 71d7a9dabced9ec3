"""Protocols: to whom the poller delivers, and what the owner of a consumer wants.

The poller delivers to a :class:`Sink`, in practice a channel of Kombu's. A worker sets one object
on its channel, ``channel.policy = ...``, that says how much it can start, and what it keeps. The
poller and the channel ask it; nothing else of a worker is known to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from ..center.exchanges import Subscription
    from ..model.results import Delivery


#: A `kombu_toc.Message`. The room of the messages lies above this one, so it cannot be named here.
Message: TypeAlias = Any


class WorkerPolicy(Protocol):
    """The owner of a channel, as the transport sees it.

    Every method is called in the event loop's thread unless it says otherwise, often several times
    for each message: none may block. The answers here are those of a plain consumer.
    """

    @property
    def prefetches(self) -> bool:
        """Whether more may be fetched than could start at once."""

    @property
    def accepts_early(self) -> bool:
        """Whether :meth:`wants_early` is worth a question."""

    @property
    def queues_in_pool(self) -> bool:
        """Whether the pool has a queue of its own, which :meth:`take_queued` can take from."""

    def idle_slots(self) -> int | None:
        """How many tasks could start at once; negative if more are queued than can start.

        None: there is no bound but the prefetch count.
        """
        return None

    def idle_within(self, seconds: float) -> int:
        """How many more tasks could start within so many seconds, as far as one can tell."""
        return 0

    def start_limit(self) -> int | None:
        """How many messages may be delivered now; None for any number.

        That is the number of idle slots, unless the pool takes what comes next faster than it can
        be delivered.
        """
        return None

    def wants_early(self, message: Message) -> bool:
        """Whether a message may be delivered ahead of its time.

        Only if whoever gets it begins nothing before (`Message.call_when_due`) and needs the time
        until then to prepare.
        """
        return False

    def keeps(self, message: Message) -> bool:
        """Whether an unsettled message stays with this process when the channel closes."""
        return False

    def execution(self, message: Message) -> Hashable | None:
        """An identity of the task of a message while it is executed; None if it is not.

        Asked when a message is acknowledged that holds something until its task has ended; in any
        thread.
        """
        return None

    def ended(self, executions: Collection[Hashable]) -> Collection[Hashable]:
        """Of these executions, the ones that have ended, however; in any thread."""
        return executions

    def take_queued(self, seconds: float) -> list[Message]:
        """Take back what the pool was given so many seconds ago and has not begun."""
        return []

    def before_delivery(self) -> None:
        """Called before each delivery. A worker that is to end raises what ends its loop."""
        return

    def flush_pool(self) -> bool:
        """Have the pool send, in this turn of the event loop, what was delivered in it.

        False: this cannot be done, and the loop has to turn once more for it.
        """
        return False


class DefaultPolicy(WorkerPolicy):
    """A plain consumer's: it takes what its prefetch count allows, and keeps nothing."""

    prefetches = True
    accepts_early = queues_in_pool = False


class EarlyMessage(Protocol):
    """A message that was delivered before it is due."""

    is_early: bool
    given_back: bool
    #: what is to be done when it is due, and if it is given back instead
    on_due: Callable[[], Any] | None
    on_given_back: Callable[[], Any] | None


class Sink(Protocol):
    """Takes messages and broadcasts."""

    @property
    def qos(self) -> Any:
        """The prefetch window, as Kombu has it; ``release(message)`` gives back one message."""

    @property
    def policy(self) -> WorkerPolicy:
        """The owner's policy: what can be started, and what is kept."""

    def capacity(self, held: int, early: int = 0) -> tuple[int, int, int]:
        """How many could start at once, how many are taken, and how many would be if nothing
        were queued.

        held: messages that are fetched and not yet delivered
        early: of these, how many were delivered before they are due
        """

    def receive(self, delivery: Delivery) -> None:
        """Deliver a message."""

    def take_early(self, delivery: Delivery) -> EarlyMessage | None:
        """The message, if it may be delivered before it is due."""

    def deliver_early(self, message: EarlyMessage) -> None:
        """Deliver what :meth:`take_early` gave."""

    def take_back(self, message: EarlyMessage) -> bool:
        """Take it back unless it was settled; whether it was taken back."""

    def wants(self, subscription: Subscription, routing_key: str) -> bool:
        """Whether a queue gets a broadcast by this of its bindings."""

    def receive_broadcast(
        self, subscription: Subscription, routing_key: str, packed: bytes
    ) -> bool:
        """Deliver a broadcast; whether there is a consumer for it."""
