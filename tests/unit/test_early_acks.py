"""What was acknowledged while its task runs on, without a server."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from kombu_toc.consumer.holdings import EarlyAcks
from kombu_toc.consumer.state import WorkerPolicy

from ..support.consumers import delivery


class Pool(WorkerPolicy):
    """Executes what it is told."""

    def __init__(self) -> None:
        self.executed: set[Any] = set()

    def ended(self, executions: Any) -> Any:
        return set(executions) - self.executed


def of(pool: Pool, *names: str) -> EarlyAcks:
    early_acks = EarlyAcks(threading.RLock())
    for name in names:
        pool.executed.add(name)
        early_acks.add(pool, name, delivery(id=name))
    return early_acks


def ids(deliveries: Any) -> list[str]:
    return sorted(one.id for one in deliveries)


def test_a_message_is_kept_until_its_task_has_ended_and_given_once() -> None:
    pool = Pool()
    early_acks = of(pool, "a", "b")
    assert early_acks.take_ended() == []
    pool.executed.discard("a")
    assert ids(early_acks.take_ended()) == ["a"]
    assert early_acks.take_ended() == []
    assert early_acks
    pool.executed.discard("b")
    assert ids(early_acks.take_ended()) == ["b"]
    assert not early_acks


def test_each_pool_is_asked_for_its_own() -> None:
    one, other = Pool(), Pool()
    early_acks = of(one, "a")
    other.executed.add("b")
    early_acks.add(other, "b", delivery(id="b"))
    one.executed.clear()
    assert ids(early_acks.take_ended()) == ["a"]
    assert ids(early_acks.take_all()) == ["b"]
    assert not early_acks


def test_who_executes_nothing_keeps_nothing() -> None:
    early_acks = EarlyAcks(threading.RLock())
    early_acks.add(WorkerPolicy(), "a", delivery(id="a"))
    assert ids(early_acks.take_ended()) == ["a"]


def test_what_is_dropped_is_not_given() -> None:
    pool = Pool()
    early_acks = of(pool)
    held = delivery(id="a")
    early_acks.add(pool, "a", held)
    assert not early_acks.drop(delivery(id="a"))  # an equal one, but another's
    assert early_acks.drop(held)
    assert not early_acks.drop(held)
    assert not early_acks


def test_whoever_wants_to_know_is_told_once_whether_it_is_acknowledged_for_good() -> None:
    pool = Pool()
    told: list[tuple[str, bool]] = []
    early_acks = EarlyAcks(threading.RLock())
    made = {name: delivery(id=name) for name in "abcd"}
    pool.executed = set("abcde")
    for name, one in made.items():
        early_acks.add(pool, name, one, partial(note, told, name))
    early_acks.add(pool, "e", delivery(id="e"))
    assert early_acks.drop(made["a"])
    assert early_acks.drop(made["b"], is_over=True)
    assert not early_acks.drop(made["b"])
    pool.executed.discard("c")
    early_acks.take_ended()
    early_acks.take_all()
    assert early_acks.take_all() == []
    assert told == [("a", False), ("b", True), ("c", True), ("d", True)]


def note(told: list[tuple[str, bool]], name: str, is_over: bool) -> None:
    told.append((name, is_over))
