"""Moving live apps: to another number of slots, and from Kombu's own Redis transport."""

from __future__ import annotations

import random
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from celery import Celery
from celery.schedules import crontab, maybe_schedule, solar

import kombu_toc
from celery_toc import timeout_center

from ..support.commands import answer
from ..support.inspection import slot_keys
from ..support.nodes import Worker
from ..support.servers import Server
from ..support.tasks import make_app
from ..support.workers import Journal, StartWorkers, stop_when_done, wait_until
from .test_cli import Run, celery

# The fixture comes along with the commands' own tests.
from .test_cli import run as run

HOUR = 3600


def start_command(url: str, *args: object) -> subprocess.Popen[str]:
    """Celery's own program, as an operator starts it."""
    return celery("-b", url, "toc", *(str(arg) for arg in args))


class Traffic:
    """Producers that send countdown tasks for as long as it is open."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.names: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(i,)) for i in range(2)]

    def _send(self, number: int) -> None:
        chance = random.Random(number)
        note = self.app.tasks["e2e.note"]
        i = 0
        while not self._stop.is_set():
            name, delay = f"live-{number}-{i}", chance.uniform(0, 3)
            i += 1
            note.apply_async((name, time.time() + delay), countdown=delay)
            self.names.append(name)
            time.sleep(0.02)  # a load that one worker keeps up with on a busy machine

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)


@pytest.mark.nightly(
    guarded_by="tests/contract/test_reshard.py::"
    "test_killed_at_any_step_it_leaves_everything_right_and_goes_on"
)
def test_a_topic_is_resharded_up_and_down_while_it_is_in_use(
    start_workers: StartWorkers, app: Celery, journal: Journal, toc: kombu_toc.TimeoutCenter
) -> None:
    """Killed again and again: no task is lost, early, or run twice, and none is late."""
    workers = start_workers(2, "-c", "2")
    url = app.conf.broker_url
    chance = random.Random(5)
    held = [app.tasks["e2e.add"].apply_async((1, 1), countdown=HOUR).id for _ in range(300)]
    with Traffic(app) as traffic:
        for slots in (32, 2, 16):
            for _ in range(3):
                process = start_command(url, "reshard", "celery", "--slots", slots, "--yes")
                with pytest.raises(subprocess.TimeoutExpired):
                    # Celery's program takes about a second to start; then it is somewhere in it.
                    process.communicate(timeout=chance.uniform(0.8, 2.5))
                process.kill()
                process.communicate()
            # Not all of the half minute: producers that do not know yet are part of it.
            process = start_command(
                url, "reshard", "celery", "-s", slots, "--settle", "3", "--yes", "--wait", "20"
            )
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, (out, err)
            assert f"'celery' has {slots} slots; moved " in out
    journal.wait_for("live-", len(traffic.names), 60)
    stop_when_done(workers, lambda: sum(toc.counts("celery")) == len(held))
    entries = journal.entries("live-")
    runs = Counter(entry["name"] for entry in entries)
    assert set(runs) == set(traffic.names)
    assert set(runs.values()) == {1}
    lateness = sorted(entry["at"] - entry["due"] for entry in entries)
    assert lateness[0] >= 0
    assert lateness[len(lateness) // 2] < 0.5, lateness[:: len(lateness) // 20]
    assert lateness[-1] < 5
    for id in held:
        [found] = toc.get(id)
        assert found.slot == toc.registry.topic("celery").slot_for(id).number
    assert sum(one.deleted for one in toc.cancel(held)) == len(held)


def test_a_worker_whose_settings_say_the_old_number_of_slots_reconnects(
    start_workers: StartWorkers,
    app: Celery,
    journal: Journal,
    client: redis.Redis,
    toc: kombu_toc.TimeoutCenter,
) -> None:
    """It declares its queues again, with that number."""
    options = {"broker_transport_options": {"toc_slots": 4}}
    [worker] = start_workers(1, "-c", "1", **options)
    assert toc.registry.declared("celery").slots == 4
    kombu_toc.reshard_topic(toc, "celery", 16, settle=0)
    for one in client.client_list():
        if int(one["id"]) != client.client_id():
            client.client_kill_filter(_id=one["id"])
    app.tasks["e2e.note"].delay("after")
    journal.wait_for("after", 1)
    restarted, *_ = start_workers(1, "-c", "1", **options)
    assert restarted.container.status == worker.container.status == "running"


def test_reshard_tells_what_it_has_done_and_what_is_wrong(
    run: Run, app: Celery, toc: kombu_toc.TimeoutCenter
) -> None:
    for i in range(20):
        app.tasks["e2e.add"].apply_async((i, i), countdown=HOUR)
    said = run("reshard", "celery", "--slots", 64, "--settle", 0, "--yes", "--json")
    assert said.code == 0
    assert said.json.pop("moved") > 0
    assert (said.json["slots"], said.json["slots_before"], said.json["done"]) == (64, 1, True)
    again = run("reshard", "celery", "--slots", 64, "--settle", 0)  # nothing to ask about
    assert (again.code, again.out) == (0, "Done: 'celery' has 64 slots; moved 0 messages.\n")
    assert toc.counts("celery").scheduled == 20

    # By a known id: of 64, one slot would not have to be moved.
    toc.put("celery", "held", b"")
    [held] = toc.pop("celery", 1).messages
    assert held.slot > 0
    options = ("--settle", 0, "--wait", "0", "--yes")
    run("reshard", "celery", "-s", 1, *options).fails(1, "1 of 'celery' cannot be moved yet")
    toc.ack([held])
    assert run("reshard", "celery", "-s", 1, *options).code == 0

    run("reshard", "celery", "-s", 6, *options).fails(2, "power of two", "6")
    run("reshard", "celery", "-s", "many", *options).fails(2, "many")
    run("reshard", "celery", *options).fails(2, "--slots")
    run("reshard", "celry", "-s", 8, *options).fails(3, "'celry'", "do you mean 'celery'")
    run("reshard", "celery", "-s", 8).fails(2, "--yes")
    toc.queues.declare("reply", slots=1, expires=60_000)
    run("reshard", "reply", "-s", 8, *options).fails(1, "'reply' goes away by itself")
    assert "celery -A shop toc reshard mail --slots 32" in run("reshard", "--help").out


# -- from redis://


@pytest.fixture
def old(server: Server, app: Celery, client: redis.Redis) -> Iterator[Celery]:
    """The same app, on Kombu's own transport, before its URL is changed."""
    made = make_app(server.url, app.conf.result_backend)
    yield made
    made.close()


def run_until_it_holds(old: Celery, client: redis.Redis, worker: Worker, number: int) -> None:
    """Wait until a worker of the old broker has so many tasks in its memory, and kill it."""
    wait_until(lambda: client.hlen("unacked") == number, 30)
    worker.container.end()


@pytest.mark.nightly(
    guarded_by="tests/contract/test_migrate.py::"
    "test_killed_at_any_step_nothing_is_lost_and_nothing_runs_twice"
)
def test_the_tasks_of_a_killed_worker_run_at_their_time(
    start_workers: StartWorkers,
    app: Celery,
    old: Celery,
    journal: Journal,
    client: redis.Redis,
    server: Server,
) -> None:
    """Its ETA tasks were in its memory: they and those that were queued run once."""
    [worker] = start_workers(1, "-c", "1", broker=server.url)
    due = time.time() + 20
    for i in range(20):
        old.tasks["e2e.note"].apply_async((f"eta-{i}", due + i / 10), countdown=20 + i / 10)
    run_until_it_holds(old, client, worker, 20)
    for i in range(20):
        old.tasks["e2e.note"].apply_async((f"ready-{i}",), priority=i % 10)

    counted = answer(app, "migrate", server.url, "--dry-run", "--json")
    assert counted.json["queues"] == {"celery": 40}
    # Killed on the way, whatever it has done by then, and run again, and once more.
    for seconds in (0.9, 1.3):
        process = start_command(server.toc_url, "migrate", server.url, "--yes")
        try:
            process.communicate(timeout=seconds)  # it takes about a second to start
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    said = answer(app, "migrate", server.url, "--yes", "--json")
    assert said.code == 0, said.err
    assert answer(app, "migrate", server.url, "--yes", "--json").json["moved"] == 0
    assert client.keys("celery*") + client.keys("unacked*") == []

    workers = start_workers(2, "-c", "2")
    assert time.time() < due, "the machine was too slow for this test"
    entries = journal.wait_for("ready-", 20) + journal.wait_for("eta-", 20, 40)
    stop_when_done(workers, lambda: slot_keys(client) == [])
    runs = Counter(entry["name"] for entry in journal.entries())
    assert set(runs.values()) == {1}
    assert len(runs) == 40
    lateness = [entry["at"] - entry["due"] for entry in entries if entry["due"]]
    # The sender rounds its ETA up to some milliseconds after what the test has noted.
    assert min(lateness) > -0.001
    assert max(lateness) < 2


def test_migrate_asks_refuses_and_says_what_is_wrong(
    start_workers: StartWorkers,
    app: Celery,
    old: Celery,
    run: Run,
    client: redis.Redis,
    server: Server,
) -> None:
    assert run("migrate", server.url).out == "Moved no messages.\n"  # and nothing was asked
    run("migrate", server.toc_url, "--yes").fails(2, "is a timeout center already")
    run("migrate", "amqp://localhost", "--yes").fails(2, "redis://, rediss://")
    run("migrate", "redis://:hush@127.0.0.1:1/0", "--yes").fails(1, "redis://:**@127.0.0.1:1/0")
    run("migrate").fails(2, "redis://", "--to")
    run("migrate", server.url, "--to", server.url).fails(2, "--to")
    answer(old, "migrate", server.url, "--yes").fails(2, "not a timeout center")
    assert (
        "celery -A shop toc migrate redis://localhost:6379/0 --dry-run"
        in run("migrate", "--help").out
    )

    old.tasks["e2e.add"].apply_async((1, 2), countdown=HOUR)
    run("migrate", server.url).fails(2, "--yes")
    client.lpush("celery", "nonsense")
    [worker] = start_workers(1, "-c", "1", broker=server.url, worker_prefetch_multiplier=0)
    wait_until(lambda: client.hlen("unacked") == 1, 30)
    refused = run("migrate", server.url, "--yes")
    refused.fails(1, "from redis://", "stop its workers", "--force")
    counted = run("migrate", server.url, "--dry-run", "--json")
    assert (counted.code, counted.json["found"]) == (1, 1)
    assert "from redis://" in counted.json["refused"]
    run("migrate", server.url, "--dry-run").fails(1, "nothing would be moved", "--force")
    worker.container.end()
    client.lpush("celery", "nonsense")
    said = run("migrate", server.url, "--yes")
    said.fails(1, "1 message stays where it is")
    assert re.search(r"^celery +1$", said.out, re.M), said.out
    assert "Moved 1 message: 1 scheduled; 1 had been held by workers." in said.out
    run("migrate", server.url, "-Q", "celry", "--yes").fails(1, "there is no queue 'celry'")
    wrong = run("migrate", server.url, "--key-prefix", "shp:", "--yes")
    wrong.fails(1, "no key", "begins with the prefix 'shp:'; in use there: no prefix")
    assert "--force" not in wrong.err
    assert "nonsense" in said.out


def test_the_way_back_names_the_schedules_and_what_replaces_them(
    app: Celery, server: Server, client: redis.Redis
) -> None:
    """As text of Python that has the same times."""
    schedules = timeout_center(app).schedules
    add = app.tasks["e2e.add"]
    schedules.put("every", add, 90, args=(1,), kwargs={"y": 3}, overlap="skip", queue="urgent")
    nightly = crontab("*/20", "2-4", day_of_month="1")
    schedules.put("nightly", add, nightly, args=(1, 2), either_day=True)
    schedules.put("dusk", add, solar("sunset", 52.5, 13.4), args=(1, 2), options={"priority": 3})
    schedules.put("over", add, 1.5, args=(1, 2))
    schedules.pause("over")
    said = answer(app, "migrate", "--to", server.url, "--dry-run", "--json").json
    assert {one["name"] for one in said["schedules"]} == {"every", "over", "dusk", "nightly"}
    out = answer(app, "migrate", "--to", server.url, "--yes").out
    assert "4 schedules stay in the timeout center" in out
    assert "# Not taken along: overlap=skip." in out
    assert "that it is paused" in out and "either_day=True" in out
    found: dict[str, Any] = {}
    exec(out[out.index("from datetime") :], found)
    beat_schedule = found["beat_schedule"]
    assert beat_schedule["every"] == {
        **{"task": "e2e.add", "schedule": timedelta(seconds=90), "args": (1,)},
        **{"kwargs": {"y": 3}, "options": {"queue": "urgent"}},
    }
    for one in schedules.each():
        assert maybe_schedule(beat_schedule[one.name]["schedule"]) == one.schedule
    assert beat_schedule["dusk"]["options"]["priority"] == 3


@pytest.mark.nightly(
    guarded_by="tests/contract/test_rollback.py::"
    "test_killed_at_any_step_nothing_is_lost_and_nothing_runs_twice"
)
def test_the_way_back_tasks_run_at_their_time_by_kombus_own_transport(
    start_workers: StartWorkers,
    app: Celery,
    old: Celery,
    journal: Journal,
    client: redis.Redis,
    server: Server,
    toc: kombu_toc.TimeoutCenter,
) -> None:
    """Also one that was rescheduled, and one whose consumer is gone: each runs once."""
    [worker] = start_workers(1, "-Q", "urgent", "-c", "1")
    due = time.time() + 25
    note = app.tasks["e2e.note"]
    for i in range(20):
        note.apply_async((f"eta-{i}", due + i / 10), countdown=25 + i / 10)
        note.apply_async((f"ready-{i}",), priority=i % 10)
    moved = note.apply_async(("eta-moved", due), countdown=HOUR)
    [rescheduled] = toc.reschedule(moved.id, at=due)
    assert rescheduled.moved, (rescheduled, toc.get(moved.id))
    assert len(toc.pop("celery", 1).messages) == 1
    refused = answer(app, "migrate", "--to", server.url, "--yes")
    refused.fails(1, "from toc+redis://", "stop its workers", "--force")
    answer(app, "migrate", "--to", server.url, "--dry-run").fails(1, "nothing would be moved")
    worker.teardown()

    counted = answer(app, "migrate", "--to", server.url, "--dry-run", "--json")
    assert (counted.code, counted.json["queues"]) == (0, {"celery": 41}), counted.err
    # Killed on the way, whatever it has done by then, and run again, and once more.
    for seconds in (0.9, 1.3):
        process = start_command(server.toc_url, "migrate", "--to", server.url, "--yes")
        try:
            process.communicate(timeout=seconds)  # it takes about a second to start
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    said = answer(app, "migrate", "--to", server.url, "--yes")
    assert said.code == 0, said.err
    again = answer(app, "migrate", "--to", server.url, "--yes")
    assert again.out == "Moved no messages.\n"
    assert sum(toc.counts("celery")) == 0

    workers = start_workers(1, "-c", "2", broker=server.url)
    assert time.time() < due, "the machine was too slow for this test"
    entries = journal.wait_for("ready-", 20) + journal.wait_for("eta-", 21, 40)
    stop_when_done(workers, lambda: client.keys("celery*") + client.keys("unacked*") == [])
    runs = Counter(entry["name"] for entry in journal.entries())
    assert set(runs.values()) == {1}
    assert len(runs) == 41
    lateness = [entry["at"] - entry["due"] for entry in entries if entry["due"]]
    assert min(lateness) > -0.1  # Celery's own timer; the times are Redis's
    assert max(lateness) < 3
