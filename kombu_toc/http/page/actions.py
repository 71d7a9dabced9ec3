"""What can be done to messages: each act with what it needs and what is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...model.results import Cancelled, Found
from .reading import DIED, READY, SCHEDULED, PageExtras
from .selection import ALL_WAITING, ANY


class Act(NamedTuple):
    """Something that is done to messages.

    role: that a token needs
    states: of the messages that it can be done to
    done: of what was done
    asks: whether it is asked if it is meant: it cannot be taken back
    """

    name: str
    title: str
    role: str
    states: tuple[str, ...]
    done: str
    asks: bool

    def could(self, state: str) -> bool:
        """Whether it can be done to messages of a state that is asked for."""
        if state == ALL_WAITING:
            return bool({SCHEDULED, READY} & set(self.states))
        return state == ANY or state in self.states


ACTS = {
    one.name: one
    for one in (
        Act("cancel", "Cancel", "write", (SCHEDULED, READY), "cancelled", True),
        Act("run", "Run now", "write", (SCHEDULED,), "made due", False),
        Act("reschedule", "Reschedule", "write", (SCHEDULED, READY), "rescheduled", False),
        Act("requeue", "Requeue", "operate", (DIED,), "requeued", False),
        Act("purge", "Delete", "operate", (DIED,), "deleted", True),
    )
}


class Done(NamedTuple):
    """What became of messages.

    late: how many were gone, or in another state by then
    skipped: the schedules whose next firing was among those that are cancelled
    """

    number: int
    late: int
    skipped: tuple[str, ...] = ()


class Actions:
    """Does it.

    center: what cancels and moves messages, so that the task library knows
    """

    def __init__(self, center: Any, extras: PageExtras) -> None:
        self._center = center
        self._extras = extras

    async def run(self, act: str, found: Sequence[Found], at: float | None = None) -> Done:
        """Do something to messages that were found a moment ago.

        at: the new time of those that are rescheduled, seconds since the epoch
        """
        if not found:
            return Done(0, 0)
        if act == "cancel":
            cancelled: list[Cancelled] = await self._center.cancel(found, dead=False)
            deleted = [one for one in cancelled if one.deleted]
            if deleted:
                await self._extras.cancelled(deleted)
            skipped = tuple(one.schedule for one in deleted if one.schedule)
            return Done(len(deleted), len(found) - len(deleted), skipped)
        if act in ("run", "reschedule"):
            moved = await self._center.reschedule(found, at=at if act == "reschedule" else None)
            number = sum(one.moved for one in moved)
            return Done(number, len(found) - number)
        # Just these: another one of the same id may have died meanwhile.
        these = {(one.id, one.time_us, one.body) for one in found}
        ids = sorted({one.id for one in found})
        method = self._center.dead.requeue if act == "requeue" else self._center.dead.purge
        number = await method(
            found[0].topic, ids=ids, where=lambda one: (one.id, one.time_us, one.body) in these
        )
        return Done(number, max(len(found) - number, 0))


def narrowed(act: Act, state: str) -> str:
    """Of a state that is asked for, that to which an act can be done."""
    if state not in (ALL_WAITING, ANY):
        return state
    return ALL_WAITING if set(act.states) == {SCHEDULED, READY} else act.states[0]
