"""What is used of the limits of a topic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from .gates import spacing_us
from .terms import count_of, interval_us
from .topic import Declaration


class Used(NamedTuple):
    """One limit of a topic, and what is used of it now."""

    #: its name: ``rate``, ``concurrency``, ``key_rate``, ``key_concurrency``, ``key_order``,
    #: ``key_fair``, ``put_rate`` or ``key_put_rate``
    name: str
    value: Any  #: as the topic is declared with
    #: of a rate: how many of those that may come at once have come; of ``concurrency``: how many
    #: run. Of a limit of each key: of ``key_rate``, how many keys wait for it; of
    #: ``key_concurrency`` and ``key_order``, of how many keys something runs; of ``key_fair``, how
    #: many take turns; of ``key_put_rate``, how many keys have used some of it
    used: int
    of: int | None  #: how much there is, if it counts the whole topic
    #: microseconds until the next may come that has to wait for a rate; 0: now, or nothing waits
    opens_us: int


class Usage(NamedTuple):
    """What is used of a topic's limits."""

    topic: str
    limits: tuple[Used, ...]  #: those that it has
    running: int  #: messages that run and hold a place, where something counts what runs
    waiting: int  #: messages that are due and were not started
    keys_waiting: int  #: keys with something due that may not start it now
    oldest_us: int  #: for how many microseconds the oldest due message has waited


class SlotUsage(NamedTuple):
    """What ``usage.lua`` tells of a slot."""

    now_us: int
    running: int
    keys_running: int
    keys_ready: int
    keys_paced: int
    opens_us: int
    keys_held: int
    oldest_us: int
    waiting: int
    used_until_us: int
    put_until_us: int
    keys_put: int


def usage_of(topic: str, said: Declaration, slots: Iterable[SlotUsage]) -> Usage:
    """What is used of a topic's limits, from what its slots tell."""
    every = list(slots)

    def total(name: str) -> int:
        return sum(getattr(slot, name) for slot in every)

    now = every[0].now_us
    opens = min((slot.opens_us for slot in every if slot.opens_us), default=0)
    ahead, put_ahead = (
        max(getattr(slot, name) for slot in every) - now
        for name in ("used_until_us", "put_until_us")
    )
    whole = puts = _NO_RATE
    if said.rate:
        whole = _rate_used(spacing_us(said.rate), said.rate_burst or 1, ahead)
    if said.put_rate:
        puts = _rate_used(interval_us(said.put_rate), count_of(said.put_rate), put_ahead)
    running, keys_running = total("running"), total("keys_running")
    found = {
        "rate": whole,
        "concurrency": (running, said.concurrency, 0),
        "key_rate": (total("keys_paced"), None, max(opens - now, 0) if opens else 0),
        "key_concurrency": (keys_running, None, 0),
        "key_order": (keys_running, None, 0),
        "key_fair": (total("keys_ready"), None, 0),
        "put_rate": puts,
        "key_put_rate": (total("keys_put"), None, 0),
    }
    limits = tuple(
        Used(name, value, *used) for name, used in found.items() if (value := getattr(said, name))
    )
    keys_waiting = total("keys_paced") + total("keys_held")
    full = said.concurrency is not None and running >= said.concurrency
    if full or (said.rate and whole[2]):
        keys_waiting += total("keys_ready")
    return Usage(
        topic,
        limits,
        running,
        total("waiting"),
        keys_waiting,
        max(slot.oldest_us for slot in every),
    )


#: What is used where there is no rate.
_NO_RATE: tuple[int, int | None, int] = (0, None, 0)


def _rate_used(interval_us: float, burst: int, ahead_us: int) -> tuple[int, int | None, int]:
    """How many of a burst are used, of how many, and microseconds until one more may come.

    ahead_us: how far the rate has been used up beyond now
    """
    used = min(max(math.ceil(ahead_us / interval_us), 0), burst)
    return used, burst, max(math.ceil(ahead_us - (burst - 1) * interval_us), 0)
