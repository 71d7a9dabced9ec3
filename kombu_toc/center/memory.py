"""Estimates how much memory topics take in Redis, from a bounded number of samples."""

from __future__ import annotations

from collections.abc import Iterable

from .center import TimeoutCenter

#: Slots that are looked at, of all topics together.
SAMPLED = 512

#: Commands that leave together.
TOGETHER = 1000


def estimate_memory(
    center: TimeoutCenter, topics: Iterable[str], *, sampled: int = SAMPLED
) -> dict[str, int] | None:
    """Estimate how many bytes each topic's messages take in Redis: {topic: bytes}.

    sampled: how many slots are measured in all. If the topics have more, some slots stand for the
        others: the CRC spreads messages evenly. Redis itself estimates a large key from some of
        its members.

    Returns None if the server refuses ``MEMORY USAGE``.
    """
    names = list(topics)
    each = max(sampled // max(len(names), 1), 1)
    wanted: list[tuple[str, float, str]] = []
    for name in names:
        topic = center.known(name) or center.topic(name)
        step = max(-(-topic.slot_span // each), 1)
        slots = range(0, topic.slot_span, step)
        share = topic.slot_span / len(slots)
        wanted += [(name, share, key) for n in slots for key in topic.slot(n).all()]
    found = dict.fromkeys(names, 0.0)
    for start in range(0, len(wanted), TOGETHER):
        part = wanted[start : start + TOGETHER]
        with center.client.pipeline(transaction=False) as pipe:
            for _, _, key in part:
                pipe.memory_usage(key)
            replies = pipe.execute(raise_on_error=False)
        for (name, share, _), reply in zip(part, replies, strict=True):
            if isinstance(reply, Exception):  # an ACL user who may not ask
                return None
            found[name] += share * (reply or 0)
    return {name: round(size) for name, size in found.items()}
