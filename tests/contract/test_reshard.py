"""Another slot count for a topic in use: nothing lost, nothing early, nothing twice."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kombu import Connection, Producer, Queue

import kombu_toc
from kombu_toc import TimeoutCenter, center_for
from kombu_toc.center.reshard import BATCH, Resharded, reshard_topic
from kombu_toc.center.upkeep import carry_on
from kombu_toc.model import message as envelope
from kombu_toc.model.results import DEAD, IN_FLIGHT, WAITING

from ..support.cases import night
from ..support.consuming import Inbox, deliver_until
from ..support.fixtures import drain
from ..support.inspection import (
    announced,
    check_slots,
    full_server,
    keys_left,
    put_call,
    put_some,
    slot_keys,
)
from ..support.waiting import in_thread

HOUR = 3600.0


def packed(id: str, **headers: object) -> bytes:
    """A body as the transport puts it."""
    message = {"headers": {"id": id, **headers}, "properties": {}, "body": b"[]"}
    return envelope.pack(message, deflate=False)


def put_packed(center: TimeoutCenter, ids: Iterable[object], prefix: str = "", **how: Any) -> None:
    for n in ids:
        center.put("mail", f"{prefix}{n}", packed(f"{prefix}{n}"), **how)


def put_for_later(center: TimeoutCenter, number: int) -> None:
    """So many, by calls that leave together."""
    topic = center.registry.topic("mail")
    ids = map(str, range(number))
    center.runner.run_all([put_call(center, topic, id, packed(id), delay_us=10**10) for id in ids])


def now(center: TimeoutCenter, topic: str, slots: int, **options: object) -> Resharded:
    """Reshard without waiting for producers: there are none."""
    return reshard_topic(center, topic, slots, **{"settle": 0.0, **options})


def everything(center: TimeoutCenter, topic: str) -> dict[str, tuple[object, ...]]:
    """What a topic holds, wherever it is: id -> state, step, score, body, reason, error."""
    slots = center.registry.topic(topic).all_slots()
    ids = {id.decode() for slot in slots for id in center.client.hkeys(slot.body)}
    found = {}
    for one in center.get(sorted(ids), topic=topic):
        assert one.id not in found or found[one.id][0] == one.state
        found[one.id] = (one.state, one.step, one.score, one.body, one.reason, one.error)
    return found


def fill(center: TimeoutCenter, topic: str) -> None:
    """Messages of every kind: waiting, with priorities, rolled back, dead, and copies of others."""

    def put(*ids: str, k: int = 0, **how: object) -> None:
        center.put_many(topic, [{"id": id, "body": packed(id, k=k), **how} for id in ids])

    def reject(**how: object) -> None:
        taken = center.pop(topic, 12).messages
        center.runner.run_all([center.commands.reject(one, **how) for one in taken])

    for i in range(10):
        put(*(f"later-{n}" for n in range(i, 40, 10)), delay=HOUR + i, priority=i)
    put(*(f"dies-{i}" for i in range(12)))
    reject(requeue=False, reason="on purpose", error="it failed")
    put(*(f"tried-{i}" for i in range(12)))
    reject(requeue=True, error="again", backoff=HOUR)
    for i, token in ((1, None), (2, "second")):
        put(*(f"shared-{n}" for n in range(8)), k=i, delay=HOUR, token=token)


@pytest.mark.parametrize(("before", "after"), [(2, 16), (16, 2), (8, 1), (1, 8), (4, 4)])
def test_messages_go_where_the_new_count_puts_them_and_are_what_they_were(
    center, client, before, after
):
    center.queues.declare("mail", slots=before)
    fill(center, "mail")
    there = everything(center, "mail")
    assert len(there) == 40 + 12 + 12 + 16
    result = now(center, "mail", after)
    assert (result.slots, result.left, result.done) == (after, 0, True)
    assert everything(center, "mail") == there
    topic = center.registry.declared("mail")
    assert (topic.slots, topic.slot_span, topic.declaration.draining_counts) == (after, after, ())
    check_slots(center, "mail")
    assert center.admin.check("mail") == []
    for id, (*_, body, _, _) in there.items():
        # Also with a basis: it is where that picks.
        basis = envelope.unpack(body)["headers"]["id"]
        assert id in [one.id for one in center.get(basis, basis=basis)]
    assert now(center, "mail", after) == (*result[:2], 0, 0, True)  # and there is no more to do


def test_what_is_due_is_delivered_from_wherever_it_is_and_nothing_is_early(center, client):
    center.queues.declare("mail", slots=16)
    put_packed(center, range(50), "due-")
    put_packed(center, range(50), "later-", delay=HOUR)
    now(center, "mail", 2)
    now(center, "mail", 32)
    popped = center.pop("mail", 1000)
    assert sorted(one.id for one in popped.messages) == sorted(f"due-{i}" for i in range(50))
    assert center.ack(popped.messages) == 50
    center.queues.purge("mail")
    assert slot_keys(client) == []


def test_a_message_with_a_slot_basis_stays_with_those_that_share_it(center, client):
    """K5: one producer, one slot."""
    center.queues.declare("mail", slots=2)
    for i in range(20):
        body = packed(f"{i}", **{"x-slot-basis": f"customer-{i % 3}"})
        center.put("mail", f"{i}", body, delay=HOUR, basis=f"customer-{i % 3}")
    now(center, "mail", 64)
    for i in range(20):
        [one] = center.get(f"{i}", basis=f"customer-{i % 3}")
        assert one.slot == center.registry.topic("mail").slot_for(f"customer-{i % 3}").number


def test_bodies_that_are_no_envelopes_stay_and_are_found_and_delivered(center, client):
    """Whoever uses the center alone: nobody knows their slot basis."""
    center.queues.declare("mail", slots=2)
    for i in range(20):
        center.put("mail", f"{i}", b"raw", basis=f"customer-{i % 3}")
    result = now(center, "mail", 16)
    assert (result.moved, result.left, result.done) == (0, 20, False)
    for i in range(20):
        basis = f"customer-{i % 3}"
        assert center.get(f"{i}", basis=basis)
        kept = center.put("mail", f"{i}", b"more", basis=basis, if_exists="keep")
        assert kept.outcome == "kept"
    assert center.ack(center.pop("mail", 100).messages) == 20
    assert now(center, "mail", 16).done
    assert center.registry.declared("mail").declaration.draining_counts == ()
    # To fewer, the slot says all there is to know.
    for i in range(20):
        center.put("mail", f"{i}", b"raw", basis=f"customer-{i % 3}", delay=HOUR)
    assert now(center, "mail", 1).done
    assert center.counts("mail").scheduled == 20


def test_what_is_in_flight_stays_and_its_acknowledgement_counts(center, client):
    """The slots that go are kept until then."""
    center.queues.declare("mail", slots=16)
    put_packed(center, range(30))
    held = center.pop("mail", 30).messages
    result = now(center, "mail", 2)
    high = [one for one in held if one.slot >= 2]
    assert (result.moved, result.left, result.done) == (0, len(high), False)
    assert center.extend(held) == []
    assert center.counts("mail").in_flight == 30
    # One goes back, and is moved then; the rest is acknowledged where it was taken.
    assert center.release(high[:1]) == 1
    assert now(center, "mail", 2)[2:] == (1, len(high) - 1, False)
    assert center.ack(held[:0] + [one for one in held if one is not high[0]]) == 29
    assert now(center, "mail", 2).done
    [last] = center.pop("mail", 30).messages
    assert last.id == high[0].id
    assert last.slot < 2
    assert center.ack([last]) == 1
    assert slot_keys(client) == []


def test_a_lease_that_ends_in_a_slot_that_goes_is_rolled_back(center, client):
    """A5: whoever held it has died."""
    center.queues.declare("mail", slots=16)
    put_packed(center, range(30))
    held = center.pop("mail", 30).messages
    assert len(held) == 30
    assert not now(center, "mail", 1).done
    assert center.extend(held, 0.05) == []
    time.sleep(0.1)  # until the leases end
    popped = TimeoutCenter(client, grace=0).pop("mail", 30)
    assert len(popped.rolled_back) == len(popped.messages) == 30
    center.ack(popped.messages)
    assert now(center, "mail", 1).done


def test_two_live_messages_that_share_an_id_meet_in_one_slot_and_stay_two(center, client):
    """Celery's retry publishes the id of the task that is running."""
    center.queues.declare("mail", slots=1)
    other = next(n for n in map(str, range(99)) if kombu_toc.model.topic.slot_of(n, 8) == 5)
    center.put("mail", other, packed(other, k=1))
    [running] = center.pop("mail", 1).messages
    assert not now(center, "mail", 8).done  # it is in flight in slot 0, and stays
    center.put("mail", other, packed(other, k=2), delay=HOUR)
    there = sorted((one.slot, one.state) for one in center.get(other))
    assert there == [(0, IN_FLIGHT), (5, WAITING)]
    center.release([running])
    assert now(center, "mail", 8).done
    assert sorted(one.state for one in center.get(other)) == [WAITING, WAITING]
    check_slots(center, "mail")
    [again] = center.pop("mail", 5).messages
    assert again.body == packed(other, k=1)
    center.ack([again])
    [left] = center.get(other)
    assert left.body == packed(other, k=2)
    assert [one.deleted for one in center.cancel(other)] == [True]
    assert slot_keys(client) == []


def test_the_same_message_that_was_put_by_both_counts_is_one_where_they_meet(center, client):
    center.queues.declare("mail", slots=1)
    old, new = TimeoutCenter(client), TimeoutCenter(client)
    old.registry.topic("mail")
    other = next(n for n in map(str, range(99)) if kombu_toc.model.topic.slot_of(n, 8) == 5)
    assert now(new, "mail", 8).done
    old.put("mail", other, packed(other), delay=HOUR)  # it has not heard of it
    new.put("mail", other, packed(other), delay=HOUR)
    assert new.counts("mail").scheduled == 2
    now(new, "mail", 1)
    assert new.counts("mail").scheduled == 1
    check_slots(new, "mail")


def test_a_topic_is_declared_with_its_former_count_and_no_third_one(center, client):
    """A worker whose settings say the old number reconnects."""
    center.queues.declare("mail", slots=4)
    now(center, "mail", 16)
    assert TimeoutCenter(client).queues.declare("mail", slots=4).slots == 16
    with pytest.raises(kombu_toc.SlotCountError, match=r"16 slots, not 8; .*toc reshard mail"):
        TimeoutCenter(client).queues.declare("mail", slots=8)


def test_a_change_of_mind_halfway_is_no_harm(center, client):
    """To 4, to 16 and to 2, none of them finished before the next."""
    center.queues.declare("mail", slots=8)
    fill(center, "mail")
    there = everything(center, "mail")
    put_packed(center, range(20))
    held = center.pop("mail", 20).messages
    for slots in (4, 16, 2):
        assert not now(center, "mail", slots).done
        assert sorted(center.get(held[0].id, basis=held[0].id))
    assert center.ack(held) == 20
    assert now(center, "mail", 2).done
    assert everything(center, "mail") == there
    check_slots(center, "mail")


def test_two_who_reshard_at_once_do_not_fight(center, client):
    """The first learns of it, and gives up."""
    center.queues.declare("mail", slots=8)
    told = []

    def meanwhile(*how_far):
        if not told:
            told.append(how_far)
            now(TimeoutCenter(client), "mail", 4)

    with pytest.raises(kombu_toc.ReshardError, match="4 slots by somebody else"):
        now(center, "mail", 16, settle=0.2, on_progress=meanwhile)
    assert center.registry.declared("mail").slots == 4


def test_what_cannot_be_resharded_is_refused_by_name(center, client):
    with pytest.raises(kombu_toc.ReshardError, match="no queue 'mail'"):
        now(center, "mail", 4)
    center.queues.declare("mail")
    with pytest.raises(kombu_toc.SlotCountError, match="power of two"):
        now(center, "mail", 6)
    center.queues.declare("reply", slots=1, expires=60_000)
    with pytest.raises(kombu_toc.ReshardError, match="'reply' goes away by itself"):
        now(center, "reply", 2)


def test_a_declaration_of_a_newer_release_keeps_what_this_one_does_not_know(center, client):
    client.hset(center.keys.topics, "mail", json.dumps({"slots": 8, "colour": "red"}))
    assert now(center, "mail", 4).done
    assert json.loads(client.hget(center.keys.topics, "mail"))["colour"] == "red"


def test_a_full_server_refuses_to_move_and_nothing_is_half_moved(center, client):
    center.queues.declare("mail", slots=16)
    fill(center, "mail")
    there = everything(center, "mail")
    refused = (redis.exceptions.ResponseError, kombu_toc.ServerError)
    with full_server(client), pytest.raises(refused, match=r"OOM|maxmemory"):
        now(center, "mail", 1)
    assert everything(center, "mail") == there
    assert now(center, "mail", 1).done
    assert everything(center, "mail") == there


def test_more_than_one_call_can_move_are_moved(center, client):
    center.queues.declare("mail", slots=2)
    number = 3 * BATCH
    put_for_later(center, number)
    now(center, "mail", 1)
    assert center.counts("mail").scheduled == number
    assert now(center, "mail", 8).moved > number / 2
    by_slot = [counts.scheduled for counts in center.queues.counts_by_slot("mail")]
    assert len(by_slot) == 8
    assert min(by_slot) > 0


@pytest.mark.parametrize(
    "changes", [(1, 32, 2), night((1, 32, 2, 64, 16, 128, 4))], ids=["few", "many"]
)
def test_a_lookup_by_id_finds_what_is_moved_in_that_moment(center, client, server, changes):
    """And a cancellation is told the truth."""
    center.queues.declare("mail", slots=64)
    number = 2000
    put_for_later(center, number)
    ids = iter(random.Random(3).sample(range(number), number))
    missed = []
    stop = threading.Event()

    def look() -> None:
        with server.client() as own:
            mine = TimeoutCenter(own)
            while not stop.is_set() and (id := next(ids, None)) is not None:
                if len(mine.get(f"{id}")) != 1 or not mine.get(f"{id}", basis=f"{id}"):
                    missed.append(id)
                if [one.deleted for one in mine.cancel(f"{id}")] != [True]:
                    missed.append(id)

    with in_thread(look):
        # As long as a lookup may take that began by the old declaration.
        moved = sum(reshard_topic(center, "mail", slots, settle=0.3).moved for slots in changes)
        stop.set()
    assert missed == []
    assert moved > number / 2


@pytest.mark.one_server("the nodes of a Cluster are asked side by side")
def test_a_message_that_is_moved_between_two_looks_is_found_once(center, monkeypatch):
    center.queues.declare("mail", slots=8)
    topic = center.registry.topic("mail")
    id = next(f"{n}" for n in range(100) if topic.slot_for(f"{n}").number >= 2)
    center.runner.run(put_call(center, topic, id, packed(id), delay_us=10**10))
    assert not reshard_topic(center, "mail", 2, settle=0, move=False).done
    monkeypatch.setattr("kombu_toc.center.messages.CALLS_TOGETHER", 1)
    monkeypatch.setattr("kombu_toc.center.messages.IDS_PER_CALL", 1)
    looker = TimeoutCenter(center.client)
    ask, slots = looker.runner.run_all, []

    def run_all(calls):
        found = ask(calls)
        seen = [one.slot for part in found for one in part]
        slots.extend(seen)
        if seen and len(slots) == 1:
            assert reshard_topic(center, "mail", 2, settle=0).moved == 1
        return found

    looker.runner.run_all = run_all
    [found] = looker.get(id)
    assert found.id == id
    assert len(slots) == 2  # it was seen in both places


# -- killed at any point


class Killed(BaseException):
    """What ends the resharder where it stands."""


class Mortal:
    """A client that dies before it sends its next command."""

    lives = 10**9

    def one_less(self) -> None:
        self.lives -= 1
        if self.lives < 0:
            raise Killed

    def execute_command(self, *args, **options):
        self.one_less()
        return super().execute_command(*args, **options)

    def pipeline(self, transaction=True, shard_hint=None):
        self.one_less()
        return super().pipeline(transaction, shard_hint)


class MortalOfCluster(Mortal):
    def run_keyed(self, calls, *args, again=False):
        # Commands are counted by themselves, and what a script has said is announced with it.
        if not again and "{toc}:wake:" not in calls[0][0]:
            self.one_less()
        return super().run_keyed(calls, *args, again=again)


def mortal(client: redis.Redis, lives: int) -> TimeoutCenter:
    made = copy.copy(client)
    kind = MortalOfCluster if hasattr(client, "run_keyed") else Mortal
    made.__class__ = type("Client", (kind, type(client)), {})
    made.lives = lives
    return TimeoutCenter(made)


def keep_up(center: TimeoutCenter) -> None:
    """What the worker that is elected does every few seconds: on a Cluster it has arrive what
    somebody who was killed has taken out of a slot."""
    carry_on(center.runner, center.context, center.registry.topic("mail"))


@pytest.mark.cluster
@pytest.mark.parametrize(("before", "after"), [(1, 8), (8, 1), night(4, 16), night(16, 4)])
def test_killed_at_any_step_it_leaves_everything_right_and_goes_on(center, client, before, after):
    lives = 1
    while True:
        client.flushall()
        center = TimeoutCenter(client)
        center.queues.declare("mail", slots=before)
        fill(center, "mail")
        put_packed(center, range(5), "due-")
        there = everything(center, "mail")
        try:
            now(mortal(client, lives), "mail", after)
        except Killed:
            survived = False
        else:
            survived = True
        center = TimeoutCenter(client)
        keep_up(center)
        check_slots(center, "mail")
        assert everything(center, "mail") == there
        # It is used as it stands.
        popped = center.pop("mail", 100)
        assert sorted(one.id for one in popped.messages) == sorted(f"due-{i}" for i in range(5))
        assert center.ack(popped.messages) == 5
        for id, basis in (("later-3", "later-3"), ("dies-2", None), ("tried-1", "tried-1")):
            assert [one.id for one in center.get(id, basis=basis)] == [id]
        [moved] = center.cancel("later-7")
        assert moved.deleted
        if survived:
            break
        assert now(mortal(client, 10**9), "mail", after).done
        check_slots(TimeoutCenter(client), "mail")
        for id in (*(one.id for one in popped.messages), "later-7"):
            del there[id]
        assert everything(TimeoutCenter(client), "mail") == there
        lives += 1
    assert lives > 15


def killed_between_two_nodes(cluster, monkeypatch, topic: str, slots: int) -> None:
    """A resharder has taken messages out of a slot, and dies."""
    with monkeypatch.context() as patch:
        patch.setattr("kombu_toc.center.reshard.arrive", Mock(side_effect=Killed))
        with pytest.raises(Killed):
            now(center_for(cluster.toc_url), topic, slots)


@pytest.mark.parametrize("what", ["get", "cancel", "reschedule"])
def test_what_is_between_two_nodes_is_found_by_its_id(cluster, across, monkeypatch, what):
    across.queues.declare("mail", slots=8)
    ids = [f"{i}" for i in range(30)]
    put_packed(across, ids, delay=HOUR)
    killed_between_two_nodes(cluster, monkeypatch, "mail", 1)
    center = center_for(cluster.toc_url)
    assert center.counts("mail").scheduled < 30
    if what == "get":
        assert sorted(one.id for one in center.get(ids)) == sorted(ids)
    elif what == "cancel":
        assert [one.deleted for one in center.cancel(ids)] == [True] * 30
    else:
        assert [one.moved for id in ids for one in center.reschedule(id, delay=60)] == [True] * 30
    assert now(center, "mail", 1).done
    check_slots(center, "mail")
    assert center.queues.counts("mail").scheduled == (0 if what == "cancel" else 30)


def test_what_is_between_two_nodes_keeps_its_queue_and_arrives_once(cluster, across, monkeypatch):
    """Also if its resharder dies when it has arrived, and it is done with when somebody sees it."""
    source = across.queues.declare("mail", slots=8).slot_for("x")
    assert source.number
    put_some(across, "mail", 5, "", basis="x")
    killed_between_two_nodes(cluster, monkeypatch, "mail", 1)
    center = center_for(cluster.toc_url)
    assert center.counts("mail").ready == 0
    assert center.queues.delete("mail", if_empty=True, settle=0) is False
    [(batch, records)] = center.client.hgetall(source.leaving).items()
    keep_up(center)
    assert center.ack(center.pop("mail", 10).messages) == 5
    center.client.hset(source.leaving, batch, records)
    keep_up(center)
    assert sum(center.counts("mail")) == 0
    assert now(center, "mail", 1) == Resharded("mail", 1, 0, 0, True)
    with cluster.client() as client:
        assert slot_keys(client) == []


def test_a_unique_key_is_held_by_what_is_between_two_nodes(cluster, across, monkeypatch):
    across.queues.declare("mail", slots=8)
    for number in range(30):
        across.put("mail", f"{number}", packed(f"{number}"), delay=HOUR, unique=f"key-{number}")
    killed_between_two_nodes(cluster, monkeypatch, "mail", 1)
    center = center_for(cluster.toc_url)
    for number in range(30):
        put = center.put("mail", "other", b"", delay=HOUR, unique=f"key-{number}")
        assert (put.id, put.outcome) == (f"{number}", "kept")


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abcdefgh"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("pop"), st.integers(1, 4)),
        st.tuples(st.just("ack"), st.integers(0, 3)),
        st.tuples(st.just("release"), st.integers(0, 3)),
        st.tuples(st.just("die"), st.integers(0, 3)),
        st.tuples(st.just("reshard"), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 40)),
        st.tuples(st.just("reload"), st.integers(0, 1)),
    ),
    max_size=60,
)


@pytest.mark.parametrize("examples", [40, night(150)])
def test_whatever_happens_meanwhile_each_message_is_delivered_until_it_is_settled(client, examples):
    """Producers that have and have not heard of it, consumers, and a resharder that is killed."""

    @settings(
        max_examples=examples,
        deadline=None,  # a server's pace is not the code's
        phases=(Phase.reuse, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(steps)
    def run(steps):
        client.flushall()
        TimeoutCenter(client).queues.declare("mail", slots=4)
        producers = [TimeoutCenter(client) for _ in range(2)]  # who read the declaration now
        for producer in producers:
            producer.registry.topic("mail")
        live: dict[bytes, str] = {}  #: body -> state
        held: list = []
        number = 0
        for what, *rest in steps:
            if what == "put":
                id, who, later = rest
                body = packed(id, k=(number := number + 1))
                center = producers[who] if who < 2 else TimeoutCenter(client)
                kept = center.put("mail", id, body, delay=HOUR if later else None).id
                assert kept.startswith(id)
                live[body] = "later" if later else "due"
            elif what == "pop":
                popped = TimeoutCenter(client).pop("mail", rest[0])
                due = [body for body, state in live.items() if state == "due"]
                assert len(popped.messages) == min(rest[0], len(due))
                for one in popped.messages:
                    assert live[one.body] == "due"
                    live[one.body] = "held"
                held += popped.messages
            elif what in ("ack", "release", "die") and held:
                one = held.pop(rest[0] % len(held))
                if what == "ack":
                    assert TimeoutCenter(client).ack([one]) == 1
                    del live[one.body]
                elif what == "release":
                    assert TimeoutCenter(client).release([one]) == 1
                    live[one.body] = "due"
                else:
                    TimeoutCenter(client).reject(one, requeue=False, reason="done for")
                    live[one.body] = "dead"
            elif what == "reshard":
                try:
                    now(mortal(client, rest[1]), "mail", rest[0])
                except Killed:
                    keep_up(TimeoutCenter(client))
            elif what == "reload":
                producers[rest[0]].registry.forget("mail")
                producers[rest[0]].registry.topic("mail")
            # What a late producer has put beyond the span is announced; a consumer that claims
            # it sees to it that all look there.
            center = TimeoutCenter(client)
            for slot, _ in announced(center, "mail"):
                center.registry.reach("mail", slot)
            check_slots(TimeoutCenter(client), "mail")
            counts = TimeoutCenter(client).counts("mail")
            states = list(live.values())
            assert counts.waiting == states.count("due") + states.count("later")
            assert (counts.in_flight, counts.dead) == (states.count("held"), states.count("dead"))
        TimeoutCenter(client).ack(held)
        assert now(TimeoutCenter(client), "mail", 2).done
        check_slots(TimeoutCenter(client), "mail")
        left = sorted(body for body, state in live.items() if state != "held")
        center = TimeoutCenter(client)
        slots = center.registry.topic("mail").all_slots()
        assert sorted(body for slot in slots for body in center.client.hvals(slot.body)) == left

    run()


# -- with the transport


def test_what_a_late_producer_puts_into_a_slot_that_is_gone_is_delivered_in_time(connect, client):
    consumer, producer = connect(), connect()
    queue = "mail"
    consumer.default_channel.queue_declare(queue, arguments={"x-slots": 16})
    inbox = Inbox(consumer)
    late = producer.default_channel
    late.queues.topic(queue)  # it has read the declaration just now, and will not for a while
    registry = producer.transport.center.registry
    registry.clock = partial(float, registry.clock())
    now(TimeoutCenter(client), queue, 1)
    while consumer.transport.center.registry.known(queue).slots != 1:
        drain(consumer, timeout=0.1)
    began = time.monotonic()
    for i in range(20):
        Producer(late).publish(i, routing_key=queue)
    while len(inbox.messages) < 20:
        consumer.drain_events(timeout=5)
    assert time.monotonic() - began < 3
    assert sorted(inbox.bodies) == list(range(20))
    topic = TimeoutCenter(client).registry.declared(queue)
    assert (topic.slots, topic.slot_span) == (1, 16)  # so that whoever dies with one is no loss
    drain(consumer)
    assert now(TimeoutCenter(client), queue, 1).done
    inbox.consumer.cancel()
    assert keys_left(client, "toc:{mail:*}:*") == []


def test_a_consumer_that_is_never_idle_takes_from_new_slots_too(connect, client):
    """It claims nothing, and so hears of no announcement."""
    consumer, producer = connect(), connect()
    consumer.default_channel.queue_declare("mail", arguments={"x-slots": 1})
    inbox = Inbox(consumer)
    # It listens to nothing: all it does is to look into all slots once a second.
    consumer.transport.poller._listen = lambda: None
    drain(consumer, 0.1)
    now(TimeoutCenter(client), "mail", 16)
    fresh = producer.channel()
    for i in range(20):
        Producer(fresh).publish(i, routing_key="mail")
    deliver_until(consumer, lambda: len(inbox.messages) >= 20, 8)
    assert sorted(inbox.bodies) == list(range(20))
    assert inbox.consumer.channel.center.registry.known("mail").slots == 16


def test_a_publish_that_is_repeated_after_the_change_stays_one_message(connect, client):
    """Its reply was lost, it has been delivered and acknowledged, and is sent again."""
    producer = connect()
    producer.default_channel.queue_declare("mail", arguments={"x-slots": 1})
    for i in range(10):
        channel = producer.default_channel
        properties: dict = {"delivery_mode": 2}  # as Kombu repeats a publish: with the same

        def publish(channel=channel, properties=properties, i=i):
            message = channel.prepare_message(f"{i}", headers={"id": f"{i}"}, properties=properties)
            channel.basic_publish(message, "", "mail")

        publish()
        center = TimeoutCenter(client)
        assert center.ack(center.pop("mail", 10).messages) == 1
        now(center, "mail", 64)
        # A channel of a new connection reads the declaration.
        channel.center.registry.forget("mail")
        publish()
        assert center.counts("mail").waiting == 0, i
        now(center, "mail", 1)
        channel.center.registry.forget("mail")


def test_producers_and_consumers_go_on_meanwhile(connect, client, server):
    """Up and down again and again: none lost, none early, none twice."""
    consumer = connect()
    consumer.default_channel.queue_declare("mail", arguments={"x-slots": 4})
    stop = threading.Event()
    sent: dict[str, float] = {}

    def produce(name: str) -> None:
        with Connection(server.toc_url) as connection:
            i = 0
            while not stop.is_set():
                channel = connection.channel()  # which reads the declaration
                for _ in range(20):
                    id = f"{name}-{i}"
                    i += 1
                    delay = random.Random(id).choice([0.0, 0.3, 0.8])
                    sent[id] = time.time() + delay
                    Producer(channel).publish(
                        id, routing_key="mail", headers={"id": id, "x-delay": delay * 1000}
                    )
                channel.close()

    def change() -> None:
        order = random.Random(1)
        while not stop.is_set():
            with server.client() as own, contextlib.suppress(Killed):
                dying, slots = mortal(own, order.randrange(5, 60)), order.choice([1, 2, 8, 32])
                reshard_topic(dying, "mail", slots, settle=0.2)

    got: dict[str, list[float]] = {}

    def take(body, message):
        got.setdefault(body, []).append(time.time())
        message.ack()

    simple = consumer.Consumer(Queue("mail"), callbacks=[take], prefetch_count=100)
    simple.consume()
    with in_thread(produce, "a"), in_thread(produce, "b"), in_thread(change):
        # So many changes, with what becomes due between any two.
        deliver_until(consumer, lambda: False, 8)
        stop.set()
    keep_up(TimeoutCenter(client))
    deliver_until(consumer, lambda: len(got) >= len(sent))
    assert set(got) == set(sent)
    assert len(sent) > 300
    assert {id: times for id, times in got.items() if len(times) > 1} == {}
    lateness = sorted(times[0] - sent[id] for id, times in got.items())
    assert lateness[0] > -0.002  # the clocks are one, but for rounding
    drain(consumer)
    assert now(TimeoutCenter(client), "mail", 2).done
    simple.cancel()
    assert keys_left(client, "toc:{mail:*}:*") == []
    assert TimeoutCenter(client).get("a-0") == []
    assert DEAD not in got
