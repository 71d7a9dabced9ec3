"""What the poller needs of whoever it delivers to: in practice, a channel of Kombu's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..center.exchanges import Subscription
    from ..model.results import Delivery
    from .policy import WorkerPolicy


class Window(Protocol):
    """The prefetch window."""

    def can_consume(self) -> bool:
        """Whether one more message fits."""

    def release(self, message: Any) -> None:
        """Release a message, if it is not settled."""


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
        """The prefetch window: a :class:`Window`."""

    @property
    def policy(self) -> WorkerPolicy:
        """What can be started, and what is kept."""

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
