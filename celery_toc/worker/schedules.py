"""Puts the app's ``beat_schedule`` from a worker, if ``toc_beat`` is set."""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

from celery import signals
from celery.utils.log import get_logger

import celery_toc
import kombu_toc

from ..beat.configured import is_of_a_beat
from ..beat.sync import Outcome, Sync
from ..schedules import state
from ..schedules.rules import utc
from ..schedules.schedules import change_of
from ..schedules.state import DROP, RUN, WAIT, Record

# -- puts the app's beat_schedule from a worker, if toc_beat is set
#
# A thread of the worker does it when the worker starts, and asks once a minute whether it is still
# the one that is in force; see :mod:`celery_toc.beat.sync`.

logger = get_logger(__name__)

#: Seconds between two looks, and after one that failed or found another process putting.
INTERVAL, SOON = 60.0, 5.0

#: Entries that one line of the log names at most.
MAX_NAMED = 10


class BeatSchedule:
    """Does it for one worker.

    app: the worker's
    worker: the name of the worker
    """

    def __init__(self, app: Any, worker: str) -> None:
        self._app = app
        self._process = f"{worker} {uuid.uuid4().hex[:8]}"
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = time.monotonic()
        #: what was logged already, so that it is not logged every minute
        self._logged: set[tuple[str, ...]] = set()

    def start(self) -> None:
        """Begin, if the app asks for it, unless it has begun."""
        if self._thread is None and self._app.conf.get("toc_beat"):
            signals.task_received.connect(self._look_for_beat, dispatch_uid="celery_toc.beat")
            self._thread = threading.Thread(target=self._run, name="toc-beat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End soon. What has been begun, another worker ends."""
        self._stopping.set()
        signals.task_received.disconnect(dispatch_uid="celery_toc.beat")

    def _run(self) -> None:
        sync: Sync | None = None
        wait = 0.0
        while not self._stopping.wait(wait):
            try:
                if sync is None:
                    sync = Sync(self._app, celery_toc.timeout_center(self._app), self._process)
                outcome = sync.run(looked=time.monotonic() - self._began)
            except Exception as exc:
                if self._is_new(str(exc)):
                    logger.error("Cannot put the beat_schedule: %s", exc)
                wait = SOON
            else:
                self._report(outcome)
                wait = INTERVAL if outcome.told.verdict in ("in force", "former") else SOON

    def _report(self, outcome: Outcome) -> None:
        told = outcome.told
        if told.verdict == "former" and self._is_new(told.in_force):
            logger.warning(
                "The beat_schedule of this worker is not in force: that of %s is%s. "
                "'celery toc schedule sync' puts this one",
                told.process,
                f" (release {told.release})" if told.release else "",
            )
        if outcome.put or outcome.removed:
            logger.info(
                "Schedules of beat_schedule: %d put, %d removed, %d unchanged",
                *(len(outcome.put), len(outcome.removed), outcome.unchanged),
            )
        refused = [one for one in outcome.refused if self._is_new(*one)]
        for name, reason in refused[:MAX_NAMED]:
            logger.error("Entry %r of beat_schedule is not put: %s", name, reason)
        if len(refused) > MAX_NAMED:
            more = len(refused) - MAX_NAMED
            logger.error("%d more entries of beat_schedule are not put", more)

    def _is_new(self, *said: str) -> bool:
        """Whether that was not logged yet."""
        is_new = said not in self._logged
        self._logged.add(said)
        return is_new

    def _look_for_beat(self, request: Any = None, **_: Any) -> None:
        """Warn of a task that a beat has sent: it is sent twice."""
        if is_of_a_beat(getattr(request, "request_dict", None) or {}):
            signals.task_received.disconnect(dispatch_uid="celery_toc.beat")
            logger.warning(
                "A celery beat sends tasks beside toc_beat: task %s[%s] came from one. What is in "
                "beat_schedule runs twice: stop that beat",
                *(request.name, request.id),
            )


# -- A worker carries schedules on
#
# What is to be done is decided by :mod:`celery_toc.schedules.state`, of what the center knows. If
# this process dies before that is done, the firing comes back to another one. If it is done and the
# task has not begun, the firing comes back too, and is no longer the next one: it is run, and
# nothing is put.

#: Of its own: a program that seeds Python's has its own numbers.
_random = random.Random()

#: How often it is tried again because somebody else has changed the schedule meanwhile.
ATTEMPTS = 20

#: Seconds between two looks for firings that are gone.
LOOK_INTERVAL = 2.0

#: Microseconds after its time at which it is looked where a firing is.
GONE_US = 2_000_000

#: Schedules of a page, and pages of a queue that one look reads.
PAGE, PAGES = 100, 10

#: Firings that a worker has taken and not delivered yet.
MAX_TAKEN = 1000

#: Microseconds after which a firing that waits for its predecessor looks again, at most.
LOOK_AGAIN_US = 1_000_000


def take(
    recurring: Any,
    delivery: kombu_toc.Delivery,
    name: str,
    cancel: Callable[[list[str]], None] = lambda ids: None,
) -> tuple[str, int]:
    """Take a firing: put the next one, and say what is to be done with this one, and the server's
    clock in microseconds.

    cancel: is told the ids of firings that run and have to end first, each time that this one comes
    """
    id = delivery.id
    for _ in range(ATTEMPTS):
        now, found = recurring.read(delivery.topic, [name], template=True, fired=True)
        if not found:  # deleted since
            return RUN, now
        one = found[0]
        noted = {
            line_id: said[1] for line_id, said in map(state.read_line, one.fired) if line_id == id
        }
        running = [other for other in one.in_flight if other != id]
        record = Record.of_text(one.record)
        alone = delivery.runs_alone
        verdict, step = state.take(name, record, id, now, bool(running), noted.get(id), alone=alone)
        if verdict == WAIT and record.overlap == "cancel":
            cancel(running)
        if step is None:
            return verdict, now
        if recurring.change(delivery.topic, change_of(name, one, step, replaces=True)).done:
            if verdict != WAIT:
                missed = int(verdict == DROP) + state.passed_over(record, step.record)
                fired = verdict == RUN and id not in noted
                recurring.count_firings(delivery.topic, int(fired), missed)
            return verdict, now
    return RUN, now


class Together:
    """Takes the firings of a pop together, of schedules whose firings may run beside others: with
    one read, and without waiting for what follows. The others are taken when each is delivered.

    again: is called with a firing, and its schedule, that was changed since it was read
    """

    def __init__(self, recurring: Any, again: Callable[[kombu_toc.Delivery, str], Any]) -> None:
        self._recurring, self._again = recurring, again

    def take(
        self, deliveries: Sequence[kombu_toc.Delivery]
    ) -> tuple[list[tuple[str, str]], list[Any]]:
        """Queue and id of each that is run, and the calls that put what follows: they are to be
        sent before any of these is acknowledged."""
        topic = deliveries[0].topic
        firings = [(one.id.rpartition("@")[0], one) for one in deliveries if "@" in one.id]
        if not firings:
            return [], []
        # Only of these: what comes next, another worker may take.
        now, found = self._recurring.read(topic, [name for name, _ in firings], template=True)
        known = {one.name: one for one in found}
        taken, calls = [], []
        for name, delivery in firings:
            one = known.pop(name, None)
            record = None if one is None else Record.of_text(one.record)
            if record is None or record.overlap != "allow" or record.next_id(name) != delivery.id:
                continue
            verdict, step = state.take(name, record, delivery.id, now, False, None)
            if verdict == RUN and step is not None:
                missed = state.passed_over(record, step.record)
                changed = partial(self._changed, delivery, name, missed)
                change = change_of(name, one, step, replaces=True)
                calls.append(self._recurring.following(topic, change, changed))
                taken.append((topic, delivery.id))
        return taken, calls

    def _changed(
        self,
        delivery: kombu_toc.Delivery,
        name: str,
        missed: int,
        changed: kombu_toc.ScheduleChanged,
    ) -> None:
        if changed.done:
            self._recurring.count_firings(delivery.topic, 1, missed)
        else:
            self._again(delivery, name)


class Followers:
    """Puts what follows a firing that is gone, although nobody has followed it: its message was
    cancelled or lost, or whoever was delivered it knows nothing of schedules.

    One process of the fleet looks, the one that keeps all queues up. It reads what is overdue and
    nothing else, however many schedules there are, and of that so much at a time. If the server's
    clock was set back, it reads all once: those that had gone on would not fire until that time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = 0.0
        #: queue -> behind which schedule the last look has ended
        self._behind: dict[str, tuple[str, str] | None] = {}
        #: the same, of the look at all, while there is one; and what showed that it is necessary
        self._of_all: dict[str, tuple[str, str] | None] = {}
        self._clocks: dict[str, tuple[int, int]] = {}

    def __call__(
        self, center: kombu_toc.TimeoutCenter, log: Callable[..., None], goes_on: Callable[[], bool]
    ) -> None:
        if self._clock() < self._next:
            return
        cut: Exception | None = None
        for queue in center.recurring.topics():
            if not goes_on():
                return
            try:
                self._look(center.recurring, queue, log)
            except kombu_toc.Transport.connection_errors as exc:
                if not center.clustered:
                    raise
                cut = exc  # other queues are on other nodes
            except Exception as exc:
                log(logging.ERROR, "queue %s: its schedules cannot be looked after: %r", queue, exc)
        self._next = self._clock() + LOOK_INTERVAL
        if cut is not None:
            raise cut

    def _look(self, recurring: Any, queue: str, log: Callable[..., None]) -> None:
        for _ in range(PAGES):
            behind = self._behind.get(queue)
            now, page, changed = recurring.page(queue, PAGE, behind, GONE_US, template=True)
            if self._was_set_back(queue, now, changed):
                self._of_all[queue] = None
            for one in page:
                if one.state not in (kombu_toc.WAITING, kombu_toc.IN_FLIGHT):
                    self._follow(recurring, one, now, log)
            more = len(page) == PAGE
            self._behind[queue] = kombu_toc.schedule_position(page[-1]) if more else None
            if not more:
                break
        for _ in range(PAGES):
            if queue not in self._of_all:
                return
            now, page, _ = recurring.page(queue, PAGE, self._of_all[queue], template=True)
            for one in page:
                self._set_back(recurring, one, now, log)
            if len(page) < PAGE:
                del self._of_all[queue]
            else:
                self._of_all[queue] = kombu_toc.schedule_position(page[-1])

    def _was_set_back(self, queue: str, now: int, changed: int) -> bool:
        """Whether the server's clock was, since a schedule of the queue was changed and since this
        was asked last."""
        last, known = self._clocks.get(queue, (0, 0))
        self._clocks[queue] = (now, changed)
        return changed > now and (changed != known or now < last)

    @staticmethod
    def _set_back(
        recurring: Any, one: kombu_toc.Scheduled, now: int, log: Callable[..., None]
    ) -> None:
        with _logged(one, log):
            record = Record.of_text(one.record)
            if not state.is_late(record, now):
                return
            step = state.set_back(record, now, "" if one.state else record.next_id(one.name))
            if recurring.change(one.topic, change_of(one.name, one, step, replaces=True)).done:
                log(
                    logging.WARNING,
                    "schedule %s: the server's clock was set back; it fires next at %s, not %s",
                    *(one.name, utc(step.put), utc(record.next)),
                )

    def _follow(
        self, recurring: Any, one: kombu_toc.Scheduled, now: int, log: Callable[..., None]
    ) -> None:
        with _logged(one, log):
            record = Record.of_text(one.record)
            if record.moving:
                self._settle(recurring, one, record, now)
            if record.next is None:
                return
            step = state.lose(one.name, record, now)
            if recurring.change(one.topic, change_of(one.name, one, step, replaces=True)).done:
                missed = 1 + state.passed_over(record, step.record)
                recurring.count_firings(one.topic, 0, missed)
                log(
                    logging.WARNING,
                    "schedule %s: the message of its firing %s was gone; the next one is put",
                    *(one.name, state.firing_id(one.name, record.next)),
                )

    @staticmethod
    def _settle(recurring: Any, one: kombu_toc.Scheduled, record: Record, now: int) -> None:
        """Whoever has moved it from another queue may have died before it fired here."""
        _, found = recurring.find(one.name, template=True)
        if [again.record for again in found] == [one.record]:
            recurring.change(one.topic, change_of(one.name, found[0], state.settle(record, now)))


@contextmanager
def _logged(one: kombu_toc.Scheduled, log: Callable[..., None]) -> Iterator[None]:
    """Log what keeps one schedule from going on, and let the others go on; not that the server is
    away."""
    try:
        yield
    except kombu_toc.Transport.connection_errors:
        raise
    except Exception as exc:
        log(logging.ERROR, "schedule %s: its next firing cannot be put: %r", one.name, exc)


class Firings:
    """What a worker's channel asks before it delivers a firing."""

    def __init__(self, app: Any, channel: kombu_toc.Channel) -> None:
        self._app = app
        self._channel = channel
        #: those that were revoked last, so that each is once
        self._revoked: list[str] = []
        self._together = Together(channel.center.recurring, self._take)
        #: what was taken and is not delivered yet
        self._taken: dict[tuple[str, str], None] = {}

    def take_together(self, deliveries: list[kombu_toc.Delivery]) -> None:
        """A pop has brought these: what comes of firings is known when they are delivered."""
        try:
            taken, calls = self._together.take(deliveries)
            self._channel.poller.outbox.send_first(calls)
        except Exception as exc:  # each is taken when it is delivered, and then it is reported
            logger.debug("firings are taken one by one: %r", exc)
            return
        # What was given back meanwhile is taken as another one, wherever it comes again.
        self._taken.update(dict.fromkeys(taken))
        for place in list(islice(self._taken, max(len(self._taken) - MAX_TAKEN, 0))):
            del self._taken[place]

    def _take(self, delivery: kombu_toc.Delivery, name: str) -> tuple[str, int]:
        try:
            return take(self._channel.center.recurring, delivery, name, self._revoke)
        except Exception as exc:
            # The task is due, whatever is wrong with its schedule. The process that keeps the
            # queues up finds that nothing follows, and puts that.
            logger.error("schedule %s: cannot put what follows %s: %r", name, delivery.id, exc)
            return RUN, 0

    def __call__(self, delivery: kombu_toc.Delivery, name: str = "") -> bool:
        channel = self._channel
        if self._taken.pop((delivery.topic, delivery.id), self) is None:
            return True
        if not name:
            return False
        verdict, now = self._take(delivery, name)
        if verdict == DROP:
            logger.info("schedule %s: %s is not run", name, delivery.id)
            channel.poller.ack(delivery)
        elif verdict == WAIT:
            # Not all at the same moment: two that come back would see each other again and again.
            again = _random.randint(LOOK_AGAIN_US * 3 // 4, LOOK_AGAIN_US)
            channel.poller.release([delivery.due_at(now + again)])
        return verdict == RUN

    def _revoke(self, ids: list[str]) -> None:
        if ids != self._revoked:
            self._revoked = ids
            logger.info("%s runs while the next firing is due: revoked", ", ".join(ids))
            self._app.control.revoke(ids, terminate=True)
