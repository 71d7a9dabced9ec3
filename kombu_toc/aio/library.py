"""The task library of what runs in an event loop: databases are asked in threads.

The library has a center of its own, whose connections wait; it is used in threads, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from ..center.admin_commands import Position
from ..center.calls import PutRequest
from ..center.center import TimeoutCenter
from ..client.options import Settings
from ..client.urls import Address
from ..library import outbox
from ..library.opening import attach
from ..model.results import Delivery, Found
from ..model.topic import Topic
from .waiting import wait_for

R = TypeVar("R")

#: What one turn of a thread reads of what is far ahead.
PAGE = 200

#: What asks no database.
_AT_ONCE = frozenset(("note", "gather", "consumes", "scheduled"))


class InThreads:
    """Something whose methods wait for databases; each is called in a thread, and awaited where
    :func:`.waiting.run` runs the caller."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found) or name in _AT_ONCE or name.startswith("_"):
            return found
        return partial(_in_thread, found)


class FarInThreads(InThreads):
    """What is far ahead: see :class:`.center.recording.Far`."""

    def read(self, *args: Any) -> Iterator[tuple[Found, Position]]:
        found = self._inner.read(*args)
        while page := _in_thread(lambda: list(islice(found, PAGE))):
            yield from page


class RecorderInThreads(InThreads):
    """The recorder of a process. What it writes over a connection of the caller's, it writes in the
    caller's thread."""

    def write_with(self, connection: Any, *args: Any) -> None:
        _with(connection, self._inner, lambda given: self._inner.write_with(given, *args))


class LibraryInThreads(InThreads):
    """What a center tells its library: see :class:`.center.recording.Recorder`."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.recorder = RecorderInThreads(inner.recorder)
        self.far = FarInThreads(inner.far)
        self.library = inner.library
        self.server_time = InThreads(inner.server_time)

    def keep_far(self, topic: Topic, requests: Sequence[PutRequest]) -> set[int]:
        connection = outbox.current()
        if connection is None:
            return _in_thread(self._inner.keep_far, topic, requests)

        def keep(given: Any) -> set[int]:
            with outbox.outbox(given):
                kept: set[int] = self._inner.keep_far(topic, requests)
            return kept

        return _with(connection, self._inner.recorder, keep)

    def acked(self, messages: Sequence[Delivery]) -> None:
        self._told(self._inner.acked, messages)

    def released(self, messages: Sequence[Delivery]) -> None:
        self._told(self._inner.released, messages)

    def extended(self, messages: Sequence[Delivery]) -> None:
        self._told(self._inner.extended, messages)

    def rejected(self, message: Delivery, **how: Any) -> None:
        self._told(partial(self._inner.rejected, **how), message)

    @staticmethod
    def _told(function: Callable[[Any], None], said: Any) -> None:
        """Say what has become of messages; only receipts are looked up in databases."""
        given = [said] if isinstance(said, Delivery) else said
        if all(one.body for one in given):
            function(said)
        else:
            _in_thread(function, said)


def attach_in_threads(
    center: TimeoutCenter,
    settings: Settings,
    address: Address,
    another: Callable[[], TimeoutCenter],
) -> None:
    """Have a center of an event loop use the library that the settings name, if they do.

    another: makes a center whose connections wait
    """
    if not settings.toc_library:
        return
    opened = attach(another(), settings, address, another)
    assert opened is not None
    opened.topic_of = center.registry.known
    center.recorder = LibraryInThreads(opened)


def _with(connection: Any, recorder: Any, write: Callable[[Any], R]) -> R:
    """Write over a connection of the caller's, in the caller's thread.

    write: given the connection, or what a connection of SQLAlchemy's asyncio extension wraps
    """
    _in_thread(recorder.ready.as_far_as_there)  # or this thread would ask
    if not outbox.is_awaited(connection):
        return write(connection)
    written: R = wait_for(connection.run_sync(write))
    return written


def _in_thread(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Call something in a thread, where waiting does not block the loop."""
    return wait_for(asyncio.to_thread(function, *args, **kwargs))
