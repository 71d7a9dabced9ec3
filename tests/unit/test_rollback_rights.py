"""Which leases a center may roll back, under a simulated clock and without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kombu_toc.center.context import Context
from kombu_toc.center.leases import NOTE_AGAIN, Leases
from kombu_toc.center.watch import grace_of
from kombu_toc.metrics.counters import Counters
from kombu_toc.model import scores
from kombu_toc.model.keys import Keys
from kombu_toc.model.limits import Limits
from kombu_toc.model.topic import Declaration, Topic
from kombu_toc.scripts.call import ScriptCall

TOPIC = Topic("mail", Declaration(slots=4, visibility=6.0), "toc:")


class World:
    """A clock, and servers that reply at once."""

    def __init__(self, *, clustered: bool = False, grace: float | None = None) -> None:
        self.now = 100.0
        self.ran: list[ScriptCall] = []
        context = Context(Keys("toc:"), clustered, Limits(), 1000, Counters(active=True).counts)
        place = (lambda key: key) if clustered else (lambda key: None)
        runner: Any = SimpleNamespace(
            executor=SimpleNamespace(place_of=place),
            run_all=self.run_all,
            run_each=self.run_all,
            clustered=clustered,
        )
        self.leases = Leases(runner, context, grace=grace, clock=lambda: self.now)

    def run_all(self, calls: list[ScriptCall]) -> list[Any]:
        self.ran += calls
        return [call.parse([0, 0, [], [], [], []]) for call in calls]

    def see(self, slot: int = 0) -> None:
        self.leases.sample(TOPIC, slot, int(self.now * 1_000_000), self.now)

    def watch(self, seconds: float, slot: int = 0) -> None:
        end = self.now + seconds
        while self.now < end:
            self.see(slot)
            self.now += 0.5
        self.see(slot)


def test_who_has_watched_for_a_grace_may_roll_back_what_has_ended_by_now() -> None:
    world = World()
    assert world.leases.recover_until(TOPIC, 0) is None
    world.watch(grace_of(6.0) - 0.5)
    assert world.leases.recover_until(TOPIC, 0) is None
    world.watch(0.5)
    until = world.leases.recover_until(TOPIC, 0)
    assert until is not None
    assert until == pytest.approx(world.now * 1_000_000, abs=600_000)


def test_the_slots_of_one_server_are_watched_together_and_of_a_cluster_by_node() -> None:
    for clustered in (False, True):
        world = World(clustered=clustered)
        world.watch(5.0)
        assert world.leases.recover_until(TOPIC, 0)
        assert (world.leases.recover_until(TOPIC, 1) is None) == clustered


def test_who_knows_better_needs_no_grace() -> None:
    assert World(grace=0).leases.recover_until(TOPIC, 0) == scores.LAST_MS * 1000


def test_what_has_ended_is_noted_now_and_then_and_a_cluster_is_asked_by_slot() -> None:
    for clustered, number in ((False, 1), (True, 3)):
        world = World(clustered=clustered)
        for _ in range(3):
            world.leases.note(TOPIC, [0, 1, 2], 10)
        assert [call.script.name for call in world.ran] == ["upkeep"] * number
        world.now += NOTE_AGAIN
        world.leases.note(TOPIC, [0, 1, 2], 10)
        assert len(world.ran) == 2 * number
        assert world.leases.note(TOPIC, [], 10) == []
