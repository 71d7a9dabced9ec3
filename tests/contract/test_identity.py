"""A message is not its id: what is said of one must not touch another that has the id since."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta, timezone

import pytest
import redis
from kombu import Connection, Queue

from kombu_toc import DEAD, IN_FLIGHT, WAITING, Delivery, TimeoutCenter
from kombu_toc.center.reshard import reshard_topic
from kombu_toc.consumer.lease_keeper import LeaseKeeper
from kombu_toc.model.results import STRAY_TOKEN
from kombu_toc.scripts.call import load

from ..support.fixtures import drain, own_server
from ..support.inspection import check_slots, end_lease, put_some, residue
from ..support.proxy import Proxy
from ..support.servers import Server
from ..support.waiting import wait_until

HOUR = 3600.0


def deliver(center: TimeoutCenter, body: bytes = b"first", id: str = "x") -> Delivery:
    center.put("mail", id, body)
    [delivery] = center.pop("mail").messages
    return delivery


def state(center: TimeoutCenter, id: str = "x") -> list[tuple[str, bytes]]:
    return [(found.state, found.body) for found in center.get(id, topic="mail")]


# -- namesakes


@pytest.mark.parametrize("body", [b"first", b"second"])
def test_an_ack_that_is_repeated_leaves_what_was_put_since_under_the_id(
    center: TimeoutCenter, body: bytes
) -> None:
    """X9"""
    first = deliver(center)
    assert center.ack([first]) == 1
    center.put("mail", "x", body, delay=HOUR)
    assert center.ack([first]) == 0
    assert state(center) == [(WAITING, body)]
    check_slots(center, "mail")


def becomes(center: TimeoutCenter, delivery: Delivery, steps: str) -> Delivery:
    """What is done to it, step by step; the latest of its deliveries."""
    for step in steps.split():
        if step == "rolled-back":
            end_lease(center, delivery)
            assert center.pop("mail", 0).rolled_back == ["x"]
        elif step == "popped":
            [delivery] = center.pop("mail").messages
        elif step == "requeued":
            center.reject(delivery, requeue=True, error="e")
        elif step == "released":
            assert center.release([delivery]) == 1
        elif step == "moved":
            assert center.reschedule("x", topic="mail", delay=HOUR)[0].moved
        elif step == "dead":
            assert center.reject(delivery, requeue=False) == DEAD
        else:
            assert step == "replayed"
            assert center.dead.requeue("mail") == 1
    return delivery


STATES = {
    "": IN_FLIGHT,
    "rolled-back": WAITING,
    "rolled-back popped": IN_FLIGHT,
    "released": WAITING,
    "dead": DEAD,
}


def say_in_vain(center: TimeoutCenter, act: str, first: Delivery) -> None:
    """Of a message that has ended."""
    if act == "ack":
        assert center.ack([first]) == 0
    elif act == "release":
        assert center.release([first]) == 0
    elif act == "extend":
        assert center.extend([first], 0) == [first]
    else:
        assert center.reject(first, requeue=act == "reject", reason="broken") is None


@pytest.mark.parametrize("steps", STATES)
@pytest.mark.parametrize("act", ["ack", "reject", "bury", "release", "extend"])
def test_what_is_said_of_a_message_does_not_touch_another_of_the_same_id(
    center: TimeoutCenter, steps: str, act: str
) -> None:
    first = deliver(center)
    center.ack([first])
    second = becomes(center, deliver(center, b"second"), steps)
    before = state(center)
    assert before == [(STATES[steps], b"second")]
    say_in_vain(center, act, first)
    assert state(center) == before
    assert center.pop("mail", 0).rolled_back == []  # its lease has not been ended either
    check_slots(center, "mail")
    assert center.ack([second]) == 1
    assert residue(center.client) == []


def test_of_many_that_are_acknowledged_together_only_namesakes_stay(center: TimeoutCenter) -> None:
    put_some(center, "mail", 40, "")
    deliveries = center.pop("mail", 40).messages
    assert center.ack(deliveries[::2]) == 20
    for delivery in deliveries[::4]:
        center.put("mail", delivery.id, b"", delay=HOUR)
    assert center.ack(deliveries) == 20
    left = sorted(found.id for found in center.scan("mail").messages)
    assert left == sorted(delivery.id for delivery in deliveries[::4])
    check_slots(center, "mail")


def test_a_copy_that_is_put_again_is_another_message(center: TimeoutCenter) -> None:
    """Celery's retry of a retry, while the first run still goes on."""
    first = deliver(center)
    copy = deliver(center, b"copy")
    assert copy.id.startswith("x#")
    assert center.ack([copy]) == 1
    assert center.put("mail", "x", b"copy", delay=HOUR).added
    assert center.ack([copy]) == 0
    assert len(center.get("x", topic="mail")) == 2
    check_slots(center, "mail")
    assert center.ack([first]) == 1
    assert len(center.get("x", topic="mail")) == 1
    center.cancel("x", topic="mail")
    assert residue(center.client) == []


@pytest.mark.one_server("one call is for the slots of one server")
def test_a_copy_that_stays_remains_known_as_one_when_its_namesake_of_another_slot_goes(
    center: TimeoutCenter,
) -> None:
    topic = center.queues.declare("mail", slots=2)
    bases = [next(b for b in "0123456789" if topic.slot_for(b).number == slot) for slot in (0, 1)]
    for basis in bases:
        center.put("mail", "x", b"first", basis=basis)
        name = center.put("mail", "x", b"second", basis=basis, token="t").id
    copies = [one for one in center.pop("mail", 4).messages if one.id == name]
    here, there = sorted(copies, key=lambda one: one.slot)
    assert center.ack([there]) == 1
    assert center.put("mail", "x", b"third", basis=bases[1], token="other").id != name
    assert center.ack([here, there]) == 1
    found = sorted((one.slot, one.body) for one in center.get("x", topic="mail"))
    assert found == [(0, b"first"), (1, b"first"), (1, b"third")]
    check_slots(center, "mail")


# -- the same message


@pytest.mark.parametrize(
    "steps",
    [
        *("rolled-back", "rolled-back popped", "rolled-back popped rolled-back popped"),
        *("requeued popped", "released", "released moved", "released popped"),
        *("dead", "dead replayed popped"),
    ],
)
def test_a_late_ack_of_the_same_message_counts_wherever_it_is(
    center: TimeoutCenter, steps: str
) -> None:
    first = deliver(center)
    becomes(center, first, steps)
    assert center.ack([first]) == 1
    assert residue(center.client) == []


@pytest.mark.parametrize("tried", [False, True])
@pytest.mark.parametrize("act", ["reject", "release", "extend", "ack"])
@pytest.mark.parametrize(
    "steps", ["rolled-back", "released", "released popped released", "dead replayed"]
)
def test_what_is_said_of_a_delivery_does_not_touch_a_later_one_of_the_same_message(
    center: TimeoutCenter, steps: str, act: str, tried: bool
) -> None:
    """But for an acknowledgement: the message has been dealt with."""
    first = deliver(center)
    if tried:
        assert center.reject(first, requeue=True) == WAITING
        [first] = center.pop("mail").messages
    second = becomes(center, first, f"{steps} popped")
    if act == "ack":
        assert center.ack([first]) == 1
    else:
        say_in_vain(center, act, first)
        assert center.pop("mail").messages == []
        assert center.extend([second]) == []
        heartbeat = LeaseKeeper(lambda: center)
        heartbeat.hold(second, 60)
        heartbeat.drop(first)
        assert [held for held, _ in heartbeat.leases.held()] == [second]
        heartbeat.drop(second)
        check_slots(center, "mail")
        assert center.ack([second]) == 1
    assert residue(center.client) == []


@pytest.mark.parametrize("end", ["ack", "cancel", "purge", "dead ones", "delete", "drop"])
def test_what_names_a_message_goes_with_it(center: TimeoutCenter, end: str) -> None:
    center.queues.declare("mail", dead_limit=8)
    first = deliver(center)
    before = {"ack": "rolled-back popped", "cancel": "rolled-back popped", "purge": "rolled-back"}
    becomes(center, first, before.get(end, "dead"))
    if end == "ack":
        center.ack([first])
    elif end == "cancel":
        center.cancel("x", topic="mail", in_flight=True)
    elif end == "purge":
        center.queues.purge("mail")
    elif end == "dead ones":
        assert center.dead.purge("mail") == 1
    elif end == "drop":
        for number in range(200):
            center.reject(deliver(center, b"", f"{number}"), requeue=False)
            if not center.get("x", topic="mail"):
                break
        center.dead.purge("mail")
    else:
        center.queues.delete("mail")
    assert residue(center.client) == []


def test_a_name_that_nothing_has_is_a_fault_that_is_mended(center: TimeoutCenter) -> None:
    first = deliver(center)
    slot = center.registry.topic("mail").slot(first.slot)
    center.client.hset(slot.tokens, "gone", "somebody.1")
    [fault] = center.admin.check("mail")
    assert (fault.kind, fault.id, fault.places) == (STRAY_TOKEN, "gone", (slot.tokens,))
    assert center.admin.repair("mail") == [fault]
    assert center.admin.check("mail") == []
    assert center.ack([first]) == 1
    assert residue(center.client) == []


@pytest.mark.one_server("messages are not moved from node to node")
@pytest.mark.parametrize("act", ["ack", "reject", "bury", "release", "extend"])
def test_a_message_that_comes_from_another_slot_is_not_the_one_that_had_its_id_there(
    center: TimeoutCenter, act: str
) -> None:
    """Two slots may have a message of one id, and one pop may deliver both."""
    center.queues.declare("mail", slots=8)
    topic = center.registry.topic("mail")
    for slot in (0, 1):
        basis = next(basis for basis in "0123456789" if topic.slot_for(basis).number == slot)
        center.put("mail", "x", basis.encode(), basis=basis)
    first, second = sorted(center.pop("mail", 2).messages, key=lambda one: one.slot)
    assert first.birth == second.birth
    center.ack([first])
    center.reject(second, requeue=True)
    assert reshard_topic(center, "mail", 1, settle=0).done
    [third] = center.pop("mail").messages
    assert (third.id, third.slot, third.body) == ("x", 0, second.body)
    say_in_vain(center, act, first)
    assert center.extend([third]) == []
    check_slots(center, "mail")
    assert center.ack([third]) == 1
    assert residue(center.client) == []


# -- names


def test_no_two_pops_have_a_name_in_common(center: TimeoutCenter) -> None:
    centers = [center, TimeoutCenter(center.client)]
    births = []
    for number, one in itertools.product(range(5), centers):
        births.append(deliver(one, b"", f"{number}-{id(one)}").birth)
    assert len(set(births)) == len(births)
    assert max(map(len, births)) < 20


# -- the heartbeat


def test_who_drops_a_delivery_goes_on_renewing_the_lease_of_a_namesake(
    center: TimeoutCenter, client: redis.Redis
) -> None:
    heartbeat = LeaseKeeper(lambda: center)
    first = deliver(center)
    center.ack([first])
    second = deliver(center, b"second")
    assert first.lease_token == second.lease_token
    heartbeat.hold(second, 60)
    heartbeat.drop(first)
    assert [held for held, _ in heartbeat.leases.held()] == [second]
    heartbeat.drop(second)
    assert heartbeat.leases.held() == []


def test_an_ack_that_is_owed_and_has_run_is_repeated_without_harm(center: TimeoutCenter) -> None:
    first = deliver(center)
    owed = center.commands.ack([first])
    center.runner.run_all(owed)
    center.put("mail", "x", b"retry", delay=HOUR)
    heartbeat = LeaseKeeper(lambda: TimeoutCenter(center.client))
    marker = deliver(center, b"", "said after it")
    heartbeat.retry_later([*owed, *center.commands.ack([marker])])
    wait_until(lambda: not center.get(marker.id, topic="mail"))
    assert state(center) == [(WAITING, b"retry")]


def acks_of(client: redis.Redis, id: str) -> int:
    """How often the server has been asked to acknowledge a message of that id."""
    sha = load("ack").sha.encode()
    entries = [entry["command"].split() for entry in client.slowlog_get(10_000)]
    return sum(sha in words and id.encode() in words for words in entries)


@own_server
@pytest.mark.one_server("the proxy that loses the reply stands before one server")
def test_a_retry_is_not_lost_to_the_repeated_ack_of_the_run_before(
    server: Server, center: TimeoutCenter, client: redis.Redis
) -> None:
    """The connection is cut after the ack has run, and before its reply has come."""
    client.config_set("slowlog-max-len", 10_000)
    client.config_set("slowlog-log-slower-than", 0)
    try:
        with Proxy(server.port) as proxy, Connection(proxy.toc_url) as connection:
            producer = connection.Producer()
            got = []
            with connection.Consumer(Queue("mail"), callbacks=[lambda b, m: got.append(m)]):
                for id in ("0", "x"):
                    producer.publish("first", routing_key="mail", headers={"id": id})
                    drain(connection)
                    if id == "x":
                        lost = proxy.drop_replies(load("ack").sha.encode())
                    got.pop().ack()
                assert lost.is_set()
                soon = datetime.now(timezone.utc) + timedelta(hours=1)
                with Connection(server.toc_url) as other:
                    headers = {"id": "x", "eta": soon.isoformat()}
                    other.Producer().publish("again", routing_key="mail", headers=headers)
                client.slowlog_reset()
                wait_until(lambda: acks_of(client, "x"))
                assert [found.state for found in center.get("x", topic="mail")] == [WAITING]
    finally:
        client.config_set("slowlog-log-slower-than", 10_000)
