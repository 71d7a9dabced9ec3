"""What the views work with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from ...aio.center import AsyncTimeoutCenter
from ...errors import LibraryError, PartialError
from ...model.failures import FailureGroup
from ...model.library import Record
from .. import tokens
from ..fields import Problem
from ..library import FarAhead
from ..request import Answer
from ..tokens import Audit, Mask
from .jobs import ACTS, FAILED_ACTS, FAILED_TASK, Act, Actions, Jobs
from .reading import PageExtras, Reader
from .render import Ask, View
from .sessions import Sessions
from .snapshots import DeadLetterGroups, Looks, SearchCache, SnapshotCache

T = TypeVar("T")


class Tools:
    """One of everything, for one page.

    api: the application
    extras: what it can show beside what every center has
    mask: what is not shown
    """

    def __init__(self, api: Any, extras: PageExtras, mask: Mask) -> None:
        self.api, self.mask = api, mask
        self.extras: Any = extras
        self.audit: Audit = api.audit
        center: AsyncTimeoutCenter = api.center
        self.center = center
        self.reader = reader = Reader(mask, extras)
        self.snapshots = SnapshotCache(center)
        self.far = FarAhead(api)
        self.sessions = Sessions(center, api.tokens, api.names)
        self.actions = Actions(api.acting, extras)
        self.jobs = Jobs(center, reader, self.actions, self.audit, self.forget)
        self.now_us = self.jobs.now_us
        self.dead_letters = DeadLetterGroups(center, reader)
        self.searches = SearchCache(center, reader)
        self._failures: Looks[tuple[Sequence[FailureGroup], str]] = Looks()

    def forget(self, queue: str) -> None:
        """Messages of a queue were changed here: whoever has done it is to see it."""
        self.dead_letters.forget(queue)
        self.searches.forget(queue)
        self._failures.forget(queue)

    async def aclose(self) -> None:
        """End what goes on by itself."""
        for one in (self.jobs, self.searches, self.snapshots, self.far, self.extras):
            await one.aclose()

    async def failure_groups(self) -> tuple[Sequence[FailureGroup], str]:
        """The groups of all failed tasks, as of a moment ago, as :meth:`as_far` gives them."""
        groups = self.center.failures.groups
        return await self._failures.read(("",), lambda: self.as_far(groups()))

    @staticmethod
    async def as_far(asked: Awaitable[T]) -> tuple[T, str]:
        """What was found, and what has not answered."""
        try:
            return await asked, ""
        except PartialError as exc:
            return exc.results, "; ".join(map(str, exc.missing))

    async def recorded(self, ask: Ask, method: str, **which: Any) -> tuple[Sequence[Record], str]:
        """What the task library has, as far as the visitor may look at it; and why it has not
        answered.

        method: ``history`` or ``find``
        """
        if not self.api.has_library or not ask.visitor.may("read", None):
            return [], ""
        try:
            found = await self.api.ask_library(method, **which)
        except LibraryError as exc:
            return [], f"the task library ({exc})"
        return getattr(found, "records", found), ""

    async def queue_of(self, ask: Ask, role: str, queue: str) -> str:
        """A queue for which this is allowed. Raises Problem for any other."""
        check_role(ask, role, queue)
        known: str = await self.api.known_queue(queue)
        return known


#: Makes a view, or answers otherwise.
Viewing = Callable[[Tools, Ask], Awaitable[View | Answer]]


def check_role(ask: Ask, role: str, queue: str | None) -> None:
    """Raises Problem if this is not allowed."""
    tokens.check_role(ask.visitor.token, role, queue)


def acts_of(ask: Ask, queue: str, state: str) -> list[Act]:
    """What a visitor may do to messages of a queue that are in a state, or to failed tasks."""
    every = FAILED_ACTS if state == FAILED_TASK else ACTS
    return [act for act in every.values() if act.could(state) and ask.visitor.may(act.role, queue)]


def check_any(ask: Ask, role: str) -> None:
    """Raises Problem for who may do this for no queue."""
    if role not in ask.visitor.token.roles:
        raise Problem("forbidden", f"this needs a token with the role {role}")
