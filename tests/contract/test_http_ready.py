"""``/readyz`` and ``/healthz``: what they ask of the broker, and when they say no."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ..support.http_server import HttpServer
from ..support.inspection import commands_run, full_server
from ..support.servers import Server, frozen

pytestmark = pytest.mark.one_server("a server of its own is stopped, demoted and watched")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("ready")) as made:
        yield made


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[HttpServer]:
    with HttpServer(server.toc_url) as made:
        made.post("/v1/queues/mail/tasks", {"id": "one", "text": "x"})
        yield made


def test_a_broker_that_only_reads_is_not_ready(server: Server, api: HttpServer) -> None:
    """As after a failover that has left this connection with the former master."""
    with server.client() as client:
        client.replicaof("127.0.0.1", "1")
        try:
            reply = api.get("/readyz")
            assert (reply.status, reply.json["detail"]) == (
                503,
                "the broker is a replica now, and takes nothing",
            )
            assert api.get("/healthz").status == 200
        finally:
            client.replicaof("no", "one")
    assert api.get("/readyz").status == 200


def test_a_broker_that_may_not_write_to_its_disk_is_not_ready(
    server: Server, api: HttpServer
) -> None:
    with server.client() as client:
        client.config_set("min-replicas-to-write", 1)  # there is none: it refuses as it does then
        try:
            reply = api.get("/readyz")
            assert (reply.status, reply.json["detail"]) == (
                503,
                "the broker answers, and takes nothing for now",
            )
        finally:
            client.config_set("min-replicas-to-write", 0)


def test_a_broker_that_is_full_is_ready(server: Server, api: HttpServer) -> None:
    """What is leased and acknowledged empties it."""
    with server.client() as client, full_server(client):
        assert api.post("/v1/queues/mail/tasks", {"text": "x"}).status == 503
        assert api.get("/readyz").status == 200


def test_a_broker_that_stands_still_is_not_waited_for_and_the_process_lives(
    server: Server, api: HttpServer
) -> None:
    with frozen(server):
        began = time.monotonic()
        reply = api.get("/readyz")
        assert (reply.status, reply.json["detail"]) == (503, "the broker does not answer")
        assert time.monotonic() - began >= 4
        assert api.get("/healthz").status == 200
    assert api.get("/readyz").status == 200


def test_to_be_alive_asks_nothing_of_the_broker_and_to_be_ready_one_command(
    server: Server, api: HttpServer
) -> None:
    """Probes come every few seconds, from every node."""

    def asked(path: str, times: int) -> list[str]:
        with commands_run(server) as found:
            for _ in range(times):
                assert api.get(path).status == 200
        return [command[0].upper() for command in found]

    assert asked("/readyz", 3).count("ZREM") == 3
    # The process writes down what it has counted, once in a while.
    assert len(asked("/healthz", 200)) < 20
