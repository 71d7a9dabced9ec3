"""Nodes of a Cluster that could not be reached, and when each is tried again.

Nothing here asks a server; times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

#: Seconds after which a node is tried again that could not be reached: doubled with each time.
FIRST_REST = 0.5
LONGEST_REST = 10.0

Node = TypeVar("Node")


class RestingNodes(Generic[Node]):
    """Each node that rests, until when, and for how long."""

    def __init__(self) -> None:
        self._resting: dict[Node, tuple[float, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._resting)

    def rests(self, node: Node, now: float) -> bool:
        """Whether nothing is to be sent to it now."""
        return self._resting.get(node, (0.0, 0.0))[0] > now

    def lost(self, node: Node, now: float) -> bool:
        """It could not be reached, once more. Returns whether that is new."""
        known = self._resting.get(node)
        rest = min(2 * known[1], LONGEST_REST) if known else FIRST_REST
        self._resting[node] = (now + rest, rest)
        return known is None

    def reached(self, node: Node) -> bool:
        """It can be reached. Returns whether that is new."""
        return self._resting.pop(node, None) is not None

    def keep(self, nodes: Collection[Node]) -> list[Node]:
        """Only these are nodes still. Returns the others that rested: they are forgotten."""
        gone = [node for node in self._resting if node not in nodes]
        for node in gone:
            del self._resting[node]
        return gone
