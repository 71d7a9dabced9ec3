"""What a beat has is read as it means it: an app's setting, and the tables of two other beats."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.beat import BeatLazyFunc
from celery.schedules import crontab, schedule

from celery_toc.beat import configured, sync
from celery_toc.beat.configured import Entry, Read, is_of_a_beat

from ..support.cases import each

NOW = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)


@pytest.fixture
def app():
    with Celery("shop", broker="memory://", set_as_current=False) as made:
        yield made


def only(read: Read) -> Entry:
    assert read.refused == []
    [entry] = read.entries
    return entry


def refusal(read: Read) -> str:
    assert read.entries == []
    [(_, reason)] = read.refused
    return reason


# -- beat_schedule


@pytest.mark.versions
def test_an_entry_of_beat_schedule_is_read_with_all_it_says(app):
    app.conf.beat_schedule = {
        "nightly": {
            "task": "shop.tidy",
            "schedule": crontab(minute="0", hour="3"),
            "args": (1,),
            "kwargs": {"deep": True},
            "options": {"queue": "slow", "expires": 60, "toc_misfire": "all", "toc_grace": 5},
        }
    }
    assert only(configured.read(app)) == Entry(
        *("nightly", "shop.tidy", crontab(minute="0", hour="3"), (1,), {"deep": True}),
        options={"queue": "slow", "expires": 60},
        rules={"misfire": "all", "grace": 5},
    )


@pytest.mark.versions
@pytest.mark.parametrize("every", [30, 30.0, timedelta(seconds=30), schedule(30)])
def test_an_interval_may_be_written_as_for_a_beat(app, every):
    app.conf.beat_schedule = {"poll": {"task": "shop.poll", "schedule": every}}
    assert only(configured.read(app)).schedule.run_every == timedelta(seconds=30)


@pytest.mark.versions
def test_what_is_added_when_the_app_is_configured_or_finalized_is_read(app):
    @app.task(name="shop.poll", shared=False)
    def poll(which: str) -> None: ...

    @app.on_after_configure.connect
    def early(sender: Celery, **_: Any) -> None:
        sender.add_periodic_task(10, sender.signature("shop.poll", ("early",)), name="early")

    @app.on_after_finalize.connect
    def late(sender: Celery, **_: Any) -> None:
        sender.add_periodic_task(20, poll.s("late"), name="late", queue="slow")

    app.finalize()
    early_one, late_one = configured.read(app).entries
    assert (early_one.name, list(early_one.args)) == ("early", ["early"])
    assert (late_one.name, late_one.options) == ("late", {"queue": "slow"})


@pytest.mark.versions
def test_results_that_do_not_expire_by_themselves_are_cleaned_up_as_by_a_beat():
    with Celery("shop", broker="memory://", backend="db+sqlite://", set_as_current=False) as app:
        entry = only(configured.read(app))
        assert (entry.name, entry.options) == ("celery.backend_cleanup", {"expires": 12 * 3600})
        app.conf.result_expires = None
        assert configured.read(app).entries == []


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"schedule": 30}, "it has no task"),
        ({"task": "shop.poll"}, "it has no schedule"),
        ({"task": "t", "schedule": 1e300}, "its schedule is 1e+300"),
        ({"task": "t", "schedule": float("nan")}, "its schedule is nan"),
        ({"task": "shop.poll", "schedule": 30, "arg": ()}, "it has arg, which no beat knows"),
        (30, "it is int, not a dictionary"),
        ({"task": "t", "schedule": 30, "args": (BeatLazyFunc(print),)}, "BeatLazyFunc"),
        ({"task": "t", "schedule": 30, "kwargs": {"a": BeatLazyFunc(print)}}, "BeatLazyFunc"),
    ],
)
def test_an_entry_that_cannot_be_read_is_named_and_the_others_are_read(app, given, reason):
    good = {"task": "shop.poll", "schedule": 30}
    app.conf.beat_schedule = {"bad": given, "good": good}
    read = configured.read(app)
    assert [entry.name for entry in read.entries] == ["good"]
    [(name, why)] = read.refused
    assert name == "bad"
    assert reason in why


def test_the_mark_that_a_beat_leaves_in_the_setting_is_no_header(app):
    headers = {"tenant": "eu", "celery_beat_task": True}
    entry = {"task": "shop.poll", "schedule": 30, "options": {"headers": headers}}
    app.conf.beat_schedule = {"poll": entry}
    assert only(configured.read(app)).options == {"headers": {"tenant": "eu"}}


# -- django-celery-beat


def row(**fields: Any) -> SimpleNamespace:
    given: dict[str, Any] = {
        "name": "poll",
        "task": "shop.poll",
        **dict.fromkeys(("interval", "crontab", "solar", "clocked", "queue", "exchange")),
        **dict.fromkeys(("routing_key", "priority", "expires", "expire_seconds", "start_time")),
        **dict.fromkeys(("last_run_at",)),
        "args": "[]",
        "kwargs": "{}",
        "headers": "{}",
        "one_off": False,
        "enabled": True,
        "total_run_count": 0,
    }
    return SimpleNamespace(**{**given, **fields})


def read_row(**fields: Any) -> Read:
    return sync.read_django([row(**fields)], NOW.timestamp())


EVERY = SimpleNamespace(every=5, period="minutes")


def test_a_row_is_read_with_all_it_says():
    fields = dict.fromkeys(("day_of_week", "day_of_month", "month_of_year"), "*")
    end = NOW + timedelta(days=1)
    entry = only(
        read_row(
            crontab=SimpleNamespace(minute="0", hour="3", timezone="Europe/Berlin", **fields),
            args='["eu"]',
            kwargs='{"deep": true}',
            queue="slow",
            priority=0,
            headers='{"tenant": 7, "periodic_task_name": "poll"}',
            expire_seconds=30,
            start_time=NOW,
            expires=end,
            enabled=False,
        )
    )
    assert entry == Entry(
        *("poll", "shop.poll", crontab(minute="0", hour="3"), ["eu"], {"deep": True}),
        options={"queue": "slow", "priority": 0, "headers": {"tenant": 7}, "expires": 30},
        rules={"timezone": "Europe/Berlin", "start": NOW.timestamp(), "end": end.timestamp()},
        paused=True,
    )


def test_what_happens_once_is_a_schedule_with_one_run():
    entry = only(read_row(interval=EVERY, one_off=True))
    assert entry.rules == {"max_runs": 1}
    when = NOW + timedelta(hours=1)
    entry = only(read_row(clocked=SimpleNamespace(clocked_time=when), one_off=True))
    assert entry.rules == {"max_runs": 1, "start": when.timestamp()}


@each(
    ("fields", "reason"),
    [
        ({}, "it has no schedule"),
        ({"interval": EVERY, "clocked": EVERY}, "it has interval and clocked, not one schedule"),
        ({"interval": EVERY, "args": "[1"}, "its args are not JSON"),
        ({"interval": EVERY, "kwargs": "[]"}, "its kwargs are list, not dict"),
        ({"interval": EVERY, "expires": NOW}, "it has expired at 2026-11-22T12:00:00+00:00"),
        ({"interval": EVERY, "one_off": True, "total_run_count": 1}, "and has run"),
        ({"clocked": SimpleNamespace(clocked_time=NOW)}, "its time has passed"),
        (
            {
                "crontab": SimpleNamespace(
                    timezone="UTC",
                    **dict.fromkeys(("hour", "day_of_month", "month_of_year"), "1"),
                    **{"minute": "61", "day_of_week": "*"},
                )
            },
            "its crontab cannot be read",
        ),
    ],
)
def test_a_row_that_cannot_be_taken_over_is_named_with_the_reason(fields, reason):
    assert reason in refusal(read_row(**fields))


# -- redbeat


def read_json(found: Any) -> Read:
    text = found if isinstance(found, str) or found is None else json.dumps(found)
    return sync.read_redbeat(iter([("poll", text)]))


EVERY_5 = {"__type__": "interval", "every": 300.0, "relative": False}


def test_what_redbeat_keeps_is_read_with_all_it_says():
    cron = {"__type__": "crontab", "minute": "0", "hour": "3", "day_of_week": "1-5"}
    cron |= {"day_of_month": "*", "month_of_year": "*"}
    moment = {"__type__": "datetime", "year": 2030, "month": 1, "day": 2, "hour": 3, "minute": 4}
    moment |= {"second": 5, "microsecond": 6, "timezone": "UTC"}
    entry = only(
        read_json(
            {
                "name": "poll",
                "task": "shop.poll",
                "args": ["eu"],
                "kwargs": {"deep": True},
                "options": {"queue": "slow", "expires": moment},
                "schedule": cron,
                "enabled": False,
            }
        )
    )
    assert entry.schedule == crontab(minute="0", hour="3", day_of_week="1-5")
    assert (entry.args, entry.kwargs, entry.paused) == (["eu"], {"deep": True}, True)
    expires = datetime(2030, 1, 2, 3, 4, 5, 6, tzinfo=timezone.utc)
    assert entry.options == {"queue": "slow", "expires": expires}


@each(
    ("found", "reason"),
    [
        (None, "its key has no definition"),
        ("{", "its definition cannot be read"),
        ({"schedule": EVERY_5}, "it names no task"),
        ({"task": "t", "schedule": {"__type__": "rrule", "freq": 3}}, "its schedule is rrule"),
        ({"task": "t", "schedule": 5}, "its schedule is int"),
        ({"task": "t", "schedule": {"__type__": "crontab", "minute": "61"}}, "its crontab cannot"),
        ({"task": "t", "schedule": {"__type__": "interval"}}, "its interval cannot be read"),
    ],
)
def test_an_entry_of_redbeat_that_cannot_be_taken_is_named_with_the_reason(found, reason):
    assert reason in refusal(read_json(found))


# -- a beat that runs beside


@pytest.mark.versions
@each(
    ("headers", "expected"),
    [
        ({"celery_beat_task": True}, True),
        ({"periodic_task_name": "poll"}, True),
        ({"task": "shop.poll"}, False),
        ({"celery_beat_task": True, "x-schedule": "poll"}, False),
    ],
)
def test_a_message_of_a_beat_is_known_by_its_headers(headers, expected):
    assert is_of_a_beat(headers) is expected
