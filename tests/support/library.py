"""Fixtures and helpers for tests of the task library: real databases of each engine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from kombu import Connection, Consumer, Producer, Queue

from kombu_toc import TimeoutCenter, center_for
from kombu_toc.client.options import read_databases
from kombu_toc.library import migrate, opening
from kombu_toc.library import statuses as statuses_of_rows
from kombu_toc.library.records import Event, Row, now_us
from kombu_toc.library.shards import Database, Shards
from kombu_toc.library.store import Store

from .databases import ENGINES, DatabaseServer


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> DatabaseServer | None:
    """A database server, which the whole run shares; None for SQLite, which needs none. conftest.py
    says which tests run on which."""
    kind = _kind(request.param)
    return kind and kind.of_the_run()


@pytest.fixture(scope="module")
def own_engine(request: pytest.FixtureRequest) -> Iterator[DatabaseServer | None]:
    """A database server for tests that stop it."""
    kind = _kind(request.param)
    made = kind and kind()
    try:
        yield made and made.start()
    finally:
        if made:
            made.stop()


def _kind(name: str) -> type[DatabaseServer] | None:
    kind = ENGINES[name]
    if kind is not None and not kind.is_there():
        pytest.skip(f"{name} is not installed")
    return kind


@pytest.fixture
def new_url(engine, tmp_path) -> Iterator[Callable[[], str]]:
    """Gives the URL of a new, empty database. What this process has opened of libraries is closed
    after the test."""
    made = iter(range(100))

    def new() -> str:
        return engine.new_url() if engine else f"sqlite:///{tmp_path / f'{next(made)}.db'}"

    yield new
    close_libraries()


@contextmanager
def shards_of(urls: Any, tables: int = 1, *, create: bool = False) -> Iterator[Shards]:
    """The databases of a library, in this block. create: whether their tables are made"""
    made = Shards(read_databases("toc_library", urls), tables, 5.0)
    if create:
        migrate.create(made)
    yield made
    made.close()


def create_tables(urls: Any, tables: int = 1) -> None:
    """Make the tables of a library in empty databases."""
    with shards_of(urls, tables, create=True):
        pass


@pytest.fixture
def library_url(new_url) -> str:
    """The URL of a database with the tables of a library."""
    url = new_url()
    create_tables([url])
    return url


def on_engines(first: str, *others: str) -> pytest.MarkDecorator:
    """Has a test run on these engines, where they are installed; by day on the first."""
    night = [pytest.param(name, marks=pytest.mark.nightly) for name in others]
    return pytest.mark.parametrize("engine", [first, *night], indirect=True, scope="session")


def statuses(library: Any, id: str) -> list[str]:
    """What has become of a task, the earliest first."""
    return [record.status for record in library.history(id)]


def close_libraries() -> None:
    """End the threads and close the connections of all task libraries that this process uses. It
    opens them again if it goes on to use them."""
    while opened := opening._opened:
        _, recorder = opened.popitem()
        recorder.close()
        recorder.store.shards.close()


@pytest.fixture
def options(engine, tmp_path) -> Iterator[dict[str, Any]]:
    """Transport options with a library of two databases with two tables each."""
    if engine is None:
        for number, template in enumerate(_templates()):
            shutil.copy(template, tmp_path / f"options{number}.db")
        urls = [f"sqlite:///{tmp_path / f'options{number}.db'}" for number in range(2)]
        yield {"toc_library": urls, "toc_library_tables": 2}
        close_libraries()
        return
    free = _migrated.setdefault(engine.port, [])
    made = free.pop() if free else Migrated([engine.new_url(), engine.new_url()])
    yield {"toc_library": list(made.urls), "toc_library_tables": 2}
    close_libraries()
    if made.clear():
        free.append(made)


@cache
def _templates() -> list[Path]:
    """Two SQLite files with the tables of a library."""
    folder = Path(tempfile.mkdtemp(dir=os.environ["TOC_TEST_RUN"]))
    create_tables([f"sqlite:///{folder / f'{number}.db'}" for number in range(2)], 2)
    return [folder / f"{number}.db" for number in range(2)]


class Migrated:
    """Two databases of a server with the tables of a library, which one test has after the other:
    to empty them takes a hundredth of what it takes to make them."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        create_tables(urls, 2)
        self._made = [self._in(url, _description) for url in urls]

    def clear(self) -> bool:
        """Make them what they were. False if that cannot be done: a test has changed their tables,
        or somebody still uses them."""
        try:
            for url, made in zip(self.urls, self._made, strict=True):
                self._in(url, partial(_empty, made))
            return [self._in(url, _description) for url in self.urls] == self._made
        except sqlalchemy.exc.OperationalError:  # a lock
            return False

    @staticmethod
    def _in(url: str, work: Callable[[Any], Any]) -> Any:
        [name] = read_databases("toc_library", [url])
        made = sqlalchemy.create_engine(name.reveal(), poolclass=sqlalchemy.NullPool)
        with made.begin() as connection:
            return work(connection)


#: What a table is, by the kind of database; of a day of history, only that it is there.
_DESCRIBED = {
    "postgresql": (
        "SELECT table_name, column_name, data_type, column_default, is_nullable "
        "FROM information_schema.columns WHERE table_schema = 'public'",
        "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
    ),
    "mysql": (
        "SELECT table_name, column_name, column_type, collation_name, is_nullable "
        "FROM information_schema.columns WHERE table_schema = DATABASE()",
        "SELECT table_name, index_name, column_name, seq_in_index, non_unique "
        "FROM information_schema.statistics WHERE table_schema = DATABASE()",
        "SELECT table_name, partition_name, partition_description FROM "
        "information_schema.partitions WHERE table_schema = DATABASE()",
    ),
}


def _described_by(connection: Any) -> tuple[str, ...]:
    return _DESCRIBED["postgresql" if connection.dialect.name == "postgresql" else "mysql"]


def _description(connection: Any) -> dict[str, Any]:
    """The tables of a database, and what is in those that are small."""
    described = [
        sorted(map(repr, connection.execute(sqlalchemy.text(statement))))
        for statement in _described_by(connection)
    ]
    rows = {
        table: sorted(map(repr, connection.execute(sqlalchemy.text(f"SELECT * FROM {table}"))))
        for table in sqlalchemy.inspect(connection).get_table_names()
    }
    return {"described": described, "rows": rows}


def _empty(made: dict[str, Any], connection: Any) -> None:
    postgresql = connection.dialect.name == "postgresql"
    run = connection.exec_driver_sql
    run("SET lock_timeout = '2s'" if postgresql else "SET lock_wait_timeout = 2")
    for table in sqlalchemy.inspect(connection).get_table_names():
        if table not in made["rows"]:
            run(f"DROP TABLE IF EXISTS {table}")  # its partitions go with it
        elif not made["rows"][table]:
            run(f"DELETE FROM {table}")
    if not postgresql:
        known = made["described"][2]
        for row in connection.execute(sqlalchemy.text(_DESCRIBED["mysql"][2])).all():
            if repr(row) not in known:
                run(f"ALTER TABLE {row[0]} DROP PARTITION {row[1]}")


#: Those that no test has, by the port of their server.
_migrated: dict[int, list[Migrated]] = {}


@pytest.fixture
def recorded(server: Any, options: dict[str, Any]) -> Iterator[TimeoutCenter]:
    """A center with that library."""
    made = center_for(server.toc_url, **options)
    yield made
    made.recorder.recorder.close()


@pytest.fixture
def store(options) -> Iterator[Store]:
    """The library's rows, seen by somebody else."""
    with shards_of(options["toc_library"], 2) as shards:
        yield Store(shards)


@pytest.fixture
def broker(server, options) -> Iterator[Connection]:
    with Connection(server.toc_url, transport_options=options) as connection:
        yield connection
        recorder = connection.default_channel.recorder
    recorder.close()


def publish(
    connection: Connection, id: str, queue: str = "mail", priority: int = 0, **headers: Any
) -> None:
    Producer(connection.default_channel).publish(
        {"n": 1},
        routing_key=queue,
        priority=priority,
        headers={"id": id, "task": "remind", **headers},
    )


def fill(connection: Connection, number: int, **how: Any) -> None:
    """Publish so many messages: order-0, order-1, ..."""
    for one in range(number):
        publish(connection, f"order-{one}", **how)


def consume(connection: Connection, number: int, act=lambda message: message.ack()) -> list[str]:
    """Take so many messages; return their ids."""
    taken: list[str] = []

    def on_message(message: Any) -> None:
        taken.append(message.headers["id"])
        act(message)

    channel = connection.channel()
    with Consumer(channel, Queue("mail"), on_message=on_message, accept=["json"]):
        while len(taken) < number:
            connection.drain_events(timeout=10)
    connection.default_channel.recorder.flush()
    return taken


def end(store: Store, row: Row, status: int = statuses_of_rows.DONE) -> None:
    """A message has ended, and whoever has had it says so."""
    store.record([Event(row.key, status, now_us(), 1, "w:1", "", ({}, 0))])


def be_old(store: Store, id: str) -> None:
    """What was noted of a row was noted a minute ago."""
    [row] = store.of_ids([id])
    store.forget([row.key])
    store.insert([row._replace(modified_us=row.modified_us - 60_000_000)])


def rebuilt(center: TimeoutCenter, *forget: TimeoutCenter) -> int:
    """Redis loses everything: how many messages its library has put back. forget: centers that are
    not to remember how `mail` was declared"""
    center.client.flushall()
    for one in forget:
        one.registry.forget("mail")
    return center.library.rebuild().put


def status_of(store: Store, id: str) -> list[str]:
    return [record.status for record in store.history(id)]


class Away:
    """Lets databases of a process seem to be away; `asked`: how often one was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.numbers: set[int] = set()
        self.asked = 0
        attempt = Database._attempt

        def fails(database: Database, *args: Any) -> Any:
            if database.number in self.numbers:
                self.asked += 1
                raise database._unusable(ConnectionError("it is away"))
            return attempt(database, *args)

        monkeypatch.setattr(Database, "_attempt", fails)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch, store: Store) -> Iterator[Away]:
    made = Away(monkeypatch)
    yield made
    made.numbers.clear()
