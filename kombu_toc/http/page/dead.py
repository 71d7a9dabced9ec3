"""Dead letters of all queues, grouped by why they died, by task and by error."""

from __future__ import annotations

import time
from typing import Any

from .actions import ACTS
from .dead_letter_groups import LOOKED, LOOKED_IN_ALL
from .render import Ask, View
from .tools import Tools

#: Milliseconds after which they are looked at again.
EVERY = 5_000

#: Queues that are shown, those with the most dead letters.
QUEUES = 50


async def dead(tools: Tools, ask: Ask) -> View:
    """Why messages were given up on."""
    chosen = ask.query.get("queue", "")
    snapshot = await tools.snapshots.read("hour")
    rows = [
        row
        for row in snapshot.rows
        if row.counts.dead and ask.visitor.may("read", row.queue) and chosen in ("", row.queue)
    ]
    now_us = await tools.now_us()
    began = time.monotonic()
    acts = [ACTS[name] for name in ("requeue", "purge")]
    queues: list[Any] = []
    looked = 0
    for row in sorted(rows, key=lambda row: -row.counts.dead):
        most = min(LOOKED, LOOKED_IN_ALL - looked)
        if most <= 0 or len(queues) >= QUEUES:
            break
        seen = await tools.dead_letters.look(row.queue, row.counts.dead, most, now_us)
        looked += seen.looked
        queues.append((row, seen, [act for act in acts if ask.visitor.may(act.role, row.queue)]))
    return View(
        f"Dead letters of {chosen}" if chosen else "Dead letters",
        "dead",
        {"queues": queues, "left": len(rows) - len(queues)},
        "dead",
        # What takes long is not looked at again all the time.
        max(EVERY, round((time.monotonic() - began) * 10_000)),
        now_us=now_us,
    )
