"""What a pool of processes was sent when the connection is lost, while its processes are killed.

Celery's pool notices in its own time that a process has died: `flush` is where that matters.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery.concurrency.prefork import TaskPool
from celery.worker import state

from celery_toc.compat.worker import SentTasks, install_soft_shutdown


class Process:
    def __init__(self) -> None:
        self.alive = True
        self.inq = SimpleNamespace(_reader=SimpleNamespace(poll=lambda timeout: False))

    def _is_alive(self) -> bool:
        return self.alive


class Message:
    acknowledged = False
    requeued = 0

    def requeue_lost(self) -> None:
        self.requeued += 1
        self.acknowledged = True


class Job:
    """One that was written to a process."""

    def __init__(self, cache: dict[int, Any], number: int, process: Process) -> None:
        self.message = Message()
        self.request = SimpleNamespace(message=self.message, on_accepted=None)
        self.request._apply_result = lambda: self
        self._callback = SimpleNamespace(__self__=self.request)
        self._write_to = self._scheduled_for = process
        self._accepted = False
        self._job, self._cache = number, cache
        cache[number] = self

    def ready(self) -> bool:
        return False

    def discard(self) -> None:
        self._cache.pop(self._job, None)


class Pool:
    """Billiard's, behind Celery's: as much of it as is asked here.

    notices: what it finds out while it is flushed
    """

    def __init__(self, notices: Any = lambda: None) -> None:
        self._cache: dict[int, Any] = {}
        self._pool = [Process(), Process()]
        self.outbound_buffer: list[Any] = []
        self.lost: list[Any] = []
        self._notices = notices

    def mark_as_worker_lost(self, job: Any, code: int) -> None:
        self.lost.append(job)

    def flush(self) -> None:
        for job in list(self._cache.values()):
            if not job._accepted:
                job.discard()
        self._notices()
        self.outbound_buffer.clear()

    def replace(self, process: Process, job: Job) -> None:
        """A process is found dead: another takes its place, with its file descriptors."""
        process.alive = False
        self._pool[self._pool.index(process)] = successor = Process()
        self.outbound_buffer.append(job)
        job._write_to = successor


def make_pool(notices: Any = lambda: None) -> tuple[Pool, Any, SentTasks]:
    """Billiard's pool, Celery's, and what is known of it."""
    behind, pool = Pool(notices), TaskPool(1, threads=False)
    vars(pool).update(_pool=behind, flush=behind.flush)
    return behind, pool, SentTasks(pool)


@pytest.mark.parametrize("asked", [True, False], ids=["kept before", "not asked for"])
def test_what_a_process_had_that_is_found_dead_meanwhile_is_given_back(asked: bool) -> None:
    """Its place is taken at once: nothing of the job tells any more that it was another's."""
    behind, pool, tasks = make_pool(lambda: behind.replace(behind._pool[0], killed))
    killed, lives = (Job(behind._cache, n, behind._pool[n]) for n in range(2))
    if asked:
        assert tasks.keeps(killed.message) and tasks.keeps(lives.message)
    pool.flush()
    assert (killed.message.requeued, lives.message.requeued) == (1, 0)
    assert list(behind._cache.values()) == [lives]


def test_what_was_kept_for_a_process_that_has_died_since_is_given_back() -> None:
    """The channel has let go of it, and the pool forgets it."""
    behind, pool, tasks = make_pool()
    kept = Job(behind._cache, 0, behind._pool[0])
    assert tasks.keeps(kept.message)
    behind._pool[0].alive = False
    pool.flush()
    assert (kept.message.requeued, behind._cache) == (1, {})


def test_what_a_process_executes_that_is_found_dead_meanwhile_is_the_pools_concern() -> None:
    behind, pool, tasks = make_pool(lambda: behind.replace(behind._pool[0], killed))
    killed = Job(behind._cache, 0, behind._pool[0])
    killed._accepted = True
    assert tasks.keeps(killed.message)
    pool.flush()
    assert killed.message.requeued == 0
    assert list(behind._cache.values()) == [killed]


def test_what_was_not_written_is_forgotten() -> None:
    behind, pool, tasks = make_pool()
    waits = Job(behind._cache, 0, behind._pool[0])
    behind.outbound_buffer.append(waits)
    assert not tasks.keeps(waits.message)
    pool.flush()
    assert behind._cache == {}


def test_a_pool_stops_when_what_a_signal_has_interrupted_is_done() -> None:
    _, pool, _ = make_pool()
    stopped: list[bool] = []
    pool.stop = lambda: stopped.append(True)
    install_soft_shutdown(SimpleNamespace(pool=pool, wait_for_soft_shutdown=print), print)

    def _recv_message() -> None:
        pool.stop()

    def _write_job(Hw: int) -> None:
        pool.stop()

    for interrupted in (_recv_message, lambda: _write_job(0)):
        interrupted()
        assert not stopped
        state.maybe_shutdown()
        assert stopped.pop()
