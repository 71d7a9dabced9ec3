"""What the task library does without Celery; prints what it measured as JSON.

Arguments: what, the broker's URL, the library's URL, and numbers.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import kombu_toc

#: Messages in one list of put_many, and rows that are written together.
TOGETHER = 10_000

#: Searches by business id, publishes and ends that are timed at each size.
SAMPLES = 300


def create(center: Any, _: str) -> dict[str, float]:
    """Make the tables."""
    return {"made": float(len(center.library.create()))}


def put_many(center: Any, _: str, number: int) -> dict[str, float]:
    """Messages a second that are put by lists, each with a row."""
    begin = time.time() + 86_400
    messages = [
        {"id": str(uuid.uuid4()), "body": b"%0200d" % n, "at": begin + n * 7919 % 3600}
        for n in range(number)
    ]
    center.put_many("warm-up", messages[:100])
    before = center.library.counts().get("pending", 0)
    began = time.perf_counter()
    for start in range(0, number, TOGETHER):
        center.put_many("many", messages[start : start + TOGETHER])
    took = time.perf_counter() - began
    if center.library.counts().get("pending", 0) - before < number:
        return {}  # it writes no rows: nothing to compare
    return {"put_many": number / took}


def _rows(number: int, first: int = 0) -> list[Any]:
    """Rows of tasks that are due over an hour, in no order."""
    from kombu_toc.library.records import Row, now_us

    now = now_us()
    return [
        Row(
            *(str(uuid.uuid4()), f"{n:011x}", "celery", 0),
            *(now + 86_400_000_000 + n * 7919 % 3600 * 1_000_000 + n, "bench.tick", "order"),
            *(str(n), 0, None, None, now, now, 0, 0, None, "", os.urandom(160)),
        )
        for n in range(first, first + number)
    ]


def _store(url: str) -> Any:
    from kombu_toc.client.databases import read_databases
    from kombu_toc.library.shards import Shards
    from kombu_toc.library.store import Store

    return Store(Shards(read_databases("toc_library", [url]), 1, 600.0))


def settle(center: Any, _: str, number: int) -> dict[str, float]:
    """Return when it is written that so many tasks are done, and nothing else is to be written."""
    while center.library.counts().get("done", 0) < number or any(
        one.entries for one in center.unwritten()
    ):
        time.sleep(0.3)  # the worker writes it, in its own time
    return {}


def rebuild(center: Any, url: str, number: int) -> dict[str, float]:
    """Rows a second that are put into an empty Redis."""
    store = _store(url)
    for start in range(0, number, TOGETHER):
        store.insert(_rows(min(TOGETHER, number - start), start))
    began = time.perf_counter()
    done = center.library.rebuild()
    took = time.perf_counter() - began
    assert done.put == number, done
    return {"rebuild": number / took}


def growth(center: Any, url: str, *sizes: int) -> dict[str, float]:
    """What a search by business id, a row more and an end cost, with the first number of rows and
    with the last; bytes of the database for each row."""
    store = _store(url)
    found: dict[str, float] = {}
    there = 0
    for size in sizes:
        _fill(store, there, size - there)
        there = size
        where = "small" if size == sizes[0] else "large"
        found[f"find_{where}"] = 1000 * _median(
            lambda n: center.library.find(biz_type="order", biz_id=str(n)), there
        )
        rows = _rows(SAMPLES, 10**12 + there)  # others than those that are searched for
        found[f"insert_{where}"] = 1000 * _each(lambda row: store.insert([row]), rows)
        found[f"ended_{where}"] = 1e6 * _ended(store, rows)
    found["rows"] = float(there)
    found["bytes"] = _size(store) / there
    return found


def _fill(store: Any, first: int, number: int) -> None:
    """Rows that the database makes itself: to send ten million takes long."""
    database = store.shards.databases[0]
    if database.dialect.name != "postgresql":
        for start in range(first, first + number, TOGETHER):
            store.insert(_rows(min(TOGETHER, first + number - start), start))
        return
    from sqlalchemy import text
    from sqlalchemy.schema import AddConstraint, CreateIndex

    def run(statement: Any) -> None:
        def work(connection: Any) -> None:
            connection.exec_driver_sql("SET maintenance_work_mem = '1GB'")
            connection.execute(text(statement) if isinstance(statement, str) else statement)

        database.run_single(work)

    pending = store.shards.all[0].tables.pending
    indexes = sorted(pending.indexes, key=lambda index: str(index.name))
    columns = "id, token, topic, status, action_us, task, biz_type, biz_id, attempts, worker, error"
    columns += ", created_us, modified_us, place, priority, basis, traits, body"
    # All at once is faster than row by row.
    run(f"ALTER TABLE {pending.name} DROP CONSTRAINT {pending.name}_pkey")
    for index in indexes:
        run(f"DROP INDEX {index.name}")
    now = time.time_ns() // 1000
    for start in range(first, first + number, 1_000_000):
        end = min(first + number, start + 1_000_000)
        run(
            f"INSERT INTO {pending.name} ({columns}) SELECT gen_random_uuid()::text, "
            f"to_hex(n), 'celery', 0, {now + 86_400_000_000} + (n * 7919 % 3600) * 1000000 + n, "
            f"'bench.tick', 'order', n::text, 0, NULL, NULL, {now}, {now}, 0, 0, NULL, '', "
            "decode(repeat(md5(n::text), 10), 'hex') "
            f"FROM generate_series({start}::bigint, {end - 1}) AS n"
        )
    run(AddConstraint(pending.primary_key))
    for index in indexes:
        run(CreateIndex(index))
    run(f"VACUUM ANALYZE {pending.name}")


def _size(store: Any) -> float:
    from sqlalchemy import text

    database = store.shards.databases[0]
    if database.dialect.name == "postgresql":
        return float(
            database.read(text("SELECT pg_database_size(current_database()) AS b"))[0]["b"]
        )
    return float("nan")


def _median(ask: Callable[[int], Any], there: int) -> float:
    """Seconds that a search takes, over this process's own work and the way."""
    times = []
    for n in range(SAMPLES):
        began = time.perf_counter()
        page = ask(n * 7919 % there)
        times.append(time.perf_counter() - began)
        assert len(page.records) == 1
    return sorted(times)[len(times) // 2]


def _each(do: Callable[[Any], Any], items: list[Any]) -> float:
    began = time.perf_counter()
    for one in items:
        do(one)
    return (time.perf_counter() - began) / len(items)


def _ended(store: Any, rows: list[Any]) -> float:
    """Seconds that it takes to write that one of these has ended, all of them at once."""
    from kombu_toc.library.records import Event, now_us

    events = [Event(row.key, 2, now_us(), 1, "bench:1", "", ({}, 0)) for row in rows]
    store.record(events[:1])
    began = time.perf_counter()
    store.record(events[1:])
    return (time.perf_counter() - began) / (len(events) - 1)


if __name__ == "__main__":
    what, broker, library, *numbers = sys.argv[1:]
    opened = kombu_toc.center_for(broker, toc_library=library, toc_library_timeout=600)
    does = (create, put_many, settle, rebuild, growth)
    do = {one.__name__: one for one in does}[what]
    print(json.dumps(do(opened, library, *map(int, numbers))))
