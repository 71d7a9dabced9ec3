"""What cuts connections to a database that does not answer: there while something is watched."""

from __future__ import annotations

import socket
import threading
import time

from kombu_toc.library import shards
from kombu_toc.library.shards import Watchdog

from ..support.waiting import wait_until


def threads() -> int:
    return sum(thread.name == "toc-watchdog" for thread in threading.enumerate())


def until_there_are(number: int) -> None:
    wait_until(lambda: threads() == number, 10, threads)


def test_its_thread_ends_when_it_is_closed_and_begins_again() -> None:
    before = threads()
    dogs = [Watchdog(5.0) for _ in range(20)]
    one, other = socket.socketpair()
    with one, other:
        for _ in range(2):
            for dog in dogs:
                with dog.watching(one.fileno(), time.monotonic() + 60):
                    pass
            assert threads() == before + 20
            for dog in dogs:
                dog.close()
            until_there_are(before)


def test_its_thread_ends_when_nothing_is_watched_any_more(monkeypatch) -> None:
    monkeypatch.setattr(shards, "IDLE", 0.05)
    before = threads()
    one, other = socket.socketpair()
    with one, other, Watchdog(0.04).watching(one.fileno(), time.monotonic() + 60):
        time.sleep(0.2)  # for longer than it waits for something to watch
        assert threads() == before + 1
    until_there_are(before)


def test_a_connection_is_cut_when_its_time_is_over_also_after_it_was_closed() -> None:
    dog = Watchdog(0.04)
    one, other = socket.socketpair()
    with one, other:
        for _ in range(2):
            with dog.watching(one.fileno(), time.monotonic() + 60):
                dog.close()
        with dog.watching(one.fileno(), time.monotonic()):
            assert other.recv(1) == b""
