"""A server whose clock is set, or whose place a server with another clock takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.schedules import crontab, schedule, solar
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kombu import Connection, Consumer, Producer, Queue

import kombu_toc
from celery_toc import timeout_center
from celery_toc.schedules.state import firing_id
from celery_toc.worker.schedules import take
from kombu_toc import Delivery, verify
from kombu_toc.transport import publisher

from ..support.consuming import Inbox, deliver_until
from ..support.servers import SteppedServer
from ..support.waiting import wait_until

pytestmark = pytest.mark.one_server("its clock is set")


@pytest.fixture
def stepped(tmp_path) -> Iterator[SteppedServer]:
    with SteppedServer(tmp_path) as made:
        yield made


@pytest.fixture
def connection(stepped: SteppedServer) -> Iterator[Connection]:
    with Connection(stepped.toc_url) as made:
        yield made


def now_us(stepped: SteppedServer) -> int:
    with stepped.client() as client:
        seconds, us = client.time()
    return seconds * 1_000_000 + us


def count_down(connection: Connection, id: str, seconds: float, **kwargs: Any) -> int:
    """Publish a task with such a countdown: when the server's clock has it due."""
    eta = (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()
    producer = kwargs.pop("producer", None) or Producer(connection)
    headers = {"id": id, "eta": eta}
    producer.publish("x", routing_key="mail", headers=headers, **{kombu_toc.COUNTDOWN: True})
    return due(connection, id)


def due(connection: Connection, id: str) -> int:
    found = connection.transport.center.get(id, topic="mail")
    return found[0].time_us if found else 0


@pytest.mark.parametrize("seconds", [15, -15, 0.1, -0.1])
def test_a_countdown_begins_by_the_clock_as_it_is_set_now(
    stepped: SteppedServer, connection: Connection, seconds: float
) -> None:
    """The sender has known the clock for moments."""
    count_down(connection, "before", 60)
    stepped.step(seconds)
    for id in ("m1", "m2"):
        before = now_us(stepped)
        found = count_down(connection, id, 60)
        assert before + 60_000_000 <= found <= now_us(stepped) + 60_000_000


def test_a_countdown_is_not_early_although_its_sender_stands_still_at_any_moment(
    stepped: SteppedServer, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3: also between the looks at two clocks"""

    def then_stands_still(read: Callable[[], Any]) -> Callable[[], Any]:
        def stalling() -> Any:
            shown = read()
            time.sleep(0.03)
            return shown

        return stalling

    stalling = {name: then_stands_still(getattr(time, name)) for name in ("monotonic", "time_ns")}
    count_down(connection, "before", 60)
    monkeypatch.setattr(publisher, "time", SimpleNamespace(**stalling))
    before = now_us(stepped)
    assert before + 60_000_000 <= count_down(connection, "m1", 60) < before + 61_000_000


def test_a_countdown_whose_way_was_long_begins_when_it_got_there(
    stepped: SteppedServer, connection: Connection
) -> None:
    """What was heard of the clock cannot be told from what it was set to."""
    count_down(connection, "before", 60)
    with stepped.client() as client:
        client.client_pause(200)
    before = now_us(stepped)
    assert before + 60_000_000 <= count_down(connection, "m1", 60) < before + 61_000_000


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
    assert before + 60_000_000 <= due(connection, "m1") < after + 60_100_000


# -- leases


@pytest.mark.parametrize("looked", [True, False], ids=["watched", "never looked at"])
@pytest.mark.parametrize(
    "how", ["own", "queue", "short", "popped", "picked", "limited", "extended"]
)
def test_leases_of_the_dead_end_no_later_although_the_clock_is_set_back(
    stepped: SteppedServer, looked: bool, how: str
) -> None:
    """Nor earlier than they could if they were renewed now. Who has not seen that the clock was
    later leaves each a minute."""
    center = kombu_toc.center_for(stepped.toc_url)
    longest = {"own": 70, "queue": 90, "short": 30 if looked else 60}.get(how, 120)
    limits = {"key_concurrency": 1} if how == "limited" else {}
    visibility = {"queue": 90, "short": 30}.get(how, 2)
    center.queues.declare("mail", slots=1, visibility=visibility, **limits)
    center.put("mail", "m", b"x", visibility=70 if how == "own" else None)
    asked = 120 if how in ("popped", "picked", "limited") else None
    chosen = ["m"] if how == "picked" else None
    held = center.pop("mail", ids=chosen, visibility=asked).messages
    assert len(held) == 1
    if how == "extended":
        center.extend(held, 120)
    if looked:
        kombu_toc.center_for(stepped.toc_url).pop("mail", 0)
    stepped.step(-1000)
    kombu_toc.center_for(stepped.toc_url).pop("mail", 0)
    ends = center.client.zscore(center.registry.topic("mail").slot(0).prepare, "m") / 1e6
    assert longest - 2 < ends - now_us(stepped) / 1e6 <= longest
    center.client.close()


def test_who_died_consumes_no_longer_than_it_could_although_the_clock_is_set_back(
    stepped: SteppedServer, connection: Connection
) -> None:
    """Y5: each would be known until the server's clock shows that time again."""
    center, who = connection.transport.center, '["dead", 1, "brief"]'
    center.queues.declare("brief", expires=1000, kept=60_000)
    for key in (users := center.keys.users("brief"), center.keys.consumers):
        center.client.zadd(key, {who: now_us(stepped) // 1000 + 60_000})
    stepped.step(-30 * 86400)
    with Consumer(connection, [Queue("brief", expires=1.0)], callbacks=[print]):
        for key in (users, center.keys.consumers):
            wait_until(lambda key=key: center.client.zcard(key) == 2)
            assert center.client.zscore(key, who) <= now_us(stepped) // 1000 + 60_000


def test_a_dead_workers_message_comes_back_in_time_although_the_clock_is_set_back(
    stepped: SteppedServer,
) -> None:
    center = kombu_toc.center_for(stepped.toc_url)
    center.queues.declare("mail", slots=1, visibility=2)
    center.put("mail", "m", b"x")
    assert center.pop("mail").messages
    other = kombu_toc.center_for(stepped.toc_url)
    other.pop("mail", 0)  # as one who looks now and then
    stepped.step(-1000)
    began = time.monotonic()
    while not other.pop("mail", 0).rolled_back:
        assert time.monotonic() < began + 2 + 3
        time.sleep(0.2)
    center.client.close()
    other.client.close()


def test_who_died_while_it_looked_for_all_is_followed_although_the_clock_is_set_back(
    stepped: SteppedServer,
) -> None:
    """Y8: its place would be kept until the server's clock shows that time again."""
    center, other = (kombu_toc.TimeoutCenter(stepped.client(), grace=0) for _ in range(2))
    look = center.keys.look("mail", 0)
    center.client.set(look, "dead", px=1500)
    stepped.step(-30 * 86400)
    center.put("mail", "m", b"")
    held = center.pop("mail", visibility=300).messages
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(other.pop, "mail", wait=60)
        wait_until(lambda: center.client.get(look) not in (None, b"dead"))
        center.extend(held, 0.1)  # nobody is told
        assert [one.id for one in waits.result().messages] == ["m"]


# -- anything, in any order

#: Seconds that a delivery lasts, as the topic says, and the longest that one of its messages says.
LASTS, LONGEST = 6.0, 20.0

#: Seconds that a lease may be longer when the clock was set back and nobody had looked before.
USUAL = 60.0

#: Seconds between two looks at leases, and those by which one may come back late: the grace of
#: these leases, and the looks around it.
STRIDE = 2.0
LATE = 4.0 + 3 * STRIDE


@dataclass
class Sent:
    """What is known of a live message. Times are the server's, in seconds, from `now`."""

    body: bytes
    lasts: float
    due: tuple[float, float]  #: at the earliest, at the latest
    held: Delivery | None = None
    ends: tuple[float, float] = (0.0, 0.0)  #: its lease, unless the clock is set back


class Stepping(RuleBasedStateMachine):
    """Producers, and consumers of which some die, while the server's clock is set to and fro."""

    server: SteppedServer  # set by the test

    def __init__(self) -> None:
        super().__init__()
        self.client = self.server.client()
        self.client.flushall()
        self.center = kombu_toc.TimeoutCenter(self.client)
        self.center.queues.declare("mail", slots=1, visibility=LASTS, retries=31)
        self.live: dict[str, Sent] = {}
        self.number = 0
        #: the server's time of the last look at leases, if there were any
        self.looked: float | None = None

    def now(self) -> float:
        return now_us(self.server) / 1e6

    @initialize(puts=st.lists(st.sampled_from([LASTS, LONGEST]), min_size=1, max_size=4))
    def begin(self, puts: list[float]) -> None:
        for lasts in puts:
            self.put(0, lasts)
        self.pop(100)

    @rule(delay=st.sampled_from([0, 0, 3, 40]), lasts=st.sampled_from([LASTS, LASTS, LONGEST]))
    def put(self, delay: float, lasts: float) -> None:
        self.number += 1
        id, body, before = f"m{self.number}", b"%d" % self.number, self.now()
        own = None if lasts == LASTS else lasts
        assert self.center.put("mail", id, body, delay=delay, visibility=own).added
        # A time is in milliseconds, rounded up.
        self.live[id] = Sent(body, lasts, (before + delay, self.now() + delay + 0.001))

    @rule(seconds=st.sampled_from([-1000, -1000, -30, -5, STRIDE, 30, 1000]))
    def step(self, seconds: float) -> None:
        self.server.step(seconds)

    @rule(limit=st.sampled_from([0, 1, 100]))
    def pop(self, limit: int) -> None:
        """By a consumer that has just begun: others may have died."""
        before = self.now()
        popped = kombu_toc.TimeoutCenter(self.client).pop("mail", limit)
        after = self.now()
        assert not popped.died
        for one in self.live.values():
            if one.held is not None:
                self.set_back(one, before, after)
        leased = any(one.held is not None for one in self.live.values())
        self.looked = popped.now_us / 1e6 if leased else None
        for id in popped.rolled_back:
            one = self.live[id]
            assert one.held is not None and one.ends[0] <= after, f"{id} is back before its time"
            one.held, one.due = None, (0.0, 0.0)
        for delivery in popped.messages:
            one = self.live[delivery.id]
            assert one.held is None and delivery.body == one.body
            assert one.due[0] <= popped.now_us / 1e6, f"{delivery.id} is early"
            one.held, one.ends = delivery, (before + one.lasts, after + one.lasts + 0.001)
        if len(popped.messages) < limit:
            late = [id for id, m in self.live.items() if m.held is None and m.due[1] <= before]
            assert not late, "it was due, and was not delivered"

    def set_back(self, one: Sent, before: float, after: float) -> None:
        """Whoever looks at leases after a step back shortens those that end too late."""
        first, last = one.ends
        if self.looked is None:
            last = min(last, after + max(one.lasts, USUAL))
        elif after < self.looked - 1:
            last = min(last, after + one.lasts + 0.001)
        one.ends = min(first, before + one.lasts), last

    @precondition(lambda self: any(one.held for one in self.live.values()))
    @rule(number=st.integers(0, 100))
    def ack(self, number: int) -> None:
        held = [id for id, one in self.live.items() if one.held is not None]
        id = held[number % len(held)]
        assert self.center.ack([self.live[id].held]) == 1
        del self.live[id]

    @invariant()
    def nothing_is_lost(self) -> None:
        found = {one.id: (one.state, one.body) for one in self.center.scan("mail").messages}
        assert found == {
            id: (kombu_toc.WAITING if one.held is None else kombu_toc.IN_FLIGHT, one.body)
            for id, one in self.live.items()
        }

    def teardown(self) -> None:
        """All consumers have died: what they had comes back in time, and all of it is delivered."""
        self.pop(0)
        began = self.now()
        while held := [one for one in self.live.values() if one.held is not None]:
            before = self.now()
            self.pop(0)
            for one in held:
                late = max(one.ends[1], began) + LATE < before
                assert one.held is None or not late, "a lease did not come back in time"
            self.step(STRIDE)
        self.step(max([one.due[1] - self.now() for one in self.live.values()] + [1]))
        self.pop(100)
        assert all(one.held is not None for one in self.live.values())
        self.center.ack([one.held for one in self.live.values()])
        assert self.center.count("mail") == 0
        self.client.close()


@pytest.mark.parametrize("examples", [25, pytest.param(200, marks=pytest.mark.nightly)])
def test_whatever_the_clock_is_set_to_nothing_is_lost_early_or_kept_by_the_dead(
    stepped: SteppedServer, examples: int
) -> None:
    class OnThisServer(Stepping):
        server = stepped

    run_state_machine_as_test(
        OnThisServer,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            phases=(Phase.reuse, Phase.generate),
            suppress_health_check=list(HealthCheck),
        ),
    )


# -- consumers


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    return [one for one in said if "went back" in one]


@pytest.mark.parametrize("anew", [False, True], ids=["connected", "connected anew"])
def test_a_consumer_tells_once_by_how_much_the_clock_went_back(
    stepped: SteppedServer, caplog: pytest.LogCaptureFixture, anew: bool
) -> None:
    with Connection(stepped.toc_url) as connection, Inbox(connection) as inbox:
        Producer(connection).publish("first", routing_key="mail")
        assert deliver_until(connection, lambda: inbox.bodies == ["first"])
        if not anew:
            stepped.step(-30)
            assert deliver_until(connection, lambda: bool(told(caplog)))
    if anew:
        stepped.step(-30)
    with Connection(stepped.toc_url) as connection, Inbox(connection) as inbox:
        Producer(connection).publish("second", routing_key="mail")
        assert deliver_until(connection, lambda: inbox.bodies and told(caplog))
        deliver_until(connection, lambda: False, 1.5)
    [line] = told(caplog)
    assert "went back by 30.0 seconds" in line or "went back by 29.9 seconds" in line


@pytest.mark.parametrize("seconds", [0.5, -0.5, 30, None])
def test_small_steps_forward_ones_and_a_reply_that_is_read_late_are_no_warning(
    stepped: SteppedServer, caplog: pytest.LogCaptureFixture, seconds: float | None
) -> None:
    """None: a task has blocked the only thread, twice."""
    with Connection(stepped.toc_url) as connection, Consumer(connection, [Queue("mail")]):
        deliver_until(connection, lambda: False, 1.2)
        for _ in range(1 if seconds else 2):
            if seconds:
                stepped.step(seconds)
            else:
                time.sleep(2.5)
            deliver_until(connection, lambda: False, 1.5)
    assert told(caplog) == []


# -- schedules


class Night:
    """Has what fires delivered, and writes down what the judge is to know."""

    def __init__(self, stepped: SteppedServer, begin: datetime) -> None:
        self.server, self.history = stepped, list[verify.Event]()
        stepped.step(begin.timestamp() - time.time())
        self.app = Celery("night", broker=stepped.toc_url, set_as_current=False)
        self.center = timeout_center(self.app)

    def put(self, name: str, when: Any, times: Iterable[datetime], **how: Any) -> None:
        """A schedule, and when it is to fire."""
        self.center.schedules.put(name, "night.fire", when, queue="night", misfire="all", **how)
        for planned in times:
            id = firing_id(name, round(planned.timestamp() * 1e6))
            self.note(verify.PLAN, verify.DONE, id, due=planned.timestamp())

    def note(self, what: str, stage: str, id: str, **more: Any) -> None:
        self.history.append(verify.Event(time.monotonic(), "worker", what, stage, id, **more))

    def until(self, moment: datetime) -> None:
        """Set the clock to a moment before that, and work until it is over."""
        self.server.step(moment.timestamp() - 0.3 - now_us(self.server) / 1e6)
        self.work(moment.timestamp() + 0.2)

    def work(self, end: float) -> None:
        center = self.center.center
        while True:
            popped = center.pop("night", 10)
            for one in popped.messages:
                verdict, _ = take(center.recurring, one, one.id.rpartition("@")[0])
                assert verdict == "run"
                self.note(verify.RUN, verify.ASKED, one.id, server=popped.now_us / 1e6)
                self.note(verify.RUN, verify.DONE, one.id)
                self.note(verify.ACK, verify.ASKED, one.id)
                center.ack([one])
                self.note(verify.ACK, verify.DONE, one.id)
            if not popped.messages and popped.now_us / 1e6 > end:
                return
            time.sleep(0.01)  # the clock goes on


def utc(*fields: int) -> datetime:
    return datetime(*fields, tzinfo=timezone.utc)


#: The clock of Berlin is put forward, and back, at one o'clock UTC.
FORWARD, BACK = (2027, 3, 28), (2027, 10, 31)


@pytest.mark.parametrize("day", [FORWARD, BACK], ids=["forward", "back"])
def test_schedules_of_every_kind_fire_at_each_of_their_times_when_the_clock_is_changed(
    stepped: SteppedServer, day: tuple[int, int, int]
) -> None:
    """X24"""
    night = Night(stepped, utc(*day, 0, 10))
    hours = [utc(*day, hour, 30) for hour in (0, 1, 2)]
    zone = {"timezone": "Europe/Berlin"}
    once = utc(*day, 1) if day == FORWARD else utc(*day, 0, 30)
    night.put("half past two", crontab("30", "2"), [once], **zone)
    night.put("each hour", crontab("30", "*"), hours, **zone)
    three = utc(*day, 1) if day == FORWARD else utc(*day, 2)
    night.put("three", crontab("0", "3"), [three], **zone)
    start = utc(*day, 0, 15)
    every = [start + timedelta(minutes=50 * number) for number in range(4)]
    night.put("interval", timedelta(minutes=50), every, start=start, **zone)
    night.put("seconds", schedule(3000.0), every, start=start, **zone)
    night.put("sunset", solar("sunset", 40.7, -124.0), [], **zone)
    sunset = night.center.schedules.get("sunset").next
    assert utc(*day, 0) < sunset < utc(*day, 4)  # in California
    night.note(verify.PLAN, verify.DONE, firing_id("sunset", round(sunset.timestamp() * 1e6)))
    for moment in sorted({once, three, *hours, *every, sunset}):
        night.until(moment)
    verdict = verify.judge(night.history, verify.Rules())
    assert verdict.broken == []
    assert verdict.counted["run done"] == verdict.counted["plan done"] == 14


@pytest.mark.parametrize("seconds", [-1.0, 1.0])
def test_schedules_fire_at_each_of_their_times_at_a_leap_second(
    stepped: SteppedServer, seconds: float
) -> None:
    """A second is repeated, or left out."""
    midnight = utc(2027, 1, 1)
    night = Night(stepped, midnight - timedelta(seconds=4))
    halves = [midnight + timedelta(seconds=number / 2) for number in range(-2, 5)]
    every, end = timedelta(seconds=0.5), halves[-1] + timedelta(seconds=0.1)
    night.put("midnight", crontab("0", "0"), [midnight])
    night.put("interval", every, halves, start=halves[0], end=end)
    night.work(midnight.timestamp() + (0.3 if seconds < 0 else -0.7))
    stepped.step(seconds)
    night.work(end.timestamp())
    verdict = verify.judge(night.history, verify.Rules())
    assert verdict.broken == []
    assert verdict.counted["run done"] == 8
