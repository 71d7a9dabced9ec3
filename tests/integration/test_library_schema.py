"""The tables of a library: each version as its release has made it, and how one follows another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, inspect
from sqlalchemy.schema import CreateIndex, CreateTable

from kombu_toc import LibraryError, center_for
from kombu_toc.client.databases import read_databases
from kombu_toc.library import migrate, schema, statuses
from kombu_toc.library.migrations.versions import v0001_tables
from kombu_toc.library.records import Row, now_us
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
    migrate._upgrade(old, old.databases[0], "0001")
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


def test_the_tables_that_are_made_are_those_that_this_release_uses(new_url):
    made, written = shards_of(new_url()), shards_of(new_url())
    migrate.create(made)

    def write(connection: Any) -> None:
        for table in (*schema.tables(0), schema.LAYOUT, schema.TOPICS, schema.SCHEDULES):
            connection.execute(CreateTable(table))
            for index in table.indexes:
                connection.execute(CreateIndex(index))

    written.databases[0].run(write)
    assert described(made) == described(written)
    for shards in (made, written):
        shards.close()


def test_a_version_does_not_follow_the_tables_of_this_release():
    written = Path(v0001_tables.__file__).read_text()
    assert "library.schema" not in written and "library import" not in written


def test_rows_are_written_while_the_index_of_an_older_table_is_made(new_url):
    shards = shards_of(new_url())
    database = shards.databases[0]
    migrate._upgrade(shards, database, "0001")
    said: list[str] = []

    def note(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        said.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        migrate.upgrade(shards)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    made = [one for one in said if one.startswith("CREATE INDEX")]
    assert len(made) == 1
    assert ("CONCURRENTLY" in made[0]) is (database.dialect.name == "postgresql")
    assert ("LOCK=NONE" in made[0]) is (database.dialect.name == "mysql")
    shards.close()


def test_an_upgrade_that_was_stopped_can_be_repeated(new_url, monkeypatch):
    shards, fresh = shards_of(new_url()), shards_of(new_url())
    database = shards.databases[0]
    migrate._upgrade(shards, database, "0001")

    class Stopped(Exception): ...

    def stop(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("CREATE INDEX"):
            raise Stopped

    event.listen(Engine, "after_cursor_execute", stop)
    try:
        with pytest.raises(Stopped):
            migrate.upgrade(shards)
    finally:
        event.remove(Engine, "after_cursor_execute", stop)
    assert migrate.upgrade(shards) == [database]
    migrate.create(fresh)
    assert described(shards) == described(fresh)
    shards.close()
    fresh.close()
