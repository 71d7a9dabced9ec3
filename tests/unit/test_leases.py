"""Which leases are renewed and whether they still last, under a simulated clock."""

from __future__ import annotations

import threading

from kombu_toc import Delivery
from kombu_toc.consumer.holdings import (
    BEATS_PER_LEASE,
    RETRY_INTERVAL,
    SWEEP_INTERVAL,
    Expiries,
    Leases,
    by_place,
    next_beat,
)

NEVER = float("inf")


def delivery(id: str, topic: str = "mail", slot: int = 0, birth: str = "b") -> Delivery:
    return Delivery(
        topic=topic, slot=slot, step=0, id=id, score=16, body=b"", limit=16, birth=birth
    )


def leases(*held: tuple[Delivery, float], now: float = 100.0) -> Leases:
    made = Leases(threading.RLock())
    for one, visibility in held:
        made.hold(one, visibility, now)
    return made


def test_every_lease_lasts_until_the_first_may_have_ended() -> None:
    held = leases((delivery("a"), 6.0), (delivery("b"), 60.0))
    assert held.in_time(105.9)
    assert not held.in_time(106.0)


def test_who_holds_nothing_is_always_in_time() -> None:
    held = leases((delivery("a"), 6.0))
    held.drop(delivery("a"))
    assert held.in_time(1000.0)
    assert not held


def test_a_renewal_counts_from_when_it_began_and_for_the_shortest_lease_by_then() -> None:
    held = leases((delivery("a"), 6.0))
    held.hold(delivery("taken meanwhile"), 3.0, 102.5)
    held.renewed(102.0, [], {6.0, 3.0})
    assert held.in_time(104.9)
    assert not held.in_time(105.0)


def test_leases_that_could_not_be_renewed_matter_where_they_are() -> None:
    held = leases((delivery("a"), 6.0), (delivery("b", slot=3), 6.0))
    held.renewed(
        104.0, [("mail", 3)], {6.0}
    )  # slot 3 is known to last until 106, the rest until 110
    assert held.in_time(105.9)
    assert not held.in_time(106.0)
    assert not held.in_time(106.0, "mail")
    assert not held.in_time(106.0, "mail", [2, 3])
    assert held.in_time(106.0, "mail", [0])
    assert held.in_time(106.0, "other")
    held.renewed(106.0, [("mail", 3)], {6.0})  # it fails again: what was known of it still counts
    assert not held.in_time(106.0)
    held.renewed(107.0, [], {6.0})
    assert held.in_time(112.9)


def test_a_message_that_was_delivered_again_is_not_dropped_by_who_had_it_before() -> None:
    held = leases((delivery("a", birth="second"), 6.0))
    held.drop(delivery("a", birth="first"))
    assert [one.birth for one, _ in held.held()] == ["second"]


def test_what_was_settled_while_its_lease_was_renewed_is_not_lost() -> None:
    one = delivery("a")
    held = leases((one, 6.0))
    assert not held.lose(delivery("a"))  # as delivered anew
    assert held.lose(one)
    assert not held.lose(one)


def renewed_at(held: Leases, began: float, next_at: float) -> list[str]:
    due = held.due(began, next_at)
    held.renewed(began, [], {visibility for _, visibility in due})
    return sorted(one.id for one, _ in due)


def test_each_lease_is_renewed_by_its_own_visibility() -> None:
    held = leases((delivery("short"), 3.0), (delivery("long"), 60.0))
    rounds = [renewed_at(held, at, at + 1) for at in range(101, 141)]
    assert rounds.count(["short"]) == 38
    assert [at for at, ids in enumerate(rounds, 101) if "long" in ids] == [119, 138]
    assert held.in_time(142.9)
    assert not held.in_time(143.0)


def test_a_lease_that_is_longer_than_its_topics_is_renewed_as_often_as_those() -> None:
    """By the topic's, others judge whether a holder had the time to renew."""
    held = leases()
    held.hold(delivery("long"), 600.0, 100.0, None, 30.0)
    assert held.shortest() == 30.0
    rounds = [renewed_at(held, at, at + 1) for at in range(101, 131)]
    assert [at for at, ids in enumerate(rounds, 101) if ids] == [109, 118, 127]
    assert held.in_time(726.9)
    held.drop(delivery("long"))
    assert renewed_at(held, 131.0, 132.0) == []
    held.hold(delivery("long"), 600.0, 140.0)
    assert held.shortest() == 600.0


def test_a_short_lease_that_is_settled_makes_nobody_late() -> None:
    held = leases((delivery("short"), 3.0), (delivery("long"), 60.0))
    held.drop(delivery("short"))
    assert renewed_at(held, 101.0, 102.0) == []
    assert held.in_time(159.9)
    assert not held.in_time(160.0)


def test_what_could_not_be_renewed_is_due_at_the_next_beat() -> None:
    held = leases((delivery("a"), 60.0))
    held.renewed(120.0, [("mail", 0)], {60.0})
    assert renewed_at(held, 121.0, 122.0) == ["a"]
    assert renewed_at(held, 122.0, 123.0) == []


def test_what_may_not_be_renewed_for_ever_is_asked_for_when_it_has_ended() -> None:
    held = leases()
    held.hold(delivery("a"), 60.0, 100.0, ends=110.0)
    held.hold(delivery("b"), 60.0, 100.0)
    assert held.first_end() == 110.0
    assert renewed_at(held, 109.0, 111.0) == []
    assert renewed_at(held, 110.0, 111.0) == ["a"]
    [(one, _)] = held.due(110.0, 111.0)
    assert held.lose(one)
    assert held.first_end() == NEVER
    assert held.take_overran() == []


def test_a_delivery_that_has_ended_is_told_although_its_message_is_here_again() -> None:
    held = leases()
    held.hold(delivery("a", birth="b!1"), 60.0, 100.0, ends=110.0)
    held.hold(delivery("a", birth="b~c!2"), 60.0, 110.5, ends=120.5)
    assert [one.birth for one in held.take_overran()] == ["b!1"]
    assert held.take_overran() == []
    held.drop(delivery("a", birth="b~c!2"))
    held.hold(delivery("a", birth="b~d!3"), 60.0, 130.0, ends=140.0)
    held.hold(delivery("a", birth="b~d!3"), 60.0, 130.0, ends=140.0)
    assert held.take_overran() == []
    assert held.first_end() == 140.0


def test_one_call_renews_what_has_the_same_place_and_lease() -> None:
    held = [(delivery("a"), 6.0), (delivery("b"), 6.0), (delivery("c"), 9.0)]
    held.append((delivery("d", slot=1), 6.0))
    grouped = {place: [one.id for one in ones] for place, ones in by_place(held).items()}
    assert grouped == {
        ("mail", 0, 6.0): ["a", "b"],
        ("mail", 0, 9.0): ["c"],
        ("mail", 1, 6.0): ["d"],
    }


def test_a_lease_is_renewed_three_times_before_it_ends() -> None:
    assert next_beat(100.0, [6.0, 60.0], NEVER) == 100.0 + 6.0 / BEATS_PER_LEASE


def test_without_leases_there_is_a_beat_now_and_then_to_look_for_what_others_left() -> None:
    assert next_beat(100.0, [], NEVER) == 100.0 + SWEEP_INTERVAL
    assert next_beat(100.0, [3600.0], NEVER) == 100.0 + SWEEP_INTERVAL


def test_what_nobody_asks_for_is_given_back_when_that_is_due_but_not_more_than_once_a_second() -> (
    None
):
    assert next_beat(100.0, [60.0], 103.0) == 103.0
    assert next_beat(100.0, [60.0], 100.1) == 100.0 + RETRY_INTERVAL


def test_a_queue_that_may_have_expired_is_looked_for_when_it_may_have() -> None:
    expiries = Expiries(threading.RLock())
    expiries.note("brief", 103.0)
    expiries.note("later", 109.0)
    assert expiries.next(100.0, RETRY_INTERVAL) == 103.0
    assert not expiries.take(102.9)
    assert expiries.take(103.0)
    assert expiries.next(103.0, RETRY_INTERVAL) == 109.0


def test_a_look_that_failed_is_repeated_a_second_later_and_keeps_no_other_waiting() -> None:
    """Else a server that lets the process in no more is asked without a pause."""
    expiries = Expiries(threading.RLock())
    expiries.note("brief", 103.0)
    assert expiries.next(103.5, RETRY_INTERVAL) == 103.5 + RETRY_INTERVAL
    expiries.note("other", 103.7)
    assert expiries.next(103.5, RETRY_INTERVAL) == 103.7
