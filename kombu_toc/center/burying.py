"""Puts a delivered message into DeadQueue, whether it is still there or was acknowledged before."""

from __future__ import annotations

import re
import zlib
from functools import partial
from typing import Any

from ..metrics.counters import TopicCounts
from ..model import scores
from ..model.results import Delivery
from ..model.topic import Topic, base_of
from ..scripts.call import ScriptCall, text
from .commands import ERROR_LENGTH, REASON_LENGTH, encoded
from .context import Context


def bury_call(
    context: Context, topic: Topic, delivery: Delivery, reason: str, error: str
) -> ScriptCall:
    """Put a delivered message into DeadQueue. Result: the id that it is kept under; None if every
    id that it could have is taken by another message.

    It may run twice without harm.
    """
    base = base_of(delivery.id)
    # A slot that the topic has no more, since it was resharded, is read by nobody.
    stays = delivery.slot < topic.slot_span
    slot = topic.slot(delivery.slot) if stays else topic.slot_for(base)
    copy = f"{base}#{zlib.crc32(delivery.body):08x}"
    birth = re.split("[;~@!]", delivery.birth, maxsplit=1)[0]
    return context.announcing(
        topic,
        "bury",
        (*slot.script_keys, slot.copies(base)),
        (
            len(topic.steps),
            slot.number,
            delivery.body,
            delivery.birth,
            scores.lease(0, delivery.step, delivery.retries_left),
            encoded(" ".join(reason.split())[:REASON_LENGTH] or "failed"),
            encoded(error[:ERROR_LENGTH]),
            topic.declaration.expires or 0,
            delivery.id,
            copy,
            f"{copy}-{birth}",
        ),
        partial(_read, context.counts(topic)),
        limited=slot if topic.declaration.lanes or delivery.has_place else None,
    )


def _read(counts: TopicCounts, raw: list[Any]) -> str | None:
    id, died, *_ = raw
    counts.dead += died == 1
    return None if died < 0 else text(id)
