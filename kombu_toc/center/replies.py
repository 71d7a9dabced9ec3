"""Reads the replies of the scripts of producers and consumers, and counts what they have done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..metrics.counters import TopicCounts, count_first
from ..model.results import DEAD, OUTCOMES, WAITING, Delivery, Put, PutTogether, Settled
from ..model.topic import Topic
from ..scripts.call import text


def read_deliveries(
    topic: Topic, numbers: Sequence[int], name: str, flat: list[Any]
) -> list[Delivery]:
    """The deliveries of a pop of that name."""
    retries = topic.declaration.retries

    def named(id: bytes | list[Any]) -> tuple[bytes, str, int]:
        """id, token, when it may start"""
        if isinstance(id, list):
            return id[0], id[1].decode(), id[2] if len(id) > 2 else 0
        return id, name, 0

    return [
        Delivery(
            topic.name,
            numbers[flat[i]],
            flat[i + 1],
            id.decode("utf-8", "surrogatepass"),
            flat[i + 3],
            flat[i + 4],
            retries,
            birth,
            start_us,
        )
        for i in range(0, len(flat), 5)
        for id, birth, start_us in [named(flat[i + 2])]
    ]


def read_starts(
    topic: Topic,
    numbers: Sequence[int],
    flat: list[Any],
    births: list[bytes],
    starts: list[int],
) -> list[Delivery]:
    """The deliveries of a pop of a topic that is limited."""
    retries = topic.declaration.retries
    name = topic.name
    messages = [
        Delivery(
            name,
            numbers[flat[i]],
            flat[i + 1],
            flat[i + 2].decode("utf-8", "surrogatepass"),
            flat[i + 3],
            flat[i + 4],
            retries,
            birth.decode(),
        )
        for i, birth in zip(range(0, len(flat), 5), births, strict=True)
    ]
    for at, start_us in zip(starts[::2], starts[1::2], strict=True):
        messages[at] = messages[at]._replace(start_us=start_us)
    return messages


def read_put(counts: TopicCounts, raw: list[Any]) -> Put:
    """The result of a put."""
    id, outcome, now, *_ = raw
    counts.put += now > 0
    return Put(text(id), OUTCOMES[outcome], now or None)


def read_settled(counts: TopicCounts, counter: str, raw: list[Any]) -> Settled:
    """The result of an ack or a release; `counter` counts what was there."""
    return Settled(count_first(counts, counter, raw), [number - 1 for number in raw[1]])


def read_put_many(counts: TopicCounts, number: int, raw: list[Any]) -> PutTogether:
    """The result of a call that puts so many messages."""
    now, there, taken, *_ = raw
    counts.put += number - len(there) - len(taken)
    return PutTogether(now, there, taken)


def read_reject(counts: TopicCounts, counter: str, raw: list[Any]) -> str | None:
    """The state that a rejected message is in now; `counter` counts it if it comes back."""
    count_first(counts, counter, [raw[0] == 1])
    counts.dead += raw[0] == 2
    return {1: WAITING, 2: DEAD, 3: DEAD}.get(raw[0])
