"""Whose turn it is, without a server and without a clock."""

from __future__ import annotations

import random
from collections import Counter

from kombu_toc.client.options import PRIORITY, SORTED
from kombu_toc.consumer.state import QueueRotation

from ..support.cases import each


def turns_of(*topics: str, **options: str) -> QueueRotation:
    turns = QueueRotation(**options)
    for topic in topics:
        turns.append(topic)
    return turns


@each("topics", [2, 3, 7, 40])
def test_topics_that_always_want_something_differ_by_one_at_most(topics: int) -> None:
    names = [f"q{number}" for number in range(topics)]
    turns, got, chance = turns_of(*names), Counter(dict.fromkeys(names, 0)), random.Random(topics)
    for _ in range(500):
        number = chance.randint(1, 17)
        dealt = turns.deal(number, names)
        assert sum(dealt.values()) == number
        got.update(dealt)
        assert max(got.values()) - min(got.values()) <= 1


def test_who_wants_nothing_gets_nothing_and_is_no_burden_to_the_others() -> None:
    turns = turns_of("a", "b", "c")
    assert turns.deal(5, {"b"}) == {"b": 5}
    assert turns.deal(3, set()) == {}
    assert turns.deal(0, {"a"}) == {}
    assert turns.deal(-1, {"a"}) == {}


def test_who_has_waited_longest_is_first() -> None:
    turns = turns_of("a", "b", "c")
    assert turns.deal(1, {"a", "b"}) == {"a": 1}
    assert turns.deal(1, {"a", "b", "c"}) == {"b": 1}
    assert turns.deal(1, {"a", "b", "c"}) == {"c": 1}
    assert turns.deal(1, {"a", "b", "c"}) == {"a": 1}


def test_with_priority_the_first_that_was_consumed_goes_before_all_others() -> None:
    turns = turns_of("b", "c", "a", strategy=PRIORITY)
    for _ in range(3):
        assert turns.deal(4, {"a", "b", "c"}) == {"b": 4}
    assert turns.deal(4, {"a", "c"}) == {"c": 4}


def test_sorted_the_first_by_name_goes_before_all_others() -> None:
    turns = turns_of("b", "c", "a", strategy=SORTED)
    for _ in range(3):
        assert turns.deal(4, {"a", "b", "c"}) == {"a": 4}
    turns.remove("a")
    assert turns.deal(4, {"b", "c"}) == {"b": 4}
