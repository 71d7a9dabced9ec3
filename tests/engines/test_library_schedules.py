"""Schedules are in the task library, and come back with a rebuild (X12)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, event

from celery_toc import timeout_center
from celery_toc.worker import schedules
from kombu_toc import TimeoutCenter
from kombu_toc.center.calls import ScheduleChange, ScheduleFiring
from kombu_toc.library.putting import Schedules
from kombu_toc.library.schema import SCHEDULES

from ..support.fixtures import own_server
from ..support.library import rebuilt

pytestmark = pytest.mark.usefixtures("client")


@pytest.fixture
def app(app: Celery, options: dict[str, Any]) -> Iterator[Celery]:
    app.conf.broker_transport_options = options
    yield app
    recorder_of(app).close()


def recorder_of(app: Celery) -> Any:
    return timeout_center(app).center.recorder.recorder


def rows(store: Any) -> dict[str, Any]:
    return {
        row["name"]: row
        for database in store.shards.databases
        for row in database.read(SCHEDULES.select().where(SCHEDULES.c.record != ""))
    }


@own_server
def test_schedules_and_their_next_firings_come_back(app, client, store):
    center = timeout_center(app)
    for number in range(12):
        center.schedules.put(f"each-{number}", "shop.remind", 3600 + number, args=(number,))
    center.schedules.pause("each-3")
    center.schedules.skip_next("each-4")
    center.schedules.delete("each-5")
    recorder_of(app).flush()
    before = {one.name: one for one in center.schedules.each()}
    assert rows(store).keys() == before.keys()
    messages = {one.id: one for one in center.center.scan("celery", limit=100).messages}
    client.flushall()
    client.config_resetstat()
    assert center.library.rebuild().put == len(before) == 11
    calls = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert calls < 2 * len(before)  # one for each, and a read of all that lie in one database
    assert center.library.rebuild().put == 0
    assert {one.name: one for one in center.schedules.each()} == before
    after = {one.id: one for one in center.center.scan("celery", limit=100).messages}
    assert after.keys() == messages.keys()
    assert {one.body for one in after.values()} == {one.body for one in messages.values()}


def test_all_is_written_when_a_flush_ends_also_what_another_thread_writes(app, client, store):
    begun, go_on = threading.Event(), threading.Event()

    def stall(connection: object, cursor: object, statement: str, *rest: object) -> None:
        if "toc_library_schedules" in statement and not begun.is_set():
            begun.set()
            go_on.wait(10)

    event.listen(Engine, "before_cursor_execute", stall)
    timeout_center(app).schedules.put("each", "shop.remind", 3600)
    assert begun.wait(10)  # the recorder's thread writes it
    flushing = threading.Thread(target=recorder_of(app).flush)
    flushing.start()
    flushing.join(0.2)  # it must not end
    assert flushing.is_alive()
    go_on.set()
    flushing.join(10)
    event.remove(Engine, "before_cursor_execute", stall)
    assert rows(store).keys() == {"each"}


def test_changes_of_more_schedules_than_a_process_keeps_are_given_up_and_it_says_so(
    app, away, monkeypatch, caplog
):
    monkeypatch.setattr("kombu_toc.library.putting.MAX_CHANGES", 2)
    away.numbers.update((0, 1))
    for number in range(3):
        timeout_center(app).schedules.put(f"each-{number}", "shop.remind", 3600)
    recorder_of(app).close()
    assert "the latest changes of 1 schedules are not recorded" in caplog.text


def test_after_a_firing_the_next_one_comes_back(app, client, store, center: TimeoutCenter):
    mine = timeout_center(app)
    mine.schedules.put("often", "shop.remind", 0.2, args=(1,))
    [delivery] = mine.center.pop("celery", wait=10).messages
    assert schedules.take(mine.center.recurring, delivery, "often")[0] == "run"
    mine.center.ack(delivery)
    recorder_of(app).flush()
    mine.schedules.pause("often")
    mine.schedules.resume("often")
    recorder_of(app).flush()
    [waiting] = mine.center.scan("celery").messages
    assert rebuilt(mine.center) == 1
    center.registry.forget("celery")
    [back] = center.scan("celery").messages
    assert (back.id, back.body) == (waiting.id, waiting.body)
    assert back.id != delivery.id


def waiting(center: Any, now: float) -> dict[str, Any]:
    """The messages that wait, and when each is due that is not due yet."""
    messages = center.center.scan("celery", limit=100).messages
    return {one.id: (one.body, max(one.time_us, int(1e6 * now) + 60_000_000)) for one in messages}


def test_what_waits_of_a_back_fill_comes_back_unless_it_was_taken_out(app, client, store):
    center = timeout_center(app)
    now = time.time()
    for name in ("filled", "paused"):
        center.schedules.put(name, "shop.remind", 3600, start=now - 8.5 * 3600)
        assert len(center.schedules.backfill(name, now - 5 * 3600, rate=0.001)) == 5
        assert center.schedules.backfill(name, now - 5 * 3600) == []
    center.schedules.pause("paused")
    recorder_of(app).flush()
    kept = waiting(center, now)
    assert len(kept) == 6  # one is the next firing
    client.flushall()
    center.library.rebuild()
    assert waiting(center, now) == kept
    assert center.library.rebuild().put == 0
    center.schedules.delete("filled")
    recorder_of(app).flush()
    assert store.count() == {"cancelled": 10, "not put": 0}
    client.flushall()
    assert center.library.rebuild().put == 1  # the schedule that is paused


def test_what_is_there_is_not_put_back_and_what_was_deleted_stays_deleted(app, client, store):
    center = timeout_center(app)
    center.schedules.put("nightly", "shop.remind", 3600)
    recorder_of(app).flush()
    client.flushall()
    center.schedules.put("nightly", "shop.remind", 7200)
    assert center.library.rebuild().put == 0
    center.queues.delete("celery")
    recorder_of(app).flush()
    assert rows(store) == {}


@pytest.mark.every_engine
def test_an_older_change_does_not_take_the_place_of_a_newer_one(store):
    def change(text: str, **more: Any) -> ScheduleChange:
        return ScheduleChange("nightly", "", text, 5, **more)

    first, second = Schedules(store), Schedules(store)
    firing = ScheduleFiring("nightly@1", b"one", 5)
    first.changed("mail", change("a", template=b"t", put=firing), 10)
    first.changed("mail", change("b"), 11)
    first.owed.write()
    [row] = rows(store).values()
    assert (row["record"], row["template"], row["firing_id"]) == ("b", b"t", "nightly@1")
    second.changed("mail", change("d", take_out="nightly@1"), 13)
    second.owed.write()
    first.changed("mail", change("c", put=firing), 12)
    first.owed.write()
    [row] = rows(store).values()
    assert (row["record"], row["template"], row["firing"]) == ("d", b"t", None)


def test_what_several_processes_say_late_is_put_together_whoever_writes_first(store):
    """Who has put a schedule writes its template after a worker has written its first firing."""

    def change(text: str, **more: Any) -> ScheduleChange:
        return ScheduleChange("nightly", "", text, 5, **more)

    sender, worker = Schedules(store), Schedules(store)
    sender.changed("mail", change("a", template=b"t", put=ScheduleFiring("n@1", b"one", 5)), 10)
    worker.changed("mail", change("b", put=ScheduleFiring("n@2", b"two", 6)), 11)
    worker.owed.write()
    sender.owed.write()
    [row] = rows(store).values()
    assert (row["record"], row["template"], row["firing_id"]) == ("b", b"t", "n@2")
    worker.changed("mail", change(""), 20)
    worker.owed.write()
    sender.changed("mail", change("c", template=b"u", put=ScheduleFiring("n@3", b"three", 7)), 19)
    sender.owed.write()
    assert rows(store) == {}  # what was deleted is not there again


def test_a_firing_that_waits_has_no_row_and_leaves_none(app, client, store, monkeypatch):
    """Neither by ``check --fix``: what is paused then is not put back."""
    monkeypatch.setattr("kombu_toc.library.rebuild.UNDER_WAY_US", 0)
    center = timeout_center(app)
    center.schedules.put("nightly", "shop.remind", 3600)
    assert center.center.scan("celery").messages
    assert center.library.check(fix=True) == []
    center.schedules.pause("nightly")
    assert center.library.check() == []
    assert store.count() == {"not put": 0}
