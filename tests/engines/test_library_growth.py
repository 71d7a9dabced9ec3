"""What is asked of the task library reads no more of it when it has grown."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from kombu_toc import LibraryError, center_for
from kombu_toc.library import guard, outcomes, rebuild, statuses
from kombu_toc.library import store as store_module
from kombu_toc.library.horizon import FarStore
from kombu_toc.library.keeper import Keeper
from kombu_toc.library.putting import DeadLetters
from kombu_toc.library.records import Event, Row, now_us
from kombu_toc.library.shards import Database
from kombu_toc.library.store import Store

from ..support.cases import night

pytestmark = [pytest.mark.one_server, pytest.mark.usefixtures("client")]

#: Rows of each kind before and after.
FEW, MANY = 300, 3000

#: When the first of them is due; all of one kind at the same moment.
BEGIN = now_us() + 86_400_000_000
SAME = BEGIN + 10**12


def rows_of(first: int, last: int) -> list[Row]:
    now = now_us()

    def row(name: str, n: int, at: int, place: int = statuses.IN_REDIS) -> Row:
        return Row(
            *(f"{n:05}-{name}", "t", "mail", statuses.PENDING, at, "remind", "order", f"{name}{n}"),
            *(0, None, None, now, now, place, 0, None, "", b"body"),
        )

    found = []
    for n in range(first, last):
        found.append(row("soon", n, BEGIN + n * 1000))
        found.append(row("same", n, SAME))
        found.append(row("far", n, BEGIN + n * 1000, statuses.FAR))
    return found


def ends_of(first: int, last: int) -> list[Event]:
    """Of a hundred, one is dead."""
    return [
        Event(
            (f"{n:05}-end", "t", "mail"),
            statuses.DEAD if n % 100 == 0 else statuses.DONE,
            *(
                now_us(),
                1,
                "",
                "",
                (
                    {"task": "remind", "x-biz-type": "order", "x-biz-id": f"end{n}"},
                    BEGIN - n * 1000,
                ),
            ),
        )
        for n in range(first, last)
    ]


class Reading:
    """How much of the database statements read."""

    def __init__(self, store: Store) -> None:
        self._database = store.shards.databases[0]
        self._asked: list[tuple[str, Any]] = []
        self._thread = threading.get_ident()

    def of(self, do: Callable[[], object]) -> int:
        self._asked.clear()
        # Of all engines: what may take long has one of its own.
        event.listen(Engine, "before_cursor_execute", self._note)
        try:
            do()
        finally:
            event.remove(Engine, "before_cursor_execute", self._note)
        asked = [one for one in self._asked if "toc_pending" in one[0] or "toc_history" in one[0]]
        assert asked
        return self.of_statements(asked)

    def of_statements(self, asked: list[tuple[str, Any]]) -> int:
        """asked: statements with their values"""
        kind = self._database.dialect.name
        count = {"sqlite": self._steps, "postgresql": self._plan, "mysql": self._handler}[kind]
        with self._database._single.connect() as connection:
            return sum(count(connection, *one) for one in asked)

    def _note(self, _: Any, __: Any, statement: str, values: Any, *___: Any) -> None:
        if statement.startswith("SELECT") and threading.get_ident() == self._thread:
            self._asked.append((statement, values))

    @staticmethod
    def _steps(connection: Any, statement: str, values: Any) -> int:
        """Steps of SQLite's machine."""
        steps = 0

        def step() -> int:
            nonlocal steps
            steps += 1
            return 0

        raw = connection.connection.dbapi_connection
        raw.set_progress_handler(step, 1)
        connection.exec_driver_sql(statement, values).all()
        raw.set_progress_handler(None, 1)
        return steps

    @staticmethod
    def _plan(connection: Any, statement: str, values: Any) -> int:
        """Rows that PostgreSQL reads of tables and indexes."""

        def rows(node: dict[str, Any]) -> float:
            own = 0.0
            if "Scan" in node["Node Type"] and "Relation Name" in node:
                dropped = ("Rows Removed by Filter", "Rows Removed by Index Recheck")
                each = node["Actual Rows"] + sum(node.get(name, 0) for name in dropped)
                own = each * node["Actual Loops"]
            return own + sum(map(rows, node.get("Plans", ())))

        explain = f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}"
        [plan] = connection.exec_driver_sql(explain, values).scalar()
        return round(rows(plan["Plan"]))

    @staticmethod
    def _handler(connection: Any, statement: str, values: Any) -> int:
        """Rows that MariaDB reads."""
        connection.exec_driver_sql("FLUSH STATUS")
        connection.exec_driver_sql(statement, values).all()
        read = connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'").all()
        return sum(int(number) for _, number in read)


def searches(store: Store, library: Any, last: int) -> dict[str, Callable[[], object]]:
    """What is asked, by name; of the last rows there are."""
    [shard] = store.shards.all
    before = last - 20
    far = FarStore(store)
    overdue = shard.tables.pending.c.action_us <= BEGIN

    def page(place: int, *which: Any, **behind: Any) -> list[Row]:
        return next(store.pages(shard, place, *which, size=5, **behind), [])

    keys = [(f"{n:05}-end", "t", "mail") for n in range(before, last)]
    since = BEGIN / 1e6 - 3 * 86_400
    return {
        "by business id": lambda: library.find(biz_id=f"soon{before}"),
        "by business id, ended": lambda: library.find(biz_id=f"end{before}", biz_type="order"),
        "the soonest": lambda: library.find(status="pending", limit=5),
        "by time": lambda: library.find(between=(BEGIN / 1e6 + before / 1000, None), limit=5),
        "all": lambda: library.find(limit=5),
        "dead": lambda: library.find(status="dead", limit=2),
        "dead, of a task": lambda: library.find(status="dead", task="remind", limit=2),
        "of a type": lambda: library.find(biz_type="order", limit=5),
        "of a type, done": lambda: library.find(biz_type="order", status="done", limit=5),
        "done, by time": lambda: library.find(status="done", between=(since, None), limit=5),
        "history": lambda: library.history(f"{before:05}-end"),
        "what is overdue": lambda: page(statuses.IN_REDIS, overdue),
        "the next page": lambda: page(statuses.IN_REDIS, after=(BEGIN, "00000-soon", "t", "mail")),
        "the next page, of many that are due at once": lambda: page(
            statuses.IN_REDIS, after=(SAME, f"{before:05}-same", "t", "mail")
        ),
        "the next page of a search, of these": lambda: library.find(
            status="pending",
            limit=5,
            after=json.dumps([SAME, f"{before:05}-same", "t", "mail", 1 << 31]),
        ),
        "what is not put": lambda: page(statuses.NOT_PUT),
        "what is to be loaded": lambda: far.ahead(shard, "mail", 0, BEGIN + 3000, 5),
        "what is far ahead": lambda: list(far.read("mail", (0, "", ""), None, BEGIN + 3000, 5)),
        "a queue, for a purge": lambda: _expect(4, list(store.of_topic("small", now_us()))),
        "a queue without rows": lambda: _expect(0, list(store.of_topic("empty", now_us()))),
        "dead letters of a queue": lambda: DeadLetters(store).forget("empty"),
        "rows": lambda: store.of_ids([key[0] for key in keys]),
        "what has ended": lambda: guard.ends_of(store, [key[0] for key in keys]),
    }


def _expect(number: int, pages: list[list[Row]]) -> None:
    assert sum(map(len, pages)) == number


def fill(store: Store, first: int, last: int) -> None:
    rows = rows_of(first, last)
    store.insert(rows)
    dead = {"status": statuses.DEAD, "place": statuses.IN_DEAD_QUEUE, "token": "d"}
    store.insert([row._replace(**dead) for row in rows[::3]])
    small = [row._replace(topic="small", token="s") for row in rows_of(0, 2)]
    small[1] = small[1]._replace(place=statuses.NOT_PUT)
    store.insert(small)
    store.record(ends_of(first, last))
    kind = store.shards.databases[0].dialect.name
    for table in store.shards.all[0].tables:
        store.shards.databases[0].execute(
            text(f"ANALYZE {'TABLE ' * (kind == 'mysql')}{table.name}")
        )


@pytest.mark.every_engine
def test_what_is_asked_reads_no_more_of_a_library_that_has_grown(server, new_url):
    center = center_for(server.toc_url, toc_library=new_url())
    center.library.create()
    store = center.recorder.recorder.store
    reading, read = Reading(store), {}
    fill(store, 0, FEW)
    for name, ask in searches(store, center.library, FEW).items():
        read[name] = [reading.of(ask)]
    fill(store, FEW, MANY)
    for name, ask in searches(store, center.library, MANY).items():
        read[name].append(reading.of(ask))
    grown = {name: pair for name, pair in read.items() if pair[1] > 2 * pair[0] + 100}
    assert grown == {}


@pytest.mark.every_engine
@pytest.mark.parametrize("limits", [(2,), night((1, 3, 5))], ids=str)
def test_pages_of_a_search_have_every_record_once(store, limits, recorded):
    """Whatever is due at once, in whatever place and with whatever end, on whatever day."""
    now, day = now_us(), 86_400_000_000
    rows = rows_of(0, 4)
    rows += [rows[0]._replace(topic="other"), rows[1]._replace(token="u", action_us=SAME)]
    store.insert(rows)
    # One message ended twice, on two days, and waits again.
    keys = [("00001-same", "t", "mail"), ("gone", "t", "mail"), ("dead", "t", "mail")]
    for key, status, ago in (
        *((keys[0], statuses.DONE, 2), (keys[0], statuses.DONE, 1), (keys[1], statuses.DONE, 0)),
        *((keys[1], statuses.CANCELLED, 3), (keys[2], statuses.DEAD, 0)),
    ):
        store.record([Event(key, status, now - ago * day, 1, "", "", ({}, SAME), False)])
    store.insert([rows[4]])  # 00001-same, which an end has taken away
    store.insert([rows[0]._replace(id="dead", status=statuses.DEAD, place=statuses.IN_DEAD_QUEUE)])
    library = recorded.library
    ends = ["done", "cancelled", "done"]
    for wanted, number in (
        *((None, 19), ("pending", 14), ("done", 3)),
        *((["pending", "dead"], 15), (ends, 4)),
    ):
        every = library.find(status=wanted, limit=100)
        assert (len(every.records), every.after) == (number, None)
        for limit in limits:
            found, after = [], None
            while True:
                page = library.find(status=wanted, limit=limit, after=after)
                found += page.records
                after = page.after
                if after is None:
                    break
                assert len(page.records) == limit
            assert found == every.records, (wanted, limit)


@pytest.mark.every_engine
def test_rows_that_are_due_at_once_are_read_page_by_page(store):
    rows = [row for row in rows_of(0, 40) if row.id.endswith("same")]
    store.insert(rows)
    for shard in store.shards.all:
        here = sorted(row.key for row in rows if store.shards.of(row.id) is shard)
        pages = list(store.pages(shard, statuses.IN_REDIS, size=3))
        assert max(map(len, pages)) <= 3
        assert [row.key for page in pages for row in page] == here


@pytest.mark.every_engine
def test_a_queue_is_read_page_by_page(store, monkeypatch):
    """In whatever state its messages are, and although rows disappear meanwhile."""
    monkeypatch.setattr(store_module, "CHUNK", 3)
    changes = (
        *({}, {"place": statuses.NOT_PUT}, {"status": statuses.TAKEN}),
        *({"topic": "other"}, {"created_us": now_us() + 10**9}),
    )
    rows = [
        row._replace(token=f"t{number}", **change)
        for number, change in enumerate(changes)
        for row in rows_of(0, 12)
    ]
    store.insert(rows)
    wanted = [row for row in rows if row.place != statuses.FAR and row.token in ("t0", "t1", "t2")]
    pages = list(store.of_topic("mail", now_us()))
    assert max(map(len, pages)) <= 3
    assert sorted(row for page in pages for row in page) == sorted(wanted)
    read = []
    for page in store.of_topic("mail", now_us()):
        read += page
        store.forget([row.key for row in page])
    assert sorted(read) == sorted(wanted)


@pytest.mark.every_engine
def test_what_is_far_ahead_at_one_moment_is_read_page_by_page(store):
    rows = [row._replace(action_us=SAME) for row in rows_of(0, 40) if row.place == statuses.FAR]
    store.insert(rows)
    far, ids = FarStore(store), sorted(row.id for row in rows)
    assert [row.id for row in far.read("mail", (0, "", ""), None, None, 3)] == ids
    assert [row.id for row in far.read("mail", (SAME, ids[7], "t"), None, None, 3)] == ids[8:]
    assert [row.id for row in far.read("mail", (SAME, ids[7], "t"), SAME + 1, None, 3)] == []
    assert [row.id for row in far.read("mail", (0, "", ""), SAME, SAME + 1, 3)] == ids


def test_a_rebuild_waits_for_no_count(store, monkeypatch, recorded):
    """It may take minutes, or fail: then an estimate is missing."""
    store.insert([row for row in rows_of(0, 20) if row.place == statuses.IN_REDIS])
    own = recorded.recorder.recorder.store
    ended, counted, seen = threading.Event(), threading.Event(), []

    def count(ends: Any) -> int:
        ended.wait(60)
        counted.set()
        return 40

    monkeypatch.setattr(own, "count_pending", count)
    monkeypatch.setattr(rebuild, "FEW", 0.01)
    done = recorded.library.rebuild(lambda *how_far: seen.append(how_far))
    assert (done.put, done.rows, done.of_rows) == (40, 40, 40)
    assert {of for _, of in seen[:-1]} == {0} and seen[-1] == (40, 40)
    ended.set()
    assert counted.wait(60)

    def fail(ends: Any) -> int:
        raise LibraryError("away")

    monkeypatch.setattr(own, "count_pending", fail)
    assert recorded.library.rebuild().rows == 40


def test_a_rebuild_that_has_ended_counts_no_more(store, monkeypatch, recorded):
    """The statement that runs ends; the next table is not asked."""
    store.insert([row for row in rows_of(0, 20) if row.place == statuses.IN_REDIS])
    monkeypatch.setattr(rebuild, "FEW", 0.01)
    monkeypatch.setattr(rebuild, "LAST", 0.01)
    goes_on, counting, read = threading.Event(), [], Database.read

    def slow(database: Database, statement: Any) -> Any:
        if threading.current_thread().name == "toc-count":
            counting.append(threading.current_thread())
            goes_on.wait(60)
        return read(database, statement)

    monkeypatch.setattr(Database, "read", slow)
    assert recorded.library.rebuild().put == 40
    goes_on.set()
    for thread in set(counting):
        thread.join()
    assert len(counting) <= 1


def test_a_rebuild_that_fails_waits_for_no_count(store, monkeypatch, recorded):
    store.insert([row for row in rows_of(0, 20) if row.place == statuses.IN_REDIS])
    monkeypatch.setattr(rebuild, "FEW", 0.01)
    monkeypatch.setattr(rebuild, "LAST", 60.0)
    ended, counted = threading.Event(), threading.Event()

    def count(ends: Any) -> None:
        ended.wait(20)
        counted.set()

    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recorded.recorder.recorder.store, "count_pending", count)
    with pytest.raises(KeyboardInterrupt):
        recorded.library.rebuild(stop)
    assert not counted.is_set()
    ended.set()
    assert counted.wait(60)


#: What keeps readers of a table waiting, and how many do: by the kind of database. SQLite has
#: neither, and its statements may take any time.
LOCKS = {
    "postgresql": (
        "LOCK TABLE toc_pending_0",
        "SELECT 1 FROM pg_locks JOIN pg_database ON pg_database.oid = database "
        "WHERE NOT granted AND datname = current_database()",
    ),
    "mysql": (
        "LOCK TABLES toc_pending_0 WRITE",
        "SELECT 1 FROM information_schema.processlist WHERE db = DATABASE() "
        "AND state LIKE 'Waiting for table%'",
    ),
}


@pytest.mark.every_engine
@pytest.mark.parametrize("asked", ["counts", "rows of a queue"])
def test_what_reads_all_rows_may_take_longer_than_a_statement(server, new_url, asked):
    center = center_for(server.toc_url, toc_library=new_url(), toc_library_timeout=0.3)
    center.library.create()
    store = center.recorder.recorder.store
    store.insert([row for row in rows_of(0, 20) if row.place == statuses.IN_REDIS])

    def ask() -> int:
        if asked == "counts":
            return center.library.counts()["pending"]
        return sum(map(len, store.of_topic("mail", now_us())))

    assert ask() == 40
    [database] = store.shards.databases
    found: list[int] = []
    asking = threading.Thread(target=lambda: found.append(ask()))
    lock, waiting = LOCKS.get(database.dialect.name, ("SELECT 1", "SELECT 1"))
    with database.patiently(60) as other, other.engine.begin() as connection:
        connection.exec_driver_sql(lock)
        asking.start()
        while not other.read(text(waiting)):
            time.sleep(0.01)
        time.sleep(1)  # longer than a statement may take
        if database.dialect.name == "mysql":
            connection.exec_driver_sql("UNLOCK TABLES")
    asking.join(60)
    assert found == [40]


@pytest.mark.every_engine
def test_a_day_of_history_is_dropped_a_little_at_a_time(store, monkeypatch, recorded):
    """Where that means to delete its rows, whoever writes meanwhile does not wait for all."""
    monkeypatch.setattr("kombu_toc.library.shards.ROWS_PER_DELETE", 2)
    now, later = now_us(), now_us() + 40 * outcomes.DAY_US
    for at in (now, later):
        store.record([one._replace(at_us=at) for one in ends_of(0, 40)])
    monkeypatch.setattr("kombu_toc.library.keeper.now_us", lambda: later)
    monkeypatch.setattr("kombu_toc.library.library.now_us", lambda: later)
    keeper = Keeper(store, recorded, "test", 30 * 86_400)
    assert store.count() == {"done": 78, "dead": 2, "not put": 0}
    dropped = recorded.library.prune(30)
    # Of each table; one that has partitions has them for the day after as well.
    assert dropped == 4 * (1 + (store.shards.databases[0].dialect.name != "sqlite"))
    assert sum(keeper.pruning()) == 0
    assert store.count() == {"done": 39, "dead": 1, "not put": 0}
    monkeypatch.setattr("kombu_toc.library.keeper.now_us", lambda: later + 40 * outcomes.DAY_US)
    assert sum(keeper.pruning()) > 0
    assert store.count() == {"not put": 0}
