"""What a consumer notes of messages, as the task library has it then."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest
from kombu import Connection, Queue

from kombu_toc.library.records import now_us

from ..support.library import consume, fill, publish, status_of

pytestmark = pytest.mark.usefixtures("client")

LATER = {"x-biz-type": "order", "x-biz-id": 42}


def declare(connection: Connection, mode: str) -> None:
    queue = Queue("mail", queue_arguments={"x-library": mode})
    queue(connection.default_channel).declare()


@pytest.fixture
def recorder(broker, monkeypatch) -> Any:
    """A recorder whose thread does nothing: the test says when it writes."""
    found = broker.default_channel.recorder
    monkeypatch.setattr(found, "_start", lambda: None)
    return found


@pytest.mark.parametrize("mode", ["through", "behind"])
def test_what_is_handled_between_two_writes_is_recorded_with_all_that_is_known(
    broker, recorder, store, mode
):
    declare(broker, mode)
    fill(broker, 3, **LATER)

    def act(message: Any) -> None:
        if message.headers["id"] == "order-1":
            message.error = "no \0 file"
        if message.headers["id"] == "order-2" and not message.delivery.failures:
            message.requeue_lost()
        else:
            message.ack()

    began = now_us()
    consume(broker, 4, act)
    assert recorder.backlog == 0
    for number, (attempts, error) in enumerate([(1, None), (1, "no \ufffd file"), (2, None)]):
        [record] = store.history(f"order-{number}")
        assert (record.status, record.task) == ("done", "remind")
        assert (record.biz_type, record.biz_id) == ("order", "42")
        assert (record.attempts, record.error) == (attempts, error)
        assert record.worker == recorder.worker
        assert began <= record.modified_us <= now_us()


def test_what_lasts_is_recorded_as_taken_when_it_was(broker, recorder, store):
    publish(broker, "order-1")
    publish(broker, "order-2")
    seen: list[Any] = []
    moments: list[int] = []

    def act(message: Any) -> None:
        moments.append(now_us())
        if len(moments) == 1:
            message.ack()
            return
        moments.append(now_us())
        recorder.flush()
        seen.extend(store.of_ids(["order-1", "order-2"]))
        message.ack()

    first, second = consume(broker, 2, act)
    [row] = seen
    assert (row.id, row.status, row.worker) == (second, 1, recorder.worker)
    assert row.modified_us <= moments[1]
    assert status_of(store, first) == status_of(store, second) == ["done"]


def test_what_was_taken_and_given_back_waits_again(broker, recorder, store):
    publish(broker, "order-1")
    channel = broker.channel()
    queue = Queue("mail")(channel)
    message = queue.get()
    assert message is not None
    recorder.flush()
    assert status_of(store, "order-1") == ["taken"]
    channel.close()
    recorder.flush()
    assert status_of(store, "order-1") == ["pending"]
    # And at once, without a write between.
    channel = broker.channel()
    assert Queue("mail")(channel).get() is not None
    channel.close()
    recorder.flush()
    assert status_of(store, "order-1") == ["pending"]
    assert recorder.gathering._taken == {}


def test_what_was_acknowledged_over_a_channel_that_is_closed_is_recorded(broker, recorder, store):
    publish(broker, "order-1")
    channel = broker.channel()
    message = Queue("mail")(channel).get()
    assert message is not None
    message.ack()
    del message
    channel.close()
    recorder.flush()
    assert status_of(store, "order-1") == ["done"]


def test_what_takes_long_is_said_to_be_taken_until_it_has_ended(broker, recorder, store):
    publish(broker, "order-1")
    message = Queue("mail")(broker.default_channel).get()
    assert message is not None
    recorder.flush()
    [row] = store.of_ids(["order-1"])
    recorder.gathering.touch(0.0)
    [touched] = store.of_ids(["order-1"])
    assert touched.modified_us > row.modified_us
    message.ack()
    recorder.flush()
    assert recorder.gathering._taken == {}
    assert status_of(store, "order-1") == ["done"]


def test_a_thread_that_could_not_be_started_is_started_the_next_time(broker, monkeypatch):
    recorder = broker.default_channel.recorder
    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError))
        recorder.wake()
    assert recorder.sleeps
    recorder.wake()
    assert not recorder.sleeps


def test_many_ends_do_not_wait_and_a_thread_that_has_ended_is_started_again(
    broker, store, monkeypatch
):
    # The interval is out of reach: what is written is written because there is much of it.
    monkeypatch.setattr("kombu_toc.library.recorder.FLUSH_INTERVAL", 600.0)
    monkeypatch.setattr("kombu_toc.transport.recorded.FLUSH_AT", 20)
    monkeypatch.setattr("kombu_toc.library.recorder.FLUSH_AT", 20)
    recorder = broker.default_channel.recorder
    recorder.close()
    assert recorder.sleeps
    fill(broker, 60)
    channel = broker.default_channel
    for _ in range(60):
        message = Queue("mail")(channel).get()
        assert message is not None
        message.ack()
    assert not recorder.sleeps
    # Fewer than 20 wait for others.
    while store.count().get("done", 0) <= 40:
        assert recorder._thread.is_alive()
