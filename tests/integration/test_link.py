"""A connection of its own whose replies are read later: what its end does to what is awaited."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from kombu_toc.consumer.pipe import BROKEN, PipelinedConnection
from kombu_toc.metrics.sender import Metrics

from ..proxy import Proxy
from ..servers import Server

pytestmark = pytest.mark.one_server("the proxy that cuts connections stands before one")


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.port) as made:
        yield made


def test_a_connection_that_ends_while_somebody_waits_for_it_is_found_broken_when_it_is_read(
    proxy: Proxy,
) -> None:
    """The one who waits looks into the socket, and redis-py closes it then."""
    with redis.Redis(port=proxy.port) as client:
        told: list[Any] = []
        link = PipelinedConnection(
            lambda: client.connection_pool,
            lambda fd, callback: None,
            told.append,
            told.append,
            Metrics(active=False),
        )
        failed: list[str] = []
        link.send([(("BLPOP", "nothing", "30"), None, lambda: failed.append("BLPOP"))], block=30)
        proxy.cut()
        assert link.wait(10)
        with pytest.raises(BROKEN):
            link.read()
        assert failed == ["BLPOP"]
        assert not link.busy
        link.send([(("PING",), told.append)])
        assert link.wait(10)
        link.read()
        assert told[-1] == b"PONG"
        link.close()
