"""Which leases are renewed and whether they still last, under a simulated clock."""

from __future__ import annotations

import threading

from kombu_toc import Delivery
from kombu_toc.consumer.holdings import BEATS_PER_LEASE, RETRY_INTERVAL, SWEEP_INTERVAL, next_beat
from kombu_toc.consumer.leases import Leases, by_place

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
    held.renewed(102.0, [])
    assert held.in_time(104.9)
    assert not held.in_time(105.0)


def test_leases_that_could_not_be_renewed_matter_where_they_are() -> None:
    held = leases((delivery("a"), 6.0), (delivery("b", slot=3), 6.0))
    held.renewed(104.0, [("mail", 3)])  # slot 3 is known to last until 106, the rest until 110
    assert held.in_time(105.9)
    assert not held.in_time(106.0)
    assert not held.in_time(106.0, "mail")
    assert not held.in_time(106.0, "mail", [2, 3])
    assert held.in_time(106.0, "mail", [0])
    assert held.in_time(106.0, "other")
    held.renewed(106.0, [("mail", 3)])  # it fails again: what was known of it still counts
    assert not held.in_time(106.0)
    held.renewed(107.0, [])
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
