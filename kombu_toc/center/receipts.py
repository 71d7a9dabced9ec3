"""Messages and receipts, as callers give them to what ends a delivery."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from operator import attrgetter

from ..errors import ReceiptError
from ..model.delivery import shown
from ..model.results import Delivery, Settled
from .registry import Registry

#: Messages or receipts, mixed, or one of them.
Given = Delivery | str | Iterable[Delivery | str]

#: The slot of a delivery: how the calls of ack are ordered.
SLOT = attrgetter("slot")


def delivery_of(delivery: Delivery) -> Hashable:
    """What tells a delivery from all others."""
    return delivery.topic, delivery.slot, delivery.id, delivery.birth


def message_of(delivery: Delivery) -> Hashable:
    """What tells the message of a delivery from all others."""
    birth = re.split("[;~@!]", delivery.birth, maxsplit=1)[0]
    return delivery.topic, delivery.slot, delivery.id, birth


class Read:
    """What a caller has given.

    deliveries: one for each
    """

    __slots__ = ("_said", "deliveries")

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        #: the receipts that deliveries were given by, by the identity of the delivery
        self._said: dict[int, str] = {}

    def add(self, delivery: Delivery, receipt: str) -> None:
        self.deliveries.append(delivery)
        self._said[id(delivery)] = receipt

    def said(self, delivery: Delivery) -> Delivery | str:
        """What the caller has given for a delivery."""
        return self._said.get(id(delivery), delivery)

    def stale(
        self,
        batches: Iterable[list[Delivery]],
        results: Iterable[Settled],
        identity: Callable[[Delivery], Hashable],
    ) -> list[Delivery | str]:
        """What the caller has given that was stale, in that order.

        batches: the deliveries of each call, in its order
        results: the result of each call
        identity: what was given twice is not stale because of that
        """
        stale, settled = set(), set()
        for batch, result in zip(batches, results, strict=True):
            gone = set(result.stale)
            for at, delivery in enumerate(batch):
                if at in gone:
                    stale.add(id(delivery))
                else:
                    settled.add(identity(delivery))
        return [
            self.said(one)
            for one in self.deliveries
            if id(one) in stale and identity(one) not in settled
        ]


class Receipts:
    """Reads what callers give."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def read(self, given: Given) -> Read:
        """Raises ReceiptError for what is neither a message nor a receipt of a topic here."""
        read = Read()
        known: set[str] = set()
        for one in (given,) if isinstance(given, (str, bytes, Delivery)) else given:
            if isinstance(one, Delivery):
                if one.topic not in known:
                    known.add(one.topic)
                    # Another process may have delivered it; a topic that is gone has the defaults.
                    if self._registry.known(one.topic) is None:
                        self._registry.declared(one.topic)
                read.deliveries.append(one)
            elif isinstance(one, str):
                read.add(self._delivery(one), one)
            else:
                raise ReceiptError(
                    f"{one!r:.60} is neither a message that was popped nor a receipt"
                )
        return read

    def _delivery(self, receipt: str) -> Delivery:
        delivery = Delivery.of_receipt(receipt)
        topic = self._registry.recent(delivery.topic)
        if topic is None:
            raise ReceiptError(
                f"{shown(receipt)} is of the queue {delivery.topic!r}, which does not exist here: "
                "it was deleted, or the receipt is of another server or key prefix"
            )
        if delivery.step >= len(topic.steps):
            raise ReceiptError(
                f"{shown(receipt)} is of the queue {delivery.topic!r} when it had other priority "
                "steps; that queue was deleted since, and the message with it"
            )
        return delivery
