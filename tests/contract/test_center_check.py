"""check and repair: what cannot be is found, named and mended, on a topic that is in use (D4)."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import redis
from celery import Celery

from kombu_toc import Fault, TimeoutCenter
from kombu_toc.model.results import (
    DEAD,
    IN_FLIGHT,
    NO_BODY,
    NO_ENTRY,
    STRAY_COPY,
    STRAY_REASON,
    TWICE,
    UNANNOUNCED,
    WAITING,
)

from ..support.cluster import Cluster
from ..support.commands import answer
from ..support.fixtures import own_server
from ..support.inspection import announced, check_slots, forget_late, residue
from ..support.servers import Server


@pytest.fixture
def slot(center):
    """The only slot of a topic 'one', in which a message 'x' waits."""
    slot = center.queues.declare("one", slots=1).slot(0)
    center.put("one", "x", b"body", delay=60)
    return slot


def faults(found):
    return [(fault.kind, fault.id, fault.places) for fault in found]


@pytest.mark.cluster
@pytest.mark.parametrize("part", ["store", "prepare", "body", "tokens", "armed", "claims"])
def test_a_key_that_another_program_has_written_is_named_and_set_aside(
    center: TimeoutCenter, client: redis.Redis, part: str
) -> None:
    slot = center.queues.declare("mail", slots=1).slot(0)
    center.put("mail", "m", b"x")
    key = f"{slot.stem}{part}"
    client.delete(key)
    client.set(key, "something else")
    [fault] = center.admin.check("mail")
    assert (fault.kind, fault.id) == ("other type", key)
    if part in ("store", "body"):
        with pytest.raises(redis.ResponseError, match=f"the key '{re.escape(key)}' is no"):
            center.pop("mail")
    faults = center.admin.repair("mail")
    assert [one.id for one in faults if one.kind == "other type"] == [key]
    [aside] = client.scan_iter("*aside*")
    assert client.get(aside) == b"something else"
    assert center.admin.check("mail") == []
    center.put("mail", "n", b"y")
    assert "n" in [message.id for message in center.pop("mail", 9).messages]


@pytest.mark.cluster
def test_status_and_list_show_the_other_queues_beside_a_key_that_another_program_has_written(
    center: TimeoutCenter, server: Server | Cluster
) -> None:
    """It is named; who consumes the others is served; check finds it, and repair sets it aside."""

    def run(*words: str) -> Any:
        with Celery("shop", broker=server.toc_url, set_as_current=False) as app:
            done = answer(app, *words)
            return done.code, done.json, done.err

    slot = center.queues.declare("broken", slots=1).slot(0)
    center.put("broken", "lost", b"x")
    center.put("mail", "m", b"x")
    key = slot.stores[0]
    center.client.delete(key)
    center.client.set(key, "something else")
    code, told, complaints = run("status", "--json")
    assert code == 6 and key in complaints and "repair" in complaints
    assert [(row["queue"], row["ready"]) for row in told["topics"]] == [("mail", 1)]
    assert [one["queue"] for one in told["missing"]] == ["broken"]
    code, told, complaints = run("list", "--json")
    assert code == 6 and key in complaints and "repair" in complaints
    assert [one["id"] for one in told["messages"]] == ["m"]
    assert [one["queue"] for one in told["missing"]] == ["broken"]
    assert [one.id for one in center.pop("mail").messages] == ["m"]
    shared = center.keys.paused  # of all queues, and told once
    center.client.set(shared, "something else")
    with pytest.raises(redis.ResponseError, match=f"the key '{shared}' is no set"):
        center.queues.paused()
    code, told, _ = run("check", "--json")
    found = [(one["kind"], one["id"]) for one in told["faults"]]
    assert sorted(found) == sorted([("other type", key), ("other type", shared)])
    code, told, _ = run("repair", "--yes", "--json")
    assert ("other type", key) in [(one["kind"], one["id"]) for one in told["faults"]], told
    center.put("broken", "n", b"y")
    assert [one.id for one in center.pop("broken", 9).messages] == ["n"]
    assert run("status", "--json")[0] == 0


def test_a_sound_topic_has_no_faults(center, slot):
    center.put("one", "y", b"")
    center.put("one", "z", b"", priority=9)
    center.reject(center.pop("one").messages[0], requeue=False)
    center.put("one", "y", b"another")
    assert center.admin.check("one") == center.admin.repair("one") == []


def test_a_topic_that_nobody_declared_has_no_faults_and_is_not_declared(center):
    assert center.admin.check("none") == center.admin.repair("none") == []
    assert center.queues.names() == []


def test_an_id_without_a_body_is_removed(center, client, slot):
    client.hdel(slot.body, "x")
    client.hset(slot.reasons, "x", "\nan earlier error")
    expected = [Fault("one", 0, NO_BODY, "x", (slot.stores[0],))]
    assert center.admin.check("one") == expected
    assert center.admin.check("one") == expected, "check changes nothing"
    assert center.admin.repair("one") == expected
    assert center.admin.check("one") == []
    assert residue(client) == []


def test_a_body_without_an_id_goes_to_dead_queue(center, client, slot):
    client.zrem(slot.stores[0], "x")
    assert faults(center.admin.check("one")) == [(NO_ENTRY, "x", (slot.body,))]
    center.admin.repair("one")
    [found] = center.get("x", topic="one")
    assert (found.state, found.body) == (DEAD, b"body")
    assert found.reason == "found in no queue: its entry was lost"
    check_slots(center, "one")


@pytest.mark.parametrize(
    ("also", "stays"), [("prepare", IN_FLIGHT), ("dead", WAITING), ("other step", WAITING)]
)
def test_an_id_in_two_places_stays_in_the_one_nearest_to_delivery(
    center, client, slot, also, stays
):
    [(_, score)] = client.zrange(slot.stores[0], 0, -1, withscores=True)
    key = slot.stores[2] if also == "other step" else getattr(slot, also)
    client.zadd(key, {"x": score})
    [fault] = center.admin.check("one")
    assert center.admin.check("one") == [fault], "check changes nothing"
    assert (fault.kind, fault.id, set(fault.places)) == (TWICE, "x", {slot.stores[0], key})
    center.admin.repair("one")
    assert [found.state for found in center.get("x", topic="one")] == [stays]
    assert center.admin.check("one") == []


def test_what_was_dead_and_alive_leaves_no_reason_behind(center, client, slot):
    center.put("one", "y", b"")
    center.reject(center.pop("one").messages[0], requeue=False, reason="why")
    center.cancel("x", topic="one")
    client.zadd(slot.stores[0], {"y": 40})
    center.admin.repair("one")
    assert center.ack(center.pop("one").messages) == 1
    assert residue(client) == []


@pytest.mark.parametrize("limits", [{}, {"concurrency": 1}])
def test_a_reason_of_no_message_is_removed(center, client, limits):
    slot = center.queues.declare("one", slots=1, **limits).slot(0)
    center.put("one", "x", b"body", delay=60)
    client.hset(slot.reasons, "gone", "why\n")
    assert center.admin.check("one") == center.admin.check("one"), "check changes nothing"
    assert faults(center.admin.repair("one")) == [(STRAY_REASON, "gone", (slot.reasons,))]
    assert not client.exists(slot.reasons)


def test_a_copy_that_is_gone_is_forgotten(center, client, slot):
    center.put("one", "x", b"a copy")
    client.hset(slot.copies("x"), "x#gone", "")
    key = slot.copies("x")
    for _ in range(2):  # check changes nothing
        assert faults(center.admin.check("one")) == [(STRAY_COPY, "x#gone", (key,))]
    center.admin.repair("one")
    assert center.admin.check("one") == []
    assert len(client.hkeys(key)) == 1


@own_server
def test_copies_are_looked_for_once_among_all_keys_whatever_the_slots(center, client):
    center.queues.declare("one", slots=64)
    center.queues.declare("one:1", slots=1)
    client.mset({f"another's:{i}": "" for i in range(1000)})
    for name in ("one", "one:1"):
        for slot in center.registry.topic(name).all_slots():
            client.hset(slot.copies("x}:copies:"), f"x}}:copies:#{name}", "")
    client.config_resetstat()
    found = center.admin.repair("one", step=100)
    assert client.info("commandstats")["cmdstat_scan"]["calls"] < 50
    assert sorted((fault.slot, fault.id) for fault in found) == [
        (slot, "x}:copies:#one") for slot in range(64)
    ]
    assert client.keys("*:copies:*") == [b"toc:{one:1:0}:copies:x}:copies:"]


@pytest.mark.parametrize("said", ["nothing", "later"])
def test_a_slot_that_has_not_announced_its_next_time_does_so(center, client, slot, said):
    first = int(client.zrange(slot.announced_times, 0, 0)[0])
    client.delete(slot.announced_times, center.keys.wake("one"))
    if said == "later":
        client.zadd(slot.announced_times, {str(first + 10**6): first + 10**6})
    for _ in range(2):  # check changes nothing
        assert faults(center.admin.check("one")) == [(UNANNOUNCED, "", ())]
    center.admin.repair("one")
    assert center.admin.check("one") == []
    [(number, us)] = announced(center, "one")
    assert (number, abs(us - first) <= 3) == (0, True)


def test_many_faults_are_found_in_small_steps(center, client):
    center.queues.declare("one", slots=2)
    for i in range(1000):
        center.put("one", str(i), b"")
    bare = [str(i) for i in range(0, 1000, 3)]
    lost = [str(i) for i in range(1, 1000, 3)]
    for slot in center.registry.topic("one").all_slots():
        client.hdel(slot.body, *bare)
        client.zrem(slot.stores[0], *lost)
    found = center.admin.check("one", step=10)
    assert sorted(fault.id for fault in found if fault.kind == NO_BODY) == sorted(bare)
    assert sorted(fault.id for fault in found if fault.kind == NO_ENTRY) == sorted(lost)
    assert set(center.admin.repair("one", step=10)) == set(found)
    assert center.admin.check("one", step=10) == []
    assert center.counts("one").dead == len(lost)
    check_slots(center, "one")


def test_a_topic_in_use_has_no_faults_and_loses_nothing_to_repair(server, center):
    """Messages come and go while it is looked through."""
    center.queues.declare("one", slots=2)
    end = threading.Event()
    done = []

    def use(name):
        with server.client() as client:
            mine = TimeoutCenter(client)
            for number in range(10**6):
                if end.is_set():
                    break
                mine.put("one", f"{name}-{number % 50}", str(number).encode())
                for message in mine.pop("one", 3).messages:
                    if number % 3:
                        done.append(mine.ack([message]))
                    else:
                        mine.reject(message, requeue=number % 2 == 0, error="e")
                if number % 7 == 0:
                    mine.cancel(f"{name}-{number % 50}", topic="one")

    threads = [threading.Thread(target=use, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    try:
        for _ in range(15):
            assert center.admin.check("one", step=20) == []
            assert center.admin.repair("one", step=20) == []
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert len(done) > 50
    forget_late(center, "one")
    check_slots(center, "one")
