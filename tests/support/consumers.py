"""Consumers without a server: what they deliver to says by itself how much it can take."""

from __future__ import annotations

import time
from typing import Any

from kombu_toc.client.options import ROUND_ROBIN
from kombu_toc.consumer.lease_keeper import LeaseKeeper
from kombu_toc.consumer.state import ConsumerState, WorkerPolicy
from kombu_toc.model.results import Delivery, Popped
from kombu_toc.model.topic import Declaration, Topic

MS = 1_000


def keeps_up(keeper: LeaseKeeper) -> bool:
    """Whether it is this process that keeps all topics up."""
    return keeper.upkeeper.working and keeper.upkeeper.election.elected(time.monotonic())


class Room:
    """A channel, as far as a fetcher asks it. `free`: what could start now; negative if more is
    queued. `ahead`: how many more may be queued."""

    def __init__(self, free: int = 4, ahead: int = 0) -> None:
        self.free, self.ahead = free, ahead
        self.policy: Any = WorkerPolicy()

    def capacity(self, held: int, early: int = 0) -> tuple[int, int, int]:
        return self.free - held, self.free - held + self.ahead, self.ahead


def consumer(*topics: str, strategy: str = ROUND_ROBIN, **room: int) -> ConsumerState:
    state = ConsumerState(Room(**room), strategy)  # type: ignore[arg-type]
    for topic in topics:
        state.pending.topics.append(topic)
    return state


def topic_of(name: str, slot: int = 0) -> Topic:
    return Topic(name, Declaration(slots=8 if slot < 8 else 16), "toc:")


def delivery(topic: str = "a", slot: int = 0, due_ms: int = 0, id: str = "m") -> Delivery:
    return Delivery(topic, slot, 0, id, due_ms * 1000 + 32 if due_ms else 16, b"", 16, "birth")


def popped(now_us: int, *messages: Delivery, more: bool = False) -> Popped:
    return Popped(now_us, more, list(messages), [], [], [], [], [])


__all__ = ("MS", "Room", "consumer", "delivery", "popped", "topic_of")
