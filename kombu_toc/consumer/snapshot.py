"""A snapshot of what a consumer has in hand, as plain data, for people."""

from __future__ import annotations

import time
from typing import Any

from ..metrics.counters import COUNTERS
from ..model.results import Delivery
from .flights import task_of

#: Messages that are named one by one, at most.
MAX_SHOWN = 100


def snapshot(channel: Any) -> dict[str, Any]:
    """A snapshot of what this process holds for a channel and has counted; times in seconds.

    topics: per topic that it consumes, its slots, whether it holds more than there was room
        for, what this process has counted since it started, and how late it has delivered
    capacity: how many messages could start at once, and how many it would take
    leases: how many delivered messages it keeps leased, and those messages
    held: messages fetched ahead of their time, or of a process that could start them
    claims: the next times that it serves, and whose
    clock_ahead: by how much Redis's clock is ahead of this machine's, at least
    """
    poller, lease_keeper = channel.poller, channel.lease_keeper
    now = time.monotonic()
    server_us = poller.clock.at(now)
    state = poller.states.get(channel)
    leases = lease_keeper.held()
    held, claims = [], []
    queued = [entry for _, entry in list(state.ready)] if state else []
    for _, _, owner, item in [*queued, *poller.dispatcher.due]:
        if owner is not state:
            continue
        if isinstance(item, Delivery):
            held.append({**_message(item), "due_in": (item.action_us - server_us) / 1e6})
        else:
            topic, slot, us = item
            claims.append({"topic": topic, "slot": slot, "due_in": (us - server_us) / 1e6})
    free, room, _ = channel.capacity(*((state.buffered, len(state.early)) if state else (0, 0)))
    return {
        "prefix": channel.center.keys.prefix,
        "clock_ahead": server_us / 1e6 - time.time() if poller.clock.known else None,
        "topics": {name: _topic(channel, name) for name in (state.pending.topics if state else ())},
        "capacity": {"free": free, "room": room},
        "leases": {
            "count": len(leases),
            "renewed_in_time": lease_keeper.in_time(),
            "messages": [_message(one) for one, _ in leases[:MAX_SHOWN]],
        },
        "held": sorted(held, key=_due)[:MAX_SHOWN],
        "claims": sorted(claims, key=_due)[:MAX_SHOWN],
    }


def _due(entry: dict[str, Any]) -> float:
    due_in: float = entry["due_in"]
    return due_in


def _message(delivery: Delivery) -> dict[str, Any]:
    return {
        "id": delivery.id,
        "task": task_of(delivery.body, delivery.id) or None,
        "topic": delivery.topic,
        "slot": delivery.slot,
        "failures": delivery.failures,
    }


def _topic(channel: Any, name: str) -> dict[str, Any]:
    topic = channel.center.registry.known(name)
    found: dict[str, Any] = {
        "slots": topic.slots if topic is not None else None,
        "backlog": name in channel.poller.states[channel].pending.backlog,
    }
    counts = channel.center.metrics.topics.get(name)
    if counts is not None:
        found["counts"] = {counter: getattr(counts, counter) for counter in COUNTERS}
        found["late_p50"] = counts.lateness.quantile(0.5)
        found["late_p99"] = counts.lateness.quantile(0.99)
    return found
