"""Fixtures and helpers for tests of the task library: real databases of each engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection, Consumer, Producer, Queue

from kombu_toc.client.databases import read_databases
from kombu_toc.library import migrate, opening
from kombu_toc.library.shards import Shards
from kombu_toc.library.store import Store

from .databases import ENGINES, DatabaseServer

#: The servers that run, by engine: each test module has the fixture for itself, and all share them.
_servers: dict[str, DatabaseServer] = {}


@pytest.fixture(scope="session", params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> DatabaseServer | None:
    """A database server; None for SQLite, which needs none."""
    kind = ENGINES[request.param]
    if kind is None:
        return None
    if not kind.is_there():
        pytest.skip(f"{request.param} is not installed")
    if request.param not in _servers:
        server = _servers[request.param] = kind()
        request.config.add_cleanup(server.stop)
        server.start()
    return _servers[request.param]


@pytest.fixture
def new_url(engine, tmp_path) -> Iterator[Callable[[], str]]:
    """Gives the URL of a new, empty database. What this process has opened of libraries is closed
    after the test."""
    made = iter(range(100))

    def new() -> str:
        return engine.new_url() if engine else f"sqlite:///{tmp_path / f'{next(made)}.db'}"

    yield new
    close_libraries()


@pytest.fixture
def library_url(new_url) -> str:
    """The URL of a database with the tables of a library."""
    url = new_url()
    shards = Shards(read_databases("toc_library", [url]), 1, 5.0)
    migrate.create(shards)
    shards.close()
    return url


def on_engines(*names: str) -> pytest.MarkDecorator:
    """Has a test run on these engines, where they are installed."""
    return pytest.mark.parametrize("engine", names, indirect=True, scope="session")


def close_libraries() -> None:
    """End the threads and close the connections of all task libraries that this process uses. It
    opens them again if it goes on to use them."""
    while opening._opened:
        _, (recorder, _) = opening._opened.popitem()
        recorder.close()
        recorder.store.shards.close()


@pytest.fixture
def options(new_url) -> dict[str, Any]:
    """Transport options with a library of two databases with two tables each."""
    urls = [new_url(), new_url()]
    shards = Shards(read_databases("toc_library", urls), 2, 5.0)
    migrate.create(shards)
    shards.close()
    return {"toc_library": urls, "toc_library_tables": 2}


@pytest.fixture
def store(options) -> Iterator[Store]:
    """The library's rows, seen by somebody else."""
    shards = Shards(read_databases("toc_library", options["toc_library"]), 2, 5.0)
    yield Store(shards)
    shards.close()


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


def status_of(store: Store, id: str) -> list[str]:
    return [record.status for record in store.history(id)]
