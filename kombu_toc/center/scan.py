"""Reads messages in the order of their times, page by page."""

from __future__ import annotations

import base64
import heapq
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from ..errors import LibraryError
from ..model.keys import Slot
from ..model.limits import MAX_SLOTS
from ..model.results import STATES, WAITING, Found, Page
from ..model.topic import Topic
from ..scripts.call import microseconds
from .admin_commands import AdminCommands, Position, SlotPage
from .context import Context
from .lookup import CALLS_TOGETHER
from .recording import Far
from .registry import Registry
from .runner import Away, Runner

#: Messages that one call of scan reads from a slot, at most.
SCAN_STEP = 200

#: No score is higher: it is a whole number in a double.
_HIGHEST = 2**53

#: What is far ahead of a topic is counted up to so many in each table of the library.
MOST_FAR = 100_000


class Scan:
    """Reads messages by state and time. `topic` is the name of the topic to read; without it, all
    declared topics are read."""

    def __init__(
        self, runner: Runner, registry: Registry, context: Context, commands: AdminCommands
    ) -> None:
        self._runner = runner
        self._registry = registry
        self._commands = commands
        self._context = context
        #: what is too far ahead to be in Redis, if there is a task library
        self.far: Far | None = None

    def scan(
        self,
        topic: str | None = None,
        *,
        state: str | Collection[str] | None = None,
        since: float | None = None,
        until: float | None = None,
        where: Callable[[Found], Any] | None = None,
        limit: int = 100,
        after: str | None = None,
        size: int | None = None,
    ) -> Page:
        """Read messages in the order of their times, of one topic or of all together.

        state: WAITING, IN_FLIGHT or DEAD, or several of these; all unless given
        since, until: seconds since the epoch; only messages whose time (when they are due, when
            their lease ends, when they died) is not before `since`, and before `until`
        where: only messages for which this is true
        limit: how many at most
        after: where to go on: `after` of the page before this one
        size: bytes of bodies from which on the page ends; any number unless given

        Reads in small steps that each take the server O(log n). A message that is moved meanwhile
        may be seen twice, or not at all; one that stays is seen once. Raises ValueError for an
        unknown state, and for an `after` that no page has; PartialError, with the page of the
        others, while nodes of a Cluster are away.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit!r}")
        step = SCAN_STEP if where else min(SCAN_STEP, limit + 1)
        messages: list[Found] = []
        held = 0
        cursor = _read_cursor(after)
        away = Away()
        for found, position in self.read(
            topic, state, since=since, until=until, cursor=cursor, step=step, away=away
        ):
            if len(messages) == limit or (size is not None and held >= size):
                return away.checked(Page(messages, _write_cursor(cursor)))
            cursor = position
            if where is None or where(found):
                messages.append(found)
                held += len(found.body)
        return away.checked(Page(messages, None))

    def count(
        self,
        topic: str | None = None,
        *,
        state: str | Collection[str] | None = None,
        since: float | None = None,
        until: float | None = None,
        where: Callable[[Found], Any] | None = None,
    ) -> int:
        """How many messages :meth:`scan` would read, page by page: it looks at each. Raises
        PartialError as that does, with the number of the others."""
        away = Away()
        far = where is not None or since is not None or until is not None
        found = self.read(
            topic, state, since=since, until=until, bodies=where is not None, far=far, away=away
        )
        number = sum(1 for one, _ in found if where is None or where(one))
        if not far and self.far is not None and WAITING in _checked_states(state):
            number += sum(self.far.count(one.name) for one in self._registry.far(topic))
        return away.checked(number)

    def count_far(self, topic: str | None = None, *, limit: int = MOST_FAR) -> dict[str, int]:
        """How many messages are in the task library only, because they are further ahead than the
        horizon (``x-horizon``) of their topic. The other counts are of what is in Redis.

        topic: all declared topics unless given
        limit: of each topic, so many are counted in each table of the library at most

        Returns the number of each topic with a horizon. Raises LibraryError, also if there is such
        a topic and this center has no library.
        """
        topics = self._registry.far(topic)
        if topics and self.far is None:
            raise LibraryError(
                f"topic {topics[0].name!r} has a horizon, and this process no task library: set "
                "toc_library"
            )
        return {one.name: self.far.count(one.name, limit) for one in topics if self.far}

    def away(self) -> Away:
        """What :meth:`read` notes the slots in that nobody answers for."""
        return Away()

    def read(
        self,
        topic: str | None,
        state: str | Collection[str] | None,
        *,
        since: float | None = None,
        until: float | None = None,
        cursor: Position | None = None,
        step: int = SCAN_STEP,
        bodies: bool = True,
        far: bool = True,
        away: Away | None = None,
    ) -> Iterator[tuple[Found, Position]]:
        """Each message, and its position; as :meth:`scan`.

        cursor: read what comes after it
        step: how many messages are read at first, of all slots together
        bodies: read their bodies, too
        far: also what is too far ahead to be in Redis
        away: notes the slots of nodes that are away, and the others are read; without it, such a
            node is an error
        """
        topics, states = self._registry.select(topic), _checked_states(state)
        since_us, until_us = microseconds(since), microseconds(until)
        ahead: list[Iterator[tuple[Found, Position]]] = []
        if far and self.far is not None and WAITING in states:
            for one in topics:
                if one.declaration.far:
                    score, id, *_ = cursor.within(one.name) if cursor else (0, b"")
                    ahead.append(self.far.read(one, (score, id), since_us, until_us, step))
        return self.read_topics(
            topics,
            states,
            since_us=since_us,
            until_us=until_us,
            cursor=cursor,
            step=step,
            bodies=bodies,
            ahead=ahead,
            away=away,
        )

    def read_topics(
        self,
        topics: Sequence[Topic],
        states: Sequence[str],
        *,
        since_us: int | None = None,
        until_us: int | None = None,
        cursor: Position | None = None,
        step: int = SCAN_STEP,
        bodies: bool = True,
        slots: Collection[int] | None = None,
        ahead: Sequence[Iterator[tuple[Found, Position]]] = (),
        away: Away | None = None,
    ) -> Iterator[tuple[Found, Position]]:
        """As :meth:`read`, of these topics.

        since_us, until_us: bounds of their times, microseconds since the epoch
        slots: only these; all unless given
        ahead: what is to be read beside it
        """
        places = [
            (one, slot)
            for one in topics
            for slot in one.all_slots()
            if slots is None or slot.number in slots
        ]
        span = len(places)
        # At first about twice as many as are asked for, of all slots together; more of a slot that
        # is read on.
        step = max(min(step, 2 * step // max(span, 1) + (8 if span <= 64 else 1)), 1)
        call = partial(
            self._commands.scan,
            since_us=since_us,
            until_us=until_us,
            bodies=bodies,
            budget=self._context.pop_bytes // max(span, 1),  # a page of each slot is held at a time
        )
        run = self._runner.run_all
        if away is not None:
            run = partial(self._runner.run_there, away=away)
        calls = [
            call(one, slot, states, cursor and cursor.within(one.name), step)
            for one, slot in places
        ]
        pages: list[SlotPage | None] = []
        for at in range(0, len(calls), CALLS_TOGETHER):
            pages += run(calls[at : at + CALLS_TOGETHER])

        def entries(
            one: Topic, slot: Slot, page: SlotPage | None
        ) -> Iterator[tuple[Found, Position]]:
            wanted = step
            while page is not None:
                yield from page
                if len(page) < wanted and not page.cut:
                    return
                last = page[-1][1]
                wanted = min(4 * wanted, SCAN_STEP)
                begin = (last.score, last.id, last.slot, last.kind)
                [page] = run([call(one, slot, states, begin, wanted)])

        for found, position in heapq.merge(
            *(entries(*each, page) for each, page in zip(places, pages, strict=True)),
            *ahead,
            key=lambda entry: entry[1],
        ):
            if since_us is not None and found.time_us < since_us:
                continue
            if until_us is not None and found.time_us >= until_us:
                continue
            yield found, position


def _write_cursor(position: Position | None) -> str | None:
    if position is None:
        return None
    score, topic, id, slot, kind = position
    fields = [topic, score, base64.b64encode(id).decode(), slot, kind]
    return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()


def _read_cursor(after: str | None) -> Position | None:
    if after is None:
        return None
    try:
        topic, score, id, slot, kind = json.loads(base64.urlsafe_b64decode(after))
        position = Position(score, topic, base64.b64decode(id, validate=True), slot, kind)
    except (ValueError, TypeError, RecursionError):
        pass
    else:
        # Anybody may have made it: no other number reaches the server.
        numbers = ((score, _HIGHEST), (slot, MAX_SLOTS), (kind, MAX_SLOTS))
        if isinstance(topic, str) and all(
            type(one) is int and -1 <= one <= most for one, most in numbers
        ):
            return position
    raise ValueError(f"no page goes on after {after!r:.100}") from None


def _checked_states(state: str | Collection[str] | None) -> Sequence[str]:
    if state is None:
        return tuple(STATES.values())
    states = (state,) if isinstance(state, str) else tuple(state)
    for one in states:
        if one not in STATES.values():
            raise ValueError(f"{one!r} is no state; there are {', '.join(STATES.values())}")
    return states
