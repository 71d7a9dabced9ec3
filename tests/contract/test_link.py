"""A connection of its own whose replies are read later: what its end does to what is awaited."""

from __future__ import annotations

import hashlib
import select
from collections.abc import Callable
from typing import Any

import pytest
import redis

from kombu_toc.consumer.connections import BROKEN, PipelinedConnection
from kombu_toc.metrics import Metrics
from kombu_toc.scripts.call import Script, ScriptCall

from ..support.proxy import Proxy
from ..support.servers import Server

pytestmark = pytest.mark.one_server("the proxy that cuts connections stands before one")


#: Notes in a list that it ran.
TEXT = "redis.call('RPUSH', KEYS[1], ARGV[1]); return 0"
NOTE = Script("note", TEXT, hashlib.sha1(TEXT.encode()).hexdigest())


def link_to(
    client: redis.Redis, on_open: Callable[[int, Any], None] = lambda fd, callback: None
) -> PipelinedConnection:
    return PipelinedConnection(
        lambda: client.connection_pool,
        on_open,
        lambda fd: None,
        lambda calls: None,
        Metrics(active=False),
    )


def test_a_script_that_the_server_does_not_know_runs_before_what_is_sent_after_it(
    server: Server, client: redis.Redis
) -> None:
    """A release that runs behind the next pop lets what comes later start first."""
    link = link_to(client)
    for _ in range(2):
        client.script_flush()
        link.close()  # as who takes over knows nothing
        link.send([(ScriptCall(NOTE, ("noted",), ("script",), int), None)])
        link.send([(("RPUSH", "noted", "command"), None)])
        link.send([(ScriptCall(NOTE, ("noted",), ("again",), int), None)])
        while link.busy:
            assert link.wait(10)
            link.read()
        assert client.lrange("noted", 0, -1) == [b"script", b"command", b"again"]
        client.delete("noted")
    link.close()


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


def test_a_reply_that_nobody_was_there_to_read_is_read_when_somebody_looks_whether_it_is_overdue(
    server: Server, client: redis.Redis
) -> None:
    """Redis-py has it in memory once it was looked for: no event loop hears of it any more."""
    opened: list[int] = []
    told: list[Any] = []
    link = link_to(client, lambda fd, callback: opened.append(fd))
    link.send([(("PING",), told.append)], block=-60)  # as if it had been a minute ago
    assert select.select(opened, [], [], 10)[0]
    link.check()
    assert (told, link.busy) == ([b"PONG"], False)
    link.close()
