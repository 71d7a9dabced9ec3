"""The tables of django-celery-beat and redbeat, as these packages write them, are taken over."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from celery.schedules import crontab, schedule
from kombu import pools

from celery_toc import timeout_center
from celery_toc.beat.sync import import_entries, read_redbeat, redbeat_definitions

from ..support.cluster import Cluster
from ..support.servers import Server

ROOT = Path(__file__).parents[2]

#: A Django project with a row of each kind, which is imported on trial, and then twice.
PROGRAM = """
import json, sys
from datetime import datetime, timedelta, timezone

import django
from django.conf import settings

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=["django_celery_beat"], USE_TZ=True, TIME_ZONE="UTC",
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
)
django.setup()

from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner
from django.core.management import call_command
from django_celery_beat.models import (
    ClockedSchedule, CrontabSchedule, IntervalSchedule, PeriodicTask
)

from celery_toc import timeout_center
from celery_toc.cli import toc

call_command("migrate", verbosity=0)
now = datetime.now(timezone.utc).replace(microsecond=0)
every = IntervalSchedule.objects.create(every=10, period="minutes")
night = CrontabSchedule.objects.create(minute="30", hour="2", timezone="Europe/Berlin")
later = ClockedSchedule.objects.create(clocked_time=now + timedelta(hours=3))
past = ClockedSchedule.objects.create(clocked_time=now - timedelta(hours=3))
add = PeriodicTask.objects.create
add(name="every", task="shop.tidy", interval=every, args='["eu"]', kwargs='{"deep": true}',
    last_run_at=now - timedelta(minutes=4))
add(name="night", task="shop.tidy", crontab=night, queue="slow", priority=3, expire_seconds=60,
    headers='{"tenant": "eu"}')
add(name="off", task="shop.tidy", interval=every, enabled=False)
add(name="once", task="shop.tidy", clocked=later, one_off=True)
add(name="over", task="shop.tidy", clocked=past, one_off=True)
add(name="configured", task="shop.tidy", interval=every)
broken = add(name="broken", task="shop.tidy", interval=every)
PeriodicTask.objects.filter(pk=broken.pk).update(args="[1")

app = Celery("shop", broker=sys.argv[1])

@app.task(name="shop.tidy")
def tidy(*args, **kwargs): ...

app.conf.beat_schedule = {"configured": {"task": "shop.tidy", "schedule": 60}}

def run(command):
    context = CLIContext(app=app, no_color=True, workdir=None)
    said = CliRunner().invoke(
        toc, [*command.split(), "--json"], obj=context, catch_exceptions=False
    )
    return said.exit_code, json.loads(said.stdout)

found = [run(command) for command in sys.argv[2:]]
kept = {
    one.name: [one.text, one.timezone, one.queue, one.args, one.kwargs, one.state, one.max_runs,
               (one.next - now).total_seconds() if one.next else None, one.options]
    for one in timeout_center(app).schedules.each()
}
print(json.dumps([found, kept]))
"""


def test_the_tables_of_django_celery_beat_are_taken_over(
    server: Server | Cluster, client: redis.Redis, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    page = (ROOT / "docs" / "recurring.md").read_text()
    dry, put = re.findall("^celery -A shop toc (schedule import django.*)", page, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), server.toc_url, dry, put, put],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [(_, tried), (code, first), (_, second)], kept = json.loads(done.stdout)
    names = ["every", "night", "off", "once"]
    assert (tried["dry_run"], tried["put"]) == (True, names)
    assert (code, first["found"], first["put"], first["paused"]) == (1, 7, names, ["off"])
    reasons = {one["name"]: one["reason"] for one in first["refused"]}
    assert sorted(reasons) == ["broken", "configured", "over"]
    assert "its args are not JSON" in reasons["broken"]
    assert "its time has passed" in reasons["over"]
    assert "in the app's beat_schedule" in reasons["configured"]
    assert (second["put"], second["unchanged"]) == ([], 4)

    text, _, queue, args, kwargs, state, _, left, _ = kept["every"]
    assert (text, queue, args, kwargs, state) == (
        *("every 10 min", "celery", ["eu"], {"deep": True}),
        "active",
    )
    assert left == 360  # ten minutes after its last run
    text, zone, queue, *_, options = kept["night"]
    assert (text, zone, queue) == ("30 2 * * *", "Europe/Berlin", "slow")
    assert options == {
        **{"queue": "slow", "priority": 3, "expires": 60},
        "headers": {"tenant": "eu"},
    }
    assert kept["off"][5] == "paused"
    assert (kept["once"][6], kept["once"][7]) == (1, 3 * 3600)


@pytest.fixture
def app(server: Server | Cluster, single_server: Server) -> Iterator[Celery]:
    with Celery("shop", broker=server.toc_url, set_as_current=False) as made:
        made.conf.redbeat_redis_url = single_server.url.removesuffix("/0") + "/3"

        @made.task(name="shop.tidy", shared=False)
        def tidy(*args: Any, **kwargs: Any) -> None: ...

        yield made
    pools.reset()


def test_what_redbeat_writes_is_taken_over(
    app: Celery, client: redis.Redis, single_server: Server
) -> None:
    from redbeat import RedBeatSchedulerEntry
    from redbeat.schedules import rrule

    night = crontab(minute="0", hour="3", day_of_week="1-5")
    made = [
        ("every", schedule(timedelta(minutes=5)), {"args": ["eu"], "kwargs": {"deep": True}}),
        ("night", night, {"options": {"queue": "slow", "priority": 3}}),
        ("off", schedule(60), {"enabled": False}),
        ("rule", rrule("DAILY"), {}),
    ]
    for name, when, more in made:
        RedBeatSchedulerEntry(name, "shop.tidy", when, app=app, **more).save()
    with single_server.client(3) as kept:
        read = read_redbeat(redbeat_definitions(kept))
        done = import_entries(app, timeout_center(app), read, "import:redbeat")
        kept.flushdb()
    assert (done.put, done.paused) == (["every", "night", "off"], ["off"])
    assert [one.name for one in done.refused] == ["rule"]
    found = {one.name: one for one in timeout_center(app).schedules.each()}
    assert {name: one.text for name, one in found.items()} == {
        "every": "every 5 min",
        "night": "0 3 * * 1-5",
        "off": "every 1 min",
    }
    assert (found["every"].args, found["every"].kwargs) == (["eu"], {"deep": True})
    assert (found["night"].queue, found["off"].state) == ("slow", "paused")
