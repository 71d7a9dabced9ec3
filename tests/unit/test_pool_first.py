"""Which turns of the loop are left to the pool, without a loop and without a clock."""

from __future__ import annotations

from kombu_toc.consumer.dispatcher import POOL_FIRST, YieldToPool


def delivered() -> YieldToPool:
    """One turn has begun, and something was delivered in it."""
    pool = YieldToPool()
    pool.turn += 1
    pool.delivered_in = pool.turn
    return pool


def test_a_turn_with_a_delivery_and_the_next_one_are_the_pools() -> None:
    pool = delivered()
    assert pool.takes_turn(1.0, backlog=False)
    pool.turn += 1
    assert pool.takes_turn(1.001, backlog=False)
    pool.turn += 1
    assert not pool.takes_turn(1.002, backlog=False)


def test_without_a_delivery_no_turn_is_the_pools() -> None:
    pool = YieldToPool()
    pool.turn += 1
    assert not pool.takes_turn(1.0, backlog=False)


def test_a_backlog_is_worked_off_without_waiting_for_the_pool() -> None:
    assert not delivered().takes_turn(1.0, backlog=True)


def test_deliveries_in_every_turn_hold_up_the_rest_for_a_while_only() -> None:
    pool, now = YieldToPool(), 1.0
    while True:
        pool.turn += 1
        pool.delivered_in = pool.turn
        if not pool.takes_turn(now, backlog=False):
            break
        now += 0.001
    assert POOL_FIRST <= now - 1.0 < POOL_FIRST + 0.002
    # After a turn that was for the rest, the pool has its turns again.
    pool.turn += 1
    assert pool.takes_turn(now, backlog=False)
