"""The tables of a library: who makes them, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Consumer, Queue
from sqlalchemy import Engine, event, inspect, select

from kombu_toc import LibraryError
from kombu_toc.client.options import read_databases
from kombu_toc.library import migrate, schema
from kombu_toc.library.shards import Shards

from ..support.waiting import wait_until

pytestmark = pytest.mark.every_engine


def shards_of(url: str) -> Shards:
    return Shards(read_databases("toc_library", [url]), 1, 5.0)


def described(shards: Shards) -> dict[str, Any]:
    """The tables of a database: columns with their types, keys, and indexes."""
    seen = inspect(shards.databases[0].engine)
    found = {}
    for table in seen.get_table_names():
        if table == schema.VERSION_TABLE or table.startswith("toc_history_0_"):
            continue
        indexes = {
            one["name"]: (one["column_names"], bool(one["unique"]))
            for one in seen.get_indexes(table)
        }
        columns = [
            (one["name"], repr(one["type"]), one["nullable"]) for one in seen.get_columns(table)
        ]
        key = seen.get_pk_constraint(table)["constrained_columns"]
        found[table] = (columns, key, indexes)
    return found


def test_who_consumes_has_the_tables_made_before_it_looks_at_them_or_says_which_command_makes_them(
    server, client, new_url, caplog
):
    """A worker looks after the library at once, before anything was sent."""
    url = new_url()
    shards = shards_of(url)
    options = {"toc_library": url, "toc_library_tables": 1}

    def is_over() -> bool:
        if url.startswith("sqlite"):
            return migrate.version_of(shards.databases[0]) == schema.REVISION
        return "has no tables yet: run 'celery toc library create'" in caplog.text

    with Connection(server.toc_url, transport_options=options) as connection:
        with Consumer(connection.channel(), Queue("mail"), accept=["json"]):
            wait_until(
                is_over, 20, lambda: caplog.text
            )  # the thread that looks after it tells nobody
        if url.startswith("sqlite"):
            connection.default_channel.recorder.close()  # after its turn
            assert "no such table" not in caplog.text
    shards.close()


def test_processes_that_make_tables_at_once_follow_one_another(new_url, caplog):
    url = new_url()
    first, second = shards_of(url), shards_of(url)
    made: dict[str, list[Any]] = {}
    stands, goes_on, asks = threading.Event(), threading.Event(), threading.Event()

    def change(name: str, shards: Shards) -> None:
        made[name] = migrate.create(shards)

    def stop(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("CREATE INDEX") and not stands.is_set():
            stands.set()
            assert goes_on.wait(60)

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        # SQLite waits within the statement, the others are told that it is not their turn.
        if stands.is_set() and statement.startswith(("BEGIN", "SELECT")):
            asks.set()

    threads = [
        threading.Thread(target=change, args=("first", first)),
        threading.Thread(target=change, args=("second", second)),
    ]
    event.listen(Engine, "after_cursor_execute", stop)
    event.listen(Engine, "before_cursor_execute", note)
    try:
        threads[0].start()
        assert stands.wait(60)
        threads[1].start()
        if first.databases[0].url.is_sqlite:
            assert asks.wait(60)
        else:
            wait_until(lambda: "this one waits for it" in caplog.text, 60)
        assert "second" not in made
        goes_on.set()
        for thread in threads:
            thread.join(60)
    finally:
        goes_on.set()
        event.remove(Engine, "after_cursor_execute", stop)
        event.remove(Engine, "before_cursor_execute", note)
    assert {name: len(some) for name, some in made.items()} == {"first": 1, "second": 0}
    migrate.check(second, second.databases[0])
    third = shards_of(new_url())
    migrate.create(third)
    assert described(first) == described(third)
    for shards in (first, second, third):
        shards.close()


def test_who_cannot_ask_for_its_turn_is_told_why(engine, new_url, monkeypatch):
    if engine is None:
        return  # SQLite sees to that itself
    shards = shards_of(new_url())

    def fail(self: Any, connection: Any) -> bool:
        connection.exec_driver_sql("SELECT nobody")
        raise AssertionError

    monkeypatch.setattr(type(shards.databases[0].dialect), "take_turn", fail)
    with pytest.raises(LibraryError, match=r"cannot be used: .*nobody"):
        migrate.create(shards)
    shards.close()


def stopped_everywhere(begins: tuple[str, ...], work: Callable[[], object]) -> None:
    """Stop that after its first statement that begins so, then after its second, until it ends."""

    class Stopped(Exception): ...

    seen = stopped = 0

    def stop(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        nonlocal seen
        if statement.lstrip().startswith(begins):
            seen += 1
            if seen > stopped:
                raise Stopped

    event.listen(Engine, "after_cursor_execute", stop)
    try:
        while True:
            seen = 0
            try:
                work()
                break
            except Stopped:
                stopped += 1
    finally:
        event.remove(Engine, "after_cursor_execute", stop)
    assert stopped


def test_tables_whose_making_was_stopped_anywhere_can_be_made_again(new_url):
    shards, fresh = shards_of(new_url()), shards_of(new_url())

    stopped_everywhere(("CREATE", "INSERT", "UPDATE"), lambda: migrate.create(shards))
    migrate.check(shards, shards.databases[0])
    migrate.create(fresh)
    assert described(shards) == described(fresh)
    for one in (shards, fresh):
        [layout] = one.databases[0].read(select(schema.LAYOUT))
        assert (layout["number"], layout["of_databases"], layout["of_tables"]) == (0, 1, 1)
        one.close()
