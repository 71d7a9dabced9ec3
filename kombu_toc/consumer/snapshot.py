"""What a consumer has in hand, for people: as plain data, and as words in a log."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from ..errors import EnvelopeError
from ..metrics.counters import COUNTERS
from ..model import envelope
from ..model.results import Delivery
from .pipe import BROKEN

if TYPE_CHECKING:
    from ..center.center import TimeoutCenter
    from ..transport.channel import Channel

#: Messages that are named one by one, at most.
MAX_SHOWN = 100

#: Messages whose task names are looked up for a log, at once.
MAX_NAMED = 10


def task_of(body: bytes, id: str) -> str:
    """The name of the task that a message kept under that id carries; empty if it is none, or
    cannot be read."""
    try:
        name = envelope.unpack(body, id)["headers"].get("task")
    except EnvelopeError:
        return ""
    return name if isinstance(name, str) else ""


def in_words(delivery: Delivery) -> str:
    """Which message it is: id, topic, and the task's name if it has one."""
    task = task_of(delivery.body, delivery.id)
    return f"{delivery.id} of {delivery.topic}{f' (task {task})' if task else ''}"


def task_names(
    center: TimeoutCenter, topic: str, ids: list[str], messages: Iterable[Delivery] = ()
) -> dict[str, str]:
    """What a log says of the tasks of these messages: `` (task NAME)``, or nothing. What is not
    among `messages` is looked up, for it is rare."""
    names = dict.fromkeys(ids, "")
    bodies = {message.id: message.body for message in messages if message.id in names}
    unknown = [id for id in ids if id not in bodies][:MAX_NAMED]
    if unknown:
        with suppress(*BROKEN, ResponseError):
            bodies.update((found.id, found.body) for found in center.get(unknown, topic=topic))
    for id, body in bodies.items():
        task = task_of(body, id)
        if id in names and task:
            names[id] = f" (task {task})"
    return names


def report(channel: Channel) -> dict[str, Any]:
    """What this process holds for a channel and what it has counted; times in seconds.

    topics: per topic that it consumes, its slots, whether it holds more than there was room
        for, what this process has counted since it started, and how late it has delivered
    capacity: how many messages could start at once, and how many it would take
    leases: how many delivered messages it keeps leased, and those messages
    held: messages fetched ahead of their time, or of a process that could start them
    claims: the next times that it serves, and whose
    clock_ahead: by how much Redis's clock is ahead of this machine's, at least
    """
    poller, heartbeat = channel.poller, channel.heartbeat
    now = time.monotonic()
    server_us = poller.clock.at(now)
    state = poller.states.get(channel)
    leases = heartbeat.held()
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
    free, room, _ = channel.capacity(*((state.buffered, len(state.early)) if state else (0,)))
    return {
        "prefix": channel.center.keys.prefix,
        "clock_ahead": server_us / 1e6 - time.time() if poller.clock.known else None,
        "topics": {name: _topic(channel, name) for name in (state.pending.topics if state else ())},
        "capacity": {"free": free, "room": room},
        "leases": {
            "count": len(leases),
            "renewed_in_time": heartbeat.in_time(),
            "messages": [_message(one) for one, _ in leases[:MAX_SHOWN]],
        },
        "held": sorted(held, key=_due)[:MAX_SHOWN],
        "claims": sorted(claims, key=_due)[:MAX_SHOWN],
    }


def _due(entry: dict[str, Any]) -> float:
    return entry["due_in"]


def _message(delivery: Delivery) -> dict[str, Any]:
    return {
        "id": delivery.id,
        "task": task_of(delivery.body, delivery.id) or None,
        "topic": delivery.topic,
        "slot": delivery.slot,
        "failures": delivery.failures,
    }


def _topic(channel: Channel, name: str) -> dict[str, Any]:
    topic = channel.center.known(name)
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
