"""``celery toc schedule``: each command, on an app whose broker is a timeout center."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import pools

from celery_toc import timeout_center

from ..support.cases import each
from ..support.cluster import Cluster
from ..support.commands import answer
from ..support.servers import Server

Run = Callable[..., Any]


@pytest.fixture
def app(server: Server | Cluster, client: redis.Redis) -> Iterator[Celery]:
    with Celery("shop", broker=server.toc_url, set_as_current=False) as made:

        @made.task(name="shop.tidy", shared=False)
        def tidy(*args: Any, **kwargs: Any) -> None: ...

        @made.task(name="shop.two", shared=False)
        def two(one: int, other: int) -> None: ...

        yield made
    pools.reset()


@pytest.fixture
def run(app: Celery) -> Run:
    return partial(answer, app, "schedule")


@pytest.fixture
def ask(run: Run) -> Run:
    """Run a command that succeeds, and return the document that it prints."""

    def ask(*words: str) -> Any:
        said = run(*words, "--json")
        assert said.code == 0, said.err
        return said.json

    return ask


@each(
    ("said", "kept"),
    [
        ("@daily", "0 0 * * *"),
        ("@Weekly", "0 0 * * 0"),
        ("0 3 * * 7", "0 3 * * 0"),
        ("0 3 * * 5-7", "0 3 * * 0,5,6"),
        ("0 3 * * 0-7", "0 3 * * *"),
        ("0 3 * * 1-7/2", "0 3 * * 0,1,3,5"),
        ("0 3 * * 7,1", "0 3 * * 0,1"),
        ("0 3 13 * 5", "0 3 13 * 5"),
    ],
)
def test_a_crontab_is_read_as_cron_reads_it(ask, app, said, kept):
    assert ask("put", "nightly", "shop.tidy", "--cron", said)["schedule"] == kept


def test_a_schedule_is_put_shown_changed_and_deleted(run, ask, app):
    put = ask(
        *("put", "nightly", "shop.tidy", "--cron", "0 3 * * *", "--timezone", "Europe/Berlin"),
        *("--args", "[1]", "--kwargs", '{"deep": true}', "--options", '{"priority": 3}'),
        *("--queue", "slow", "--misfire", "all", "--grace", "5m", "--overlap", "skip"),
        *("--jitter", "10s", "--start", "1h", "--max-runs", "7"),
    )
    assert (put["is_new"], put["has_changed"]) == (True, True)
    rules = {
        **{"name": "nightly", "task": "shop.tidy", "schedule": "0 3 * * *", "queue": "slow"},
        **{"timezone": "Europe/Berlin", "args": [1], "kwargs": {"deep": True}, "max_runs": 7},
        **{"misfire": "all", "grace_seconds": 300.0, "overlap": "skip", "jitter_seconds": 10.0},
        **{"state": "active", "runs": 0, "owner": None, "end": None, "last": None},
    }
    assert rules.items() <= put.items()
    assert put["next"].endswith(("T01:00:00.000Z", "T02:00:00.000Z"))
    shown = ask("show", "nightly")
    assert rules.items() <= shown.items()
    assert len(shown["upcoming"]) == 5
    assert shown["upcoming"][0] == shown["next"]
    assert shown["history"] == []
    assert ask("list")["schedules"] == [{k: shown[k] for k in shown.keys() - _BESIDE}]
    again = ask("put", "nightly", "shop.tidy", "--every", "30s")
    assert (again["is_new"], again["has_changed"], again["schedule"]) == (False, True, "every 30 s")
    again = ask("put", "nightly", "shop.tidy", "--every", "30s")
    assert (again["is_new"], again["has_changed"]) == (False, False)
    assert ask("delete", "nightly", "--yes") == {"deleted": ["nightly"]}
    assert timeout_center(app).schedules.count() == 0


_BESIDE = {"upcoming", "history", "edits"}


def test_a_schedule_is_paused_resumed_skipped_and_run(ask, app):
    ask("put", "poll", "shop.tidy", "--every", "1h")
    [paused] = ask("pause", "poll")["schedules"]
    assert (paused["state"], paused["next"]) == ("paused", None)
    assert ask("list", "--state", "paused")["schedules"] == [paused]
    [resumed] = ask("resume", "poll")["schedules"]
    assert resumed["state"] == "active"
    [skipped] = ask("skip", "poll")["schedules"]
    assert skipped["next"] > resumed["next"]
    [sent] = ask("run", "poll")["schedules"]
    assert sent["name"] == "poll"
    assert timeout_center(app).get(sent["id"])
    [by_hand] = [one for one in ask("show", "poll")["history"] if one["by_hand"]]
    assert by_hand["id"] == sent["id"]


def test_a_schedule_is_back_filled_leaves_days_out_and_shows_who_changed_it(
    ask, run, app, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "2030.txt").write_text("2030-12-24\n2030-12-25\n")
    made = ask("put", "a", "shop.tidy", "--every", "1h", "--exclude", "2030.txt")
    assert made["exclude"] == ["2030-12-24", "2030-12-25"]
    sent = ask("backfill", "a", "--from", "-200m", "--rate", "2")
    assert len(sent["ids"]) == 4  # of now, too
    assert len(timeout_center(app).get(sent["ids"])) == 4
    assert run("backfill", "a", "--from", "-200m").out == "Sent 0 firings of 'a', 10 a second.\n"
    ask("put", "a", "shop.tidy", "--every", "2h", "--exclude", "2030-12-25")
    whats = [one["what"] for one in ask("show", "a")["edits"]]
    assert whats[0] == "put: schedule every 1 h -> every 2 h, exclude"
    assert whats[1].startswith("sent 4 of the past, from 20")
    shown = run("show", "a").out
    assert "not on" in shown and "2030-12-25" in shown and whats[0] in shown


@pytest.mark.cluster
def test_schedules_are_listed_as_they_fire_filtered_and_in_pages(ask, run):
    for name, every in (("c", "3h"), ("a", "1h"), ("b", "2h")):
        ask("put", name, "shop.tidy", "--every", every)
    ask("put", "other", "shop.poll", "--every", "4h", "--queue", "slow")

    def names(*words: str) -> list[str]:
        return [one["name"] for one in ask("list", *words)["schedules"]]

    assert names() == ["a", "b", "c", "other"]
    assert names("--queue", "slow") == ["other"]
    assert names("--task", "*.poll") == ["other"]
    assert names("--owner", "beat:*") == []
    first = ask("list", "--limit", "2")
    assert [one["name"] for one in first["schedules"]] == ["a", "b"]
    assert names("--limit", "2", "--after", first["after"]) == ["c", "other"]
    table = run("list").out.splitlines()
    assert table[0].split()[:3] == ["NAME", "SCHEDULE", "TASK"]
    assert [line.split()[0] for line in table[1:]] == ["a", "b", "c", "other"]


@each(
    ("words", "code", "said"),
    [
        (("show", "nigthly"), 3, "there is no schedule 'nigthly'; do you mean 'nightly'?"),
        (("pause", "x"), 3, "there is no schedule 'x'; 'celery toc schedule list' shows all"),
        (("resume", "x"), 3, "there is no schedule 'x'"),
        (("skip", "x"), 3, "there is no schedule 'x'"),
        (("run", "x"), 3, "there is no schedule 'x'"),
        (("delete", "x", "--yes"), 3, "there is no schedule 'x'"),
        (("delete", "nightly"), 2, "pass --yes"),
        (("list", "--queue", "nowhere"), 3, "there is no queue 'nowhere'"),
        (("put", "x", "shop.tidy"), 2, "say one of --cron, --every and --sun"),
        (("put", "x", "t", "--every", "1h", "--cron", "* * * * *"), 2, "say one of"),
        (("put", "x", "t", "--cron", "* * *"), 2, "has 3 fields, not five"),
        (("put", "x", "t", "--cron", "61 * * * *"), 2, "the schedule cannot be read"),
        (("put", "x", "t", "--cron", "@reboot"), 2, "there is no @reboot; there are @yearly"),
        (("put", "x", "t", "--cron", "* * * * 8"), 2, "the schedule cannot be read"),
        (("put", "x", "t", "--every", "soon"), 2, "'soon' is not a span of time"),
        (("put", "x", "t", "--sun", "sunrise"), 2, "--sun needs a place"),
        (("put", "x", "t", "--every", "1h", "--args", "{}"), 2, 'is not JSON such as [1, "a"]'),
        (("put", "x", "t", "--every", "1h", "--start", "soon"), 2, "--start: 'soon' is not a time"),
        (("put", "x", "t", "--every", "0s"), 2, "the shortest interval is"),
        (("put", "x", "t", "--every", "1h", "--timezone", "Mars"), 2, "'Mars' is no time zone"),
        (("put", "x", "t", "--every", "1h", "--options", '{"eta": 1}'), 2, "eta"),
        (("put", "x", "t", "--every", "1h", "--exclude", "2026-02-30"), 2, "exclude='2026-02-30'"),
        (("put", "x", "t", "--every", "1h", "--exclude", "no.ics"), 2, "No such file"),
        (("backfill", "x", "--from", "-1h"), 3, "there is no schedule 'x'"),
        (("backfill", "nightly", "--from", "1h"), 2, "is no range of the past"),
        (("backfill", "nightly", "--from", "soon"), 2, "--from: 'soon' is not a time"),
        (("put", "x", "shop.two", "--every", "1h"), 2, "task 'shop.two' cannot be sent so: two()"),
        (("import", "django", "redis://x"), 2, "leave out the URL"),
        (("import", "redbeat"), 2, "say where redbeat keeps its entries"),
        (("import", "redbeat", "redis://localhost:1/0"), 1, "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_one_line_that_says_why(ask, run, words, code, said):
    ask("put", "nightly", "shop.tidy", "--cron", "0 3 * * *")
    run(*words).fails(code, said)
    assert [one["name"] for one in ask("list")["schedules"]] == ["nightly"]


@pytest.mark.cluster
def test_of_several_names_those_that_are_there_are_done(run, ask):
    ask("put", "a", "shop.tidy", "--every", "1h")
    said = run("pause", "x", "a", "--json")
    assert said.code == 3
    assert [one["name"] for one in said.json["schedules"]] == ["a"]


def test_what_an_apps_setting_has_put_is_not_changed_by_mistake(run, ask, app):
    app.conf.beat_schedule = {"poll": {"task": "shop.tidy", "schedule": 60}}
    assert ask("sync")["put"] == ["poll"]
    said = run("put", "poll", "shop.tidy", "--every", "1h")
    assert said.code == 1
    assert "comes from the beat_schedule of app 'shop': change it there" in said.err
    assert ask("put", "poll", "shop.tidy", "--every", "1h", "--force")["owner"] is None


def test_sync_puts_what_the_setting_has_and_removes_what_is_gone(run, ask, app):
    app.conf.beat_schedule = {
        "a": {"task": "shop.tidy", "schedule": 60},
        "b": {"task": "shop.tidy", "schedule": 60},
    }
    dry = ask("sync", "--dry-run")
    assert dry == {"dry_run": True, "put": ["a", "b"], "removed": [], "unchanged": 0, "refused": []}
    assert ask("list")["schedules"] == []
    assert ask("sync") == {**dry, "dry_run": False}
    app.conf.beat_schedule = {
        "b": {"task": "shop.tidy", "schedule": 60},
        "c": {"task": "shop.tidy", "schedule": "daily"},
    }
    said = run("sync")
    assert said.code == 1
    assert "a: removed" in said.out
    assert "0 put, 1 removed, 1 unchanged." in said.out
    assert "its schedule is str: write crontab, timedelta or solar" in said.out


def test_sync_puts_a_release_that_was_taken_back(ask, app):
    for entries in (("a",), ("b",), ("a",)):
        app.conf.beat_schedule = {name: {"task": "shop.tidy", "schedule": 60} for name in entries}
        ask("sync")
        assert [one["name"] for one in ask("list")["schedules"]] == list(entries)


def test_sync_of_an_app_without_a_name_says_so(server, client):
    with Celery(broker=server.toc_url, set_as_current=False) as app:
        answer(app, "schedule", "sync").fails(2, "has no name: Celery('shop')")


def definition(name: str, **fields: Any) -> str:
    every = {"__type__": "interval", "every": 300.0, "relative": False}
    given = {"name": name, "task": "shop.tidy", "args": [1], "kwargs": {}, "options": {}}
    return json.dumps({**given, "schedule": every, "enabled": True, **fields})


@pytest.mark.cluster
def test_what_redbeat_keeps_is_taken_over(run, ask, single_server):
    with single_server.client(3) as client:
        entries = {
            "poll": definition("poll"),
            "off": definition("off", enabled=False),
            "rule": definition("rule", schedule={"__type__": "rrule", "freq": 3}),
        }
        for name, text in entries.items():
            client.hset(f"redbeat:{name}", mapping={"definition": text, "meta": "{}"})
            client.zadd("redbeat::schedule", {f"redbeat:{name}": 1})
        url = single_server.url.removesuffix("/0") + "/3"
        tried = run("import", "redbeat", url, "--dry-run")
        assert "3 entries: 2 would be put, 0 unchanged, 1 not taken." in tried.out
        assert ask("list")["schedules"] == []
        said = run("import", "redbeat", url, "--json")
        assert said.code == 1
        done = said.json
        assert (done["put"], done["paused"], done["unchanged"]) == (["off", "poll"], ["off"], 0)
        [refused] = done["refused"]
        assert refused["name"] == "rule"
        assert "its schedule is rrule" in refused["reason"]
        assert run("import", "redbeat", url, "--json").json["unchanged"] == 2
        found = {one["name"]: one for one in ask("list", "--owner", "import:redbeat")["schedules"]}
        assert {name: one["state"] for name, one in found.items()} == {
            "poll": "active",
            "off": "paused",
        }
        assert (found["poll"]["schedule"], found["poll"]["args"]) == ("every 5 min", [1])
        client.flushdb()
