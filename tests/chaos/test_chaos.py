"""A short run of the harness: whatever breaks, each task runs once, on time, and is gone."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ..support.databases import ENGINES, PostgreSQL
from ..support.library import engine, new_url, on_engines
from ..support.servers import Server
from ..support.waiting import wait_until
from .library import FAMILIES as FAMILIES_OF_LIBRARY
from .library import LibraryRun
from .run import FAMILIES, ROOT, Run, schedule
from .schedules import ScheduleChaos
from .soak import SoakRun
from .steps import Chaos
from .verdict import PUTS
from .ways import WAYS, make_library

__all__ = ("engine", "new_url")  # fixtures


@pytest.mark.parametrize(
    ("families", "seconds"),
    [
        pytest.param(tuple(FAMILIES["redis"]), 80, id="all", marks=pytest.mark.nightly),
        pytest.param(("kill", "cut"), 15, id="processes and connections"),
    ],
)
def test_whatever_breaks_no_task_is_lost_early_repeated_or_left(
    tmp_path: Path, families: tuple[str, ...], seconds: float
) -> None:
    """Each fault that the harness has, once."""
    report = Run(tmp_path, seed=1, seconds=seconds, families=families).run()
    kinds = {what for family in families for what in FAMILIES["redis"][family]}
    assert set(report.faults) == kinds
    assert report.executed + len(report.gone) >= report.sent > 50
    assert report.counted[PUTS] > 0
    assert report.faultless, report.table()


def test_a_run_that_is_told_to_end_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos", "--soak", "--engines", "sqlite"]
    run = subprocess.Popen([*command, "--seconds", "600", "--directory", str(tmp_path)], cwd=ROOT)
    try:
        wait_until((tmp_path / "producer1.log").exists, 120)  # workers are ready
        begun = psutil.Process(run.pid).children(recursive=True)
        assert len(begun) > 5
        run.terminate()
        assert run.wait(60) == 128 + signal.SIGTERM
        assert psutil.wait_procs(begun, 60)[1] == []
    finally:
        run.kill()


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_cluster.py::test_nothing_is_lost_when_a_primary_dies_and_its_replica_is_promoted"
)
def test_whatever_breaks_in_a_cluster_no_task_is_lost_early_or_left(tmp_path: Path) -> None:
    """Each fault of a Cluster once. What runs twice was with a node whose replica took over."""
    report = Run(tmp_path, seed=1, seconds=47, broker="cluster").run()
    kinds = {what for whats in FAMILIES["cluster"].values() for what in whats}
    assert set(report.faults) == kinds
    assert report.executed + len(report.gone) >= report.sent > 150
    assert report.counted[PUTS] > 5
    assert report.faultless, report.table()


@pytest.mark.nightly(
    guarded_by="tests/chaos/test_chaos.py::test_whoever_dies_between_two_steps_of_the_library_no_message_is_lost"
)
@pytest.mark.skipif(not PostgreSQL.is_there(), reason="PostgreSQL is not installed")
def test_with_a_task_library_no_task_is_lost_though_redis_and_a_database_are(
    tmp_path: Path,
) -> None:
    """Redis is flushed or replaced, a database of two is away, and processes die at any step."""
    chosen = ("lost", "database", "kill", "step")
    report = LibraryRun(tmp_path, seed=3, seconds=10, families=chosen).run()
    kinds = {what for family in chosen for what in FAMILIES_OF_LIBRARY[family]}
    assert kinds <= set(report.faults)
    assert report.executed + len(report.gone) >= report.sent > 20
    assert report.faultless, report.table()


@on_engines("sqlite", *(name for name in ENGINES if name != "sqlite"))
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if way == "through" else pytest.mark.nightly) for way in WAYS],
)
def test_whoever_dies_between_two_steps_of_the_library_no_message_is_lost(
    tmp_path: Path, new_url: Callable[[], str], way: str
) -> None:
    """Senders, workers, keepers and rebuilds, at any statement and any command; and what each way
    of keeping a queue promises holds."""
    options = make_library([new_url() for _ in range(WAYS[way].databases)], 2)
    server = Server(tmp_path).start()
    try:
        with server.client() as client:
            found = Chaos(client, server.toc_url, options, seed=1, way=way).run(lives=150)
    finally:
        server.stop()
    assert found.holds, found
    # Of what is behind, there may be nothing just when Redis loses everything.
    assert way == "behind" or all(found.counted.values()), found.counted
    assert found.sent > 10
    assert found.losses
    assert sum(found.deaths.values()) > 20
    roles = {what.partition(",")[0] for what in found.deaths}
    assert {"send", "work", "keep"} <= roles


@pytest.mark.nightly(
    guarded_by="tests/contract/test_clock_steps.py::"
    "test_schedules_of_every_kind_fire_at_each_of_their_times_when_the_clock_is_changed"
)
@pytest.mark.one_server("its clock is set")
def test_schedules_fire_at_each_of_their_times_once_whatever_the_clock_shows(
    tmp_path: Path,
) -> None:
    """Y8: a leader dies, a queue is emptied, and the clock is set 30 days forward and back."""
    found = ScheduleChaos(tmp_path, seed=1).run(faults=("leader", "purge", "forward"))
    assert found.asked > 10
    assert found.lost
    assert found.holds, str(found)


@pytest.mark.timeout(1_200)
@pytest.mark.nightly(
    guarded_by="tests/chaos/test_chaos.py::test_whatever_breaks_no_task_is_lost_early_repeated_or_left"
)
@pytest.mark.skipif(not PostgreSQL.is_there(), reason="PostgreSQL is not installed")
def test_after_ten_minutes_with_everything_on_nothing_is_lost_and_nothing_has_grown(
    tmp_path: Path,
) -> None:
    """A library, limits, keys, schedules, HTTP and the page; a fault every 20 seconds."""
    report = SoakRun(tmp_path, seed=1, seconds=600).run()
    assert report.counted["firings"] > 200
    assert report.counted["put over HTTP"] > 200
    assert report.executed + len(report.gone) >= report.sent > 2_000
    assert report.faultless, report.table()


def test_a_schedule_is_told_by_its_seed_and_leaves_time_between_faults() -> None:
    faults = schedule(7, 120)
    assert faults == schedule(7, 120)
    assert faults != schedule(8, 120)
    times = [fault.at for fault in faults]
    assert min(after - before for before, after in itertools.pairwise(times)) >= 2
