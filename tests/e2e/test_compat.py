"""The guarantees hold without any private name that can be done without: no task is lost, none
starts early, each runs once, on workers and in producers that have every such part switched off.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

import kombu_toc
from celery_toc import compat
from kombu_toc.compat import SWITCH, parts

from ..support import nursery
from ..support.inspection import slot_keys
from ..support.nodes import Worker
from ..support.workers import (
    QUICK,
    Journal,
    Live,
    StartWorkers,
    environment_of,
    stop_when_done,
    wait_until,
)

pytestmark = pytest.mark.versions

#: Whoever imports these knows their parts.
assert compat

OPTIONAL = sorted(name for name, part in parts().items() if not part.required)


@pytest.fixture(autouse=True)
def everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, ",".join(OPTIONAL))


@pytest.fixture(params=["prefork", "threads"])
def pool(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def start(start_workers: StartWorkers, pool: str) -> Iterator[Callable[..., Worker]]:
    """Start a worker: seconds of its leases, and how many tasks at once."""

    def start(leases: float = 600, concurrency: int = 2, **settings: Any) -> Worker:
        [worker] = start_workers(
            *(1, "-P", pool, "-c", str(concurrency), *QUICK),
            broker_transport_options={"visibility_timeout": leases},
            **settings,
        )
        return worker

    yield start


def produce(app: Celery, program: str) -> str:
    """Run a program that has `app`, in a process of its own: in this one, what Celery sends is
    marked already. Return what it prints."""
    head = (
        "import time\n"
        "from datetime import datetime, timedelta, timezone\n"
        "from tests.support.tasks import make_app\n"
        f"app = make_app({app.conf.broker_url!r}, {app.conf.result_backend!r})\n"
        "now = datetime.now(timezone.utc)\n"
    )
    return nursery.done(("-c", head + program), execute=True).stdout.strip()


def test_a_worker_tells_of_every_part_that_is_off(start: Callable[..., Worker], pool: str) -> None:
    worker = start()
    log = worker.container.logs()
    expected = {"acks-at-once", "connect-pause", "due-times", "failure-reasons", "quick-times"}
    if pool == "prefork":
        expected.add("missing-processes")
    told = [line for line in log.splitlines() if "is switched off" in line]
    assert {name for name in OPTIONAL if any(f" {name} is" in line for line in told)} >= expected
    assert all(sum(f" {name} is" in line for line in told) <= 1 for name in OPTIONAL)


def test_each_task_runs_once_and_none_early(start: Callable[..., Worker], live: Live) -> None:
    """At once, with a countdown, with an eta, retried; and one that is revoked does not run."""
    workers = [start(), start()]
    revoked = produce(
        live.app,
        "for i in range(60):\n"
        "    app.tasks['e2e.note'].delay(f'now-{i}')\n"
        "for i in range(40):\n"
        "    due = time.time() + 1 + i / 20\n"
        "    app.tasks['e2e.note'].apply_async((f'soon-{i}', due), countdown=1 + i / 20)\n"
        "    at = now + timedelta(seconds=2 + i / 20)\n"
        "    app.tasks['e2e.note'].apply_async((f'at-{i}', at.timestamp()), eta=at)\n"
        "app.tasks['e2e.again'].delay(2, 0.5)\n"
        "revoked = app.tasks['e2e.note'].apply_async(('revoked',), countdown=2)\n"
        "revoked.revoke()\n"
        "print(revoked.id)\n",
    )
    live.journal.wait_for("now-", 60)
    live.journal.wait_for("soon-", 40)
    live.journal.wait_for("at-", 40)
    again = live.journal.wait_for("again-", 3)
    assert live.app.AsyncResult(revoked).get(timeout=10, propagate=False) is not None
    stop_when_done(workers, lambda: slot_keys(live.client) == [])
    assert sorted(entry["retries"] for entry in again) == [0, 1, 2]
    runs = Counter(entry["name"] for entry in live.journal.entries() if "retries" not in entry)
    assert len(runs) == 140
    assert set(runs.values()) == {1}
    assert "revoked" not in runs
    early = [e for e in live.journal.entries() if e.get("due") and e["by_redis"] < e["due"] - 0.002]
    assert early == []


def test_a_task_that_is_acknowledged_late_runs_again_when_its_worker_is_killed(
    start: Callable[..., Worker], app: Celery, journal: Journal, toc: kombu_toc.TimeoutCenter
) -> None:
    killed = start(leases=1.5)
    app.tasks["e2e.late_ack"].delay("killed", 3)
    journal.wait_for("killed", 1)
    killed.container.end()
    other = start(leases=1.5)
    journal.wait_for("killed-done", 1)

    def done() -> bool:
        # Not by the keys of slots: one stays for a while in which it was seen that leases ended.
        counts = toc.counts("celery")
        return not counts.waiting and not counts.in_flight

    stop_when_done([other], done)
    runs = journal.runs()
    assert runs == {"killed": 2, "killed-done": 1}


def test_what_is_executed_runs_once_although_the_connection_was_cut(
    start: Callable[..., Worker], live: Live
) -> None:
    worker = start(concurrency=1)
    for name in ("first", "second", "third"):
        live.app.tasks["e2e.late_ack"].delay(name, 1.5)
    live.journal.wait_for("first", 1)
    live.client.client_kill_filter(_type="normal", skipme=True)
    live.journal.wait_for("third-done", 1)
    stop_when_done([worker], lambda: slot_keys(live.client) == [])
    runs = Counter(entry["name"].removesuffix("-done") for entry in live.journal.entries())
    assert runs == {"first": 2, "second": 2, "third": 2}


def test_a_warm_shutdown_gives_back_what_is_not_begun_and_ends_what_is(
    start: Callable[..., Worker], live: Live
) -> None:
    """Leases last ten minutes: what comes back within seconds was given back."""
    # A first task that ends, so that more is fetched than can start.
    live.app.tasks["e2e.told"].delay("before")
    live.app.tasks["e2e.late_ack"].delay("long", 4)
    live.fill("told", 3, "next-")
    worker = start(concurrency=1, worker_prefetch_multiplier=4)
    live.journal.wait_for("long", 1)
    os.kill(worker.container.pid, signal.SIGTERM)
    other = start()
    live.journal.wait_for("next-", 6)
    wait_until(lambda: worker.container.status == "exited")
    live.journal.wait_for("long-done", 1)
    stop_when_done([other], lambda: slot_keys(live.client) == [])
    entries = live.journal.entries()
    runs = Counter(entry["name"].removesuffix("-done") for entry in entries)
    assert runs == {"before": 2, "long": 2, "next-0": 2, "next-1": 2, "next-2": 2}
    taken = [e for e in entries if e["name"].startswith("next-") and "worker" in e]
    assert {entry["worker"] for entry in taken} == {other.hostname()}
    assert not any(entry["redelivered"] for entry in taken)


@pytest.mark.parametrize("named", ["quick-time", "processes"])
def test_a_worker_does_not_start_with_a_name_that_cannot_be_switched_off(
    app: Celery, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is no part, and one that is needed for correctness."""
    monkeypatch.setenv(SWITCH, named)
    words = ("-m", "celery", "-A", "tests.support.tasks", "worker", "-P", "solo", *QUICK)
    done = nursery.done(words, code=1, execute=True, environment=environment_of(app))
    assert f"{SWITCH} names {named!r}, which" in done.stderr


def test_a_producer_with_an_unknown_name_is_told_the_names(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "quick-time")
    with pytest.raises(
        AssertionError, match=r"is no part; these can be switched off: .*countdowns"
    ):
        produce(app, "app.tasks['e2e.note'].delay('never')")
