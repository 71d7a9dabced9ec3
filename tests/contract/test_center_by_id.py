"""Looking up, cancelling and rescheduling single messages (Y2, W1, D1, D5, X4)."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from kombu_toc import DEAD, IN_FLIGHT, WAITING, ActionTimeError, TimeoutCenter, TocError, center_for

from ..support.cases import each
from ..support.fixtures import own_server
from ..support.inspection import (
    announced,
    calls_of,
    check_slots,
    delivered,
    keys_left,
    now_us,
    put_call,
    put_some,
    residue,
)
from ..support.waiting import at_once

HOUR = 3600.0


def dead(center, topic, id, body=b""):
    center.reject(delivered(center, topic, id, body), requeue=False, reason="why")


def test_a_body_of_another_kind_of_bytes_is_kept_as_it_is(server, client):
    center = center_for(server.toc_url)
    center.put("mail", "a", bytearray(b"x\xff"))
    center.put("mail", "b", memoryview(b"x\xff"))
    assert [one.body for one in center.get(["a", "b"])] == [b"x\xff"] * 2


def done(cancelled):
    return [(one.id, one.state, one.deleted) for one in cancelled]


def moved(rescheduled):
    return [(one.id, one.state, one.moved) for one in rescheduled]


@each(
    ("call", "said"),
    [
        (lambda center: center.put("mail", 7, b"x"), "id must be a str, not 7"),
        (lambda center: center.put("mail", 7, b"x", basis="b"), "id must be a str, not 7"),
        (lambda center: center.put("mail", "7", "x"), "body must be bytes, not a str: encode it"),
        (lambda center: center.put("mail", "7", {"a": 1}), "body must be bytes, not a dict"),
        (lambda center: center.put("mail", "7", b"x", basis=5), "slot basis must be a str, not 5"),
        (lambda center: center.put("mail", "7", b"x", priority="high"), "priority must be an int"),
        (lambda center: center.put(7, "7", b"x"), "a queue is named by a str, not 7"),
        (lambda center: center.put(b"mail", "7", b"x"), "a queue is named by a str, not b'mail'"),
        (lambda center: center.put("mail", "7", b"x", delay="5"), "'5' is not a time: .* seconds"),
        (lambda center: center.put("mail", "7", b"x", delay=timedelta(1)), "total_seconds"),
        (lambda center: center.put("mail", "7", b"x", at=datetime(2030, 1, 1)), "timestamp()"),
        (lambda center: center.put("mail", "7", b"x", at=2e9, delay=5), "by at or by delay"),
        (lambda center: center.put("mail", "7", b"x", token=5), "token must be a str, not 5"),
        (lambda center: center.pop("mail", "5"), "limit must be a whole number, not '5'"),
        (lambda center: center.pop("mail", ids=7), "id must be a str, or several of them, not 7"),
        (lambda center: center.pop("mail", visibility="5"), "'5' is not a time: .* seconds"),
        (lambda center: type(center).from_url(5), "a broker URL is a str: toc.*, not a int"),
        (lambda center: center.get(7), "id must be a str, or several of them, not 7"),
        (lambda center: center.get([7], topic="mail"), "id must be a str, or several"),
        (lambda center: center.cancel(7), "id must be a str, or several of them, not 7"),
        (lambda center: center.cancel(["1", 7], topic="mail"), "id must be a str, or several"),
        (lambda center: center.reschedule(7, delay=5), "id must be a str, or several"),
        (lambda center: center.pop(7), "a queue is named by a str, not 7"),
        (lambda center: center.counts(7), "a queue is named by a str, not 7"),
        (lambda center: center.queues.declare(7), "a queue is named by a str, not 7"),
        (lambda center: center.queues.pause(7), "a queue is named by a str, not 7"),
    ],
)
def test_what_is_not_of_its_type_is_named_and_nothing_is_done(center, call, said):
    with pytest.raises(TocError, match=said):
        call(center)
    assert center.queues.names() in ([], ["mail"])
    assert center.count() == 0


# -- get


def test_a_message_is_found_in_every_state(center, client):
    """D1, Y1"""
    center.put("mail", "w", b"1", at=2e9, priority=6)
    [found] = center.get("w", topic="mail")
    assert found[0] == "mail"
    assert (found.id, found.state, found.step, found.body) == ("w", WAITING, 2, b"1")
    assert found.time_us == 2_000_000_000_000_000

    delivered(center, "mail", "f", b"2")
    [found] = center.get("f", topic="mail")
    assert (found.state, found.step, found.body) == (IN_FLIGHT, 0, b"2")
    assert 59_000_000 < found.time_us - now_us(client) <= 60_000_000

    dead(center, "mail", "d", b"3")
    [found] = center.get("d", topic="mail")
    assert (found.state, found.body, found.reason) == (DEAD, b"3", "why")
    assert abs(found.time_us - now_us(client)) < 5_000_000


def test_what_is_found_and_what_is_cancelled_are_shown_in_a_line(center):
    """However large the body is."""
    center.put("mail", "order-7", b"x" * 1_000_000)
    center.put("mail", "order-8", b"short")
    [long], [short] = center.get("order-7"), center.get("order-8")
    assert "id='order-7'" in repr(long)
    assert "... (1000000 bytes)" in repr(long)
    assert len(repr(long)) < 300
    assert "body=b'short'" in repr(short)
    assert len(repr(center.scan("mail"))) < 600
    [cancelled] = center.cancel("order-7")
    assert "deleted=True" in repr(cancelled)
    assert len(repr(cancelled)) < 300


def test_what_is_not_there_is_not_found_and_looking_for_it_declares_nothing(center, client):
    assert center.get("x", topic="mail") == []
    assert center.cancel("x", topic="mail") == []
    assert center.reschedule("x", topic="mail", delay=1) == []
    assert center.reschedule("x", topic="mail") == []
    assert center.counts("mail") == (0, 0, 0, 0)
    assert center.queues.purge("mail") == 0
    assert keys_left(client) == []


def test_copies_are_found_by_the_id_they_share(center):
    center.put("mail", "x", b"1")
    copy = center.put("mail", "x", b"2", delay=HOUR).id
    found = center.get("x", topic="mail")
    assert {(one.id, one.body) for one in found} == {("x", b"1"), (copy, b"2")}
    assert [one.body for one in center.get(copy, topic="mail")] == [b"2"]


@pytest.mark.parametrize("basis", ["order-7", None])
def test_a_message_with_a_slot_basis_is_found_with_it_and_without(center, basis):
    """A2"""
    put_some(center, "mail", 10, "", delay=HOUR, basis="order-7")
    for number in range(10):
        [found] = center.get(f"{number}", topic="mail", basis=basis)
        assert found.id == f"{number}"
    [one] = center.reschedule("4", topic="mail", basis=basis)
    assert (one.topic, one.id, one.state, one.moved) == ("mail", "4", WAITING, True)
    assert done(center.cancel("5", topic="mail", basis=basis)) == [("5", WAITING, True)]
    check_slots(center, "mail")


# -- in whichever topic and slot


def test_without_a_topic_a_message_is_found_wherever_it_is(center):
    """Y2: by id, without naming the queue"""
    for topic in ("a", "b", "c"):
        center.put(topic, f"of-{topic}", b"", delay=HOUR)
    center.put("b", "shared", b"1", delay=HOUR)
    center.put("c", "shared", b"2", delay=HOUR)
    assert [one.topic for one in center.get("of-b")] == ["b"]
    assert {one.topic for one in center.get("shared")} == {"b", "c"}
    assert [one.topic for one in center.reschedule("of-c", delay=1)] == ["c"]
    assert {one.topic for one in center.cancel("shared")} == {"b", "c"}
    assert center.get("shared") == []
    assert center.get("none") == center.cancel("none") == center.run_now("none") == []


def test_messages_that_share_an_id_are_found_in_different_slots_too(center, client):
    """Each sender gave his own slot basis."""
    bases = ["order-1", "order-2", "order-3", None]
    numbers = {center.registry.topic("mail").slot_for(basis or "x").number for basis in bases}
    assert len(numbers) > 2
    for number, basis in enumerate(bases):
        for body in (b"a", b"b"):
            center.put("mail", "x", b"%d" % number + body, delay=HOUR, basis=basis)
    assert len(center.get("x")) == 8
    assert {one.slot for one in center.get("x")} == numbers
    [one] = {one.slot for one in center.get("x", basis="order-2")}
    assert one == center.registry.topic("mail").slot_for("order-2").number
    assert [one.moved for one in center.reschedule("x", delay=2 * HOUR)] == [True] * 8
    check_slots(center, "mail")
    assert [one.deleted for one in center.cancel("x")] == [True] * 8
    assert residue(client) == []


def test_several_ids_are_looked_for_at_once(center, client):
    topic = center.registry.topic("mail")
    ids = [f"{n}" for n in range(250)]
    center.runner.run_all([put_call(center, topic, id, b"", delay_us=10**9) for id in ids])
    assert sorted(one.id for one in center.get([*ids, "none", "0"])) == sorted(ids)
    assert sorted(one.id for one in center.cancel(iter(ids[:200]))) == sorted(ids[:200])
    assert center.counts("mail").scheduled == 50
    check_slots(center, "mail")


def test_a_topic_that_was_declared_anew_is_asked_as_it_is_now(center):
    """By somebody else, with more slots than it had."""
    center.queues.declare("mail", slots=1)
    other = TimeoutCenter(center.client)
    other.queues.delete("mail")
    other.queues.declare("mail", slots=16)
    put_some(other, "mail", 20, "", delay=HOUR)
    assert all(center.get(f"{number}", topic="mail") for number in range(20))
    assert len(center.scan("mail").messages) == 20


@own_server
@pytest.mark.one_server("whose commands are counted")
@pytest.mark.parametrize(("topics", "most"), [(20, 22), (1000, 1002)])
def test_each_topic_is_asked_once_for_an_id(server, client, topics, most):
    """Also if it is found: by every call that takes an id"""
    center = center_for(f"{server.toc_url}?toc_metrics=false")  # which a thread sends by scripts
    declared = center.queues.declare("queue-0").declaration.to_json()
    names = [f"queue-{number}" for number in range(topics)]
    client.hset(center.keys.topics, mapping=dict.fromkeys(names, declared))
    for number in range(50):
        center.queues.declare(f"{number}.reply.celery.pidbox", slots=1, expires=60_000)
    for call in (center.get, center.cancel, center.reschedule):
        center.put("queue-7", "x", b"", delay=HOUR, if_exists="keep")
        assert call("none") == []  # a server that has not the script yet is asked twice
        client.config_resetstat()
        assert [one.id for one in call("x")] == ["x"]
        assert calls_of(client) <= most


def test_a_first_slot_basis_is_known_to_who_looks_from_then_on(center, client):
    """Although its center, and the sender's, remember the declaration from before"""
    looker, topic = TimeoutCenter(client), center.queues.declare("mail")
    center.put("mail", "own", b"", delay=HOUR)
    assert looker.registry.topic("mail").declaration.bases is False
    bases = {topic.slot_for(f"order-{n}").number: f"order-{n}" for n in range(50)}
    del bases[topic.slot_for("x").number]
    assert len(bases) == 7
    for basis in bases.values():
        center.put("mail", "x", basis.encode(), delay=HOUR, basis=basis)
        assert {one.body for one in looker.get("x")} >= {basis.encode()}
    assert len(looker.get("x")) == len(looker.cancel("x")) == 7
    assert looker.registry.topic("mail").declaration.bases is True
    assert [one.moved for one in looker.reschedule("own")] == [True]


def test_a_declaration_is_written_once_for_all_that_have_a_slot_basis(center, client, monkeypatch):
    ran = []
    runner, run = center.runner, center.runner.run
    monkeypatch.setattr(runner, "run", lambda call: ran.append(call.script.name) or run(call))
    center.queues.declare("mail")
    for number in range(5):
        center.put("mail", f"own-{number}", b"", basis=f"own-{number}")
    assert set(ran) == {"declare", "put"}
    put_some(center, "mail", 5, "", basis="order-7")
    assert (ran.count("declare"), ran.count("admit")) == (1, 1)


def test_what_an_older_release_has_declared_is_asked_in_all_slots(center, client):
    """It does not tell whether a slot basis was given."""
    client.hset(center.keys.topics, "mail", json.dumps({"slots": 8, "retries": 16}))
    for basis in ("order-1", "order-2", "order-3"):
        center.put("mail", f"of-{basis}", b"", delay=HOUR, basis=basis)
        [found] = TimeoutCenter(client).get(f"of-{basis}")
        assert found.slot == center.registry.topic("mail").slot_for(basis).number
    assert json.loads(client.hget(center.keys.topics, "mail")) == {"slots": 8, "retries": 16}


def test_a_copy_is_found_by_its_own_id_and_so_is_an_id_that_reads_like_one(center):
    for number in range(20):
        center.put("mail", f"{number}", b"1", delay=HOUR)
        copy = center.put("mail", f"{number}", b"2", delay=HOUR).id
        assert [one.id for one in center.get(copy)] == [copy]
        center.put("mail", f"order#{number}", b"3", delay=HOUR)
        assert [one.body for one in center.get(f"order#{number}")] == [b"3"]
        again = center.put("mail", f"order#{number}", b"4", delay=HOUR).id
        assert done(center.cancel(again)) == [(again, WAITING, True)]


@pytest.mark.parametrize("slots", [16, 2])
def test_who_has_not_heard_of_a_reshard_puts_where_it_is_found(center, client, slots):
    """It is over for everybody else: nothing was left to be moved."""
    late = TimeoutCenter(client)
    topic = late.queues.declare("mail", slots=4)
    assert center.registry.redeclare(
        topic, replace(topic.declaration, slots=slots, previous_counts=(4,))
    )
    put_some(late, "mail", 20, "", delay=HOUR)
    center.registry.reach("mail", 3)  # who consumes has seen what it announced
    assert all(center.get(f"{number}") for number in range(20))
    assert {one.slot for one in center.scan("mail").messages} == {0, 1, 2, 3}


def test_queues_that_go_away_by_themselves_are_asked_once_a_task_was_sent_there(center, client):
    """Their names are for one consumer, and its tasks can be revoked like any."""
    center.queues.declare("reply", slots=1, expires=60_000)
    center.queues.declare("worker-1.dq", slots=1, expires=60_000)
    client.hset(center.keys.topics, "older", json.dumps({"slots": 1, "expires": 60_000}))
    center.runner.run(put_call(center, center.registry.topic("reply"), "7", b"an answer"))
    for topic in ("worker-1.dq", "older"):
        center.put(topic, "x", b"", delay=HOUR)
    looker = TimeoutCenter(client)
    assert [one.topic for one in looker.get(["x", "7"])] == ["older", "worker-1.dq"]
    assert [one.topic for one in looker.get("7", topic="reply")] == ["reply"]


# -- cancel


def test_a_waiting_message_can_be_cancelled(center, client):
    """Y2, X4: once, whether it is due or not"""
    for delay in (HOUR, None):
        center.put("mail", "x", b"", delay=delay, priority=3)
        assert done(center.cancel("x", topic="mail")) == [("x", WAITING, True)]
        assert center.cancel("x", topic="mail") == []
        assert residue(client) == []


def test_a_message_in_flight_is_cancelled_too_late_and_says_so(center):
    """X4"""
    message = delivered(center, "mail", "x")
    assert done(center.cancel("x", topic="mail")) == [("x", IN_FLIGHT, False)]
    assert center.ack([message]) == 1


def test_a_message_in_flight_can_be_deleted_all_the_same(center, client):
    """Y2: at any time, waiting or in flight"""
    message = delivered(center, "mail", "x")
    assert done(center.cancel("x", topic="mail", in_flight=True)) == [("x", IN_FLIGHT, True)]
    assert residue(client) == []
    assert center.ack([message]) == 0
    assert center.reject(message, requeue=True) is None
    assert center.release([message]) == 0
    assert center.extend([message]) == [message]
    assert residue(client) == []


def test_a_dead_message_can_be_cancelled_or_left(center, client):
    dead(center, "mail", "x")
    assert done(center.cancel("x", dead=False)) == [("x", DEAD, False)]
    assert [one.state for one in center.get("x")] == [DEAD]
    assert done(center.cancel("x", topic="mail")) == [("x", DEAD, True)]
    assert residue(client) == []


def test_what_is_cancelled_is_given_back_with_its_past(center):
    """Whoever cancels it may have to tell others what it was."""
    center.put("mail", "new", b"1")
    [one] = center.cancel("new")
    assert (one.topic, one.body, one.tried) == ("mail", b"1", False)
    center.reject(delivered(center, "mail", "tried", b"2"), requeue=True)
    [one] = center.cancel("tried")
    assert (one.body, one.tried) == (b"2", True)
    delivered(center, "mail", "taken", b"3")
    [one] = center.cancel("taken")
    assert (one.body, one.tried) == (b"", True)


def test_just_the_messages_that_were_found_are_cancelled(center, client):
    """And not those that share their ids."""
    center.put("mail", "x", b"1", delay=HOUR)
    copy = center.put("mail", "x", b"2", delay=HOUR).id
    dead(center, "mail", "dead")
    found = center.scan("mail").messages
    assert done(center.cancel(one for one in found if one.body == b"1")) == [("x", WAITING, True)]
    assert {one.id for one in center.scan("mail").messages} == {copy, "dead"}
    check_slots(center, "mail")
    assert len(center.cancel(found)) == 2
    assert residue(client) == []


def test_cancelling_reaches_the_copies_that_share_the_id(center, client):
    first = delivered(center, "mail", "x", b"1")
    copy = center.put("mail", "x", b"2", delay=HOUR).id
    assert done(center.cancel("x", topic="mail")) == [
        ("x", IN_FLIGHT, False),
        (copy, WAITING, True),
    ]
    center.ack([first])
    assert residue(client) == []


@pytest.mark.parametrize("copy_first", [False, True])
def test_a_copy_cancelled_by_its_own_id_leaves_nothing_behind(center, client, copy_first):
    center.put("mail", "x", b"1", delay=HOUR)
    copy = center.put("mail", "x", b"2", delay=HOUR).id
    ids = [copy, "x"] if copy_first else ["x", copy]
    if copy_first:
        assert done(center.cancel(copy, topic="mail")) == [(copy, WAITING, True)]
        assert [found.id for found in center.get("x", topic="mail")] == ["x"]
        check_slots(center, "mail")
    for id in ids:
        center.cancel(id, topic="mail")
    assert residue(client) == []


def test_cancelling_one_message_leaves_the_others_announced(one):
    """A8"""
    one.put("one", "a", b"", at=2e9)
    one.put("one", "b", b"", at=2.1e9)
    one.cancel("a", topic="one")
    check_slots(one, "one")
    one.cancel("b", topic="one")
    assert announced(one, "one") == set()


# -- reschedule


@pytest.mark.parametrize("first", [2e9, 2.2e9])
def test_a_waiting_message_gets_another_time(center, first):
    """D5, W1: earlier or later"""
    center.put("mail", "x", b"", at=first, priority=9)
    assert moved(center.reschedule("x", topic="mail", at=2.1e9)) == [("x", WAITING, True)]
    [found] = center.get("x", topic="mail")
    assert (found.time_us, found.step) == (2_100_000_000_000_000, 3)
    check_slots(center, "mail")


def test_several_messages_get_another_time_by_ids_and_as_they_were_found(center):
    put_some(center, "mail", ("a", "b", "c"), delay=HOUR)
    wanted = [*center.get("a"), "b", "c"]
    assert sorted(moved(center.reschedule(wanted, topic="mail", at=2.1e9))) == [
        (id, WAITING, True) for id in ("a", "b", "c")
    ]


def test_rescheduled_without_a_time_a_message_is_due_now(center):
    center.put("mail", "x", b"", delay=HOUR)
    assert moved(center.reschedule("x", topic="mail")) == [("x", WAITING, True)]
    assert [message.id for message in center.pop("mail").messages] == ["x"]


def test_a_message_that_was_tried_and_is_rescheduled_to_now_is_due_now(center):
    """Without a wait for the next millisecond."""
    for number in range(20):
        message = delivered(center, "mail", f"{number}")
        center.reject(message, requeue=True, backoff=HOUR)
        assert moved(center.reschedule(message.id, topic="mail")) == [(message.id, WAITING, True)]
        [again] = center.pop("mail").messages
        assert again.retries_left == 15
        center.ack([again])


def test_a_message_that_was_tried_keeps_its_retries_and_is_not_due_early(center):
    """A3, A6"""
    message = delivered(center, "mail", "x")
    center.reject(message, requeue=True)
    [one] = center.reschedule("x", topic="mail", at=2_000_000_000.0004)
    assert one.moved
    [found] = center.get("x", topic="mail")
    assert found.time_us == one.time_us == 2_000_000_000_001_000
    center.reschedule("x", topic="mail")
    assert center.pop("mail").messages[0].retries_left == 15


def test_what_is_in_flight_or_dead_stays_where_it_is_and_a_retry_beside_it_is_moved(center):
    """X4; the task that is in flight has the id of its retry"""
    first = delivered(center, "mail", "f", b"1")
    dead(center, "mail", "d")
    for id, state in (("f", IN_FLIGHT), ("d", DEAD)):
        before = center.get(id, topic="mail")
        assert moved(center.reschedule(id, topic="mail", delay=1)) == [(id, state, False)]
        assert center.get(id, topic="mail") == before
    copy = center.put("mail", "f", b"2", delay=HOUR).id
    assert sorted(moved(center.run_now("f"))) == [("f", IN_FLIGHT, False), (copy, WAITING, True)]
    assert [message.id for message in center.pop("mail").messages] == [copy]
    assert center.ack([first]) == 1


def test_a_new_time_beyond_2255_is_refused(center):
    center.put("mail", "x", b"", at=2e9)
    for when in ({"at": 9.1e9}, {"delay": 9e9}):
        with pytest.raises(ActionTimeError):
            center.reschedule("x", topic="mail", **when)
    assert center.get("x", topic="mail")[0].time_us == 2_000_000_000_000_000


def test_a_delay_counts_from_now(center, client):
    """And the time that was announced before leaves nothing behind."""
    center.put("mail", "x", b"")
    before = now_us(client)
    assert moved(center.reschedule("x", topic="mail", delay=HOUR)) == [("x", WAITING, True)]
    [found] = center.get("x", topic="mail")
    assert before <= found.time_us - 3_600_000_000 <= now_us(client) + 3
    center.reschedule("x", topic="mail")
    center.ack(center.pop("mail").messages)
    assert residue(client) == []


# -- what is to be seen of it


@pytest.mark.cluster
def test_the_latest_cancelled_ids_are_remembered_for_a_while(center, client):
    center.notes.remember_cancelled((f"{n}" for n in range(1200)), most=1000, seconds=60)
    found = center.notes.cancelled_lately(60)
    assert len(found) == len(set(found)) == 1000
    until = now_us(client) + 2_000
    while now_us(client) < until:  # the server's clock has gone on
        pass
    center.notes.remember_cancelled(["again", "1199"], most=1000, seconds=60)
    assert center.notes.cancelled_lately(60)[-2:] == ["1199", "again"]
    assert 0 < client.pttl(center.keys.cancelled) <= 60_000
    center.notes.remember_cancelled([], most=1000, seconds=60)
    center.notes.remember_cancelled(["new"], most=1, seconds=60)
    assert center.notes.cancelled_lately(60) == ["new"]
    center.notes.remember_cancelled(["old"], most=10, seconds=0)
    assert client.exists(center.keys.cancelled) == 0


def test_one_of_many_speaks_for_a_topic_until_it_is_not_heard_for_a_while(center, client):
    assert center.notes.speaks_for(["a", "b"], "one", 60) == ["a", "b"]
    assert center.notes.speaks_for(["a", "c"], "two", 60) == ["c"]
    assert center.notes.speaks_for(["a", "b", "c"], "one", 60) == ["a", "b"]
    assert center.notes.speaks_for([], "one", 60) == []
    client.pexpire(center.keys.speaker("a"), 0)  # its time is over
    assert center.notes.speaks_for(["a", "b"], "two", 60) == ["a"]


# -- ensure


@pytest.mark.parametrize("make", [delivered, dead, lambda c, t, id: c.put(t, id, b"", delay=HOUR)])
def test_a_message_is_ensured_once_whatever_state_it_is_in(center, make):
    """D3"""
    make(center, "mail", "x")
    before = center.get("x")
    elsewhere = {"basis": "order-7"}  # in another slot
    for body, how in ((b"new", {}), (b"", {}), (b"new", elsewhere)):
        assert center.put("mail", "x", body, if_exists="keep", **how).outcome == "kept"
    assert center.get("x", topic="mail") == before
    assert center.put("mail", "y", b"new", delay=HOUR, if_exists="keep").added is True
    assert center.put("other", "x", b"new", if_exists="keep").added is True, "another topic"
    assert center.counts("mail").scheduled <= 2
    [one] = center.get("y")
    assert (one.body, one.state) == (b"new", WAITING)


@pytest.mark.parametrize("resharded", [False, True])
def test_what_a_copy_has_left_behind_keeps_nobody_from_ensuring(center, client, resharded):
    """Its message was consumed, and its name is among the copies still."""
    topic = center.queues.declare("mail", slots=1)
    if resharded:
        assert center.registry.redeclare(topic, replace(topic.declaration, draining_counts=(2,)))
    copies = topic.slot(0).copies("x")
    client.hset(copies, mapping={"x#1": "", "x#2": ""})
    assert center.put("mail", "x", b"", delay=HOUR, if_exists="keep").id == "x"
    assert client.exists(copies) == 0
    copy = center.put("mail", "x", b"other", delay=HOUR).id
    client.hset(copies, "x#1", "")
    center.cancel([one for one in center.get("x") if one.id == "x"])
    # There is the copy.
    assert center.put("mail", "x", b"", delay=HOUR, if_exists="keep").outcome == "kept"
    assert [one.id for one in center.get("x")] == [copy]


def test_of_many_that_ensure_at_once_one_adds(center, server):
    """D3"""
    added = []

    def ensure(number):
        mine = TimeoutCenter(server.client())
        for id in range(50):
            if mine.put("mail", f"{id}", b"%d" % number, delay=HOUR, if_exists="keep").added:
                added.append(id)

    at_once(ensure, range(4))
    assert sorted(added) == list(range(50))
    assert center.counts("mail").scheduled == 50


def test_what_was_found_may_be_cancelled_beside_ids_and_alone(center):
    put_some(center, "mail", "aab", delay=HOUR)
    [first, copy] = center.get("a")
    assert {one.id for one in center.cancel([first, "b"]) if one.deleted} == {first.id, "b"}
    assert center.get("a") == [copy]
    assert [one.id for one in center.reschedule(copy, delay=2 * HOUR)] == [copy.id]
    assert [one.id for one in center.cancel(copy)] == [copy.id]
    assert center.cancel([]) == center.reschedule([]) == []
    with pytest.raises(TocError, match="id must be a str"):
        center.cancel([copy, 7])
