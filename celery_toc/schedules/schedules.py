"""The schedules of an app's broker: put, found, changed, and gone on with."""

from __future__ import annotations

import builtins
import copy
import getpass
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import kombu_toc

from ..compat.sending import QuickMessages
from . import state
from .messages import Plan, Wanted, firing_of, plan_of
from .rules import ScheduleError, UnknownScheduleError, is_number, read_time, to_datetime

if TYPE_CHECKING:
    from celery import Celery

#: How often a change is tried again because somebody else has changed the schedule meanwhile.
ATTEMPTS = 100

#: Firings that a history has.
REMEMBERED = 20

#: Schedules that are read at a time where all are wanted.
PAGE = 100

#: Schedules that are put in a round trip.
TOGETHER = 200

#: Firings of the past that a call may send, and how many it does unless told otherwise.
MAX_FILLED, FILLED = 10_000, 1000

#: Of these, how many are put in a step, and bytes of their messages.
FILLED_TOGETHER, FILLED_BYTES = 100, 1_000_000


class Schedules:
    """Tasks that run again and again, kept by the center and carried on by any worker.

    reads: reads a message as a task
    channel: gives a channel that captures what is published
    """

    def __init__(
        self,
        app: Celery,
        center: kombu_toc.TimeoutCenter,
        reads: Callable[[kombu_toc.Delivery], Any],
        channel: Callable[[], AbstractContextManager[kombu_toc.CapturingChannel]] | None = None,
    ) -> None:
        self._app = app
        self._center = center
        self._recurring = center.recurring
        self._reads = reads
        self._channel = channel or self._own_channel
        self._by = ""
        self._quick: QuickMessages | None = None

    def signed(self, by: str) -> Schedules:
        """These schedules, for changes that somebody makes: :attr:`Schedule.edits` names them.
        Without it they are those of the user of this process and its host."""
        found = copy.copy(self)
        found._by = by
        return found

    @contextmanager
    def _own_channel(self) -> Iterator[kombu_toc.CapturingChannel]:
        with self._app.pool.acquire(block=True) as connection:
            yield kombu_toc.CapturingChannel(connection.transport)

    # -- put

    def put(
        self,
        name: str,
        task: Any,
        schedule: Any,
        *,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        queue: str | None = None,
        options: Mapping[str, Any] | None = None,
        misfire: str = "once",
        grace: float | timedelta = 60.0,
        overlap: str = "allow",
        jitter: float | timedelta = 0.0,
        start: datetime | float | None = None,
        end: datetime | float | None = None,
        max_runs: int | None = None,
        timezone: str | tzinfo | None = None,
        owner: str | None = None,
        either_day: bool = False,
        exclude: Any = (),
    ) -> state.Schedule:
        """Have a task run again and again; return the schedule as it is then.

        name: of the schedule; a second put of a name changes what is there
        task: a task, the name of one, or its signature
        schedule: a ``crontab``, a ``timedelta`` or number of seconds, ``celery.schedules.schedule``
            or ``solar``
        args, kwargs, options: as of ``apply_async``, but for what says when it runs. ``expires`` in
            seconds counts from the planned time of a firing
        queue: where it goes, unless its routes say it
        misfire: what is done with a firing that is late by more than `grace` seconds, because
            nothing ran: ``once`` runs it for all that were missed, ``skip`` runs none of them,
            ``all`` runs each
        overlap: what is done with a firing whose predecessor is still running: ``allow`` runs it
            beside, ``skip`` leaves it out, ``wait`` runs it afterwards, ``cancel`` revokes the
            other one, terminates it, and runs it then
        jitter: each firing is due up to so many seconds after its planned time, always the same
        start, end: the first and the last moment at which it may fire: a datetime, in the time zone
            of the schedule unless it has one, or seconds since the epoch
        max_runs: it ends after so many runs
        timezone: in which a crontab is read; the app's unless given
        owner: kept with it, to be told from others
        either_day: a crontab that names days of the month and days of the week fires on both, as
            cron has it; otherwise on days that are among both, as Celery has it
        exclude: days of its time zone on which it does not fire: dates, texts such as
            ``2026-12-25``, and paths of files, iCalendar or a date in each line

        If it is there already with the same definition, nothing is changed. Otherwise the firing
        that waits is replaced; what has run is counted on, and a pause stays.

        Raises ScheduleError if it makes no sense, and what ``apply_async`` raises for the task.
        """
        wanted = Wanted(
            *(args, kwargs, queue, options, misfire, grace, overlap, jitter, start, end, max_runs),
            *(timezone, owner, either_day, exclude),
        )
        return self.keep(self._planned(name, task, schedule, wanted))

    def put_many(self, entries: Iterable[Mapping[str, Any]]) -> builtins.list[state.Schedule]:
        """Put many schedules, hundreds in a round trip: for each a mapping of the arguments of
        :meth:`put`. Return them in the order of the entries.

        Nothing is put if one of them makes no sense, which raises ScheduleError. If the connection
        breaks meanwhile, some are put: putting them again changes nothing of these.
        """
        with self.planning():
            plans = [self.plan(**entry) for entry in entries]
        return [_kept(one) for one in self.keep_many(plans)]

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Within this, all plans are made over one connection."""
        channel = self._channel
        with channel() as capturing:
            self._channel = lambda: nullcontext(capturing)
            self._quick = QuickMessages(self._app)
            try:
                yield
            finally:
                self._channel, self._quick = channel, None

    def plan(self, name: str, task: Any, schedule: Any, **options: Any) -> Plan:
        """The first half of :meth:`put`: has Celery make the message, and declares its queue."""
        return self._planned(name, task, schedule, Wanted(**options))

    def _planned(self, name: str, task: Any, schedule: Any, wanted: Wanted) -> Plan:
        return plan_of(self._app, self._channel, name, task, schedule, wanted, self._quick)

    def keep(self, plan: Plan) -> state.Schedule:
        """The second half of :meth:`put`: asks the server only."""
        return _kept(self.keep_many([plan])[0])

    def keep_many(
        self, plans: Sequence[Plan], *, own: bool = False
    ) -> builtins.list[state.Schedule | ScheduleError]:
        """Keep many plans, hundreds in a round trip: what each has become, or why it is not kept.

        own: replace no schedule that another owner has put
        """
        kept: dict[int, state.Schedule | ScheduleError] = {}
        for start in range(0, len(plans), TOGETHER):
            left = dict(enumerate(plans[start : start + TOGETHER], start))
            tries = 0
            while left and tries < ATTEMPTS:
                done = self._keep(left, own)
                tries = 0 if done else tries + 1
                kept |= done
                left = {number: plan for number, plan in left.items() if number not in done}
            kept |= {number: _contended(plan.name) for number, plan in left.items()}
        return [kept[number] for number in range(len(plans))]

    def _keep(
        self, plans: Mapping[int, Plan], own: bool
    ) -> dict[int, state.Schedule | ScheduleError]:
        """Try to keep plans, the first of each name; what came of those that need no other try."""
        first: dict[str, int] = {}
        for number, plan in plans.items():
            first.setdefault(plan.name, number)
        now, found = self._recurring.find_many(builtins.list(first), template=True)
        now = now or self._now()
        kept: dict[int, state.Schedule | ScheduleError] = {}
        steps: dict[str, builtins.list[tuple[int, state.Step, kombu_toc.ScheduleChange]]] = (
            defaultdict(builtins.list)
        )
        for name, number in first.items():
            plan = plans[number]
            try:
                one, step = self._step_to(plan, found[name], now, own)
            except ScheduleError as exc:
                kept[number] = exc
                continue
            if step is not None:
                change = change_of(name, one, step, plan.template.packed)
                steps[plan.template.queue].append((number, step, change))
            elif one is not None:
                kept[number] = self._shown(one)
        for queue, some in steps.items():
            changes = [change for _, _, change in some]
            for (number, step, change), changed in zip(
                some, self._recurring.change_many(queue, changes), strict=True
            ):
                if changed.done and step.record is not None:
                    what = (step.record, change.template, self._reads)
                    kept[number] = state.Schedule(change.name, queue, *what)
        return kept

    def _step_to(
        self, plan: Plan, found: builtins.list[kombu_toc.Scheduled], now: int, own: bool
    ) -> tuple[kombu_toc.Scheduled | None, state.Step | None]:
        """The schedule in the queue of a plan, and the step that makes of it what was planned; no
        step if it is that already, and nothing if something had to be done first."""
        name, queue = plan.name, plan.template.queue
        if own and any(
            state.Record.of_text(one.record).owner != plan.record.owner for one in found
        ):
            raise ScheduleError(f"there is a schedule {name!r} that somebody else has put")
        if any(self._lose(name, one, now) for one in found):
            return None, None
        here = next((one for one in found if one.topic == queue), None)
        elsewhere = next((one for one in found if one.topic != queue), None)
        if elsewhere is not None:
            self._move(plan, here, elsewhere, now)
            return None, None
        if here is None:
            return None, self._edited(state.begin(plan.made_of(None, now), now), now, "put")
        old = state.Record.of_text(here.record)
        same = old.fingerprint == plan.record.fingerprint
        if same and not old.moving and not state.is_late(old, now):
            return here, None
        new = plan.made_of(old, now)
        what = f"moved to queue {queue}" if old.moving else state.difference(old, new)
        return here, self._edited(state.change(old, new, now), now, what)

    def _move(
        self, plan: Plan, here: kombu_toc.Scheduled | None, there: kombu_toc.Scheduled, now: int
    ) -> None:
        """One step of a move from another queue, where it fires until the last one. Two queues are
        in two places: whoever dies in between leaves a schedule that fires in one of them, or that
        the process that keeps the queues up sets going."""
        old = state.Record.of_text(there.record)
        new = plan.made_of(old, now)
        arriving = state.arrive(old, new, now, waits=there.state == kombu_toc.WAITING)
        standing = None if here is None else state.Record.of_text(here.record)
        if standing is not None and replace(standing, when=new.when, changed=now) == arriving:
            gone = self._recurring.change(
                there.topic, change_of(plan.name, there, state.delete(old))
            )
            if gone.done and arriving.carried is not None and not gone.taken_out:
                # Somebody has been delivered it meanwhile, and runs it.
                step = state.Step(replace(standing, carried=None))
                self._run(plan.template.queue, plan.name, here, step)
        else:
            step = state.Step(arriving, take_out=None if standing is None else standing.next)
            self._run(plan.template.queue, plan.name, here, step, plan.template.packed)

    # -- look

    def get(self, name: str) -> state.Schedule | None:
        """The schedule of that name, or None."""
        _, found = self._find(name, template=True)
        return self._shown(found[0]) if found else None

    def list(
        self, *, queue: str | None = None, limit: int = 100, after: str | None = None
    ) -> state.Listed:
        """Read schedules, page by page: of one queue after the other, the one that fires next
        first; those that are paused or have ended come last.

        queue: only those of this one
        limit: how many at most
        after: goes on behind a former page, as its `after` says
        """
        page = [*islice(self._in_order(queue, after, min(limit, PAGE)), limit)]
        more = page and len(page) == limit
        return state.Listed([*map(self._shown, page)], _write_after(page[-1]) if more else None)

    def _in_order(
        self, queue: str | None, after: str | None = None, together: int = PAGE
    ) -> Iterator[kombu_toc.Scheduled]:
        """What there is of a queue, or of all, behind a position; so much is read at a time."""
        topic, begin = ("", None) if after is None else _read_after(after)
        if queue is not None and topic != queue:
            begin = None
        for name in self._queues_from(topic) if queue is None else [queue]:
            while page := self._recurring.page(name, together, begin, template=True)[1]:
                yield from page
                if len(page) < together:
                    break
                begin = kombu_toc.schedule_position(page[-1])
            begin = None

    def _queues_from(self, first: str) -> Iterator[str]:
        """That queue, if it is one, and then those behind it; read when they are needed."""
        if first:
            yield first
        while page := self.queues(after=first, limit=PAGE):
            yield from page
            first = page[-1]

    def queues(
        self, *, prefix: str = "", after: str = "", limit: int | None = None
    ) -> builtins.list[str]:
        """The names of the queues that have schedules, sorted: all of them unless something is
        said.

        prefix: only those that begin with it
        after: only those behind this name
        limit: how many at most; with it, a call costs as much as it returns, however many queues
            there are
        """
        return self._recurring.topics(prefix=prefix, after=after, limit=limit)

    def page(
        self, queues: Sequence[str], *, limit: int = 100, after: str = ""
    ) -> state.SchedulesByName:
        """Read schedules by queue and name. It costs as much as it returns, and a look at each
        queue that it takes, however many there are. It may have fewer than the limit, or none, and
        go on: `behind` says it.

        queues: of these, one after the other
        limit: how many at most
        after: of the first queue, only those behind this name
        """
        found, behind = self._recurring.by_name(queues, limit, after, template=True)
        return state.SchedulesByName([self._shown(one) for one in found], behind)

    def each(self, *, queue: str | None = None) -> Iterator[state.Schedule]:
        """Yield all schedules, as :meth:`list` reads them."""
        return map(self._shown, self._in_order(queue))

    def count(self, *, queue: str | None = None) -> int:
        """How many schedules there are."""
        queues = self.queues() if queue is None else [queue]
        return sum(map(self._recurring.count, queues))

    def history(self, name: str) -> builtins.list[state.Firing]:
        """The latest firings, the latest first: at most 20.

        Raises UnknownScheduleError.
        """
        _, found = self._find(name, fired=True)
        if not found:
            raise _unknown(name)
        # More are kept while their messages are there.
        lines = found[0].fired[:REMEMBERED]
        return [state.firing_of_line(self._app, *state.read_line(line)) for line in lines]

    # -- change

    def pause(self, name: str) -> state.Schedule:
        """Have it fire no more until :meth:`resume`; the firing that waits is taken out, and what
        waits of back-fills. Raises UnknownScheduleError, as those below."""
        paused = self._change(name, "paused", lambda record, now: state.pause(record))
        self._take_out_filled(name, paused.queue, paused.record)
        return paused

    def resume(self, name: str) -> state.Schedule:
        """Have it fire again. What was missed meanwhile is not made up for."""
        return self._change(name, "resumed", state.resume)

    def skip_next(self, name: str) -> state.Schedule:
        """Leave its next firing out."""
        leave_out = partial(state.leave_out, name)
        return self._change(name, "left out the next firing", leave_out)

    def run_now(self, name: str) -> str:
        """Send its task once, now, beside its firings; return the id of the task. It counts among
        no runs."""
        for now, one, record in self._attempts(name):
            made = firing_of(
                *(name, one.template, now, now, record.priority, record.expires_us),
                by_hand=True,
                traits=record.message_traits,
            )
            line = state.line_of(made.id, now, state.BY_HAND, now)
            text = record.edited(now, self._editor(), "ran it by hand").to_text(name)
            change = kombu_toc.ScheduleChange(
                *(name, one.record, text, one.next_us), put=made, fired=(line,)
            )
            if self._recurring.change(one.topic, change).done:
                return made.id
        raise _contended(name)

    def _attempts(self, name: str) -> Iterator[tuple[int, kombu_toc.Scheduled, state.Record]]:
        """Read a schedule, and again while somebody else changes it: the time, what is kept, and
        what that says. Raises UnknownScheduleError."""
        for _ in range(ATTEMPTS):
            now, found = self._find(name, template=True)
            if not found:
                raise _unknown(name)
            yield now, found[0], state.Record.of_text(found[0].record)

    def backfill(
        self,
        name: str,
        start: datetime | float,
        end: datetime | float | None = None,
        *,
        rate: float = 10.0,
        limit: int = FILLED,
        on_progress: Callable[[int, int], Any] = lambda done, of: None,
    ) -> builtins.list[str]:
        """Send its task for each time of a range for which no firing has come, before the next
        firing: each once, however often and by whomever this is called. Return the ids of the
        tasks. They count among no runs; the overlap rule holds for them.

        start, end: as of :meth:`put`; the end is now unless given
        rate: how many are due in a second
        limit: how many at most, up to 10,000; if there are more, none is sent

        Raises ScheduleError for a range that is not in the past, or has more times.
        """
        if not (is_number(rate) and 0 < rate <= 1000):
            raise ScheduleError(
                f"schedule {name!r}: rate={rate!r} is not above 0, to 1000 a second"
            )
        if not (type(limit) is int and 0 < limit <= MAX_FILLED):
            raise ScheduleError(f"schedule {name!r}: limit={limit!r} is not 1 to {MAX_FILLED}")
        ids: builtins.list[str] = []
        began = left = 0
        paused = False
        attempts = self._attempts(name)
        while (read := next(attempts, None)) is not None:
            now, one, record = read
            if not began:
                began, paused = now, record.paused
                first = read_time(name, "start", start, record.zone) or 0
                last = read_time(name, "end", now / 1e6 if end is None else end, record.zone) or 0
                left = len(_to_be_filled(name, record, first, last, now, limit))
            together = max(1, min(FILLED_TOGETHER, FILLED_BYTES // max(len(one.template), 1)))
            times = record.unfollowed(first, last, min(left, together))
            if not times or record.paused > paused:  # somebody does not want the rest
                return ids
            firings = [
                firing_of(
                    *(name, one.template, planned, began + round(1e6 * (len(ids) + number) / rate)),
                    *(record.priority, record.expires_us),
                    late=True,
                    traits=record.message_traits,
                )
                for number, planned in enumerate(times)
            ]
            filled = record.fill(times, firings[-1].at_us, now)
            if not ids:
                span = f"{to_datetime(times[0]):%Y-%m-%d %H:%M:%S} UTC on"
                filled = filled.edited(now, self._editor(), f"sent {left} of the past, from {span}")
            change = kombu_toc.ScheduleChange(
                *(name, one.record, filled.to_text(name), one.next_us), more=firings
            )
            if self._recurring.change(one.topic, change).done:
                ids += [firing.id for firing in firings]
                left, attempts = left - len(times), self._attempts(name)
                on_progress(len(ids), len(ids) + left)
        raise _contended(name)

    def delete(self, name: str, *, owner: str | None = None) -> bool:
        """Delete a schedule, with the firings that wait; whether there was one. What has been
        delivered already, runs.

        owner: only if it is this one's; of anybody unless given
        """
        gone = False
        for _ in range(ATTEMPTS):
            _, found = self._recurring.find(name)
            if owner is not None:
                found = [one for one in found if state.Record.of_text(one.record).owner == owner]
            if not found:
                return gone
            for one in found:
                record = state.Record.of_text(one.record)
                if self._run(one.topic, name, one, state.delete(record)):
                    gone = True
                    self._take_out_filled(name, one.topic, record)
        raise _contended(name)

    def _take_out_filled(self, name: str, queue: str, record: state.Record) -> None:
        if record.filled and (ids := record.filled_ids(name, self._now())):
            basis = kombu_toc.SCHEDULE_BASIS
            self._center.cancel(ids, topic=queue, basis=basis, dead=False)

    def _change(
        self, name: str, what: str, event: Callable[[state.Record, int], state.Step]
    ) -> state.Schedule:
        for now, one, record in self._attempts(name):
            if self._lose(name, one, now):
                continue
            if record.moving:  # whoever has moved it died before it was there
                self._run(one.topic, name, one, state.settle(record, now))
                continue
            step = event(record, now)
            if step.record != record:
                step = self._edited(step, now, what)
            if step.record == record or self._run(one.topic, name, one, step):
                return self._shown(one._replace(record=_text(name, step)))
        raise _contended(name)

    def _lose(self, name: str, one: kombu_toc.Scheduled, now: int) -> bool:
        """Have a schedule go on whose next firing was cancelled or lost, which nobody has noticed
        yet: that comes no more. Whether it was so."""
        if one.state or one.record.startswith("\n"):
            return False
        self._run(one.topic, name, one, state.lose(name, state.Record.of_text(one.record), now))
        return True

    def _run(
        self,
        queue: str,
        name: str,
        one: kombu_toc.Scheduled | None,
        step: state.Step,
        template: bytes = b"",
    ) -> bool:
        """Run a step; whether the schedule was as it was read."""
        return self._recurring.change(queue, change_of(name, one, step, template)).done

    def _edited(self, step: state.Step, now: int, what: str) -> state.Step:
        """The step, with a note of who runs it."""
        assert step.record is not None
        return step._replace(record=step.record.edited(now, self._editor(), what))

    def _editor(self) -> str:
        if not self._by:
            try:
                user = getpass.getuser()
            except (OSError, KeyError):  # a container's user has no name
                user = str(os.getuid())
            self._by = f"{user}@{socket.gethostname()}"
        return self._by

    def _find(self, name: str, **what: bool) -> tuple[int, builtins.list[kombu_toc.Scheduled]]:
        """The schedules of that name: first the one that fires, if there are two because one is
        being moved."""
        now, found = self._recurring.find(name, **what)
        if len(found) > 1:
            found.sort(key=lambda one: state.Record.of_text(one.record).moving)
        return now, found

    def _now(self) -> int:
        seconds, rest = self._center.client.time()
        return int(seconds) * 1_000_000 + int(rest)

    def _shown(self, one: kombu_toc.Scheduled) -> state.Schedule:
        record = state.Record.of_text(one.record)
        return state.Schedule(one.name, one.topic, record, one.template, self._reads)


def change_of(
    name: str,
    one: kombu_toc.Scheduled | None,
    step: state.Step,
    template: bytes = b"",
    *,
    replaces: bool = False,
) -> kombu_toc.ScheduleChange:
    """What a step of a schedule changes in the center.

    one: as it was read; None: there was none
    template: the new one; empty: the one that was read with it
    """
    record, put = step.record, None
    if record is not None and step.put is not None:
        made_of = template or (one.template if one is not None else b"")
        due = record.due(name, step.put)
        put = firing_of(
            *(name, made_of, step.put, due, record.priority, record.expires_us),
            traits=record.message_traits,
        )
    return kombu_toc.ScheduleChange(
        name,
        "" if one is None else one.record,
        _text(name, step),
        None if record is None else record.looked_at(name),
        template,
        "" if step.take_out is None else state.firing_id(name, step.take_out),
        put,
        step.lines,
        replaces,
    )


def _text(name: str, step: state.Step) -> str:
    return "" if step.record is None else step.record.to_text(name)


def _to_be_filled(
    name: str, record: state.Record, first: int, last: int, now: int, limit: int
) -> builtins.list[int]:
    """The times that a back-fill sends."""
    if not first <= last <= now:
        raise ScheduleError(
            f"schedule {name!r}: {to_datetime(first).isoformat()} to "
            f"{to_datetime(last).isoformat()} is no range of the past"
        )
    if record.forgot is not None and first <= record.forgot:
        raise ScheduleError(
            f"schedule {name!r}: which firings came until {to_datetime(record.forgot).isoformat()} "
            "is not known any more; begin later"
        )
    times = record.unfollowed(first, last, limit + 1)
    if len(times) > limit:
        raise ScheduleError(
            f"schedule {name!r}: the range has more than {limit} times for which no firing has "
            "come; choose a shorter one, or a higher limit"
        )
    return times


def _kept(one: state.Schedule | ScheduleError) -> state.Schedule:
    """What has become of a plan, if it is kept."""
    if isinstance(one, ScheduleError):
        raise one
    return one


def _unknown(name: str) -> UnknownScheduleError:
    return UnknownScheduleError(f"there is no schedule {name!r}")


def _contended(name: str) -> ScheduleError:
    return ScheduleError(
        f"schedule {name!r} is being changed by somebody else all the time; try again"
    )


def _write_after(one: kombu_toc.Scheduled) -> str:
    parts = (one.topic, *kombu_toc.schedule_position(one))
    return ":".join(quote(part, safe="") for part in parts)


def _read_after(after: str) -> tuple[str, tuple[str, str]]:
    parts = [unquote(part) for part in after.split(":")]
    if len(parts) != 3:
        raise ScheduleError(f"after={after!r:.80} is not what a page of schedules has given")
    queue, at, name = parts
    return queue, (at, name)
