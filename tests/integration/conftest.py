"""Fixtures for tests of the transport: connections of Kombu's to the shared server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from kombu import Connection

from ..cluster import Cluster
from ..servers import Server


@pytest.fixture
def connect(server: Server | Cluster, client: redis.Redis) -> Iterator[Callable[..., Connection]]:
    """Connect to the shared server, which is empty; options as in broker_transport_options."""
    with contextlib.ExitStack() as stack:

        def made(**options: Any) -> Connection:
            connection = Connection(server.toc_url, transport_options=options)
            connection.connect()
            stack.callback(connection.release)
            return connection

        yield made


@pytest.fixture
def connection(connect: Callable[..., Connection]) -> Connection:
    return connect()


def drain(connection: Connection, timeout: float = 0.3) -> None:
    """Deliver whatever comes, until nothing has come for `timeout` seconds."""
    while True:
        try:
            connection.drain_events(timeout=timeout)
        except TimeoutError:
            return
