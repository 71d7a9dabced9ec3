"""Holds back what was fetched until somebody has said whether it has ended already.

Only of topics that are declared with ``guard``. Who is asked answers from a thread of its own, in
bounded time: what it does not say in time is delivered, for a message is delivered at least once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..model.results import Delivery

if TYPE_CHECKING:
    from typing import TypeAlias

    from ..center.center import TimeoutCenter
    from .loop import Loop
    from .state import ConsumerState, Entry

    #: What is known of those that have ended, by their places; None if nothing is.
    Ended: TypeAlias = Mapping[int, Any] | None
    Answer: TypeAlias = Callable[["Ended"], None]

    #: Told a consumer, what it may have, and what has ended.
    OnJudged: TypeAlias = Callable[["ConsumerState", list["Entry"], list[Delivery]], None]


class Guard(Protocol):
    """Knows what has ended.

    patience: seconds for which an answer is waited for
    """

    patience: float

    def apart(self, deliveries: Sequence[Delivery]) -> Sequence[Sequence[int]]:
        """The places of those that are asked about together: nobody waits for others."""

    def ask(self, deliveries: Sequence[Delivery], answer: Answer) -> bool:
        """Ask which of these, which belong together, are not to be run again. Returns whether
        there will be an answer, by a call from any thread; if not, nobody can be asked for now."""

    def held_back(self, topic: str, known: Sequence[Any]) -> None:
        """These were not delivered: of each, what was answered."""


class _Asked(NamedTuple):
    state: ConsumerState
    topic: str
    entries: list[Entry]
    until: float  #: monotonic seconds


@dataclass(eq=False)
class Guarding:
    """What a poller has asked about. Used by its loop, but for what says otherwise.

    on_judged: told what comes of it
    """

    _guard: Guard
    _center: TimeoutCenter
    _loop: Loop
    _on_judged: OnJudged

    def __post_init__(self) -> None:
        self._numbers = count()
        #: in the order in which they are waited for
        self._asked: dict[int, _Asked] = {}
        self._answers: deque[tuple[int, Ended]] = deque()

    def hold(self, state: ConsumerState, topic: str, entries: list[Entry]) -> list[Entry]:
        """Hold back what was fetched, if it is to be asked about; return the others."""
        known = self._center.registry.known(topic)
        if known is None or not known.declaration.guard or not entries:
            return entries
        others: list[Entry] = []
        until = self._loop.now() + self._guard.patience
        for places in self._guard.apart([entry[3] for entry in entries]):
            some = [entries[place] for place in places]
            number = next(self._numbers)
            self._asked[number] = _Asked(state, topic, some, until)
            if not self._guard.ask([entry[3] for entry in some], partial(self._answer, number)):
                del self._asked[number]
                others += some
        self._center.context.counts(known).unguarded += len(others)
        return others

    def _answer(self, number: int, ended: Ended) -> None:
        """Somebody has answered; any thread may call it."""
        self._answers.append((number, ended))
        self._loop.nudge()

    def settle(self) -> None:
        """Hand on what was answered, and what has waited for too long."""
        while self._answers:
            number, ended = self._answers.popleft()
            asked = self._asked.pop(number, None)
            if asked is not None:
                self._judge(asked, ended)
        while self._asked:
            number, asked = next(iter(self._asked.items()))
            if self._loop.now() < asked.until:
                return
            if self._asked.pop(number, None) is not None:
                self._judge(asked, None)

    def _judge(self, asked: _Asked, ended: Ended) -> None:
        counts = self._center.context.counts(self._center.registry.resolved(asked.topic))
        if ended is None:
            counts.unguarded += len(asked.entries)
        elif ended:
            counts.guarded += len(ended)
            self._guard.held_back(asked.topic, list(ended.values()))
        ended = ended or {}
        passed = [one for place, one in enumerate(asked.entries) if place not in ended]
        self._on_judged(asked.state, passed, [asked.entries[place][3] for place in sorted(ended)])

    # -- what is not waited for any more

    def take(self, state: ConsumerState, topic: str) -> list[Delivery]:
        """Take back what is held for a consumer that takes no more of a topic."""
        taken: list[Delivery] = []
        for number, asked in list(self._asked.items()):
            if asked.state is state and asked.topic == topic:
                del self._asked[number]
                taken += [entry[3] for entry in asked.entries]
        return taken

    def take_all(self) -> list[Delivery]:
        """Take everything, from another thread, while the loop stands still."""
        taken: list[Delivery] = []
        for number in list(self._asked):
            asked = self._asked.pop(number, None)
            if asked is not None:
                taken += [entry[3] for entry in asked.entries]
        return taken
