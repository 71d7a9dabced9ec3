"""A worker starts, serves and ends although Redis has no memory left (``noeviction``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

import kombu_toc

from ..support.nodes import Worker
from ..support.servers import Server
from ..support.tasks import make_app
from ..support.workers import Journal, StartWorkers, wait_until

POOLS = {"prefork": ("-P", "prefork", "-c", "2"), "solo": ("-P", "solo")}

#: Bytes: less than any server has in use from its start on.
LITTLE = 1


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Server]:
    """A server of its own, with room until a test says otherwise."""
    server = Server(tmp_path, "--maxmemory-policy", "noeviction").start()
    yield server
    server.stop()


@pytest.fixture
def full(broker: Server) -> Callable[[bool], None]:
    """Leave the server no memory, or some again."""

    def set_full(is_full: bool) -> None:
        with broker.client() as client:
            client.config_set("maxmemory", LITTLE if is_full else 0)
            if is_full:
                with pytest.raises(redis.OutOfMemoryError):
                    client.set("more", "x")

    return set_full


@pytest.mark.parametrize("pool", list(POOLS))
@pytest.mark.parametrize(
    "known", [pytest.param(True, marks=pytest.mark.nightly), False], ids=["seen before", "new"]
)
def test_a_worker_starts_while_the_server_is_full_and_drains_it(
    broker: Server,
    full: Callable[[bool], None],
    start_workers: StartWorkers,
    journal: Journal,
    pool: str,
    known: bool,
) -> None:
    """Whether its queues and bindings have been declared before, and with everything that a
    worker says to others on: mingle, gossip, events and remote control."""
    app = make_app(broker.toc_url, "disabled://")
    if known:
        with app.connection_for_write() as connection:
            for queue in app.amqp.queues.values():
                queue(connection.default_channel).declare()
    for number in range(20):
        app.tasks["e2e.note"].apply_async((f"n{number}",), countdown=number % 2)
    full(True)
    [worker] = start_workers(1, *POOLS[pool], "-E", broker=broker.toc_url, mingle=True)
    journal.wait_for("n", 20)
    center = kombu_toc.center_for(broker.toc_url)
    wait_until(lambda: sum(center.counts("celery")) == 0, 15, worker.logs)
    logs = worker.logs()
    assert logs.count("Connected to") == 1, logs
    assert "Traceback" not in logs, logs
    assert "refused" not in logs, logs


def test_workers_hear_each_other_and_their_operator_while_the_server_is_full(
    broker: Server, full: Callable[[bool], None], start_workers: StartWorkers
) -> None:
    """They greet each other, answer, tell of events, revoke what they are told to, and end."""
    app = make_app(broker.toc_url, "disabled://")
    full(True)
    workers = start_workers(2, "-P", "solo", "-E", broker=broker.toc_url, mingle=True)
    names = {worker.hostname() for worker in workers}
    answers = app.control.inspect(timeout=5, limit=2).ping()
    assert set(answers) == names
    heard: list[str] = []
    with app.connection_for_read() as connection:
        handlers = {"*": lambda event: heard.append(event["hostname"])}
        receiver = app.events.Receiver(connection, handlers)
        wait_until(lambda: receiver.capture(limit=1, timeout=5) or names <= {*heard}, 15, heard)
    app.control.broadcast("shutdown", destination=list(names))
    wait_until(lambda: all(one.container.status == "exited" for one in workers), 30)


def test_the_streams_of_broadcasts_do_not_grow_while_the_server_is_full(
    broker: Server, full: Callable[[bool], None]
) -> None:
    app = make_app(broker.toc_url, "disabled://")
    with app.connection_for_read() as connection, broker.client() as client:
        receiver = app.events.Receiver(connection, {"*": print})
        with receiver.consumer_context():
            with app.events.default_dispatcher(enabled=True) as dispatcher:
                for number in range(150):
                    dispatcher.send("worker-online", number=number)
                full(True)
                for number in range(150):
                    dispatcher.send("worker-offline", number=number)
            [stream] = client.keys("toc:{toc}:part:*:celeryev")
            assert client.xlen(stream) == 100
            [[_, last]] = client.xrevrange(stream, count=1)
            assert any(b'"number": 149' in part for part in last.values())


def test_tasks_are_still_refused_by_a_full_server(
    broker: Server, full: Callable[[bool], None]
) -> None:
    """Only what goes away by itself is taken."""
    app = make_app(broker.toc_url, "disabled://")
    full(True)
    with pytest.raises(Exception, match="maxmemory"):
        app.tasks["e2e.note"].apply_async(("n",), retry=False)


def test_a_worker_that_is_refused_after_it_has_connected_pauses_longer_and_longer(
    broker: Server, start_worker: Callable[..., Worker], journal: Journal
) -> None:
    app = make_app(broker.toc_url, "disabled://")
    app.tasks["e2e.note"].delay("n")
    with broker.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-xrevrange")
        worker = start_worker("-P", "solo", "--without-mingle", broker=broker.toc_url)
        try:
            wait_until(lambda: "Connected to" in worker.logs(), 30, worker.logs)
            began = time.monotonic()
            wait_until(lambda: worker.logs().count("Connected to") >= 7, 30, worker.logs)
            # 0.1, 0.2, 0.4, 0.8, 1.6 and 3.2 seconds; Celery alone has had five in the first.
            assert time.monotonic() - began > 6
            client.execute_command("ACL", "SETUSER", "default", "+xrevrange")
            journal.wait_for("n", 1)
        finally:
            worker.teardown()
