"""What a connection may cost while no request of it is being dealt with, by a simulated clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kombu_toc.http import serving as guard
from kombu_toc.http.request import current


class Loop:
    """A loop whose time is set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.later: list[tuple[float, Any]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Any) -> Any:
        self.later.append((self.now + seconds, call))

        class Handle:
            def cancel(self) -> None:
                pass

        return Handle()

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [one for one in self.later if one[0] <= end]:
            first = min(due, key=lambda one: one[0])
            self.later.remove(first)
            self.now = first[0]
            first[1]()
        self.now = end


class Transport:
    def __init__(self) -> None:
        self.buffered = 0
        self.aborted = self.closed = False
        self.written = b""

    def set_write_buffer_limits(self, high: int) -> None:
        assert high == 0

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed or self.aborted


class Inner(asyncio.Protocol):
    def __init__(self) -> None:
        self.received = b""

    def data_received(self, data: bytes) -> None:
        assert current() is not None  # the task of a request has it
        self.received += data


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    made = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: made)
    yield made


def connected() -> tuple[guard.Guarded, Transport, Inner]:
    inner, transport = Inner(), Transport()
    made = guard.guarded(lambda: inner)()
    assert isinstance(made, guard.Guarded)
    made.connection_made(transport)  # type: ignore[arg-type]
    return made, transport, inner


def test_headers_that_do_not_end_are_cut_off_whatever_comes(loop: Loop) -> None:
    made, transport, inner = connected()
    for _ in range(8):
        made.data_received(b"x")
        loop.advance(1)
    assert not transport.aborted
    loop.advance(5)
    assert transport.aborted
    assert inner.received == b"x" * 8


def test_a_request_may_take_as_long_as_it_takes(loop: Loop) -> None:
    made, transport, _ = connected()
    made.data_received(b"GET")
    made.begin()
    loop.advance(600)
    assert not transport.aborted
    made.end()
    loop.advance(59)
    assert not transport.closed
    loop.advance(5)
    assert transport.closed and not transport.aborted


def test_the_headers_of_a_later_request_must_be_there_as_soon(loop: Loop) -> None:
    made, transport, _ = connected()
    made.begin()
    made.end()
    loop.advance(50)
    for _ in range(8):
        made.data_received(b"x")
        loop.advance(1)
    assert not transport.closed and not transport.aborted
    made.data_received(b"x")
    loop.advance(5)
    assert transport.aborted


@pytest.mark.parametrize("busy", [True, False])
def test_an_answer_that_nobody_reads_is_dropped_whatever_else_goes_on(
    loop: Loop, busy: bool
) -> None:
    made, transport, _ = connected()
    made.begin()
    transport.buffered = 1000
    if not busy:
        made.end()
    loop.advance(28)
    assert not transport.aborted
    loop.advance(8)
    assert transport.aborted


def test_what_comes_during_a_request_is_bounded(loop: Loop) -> None:
    made, transport, inner = connected()
    made.begin()
    for _ in range(guard.MOST_OF_BODY >> 20):
        made.data_received(b"x" * (1 << 20))
    assert not transport.aborted
    made.data_received(b"x")
    assert transport.aborted
    assert len(inner.received) == guard.MOST_OF_BODY


def test_what_comes_while_a_request_waits_is_of_the_next_one(loop: Loop) -> None:
    made, transport, inner = connected()
    made.data_received(b"first")
    made.begin()
    made.hold()
    made.data_received(b"sec")
    made.data_received(b"ond")
    assert inner.received == b"first"
    made.end()
    assert inner.received == b"firstsecond"
    made.begin()
    made.hold()
    for _ in range(3):
        made.data_received(b"x" * 30_000)
    assert transport.aborted
    made.end()
    assert inner.received == b"firstsecond"


def test_whoever_waits_learns_that_the_connection_is_lost(loop: Loop) -> None:
    made, _, _ = connected()
    made.begin()
    made.begin()
    assert not made.lost.is_set()
    made.connection_lost(None)
    assert made.lost.is_set()


def test_an_answer_that_is_read_slowly_may_be_read_and_one_that_is_not_is_dropped(
    loop: Loop,
) -> None:
    made, transport, _ = connected()
    made.data_received(b"GET")
    made.begin()
    transport.buffered = 1_000_000
    made.end()
    for _ in range(40):
        loop.advance(3)
        transport.buffered -= 1000  # it is being read
    assert not transport.aborted
    loop.advance(40)
    assert transport.aborted


def test_headers_are_bounded_and_bodies_are_left_to_the_application(loop: Loop) -> None:
    made, transport, inner = connected()
    made.data_received(b"x" * 60_000)
    made.begin()
    for _ in range(100):
        made.data_received(b"y" * 60_000)
    made.end()
    assert not transport.closed
    for _ in range(3):
        made.data_received(b"z" * 60_000)
    assert transport.closed
    assert transport.written.startswith(b"HTTP/1.1 431 ")
    assert b"urn:celery-toc:headers-too-large" in transport.written
    assert inner.received.count(b"z") == 120_000
