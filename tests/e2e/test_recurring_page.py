"""The examples of docs/recurring.md run as they stand, with a real worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from celery import Celery
from kombu import pools

from celery_toc import timeout_center

from ..meta.test_readme import blocks_of
from ..support import nursery
from ..support.cluster import Cluster
from ..support.servers import Server
from ..support.workers import wait_until

PAGE = "docs/recurring.md"

URL = "toc+redis://localhost:6379/0"


@pytest.fixture
def example(server: Server | Cluster, client: redis.Redis, tmp_path: Path) -> Iterator[str]:
    """The first example, as a module for ``celery -A``, with the broker of the tests."""
    [first, *_] = blocks_of(PAGE)
    assert URL in first
    text = first.replace(URL, server.toc_url)
    (tmp_path / "recurring_example.py").write_text(text)
    yield text
    pools.reset()


@pytest.fixture
def start_worker(example: str, tmp_path: Path) -> Iterator[Callable[[], Path]]:
    started = []

    def start() -> Path:
        log = tmp_path / "worker.log"
        words = [sys.executable, "-m", "celery", "-A", "recurring_example", "worker", "-P", "solo"]
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        with open(log, "wb") as out:
            process = nursery.Popen(
                [*words, "-l", "INFO", "--without-mingle"],
                env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
                cwd=tmp_path,
                stdout=out,
                stderr=out,
            )
        started.append(process)
        return log

    yield start
    for process in started:
        process.terminate()
        process.wait(30)


def test_the_smallest_example_is_all_that_is_needed(
    start_worker: Callable[[], Path], server: Server | Cluster
) -> None:
    with Celery("looks", broker=server.toc_url, set_as_current=False) as app:
        schedules = timeout_center(app).schedules
        log = start_worker()

        def runs() -> int:
            found = schedules.get("poll")
            return found.runs if found is not None else 0

        wait_until(lambda: runs() >= 3, 30, log.read_text)
        nightly = schedules.get("nightly")
        assert nightly is not None
        assert (nightly.text, nightly.owner) == ("0 3 * * *", "beat:shop")


def test_the_other_examples_run(example: str, tmp_path: Path) -> None:
    """In a process of their own: the tasks of an example are those of every app of its process."""
    _, by_hand, fill, options, *rest = blocks_of(PAGE)
    assert rest == []
    looks = """
from celery_toc.beat import configured

ids = schedules.backfill("report", datetime(2025, 11, 1))
print(schedules.count(), ids[0])
print(configured.read(app).entries[1].rules)
"""
    script = tmp_path / "script.py"
    script.write_text("\n".join((example, by_hand, fill, options, looks)))
    assert nursery.done((script,), execute=True).stdout.splitlines() == [
        "30 8 * * 1-5 UTC active",
        "1 report@2025-11-20T08:30:00Z",
        "{'misfire': 'skip', 'overlap': 'skip'}",
    ]
