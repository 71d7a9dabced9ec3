"""Sends what settles messages: with the next turn of the loop, or at once without one."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from ..center.pop import bury_call, mark_calls
from ..center.waiting import by_topic
from ..model.results import Delivery
from ..scripts.call import ScriptCall
from .connections import BROKEN
from .holdings import describe
from .loop import TICK, Alarm, Loop

if TYPE_CHECKING:
    from ..center.center import TimeoutCenter
    from .lease_keeper import LeaseKeeper
    from .loop import Connection
    from .state import Claim, WorkerPolicy


# -- acknowledgements and other calls that leave together, and when they leave

#: While there is a backlog, acknowledgements wait for the next pop: so many at most, and for so
#: many seconds.
MAX_ACKS = 32
ACKS_WAIT = 0.003


class Settlements:
    """What is to leave with the next turn of the loop. Any thread may add to it."""

    def __init__(self) -> None:
        self.acks: deque[Delivery] = deque()
        self.calls: deque[ScriptCall] = deque()
        #: what was acknowledged while its task runs on, and is to be marked, and whether it is dead
        #: if that is lost; each by its identity
        self.marks: dict[int, tuple[Delivery, bool]] = {}
        #: what has left something for which others may wait
        self.freed: deque[Delivery] = deque()
        #: monotonic seconds when acknowledgements leave that wait for company
        self.leave_at: float | None = None

    def __bool__(self) -> bool:
        return bool(self.acks or self.calls or self.marks)

    def may_wait(self, now: float) -> bool:
        """Whether what there is may wait for the next pop to take it along.

        Acknowledgements may, for moments from when this is first asked. Rejections do not, for
        another consumer may wait for the message.
        """
        if self.calls or len(self.acks) + len(self.marks) >= MAX_ACKS:
            return False
        if self.leave_at is None:
            self.leave_at = now + ACKS_WAIT
        return now < self.leave_at

    def leave_now(self) -> None:
        """What waits is not to wait any longer."""
        self.leave_at = 0.0

    def take(self) -> tuple[list[Delivery], list[ScriptCall]]:
        """What leaves now: deliveries to acknowledge, and calls."""
        self.leave_at = None
        return _drained(self.acks), _drained(self.calls) if self.calls else []

    def take_freed(self) -> list[Delivery]:
        """What has left something since this was last asked."""
        return _drained(self.freed)

    def take_marks(self) -> list[tuple[Delivery, bool]]:
        """What leaves now to be marked."""
        taken = []
        with suppress(KeyError):  # another thread has taken one out
            while self.marks:
                taken.append(self.marks.popitem()[1])
        return taken


def _drained(queue: deque[Any]) -> list[Any]:
    # Others may be adding to it.
    return [queue.popleft() for _ in range(len(queue))]


# -- sends what settles messages

logger = logging.getLogger(__name__)


class Outbox:
    """Acknowledges, rejects and releases messages, and announces claims again.

    Acknowledgements and rejections may come from any thread.
    """

    def __init__(self, poller: Any) -> None:
        self.settlements = Settlements()
        self._center: TimeoutCenter = poller.center
        self._leases: LeaseKeeper = poller.leases
        self._loop: Loop = poller.loop
        self._work: Connection = poller.work
        self._alarm = Alarm(self._loop, self._on_alarm)

    # -- what settles messages

    def ack(self, delivery: Delivery) -> None:
        """Acknowledge: within this turn of the loop, or at once without one."""
        self._leases.drop(delivery)
        if self._loop.hub is not None:
            self.settlements.acks.append(delivery)
            self._leaves_with_next_turn()
        else:
            self._run_or_owe(self._center.commands.ack([delivery]))
            self._loop.nudge()

    def ack_early(
        self,
        delivery: Delivery,
        policy: WorkerPolicy,
        execution: Hashable,
        *,
        buries: bool = False,
        on_end: Callable[[bool], Any] | None = None,
    ) -> None:
        """A message is acknowledged, and its task runs on: it is acknowledged for good when that
        has ended. Whoever crashes meanwhile does not have it delivered again.

        buries: it is dead then, and not gone
        on_end: is called when it has ended: see :meth:`.holdings.EarlyAcks.add`
        """
        self._leases.early_acks.add(policy, execution, delivery, on_end)
        if self._loop.hub is not None:
            self.settlements.marks[id(delivery)] = delivery, buries
            self._leaves_with_next_turn()
        else:
            self._run_or_owe(self._mark([(delivery, buries)]))

    def ack_at_end(self, delivery: Delivery) -> None:
        """Acknowledge what holds something for which others may wait: as soon as possible."""
        self.settlements.marks.pop(id(delivery), None)
        self.ack(delivery)
        self.settlements.leave_now()
        self.settlements.freed.append(delivery)

    def ack_ended(self) -> None:
        """Acknowledge for good what was acknowledged early and has ended since."""
        for delivery in self._leases.early_acks.take_ended():
            self.ack_at_end(delivery)

    def _mark(self, marks: list[tuple[Delivery, bool]]) -> list[ScriptCall]:
        calls = []
        for buries in (False, True):
            if some := [delivery for delivery, is_so in marks if is_so == buries]:
                calls += mark_calls(self._center.registry.topic_of, some, buries=buries)
        return [call._replace(parse=partial(self._marked, call)) for call in calls]

    def _marked(self, call: ScriptCall, raw: Any) -> None:
        for delivery in call.parse(raw):
            # Its lease had ended before: as it counts however late, it is acknowledged for good.
            if self._leases.early_acks.drop(delivery, is_over=True):
                self.ack(delivery)

    def reject(
        self,
        delivery: Delivery,
        requeue: bool,
        reason: str = "",
        error: str = "",
        *,
        on_purpose: bool = False,
    ) -> None:
        """Reject, as soon as :meth:`ack` acknowledges.

        on_purpose: a requeue costs no retry: nothing has failed
        """
        self._leases.drop(delivery)
        if not requeue:
            logger.warning("message %s goes to DeadQueue: %s", describe(delivery), reason)
        elif not (on_purpose or delivery.retries_left):
            logger.error("message %s: no retries left, it goes to DeadQueue", describe(delivery))
        call = self._center.commands.reject(
            delivery, requeue=requeue, reason=reason, error=error, on_purpose=on_purpose
        )
        self._settle(call)

    def bury(self, delivery: Delivery, reason: str, error: str = "") -> None:
        """Put what was acknowledged before into DeadQueue, as soon as :meth:`ack` acknowledges,
        and after that."""
        logger.warning("message %s goes to DeadQueue: %s", describe(delivery), reason)
        center = self._center
        topic = center.registry.topic_of(delivery)
        self._settle(bury_call(center.context, topic, delivery, reason, error))

    def _settle(self, call: ScriptCall) -> None:
        if self._loop.hub is not None:
            self.settlements.calls.append(call)
            self._leaves_with_next_turn()
        else:
            self._run_or_owe([call])
            self._loop.nudge()

    def release(self, deliveries: list[Delivery], *, handed: bool = False) -> None:
        """Give messages back unhandled, now.

        handed: a consumer was handed them: their next deliveries say so
        """
        if not deliveries:
            return
        for delivery in deliveries:
            self._leases.drop(delivery)
        # There is one attempt, and it often comes after a connection was cut, seldom alone.
        self._center.client.drop_idle()
        try:
            self._center.runner.run_all(self._center.commands.release(deliveries, handed=handed))
        except (*BROKEN, ResponseError) as exc:
            # Not to be repeated later, when another may hold them: their leases end.
            logger.info("%d messages come back when their leases end: %s", len(deliveries), exc)

    def release_later(self, deliveries: list[Delivery]) -> None:
        """Give messages back unhandled, without waiting for the reply."""
        for delivery in deliveries:
            self._leases.drop(delivery)
        # Not to be repeated if it fails, when another may hold them: their leases end.
        self._work.send([(call, None) for call in self._center.commands.release(deliveries)])

    def _leaves_with_next_turn(self) -> None:
        if self._loop.elsewhere:
            self._loop.nudge()
            if self._loop.hub is None:  # the loop has ended since
                self.flush()
        elif self._loop.held_up:
            # A solo pool runs the task inside the delivery, for as long as it takes.
            try:
                self.send([])
            except BROKEN as exc:
                self._log_later(exc)  # it is owed by now; the loop finds that it has to reconnect

    def _run_or_owe(self, calls: list[ScriptCall]) -> None:
        if not calls:
            return
        try:
            self._center.runner.run_all(calls)
        except (*BROKEN, ResponseError) as exc:
            # Each may run twice without harm, and none may be forgotten.
            self._leases.retry_later(calls)
            self._log_later(exc)

    @staticmethod
    def _log_later(exc: Exception) -> None:
        logger.info("said later, when the server can be reached: %s", exc)

    # -- when it leaves

    def flush(self) -> None:
        """Send, and wait until it has happened, what was to leave with the next turn."""
        self._run_or_owe(self._take_settled())

    def send(self, items: list[tuple[Any, ...]]) -> None:
        """Send calls, and what is settled along with them."""
        settled = [(call, None) for call in self._take_settled()]
        self._work.send(settled + items, owed=len(settled))

    def send_first(self, calls: list[ScriptCall]) -> None:
        """Send calls before anything is settled that is settled from now on. Each is repeated until
        the server has answered, and may run twice without harm."""
        if calls:
            self._work.send([(call, None) for call in calls], owed=len(calls))

    def send_settled(self, *, may_wait: bool) -> None:
        """Send what is settled, if anything is.

        may_wait: it goes along with the next pop if there is one within moments
        """
        settlements = self.settlements
        if not settlements:
            return
        now = self._loop.now()
        if not (may_wait and settlements.may_wait(now)):
            self.send([])
        elif settlements.leave_at is not None:
            self._alarm.set(settlements.leave_at, now)

    def _take_settled(self) -> list[ScriptCall]:
        acks, calls = self.settlements.take()
        calls = self._center.commands.ack(acks) + calls
        if self.settlements.marks:
            calls += self._mark(self.settlements.take_marks())
        return calls

    def _on_alarm(self) -> None:
        # Nearly always a pop has taken them along.
        leave_at, now = self.settlements.leave_at, self._loop.now()
        if leave_at is None:
            return
        if leave_at - now > TICK:
            self._alarm.set(leave_at, now)
        else:
            self.settlements.leave_now()
            self._loop.nudge()

    def unregister(self) -> None:
        """The loop has no hub any more."""
        self._alarm.cancel()

    # -- claims

    def announce_later(self, claims: Iterable[Claim]) -> None:
        """Announce claims again, without waiting for the reply."""
        for topic, pairs in by_topic(claims).items():
            self._work.send([(call, None) for call in self._reannounce(topic, pairs)])

    def pass_on(self, claim: Claim) -> None:
        """Leave a claim to those who prefer its slot, without waiting for the reply."""
        self._work.send([(self._center.commands.pass_on(*claim), None)])

    def _reannounce(self, topic: str, pairs: list[tuple[int, int]]) -> list[ScriptCall]:
        center = self._center
        return center.commands.reannounce(center.registry.resolved(topic), pairs)

    def announce_now(self, claims: Iterable[Claim]) -> None:
        """Announce claims again, and wait until it has happened."""
        for topic, pairs in by_topic(claims).items():
            try:
                self._center.runner.run_all(self._reannounce(topic, pairs))
            except (*BROKEN, ResponseError) as exc:
                # The others look into all slots within a second.
                logger.debug("claims of %s were not handed back: %s", topic, exc)
