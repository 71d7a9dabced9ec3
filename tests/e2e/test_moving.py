"""Moving live apps: to another number of slots, and from Kombu's own Redis transport."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from celery import Celery
from celery.schedules import crontab, maybe_schedule, solar

import kombu_toc
from celery_toc import timeout_center

from ..support.servers import Server
from ..support.tasks import make_app
from ..support.workers import Live, wait_until
from .test_cli import Run, answer

# The fixture comes along with the commands' own tests.
from .test_cli import run as run

HOUR = 3600


def test_a_worker_whose_settings_say_the_old_number_of_slots_reconnects(live: Live) -> None:
    """It declares its queues again, with that number."""
    options = {"broker_transport_options": {"toc_slots": 4}}
    [worker] = live.start_workers(1, "-c", "1", **options)
    assert live.toc.registry.declared("celery").slots == 4
    kombu_toc.reshard_topic(live.toc, "celery", 16, settle=0)
    for one in live.client.client_list():
        if int(one["id"]) != live.client.client_id():
            live.client.client_kill_filter(_id=one["id"])
    live.app.tasks["e2e.note"].delay("after")
    live.journal.wait_for("after", 1)
    restarted, *_ = live.start_workers(1, "-c", "1", **options)
    assert restarted.container.status == worker.container.status == "running"


def test_reshard_tells_what_it_has_done_and_what_is_wrong(run: Run) -> None:
    for i in range(20):
        run.app.tasks["e2e.add"].apply_async((i, i), countdown=HOUR)
    said = run("reshard", "celery", "--slots", 64, "--settle", 0, "--yes", "--json")
    assert said.code == 0
    assert said.json.pop("moved") > 0
    assert (said.json["slots"], said.json["slots_before"], said.json["done"]) == (64, 1, True)
    again = run("reshard", "celery", "--slots", 64, "--settle", 0)  # nothing to ask about
    assert (again.code, again.out) == (0, "Done: 'celery' has 64 slots; moved 0 messages.\n")
    assert run.toc.counts("celery").scheduled == 20

    # By a known id: of 64, one slot would not have to be moved.
    run.toc.put("celery", "held", b"")
    [held] = run.toc.pop("celery", 1).messages
    assert held.slot > 0
    options = ("--settle", 0, "--wait", "0", "--yes")
    run("reshard", "celery", "-s", 1, *options).fails(1, "1 of 'celery' cannot be moved yet")
    run.toc.ack([held])
    assert run("reshard", "celery", "-s", 1, *options).code == 0

    run("reshard", "celery", "-s", 6, *options).fails(2, "power of two", "6")
    run("reshard", "celery", "-s", "many", *options).fails(2, "many")
    run("reshard", "celery", *options).fails(2, "--slots")
    run("reshard", "celry", "-s", 8, *options).fails(3, "'celry'", "do you mean 'celery'")
    run("reshard", "celery", "-s", 8).fails(2, "--yes")
    run.toc.queues.declare("reply", slots=1, expires=60_000)
    run("reshard", "reply", "-s", 8, *options).fails(1, "'reply' goes away by itself")
    assert "celery -A shop toc reshard mail --slots 32" in run("reshard", "--help").out


# -- from redis://


@pytest.fixture
def old(server: Server, app: Celery, client: redis.Redis) -> Iterator[Celery]:
    """The same app, on Kombu's own transport, before its URL is changed."""
    made = make_app(server.url, app.conf.result_backend)
    yield made
    made.close()


def test_migrate_asks_refuses_and_says_what_is_wrong(live: Live, old: Celery, run: Run) -> None:
    assert run("migrate", live.server.url).out == "Moved no messages.\n"  # and nothing was asked
    run("migrate", live.server.toc_url, "--yes").fails(2, "is a timeout center already")
    run("migrate", "amqp://localhost", "--yes").fails(2, "redis://, rediss://")
    run("migrate", "redis://:hush@127.0.0.1:1/0", "--yes").fails(1, "redis://:**@127.0.0.1:1/0")
    run("migrate").fails(2, "redis://", "--to")
    run("migrate", live.server.url, "--to", live.server.url).fails(2, "--to")
    answer(old, "migrate", live.server.url, "--yes").fails(2, "not a timeout center")
    assert (
        "celery -A shop toc migrate redis://localhost:6379/0 --dry-run"
        in run("migrate", "--help").out
    )

    old.tasks["e2e.add"].apply_async((1, 2), countdown=HOUR)
    run("migrate", live.server.url).fails(2, "--yes")
    live.client.lpush("celery", "nonsense")
    [worker] = live.start_workers(
        1, "-c", "1", broker=live.server.url, worker_prefetch_multiplier=0
    )
    wait_until(lambda: live.client.hlen("unacked") == 1, 30)
    refused = run("migrate", live.server.url, "--yes")
    refused.fails(1, "from redis://", "stop its workers", "--force")
    counted = run("migrate", live.server.url, "--dry-run", "--json")
    assert (counted.code, counted.json["found"]) == (1, 1)
    assert "from redis://" in counted.json["refused"]
    run("migrate", live.server.url, "--dry-run").fails(1, "nothing would be moved", "--force")
    worker.container.end()
    live.client.lpush("celery", "nonsense")
    said = run("migrate", live.server.url, "--yes")
    said.fails(1, "1 message stays where it is")
    assert re.search(r"^celery +1$", said.out, re.M), said.out
    assert "Moved 1 message: 1 scheduled; 1 had been held by workers." in said.out
    run("migrate", live.server.url, "-Q", "celry", "--yes").fails(1, "there is no queue 'celry'")
    wrong = run("migrate", live.server.url, "--key-prefix", "shp:", "--yes")
    wrong.fails(1, "no key", "begins with the prefix 'shp:'; in use there: no prefix")
    assert "--force" not in wrong.err
    assert "nonsense" in said.out


def test_the_way_back_names_the_schedules_and_what_replaces_them(live: Live) -> None:
    """As text of Python that has the same times."""
    schedules = timeout_center(live.app).schedules
    add = live.app.tasks["e2e.add"]
    schedules.put("every", add, 90, args=(1,), kwargs={"y": 3}, overlap="skip", queue="urgent")
    nightly = crontab("*/20", "2-4", day_of_month="1")
    schedules.put("nightly", add, nightly, args=(1, 2), either_day=True)
    schedules.put("dusk", add, solar("sunset", 52.5, 13.4), args=(1, 2), options={"priority": 3})
    schedules.put("over", add, 1.5, args=(1, 2))
    schedules.pause("over")
    said = answer(live.app, "migrate", "--to", live.server.url, "--dry-run", "--json").json
    assert {one["name"] for one in said["schedules"]} == {"every", "over", "dusk", "nightly"}
    out = answer(live.app, "migrate", "--to", live.server.url, "--yes").out
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
