"""A Redis Cluster as broker: the promises of one server, whatever becomes of the nodes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from kombu import Connection, Consumer, Exchange, Queue
from kombu.exceptions import OperationalError

import kombu_toc

from ..support import nursery
from ..support.cluster import NODE_TIMEOUT, Cluster, Node
from ..support.inspection import slot_keys
from ..support.nodes import Worker
from ..support.tasks import make_app
from ..support.workers import (
    EVENT_LOOP,
    LOOPS,
    POOLS,
    Journal,
    StartWorkers,
    stop_when_done,
    wait_until,
)

#: How a producer goes on although its broker is away: for half a minute.
PATIENTLY = {"max_retries": 300, "interval_start": 0, "interval_step": 0.05, "interval_max": 0.1}

#: Options of a node that keeps what it has been told although it is killed.
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


class Load:
    """A producer that sends without end, at once and with countdowns up to a second."""

    def __init__(self, app: Celery) -> None:
        self.sent: list[str] = []
        self.failed: list[str] = []
        self._task = app.tasks["e2e.note"]
        self._end = threading.Event()
        self._random = random.Random(1)

    def _run(self) -> None:
        while not self._end.wait(0.02):
            name = f"load-{len(self.sent) + len(self.failed)}"
            countdown = self._random.choice((0, 0, 0.3, 1))
            try:
                self._task.apply_async(
                    (name, time.time() + countdown), countdown=countdown, retry_policy=PATIENTLY
                )
            except Exception as exc:
                self.failed.append(f"{name}: {exc!r}")
            else:
                self.sent.append(name)

    @contextmanager
    def flowing(self, seconds: float = 1.5) -> Iterator[None]:
        """It flows for so long before the body and after it, too."""
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            time.sleep(seconds)  # all that comes is to come under load
            yield
            time.sleep(seconds)  # and the load goes on
        finally:
            self._end.set()
            thread.join()


class Site:
    """A cluster, a worker on it, and a producer."""

    def __init__(self, cluster: Cluster, worker: Worker, app: Celery, journal: Journal) -> None:
        self.cluster = cluster
        self.worker = worker
        self.app = app
        self.journal = journal
        self.load = Load(app)
        self.toc = kombu_toc.center_for(cluster.toc_url)

    def hash_slots(self, topic: str = "celery") -> list[int]:
        """Where in the cluster the topic's slots are."""
        return [
            self.cluster.slot_of(slot.body) for slot in self.toc.registry.topic(topic).all_slots()
        ]

    @property
    def hub(self) -> int:
        """Where everything is that is not of one topic's slot."""
        return self.cluster.slot_of("toc:{toc}:topics")

    def all_ran(self, timeout: float = 60) -> list[dict[str, Any]]:
        """What the tasks of the load wrote down, as soon as each has run."""
        assert self.load.failed == []
        sent = set(self.load.sent)

        def missing() -> set[str]:
            return sent - {entry["name"] for entry in self.journal.entries("load-")}

        wait_until(lambda: not missing(), timeout, lambda: f"{missing()}\n{self.logs()[-5000:]}")
        return self.journal.entries("load-")

    def logs(self) -> str:
        return self.worker.container.logs()

    def assert_once_and_timely(self, lateness: float) -> None:
        entries = self.all_ran()
        runs = Counter(entry["name"] for entry in entries)
        assert [name for name, number in runs.items() if number > 1] == []
        late = sorted(round(entry["at"] - entry["due"], 2) for entry in entries)
        assert late[0] >= 0
        assert late[-1] < lateness, late[-20:]

    def assert_no_complaints(self) -> None:
        bad = [line for line in self.logs().splitlines() if "ERROR" in line or "Traceback" in line]
        assert bad == []

    def assert_no_residue(self) -> None:
        self.worker.teardown()
        with self.cluster.client() as client:
            assert slot_keys(client) == []


@pytest.fixture
def site(
    start_cluster: Callable[..., Cluster], start_workers: StartWorkers, journal: Journal
) -> Iterator[Callable[..., Site]]:
    """Start a cluster, and a worker with a producer on it."""
    apps = []

    def made(
        pool: str, *options: str, settings: dict[str, Any] | None = None, **shape: Any
    ) -> Site:
        cluster = start_cluster(*options, **shape)
        settings = {"broker_connection_max_retries": None, **(settings or {})}
        [worker] = start_workers(1, *POOLS[pool], broker=cluster.toc_url, **settings)
        apps.append(make_app(cluster.toc_url, "disabled://", **settings))
        return Site(cluster, worker, apps[-1], journal)

    yield made
    for app in apps:
        app.close()


def blocked(cluster: Cluster, command: str) -> int:
    """Connections that wait at any node in that command."""
    listed = [one for node in cluster.living() for one in node("CLIENT LIST")]
    return sum(one["cmd"] == command and "b" in one["flags"] for one in listed)


# -- what one server does


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_tasks_canvas_events_and_remote_control_work(
    pool: str,
    cluster: Cluster,
    start_workers: StartWorkers,
    journal: Journal,
    celery_backend_cluster: Any,
) -> None:
    with cluster.client() as client:
        client.flushall()
    [worker] = start_workers(1, *POOLS[pool], "-E", broker=cluster.toc_url)
    app = make_app(cluster.toc_url, celery_backend_cluster[0].config()["url"])
    try:
        add, mul, total = (app.tasks[f"e2e.{name}"] for name in ("add", "mul", "total"))
        assert add.delay(1, 2).get(timeout=20) == 3
        assert chain(add.s(1, 2), mul.s(4))().get(timeout=20) == 12
        assert group(add.s(i, i) for i in range(10))().get(timeout=20) == [2 * i for i in range(10)]
        assert chord((add.s(i, i) for i in range(10)), total.s())().get(timeout=20) == 90
        for priority in range(10):
            app.tasks["e2e.note"].apply_async((f"priority-{priority}",), priority=priority)
        app.tasks["e2e.again"].delay(2, 0.2).get(timeout=20)
        app.tasks["e2e.note"].apply_async(("heard",), queue="everyone")
        journal.wait_for("priority-", 10)
        journal.wait_for("heard", 1)

        if pool != "gevent":  # greenlets have a connection more
            wait_until(lambda: blocked(cluster, "bzpopmin"), what="it does not wait at all")
            for _ in range(20):  # one connection, whatever it consumes
                assert blocked(cluster, "bzpopmin") <= 1
                assert blocked(cluster, "xread") <= 1
                time.sleep(0.1)  # it would not open another all at once
        name = worker.hostname()
        assert app.control.ping(timeout=3) == [{name: {"ok": "pong"}}]
        inspect = app.control.inspect(timeout=3)
        assert inspect.active_queues() and inspect.stats()
        words = ("-m", "celery", "-b", cluster.toc_url, "inspect", "toc", "-j")
        assert name in json.loads(nursery.done(words).stdout)

        revoked = app.tasks["e2e.note"].apply_async(("revoked",), countdown=1)
        app.control.revoke(revoked.id)
        with app.connection_for_read() as connection:
            heard: list[str] = []
            handlers = {"task-succeeded": lambda event: heard.append(event["uuid"])}
            receiver = app.events.Receiver(connection, handlers=handlers)
            # Who listens hears what comes after that.
            threading.Timer(0.5, lambda: add.delay(2, 2)).start()
            for _ in receiver.itercapture(limit=None, timeout=10, wakeup=False):
                if heard:
                    break
        assert heard
        with cluster.client() as client:
            stop_when_done([worker], lambda: slot_keys(client) == [])
        assert journal.entries("revoked") == []
        assert "Traceback" not in worker.container.logs()
    finally:
        app.close()


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_guarantees.py::test_countdown_tasks_start_on_time_and_never_early"
)
@pytest.mark.alone
def test_an_idle_worker_starts_what_comes_due_at_its_time(
    site: Callable[..., Site], journal: Journal
) -> None:
    """Twenty times, each at another slot, and the worker has nothing else to do."""
    site = site("prefork")
    time.sleep(2)  # the worker idles
    for i in range(20):
        due = time.time() + 1.5 + i * 0.4
        countdown = due - time.time()
        site.app.tasks["e2e.note"].apply_async((f"idle-{i}", due), countdown=countdown)
    lateness = [entry["at"] - entry["due"] for entry in journal.wait_for("idle-", 20)]
    assert min(lateness) >= 0
    assert max(lateness) < 0.5, lateness


# -- slots that move


@pytest.mark.parametrize("pool", LOOPS)
@pytest.mark.parametrize(
    "what", [pytest.param("the topic's slots", marks=pytest.mark.nightly), "the wake index"]
)
def test_hash_slots_move_under_load_and_every_task_runs_once_and_in_time(
    site: Callable[..., Site], pool: str, what: str
) -> None:
    """Each slot is at two nodes for a while, so that MOVED and ASK occur; there and back."""
    site = site(pool)
    cluster, asks = site.cluster, Counter()
    moved = [site.hub] if what == "the wake index" else site.hash_slots()

    def midway(slot: int) -> None:
        asks[slot] += 1
        time.sleep(0.05)  # what the load asks for meanwhile is at the one node or the other

    with site.load.flowing():
        homes = {slot: cluster.owner(slot) for slot in moved}
        for slot, home in homes.items():
            others = [node for node in cluster.primaries() if node is not home]
            cluster.migrate_slots([slot], others[slot % 2], step=1, midway=midway)
        time.sleep(1)  # the worker serves them there
        for slot, home in homes.items():
            cluster.migrate_slots([slot], home, step=1, midway=midway)
    site.assert_once_and_timely(2.5)
    site.assert_no_complaints()
    assert asks, "no slot that moved had a key"
    site.assert_no_residue()


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_cluster.py::test_hash_slots_move_under_load_and_every_task_runs_once_and_in_time"
)
@pytest.mark.parametrize("pool", EVENT_LOOP)
def test_nodes_come_and_go_under_load(site: Callable[..., Site], pool: str) -> None:
    """A node is added and gets slots; the node that had the wake index is removed."""
    site = site(pool)
    cluster = site.cluster
    with site.load.flowing():
        new = cluster.add_node()
        cluster.migrate_slots([*site.hash_slots()[::2], *range(0, 300)], new)
        time.sleep(1)  # the worker serves them there
        cluster.remove_node(cluster.owner(site.hub))
    site.assert_once_and_timely(2.5)
    site.assert_no_complaints()
    site.assert_no_residue()


# -- nodes that die


def _with_the_hub(site: Site) -> Node:
    return site.cluster.owner(site.hub)


def _without_the_hub(site: Site) -> Node:
    owners = {site.cluster.owner(slot) for slot in site.hash_slots()}
    return min(owners - {_with_the_hub(site)}, key=lambda node: node.port)


VICTIMS = {"with the wake index": _with_the_hub, "without it": _without_the_hub}
EACH_VICTIM = pytest.mark.parametrize(
    "victim", ["with the wake index", pytest.param("without it", marks=pytest.mark.nightly)]
)


@pytest.mark.parametrize("pool", LOOPS)
@EACH_VICTIM
def test_nothing_is_lost_when_a_primary_dies_and_its_replica_is_promoted(
    site: Callable[..., Site], pool: str, victim: str
) -> None:
    """Every publish that returned is on a replica: toc_wait_replicas. (The one that takes over has
    another then, or it would confirm nothing.)"""
    options = {"toc_wait_replicas": 1, "visibility_timeout": 5}
    site = site(pool, replicas=2, settings={"broker_transport_options": options})
    with site.load.flowing():
        site.cluster.kill(VICTIMS[victim](site))
        site.cluster.wait_ok()
        site.app.tasks["e2e.note"].apply_async(("afterwards",), retry_policy=PATIENTLY)
        site.journal.wait_for("afterwards", 1, timeout=20)
    runs = Counter(entry["name"] for entry in site.all_ran())
    # The latest acknowledgements may not have been replicated: these messages come again.
    assert sum(runs.values()) - len(runs) < 20
    center = kombu_toc.center_for(site.cluster.toc_url)  # it knows nothing of who was there before

    def held() -> int:
        counts = center.counts("celery")
        return counts.waiting + counts.in_flight

    wait_until(lambda: not held(), 20, "something is left")


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_cluster.py::"
    "test_nothing_is_lost_when_a_primary_dies_and_its_replica_is_promoted"
)
@EACH_VICTIM
def test_a_manual_failover_under_load_loses_nothing_and_runs_nothing_twice(
    site: Callable[..., Site], victim: str
) -> None:
    site = site("prefork", replicas=1)
    with site.load.flowing():
        site.cluster.failover(VICTIMS[victim](site))
    site.assert_once_and_timely(4)


#: A resharder that is killed (kill -9) with the second batch that it takes from node to node,
#: before it has arrived, or after that.
KILLED = """
import os, signal, sys
from kombu_toc import center_for
from kombu_toc.center import reshard

arrive, calls = reshard.arrive, []

def die(*args):
    calls.append(args)
    if len(calls) == 2:
        if sys.argv[3] == "after":
            args[0].client.hdel = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            arrive(*args)
        os.kill(os.getpid(), signal.SIGKILL)
    return arrive(*args)

reshard.arrive = die
reshard.reshard_topic(center_for(sys.argv[1]), "celery", int(sys.argv[2]), settle=0)
"""


def test_a_reshard_that_is_killed_between_two_nodes_loses_and_doubles_nothing(
    site: Callable[..., Site],
) -> None:
    """The worker that is elected has arrive what was under way."""
    made = site("prefork")
    names = [f"far-{number}" for number in range(60)]
    for name in names:
        made.app.tasks["e2e.note"].apply_async((name,), countdown=3600, task_id=name)
    with made.load.flowing():
        for slots, when in ((2, "before"), (1, "after")):
            command = [sys.executable, "-c", KILLED, made.cluster.toc_url, f"{slots}", when]
            assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    topic = made.toc.registry.declared("celery")
    assert topic is not None
    with made.cluster.client() as client:
        left = [slot.leaving for slot in topic.all_slots()]
        wait_until(lambda: not any(map(client.exists, left)), 60, "a batch was left behind")
    assert [one.moved for one in made.toc.reschedule(names, topic="celery")] == [True] * 60
    wait_until(lambda: len(made.journal.entries("far-")) >= 60, 60, "some are lost")
    made.assert_once_and_timely(lateness=30)
    result = kombu_toc.reshard_topic(made.toc, "celery", 1, settle=6, patience=30)
    assert (result.left, result.done) == (0, True)
    assert sorted(entry["name"] for entry in made.journal.entries("far-")) == sorted(names)
    made.assert_no_residue()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_while_a_node_without_replica_is_away_the_others_are_served_and_then_it_is_too(
    site: Callable[..., Site], pool: str, journal: Journal
) -> None:
    """What is scheduled on the others starts about in time and is listed by `inspect scheduled`,
    what is on it when it is back."""
    site = site(pool, *DURABLE, "--cluster-require-full-coverage", "no")
    dead = _without_the_hub(site)
    note, topic = site.app.tasks["e2e.note"], site.toc.registry.topic("celery")
    here = {True: 0, False: 0}
    due = time.time() + 4
    for i in range(40):
        id_ = f"scheduled-{i}"
        stays = site.cluster.node_of(topic.slot_for(id_).body) is not dead
        name = f"{'others' if stays else 'its'}-{i}"
        note.apply_async((name, due), countdown=due - time.time(), task_id=id_)
        here[stays] += 1
    assert min(here.values()) > 0
    waits = set(map("waits-{}".format, range(20)))
    for id_ in waits:
        note.apply_async((id_,), countdown=3600, task_id=id_)
    stay = {id_ for id_ in waits if site.cluster.node_of(topic.slot_for(id_).body) is not dead}
    assert stay < waits
    time.sleep(0.5)  # the worker has claimed what is announced
    site.cluster.kill(dead)
    others = journal.wait_for("others-", here[True], timeout=15)
    assert max(entry["at"] - entry["due"] for entry in others) < 3
    assert journal.entries("its-") == []
    time.sleep(3)  # the worker goes on without it
    replies: list[dict[str, Any]] = []

    def answered() -> bool:
        with suppress(OSError):  # the queue for the reply may lie on the node that is away
            replies.extend((site.app.control.inspect(timeout=3).scheduled() or {}).values())
        return bool(replies)

    wait_until(answered, 60, site.logs)
    assert {one["request"]["id"] for one in replies[0]} == stay
    assert "the reply lacks" in site.logs() and f":{dead.port}" in site.logs()
    site.cluster.restart(dead)
    site.cluster.wait_ok()
    back = time.time()
    its = journal.wait_for("its-", here[False], timeout=20)
    assert max(entry["at"] for entry in its) - back < 15  # else nobody looks at it
    assert set(journal.runs().values()) == {1}
    note.delay("afterwards")
    journal.wait_for("afterwards", 1, timeout=10)
    assert site.logs().count("cannot renew leases") == 1
    wait_until(lambda: "leases are renewed again" in site.logs(), 5)
    assert "may stop as a whole" not in site.logs()


@pytest.mark.parametrize(
    ("pool", "how"),
    [
        ("prefork", "dead"),
        pytest.param("prefork", "frozen", marks=pytest.mark.nightly),
        ("threads", "frozen"),
    ],
)
def test_while_the_node_with_the_wake_index_is_away_the_others_are_served_and_then_it_is_too(
    site: Callable[..., Site], pool: str, how: str, journal: Journal
) -> None:
    """X6: Consumers look into the slots of the others, where puts go on; what is on the node runs
    when it is back."""
    site = site(pool, *DURABLE, "--cluster-require-full-coverage", "no")
    away, topic = _with_the_hub(site), site.toc.registry.topic("celery")
    nodes = [site.cluster.node_of(slot.body) for slot in topic.all_slots()]
    note = site.app.tasks["e2e.note"]
    sent: Counter[str] = Counter()

    def node_of(id_: str) -> Node:
        return nodes[topic.slot_for(id_).number]

    def send(kind: str, countdown: float, ids: Iterable[str]) -> None:
        for id_ in ids:
            there = node_of(id_) is away
            name = f"{'its' if there else kind}-{id_}"
            sent[name.partition("-")[0]] += 1
            note.apply_async((name, time.time() + countdown), countdown=countdown, task_id=id_)

    send("others", 3, map("scheduled-{}".format, range(40)))
    assert min(sent.values()) > 0
    ids = list(map("new-{}".format, range(200)))
    stays = [id_ for id_ in ids if node_of(id_) is not away]
    lost = next(id_ for id_ in ids if node_of(id_) is away)
    time.sleep(0.5)  # the worker has claimed what is announced
    with ExitStack() as stack:
        if how == "dead":
            with ExitStack() as late:  # who has taken over is not answered for a while
                for node in {*nodes} - {away}:
                    late.enter_context(frozen(node))
                site.cluster.kill(away)
                time.sleep(3)  # a connection for that, and for the answer, takes a second each
        else:
            stack.enter_context(frozen(away))
        wait_until(lambda: len(journal.entries("others-")) == sent["others"], 30, site.logs)
        others = journal.entries("others-")
        assert min(entry["at"] - entry["due"] for entry in others) >= 0
        with pytest.raises(OperationalError):
            note.apply_async(("lost",), task_id=lost, retry=False)
        began = time.monotonic()
        send("put", 0, stays[:20])
        send("timed", 2, stays[20:40])
        assert time.monotonic() - began < 30
        journal.wait_for("put-", 20, timeout=30)
        timed = journal.wait_for("timed-", 20, timeout=30)
        assert min(entry["at"] - entry["due"] for entry in timed) >= 0
        assert journal.entries("its-") == []
        assert "Traceback" not in site.logs(), site.logs()
    if how == "dead":
        site.cluster.restart(away)
    site.cluster.wait_ok()
    journal.wait_for("its-", sent["its"], timeout=60)
    wait_until(lambda: site.app.control.ping(timeout=1, limit=1), 60, site.logs)
    note.delay("afterwards")
    journal.wait_for("afterwards", 1, timeout=10)
    runs = Counter(entry["name"] for entry in journal.entries() if entry["name"] != "lost")
    assert set(runs.values()) == {1}


# -- remote control while a node is away


@contextmanager
def frozen(node: Node) -> Iterator[None]:
    os.kill(node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


def _answers_at(site: Site, node: Node, connection: Connection) -> Queue:
    """A reply queue on that node, declared and bound as Kombu does."""
    exchange = Exchange("reply.celery.pidbox", "direct", durable=False)
    for number in range(1000):
        name = f"asker-{number}.reply.celery.pidbox"
        if site.cluster.node_of(f"toc:{{{name}:0}}:body") is node:
            queue = Queue(name, exchange, name, durable=False, exclusive=True, expires=60)
            bound = queue(connection.default_channel)
            bound.declare()
            return bound
    raise AssertionError(f"no name lies on {node}")


def _ping(connection: Connection, answers: Queue) -> None:
    reply_to = {"exchange": answers.exchange.name, "routing_key": answers.name}
    message = {"method": "ping", "arguments": {}, "destination": None, "reply_to": reply_to}
    with connection.Producer() as producer:
        producer.publish(message, exchange=Exchange("celery.pidbox", "fanout", durable=False))


def _pongs(connection: Connection, answers: Queue, seconds: float) -> list[Any]:
    """Who answers into a reply queue first; nobody if the time is over."""
    heard: list[Any] = []
    deadline = time.monotonic() + seconds
    callbacks = [lambda body, _: heard.append(body)]
    with Consumer(connection, [answers], callbacks=callbacks, no_ack=True):
        _ping(connection, answers)
        while not heard and time.monotonic() < deadline:
            with suppress(TimeoutError):
                connection.drain_events(timeout=0.5)
    return heard


@pytest.mark.parametrize("pool", LOOPS)
@pytest.mark.parametrize("how", [pytest.param("dead", marks=pytest.mark.nightly), "frozen"])
def test_an_answer_to_remote_control_that_cannot_be_sent_holds_no_worker(
    site: Callable[..., Site], pool: str, how: str, journal: Journal
) -> None:
    """X6: The reply queue lies on a node that is away: tasks on the others start, and who asks from
    there is answered."""
    site = site(pool, *DURABLE, "--cluster-require-full-coverage", "no")
    away = _without_the_hub(site)
    note, topic = site.app.tasks["e2e.note"], site.toc.registry.topic("celery")
    stays = [
        id_
        for id_ in map("stays-{}".format, range(200))
        if site.cluster.node_of(topic.slot_for(id_).body) is not away
    ]
    with site.app.connection_for_write() as connection, ExitStack() as stack:
        lost = _answers_at(site, away, connection)
        here = _answers_at(site, _with_the_hub(site), connection)
        assert _pongs(connection, here, 10)
        note.delay("before")  # its queue is declared
        journal.wait_for("before", 1)
        if how == "dead":
            site.cluster.kill(away)
            time.sleep(2 * NODE_TIMEOUT / 1000)  # the others know
        else:
            stack.enter_context(frozen(away))
        for _ in range(5):
            _ping(connection, lost)
        for id_ in stays[:20]:
            note.apply_async((id_,), task_id=id_)
        journal.wait_for("stays-", 20, timeout=10)
        assert _pongs(connection, here, 10), site.logs()
    told = [line for line in site.logs().splitlines() if "is not sent" in line]
    assert told and all("remote control" in line for line in told)
    site.assert_no_complaints()


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_cluster.py::"
    "test_an_answer_to_remote_control_that_cannot_be_sent_holds_no_worker"
)
@pytest.mark.parametrize("pool", [pool for pool in LOOPS if pool != "prefork"])
@pytest.mark.parametrize("seconds", [8, 13])
def test_remote_control_comes_back_after_the_node_with_the_wake_index_was_frozen_and_demoted(
    site: Callable[..., Site], pool: str, seconds: float
) -> None:
    site = site(pool, replicas=1)
    was = _with_the_hub(site)
    assert site.app.control.ping(timeout=5)
    with frozen(was):
        time.sleep(seconds)  # its replica takes over
    site.cluster.wait_ok()
    assert _with_the_hub(site) is not was
    wait_until(lambda: site.app.control.ping(timeout=1, limit=1), 20, site.logs)
    assert "Traceback" not in site.logs()


# -- what cannot work


def test_a_worker_with_a_database_on_a_cluster_says_what_to_change(cluster: Cluster) -> None:
    words = ("-m", "celery", "-A", "tests.support.tasks", "worker", "-P", "solo")
    urls = {"E2E_BROKER": f"{cluster.toc_url}/1", "E2E_BACKEND": "disabled://"}
    said = nursery.done(words, code=1, environment={**urls, "E2E_LOG": "redis://"}).stderr
    assert "database" in said and "cluster" in said, said
