"""What keeps leases alive, against a real server: nothing may get in its way."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kombu_toc import TimeoutCenter, center_for
from kombu_toc.center.exchanges import Bindings, Routes, binding
from kombu_toc.consumer.lease_keeper import LeaseKeeper
from kombu_toc.model.results import Delivery
from kombu_toc.model.topic import slot_of

from ..support import nursery
from ..support.cases import night
from ..support.cluster import Cluster
from ..support.inspection import put_some
from ..support.ports import free_port
from ..support.proxy import Proxy
from ..support.servers import Server
from ..support.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def heartbeat(server: Server) -> Iterator[LeaseKeeper]:
    made = LeaseKeeper(lambda: TimeoutCenter(server.client()))
    yield made
    for delivery, _ in made.leases.held():
        made.drop(delivery)


def deliver(
    center: TimeoutCenter, topic: str, visibility: float, number: int = 1
) -> list[Delivery]:
    center.queues.declare(topic, slots=1)
    put_some(center, topic, number, f"{topic}-", b"x")
    return center.pop(topic, number, visibility=visibility).messages


def test_an_error_in_one_topic_keeps_no_other_lease_from_being_renewed(
    center: TimeoutCenter, client: redis.Redis, heartbeat: LeaseKeeper
) -> None:
    [broken] = deliver(center, "broken", 2.4)
    [sound] = deliver(center, "sound", 2.5)
    client.set("toc:{broken:0}:prepare", "no sorted set")
    heartbeat.hold(broken, 2.4)
    heartbeat.hold(sound, 2.5)
    time.sleep(3)  # more than a lease
    assert center.pop("sound").rolled_back == []
    assert center.counts("sound").in_flight == 1


@pytest.mark.alone
def test_a_short_lease_taken_while_others_are_being_renewed_is_renewed_in_time(
    center: TimeoutCenter, client: redis.Redis, heartbeat: LeaseKeeper
) -> None:
    [long] = deliver(center, "long", 3)
    heartbeat.hold(long, 3)
    time.sleep(0.7)  # the first beat comes after one second
    [short] = deliver(center, "short", 1.2)
    client.client_pause(600)
    time.sleep(0.5)  # that beat is under way, and the server does not answer yet
    heartbeat.hold(short, 0.6)
    time.sleep(0.9)  # its first lease has ended, and the long one is not due again
    assert center.pop("short").rolled_back == []
    assert center.counts("short").in_flight == 1


def test_what_was_settled_while_its_lease_was_being_renewed_is_not_reported_as_lost(
    center: TimeoutCenter,
    client: redis.Redis,
    heartbeat: LeaseKeeper,
    caplog: pytest.LogCaptureFixture,
) -> None:
    [delivery] = deliver(center, "mail", 1)
    center.ack([delivery])
    client.client_pause(2500)
    heartbeat.hold(delivery, 1)
    time.sleep(0.5)  # the renewal is under way
    heartbeat.drop(delivery)
    client.ping()
    time.sleep(0.5)  # and is answered
    assert "mail" not in caplog.text
    assert not heartbeat.leases.held()


def test_a_thousand_leases_that_ended_make_one_warning(
    center: TimeoutCenter, heartbeat: LeaseKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    deliveries = deliver(center, "mail", 60, 1000)
    center.release(deliveries)
    for delivery in deliveries:
        heartbeat.hold(delivery, 1)
    wait_until(lambda: not heartbeat.leases.held())
    again = "may be delivered again"
    wait_until(lambda: again in caplog.text)
    [record] = [record for record in caplog.records if again in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith("and 990 more")


def test_that_a_max_lease_has_passed_is_told_and_counted_when_the_server_is_back(
    center: TimeoutCenter, caplog: pytest.LogCaptureFixture
) -> None:
    """X9: of a message that was delivered here again before that was noticed."""
    keeper, now = LeaseKeeper(lambda: center), time.monotonic()
    [first] = deliver(center, "mail", 60)
    center.release([first])
    [again] = center.pop("mail").messages
    keeper.leases.hold(first, 60, now - 2, ends=now - 1)
    keeper.leases.hold(again, 60, now)
    with pytest.raises(redis.ConnectionError):
        keeper.beat(TimeoutCenter(redis.Redis(port=free_port())), now)
    for _ in range(2):
        keeper.beat(center, now)
    assert caplog.text.count("its max lease has passed") == 1
    assert center.metrics.counts(center.registry.topic("mail")).overran == 1


def test_thousands_of_leases_are_renewed_in_calls_of_bounded_length(center: TimeoutCenter) -> None:
    deliveries = deliver(center, "mail", 0.5, 3000)
    center.client.config_resetstat()
    gone = deliveries[0]
    center.ack([gone])
    assert center.extend(deliveries, 60) == [gone]
    time.sleep(0.5)  # the first leases would have ended
    assert center.pop("mail").rolled_back == []
    assert max(len(call.args) for call in center.commands.extend(deliveries, 60)) == 1502


def test_queues_and_bindings_may_go_at_any_time_while_others_are_kept(
    center: TimeoutCenter, heartbeat: LeaseKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    """By a thread that deletes them, and by a channel that is collected as garbage meanwhile."""

    class Channel:
        """Garbage leaves what it held, from within whatever has it collected."""

        def __del__(self) -> None:
            heartbeat.leave_all("garbage")

    class Milliseconds(int):
        """To compare two of them takes a moment."""

        def __lt__(self, other: int) -> bool:
            Channel()
            thread.join(0.001)  # as long as it takes another one to get the turn
            return int(self) < int(other)

        __gt__ = __lt__

    minute = Milliseconds(60_000)
    bound = [binding("direct", "", None, f"reply-{number}") for number in range(200)]
    for number in range(200):
        center.queues.declare(f"reply-{number}", slots=1, expires=int(minute))
    with heartbeat.lock:  # its own thread waits until the tables are full
        for number in range(200):
            for holder in ("garbage", "channel", "other"):
                heartbeat.keep_topic(f"reply-{number}", minute, holder)
                heartbeat.keep_binding("news", bound[number], minute, holder)

    def delete() -> None:
        for number in range(100):
            heartbeat.topics.forget(f"reply-{number}")
            heartbeat.bindings.forget(("news", bound[number]))

    thread = threading.Thread(target=delete)
    thread.start()
    heartbeat.beat(center, time.monotonic())
    thread.join()
    heartbeat.beat(center, time.monotonic())
    here = [one for one in caplog.records if one.thread == threading.get_ident()]
    assert not any("cannot renew" in one.getMessage() for one in here)
    assert "reply-199" in center.queues.names()
    for holder in ("garbage", "channel", "other"):
        heartbeat.leave_all(holder)


def test_a_binding_that_is_undone_while_it_is_refreshed_stays_undone(
    center: TimeoutCenter, heartbeat: LeaseKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that ends undoes its bindings, and its heartbeat is at work meanwhile."""
    exchange, member = Bindings(center), binding("fanout", "", None, "reply")
    heartbeat.keep_binding("everyone", member, 60_000, "me")

    def add_too_late(self: Bindings, *args: Any, add: Any = Bindings.add) -> Any:
        heartbeat.bindings.forget(("everyone", member))
        exchange.remove("everyone", member)
        return add(self, *args)

    monkeypatch.setattr(Bindings, "add", add_too_late)
    heartbeat.beat(center, time.monotonic())
    assert Routes(center).of("everyone").rows == []


def test_an_acknowledgement_that_a_replica_refused_is_said_again(tmp_path: Path) -> None:
    """A failover: for a while the server takes no writes."""
    with Server(tmp_path) as server, server.client() as client:
        center = TimeoutCenter(client)
        [delivery] = deliver(center, "mail", 60)
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        heartbeat = LeaseKeeper(lambda: TimeoutCenter(server.client()))
        heartbeat.retry_later(center.commands.ack([delivery]))
        time.sleep(1.5)  # it is said once a second, and refused
        assert center.counts("mail").in_flight == 1
        client.execute_command("REPLICAOF", "NO", "ONE")
        wait_until(lambda: center.counts("mail").in_flight == 0)


class Away:
    """A Cluster of which one node is stopped, and what has a slot there and elsewhere."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.center = center_for(cluster.toc_url)
        home = cluster.node_of(self.center.keys.topics)
        self.node = next(node for node in cluster.primaries() if node is not home)
        self.topic = self.center.queues.declare("mail", slots=64)

    def deliver(self, there: bool, number: int, visibility: float) -> list[Delivery]:
        """Messages that are in flight, of slots of the node that will be away, or of others."""
        slots = [
            slot.number
            for slot in self.topic.all_slots()
            if (self.cluster.node_of(slot.body) is self.node) == there
        ]
        for slot in slots[:number]:
            basis = next(f"{i}" for i in range(10_000) if slot_of(f"{i}", 64) == slot)
            self.center.put("mail", f"m{slot}", b"", basis=basis)
        return self.center.pop("mail", number, visibility=visibility, slots=slots[:number]).messages


@pytest.fixture
def away(start_cluster: Callable[..., Cluster]) -> Away:
    return Away(start_cluster("--cluster-require-full-coverage", "no"))


@pytest.mark.parametrize("owed", [2, night(0), night(1)])
def test_a_node_that_is_away_keeps_nothing_on_the_others_from_being_renewed(
    away: Away, owed: int
) -> None:
    held = away.deliver(False, 3, 3)
    lost = away.deliver(True, owed + 1, 60)
    transient = next(
        name
        for name in (f"reply{i}" for i in range(100))
        if away.cluster.node_of(away.center.keys.prefix + "{" + name + ":0}:body") is not away.node
    )
    away.center.queues.declare(transient, slots=1, expires=3000)
    exchange = Bindings(away.center)
    member = binding("fanout", "", None, transient)
    exchange.add("everyone", member, 3000)
    heartbeat = LeaseKeeper(lambda: center_for(away.cluster.toc_url))
    away.cluster.kill(away.node)
    for delivery in held:
        heartbeat.hold(delivery, 3)
    for delivery in lost[:1]:
        heartbeat.hold(delivery, 60)
    for delivery in lost[1:]:
        heartbeat.retry_later(away.center.commands.ack([delivery]))
    heartbeat.keep_topic(transient, 3000, "me")
    heartbeat.keep_binding("everyone", member, 3000, "me")
    time.sleep(4)  # more than a lease
    places = {delivery.slot for delivery in held}
    assert away.center.pop("mail", 0, slots=places).rolled_back == []
    assert heartbeat.leases.held()[:3] == [(delivery, 3) for delivery in held]
    assert away.center.expiring.stale() == []
    assert len(Routes(away.center).of("everyone").rows) == 1
    assert heartbeat.in_time("mail", places), "expired leases are rolled back there"
    away.cluster.restart(away.node)
    wait_until(lambda: not heartbeat.calls)
    for delivery, _ in heartbeat.leases.held():
        heartbeat.drop(delivery)
    heartbeat.leave_all("me")


def test_where_leases_cannot_be_renewed_nothing_is_rolled_back_by_who_holds_them(
    away: Away,
) -> None:
    [here] = away.deliver(False, 1, 3)
    [there] = away.deliver(True, 1, 3)
    heartbeat = LeaseKeeper(lambda: center_for(away.cluster.toc_url))
    heartbeat.hold(here, 3)
    heartbeat.hold(there, 3)
    assert heartbeat.in_time("mail")
    away.cluster.kill(away.node)
    wait_until(lambda: not heartbeat.in_time("mail", {there.slot}))
    assert heartbeat.in_time("mail", {here.slot})
    assert heartbeat.in_time("mail", ()) and heartbeat.in_time("news")
    assert not heartbeat.in_time("mail") and not heartbeat.in_time()
    heartbeat.drop(there)
    wait_until(lambda: heartbeat.in_time("mail"))
    heartbeat.drop(here)


GREEN = """
import sys
if sys.argv[1] == "gevent":
    import gevent.monkey; gevent.monkey.patch_all()
else:
    import warnings; warnings.simplefilter("ignore")
    import eventlet; eventlet.monkey_patch()
import ctypes, gc, logging, os, time
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
import kombu_toc
from kombu_toc.consumer import lease_keeper as module
from kombu_toc.consumer.lease_keeper import LeaseKeeper

url = sys.argv[2]
center = kombu_toc.center_for(url)
heart = LeaseKeeper.of("here", lambda: kombu_toc.center_for(url))

def deliver(id):
    center.put("mail", id, b"x")
    return center.pop("mail", visibility=0.6).messages[0]

def block(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ctypes.CDLL(None).usleep(100_000)

def threads():
    return len(os.listdir("/proc/self/task"))

def files():
    return len(os.listdir("/proc/self/fd"))

def block_until(holds):
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, (before, threads(), files())
        block(0.1)
        gc.collect()

kept, lost = deliver("kept"), deliver("lost")
center.client.ping()  # by a connection of redis-py's pool, which a script may need later
before = threads(), files()
heart.hold(kept, 0.6)
heart.hold(lost, 0.6)
center.reject(lost, requeue=True)
block(1.5)
print("rolled back", center.pop("mail", 0).rolled_back)
print("before it may speak")
heart.flush_deferred_logs()
for _ in range(3):
    heart.drop(kept)
    block_until(lambda: threads() <= before[0])
    idle = threads()  # gevent's own may have ended
    heart.hold(kept, 0.6)
    assert threads() > idle
block(0.5)
heart.drop(kept)
block_until(lambda: files() <= before[1])
print("once more")
heart.hold(kept, 0.6)
heart.hold(lost, 0.6)
block(0.5)
"""


@pytest.mark.alone
@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_the_thread_is_native_where_threads_are_greenlets(
    server: Server, client: redis.Redis, library: str
) -> None:
    """It renews while the process is blocked, logs nothing by itself, ends, starts again, and
    neither keeps the process nor spoils its end."""
    ran = subprocess.run(
        [sys.executable, "-c", GREEN, library, server.toc_url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ran.stderr == ""
    assert ran.returncode == 0
    lines = ran.stdout.splitlines()
    warning = lines.pop(2)
    assert warning.endswith("may be delivered again: lost of mail")
    assert lines == ["rolled back []", "before it may speak", "once more", warning]


CONSUMES = """
import sys
import kombu_toc
from kombu import Connection
connection = Connection(sys.argv[1])
channel = connection.default_channel
channel.queue_declare("mail", durable=True)
channel.basic_consume("mail", False, print, "tag")
center = connection.transport.center
while not center.queues.consumers():
    pass
print("ends", flush=True)
"""


def test_nobody_reads_that_a_process_consumes_which_has_ended(
    server: Server, center: TimeoutCenter
) -> None:
    """Although it has cancelled nothing, and is gone at once."""
    command = [sys.executable, "-c", CONSUMES, server.toc_url]
    assert nursery.run(command, cwd=ROOT, check=True, capture_output=True).stdout == b"ends\n"
    assert center.queues.consumers() == {}


ENDS = """
import sys
if sys.argv[1] == "gevent":
    import gevent.monkey; gevent.monkey.patch_all()
import logging, time
logging.basicConfig(level="WARNING", stream=sys.stdout, format="%(message)s")
import kombu_toc
from kombu_toc.consumer.lease_keeper import LeaseKeeper

center = kombu_toc.center_for(sys.argv[2])
deliveries = center.pop("mail", 3).messages
assert len(deliveries) == 3
heart = LeaseKeeper.of("here", lambda: kombu_toc.center_for(sys.argv[3]))
for delivery in deliveries:
    heart.retry_later(center.commands.ack([delivery]))
print("ends", flush=True)
"""


@pytest.mark.parametrize("library", ["none", night("gevent")])
@pytest.mark.parametrize("reachable", [True, False, "soon"])
def test_a_process_says_what_it_owes_before_it_ends_and_waits_no_longer_than_it_must(
    server: Server, center: TimeoutCenter, library: str, reachable: bool | str
) -> None:
    center.queues.declare("mail", slots=1)
    put_some(center, "mail", "abc")
    command = [sys.executable, "-c", ENDS, library, server.toc_url]
    with Proxy(server.port) as proxy:
        if reachable is not True:
            proxy.refuse()
        command.append(proxy.toc_url)
        with nursery.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ends\n"
            began = time.monotonic()
            if reachable == "soon":
                time.sleep(1.3)  # of the two seconds that it waits
                proxy.accept()
            said = process.stdout.read()
            assert process.wait(30) == 0
    lasted = time.monotonic() - began
    assert center.counts("mail").in_flight == (0 if reachable else 3)
    if reachable:
        assert said == "" if reachable is True else "not said" not in said
    else:
        assert "3 calls that settle messages are not said" in said
        assert 1.5 < lasted < 6
