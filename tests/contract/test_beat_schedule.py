"""What an app has in its ``beat_schedule`` becomes schedules, and several releases do not fight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
import redis
from celery import Celery
from celery.schedules import crontab
from kombu import pools

from celery_toc import timeout_center
from celery_toc.beat.configured import Entry, Read, Refused
from celery_toc.beat.sync import Outcome, Sync, import_entries

from ..support.cluster import Cluster
from ..support.servers import Server

HOUR = timedelta(hours=1)

MakeApp = Callable[..., Celery]


@pytest.fixture
def make_app(server: Server | Cluster, client: redis.Redis) -> Iterator[MakeApp]:
    made = []

    def make(name: str = "shop", **entries: Any) -> Celery:
        app = Celery(name, broker=server.toc_url, set_as_current=False)

        @app.task(name="shop.tidy", shared=False)
        def tidy(*args: Any, **kwargs: Any) -> None: ...

        app.conf.beat_schedule = {
            entry: {"task": "shop.tidy", "schedule": HOUR, **more}
            for entry, more in entries.items()
        }
        made.append(app)
        return app

    yield make
    for app in made:
        app.close()
    pools.reset()


class Worker:
    """What a worker does of it, one look at a time."""

    def __init__(self, app: Celery, name: str) -> None:
        self.center = timeout_center(app)
        self.sync = Sync(app, self.center, name)

    def look(self, **options: Any) -> Outcome:
        return self.sync.run(**options)


def kept(app: Celery) -> dict[str, Any]:
    return {one.name: one for one in timeout_center(app).schedules.each()}


@pytest.mark.cluster
def test_what_is_new_is_put_what_changed_is_changed_and_what_is_gone_is_removed(make_app):
    old = make_app(a={}, b={"args": (1,)}, c={})
    assert Worker(old, "one").look().put == ["a", "b", "c"]
    before = kept(old)
    assert {one.owner for one in before.values()} == {"beat:shop"}
    new = make_app(b={"args": (2,)}, c={}, d={"schedule": crontab(minute="0", hour="3")})
    outcome = Worker(new, "two").look()
    assert (outcome.put, outcome.removed, outcome.unchanged) == (["b", "d"], ["a"], 1)
    after = kept(new)
    assert sorted(after) == ["b", "c", "d"]
    assert (after["b"].args, after["d"].text) == ([2], "0 3 * * *")
    assert (after["c"].next, after["c"].changed) == (before["c"].next, before["c"].changed)


def test_the_same_setting_is_one_call_for_each_further_worker(make_app, monkeypatch):
    app = make_app(a={}, b={})
    Worker(app, "first").look()
    second = Worker(app, "second")
    monkeypatch.setattr(type(second.center.schedules), "list", None)
    monkeypatch.setattr(type(second.center.schedules), "plan", None)
    for _ in range(2):
        outcome = second.look()
        assert (outcome.told.verdict, outcome.put, outcome.removed) == ("in force", [], [])


def test_a_worker_of_the_old_release_puts_nothing_back_and_removes_nothing(make_app):
    old, new = make_app(a={}, b={"args": (1,)}), make_app(b={"args": (2,)}, c={})
    Worker(old, "old 1").look()
    Worker(new, "new 1").look()
    before = {name: one.fingerprint for name, one in kept(new).items()}
    for name in ("old 1", "old 2", "old 3"):  # of these two have been started just now
        outcome = Worker(old, name).look()
        assert (outcome.told.verdict, outcome.put, outcome.removed) == ("former", [], [])
        assert outcome.told.process == "new 1"
    assert {name: one.fingerprint for name, one in kept(new).items()} == before


def test_a_later_release_is_in_force_although_an_earlier_one_is_seen_for_the_first_time(make_app):
    old, new = make_app(a={}), make_app(b={})
    old.conf.toc_beat_release, new.conf.toc_beat_release = "2026.9", "2026.10"
    Worker(new, "new").look()
    assert Worker(old, "old").look().told.verdict == "former"
    assert sorted(kept(new)) == ["b"]


def test_a_release_that_is_taken_back_can_be_put_by_hand(make_app):
    old, new = make_app(a={}), make_app(b={})
    Worker(old, "old").look()
    Worker(new, "new").look()
    outcome = Worker(old, "the operator").look(force=True)
    assert (outcome.put, outcome.removed) == (["a"], ["b"])
    assert Worker(new, "new").look().told.verdict == "former"


def test_apps_with_the_same_names_do_not_fight(make_app):
    shop, blog = make_app("shop", a={}, b={}), make_app("blog", b={"args": (1,)}, c={})
    Worker(shop, "shop").look()
    outcome = Worker(blog, "blog").look()
    assert (outcome.put, outcome.removed) == (["c"], [])
    [(name, reason)] = outcome.refused
    assert name == "b"
    assert "put by 'beat:shop'" in reason
    blog.conf.toc_beat_prefix = "blog:"
    outcome = Worker(blog, "blog").look()
    assert (outcome.put, outcome.removed) == (["blog:b", "blog:c"], ["c"])
    assert sorted(kept(shop)) == ["a", "b", "blog:b", "blog:c"]


def test_what_was_put_by_hand_is_left_alone(make_app):
    app = make_app(a={}, b={})
    timeout_center(app).schedules.put("a", "shop.tidy", 60)
    timeout_center(app).schedules.put("mine", "shop.tidy", 60)
    outcome = Worker(app, "one").look()
    assert outcome.put == ["b"]
    assert [one.name for one in outcome.refused] == ["a"]
    assert sorted(kept(app)) == ["a", "b", "mine"]
    assert kept(app)["a"].schedule.run_every == timedelta(minutes=1)


def test_a_pause_outlives_a_release(make_app):
    old, new = make_app(a={"args": (1,)}), make_app(a={"args": (2,)})
    Worker(old, "old").look()
    timeout_center(old).schedules.pause("a")
    Worker(new, "new").look()
    found = kept(new)["a"]
    assert (found.args, found.state) == ([2], "paused")


def test_an_entry_that_cannot_be_put_is_named_and_the_others_are_put(make_app):
    Worker(make_app(a={}, b={}, c={}), "before").look()
    app = make_app(
        a={"schedule": "daily"},
        b={"args": (object(),)},
        c={"args": (1,)},
        d={},
        e={"schedule": timedelta.max},
        f={"options": {"toc_end": 1e9}},
        g={"options": {"toc_start": datetime.max, "toc_timezone": "America/New_York"}},
    )
    outcome = Worker(app, "one").look()
    assert (outcome.put, outcome.removed) == (["c", "d"], [])
    reasons = dict(outcome.refused)
    assert "after the year 2255" in reasons["e"]
    assert "end=2001-09-09T01:46:40+00:00 is in the past" in reasons["f"]
    assert sorted(reasons) == ["a", "b", "e", "f", "g"]
    assert "its schedule is str" in reasons["a"]
    assert "not JSON serializable" in reasons["b"]
    assert sorted(kept(app)) == ["a", "b", "c", "d"]  # what cannot be put stays as it was


def test_what_is_added_to_the_setting_later_is_put(make_app):
    app = make_app(a={})
    worker = Worker(app, "one")
    worker.look()
    app.conf.beat_schedule["b"] = {"task": "shop.tidy", "schedule": HOUR}
    assert worker.look().put == ["b"]


def test_arguments_whose_text_is_never_the_same_make_no_new_edition(make_app):
    first, second = (make_app(a={"args": ({3, 1, 2},), "kwargs": {"b": 1, "a": 2}}) for _ in "12")
    second.conf.beat_schedule["a"]["kwargs"] = {"a": 2, "b": 1}
    editions = {Worker(app, "it").look().told.in_force for app in (first, second)}
    assert len(editions) == 1


@pytest.mark.cluster
def test_where_a_task_is_routed_belongs_to_the_edition(make_app):
    old, new = make_app(a={}), make_app(a={})
    new.conf.task_routes = {"shop.tidy": {"queue": "slow"}}
    Worker(old, "old").look()
    assert Worker(new, "new").look().put == ["a"]
    assert kept(new)["a"].queue == "slow"


def test_who_has_lost_the_right_to_put_stops(make_app, client, monkeypatch):
    """It was stopped for longer than the others wait, and a new release came."""
    monkeypatch.setattr("celery_toc.beat.sync.RENEW", -1.0)
    old, new = make_app(a={}, b={}, c={}), make_app(d={})
    monkeypatch.setattr("celery_toc.beat.sync.TOGETHER", 1)
    stalled, keep = Worker(old, "stalled"), type(timeout_center(old).schedules).keep_many
    done: list[str] = []

    def keep_and_stall(self: Any, plans: Any, **how: Any) -> Any:
        done.append(plans[0].name)
        if len(done) == 1:
            key = stalled.center.keys.edition("shop")
            client.hset(key, "until", 0)
            Worker(new, "new").look()
        return keep(self, plans, **how)

    monkeypatch.setattr(type(stalled.center.schedules), "keep_many", keep_and_stall)
    outcome = stalled.look()
    assert outcome.told.verdict == "former"
    assert done == ["a", "d"]
    assert sorted(kept(new)) == ["a", "d"]  # it has put one when it no longer had the right
    assert Worker(new, "any").look().removed == ["a"]  # so the new one's is put once more
    assert Worker(new, "any").look().told.verdict == "in force"


def test_a_run_on_trial_changes_nothing(make_app):
    app = make_app(a={}, b={})
    Worker(app, "one").look()
    new = make_app(a={"args": (1,)})
    before = {name: one.fingerprint for name, one in kept(app).items()}
    plan = Worker(new, "two").sync.plan()
    assert (plan.put, plan.removed, plan.unchanged) == (["a"], ["b"], 0)
    assert {name: one.fingerprint for name, one in kept(app).items()} == before


# -- other beats' tables


def imported(app: Celery, *entries: Entry, **options: Any) -> Any:
    read = Read(list(entries), [])
    return import_entries(app, timeout_center(app), read, "import:django", **options)


def entry(name: str, **more: Any) -> Entry:
    return Entry(name, "shop.tidy", timedelta(minutes=5), **more)


@pytest.mark.cluster
def test_an_import_can_be_tried_and_repeated(make_app):
    app = make_app()
    entries = (entry("a"), entry("b", args=(1,), paused=True))
    assert imported(app, *entries, dry_run=True) == (["a", "b"], ["b"], 0, [])
    assert kept(app) == {}
    assert imported(app, *entries) == (["a", "b"], ["b"], 0, [])
    found = kept(app)
    assert {name: one.state for name, one in found.items()} == {"a": "active", "b": "paused"}
    timeout_center(app).schedules.resume("b")
    assert imported(app, *entries) == ([], [], 2, [])
    assert imported(app, entry("a", args=(2,))) == (["a"], [], 0, [])
    assert kept(app)["b"].state == "active"


def test_an_import_leaves_what_others_have_put_unless_it_is_forced(make_app):
    app = make_app(tidy={})
    timeout_center(app).schedules.put("a", "shop.tidy", 60)
    done = imported(app, entry("a"), entry("tidy"), entry("b"))
    assert done.put == ["b"]
    reasons = dict(done.refused)
    assert "put by hand: --force replaces it" in reasons["a"]
    assert "in the app's beat_schedule" in reasons["tidy"]
    assert imported(app, entry("a"), force=True).put == ["a"]
    assert kept(app)["a"].owner == "import:django"


def test_an_import_names_what_cannot_be_put(make_app):
    app = make_app()
    done = imported(app, Entry("a", "shop.tidy", 0), entry("b", args=(object(),)), entry("c"))
    assert done.put == ["c"]
    assert [one.name for one in done.refused] == ["a", "b"]
    assert all(isinstance(one, Refused) for one in done.refused)


def test_what_the_server_has_lost_is_put_back(make_app, client):
    app = make_app(a={}, b={})
    worker = Worker(app, "one")
    worker.look()
    client.flushall()
    assert worker.look().put == ["a", "b"]
    assert sorted(kept(app)) == ["a", "b"]


def test_a_release_that_is_taken_back_is_not_put_again_by_its_workers_that_still_run(make_app):
    old, new = make_app(a={}), make_app(b={})
    old.conf.toc_beat_release, new.conf.toc_beat_release = "1", "2"
    Worker(old, "old").look()
    Worker(new, "new").look()
    Worker(old, "the operator").look(force=True)
    assert Worker(new, "new").look().told.verdict == "former"
    assert Worker(old, "old again").look().told.verdict == "in force"
    assert sorted(kept(old)) == ["a"]


def test_an_entry_that_another_app_has_taken_meanwhile_is_not_removed(make_app, monkeypatch):
    """Its name came free between the look and the removal, and was put by somebody else."""
    old, new, blog = make_app(a={}, b={}), make_app(b={}), make_app("blog", a={})
    Worker(old, "old").look()
    worker = Worker(new, "new")
    compare = worker.sync._compare

    def compare_and_lose() -> Any:
        found = compare()
        if found[1]:
            timeout_center(old).schedules.delete("a")
            Worker(blog, "blog").look()
        return found

    monkeypatch.setattr(worker.sync, "_compare", compare_and_lose)
    outcome = worker.look()
    assert outcome.removed == []
    assert kept(new)["a"].owner == "beat:blog"
