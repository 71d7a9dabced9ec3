"""Commands: what a request becomes, without a server and without a clock."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from redis.crc import key_slot

from kombu_toc.center.calls import (
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
from kombu_toc.center.messages import Place, cancel_call, get_call, requeue_call, reschedule_call
from kombu_toc.center.pop import Wanted, bury_call, look_call, mark_calls, pick_call
from kombu_toc.center.put import put_many_call, unique_call
from kombu_toc.center.schedules import changing, reading
from kombu_toc.center.topics import (
    PURGE_STEP,
    coming_call,
    counts_call,
    purge_call,
    summary_call,
    usage_call,
    vacate_call,
)
from kombu_toc.center.upkeep import check_call, check_copies_call, sweep_call
from kombu_toc.metrics import Metrics
from kombu_toc.model import scores
from kombu_toc.model.limits import Limits
from kombu_toc.model.message import Unique, claim_of
from kombu_toc.model.results import WAITING, Delivery
from kombu_toc.model.topic import Declaration, Keys, Topic
from kombu_toc.scripts.call import FreeNames, ScriptCall, publish_of

from ..support.cases import each

#: A name whose braces would cut a hash tag short.
NAME = "a{b}c"


class Made:
    """Commands with what they share."""

    def __init__(self, *, clustered: bool = False, slots: int = 4, **declared: Any) -> None:
        self.counters = Metrics(active=True)
        self.keys = Keys("toc:")
        self.context = Context(self.keys, clustered, Limits(), 1000, self.counters.counts)
        self.topic = Topic(NAME, Declaration(slots=slots, **declared), "toc:")
        behind = Declaration(slots=slots, library="behind", key_order="serial", put_rate="9/s")
        self.behind = Topic(NAME, behind, "toc:")
        self.commands = Commands(self.context, lambda delivery: self.topic)
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
    commands, context, topic = made.commands, made.context, made.topic
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
        pick_call(made.context, topic, slot, "me.2", [Wanted("a")], 1, 100),
        vacate_call(topic, slot),
        *commands.reannounce(topic, [(0, 1), (1, 2), (3, 4)]),
        *commands.ack(held),
        *commands.release(held),
        *commands.extend(held),
        commands.reject(held[0], requeue=True),
        bury_call(made.context, topic, held[1], "failed", ""),
        *mark_calls(lambda delivery: topic, held),
        get_call([place]),
        cancel_call(context, place, (WAITING,), copies=True, bodies=True),
        reschedule_call(context, Place(topic, slot, ["a"]), "", copies=True),
        requeue_call(context, place),
        purge_call(context, topic, slot),
        check_call(context, topic, slot, topic.other_steps(), 1, "0", step=10, repair=False),
        check_copies_call(topic, slot, slot.copies("a"), repair=False),
        counts_call(topic, [slot]),
        coming_call(slot, [0]),
        summary_call(slot),
        usage_call(slot),
        changing(made.context, topic, ScheduleChange("nightly", "", "x", template=b"y")),
        reading(topic, ["nightly"]),
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


def test_a_maker_of_names_is_of_one_put_at_a_time_and_names_are_never_given_twice() -> None:
    names = FreeNames()
    one, other = names.take(), names.take()
    said = {one.next(), one.next(), other.next()}
    assert len({publish_of(name)[0] for name in said}) == 2
    names.give(one)
    assert names.take() is one
    assert len(said | {one.next()}) == 4


# -- pop


def test_a_pop_asks_each_slot_once_and_in_order(made: Made) -> None:
    call = made.commands.pop(made.topic, PopRequest("me.1", [3, 1, 3]))
    assert call.args[-2:] == (1, 3)
    assert call.args[0] == 2
    slots = made.topic.slot(1), made.topic.slot(3)
    keys = [key for slot in slots for key in slot.script_keys[:6]]
    keys += [key for step in zip(*(slot.stores for slot in slots), strict=True) for key in step]
    assert call.keys == (*keys, made.topic.slot(1).given("me"), made.keys.wake(NAME))


def test_a_recall_delivers_nothing_new(made: Made) -> None:
    call = made.commands.recall(made.topic, None, "me.1", bodies=False, remember=0)
    assert call.parse([5, [0, 0, b"a", scores.action(10**15), b""]]).messages[0].birth == "me.1"
    assert made.counted.delivered == 0


# -- what ends a delivery


# -- of people and tools


def test_a_purge_deletes_a_bounded_number(made: Made) -> None:
    call = purge_call(made.context, made.topic, made.topic.slot(0))
    assert call.args == (4, 0, PURGE_STEP)
    assert call.parse([3, [b"a#1"], [], []]) == (3, ["a#1"])
    assert made.counted.purged == 3


@each("total, among", [(0, [1, 2]), (1, [4, 5, 6]), (7, [1, 2, 3]), (9, [1])])
def test_what_is_divided_is_all_given_out_and_evenly(total: int, among: list[int]) -> None:
    given = divide_evenly(total, among)
    numbers = [number for _, number in given]
    assert sum(numbers) == total
    assert all(numbers)
    assert max(numbers, default=0) - min([*numbers, total // len(among)]) <= 1
