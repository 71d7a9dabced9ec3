"""Slots that a consumer takes first: what is asked of which, and a fleet in two zones."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kombu_toc.client.options import Settings
from kombu_toc.consumer.fetcher import OVERDUE_US, Fetcher, PreferredSlots, divide, earliest
from kombu_toc.consumer.state import ConsumerState
from kombu_toc.model.topic import Declaration, Topic

from ..support.consumers import consumer, popped, topic_of
from .simulation.fleet import Fleet, Task

#: Of the four slots of a simulated fleet's topics.
A, B = (0, 1), (2, 3)


def topic(name: str = "mail", slots: int = 8) -> Topic:
    return Topic(name, Declaration(slots=slots), "toc:")


# -- which slots


def test_a_preference_is_the_slots_that_a_topic_has() -> None:
    preferred = PreferredSlots((0, 1, 9))
    assert preferred.own(topic()) == {0, 1}
    assert not preferred.is_foreign(topic(), 1)
    assert preferred.is_foreign(topic(), 2)


@pytest.mark.parametrize("slots", [(0,), (4, 5)])
def test_of_a_topic_that_has_none_or_all_of_them_all_slots_are_alike(
    slots: tuple[int, ...],
) -> None:
    """So replies and remote control, with one slot each, reach every zone."""
    preferred = PreferredSlots(slots)
    assert preferred.own(topic(slots=1)) == frozenset()
    assert not preferred.is_foreign(topic(slots=1), 0)


def test_of_a_topic_that_is_limited_as_a_whole_all_slots_are_alike() -> None:
    """What may start of one depends on the others. Of one whose keys are limited it does not."""
    preferred = PreferredSlots((0, 1))
    whole, keys = ({"rate": "9/s"}, {"key_rate": "9/s"})
    said = [Declaration.of("mail", slots=8, **limits) for limits in (whole, keys)]
    topics = [Topic("mail", declaration, "toc:") for declaration in said]
    assert [preferred.own(one) for one in topics] == [frozenset(), {0, 1}]


def test_a_preference_may_be_for_some_topics_only(caplog: pytest.LogCaptureFixture) -> None:
    preferred = PreferredSlots({"mail": (6, 7, 8)})
    with caplog.at_level(logging.WARNING):
        assert preferred.own(topic("sms")) == frozenset()
        assert preferred.own(topic()) == preferred.own(topic()) == {6, 7}
    [record] = caplog.records
    assert "slots [8] of queue 'mail', which has 8 slots" in record.getMessage()


def test_a_topic_that_is_resharded_has_other_slots() -> None:
    preferred = PreferredSlots((1, 12))
    assert preferred.own(topic()) == {1}
    assert preferred.own(topic(slots=16)) == {1, 12}


def test_without_the_option_there_is_none() -> None:
    for nothing in ((), {}):
        settings = Settings(toc_prefer_slots=nothing)
        assert Fetcher(settings, False, topic_of).preferred is None


# -- what is asked


def test_the_own_slots_are_asked_and_the_others_are_looked_into() -> None:
    own = frozenset({0, 1})
    both = divide(own, 4, None, (3, 5), others_turn=False, look=True)
    assert both == ([({0, 1}, 3, 5), ({2, 3}, 0, 0)], set())
    assert divide(own, 4, None, (3, 5), others_turn=False, look=False) == ([({0, 1}, 3, 5)], set())


def test_of_both_that_hold_something_each_has_its_turn() -> None:
    own = frozenset({0, 1})
    assert divide(own, 4, {1, 2}, (3, 5), others_turn=False, look=True) == ([({1}, 3, 5)], {2})
    assert divide(own, 4, {1, 2}, (3, 5), others_turn=True, look=True) == ([({2}, 0, 5)], {1})
    assert divide(own, 4, {2}, (3, 5), others_turn=False, look=True) == ([({2}, 0, 5)], set())
    assert divide(own, 4, {1}, (3, 5), others_turn=True, look=False) == ([({1}, 3, 5)], set())


def test_the_earliest_claims_of_a_slot_are_kept() -> None:
    claims = [("a", 1, us) for us in (5, 3, 9, 3, 1)]
    assert [us for _, _, us in earliest(claims, 3)] == [1, 3, 5]


def fetcher(clustered: bool = False, prefer: Any = (0, 1)) -> Fetcher:
    settings = Settings(toc_prefer_slots=prefer)
    return Fetcher(settings, clustered, topic_of, jitter=lambda: 0.5)


def asked(fetch: Fetcher, state: ConsumerState, now: float) -> list[tuple[Any, ...]]:
    plan = fetch.plan(state, now, kept_up=True, lookahead_us=20_000)
    assert plan is not None
    return [(pop.slots, pop.ready_limit, pop.overdue_limit, pop.behind_us) for pop in plan.pops]


OTHERS = {2, 3, 4, 5, 6, 7}


def test_a_backlog_of_the_own_slots_leaves_the_others_a_look_each_second() -> None:
    fetch, state = fetcher(), consumer("a", free=2)
    seen = []
    for number in range(30):
        plan = fetch.plan(state, 100.0 + 0.1 * number, kept_up=True, lookahead_us=20_000)
        assert plan is not None
        for pop in plan.pops:
            seen.append(pop.slots == OTHERS)
            fetch.take(state, pop, popped(10**15, more=pop.slots == {0, 1}))
        state.pending.ask("a")
    assert sum(seen) == 3
    assert len(seen) - sum(seen) == 30


def test_others_with_something_overdue_have_every_other_turn() -> None:
    fetch, state = fetcher(), consumer("a", free=2)
    mine = ({0, 1}, 2, 2, 5_000)
    assert asked(fetch, state, 100.0) == [mine, (OTHERS, 0, 0, OVERDUE_US)]
    seen = []
    for number in range(6):
        for slot in (0, 1, 5):
            state.pending.ask("a", slot)
        seen += asked(fetch, state, 100.01 + number / 100)
    assert seen == [mine, ({5}, 0, 2, OVERDUE_US)] * 3


def test_on_a_cluster_other_slots_give_only_what_is_overdue() -> None:
    fetch, state = fetcher(clustered=True), consumer("a", free=2)
    looks = asked(fetch, state, 100.0)
    assert {frozenset(slots): behind for slots, _, _, behind in looks} == {
        frozenset({slot}): 0 if slot < 2 else OVERDUE_US for slot in range(8)
    }
    state.pending.slots.clear()
    state.pending.ask("a", 1)
    state.pending.ask("a", 5)
    parts = asked(fetch, state, 100.1)
    assert sorted(parts, key=str) == [({1}, 1, 1, 5_000), ({5}, 0, 1, OVERDUE_US)]


def test_who_prefers_nothing_asks_as_ever() -> None:
    fetch, state = fetcher(prefer=()), consumer("a", free=2)
    assert fetch.preferred is None
    assert asked(fetch, state, 100.0) == [(None, 2, 2, 5_000)]


# -- a fleet


def zones(tasks: list[Task]) -> list[bool]:
    """Whether each was started by a worker of its own zone."""
    return [task.slot in task.by[0].prefer for task in tasks]


def late(fleet: Fleet, task: Task) -> float:
    return task.starts[0] - (task.due_us - fleet.network.server.ahead) / 1e6


def test_idle_zones_start_their_own_on_time() -> None:
    fleet = Fleet(["mail"])
    for prefer in (A, A, B, B):
        fleet.add(2, prefer=prefer)
    fleet.run(3.0)
    tasks = []
    for number in range(200):
        tasks.append(fleet.put("mail", (0.0, 0.4)[number % 2], 0.005, slot=number // 2 % 4))
        fleet.run(0.05)
    fleet.run(1.0)
    assert all(zones(tasks))
    assert max(late(fleet, task) for task in tasks) < 0.01


def test_what_another_zone_leaves_is_started_about_a_second_late() -> None:
    fleet = Fleet(["mail"])
    fleet.add(2, prefer=A)
    gone = fleet.add(2, prefer=B)
    fleet.run(3.0)
    fleet.stop(gone)
    tasks = []
    for number in range(40):
        tasks.append(fleet.put("mail", (0.0, 0.4, 2.0)[number % 3], 0.005))
        fleet.run(0.2)
    fleet.run(3.0)
    for task in tasks:
        if task.slot in A:
            assert late(fleet, task) < 0.01
        else:
            assert 1.0 <= late(fleet, task) < 1.05


def test_a_zone_that_comes_back_has_its_own_again() -> None:
    fleet = Fleet(["mail"])
    fleet.add(2, prefer=A)
    fleet.run(1.0)
    early = [fleet.put("mail", 30.0, slot=slot) for slot in B]
    fleet.run(10.0)  # what is to come is announced, to a zone that is not there
    fleet.add(2, prefer=B)
    fleet.run(25.0)
    assert zones(early) == [True, True]
    assert max(late(fleet, task) for task in early) < 0.01


def test_a_zone_with_too_much_to_do_is_helped_with_what_is_overdue() -> None:
    fleet = Fleet(["mail"])
    fleet.add(2, prefer=A)
    fleet.add(1, prefer=B)
    fleet.run(1.0)
    tasks = [fleet.put("mail", 0.0, 0.1, slot=2 + number % 2) for number in range(60)]
    fleet.run(4.0)
    assert all(task.starts for task in tasks)
    helped = [task for task in tasks if task.by[0].prefer == A]
    assert len(helped) >= 20
    assert min(late(fleet, task) for task in helped) >= 1.0


def test_a_busy_zone_leaves_nothing_of_a_dead_one_for_long() -> None:
    fleet = Fleet(["mail"])
    fleet.add(2, prefer=A)
    fleet.run(1.0)
    for _ in range(400):
        fleet.put("mail", 0.0, 0.05, slot=0)  # ten seconds of work
    fleet.run(0.5)
    left = [fleet.put("mail", 0.0, 0.05, slot=3) for _ in range(10)]
    fleet.run(3.5)
    assert all(task.starts for task in left)


def test_passing_claims_on_costs_a_call_each_and_none_comes_back() -> None:
    fleet = Fleet(["mail"])
    fleet.add(1, prefer=A)
    fleet.add(1, prefer=B)
    fleet.run(3.0)
    ran = fleet.network.server.ran
    ran.clear()
    for number in range(100):
        fleet.put("mail", 0.0, 0.002, slot=number % 4)
        fleet.run(0.02)
    fleet.run(3.0)
    assert ran["pass_on"] <= 100
    assert ran["reannounce"] == 0
    ran.clear()
    fleet.run(60.0)
    assert not ran["pass_on"]


def test_without_the_option_nothing_is_passed_on() -> None:
    fleet = Fleet(["mail"])
    fleet.add(1)
    fleet.add(1)
    for _ in range(20):
        fleet.put("mail", 0.1)
        fleet.run(0.05)
    fleet.run(2.0)
    assert not fleet.network.server.ran["pass_on"]
