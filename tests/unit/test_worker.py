"""What a worker does with tasks that have waited in Redis."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from kombu.asynchronous.timer import Timer

from celery_toc.worker import _PastTimers
from kombu_toc import Delivery, Message

MINUTES = 300.0


DELIVERY = Delivery("celery", 0, 0, "id", 1_000, b"", 16)
ETA = {"eta": "2026-01-01T00:00:00+00:00"}


def request(delivery: Delivery | None, headers: dict[str, Any] = ETA) -> Any:
    content: dict[str, Any] = {
        "headers": dict(headers),
        "properties": {},
        "content-type": None,
        "content-encoding": None,
        "body": b"",
    }
    return SimpleNamespace(message=Message(None, content, delivery))


@pytest.mark.parametrize("ahead", [-MINUTES, 0.0, MINUTES])
def test_a_task_that_waited_in_redis_starts_at_once_whatever_the_workers_clock_says(
    ahead: float,
) -> None:
    """X2: an ETA that seems to lie in the future, because the worker's clock is slow, included."""
    timer, started = Timer(), []
    delivered = request(DELIVERY)
    _PastTimers(timer).call_at(time.monotonic() + ahead, started.append, (delivered,), priority=6)
    assert started == [delivered]
    assert timer.queue == []


@pytest.mark.parametrize(
    "args", [(request(None),), (request(DELIVERY, {}),), (), ("something else",)]
)
def test_what_did_not_wait_in_redis_waits_for_the_timer(args: tuple[Any, ...]) -> None:
    """A broadcast task with an ETA, one whose ETA is in its body alone (protocol 1, of a sender
    that has nothing of us), and whatever else the consumer's timer is used for."""
    timer, started = Timer(), []
    entry = _PastTimers(timer).call_at(time.monotonic() + MINUTES, started.append, args)
    assert started == []
    assert [scheduled.entry for scheduled in timer.queue] == [entry]


def test_the_rest_of_the_timer_is_the_timers_own() -> None:
    timer = Timer()
    entry = _PastTimers(timer).call_after(MINUTES, print)
    assert [scheduled.entry for scheduled in timer.queue] == [entry]
