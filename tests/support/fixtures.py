"""Fixtures on the shared server: connections of Kombu's, an app, servers of API and page."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import redis
from celery import Celery
from kombu import Connection

from kombu_toc import TimeoutCenter, center_for
from kombu_toc.center import registry
from kombu_toc.http import new_token

from .cluster import Cluster
from .http_server import HttpServer
from .page_visitor import Visitor
from .proxy import Proxy
from .sentinels import Deployment
from .servers import Server
from .waiting import MOST, running

#: Gives a test a server of its own, which counts what it is asked for: threads and processes of
#: earlier tests may still ask the shared one.
own_server = pytest.mark.parametrize("server", ["own"], indirect=True, scope="function")


@pytest.fixture
def one(center: TimeoutCenter) -> TimeoutCenter:
    """A center with a topic 'one' of a single slot."""
    center.queues.declare("one", slots=1)
    return center


@pytest.fixture
def across(cluster: Cluster) -> TimeoutCenter:
    """A center on the shared Cluster, which is empty."""
    with cluster.client() as client:
        client.flushall()
    return center_for(cluster.toc_url)


@pytest.fixture
def full(client: redis.Redis) -> Iterator[Callable[[], Any]]:
    """Makes the server refuse whatever takes memory."""
    yield lambda: client.config_set("maxmemory", "1")
    client.config_set("maxmemory", "0")


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has warned of no declaration yet."""
    monkeypatch.setattr(registry, "_warned", set())


@pytest.fixture
def replica(server: Server, client: redis.Redis, tmp_path: Path) -> Iterator[Server]:
    """Of the shared server, in step with it."""
    client.config_set("repl-diskless-sync-delay", 0)
    with Server(tmp_path, "--replicaof", "127.0.0.1", str(server.port)) as made:
        with made.client() as follower:
            while follower.info("replication")["master_link_status"] != "up":
                pass
            client.set("seen", "by the replica")  # WAIT may wait for nothing but writes
            while client.wait(1, 1000) < 1:
                pass
            client.delete("seen")
        yield made


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Deployment]:
    """A primary, its replica and their sentinels, to break."""
    with Deployment(tmp_path) as made:
        yield made


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


@pytest.fixture
def proxy(server: Server, client: redis.Redis) -> Iterator[Proxy]:
    """Stands before the shared server, which is empty."""
    with Proxy(server.port) as made:
        yield made


@pytest.fixture
def url(client: redis.Redis, server: Server | Cluster) -> str:
    """Of the shared server, which is empty."""
    return server.toc_url


@pytest.fixture
def app(client: redis.Redis, server: Server | Cluster) -> Iterator[Celery]:
    with Celery("shop", broker=server.toc_url, set_as_current=False) as made:

        @made.task(name="shop.remind", shared=False)
        def remind(order: int = 0) -> None: ...

        yield made


@pytest.fixture(scope="module")
def shared(server: Server | Cluster) -> Iterator[HttpServer]:
    with HttpServer(server.toc_url) as made:
        yield made


@pytest.fixture
def api(shared: HttpServer, center: TimeoutCenter) -> HttpServer:
    """A server of the API on the shared server, which is empty."""
    # It remembers declarations for a moment, which were flushed.
    for queue in ("mail", "sms"):
        center.queues.declare(queue)
    shared.center = center
    return shared


def failure(connection: Connection, error: Any = None) -> Exception:
    """How connecting fails; its second attempt follows at once, and not after Kombu's two seconds.

    error: what it is; one of the connection's own errors unless that is given
    """
    with (
        mock.patch("kombu.utils.functional.sleep"),
        pytest.raises(error or connection.connection_errors) as caught,
    ):
        connection.connect()
    return caught.value


def drain(connection: Connection, timeout: float = 0.3) -> None:
    """Deliver whatever comes, until nothing has come for `timeout` seconds."""
    came = True
    while came:
        came = False
        for _ in running(timeout):
            with contextlib.suppress(TimeoutError):
                connection.drain_events(timeout=min(timeout, MOST))
                came = True
                break


# -- the page


@pytest.fixture(scope="module")
def page_server(server: Server | Cluster) -> Iterator[HttpServer]:
    with HttpServer(server.toc_url, "--mask", "card") as made:
        yield made


@pytest.fixture
def local(page_server: HttpServer, center: TimeoutCenter) -> Visitor:
    """Who sits at the machine; on the page_server server, which is empty."""
    for queue in ("mail", "sms"):
        center.queues.declare(queue)
    page_server.center = center
    made = Visitor(page_server)
    made.get("queue?queue=mail")
    return made


@pytest.fixture(scope="module")
def tokens() -> dict[str, tuple[str, str]]:
    """name -> a token and its line."""
    slow = new_token("slow", "read", "*")
    return {
        "anna": new_token("anna", "read,write,operate", "*"),
        "ben": new_token("ben", "read", "mail,m-*"),
        "carl": new_token("carl", "read,write", "mail"),
        "slow": (slow[0], f"{slow[1]} rate=2/m"),
    }


@pytest.fixture(scope="module")
def guarded_page(
    server: Server | Cluster, tokens: dict[str, tuple[str, str]]
) -> Iterator[HttpServer]:
    lines = ";".join(line for _, line in tokens.values())
    with HttpServer(server.toc_url, environment={"TOC_HTTP_TOKENS": lines}) as made:
        yield made


@pytest.fixture
def signed_in(
    guarded_page: HttpServer, tokens: dict[str, tuple[str, str]], center: TimeoutCenter
) -> Any:
    for queue in ("mail", "sms"):
        center.queues.declare(queue)

    def sign_in(name: str) -> Visitor:
        made = Visitor(guarded_page)
        assert made.sign_in(tokens[name][0]).status == 303
        return made

    return sign_in
