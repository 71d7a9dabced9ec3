"""Clocks that are minutes off: Redis's clock decides what is due, and no other.

A skewed process has its own ``time`` and ``datetime`` shifted. What is measured is Redis's clock,
which is also this machine's and which the skew does not touch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import celery
import pytest
import time_machine
from celery import Celery, chain, chord, group

from ..support import nursery
from ..support.nodes import Worker
from ..support.servers import Server, SteppedServer
from ..support.tasks import make_app
from ..support.workers import POOLS, Journal

#: What they share is started once, in one process of a run.
pytestmark = pytest.mark.xdist_group("clocks")

MINUTES = 300.0

#: Seconds a task may start late: few, beside the minutes of a clock. Never is it early.
LATE = 10.0

both_ways = pytest.mark.parametrize("skew", [MINUTES, -MINUTES], ids=["ahead", "behind"])


class Clock:
    """Redis's clock, and what is due by it."""

    def __init__(self, server: Server) -> None:
        self._client = server.client()
        self._due: dict[str, tuple[float, float]] = {}

    def now(self) -> float:
        seconds, us = self._client.time()
        return seconds + us / 1_000_000

    def expect(self, name: str, seconds: float, send: Callable[[], Any]) -> Any:
        """Send something that is to start that many seconds later."""
        before = self.now()
        sent = send()
        self._due[name] = (before + seconds, self.now() + seconds)
        return sent

    def expect_at(self, name: str, due: datetime) -> None:
        self._due[name] = (due.timestamp(), due.timestamp())

    def check(self, journal: Journal) -> None:
        """Wait until all have started, and see that each did so on time."""
        for name, (earliest, latest) in self._due.items():
            [entry] = journal.wait_for(name, 1)
            assert entry["by_redis"] >= earliest, f"{name} is early"
            assert entry["by_redis"] < latest + LATE, f"{name} is late"

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def clock(server: Server) -> Iterator[Clock]:
    made = Clock(server)
    yield made
    made.close()


def at(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


def shifted(skew: float) -> Any:
    """As if this process's clock were that many seconds ahead."""
    return time_machine.travel(time.time() + skew, tick=True)


@pytest.fixture(scope="module")
def worker(
    request: pytest.FixtureRequest, start_worker: Callable[..., Worker], server: Server
) -> Iterator[float]:
    """One worker, shared by the tests of its kind; by how much its clock is ahead."""
    pool, skew = request.param
    with server.client() as client:
        client.flushall()
    made = start_worker(*POOLS[pool], skew=skew or None)
    made.ready()
    yield skew
    made.teardown()


on_skewed_workers = pytest.mark.parametrize(
    "worker",
    [
        pytest.param((pool, skew), id=f"{pool}-{way}", marks=marks)
        for pool, marks in (("prefork", ()), ("threads", pytest.mark.nightly))
        for way, skew in (("ahead", MINUTES), ("behind", -MINUTES))
    ],
    indirect=True,
)
on_a_right_worker = pytest.mark.parametrize(
    "worker", [("prefork", 0)], ids=["right-worker"], indirect=True
)


# -- workers


@on_skewed_workers
def test_a_worker_whose_clock_is_minutes_off_starts_tasks_on_time(
    worker: float, app: Celery, journal: Journal, clock: Clock
) -> None:
    note = app.tasks["e2e.note"]
    for i in range(10):
        name, seconds = f"countdown-{i}", 0.4 + i * 0.1
        clock.expect(name, seconds, lambda n=name, s=seconds: note.apply_async((n,), countdown=s))
        due = at(seconds)
        note.apply_async((f"eta-{i}",), eta=due)
        clock.expect_at(f"eta-{i}", due)
    clock.check(journal)
    # The clock that its tasks see is off indeed, also in the processes of its pool.
    for entry in journal.entries():
        assert abs(entry["at"] - entry["by_redis"] - worker) < 1


@on_skewed_workers
def test_a_retry_of_such_a_worker_waits_for_its_countdown(
    worker: float, app: Celery, journal: Journal
) -> None:
    result = app.tasks["e2e.again"].delay(2, 0.5)
    times = [entry["by_redis"] for entry in journal.wait_for(f"again-{result.id}", 3)]
    assert all(0.5 <= b - a < 0.5 + LATE for a, b in pairwise(times))


@on_skewed_workers
def test_a_retry_at_a_given_time_is_not_taken_for_a_countdown(
    worker: float, app: Celery, journal: Journal
) -> None:
    """Not even of a task that was itself sent with a countdown."""
    due = at(1.2)
    result = app.tasks["e2e.again_at"].apply_async((due.isoformat(),), countdown=0.2)
    again = journal.wait_for(f"again-{result.id}", 2)[1]["by_redis"]
    assert due.timestamp() <= again < due.timestamp() + LATE


@on_skewed_workers
def test_what_such_a_worker_sends_on_waits_for_its_countdown(
    worker: float, app: Celery, journal: Journal
) -> None:
    note = app.tasks["e2e.note"]
    chain(note.si("chain-0"), note.si("chain-1").set(countdown=0.5)).apply_async()
    chord([note.si("header")], note.si("body").set(countdown=0.5)).apply_async()
    for first, then in (("chain-0", "chain-1"), ("header", "body")):
        [a], [b] = journal.wait_for(first, 1), journal.wait_for(then, 1)
        # A chord's body is sent when its header's result is in, and that takes a moment.
        assert 0.5 <= b["by_redis"] - a["by_redis"] < 0.5 + LATE


# -- producers


@pytest.fixture
def producer(app: Celery, worker: float) -> Celery:
    # Celery before 5.5 asks for its transport only when its first message is made.
    app.connection_for_write().get_transport_cls()
    return app


@both_ways
@on_a_right_worker
def test_countdowns_of_a_producer_whose_clock_is_minutes_off_start_on_time(
    producer: Celery, journal: Journal, clock: Clock, skew: float
) -> None:
    note = producer.tasks["e2e.note"]
    ways: dict[str, Callable[[], Any]] = {
        "apply": lambda: note.apply_async(("apply",), countdown=0.6),
        "send": lambda: producer.send_task("e2e.note", ("send",), countdown=0.6),
        "signature": lambda: note.si("signature").set(countdown=0.6).delay(),
        "chain": lambda: chain(note.si("chain"), note.si("-")).apply_async(countdown=0.6),
        "group": lambda: group(note.si("group").set(countdown=0.6), note.si("-")).apply_async(),
        "chord": lambda: chord(note.si("chord").set(countdown=0.6))(note.si("-")),
        "both": lambda: note.apply_async(("both",), countdown=0.6, eta=at(5)),
        "headers": lambda: note.apply_async(("headers",), countdown=0.6, headers={"mine": "1"}),
    }
    with shifted(skew):
        for name, send in ways.items():
            clock.expect(name, 0.6, send)
    clock.check(journal)


@both_ways
@on_a_right_worker
def test_a_time_given_to_such_a_producer_stands_as_it_is(
    producer: Celery, journal: Journal, clock: Clock, skew: float
) -> None:
    due = at(0.8)
    clock.expect_at("given", due)
    with shifted(skew):
        producer.tasks["e2e.note"].apply_async(("given",), eta=due)
    clock.check(journal)


@on_a_right_worker
@pytest.mark.parametrize("skew", [0.0, MINUTES, -MINUTES], ids=["right", "ahead", "behind"])
def test_tasks_of_protocol_1_wait_too(
    producer: Celery, journal: Journal, clock: Clock, server: Server, skew: float
) -> None:
    """Their ETA is in the body of the message."""
    old = make_app(server.toc_url, server.url.removesuffix("/0") + "/1", task_protocol=1)
    note = old.tasks["e2e.note"]
    with shifted(skew):
        clock.expect("counted", 0.6, lambda: note.apply_async(("counted",), countdown=0.6))
    due = at(0.8)
    note.apply_async(("eta",), eta=due)
    clock.expect_at("eta", due)
    clock.check(journal)
    old.close()


@both_ways
@on_a_right_worker
@pytest.mark.skipif(
    celery.VERSION < (5, 5), reason="before 5.5, Celery makes a message before it knows its broker"
)
def test_the_first_message_of_a_producer_is_on_time(
    worker: float, journal: Journal, clock: Clock, server: Server, skew: float
) -> None:
    program = (
        "from tests.support.tasks import app; app.send_task('e2e.note', ('first',), countdown=0.6)"
    )
    urls = {"E2E_BROKER": server.toc_url, "E2E_BACKEND": server.url.removesuffix("/0") + "/1"}
    before = clock.now()
    nursery.done(("-c", program), execute=True, environment={**urls, "E2E_SKEW": str(skew)})
    sent = clock.now()
    [entry] = journal.wait_for("first", 1)
    assert before + 0.6 <= entry["by_redis"] < sent + 0.6 + LATE


def test_who_is_idle_hears_that_the_servers_clock_was_set_forward(
    tmp_path: Path, start_workers: Callable[..., list[Worker]], journal: Journal
) -> None:
    """Who waits for a time asks the server nothing until then, by its own account of the time."""
    server = SteppedServer(tmp_path).start()
    try:
        start_workers(2, "-c", "1", broker=server.toc_url)
        with make_app(server.toc_url, "disabled://") as app:
            note = app.tasks["e2e.note"]
            time.sleep(1)  # the workers have looked, and wait
            note.apply_async(("before", 0), countdown=3600)
            time.sleep(0.5)
            server.step(3700)
            journal.wait_for("before", 1)
            note.apply_async(("after", 0), countdown=2)
            journal.wait_for("after", 1)
    finally:
        server.stop()
