"""What a channel has delivered and not yet settled, and how much more it may take."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from kombu.transport import virtual

from ..consumer.policy import WorkerPolicy
from ..model.results import Delivery
from .receiving import Message

# -- what a channel has delivered and not yet settled, and how much more it may take

logger = logging.getLogger(__name__)


class QoS(virtual.QoS):
    """Prefetch window of a channel. Acknowledgements may come from any thread.

    What is settled goes straight to the poller, which sends it.
    """

    def __init__(self, channel: Any, prefetch_count: int = 0) -> None:
        super().__init__(channel, prefetch_count)  # type: ignore[no-untyped-call]  # Kombu's
        self._poller = channel.poller
        # Of Kombu's ordered one, nothing is used.
        self._delivered: dict[int, Message] = {}  # type: ignore[assignment]

    def can_consume(self) -> bool:
        """Whether one more message fits. Celery's worker_disable_prefetch replaces this."""
        return not self.prefetch_count or len(self._delivered) < self.prefetch_count

    def can_consume_max_estimate(self) -> int | None:
        """How many more messages fit; None if there is no limit."""
        if not self.prefetch_count:
            return None
        return max(self.prefetch_count - len(self._delivered), 0)

    def append(self, message: Message, delivery_tag: int) -> None:
        self._delivered[delivery_tag] = message

    def get(self, delivery_tag: int) -> Message:
        return self._delivered[delivery_tag]

    def unsettled(self) -> list[int]:
        """The delivery tags that are neither acknowledged nor rejected."""
        return list(self._delivered)

    def ack(self, delivery_tag: int) -> None:
        message = self._delivered.pop(delivery_tag, None)
        if message is None or (delivery := message.delivery) is None:
            return
        if message.dies_if_lost or (";" in delivery.birth and delivery.outlives_ack):
            self._end_place(message, delivery)
        else:
            self._poller.ack(delivery)

    def _end_place(self, message: Message, delivery: Delivery) -> None:
        """Acknowledge what has a place, or a unique key; that is held until the task has ended. So
        is what is to be dead if its task is lost."""
        policy = self.channel.policy
        execution = policy.execution(message)
        if execution is None:
            self._poller.ack_at_end(delivery)
        else:
            buries = message.dies_if_lost
            self._poller.ack_early(
                *(delivery, policy, execution),
                buries=buries,
                on_end=self._runs_on(message) if buries else None,
            )

    def _runs_on(self, message: Message) -> Callable[[bool], Any] | None:
        """What is acknowledged now is dead if its task is lost; returns what is to be called when
        that has ended: see :meth:`.early_acks.EarlyAcks.add`."""
        return None

    def reject(self, delivery_tag: int, requeue: bool = False) -> None:
        message = self._delivered.pop(delivery_tag, None)
        if message is None:
            return
        delivery, on_purpose = message.delivery, requeue and not message.is_lost
        if on_purpose and delivery is not None:
            spent = self.channel.center.commands.spent_requeues(delivery)
            if spent:
                message.reason = f"{spent}: {message.reason}" if message.reason else spent
                requeue = on_purpose = False
        self._reject(message, requeue, on_purpose)

    def _reject(self, message: Message, requeue: bool, on_purpose: bool) -> None:
        if message.delivery is not None:
            how = (requeue, message.reason, message.error)
            self._poller.reject(message.delivery, *how, on_purpose=on_purpose)
        elif requeue:
            message.return_broadcast()

    def release(self, message: Message) -> None:
        """Release a message, if it is not settled."""
        if self.take_back(message):
            self._release([message])

    def take_back(self, message: Message) -> bool:
        """Whether it is not settled; then it is forgotten here, for it is given back."""
        return self._delivered.pop(message.delivery_tag, None) is not None

    def restore_unacked(self) -> list[Any]:
        """Release whatever is not settled, but for what the worker still executes."""
        taken = []
        for tag, message in list(self._delivered.items()):
            # What is kept stays here: it is settled by its tag, later, through this channel.
            kept = self.channel.policy.keeps(message)
            if not kept and self._delivered.pop(tag, None) is not None:
                taken.append(message)
        self._release(taken)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """As restore_unacked, when the channel closes or the program ends; once."""
        self._on_collect.cancel()
        if not self.restore_at_shutdown or not self.channel.do_restore:
            return
        if self._delivered:
            try:
                self.restore_unacked()
            except Exception:
                print("cannot give messages back:", sys.exc_info()[1], file=stderr or sys.stderr)
                raise

    def _release(self, messages: list[Message]) -> None:
        """Give messages back unhandled. What was fetched ahead of its time is as if it had not
        been delivered."""
        for message in messages:
            message.note_release()
        for handed in (True, False):
            some = [m.delivery for m in messages if m.delivery and m.is_early is not handed]
            if some:
                self._poller.release(some, handed=handed)
        for message in messages:
            if message.delivery is None:
                message.return_broadcast()


# -- how much a consumer can take

#: Seconds for which a worker's processes have work queued: the round trip to Redis is hidden.
AHEAD = 0.02


class Capacity(NamedTuple):
    """How much a consumer can take."""

    free: int  #: that many could start at once; negative if more is queued than can start
    room: int  #: that many are taken, those included
    batch: int  #: the room there is when nothing is queued, and as many as free come free


def capacity_of(policy: WorkerPolicy, room: int, held: int, window: int) -> Capacity:
    """What a consumer can take, by what its owner could start and by its prefetch window.

    room: messages that still fit into the window; window: messages that fit into it when empty
    held: messages that are fetched, and could start none yet
    """
    idle = policy.idle_slots()
    if idle is None:
        return Capacity(room, room, window)
    free = idle - held
    if not policy.prefetches:
        return Capacity(free, min(room, free), 0)
    ahead = policy.idle_within(AHEAD)
    return Capacity(free, min(room, free + ahead), min(window, ahead))
