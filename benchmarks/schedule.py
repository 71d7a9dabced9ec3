"""Fills a timeout center with scheduled tasks, faster than Celery sends them."""

from __future__ import annotations

import itertools
import uuid

import kombu_toc
from kombu_toc.center.calls import PutRequest

from .trial import Trial

#: Puts in one round trip.
_TOGETHER = 500

TOPIC = "celery"

#: Seconds from now on in which what is filled in is due: long after any measurement.
FIRST, SPAN = 30 * 86_400, 10 * 86_400
_SPAN_US = SPAN * 1_000_000


def center_of(trial: Trial) -> kombu_toc.TimeoutCenter:
    """The timeout center of a trial's broker."""
    return kombu_toc.center_for(trial.broker.url)


def real_envelope(trial: Trial) -> bytes:
    """What Celery and the transport make of a scheduled task; it is sent, and cancelled again."""
    center = center_of(trial)
    trial.tell("publish", tasks=1, countdown=FIRST)
    slots = center.registry.topic(TOPIC).all_slots()
    [(id, body)] = [item for slot in slots for item in center.client.hgetall(slot.body).items()]
    center.cancel(id.decode(), topic=TOPIC)
    return body


def fill(trial: Trial, number: int, body: bytes) -> None:
    """Schedule so many more tasks, by the operation that a publish uses."""
    center = center_of(trial)
    topic = center.registry.topic(TOPIC)
    numbers = iter(range(number))
    while part := list(itertools.islice(numbers, _TOGETHER)):
        ids = [str(uuid.uuid4()) for _ in part]
        center.runner.run_all(
            [
                # Spread over the time in no order, as tasks of many producers are.
                center.commands.put(
                    topic,
                    PutRequest(
                        id, body, delay_us=FIRST * 1_000_000 + (n * 7_919_777_777) % _SPAN_US
                    ),
                )
                for n, id in zip(part, ids, strict=True)
            ]
        )
