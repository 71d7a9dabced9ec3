"""``toc_beat``: workers put what the app has in ``beat_schedule``, and no beat runs."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_toc import timeout_center

from ..support import nursery
from ..support.nodes import ROOT
from ..support.workers import POOLS, Live, wait_until

LINE = "The beat_schedule of this worker is not in force"


def settings(release: str | None = None, **entries: Any) -> dict[str, Any]:
    """Those of an app with such entries: name -> arguments. Nothing is due within the hour."""
    configured = {
        name: {"task": "e2e.note", "schedule": 3600, "args": args} for name, args in entries.items()
    }
    return {"toc_beat": True, "toc_beat_release": release, "beat_schedule": configured}


def kept(app: Celery) -> dict[str, list[Any]]:
    return {one.name: one.args for one in timeout_center(app).schedules.each()}


@pytest.mark.cluster
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_worker_puts_what_is_in_beat_schedule_and_runs_it(live: Live, pool: str) -> None:
    often = {"task": "e2e.tick", "schedule": 0.2}
    [worker] = live.start_workers(1, *POOLS[pool], toc_beat=True, beat_schedule={"often": often})
    live.journal.wait_for("often@", 5)
    ids = [entry["name"] for entry in live.journal.entries("often@")]
    assert len(set(ids)) == len(ids)
    assert "Schedules of beat_schedule: 1 put, 0 removed, 0 unchanged" in worker.logs()
    found = timeout_center(live.app).schedules.get("often")
    assert found is not None
    assert found.owner == "beat:e2e"


def test_in_a_rolling_deploy_old_workers_that_restart_put_nothing_back_and_remove_nothing(
    live: Live,
) -> None:
    old = settings(a=["a"], b=["old"])
    old_workers = live.start_workers(2, "-P", "solo", **old)
    wait_until(lambda: kept(live.app) == {"a": ["a"], "b": ["old"]})
    live.start_workers(1, "-P", "solo", **settings(b=["new"], c=["c"]))
    new = {"b": ["new"], "c": ["c"]}
    wait_until(lambda: kept(live.app) == new)
    for worker in old_workers:
        worker.container.end()
        worker.container.restart()  # it forgets its log
    old_workers[0].container.kill("SIGKILL")
    [another] = live.start_workers(1, "-P", "solo", **old)
    for worker in (old_workers[1], another):
        wait_until(lambda logs=worker.logs: LINE in logs(), what=worker.logs)
        assert "'celery toc schedule sync' puts this one" in worker.logs()
    assert kept(live.app) == new


def test_a_worker_of_an_earlier_release_that_comes_last_changes_nothing(live: Live) -> None:
    live.start_workers(1, "-P", "solo", **settings("v10", b=["new"]))
    wait_until(lambda: kept(live.app) == {"b": ["new"]})
    [old] = live.start_workers(1, "-P", "solo", **settings("v9", a=["old"]))
    wait_until(lambda: LINE in old.logs(), what=old.logs)
    assert "(release v10)" in old.logs()
    assert kept(live.app) == {"b": ["new"]}


class Beat:
    """A ``celery beat`` of the tests' app."""

    def __init__(self, directory: Path, broker: str, settings: dict[str, Any]) -> None:
        self._log = directory / "beat.log"
        words = [sys.executable, "-m", "celery", "-A", "tests.support.tasks", "beat", "-l", "INFO"]
        words += ["-s", str(directory / "schedule"), "--pidfile="]
        environment = {
            **os.environ,
            "E2E_BROKER": broker,
            "E2E_BACKEND": "disabled://",
            "E2E_SETTINGS": json.dumps(settings),
            "PYTHONWARNINGS": "ignore",
        }
        with open(self._log, "wb") as log:
            self._process = nursery.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def logs(self) -> str:
        return self._log.read_text()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


@pytest.fixture
def start_beat(tmp_path: Path, app: Celery) -> Iterator[Callable[..., Beat]]:
    started = []

    def start(**settings: Any) -> Beat:
        started.append(Beat(tmp_path, app.conf.broker_url, settings))
        return started[-1]

    yield start
    for beat in started:
        beat.stop()


def test_a_celery_beat_that_runs_beside_is_warned_of_by_itself_and_by_workers(
    live: Live, start_beat: Callable[..., Beat]
) -> None:
    [worker] = live.start_workers(1, "-P", "solo", toc_beat=True)
    live.begin("note", "by hand")
    often = {"often": {"task": "e2e.note", "schedule": 0.2, "args": ["beat"]}}
    beat = start_beat(toc_beat=True, beat_schedule=often)
    live.journal.wait_for("beat", 3)
    line = "A celery beat sends tasks beside toc_beat: task e2e.note["
    wait_until(lambda: line in worker.logs(), what=worker.logs)
    assert worker.logs().count(line) == 1
    assert "This celery beat is not needed" in beat.logs()


def test_without_the_setting_nothing_is_put_and_a_beat_is_not_warned_of(
    live: Live, start_beat: Callable[..., Beat]
) -> None:
    often = {"often": {"task": "e2e.note", "schedule": 0.2, "args": ["beat"]}}
    [worker] = live.start_workers(1, "-P", "solo", beat_schedule=often)
    live.begin("note", "later", countdown=1)
    assert kept(live.app) == {}
    assert live.journal.entries("beat") == []
    beat = start_beat(beat_schedule=often)
    live.journal.wait_for("beat", 3)
    assert "celery beat" not in worker.logs()
    assert "not needed" not in beat.logs()


def test_celery_inspect_knows_what_recurs(live: Live) -> None:
    workers = live.start_workers(2, "-P", "solo", **settings(a=["a"], b=["b"]))
    wait_until(lambda: len(kept(live.app)) == 2)
    inspect = live.app.control.inspect(timeout=5)
    told = inspect._request("toc_schedules")
    assert set(told) == {worker.hostname() for worker in workers}
    [one, other] = sorted(
        (two for found in told.values() for two in found), key=lambda x: x["name"]
    )
    assert (one["name"], one["task"], one["schedule"], one["state"]) == (
        *("a", "e2e.note", "every 1 h"),
        "active",
    )
    assert (other["name"], other["owner"], other["queue"]) == ("b", "beat:e2e", "celery")
    waiting = [task["request"] for found in inspect.scheduled().values() for task in found]
    # Flower's page of a worker shows these.
    assert sorted(request["id"].partition("@")[0] for request in waiting) == ["a", "b"]
    assert {request["name"] for request in waiting} == {"e2e.note"}
