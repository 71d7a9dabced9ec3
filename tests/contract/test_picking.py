"""A pop that names what it takes, by id or by a predicate."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis

from kombu_toc import DEAD, IN_FLIGHT, WAITING, ConfigurationError, Found, TimeoutCenter
from kombu_toc.center.pop import LOOK, Picked
from kombu_toc.center.reshard import reshard_topic
from kombu_toc.scripts.call import ScriptCall

from ..support.inspection import (
    announced,
    birth_of,
    check_slots,
    end_lease,
    forget_late,
    now_us,
    put_some,
    residue,
    time_passes,
)
from ..support.waiting import at_once

HOUR = 3600.0


def ids(popped: object) -> list[str]:
    return [message.id for message in popped.messages]


def states(center: TimeoutCenter) -> dict[str, str]:
    return {found.id: found.state for found in center.scan("mail").messages}


# -- by id


def test_what_is_named_is_delivered_if_it_is_due(center: TimeoutCenter) -> None:
    for id in "abcdef":
        center.put("mail", id, id.encode(), delay=HOUR if id in "ef" else None)
    [held] = center.pop("mail", ids=["b"]).messages
    center.reject(center.pop("mail", ids="c").messages[0], requeue=False)
    popped = center.pop("mail", ids=["f", "d", "nobody", "b", "c", "a"])
    assert sorted(ids(popped)) == ["a", "d"]
    assert {message.id: message.body for message in popped.messages} == {"a": b"a", "d": b"d"}
    assert not popped.more
    assert states(center) == {
        **dict.fromkeys("abd", IN_FLIGHT),
        "c": DEAD,
        **dict.fromkeys("ef", WAITING),
    }
    check_slots(center, "mail")
    assert center.ack([held, *popped.messages]) == 3
    assert ids(center.pop("mail", 10)) == []


def test_a_picked_message_is_a_delivery_like_any_other(center: TimeoutCenter) -> None:
    """Its lease, its retries, its birth: release, reject and the end of its lease do as ever."""
    center.queues.declare("mail", retries=2)
    center.put("mail", "a", b"", priority=9)
    [first] = center.pop("mail", ids=["a"], visibility=HOUR).messages
    assert (first.retries_left, first.failures) == (2, 0)
    assert center.release(first) == 1
    [second] = center.pop("mail", ids=["a"]).messages
    assert birth_of(second) == birth_of(first)
    assert (second.score, second.step) == (first.score, first.step)
    end_lease(center, second)
    [third] = center.pop("mail", ids=["a"]).messages  # rolled back first, as any pop does
    assert (third.retries_left, birth_of(third)) == (1, birth_of(first))
    assert center.extend([first, second, third], HOUR) == [first, second]
    assert center.reject(third.receipt, requeue=True) == WAITING
    [last] = center.pop("mail", ids=["a"]).messages
    assert last.retries_left == 0
    assert center.ack([last.receipt]) == 1
    check_slots(center, "mail")
    assert residue(center.client) == []


def test_copies_are_picked_by_the_id_that_they_share(center: TimeoutCenter) -> None:
    for body in (b"1", b"2", b"3"):
        center.put("mail", "a", body)
    center.put("mail", "a", b"4", delay=HOUR)
    center.put("mail", "b", b"")
    copies = [found.id for found in center.get("a") if found.body == b"2"]
    [one] = center.pop("mail", ids=copies).messages
    assert one.body == b"2"
    popped = center.pop("mail", ids=["a", "a"])
    assert sorted(message.body for message in popped.messages) == [b"1", b"3"]
    check_slots(center, "mail")
    assert center.release(popped.messages) == 2
    popped = center.pop("mail", ids=["a", *(message.id for message in popped.messages)])
    assert len(popped.messages) == 2
    assert center.ack([one, *popped.messages]) == 3
    assert sorted(found.body for found in center.get("a")) == [b"4"]


def test_an_id_with_thousands_of_copies_is_picked_in_calls_of_a_bounded_size(
    center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    center.put_many("mail", [("x", b"%d" % number) for number in range(2500)])
    calls: list[int] = []

    def run_each(asked: list[ScriptCall], run: Any = center.runner.run_each) -> list[Any]:
        results = run(asked)
        calls.extend(len(one.popped.messages) for one in results if isinstance(one, Picked))
        return results

    monkeypatch.setattr(center.runner, "run_each", run_each)
    popped = center.pop("mail", ids=["x"])
    assert calls == [1000, 1000, 500]
    assert len(popped.messages) == 2500
    assert not popped.more
    assert center.ack(popped.messages) == 2500


def test_early_takes_what_is_not_due_and_a_release_gives_it_back_its_time(
    center: TimeoutCenter,
) -> None:
    center.put("mail", "a", b"", delay=HOUR)
    center.put("mail", "b", b"", delay=2 * HOUR)
    before = announced(center, "mail")
    assert ids(center.pop("mail", ids=["a", "b"])) == []
    [early] = center.pop("mail", ids=["a"], early=True).messages
    check_slots(center, "mail")
    assert center.release([early]) == 1
    check_slots(center, "mail")
    forget_late(center, "mail")
    assert announced(center, "mail") == before
    assert center.counts("mail").scheduled == 2
    time_passes(center, "mail", HOUR + 60)
    assert ids(center.pop("mail", 10)) == ["a"]
    late = center.metrics.counts(center.registry.topic("mail")).lateness.count
    assert late == 1  # what is early is not late


def test_an_early_message_whose_lease_ends_is_due_at_once(center: TimeoutCenter) -> None:
    """Whoever took it has begun with it."""
    center.put("mail", "a", b"", delay=HOUR)
    [early] = center.pop("mail", ids=["a"], early=True).messages
    end_lease(center, early)
    popped = center.pop("mail")
    assert (popped.rolled_back, ids(popped)) == (["a"], ["a"])


def test_no_more_than_the_limit_is_picked_and_more_tells_what_is_left(
    center: TimeoutCenter,
) -> None:
    names = [f"m{number}" for number in range(20)]
    put_some(center, "mail", names)
    popped = center.pop("mail", 7, ids=names)
    assert len(popped.messages) == 7 and popped.more
    keys = [(message.step, message.score) for message in popped.messages]
    assert keys == sorted(keys)
    rest = center.pop("mail", 13, ids=names)
    assert len(rest.messages) == 13 and not rest.more
    assert not {*ids(popped)} & {*ids(rest)}
    assert center.pop("mail", 0, ids=names).more is False
    assert center.release(rest.messages) == 13
    none = center.pop("mail", 0, ids=names)
    assert none.messages == [] and none.more
    assert center.pop("mail", ids=[]).messages == []


def test_thousands_of_ids_and_many_megabytes_are_picked_in_bounded_calls(
    center: TimeoutCenter, client: redis.Redis
) -> None:
    center.context.pop_bytes = 40_000
    names = [f"m{number}" for number in range(1200)]
    sizes = {name: 3000 if number % 10 == 0 else 50 for number, name in enumerate(names)}
    for name in names:
        center.put("mail", name, b"x" * sizes[name])
    calls_made = 0
    run_each = center.runner.run_each

    def noted(calls: list[ScriptCall]) -> list[Any]:
        nonlocal calls_made
        found = run_each(calls)
        for call, one in zip(calls, found, strict=True):
            if call.script.name == "pick":
                calls_made += 1
                assert one.looked <= 100
                bodies = [len(message.body) for message in one.popped.messages]
                assert sum(bodies) - max(bodies, default=0) <= center.context.pop_bytes // len(
                    calls
                )
        return found

    center.runner.run_each = noted
    popped = center.pop("mail", ids=names)
    assert {*ids(popped)} == {*names} and len(popped.messages) == 1200
    assert all(len(message.body) == sizes[message.id] for message in popped.messages)
    assert calls_made > 12
    assert center.ack(popped.messages) == 1200
    assert residue(client) == []


def test_what_a_reshard_has_moved_is_picked(center: TimeoutCenter) -> None:
    """Also by a center that has not heard of it, and also where it could not be moved."""
    center.queues.declare("mail", slots=8)
    names = [f"m{number}" for number in range(30)]
    put_some(center, "mail", names)
    other = TimeoutCenter(center.client, grace=0)
    assert other.registry.topic("mail").slots == 8
    reshard_topic(center, "mail", 2, settle=0)
    assert {*ids(other.pop("mail", ids=names[:20]))} == {*names[:20]}
    assert {*ids(center.pop("mail", where=lambda one: True, limit=20))} == {*names[20:]}


def test_messages_of_a_slot_basis_are_found_in_their_slots(center: TimeoutCenter) -> None:
    put_some(center, "mail", 8, basis="one order")
    popped = center.pop("mail", ids=[f"m{number}" for number in range(8)])
    assert len(popped.messages) == 8
    assert len({message.slot for message in popped.messages}) == 1


def test_only_the_slots_that_are_named_are_picked_from(center: TimeoutCenter) -> None:
    topic = center.queues.declare("mail", slots=4)
    names = [f"m{number}" for number in range(40)]
    put_some(center, "mail", names)
    here = {name for name in names if topic.slot_for(name).number in (1, 3)}
    assert {*ids(center.pop("mail", 5, where=lambda one: True, slots=[1, 3]))} <= here
    assert {*ids(center.pop("mail", ids=names, slots=[1, 3]))} <= here
    assert center.counts("mail").ready == len(names) - len(here)


def test_a_paused_topic_is_picked_from_as_it_is_popped(center: TimeoutCenter) -> None:
    center.put("mail", "a", b"")
    center.queues.pause("mail")
    assert ids(center.pop("mail", ids=["a"])) == ["a"]


def test_an_id_without_a_body_is_removed(center: TimeoutCenter, client: redis.Redis) -> None:
    center.put("mail", "a", b"")
    [failed] = center.pop("mail").messages
    center.reject(failed, requeue=True, error="of an earlier try")
    center.put("mail", "a", b"copy")
    slot = center.registry.topic("mail").slot_for("a")
    client.delete(slot.body)
    popped = center.pop("mail", ids=["a"])
    assert popped.messages == [] and sorted(popped.bare)[0] == "a" and len(popped.bare) == 2
    assert residue(client) == []


def test_what_holds_for_one_message_holds_when_it_is_picked(center: TimeoutCenter) -> None:
    """Its visibility, its max lease and its expiration; the caller's visibility goes before."""
    center.put("mail", "a", b"", visibility=500, max_lease=900, expiration=9)
    center.put("mail", "b", b"", visibility=500)
    center.put("mail", "old", b"", at=time.time() + 0.001, expiration=0)
    first = center.pop("mail", ids=["a", "b"])
    left = {
        found.id: (found.time_us - first.now_us) / 1e6
        for found in center.get(["a", "b"], topic="mail")
    }
    assert left == {"a": pytest.approx(500, abs=1), "b": pytest.approx(500, abs=1)}
    a, b = sorted(first.messages, key=lambda message: message.id)
    assert (a.visibility, b.visibility, b.ends_us) == (500, 500, None)
    assert a.ends_us == pytest.approx(first.now_us + 900e6, abs=1e6)
    assert center.ack([a.receipt]) == 1
    assert center.release([b.receipt]) == 1
    [b] = center.pop("mail", where=lambda found: found.id == "b", visibility=40).messages
    [found] = center.get("b", topic="mail")
    assert (found.time_us - first.now_us) / 1e6 == pytest.approx(40, abs=5)
    deadline = time.monotonic() + 5
    while not (late := center.pop("mail", ids=["old"])).expired:
        assert late.messages == []  # it is not due for another millisecond
        assert time.monotonic() < deadline
    assert late.expired == ["old"]
    assert states(center) == {"b": IN_FLIGHT, "old": DEAD}
    check_slots(center, "mail")


@pytest.mark.parametrize("choice", [{"ids": [*"abcde"]}, {"where": bool}])
def test_what_has_expired_takes_nobodys_place(
    center: TimeoutCenter, choice: dict[str, Any]
) -> None:
    center.queues.declare("mail", slots=1)
    put_some(center, "mail", "abc", expiration=0)
    put_some(center, "mail", "de")
    [last] = center.get("c", topic="mail")
    while now_us(center.client) < last.time_us + 2000:  # it lives for its millisecond
        time.sleep(0.001)
    popped = center.pop("mail", 1, recover=0, **choice)
    assert (ids(popped), popped.expired, popped.more) == (["d"], [*"abc"], True)
    check_slots(center, "mail")


@pytest.mark.parametrize("early", [False, True])
def test_a_slot_that_is_picked_empty_has_nothing_announced(
    center: TimeoutCenter, early: bool
) -> None:
    center.put("mail", "a", b"", delay=HOUR if early else None)
    assert ids(center.pop("mail", ids=["a"], early=early)) == ["a"]
    forget_late(center, "mail")
    assert announced(center, "mail") == set()
    check_slots(center, "mail")


def test_whoever_wakes_for_what_was_picked_announces_the_next(center: TimeoutCenter) -> None:
    center.queues.declare("mail", slots=1)
    center.put("mail", "a", b"", delay=HOUR)
    center.put("mail", "b", b"", delay=2 * HOUR)
    [(_, first)] = announced(center, "mail")
    center.pop("mail", ids=["a"], early=True)
    assert announced(center, "mail") == {(0, first)}
    time_passes(center, "mail", HOUR + 1)
    assert center.pop("mail", recover=0).messages == []
    [(_, second)] = announced(center, "mail")
    assert second > first - (HOUR + 1) * 1_000_000
    check_slots(center, "mail")


# -- by a predicate


def test_what_matches_is_delivered_in_the_order_of_a_pop(center: TimeoutCenter) -> None:
    for number in range(12):
        center.put("mail", f"m{number}", b"%d" % (number % 2), priority=9 if number < 6 else 0)
    center.put("mail", "later", b"1", delay=HOUR)
    seen: list[Found] = []

    def odd(found: Found) -> bool:
        seen.append(found)
        return found.body == b"1"

    first = center.pop("mail", where=odd)
    assert ids(first) == ["m7"] and first.more
    assert [found.id for found in seen[:2]] == ["m6", "m7"]
    assert all(found.state == WAITING and found.time_us <= first.now_us for found in seen)
    rest = center.pop("mail", 10, where=odd)
    assert ids(rest) == ["m9", "m11", "m1", "m3", "m5"] and not rest.more
    assert [message.step for message in rest.messages] == [0, 0, 3, 3, 3]
    assert ids(center.pop("mail", 10, where=odd, early=True)) == ["later"]
    check_slots(center, "mail")


def test_a_predicate_is_asked_about_no_more_than_look(center: TimeoutCenter) -> None:
    for number in range(60):
        center.put("mail", f"m{number}", b"", delay=-60 + number)
    asked: list[str] = []

    def late(found: Found) -> bool:
        asked.append(found.id)
        return found.id == "m50"

    popped = center.pop("mail", where=late, look=40)
    assert (popped.messages, popped.more) == ([], True)
    assert len(asked) == 40
    popped = center.pop("mail", where=late)
    assert ids(popped) == ["m50"]
    assert center.pop("mail", 60, where=late, look=59).more is False
    assert LOOK == 1000


def test_ids_and_a_predicate_go_together(center: TimeoutCenter) -> None:
    for number in range(10):
        center.put("mail", f"m{number}", b"%d" % (number % 2))
    popped = center.pop("mail", 9, ids=["m1", "m2", "m3"], where=lambda found: found.body == b"1")
    assert ids(popped) == ["m1", "m3"]


def test_a_message_that_changes_after_it_was_seen_is_not_delivered(center: TimeoutCenter) -> None:
    """Another of its id, at its very time, is not what the predicate was asked about."""
    at = time.time() + HOUR

    def replaced(found: Found) -> bool:
        center.cancel("a", topic="mail")
        center.put("mail", "a", b"other", at=at)
        return found.body == b"first"

    center.put("mail", "a", b"first", at=at)
    assert center.pop("mail", where=replaced, early=True).messages == []
    assert [found.body for found in center.get("a")] == [b"other"]

    def moved(found: Found) -> bool:
        return bool(center.reschedule("a", delay=HOUR + 60))

    assert center.pop("mail", where=moved, early=True).messages == []
    assert states(center) == {"a": WAITING}


def test_a_predicate_that_fails_loses_nothing(center: TimeoutCenter) -> None:
    put_some(center, "mail", 40)
    calls: list[str] = []

    def fails(found: Found) -> bool:
        calls.append(found.id)
        if len(calls) == 30:
            raise KeyError("no such customer")
        if len(calls) == 2:  # somebody else is faster: so there is a second round
            assert len(center.pop("mail", ids=calls).messages) == 2
        return len(calls) < 5

    with pytest.raises(KeyError, match="no such customer"):
        center.pop("mail", 4, where=fails)
    assert center.counts("mail").ready == 38
    assert center.counts("mail").in_flight == 2
    check_slots(center, "mail")


def test_of_many_that_want_one_message_one_gets_it(center: TimeoutCenter) -> None:
    put_some(center, "mail", 100)
    got: list[str] = []

    def take(number: int) -> None:
        mine = TimeoutCenter(center.client, grace=0)
        if number % 2:
            got.extend(ids(mine.pop("mail", ids=[f"m{number}" for number in range(100)])))
        else:
            while found := ids(mine.pop("mail", 7, where=lambda found: True)):
                got.extend(found)

    at_once(take, range(4))
    assert sorted(got) == sorted(f"m{number}" for number in range(100))
    check_slots(center, "mail")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"early": True}, r"pop: early=True needs ids=\[...\] or where=..."),
        ({"ids": ["a"], "limit": -1}, "pop: limit must be a whole number from 0 up, not -1"),
        ({"where": bool, "look": 0}, "pop: look must be a whole number from 1 up, not 0"),
        ({"where": bool, "look": "9"}, "pop: look must be a whole number from 1 up, not '9'"),
        ({"ids": [b"a"]}, "id must be a str, or several of them, not b'a'"),
        ({"ids": [7]}, "id must be a str, or several of them, not 7"),
        ({"where": "a"}, "pop: where must be a function of a message, not 'a'"),
    ],
)
def test_a_choice_that_cannot_be_meant_is_refused(
    center: TimeoutCenter, arguments: dict[str, object], message: str
) -> None:
    center.put("mail", "a", b"")
    with pytest.raises(ConfigurationError, match=message):
        center.pop("mail", **arguments)
    assert center.counts("mail").ready == 1


@pytest.mark.parametrize("recover", [0, 100])
def test_what_is_picked_is_counted_as_what_is_popped(center: TimeoutCenter, recover: int) -> None:
    put_some(center, "mail", "abc")
    counts = center.metrics.counts(center.registry.topic("mail"))
    center.pop("mail", ids=["a", "b"], recover=recover)
    center.pop("mail", where=lambda found: found.id == "c", recover=recover)
    assert (counts.delivered, counts.empty, counts.lateness.count) == (3, 0, 3)
    center.pop("mail", where=lambda found: False, recover=recover)
    assert (counts.delivered, counts.empty) == (3, 1)
