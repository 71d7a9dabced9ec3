"""What each operation of the task library costs the database, in a library of so many rows.

Arguments: the broker's URL, the library's URL (of one table), and how many rows have not ended; as
many have. Prints as JSON what it measured: milliseconds of the operations'
statements as the driver sees them, if nothing else is said. Redis's part is not in them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kombu_toc

#: Days over which what is pending is due, and over which what is in history has ended.
DAYS = 30

#: How often each operation is timed; rows of a list, of a rebuild's part, and of a look.
SAMPLES = 100
LIST = 1000
REBUILT = LOADED = 20_000
OVERDUE = 2000

#: Rows that the database makes in one statement.
_TOGETHER = 1_000_000

DAY_US = 86_400_000_000

#: One of so many rows of history is dead, has failed, is of a rare business type, of a rare task.
DEAD_OF, FAILED_OF, RARE_OF, RARE_TASK_OF = 1000, 200, 20_000, 5000

#: A row of what has ended: its status and its task; what it is about; its attributes.
_STATUS = "CASE WHEN {0} % 1000 = 0 THEN 9 WHEN {0} % 200 = 7 THEN 8 ELSE 3 END"
_TASK = "CASE WHEN {0} % 5000 = 7 THEN 'shop.rare' ELSE 'shop.expire' END"
_TYPE = "CASE WHEN {0} % 20000 = 3 THEN 'refund' ELSE 'order' END"

_COMMON = (
    "id, token, topic, status, action_us, task, biz_type, biz_id, attempts, worker, error, "
    "created_us, modified_us"
)


def id_of(n: int) -> str:
    """The id of a pending row; of history's, it is that of -n."""
    return str(uuid.UUID(hashlib.md5(str(n).encode()).hexdigest()))


class Statements:
    """How long statements take, at the driver."""

    def __init__(self, store: Any) -> None:
        from sqlalchemy import event

        self.seconds = 0.0
        self.seen: list[tuple[str, Any]] = []
        database = store.shards.databases[0]
        for engine in (database.engine, database._single):
            event.listen(engine, "before_cursor_execute", self._before)
            event.listen(engine, "after_cursor_execute", self._after)

    def _before(self, connection: Any, *_: Any) -> None:
        connection.info["began"] = time.perf_counter()

    def _after(self, connection: Any, _: Any, statement: str, values: Any, *__: Any) -> None:
        self.seconds += time.perf_counter() - connection.info["began"]
        self.seen.append((statement, values))

    @contextmanager
    def timed(self, times: list[float]) -> Iterator[None]:
        """Add the seconds of all statements within it."""
        before = self.seconds
        self.seen.clear()
        yield
        times.append(self.seconds - before)


def fill(center: Any, store: Any, number: int) -> dict[str, float]:
    """Half of what is pending is far ahead, in a queue of its own; history has as many rows."""
    began = time.perf_counter()
    center.library.create()
    center.queues.declare("near")
    center.queues.declare("far", horizon=3600)
    for topic in ("near", "far"):
        store.declarations.note(topic, center.registry.declared(topic).declaration)
    database = store.shards.databases[0]
    {"postgresql": _fill_postgresql, "mysql": _fill_mariadb, "sqlite": _fill_sqlite}[
        database.dialect.name
    ](store, number)
    return {"fill": time.perf_counter() - began, **_size(store, 2 * number)}


def _pending_of(n: str, number: int, now: int, id: str, body: str) -> str:
    step = DAYS * DAY_US // number
    return (
        f"{id}, '0', CASE {n} % 2 WHEN 0 THEN 'near' ELSE 'far' END, 0, "
        f"{now} + {DAY_US} + {n} * {step}, 'shop.expire', 'order', CAST({n} AS text), 0, NULL, "
        f"NULL, {now}, {now}, CASE {n} % 2 WHEN 0 THEN 0 ELSE 2 END, 0, NULL, '', {body}"
    )


def _ended_of(n: str, number: int, now: int, id: str) -> str:
    # The latest end today, the first one 29 days ago.
    ago = f"{n} * {(DAYS - 1) * DAY_US // number}"
    return (
        f"({now} - {ago}) / {DAY_US}, {id}, '0', 'near', "
        f"{_STATUS.format(n)}, "
        f"{now} - {ago}, {_TASK.format(n)}, {_TYPE.format(n)}, CAST(-{n} AS text), 1, "
        f"'worker@host', NULL, {now} - {ago}, {now} - {ago}"
    )


def _fill_postgresql(store: Any, number: int) -> None:
    from sqlalchemy import text
    from sqlalchemy.schema import AddConstraint, CreateIndex

    from kombu_toc.library.schema import indexes_of

    def run(statement: Any) -> None:
        def work(connection: Any) -> None:
            connection.exec_driver_sql("SET maintenance_work_mem = '1GB'")
            connection.execute(text(statement) if isinstance(statement, str) else statement)

        store.shards.databases[0].run_single(work)

    shard = store.shards.all[0]
    now = time.time_ns() // 1000
    for day in range(DAYS):
        store.make_room(shard, {now // DAY_US - day})
    uuid_of = "CAST(CAST(md5(CAST({} AS text)) AS uuid) AS text)"
    body = "decode(repeat(md5(CAST(n AS text)), 10), 'hex')"
    # All at once is faster than row by row.
    for table in shard.tables:
        indexes = indexes_of(table, "postgresql")
        run(f"ALTER TABLE {table.name} DROP CONSTRAINT {table.name}_pkey")
        for index in indexes:
            run(f"DROP INDEX {index.name}")
        if table is shard.tables.pending:
            columns = f"{_COMMON}, place, priority, basis, traits, body"
            values = _pending_of("n", number, now, uuid_of.format("n"), body)
        else:
            columns, values = f"day, {_COMMON}", _ended_of("n", number, now, uuid_of.format("-n"))
        for start in range(1, number + 1, _TOGETHER):
            last = min(start + _TOGETHER - 1, number)
            run(
                f"INSERT INTO {table.name} ({columns}) SELECT {values} "
                f"FROM generate_series({start}::bigint, {last}) AS n"
            )
        run(AddConstraint(table.primary_key))
        for index in indexes:
            run(CreateIndex(index))
        run(f"VACUUM ANALYZE {table.name}")


def _fill_mariadb(store: Any, number: int) -> None:
    from sqlalchemy import text
    from sqlalchemy.schema import CreateIndex

    from kombu_toc.library.schema import indexes_of

    def run(statement: Any) -> None:
        def work(connection: Any) -> None:
            connection.execute(text(statement) if isinstance(statement, str) else statement)

        store.shards.databases[0].run_single(work)

    pending, history = store.shards.all[0].tables
    now = time.time_ns() // 1000
    days = [now // DAY_US - day for day in range(DAYS - 1, -1, -1)]
    parts = ", ".join(f"PARTITION d{day} VALUES LESS THAN ({day + 1})" for day in days)
    run(f"ALTER TABLE {history.name} REORGANIZE PARTITION d{days[-1]} INTO ({parts})")
    text_of = "CAST({} AS CHAR)"
    hash_of = f"MD5({text_of})"
    parts_of = ", ".join(
        f"SUBSTR({hash_of}, {start}, {size})"
        for start, size in ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))
    )
    uuid_of = f"CONCAT_WS('-', {parts_of})"
    for table in (pending, history):
        indexes = indexes_of(table, "mysql")
        for index in indexes:
            run(f"DROP INDEX {index.name} ON {table.name}")
        for start in range(1, number + 1, _TOGETHER):
            last = min(start + _TOGETHER - 1, number)
            if table is pending:
                columns = f"{_COMMON}, place, priority, basis, traits, body"
                id, body = uuid_of.format(*["seq"] * 5), f"UNHEX(REPEAT({hash_of}, 10))"
                values = _pending_of("seq", number, now, id, body.format("seq"))
            else:
                columns, id = f"day, {_COMMON}", uuid_of.format(*["-seq"] * 5)
                values = _ended_of("seq", number, now, id).replace(" / ", " DIV ")
            # In the order of the key: a row that goes between others costs a page.
            run(
                f"INSERT INTO {table.name} ({columns}) "
                f"SELECT {values.replace('AS text', 'AS CHAR')} "
                f"FROM seq_{start}_to_{last} ORDER BY {id}"
            )
        for index in indexes:
            run(CreateIndex(index))
        run(f"ANALYZE TABLE {table.name}")


def _fill_sqlite(store: Any, number: int) -> None:
    pending, history = store.shards.all[0].tables
    now = time.time_ns() // 1000

    def work(connection: Any) -> None:
        raw = connection.connection.dbapi_connection
        raw.create_function("id_of", 1, id_of, deterministic=True)
        series = (
            f"WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {number}) "
        )
        columns = f"{_COMMON}, place, priority, basis, traits, body"
        values = _pending_of("n", number, now, "id_of(n)", "randomblob(160)")
        connection.exec_driver_sql(
            f"INSERT INTO {pending.name} ({columns}) {series} SELECT {values} FROM s"
        )
        values = _ended_of("n", number, now, "id_of(-n)")
        connection.exec_driver_sql(
            f"INSERT INTO {history.name} (day, {_COMMON}) {series} SELECT {values} FROM s"
        )
        connection.exec_driver_sql("ANALYZE")

    store.shards.databases[0].run(work)


def _size(store: Any, rows: int) -> dict[str, float]:
    from sqlalchemy import text

    database = store.shards.databases[0]
    asked = {
        "postgresql": "SELECT pg_database_size(current_database()) AS bytes",
        "mysql": (
            "SELECT SUM(data_length + index_length) AS bytes FROM information_schema.tables "
            "WHERE table_schema = DATABASE()"
        ),
    }.get(database.dialect.name)
    if asked is None:
        return {}
    asked = text(asked)
    return {"bytes": float(database.read(asked)[0]["bytes"]) / rows}


def measure(center: Any, store: Any, number: int) -> dict[str, float]:
    statements = Statements(store)

    def p50(do: Callable[[int], Any], samples: int = SAMPLES) -> float:
        """Of an operation's statements; the first time, connections are made and plans."""
        times: list[float] = []
        for one in range(samples + 1):
            with statements.timed(times):
                do(one)
        return 1000 * sorted(times[1:])[samples // 2]

    def near(one: int) -> int:
        """The number of a row whose message would be in Redis; others than the soonest."""
        return number // 4 * 2 + one * 7919 % (number // 4) * 2

    library = center.library
    begin = time.time() + 2 * 86_400
    found = {
        "put": p50(lambda one: center.put("near", f"one-{one}", b"x" * 160, delay=86_400)),
        "put_many": p50(lambda one: center.put_many("near", _messages(one)), 10) / LIST,
        "find_biz": p50(lambda one: _expect(1, library.find(biz_id=str(near(one))))),
        "find_ended": p50(lambda one: _expect(1, library.find(biz_id=str(-near(one))))),
        "find_time": p50(
            lambda one: library.find(
                status="pending", between=(begin + 3600 * one, begin + 3600 * one + 600)
            )
        ),
        "find_soon": p50(lambda one: _expect(100, library.find(status="pending")), 10),
        "find_dead": p50(
            lambda one: _expect(min(100, number // DEAD_OF), library.find(status="dead")), 10
        ),
        "find_failed": p50(lambda one: _expect(100, library.find(status="failed")), 10),
        "find_failed_task": p50(
            lambda one: _expect(
                min(100, number // RARE_TASK_OF),
                library.find(status=("failed", "dead"), task="shop.rare"),
            ),
            10,
        ),
        "find_type": p50(
            lambda one: _expect(min(100, number // RARE_OF), library.find(biz_type="refund")), 10
        ),
        "find_past": p50(
            lambda one: library.find(
                status="succeeded", between=(begin - 86_400 * (5 + one % 20), begin - 86_400 * 4)
            ),
            20,
        ),
        "history": p50(lambda one: _expect(1, library.history(id_of(near(one))))),
        "history_ended": p50(lambda one: _expect(1, library.history(id_of(-near(one))))),
        "cancel": p50(lambda one: _expect(1, library.cancel(biz_id=str(near(one) + 2)))),
    }
    found["purge"] = _purge(center)
    found.update(_becoming(store, number))
    found.update(_rebuild(center, statements))
    found["load"] = _load(center, store)
    found.update(_look(center, store))
    began = time.perf_counter()
    library.counts()
    found["counts"] = 1000 * (time.perf_counter() - began)
    began = time.perf_counter()
    library.prune(DAYS - 3)
    found["prune"] = 1000 * (time.perf_counter() - began)
    return found


def _expect(number: int, page: Any) -> None:
    records = getattr(page, "records", page)
    assert len(records) == number, (number, len(records), records[:2])


def _messages(part: int) -> list[dict[str, Any]]:
    at = time.time() + 86_400
    return [{"id": f"many-{part}-{n}", "body": b"x" * 160, "at": at + n} for n in range(LIST)]


def _purge(center: Any) -> float:
    """Milliseconds of a purge of a queue that has few rows, for each row; Redis's part is in it."""
    center.queues.declare("small")
    times = []
    for _ in range(5):
        center.put_many("small", _messages(0)[:100])
        began = time.perf_counter()
        assert center.queues.purge("small") == 100
        times.append(time.perf_counter() - began)
    return 1000 * sorted(times)[2] / 100


def _becoming(store: Any, number: int) -> dict[str, float]:
    """Milliseconds to write that a message is taken, and that it is done, of 500 together."""
    from kombu_toc.library.records import Event, now_us

    found = {}
    keys = [(id_of(n), "0", "near") for n in range(number // 2 + 2, number // 2 + 10_002, 2)]
    keys = keys[: min(5000, number // 8)]
    for name, status in (("taken", 1), ("done", 2), ("succeeded", 3)):
        times = []
        for start in range(0, len(keys) - 499, 500):
            events = [
                Event(key, status, now_us(), 1, "bench:1", "", ({}, 0))
                for key in keys[start : start + 500]
            ]
            began = time.perf_counter()
            store.record(events)
            times.append(time.perf_counter() - began)
        found[name] = 1000 * sorted(times)[len(times) // 2] / 500
    return found


class _Enough(Exception):
    """As much as is measured has been put."""


def _rebuild(center: Any, statements: Statements) -> dict[str, float]:
    """Milliseconds until the first messages are back, and messages a second from then on, of the
    first ones."""
    center.client.flushall()
    seen: list[tuple[float, int]] = []

    def progress(done: Any) -> None:
        if done.put:
            seen.append((time.perf_counter(), done.put))
        if done.put >= REBUILT:
            raise _Enough

    began = time.perf_counter()
    try:
        center.library.rebuild(progress)
    except _Enough:
        pass
    (first, before), (last, put) = seen[0], seen[-1]
    rate = (put - before) / (last - first) if put > before else float("nan")
    return {"rebuild_first": 1000 * (first - began), "rebuild": rate}


def _load(center: Any, store: Any) -> float:
    """Messages a second that are loaded ahead, of the first ones."""
    from kombu_toc.library.horizon import FarStore, Loader
    from kombu_toc.library.putting import Putter

    center.queues.declare("far", horizon=3600)
    center.queues.alter("far", horizon=(DAYS + 2) * 86_400)
    loader = Loader(FarStore(store), Putter(store, center), lambda rows: None)
    began = time.perf_counter()
    while loader.loaded < REBUILT and loader.turn(time.monotonic() + 600):
        pass
    return loader.loaded / (time.perf_counter() - began)


def _look(center: Any, store: Any) -> dict[str, float]:
    """Milliseconds of a look at what is overdue and is in Redis, and of one that puts it there."""
    from kombu_toc.library.putting import Putter
    from kombu_toc.library.rebuild import Reconciler
    from kombu_toc.library.records import Row

    begin = time.time_ns() // 1000 - 3600 * 1_000_000
    rows = [
        Row(
            *(f"overdue-{n}", "0", "near", 0, begin + n, "shop.expire", None, None, 0, None, None),
            *(begin, begin, 0, 0, None, "", b"x" * 160),
        )
        for n in range(OVERDUE)
    ]
    store.insert(rows)
    putter = Putter(store, center)
    putter.put(rows)
    reconciler = Reconciler(putter)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        reconciler.look()
        times.append(time.perf_counter() - began)
    return {"look": 1000 * sorted(times)[2]}


def main(broker: str, library: str, rows: str) -> None:
    center = kombu_toc.center_for(broker, toc_library=library, toc_library_timeout=600)
    store = center.recorder.recorder.store
    print(json.dumps({**fill(center, store, int(rows)), **measure(center, store, int(rows))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
