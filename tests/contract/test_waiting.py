"""Pops that wait until something is due, on real servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from kombu_toc import ConfigurationError, Popped, PriorityStepsError, TimeoutCenter, center_for
from kombu_toc.center.waiting import WakeConnection
from kombu_toc.scripts.call import load

from ..support import nursery
from ..support.cluster import Cluster
from ..support.fixtures import own_server
from ..support.inspection import (
    announced,
    blocked,
    calls_of,
    check_slots,
    commands_run,
    now_us,
    put_some,
    time_passes,
)
from ..support.proxy import Proxy
from ..support.sentinels import Deployment
from ..support.servers import Server, frozen
from ..support.waiting import in_thread, running, wait_until

HOUR = 3600.0


Make = Callable[[], TimeoutCenter]


class Waiters:
    """Threads that wait for messages, each with a center of its own; what each got."""

    def __init__(self, make: Make, number: int, *topics: str, **how: Any) -> None:
        self.got: list[tuple[int, str]] = []
        self.errors: list[BaseException] = []
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, args=(number, make(), topics, how))
            for number in range(number)
        ]

    def _run(self, number: int, center: TimeoutCenter, topics: Any, how: dict[str, Any]) -> None:
        try:
            while not self._stopped:
                found = center.pop(topics, wait=0.5, **how).messages
                self.got += [(number, message.id) for message in found]
                center.ack(found)
        except BaseException as exc:
            self.errors.append(exc)

    @contextmanager
    def running(self) -> Iterator[Waiters]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stopped = True
            for thread in self._threads:
                thread.join()
            assert self.errors == []

    def until(self, number: int, seconds: float = 20) -> None:
        """Until so many messages have come."""
        for _ in running(seconds):
            if len(self.got) >= number:
                return
            time.sleep(0.005)
        raise AssertionError(len(self.got), self.errors)


@pytest.fixture
def make(server: Server | Cluster, client: redis.Redis) -> Callable[[], TimeoutCenter]:
    """Another center on the shared server, which is empty."""
    return lambda: TimeoutCenter(server.client(), grace=0)


@contextmanager
def gets(id: str, center: TimeoutCenter, *topics: str, asks: Any = None) -> Iterator[None]:
    """In this block somebody waits there for messages; it gets this one.

    asks: a client of the server, where another's are blocked too, or none can be asked now
    """
    client = asks or center.client
    with in_thread(center.pop, topics or ["mail", "sms"], wait=60) as returned:
        wait_until(lambda: blocked(client) == 1)
        yield
    assert [message.id for message in returned[0].messages] == [id]


# -- what comes back, and when


def test_a_pop_waits_until_a_message_is_due_and_no_longer(center: TimeoutCenter) -> None:
    center.put("mail", "m", b"body", delay=0.3)
    began = time.monotonic()
    popped = center.pop("mail", wait=30)
    took = time.monotonic() - began
    [message] = popped.messages
    assert (message.topic, message.id, message.body) == ("mail", "m", b"body")
    assert popped.now_us >= message.action_us
    assert 0.25 <= took < 5
    assert center.ack([message]) == 1


def test_what_is_due_already_is_returned_at_once_from_several_topics(center: TimeoutCenter) -> None:
    for number in range(3):
        center.put("mail", f"m{number}", b"")
        center.put("sms", f"s{number}", b"")
    popped = center.pop(["mail", "sms"], 10)
    assert Counter(message.topic for message in popped.messages) == {"mail": 3, "sms": 3}
    assert not popped.more
    assert center.ack(popped.messages) == 6


def test_a_time_that_passes_without_a_message_ends_the_wait(center: TimeoutCenter) -> None:
    center.put("mail", "later", b"", delay=HOUR)
    began = time.monotonic()
    popped = center.pop(["mail", "sms"], wait=0.3)
    assert 0.3 <= time.monotonic() - began < 5
    assert popped.messages == [] and not popped.more
    assert abs(popped.now_us / 1e6 - time.time()) < 5
    assert center.pop(["mail", "sms"]).messages == []


def test_a_message_that_is_put_while_others_wait_for_their_time_comes_at_once(
    center: TimeoutCenter, client: redis.Redis, make: Make
) -> None:
    put_some(center, "mail", 20, "later", delay=HOUR)
    with in_thread(make().pop, ["mail", "sms"], wait=10) as returned:
        wait_until(lambda: not announced(center, "mail") and blocked(client))
        center.put("sms", "now", b"")
    assert [message.id for message in returned[0].messages] == ["now"]
    assert len(announced(center, "mail")) == len({*announced(center, "mail")}) > 0
    check_slots(center, "mail")


def test_who_returns_hands_back_what_it_has_claimed(center: TimeoutCenter) -> None:
    for number in range(40):
        center.put("mail", f"later{number}", b"", delay=HOUR + number)
    before = announced(center, "mail")
    assert len(before) == 8
    assert center.pop("mail", wait=0.3).messages == []
    assert announced(center, "mail") == before


def test_an_exception_while_it_waits_leaves_nothing_claimed(
    center: TimeoutCenter, client: redis.Redis, make: Make
) -> None:
    for number in range(40):
        center.put("mail", f"later{number}", b"", delay=HOUR + number)
    before = announced(center, "mail")

    class Stop(BaseException):
        pass

    def stop(signum: int, frame: Any) -> None:
        raise Stop

    def interrupt() -> None:
        wait_until(lambda: not announced(center, "mail"))
        os.kill(os.getpid(), signal.SIGUSR1)

    previous = signal.signal(signal.SIGUSR1, stop)
    try:
        with in_thread(interrupt), pytest.raises(Stop):
            make().pop("mail", wait=None)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert announced(center, "mail") == before
    assert blocked(client) == 0


# -- many wait


def test_of_many_that_wait_one_gets_a_message(make: Make, center: TimeoutCenter) -> None:
    """X13"""
    with Waiters(make, 8, "mail", "sms").running() as waiters:
        for number in range(60):
            center.put(("mail", "sms")[number % 2], f"m{number}", b"", delay=0.01 * (number % 7))
            if number % 10 == 9:
                waiters.until(number + 1)
        waiters.until(60)
    assert sorted(id for _, id in waiters.got) == sorted(f"m{n}" for n in range(60))
    assert center.counts("mail").in_flight == center.counts("sms").in_flight == 0


def test_messages_that_are_due_together_go_to_all_who_wait(
    make: Make, center: TimeoutCenter, client: redis.Redis
) -> None:
    """Nobody who waits sits on what another could have."""
    center.queues.declare("mail", slots=8)
    with Waiters(make, 6, "mail", limit=1).running() as waiters:
        wait_until(lambda: blocked(client) == 6)
        at = now_us(client) / 1e6 + 0.5
        put_some(center, "mail", 6, at=at)
        waiters.until(6, 0.5 + 1)
    assert len({id for _, id in waiters.got}) == 6


def test_topics_take_turns_and_none_starves(center: TimeoutCenter) -> None:
    put_some(center, "mail", 40)
    put_some(center, "sms", 5, "s")
    got = [center.pop(["mail", "sms"], wait=1).messages[0].topic for _ in range(10)]
    assert got.count("sms") == 5
    put_some(center, "sms", 20, "t")
    topics = Counter(one.topic for one in center.pop(["mail", "sms"], 20, wait=1).messages)
    assert topics == {"mail": 10, "sms": 10}


def test_a_topic_of_which_many_times_are_claimed_delays_the_claims_of_no_other(
    quiet: Server,
) -> None:
    """X8: Redis gives of the first index that has a time, and it is another one each time."""
    with quiet.client() as client, commands_run(quiet) as run:
        center = TimeoutCenter(client, grace=0)
        for _ in range(2):
            center.pop(["mail", "sms"], wait=0.05)
    heard = [command[1:3] for command in run if command[0] == "BZPOPMIN"]
    indexes = [center.keys.wake(queue) for queue in ("mail", "sms")]
    assert sorted(heard) == sorted([indexes, indexes[::-1]])


def test_a_topic_with_a_backlog_delays_no_other(
    center: TimeoutCenter, make: Callable[[], TimeoutCenter]
) -> None:
    put_some(center, "mail", 300)
    other = make()
    for number in range(20):
        other.put("sms", f"s{number}", b"")
        found = [m for _ in range(2) for m in center.pop(["mail", "sms"], 2, wait=1).messages]
        assert f"s{number}" in [message.id for message in found]
        center.ack(found)


def test_priorities_go_first(center: TimeoutCenter) -> None:
    center.queues.declare("mail", slots=1)  # of a Cluster, one is popped after the other
    center.put("mail", "low", b"", priority=9)
    center.put("mail", "high", b"", priority=0)
    assert [center.pop("mail", wait=1).messages[0].id for _ in "12"] == ["high", "low"]


# -- what is announced to nobody


def test_what_comes_back_when_a_lease_ends_reaches_who_waits(
    center: TimeoutCenter, make: Make
) -> None:
    """Without a worker or another process that keeps the topic in order."""
    center.queues.declare("mail", visibility=1)
    center.put("mail", "m", b"")
    [message] = center.pop("mail").messages
    began = time.monotonic()
    popped = make().pop(["mail", "sms"], wait=10)
    assert [one.id for one in popped.messages] == ["m"]
    assert popped.messages[0].failures == 1
    assert popped.rolled_back == ["m"]
    assert time.monotonic() - began < 4
    assert center.extend([message]) == [message]


WAITS = """
import sys, redis
from kombu_toc import center_for
center = center_for(sys.argv[1])
print("waits", flush=True)
for message in center.pop(["mail", "sms"], wait=None).messages:
    print(message.id, flush=True)
"""


def test_a_process_that_is_killed_with_claims_delays_its_messages_by_moments(
    server: Server | Cluster, center: TimeoutCenter, client: redis.Redis
) -> None:
    center.queues.declare("mail", slots=1)
    center.queues.declare("sms", slots=1)
    command = [sys.executable, "-c", WAITS, server.toc_url]
    with nursery.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waits\n"
        wait_until(lambda: blocked(client) == 1)
        due = time.monotonic() + 3
        center.put("mail", "m", b"", delay=3)
        wait_until(lambda: not announced(center, "mail"))  # it has claimed it
        process.kill()
    assert [one.id for one in center.pop(["mail", "sms"], wait=20).messages] == ["m"]
    assert time.monotonic() < due + 3


# -- cost


@pytest.fixture
def quiet(tmp_path: Path) -> Iterator[Server]:
    """A server of its own: threads of earlier tests may still ask the shared one."""
    with Server(tmp_path) as made:
        yield made


def test_who_waits_asks_the_server_next_to_nothing(quiet: Server) -> None:
    """X13: one look a second, and one question in five: not a poll."""
    with quiet.client() as client, quiet.client() as waits:
        other = TimeoutCenter(waits, grace=0)
        other.queues.declare("mail", slots=1)
        with in_thread(other.pop, "mail", wait=30):
            wait_until(lambda: blocked(client) == 1)
            client.config_resetstat()
            began = time.monotonic()
            time.sleep(3)  # what is counted is what it does in this time
            wait_until(lambda: calls_of(client, "evalsha", "eval", "bzpopmin") >= 2)
            calls = calls_of(client, "evalsha", "eval", "bzpopmin")
            seconds = time.monotonic() - began
            other.put("mail", "end", b"")
    assert calls <= 2 + 1.2 * seconds  # both may come just after the count begins


@pytest.mark.one_server("on a Cluster a look is one call for each slot")
def test_threads_that_share_a_center_share_the_looks(quiet: Server) -> None:
    with quiet.client() as client, quiet.client() as shared, ExitStack() as stack:
        center = TimeoutCenter(shared, grace=0)
        center.queues.declare("mail", slots=1)
        for _ in range(10):
            stack.enter_context(in_thread(center.pop, "mail", wait=30))
        wait_until(lambda: blocked(client) == 10)
        client.config_resetstat()
        began = time.monotonic()
        time.sleep(1.5)  # what is counted is what they do in this time
        calls = calls_of(client, "evalsha", "eval")
        assert calls <= 2 + 1.2 * (time.monotonic() - began)  # each by itself: 15 and more
        put_some(center, "mail", 10, "end-")
        stack.pop_all().close()
        assert blocked(client) == 0


def test_somebody_who_keeps_the_topics_up_spares_the_looks(quiet: Server) -> None:
    with quiet.client() as client, ExitStack() as stack:
        center = TimeoutCenter(stack.enter_context(quiet.client()), grace=0)
        center.queues.declare("mail")
        client.set(center.keys.upkeep, "somebody")
        stack.enter_context(in_thread(center.pop, "mail", wait=30))
        wait_until(lambda: blocked(client) == 1)
        client.config_resetstat()
        wait_until(lambda: calls_of(client, "exists") >= 1)  # from then on it knows
        client.config_resetstat()
        time.sleep(2)  # what is counted is what it does in this time
        assert calls_of(client, "evalsha", "eval", "set") == 0
        center.put("mail", "end", b"")


@pytest.mark.one_server("on a Cluster a look is one call for each slot")
def test_of_all_processes_that_wait_one_looks(quiet: Server) -> None:
    with quiet.client() as client, ExitStack() as stack:
        clients = [stack.enter_context(quiet.client()) for _ in range(12)]
        centers = [TimeoutCenter(one, grace=0) for one in clients]
        centers[0].queues.declare("mail", slots=1)
        for center in centers:
            stack.enter_context(in_thread(center.pop, "mail", wait=30))
        wait_until(lambda: blocked(client) == 12)
        wait_until(lambda: client.exists(centers[0].keys.look("mail", 2)))
        client.config_resetstat()
        time.sleep(3)  # what is counted is what they do in this time
        wait_until(lambda: calls_of(client, "evalsha", "eval") >= 2)
        assert calls_of(client, "evalsha", "eval") <= 12  # each by itself: 36 and more
        put_some(centers[0], "mail", 12, "end-")


def test_who_stands_next_looks_when_the_process_that_looks_is_killed(
    center: TimeoutCenter, make: Make, server: Server | Cluster
) -> None:
    client = center.client
    center.put("mail", "m", b"")
    held = center.pop("mail", visibility=60).messages
    first, last = center.keys.look("mail", 0), center.keys.look("mail", 2)
    command = [sys.executable, "-c", WAITS, server.toc_url]
    with nursery.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "waits\n"
            wait_until(lambda: client.exists(first))
            killed = client.get(first)
            with in_thread(make().pop, "mail", wait=40) as returned:
                wait_until(lambda: client.exists(last))
                process.kill()
                wait_until(lambda: client.get(first) not in (None, killed))
                center.extend(held, 0.1)  # nobody is told
        finally:
            process.kill()
    assert [message.id for message in returned[0].messages] == ["m"]


# -- faults


def test_a_connection_that_is_cut_is_made_again(
    center: TimeoutCenter, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    client = center.client
    with gets("m", make(), asks=client):
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        wait_until(lambda: "cannot wait for messages of mail, sms for now" in caplog.text)
        center.put("mail", "m", b"", delay=0.1)


def test_what_came_is_not_lost_when_the_connection_that_waited_is_cut(
    center: TimeoutCenter, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: WakeConnection, real: Any = WakeConnection.stop) -> Any:
        self._connection._sock.close()  # to read is an error then, as after a reset
        return real(self)

    monkeypatch.setattr(WakeConnection, "stop", stop)
    for id in ("m", "n"):
        with gets(id, make(), asks=center.client):
            center.put("mail", "later", b"", delay=HOUR)  # claimed, and waited on
            center.put("mail", id, b"", delay=0.1)


@pytest.mark.one_server("a Cluster has no server that could be stopped and started alone")
def test_a_server_that_is_restarted_is_waited_for(tmp_path: Path) -> None:
    with Server(tmp_path, "--appendonly", "yes") as server:
        center = center_for(server.toc_url)
        center.put("mail", "m", b"", delay=1)
        with gets("m", center_for(server.toc_url), "mail", asks=center.client):
            server.stop()
            server.start()


@pytest.mark.one_server("a Cluster has no server that could be stopped and started alone")
def test_a_server_that_is_away_ends_the_wait_with_its_error(tmp_path: Path) -> None:
    server = Server(tmp_path).start()
    center = center_for(server.toc_url)
    center.queues.declare("mail")
    server.kill()
    began = time.monotonic()
    with pytest.raises(redis.exceptions.ConnectionError):
        center.pop("mail", wait=0.5)
    assert 0.4 <= time.monotonic() - began < 5


@pytest.mark.one_server("it stops the server's process")
def test_a_server_that_is_frozen_for_a_while_is_waited_for(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        center = center_for(server.toc_url)
        center.put("mail", "m", b"", delay=1)
        with gets("m", center_for(server.toc_url), "mail", asks=center.client), frozen(server):
            time.sleep(2)  # for so long the server stands still


@pytest.mark.one_server("a proxy stands before one server")
@pytest.mark.parametrize("many", [False, True])
def test_what_a_pop_had_given_when_its_connection_was_cut_is_not_lost(
    server: Server, center: TimeoutCenter, many: bool
) -> None:
    """It is fetched by the name of the pop, and no retry is spent."""
    center.queues.declare("mail", visibility=30)
    center.put("mail", "m", b"body")
    with Proxy(server.port) as proxy:
        waits = center_for(proxy.toc_url)
        waits.queues.declare("mail")
        waits.pop("mail", 0)  # loads the script, and takes nothing
        lost = proxy.drop_replies(load("pop").sha.encode())
        began = time.monotonic()
        popped = waits.pop(["mail", "sms"] if many else "mail", 5, wait=20)
        assert lost.is_set()
        [message] = popped.messages
        assert (message.id, message.body, message.failures) == ("m", b"body", 0)
        assert time.monotonic() < began + 10
        assert waits.ack(message) == 1
    assert sum(center.counts("mail")) == 0


@pytest.mark.one_server("it has sentinels of its own")
def test_a_failover_is_waited_for(failing: Deployment) -> None:
    center = center_for(failing.toc_url)
    center.queues.declare("mail")
    with gets("m", center_for(failing.toc_url), "mail", asks=center.client):
        failing.acting().kill()
        failing.wait_for_failover()
        put_when_possible(center, "m")


def put_when_possible(center: TimeoutCenter, id: str) -> None:
    def done() -> bool:
        try:
            return center.put("mail", id, b"").added
        except redis.exceptions.ConnectionError:
            return False

    wait_until(done, 30)


def test_a_node_of_a_cluster_that_dies_or_loses_the_wake_indexes_is_waited_for(
    start_cluster: Callable[..., Cluster],
) -> None:
    cluster = start_cluster(replicas=1)
    center = center_for(cluster.toc_url)
    center.queues.declare("mail")
    home = cluster.node_of(center.keys.wake("mail"))
    with in_thread(center_for(cluster.toc_url).pop, ["mail", "sms"], wait=60) as returned:
        wait_until(lambda: home("INFO", "clients")["blocked_clients"] == 1)
        cluster.kill(home)
        cluster.wait_ok()  # its replica has taken over
        put_when_possible(center, "m")
    assert [message.id for message in returned[0].messages] == ["m"]

    home, other = cluster.node_of(center.keys.wake("mail")), cluster.primaries()
    target = next(node for node in other if node is not home)
    with in_thread(center_for(cluster.toc_url).pop, ["mail", "sms"], wait=60) as returned:
        wait_until(lambda: home("INFO", "clients")["blocked_clients"] == 1)
        cluster.migrate_slots([cluster.slot_of(center.keys.wake("mail"))], target)
        put_when_possible(center, "n")
    assert [message.id for message in returned[0].messages] == ["n"]


# -- bad input


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([], 1), "no topic is named"),
        ((["mail", b"sms"], 1), "named by a str"),
        ((["mail"], 0), "a limit of at least 1"),
        (("mail", True), "limit must be a whole number, not True"),
    ],
)
def test_a_pop_that_makes_no_sense_is_refused_and_takes_nothing(
    center: TimeoutCenter, arguments: Any, text: str
) -> None:
    center.put("mail", "m", b"")
    with pytest.raises(ConfigurationError, match=text):
        center.pop(*arguments, wait=1)
    assert center.counts("mail").ready == 1


def test_a_wait_that_is_no_time_and_a_wait_for_some_slots_are_refused(
    center: TimeoutCenter,
) -> None:
    center.put("mail", "m", b"")
    for wrong in (-1, float("nan"), "soon"):
        with pytest.raises(ConfigurationError, match="wait must be a number of seconds"):
            center.pop("mail", wait=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="leave out slots"):
        center.pop("mail", wait=1, slots=[0])
    for none in ([], [True], ["0"]):
        with pytest.raises(ConfigurationError, match="slots must be numbers of slots"):
            center.pop("mail", slots=none)
    for way in ({}, {"wait": 1}, {"ids": ["m"]}):
        with pytest.raises(
            ConfigurationError, match="visibility must be seconds from 0 up, not -1"
        ):
            center.pop("mail", visibility=-1, **way)  # type: ignore[arg-type]
    for chosen in ({"ids": ["m"]}, {"where": bool}, {"early": True}):
        with pytest.raises(ConfigurationError, match="a pop that chooses messages"):
            center.pop(["mail", "sms"], **chosen)  # type: ignore[arg-type]
    assert center.counts("mail").ready == 1


def test_what_one_topic_has_given_is_not_lost_when_another_one_fails(
    center: TimeoutCenter, caplog: pytest.LogCaptureFixture
) -> None:
    center.put("good", "x", b"")
    for slot in center.queues.declare("bad").all_slots():
        center.client.set(slot.prepare, "not a sorted set")
    [message] = center.pop(["good", "bad"], 9, wait=5).messages
    assert message.id == "x"
    assert "cannot wait for messages of good, bad for now: WRONGTYPE" in caplog.text
    center.ack([message])
    with pytest.raises(redis.exceptions.ResponseError, match="WRONGTYPE"):
        center.pop(["good", "bad"], 9, wait=5)


def test_an_exception_after_one_topic_was_popped_gives_its_messages_back(
    center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def agreed(topic: Any, agreed: Any = center.registry.agreed) -> Any:
        if topic.name == "second":
            raise PriorityStepsError("it has other steps")
        return agreed(topic)

    center.put("first", "x", b"")
    center.queues.declare("second")
    monkeypatch.setattr(center.registry, "agreed", agreed)
    for _ in range(2):  # another topic goes first each time
        with pytest.raises(PriorityStepsError):
            center.pop(["first", "second"], 9, wait=5)
        assert center.counts("first") == (1, 0, 0, 0)
    assert center.pop("first").messages[0].failures == 0
    check_slots(center, "first")


@own_server
def test_connections_that_wait_for_nothing_are_used_again(center: TimeoutCenter) -> None:
    center.pop("mail", wait=0.05)
    before = center.client.info("stats")["total_connections_received"]
    for _ in range(5):
        center.pop("mail", wait=0.05)
    assert center.client.info("stats")["total_connections_received"] <= before + 1
    assert isinstance(center.pop("mail", wait=0.01), Popped)


def test_a_message_whose_announcement_was_lost_is_found(
    center: TimeoutCenter, client: redis.Redis, make: Make
) -> None:
    with gets("m", make(), "mail", asks=center.client):
        center.put("mail", "m", b"", delay=HOUR)
        wait_until(lambda: not announced(center, "mail"))  # it is claimed for in an hour
        time_passes(center, "mail", HOUR + 1)
