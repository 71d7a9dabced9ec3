"""What may start of a topic that is limited: by rate, by how many run, and key by key."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection

from kombu_toc import (
    ConfigurationError,
    Delivery,
    Popped,
    RateLimitedError,
    ScheduleChange,
    ScheduleFiring,
    TimeoutCenter,
    Unique,
    pack,
)
from kombu_toc.center import topics
from kombu_toc.center.calls import PopRequest, PutRequest
from kombu_toc.center.clock import MAY_NOT
from kombu_toc.center.pop import mark_calls
from kombu_toc.center.reshard import reshard_topic
from kombu_toc.center.upkeep import Part, keep
from kombu_toc.model.delivery import traits_of
from kombu_toc.model.results import MISCOUNTED, NO_LANE
from kombu_toc.model.topic import slot_of

from ..support.consuming import Loop
from ..support.inspection import announced, now_us, put_some, time_passes
from ..support.waiting import in_thread


def put(center: TimeoutCenter, id: str, key: str = "", topic: str = "mail", **more: Any) -> None:
    body = more.pop("body", b"body of " + id.encode())
    center.put(topic, id, body, key=key or None, **more)


def pop(center: TimeoutCenter, limit: int = 100, topic: str = "mail") -> list[Delivery]:
    return center.pop(topic, limit).messages


def fill(center: TimeoutCenter, number: int, key: str = "a", **more: Any) -> None:
    """So many messages of a key: a0, a1, ..."""
    for n in range(number):
        put(center, f"{key}{n}", key, **more)


def many(number: int, key: str = "large", **more: Any) -> list[dict[str, Any]]:
    """So many for `put_many`: l0, l1, ..."""
    return [{"id": f"{key[0]}{n}", "body": b"", "key": key, **more} for n in range(number)]


def keep_up(center: TimeoutCenter) -> Any:
    """What the upkeep of the queue does."""
    part = Part(center.registry.topic("mail"), (0,))
    return center.runner.run(keep(center.context, [(part, MAY_NOT)]))


def until_due(center: TimeoutCenter, us: float) -> None:
    while now_us(center.client) < us:
        time.sleep(0.01)  # the server's clock says what is due, or has expired


def run_out(center: TimeoutCenter, at_once: int = 100) -> list[str]:
    """Pop and acknowledge until nothing comes: the ids. at_once: how many may come together"""
    got: list[str] = []
    while some := pop(center):
        assert len(some) <= at_once
        got += ids(some)
        center.ack(some)
    return got


def key_of(slot: int) -> str:
    """A key whose messages are in this one of two slots."""
    return next(key for key in "abcdefgh" if slot_of(key, 2) == slot)


def clock_set_back(center: TimeoutCenter, keys: list[str]) -> float:
    """As the clock was an hour ahead when these keys started: when the last of them may go on."""
    slot = center.registry.topic("mail").slot(0)
    for name in (slot.pace, slot.waits):
        for key in keys:
            center.client.zincrby(name, 3600e6, key)
    keep_up(center)
    return max(center.client.zscore(slot.waits, key) for key in keys)


def ids(messages: list[Delivery]) -> list[str]:
    return [message.id for message in messages]


def ahead(center: TimeoutCenter, limit: int = 100, us: int = 20_000) -> Popped:
    """A pop that looks ahead, as a consumer does."""
    request = PopRequest(center.deliveries.names.next(), ready_limit=limit, lookahead_us=us)
    popped: Popped = center.runner.run(center.commands.pop(center.registry.topic("mail"), request))
    return popped


@pytest.fixture
def slots() -> int:
    return 1


@pytest.fixture
def declare(center: TimeoutCenter, slots: int) -> Any:
    def declared(**limits: Any) -> TimeoutCenter:
        center.queues.declare("mail", slots=slots, **limits)
        return center

    return declared


# -- how many run


@pytest.mark.cluster
def test_of_a_key_no_more_run_at_once_than_it_may(declare: Any) -> None:
    center = declare(key_concurrency=2)
    fill(center, 5)
    put(center, "b0", "b")
    first = pop(center)
    assert ids(first) == ["a0", "a1", "b0"]
    assert all(message.has_place for message in first)
    assert pop(center) == []
    assert center.ack(first[:1]) == 1
    assert ids(pop(center)) == ["a2"]


@pytest.mark.cluster
def test_of_a_queue_no_more_run_at_once_than_it_may(declare: Any) -> None:
    center = declare(concurrency=3)
    for number in range(6):
        put(center, f"m{number}", "k" if number % 2 else "")
    first = pop(center)
    assert ids(first) == ["m0", "m1", "m2"]
    assert pop(center) == []
    center.ack(first)
    assert ids(pop(center)) == ["m3", "m4", "m5"]


@pytest.mark.cluster
@pytest.mark.parametrize("how", ["reject", "dead", "release", "lease"])
def test_a_place_comes_free_however_its_delivery_ends(declare: Any, client: Any, how: str) -> None:
    center = declare(key_concurrency=1)
    put(center, "a0", "a")
    put(center, "a1", "a")
    [first] = pop(center)
    assert pop(center) == []
    if how == "lease":
        time_passes(center, "mail", 200)
    elif how == "release":
        center.release([first])
    else:
        center.reject(first, requeue=how == "reject")
    again = pop(center)
    assert ids(again) == ["a1" if how == "dead" else "a0"]
    assert center.ack(again) == 1
    assert len(pop(center)) == (0 if how == "dead" else 1)


@pytest.mark.cluster
def test_who_frees_a_place_announces_what_may_start_instead(declare: Any, client: Any) -> None:
    center = declare(key_concurrency=1)
    fill(center, 2)
    [first] = pop(center)
    assert pop(center) == []
    wake = center.keys.wake("mail")
    assert client.zcard(wake) == 0
    center.ack([first])
    assert client.zcard(wake) == 1


# -- rates


@pytest.mark.cluster
def test_starts_of_a_queue_are_spaced_by_its_rate(declare: Any, client: Any) -> None:
    center = declare(rate="200/s")
    for number in range(10):
        put(center, f"m{number}", "k" if number % 2 else "")
    popped = ahead(center, us=21_000)
    starts = [message.start_us or popped.now_us for message in popped.messages]
    assert len(starts) == 5
    assert [b - a for a, b in itertools.pairwise(starts)] == [5025] * 4  # see gates.SLOWER
    assert not popped.more
    [(_, at)] = client.zrange(center.keys.wake("mail"), 0, -1, withscores=True)
    assert at == starts[-1] + 5025


@pytest.mark.parametrize("wait", [0, 60])
def test_a_pop_that_looks_ahead_delivers_what_the_rate_lets_start_by_then(
    declare: Any, wait: float
) -> None:
    center = declare(rate="10/s")
    put_some(center, "mail", 20, "c", b"x")
    first = center.pop("mail", 20, wait=wait, ahead=0.85)
    starts = [first.now_us, *(one.start_us for one in first.messages[1:])]
    assert [one.id for one in first.messages] == [f"c{number}" for number in range(9)]
    assert all(later - sooner >= 100_000 for sooner, later in itertools.pairwise(starts))
    assert starts[-1] <= first.now_us + 850_000
    # What comes next starts when these have: it does not matter when it is asked for.
    second = center.pop("mail", 20, wait=60, ahead=0.85)
    assert (second.messages[0].start_us or second.now_us) - starts[-1] >= 100_000


def test_a_pop_of_a_queue_without_a_rate_does_not_look_ahead(declare: Any) -> None:
    center = declare(concurrency=5)
    center.put("mail", "now", b"x")
    center.put("mail", "soon", b"x", delay=30)
    assert [one.id for one in center.pop("mail", 5, ahead=0.9).messages] == ["now"]
    for wrong in (-1, 1, True, "1", None, float("nan")):
        with pytest.raises(ConfigurationError, match=r"ahead must be from 0 to 0\.9 s"):
            center.pop("mail", 5, ahead=wrong)


@pytest.mark.cluster
def test_starts_of_a_key_are_spaced_by_its_rate(declare: Any) -> None:
    center = declare(key_rate="100/s", key_burst=2)
    fill(center, 6)
    put(center, "b", "b")
    popped = ahead(center, us=21_000)
    starts = {message.id: message.start_us for message in popped.messages}
    assert list(starts) == ["a0", "a1", "a2", "a3", "b"]
    assert starts["a0"] == starts["a1"] == starts["b"] == 0
    assert starts["a3"] - starts["a2"] == 10_050


def test_a_clock_that_is_set_back_lets_keys_wait_no_longer_than_their_rate_says(
    declare: Any,
) -> None:
    center = declare(key_rate="1/s")
    keys = [f"k{number}" for number in range(30)]
    for number in range(2):
        for key in keys:
            put(center, f"{number} of {key}", key)
    assert len(pop(center)) == len(keys)
    assert pop(center) == []
    last = clock_set_back(center, keys)
    latest = now_us(center.client) + 3_000_000
    assert last <= latest
    assert min(us for _, us in announced(center, "mail")) <= latest
    time_passes(center, "mail", 3)
    assert sorted(ids(pop(center))) == sorted(f"1 of {key}" for key in keys)


def test_a_clock_that_is_set_back_lets_keys_of_which_many_start_at_once_wait_no_longer(
    declare: Any,
) -> None:
    center = declare(key_rate="100/h", key_burst=101)
    for key in "abc":
        center.put_many("mail", many(102, key))
    assert len(pop(center, 400)) == 101 * 3
    assert pop(center) == []
    assert clock_set_back(center, list("abc")) <= now_us(center.client) + 40e6


# -- order


@pytest.mark.cluster
def test_a_key_that_is_served_in_order_is_held_by_what_comes_back(declare: Any) -> None:
    center = declare(key_order="serial", retry_backoff=100)
    fill(center, 3)
    put(center, "b0", "b")
    first = pop(center)
    assert ids(first) == ["a0", "b0"]
    center.reject(first[0], requeue=True)
    assert pop(center) == []
    time_passes(center, "mail", 200)
    again = pop(center)
    assert ids(again) == ["a0"]  # the lease of b0 has just ended: it waits, too
    center.reject(again[0], requeue=False)
    assert ids(pop(center)) == ["a1"]


@pytest.mark.parametrize("waited", [False, True], ids=["later", "due before"])
def test_what_is_put_off_to_one_time_starts_in_the_order_in_which_that_was_done(
    declare: Any, waited: bool
) -> None:
    center = declare(key_order="serial")
    put(center, "first", "a")
    [first] = pop(center)
    names = ["d", "c", "b", "a"]
    for name in sorted(names):
        put(center, name, "a", delay=None if waited else 7200)
    assert pop(center) == []
    at = now_us(center.client) / 1e6 + 3600
    put(center, "e", "a", at=at)
    for name in names:
        [moved] = center.reschedule(name, at=at, topic="mail")
        assert moved.moved
    time_passes(center, "mail", 3700)
    # The first, whose lease has ended; and then by their time.
    assert run_out(center) == [first.id, "e", *names]


def test_what_comes_back_later_lets_the_others_pass_if_it_is_said_so(declare: Any) -> None:
    center = declare(key_order="serial", key_retry="later", retry_backoff=100)
    fill(center, 3)
    [first] = pop(center)
    center.reject(first, requeue=True)
    assert ids(pop(center)) == ["a1"]


def put_again(center: TimeoutCenter, id: str, body: bytes, key: str = "a", **more: Any) -> None:
    traits = traits_of(f"message {id}", key=key)
    more = {"replaces": True, "delay_us": 100_000_000, **more}
    request = PutRequest(id, body, basis=key, traits=traits, **more)
    center.runner.run(center.commands.put(center.registry.topic("mail"), request))


@pytest.mark.cluster
def test_what_is_sent_again_under_its_id_holds_the_key_in_its_place(declare: Any) -> None:
    center = declare(key_order="serial")
    fill(center, 3)
    for number in range(3):
        [first] = pop(center)
        # As a task does that retries: it sends itself again, and is acknowledged then.
        put_again(center, "a0", b"again %d" % number)
        center.ack([first])
        assert pop(center) == []
        time_passes(center, "mail", 200)
    [again] = pop(center)
    assert again.body == b"again 2"
    center.ack([again])
    assert ids(pop(center)) == ["a1"]


@pytest.mark.cluster
@pytest.mark.parametrize("how", ["replaces", "goes_on"])
def test_what_takes_the_place_of_what_runs_holds_its_key(declare: Any, how: str) -> None:
    center = declare(key_order="serial")
    fill(center, 2)
    [first] = pop(center)
    put_again(center, "a0", b"again", **{"replaces": False, how: True})
    center.ack([first])
    assert pop(center) == []
    time_passes(center, "mail", 200)
    [again] = pop(center)
    assert (again.id.partition("#")[0], again.body) == ("a0", b"again")


@pytest.mark.parametrize("state", ["runs", "waits for its next try"])
def test_a_message_that_has_the_id_of_what_holds_a_key_does_not_hold_it(
    declare: Any, state: str
) -> None:
    center = declare(key_order="serial", retry_backoff=100)
    fill(center, 2)
    [first] = pop(center)
    if state != "runs":
        center.reject(first, requeue=True)
    put(center, "a0", "a", body=b"another", delay=3600)
    assert pop(center) == []
    if state != "runs":
        time_passes(center, "mail", 200)
        [first] = pop(center)
    assert (first.id, first.body) == ("a0", b"body of a0")
    center.ack([first])
    assert ids(pop(center)) == ["a1"]


@pytest.mark.cluster
def test_who_cancels_what_holds_a_key_lets_the_others_go_on(declare: Any) -> None:
    center = declare(key_order="serial", retry_backoff=100)
    fill(center, 3)
    [first] = pop(center)
    center.reject(first, requeue=True)
    assert pop(center) == []
    center.cancel("a0", topic="mail")
    assert ids(pop(center)) == ["a1"]


# -- turns


@pytest.mark.cluster
def test_keys_take_turns(declare: Any) -> None:
    """X11"""
    center = declare(key_fair=True)
    fill(center, 50)
    put(center, "b0", "b")
    put(center, "c0", "c")
    assert ids(pop(center, 6)) == ["a0", "b0", "c0", "a1", "a2", "a3"]
    put(center, "d0", "d")
    assert "d0" in ids(pop(center, 2))


def test_a_key_that_comes_beside_a_backlog_waits_for_one_message(declare: Any) -> None:
    center = declare(key_fair=True)
    center.put_many("mail", many(3000))
    center.ack(pop(center))
    for number in range(5):
        put(center, f"s{number}", "small")
        some = [center.pop("mail", 1).messages[0] for _ in range(2)]
        assert f"s{number}" in ids(some)
        center.ack(some)


def test_what_is_put_off_of_a_key_holds_up_no_other_key(declare: Any) -> None:
    """Its lane has entries that say nothing any more, as many as there were messages."""
    center = declare(key_fair=True)
    messages = many(2500)
    center.put_many("mail", messages)
    names = [message["id"] for message in messages]
    center.reschedule(names[:-1], delay=3600, topic="mail")
    put(center, "s", "small")
    lanes, got, left = center.registry.topic("mail").slot(0).lane_keys[0], [], [len(names) + 1]
    for _ in range(5):
        got += ids(pop(center, 1))
        left.append(center.client.zcard(lanes))
    assert sorted(got) == [names[-1], "s"]
    assert left[-1] == 0
    # Redis does nothing else meanwhile.
    assert max(before - after for before, after in itertools.pairwise(left)) < 1200


@pytest.mark.cluster
def test_what_is_cancelled_leaves_nothing_in_its_lane(declare: Any) -> None:
    center = declare(key_fair=True)
    for number in range(10):
        put(center, f"a{number}", "a", priority=number % 2 * 9)
    for number in (0, 3, 4, 9):
        center.cancel(f"a{number}", topic="mail")
    lanes = center.registry.topic("mail").slot(0).lane_keys[0]
    assert center.client.zcard(lanes) == 6
    assert ids(pop(center)) == ["a2", "a6", "a8", "a1", "a5", "a7"]
    assert center.client.zcard(lanes) == 0


@pytest.mark.cluster
@pytest.mark.parametrize("by", ["pop", "upkeep"])
def test_what_expires_while_it_waits_leaves_nothing_in_its_lane(declare: Any, by: str) -> None:
    center = declare(key_concurrency=1, message_ttl=500)
    fill(center, 5)
    first = pop(center)
    assert pop(center) == []
    assert len(entries(center)) == 4
    until_due(center, now_us(center.client) + 600_000)
    if by == "pop":
        gone = center.pop("mail").expired
    else:
        gone = [id for event in keep_up(center).events for id in event.expired]
    assert sorted(gone) == ["a1", "a2", "a3", "a4"]
    assert ids(first) == ["a0"]
    assert entries(center) == []


def entries(center: TimeoutCenter) -> list[str]:
    lanes = center.registry.topic("mail").slot(0).lane_keys[0]
    return [entry.decode().split("\0")[2] for entry in center.client.zrange(lanes, 0, -1)]


def burst(number: int, **more: Any) -> list[dict[str, Any]]:
    """One message of a key amid so many of another."""
    found = many(number, **more)
    found[number // 2] |= {"id": "s", "key": "small"}
    return found


@pytest.mark.parametrize("priority", [0, 9])
@pytest.mark.parametrize("together", [True, False], ids=["a list", "one by one"])
def test_a_key_in_the_midst_of_a_burst_has_its_turn_at_once(
    declare: Any, together: bool, priority: int
) -> None:
    center = declare(key_fair=True)
    messages = burst(3000 if together else 700, priority=priority)
    if together:
        center.put_many("mail", messages)
    else:
        for message in messages:
            center.put("mail", **message)
    got = [*ids(pop(center, 1)), *ids(pop(center, 1))]
    assert "s" in got
    assert center.admin.check("mail") == []
    while len(got) < len(messages):
        more = ids(pop(center, 5000))
        assert more
        got += more
    # None twice, and those of a key in their order.
    assert set(got) == {message["id"] for message in messages}
    large = [int(id[1:]) for id in got if id != "s"]
    assert large == sorted(large)


def test_a_key_in_the_midst_of_what_is_due_together_later_has_its_turn_within_some_pops(
    declare: Any,
) -> None:
    center = declare(key_fair=True)
    due = now_us(center.client) + 1_000_000
    center.put_many("mail", burst(3000, at=due / 1_000_000))
    until_due(center, due + 10_000)
    assert any("s" in ids(pop(center, 1)) for _ in range(3000 // 200 + 1))


@pytest.mark.one_server("on a Cluster a pop is of one slot")
def test_what_is_due_later_stays_announced_beside_a_burst_in_another_slot(
    center: TimeoutCenter,
) -> None:
    """A pop that has not sorted all that is due does not look at what is due later."""
    center.queues.declare("mail", slots=2, key_fair=True, key_concurrency=1)
    due = now_us(center.client) + 300_000
    large = key_of(0)
    center.put_many("mail", many(150, large, at=due / 1e6))
    put(center, "s", key_of(1), at=due / 1e6 + 3600)
    until_due(center, due + 10_000)
    assert ids(pop(center, 1)) == [f"{large}0"]
    assert any(
        slot == 1 and due + 3599e6 <= us <= due + 3601e6 for slot, us in announced(center, "mail")
    )


@pytest.mark.cluster
def test_what_takes_turns_is_found_by_its_id_cancelled_and_put_off(declare: Any) -> None:
    """Although it went to its lane at once."""
    center = declare(key_fair=True, key_concurrency=1)
    fill(center, 5)
    put(center, "none")
    assert [found.id for found in center.get("a1", topic="mail")] == ["a1"]
    center.cancel("a0", topic="mail")
    center.reschedule("a1", delay=3600, topic="mail")
    first = pop(center)
    assert sorted(ids(first)) == ["a2", "none"]
    assert pop(center) == []
    center.ack(first)
    assert ids(pop(center)) == ["a3"]
    assert center.admin.check("mail") == []


@pytest.mark.cluster
def test_keys_take_turns_where_puts_are_limited_and_keys_unique(declare: Any) -> None:
    center = declare(key_fair=True, put_rate="1000/s", key_put_rate="20/h")
    large = many(20)
    center.put_many("mail", large[:10])
    for message in large[10:]:
        center.put("mail", **message)
    with pytest.raises(RateLimitedError):
        center.put_many("mail", [{"id": "l20", "body": b"", "key": "large"}])
    put_some(center, "mail", ("s0", "s1"), key="small", unique=Unique("only"))
    center.put("mail", "s2", b"new", key="small", unique=Unique("only", conflict="replace"))
    got = pop(center, 3)
    assert [one.body for one in got if one.id[0] == "s"] == [b"new"]
    assert len(got) == 3
    assert len(pop(center)) == 18
    assert center.admin.check("mail") == []


def test_a_key_with_a_weight_has_more_turns(declare: Any) -> None:
    center = declare(key_fair=True, key_weights={"a": 3})
    for number in range(30):
        put(center, f"a{number}", "a")
        put(center, f"b{number}", "b")
    got = ids(pop(center, 24))
    assert sum(id[0] == "a" for id in got) == 18


# -- check and repair


@pytest.mark.cluster
def test_a_limited_topic_has_no_faults_whatever_waits(declare: Any) -> None:
    center = declare(key_concurrency=1, concurrency=2)
    for number in range(4):
        put(center, f"a{number}", "a")
        put(center, f"b{number}", "b")
    held = pop(center)
    assert pop(center) == []
    assert center.admin.check("mail") == []
    center.ack(held[:1])
    assert center.admin.check("mail") == center.admin.repair("mail") == []
    center.queues.alter("mail", concurrency=None)
    assert center.admin.check("mail") == []


@pytest.mark.cluster
def test_what_is_lost_of_lanes_and_counts_is_found_and_mended(declare: Any, client: Any) -> None:
    center = declare(key_concurrency=1)
    for number in range(3):
        put(center, f"a{number}", "a b")
    [first] = pop(center)
    assert pop(center) == []
    slot = center.registry.topic("mail").slot(0)
    client.delete(slot.lane_keys[0], slot.waits)
    client.hset(slot.busy, "a%20b", 7)
    client.hset(slot.busy, "gone", 1)
    kinds = {(fault.kind, fault.id) for fault in center.admin.check("mail")}
    assert kinds == {*((NO_LANE, "a1"), (NO_LANE, "a2"), (MISCOUNTED, "a b"), (MISCOUNTED, "gone"))}
    assert {(fault.kind, fault.id) for fault in center.admin.repair("mail")} == kinds
    assert center.admin.check("mail") == []
    center.ack([first])
    assert ids(pop(center)) == ["a1"]


# -- another number of slots


@pytest.mark.one_server("on a Cluster messages stay where they are until they are delivered")
@pytest.mark.parametrize(("before", "after"), [(8, 2), (2, 8)])
def test_a_key_goes_on_in_order_while_its_topic_is_resharded(
    center: TimeoutCenter, before: int, after: int
) -> None:
    center.queues.declare("mail", slots=before, key_order="serial", retry_backoff=100)
    keys = [f"key {number}" for number in range(12)]
    for number in range(6):
        for key in keys:
            put(center, f"{key}:{number}", key)
    got: dict[str, list[str]] = {key: [] for key in keys}
    running: dict[str, Delivery] = {}

    def step() -> None:
        for message in pop(center, 7):
            key, _, number = message.id.partition(":")
            assert key not in running, "two of a key run"
            running[key] = message
            got[key].append(number)
        for key in list(running)[::2]:
            message = running.pop(key)
            if message.id.endswith(":1") and not message.failures:
                center.reject(message, requeue=True, backoff=0)
                got[key].pop()
            else:
                center.ack([message])

    for _ in range(4):
        step()

    def meanwhile(*how_far: int) -> None:
        if center.counts("mail").waiting:
            step()

    for number in (6, 7):  # a producer that knows of the new count, and one that does not yet
        for key in keys:
            put(center, f"{key}:{number}", key)
        if number == 6:
            done = reshard_topic(center, "mail", after, settle=0, on_progress=meanwhile)
    while not done.done:
        step()
        done = reshard_topic(center, "mail", after, settle=0)
    for _ in range(300):
        step()
    assert not center.counts("mail").waiting
    assert got == {key: [str(number) for number in range(8)] for key in keys}


# -- pops that wait


@pytest.mark.cluster
def test_a_pop_that_waits_gets_what_a_freed_place_lets_start(declare: Any) -> None:
    center = declare(key_concurrency=1)
    put(center, "a0", "a")
    put(center, "a1", "a")
    [first] = pop(center)
    got: list[str] = []
    other = TimeoutCenter(center.client, grace=0)
    with in_thread(lambda: got.extend(ids(other.pop("mail", wait=20).messages))):
        while not center.client.info("clients")["blocked_clients"] and not center.clustered:
            time.sleep(0.01)  # there is nothing to wait on but the server's count
        began = time.monotonic()
        center.ack([first])
    assert got == ["a1"]
    assert time.monotonic() - began < 10


@pytest.mark.cluster
def test_a_pop_that_waits_gets_what_a_rate_lets_start(declare: Any) -> None:
    center = declare(rate="10/s")
    for number in range(3):
        put(center, f"m{number}")
    got = [center.pop("mail", 5, wait=20) for _ in range(3)]
    assert [ids(popped.messages) for popped in got] == [["m0"], ["m1"], ["m2"]]
    assert got[2].now_us - got[0].now_us >= 2 * 100_000 - 1000


# -- what readers found


def test_what_has_expired_uses_nothing_of_a_rate(declare: Any) -> None:
    center = declare(rate="1/m")
    for number in range(3):
        put(center, f"old{number}", expiration=0.001)
    time.sleep(0.01)  # the server's clock says what has expired
    put(center, "live")
    gone: list[str] = []
    while len(gone) < 3:
        popped = ahead(center)
        assert popped.messages == []
        gone += popped.expired
        assert min(us for _, us in announced(center, "mail")) <= now_us(center.client) + 1_000_000
    assert ids(ahead(center).messages) == ["live"]


@pytest.mark.cluster
def test_a_pop_of_thousands_of_keys_that_take_turns_gives_a_part_of_them(declare: Any) -> None:
    center = declare(key_fair=True)
    center.put_many("mail", [{"id": f"m{n}", "body": b"", "key": f"k{n % 7}"} for n in range(6000)])
    got: set[str] = set()
    while len(got) < 6000:
        some = ids(pop(center, 5000))
        assert some and got.isdisjoint(some)
        got.update(some)


@pytest.mark.parametrize("together", [False, True])
def test_what_is_put_for_a_time_that_is_looked_ahead_to_goes_behind_the_others(
    declare: Any, together: bool
) -> None:
    """A pop has sorted them already."""
    center = declare(key_order="serial")
    at = now_us(center.client) / 1e6 + 1
    fill(center, 4, at=at)
    [first] = ahead(center, us=1_500_000).messages
    if together:
        center.put_many("mail", many(5, "a", at=at)[4:])
    else:
        put(center, "a4", "a", at=at)
    got = [first.id]
    center.ack([first])
    while len(got) < 5:
        [one] = ahead(center, us=1_500_000).messages
        got.append(one.id)
        center.ack([one])
    assert got == [f"a{number}" for number in range(5)]


@pytest.mark.one_server("on a Cluster a key is counted in each of its slots meanwhile")
def test_a_retry_holds_its_key_while_the_queue_gets_more_slots(declare: Any) -> None:
    center = declare(key_order="serial")
    key = key_of(1)
    put(center, "first", key)
    put(center, "second", key)
    first = pop(center)
    assert ids(first) == ["first"]
    assert not reshard_topic(center, "mail", 2, settle=0).done  # the first is in the former slot
    topic = center.registry.topic("mail")
    assert topic.declaration.draining_counts == (1,)
    put_again(center, "first", b"retry", key, delay_us=300_000)
    center.ack(first)
    assert pop(center) == []
    time_passes(center, "mail", 1)
    got = pop(center)
    while not got:
        got = pop(center)
    assert [one.body for one in got] == [b"retry"]
    center.ack(got)
    assert ids(pop(center)) == ["second"]


@pytest.mark.one_server("on a Cluster a key is counted in each of its slots meanwhile")
def test_a_key_that_comes_free_in_its_former_slot_goes_on_however_many_others_wait(
    declare: Any,
) -> None:
    center = declare(key_concurrency=1)
    keys = sorted(key for key in map("k{:04}".format, range(400)) if slot_of(key, 2) == 1)[:150]
    for key in keys:
        put(center, f"first of {key}", key)
    running = {message.key: message for message in pop(center, 1000)}
    assert sorted(running) == keys
    assert not reshard_topic(center, "mail", 2, settle=0).done
    for key in keys:
        put(center, f"second of {key}", key)
    while center.pop("mail", 1000).more:
        pass
    free = keys[-10:]
    center.ack([running[key] for key in free])
    got: list[str] = []
    for _ in range(500):  # each looks at some of those that wait
        got += ids(pop(center))
        if len(got) == len(free):
            break
    assert sorted(got) == [f"second of {key}" for key in free]


@pytest.mark.one_server("on a Cluster a key is counted in each of its slots meanwhile")
@pytest.mark.parametrize("limits", [{"key_concurrency": 1}, {"key_order": "serial"}])
def test_a_pop_by_id_knows_what_runs_of_the_key_in_its_former_slot(
    declare: Any, limits: dict[str, Any]
) -> None:
    center = declare(**limits)
    key = key_of(1)
    put(center, "first", key)
    [first] = pop(center)
    assert not reshard_topic(center, "mail", 2, settle=0).done
    put(center, "second", key)
    put(center, "other", key_of(0))
    wanted = ["second", "other"]
    assert ids(center.pop("mail", ids=wanted).messages) == ["other"]
    assert center.pop("mail", where=lambda found: found.id == "second").messages == []
    center.ack([first])
    assert ids(center.pop("mail", ids=wanted).messages) == ["second"]


@pytest.mark.cluster
def test_what_is_given_again_after_a_lost_reply_keeps_its_start(declare: Any) -> None:
    center = declare(rate="100/s")
    for number in range(5):
        put(center, f"m{number}")
    name = center.deliveries.names.next()
    request = PopRequest(name, ready_limit=10, lookahead_us=45_000, remember=60)
    given = center.runner.run(center.commands.pop(center.registry.topic("mail"), request)).messages
    again = center.runner.run(
        center.commands.recall(center.registry.topic("mail"), None, name)
    ).messages
    assert len(given) == 5
    starts = [message.start_us for message in given]
    assert starts[1:] == sorted(set(starts[1:])) and min(starts[1:]) > 0
    assert [message.start_us for message in again] == starts


def test_what_is_chosen_and_has_expired_uses_nothing_of_a_limit(declare: Any) -> None:
    center = declare(key_rate="1/h", key_order="serial")
    for number in range(3):
        put(center, f"old{number}", "a", expiration=0.001)
    put(center, "live", "a")
    put(center, "last", "a")
    time.sleep(0.01)  # the server's clock says what has expired
    popped = center.pop("mail", ids=[f"old{number}" for number in range(3)])
    assert (popped.messages, sorted(popped.expired)) == ([], ["old0", "old1", "old2"])
    assert ids(center.pop("mail", ids=["live"]).messages) == ["live"]
    assert center.pop("mail", ids=["last"]).messages == []
    assert center.admin.check("mail") == []


def test_what_is_chosen_with_others_of_its_key_and_has_expired_uses_nothing_of_a_rate(
    declare: Any,
) -> None:
    center = declare(key_rate="3/h", key_burst=3)
    put(center, "live0", "a")
    for number in range(2):
        put(center, f"old{number}", "a", expiration=0.001)
    for number in range(1, 4):
        put(center, f"live{number}", "a")
    time.sleep(0.01)  # the server's clock says what has expired
    got: list[str] = []
    gone: list[str] = []
    for _ in range(3):
        popped = center.pop("mail", 100)
        got += ids(popped.messages)
        gone += popped.expired
    assert (got, gone) == (["live0", "live1", "live2"], ["old0", "old1"])
    assert center.admin.check("mail") == []


@pytest.mark.one_server("on a Cluster such a queue has one slot")
@pytest.mark.parametrize("limits", [{"concurrency": 1}, {"rate": "2/h"}], ids=["places", "rate"])
def test_a_schedule_that_goes_leaves_what_is_announced_for_the_whole_queue(
    center: TimeoutCenter, limits: dict[str, Any]
) -> None:
    center.queues.declare("mail", slots=2, **limits)
    far = 2 * 10**15
    change = ScheduleChange("daily", "", "1", far, put=ScheduleFiring("daily@1", b"", far))
    assert center.recurring.change("mail", change).put
    fill(center, 2, key_of(1))
    [first] = pop(center)
    assert pop(center) == []
    center.ack([first])
    soon = {one for one in announced(center, "mail") if one[1] < far}
    assert len(soon) == 1
    change = ScheduleChange("daily", "1", "", take_out="daily@1")
    assert center.recurring.change("mail", change).taken_out
    assert announced(center, "mail") >= soon


@pytest.mark.cluster
@pytest.mark.parametrize("others", [1, 25])
def test_a_firing_that_held_its_key_and_is_taken_out_lets_it_go(declare: Any, others: int) -> None:
    center = declare(key_order="serial", retry_backoff=100)
    for number in range(others):  # which come first among those that wait
        put(center, f"a{number}", f"a{number:02}")
        put(center, f"b{number}", f"a{number:02}")
    firing = ScheduleFiring("daily@1", b"", now_us(center.client), traits=";kb")
    assert center.recurring.change("mail", ScheduleChange("daily", "", "1", put=firing)).put
    put(center, "second", "b")
    [*_, fired] = sorted(pop(center), key=lambda one: one.key or "")
    assert fired.id == "daily@1"
    center.reject(fired, requeue=True)
    assert pop(center) == []
    change = ScheduleChange("daily", "1", "", take_out="daily@1")
    assert center.recurring.change("mail", change).taken_out
    for _ in range(300):  # each looks at some of the keys that wait
        keep_up(center)
        if some := pop(center):
            break
    assert ids(some) == ["second"]


@pytest.mark.cluster
def test_who_purges_a_part_of_a_slot_lets_go_what_waited_for_that(
    declare: Any, monkeypatch: Any
) -> None:
    center = declare(key_order="serial", retry_backoff=100)
    put(center, "first", "a")
    put(center, "second", "a", priority=9)
    [first] = pop(center)
    center.reject(first, requeue=True)
    assert pop(center) == []  # it is held
    monkeypatch.setattr(topics, "PURGE_STEP", 1)
    topic = center.registry.topic("mail")
    call = topics.purge_call(center.context, topic, topic.slot(0))
    assert center.runner.run(call) == (1, [])
    assert min(us for _, us in announced(center, "mail")) <= now_us(center.client)
    assert ids(pop(center)) == ["second"]
    assert center.admin.check("mail") == []


def test_a_consumer_that_looks_far_ahead_starts_no_more_than_a_rate_says(
    connect: Callable[..., Connection], center: TimeoutCenter
) -> None:
    center.queues.declare("mail", slots=1, rate="5/s")
    text = {"content-type": "text/plain", "content-encoding": "utf-8"}
    body = pack({"body": "", "headers": {}, "properties": {}, **text}, deflate=False)
    center.put_many("mail", [{"id": f"m{n}", "body": body, "delay": 2.5} for n in range(14)])
    connection = connect(toc_lookahead=4.0)
    starts: list[int] = []

    def receive(message: Any) -> None:
        starts.append(max(message.delivery.start_us, message.delivery.action_us))
        message.ack()

    def all_have_started() -> bool:
        popped = center.pop("mail")  # somebody who does not look ahead
        starts.extend(popped.now_us for _ in popped.messages)
        center.ack(popped.messages)
        return len(starts) == 14

    with Loop(connection) as loop:
        connection.channel().basic_consume("mail", False, receive, "tag")
        loop.until(all_have_started, 30)
    assert min(b - a for a, b in itertools.pairwise(sorted(starts))) >= 200_000


# -- with what else a queue knows


def test_priorities_hold_within_a_key(declare: Any) -> None:
    center = declare(key_concurrency=1)
    for number, priority in enumerate((0, 9, 3, 0, 9, 3)):
        for key in "ab":
            put(center, f"{key}{number}", key, priority=priority)
    got = run_out(center)
    for key in "ab":
        assert [id for id in got if id[0] == key] == [f"{key}{n}" for n in (0, 3, 2, 5, 1, 4)]


def test_delayed_messages_become_due_and_take_their_place_while_all_waits(declare: Any) -> None:
    center = declare(key_order="serial")
    put(center, "a0", "a")
    [first] = pop(center)
    put(center, "later", "a", delay=50)
    put(center, "soon", "a", delay=20)
    put(center, "b0", "b", delay=10)
    assert pop(center) == []
    assert center.counts("mail") == (0, 3, 1, 0)
    time_passes(center, "mail", 55)
    center.extend([first])
    [other] = pop(center)
    assert other.id == "b0"
    assert center.counts("mail") == (2, 0, 2, 0)
    center.ack([first, other])
    assert run_out(center) == ["soon", "later"]


# -- an acknowledgement that is late


def late_and_running(center: TimeoutCenter, number: int = 2) -> tuple[Delivery, Delivery]:
    """So many messages of one key: a delivery whose lease has ended, and the next one."""
    fill(center, number)
    [late] = pop(center)
    time_passes(center, "mail", 200)
    [running] = pop(center)
    return late, running


def end(center: TimeoutCenter, running: Delivery, how: str) -> None:
    """Of what somebody else has said the end of already."""
    if how == "ack":
        assert center.ack([running]) == 1
    elif how == "lease":
        time_passes(center, "mail", 200)
    elif how == "dead":
        assert center.reject(running, requeue=False, reason="its own") == "dead"
    elif how == "reject":
        center.reject(running, requeue=True)
    else:
        assert center.release([running]) == 0


@pytest.mark.cluster
@pytest.mark.parametrize("ends", ["ack", "lease", "reject", "release"])
@pytest.mark.parametrize("limit", ["concurrency", "key_concurrency", "key_order"])
def test_an_acknowledgement_that_is_late_leaves_the_place_to_who_runs_the_message_now(
    declare: Any, limit: str, ends: str
) -> None:
    center = declare(**{limit: "serial" if limit == "key_order" else 1})
    late, other = late_and_running(center, 3)
    assert other.id == late.id == "a0"
    for _ in range(2):
        assert center.ack([late]) == 1
        assert pop(center) == []
    assert center.extend([other]) == []
    assert center.admin.check("mail") == []
    end(center, other, ends)
    # It does not come back.
    assert ids(pop(center)) == ["a1"]
    assert center.counts("mail").waiting == 1
    assert center.admin.check("mail") == []


def test_of_a_message_that_has_been_delivered_again_an_early_acknowledgement_frees_nothing(
    declare: Any,
) -> None:
    """A worker that was stopped past its lease marks it, and is refused; then it acknowledges."""
    center = declare(key_concurrency=1)
    late, other = late_and_running(center)
    [refused] = center.runner.run_all(mark_calls(center.registry.topic_of, [late]))
    assert refused == [late]
    assert center.ack([late]) == 1
    assert center.runner.run_all(mark_calls(center.registry.topic_of, [other])) == [[]]
    assert pop(center) == []
    assert center.ack([other]) == 1
    assert ids(pop(center)) == ["a1"]


LATE = {
    "ack": lambda center, late: center.ack([late]),
    "reject": lambda center, late: center.reject(late, requeue=False, reason="broken", error="E"),
    "bury": lambda center, late: center.bury(late, reason="broken", error="E"),
}


@pytest.mark.parametrize("ends", ["ack", "lease", "reject", "dead", "release"])
@pytest.mark.parametrize("how", ["reject", "bury"])
@pytest.mark.parametrize("limit", ["concurrency", "key_concurrency", "key_order"])
def test_what_is_dead_for_who_is_late_leaves_the_place_to_who_runs_the_message_now(
    declare: Any, limit: str, how: str, ends: str
) -> None:
    center = declare(**{limit: "serial" if limit == "key_order" else 1})
    late, other = late_and_running(center)
    assert other.id == late.id == "a0"
    assert LATE[how](center, late) == ("dead" if how == "reject" else "a0")
    LATE[how](center, late)  # repeated, for its reply was lost
    assert pop(center) == []
    assert center.extend([other]) == []
    assert center.admin.check("mail") == []
    end(center, other, ends)
    assert ids(pop(center)) == ["a1"]
    left = center.get("a0", topic="mail")
    reason = ("its own", "E") if ends == "dead" else ("broken", "E")
    assert [(one.state, one.reason, one.error) for one in left] == (
        [] if ends == "ack" else [("dead", *reason)]
    )
    assert center.admin.check("mail") == []


def test_what_was_acknowledged_late_has_ended_well_whatever_others_say(declare: Any) -> None:
    center = declare(key_concurrency=1)
    put(center, "a0", "a")
    some = []
    for _ in range(3):
        some += pop(center)
        time_passes(center, "mail", 200)
    [running] = pop(center)
    first, second, third = some
    assert center.reject(first, requeue=False) == "dead"
    assert center.ack([second]) == 1
    assert center.reject(third, requeue=False) is None
    assert center.extend([running]) == []
    time_passes(center, "mail", 200)
    assert pop(center) == []
    assert center.get("a0", topic="mail") == []
    assert center.admin.check("mail") == []


@pytest.mark.parametrize("ends", ["ack", "lease"])
def test_a_failure_that_is_told_after_an_early_acknowledgement_frees_nothing_either(
    declare: Any, ends: str
) -> None:
    """A worker that was stopped past its lease acknowledges, runs the task, and that fails."""
    center = declare(key_concurrency=1)
    late, other = late_and_running(center)
    assert center.ack([late]) == 1
    assert center.runner.run_all(mark_calls(center.registry.topic_of, [other])) == [[]]
    assert center.bury(late, reason="failed") == "a0"
    assert pop(center) == []
    end(center, other, ends)
    assert ids(pop(center)) == ["a1"]
    assert [one.reason for one in center.get("a0", topic="mail")] == (
        [] if ends == "ack" else ["failed"]
    )
    assert center.admin.check("mail") == []


@pytest.mark.cluster
@pytest.mark.parametrize("how", LATE)
def test_who_knows_of_no_limit_and_is_late_frees_no_place(center: TimeoutCenter, how: str) -> None:
    center.queues.declare("mail", slots=1)
    fill(center, 2)
    before = TimeoutCenter(center.client, grace=0)
    [late] = before.pop("mail", 1).messages
    before.registry.clock = lambda: 0.0  # it reads no declaration again
    center.queues.alter("mail", key_concurrency=1)
    time_passes(center, "mail", 200)
    [other] = pop(center, 1)
    assert other.id == "a0"
    assert other.has_place
    assert not before.registry.topic("mail").declaration.lanes
    LATE[how](before, late)
    assert pop(center) == []
    assert center.extend([other]) == []
    assert center.admin.check("mail") == []
    assert center.ack([other]) == 1
    assert ids(pop(center)) == ["a1"]
    assert center.get("a0", topic="mail") == []


@pytest.mark.parametrize("how", LATE)
@pytest.mark.parametrize("comes_back", ["reject", "release"])
def test_a_full_server_takes_what_is_said_late(
    declare: Any, client: Any, full: Callable[[], Any], how: str, comes_back: str
) -> None:
    center = declare(key_concurrency=1)
    late, other = late_and_running(center)
    full()
    LATE[how](center, late)
    end(center, other, comes_back)
    client.config_set("maxmemory", "0")
    assert ids(pop(center)) == ["a1"]
    assert center.counts("mail").dead == (how != "ack")
