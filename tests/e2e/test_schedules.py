"""Recurring tasks without a beat process, with real workers."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import pytest
from celery.schedules import solar

from celery_toc import timeout_center

from ..support.workers import POOLS, Live, wait_until

EACH_TASK = pytest.mark.parametrize(
    "task", [pytest.param("e2e.tick", marks=pytest.mark.nightly), "e2e.tick_late"]
)


def planned(id: str) -> datetime:
    """The time in the id of a firing."""
    return datetime.fromisoformat(id.rpartition("@")[2].replace("Z", "+00:00"))


@pytest.mark.cluster
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_any_worker_carries_a_schedule_on(live: Live, pool: str) -> None:
    """Each planned time is met once, by whichever of two workers, and not before."""
    live.start_workers(2, *POOLS[pool])
    center = timeout_center(live.app)
    period = timedelta(seconds=0.1)
    center.schedules.put("often", "e2e.tick", period)
    live.journal.wait_for("often@", 30)
    center.schedules.delete("often")
    wait_until(lambda: center.count("celery") == 0)
    ran = live.journal.entries("often@")
    times = sorted(planned(entry["name"]) for entry in ran)
    assert times == [times[0] + number * period for number in range(len(times))]
    assert all(entry["by_redis"] >= entry["eta"] for entry in ran)
    if pool in ("prefork", "threads"):
        assert len({entry["pid"] for entry in ran}) > 1


@EACH_TASK
@pytest.mark.parametrize("overlap", [pytest.param("skip", marks=pytest.mark.nightly), "wait"])
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_no_two_firings_run_at_once_where_that_is_asked_for(
    live: Live, pool: str, overlap: str, task: str
) -> None:
    """Also where Celery acknowledges a task before it begins."""
    live.start_workers(2, *POOLS[pool])
    center = timeout_center(live.app)
    center.schedules.put("slow", task, 0.3, args=(0.8,), overlap=overlap)
    live.journal.wait_for("done-slow@", 4)
    center.schedules.delete("slow")
    ends = {entry["name"]: entry["by_redis"] for entry in live.journal.entries("done-slow@")}
    began = [entry for entry in live.journal.entries("slow@") if f"done-{entry['name']}" in ends]
    for former, following in itertools.pairwise(sorted(began, key=lambda one: one["by_redis"])):
        assert following["by_redis"] >= ends[f"done-{former['name']}"]
    assert len({entry["name"] for entry in began}) == len(began)


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_schedules.py::"
    "test_no_two_firings_run_at_once_where_that_is_asked_for"
)
@EACH_TASK
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_the_running_firing_is_cancelled_by_the_next_one_where_that_is_asked_for(
    live: Live, pool: str, task: str
) -> None:
    """Where a pool cannot terminate a task, the next one waits for its end; they never overlap."""
    live.start_workers(2, *POOLS[pool])
    center = timeout_center(live.app)
    seconds = 60.0 if pool == "prefork" else 9.0
    center.schedules.put("slow", task, 8.0, args=(seconds,), overlap="cancel", max_runs=2)
    first, second = live.journal.wait_for("slow@", 2)
    assert second["eta"] - first["eta"] == 8
    ended = [entry["name"] for entry in live.journal.entries("done-slow@")]
    if pool == "prefork":
        # The pool sees within five seconds that a process has ended, and the firing that waits
        # looks once a second.
        assert second["by_redis"] - first["by_redis"] < 8 + 5 + 1 + 2
        assert ended == []
    else:
        assert ended == [f"done-{first['name']}"]


def test_a_back_fill_runs_each_time_once_beside_the_firings(live: Live) -> None:
    """Two at the same moment send each time once, and workers put nothing behind them."""
    live.start_workers(2, *POOLS["threads"])
    center = timeout_center(live.app)
    made = center.schedules.put("hourly", "e2e.tick", timedelta(hours=1))
    start = time.time() - 20 * 3600
    with ThreadPoolExecutor(2) as both:
        calls = [both.submit(center.schedules.backfill, "hourly", start) for _ in range(2)]
        ids = [id for call in calls for id in call.result()]
    entries = live.journal.wait_for("hourly@", 20)
    wait_until(lambda: center.count("celery") == 1)
    assert sorted(entry["name"] for entry in entries) == sorted(ids)
    assert len(set(ids)) == 20
    moments = sorted(entry["by_redis"] for entry in entries)
    assert moments[-1] - moments[0] > 0.9  # ten a second, and two did it together
    assert center.schedules.get("hourly").next == made.next


def test_a_firing_that_is_cancelled_does_not_end_its_schedule(live: Live) -> None:
    [worker] = live.start_workers(1, *POOLS["solo"])
    center = timeout_center(live.app)
    made = center.schedules.put("often", "e2e.tick", timedelta(seconds=2))
    [cancelled] = center.cancel(made.next_id)
    assert cancelled.deleted
    [entry, *_] = live.journal.wait_for("often@", 1)
    assert planned(entry["name"]) > made.next
    history = center.schedules.history("often")
    assert [one.outcome for one in history if one.id == made.next_id] == ["lost"]
    assert f"the message of its firing {made.next_id} was gone" in worker.logs()


@pytest.mark.parametrize(
    "how",
    [
        "by itself, at any command",
        pytest.param("by others, at any time", marks=pytest.mark.nightly),
    ],
)
def test_workers_that_are_killed_neither_double_a_firing_nor_miss_one(
    live: Live, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Y8: TOC_FIRINGS_SECONDS says for how long workers are killed."""
    seconds = float(os.environ.get("TOC_FIRINGS_SECONDS", "8"))
    if how.startswith("by itself"):
        monkeypatch.setenv("E2E_MORTAL", "0.02")
    options = (*POOLS["threads"], "--without-gossip", "--without-heartbeat")
    brief = {"broker_transport_options": {"visibility_timeout": 2}}
    workers = live.start_workers(2, *options, **brief)
    center = timeout_center(live.app)
    period = timedelta(seconds=0.02)
    names = [f"s{number}" for number in range(4)]
    firsts = {}
    for name in names:
        made = center.schedules.put(name, "e2e.tick_late", period, misfire="all")
        firsts[name] = made.next
    chance = random.Random(1)
    kills, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.3)  # between two kills
        if how.startswith("by others") and chance.random() < 0.3:
            chance.choice(workers).kill()
        for worker in [one for one in workers if one.container.status != "running"]:
            kills += 1
            workers.remove(worker)
            workers += live.start_workers(1, *options, **brief)
    monkeypatch.delenv("E2E_MORTAL", raising=False)
    for name in names:
        center.schedules.pause(name)
    workers += live.start_workers(1, *options, **brief)
    wait_until(lambda: center.count("celery") == 0, 60, lambda: center.counts("celery"))
    ran = live.journal.runs("s")
    fresh = Counter(
        entry["name"] for entry in live.journal.entries("s") if not entry["redelivered"]
    )
    assert [id for id, number in fresh.items() if number > 1] == []
    wanted = 0
    for name in names:
        last = center.schedules.get(name).last
        times = {planned(id) for id in ran if id.startswith(f"{name}@")}
        planned_times = [
            firsts[name] + number * period for number in range((last - firsts[name]) // period + 1)
        ]
        wanted += len(planned_times)
        # One that was delivered already when it was paused has run, too.
        beyond = planned_times[-1] + period
        assert sorted(times - {beyond}) == planned_times
    assert kills > 0
    print(f"{kills} kills, {wanted} firings, {sum(ran.values()) - wanted} run again")


def test_what_the_sun_says_is_fired_by_a_worker_which_puts_the_next_one(live: Live) -> None:
    live.start_workers(1, *POOLS["prefork"])
    center = timeout_center(live.app)
    sun = solar("sunrise", 52.5, 13.4)
    made = center.schedules.put("sun", "e2e.tick", sun)
    assert made.next is not None and made.next_id is not None
    [second] = made.upcoming(2)[1:]
    center.run_now(made.next_id)  # it waits for the sun otherwise
    [ran] = live.journal.wait_for("sun@", 1)
    assert ran["name"] == made.next_id
    wait_until(lambda: center.schedules.get("sun").next == second)
    assert timedelta(hours=23) < second - made.next < timedelta(hours=25)
    wait_until(lambda: center.schedules.history("sun")[0].outcome == "success")
    [fired] = center.schedules.history("sun")
    assert (fired.id, fired.planned) == (made.next_id, made.next)
    [found] = center.get(center.schedules.get("sun").next_id)
    assert found.state == "waiting"
    assert timedelta(0) <= center.task(found).eta - second < timedelta(milliseconds=1)
    center.schedules.delete("sun")


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_schedules.py::"
    "test_workers_that_are_killed_neither_double_a_firing_nor_miss_one"
)
def test_a_firing_whose_worker_was_killed_does_not_run_beside_the_next_one(live: Live) -> None:
    """It comes back, for it is acknowledged late, and waits until the other one has ended."""
    live.toc.queues.declare(
        "celery", visibility=2, retry_backoff=3
    )  # the next one begins before it is back
    workers = live.start_workers(2, *POOLS["prefork"])
    center = timeout_center(live.app)
    period = timedelta(seconds=4)
    center.schedules.put("often", "e2e.tick_late", period, args=(3.0,), overlap="wait")
    [first] = live.journal.wait_for("often@", 1)
    [killed] = [
        one for one in workers if first["pid"] in {p.pid for p in one.container.processes()}
    ]
    killed.container.end()
    live.journal.wait_for("done-often@", 3)
    center.schedules.delete("often")
    wait_until(lambda: center.count("celery") == 0)
    entries = sorted(live.journal.entries(), key=lambda entry: entry["by_redis"])
    names = [entry["name"] for entry in entries if "often@" in entry["name"]]
    assert names[0] == first["name"] and names.count(names[0]) == 2
    for begun, ended in zip(names[1::2], names[2::2], strict=True):
        assert ended == f"done-{begun}"
