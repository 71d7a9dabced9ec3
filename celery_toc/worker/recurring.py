"""A worker carries schedules on: who is delivered a firing puts the next one, before its task
begins.

What is to be done is decided by :mod:`celery_toc.schedules.state`, of what the center knows. If
this process dies before that is done, the firing comes back to another one. If it is done and the
task has not begun, the firing comes back too, and is no longer the next one: it is run, and nothing
is put.
"""

from __future__ import annotations

from typing import Any

from celery.utils.log import get_logger

import kombu_toc

from ..schedules import state
from ..schedules.schedules import run_step
from ..schedules.state import DROP, RUN, WAIT, Record

logger = get_logger(__name__)

#: How often it is tried again because somebody else has changed the schedule meanwhile.
ATTEMPTS = 20

#: Microseconds after which a firing that waits for its predecessor looks again.
LOOK_AGAIN_US = 1_000_000


def take(recurring: Any, delivery: kombu_toc.Delivery, name: str) -> tuple[str, int]:
    """Take a firing: put the next one, and say what is to be done with this one, and the server's
    clock in microseconds."""
    id = delivery.id
    for _ in range(ATTEMPTS):
        now, found = recurring.read(delivery.topic, [name], template=True, fired=True)
        if not found:  # deleted since
            return RUN, now
        one = found[0]
        noted = {
            line_id: said[1] for line_id, said in map(state.read_line, one.fired) if line_id == id
        }
        running = any(other != id for other in one.in_flight)
        verdict, step = state.take(
            name, Record.of_text(one.record), id, now, running, noted.get(id)
        )
        if step is None or run_step(recurring, delivery.topic, name, one, step, replaces=True).done:
            return verdict, now
    return RUN, now


class Firings:
    """What a worker's channel asks before it delivers a firing."""

    def __init__(self, channel: kombu_toc.Channel) -> None:
        self._channel = channel

    def __call__(self, delivery: kombu_toc.Delivery, name: str) -> bool:
        channel = self._channel
        try:
            verdict, now = take(channel.center.recurring, delivery, name)
        except Exception as exc:
            # The task is due, whatever is wrong with its schedule. The process that keeps the
            # queues up finds that nothing follows, and puts that.
            logger.error("schedule %s: cannot put what follows %s: %r", name, delivery.id, exc)
            return True
        if verdict == DROP:
            logger.info("schedule %s: %s is not run", name, delivery.id)
            channel.poller.ack(delivery)
        elif verdict == WAIT:
            channel.poller.release([delivery.due_at(now + LOOK_AGAIN_US)])
        return verdict == RUN
