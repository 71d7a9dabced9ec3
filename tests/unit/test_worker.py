"""What a worker does with tasks that have waited in Redis."""

from __future__ import annotations

import threading
import time
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from celery import Celery, Task
from celery.exceptions import InvalidTaskError
from celery.worker.request import Request
from kombu.asynchronous.timer import Timer
from kombu.common import QoS

from celery_toc.compat import worker as compat
from celery_toc.worker.pool import Pace, PastTimers, PoolPolicy, begin_when_due, is_timed
from celery_toc.worker.step import Shutdown
from kombu_toc import Delivery, Message

from ..support.cases import each

pytestmark = pytest.mark.versions

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


def test_a_pool_of_greenlets_starts_as_many_tasks_as_it_may_have() -> None:
    """Before Celery 5.7, it says instead how many run just now."""
    running = {object(), object()}
    pool = SimpleNamespace(is_green=True, limit=20, num_processes=len(running))
    consumer = SimpleNamespace(
        pool=pool,
        app=Celery("a", set_as_current=False),
        controller=SimpleNamespace(autoscaler=None, max_concurrency=None),
    )
    submitted = SimpleNamespace(busy=lambda: running)
    assert PoolPolicy(consumer, submitted, Pace(), accepts_early=False).idle_slots() == 18


@each("ahead", [-MINUTES, 0.0, MINUTES])
def test_a_task_that_waited_in_redis_starts_at_once_whatever_the_workers_clock_says(
    ahead: float,
) -> None:
    """X2: an ETA that seems to lie in the future, because the worker's clock is slow, included."""
    timer, started = Timer(), []
    delivered = request(DELIVERY)
    PastTimers(timer).call_at(time.monotonic() + ahead, started.append, (delivered,), priority=6)
    assert started == [delivered]
    assert timer.queue == []


def test_a_task_that_is_handed_over_ahead_starts_when_it_is_due() -> None:
    timer, started = Timer(), []
    delivered = request(DELIVERY)
    delivered.message.is_early = True
    PastTimers(timer).call_at(time.monotonic(), started.append, (delivered,), priority=6)
    assert (started, timer.queue) == ([], [])
    delivered.message.on_due()
    assert started == [delivered]


def test_a_task_that_celery_has_cancelled_does_not_start_when_it_is_due() -> None:
    """Because the connection is lost: somebody else is given its message."""
    timer, started = Timer(), []
    delivered = request(DELIVERY)
    delivered.message.is_early = True
    timers = PastTimers(timer)
    timers.cancel(timers.call_at(time.monotonic(), started.append, (delivered,), priority=6))
    delivered.message.on_due()
    assert started == []


def test_while_a_task_is_ready_and_not_due_the_prefetch_count_is_what_it_was() -> None:
    """It may be set anew in between, and would be one too low afterwards."""
    set_: list[int] = []
    qos = QoS(lambda prefetch_count, **_: set_.append(prefetch_count), 4)
    timers = PastTimers(Timer(), qos=lambda: qos)
    delivered = request(DELIVERY)
    delivered.message.is_early = True
    qos.increment_eventually()  # as Celery's strategy does
    timers.call_at(time.monotonic(), lambda _: qos.decrement_eventually(), (delivered,))
    assert qos.value == 4
    delivered.message.on_due()
    assert qos.value == 4


class OwnStart(Task):
    """An app's own way to a strategy."""

    def start_strategy(self, app: Any, consumer: Any, **kwargs: Any) -> Any:
        return super().start_strategy(app, consumer, **kwargs)


def test_only_what_is_celerys_own_is_handed_over_ahead(shop: Celery) -> None:
    shop.task(name="own-start", base=OwnStart)(mail)
    shop.task(name="own-strategy", Strategy="somebody.elses:strategy")(mail)

    def timed(task: str | None, **headers: Any) -> bool:
        message = request(DELIVERY, {"task": task, **headers}).message
        return is_timed(shop, message)

    assert timed("mail", **ETA)
    assert not timed("mail")
    assert not any(timed(n, **ETA) for n in ("own-start", "own-strategy", "missing", None))


@pytest.mark.parametrize("early", [True, False])
def test_what_celery_does_not_give_to_the_timer_waits_as_well(early: bool) -> None:
    """Such as a task whose eta is older than the machine's start, and was put off since."""
    started: list[Any] = []
    consumer = SimpleNamespace(on_task_request=begin_when_due(started.append))
    delivered = request(DELIVERY)
    delivered.message.is_early = early
    consumer.on_task_request(delivered)
    assert started == ([] if early else [delivered])
    if early:
        delivered.message.on_due()
        assert started == [delivered]
    consumer.on_task_request("of somebody else")
    assert started[1:] == ["of somebody else"]


@each("args", [(request(None),), (request(DELIVERY, {}),), (), ("something else",)])
def test_what_did_not_wait_in_redis_waits_for_the_timer(args: tuple[Any, ...]) -> None:
    """A broadcast task with an ETA, one whose ETA is in its body alone (protocol 1, of a sender
    that has nothing of us), and whatever else the consumer's timer is used for."""
    timer, started = Timer(), []
    entry = PastTimers(timer).call_at(time.monotonic() + MINUTES, started.append, args)
    assert started == []
    assert [scheduled.entry for scheduled in timer.queue] == [entry]


def test_the_rest_of_the_timer_is_the_timers_own() -> None:
    timer = Timer()
    entry = PastTimers(timer).call_after(MINUTES, print)
    assert [scheduled.entry for scheduled in timer.queue] == [entry]


# -- times that are read quickly


class OwnRequest(Request):
    """An app's own."""


def mail() -> None:
    """A task."""


@pytest.fixture(params=[None, "America/New_York"])
def shop(request: pytest.FixtureRequest) -> Celery:
    with Celery("shop", set_as_current=False) as app:
        app.conf.timezone = request.param
        app.task(name="mail")(mail)
        app.task(name="own", Request=OwnRequest)(mail)
        app.finalize()
        yield app


def request_classes(app: Celery, fails: bool = False) -> dict[str, type[Request]]:
    """Those of the tasks while the worker makes their strategies."""
    seen: dict[str, type[Request]] = {}

    def update_strategies() -> None:
        seen.update((name, task.Request) for name, task in app.tasks.items())
        if fails:
            raise KeyError("of an app's own strategy")

    consumer = SimpleNamespace(app=app, update_strategies=update_strategies)
    compat.install_quick_times(consumer)
    consumer.update_strategies()
    return seen


def eta_of(request_class: type[Request], app: Celery, eta: Any, expires: Any = None) -> Any:
    headers = {"id": "id-1", "task": "mail", "eta": eta, "expires": expires}
    message = SimpleNamespace(
        headers=headers,
        properties={},
        delivery_info={},
        payload=((), {}, {}),
        body=b"",
        content_type=None,
        content_encoding=None,
    )
    made = request_class(message, app=app, task=app.tasks["mail"], hostname="h")
    assert made.request_dict["eta"] == eta  # as it was sent
    return (
        *(made.eta, made.eta and made.eta.isoformat()),
        *(made.expires, made.expires and made.expires.isoformat()),
    )


@pytest.mark.parametrize(
    "time",
    [
        None,
        "2026-11-21T16:13:29.123456+00:00",
        "2026-11-21T16:13:29+00:00",
        "2026-11-21T16:13:29.5-05:00",
        "2026-11-21T16:13:29Z",
        "2026-11-21T16:13:29.123",
        "2026-11-21T16:13:29",
        "20261121T161329Z",
        "2026-11-21T16:13",
        "2026-11-21",
        datetime(2026, 11, 21, 16, 13, tzinfo=timezone.utc),
        datetime(2026, 11, 21, 16, 13),
    ],
)
def test_a_time_that_is_read_quickly_is_the_one_that_celery_reads(shop: Celery, time: Any) -> None:
    quick = request_classes(shop)["mail"]
    assert quick is not Request
    assert eta_of(quick, shop, time, time) == eta_of(Request, shop, time, time)


@pytest.mark.parametrize("time", ["soon", "2026-13-01T00:00:00+00:00", 7, {"a": 1}])
def test_what_is_no_time_is_refused_as_celery_does(shop: Celery, time: Any) -> None:
    quick = request_classes(shop)["mail"]
    with pytest.raises(InvalidTaskError) as of_celery:
        eta_of(Request, shop, time)
    with pytest.raises(InvalidTaskError, match="invalid ETA value") as ours:
        eta_of(quick, shop, time)
    assert str(ours.value) == str(of_celery.value)


def test_an_apps_own_request_class_stays_and_tasks_are_left_as_they_were(shop: Celery) -> None:
    before = {name: dict(vars(task)) for name, task in shop.tasks.items()}
    assert request_classes(shop)["own"] is OwnRequest
    with pytest.raises(KeyError, match="strategy"):
        request_classes(shop, fails=True)
    assert {name: dict(vars(task)) for name, task in shop.tasks.items()} == before


def test_a_worker_ends_when_redis_has_been_told_what_ended_last() -> None:
    """Its process ends next: what is still being said then is never said."""
    running, begun, answers, told = [object()], threading.Event(), threading.Event(), []

    def tell() -> None:
        running.clear()
        begun.set()
        assert answers.wait(60)
        told.append(True)

    channel = mock.MagicMock()
    channel.lease_keeper.early_acks = running
    channel.poller.outbox.ack_ended = tell
    shutdown = Shutdown(mock.MagicMock(), mock.MagicMock(), lambda: channel)
    shutdown.finish(mock.MagicMock())
    assert begun.wait(60)
    threading.Timer(0.1, answers.set).start()
    shutdown.wait_until_told()
    assert told
