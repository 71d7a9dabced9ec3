"""What the page can show and do beside what every center has: an app of Celery knows more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...model.results import Cancelled, Found
from ..messages import Room
from ..tokens import Token
from .reading import Parts, read_parts


class WorkerRow(NamedTuple):
    """A worker, as it says itself.

    queues: which it consumes
    running, held: messages that it runs, and that it has fetched besides: id and name of a task
    free: how many more could start at once; None if that is not known
    """

    name: str
    queues: list[str]
    running: list[tuple[str, str]]
    held: list[tuple[str, str]]
    free: int | None
    paused: bool = False


class ScheduleRow(NamedTuple):
    """A schedule. Times are microseconds since the epoch, 0: none.

    rule: when it fires, for people
    state: ``active``, ``paused`` or ``ended``
    """

    name: str
    task: str
    queue: str
    rule: str
    zone: str
    state: str
    next_us: int
    last_us: int
    runs: int
    owner: str


class FiringRow(NamedTuple):
    """A firing of a schedule. Times are microseconds since the epoch, 0: none."""

    id: str
    planned_us: int
    started_us: int
    outcome: str
    reason: str


class PageExtras:
    """What a center knows by itself. An app's page has a class of its own."""

    #: whether there are schedules
    has_schedules = False
    #: whether workers can be asked what they hold
    has_workers = False

    def parts(self, found: Found, room: Room) -> Parts:
        """The parts of a message."""
        return read_parts(found, room)

    def parameters(self, task: str) -> Sequence[str] | None:
        """Names of the parameters of a task, in order; None if they are not known."""
        return None

    async def cancelled(self, cancelled: Sequence[Cancelled]) -> None:
        """Messages were deleted before they were run."""

    async def workers(self) -> list[WorkerRow] | None:
        """What workers hold, as far as they have said; None until the first have answered."""
        return None

    async def schedules(
        self, token: Token, limit: int, after: str
    ) -> tuple[list[ScheduleRow], str | None]:
        """A page of the schedules that a token may see, and where the next one begins. Raises
        Problem.

        after: where this one begins; empty: at the first one
        """
        return [], None

    async def schedule(self, name: str) -> tuple[ScheduleRow, list[FiringRow]]:
        """A schedule and its latest firings. Raises Problem if there is none."""
        raise NotImplementedError

    async def change_schedule(self, name: str, act: str) -> Any:
        """Pause, resume, skip or run a schedule. Raises Problem."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """End what goes on by itself."""
