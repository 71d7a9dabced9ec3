"""Marks deliveries that are acknowledged although their tasks still run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ..model.results import Delivery
from ..model.topic import Topic
from ..scripts.call import ScriptCall, load
from .commands import batches_by_slot


def mark_calls(
    topic_of: Callable[[Delivery], Topic], deliveries: Iterable[Delivery], *, buries: bool = False
) -> list[ScriptCall]:
    """Mark messages as acknowledged: they stay in flight until they are acknowledged once more,
    and are gone if their leases end before. Result of each call: a list of those that are held no
    longer by their deliveries, and so are not marked.

    topic_of: the topic of a delivery; asks nobody
    buries: they are dead if their leases end before, and not gone

    Each may run twice without harm.
    """
    calls = []
    for batch in batches_by_slot(deliveries):
        slot = topic_of(batch[0]).slot(batch[0].slot)
        args: list[Any] = [int(buries)]
        args += [x for one in batch for x in (one.id, one.lease_token, one.birth)]
        parse = partial(_refused, batch)
        calls.append(ScriptCall(load("mark"), (slot.prepare, slot.tokens), args, parse))
    return calls


def _refused(batch: list[Delivery], raw: list[int]) -> list[Delivery]:
    return [batch[number - 1] for number in raw]
