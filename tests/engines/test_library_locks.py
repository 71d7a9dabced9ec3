"""Transactions of the task library that others are in the way of: deadlocks, serialization
failures and locks that are held for long are tried again (X12)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Connection, text

from kombu_toc import LibraryError
from kombu_toc.client.options import read_databases
from kombu_toc.library import statuses
from kombu_toc.library.outcomes import DAY_US
from kombu_toc.library.records import Event, now_us
from kombu_toc.library.shards import Database, Shards, Watchdog
from kombu_toc.library.store import Store

from ..support.library import fill, status_of

pytestmark = [
    pytest.mark.usefixtures("client"),
    pytest.mark.parametrize("engine", ["postgresql", "mariadb"], indirect=True, scope="session"),
]

#: What a transaction that wants what it has read is told, by the kind of database.
STRICT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"


@pytest.fixture
def pair(broker, store) -> list[Any]:
    """Two rows of one table."""
    fill(broker, 40, **{"x-delay": 60_000})
    rows = store.of_ids([f"order-{number}" for number in range(40)])
    shard = store.shards.of("order-0")
    return [shard, *[row.key for row in rows if store.shards.of(row.id) is shard][:2]]


def together(*works: Callable[[], Any]) -> None:
    """Run these at once; raises what one of them raises."""
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result(60)


def test_transactions_that_block_each_other_are_both_done(store, pair):
    shard, *keys = pair
    table = shard.tables.pending.name
    meet = threading.Barrier(2)
    begun: list[int] = []

    def mark(first: str, then: str, number: int) -> Callable[[], None]:
        def work(connection: Connection) -> None:
            begun.append(number)
            change = text(f"UPDATE {table} SET attempts = attempts + 1 WHERE id = :id")
            connection.execute(change, {"id": first})
            if begun.count(number) == 1:
                meet.wait(10)  # each has what the other wants
            connection.execute(change, {"id": then})

        return lambda: shard.database.run(work)

    one, other = (
        id.encode() if store.shards.databases[0].dialect.name == "mysql" else id
        for id, _, _ in keys
    )
    together(mark(one, other, 1), mark(other, one, 2))
    assert len(begun) > 2  # the database ended one of them
    rows = store.of_ids([id for id, _, _ in keys])
    assert [row.attempts for row in rows] == [2, 2]


def test_a_transaction_whose_rows_were_changed_meanwhile_is_done_again(engine, store, pair):
    shard, (id, _, _), _ = pair
    if shard.database.dialect.name == "mysql":
        return  # its transactions read what is committed, and have no such failures
    table = shard.tables.pending.name
    begun = 0

    def work(connection: Connection) -> None:
        nonlocal begun
        begun += 1
        connection.execute(text(STRICT))
        read = text(f"SELECT attempts FROM {table} WHERE id = :id")
        attempts = connection.execute(read, {"id": id}).scalar()
        if begun == 1:  # another one is quicker
            engine_change = text(f"UPDATE {table} SET attempts = 7 WHERE id = '{id}'")
            shard.database.execute(engine_change)
        change = text(f"UPDATE {table} SET attempts = :n WHERE id = :id")
        connection.execute(change, {"id": id, "n": attempts + 1})

    shard.database.run(work)
    assert begun == 2
    assert [row.attempts for row in store.of_ids([id])] == [8]


def test_a_lock_that_is_held_for_a_while_is_waited_for_and_for_no_longer(store, pair):
    shard, key, _ = pair
    database = shard.database
    give_up = (
        "SET innodb_lock_wait_timeout = 1"
        if database.dialect.name == "mysql"
        else ("SET lock_timeout = 300")
    )
    table = shard.tables.pending.name
    id = key[0].encode() if database.dialect.name == "mysql" else key[0]
    change = text(f"UPDATE {table} SET attempts = attempts + 1 WHERE id = :id")
    held, free = threading.Event(), threading.Event()
    begun = 0

    def hold() -> None:
        def work(connection: Connection) -> None:
            connection.execute(change, {"id": id})
            held.set()
            assert free.wait(30)

        database.run(work)

    def wait() -> None:
        nonlocal begun

        def work(connection: Connection) -> None:
            nonlocal begun
            begun += 1
            if begun == 2:
                free.set()  # it was refused once
            connection.execute(text(give_up))
            connection.execute(change, {"id": id})

        assert held.wait(10)
        database.run(work)

    together(hold, wait)
    assert begun >= 2
    assert [row.attempts for row in store.of_ids([key[0]])] == [2]


def test_a_lock_that_is_never_given_is_told_of_in_time(store, pair):
    shard = pair[0]
    held, free = threading.Event(), threading.Event()
    told: list[float] = []
    other = Database(shard.database.number, shard.database.url, 1.0, Watchdog(1.0))

    def hold() -> None:
        def work(connection: Connection) -> None:
            table = shard.tables.pending.name
            connection.execute(text(f"UPDATE {table} SET attempts = 9"))
            held.set()
            assert free.wait(30)

        shard.database.run(work)

    def wait() -> None:
        table = shard.tables.pending.name
        assert held.wait(10)
        began = time.monotonic()
        with pytest.raises(LibraryError, match="cannot be used"):
            other.execute(text(f"UPDATE {table} SET attempts = 1"))
        told.append(time.monotonic() - began)
        free.set()

    try:
        together(hold, wait)
    finally:
        free.set()
        other.close()
    assert told[0] < 5


def test_many_processes_that_record_the_same_rows_all_succeed(store, pair, broker):
    rows = store.of_ids([f"order-{number}" for number in range(40)])

    def record(number: int) -> Callable[[], None]:
        def work() -> None:
            for turn in range(15):
                status = statuses.TAKEN if turn < 14 else statuses.DONE
                some = rows if number % 2 else rows[::-1]
                events = [
                    Event(row.key, status, now_us(), 1, f"w:{number}", "", ({}, 0)) for row in some
                ]
                store.record(events)

        return work

    together(*(record(number) for number in range(4)))
    assert store.count() == {"done": 40, "not put": 0}
    assert status_of(store, "order-3") == ["done"]


def test_many_processes_make_room_for_a_day_at_once(store, options):
    urls = read_databases("toc_library", options["toc_library"])
    processes = [Shards(urls, 2, 5.0) for _ in range(4)]
    stores = [Store(one) for one in processes]
    meet = threading.Barrier(len(stores))
    today = now_us() // DAY_US

    def make(store: Store) -> Callable[[], None]:
        def work() -> None:
            for ahead in range(10, 25):
                meet.wait(30)
                store.make_room(store.shards.all[0], {today + ahead})

        return work

    together(*map(make, stores))
    for one in processes:
        one.close()
