"""What is counted, on a real server: it agrees with what was done, and is in nobody's way."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from kombu import Connection, Consumer, Producer, Queue

import kombu_toc
from kombu_toc import TimeoutCenter, read_metrics, read_script_times
from kombu_toc.metrics import COUNTERS, INTERVAL, Metrics, _all
from kombu_toc.model.topic import MINUTES

from ..support import nursery
from ..support.cases import night
from ..support.fixtures import drain, own_server
from ..support.inspection import keys_left, put_call, put_some
from ..support.servers import Server
from ..support.waiting import wait_until

ROOT = Path(__file__).parents[2]
HOUR = 3600.0


@pytest.fixture(autouse=True)
def _earlier_tests_have_counted() -> None:
    """What this process has not sent of other tests' topics is not sent to these."""
    for metrics in list(_all):
        metrics.reset()


def counted(center: TimeoutCenter, topic: str = "mail") -> dict[str, int]:
    """What Redis has of it, once this process has said what it has to say; only what is not 0."""
    center.metrics.send(center.runner)
    return {name: n for name, n in read_metrics(center)[topic].totals.items() if n}


@own_server
def test_the_counters_agree_with_what_was_done(center: TimeoutCenter) -> None:
    put_some(center, "mail", 10, "now-", body=b"x", token="once")
    center.put("mail", "now-0", b"x", token="once")  # the same once more: it is not added
    put_some(center, "mail", 5, "later-", body=b"x", delay=HOUR)
    messages = center.pop("mail", 20).messages
    assert center.pop("mail").messages == []
    center.ack(messages[:6])
    center.ack(messages[:6])  # there is nothing more to acknowledge
    center.release(messages[6:8])
    center.reject(messages[8], requeue=True)
    center.reject(messages[9], requeue=False)
    center.cancel("later-0")
    center.cancel("nobody")
    center.reschedule("later-1", delay=HOUR)
    assert center.queues.purge("mail") == 7
    assert center.dead.requeue("mail") == 1
    [again] = center.pop("mail").messages
    center.reject(again, requeue=False)
    assert center.dead.purge("mail") == 1
    assert counted(center) == {
        "put": 15,
        "delivered": 11,
        "acked": 6,
        "released": 2,
        "rolled_back": 1,
        "dead": 2,
        "cancelled": 1,
        "rescheduled": 1,
        "requeued": 1,
        "purged": 8,
        "empty": 1,
    }


def test_leases_that_end_and_messages_that_die_of_it_are_counted(center: TimeoutCenter) -> None:
    center.queues.declare("mail", slots=1, retries=1, dead_limit=1)
    put_some(center, "mail", 3, "", body=b"x")
    for _ in range(2):
        assert len(center.pop("mail", 3, visibility=0.01).messages) == 3
        time.sleep(0.02)  # the leases end
    center.pop("mail")
    center.pop("mail")
    assert counted(center) == {
        "put": 3,
        "delivered": 6,
        "rolled_back": 3,
        "dead": 3,
        "dropped": 2,
        "empty": 2,
    }


def test_each_topic_has_its_own_numbers(center: TimeoutCenter) -> None:
    """Whatever the order in which they were declared, and in which Redis keeps them."""
    sizes = {name: number for number, name in enumerate(("zeta", *"qwertyuiopasdfgh", "alpha"), 1)}
    for name, number in sizes.items():
        put_some(center, name, number, "", body=b"x")
        center.pop(name, number - 1)
    center.metrics.send(center.runner)
    measured = read_metrics(center)
    assert list(measured) == sorted(sizes)
    for name, number in sizes.items():
        of_it = measured[name]
        assert of_it.totals["put"] == of_it.recent["put"] == number
        assert of_it.totals["delivered"] == of_it.recent["delivered"] == number - 1
        assert of_it.lateness.count == of_it.recent_lateness.count == number - 1
    some = read_metrics(center, ["zeta", "alpha", "nobody"])
    assert {name: one.totals["put"] for name, one in some.items()} == {"alpha": 18, "zeta": 1}


@pytest.mark.parametrize("moved", [False, True])
def test_lateness_of_what_is_sent_after_its_time_counts_from_its_sending(
    center: TimeoutCenter, moved: bool
) -> None:
    yesterday = time.time() - 86400
    for i in range(50):
        center.put(
            "mail", f"{i}", b"x", at=None if moved else yesterday, delay=HOUR if moved else None
        )
        if moved:  # as if it were sent anew
            center.reschedule(f"{i}", at=yesterday)
    assert max(one.oldest_us for one in center.queues.summary()) < 60_000_000
    assert len(center.pop("mail", 50).messages) == 50
    center.metrics.send(center.runner)
    lateness = read_metrics(center)["mail"].lateness
    assert lateness.count == 50
    assert lateness.quantile(1) < 60


def test_lateness_is_counted_from_the_action_time(center: TimeoutCenter) -> None:
    began = time.monotonic()
    put_some(center, "mail", 20, "", body=b"x", delay=0.05)
    time.sleep(0.25)  # they are to be 200 ms late
    rolled_back = center.pop("mail", 20).messages[0]
    most = time.monotonic() - began - 0.05
    center.reject(rolled_back, requeue=True)
    center.pop("mail")  # it has no action time any more
    center.metrics.send(center.runner)
    measured = read_metrics(center)["mail"]
    assert measured.lateness.count == measured.recent_lateness.count == 20
    assert 0.15 < measured.lateness.quantile(0.5) < 1.5 * most
    assert 0.2 <= measured.lateness.us / 20 / 1_000_000 <= most
    assert measured.recent == measured.totals
    assert measured.rate("delivered") == 21 / measured.seconds


@pytest.mark.alone
def test_a_transports_deliveries_count_their_lateness_when_they_are_handed_over(
    connection: Connection, center: TimeoutCenter
) -> None:
    """Not when they are fetched, which may be before their action time."""
    producer = Producer(connection)
    for _ in range(20):
        producer.publish({}, routing_key="mail", headers={"x-delay": 100})
    with Consumer(connection, [Queue("mail")], callbacks=[lambda body, message: message.ack()]):
        drain(connection)
        # Before it consumes no more: the process's own thread then sends what was counted.
        counts = counted(connection.default_channel.center)
    assert (counts["put"], counts["delivered"], counts["acked"]) == (20, 20, 20)
    measured = read_metrics(center)["mail"]
    assert measured.lateness.count == 20
    assert 0 <= measured.lateness.quantile(0.5) < 0.1


def test_the_numbers_of_the_last_minutes_are_by_the_servers_clock_and_go_by_themselves(
    center: TimeoutCenter, client: redis.Redis
) -> None:
    center.put("mail", "x", b"")
    center.metrics.send(center.runner)
    ring = center.keys.minutes("mail")
    [(place, said)] = client.hgetall(ring).items()
    minute = int(said.split(b"minute ")[1].split()[0])
    assert int(place) == minute % MINUTES
    assert 0 < client.ttl(ring) <= MINUTES * 60
    # As if it were a whole round later: what the place holds is not of this minute.
    client.hset(ring, place, said.replace(b"%d" % minute, b"%d" % (minute - MINUTES)))
    assert read_metrics(center)["mail"].recent["put"] == 0
    assert read_metrics(center)["mail"].totals["put"] == 1
    center.put("mail", "y", b"")
    center.metrics.send(center.runner)
    assert read_metrics(center)["mail"].recent["put"] == 1
    assert read_metrics(center)["mail"].totals["put"] == 2


def test_several_processes_add_up(server: Server, client: redis.Redis) -> None:
    centers = [TimeoutCenter(client) for _ in range(3)]
    for number, center in enumerate(centers):
        put_some(center, "mail", number + 1, f"{number}-")
        center.metrics.send(center.runner)
    assert counted(centers[0]) == {"put": 6}


def test_the_connections_of_a_process_count_together(server: Server, client: redis.Redis) -> None:
    one, two = kombu_toc.center_for(server.toc_url), kombu_toc.center_for(server.toc_url)
    other = kombu_toc.center_for(server.toc_url, toc_prefix="other:")
    assert one.metrics is two.metrics is not other.metrics


def test_a_deleted_topic_leaves_no_counters_and_gets_none(center: TimeoutCenter) -> None:
    center.put("mail", "x", b"")
    center.metrics.send(center.runner)
    center.queues.delete("mail")
    center.metrics.topics["mail"].put += 1  # by another process, say, that has not heard of it
    center.metrics.send(center.runner)
    assert keys_left(center.client) == []


@own_server
def test_nothing_is_sent_where_nothing_has_changed(center: TimeoutCenter) -> None:
    center.put("mail", "x", b"")
    center.metrics.send(center.runner)
    center.client.config_resetstat()
    for _ in range(10):
        center.metrics.send(center.runner)
    assert "cmdstat_evalsha" not in center.client.info("commandstats")
    center.pop("other")
    center.client.config_resetstat()
    center.metrics.send(center.runner)
    assert "cmdstat_evalsha" not in center.client.info("commandstats"), "an empty pop is no news"


def test_a_producer_sends_its_first_publish_and_then_no_more_than_every_few_seconds(
    center: TimeoutCenter, client: redis.Redis
) -> None:
    put_some(center, "mail", 100, "")
    assert read_metrics(center)["mail"].totals["put"] == 1
    center.metrics.due -= INTERVAL  # as if so much time had passed
    center.put("mail", "one more", b"")
    assert read_metrics(center)["mail"].totals["put"] == 101


def test_two_threads_do_not_send_the_same_twice(center: TimeoutCenter) -> None:
    center.registry.topic("mail")
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            center.metrics.send(center.runner)

    threads = [threading.Thread(target=send) for _ in range(3)]
    for thread in threads:
        thread.start()
    topic = center.registry.topic("mail")
    for i in range(0, 300, 10):
        calls = [put_call(center, topic, f"{n}", b"") for n in range(i, i + 10)]
        center.runner.run_all(calls)
    stop.set()
    for thread in threads:
        thread.join()
    assert counted(center)["put"] == 300


def test_counters_that_cannot_be_sent_stop_no_publish_and_are_sent_later(
    center: TimeoutCenter, client: redis.Redis
) -> None:
    client.set("toc:{toc}:counted:mail", "no hash")
    put_some(center, "mail", 3, "")
    client.delete("toc:{toc}:counted:mail")
    assert counted(center)["put"] == 3


def test_a_server_that_is_away_raises_nothing_and_what_was_counted_is_kept(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        center = kombu_toc.center_for(server.toc_url)
        center.put("mail", "x", b"")
        center.put("mail", "y", b"")
        server.kill()
        center.metrics.send(center.runner)
        assert center.metrics.due > time.monotonic() + INTERVAL, "it is not asked again at once"
        server.start()
        center.queues.declare("mail")
        assert counted(center) == {"put": 1}  # the other was sent before, and is gone with it


def test_no_counting_at_all_if_the_url_says_so(server: Server, client: redis.Redis) -> None:
    center = kombu_toc.center_for(f"{server.toc_url}?toc_metrics=false&toc_prefix=quiet:")
    center.put("mail", "x", b"")
    center.ack(center.pop("mail").messages)
    center.metrics.send(center.runner)
    left = {key for key in client.keys("quiet:*") if b"}:sent:" not in key}
    assert left == {b"quiet:{toc}:names", b"quiet:{toc}:topics"}
    assert read_metrics(center)["mail"].totals == dict.fromkeys(COUNTERS, 0)


def test_how_long_scripts_take_is_counted(center: TimeoutCenter) -> None:
    before = time.perf_counter()
    put_some(center, "mail", 50, "")
    took = time.perf_counter() - before
    center.runner.run_all(
        [center.commands.ack(center.pop("mail", 1).messages)[0] for _ in range(2)]
    )
    center.metrics.send(center.runner)
    times = read_script_times(center)
    assert times["put"].calls == times["put"].timed == 50
    assert 0 < times["put"].seconds < took
    assert times["ack"].calls == 2


SHORT = """
import sys, kombu
with_close = len(sys.argv) > 2
connection = kombu.Connection(sys.argv[1])
producer = kombu.Producer(connection)
for i in range(10):
    producer.publish({}, routing_key="mail")
"""


def run(program: str, *args: str) -> float:
    """Run it; return the seconds that it took."""
    began = time.monotonic()
    ran = nursery.run(
        [sys.executable, "-c", program, *args], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return time.monotonic() - began


def test_a_short_programs_last_publishes_are_counted_when_it_ends(
    server: Server, client: redis.Redis
) -> None:
    run(SHORT, server.toc_url)
    center = TimeoutCenter(client)
    wait_until(lambda: read_metrics(center)["mail"].totals["put"] >= 10)


FROZEN = (
    SHORT
    + """
import os, signal
os.kill(int(sys.argv[2]), signal.SIGSTOP)
"""
)


def test_a_program_ends_at_once_although_the_server_does_not_answer(tmp_path: Path) -> None:
    server = Server(tmp_path).start()
    try:
        seconds = run(FROZEN, f"{server.toc_url}?socket_timeout=50", str(server.pid))
    finally:
        subprocess.run(["kill", "-CONT", str(server.pid)], check=True)
        server.stop()
    assert seconds < 30  # who waits for the server waits for the socket's timeout


GREEN = """
import sys
if sys.argv[1] == "gevent":
    import gevent.monkey; gevent.monkey.patch_all()
    from gevent import spawn, joinall
else:
    import warnings; warnings.simplefilter("ignore")
    import eventlet; eventlet.monkey_patch()
    from eventlet import spawn
    joinall = lambda some: [one.wait() for one in some]
import kombu_toc
center = kombu_toc.center_for(sys.argv[2])

def publish(number):
    for i in range(20):
        center.metrics.due = 0
        center.put("mail", f"{number}-{i}", b"x")

joinall([spawn(publish, number) for number in range(10)])
center.metrics.send(center.runner)
"""


@pytest.mark.parametrize("library", ["gevent", night("eventlet")])
def test_greenlets_count_as_threads_do(server: Server, client: redis.Redis, library: str) -> None:
    run(GREEN, library, server.toc_url)
    assert read_metrics(TimeoutCenter(client))["mail"].totals["put"] == 200


def test_a_process_that_only_consumes_sends_from_its_heartbeat(
    connect: Callable[..., Connection], center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kombu_toc.consumer.lease_keeper.INTERVAL", 0.1)
    connection = connect(visibility_timeout=3)
    queue = connection.SimpleQueue("mail")
    for i in range(5):
        queue.put(i)
    own: Metrics = connection.default_channel.center.metrics
    own.reset()
    own.due = time.monotonic() + 0.2
    with connection.channel() as channel:
        while channel.basic_get("mail", no_ack=False) is not None:
            pass
        wait_until(lambda: read_metrics(center)["mail"].totals["delivered"] >= 5)
