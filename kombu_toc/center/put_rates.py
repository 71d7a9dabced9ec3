"""How many messages may be put: of which topic and key a put is counted, and what it is told."""

from __future__ import annotations

from typing import Any

from ..errors import RateLimitedError
from ..metrics.counters import TopicCounts
from ..model.keys import Slot
from ..model.results import Put, PutTogether
from ..model.topic import Topic
from .replies import read_put, read_put_many


def pace_key(topic: Topic, slot: Slot, *, clustered: bool) -> str:
    """Where the puts of a topic are counted: in one place, unless its slots are on several nodes.
    Then each key is counted in its own slot, and a topic that is counted as a whole has one."""
    return slot.put_pace if clustered else topic.slot(0).put_pace


def read_limited_put(topic: Topic, counts: TopicCounts, raw: list[Any]) -> Put | RateLimitedError:
    """The result of a put into a topic whose puts are limited; an error that runners raise."""
    if raw[1] >= 0:
        return read_put(counts, raw)
    counts.refused += 1
    return _refused(topic, raw[3], raw[4])


def read_limited_put_many(
    topic: Topic, counts: TopicCounts, number: int, raw: list[Any]
) -> PutTogether:
    """The result of a call that puts so many messages into such a topic."""
    now, there, taken, flat, *_ = raw
    refused = {flat[i]: _refused(topic, flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)}
    counts.refused += len(refused)
    put = read_put_many(counts, number - len(refused), [now, there, taken])
    return put._replace(refused=refused)


def _refused(topic: Topic, wait_us: int, kind: bytes) -> RateLimitedError:
    limit = "put_rate" if kind == b"p" else "key_put_rate"
    rate = getattr(topic.declaration, limit)
    whose = f"queue {topic.name!r}" if kind == b"p" else f"each key of queue {topic.name!r}"
    seconds = wait_us / 1e6
    return RateLimitedError(
        f"{whose} takes {rate} ({limit}), and has got as many; the message was not kept. One more "
        f"may be put in {seconds:.6g} seconds",
        limit,
        seconds,
    )
