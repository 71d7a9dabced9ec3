"""A task library that a process has inherited from its parent (X12)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from kombu_toc import center_for

from ..support.library import status_of

pytestmark = pytest.mark.usefixtures("client")

#: Seconds after which a child that waits for a lock of its parent's is ended.
PATIENCE = 30


def in_child(work: Callable[[], None]) -> int:
    """Run something in a child; return how that has ended."""
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.every_engine
def test_a_child_records_over_connections_of_its_own(store, recorded):
    center: Any = recorded
    recorder = center.recorder.recorder
    center.put("mail", "parent-1", b"1")
    [message] = center.pop("mail").messages
    recorder.flush()
    parents = [(one.engine.pool, one._single.pool) for one in recorder.store.shards.databases]
    name = recorder.worker

    def work() -> None:
        for database, pools in zip(recorder.store.shards.databases, parents, strict=True):
            assert database.engine.pool is not pools[0]
            assert database._single.pool is not pools[1]
        assert recorder.worker != name and recorder._thread is None
        center.put("mail", "child-1", b"1")
        center.ack(center.pop("mail").messages)
        recorder.flush()

    assert in_child(work) == 0
    center.ack([message])
    recorder.flush()
    assert status_of(store, "child-1") == status_of(store, "parent-1") == ["done"]
    [record] = store.history("child-1")
    assert record.worker != name
    recorder.close()


def test_a_child_waits_for_no_lock_and_writes_nothing_of_its_parent(store, recorded):
    center: Any = recorded
    recorder = center.recorder.recorder
    recorder._start = lambda: None  # the test says when it is written
    center.put("mail", "order-1", b"1")
    [message] = center.pop("mail").messages
    assert recorder.backlog == 1

    def work() -> None:
        assert recorder.backlog == 0
        assert not recorder.schedules.owed
        recorder.guard.ask([message], lambda ended: None)
        center.put("mail", "order-2", b"1")
        recorder.flush()

    owed = (recorder.schedules.owed, store.locator.owed, recorder.store.declarations.owed)
    locks = [recorder._lock, recorder.gathering._lock]
    for one in (*owed, *recorder.gathering._owed):
        locks += [one._lock, one._writing]
    locks += [asker._lock for asker in recorder.guard.askers]
    for lock in locks:
        lock.acquire()
    try:
        assert in_child(work) == 0
    finally:
        for lock in locks:
            lock.release()
    assert status_of(store, "order-2") == ["pending"]
    assert recorder.backlog == 1
    recorder.flush()
    assert status_of(store, "order-1") == ["taken"]
    recorder.close()


def test_a_child_that_opens_the_same_library_shares_it_with_what_it_has_inherited(server, options):
    center: Any = center_for(server.toc_url, **options)

    def work() -> None:
        other: Any = center_for(server.toc_url, **options)
        assert other.recorder.recorder is center.recorder.recorder

    assert in_child(work) == 0
    center.recorder.recorder.close()
