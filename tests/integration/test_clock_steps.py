"""A server whose clock is set, or whose place a server with another clock takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from kombu import Connection, Consumer, Producer, Queue

import kombu_toc

from ..servers import SteppedServer

pytestmark = pytest.mark.one_server("its clock is set")


@pytest.fixture
def stepped(tmp_path) -> Iterator[SteppedServer]:
    made = SteppedServer(tmp_path).start()
    yield made
    made.stop()


@pytest.fixture
def connection(stepped: SteppedServer) -> Iterator[Connection]:
    with Connection(stepped.toc_url) as made:
        yield made


def now_us(stepped: SteppedServer) -> int:
    with stepped.client() as client:
        seconds, us = client.time()
    return seconds * 1_000_000 + us


def count_down(connection: Connection, id: str, seconds: float, **kwargs: Any) -> None:
    eta = (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()
    producer = kwargs.pop("producer", None) or Producer(connection)
    headers = {"id": id, "eta": eta}
    producer.publish(
        "x", routing_key="mail", headers=headers, **{kombu_toc.COUNTDOWN: True}, **kwargs
    )


@pytest.mark.parametrize("seconds", [15, -15, 0.1, -0.1])
def test_a_countdown_begins_by_the_clock_as_it_is_set_now(
    stepped: SteppedServer, connection: Connection, seconds: float
) -> None:
    """The sender has known the clock for moments."""
    count_down(connection, "before", 60)
    stepped.step(seconds)
    for id in ("m1", "m2"):
        before = now_us(stepped)
        count_down(connection, id, 60)
        after = now_us(stepped)
        [found] = connection.transport.center.get(id, topic="mail")
        assert before + 60_000_000 <= found.time_us <= after + 60_000_000


def test_a_countdown_whose_way_was_long_begins_when_it_got_there(
    stepped: SteppedServer, connection: Connection
) -> None:
    """What was heard of the clock cannot be told from what it was set to."""
    count_down(connection, "before", 60)
    with stepped.client() as client:
        client.client_pause(200)
    before = now_us(stepped)
    count_down(connection, "m1", 60)
    [found] = connection.transport.center.get("m1", topic="mail")
    assert before + 60_000_000 <= found.time_us < before + 61_000_000


def test_the_countdowns_of_a_batch_begin_when_they_are_asked_for(
    stepped: SteppedServer, connection: Connection
) -> None:
    """Whenever the batch leaves."""
    producer = Producer(connection)
    if not hasattr(producer, "batch"):
        pytest.skip("this Kombu publishes no batches")
    with producer.batch(max_size=10):
        before = now_us(stepped)
        count_down(connection, "m1", 60, producer=producer)
        after = now_us(stepped)
        time.sleep(0.5)  # it fills
    [found] = connection.transport.center.get("m1", topic="mail")
    assert before + 60_000_000 <= found.time_us < after + 60_100_000


# -- consumers


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and "went back" in record.getMessage()
    ]


def drain_until(connection: Connection, holds: Callable[[], bool], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        try:
            connection.drain_events(timeout=0.2)
        except TimeoutError:
            pass
    return holds()


@pytest.mark.parametrize("anew", [False, True], ids=["connected", "connected anew"])
def test_a_consumer_tells_once_by_how_much_the_clock_went_back(
    stepped: SteppedServer, caplog: pytest.LogCaptureFixture, anew: bool
) -> None:
    got: list[str] = []

    def consume(connection: Connection) -> Consumer:
        received = lambda body, message: (got.append(body), message.ack())  # noqa: E731
        return Consumer(connection, [Queue("mail")], callbacks=[received])

    with Connection(stepped.toc_url) as connection, consume(connection):
        Producer(connection).publish("first", routing_key="mail")
        assert drain_until(connection, lambda: got == ["first"])
        if not anew:
            stepped.step(-30)
            assert drain_until(connection, lambda: bool(told(caplog)))
    if anew:
        stepped.step(-30)
    with Connection(stepped.toc_url) as connection, consume(connection):
        Producer(connection).publish("second", routing_key="mail")
        assert drain_until(connection, lambda: len(got) == 2 and bool(told(caplog)))
        drain_until(connection, lambda: False, seconds=1.5)
    [line] = told(caplog)
    assert "went back by 30.0 seconds" in line or "went back by 29.9 seconds" in line


@pytest.mark.parametrize("seconds", [0.5, -0.5, 30])
def test_small_steps_and_forward_ones_are_no_warning(
    stepped: SteppedServer, caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    with Connection(stepped.toc_url) as connection, Consumer(connection, [Queue("mail")]):
        drain_until(connection, lambda: False, seconds=1.2)
        stepped.step(seconds)
        drain_until(connection, lambda: False, seconds=1.5)
    assert told(caplog) == []


def test_a_reply_that_is_read_late_is_no_step(
    stepped: SteppedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A task has blocked the only thread."""
    with Connection(stepped.toc_url) as connection, Consumer(connection, [Queue("mail")]):
        drain_until(connection, lambda: False, seconds=1.2)
        for _ in range(2):
            time.sleep(2.5)
            drain_until(connection, lambda: False, seconds=1)
    assert told(caplog) == []
