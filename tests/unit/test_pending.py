"""What a consumer knows of its topics, without a server and without a clock."""

from __future__ import annotations

from kombu_toc.consumer.state import ASK_AGAIN, MAX_LOOKS, MAX_OTHERS, PendingTopics


def of(*topics: str) -> PendingTopics:
    pending = PendingTopics()
    for topic in topics:
        pending.topics.append(topic)
    return pending


def test_slots_add_up_and_all_of_them_stay_all() -> None:
    pending = of("a")
    pending.ask("a", 1)
    pending.ask("a", 2)
    assert pending.slots == {"a": {1, 2}}
    pending.look("a")
    pending.ask("a", 3)
    assert pending.take("a") is None
    assert not pending.slots
    assert not pending.sure


def test_what_could_not_be_asked_is_asked_after_a_while_unless_it_was_cancelled() -> None:
    pending = of("a", "b")
    pending.miss("a", {1}, 10.0)
    pending.miss("b", None, 10.2)
    pending.ask_missed(10.0 + ASK_AGAIN / 2)
    assert not pending.slots
    pending.forget("b")
    pending.ask_missed(10.0 + ASK_AGAIN)
    assert pending.slots == {"a": {1}}
    pending.slots.clear()
    pending.ask_missed(99.0)
    assert not pending.slots


def test_of_very_many_topics_that_nothing_is_known_of_each_has_its_turn() -> None:
    pending = of("busy", *(f"q{n:04d}" for n in range(600)))
    pending.ask_for_backlog("busy")
    asked: list[str] = []
    for _ in range(4):
        some = pending.unknown()
        assert len(some) <= MAX_OTHERS
        asked += some
    assert set(asked) == {f"q{n:04d}" for n in range(600)}


def test_nothing_is_unknown_while_no_topic_holds_more_than_there_is_room_for() -> None:
    pending = of("a", "b")
    pending.ask("a")
    assert pending.unknown() == []
    pending.ask_for_backlog("a")
    pending.pause({"b"})
    assert pending.unknown() == []
    pending.pause(set())
    assert pending.unknown() == ["b"]


def test_topics_that_were_asked_about_and_cancelled_are_not_asked() -> None:
    pending = of("a")
    pending.found_due(["gone", "a"], [0, 1])
    assert pending.slots == {"a": None}
    assert pending.backlog == {"a"}


def test_a_topic_that_goes_on_after_a_pause_is_looked_into() -> None:
    pending = of("a", "b")
    pending.pause({"a", "elsewhere"})
    assert pending.paused == {"a"}
    pending.ask_for_backlog("a")
    pending.leave_paused()
    assert not (pending.slots or pending.sure or pending.backlog)
    pending.pause(set())
    assert pending.slots == {"a": None}
    assert not pending.sure


def test_few_topics_are_looked_into_along_with_those_that_hold_something() -> None:
    pending = of(*(f"q{n}" for n in range(100)))
    pending.look_at_all()
    pending.ask("q7")
    split = pending.split(4, 4)
    assert split.pop("q7") == (4, 4)
    assert list(split.values()) == [(0, 0)] * MAX_LOOKS


def test_a_topic_that_is_forgotten_leaves_nothing() -> None:
    pending = of("a")
    pending.ask_for_backlog("a", 3)
    pending.miss("a", {1}, 1.0)
    pending.pause({"a"})
    pending.forget("a")
    pending.ask_missed(99.0)
    assert not (pending.slots or pending.sure or pending.backlog or pending.paused)
    assert "a" not in pending.topics
