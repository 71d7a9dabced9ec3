"""Upkeep: one process keeps all topics in order, and nobody takes from who lives.

A holder here is a heartbeat of its own, as each process has one; the message is delivered by a
center's pop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection, Consumer, Exchange, Message, Queue

import kombu_toc
from kombu_toc import Limits, TimeoutCenter
from kombu_toc.consumer import upkeeper
from kombu_toc.consumer.lease_keeper import LeaseKeeper
from kombu_toc.consumer.upkeeper import LEASE
from kombu_toc.model.results import Delivery

from ..support.cases import night
from ..support.consumers import keeps_up
from ..support.consuming import Inbox, deliver_until
from ..support.fixtures import own_server
from ..support.inspection import announced, calls_of, check_slots, put_some
from ..support.servers import Server, SteppedServer, frozen
from ..support.waiting import in_thread, wait_until

Connect = Callable[..., Connection]

#: Seconds; long enough for a grace to end within it.
VISIBILITY = 3.0

#: An envelope as the transport keeps it.
BODY = b'{"h":{},"p":{},"t":null,"e":null}\nx'


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Server]:
    """A server that may be stopped, and keeps what it has."""
    with Server(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


@pytest.fixture
def stepped(tmp_path: Path) -> Iterator[SteppedServer]:
    with SteppedServer(tmp_path) as server:
        yield server


class Process:
    """What stands for a process: a heartbeat, and what it holds."""

    def __init__(self, url: str) -> None:
        self.heartbeat = LeaseKeeper(lambda: kombu_toc.center_for(url))
        self.center = kombu_toc.center_for(url)
        self.held: list[Delivery] = []

    def take(self, topic: str, number: int = 1, visibility: float = VISIBILITY) -> None:
        """Have messages delivered, and renew their leases from now on."""
        for delivery in self.center.pop(topic, number, visibility=visibility).messages:
            self.heartbeat.hold(delivery, visibility)
            self.held.append(delivery)

    def keep_up(self) -> None:
        self.heartbeat.keep_up(self, 0.7)

    def be_elected(self, seconds: float = 0) -> None:
        """It is the one that keeps all topics up, and has been so for this time."""
        self.keep_up()
        until(lambda: keeps_up(self.heartbeat))
        time.sleep(seconds)

    def die(self) -> None:
        """It renews nothing any more."""
        for delivery in self.held:
            self.heartbeat.drop(delivery)
        self.leave()

    def leave(self) -> None:
        self.heartbeat.leave_up(self)

    def close(self) -> None:
        self.die()
        self.center.client.close()


Make = Callable[..., Process]


@pytest.fixture
def process(server: Server, client: redis.Redis) -> Iterator[Make]:
    """Makes them, on the shared server, which is empty, unless another is given."""
    made: list[Process] = []

    def make(on: Server = server) -> Process:
        made.append(Process(on.toc_url))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(holds: Callable[[], Any], seconds: float = 15) -> float:
    """Wait until it holds; returns how long that took."""
    began = time.monotonic()
    wait_until(holds, seconds)
    return time.monotonic() - began


def drain(connection: Connection, seconds: float) -> None:
    deliver_until(connection, lambda: False, seconds)


#: What a keeper needs to know by itself that the server is there.
KNOWN = 2.5


def watch(center: TimeoutCenter, topic: str, seconds: float) -> list[str]:
    """Pop nothing again and again; returns what was rolled back."""
    found: list[str] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found += center.pop(topic, 0).rolled_back
        time.sleep(0.1)  # as one who looks now and then
    return found


# -- a server that stood still, was away, or whose clock was set


def test_what_was_asked_before_the_server_stood_still_takes_nothing_from_who_lives(
    own: Server, process: Make
) -> None:
    """A look is on its way when the server freezes for longer than a lease."""
    center = kombu_toc.center_for(own.toc_url)
    center.context.limits = Limits(visibility=VISIBILITY)
    center.put("mail", "m", BODY)
    holder = process(own)
    holder.take("mail")
    assert watch(center, "mail", 2.5) == []  # it knows by now that the server is there
    with frozen(own) as go_on, in_thread(center.pop, "mail", 0) as looked:
        time.sleep(VISIBILITY + 1)  # the lease ends meanwhile
        go_on()
    assert looked[0].rolled_back == []
    assert watch(center, "mail", VISIBILITY) == []
    assert center.ack(holder.held) == 1


@pytest.mark.parametrize("times", [1, night(2)])
def test_who_keeps_topics_up_takes_nothing_from_who_lives_after_the_server_stood_still(
    own: Server, process: Make, times: int
) -> None:
    holder, keeper = process(own), process(own)
    put_some(holder.center, "mail", 20, body=BODY)
    holder.center.queues.declare("mail", visibility=VISIBILITY)
    holder.take("mail", 20)
    keeper.be_elected(KNOWN)
    for _ in range(times):
        with frozen(own):
            time.sleep(VISIBILITY + 1)
        time.sleep(VISIBILITY)
        assert holder.center.counts("mail").in_flight == 20
    assert holder.center.ack(holder.held) == 20


@pytest.mark.parametrize("who", ["center", "keeper"])
def test_a_clock_that_is_set_forward_takes_nothing_from_who_lives(
    stepped: SteppedServer, process: Make, who: str
) -> None:
    """X10"""
    living, dead, other = (process(stepped) for _ in range(3))
    center = other.center
    center.queues.declare("mail", visibility=VISIBILITY)
    put_some(center, "mail", ("a", "b"), body=BODY)
    living.take("mail")
    dead.take("mail")
    if who == "keeper":
        other.be_elected(KNOWN)
    else:
        watch(center, "mail", 2.5)
    dead.die()
    stepped.step(15)
    if who == "center":
        assert watch(center, "mail", 0.5) == []
    gone = dead.held[0].id

    def is_back() -> bool:
        if who == "center":
            center.pop("mail", 0)
        return center.get(gone, topic="mail")[0].state == "waiting"

    until(is_back)
    assert center.counts("mail").in_flight == 1
    assert center.ack(living.held) == 1


def test_after_a_clock_was_set_forward_who_holds_a_long_lease_has_the_time_to_renew_it(
    stepped: SteppedServer, process: Make
) -> None:
    """X10: that is done when a third of it has passed, however soon somebody looks."""
    center, visibility = process(stepped).center, 3 * VISIBILITY
    center.queues.declare("mail", visibility=visibility)
    center.put("mail", "m", BODY)
    messages = center.pop("mail").messages
    watch(center, "mail", 2.5)  # it knows by now what the clock shows
    stepped.step(2 * visibility)
    assert watch(center, "mail", visibility / 3) == []
    assert center.extend(messages, visibility) == []
    assert center.ack(messages) == 1


@pytest.mark.parametrize("way", ["center", "drain_events", night("basic_get")])
def test_after_a_restart_nobody_takes_from_who_lives(own: Server, process: Make, way: str) -> None:
    """Nor does one that has just connected; but from who died meanwhile."""
    living, dead = process(own), process(own)
    living.center.queues.declare("mail", visibility=VISIBILITY)
    put_some(living.center, "mail", ("a", "b"), body=BODY)
    living.take("mail")
    dead.take("mail")
    own.stop()
    dead.die()
    living.die()  # for now: it takes a second until it is connected again
    time.sleep(VISIBILITY)
    own.start()
    got: list[str] = []
    with Connection(own.toc_url) as connection:
        channel = connection.channel()

        def received(body: object, message: Message) -> None:
            got.append(message.delivery.id)

        if way == "drain_events":
            Consumer(channel, [Queue("mail")], callbacks=[received]).consume()
        center = kombu_toc.center_for(own.toc_url)

        def ask() -> bool:
            if way == "center":
                got.extend(message.id for message in center.pop("mail").messages)
            elif way == "basic_get":
                message = channel.basic_get("mail")
                got.extend([message.delivery.id] if message else [])
            else:
                drain(connection, 0.2)
            return bool(got)

        back = time.monotonic() + 1
        while time.monotonic() < back:
            ask()
            time.sleep(0.02)  # as one who looks now and then
        assert got == []
        assert living.center.extend(living.held, VISIBILITY) == []
        for delivery in living.held:
            living.heartbeat.hold(delivery, VISIBILITY)
        until(ask)
        assert got == [dead.held[0].id]
        assert living.center.ack(living.held) == 1


def test_who_comes_rarely_gives_back_what_the_one_before_saw_ended(process: Make) -> None:
    """A program that is started, looks once, and ends: each time another."""

    def look() -> list[str]:
        return process().center.pop("rarely", 0).rolled_back

    center = process().center
    center.queues.declare("rarely", slots=1, visibility=1)
    center.put("rarely", "m", BODY)
    center.pop("rarely")
    time.sleep(1)  # its lease ends
    assert look() == []
    assert look() == []
    time.sleep(2.4)  # a grace: a third of a lease and two seconds
    assert look() == ["m"]
    assert look() == []
    assert center.client.exists(center.registry.topic("rarely").slot(0).watch) == 0


@pytest.mark.parametrize("who", ["center", "next", "late", night("keeper"), night("others")])
def test_a_message_of_its_own_visibility_comes_back_in_time_whoever_polls(
    process: Make, who: str
) -> None:
    """Its queue's leases last a minute, and nobody has watched the server before."""
    dead, other = process(), process()
    dead.center.queues.declare("mail", slots=1)
    if who == "next":
        killed = process()  # it keeps all topics up, and goes without a word
        killed.be_elected()
        other.keep_up()
    dead.center.put("mail", "m", BODY, visibility=1)
    dead.center.pop("mail")
    began = time.monotonic()
    if who == "keeper":
        other.keep_up()
    if who == "next":
        watch_key = dead.center.registry.topic("mail").slot(0).watch
        until(lambda: bool(dead.center.client.exists(watch_key)))  # it has looked
        killed.heartbeat.upkeeper._elect = lambda *_: (False, 1.0)  # without a word
    if who == "late":
        time.sleep(1.5)  # nobody looks until its lease has ended

    def is_back() -> bool:
        if who == "others":
            process().center.pop("mail", 0)
        elif who not in ("keeper", "next"):
            other.center.pop("mail", 0)
        back = dead.center.get("m", topic="mail")[0].state == "waiting"
        time.sleep(0 if back else 0.2)  # as one who looks now and then
        return back

    until(is_back)
    assert time.monotonic() - began < 1 + 3 + (0.5 if who == "late" else 0)


@pytest.mark.parametrize("times", [1, night(3)])
def test_a_short_lease_of_a_queue_with_long_ones_outlasts_a_silence_that_nobody_sees(
    own: Server, process: Make, times: int
) -> None:
    holder, keeper = process(own), process(own)
    holder.center.put("mail", "m", BODY, visibility=1)
    holder.take("mail", visibility=1)
    keeper.be_elected(KNOWN)
    for _ in range(times):
        with frozen(own):
            time.sleep(2.5)  # the lease ends meanwhile
        time.sleep(0.5)
        assert holder.center.counts("mail").in_flight == 1
    assert holder.center.ack(holder.held) == 1


def test_what_is_known_of_looks_at_leases_goes_with_the_leases(center: TimeoutCenter) -> None:
    topic = center.queues.declare("mail", slots=1, visibility=1)
    center.put("mail", "m", BODY)
    held = center.pop("mail").messages
    TimeoutCenter(center.client).pop("mail", 0)
    assert center.client.exists(topic.slot(0).watch) == 1
    center.ack(held)
    TimeoutCenter(center.client).pop("mail", 0)
    assert center.client.exists(topic.slot(0).watch) == 0


# -- what is done for topics that nobody consumes, or whose consumers are busy


def test_topics_that_nobody_consumes_are_kept_up(process: Make) -> None:
    keeper, dead = process(), process()
    center = dead.center
    keeper.be_elected()
    for name in ("nobody", "others"):
        center.queues.declare(name, slots=8, visibility=VISIBILITY, dead_limit=8)
        put_some(center, name, 3, "", body=BODY, basis="0")
        dead.take(name, 1)
        center.reject(center.pop(name).messages[0], requeue=False)
        center.reject(center.pop(name).messages[0], requeue=False)
    dead.die()  # its leases are those of the pops
    took = until(lambda: all(center.counts(n).ready == 1 for n in ("nobody", "others")))
    assert took < VISIBILITY + 2
    until(lambda: all(center.counts(n).dead == 1 for n in ("nobody", "others")))
    for name in ("nobody", "others"):
        assert announced(center, name)
        check_slots(center, name)


def test_a_message_whose_announcement_was_lost_starts_within_a_second(
    connection: Connection, center: TimeoutCenter
) -> None:
    got: list[float] = []

    def received(body: object, message: Message) -> None:
        got.append(time.monotonic())
        message.ack()

    with Consumer(connection, [Queue("mail")], callbacks=[received]):
        connection.transport.poller.long_running = True
        assert deliver_until(connection, lambda: keeps_up(connection.transport.lease_keeper), 10)
        drain(connection, 1.5)
        for number in range(3):
            due = time.monotonic() + 0.5
            center.put("mail", f"m{number}", BODY, delay=0.5)
            # Claimed by now; and whoever has claimed it forgets it.
            drain(connection, 0.1)
            connection.transport.poller.dispatcher.due.replace([])
            center.client.delete(center.keys.wake("mail"))
            assert deliver_until(connection, lambda n=number: len(got) > n, 5), "it is stuck"
            assert got[number] < due + 1


def test_of_many_processes_one_keeps_the_topics_up_and_another_follows(process: Make) -> None:
    processes = [process() for _ in range(5)]

    def keepers() -> list[Process]:
        return [one for one in processes if keeps_up(one.heartbeat)]

    for one in processes:
        one.keep_up()
    until(lambda: len(keepers()) == 1 and all(one.heartbeat.kept_up for one in processes))
    [first] = keepers()
    first.leave()
    assert until(lambda: any(one is not first for one in keepers())) < 2 * LEASE + 1
    [second] = keepers()
    # Without a word: as if it had been killed.
    second.heartbeat.upkeeper._elect = lambda *_: (False, 1.0)
    assert until(lambda: any(one is not second for one in keepers())) < 2 * LEASE + 1


def test_who_left_while_it_was_being_elected_stands_in_nobodys_way(process: Make) -> None:
    """W5: it would be elected again and again, and keep nothing up."""
    first, second = process(), process()
    first.heartbeat.look_after("mail", 3_600_000)  # its thread goes on
    keeper = first.heartbeat.upkeeper
    elect, answers = keeper._elect, []

    def elect_and_leave(*args: object) -> tuple[bool, float]:
        answers.append(elect(*args))
        first.leave()
        return answers[-1]

    keeper._elect = elect_and_leave
    first.keep_up()
    until(lambda: answers)
    second.keep_up()
    assert until(lambda: keeps_up(second.heartbeat)) < LEASE + 1


def test_who_is_elected_and_can_start_no_thread_keeps_the_topics_up_later(
    process: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W5: it took itself for at work from then on, and was never elected again."""
    one, native = process(), upkeeper.unpatched_threading()
    starts = []

    def start(run: Callable[[], None]) -> None:
        starts.append(run)
        if len(starts) == 1:
            raise RuntimeError("can't start new thread")
        native.start(run)

    monkeypatch.setattr(upkeeper, "unpatched_threading", lambda: native._replace(start=start))
    one.keep_up()
    until(lambda: len(starts) == 2 and keeps_up(one.heartbeat))


def test_who_died_elected_is_followed_although_the_clock_is_set_back(
    stepped: SteppedServer, process: Make
) -> None:
    """Y8: its election would last until the server's clock shows that time again"""
    other = process(stepped)
    other.center.client.set(other.center.keys.upkeep, "dead", px=int(LEASE * 1000))
    stepped.step(-30 * 86400)
    other.be_elected()


def test_what_only_some_processes_can_do_is_done_by_one_of_them(process: Make) -> None:
    """Schedules go on although a consumer that knows nothing of them keeps the queues up."""
    plain, *able = (process() for _ in range(3))
    plain.be_elected()
    looks: list[Process] = []
    for one in able:
        one.heartbeat.keep_up_also("schedules", lambda *_, one=one: looks.append(one))
        one.keep_up()
    until(lambda: len(looks) > 2)
    [first] = set(looks)
    assert keeps_up(plain.heartbeat)
    first.leave()
    until(lambda: looks[-1] is not first)
    assert keeps_up(plain.heartbeat) and not any(keeps_up(one.heartbeat) for one in able)
    assert set(looks) == set(able)
    plain.leave()
    until(lambda: keeps_up(looks[-1].heartbeat))


def test_a_broken_topic_keeps_no_other_from_being_kept_up(
    process: Make, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    keeper, dead = process(), process()
    for name in ("a", "b", "c"):
        dead.center.queues.declare(name, slots=2, visibility=VISIBILITY)
        dead.center.put(name, "m", BODY)
        dead.take(name)
    client.set("toc:{b:0}:prepare", "no sorted set", keepttl=False)
    keeper.keep_up()
    dead.die()
    until(lambda: all(dead.center.counts(name).ready for name in ("a", "c")))
    until(lambda: "cannot keep queue b up" in caplog.text)


@pytest.mark.cluster
@pytest.mark.parametrize("which", ["store", "wake index"])
def test_a_key_that_another_program_has_written_stops_its_queue_and_no_other(
    connection: Connection, center: TimeoutCenter, caplog: pytest.LogCaptureFixture, which: str
) -> None:
    """And the error names it. When it is set aside, that queue goes on."""
    queues = [Queue("broken"), Queue("mail")]
    with Inbox(connection, *queues) as inbox, connection.Producer() as producer:
        got = inbox.messages
        slot = center.registry.topic("broken").slot(0)
        key = slot.stores[0] if which == "store" else center.keys.wake("broken")
        center.client.set(key, "something else")
        for number in range(3):
            producer.publish(f"{number}", routing_key="mail")
            assert deliver_until(connection, lambda count=number + 1: len(got) == count)
        assert deliver_until(connection, lambda: "goes on" in caplog.text)
        assert f"the key {key!r} is no" in caplog.text
        center.admin.repair("broken")
        for number in range(3, 20):
            producer.publish(f"{number}", routing_key="broken")
        assert deliver_until(connection, lambda: len(got) == 20)


@pytest.mark.cluster
@pytest.mark.parametrize("which", ["broadcasts", "late broadcasts", "paused"])
def test_a_key_of_no_queue_that_another_program_has_written_stops_only_what_needs_it(
    connection: Connection,
    center: TimeoutCenter,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    which: str,
) -> None:
    """No connection is lost, and the error names the key. When it is set aside, all goes on."""
    monkeypatch.setattr("kombu_toc.consumer.loop.LEFT_OUT", 1.0)
    monkeypatch.setattr("kombu_toc.consumer.blocking.STREAM_PAUSE", 0.2)
    if which == "late broadcasts":
        connection.transport.poller.unhurried |= {"lame", "well"}
    lame, well = Exchange("lame", "fanout"), Exchange("well", "fanout")
    fans = [Queue(exchange.name, exchange, auto_delete=True) for exchange in (lame, well)]
    keys = center.keys
    key = keys.paused if which == "paused" else keys.fanout("lame")
    center.client.set(key, "something else")
    with Inbox(connection, Queue("mail"), *fans) as inbox, connection.Producer() as producer:
        got = inbox.messages
        for number in range(3):
            producer.publish(f"mail {number}", routing_key="mail")
            producer.publish(f"well {number}", exchange="well")
            assert deliver_until(connection, lambda count=2 * number + 2: len(got) == count)
        assert deliver_until(connection, lambda: "goes on" in caplog.text)
        assert f"the key {key!r} is no" in caplog.text
        assert key in [fault.id for fault in center.admin.check("mail")]
        center.admin.repair("mail")
        assert list(center.client.scan_iter("*aside*"))
        producer.publish("lame", exchange="lame")
        assert deliver_until(connection, lambda: len(got) == 7)
        center.queues.pause("mail")
        assert center.queues.is_paused("mail")


# -- what idle consumers ask for


@own_server
def test_an_idle_consumer_looks_rarely_while_somebody_keeps_the_topics_up(
    connection: Connection, client: redis.Redis
) -> None:
    queues = [Queue(f"q{i}") for i in range(10)]
    with Consumer(connection, queues, callbacks=[lambda body, message: None]):
        connection.transport.poller.long_running = True
        drain(connection, 4)
        assert connection.transport.lease_keeper.kept_up
        client.config_resetstat()
        drain(connection, 4)
        sent = calls_of(client, "evalsha")
    # A pass every 0.7 seconds, of two batches or as many slots; elections; and a look perhaps.
    each = 10 * 8 if hasattr(client, "run_keyed") else 2
    assert sent < 7 * each + 4 + 10 * max(each // 10, 1)
