"""What a worker costs the server while it has nothing to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis
from celery import Celery

from ..support.nodes import Worker
from ..support.servers import Server
from ..support.workers import POOLS, Journal, wait_until

#: Blocked on what wakes it, blocked on broadcasts, one for what is answered at once, one of the
#: heartbeat's thread, and one for Celery's own heartbeats.
CONNECTIONS = 5

#: The one process that keeps the topics up has another.
KEEPS_UP = 1


@pytest.fixture
def alone(single_server: Server) -> redis.Redis:
    """A client of the server's second database, which nobody else uses."""
    with single_server.client(3) as client:
        client.flushdb()
        yield client


def connections(client: redis.Redis) -> list[str]:
    """What the connections to its database but its own did last, and when."""
    mine, db = client.client_id(), str(client.connection_pool.connection_kwargs["db"])
    return [
        f"{one['cmd']}, idle for {one['idle']} of {one['age']} s"
        for one in client.client_list()
        if one["db"] == db and int(one["id"]) != mine
    ]


def test_an_idle_worker_keeps_five_connections(
    single_server: Server,
    alone: redis.Redis,
    start_workers: Callable[..., list[Worker]],
    journal: Journal,
) -> None:
    """X14"""
    url = single_server.toc_url.removesuffix("/0") + "/3"
    start_workers(1, *POOLS["prefork"], mingle=True, broker=url)
    wait_until(lambda: alone.exists("toc:{toc}:upkeep"))
    most = CONNECTIONS + KEEPS_UP
    wait_until(lambda: len(connections(alone)) <= most, 40, lambda: "\n".join(connections(alone)))
    # They are opened again when they are needed.
    Celery(broker=url).send_task("e2e.note", ("afterwards",))
    journal.wait_for("afterwards", 1)
