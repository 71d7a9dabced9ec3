"""What is asked for, when and of whom, without a server and without a clock."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_toc.client.options import PRIORITY, ROUND_ROBIN, Settings
from kombu_toc.consumer.fetcher import (
    ASK_OTHERS,
    OTHERS_STALE,
    RARELY,
    WORTH,
    Fetcher,
    Plan,
    due_entries,
    is_worth_a_pop,
    split_over_slots,
)
from kombu_toc.consumer.state import ConsumerState
from kombu_toc.model.topic import Declaration, Topic

from ..support.cases import each
from ..support.consumers import MS, consumer, delivery, popped, topic_of

LOOKAHEAD = 20 * MS
BEHIND = 5 * MS


def fetcher(clustered: bool = False, strategy: str = ROUND_ROBIN) -> Fetcher:
    settings = Settings(queue_order_strategy=strategy)
    return Fetcher(settings, clustered, topic_of, jitter=lambda: 0.5)


def plan(
    fetcher: Fetcher, state: ConsumerState, now: float = 100.0, kept_up: bool = True
) -> Plan | None:
    return fetcher.plan(state, now, kept_up=kept_up, lookahead_us=LOOKAHEAD)


def asked(plan: Plan | None) -> list[tuple[Any, ...]]:
    assert plan is not None
    return [(pop.topic.name, pop.slots, pop.ready_limit, pop.overdue_limit) for pop in plan.pops]


def settled(
    fetcher: Fetcher, state: ConsumerState, now: float = 100.0
) -> tuple[Fetcher, ConsumerState]:
    """The first looks are over, and have found nothing."""
    while (found := plan(fetcher, state, now)) is not None:
        for pop in found.pops:
            fetcher.take(state, pop, popped(1))
    return fetcher, state


def planned(fetcher: Fetcher, state: ConsumerState, now: float = 100.0) -> Plan:
    """What is asked for, which is something."""
    found = plan(fetcher, state, now)
    assert found is not None
    return found


# -- when


def test_an_idle_consumer_looks_into_everything_and_then_rests() -> None:
    fetch, state = fetcher(), consumer("a", "b")
    assert asked(plan(fetch, state)) == [("a", None, 2, 2), ("b", None, 2, 2)]
    assert plan(fetch, state, 100.1) is None


@pytest.mark.parametrize(("kept_up", "pause"), [(False, 1.0), (True, RARELY * 0.75)])
def test_it_looks_again_rarely_while_somebody_keeps_the_topics_up(
    kept_up: bool, pause: float
) -> None:
    fetch, state = settled(fetcher(), consumer("a"))
    assert plan(fetch, state, 100.0 + pause - 0.01, kept_up) is None
    assert asked(plan(fetch, state, 100.0 + pause, kept_up)) == [("a", None, 4, 4)]


def test_who_kept_them_up_and_is_gone_is_made_up_for_within_an_interval() -> None:
    fetch, state = fetcher(), consumer("a")
    settled(fetch, state)  # kept up: the next look is minutes away
    assert asked(plan(fetch, state, 101.0, kept_up=False)) == [("a", None, 4, 4)]


@each(
    "slot, clustered, late, slots",
    [
        (3, False, False, {3}),
        (3, False, True, None),
        (3, True, True, {3}),
        (60, False, True, {60}),  # a slot of which this declaration knows nothing
    ],
)
def test_who_comes_late_for_a_slot_asks_all_of_them_for_what_was_due_first(
    slot: int, clustered: bool, late: bool, slots: set[int] | None
) -> None:
    fetch, state = settled(fetcher(clustered), consumer("a"))
    state.pending.ask("a", slot)
    if late:
        state.pending.late.add("a")
    assert [found[1] for found in asked(plan(fetch, state))] == [slots]
    assert not state.pending.late


def test_a_busy_consumer_looks_for_nothing() -> None:
    fetch, state = fetcher(), consumer("a", free=0, ahead=2)
    assert plan(fetch, state, 1e6, kept_up=False) is None


def test_a_cluster_is_looked_into_every_interval() -> None:
    fetch, state = settled(fetcher(clustered=True), consumer("a"))
    assert plan(fetch, state, 100.9) is None
    assert plan(fetch, state, 101.0) is not None


@each(
    ("finished", "room", "most", "worth"),
    [
        (True, 2, 4, True),
        (True, 1, 4, False),  # it would be a small batch: a bit later it is a larger one
        (False, 4, 4, False),  # nothing has ended since
        (True, 0, 0, False),
    ],
)
def test_what_would_be_queued_is_fetched_in_batches(
    finished: bool, room: int, most: int, worth: bool
) -> None:
    assert is_worth_a_pop(finished=finished, room=room, most=most) is worth


def test_a_full_consumer_fetches_a_batch_when_a_task_ends() -> None:
    fetch, state = fetcher(), consumer("a", free=-1, ahead=4)
    state.pending.ask("a", 3)
    state.last_free = -2
    assert asked(plan(fetch, state)) == [("a", {3}, 0, 3)]


# -- how much of what


def test_what_can_start_is_split_over_the_topics_that_hold_something() -> None:
    fetch, state = settled(fetcher(), consumer("a", "b", "c", free=5))
    state.pending.ask("a", 1)
    state.pending.ask("b", 2)
    state.others_at = 100.0
    plans = asked(plan(fetch, state))
    assert {name: limits for name, _, *limits in plans} == {"a": [3, 3], "b": [2, 2]}


def test_topics_that_nothing_is_known_of_are_looked_into_along_with_the_others() -> None:
    fetch, state = fetcher(), consumer("a", "b", free=2)
    state.pending.ask("a", 1)
    assert asked(plan(fetch, state)) == [("a", None, 2, 2), ("b", None, 0, 0)]


def test_only_a_topic_with_a_backlog_is_fetched_to_be_queued_by_a_consumer_that_is_idle() -> None:
    fetch, state = settled(fetcher(), consumer("a", "b", free=2, ahead=6))
    state.pending.ask("a")
    state.pending.ask_for_backlog("b")
    state.others_at = 100.0
    plans = asked(plan(fetch, state))
    assert {name: limits for name, _, *limits in plans} == {"a": [1, 1], "b": [1, 7]}


def test_slots_are_asked_that_a_declaration_does_not_have() -> None:
    fetch, state = settled(fetcher(), consumer("a"))
    state.pending.ask("a", 12)
    [pop] = planned(fetch, state).pops
    assert (pop.slots, pop.topic.slot_span) == ({12}, 16)


# -- claims


def test_a_pop_settles_the_due_claims_of_its_slots_and_no_others() -> None:
    fetch, state = settled(fetcher(), consumer("a", "b"))
    mine, other = ("a", 1, 5000), ("b", 1, 5000)
    state.due_claims.update(dict.fromkeys([mine, other]))
    state.pending.ask("a", 1)
    [pop] = planned(fetch, state).pops
    assert pop.claims == [mine]
    assert list(state.due_claims) == [other]
    fetch.take(state, pop, popped(5000))
    assert list(state.due_claims) == [other]


def test_a_claim_beyond_the_horizon_of_its_pop_is_not_settled_by_it() -> None:
    fetch, state = settled(fetcher(), consumer("a"))
    near, far = ("a", 1, 1_000_000 + LOOKAHEAD), ("a", 1, 1_000_001 + LOOKAHEAD)
    state.due_claims.update(dict.fromkeys([near, far]))
    state.pending.ask("a", 1)
    [pop] = planned(fetch, state).pops
    fetch.take(state, pop, popped(1_000_000))
    assert list(state.due_claims) == [far]


def test_who_can_start_nothing_leaves_its_claims_to_somebody_idle_and_comes_back_later() -> None:
    fetch, state = fetcher(), consumer("a", free=0)
    claim = ("a", 1, 5000)
    state.due_claims[claim] = None
    assert plan(fetch, state) == Plan([claim])
    assert not state.due_claims
    assert "a" in state.pending.backlog
    state.sink.free = 1  # type: ignore[attr-defined]
    assert asked(plan(fetch, state, 100.05))[0][:2] == ("a", None)


def test_nothing_is_asked_of_paused_topics_and_their_claims_are_left() -> None:
    fetch, state = fetcher(), consumer("a", "b")
    state.pending.pause({"a"})
    claim = ("a", 1, 5000)
    state.due_claims[claim] = None
    found = planned(fetch, state)
    assert found.claims == [claim]
    assert [name for name, *_ in asked(found)] == ["b"]
    state.pending.pause(set())
    assert [name for name, *_ in asked(plan(fetch, state, 100.1))] == ["a"]


# -- the others


def test_a_busy_consumer_asks_where_else_something_is_due_before_it_pops() -> None:
    fetch, state = settled(fetcher(), consumer("a", "b", free=1))
    state.pending.ask_for_backlog("a")
    found = planned(fetch, state)
    assert (found.unknown, found.ask_first, found.pops) == (["b"], True, [])
    state.pending.found_due(found.unknown, [0])
    served = []
    for now in (100.001, 100.002):
        served += [name for name, *_ in asked(plan(fetch, state, now))]
        state.pending.ask_for_backlog(served[0])
    assert sorted(served) == ["a", "b"]  # one each, although only one could start at a time


def test_it_asks_along_with_its_pops_if_it_has_asked_lately() -> None:
    fetch, state = settled(fetcher(), consumer("a", "b", free=1))
    for now, unknown in ((100.0 + ASK_OTHERS / 2, []), (100.0 + ASK_OTHERS, ["b"])):
        state.others_at = 100.0
        state.pending.ask_for_backlog("a")
        found = planned(fetch, state, now)
        assert (found.unknown, found.ask_first, len(found.pops)) == (unknown, False, 1)
    state.pending.ask_for_backlog("a")
    found = planned(fetch, state, 100.0 + ASK_OTHERS + OTHERS_STALE)
    assert found.ask_first


def test_by_priority_the_first_queue_is_asked_about_before_every_pop() -> None:
    fetch = fetcher(strategy=PRIORITY)
    state = consumer("first", "second", free=1, strategy=PRIORITY)
    settled(fetch, state)
    state.others_at = 100.0
    state.pending.ask_for_backlog("second")
    found = planned(fetch, state, 100.0 + ASK_OTHERS)
    assert (found.unknown, found.ask_first) == (["first"], True)


# -- replies


def test_what_a_pop_has_left_is_asked_for_again_and_is_a_backlog() -> None:
    fetch, state = fetcher(), consumer("a")
    [pop] = planned(fetch, state).pops
    fetch.take(state, pop, popped(1, more=True))
    assert state.pending.slots == {"a": None}
    assert "a" in state.pending.backlog
    [pop] = planned(fetch, state, 100.01).pops
    fetch.take(state, pop, popped(1))
    assert not state.pending.slots
    assert not state.pending.backlog


def test_a_look_that_finds_something_asks_for_it_and_makes_no_backlog() -> None:
    fetch, state = fetcher(), consumer("a", "b", free=1)
    state.pending.ask("a")
    [_, look] = planned(fetch, state).pops
    assert look.looks
    fetch.take(state, look, popped(1, more=True))
    assert "b" in state.pending.sure
    assert not state.pending.backlog


def test_messages_that_were_due_keep_their_order_and_later_ones_wait_for_their_time() -> None:
    state = consumer("a")
    messages = [delivery(due_ms=2), delivery(due_ms=1), delivery(due_ms=9), delivery()]
    entries = due_entries(state, popped(8 * MS, *messages), 5 * MS, 7, 3)
    assert [entry[0] for entry in entries] == [5 * MS, 5 * MS, 9 * MS, 5 * MS]
    assert [entry[1] for entry in entries] == [(7, 0, 3), (7, 1, 3), (7, 2, 3), (7, 3, 3)]
    unknown_clock = due_entries(state, popped(8 * MS, *messages), 0, 7, 3)
    assert [entry[0] for entry in unknown_clock] == [0, 0, 9 * MS, 0]


def test_what_is_due_does_not_wait_for_a_time_of_before_the_clock_was_set_back() -> None:
    entries = due_entries(consumer("a"), popped(8 * MS, delivery(due_ms=7)), 60_000 * MS, 7, 3)
    assert [entry[0] for entry in entries] == [8 * MS]


# -- leases


def test_only_a_look_into_all_slots_rolls_back_and_once_an_interval() -> None:
    fetch, state = fetcher(), consumer("a")
    found = [plan(fetch, state, 100.0, kept_up=False)]
    state.pending.ask("a", 1)
    found.append(plan(fetch, state, 100.5, kept_up=False))
    state.pending.ask("a")
    found.append(plan(fetch, state, 100.6, kept_up=False))
    state.pending.ask("a")
    found.append(plan(fetch, state, 101.0, kept_up=True))
    state.pending.ask("a")
    found.append(plan(fetch, state, 101.0, kept_up=False))
    assert [one.pops[0].recover for one in found if one] == [True, False, False, False, True]


# -- a Cluster


def test_on_a_cluster_slots_that_hold_something_are_popped_and_the_others_looked_into() -> None:
    parts, later = split_over_slots(4, None, {2}, 3, 5, backlog=False, rotation=0)
    assert parts == [({2}, 3, 5), ({0}, 0, 0), ({1}, 0, 0), ({3}, 0, 0)]
    assert later == []


def test_on_a_cluster_no_more_is_asked_of_all_slots_together_than_there_is_room_for() -> None:
    for rotation in range(8):
        for ready in range(5):
            parts, later = split_over_slots(
                8, set(range(8)), {3}, ready, ready + 2, backlog=False, rotation=rotation
            )
            assert sum(limit for _, limit, _ in parts) == ready
            assert sum(limit for _, _, limit in parts) == ready + 2
            assert parts[0][0] == {3}  # what was claimed comes first
            assert sorted([n for some, *_ in parts for n in some or ()] + later) == [*range(8)]


def test_on_a_cluster_a_backlog_is_worked_off_with_few_pops_of_many_messages() -> None:
    parts, later = split_over_slots(16, {*range(16)}, set(), 0, 32, backlog=True, rotation=0)
    assert len(parts) == 32 // WORTH
    assert len(later) == 16 - len(parts)
    asked_first = [
        split_over_slots(16, {*range(16)}, set(), 0, 4, backlog=True, rotation=n)[0][0][0]
        for n in range(16)
    ]
    assert {*range(16)} == {slot for some in asked_first for slot in some or ()}


def test_a_node_that_cannot_be_asked_is_asked_again_after_a_while() -> None:
    fetch, state = settled(fetcher(clustered=True), consumer("a"))
    state.pending.ask("a", 3)
    [pop] = planned(fetch, state, 100.1).pops
    fetch.miss(state, pop, 100.1)
    assert plan(fetch, state, 100.2) is None
    assert asked(plan(fetch, state, 100.7))[0][1] in ({3}, None)
    fetch.miss(state, pop, 200.0)
    state.pending.forget("a")
    fetch.miss(state, pop, 200.0)  # cancelled meanwhile
    assert not state.pending.slots


# -- limited queues


def limited_topic(name: str, slot: int = 0) -> Topic:
    said = {"l": {"concurrency": 3}, "k": {"key_rate": "10/s"}}.get(name, {})
    return Topic(name, Declaration.of(name, slots=8, **said), "toc:")


def limiting(clustered: bool = False) -> Fetcher:
    return Fetcher(Settings(), clustered, limited_topic, jitter=lambda: 0.5)


def test_of_a_limited_queue_nothing_is_fetched_ahead() -> None:
    fetch, state = settled(limiting(), consumer("a", "l", free=2, ahead=6))
    for topic in ("a", "l"):
        state.pending.ask_for_backlog(topic)
    both = {name: limits for name, _, *limits in asked(plan(fetch, state))}
    assert both["l"] == [1, 1]
    assert both["a"][0] == 1 < both["a"][1]


def test_a_busy_consumer_leaves_a_limited_queue_to_others_until_a_process_is_free() -> None:
    fetch, state = settled(limiting(), consumer("l", free=2, ahead=6))
    state.pending.ask_for_backlog("l")
    sink: Any = state.sink
    sink.free, state.last_free = 0, -1  # a task has ended, and more may be queued
    found = plan(fetch, state)
    assert found is None or asked(found) == []
    sink.free = 1
    assert asked(plan(fetch, state)) == [("l", None, 1, 1)]


def test_a_queue_that_is_limited_as_a_whole_is_asked_as_a_whole_and_others_by_slot() -> None:
    fetch, state = settled(limiting(), consumer("l", "k"))
    for topic in ("l", "k"):
        state.pending.ask(topic, 3)
    state.due_claims.update(dict.fromkeys([("l", 0, 1), ("l", 3, 2), ("k", 3, 2)]))
    found = plan(fetch, state)
    assert asked(found) == [("l", None, 2, 2), ("k", {3}, 2, 2)]
    assert found is not None
    assert [sorted(pop.claims) for pop in found.pops] == [[("l", 0, 1), ("l", 3, 2)], [("k", 3, 2)]]
    assert not state.due_claims


def test_what_a_rate_lets_start_in_a_moment_is_due_then() -> None:
    now = 1_700_000_000_000_000
    late = delivery(due_ms=now // 1000 - 50)
    result = popped(now, late, late._replace(start_us=now + 7_000))
    for sent_us in (0, now - 300):
        dues = [entry[0] for entry in due_entries(consumer("a"), result, sent_us, 1, 1)]
        assert dues == [sent_us, now + 7_000]
