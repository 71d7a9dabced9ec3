"""Commands: what a request becomes, without a server and without a clock."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from redis.crc import key_slot

from kombu_toc.center.admin_commands import PURGE_STEP, AdminCommands, Place
from kombu_toc.center.calls import (
    ACKS_PER_CALL,
    ERROR_LENGTH,
    LEASES_PER_CALL,
    REASON_LENGTH,
    SENT,
    Commands,
    Context,
    PopRequest,
    PutRequest,
    ScheduleChange,
    add_counters,
    announce_presence,
    divide_evenly,
    read_call,
    written_call,
)
from kombu_toc.center.pop import PickRequest, Wanted, bury_call, look_call, mark_calls, pick_call
from kombu_toc.center.put import put_many_call, unique_call
from kombu_toc.center.schedules import RecurringCommands
from kombu_toc.center.upkeep import sweep_call
from kombu_toc.errors import ActionTimeError
from kombu_toc.metrics import Counters
from kombu_toc.model import scores
from kombu_toc.model.keys import Keys
from kombu_toc.model.limits import Limits
from kombu_toc.model.message import Unique, claim_of
from kombu_toc.model.results import DEAD, WAITING, Delivery, Put, PutTogether
from kombu_toc.model.topic import Declaration, Topic
from kombu_toc.scripts.call import FreeNames, ScriptCall, publish_of

from ..support.cases import each

#: A name whose braces would cut a hash tag short.
NAME = "a{b}c"


class Made:
    """Commands with what they share."""

    def __init__(self, *, clustered: bool = False, slots: int = 4, **declared: Any) -> None:
        self.counters = Counters(active=True)
        self.keys = Keys("toc:")
        self.context = Context(self.keys, clustered, Limits(), 1000, self.counters.counts)
        self.topic = Topic(NAME, Declaration(slots=slots, **declared), "toc:")
        behind = Declaration(slots=slots, library="behind", key_order="serial", put_rate="9/s")
        self.behind = Topic(NAME, behind, "toc:")
        self.commands = Commands(self.context, lambda delivery: self.topic)
        self.admin = AdminCommands(self.context)
        self.recurring = RecurringCommands(self.context)
        self._numbers = count()

    def delivery(self, slot: int = 0, id: str = "", **more: Any) -> Delivery:
        id = id or f"id-{next(self._numbers)}"
        return Delivery(NAME, slot, 0, id, scores.action(10**15), b"", 16, **more)

    @property
    def counted(self) -> Any:
        return self.counters.counts(self.topic)


@pytest.fixture
def made() -> Made:
    return Made()


def hash_slots(keys: Any) -> set[int]:
    return {key_slot(key.encode()) for key in keys}


# -- on a Cluster


def every_call(made: Made) -> list[ScriptCall]:
    """One call, or several, of each command."""
    commands, admin, topic = made.commands, made.admin, made.topic
    slot = topic.slot(1)
    place = Place(topic, slot, ["a", "a#1"])
    held = [made.delivery(slot % 4, f"m{slot}#{slot}") for slot in range(8)]
    return [
        commands.put(topic, PutRequest("a", b"body", basis="other", publish=("me", "1"))),
        unique_call(
            commands, topic, PutRequest("a", b"", basis="k"), claim_of("a", Unique("k"), None)
        ).call,
        sweep_call(slot),
        commands.put(topic, PutRequest("a", b"body", traits=";v9", publish=("me", "1"))),
        commands.put(made.behind, PutRequest("a", b"body", basis="other", publish=("me", "1"))),
        commands.put(made.behind, PutRequest("a", b"", traits=";ka")),
        unique_call(
            commands, made.behind, PutRequest("a", b"", basis="k"), claim_of("a", Unique("k"), None)
        ).call,
        put_many_call(made.context, made.behind, slot, 0, ["a", b"", "", "b", b"", "+5"]),
        read_call(slot, 10, 100),
        written_call(slot, ["1-1"], ["a"]),
        put_many_call(made.context, topic, slot, 0, ["a", b"", "", "b", b"", "+5"]),
        commands.pop(topic, PopRequest("me.1", [1], ready_limit=5, recover=7)),
        commands.recall(topic, [1], "me.1"),
        look_call(commands, topic, PopRequest("me.1", [1], heads=10)),
        pick_call(made.context, topic, slot, PickRequest("me.2", [Wanted("a")], 1, 100)),
        admin.vacate(topic, slot),
        *commands.reannounce(topic, [(0, 1), (1, 2), (3, 4)]),
        *commands.ack(held),
        *commands.release(held),
        *commands.extend(held),
        commands.reject(held[0], requeue=True),
        bury_call(made.context, topic, held[1], "failed", ""),
        *mark_calls(lambda delivery: topic, held),
        admin.get([place]),
        admin.cancel(place, (WAITING,), copies=True, bodies=True),
        admin.reschedule(topic, slot, "a", "", copies=True),
        admin.requeue(place),
        admin.purge(topic, slot),
        admin.check(topic, slot, topic.other_steps(), 1, "0", step=10, repair=False),
        admin.check_copies(topic, slot, slot.copies("a"), repair=False),
        admin.counts(topic, [slot]),
        admin.coming(slot, [0]),
        admin.summary(slot),
        admin.usage(slot),
        made.recurring.changing(topic, ScheduleChange("nightly", "", "x", template=b"y")),
        made.recurring.reading(topic, ["nightly"]),
    ]


def test_on_a_cluster_all_keys_of_a_call_share_a_slot() -> None:
    """A4"""
    calls = every_call(Made(clustered=True))
    assert len({call.script.name for call in calls}) == 30
    for call in calls:
        assert len(hash_slots(call.keys)) == 1, call.script.name
        assert not any("{toc}" in key for key in call.keys), call.script.name


def test_what_belongs_to_no_slot_shares_one_tag() -> None:
    made = Made(clustered=True)
    calls = [
        made.commands.find_due(["one", "two"]),
        made.commands.pass_on("one", 3, 10**15),
        add_counters(made.keys, "one", {"put": 1}),
        add_counters(made.keys, None, {"put:calls": 1}),
        announce_presence(made.keys, "[]", (), 60_000),
    ]
    assert {slot for call in calls for slot in hash_slots(call.keys)} == {key_slot(b"toc")}


def test_on_one_server_the_wake_index_is_the_last_key() -> None:
    for call in every_call(Made()):
        wakes = [at for at, key in enumerate(call.keys) if "{toc}" in key]
        assert call.wake is None
        assert wakes in ([], [len(call.keys) - 1]), call.script.name


def test_on_a_cluster_a_script_replies_what_is_to_be_announced() -> None:
    made = Made(clustered=True)
    call = made.commands.pop(made.topic, PopRequest("me.1", [1]))
    assert call.wake == (made.keys.wake(NAME), 0)
    announced = call.announcing([0, 0, [], [], [], [], [], [1, 500], []])
    assert announced == (made.keys.wake(NAME), 0, [1, 500], [])
    for odd in (7, b"7", None, [], [1], [1, 2], [[1, 500]], [[1, 500], 2]):
        assert call.announcing(odd) is None


# -- put


def test_a_put_goes_to_the_slot_of_its_basis_and_to_the_step_of_its_priority(made: Made) -> None:
    for priority, step in ((0, 0), (2, 0), (3, 1), (9, 3), (-1, 0)):
        call = made.commands.put(made.topic, PutRequest("id", b"", basis="x", priority=priority))
        slot = made.topic.slot_for("x")
        assert call.keys[0] == slot.stores[step]
        assert call.args[3] == slot.number
        assert call.keys[3] == slot.copies("id")


def test_a_put_says_when_in_one_of_three_ways(made: Made) -> None:
    for request, when in (
        (PutRequest("a", b""), ""),
        (PutRequest("a", b"", delay_us=5_000_000), "+5000000"),
        (PutRequest("a", b"", delay_us=-1), ""),
        (PutRequest("a", b"", at_us=10**15), str(10**15)),
    ):
        assert made.commands.put(made.topic, request).args[2] == when
    with pytest.raises(ActionTimeError):
        made.commands.put(made.topic, PutRequest("a", b"", at_us=10**16))


def test_the_suffix_of_a_copy_follows_from_the_name_of_its_put_and_not_from_its_body(
    made: Made,
) -> None:
    one, same, other, nameless, own = (
        made.commands.put(made.topic, request).args[4]
        for request in (
            PutRequest("a", b"1", publish=("me", "me.1")),
            PutRequest("a", b"2", publish=("me", "me.1")),
            PutRequest("a", b"1", publish=("me", "me.2")),
            PutRequest("a", b"1"),
            PutRequest("a", b"1", token="mine"),
        )
    )
    assert one == same
    assert len({one, other, nameless, own}) == 4
    assert own == "mine"


def test_a_maker_of_names_is_of_one_put_at_a_time_and_names_are_never_given_twice() -> None:
    names = FreeNames()
    one, other = names.take(), names.take()
    said = {one.next(), one.next(), other.next()}
    assert len({publish_of(name)[0] for name in said}) == 2
    names.give(one)
    assert names.take() is one
    assert len(said | {one.next()}) == 4


def test_a_put_remembers_the_publish_of_its_producer_in_the_slot(made: Made) -> None:
    call = made.commands.put(made.topic, PutRequest("a", b"", publish=("me", "7"), remember=9))
    assert call.keys[SENT] == made.topic.slot_for("a").sent("me")
    assert call.args[7:9] == ("7", 9)


def test_only_an_added_message_counts(made: Made) -> None:
    call = made.commands.put(made.topic, PutRequest("a", b""))
    assert call.parse([b"a#2", 1, 77, [], []]) == Put("a#2", "added", 77)
    assert call.parse([b"a", 0, 0, [], []]) == Put("a", "repeated")
    assert made.counted.put == 1


def test_what_is_put_together_is_counted_but_for_what_was_not_added(made: Made) -> None:
    call = put_many_call(made.context, made.topic, made.topic.slot(2), 1, ["a", b"", ""] * 5)
    assert call.keys[0] == made.topic.slot(2).stores[1]
    assert call.parse([77, [1], [0, 4], [], []]) == PutTogether(77, [1], [0, 4])
    assert made.counted.put == 2


# -- pop


def test_a_pop_asks_each_slot_once_and_in_order(made: Made) -> None:
    call = made.commands.pop(made.topic, PopRequest("me.1", [3, 1, 3]))
    assert call.args[-2:] == (1, 3)
    assert call.args[0] == 2
    slots = made.topic.slot(1), made.topic.slot(3)
    keys = [key for slot in slots for key in slot.script_keys[:6]]
    keys += [key for step in zip(*(slot.stores for slot in slots), strict=True) for key in step]
    assert call.keys == (*keys, made.topic.slot(1).given("me"), made.keys.wake(NAME))


def test_a_pop_asks_all_slots_unless_told_which() -> None:
    made = Made(slots=2, draining_counts=(8,))
    call = made.commands.pop(made.topic, PopRequest("me.1"))
    assert (call.args[0], call.args[19:]) == (8, ())  # all from 0 on


@each(
    "declared, asked, ms",
    [(None, None, 60_000), (None, 5.0, 5000), (90.0, 5.0, 5000), (90.0, None, 90_000)],
)
def test_the_caller_says_how_long_a_lease_lasts_then_the_topic_then_the_center(
    declared: float | None, asked: float | None, ms: int
) -> None:
    made = Made(visibility=declared)
    assert made.commands.pop(made.topic, PopRequest("me.1", visibility=asked)).args[6] == ms
    assert made.commands.recall(made.topic, None, "me.1", visibility=asked).args[1] == ms
    assert made.commands.extend([made.delivery()], asked)[0].args[0] == ms


def test_the_slots_of_a_topic_share_its_dead_queue() -> None:
    made = Made(slots=8, dead_limit=20)
    assert 3 in made.commands.pop(made.topic, PopRequest("me.1")).args[12:13]


def test_what_a_pop_has_delivered_says_where_it_is_from_and_is_counted(made: Made) -> None:
    call = made.commands.pop(made.topic, PopRequest("me.1", [1, 3]))
    score = scores.action(10**15)
    flat = [1, 2, b"a", score, b"body", 0, 0, [b"b", b"other.9"], score, b""]
    popped = call.parse([5, 1, flat, [1, b"c#2"], [b"d", b"e"], [b"e"], [0, b"f"], [], [], []])
    assert [(one.slot, one.step, one.id, one.birth) for one in popped.messages] == [
        (3, 2, "a", "me.1"),
        (1, 0, "b", "other.9"),
    ]
    assert (popped.bare, popped.rolled_back, popped.died, popped.dropped) == (
        *(["c#2"], ["d", "e"]),
        *(["e"], ["f"]),
    )
    assert popped.stray == [(made.topic.slot(3).copies("c"), "c#2")]
    assert popped.more
    counted = made.counted
    assert (counted.delivered, counted.rolled_back, counted.dead) == (2, 2, 1)


def test_a_recall_delivers_nothing_new(made: Made) -> None:
    call = made.commands.recall(made.topic, None, "me.1", bodies=False, remember=0)
    assert call.parse([5, [0, 0, b"a", scores.action(10**15), b""]]).messages[0].birth == "me.1"
    assert made.counted.delivered == 0


# -- what ends a delivery


def test_messages_of_one_server_are_acknowledged_by_one_call_and_of_a_cluster_by_slot() -> None:
    for clustered, number in ((False, 1), (True, 3)):
        made = Made(clustered=clustered)
        calls = made.commands.ack([made.delivery(slot) for slot in (0, 1, 0, 3)])
        assert len(calls) == number
        assert sum(call.parse([2, [], [], []]) for call in calls) == 2 * number
        assert made.counted.acked == 2 * number


def test_the_reply_tells_which_of_several_were_stale(made: Made) -> None:
    held = [made.delivery(0, birth="x") for _ in range(3)]
    for calls in (made.commands.ack(held), made.commands.release(held)):
        [call] = calls
        settled = call.parse([1, [1, 3], [], []])
        assert (settled, settled.stale) == (1, [0, 2])


def test_a_call_acknowledges_a_bounded_number(made: Made) -> None:
    calls = made.commands.ack(made.delivery() for _ in range(2 * ACKS_PER_CALL + 1))
    assert [call.args[4] for call in calls] == [ACKS_PER_CALL] * 2 + [1]


def test_an_acknowledged_copy_leaves_its_copies_set(made: Made) -> None:
    held = [made.delivery(1, "a#2", birth="x"), made.delivery(1, "b", birth="y")]
    [call] = made.commands.ack(held)
    assert made.topic.slot(1).copies("a") in call.keys
    assert call.args == (1, 4, 1, 1, 2, "a#2", "b", "x", "y", 1, "a#2")
    assert not call.keys_recur  # copies sets are of any number


def test_a_call_renews_a_bounded_number_of_leases(made: Made) -> None:
    held = [made.delivery() for _ in range(2 * LEASES_PER_CALL + 1)]
    calls = made.commands.extend(held)
    assert [(len(call.args) - 1) // 3 for call in calls] == [LEASES_PER_CALL] * 2 + [1]
    assert calls[1].parse([1, 2]) == held[LEASES_PER_CALL : LEASES_PER_CALL + 2]


def test_reasons_and_errors_are_cut_and_what_is_no_utf_8_is_escaped(made: Made) -> None:
    long = "x" * 5000
    call = made.commands.reject(
        made.delivery(), requeue=False, reason=f"a\n b\t{long}", error="\ud800" + long
    )
    reason, error = call.args[6:8]
    assert reason == f"a b {long}".encode()[:REASON_LENGTH]
    assert error.startswith(rb"\ud800x")
    assert len(error) == ERROR_LENGTH + 5
    assert made.commands.reject(made.delivery(), requeue=False).args[6] == b"rejected"


def test_a_rejected_message_waits_as_its_topic_says_unless_told_otherwise() -> None:
    made = Made(retry_backoff=2.0, retry_backoff_max=60.0)
    delivery = made.delivery()
    assert made.commands.reject(delivery, requeue=True).args[4:6] == (2000, 60_000)
    assert made.commands.reject(delivery, requeue=True, backoff=5).args[4:6] == (5000, 5000)
    for requeue, most in ((True, (50, 1000)), (False, (2000, 60_000))):
        put_off = made.commands.reject(delivery, requeue=requeue, on_purpose=True)
        assert put_off.args[4:6] == most


def test_a_reject_tells_the_new_state_and_counts_it(made: Made) -> None:
    call = made.commands.reject(made.delivery(), requeue=True)
    assert [call.parse([number]) for number in (0, 1, 2)] == [None, WAITING, DEAD]
    assert (made.counted.rolled_back, made.counted.dead) == (1, 1)


def test_a_delivery_is_settled_by_its_own_lease_only(made: Made) -> None:
    delivery = made.delivery(birth="me.1")
    [released] = made.commands.release([delivery])
    [extended] = made.commands.extend([delivery])
    for call in (released, extended, made.commands.reject(delivery, requeue=True)):
        assert call.args[-2:] == (delivery.lease_token, "me.1")


# -- of people and tools


def test_cancel_reads_a_bounded_number_of_bytes_unless_it_reads_none(made: Made) -> None:
    place = Place(made.topic, made.topic.slot(1), ["a", "b"])
    reads = made.admin.cancel(place, (WAITING, DEAD), copies=False, bodies=True)
    assert reads.args[2:7] == (1, 0, 1, 0, 1000)
    assert made.admin.cancel(place, (DEAD,), copies=True, bodies=False).args[5:7] == (1, 0)
    flat = [b"a", 1, 1, 0, b"body", b";v5", b"b", 3, 1, 1, b"", b"", b"c", 2, 0, 0, b"", b""]
    reply = reads.parse([flat, 1, [], []])
    assert [(one.id, one.state, one.deleted) for one in reply.cancelled] == [
        ("a", "waiting", True),
        ("b", "dead", True),
        ("c", "in flight", False),
    ]
    assert reply.done == 1
    assert (made.counted.cancelled, made.counted.purged) == (1, 1)


def test_a_purge_deletes_a_bounded_number(made: Made) -> None:
    call = made.admin.purge(made.topic, made.topic.slot(0))
    assert call.args == (4, 0, PURGE_STEP)
    assert call.parse([3, [b"a#1"], [], []]) == (3, ["a#1"])
    assert made.counted.purged == 3


def test_a_scan_goes_on_behind_where_it_was(made: Made) -> None:
    """Of the places of a slot, those that come later begin at the same score, too."""
    slot = made.topic.slot(2)
    call = made.admin.scan(
        made.topic,
        slot,
        (WAITING, DEAD),
        (77, b"x", 2, 1),
        50,
        since_us=None,
        until_us=1_999,
        bodies=True,
        budget=9,
    )
    assert call.args == (50, "-inf", "1999", 1, 9, 77, b"x", 0, 0, 1, 1, 1)
    assert call.keys == (slot.body, slot.reasons, slot.tokens, *slot.stores, slot.dead)


@each("total, among", [(0, [1, 2]), (1, [4, 5, 6]), (7, [1, 2, 3]), (9, [1])])
def test_what_is_divided_is_all_given_out_and_evenly(total: int, among: list[int]) -> None:
    given = divide_evenly(total, among)
    numbers = [number for _, number in given]
    assert sum(numbers) == total
    assert all(numbers)
    assert max(numbers, default=0) - min([*numbers, total // len(among)]) <= 1
