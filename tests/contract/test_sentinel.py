"""Sentinel: the URL leads to whoever is the master, and what is wrong is said once and clearly."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from kombu import Connection

import kombu_toc

from ..meta.test_readme import broker_of
from ..support.fixtures import failure
from ..support.ports import free_port
from ..support.sentinels import NAME, Deployment
from ..support.servers import Server
from .test_connections import round_trip, round_trip_on


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A primary and its sentinels; no test ends either."""
    with Deployment(tmp_path_factory.mktemp("sentinel"), sentinels=2) as made:
        yield made


def said(url: str, **options: object) -> str:
    """What a connection that cannot be made says."""
    connection = Connection(url, connect_timeout=2, transport_options=options)
    error = failure(connection, kombu_toc.ServerError)
    assert isinstance(error, connection.connection_errors)
    return str(error)


@pytest.mark.versions
def test_a_url_with_commas_leads_to_the_master(deployment: Deployment) -> None:
    places = {"h1:26379,h2:26379,h3:26379": deployment.hosts}
    round_trip(Connection(broker_of("docs/connections.md", "toc+sentinel:", places)))
    with deployment.primary.client() as client:
        assert client.hexists("toc:{toc}:topics", "trip")


@pytest.mark.versions
@pytest.mark.parametrize("scheme", ["sentinel", "toc+sentinel"])
def test_kombus_own_spelling_leads_to_the_master(deployment: Deployment, scheme: str) -> None:
    dead = f"toc+sentinel://127.0.0.1:{free_port()}"
    first, second = (f"127.0.0.1:{one.port}" for one in deployment.sentinels)
    url = f"{dead};{scheme}://{first};{scheme}://{second}/3"
    options = {"master_name": NAME, "min_other_sentinels": 1, "sentinel_kwargs": None}
    connection = Connection(url, transport_options=options)
    round_trip(connection.clone())
    # A failure must not make Kombu go on to the next URL as to another broker.
    connection.maybe_switch_next()
    round_trip(connection)
    with deployment.primary.client(3) as client:
        assert client.hexists("toc:{toc}:topics", "trip")


@pytest.mark.versions
def test_kombus_list_of_urls_leads_to_the_master(deployment: Deployment) -> None:
    urls = [f"toc+sentinel://127.0.0.1:{one.port}" for one in deployment.sentinels]
    round_trip(Connection(urls, transport_options={"master_name": NAME}))


@pytest.mark.versions
def test_a_bounded_pool_leads_to_the_master(deployment: Deployment) -> None:
    round_trip(Connection(f"{deployment.toc_url}&max_connections=3"))


@pytest.mark.versions
def test_the_password_of_the_url_is_the_masters_and_never_shown(deployment: Deployment) -> None:
    with deployment.primary.client() as client:
        client.execute_command("ACL", "SETUSER", "app", "on", ">p@ss,w", "~*", "&*", "+@all")
        try:
            first, second = (f"127.0.0.1:{one.port}" for one in deployment.sentinels)
            secret = "p%40ss%2Cw"
            host = f"app:{secret}@{first},app:{secret}@{second}"
            connection = Connection(f"toc+sentinel://{host}/0?master_name={NAME}")
            round_trip(connection.clone())
            assert first in connection.as_uri()
            assert second in connection.as_uri()
            assert secret not in connection.as_uri()
            assert secret not in str(connection.info())
            assert Connection(connection.as_uri(include_password=True)).connect()
        finally:
            client.execute_command("ACL", "DELUSER", "app")


def test_a_wrong_master_name_is_answered_with_those_that_are_known(deployment: Deployment) -> None:
    text = said(deployment.toc_url.replace(NAME, "nosuch"))
    assert "know no master 'nosuch', but 'mymaster': set master_name" in text


def test_a_missing_master_name_is_asked_for(deployment: Deployment) -> None:
    with pytest.raises(kombu_toc.ConfigurationError, match=r"which master\? .*master_name=my"):
        Connection(deployment.toc_url.partition("?")[0]).connect()


@pytest.mark.versions
def test_sentinels_that_do_not_answer_are_named() -> None:
    port = free_port()
    text = said(f"toc+sentinel://127.0.0.1:{port}/0?master_name=m")
    assert f"no sentinel answers: 127.0.0.1:{port} (" in text
    assert "name the sentinels' hosts and ports" in text


def test_a_server_is_no_sentinel(server: Server) -> None:
    text = said(f"toc+sentinel://127.0.0.1:{server.port}/0?master_name=m")
    assert f"127.0.0.1:{server.port} is a server and not a sentinel: use toc+redis://" in text


@pytest.mark.parametrize("database", ["", "/0", "/1"])
def test_a_sentinel_is_no_server(deployment: Deployment, database: str) -> None:
    where = f"127.0.0.1:{deployment.sentinels[0].port}"
    text = said(f"toc+redis://{where}{database}")
    assert f"use toc+sentinel://{where}/0?master_name=" in text
    assert "sentinel" in text


def test_a_sentinel_that_knows_too_few_others_is_not_believed(deployment: Deployment) -> None:
    text = said(deployment.toc_url, min_other_sentinels=5)
    assert "knows of 1 other sentinels, and min_other_sentinels is 5" in text


def test_a_sentinel_that_wants_a_password_says_where_to_give_it(tmp_path: Path) -> None:
    lines = ("requirepass sesame", "sentinel sentinel-pass sesame")
    made = Deployment(tmp_path, sentinels=0)
    made.primary.start()
    from ..support.sentinels import SentinelProcess

    (tmp_path / "s").mkdir()
    sentinel = SentinelProcess(tmp_path / "s", made.primary, 1, *lines).start()
    try:
        url = f"toc+sentinel://127.0.0.1:{sentinel.port}/0?master_name={NAME}"
        assert "sentinel_kwargs={'password'" in said(url)
        assert "sentinel_kwargs={'password'" in said(url, sentinel_kwargs={"password": "wrong"})
        options = {"sentinel_kwargs": {"password": "sesame"}}
        round_trip(Connection(url, transport_options=options))
    finally:
        sentinel.kill()
        made.stop()


@pytest.mark.versions
def test_a_kept_connection_to_a_demoted_master_is_given_up_for_the_new_one(
    failing: Deployment,
) -> None:
    """Also one that Sentinel did not cut: nobody gets READONLY for ever."""
    center = kombu_toc.center_for(failing.toc_url)
    center.put("mail", "before", b"x")
    replica = failing.replicas[0]
    for sentinel in failing.sentinels:
        sentinel.kill()
    with replica.client() as client:
        client.replicaof("NO", "ONE")
    with failing.primary.client() as client:
        client.replicaof("127.0.0.1", replica.port)
    # No sentinel answers: a demoted master is told for what it is, and once only.
    with pytest.raises(kombu_toc.ServerError, match="not the master any more"):
        center.put("mail", "refused", b"x")
    with pytest.raises(kombu_toc.ServerError, match="no sentinel answers"):
        center.put("mail", "refused", b"x")
    for sentinel in failing.sentinels:
        (sentinel.directory / "sentinel.conf").unlink()
        sentinel.primary = replica
        sentinel.start()
    center.put("mail", "after", b"x")
    with replica.client() as client:
        assert client.info("replication")["role"] == "master"
    assert [m.id for m in center.pop("mail", 10).messages] == ["before", "after"]


def test_a_sentinel_that_is_behind_the_times_is_not_believed(failing: Deployment) -> None:
    """Its master has become a replica: nothing is written there, and nothing is waited for."""
    replica = failing.replicas[0]
    for sentinel in failing.sentinels[1:]:
        sentinel.kill()
    with replica.client() as client:
        client.replicaof("NO", "ONE")
    with failing.primary.client() as client:
        client.replicaof("127.0.0.1", replica.port)
    text = said(failing.toc_url)
    assert f"127.0.0.1:{failing.primary.port} is not the master, though a sentinel says so" in text


@pytest.mark.versions
def test_after_a_failover_producers_and_consumers_go_on_with_the_new_master(
    failing: Deployment,
) -> None:
    options = {"toc_wait_replicas": 1, "toc_wait_timeout": 5}
    with Connection(failing.toc_url, transport_options=options) as connection:
        queue = connection.SimpleQueue("mail")
        for i in range(20):
            queue.put(i)
        failing.primary.kill()
        began = time.monotonic()
        promoted = failing.wait_for_failover()
        connection = Connection(failing.toc_url)
        with connection, connection.SimpleQueue("mail") as queue:
            got = [queue.get(timeout=10) for _ in range(20)]
            assert sorted(message.payload for message in got) == list(range(20))
            for message in got:
                message.ack()
        assert time.monotonic() - began < 60
    with promoted.client() as client:
        assert client.keys("toc:{mail:*}:prepare") == []


def test_what_was_known_of_the_old_masters_clock_is_forgotten(failing: Deployment) -> None:
    with Connection(failing.toc_url) as connection:
        round_trip_on(connection)
        transport = connection.transport
        assert transport.poller.clock.known
        failing.primary.kill()
        failing.wait_for_failover()
        deadline = time.monotonic() + 10
        while transport.center.client.connection_pool.master_address[1] == failing.primary.port:
            assert time.monotonic() < deadline
            try:
                transport.center.client.ping()
            except (redis.ConnectionError, kombu_toc.ServerError):
                time.sleep(0.05)  # the sentinels have agreed, and the first may not know yet
        assert not transport.poller.clock.known
