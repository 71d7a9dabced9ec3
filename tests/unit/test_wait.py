"""What a waiting pop claims and when it does what, under a simulated clock."""

from __future__ import annotations

import random

import pytest

from kombu_toc import ConfigurationError, Delivery, Popped
from kombu_toc.center.waiting import (
    KEPT_UP,
    LOOK,
    LOOK_RARELY,
    LOOKS,
    MAX_CLAIMS,
    Gathered,
    Looks,
    Wait,
    names_of,
    passes,
    seconds_of,
)

from ..support.cases import each

FOREVER = float("inf")
US = 1_000_000


def popped(*ids: str, topic: str = "mail", more: bool = False, now_us: int = 5) -> Popped:
    messages = [Delivery(topic, 0, 0, id, 0, b"", 16) for id in ids]
    return Popped(now_us, more, messages, *([[]] * (len(Popped._fields) - 3)))


def test_a_claim_is_acted_on_when_it_is_due_and_not_before() -> None:
    wait = Wait(["mail", "sms"], until=100.0)
    assert wait.add(("mail", 3, 20 * US), at=20.0) == []
    assert wait.add(("sms", 1, 10 * US), at=10.0) == []
    assert (wait.due(9.9), wait.next_time()) == ({}, 10.0)
    assert wait.due(10.0) == {"sms": {1}}
    assert wait.due(20.0) == {"sms": {1}, "mail": {3}}


def test_a_pop_that_looks_ahead_settles_what_it_has_looked_at_and_comes_early_for_the_rest() -> (
    None
):
    wait = Wait(["mail"], until=100.0)
    for slot, second in enumerate((20, 21, 22)):
        wait.add(("mail", slot, second * US), at=second)
    wait.popped("mail", None, now_us=20 * US, now=50.0, ahead_us=US)
    assert len(wait) == 1
    assert wait.next_time() == 51.5  # a second and a half before its time, half a second early


def test_the_end_of_the_wait_comes_before_a_later_claim() -> None:
    wait = Wait(["mail"], until=5.0)
    assert wait.next_time() == 5.0
    wait.add(("mail", 0, 9 * US), at=9.0)
    assert wait.next_time() == 5.0


def test_a_pop_settles_what_was_due_and_corrects_the_time_of_what_was_not() -> None:
    wait = Wait(["mail"], until=FOREVER)
    wait.add(("mail", 3, 20 * US), at=1.0)
    wait.add(("mail", 3, 30 * US), at=1.0)
    wait.add(("mail", 4, 20 * US), at=9.0)
    wait.popped("mail", {3}, now_us=20 * US, now=2.0)
    assert wait.due(8.0) == {}
    assert wait.next_time() == 9.0  # of the other slot
    assert wait.due(12.0) == {"mail": {3, 4}}
    wait.popped("mail", None, now_us=31 * US, now=12.0)
    assert len(wait) == 0


def test_a_pop_of_one_topic_settles_nothing_of_another() -> None:
    wait = Wait(["mail", "sms"], until=FOREVER)
    wait.add(("mail", 0, 1), at=0.0)
    wait.popped("sms", None, now_us=10, now=0.0)
    assert wait.give_up() == [("mail", 0, 1)]


def test_more_claims_of_a_slot_than_it_announces_are_all_handed_back() -> None:
    wait = Wait(["mail"], until=FOREVER)
    claims = [("mail", 0, us) for us in range(MAX_CLAIMS + 1)]
    wait.add(("mail", 1, 5), at=5.0)
    assert [wait.add(claim, at=1.0) for claim in claims[:-1]] == [[]] * MAX_CLAIMS
    assert sorted(wait.add(claims[-1], at=1.0)) == claims
    assert wait.give_up() == [("mail", 1, 5)]


def test_who_gives_up_hands_back_every_claim_once() -> None:
    wait = Wait(["mail"], until=FOREVER)
    wait.add(("mail", 0, 1), at=0.0)
    wait.add(("mail", 0, 1), at=0.0)
    assert wait.give_up() == [("mail", 0, 1)]
    assert wait.give_up() == []


def test_every_claim_of_a_long_random_life_is_popped_in_time_or_handed_back() -> None:
    """Whatever the order, no claim is forgotten: it was popped at its time, or is handed back."""
    chance = random.Random(1)
    for _ in range(200):
        wait, now, held, ahead = Wait(["a", "b"], FOREVER), 0.0, set(), chance.uniform(-0.2, 0.2)
        for _ in range(60):
            if chance.random() < 0.5:
                claim = (chance.choice("ab"), chance.randrange(3), chance.randrange(30 * US))
                gone = wait.add(claim, at=max(claim[2] / US + ahead, now))
                held = (held | {claim}) - set(gone)
            else:
                now = max(now, min(wait.next_time(), now + 5.0))
                for topic, slots in wait.due(now).items():
                    us = int(now * US)
                    wait.popped(topic, slots, us, now)
                    held -= {c for c in held if c[0] == topic and c[1] in slots and c[2] <= us}
                assert all(claim[2] / US + ahead > now or claim[2] > now * US for claim in held)
        assert set(wait.give_up()) == held


def test_somebody_looks_every_second_while_nobody_keeps_the_topics_up() -> None:
    looks = Looks()
    assert looks.due(["mail", "sms"], 100.0) == ["mail", "sms"]
    looks.looked("mail", 100.0)
    assert looks.due(["mail", "sms"], 100.5) == ["sms"]
    looks.looked("sms", 100.5)
    assert looks.next_time(["mail", "sms"]) == 100.0 + LOOK
    assert looks.due(["mail", "sms"], 100.0 + LOOK) == ["mail"]


def test_while_somebody_keeps_them_up_it_is_only_asked_whether_that_is_still_so() -> None:
    looks, now, asked, looked = Looks(), 0.0, 0, 0
    looks.looked("mail", now)
    while now < 60.0:
        now = looks.next_time(["mail"])
        assert looks.asks(now)
        looks.asked(True, now)
        asked += 1
        if looks.due(["mail"], now):
            looked += 1
            looks.looked("mail", now)
    assert (asked, looked) == (60 // KEPT_UP, 0) or asked == 60 // KEPT_UP + 1
    now = looks.next_time(["mail"])
    looks.asked(False, now)
    assert looks.due(["mail"], now) == ["mail"]


@each(("number", "most"), [(100, 100), (1000, LOOKS), (2000, LOOKS), (4000, 400)])
def test_however_many_topics_there_are_somebody_looks_into_each(number: int, most: int) -> None:
    """But into no more of them a second than a process has time for."""
    looks, now, looked = Looks(), 0.0, []
    topics = [f"mail-{n}" for n in range(number)]
    while now < 40.0:
        for topic in looks.due(topics, now):
            looks.looked(topic, now)
            looked.append((now, topic))
        now += 0.25
    late = [(at, topic) for at, topic in looked if at >= 20.0]
    assert {topic for _, topic in late} == set(topics)
    assert len(late) <= 20 * most * 1.1
    # One that is left alone has as few again as it had at first.
    while now < 80.0:
        for topic in looks.due(topics[:1], now):
            looks.looked(topic, now)
        now += 0.25
    assert looks.next_time(topics[:1]) <= now + LOOK


def test_somebody_looks_rarely_although_the_topics_are_kept_up() -> None:
    looks, now, looked = Looks(), 0.0, []
    looks.looked("mail", now)
    while now < 3 * LOOK_RARELY:
        now = looks.next_time(["mail"])
        if looks.asks(now):
            looks.asked(True, now)
        if looks.due(["mail"], now):
            looked.append(now)
            looks.looked("mail", now)
    assert len(looked) == 3


def test_what_several_pops_did_is_told_as_one() -> None:
    found = Gathered(5)
    found.add("mail", popped(more=True, now_us=7))
    assert not found
    rolled = popped("a", "b", now_us=9)._replace(rolled_back=["x"])
    found.add("mail", rolled)
    found.add("sms", popped("c", topic="sms", more=True)._replace(rolled_back=["y"]))
    assert found and found.left == 2
    result = found.result()
    assert [one.id for one in result.messages] == ["a", "b", "c"]
    assert (result.now_us, result.more, result.rolled_back) == (9, True, ["x", "y"])
    found.add("sms", popped())
    assert found.result().more is False


def test_a_pop_that_found_nothing_for_long_holds_nothing_of_it() -> None:
    found = Gathered(1)
    for _ in range(1000):
        found.add("mail", popped())
    assert len(found._parts) == 1


def test_topics_and_times_that_make_no_sense_are_refused_by_name() -> None:
    assert names_of(name for name in ("b", "a", "b")) == ["b", "a"]
    assert seconds_of(None, "wait") == FOREVER
    assert seconds_of(2, "wait") == 2
    with pytest.raises(ConfigurationError, match="not by b'mail'"):
        names_of(b"mail")
    with pytest.raises(ConfigurationError, match="not by 7"):
        names_of(["mail", 7])
    with pytest.raises(ConfigurationError, match="no topic is named"):
        names_of([])
    for wrong in (-1, float("nan"), "5", True):
        with pytest.raises(ConfigurationError, match="idle must be a number of seconds"):
            seconds_of(wrong, "idle")  # type: ignore[arg-type]


def test_an_error_that_only_a_person_can_mend_is_not_waited_out() -> None:
    from redis import exceptions

    from kombu_toc import NotPermittedError, ServerError

    assert passes(exceptions.ConnectionError())
    assert passes(exceptions.TimeoutError())
    assert passes(ServerError("MASTERDOWN"))
    assert passes(exceptions.ResponseError("LOADING it"))
    assert not passes(exceptions.AuthenticationError())
    assert not passes(NotPermittedError("rule"))
    assert not passes(exceptions.ResponseError("WRONGTYPE"))
