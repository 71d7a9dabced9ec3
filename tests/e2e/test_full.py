"""A server whose memory is full: it takes nothing more, and workers drain it all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from kombu.exceptions import OperationalError

from kombu_toc import center_for

from ..support.nodes import Worker
from ..support.servers import Server
from ..support.tasks import make_app
from ..support.workers import LOOPS, POOLS, Journal, wait_until

#: How many tasks wait when the server is full, of the plain kind and of each other kind.
PLAIN, OTHER = 100, 8


class Full:
    """A server that keeps broker and results, and can be made full."""

    def __init__(self, directory: Path) -> None:
        self.server = Server(directory, "--maxmemory-policy", "noeviction").start()
        self.client = self.server.client()
        self.center = center_for(self.server.toc_url)
        self.results = f"redis://127.0.0.1:{self.server.port}/1"
        self.app = make_app(self.server.toc_url, self.results, task_publish_retry=False)

    def fill(self) -> None:
        """It is more than full by so much that it stays so, whatever is drained."""
        for _ in range(30):
            self.client.rpush("ballast", b"x" * 100_000)
        used = self.client.info("memory")["used_memory"]
        self.client.config_set("maxmemory", used - 2_000_000)
        assert self.is_full()

    def is_full(self) -> bool:
        try:
            self.client.set("more", "x")
        except redis.exceptions.OutOfMemoryError:
            return True
        return False

    def make_room(self) -> None:
        self.client.config_set("maxmemory", 0)
        self.client.delete("ballast")

    def send(self) -> dict[str, int]:
        """Tasks of every kind; how often each is to run, by what it writes down."""
        tasks = self.app.tasks
        expected = {}
        for number in range(PLAIN):
            tasks["e2e.note"].delay(f"plain-{number}")
            expected[f"plain-{number}"] = 1
        for number in range(OTHER):
            tasks["e2e.note"].apply_async((f"soon-{number}",), countdown=1)
            tasks["e2e.note"].apply_async((f"urgent-{number}",), queue="urgent")
            tasks["e2e.late_ack"].delay(f"late-{number}", 0)
            tasks["e2e.refuse"].delay("on purpose")
            retried = tasks["e2e.again"].delay(2, 0.2).id
            expected.update({f"{name}-{number}": 1 for name in ("soon", "urgent", "late")})
            expected[f"late-{number}-done"] = 1
            expected[f"again-{retried}"] = 3
        expected["refused"] = OTHER
        return expected

    def close(self) -> None:
        self.app.close()
        self.client.close()
        self.server.stop()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Full]:
    made = Full(tmp_path_factory.mktemp("full"))
    yield made
    made.close()


@pytest.mark.parametrize("pool", LOOPS)
@pytest.mark.parametrize("comes", ["before", pytest.param("after", marks=pytest.mark.nightly)])
def test_a_full_server_drains(
    full: Full, start_worker: Callable[..., Worker], journal: Journal, pool: str, comes: str
) -> None:
    """Whether the worker comes before it is full or after; with results, events, retries and dead
    letters, none of which may keep it from going on."""
    full.make_room()
    full.client.flushall()

    def start() -> Worker:
        worker = start_worker(
            *(*POOLS[pool], "-E", "-Q", "celery,urgent"),
            broker=full.server.toc_url,
            backend=full.results,
        )
        worker.ready()
        return worker

    worker = start() if comes == "before" else None
    try:
        if worker is not None:
            to = {"destination": [worker.hostname()], "reply": True, "timeout": 10, "limit": 1}
            full.app.control.broadcast("toc_pause", **to)
        expected = full.send()
        full.fill()
        if worker is None:
            worker = start()
        else:
            full.app.control.broadcast("toc_resume", **{**to, "reply": False})
        wait_until(
            lambda: len(journal.entries()) >= sum(expected.values()), 90, lambda: worker.logs()
        )
        counts = journal.runs()
        assert counts == expected
        wait_until(
            lambda: (
                [full.center.counts(name)[:3] for name in ("celery", "urgent")] == [(0,) * 3] * 2
            ),
            what=lambda: worker.logs(),
        )
        assert full.center.counts("celery").dead == OTHER

        assert full.is_full(), "it was so all the time"
        with pytest.raises(
            OperationalError, match=r"is full .*nothing was kept.* raise its maxmemory"
        ):
            full.app.tasks["e2e.note"].delay("refused by the server")
        full.make_room()
        assert full.app.tasks["e2e.add"].delay(1, 2).get(timeout=10) == 3
        assert not journal.entries("refused by the server")
    finally:
        if worker is not None:
            worker.teardown()
