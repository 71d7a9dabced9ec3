"""Claims of announced times: what is listened for, and what becomes of what is heard."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .consumer_state import ConsumerState
    from .due_queue import Claim

#: Claims of one slot that a consumer holds, at most.
MAX_CLAIMS = 4


class WakeTopics:
    """The topics whose wake indexes a process blocks on."""

    def __init__(self) -> None:
        self._topics: dict[bytes, str] = {}
        self._turn = 0

    def __contains__(self, topic: object) -> bool:
        return topic in self._topics.values()

    def listen(
        self,
        topics: list[str],
        key_of: Callable[[str], str],
        passed_on: Callable[[str], list[str]] | None = None,
    ) -> list[str]:
        """The keys to block on. Another one comes first each time: what a server gives is of the
        first that has something.

        passed_on: of a topic, where others pass on what they leave to this process
        """
        self._turn = (self._turn + 1) % len(topics)
        topics = topics[self._turn :] + topics[: self._turn]
        keys = [key_of(topic) for topic in topics]
        if passed_on is not None:
            also = [(key, topic) for topic in topics for key in passed_on(topic)]
            keys = [*(key for key, _ in also), *keys]
            topics = [*(topic for _, topic in also), *topics]
        self._topics = {
            key.encode("utf-8", "surrogatepass"): topic
            for key, topic in zip(keys, topics, strict=True)
        }
        return keys

    def received(self, reply: Any) -> Claim | None:
        """What was claimed, by the reply to BZPOPMIN; None if it ended without."""
        topics, self._topics = self._topics, {}
        if not reply:
            return None
        slot, _, us = reply[1].decode().partition(":")
        return topics[reply[0]], int(slot), int(us)


def idle_topics(states: Iterable[ConsumerState]) -> list[str]:
    """The topics of which times are to be claimed: of consumers that could start something and
    have nothing else to ask for."""
    topics: list[str] = []
    for state in states:
        if state.pops_in_flight or state.pending.slots:
            continue
        free, room, _ = state.capacity()
        if free > 0 and room > 0:
            paused = state.pending.paused
            topics += [topic for topic in state.pending.topics if topic not in paused]
    return topics


def claimant(states: Iterable[ConsumerState], topic: str) -> ConsumerState | None:
    """Whose a claim is to be: of those that consume the topic, who can start most."""
    having = [state for state in states if topic in state.pending.topics]
    return max(having, key=lambda state: min(state.capacity()[:2])) if having else None


def by_topic(claims: Iterable[Claim]) -> dict[str, list[tuple[int, int]]]:
    """Claims by topic, each as a slot and a time."""
    found: dict[str, list[tuple[int, int]]] = {}
    for topic, slot, us in claims:
        found.setdefault(topic, []).append((slot, us))
    return found
