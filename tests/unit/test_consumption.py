"""Which leases a loop over messages renews, and when, under a simulated clock."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from kombu_toc import Delivery, ServerError, Taken
from kombu_toc.center.consumption import MOST_INTERVAL, RETRY, TIMES, Consumption, Held, told


def message(id: str, birth: str = "c.1") -> Taken:
    made = Taken("mail", 0, 0, id, 0, b"", 16, birth)
    made.lost = False
    return made


def test_the_shortest_lease_says_when_all_are_renewed() -> None:
    held = Held()
    held.add(message("long"), 60.0, now=0.0)
    assert held.due == MOST_INTERVAL
    held.add(message("short"), 3.0, now=1.0)
    assert held.due == 1.0 + 3.0 / TIMES
    assert held.renewing(1.9) == []
    assert [one.id for one in held.renewing(2.0)] == ["long", "short"]
    assert held.due == 3.0


def test_nothing_is_renewed_when_nothing_is_held() -> None:
    held, one = Held(), message("a")
    held.add(one, 3.0, now=0.0)
    assert held.drop([one, message("b")]) == [one]
    assert held.renewing(1.0) == []
    assert held.due == float("inf")


def test_a_settled_delivery_is_no_other_one_of_the_same_message() -> None:
    held = Held()
    held.add(message("a", "c.1~c.2"), 3.0, now=0.0)
    assert held.drop([message("a", "c.1")]) == []
    assert message("a", "c.1~c.2") in held


def test_leases_are_renewed_often_enough_however_long_the_messages_are_held() -> None:
    """No lease ends between two renewals, whatever comes and goes."""
    held, ends = Held(), {}
    for step in range(2000):
        now = step * 0.05
        if step % 7 == 0:
            lease = (1.0, 2.0, 7.0, 100.0)[step // 7 % 4]
            one = message(f"m{step}")
            held.add(one, lease, now)
            ends[one.id] = (now + lease, lease)
        for one in held.renewing(now):
            assert ends[one.id][0] > now, one
            ends[one.id] = (now + ends[one.id][1], ends[one.id][1])
        if step % 11 == 0 and held.all():
            held.drop([held.all()[0]])


def test_a_renewal_that_fails_is_tried_again_soon() -> None:
    held = Held()
    held.add(message("a"), 60.0, now=0.0)
    held.renewing(15.0)
    held.again(15.0)
    assert held.due == 15.0 + RETRY


class Center:
    """Stands for the center: its extend fails, or finds leases that have ended."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.on_settled: list[Any] = []

    def pop(self, *_: Any, **how: Any) -> Any: ...

    def extend(self, messages: Any, visibility: Any) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_what_a_renewal_finds_is_logged_once_and_marked(caplog: pytest.LogCaptureFixture) -> None:
    one, two = message("a"), message("b")
    refused = redis.exceptions.ResponseError("WRONGTYPE")
    away = ServerError("away")
    center = Center(away, away, refused, [one], [one])
    loops: Any = SimpleNamespace(deliveries=center, lease_of=lambda one: 3.0)
    loop = Consumption(loops, ["mail"])
    for each in (one, two):
        loop.held.add(each, 3.0, now=0.0)
    with caplog.at_level(logging.WARNING):
        for now in (1.0, 2.0, 3.0, 4.0, 5.0):
            loop.renew(loop.held, loop.held.renewing(now), now)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [
        ("WARNING", "cannot renew leases for now, will retry: away"),
        ("ERROR", "cannot renew leases: WRONGTYPE"),
        ("WARNING", "leases are renewed again, after 3 seconds"),
        (
            "WARNING",
            "leases ended before they were renewed, the messages may be delivered again: a of mail",
        ),
    ]
    assert (one.lost, two.lost, loop.held.all()) == (True, False, [two])


def test_an_exception_is_told_with_its_place() -> None:
    try:
        raise ValueError("no such address")
    except ValueError as exc:
        assert told(exc).startswith("ValueError: no such address (")
        assert told(exc).endswith(".py:" + str(exc.__traceback__.tb_lineno) + ")")  # type: ignore
    assert told(KeyError("x")) == "KeyError: 'x'"


def test_a_taken_message_is_a_delivery() -> None:
    one = message("a")
    assert isinstance(one, Delivery) and one == Delivery(*one)
