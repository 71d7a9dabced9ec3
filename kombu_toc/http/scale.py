"""How much work a queue has, for an autoscaler."""

from __future__ import annotations

import asyncio
from typing import Any

from ..center.center import TimeoutCenter
from ..center.topics import MOST_FAR
from ..errors import LibraryError
from .fields import WHOLE, described, or_null, record
from .library import FAR_WITHIN
from .queues import WITHIN, counts_of
from .request import Answer, Operations, Request, answer

OPERATIONS = Operations()


@OPERATIONS.add(
    "GET",
    ("scale", "{queue}"),
    "Tell an autoscaler how much work there is",
    query={"within": WITHIN},
    returns=(
        "The value is ready and in flight, and what comes due.",
        record(
            "value ready inFlight due",
            value=described(WHOLE, "due and inFlight."),
            ready=WHOLE,
            inFlight=WHOLE,
            due=described(WHOLE, "What is ready, or comes due within so many seconds."),
            far=or_null(
                WHOLE,
                "Of a queue with a horizon: what of due is in the task library only; null: it "
                "cannot be asked.",
            ),
        ),
    ),
    about="For KEDA's metrics-api scaler. A queue that nobody has declared has no work.",
)
async def scale(api: Any, request: Request) -> Answer:
    """How much work there is, for KEDA: ready and in flight, and what comes due."""
    queue = request.segments[0]
    within = request.asked.get("within", 0.0)
    declared = await api.center.registry.declared(queue)
    if declared is None:  # nobody has put anything yet
        return answer({"value": 0, "ready": 0, "inFlight": 0, "due": 0})
    found = await counts_of(api, queue, within)
    due = max(found["due"], found["ready"])
    told: dict[str, int | None] = {"ready": found["ready"], "inFlight": found["inFlight"]}
    if declared.declaration.far:
        told["far"] = await _far(api, queue, within)
        due += told["far"] or 0
    return answer({"value": due + found["inFlight"], "due": due, **told})


async def _far(api: Any, queue: str, within: float) -> int | None:
    """How many messages come due that are in the task library only. None: it cannot be asked. Then
    nobody can put them into Redis either, and more pods would have no more to do."""

    def count(center: TimeoutCenter) -> int | None:
        if center.scans.far is None:
            return None
        seconds, us = center.client.time()
        until_us = seconds * 1_000_000 + us + int(within * 1_000_000)
        return center.scans.far.count(queue, MOST_FAR, until_us)

    try:
        found: int | None = await asyncio.wait_for(api.center.call(count), FAR_WITHIN)
    except (LibraryError, asyncio.TimeoutError):
        return None
    return found
