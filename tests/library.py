"""Fixtures and helpers for tests of the task library: real databases of each engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection, Consumer, Producer, Queue

from kombu_toc.client.databases import read_databases
from kombu_toc.library import migrate
from kombu_toc.library.shards import Shards
from kombu_toc.library.store import Store

from .databases import ENGINES, DatabaseServer


@pytest.fixture(scope="session", params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> Iterator[DatabaseServer | None]:
    """A database server; None for SQLite, which needs none."""
    kind = ENGINES[request.param]
    if kind is None:
        yield None
        return
    if not kind.is_there():
        pytest.skip(f"{request.param} is not installed")
    server = kind()
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def new_url(engine, tmp_path) -> Callable[[], str]:
    """Gives the URL of a new, empty database."""
    made = iter(range(100))

    def new() -> str:
        return engine.new_url() if engine else f"sqlite:///{tmp_path / f'{next(made)}.db'}"

    return new


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
