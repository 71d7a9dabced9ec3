"""Failed tasks in Redis: kept, read, retried and deleted."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import Any

from ..errors import EnvelopeError, LibraryError
from ..model import failures as model
from ..model import message as envelope
from ..model.delivery import key_in, token_with
from ..model.failures import FailedTask, FailuresRetried
from ..model.library import Record
from ..model.results import DEAD, Found, Missing, OnProgress, tell_nobody
from ..scripts.call import ScriptCall, load, microseconds, parts_of, rows, text
from .calls import PutRequest, suffix_of
from .core import CenterPart, Core, FailedRows, started
from .messages import Dead, ids_of
from .put import Puts
from .runner import BROKEN, Away

logger = logging.getLogger(__name__)

#: Parts of a record that are read: what groups need, all but the message, or all.
_HEAD, _DETAILS, _WHOLE = 1, 2, 3

#: Records and bytes that one call reads; ids that one call names; queues that are asked together.
_STEP, _BYTES, _IDS, _TOGETHER = 500, 1 << 20, 100, 100

_LATEST = 1 << 53

#: The first and the last microsecond of what is read, and the queue behind which it begins there.
_Span = tuple[int, int, str | None]


class Failures(CenterPart):
    """The latest failed tasks of each queue, and with a task library all that it has. `topic` is
    the name of the queue to look at; without it, all declared queues are.

    A task that both have is listed once, as Redis has it."""

    def __init__(self, core: Core, puts: Puts, dead: Dead) -> None:
        super().__init__(core)
        self._puts, self._dead = puts, dead

    # -- writing

    def count(self, topic: str) -> None:
        """Count a failed task among the metrics."""
        self._runner.metrics.count(topic, "failed")

    def keep(self, failures: Sequence[FailedTask], bounds: model.FailureBounds) -> list[Any]:
        """Keep failed tasks. Returns, for each, whether it is kept, or the error of Redis."""
        return self._runner.run_each(
            [
                self._call(
                    "fail",
                    one.topic,
                    (
                        *(one.id, model.write_record(one), bounds.number, bounds.bytes),
                        int(bounds.age * 1000),
                    ),
                    bool,
                )
                for one in failures
            ]
        )

    def _shares(self, topics: Iterable[str], bounds: model.FailureBounds) -> model.FailureBounds:
        """The share of these bounds that a queue has: all of which failed tasks are kept have the
        same, and these are among them from now on."""
        key, now = self._context.keys.failing, time.time()
        with self._runner.client.pipeline(transaction=False) as pipe:
            pipe.zadd(key, dict.fromkeys(topics, now))
            pipe.zremrangebyscore(key, "-inf", now - bounds.age)
            pipe.zcard(key)
            pipe.pexpire(key, int(bounds.age * 1000))
            return model.share_of(bounds, max(pipe.execute()[2], 1))

    def _call(self, script: str, topic: str, args: Sequence[Any], parse: Any) -> ScriptCall:
        known = self._registry.known(topic) or self._registry.standing(topic)
        return ScriptCall(load(script), known.slot(0).failure_keys, args, parse)

    # -- reading

    def find(
        self,
        topic: str | None = None,
        *,
        task: str | None = None,
        exception: str | None = None,
        since: float | None = None,
        until: float | None = None,
        limit: int = 100,
        after: str | None = None,
        messages: bool = False,
    ) -> model.FailurePage:
        """A page of failed tasks, the latest first.

        task: only of tasks of this name, or pattern
        exception: only with this type of exception
        since, until: only what failed within, seconds since the epoch
        after: where another page ended. Raises ValueError for any other text
        messages: whether their messages are read, too
        """
        if not isinstance(limit, int) or limit < 1:
            raise ValueError(f"limit must be a whole number from 1 up, not {limit!r}")
        which, away = model.FailureFilter(task, exception), Away()
        failures: list[FailedTask] = []
        step = _STEP if task or exception else min(limit + 1, _STEP)
        parts = _WHOLE if messages else _DETAILS
        for failed in self._latest(away, topic, parts, step, since, until, after):
            if which.matches(failed):
                failures.append(failed)
            if len(failures) > limit:
                last = failures[limit - 1]
                page = self._whole(failures[:limit], away)
                return away.checked(model.FailurePage(page, f"{last.failed_us}:{last.topic}"))
        return away.checked(model.FailurePage(self._whole(failures, away), None))

    def groups(
        self, topic: str | None = None, *, since: float | None = None
    ) -> list[model.FailureGroup]:
        """Failed tasks by queue, task and type of exception, the largest group first."""
        away = Away()
        return away.checked(model.groups_of(self._latest(away, topic, _HEAD, _STEP, since)))

    def get(self, id: str | Iterable[str], *, topic: str | None = None) -> list[FailedTask]:
        """The records of tasks, with their messages; those of ids that have none are left out."""
        ids = [one for one in dict.fromkeys(ids_of(id)) if one]
        away = Away()
        failures: list[FailedTask] = []
        topics = self._topics(topic)
        for part in parts_of(ids, _IDS):
            args = (_WHOLE, len(part), 0, 0, 0, *part)
            for _, page in self._read([(one, args) for one in topics], away):
                failures += page
        known = {(one.topic, one.id) for one in failures}
        for one in self._in_library(away, methodcaller("of_ids", ids)):
            if topic in (None, one.topic) and (one.topic, one.id) not in known:
                failures.append(one)
        if away and {one.id for one in failures} != set(ids):
            return away.checked(failures)
        return failures

    def _listed(self, failures: Iterable[FailedTask | Record]) -> dict[tuple[str, str], int]:
        """When these tasks failed that Redis lists, by their queues and ids."""
        ids: dict[str, list[str]] = {}
        for one in failures:
            ids.setdefault(one.topic, []).append(one.id)
        asked = [
            (topic, (_HEAD, _IDS, 0, 0, 0, *part))
            for topic, some in ids.items()
            for part in parts_of(some, _IDS)
        ]
        pages = self._read(asked, Away())
        return {(one.topic, one.id): one.failed_us for _, page in pages for one in page}

    def _in_library(
        self, away: Away, ask: Callable[[FailedRows], list[FailedTask]]
    ) -> list[FailedTask]:
        """What the task library says, if there is one that answers."""
        recorder = self._core.recorder
        try:
            return [] if recorder is None else ask(recorder.failures)
        except LibraryError as exc:
            away.add([Missing("", (), "the task library", str(exc))])
            return []

    def _whole(self, found: list[FailedTask], away: Away) -> list[FailedTask]:
        """These failures, with what the task library knows of its own beside their heads."""
        of_library = [one for one in found if one.token is not None]
        ask = methodcaller("of_ids", [one.id for one in of_library], of_library)
        more = self._in_library(away, ask) if of_library else []
        rows = {(one.topic, one.id, one.token): one for one in more}
        return [rows.get((one.topic, one.id, one.token), one) for one in found]

    def _topics(self, topic: str | None) -> list[str]:
        return [one.name for one in self._registry.select(topic)]

    def _read(
        self, asked: Sequence[tuple[str, tuple[Any, ...]]], away: Away
    ) -> Iterator[tuple[bool, list[FailedTask]]]:
        """Whether a queue has more, and what was read of it; of each that is asked with these
        arguments and answers."""
        for part in parts_of(asked, _TOGETHER):
            calls = [
                self._call("failures", topic, args, partial(_page, topic)) for topic, args in part
            ]
            for page in self._runner.run_there(calls, away):
                if page is not None:
                    yield page

    def _latest(
        self,
        away: Away,
        topic: str | None,
        parts: int,
        step: int,
        since: float | None = None,
        until: float | None = None,
        after: str | None = None,
    ) -> Iterator[FailedTask]:
        """Failed tasks, the latest first, and those of one moment by their queues."""
        low, high = microseconds(since) or 0, microseconds(until) or _LATEST
        behind = None
        if after is not None:
            us, _, behind = after.partition(":")
            high = min(high, int(us))
        return heapq.merge(
            self._in_redis(away, topic, parts, step, (low, high, behind)),
            self._only_in_library(away, topic, step, (low, high, behind)),
            key=lambda one: (-one.failed_us, one.topic),
        )

    def _only_in_library(
        self, away: Away, topic: str | None, step: int, span: _Span
    ) -> Iterator[FailedTask]:
        (low, high, behind), last, is_last = span, None, False
        while not is_last:
            ask = methodcaller("latest", topic, low, high, last, step)
            page = self._in_library(away, ask)
            listed = self._listed(page)
            for one in page:
                is_before = behind is not None and one.failed_us == high and one.topic <= behind
                if not is_before and (one.topic, one.id) not in listed:
                    yield one
            last, is_last = page[-1] if page else None, len(page) < step

    def _in_redis(
        self, away: Away, topic: str | None, parts: int, step: int, span: _Span
    ) -> Iterator[FailedTask]:
        low, high, behind = span
        # Of each queue, what was not read has failed then or before.
        left = {
            name: high - (behind is not None and name <= behind) for name in self._topics(topic)
        }
        waiting: list[FailedTask] = []
        while left:
            newest = max(left.values())
            names = [name for name, until_us in left.items() if until_us >= newest - 1]
            budget = max(_BYTES // len(names), 1)
            asked = [(name, (parts, step, budget, low, left.pop(name))) for name in names]
            for has_more, page in self._read(asked, away):
                waiting += page
                if has_more and page:
                    left[page[-1].topic] = page[-1].failed_us - 1
            waiting.sort(key=lambda one: (-one.failed_us, one.topic))
            floor = max(left.values(), default=-1)
            number = sum(one.failed_us > floor for one in waiting)
            yield from waiting[:number]
            del waiting[:number]

    # -- changing

    def retry(
        self,
        topic: str | None = None,
        *,
        ids: Iterable[str] | None = None,
        task: str | None = None,
        exception: str | None = None,
        limit: int | None = None,
        on_progress: OnProgress = tell_nobody,
    ) -> FailuresRetried:
        """Put failed tasks into their queues again, due now, under their ids, with their arguments
        and all their retries; a dead letter is requeued. What is retried has no record any more.

        ids: only these
        task, exception: as :meth:`find`
        limit: so many at most, the latest

        Each failure is retried once, however often this is asked for at the same time.
        """
        done, away = FailuresRetried(), Away()
        for part in self._chosen(away, topic, ids, model.FailureFilter(task, exception), limit):
            sent, left = self._send_again(part)
            done = done.plus(sent)
            settled: list[FailedTask] = []
            try:
                for failed in left:
                    result = self._retry(failed)
                    done = done.plus(result)
                    if not result.not_kept:
                        settled.append(failed)
            finally:
                self._forget(settled)
            on_progress(done.number + done.not_kept + done.gone, 0)
        return away.checked(done)

    def _send_again(self, some: list[FailedTask]) -> tuple[FailuresRetried, list[FailedTask]]:
        """Have the task library send those again whose messages it has; return what it has done,
        and the others. Nobody else sends what it has: so each is sent once."""
        rows = {(one.topic, one.id): one for one in self._rows_of(some)}
        kept = {key for key, one in rows.items() if one.has_message}
        sent = [one for one in some if (one.topic, one.id) in kept and not one.dead]
        # Before it is sent: what was sent, and is still listed in Redis, would be sent once more.
        self._forget_in_redis(sent)
        if self._core.recorder is None:
            return FailuresRetried(), some
        again = [rows[one.topic, one.id] for one in sent]
        done = self._core.recorder.failures.send_again(again)
        others = [one for one in some if one not in sent]
        listed = self._listed(others)
        left = []
        for one in others:
            key = one.topic, one.id
            if listed.get(key) == one.failed_us if one.token is None else key in rows:
                left.append(one)
        return done.plus(FailuresRetried(gone=len(others) - len(left))), left

    def _rows_of(self, failures: Sequence[FailedTask]) -> list[FailedTask]:
        """What the task library has of failed tasks, the oldest first. Raises LibraryError."""
        recorder = self._core.recorder
        if recorder is None:
            return []
        named = {(one.topic, one.id) for one in failures}
        found = recorder.failures.of_ids([one.id for one in failures])
        return [one for one in found if (one.topic, one.id) in named]

    def _retry(self, failed: FailedTask) -> FailuresRetried:
        if failed.dead:
            number = self._dead.requeue(failed.topic, ids=[failed.id])
            return FailuresRetried(int(number > 0), gone=int(not number))
        if not failed.message:
            return FailuresRetried(not_kept=1)
        try:
            content = envelope.unpack(failed.message, failed.kept_id)
        except EnvelopeError:
            return FailuresRetried(not_kept=1)
        seconds, us = self._runner.client.time()
        result = model.again(content, seconds + us / 1e6)
        token = f"failure {failed.failed_us}"
        headers = content["headers"]
        if "k" in content["properties"]:
            name = suffix_of(f"{failed.id}\0{token}")
            content["properties"]["k"] = token_with(name, headers)
        request = PutRequest(
            failed.id,
            envelope.pack(content, deflate=True, id=failed.id),
            basis=headers.get("x-slot-basis") or key_in(failed.traits),
            priority=failed.priority,
            traits=model.traits_again(failed.traits),
        )
        put = self._puts.put_named(failed.topic, request, token)
        return result if put.added else FailuresRetried(gone=1)

    def delete(
        self,
        topic: str | None = None,
        *,
        ids: Iterable[str] | None = None,
        task: str | None = None,
        exception: str | None = None,
        limit: int | None = None,
        on_progress: OnProgress = tell_nobody,
    ) -> int:
        """Delete records; return how many. The arguments are those of :meth:`retry`. Dead letters
        stay in DeadQueue, and records of the task library in its history."""
        away, which = Away(), model.FailureFilter(task, exception)
        number = 0
        for part in self._chosen(away, topic, ids, which, limit, parts=_HEAD):
            number += self._forget(part)
            on_progress(number, 0)
        return away.checked(number)

    def _chosen(
        self,
        away: Away,
        topic: str | None,
        ids: Iterable[str] | None,
        which: model.FailureFilter,
        limit: int | None,
        *,
        parts: int = _WHOLE,
    ) -> Iterator[list[FailedTask]]:
        """Those that are meant, a bounded number at a time; none that fails from now on."""
        if ids is not None:
            every = iter(self.get(ids, topic=topic))
        else:
            seconds, us = self._runner.client.time()
            every = self._latest(away, topic, parts, _IDS, until=seconds + us / 1e6)
        chosen = itertools.islice(filter(which.matches, every), limit)
        while part := list(itertools.islice(chosen, _IDS)):
            yield part

    def _forget(self, failures: Sequence[FailedTask]) -> int:
        if self._core.recorder is not None:
            self._core.recorder.failures.forget(self._rows_of(failures))
        return self._forget_in_redis(failures) + sum(one.token is not None for one in failures)

    def unlist(self, sent: Sequence[Record]) -> None:
        """Delete the records in Redis of what the task library is about to send again."""
        listed = self._listed(sent)
        self._forget_in_redis(
            [FailedTask(id, topic, "", "", at) for (topic, id), at in listed.items()]
        )

    def _forget_in_redis(self, failures: Sequence[FailedTask]) -> int:
        by_topic: dict[str, list[Any]] = {}
        for one in failures:
            if one.token is None:
                by_topic.setdefault(one.topic, []).extend((one.id, one.failed_us))
        calls = [
            self._call("forget_failures", topic, args, int) for topic, args in by_topic.items()
        ]
        return sum(self._runner.run_all(calls)) if calls else 0


def _page(topic: str, raw: list[Any]) -> tuple[bool, list[FailedTask]]:
    more, flat = raw
    read = (model.read_record(topic, text(id), int(us), kept) for id, us, kept in rows(flat, 3))
    return bool(more), [one for one in read if one is not None]


def found_of(failed: FailedTask) -> Found:
    """A failed task as a message that was found, for what reads messages."""
    score = failed.failed_us // 1000 * 1000
    return Found(
        *(failed.topic, -1, failed.kept_id or failed.id, DEAD, 0, score, failed.message),
        *("the task failed", failed.error, failed.traits),
    )


# -- a thread writes them, so that nothing waits for it

#: Records that wait at most; seconds without any after which the thread ends; seconds between two
#: log lines about what is left out.
_WAITING, _IDLE, _REPORT = 200, 10.0, 60.0

#: Seconds for which a queue's share of the bounds is taken for what it was.
_SHARE = 60.0


class FailureWriter:
    """Keeps failed tasks as well as it can: nobody waits for it, and nothing fails because of it.

    failures: of the center
    bounds: of what is kept of all queues
    """

    def __init__(self, failures: Failures, bounds: model.FailureBounds) -> None:
        self._failures = failures
        self.bounds = self._share = bounds
        self._sharing: set[str] = set()
        self._shared = float("-inf")
        self._waiting: deque[FailedTask] = deque()
        #: the second of the monotonic clock in which so many were to be written
        self._second = self._written = 0
        self._lock = threading.Lock()
        self._bell = threading.Condition(self._lock)
        self._thread: tuple[int, threading.Thread] | None = None
        #: how many were left out, and why last
        self.left_out = 0
        self._why = ""
        self._reported = float("-inf")

    def note(self, failed: FailedTask) -> None:
        """Have it kept, if there is room; any thread may call this."""
        self._failures.count(failed.topic)
        second = int(time.monotonic())
        with self._bell:
            self._written = self._written + 1 if second == self._second else 1
            self._second = second
            if len(self._waiting) >= _WAITING or self._written > model.WRITES:
                self._leave_out(1, "too many fail at once")
            else:
                self._waiting.append(failed)
            if self._thread is None or self._thread[0] != os.getpid():
                self._thread = os.getpid(), started(self._write, "toc-failures")
            self._bell.notify_all()

    def flush(self, seconds: float) -> None:
        """Wait until all are written, for so long at most."""
        end = time.monotonic() + seconds
        with self._bell:
            while self._thread is not None and (left := end - time.monotonic()) > 0:
                if not self._waiting:
                    break
                self._bell.wait(left)

    def _write(self) -> None:
        while True:
            with self._bell:
                if not self._waiting and not self._bell.wait_for(lambda: self._waiting, _IDLE):
                    self._thread = None
                    return
                records = list(self._waiting)[:_IDS]
            try:
                self._look_at_shares({one.topic for one in records})
                results = self._failures.keep(records, self._share)
            except Exception as exc:  # whatever it is, tasks go on
                results = [exc] * len(records)
            with self._bell:
                for result in results:
                    self._waiting.popleft()
                    if isinstance(result, Exception):
                        self._leave_out(1, str(result))
                self._bell.notify_all()
            if any(isinstance(one, BROKEN) for one in results):
                time.sleep(1.0)

    def _look_at_shares(self, topics: set[str]) -> None:
        now = time.monotonic()
        if now >= self._shared + _SHARE:
            self._sharing.clear()
        if not topics <= self._sharing:
            self._sharing |= topics
            self._shared = now
            # The queues may be on other nodes than what counts them: the former share holds.
            with suppress(*BROKEN):
                self._share = self._failures._shares(topics, self.bounds)

    def _leave_out(self, number: int, why: str) -> None:
        self.left_out += number
        now = time.monotonic()
        if now >= self._reported + _REPORT:
            self._reported = now
            logger.warning(
                "%d failed tasks are left out of the list of failures: %s", self.left_out, why
            )
