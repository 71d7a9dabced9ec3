"""The tables of a library: each version as its release has made it, and how one follows another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Consumer, Queue
from sqlalchemy import Engine, event, inspect, select, text
from sqlalchemy.schema import CreateIndex, CreateTable

from kombu_toc import LibraryError, center_for
from kombu_toc.client.databases import read_databases
from kombu_toc.library import migrate, schema, statuses
from kombu_toc.library.migrations.versions import v0001_tables
from kombu_toc.library.records import Event, Row, now_us
from kombu_toc.library.shards import Shards
from kombu_toc.library.store import Store

from ..library import engine, new_url

__all__ = ("engine", "new_url")  # fixtures

#: What 0001 has of a table of what is pending, for good: name of the index -> its columns
FIRST_INDEXES = {
    "toc_pending_0_biz": ["biz_id", "biz_type"],
    "toc_pending_0_time": ["place", "action_us", "id"],
}
FIRST_COLUMNS = (
    *("id", "token", "topic", "status", "action_us", "task", "biz_type", "biz_id", "attempts"),
    *("worker", "error", "created_us", "modified_us", "place", "priority", "basis", "traits"),
    "body",
)


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


def row(id: str, place: int) -> Row:
    at = now_us()
    return Row(
        *(id, "t", "mail", statuses.PENDING, at, "remind", None, None, 0, None, None, at, at),
        *(place, 0, None, "", b"body"),
    )


def test_tables_of_the_first_version_become_those_of_this_release(server, new_url):
    url, other = new_url(), new_url()
    old, new = shards_of(url), shards_of(other)
    migrate._change(old, old.databases[0], "0001")
    found = described(old)["toc_pending_0"]
    assert {name: columns for name, (columns, _) in found[2].items()} == FIRST_INDEXES
    assert tuple(name for name, _, _ in found[0]) == FIRST_COLUMNS
    Store(old).insert([row(f"order-{number}", number % 2) for number in range(4)])
    library = center_for(server.toc_url, toc_library=url, toc_library_tables=1).library
    with pytest.raises(LibraryError, match="run 'celery toc library upgrade'"):
        library.counts()
    assert len(library.upgrade()) == 1
    assert [one.version for one in library.status()] == [schema.REVISION]
    assert library.upgrade() == []
    assert library.counts()["pending"] == 4
    migrate.create(new)
    assert described(old) == described(new)
    for shards in (old, new):
        shards.close()


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
            deadline = time.monotonic() + 20
            while not is_over():
                assert time.monotonic() < deadline, caplog.text
                time.sleep(0.02)  # the thread that looks after it tells nobody
        if url.startswith("sqlite"):
            connection.default_channel.recorder.close()  # after its turn
            assert "no such table" not in caplog.text
    shards.close()


def test_the_tables_that_are_made_are_those_that_this_release_uses(new_url):
    made, written = shards_of(new_url()), shards_of(new_url())
    migrate.create(made)

    def write(connection: Any) -> None:
        kind = connection.dialect.name
        for table in (*schema.tables(0), schema.LAYOUT, schema.TOPICS, schema.SCHEDULES):
            connection.execute(CreateTable(table))
            for index in schema.indexes_of(table, kind):
                connection.execute(CreateIndex(index))

    written.databases[0].run(write)
    assert described(made) == described(written)
    for shards in (made, written):
        shards.close()


def test_a_version_does_not_follow_the_tables_of_this_release():
    written = Path(v0001_tables.__file__).read_text()
    assert "library.schema" not in written and "library import" not in written


def ended(id: str) -> Event:
    return Event((id, "t", "mail"), statuses.DONE, now_us(), 1, "", "", ({}, 0))


def test_rows_are_written_while_the_indexes_of_an_older_table_are_made(new_url):
    shards = shards_of(new_url())
    database = shards.databases[0]
    migrate._change(shards, database, "0001")
    Store(shards).record([ended("order-1")])  # so that history has a day
    said: list[str] = []

    def note(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        said.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        migrate.upgrade(shards)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    made = [one for one in said if one.startswith("CREATE INDEX")]
    # That of a partitioned table itself is a mere name: the days have one each, of two days here.
    of_rows = [one for one in made if " ON ONLY " not in one]
    kind = database.dialect.name
    assert len(of_rows) == {"sqlite": 4, "postgresql": 4, "mysql": 2}[kind]
    assert all(("CONCURRENTLY" in one) is (kind == "postgresql") for one in of_rows)
    assert all(("LOCK=NONE" in one) is (kind == "mysql") for one in of_rows)
    shards.close()


@pytest.mark.parametrize("what", ["create", "upgrade"])
def test_processes_that_change_tables_at_once_follow_one_another(new_url, caplog, what):
    url = new_url()
    first, second = shards_of(url), shards_of(url)
    if what == "upgrade":
        migrate._change(first, first.databases[0], "0001")
    made: dict[str, list[Any]] = {}
    stands, goes_on, asks = threading.Event(), threading.Event(), threading.Event()

    def change(name: str, shards: Shards) -> None:
        made[name] = getattr(migrate, what)(shards)

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
            until = time.monotonic() + 60
            while "this one waits for it" not in caplog.text:
                assert time.monotonic() < until
                time.sleep(0.01)
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


def test_an_upgrade_that_was_stopped_anywhere_can_be_repeated(new_url):
    shards, fresh = shards_of(new_url()), shards_of(new_url())
    database = shards.databases[0]
    migrate._change(shards, database, "0001")
    Store(shards).record([ended("order-1")])

    stopped_everywhere(("CREATE INDEX", "ALTER INDEX"), lambda: migrate.upgrade(shards))
    migrate.create(fresh)
    Store(fresh).record([ended("order-1")])
    assert described(shards) == described(fresh)
    for one in (shards, fresh):
        valid = (
            one.databases[0].dialect.name != "postgresql"
            or one.databases[0].read(text("SELECT bool_and(indisvalid) AS valid FROM pg_index"))[0][
                "valid"
            ]
        )
        assert valid
        one.close()
