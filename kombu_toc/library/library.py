"""The library as a program uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sqlalchemy import delete, select, update

from ..center.calls import PutRequest
from ..center.center import TimeoutCenter
from ..center.runner import BROKEN
from ..errors import LibraryError
from ..model import library as model
from ..model.failures import FailuresRetried
from ..model.results import Cancelled, OnProgress, Rescheduled, tell_nobody
from ..scripts.call import Countdown
from . import migrate, search, statuses
from .outcomes import DAY_US, KEY
from .putting import write_schedules
from .rebuild import Comparison, Rebuild
from .records import Key, attributes_of, now_us, storable
from .retry import retry
from .schema import LAYOUT, LOCATOR, SCHEDULES, TOPICS
from .shards import MOVED, Database, Shard, T
from .store import Store

#: Records that are read at a time where all are meant.
PAGE = 500

#: Records of one search, and seconds (or days) from the epoch, at most: what a database counts to.
MOST = 1 << 31
SECONDS = 9e12


@dataclass(eq=False)
class Library:
    """What can be asked of the record, and done to what is found: see
    :class:`kombu_toc.center.core.TaskLibrary`."""

    store: Store
    _center: TimeoutCenter
    _another: Callable[[], TimeoutCenter]

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
    ) -> model.RecordPage:
        given = {"biz_type": biz_type, "biz_id": biz_id, "task": task}
        where: dict[str, Any] = {
            name: _text(name, value) for name, value in given.items() if value is not None
        }
        if attributes:
            try:
                where["attributes"] = attributes_of(attributes)
            except (ValueError, AttributeError) as exc:
                raise LibraryError(f"attributes={attributes!r:.80}: {exc}") from None
        if status is not None:
            where["status"] = _numbers(status)
        if not isinstance(limit, int) or limit < 1:
            raise LibraryError(f"limit must be a whole number from 1 on, not {limit!r}")
        shards, most = self.store.shards, min(limit, MOST)
        return search.find(shards, where, _bounds(between), most, after)

    def retry(
        self,
        *,
        status: str | Collection[str] = model.FAILURES,
        limit: int | None = None,
        on_progress: OnProgress = tell_nobody,
        **which: Any,
    ) -> FailuresRetried:
        names = [status] if isinstance(status, str) else status
        if not names or not set(names) <= set(model.FAILURES):
            raise LibraryError(f"only what is failed or dead is retried, not {status!r}")
        done, after, until = FailuresRetried(), None, now_us()
        while limit is None or done.number < limit:
            size = PAGE if limit is None else min(PAGE, limit - done.number)
            page = self.find(status=names, limit=size, after=after, **which)
            # What has failed again meanwhile stays.
            wrong = [one for one in page.records if one.modified_us <= until]
            self._center.failures.unlist([one for one in wrong if one.status == "failed"])
            some = retry(self.store, self._center, wrong)
            done = done.plus(some)
            on_progress(done.number + done.not_kept, limit or 0)
            after = page.after
            if after is None:
                break
        return done

    def rebuild(self, on_progress: OnProgress = tell_nobody) -> model.Rebuilt:
        return Rebuild(self.store, self._center).run(on_progress)

    def check(self, *, fix: bool = False) -> list[model.Disagreement]:
        center = self._another()  # one that records nothing
        try:
            return list(Comparison(self.store, center).run(fix=fix))
        finally:
            center.client.close()

    def create(self) -> list[str]:
        return [str(database.url) for database in migrate.create(self.store.shards)]

    def upgrade(self) -> list[str]:
        return [str(database.url) for database in migrate.upgrade(self.store.shards)]

    def reshard(self, on_progress: OnProgress = tell_nobody) -> model.LibraryResharded:
        if self.store.shards.former is None:
            raise LibraryError(
                "toc_library_before and toc_library_tables_before are to name the layout that the "
                "library has, toc_library and toc_library_tables the one that it is to get"
            )
        migrate.create(self.store.shards)
        return Reshard(self.store).run(on_progress)

    def prune(self, days: float) -> int:
        if not isinstance(days, (int, float)) or not days >= 1:
            raise LibraryError(f"days must be 1 or more, not {days!r}")
        before = (now_us() - int(min(days, SECONDS) * DAY_US)) // DAY_US
        store = self.store
        return sum(days for one in store.shards.all for days in store.pruning(one, before))

    def status(self) -> list[model.LibraryStatus]:
        found = []
        for database in self.store.shards.databases:
            version, problem = None, ""
            try:
                with database.as_it_is():
                    version = migrate.version_of(database)
                    migrate.check(self.store.shards, database)
            except LibraryError as exc:
                problem = str(exc)
            found.append(model.LibraryStatus(str(database.url), version, problem))
        return found

    def counts(self) -> dict[str, int]:
        return self.store.count()

    def history(self, id: str) -> list[model.Record]:
        return self.store.history(_text("id", id))

    def cancel(self, *, biz_id: str, biz_type: str | None = None) -> list[Cancelled]:
        return self._each_pending(biz_id, biz_type, self._center.cancel)

    def reschedule(
        self,
        *,
        biz_id: str,
        biz_type: str | None = None,
        at: float | None = None,
        delay: float | None = None,
    ) -> list[Rescheduled]:
        def change(ids: list[str], topic: str) -> list[Rescheduled]:
            moved = (self._center.reschedule(id, topic=topic, at=at, delay=delay) for id in ids)
            return [one for some in moved for one in some]

        return self._each_pending(biz_id, biz_type, change)

    def _each_pending(
        self, biz_id: str, biz_type: str | None, change: Callable[..., list[T]]
    ) -> list[T]:
        """Change what is pending, the ids of a queue together; return what that has found."""
        found: list[T] = []
        for topic, keys in self._pending(biz_id, biz_type).items():
            with self.store.locator.knowing(keys):
                found += change(list(dict.fromkeys(key[0] for key in keys)), topic=topic)
        return found

    def _pending(self, biz_id: str, biz_type: str | None) -> dict[str, list[Key]]:
        """The keys of what is pending, by queue."""
        biz_id = _text("biz_id", biz_id)  # without one, this would be everything
        found: dict[str, list[Key]] = {}
        after = None
        while True:
            page = self.find(
                biz_id=biz_id,
                biz_type=biz_type,
                status=[statuses.NAMES[number] for number in statuses.LIVE],
                limit=PAGE,
                after=after,
            )
            for record in page.records:
                key = (record.id, record.token, record.topic)
                found.setdefault(record.topic, []).append(key)
            after = page.after
            if after is None:
                return found


def _text(name: str, value: Any) -> str:
    """What a column is to be, as it is kept."""
    text = str(value)
    if value is None or isinstance(value, bytes):
        raise LibraryError(f"{name} must be a text, not {value!r}")
    if storable(text) != text:
        raise LibraryError(f"{name} {text[:80]!r} has characters that no database keeps")
    return text


def _bounds(between: Any) -> tuple[int | None, int | None]:
    """The microseconds of two times."""
    try:
        since, until = (None, None) if between is None else between
        return _us(since), _us(until)
    except (TypeError, ValueError):
        raise LibraryError(
            "between must be two times, in seconds since the epoch, either of which may be None, "
            f"not {between!r}"
        ) from None


def _us(seconds: float | None) -> int | None:
    if seconds is None:
        return None
    return round(max(min(seconds, SECONDS), -SECONDS) * 1_000_000)


def _numbers(status: Any) -> list[int]:
    names = [status] if isinstance(status, str) else status
    if not isinstance(names, Collection) or isinstance(names, bytes):
        raise LibraryError(f"status must be a name or several, not {status!r}")
    unknown = [name for name in names if name not in statuses.NUMBERS]
    if unknown:
        raise LibraryError(
            f"there is no status {unknown[0]!r}; there are {', '.join(statuses.NUMBERS)}"
        )
    return [statuses.NUMBERS[name] for name in names]


# -- redis's clock, for the rows of what is counted by it

#: Seconds after which a server is asked again.
INTERVAL = 30.0


class ServerTime:
    """What a server's clock shows, as it was asked lately. Any thread may call it.

    client: reaches the server
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._next = 0.0
        #: what it is ahead of this process's monotonic clock
        self._ahead_us: int | None = None

    def of(self, request: PutRequest) -> int | None:
        """The moment from which the time of a message counts, in microseconds since the epoch;
        None if it says its time itself, or the server does not answer."""
        at_us = request.at_us
        if at_us is not None and not (isinstance(at_us, Countdown) and at_us.at_us is None):
            return None
        now = time.monotonic()
        if now >= self._next:
            self._next = now + INTERVAL
            try:
                seconds, us = self._client.time()
                own_us = int(time.monotonic() * 1_000_000)
                self._ahead_us = int(seconds) * 1_000_000 + int(us) - own_us
            except BROKEN:
                self._ahead_us = None
        return None if self._ahead_us is None else int(now * 1_000_000) + self._ahead_us


# -- all rows are moved to another layout, while it is used

#: Rows that are looked at together.
MOVED_TOGETHER = 1000

#: How often all is looked through, as long as somebody still writes where rows do not belong.
ROUNDS = 10


class Reshard:
    """One reshard. What was moved before is found out as it goes: it can be repeated."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shards = store.shards
        self._tell: OnProgress = tell_nobody
        #: how many rows there were; were told; and were moved
        self._count = self._told = self._moved = 0

    def run(self, on_progress: OnProgress) -> model.LibraryResharded:
        """Move the rows. Raises LibraryError."""
        self._tell = on_progress
        for database in self._shards.databases:
            self._move_shared(database)
        self._count = self._count_rows()
        for _ in range(ROUNDS):
            rows, before = 0, self._moved
            for shard in self._shards.all:
                rows = self._move(shard, rows)
            if self._moved == before:
                break
        else:
            raise LibraryError(
                "there are processes that still write rows by the former layout: restart them with "
                "toc_library and toc_library_tables as they are to be, and repeat this"
            )
        for database in self._shards.databases:
            self._move_locator(database)
            self._say_layout(database)
        return model.LibraryResharded(rows, self._moved)

    def _count_rows(self) -> int:
        """How many rows there are."""
        return sum(
            patient.count(table)
            for patient, shards in self._store.patiently()
            for table in chain.from_iterable(shard.tables for shard in shards)
        )

    def _move(self, shard: Shard, rows: int) -> int:
        """Move what does not belong into a shard, and say in the locator where the rest is.

        rows: how many have been found where they belong in this round; returns how many now
        """
        for table in shard.tables:
            columns = [table.c[name] for name in KEY]
            for page in shard.database.pages(select(*columns), *columns, size=MOVED_TOGETHER):
                keys: list[Key] = [(row["id"], row["token"], row["topic"]) for row in page]
                moved = self._store.mover.bring_home(shard, keys)
                if table is shard.tables.history:
                    self._store.locator.owe(keys, now_us())
                    self._store.locator.owed.write()
                self._moved += moved
                rows += len(keys) - moved
                self._told = max(self._told, rows)
                self._tell(self._told, max(self._count, self._told))
        return rows

    def _move_shared(self, database: Database) -> None:
        """Give what a database has of queues and schedules to those that have them from now on."""
        topics = [dict(row) for row in database.read(select(TOPICS))]
        for other in self._shards.databases if topics else ():
            if other is not database:
                there = {row["name"]: row for row in other.read(select(TOPICS))}
                newer = [
                    row
                    for row in topics
                    if row["name"] not in there
                    or there[row["name"]]["modified_us"] < row["modified_us"]
                ]
                names = ("declaration", "altered", "paused", "modified_us")
                if newer:
                    other.execute(other.dialect.upsert(TOPICS, ("name",), names), newer)
        for row in database.read(select(SCHEDULES)):
            other = self._shards.of(row["name"]).database
            if other is not database:
                write_schedules(other, [((row["topic"], row["name"]), dict(row))])
                mine = (SCHEDULES.c.topic == row["topic"]) & (SCHEDULES.c.name == row["name"])
                database.execute(delete(SCHEDULES).where(mine))

    def _move_locator(self, database: Database) -> None:
        """Give what a database has of the locator to those that have it from now on."""
        id, spread = LOCATOR.c.id, LOCATOR.c.spread
        for rows in database.pages(select(LOCATOR), id, spread, size=MOVED_TOGETHER):
            gone = [row for row in rows if self._shards.of(row["id"]).database is not database]
            if gone:
                owed = self._store.locator.owed
                owed.add(((row["id"], row["spread"]), row["day"]) for row in gone)
                owed.write()
                database.execute(delete(LOCATOR).where(id.in_([row["id"] for row in gone])))

    def _say_layout(self, database: Database) -> None:
        """Have a database say what it is from now on."""
        urls = self._shards.layout.urls
        says = MOVED
        if database.url in urls:
            says = urls.index(database.url), len(urls), self._shards.layout.tables
        values = dict(zip(("number", "of_databases", "of_tables"), says, strict=True))
        database.execute(update(LAYOUT).where(LAYOUT.c.id == 1).values(**values))
