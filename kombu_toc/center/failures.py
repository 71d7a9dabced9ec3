"""Failed tasks in Redis: kept, read, retried and deleted."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from ..errors import EnvelopeError
from ..model import message as envelope
from ..model.delivery import key_in, token_with
from ..model.failures import (
    FailedTask,
    FailureBounds,
    FailureFilter,
    FailureGroup,
    FailurePage,
    FailuresRetried,
    WritePace,
    again,
    groups_of,
    read_record,
    write_record,
)
from ..model.results import DEAD, Found, OnProgress, tell_nobody
from ..scripts.call import ScriptCall, load, microseconds, text
from .calls import PutRequest, suffix_of
from .core import CenterPart, Core
from .operations import Dead
from .put import Puts
from .runner import BROKEN, Away

logger = logging.getLogger(__name__)

#: Parts of a record that are read: what groups need, all but the message, or all.
_HEAD, _DETAILS, _WHOLE = 1, 2, 3

#: Records and bytes that one call reads; ids that one call names; queues that are asked together.
_STEP, _BYTES, _IDS, _TOGETHER = 500, 1 << 20, 100, 100

#: Letters of the traits that a retried message keeps.
_TRAITS = "vmkuo"

_LATEST = 1 << 53


class Failures(CenterPart):
    """The latest failed tasks of each queue. `topic` is the name of the queue to look at; without
    it, all declared queues are."""

    def __init__(self, core: Core, puts: Puts, dead: Dead) -> None:
        super().__init__(core)
        self._puts, self._dead = puts, dead

    # -- writing

    def count(self, topic: str) -> None:
        """Count a failed task among the metrics."""
        self._runner.metrics.count(topic, "failed")

    def keep(self, failures: Sequence[FailedTask], bounds: FailureBounds) -> list[Any]:
        """Keep failed tasks. Returns, for each, whether it is kept, or the error of Redis."""
        return self._runner.run_each(
            [
                self._call(
                    "fail",
                    one.topic,
                    (
                        *(one.id, write_record(one), bounds.number, bounds.bytes),
                        int(bounds.age * 1000),
                    ),
                    bool,
                )
                for one in failures
            ]
        )

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
    ) -> FailurePage:
        """A page of failed tasks, the latest first.

        task: only of tasks of this name, or pattern
        exception: only with this type of exception
        since, until: only what failed within, seconds since the epoch
        after: where another page ended. Raises ValueError for any other text
        messages: whether their messages are read, too
        """
        which, away = FailureFilter(task, exception), Away()
        found: list[FailedTask] = []
        step = _STEP if task or exception else min(limit + 1, _STEP)
        parts = _WHOLE if messages else _DETAILS
        for one in self._latest(away, topic, parts, step, since, until, after):
            if which.matches(one):
                found.append(one)
            if len(found) > limit:
                last = found[limit - 1]
                page = FailurePage(found[:limit], f"{last.failed_us}:{last.topic}")
                return away.checked(page)
        return away.checked(FailurePage(found, None))

    def groups(self, topic: str | None = None, *, since: float | None = None) -> list[FailureGroup]:
        """Failed tasks by queue, task and type of exception, the largest group first."""
        away = Away()
        return away.checked(groups_of(self._latest(away, topic, _HEAD, _STEP, since)))

    def get(self, id: str | Iterable[str], *, topic: str | None = None) -> list[FailedTask]:
        """The records of tasks, with their messages; those of ids that have none are left out."""
        ids = [id] if isinstance(id, str) else [*dict.fromkeys(id)]
        ids = [one for one in ids if one]
        found: list[FailedTask] = []
        away = Away()
        topics = self._topics(topic)
        for start in range(0, len(ids), _IDS):
            some = ids[start : start + _IDS]
            args = (_WHOLE, len(some), 0, 0, 0, *some)
            for _, page in self._read(topics, [args] * len(topics), away):
                found += page
        if away and {one.id for one in found} != set(ids):
            return away.checked(found)
        return found

    def _topics(self, topic: str | None) -> list[str]:
        return [one.name for one in self._registry.select(topic)]

    def _read(
        self, topics: Sequence[str], args: Sequence[tuple[Any, ...]], away: Away
    ) -> Iterator[tuple[bool, list[FailedTask]]]:
        """Whether a queue has more, and what was read of it; of each that answers."""
        for start in range(0, len(topics), _TOGETHER):
            calls = [
                self._call("failures", topic, given, partial(_page, topic))
                for topic, given in zip(
                    topics[start : start + _TOGETHER], args[start : start + _TOGETHER], strict=True
                )
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
        behind = ""
        if after is not None:
            said, _, behind = after.partition(":")
            high = min(high, int(said))
        # Of each queue, what was not read has failed then or before.
        left = {name: high - (after is not None and name <= behind) for name in self._topics(topic)}
        waiting: list[FailedTask] = []
        while left:
            newest = max(left.values())
            names = [name for name, until_us in left.items() if until_us >= newest - 1]
            budget = max(_BYTES // len(names), 1)
            args = [(parts, step, budget, low, left.pop(name)) for name in names]
            for has_more, page in self._read(names, args, away):
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
        for some in self._chosen(away, topic, ids, FailureFilter(task, exception), limit):
            settled: list[FailedTask] = []
            try:
                for one in some:
                    result = self._retry(one)
                    done = done.plus(result)
                    if not result.not_kept:
                        settled.append(one)
            finally:
                self._forget(settled)
            on_progress(done.number + done.not_kept + done.gone, 0)
        return away.checked(done)

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
        result = again(content, failed, seconds + us / 1e6)
        token = f"failure {failed.failed_us}"
        headers = content["headers"]
        if "k" in content["properties"]:
            name = suffix_of(f"{failed.id}\0{token}")
            content["properties"]["k"] = token_with(name, headers)
        traits = [one for one in failed.traits[1:].split(",") if one[:1] in _TRAITS]
        request = PutRequest(
            failed.id,
            envelope.pack(content, deflate=True, id=failed.id),
            basis=headers.get("x-slot-basis") or key_in(failed.traits),
            priority=failed.priority,
            traits=f";{','.join(traits)}" if any(traits) else "",
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
        stay in DeadQueue."""
        away, which = Away(), FailureFilter(task, exception)
        number = 0
        for some in self._chosen(away, topic, ids, which, limit, parts=_HEAD):
            number += self._forget(some)
            on_progress(number, 0)
        return away.checked(number)

    def clear(self, topic: str | None = None) -> int:
        """Delete all records; return how many."""
        away, number = Away(), 0
        names = self._topics(topic)
        for start in range(0, len(names), _TOGETHER):
            calls = [
                self._call("forget_failures", name, (), int)
                for name in names[start : start + _TOGETHER]
            ]
            number += sum(one or 0 for one in self._runner.run_there(calls, away))
        return away.checked(number)

    def _chosen(
        self,
        away: Away,
        topic: str | None,
        ids: Iterable[str] | None,
        which: FailureFilter,
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
        while some := list(itertools.islice(chosen, _IDS)):
            yield some

    def _forget(self, failures: Sequence[FailedTask]) -> int:
        by_topic: dict[str, list[Any]] = {}
        for one in failures:
            by_topic.setdefault(one.topic, []).extend((one.id, one.failed_us))
        calls = [
            self._call("forget_failures", topic, args, int) for topic, args in by_topic.items()
        ]
        return sum(self._runner.run_all(calls)) if calls else 0


def _page(topic: str, raw: list[Any]) -> tuple[bool, list[FailedTask]]:
    more, flat = raw
    read = (
        read_record(topic, text(flat[i]), int(flat[i + 1]), flat[i + 2])
        for i in range(0, len(flat), 3)
    )
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


class FailureWriter:
    """Keeps failed tasks as well as it can: nobody waits for it, and nothing fails because of it.

    failures: of the center
    bounds: of what is kept
    """

    def __init__(self, failures: Failures, bounds: FailureBounds) -> None:
        self._failures = failures
        self.bounds = bounds
        self._waiting: deque[FailedTask] = deque()
        self._pace = WritePace()
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
        with self._bell:
            if len(self._waiting) >= _WAITING or not self._pace.admits(time.monotonic()):
                self._leave_out(1, "too many fail at once")
            else:
                self._waiting.append(failed)
            if self._thread is None or self._thread[0] != os.getpid():
                thread = threading.Thread(target=self._write, name="toc-failures", daemon=True)
                self._thread = os.getpid(), thread
                thread.start()
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
                some = list(self._waiting)[:_IDS]
            try:
                results = self._failures.keep(some, self.bounds)
            except Exception as exc:  # whatever it is, tasks go on
                results = [exc] * len(some)
            with self._bell:
                for result in results:
                    self._waiting.popleft()
                    if isinstance(result, Exception):
                        self._leave_out(1, str(result))
                self._bell.notify_all()
            if any(isinstance(one, BROKEN) for one in results):
                time.sleep(1.0)

    def _leave_out(self, number: int, why: str) -> None:
        self.left_out += number
        now = time.monotonic()
        if now >= self._reported + _REPORT:
            self._reported = now
            logger.warning(
                "%d failed tasks are left out of the list of failures: %s", self.left_out, why
            )
