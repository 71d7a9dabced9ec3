"""A Redis Cluster: what is particular to several nodes. The rest of what a center and the
transport promise is tested there by the same tests as on one server (TOC_TEST_CLUSTER=1)."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from celery import Celery
from kombu import Connection, Consumer, Exchange, Message, Producer, Queue

import kombu_toc
from kombu_toc import ScheduleChange, ScheduleFiring, TimeoutCenter, center_for
from kombu_toc.client.errors import BROKEN
from kombu_toc.migrate import migrate_broker

from ..meta.test_readme import broker_of
from ..support.cases import night
from ..support.cluster import Cluster
from ..support.commands import Answer, answer
from ..support.fixtures import drain, failure
from ..support.http_server import HttpServer
from ..support.inspection import (
    announced,
    calls_of,
    check_slots,
    commands_run,
    keys_left,
    pop_call,
    put_call,
    put_some,
    slot_keys,
    time_passes,
)
from ..support.ports import free_port
from ..support.servers import Server, frozen
from ..support.waiting import in_thread, wait_until
from .test_migrate import at, hold, send, source_keys
from .test_reshard import Killed


@pytest.fixture
def center(across: TimeoutCenter) -> TimeoutCenter:
    return across


def crossed(cluster: Cluster) -> int:
    """How often a node has refused a command whose keys are not in one hash slot."""
    number = 0
    for node in cluster.living():
        with node.client() as client:
            for name, figures in client.info("errorstats").items():
                if "CROSSSLOT" in name:
                    number += figures["count"]
    return number


# -- every operation


@pytest.mark.versions
@pytest.mark.parametrize("slots", [1, 8, 64])
def test_every_operation_works_whatever_the_slots(
    cluster: Cluster, center: TimeoutCenter, slots: int
) -> None:
    before = crossed(cluster)
    center.queues.declare("mail", slots=slots)
    assert center.queues.names() == ["mail"]
    ids = [f"m{i}" for i in range(100)]
    for number, id in enumerate(ids[:50]):
        center.put("mail", id, b"body", delay=3600 if number < 20 else 0, priority=number % 10)
    center.put_many("mail", [{"id": id, "body": b"body", "priority": 3} for id in ids[50:]])
    center.put_many("mail", [("m0", b"another body", None, 3600)])  # a copy
    assert (center.counts("mail").scheduled, center.counts("mail").ready) == (21, 80)
    assert [center.put("mail", id, b"", unique="k", delay=60).id for id in ("u", "v")] == ["u", "u"]
    assert center.cancel("u")[0].deleted
    assert sum(counts.waiting for counts in center.queues.counts_by_slot("mail")) == 101
    assert len(center.get("m0")) == 2
    assert len(center.scan("mail", limit=200).messages) == 101
    assert [one.topic for one in center.queues.summary("mail")] == ["mail"]
    assert center.queues.usage("mail").limits == ()
    assert center.queues.unwritten("mail") == []
    assert center.queues.alter("mail", dead_age=60).declaration.dead_age == 60
    assert center.queues.describe("mail").counts.waiting == 101
    assert not center.queues.delete("mail", if_empty=True)
    assert center.queues.coming("mail", [10, 7200])[-1] >= 21
    assert center.admin.check("mail") == center.admin.repair("mail") == []

    messages = []
    while popped := center.pop("mail", 7).messages:
        messages += popped
    assert {message.id for message in messages} == set(ids[20:])
    assert center.pop("mail", 7).more is False
    assert center.extend(messages) == []
    assert center.ack(messages[:40]) == 40
    assert center.ack(messages[:40]) == 0
    assert center.release(messages[40:60]) == 20
    for message in messages[60:80]:
        center.reject(message, requeue=False, reason="done for", error="e")
    assert center.counts("mail").dead == 20
    assert center.dead.requeue("mail", ids=[messages[60].id]) == 1
    assert center.dead.purge("mail") == 19
    assert [center.bury(message, reason="failed") for message in messages[:2]] == [
        message.id for message in messages[:2]
    ]
    assert center.dead.purge("mail") == 2
    assert center.ack(center.pop(["mail", "sms"], 100, wait=5).messages) == 21
    center.queues.delete("sms")

    assert [one.deleted for one in center.cancel("m1")] == [True]
    assert len(center.cancel("m0", topic="mail")) == 2
    assert [one.moved for one in center.reschedule("m2", delay=7200)] == [True]
    assert [one.moved for one in center.run_now("m3")] == [True]
    assert center.ack(center.pop("mail").messages) == 1
    picked = center.pop("mail", ids=["m4", "m5", "m6"], early=True).messages
    assert {message.id for message in picked} == {"m4", "m5", "m6"}
    picked += center.pop("mail", where=lambda one: one.id == "m7", early=True).messages
    released = center.release([*(message.receipt for message in picked), picked[0]])
    assert (released, released.stale) == (4, [])
    check_slots(center, "mail")
    firing = ScheduleFiring("s@1", b"", 4 * 10**15)
    change = ScheduleChange("s", "", "s@1", 4 * 10**15, b"template", put=firing)
    assert center.recurring.change("mail", change).put
    assert [one.state for one in center.recurring.find("s")[1]] == ["waiting"]
    assert len(center.recurring.page("mail", 5)[1]) == center.recurring.count("mail") == 1
    assert [one.name for one in center.recurring.by_name(["mail"], 5).schedules] == ["s"]
    assert center.recurring.topics(limit=5) == ["mail"]
    assert not center.queues.is_paused("mail")
    gone = ScheduleChange("s", "s@1", "", take_out="s@1")
    assert center.recurring.change("mail", gone).taken_out
    assert center.queues.purge("mail") == 17
    with cluster.client() as client:
        assert keys_left(client) == ["toc:{toc}:topics"]
    center.queues.delete("mail")
    assert center.queues.names() == []
    assert crossed(cluster) == before


@pytest.mark.versions
@pytest.mark.parametrize("slots", [8, 64])
def test_kombus_operations_work_whatever_the_slots(
    cluster: Cluster, center: TimeoutCenter, slots: int
) -> None:
    before, got = crossed(cluster), Counter()

    def received(body: str, message: Message) -> None:
        got[body] += 1
        if body == "again" and got[body] == 1:
            message.requeue()
        elif body == "never":
            message.reject()
        else:
            message.ack()

    topics = Exchange("topics", type="topic")
    everyone = Exchange("everyone", type="fanout")
    arguments = {"x-slots": slots}
    queues = [
        Queue("mail", queue_arguments=arguments),
        Queue("news", topics, routing_key="news.#", queue_arguments=arguments),
        Queue("heard", everyone, exclusive=True),
    ]
    with Connection(cluster.toc_url) as connection, Connection(cluster.toc_url) as other:
        producer = Producer(other)
        with Consumer(connection, queues, callbacks=[received]):
            for i in range(100):
                producer.publish(f"mail-{i}", routing_key="mail", priority=i % 10)
                producer.publish(f"news-{i}", exchange=topics, routing_key=f"news.{i}")
            for body in ("again", "never"):
                producer.publish(body, routing_key="mail")
            producer.publish("later", routing_key="mail", headers={"x-delay": 500})
            producer.publish("all", exchange=everyone)
            drain(connection, timeout=1.5)
    assert got.pop("again") == 2
    assert len(got) == 203 and set(got.values()) == {1}
    assert center.counts("mail").dead == 1
    center.dead.purge("mail")
    with cluster.client() as client:
        assert slot_keys(client) == []
    assert crossed(cluster) == before


@pytest.mark.nightly(
    guarded_by="tests/unit/test_topics.py::"
    "test_the_slots_of_any_topic_are_spread_evenly_over_the_nodes_of_a_cluster"
)
def test_the_slots_of_a_topic_lie_evenly_on_the_nodes(
    start_cluster: Callable[..., Cluster],
) -> None:
    """64 slots on 4 nodes: no node has a quarter more than its share."""
    cluster = start_cluster(primaries=4)
    center = center_for(cluster.toc_url)
    center.queues.declare("celery", slots=64)
    on = Counter(cluster.node_of(slot.body) for slot in center.registry.topic("celery").all_slots())
    assert len(on) == 4
    assert max(on.values()) <= 20 and min(on.values()) >= 12, on


# -- slots that move


@pytest.mark.versions
def test_an_announcement_of_another_node_is_no_script_on_the_one_that_wakes_all(
    cluster: Cluster, center: TimeoutCenter
) -> None:
    """That node limits what a Cluster can take (K8)."""
    center.queues.declare("mail", slots=16)
    home = cluster.node_of("{toc}")
    slots = {n for n in range(16) if cluster.node_of(f"{{mail:{n}}}") is not home}
    ids = [id for id in map(str, range(400)) if zlib.crc32(id.encode()) % 16 in slots]
    with home.client() as client:
        before = calls_of(client)
        put_some(center, "mail", ids)
        assert client.zcard(center.keys.wake("mail")) == len(slots)
        assert calls_of(client) - before < len(slots)
        popped = center.pop("mail", limit=len(ids)).messages
        assert len(popped) == center.ack(popped) == len(ids)
        assert not client.exists(center.keys.wake("mail"))


def test_what_a_worker_has_claimed_is_not_taken_out_of_the_wake_index_again(
    cluster: Cluster, center: TimeoutCenter
) -> None:
    """A command for each task less, on the node that wakes all workers (K8)."""
    got = Mock(side_effect=lambda body, message: message.ack())
    with Connection(cluster.toc_url) as one, Consumer(one, [Queue("mail")], callbacks=[got]):
        headers = {"x-delay": 5000}  # longer than it takes until the consumer claims it
        Producer(one).publish("x", routing_key="mail", headers=headers)
        with commands_run(cluster.node_of("{toc}")) as found:
            one.drain_events(timeout=30)
    got.assert_called_once()
    about = [words[0] for words in found if center.keys.wake("mail") in words]
    assert "BZPOPMIN" in about and "ZREM" not in about


def test_few_of_the_puts_into_a_backlog_announce_it_again(
    cluster: Cluster, center: TimeoutCenter
) -> None:
    """Each that does is a command more for the node that wakes all workers (K8)."""
    topic = center.queues.declare("mail", slots=1)
    center.put("mail", "x", b"", delay=60)
    time_passes(center, "mail", 61)
    [(slot, due)] = announced(center, "mail")
    told: set[bool] = set()

    def put() -> bool:
        name = str(time.time_ns())
        call = put_call(center, topic, name, b"", publish=("producer", name))
        [reply] = center.runner.executor.replies([call])
        told.add(again := (reply[2] - due) % 1_000_000 < 200_000)
        assert reply[3] == ([slot, due] if again else [])
        return len(told) == 2

    wait_until(put)


def test_operations_wait_while_what_they_need_is_at_two_nodes(
    cluster: Cluster, center: TimeoutCenter
) -> None:
    """Some keys of a slot are here and some there: nobody can run a script until it is over."""
    center.queues.declare("one", slots=1)
    slot = cluster.slot_of(center.registry.topic("one").slot(0).body)
    home = cluster.owner(slot)
    to = next(node for node in cluster.primaries() if node is not home)
    put_some(center, "one", 5)
    reached, found = threading.Event(), []

    def midway(_: int) -> None:
        reached.set()
        time.sleep(0.3)  # longer than an operation takes

    def use() -> None:
        reached.wait(10)
        center.put("one", "m5", b"")
        found.extend(message.id for message in center.pop("one", 10).messages)

    with in_thread(use):
        cluster.migrate_slots([slot], to, step=1, midway=midway)
    assert found == [f"m{i}" for i in range(6)]
    assert cluster.owner(slot) is to
    # Another that knows nothing of the move, and one that knew it otherwise.
    assert center_for(cluster.toc_url).counts("one").in_flight == 6
    assert center.counts("one").in_flight == 6
    cluster.migrate_slots([slot], home)
    assert center.counts("one").in_flight == 6
    center.queues.delete("one")


# -- replicas


def test_a_put_waits_for_the_replicas_of_its_own_node(
    start_cluster: Callable[..., Cluster],
) -> None:
    cluster = start_cluster(replicas=1)
    center = center_for(cluster.toc_url, toc_wait_replicas=1, toc_wait_timeout=0.3)
    topic = center.queues.declare("mail", slots=8)
    put_some(center, "mail", 40)
    stopped = cluster.replicas_of(cluster.node_of(topic.slot_for("x").body))[0]
    fine = next(
        f"y{i}"
        for i in range(100)
        if stopped not in cluster.replicas_of(cluster.node_of(topic.slot_for(f"y{i}").body))
    )
    with frozen(stopped):
        with pytest.raises(kombu_toc.ReplicationError, match="only 0 of 1 replicas") as said:
            center.put("mail", "x", b"")
        assert "is lost if a replica takes over" in str(said.value)
        assert center.put("mail", fine, b"").id == fine
    assert center.get("x", topic="mail"), "it is kept all the same"


# -- nodes that are away, and what the others have


class OneAway:
    """A Cluster without replicas, with 40 messages in a topic, and one node away."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        center = center_for(cluster.toc_url)
        center.queues.declare("mail", slots=8, key_rate="5/s")
        self.node = next(
            node
            for slot in center.registry.topic("mail").all_slots()
            if (node := cluster.node_of(slot.body)) is not cluster.node_of(center.keys.topics)
        )
        self.slots = tuple(
            slot.number
            for slot in center.registry.topic("mail").all_slots()
            if cluster.node_of(slot.body) is self.node
        )
        self.here: list[str] = []
        self.there: list[str] = []
        for id in map("m{}".format, range(40)):
            center.put("mail", id, b"{}")
            slot = center.registry.topic("mail").slot_for(id).number
            (self.there if slot in self.slots else self.here).append(id)
        center.bury(center.pop("mail", ids=self.here[0]).messages[0], reason="bad")
        self.dead = self.here.pop(0)
        #: who asks has not heard of it, and waits no longer than a second
        self.center = center_for(cluster.toc_url, socket_timeout=1)
        self.center.queues.names()


@pytest.fixture
def one_away(request: Any, start_cluster: Callable[..., Cluster]) -> Iterator[OneAway]:
    away = OneAway(start_cluster("--cluster-require-full-coverage", "no"))
    if request.param == "dead":
        away.cluster.kill(away.node)
        yield away
        return
    os.kill(away.node.pid, signal.SIGSTOP)
    yield away
    os.kill(away.node.pid, signal.SIGCONT)


def what_is_read_of_the_others(one_away: OneAway) -> None:
    center, here = one_away.center, one_away.here
    asked: dict[str, Callable[[], Any]] = {
        "counts": lambda: center.counts("mail"),
        "summary": lambda: center.queues.summary("mail"),
        "scan": lambda: center.scan("mail", limit=100),
        "dead": lambda: center.scan("mail", state="dead"),
        "count": lambda: center.count("mail", state="waiting"),
        "coming": lambda: center.queues.coming("mail", [0, 60]),
        "usage": lambda: center.queues.usage("mail"),
        "check": lambda: center.admin.check("mail"),
        "get": lambda: center.get([here[0], one_away.there[0]], topic="mail"),
        "cancel": lambda: center.cancel([here[0], one_away.there[0]], topic="mail"),
    }
    found = {}
    began = time.monotonic()
    for name, ask in asked.items():
        with pytest.raises(kombu_toc.PartialError) as said:
            ask()
        [missing] = said.value.missing
        slots = one_away.slots
        if name in ("get", "cancel"):  # others cannot have that id
            slots = (center.registry.topic("mail").slot_for(one_away.there[0]).number,)
        assert (missing.topic, missing.slots) == ("mail", slots)
        assert f":{one_away.node.port}" in str(said.value) and "'mail'" in str(said.value)
        found[name] = said.value.results
    assert time.monotonic() - began < 10
    assert found["counts"].waiting == len(here) and found["counts"].dead == 1
    assert found["count"] == len(here)
    assert found["coming"] == [len(here), len(here)]
    assert found["summary"][0].counts == found["counts"]
    assert {one.id for one in found["scan"].messages} == {*here, one_away.dead}
    assert [one.id for one in found["dead"].messages] == [one_away.dead]
    assert found["usage"].limits and found["usage"].waiting == len(here)
    assert found["check"] == []
    assert [one.id for one in found["get"]] == [here[0]]
    assert [(one.id, one.deleted) for one in found["cancel"]] == [(here.pop(0), True)]


def ids_of_the_others_are_found_and_cancelled(one_away: OneAway) -> None:
    center, id = one_away.center, one_away.here.pop()
    assert [one.id for one in center.get(id)] == [id]
    assert [one.deleted for one in center.cancel(id)] == [True]
    assert center.get(id, topic="mail") == []  # its slot has answered


def what_is_not_found_may_be_on_a_node_that_is_away(one_away: OneAway) -> None:
    for ask in (one_away.center.get, one_away.center.cancel):
        with pytest.raises(kombu_toc.PartialError) as said:
            ask(one_away.there[0])
        assert said.value.results == []
    center = one_away.center
    with pytest.raises(kombu_toc.ServerError):
        center.put("mail", one_away.there[0], b"", if_exists="keep")


def what_is_done_to_many_is_done(one_away: OneAway) -> None:
    center, here = one_away.center, one_away.here
    done: dict[str, Any] = {}
    asked: dict[str, Callable[[], Any]] = {
        "requeue": lambda: center.dead.requeue("mail"),
        "dead again": lambda: center.bury(
            center.pop("mail", ids=one_away.dead).messages[0], reason="bad"
        ),
        "purge": lambda: center.dead.purge("mail", ids=[one_away.dead, one_away.there[0]]),
    }
    for name, ask in asked.items():
        try:
            done[name] = ask()
        except kombu_toc.PartialError as exc:
            [missing] = exc.missing
            assert f":{one_away.node.port}" in missing.server
            done[name] = exc.results
    assert (done["requeue"], done["purge"]) == (1, 1)
    cancelled = _toc(one_away.cluster, "cancel", "--queue", "mail", "--yes", "--json")
    assert cancelled.code == 6, cancelled
    told = cancelled.json
    assert (told["cancelled"], told["late"]) == (len(here), 0)
    assert told["missing"][0]["queue"] == "mail"


def _toc(cluster: Cluster, *words: str) -> Answer:
    """Run a command of ``celery toc``."""
    places = {"h1:7000,h2:7000,h3:7000": cluster.toc_url.partition("//")[2]}
    broker = broker_of("docs/cluster.md", "toc+cluster:", places)
    with Celery("shop", broker=broker, set_as_current=False) as app:
        app.conf.broker_transport_options = {"socket_timeout": 1}
        return answer(app, *words)


@pytest.mark.parametrize("one_away", ["dead", night("frozen")], indirect=True)
def test_commands_show_what_the_others_have_and_say_what_is_missing(one_away: OneAway) -> None:
    cluster, here, there = one_away.cluster, one_away.here, one_away.there
    expected = {
        ("list", "-n", "100"): lambda told: len(told["messages"]) == len(here) + 1,
        ("dead", "list"): lambda told: [m["id"] for m in told["messages"]] == [one_away.dead],
        ("show", there[0]): lambda told: told["messages"] == [],
        ("check",): lambda told: told["faults"] == [],
        ("limits",): lambda told: told["limits"][0]["queue"] == "mail",
        ("status",): lambda told: told["topics"][0]["dead"] == 1,
        ("topic", "list"): lambda told: told["topics"][0]["slots"] == 8,
        ("topic", "show", "mail"): lambda told: told["dead"] == 1,
        ("topic", "set", "mail", "--retries", "5"): lambda told: told["changed"] == ["retries"],
        ("cancel", here[0], there[0], "--yes"): lambda told: told["results"][0]["id"] == here[0],
    }
    for words, holds in expected.items():
        done = _toc(cluster, *words, "--json")
        assert done.code == 6, (words, done)
        told = done.json
        assert holds(told), (words, told)
        [missing] = told["missing"]
        assert missing["queue"] == "mail" and {*missing["slots"]} <= {*one_away.slots}
        assert f":{one_away.node.port}" in missing["server"]
        assert "no answer from" in done.err and "'mail'" in done.err
    metrics = _toc(cluster, "metrics")
    assert metrics.code == 6
    assert "celery_toc_slots_missing{server=" in metrics.out
    assert "celery_toc_up 1.0" in metrics.out
    assert "celery_toc_messages{" not in metrics.out, "a sum would be too small"
    del here[0]  # it was cancelled
    fine = _toc(cluster, "show", here[0])
    assert fine.code == 0 and here[0] in fine.out, fine


@pytest.mark.parametrize("one_away", ["dead", "frozen"], indirect=True)
def test_while_a_node_is_away_the_others_answer_and_it_is_named(
    one_away: OneAway, subtests: pytest.Subtests
) -> None:
    for part in (
        *(what_is_read_of_the_others, ids_of_the_others_are_found_and_cancelled),
        *(what_is_not_found_may_be_on_a_node_that_is_away, what_is_done_to_many_is_done),
    ):
        with subtests.test(part.__name__):
            part(one_away)


@pytest.mark.parametrize("how", ["dead", night("frozen")])
def test_while_the_node_with_the_wake_index_is_away_centers_and_http_serve_what_lies_elsewhere(
    start_cluster: Callable[..., Cluster], how: str
) -> None:
    """X6: Puts, pops that wait and acknowledgements; a put to the node itself is refused."""
    cluster = start_cluster("--cluster-require-full-coverage", "no", "--appendonly", "yes")
    center = center_for(cluster.toc_url, socket_timeout=1)
    topic = center.queues.declare("mail", slots=8)
    away = cluster.node_of(center.keys.topics)
    nodes = {id: cluster.node_of(topic.slot_for(id).body) for id in map(str, range(60))}
    here = [id for id, node in nodes.items() if node is not away]
    there = next(id for id, node in nodes.items() if node is away)

    def served(id: str, delay: float) -> None:
        began = time.monotonic()
        center.put("mail", id, b"{}", delay=delay)
        [message] = center.pop("mail", wait=30).messages
        assert message.id == id
        assert time.monotonic() - began >= delay
        center.ack([message])

    with HttpServer(f"{cluster.toc_url}?socket_timeout=1") as api:

        def leased(id: str) -> None:
            put = api.post("/v1/queues/mail/tasks", {"id": id, "text": "x"})
            assert put.status == 201, put
            [task] = api.post("/v1/queues/mail:lease", {"wait": 20}).json["tasks"]
            assert task["id"] == id
            done = api.post("/v1/queues/mail:ack", {"receipts": [task["receipt"]]})
            assert done.json["acknowledged"] == 1

        served(here.pop(), 0.5)
        leased(here.pop())
        if how == "dead":
            cluster.kill(away)
        else:
            os.kill(away.pid, signal.SIGSTOP)
        try:
            for delay in (0, 1, 2):
                served(here.pop(), delay)
            leased(here.pop())
            assert api.get("/readyz").status == 200
            with pytest.raises(BROKEN):
                center.put("mail", there, b"{}")
            assert api.post("/v1/queues/mail/tasks", {"id": there, "text": "x"}).status == 503
            with pytest.raises(BROKEN):  # it was never read
                center.put("unknown", here[-1], b"{}")
            leased(here.pop())
            served(here.pop(), 0.5)
        finally:
            if how == "dead":
                cluster.restart(away)
            else:
                os.kill(away.pid, signal.SIGCONT)
        cluster.wait_ok()
        served(here.pop(), 0.5)


@pytest.mark.versions
def test_a_publish_to_a_node_that_hangs_takes_as_long_as_connecting_may(
    start_cluster: Callable[..., Cluster],
) -> None:
    """Y4: it is not asked again and again where the slots are, which would hold up whoever asks"""
    cluster = start_cluster()
    clients = [center_for(cluster.toc_url).client for _ in range(2)]
    for client in clients:
        client.refresh()
    with Connection(cluster.toc_url, connect_timeout=1.5) as connection:
        producer = connection.Producer()
        queue = Queue("mail", queue_arguments={"x-slots": 1})
        producer.publish("before", routing_key="mail", declare=[queue])
        hangs = cluster.node_of(center_for(cluster.toc_url).registry.topic("mail").slot(0).body)
        with frozen(hangs):
            began = time.monotonic()
            with pytest.raises(connection.connection_errors):
                producer.publish("x", routing_key="mail")
            assert 1 < time.monotonic() - began < 4
            began = time.monotonic()
            for _ in range(10):
                time.sleep(0.11)  # sooner it is not asked at all
                for client in clients:
                    client.refresh()
            assert time.monotonic() - began < 5


def test_a_publish_that_a_primary_answers_when_it_was_replaced_is_sent_to_its_successor(
    start_cluster: Callable[..., Cluster],
) -> None:
    """A primary that was suspended executes what is in its sockets before it learns of that."""
    cluster = start_cluster(replicas=1)
    center = center_for(cluster.toc_url)
    slot = center.queues.declare("mail", slots=1).slot(0)
    was = cluster.node_of(slot.body)
    other = next(node for node in cluster.primaries() if node is not was)
    failed: list[Exception] = []

    def send(number: int) -> None:
        with Connection(cluster.toc_url, connect_timeout=20) as connection:
            producer = connection.Producer()
            producer.publish("before", routing_key="mail")
            ready.wait()
            stopped.wait()
            try:
                producer.publish("x", routing_key="mail", headers={"id": f"x{number}"}, retry=True)
            except Exception as exc:
                failed.append(exc)

    ready, stopped = threading.Barrier(5), threading.Event()
    senders = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for sender in senders:
        sender.start()
    ready.wait()
    with frozen(was):
        stopped.set()
        cluster._until(
            lambda: any(
                cluster.slot_of(slot.body) in seen.slots and seen.id != was.id
                for seen in cluster._seen(other)
            ),
            "no replica takes over",
        )
    for sender in senders:
        sender.join()
    cluster.wait_ok()
    assert failed == []
    found = center_for(cluster.toc_url).get([f"x{number}" for number in range(4)], topic="mail")
    assert sorted(one.id for one in found) == [f"x{number}" for number in range(4)]


@pytest.mark.parametrize(
    "coverage",
    # That the others go on without it is the promise of the tests of a node that is away.
    ["yes", night("no")],
)
def test_whether_one_dead_node_stops_the_others_is_warned_of(
    start_cluster: Callable[..., Cluster], coverage: str
) -> None:
    """Redis's default is that it does."""
    options = () if coverage == "yes" else ("--cluster-require-full-coverage", "no")
    cluster = start_cluster(*options)
    center = center_for(cluster.toc_url)
    center.queues.declare("mail", slots=8)
    dead = next(
        node for node in cluster.primaries() if node is not cluster.node_of(center.keys.topics)
    )
    warnings = kombu_toc.outage_warnings(center.client)
    assert [("cluster-require-full-coverage no" in one) for one in warnings] == (
        [True] if coverage == "yes" else []
    )
    done = _toc(cluster, "status")
    assert done.code == 0
    assert ("cluster-require-full-coverage" in done.out) == (coverage == "yes")
    stays = next(
        id
        for id in map("m{}".format, range(100))
        if cluster.node_of(center.registry.topic("mail").slot_for(id).body) is not dead
    )
    cluster.kill(dead)
    cluster._until(
        lambda: b"cluster_slots_fail:0" not in cluster.living()[0]("CLUSTER", "INFO"), "unnoticed"
    )
    time.sleep(0.3)  # the others have heard, too
    if coverage == "no":
        center.put("mail", stays, b"")
        assert center.queues.counts_by_slot("mail", reachable=True)
        return
    with pytest.raises(kombu_toc.ServerError, match=r"CLUSTERDOWN|cluster is down"):
        center.put("mail", stays, b"")


def test_who_has_not_heard_of_a_promotion_asks_where_the_slots_are_now(
    start_cluster: Callable[..., Cluster],
) -> None:
    """K7: nothing was sent to the node that is gone, so the call goes to the next one"""
    cluster = start_cluster(replicas=1)
    center = center_for(cluster.toc_url)
    center.put("mail", "x", b"")
    dead = cluster.node_of(center.registry.topic("mail").slot_for("x").body)
    [heir] = cluster.replicas_of(dead)
    cluster.kill(dead)
    cluster._until(lambda: heir in cluster.primaries(), "nobody is promoted")
    cluster.wait_ok()
    assert center.get("x", topic="mail")
    assert center.counts("mail").waiting == 1


def test_who_takes_a_part_of_what_is_due_announces_the_rest(
    cluster: Cluster, center: TimeoutCenter
) -> None:
    """A8: an idle consumer need not wait until it looks into all slots"""
    topic, wake = center.queues.declare("mail", slots=1), center.keys.wake("mail")
    put_some(center, "mail", "abc")
    with cluster.client() as client:
        client.delete(wake)  # it was claimed
        center.runner.run(pop_call(center, topic, [0], ready_limit=1))
        assert client.zcard(wake) == 1
        client.delete(wake)  # again, by somebody else, who will look for the rest
        center.runner.run(pop_call(center, topic, [0], ready_limit=1, claimed=False))
        assert client.zcard(wake) == 0


# -- moving in


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_broker_of_kombus_own_has_moves_into_a_cluster(
    cluster: Cluster,
    center: TimeoutCenter,
    single_server: Server,
    monkeypatch: pytest.MonkeyPatch,
    killed: bool,
) -> None:
    """Also if it was killed when messages were written and not yet taken from where they were."""
    before = crossed(cluster)
    with single_server.client() as client:
        client.flushall()
    with (
        Connection(single_server.url) as old,
        Connection(single_server.url) as worker,
        Connection(cluster.toc_url) as new,
    ):
        Queue("celery")(old.default_channel).declare()
        for number in range(5):
            send(old, f"held-{number}", headers={"eta": at(3600)})
        hold(worker, 5)
        for number in range(40):
            send(old, f"ready-{number}")
        if killed:
            with monkeypatch.context() as patch:
                patch.setattr(
                    "kombu_toc.client.connection.Pipeline.execute", Mock(side_effect=Killed)
                )
                with pytest.raises(Killed):
                    migrate_broker(single_server.url, new)
            assert center.counts("celery").waiting > 0  # the first page, which is not taken yet
        moved = migrate_broker(single_server.url, new)
        assert (moved.moved, moved.unacknowledged, moved.scheduled, moved.staying) == (45, 5, 5, 0)
    popped = center.pop("celery", 100).messages
    assert {one.id for one in popped} == {f"ready-{number}" for number in range(40)}
    assert center.ack(popped) == 40
    left = center.scan("celery").messages
    assert {one.id for one in left} == {f"held-{number}" for number in range(5)}
    assert all(abs(one.time_us / 1e6 - time.time() - 3600) < 60 for one in left)
    check_slots(center, "celery")
    with single_server.client() as client:
        assert source_keys(client) == []
    assert crossed(cluster) == before


# -- what cannot work


def test_the_client_of_a_cluster_that_redis_py_has_is_refused_with_what_to_use(
    cluster: Cluster,
) -> None:
    with (
        redis.RedisCluster(host="127.0.0.1", port=cluster.port) as client,
        pytest.raises(kombu_toc.ConfigurationError, match="center_for"),
    ):
        TimeoutCenter(client)


def refused(url: str, *words: str, **options: object) -> str:
    """The one error that a connection and a center get, which names these words."""
    with pytest.raises(Exception) as caught:
        center_for(url, **options).counts("mail")
    connection = Connection(url, transport_options=dict(options))
    for said in (str(failure(connection, Exception)), str(caught.value)):
        for word in words:
            assert word in said, said
    return said


def test_a_cluster_url_for_one_server_says_which_to_use(single_server: Server) -> None:
    refused(f"toc+cluster://127.0.0.1:{single_server.port}", "cluster mode", "toc+redis://")


def test_a_url_of_one_server_for_a_node_says_which_to_use(cluster: Cluster) -> None:
    text = str(failure(Connection(f"toc+redis://127.0.0.1:{cluster.port}/0"), Exception))
    assert re.search(r"Cluster.*toc\+cluster://", text)


@pytest.mark.parametrize("how", ["{}/1", "{}?db=1"])
def test_a_database_number_on_a_cluster_says_what_to_change(cluster: Cluster, how: str) -> None:
    refused(how.format(cluster.toc_url), "database", "global_keyprefix")


@pytest.mark.versions
def test_when_no_node_can_be_reached_the_error_names_each() -> None:
    ports = [free_port(), free_port()]
    url = "toc+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)
    said = refused(url, *map(str, ports))
    assert re.search("no node", said), said


def test_one_node_that_can_be_reached_is_enough(cluster: Cluster) -> None:
    url = f"toc+cluster://127.0.0.1:{free_port()},127.0.0.1:{cluster.port}"
    with Connection(url) as connection:
        connection.connect()
    assert center_for(url).queues.names() is not None


def test_a_node_that_never_answers_does_not_keep_the_others_from_it(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"toc+cluster://127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{cluster.port}"
        began = time.monotonic()
        center_for(url, socket_timeout=2).queues.names()
        assert time.monotonic() - began < 8


def test_a_cluster_whose_slots_nobody_has_is_one_clear_error(tmp_path_factory) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("bare"))
    try:
        node = cluster._launch()
        node.wait()
        refused(f"toc+cluster://127.0.0.1:{node.port}", "hash slots")
    finally:
        cluster.stop()


@pytest.mark.versions
def test_a_wrong_password_is_an_error_that_does_not_print_it(
    start_cluster: Callable[..., Cluster],
) -> None:
    cluster = start_cluster(password="right-one")
    good = center_for(cluster.toc_url)
    good.put("mail", "x", b"")
    assert "right-one" not in Connection(cluster.toc_url).as_uri()
    with Connection(cluster.toc_url) as connection:
        connection.connect()
        assert connection.default_channel.queue_declare("mail").message_count == 1
    wrong = cluster.toc_url.replace("right-one", "wr0ng-pw")
    said = refused(wrong)
    assert "wr0ng-pw" not in said
    assert re.search("password|WRONGPASS", said), said
    refused(wrong.replace(":wr0ng-pw@", ""), "uthentication")


def test_a_lease_is_renewed_while_its_slot_is_about_to_move(
    cluster: Cluster, center: TimeoutCenter
) -> None:
    """A key that lost its only member for a moment would be gone from the node, and not be let in
    again: the message would be in no queue."""
    center.queues.declare("one", slots=1)
    slot = cluster.slot_of(center.registry.topic("one").slot(0).body)
    home = cluster.owner(slot)
    to = next(node for node in cluster.primaries() if node is not home)
    center.put("one", "m", b"")
    held = center.pop("one").messages
    for node, what, other in ((to, "IMPORTING", home), (home, "MIGRATING", to)):
        with node.client() as client:
            client.execute_command("CLUSTER", "SETSLOT", slot, what, other.id)
    try:
        assert center.extend(held) == []
    finally:
        for node in (to, home):
            with node.client() as client:
                client.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")
    assert center.counts("one").in_flight == 1
    assert center.ack(held) == 1
    center.queues.delete("one")
