"""The connections that put, pop and the like keep for themselves. K7."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import redis

import kombu_toc
from kombu_toc.client.connection import IDLE
from kombu_toc.errors import ServerError

from ..support.inspection import full_server, put_call, put_some
from ..support.servers import Server
from ..support.waiting import at_once

pytestmark = [pytest.mark.one_server("it looks at the connections to one"), pytest.mark.versions]


@pytest.fixture
def own_center(server: Server, client: redis.Redis) -> Iterator[kombu_toc.TimeoutCenter]:
    center = kombu_toc.center_for(server.toc_url)
    yield center
    center.client.close()


def _connections(server: Server) -> set[str]:
    """The ids of those that are open: earlier tests' may be collected and close at any time."""
    with server.client() as client:
        return {one["id"] for one in client.client_list()} - {str(client.client_id())}


def test_a_connection_that_the_server_has_closed_while_idle_is_opened_again(
    server: Server, own_center: kombu_toc.TimeoutCenter
) -> None:
    own_center.put("mail", "a", b"")
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
    time.sleep(2 * IDLE)  # only one that was not used for that long may have been closed
    own_center.put("mail", "b", b"")
    assert own_center.counts("mail").waiting == 2


def test_a_connection_that_is_cut_under_a_command_is_told_and_the_next_one_works(
    server: Server, own_center: kombu_toc.TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow this machine is, the connection was in use just now.
    monkeypatch.setattr("kombu_toc.client.connection.IDLE", 60)
    own_center.put("mail", "a", b"")
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(redis.ConnectionError):
        own_center.runner.run(put_call(own_center, own_center.registry.topic("mail"), "b", b""))
    own_center.put("mail", "b", b"")
    assert own_center.counts("mail").waiting == 2


def test_a_reply_that_was_not_waited_for_is_never_taken_for_anothers(
    own_center: kombu_toc.TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_center.put("mail", "a", b"")
    connection = own_center.client._idle[0][0]

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(connection, "read_response", interrupted)
    with pytest.raises(KeyboardInterrupt):
        own_center.counts("mail")
    monkeypatch.undo()
    assert own_center.put("mail", "b", b"").id == "b"
    assert own_center.counts("mail").waiting == 2


def test_threads_have_a_connection_each_and_leave_them_to_whoever_comes_next(
    server: Server, own_center: kombu_toc.TimeoutCenter
) -> None:
    before = _connections(server)
    own_center.registry.topic("mail")

    def many(name: str) -> None:
        for number in range(50):
            assert own_center.put("mail", f"{name}{number}", b"").id == f"{name}{number}"

    for names in ("abcd", "efgh", "ijkl"):
        at_once(many, names)
    assert own_center.counts("mail").waiting == 600
    assert len(_connections(server) - before) <= 5  # one for each, and one of the pool
    own_center.client.close()
    own_center.client.connection_pool.disconnect()
    assert not _connections(server) - before


def test_a_forked_child_does_not_speak_on_its_parents_connection(
    own_center: kombu_toc.TimeoutCenter,
) -> None:
    own_center.put("mail", "parents", b"")
    child = os.fork()
    if not child:
        try:
            put_some(own_center, "mail", 100, "childs")
        except BaseException:
            os._exit(1)
        os._exit(0)
    for number in range(100):
        assert own_center.put("mail", f"parents{number}", b"").id == f"parents{number}"
    assert os.waitpid(child, 0)[1] == 0
    assert own_center.counts("mail").waiting == 201


def test_what_a_server_refuses_for_now_is_an_error_of_its_own(
    server: Server, own_center: kombu_toc.TimeoutCenter
) -> None:
    own_center.put("mail", "a", b"")
    refused = pytest.raises(ServerError, match=r"OOM|memory")
    with server.client() as client, full_server(client), refused:
        own_center.put("mail", "b", b"")
    own_center.put("mail", "b", b"")
    assert own_center.counts("mail").waiting == 2


def test_a_bounded_pool_stays_bounded(server: Server, client: redis.Redis) -> None:
    before = _connections(server)
    center = kombu_toc.center_for(server.toc_url, max_connections=1)
    center.put("mail", "a", b"")
    assert center.counts("mail").waiting == 1
    center.queues.purge("mail")
    assert len(_connections(server) - before) == 1
    center.client.connection_pool.disconnect()
