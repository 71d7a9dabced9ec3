"""What a consumer reads again now and then: which topics are paused, and how its own are declared.

So a pause, and whatever is changed of a topic, is known within five seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..scripts.call import texts

if TYPE_CHECKING:
    from ..center.center import TimeoutCenter
    from .consumer_state import ConsumerState
    from .wiring import Connection

#: Seconds after which it is read again; an idle consumer looks every second whether it is time to.
REREAD = 4.0


class Rereading:
    """Reads it along with what is sent anyway.

    states: the consumers
    on_resumed: told the topics that are paused no more
    on_lost: called when a topic is gone that is consumed here
    """

    def __init__(
        self,
        center: TimeoutCenter,
        work: Connection,
        states: Mapping[Any, ConsumerState],
        on_resumed: Callable[[set[str]], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._center = center
        self._work = work
        self._states = states
        self._on_resumed = on_resumed
        self._on_lost = on_lost
        self._paused: set[str] = set()
        self._at = 0.0
        #: the limits of topics as they were last read
        self._gates: dict[str, str] = {}

    def begin(self, state: ConsumerState, now: float) -> None:
        """A topic is consumed from now on. Waits for the server, if it was not asked lately."""
        if now >= self._at:
            self._at = now + REREAD
            self._paused = self._center.paused()
        state.pending.pause(self._paused)

    def read(self, now: float) -> None:
        """Read it, if it is time to; now: monotonic seconds."""
        if now < self._at or not self._states:
            return
        self._at = now + REREAD
        keys = self._center.keys
        names = list({name: None for s in self._states.values() for name in s.pending.topics})
        declarations = (("HMGET", keys.topics, *names), partial(self._learn, names))
        self._work.send([(("SMEMBERS", keys.paused), self._pause), declarations])

    def _pause(self, names: Iterable[bytes]) -> None:
        self._paused = set(texts(names))
        resumed: set[str] = set()
        for state in self._states.values():
            resumed |= state.pending.pause(self._paused)
        if resumed:
            self._on_resumed(resumed)

    def _learn(self, names: list[str], raws: Iterable[bytes | None]) -> None:
        registry = self._center.registry
        for name, raw in zip(names, raws, strict=True):
            if raw is not None:
                topic = registry.learn(name, raw)
                if topic is not None:
                    self._compare(name, topic.declaration.gates)
            elif any(name in state.pending.topics for state in self._states.values()):
                # Deleted, or lost with the server's memory. What is put by who still remembers it
                # is found by id only if it is declared.
                known = registry.known(name)
                call = None if known is None else registry.declare_again_call(known)
                if call is not None:
                    self._work.send([(call, None)])
                    self._on_lost()

    def _compare(self, name: str, gates: str) -> None:
        """Look into a topic whose limits are others now: they may let something start."""
        before, self._gates[name] = self._gates.get(name, gates), gates
        if before != gates:
            for state in self._states.values():
                if name in state.pending.topics:
                    state.pending.look(name)
