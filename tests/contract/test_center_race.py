"""Cancelled in the millisecond it becomes due: in time or too late, never both (X4)."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from kombu_toc import IN_FLIGHT, WAITING, TimeoutCenter

from ..support.inspection import check_slots, forget_late, now_us, put_call, residue

#: Messages, all due within a few milliseconds.
NUMBER = 400


class Racers:
    """Threads with a connection each that begin together."""

    def __init__(self, server):
        self._server = server
        self._threads = []
        self._failures = []

    def add(self, function, *args, at=None):
        """at: microseconds by the server's clock when they begin, or as soon as all can"""

        def run():
            with self._server.client() as client:
                try:
                    if at is not None:
                        sleep_until(client, at)
                    self._ready.wait(60)
                    function(TimeoutCenter(client), *args)
                except BaseException as exc:
                    self._failures.append(exc)

        self._threads.append(threading.Thread(target=run))

    def race(self):
        self._ready = threading.Barrier(len(self._threads))
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads)
        assert self._failures == []


def put_together(center, client, seconds):
    """Messages that become due in so many seconds, one every 10 microseconds."""
    topic = center.queues.declare("race", slots=4)
    due = now_us(client) + int(seconds * 1_000_000)
    calls = [put_call(center, topic, f"{n}", b"%d" % n, at_us=due + 10 * n) for n in range(NUMBER)]
    center.runner.run_all(calls)
    return due


def sleep_until(client, us):
    time.sleep(max(us - now_us(client), 0) / 1e6)  # the race is about this moment


def consume(center, delivered):
    """Until nothing waits any more."""
    deadline = time.monotonic() + 60
    while center.counts("race").waiting and time.monotonic() < deadline:
        for message in center.pop("race", 5).messages:
            assert message.action_us <= now_us(center.client)
            delivered.append(message)
            center.ack([message])


@pytest.mark.parametrize("attempt", range(3))
def test_each_message_is_either_cancelled_or_delivered(center, client, server, attempt):
    """X4: with many that cancel and pop, in the very milliseconds they become due"""
    due = put_together(center, client, 0.3)
    delivered, told = [], []

    def cancel(mine, share):
        for number in share:
            told.append((f"{number}", mine.cancel(f"{number}", topic="race")))

    racers = Racers(server)
    for _ in range(2):
        racers.add(consume, delivered, at=due - 2000)
    for first in range(4):
        # Some ids by two: one of them at most is told that he deleted it.
        racers.add(cancel, [*range(first, NUMBER, 4), *range(NUMBER - 1, 0, -40)], at=due - 2000)
    racers.race()

    runs = Counter(message.id for message in delivered)
    deleted = Counter(id for id, found in told for one in found if one.deleted)
    assert set(runs.values()) <= {1}
    assert set(deleted.values()) <= {1}
    assert runs.keys() & deleted.keys() == set(), "cancelled in time, and delivered"
    assert len(runs) + len(deleted) == NUMBER, "lost"
    assert runs and deleted, "they did not race"
    for id, found in told:
        for one in found:
            assert one.deleted is (one.state == WAITING)
            assert id in deleted if one.deleted else id in runs
            assert one.deleted or one.state == IN_FLIGHT
    forget_late(center, "race")
    assert residue(client) == []


def test_each_message_is_moved_or_delivered_and_none_is_lost(center, client, server):
    """X4: rescheduled by half a second, in the very milliseconds they become due"""
    due = put_together(center, client, 0.3)
    times = {one.id: one.time_us for one in center.scan("race", limit=NUMBER).messages}
    delivered, moved = [], {}

    def move(mine, share):
        for number in share:
            for one in mine.reschedule(f"{number}", at=due / 1e6 + 0.5, topic="race"):
                moved[one.id] = one.moved

    racers = Racers(server)
    for _ in range(2):
        racers.add(consume, delivered, at=due - 2000)
    for first in range(4):
        racers.add(move, range(first, NUMBER, 4), at=due - 2000)
    racers.race()

    runs = Counter(message.id for message in delivered)
    assert len(runs) == NUMBER, "lost"
    assert set(runs.values()) == {1}
    later = {message.id for message in delivered if message.action_us != times[message.id]}
    assert all(m.action_us >= due + 499_000 for m in delivered if m.id in later)
    assert later == {id for id, done in moved.items() if done}
    assert later
    forget_late(center, "race")
    check_slots(center, "race")
    assert residue(client) == []


def test_each_message_is_run_now_or_cancelled(center, client, server):
    """X4: two operators at the same message"""
    topic = center.queues.declare("race", slots=4)
    center.runner.run_all(
        [put_call(center, topic, f"{n}", b"", delay_us=10**9) for n in range(NUMBER)]
    )
    moved, deleted = set(), set()

    def run_now(mine):
        for number in range(NUMBER):
            moved.update(one.id for one in mine.run_now(f"{number}", topic="race") if one.moved)

    def cancel(mine):
        for number in range(NUMBER):
            deleted.update(one.id for one in mine.cancel(f"{number}", topic="race") if one.deleted)

    racers = Racers(server)
    racers.add(run_now)
    racers.add(cancel)
    racers.race()
    left = {message.id for message in center.pop("race", NUMBER).messages}
    assert left | deleted == {f"{n}" for n in range(NUMBER)}
    assert left & deleted == set()
    assert left <= moved
