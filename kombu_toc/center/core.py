"""What the parts of one center share: keys, limits, who runs calls, and who keeps a record."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..model import library as kept
from ..model.failures import FailedTask, FailuresRetried
from ..model.results import (
    Cancelled,
    Delivery,
    Found,
    OnProgress,
    Position,
    Put,
    Rescheduled,
    tell_nobody,
)
from ..model.topic import Topic
from ..scripts.call import ScriptCall, load, parts_of, text
from .calls import Commands, Context, PutRequest, ScheduleChange
from .registry import Registry
from .runner import Runner


@dataclass(eq=False)
class Core:
    """What the parts of one center share.

    recorder: who keeps a record of what is done, if anybody does
    """

    runner: Runner
    registry: Registry
    context: Context
    commands: Commands
    recorder: Recorder | None = None


class CenterPart:
    """A part of a center: methods that build calls, and run them."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._runner, self._registry, self._context = core.runner, core.registry, core.context
        self._commands, self._client = core.commands, core.runner.client
        self._keys = core.context.keys

    @property
    def far(self) -> Far | None:
        """What is too far ahead to be in Redis, if there is a task library."""
        recorder = self._core.recorder
        return None if recorder is None else recorder.far

    def _far_of(self, topic: str | None) -> Far | None:
        """What is too far ahead, if a topic may have such messages; None: any topic."""
        return self.far if self._registry.far(topic) else None


# -- what the processes of one server and prefix tell each other

#: Ids that one call remembers as cancelled.
REMEMBERED_PER_CALL = 500

#: Ids that one call reads.
READ_PER_CALL = 5000


class SharedNotes(CenterPart):
    """Notes in Redis that every process may read."""

    def remember_cancelled(self, ids: Iterable[str], *, most: int, seconds: float) -> None:
        """Note ids for :meth:`cancelled_lately`; messages that have them do not change.

        most: how many ids are kept, the latest, whoever has noted them
        seconds: for how long
        """
        every = list(dict.fromkeys(ids))
        script, keys = load("cancelled"), (self._keys.cancelled,)
        bounds = most, int(seconds * 1000)
        parts = parts_of(every, REMEMBERED_PER_CALL)
        calls = [ScriptCall(script, keys, (*bounds, *some), int) for some in parts]
        self._runner.run_all(calls)

    def cancelled_lately(self, seconds: float) -> list[str]:
        """The ids that were noted as cancelled within so many seconds, the oldest first."""
        now, us = self._client.time()
        since = now * 1000 + us // 1000 - int(seconds * 1000)
        ids: dict[str, None] = {}
        while True:
            limit = {"start": len(ids), "num": READ_PER_CALL}
            page = self._client.zrangebyscore(self._keys.cancelled, f"({since}", "+inf", **limit)
            ids.update(dict.fromkeys(map(text, page)))
            if len(page) < READ_PER_CALL:
                return list(ids)

    def cancelled_at(self, id: str) -> float | None:
        """When an id was noted as cancelled, in seconds since the epoch; None if it was not."""
        ms = self._client.zscore(self._keys.cancelled, id)
        return None if ms is None else ms / 1000

    def speaks_for(self, topics: Iterable[str], name: str, seconds: float) -> list[str]:
        """The topics for which this process is to answer where one of many does.

        name: the process's. Who asks first has a topic for so many seconds, and again with each
            call
        """
        names = list(topics)
        if not names:
            return []
        keys = [self._keys.speaker(one) for one in names]
        call = ScriptCall(load("elect"), keys, (name, int(seconds * 1000)), lambda raw: raw[1::2])
        answers = self._runner.run(call)
        return [one for one, mine in zip(names, answers, strict=True) if mine]


# -- what a center tells whoever keeps a record of its messages elsewhere: the task library


class TaskLibrary(Protocol):
    """What can be asked of the record, and done to what is found there."""

    def find(
        self,
        *,
        biz_type: str | None = None,
        biz_id: str | None = None,
        status: str | Collection[str] | None = None,
        task: str | None = None,
        attributes: Mapping[str, object] | None = None,
        between: tuple[float | None, float | None] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> kept.RecordPage:
        """Records, in the order of their action times.

        biz_type, biz_id: as they were sent: :func:`celery_toc.biz`
        status: one of :data:`kombu_toc.STATUSES`, or several; all unless given
        task: the name of a task
        attributes: of the user's own, all of which it has
        between: the first and the last action time, seconds since the epoch; None: without a bound
        limit: how many at most
        after: where the page before has ended: its `after`

        Raises LibraryError.
        """

    def retry(
        self,
        *,
        status: str | Collection[str] = kept.FAILURES,
        limit: int | None = None,
        on_progress: OnProgress = tell_nobody,
        **which: Any,
    ) -> FailuresRetried:
        """Send again what has failed or is dead, and is found by these filters: each once, however
        often and by however many this is called, as :meth:`.failures.Failures.retry` does. A
        worker puts it within a second or so.

        status: ``failed``, ``dead``, or both
        limit: how many at most
        on_progress: called after each some hundred
        which: as of :meth:`find`: biz_type, biz_id, task, attributes, between

        Raises LibraryError.
        """

    def rebuild(self, on_progress: OnProgress = tell_nobody) -> kept.Rebuilt:
        """Put back into Redis what is pending and is not there, the soonest first.

        Workers may run meanwhile, and others send. It may be killed and repeated at any time: what
        is there is not put twice.

        on_progress: called after each some thousand rows

        Raises LibraryError.
        """

    def check(self, *, fix: bool = False) -> list[kept.Disagreement]:
        """Compare all that is pending with what is in Redis; return what does not agree.

        fix: mend it: a message that is missing is put, one without a row gets one, and one that
            waits although it has ended is deleted

        The queues may be in use meanwhile. Raises LibraryError.
        """

    def create(self) -> list[str]:
        """Make the tables of databases that have none; return the URLs of these, without their
        passwords. Raises LibraryError."""

    def upgrade(self) -> list[str]:
        """Bring older tables up to date; return the URLs of these databases. Raises
        LibraryError."""

    def reshard(self, on_progress: OnProgress = tell_nobody) -> kept.LibraryResharded:
        """Move all rows from the layout that ``toc_library_before`` names to that of
        ``toc_library``, while the library is used. It may be killed and repeated at any time.

        on_progress: called after each some hundred rows

        Raises LibraryError if a database is away, or if there is nothing to be moved.
        """

    def prune(self, days: float) -> int:
        """Drop what history has of earlier days than so many; return how many days were dropped,
        of each table. Raises LibraryError."""

    def status(self) -> list[kept.LibraryStatus]:
        """The state of each database. It raises nothing."""

    def counts(self) -> dict[str, int]:
        """How many rows have each status; of these, ``not put`` are not in Redis as far as is
        known. Raises LibraryError."""

    def history(self, id: str) -> list[kept.Record]:
        """Everything that is known of a task, the oldest first: one record for each message, such
        as those of its retries. Raises LibraryError."""

    def cancel(self, *, biz_id: str, biz_type: str | None = None) -> list[Cancelled]:
        """Cancel what is pending of a business id, as :meth:`TimeoutCenter.cancel` does; return
        what there was. Raises LibraryError."""

    def reschedule(
        self,
        *,
        biz_id: str,
        biz_type: str | None = None,
        at: float | None = None,
        delay: float | None = None,
    ) -> list[Rescheduled]:
        """Give what is pending of a business id another action time, as
        :meth:`TimeoutCenter.reschedule` does; return what there was. Raises LibraryError."""


class Far(Protocol):
    """What is too far ahead to be in Redis (``x-horizon``). It is asked, and told what to do,
    before Redis is: what it has no more is in Redis from then on.

    ids: of messages, or what was found: just these, as far as they are there
    topic: where ids are looked for; None: everywhere
    """

    def get(self, ids: Sequence[str], topic: str | None) -> list[Found]:
        """What there is of these ids."""

    def read(
        self,
        topic: Topic,
        after: tuple[int, bytes],
        since_us: int | None,
        until_us: int | None,
        step: int,
    ) -> Iterator[tuple[Found, Position]]:
        """What there is of a topic, in the order of time.

        after: score and id of the position behind which it begins
        step: how many are read together at first
        """

    def count(self, topic: str, limit: int | None = None, until_us: int | None = None) -> int:
        """How many there are of a topic; about `limit` are counted at most.

        until_us: only what is due by then, in microseconds since the epoch
        """

    def cancel(
        self, ids: Sequence[str | Found], topic: str | None, revoked: bool
    ) -> list[Cancelled]:
        """Cancel what there is of these; return that."""

    def reschedule(
        self, ids: Sequence[str | Found], topic: str | None, at_us: int | None, delay_us: int | None
    ) -> list[Rescheduled]:
        """Give what there is of these another time: what is within the horizon then is put into
        Redis. Returns what there was."""

    def purge(self, topic: str) -> int:
        """Cancel what there is of a topic; return how many."""


class FailedRows(Protocol):
    """What has failed, was not sent again, and was not forgotten. Raises LibraryError."""

    def latest(
        self, topic: str | None, since_us: int, until_us: int, after: FailedTask | None, limit: int
    ) -> list[FailedTask]:
        """The latest first, without their messages.

        after: the one behind which it begins
        """

    def of_ids(self, ids: Iterable[str], known: Iterable[FailedTask] = ()) -> list[FailedTask]:
        """The failures of these ids, the oldest first, with their messages.

        known: as :meth:`latest` has found some of them: these are looked for there only
        """

    def send_again(self, failed: Sequence[FailedTask]) -> FailuresRetried:
        """Send these again, as far as nobody has done it. A worker puts them."""

    def forget(self, failed: Sequence[FailedTask]) -> None:
        """Keep these in history only, without their messages."""


class Recorder(Protocol):
    """Keeps a record. It is told what was done, after Redis has done it."""

    @property
    def far(self) -> Far:
        """What is too far ahead to be in Redis."""

    @property
    def library(self) -> TaskLibrary:
        """What can be asked of it."""

    @property
    def failures(self) -> FailedRows:
        """What has failed."""

    def putting(self, topic: Topic, requests: Sequence[PutRequest]) -> Sequence[Any]:
        """Messages are about to be put: write their rows. Raises LibraryError: then they are not
        put. Returns what :meth:`withdraw` and :meth:`not_put` take, for each; nothing at all for a
        topic that goes away by itself."""

    def keep_far(self, topic: Topic, requests: Sequence[PutRequest]) -> set[int]:
        """Keep what is further ahead than the topic's horizon, or belongs to a transaction of the
        caller's: it is not put now. Returns the places of these. Raises LibraryError."""

    def withdraw(self, rows: Sequence[Any]) -> None:
        """Messages were not put: what :meth:`putting` has returned for them goes, if it was new."""

    def not_put(self, rows: Sequence[Any]) -> None:
        """Redis did not answer: these messages follow when it does, unless they are there."""

    def named(self, topic: Topic, request: PutRequest) -> PutRequest:
        """A message that is about to be put, with a name that its record is known by."""

    def repeated(self, rows: Sequence[Any]) -> None:
        """Messages had been put before, by the same put."""

    def replace_far(self, topic: Topic, request: PutRequest) -> Put | None:
        """Give body and time of a message to the newest one of its id, if that is too far ahead to
        be in Redis; None if it is not. Raises LibraryError, and MessageError if that has another
        slot basis."""

    def replaced(self, rows: Sequence[Any]) -> None:
        """Messages have taken the places of others, and have their ids."""

    def delivered(self, messages: Sequence[Delivery]) -> Sequence[Delivery]:
        """Messages were delivered. Returns those that have ended before, and are to be
        acknowledged and not handled."""

    def told(self, messages: Sequence[Delivery], state: str | None, error: str = "") -> None:
        """What has become of deliveries.

        state: they wait again, are still in flight, or are dead; None: they were acknowledged
        """

    def cancelled(
        self,
        ids: Sequence[str],
        found: Sequence[Cancelled],
        topic: str | None,
        revoked: bool = False,
    ) -> list[Cancelled]:
        """Messages were cancelled by their ids.

        found: what there was in Redis
        topic: where they were looked for; None: everywhere
        revoked: whether they were revoked

        Returns what there was in the record only, and is cancelled now.
        """

    def deleted(self, found: Sequence[Cancelled], revoked: bool = False) -> None:
        """Just these messages were cancelled, or revoked."""

    def rescheduled(
        self,
        ids: Sequence[str],
        moved: Sequence[Rescheduled],
        topic: str | None,
        at_us: int | None,
        delay_us: int | None,
    ) -> list[Rescheduled]:
        """Messages have another time, by their ids.

        moved: what there was in Redis
        topic: where they were looked for; None: everywhere
        at_us, delay_us: the time; neither: now

        Returns what there was in the record only, and has that time now.
        """

    def moved(self, moved: Sequence[Rescheduled], found: Sequence[Found]) -> None:
        """Just these messages have another time, of those that were found."""

    def scheduled(self, topic: str, change: ScheduleChange, at_us: int) -> None:
        """A schedule was changed; at_us: when, by the server's clock. It waits for nobody."""

    def altered(self, before: Topic, after: Topic) -> None:
        """Limits of a topic were altered while it is in use. Raises LibraryError."""

    def paused(self, topic: str, paused: bool) -> None:
        """A topic was paused, or goes on. Raises LibraryError."""

    def forgotten(self, topic: str) -> None:
        """A topic was deleted, with its schedules and its dead letters."""

    def purged_dead(self, named: Sequence[tuple[str, str]]) -> None:
        """Dead letters were deleted; named: topic and id of each."""

    def requeuing(self, found: Sequence[Found]) -> None:
        """Dead letters are about to wait again. Raises LibraryError: then they stay dead."""

    def requeued(self, named: Sequence[tuple[str, str]]) -> None:
        """Dead letters wait again; named: as before."""

    def purged(self, topic: str) -> None:
        """What waited in a topic was deleted."""


def started(run: Callable[..., object], name: str, *args: Any) -> threading.Thread:
    """A thread that runs this, and for which the process does not wait at its end. Raises
    RuntimeError if there can be none just now: remember it only when this has returned, so that
    the next attempt starts one."""
    thread = threading.Thread(target=run, name=name, args=args, daemon=True)
    thread.start()
    return thread
