"""Queues whose rows are written behind, from what the scripts log (X12)."""

from __future__ import annotations

import json
import logging
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Queue

from celery_toc.metrics import metrics_text
from kombu_toc import (
    DEAD,
    ConfigurationError,
    LibraryError,
    NewMessage,
    TimeoutCenter,
    Unwritten,
    center_for,
    reshard_topic,
)
from kombu_toc.center.calls import read_call
from kombu_toc.library import deferred as behind_module
from kombu_toc.library import statuses
from kombu_toc.library.deferred import Behind
from kombu_toc.library.keeper import Keeper
from kombu_toc.library.recorder import Recorder
from kombu_toc.library.shards import Database, RefusedError

from ..support.library import consume, fill, publish, rebuilt, status_of
from ..support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("client")

ROOT = Path(__file__).parents[2]

#: What an elected process does to look after the library.
KEEP = Recorder._keep

#: How old an entry is when it is written, in milliseconds.
AGE_MS = behind_module.AGE_MS

LATER = {"x-delay": 60_000}


def declare(connection: Connection, mode: str = "behind", **arguments: Any) -> None:
    said = {"x-library": mode, "x-slots": 2, **arguments}
    Queue("mail", queue_arguments=said)(connection.default_channel).declare()


@pytest.fixture
def mail(broker) -> Connection:
    """A connection whose queue `mail` is kept behind."""
    declare(broker)
    return broker


@pytest.fixture
def behind(store, center) -> Behind:
    """What the elected process does."""
    return Behind(store, center)


@pytest.fixture(autouse=True)
def no_age(monkeypatch) -> None:
    """Entries are written at once."""
    monkeypatch.setattr(behind_module, "AGE_MS", 0)


@pytest.fixture(autouse=True)
def unelected(monkeypatch) -> None:
    """This process looks after nothing by itself, however long a test takes: a test says what the
    elected one does, and when."""
    monkeypatch.setattr(Recorder, "_keep", lambda _: None)


def logs(center: TimeoutCenter) -> list[bytes]:
    return list(center.client.scan_iter(match="*:log"))


def test_a_publish_asks_no_database_and_its_row_follows(mail, store, center, behind, monkeypatch):
    recorder = mail.default_channel.recorder
    monkeypatch.setattr(recorder.store.shards, "of", None)
    monkeypatch.setattr(recorder.store.shards, "divided", None)
    business = {"x-biz-type": "order", "x-biz-id": 7}
    publish(mail, "order-7", priority=3, **business, **LATER)
    assert store.of_ids(["order-7"]) == []
    assert center.queues.unwritten("mail")[0].entries == 1
    assert not behind.turn()
    [row] = store.of_ids(["order-7"])
    [found] = center.get("order-7")
    assert (row.topic, row.task, row.status, row.body) == ("mail", "remind", 0, found.body)
    assert (row.biz_type, row.biz_id, row.priority) == ("order", "7", 3)
    assert row.action_us == found.time_us
    assert abs(row.created_us / 1e6 - time.time()) < 30
    assert logs(center) == []


@pytest.mark.cluster
def test_what_is_written_behind_is_rebuilt_as_it_was(mail, store, client, center, behind, recorded):
    headers: list[dict[str, Any]] = [
        {"x-key": "customer 42"},
        {"x-slot-basis": "order-7"},
        {"x-visibility": 90, "x-max-lease": 600},
        {},
    ]
    for number in range(40):
        publish(
            *(mail, f"order-{number}"),
            priority=number % 3 * 3,
            **{"x-delay": 60_000 + number},
            **headers[number % 4],
        )
    before = {one.id: one for one in center.scan("mail", limit=1000).messages}
    behind.turn()
    client.flushall()  # all nodes of a Cluster
    center.registry.forget("mail")
    assert recorded.library.rebuild().put == 40
    after = {one.id: one for one in center.scan("mail", limit=1000).messages}
    assert after.keys() == before.keys()
    for id, found in after.items():
        one = before[id]
        assert (found.slot, found.step, found.body) == (one.slot, one.step, one.body)
        assert (found.key, found.visibility, found.max_lease) == (
            *(one.key, one.visibility, one.max_lease),
        )
        assert abs(found.time_us - one.time_us) <= 5  # a score is as exact as two microseconds
    assert center.registry.topic("mail").declaration.library == "behind"


def test_a_row_follows_its_message_to_its_end(mail, store, behind):
    publish(mail, "order-1")
    publish(mail, "order-2", **LATER)
    seen = []

    def look(message: Any) -> None:
        behind.turn()
        seen.append(status_of(store, "order-1"))
        message.ack()

    assert consume(mail, 1, look) == ["order-1"]
    assert seen == [["taken"]]
    [record] = store.history("order-1")
    assert (record.status, record.attempts, record.task) == ("done", 1, "remind")
    assert status_of(store, "order-2") == ["pending"]


def test_what_has_ended_before_its_row_was_written_gets_none(mail, store, center, behind):
    fill(mail, 3)
    consume(mail, 3)
    assert center.queues.unwritten()[0].entries == 3
    behind.turn()
    assert store.of_ids([f"order-{number}" for number in range(3)]) == []
    assert [status_of(store, f"order-{number}") for number in range(3)] == [["done"]] * 3
    assert logs(center) == []


def test_what_a_log_says_of_messages_that_are_gone_is_deleted_when_it_is_read(
    mail, center, monkeypatch
):
    for number in range(4):
        publish(mail, f"order-{number}", **({} if number else LATER))
    center.cancel("order-0")
    consume(mail, 3)
    read = [
        center.runner.run(read_call(slot, 10, 10**6))
        for slot in center.registry.topic("mail").all_slots()
    ]
    assert sum(one.gone for one in read) == 4
    assert not any(one.more for one in read)
    # A row of what was cancelled may be there.
    [entry] = [entry for one in read for entry in one.entries]
    assert (entry.what, entry.id, entry.state) == ("c", "order-0", "")
    assert center.queues.unwritten("mail")[0].entries == 1
    assert len(logs(center)) == 1


def test_a_busy_worker_takes_its_time_for_a_backlog(mail, store, center, monkeypatch):
    """Most of it has run by then, and needs no row."""
    monkeypatch.setattr(behind_module, "ENTRIES", 4)
    monkeypatch.setattr(behind_module, "INTERVAL", 0.0)
    monkeypatch.setattr(behind_module, "CATCH_UP", 3600.0)
    monkeypatch.setattr(behind_module, "BUSY", -1.0)
    fill(mail, 40)
    behind = Behind(store, center)
    assert not behind.turn()
    assert center.queues.unwritten("mail")[0].entries == 40, "it does not begin at once"
    while messages := center.pop("mail", 10).messages:
        center.ack(messages)
    monkeypatch.setattr(behind_module, "CATCH_UP", 1e-9)  # now it is late
    assert not behind.turn()
    assert center.queues.unwritten("mail")[0].entries == 0
    assert not store.count().get("pending")


def test_a_worker_with_time_to_spare_writes_a_backlog_at_once(mail, store, center, monkeypatch):
    monkeypatch.setattr(behind_module, "ENTRIES", 4)
    monkeypatch.setattr(behind_module, "INTERVAL", 0.0)
    monkeypatch.setattr(behind_module, "BUSY", 1e9)
    fill(mail, 40, **LATER)
    behind = Behind(store, center)
    behind.turn()
    while behind.turn():  # as long as there is more to do at once
        pass
    assert store.count()["pending"] == 40


def test_what_ends_between_the_look_and_the_row_leaves_none_behind(
    mail, store, center, behind, monkeypatch
):
    publish(mail, "order-1")
    publish(mail, "order-2", **LATER)
    insert = store.insert

    def late(rows: Any) -> None:
        center.ack(center.pop("mail").messages)
        insert(rows)

    monkeypatch.setattr(store, "insert", late)
    behind.turn()
    assert [row.id for row in store.of_ids(["order-1", "order-2"])] == ["order-2"]


def test_what_was_lost_with_redis_after_the_look_is_kept(
    mail, store, client, center, behind, monkeypatch
):
    publish(mail, "order-1", **LATER)
    insert = store.insert

    def late(rows: Any) -> None:
        client.flushall()
        insert(rows)

    monkeypatch.setattr(store, "insert", late)
    behind.turn()
    assert [row.id for row in store.of_ids(["order-1"])] == ["order-1"]


def test_a_process_without_a_library_cancels_and_moves(mail, store, center, behind):
    """What a center with one does is told at once; the logs tell the rest."""
    fill(mail, 4, **LATER)
    behind.turn()
    at = time.time() + 7200
    assert center.cancel("order-0")[0].deleted
    center.reschedule("order-1", at=at)
    center.cancel("order-2")
    publish(mail, "order-2", retries=1, **LATER)  # another message with its id
    behind.turn()
    assert status_of(store, "order-0") == ["cancelled"]
    assert sorted(status_of(store, "order-2")) == ["cancelled", "pending"]
    rows = {row.id: row.action_us for row in store.of_ids(["order-1", "order-3"])}
    assert rows["order-1"] == pytest.approx(at * 1e6, abs=2000)
    assert rows["order-3"] < rows["order-1"] - 1e9


def test_a_center_with_a_library_ends_what_has_no_row_yet(mail, store, center, behind, recorded):
    fill(mail, 3, **LATER)
    recorded.cancel("order-0")
    recorded.reschedule("order-1", delay=7200)
    recorded.queues.purge("mail")
    behind.turn()
    assert store.of_ids([f"order-{number}" for number in range(3)]) == []
    assert status_of(store, "order-0") == ["cancelled"]


def refuse(message: Any) -> None:
    message.error = "ValueError: no"
    message.reject()


def test_what_dies_is_dead_in_the_library(mail, store, center, behind):
    publish(mail, "order-1")
    [message] = center.pop("mail").messages
    center.reject(message, requeue=False, reason="no")  # by a process without a library
    behind.turn()
    assert status_of(store, "order-1") == ["dead"]
    [record] = store.history("order-1")
    assert record.task == "remind"


def test_what_a_worker_has_said_of_its_end_stays(mail, store, behind):
    publish(mail, "order-1")
    consume(mail, 1, refuse)
    behind.turn()
    [record] = store.history("order-1")
    assert (record.status, record.attempts, record.error) == ("dead", 1, "ValueError: no")


@pytest.mark.parametrize("by", ["a worker", "a process without a library"])
def test_what_dies_before_it_has_a_row_is_a_dead_letter_again_after_a_rebuild(
    server, client, mail, store, center, behind, options, by
):
    publish(mail, "order-1")
    if by == "a worker":
        consume(mail, 1, refuse)
    else:
        [message] = center.pop("mail").messages
        center.reject(message, requeue=False, reason="no")
    behind.turn()
    [before] = center.scan("mail", state=DEAD).messages
    client.flushall()
    recorded = center_for(server.toc_url, **options)
    assert recorded.library.rebuild().put == 1
    assert recorded.library.rebuild().put == 0
    center.registry.forget("mail")
    [after] = center.scan("mail", state=DEAD).messages
    assert (after.id, after.body, after.slot) == (before.id, before.body, before.slot)
    assert after.error == ("ValueError: no" if by == "a worker" else "")
    assert status_of(store, "order-1") == ["dead"]
    # And what is deleted of DeadQueue stays away.
    assert recorded.dead.purge("mail") == 1
    assert rebuilt(recorded) == 0


@pytest.mark.parametrize("is_written", [True, False])
def test_what_a_process_without_a_library_requeues_comes_back_to_be_run(
    client, mail, store, center, behind, is_written, recorded
):
    publish(mail, "order-1", **{"x-delay": 10})
    if is_written:
        behind.turn()
    consume(mail, 1, refuse)
    behind.turn()
    assert center.dead.requeue("mail") == 1
    behind.turn()
    assert rebuilt(recorded) == 1
    center.registry.forget("mail")
    assert not center.scan("mail", state=DEAD).messages
    assert consume(mail, 1) == ["order-1"]


def test_what_was_requeued_keeps_its_row_although_two_processes_write_it(
    mail, store, center, behind, monkeypatch
):
    """As when one is elected while the one before stands still. It was dead: history says so."""
    publish(mail, "order-1")
    consume(mail, 1, refuse)
    behind.turn()
    assert center.dead.requeue("mail") == 1
    insert = store.insert

    def insert_late(rows: Any) -> bool:
        monkeypatch.setattr(store, "insert", insert)
        Behind(store, center).turn()
        return insert(rows)

    monkeypatch.setattr(store, "insert", insert_late)
    behind.turn()
    [row] = store.of_ids(["order-1"])
    assert (row.status, row.place) == (statuses.PENDING, statuses.IN_REDIS)


def test_what_dies_while_its_row_is_written_is_a_dead_letter_again_after_a_rebuild(
    server, client, mail, store, behind, options, monkeypatch
):
    publish(mail, "order-1")
    insert = store.insert

    def dies(rows: Any) -> bool:
        insert(rows)
        monkeypatch.setattr(store, "insert", insert)
        consume(mail, 1, refuse)
        return False  # as databases do that do not say whether rows were there

    monkeypatch.setattr(store, "insert", dies)
    behind.turn()
    client.flushall()
    recorded = center_for(server.toc_url, **options)
    assert recorded.library.rebuild().put == 1
    [after] = recorded.scan("mail").messages
    assert (after.id, after.state, after.error) == ("order-1", DEAD, "ValueError: no")


def test_what_is_not_dead_is_not_changed_by_who_looks_for_that(mail, store, behind, monkeypatch):
    publish(mail, "order-1", **LATER)
    insert, execute = store.insert, Database.execute
    changes = []

    def run(database: Database, statement: Any, values: Any = None) -> None:
        changes.append(str(statement))
        execute(database, statement, values)

    monkeypatch.setattr(store, "insert", lambda rows: insert(rows) and False)
    monkeypatch.setattr(Database, "execute", run)
    behind.turn()
    assert [row.id for row in store.of_ids(["order-1"])] == ["order-1"]
    assert not [one for one in changes if "toc_pending" in one]


def test_a_dead_letter_that_is_deleted_before_it_has_a_row_stays_away(
    server, client, mail, center, behind, options, monkeypatch
):
    publish(mail, "order-1")
    consume(mail, 1, refuse)
    recorded = center_for(server.toc_url, **options)
    bury = Behind._bury

    def purged(self: Behind, dead: Any) -> None:
        assert recorded.dead.purge("mail") == 1
        bury(self, dead)

    monkeypatch.setattr(Behind, "_bury", purged)
    behind.turn()
    assert rebuilt(recorded) == 0


def test_lists_retries_and_copies_are_logged(mail, store, center, behind):
    publish(mail, "order-1", **LATER)
    publish(mail, "order-1", retries=1, **LATER)
    publish(mail, "order-1", retries=1, **LATER)
    listed = [
        NewMessage(f"list-{n}", one.body, delay=60) for n, one in enumerate(center.get("order-1"))
    ]
    center.put_many("mail", listed, token="list 7")
    assert center.queues.unwritten()[0].entries == 6
    behind.turn()
    assert len(store.of_ids(["order-1"])) == 3
    center.put_many("mail", listed, token="list 7")
    assert logs(center) == []  # nothing was added
    center.put_many("mail", listed)
    assert center.queues.unwritten()[0].entries == 3


def test_other_queues_leave_nothing(broker, store, center, behind):
    for mode in ("through", "off", "outbox"):
        Queue(mode, queue_arguments={"x-library": mode})(broker.default_channel).declare()
    Queue("short", queue_arguments={"x-library": "behind", "x-expires": 60_000})(
        broker.default_channel
    ).declare()
    for queue in ("plain", "through", "off", "short"):
        publish(broker, f"to-{queue}", queue=queue, **LATER)
    assert logs(center) == []
    ids = [f"to-{queue}" for queue in ("plain", "through", "off", "short")]
    assert sorted(row.id for row in store.of_ids(ids)) == ["to-plain", "to-through"]


def test_what_off_means(broker, store, center, at_once, recorded):
    declare(broker, "off")
    for number in range(3):
        publish(broker, f"order-{number}", **({} if number else LATER))
    consume(broker, 2)
    assert recorded.cancel("order-0")[0].deleted
    publish(broker, "order-4", **LATER)
    assert recorded.library.check(fix=True) == []
    recorded.queues.purge("mail")
    assert store.count() == {"not put": 0}


@pytest.fixture
def at_once(monkeypatch) -> None:
    """Nothing is on its way, and what is missing once is missing."""
    monkeypatch.setattr("kombu_toc.library.rebuild.UNDER_WAY_US", 0)
    monkeypatch.setattr("kombu_toc.library.rebuild.CONFIRM", 0.0)


def test_a_queue_may_take_only_what_an_outbox_sends(broker, store, center):
    declare(broker, "outbox")
    with pytest.raises(LibraryError, match=r"queue 'mail' .* kombu_toc.outbox.*nothing was sent"):
        publish(broker, "order-1")
    assert not center.get("order-1")
    publish(broker, "order-2", retries=1)  # what a worker sends again
    assert status_of(store, "order-2") == ["pending"]


def test_another_mode_is_refused(broker):
    with pytest.raises(ConfigurationError, match=r"'mail': library must be .*'behind'"):
        declare(broker, "later")


def test_what_has_just_been_sent_may_end_before_it_is_looked_at(
    mail, store, center, behind, monkeypatch
):
    monkeypatch.setattr(behind_module, "AGE_MS", 3_600_000)
    publish(mail, "order-1", **LATER)
    assert not behind.turn()
    assert store.of_ids(["order-1"]) == []
    assert center.queues.unwritten()[0].entries == 1
    monkeypatch.setattr(behind_module, "AGE_MS", AGE_MS)
    deadline = time.monotonic() + 30
    while not store.of_ids(["order-1"]):
        assert time.monotonic() < deadline
        behind.turn()


# -- the window


def test_the_window_is_measured(mail, store, center, behind):
    assert center.queues.unwritten() == [Unwritten("mail", 0, 0, False)]
    center.queues.declare("other")
    publish(mail, "order-1", **LATER)
    [begun] = center.queues.unwritten("mail")
    while center.queues.unwritten()[0].oldest_us < begun.oldest_us + 2000:
        pass
    publish(mail, "order-2", **LATER)
    [found] = center.queues.unwritten()
    assert (found.topic, found.entries, found.incomplete) == ("mail", 2, False)
    assert found.oldest_us >= 2000
    behind.turn()
    assert center.queues.unwritten() == [Unwritten("mail", 0, 0, False)]


@pytest.fixture
def small(monkeypatch) -> None:
    """Logs have room for little."""
    monkeypatch.setattr("kombu_toc.model.library.LOG_ENTRIES", 20)
    monkeypatch.setattr("kombu_toc.model.library.LOG_LEAST", 1)


def test_a_log_is_bounded_and_what_it_has_no_room_for_gets_rows(
    small, mail, store, center, behind, caplog
):
    caplog.set_level(logging.INFO)
    fill(mail, 100, **LATER)
    [window] = center.queues.unwritten()
    assert 20 <= window.entries <= 22  # ten in each of two slots, and that there are more
    assert window.incomplete
    publish(mail, "order-100", **LATER)
    behind.turn()
    assert store.count()["pending"] == 101
    assert center.queues.unwritten() == [Unwritten("mail", 0, 0, False)]
    assert logs(center) == []
    assert caplog.text.count("more was sent than its log for the task library may have") == 1
    assert "queue mail: 101 messages were looked through" in caplog.text


def test_a_log_is_bounded_in_bytes(small, mail, store, center, behind):
    for number in range(30):
        publish(mail, "x" * 200 + str(number), **LATER)
    [window] = center.queues.unwritten()
    assert 2 < window.entries <= 22
    size = sum(center.client.memory_usage(key) for key in logs(center))
    assert size < 20 * 64 * 4 + 4000
    behind.turn()
    assert store.count()["pending"] == 30


def test_what_comes_while_all_is_looked_through_gets_rows_too(
    small, mail, store, center, behind, monkeypatch
):
    monkeypatch.setattr("kombu_toc.library.deferred.CHUNK", 10)
    monkeypatch.setattr("kombu_toc.library.deferred.TURN", 0.0)
    fill(mail, 100, **LATER)
    turns = 0
    while behind.turn():
        turns += 1
        for number in range(30 if turns < 4 else 0):
            publish(mail, f"more-{turns}-{number}", **{"x-delay": 30_000 + number})
    assert turns > 10  # a page each
    assert store.count()["pending"] == 100 + 3 * 30
    assert logs(center) == []


def test_a_look_that_is_killed_is_begun_again(small, mail, store, center, behind, monkeypatch):
    monkeypatch.setattr("kombu_toc.library.deferred.CHUNK", 10)
    monkeypatch.setattr("kombu_toc.library.deferred.TURN", 0.0)
    fill(mail, 60, **LATER)
    assert behind.turn()
    assert behind.turn()
    assert center.queues.unwritten()[0].incomplete
    another = Behind(store, center)
    while another.turn():
        pass
    assert store.count()["pending"] == 60
    assert logs(center) == []


class Killed(BaseException): ...


@pytest.mark.parametrize("step", ["read", "insert", "record", "delete", "forget"])
def test_a_recorder_may_be_stopped_anywhere_and_another_goes_on(
    mail, store, client, center, monkeypatch, step
):
    for number in range(4):
        publish(mail, f"order-{number}", **({} if number else LATER))
    Behind(store, center).turn()
    publish(mail, "order-4", **LATER)
    publish(mail, "order-5", **LATER)
    center.reschedule("order-4", delay=7200)
    center.cancel("order-0")
    messages = center.pop("mail", limit=2).messages
    center.reject(messages[0], requeue=False)
    publish(mail, "order-6")
    behind = Behind(store, center)

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patched:
        if step in ("read", "delete"):
            patched.setattr(behind, {"read": "_write", "delete": "_delete"}[step], stop)
        else:
            wrapped, insert = getattr(store, step), store.insert

            def then_stop(*args: Any) -> Any:
                wrapped(*args)
                raise Killed

            def late(rows: Any) -> None:
                insert(rows)
                center.ack(center.pop("mail", limit=9).messages)

            patched.setattr(store, step, then_stop)
            if step == "forget":  # what has ended meanwhile
                patched.setattr(store, "insert", late)
        with pytest.raises(Killed):
            behind.turn()
    another = Behind(store, center)
    another.turn()
    another.turn()
    found = {id: status_of(store, id) for id in (f"order-{n}" for n in range(7))}
    dead = messages[0].id
    assert found[dead][-1] in ("dead", "pending")
    assert (found["order-0"], found["order-4"], found["order-5"]) == (
        *(["cancelled"], ["pending"]),
        ["pending"],
    )
    [row] = store.of_ids(["order-4"])
    assert row.action_us > time.time() * 1e6 + 3600e6
    assert logs(center) == []


def test_two_recorders_at_a_time_write_the_same(mail, store, center, monkeypatch):
    fill(mail, 20, **LATER)
    one, other = Behind(store, center), Behind(store, center)
    write = one._write

    def late(read: Any) -> None:
        other.turn()
        center.cancel("order-3")
        other.turn()
        write(read)

    monkeypatch.setattr(one, "_write", late)
    one.turn()
    one.turn()
    assert store.count() == {"pending": 19, "cancelled": 1, "not put": 0}


def test_what_is_logged_is_written_wherever_it_is_moved(mail, store, center, behind):
    fill(mail, 60, **LATER)
    reshard_topic(center, "mail", 8, settle=0)
    for number in range(60, 70):
        publish(mail, f"order-{number}", **LATER)
    center.registry.forget("mail")
    reshard_topic(center, "mail", 1, settle=0)
    center.cancel("order-0")
    behind.turn()
    found = store.of_ids([f"order-{number}" for number in range(70)])
    assert len(found) == 69
    assert logs(center) == []
    assert center.queues.unwritten() == [Unwritten("mail", 0, 0, False)]


def test_what_was_written_is_not_logged_again_when_it_is_moved(mail, store, center, behind):
    fill(mail, 20, **LATER)
    behind.turn()
    reshard_topic(center, "mail", 8, settle=0)
    assert logs(center) == []


def test_a_queue_may_be_kept_otherwise_later(mail, store, client, center, behind):
    publish(mail, "order-1", **LATER)
    center.queues.alter("mail", library="through")
    behind.turn()
    mail.default_channel.center.registry.forget("mail")
    publish(mail, "order-2", **LATER)
    assert len(store.of_ids(["order-1", "order-2"])) == 2
    center.queues.alter("mail", library="behind")
    mail.default_channel.center.registry.forget("mail")
    publish(mail, "order-3", **LATER)
    center.queues.alter("mail", library="off")
    behind._believed = 0.0
    behind.turn()
    assert store.of_ids(["order-3"]) == []
    assert logs(center) == []


def test_queues_that_are_kept_otherwise_are_not_asked_about(mail, center, behind, monkeypatch):
    behind.turn()
    center.queues.declare("other", slots=64)
    asked: list[str] = []
    lengths = behind._lengths

    def counted(slots: Any) -> Any:
        asked.extend(topic.name for topic, _ in slots)
        return lengths(slots)

    monkeypatch.setattr(behind, "_lengths", counted)
    behind._believed = 0.0  # as after two seconds
    behind.turn()
    assert set(asked) == {"mail"}
    behind._believed = behind._next_others = 0.0  # as after a minute
    behind.turn()
    assert set(asked) == {"mail", "other"}


def test_a_deleted_queue_leaves_no_log(mail, store, center, behind, recorded):
    publish(mail, "order-1", **LATER)
    recorded.queues.delete("mail")
    assert logs(center) == []
    behind.turn()
    assert store.count() == {"not put": 0}
    declare(mail)
    publish(mail, "order-2", **LATER)
    center.cancel("order-2")
    assert center.queues.delete("mail", if_empty=True, settle=0)
    assert logs(center) == []


def test_unique_messages_put_one_for_another(mail, store, center, behind):
    for number in range(3):
        publish(
            *(mail, f"job-{number}"),
            **{"x-unique": "order-7", "x-unique-conflict": "replace", **LATER},
        )
    [waits] = center.scan("mail").messages
    assert center.queues.unwritten()[0].entries >= 1
    behind.turn()
    assert {row.body for row in store.of_ids([waits.id])} <= {waits.body}
    assert logs(center) == []


def test_a_message_that_no_row_can_have_is_put_and_said(mail, store, center, behind, caplog):
    publish(mail, "order-1", **{"x-biz-id": "a\0b", **LATER})
    publish(mail, "i" * 256, **LATER)
    center.put("mail", "raw", b"no envelope", delay=60, key="k", visibility=90)
    publish(mail, "order-2", **LATER)
    behind.turn()
    assert store.count() == {"pending": 2, "not put": 0}
    [row] = store.of_ids(["raw"])
    assert (row.body, row.basis, row.traits) == (b"no envelope", "k", ";v90000,kk")
    assert center.counts("mail").waiting == 4
    assert "message 'order-1' in queue mail has no row" in caplog.text
    assert "nothing was sent" not in caplog.text
    assert logs(center) == []


def test_a_row_that_a_database_refuses_keeps_no_other_waiting(
    mail, store, center, behind, caplog, monkeypatch
):
    fill(mail, 5, **LATER)
    insert = store.insert

    def picky(rows: Any) -> None:
        if any(row.id == "order-3" for row in rows):
            raise RefusedError("too large")
        insert(rows)

    monkeypatch.setattr(store, "insert", picky)
    behind.turn()
    assert store.count()["pending"] == 4
    assert "message 'order-3' in queue mail has no row: too large" in caplog.text


def test_while_the_database_is_away_entries_stay(mail, store, center, behind, monkeypatch):
    """Also while it is full: it answers what is read, and takes nothing."""
    publish(mail, "order-1", **LATER)

    def away(*args: Any) -> None:
        raise LibraryError("away")

    with monkeypatch.context() as gone:
        gone.setattr(store, "insert", away)
        with pytest.raises(LibraryError, match="away"):
            behind.turn()
    assert center.queues.unwritten()[0].entries == 1
    behind.turn()
    assert len(store.of_ids(["order-1"])) == 1


def test_many_slots_and_queues_are_written_together(broker, store, center, behind):
    """Each is read in its turn, however many have something."""
    for queue in ("mail", "more"):
        Queue(queue, queue_arguments={"x-library": "behind", "x-slots": 32})(
            broker.default_channel
        ).declare()
        for number in range(100):
            publish(broker, f"{queue}-{number}", queue=queue, **LATER)
    while behind.turn():
        pass
    assert store.count()["pending"] == 200
    assert logs(center) == []


def test_large_bodies_are_read_a_few_at_a_time(mail, store, center, behind, monkeypatch):
    monkeypatch.setattr("kombu_toc.library.deferred.BYTES", 1000)
    for number in range(20):
        publish(mail, f"order-{number}", **{"x-note": "n" * 900, "x-biz-id": number})
    read = behind._read(behind._see())
    assert all(1 <= len(one.entries) <= 2 for one in read)
    behind.turn()
    assert store.count()["pending"] == 20


def test_the_keeper_of_a_fleet_writes_behind(mail, store, center):
    publish(mail, "order-1", **LATER)
    keeper = Keeper(store, center, "test", 86_400.0)
    keeper.turn()
    assert len(store.of_ids(["order-1"])) == 1
    another = Keeper(store, center, "another", 86_400.0)
    publish(mail, "order-2", **LATER)
    another.turn()  # it is not elected
    assert store.of_ids(["order-2"]) == []


def test_a_consumer_writes_what_waits_meanwhile(mail, store, monkeypatch):
    """In a thread, by itself."""
    monkeypatch.setattr(Recorder, "_keep", KEEP)
    publish(mail, "order-1", **LATER)
    publish(mail, "order-2")
    consume(mail, 1)
    wait_until(lambda: store.of_ids(["order-1"]), 30)


@pytest.mark.parametrize("room", [200_000, 20])
def test_with_one_database_locked_the_rows_of_the_other_are_written(
    server, store, center, options, monkeypatch, room
):
    """Also where the logs have no room for what waits for it."""
    monkeypatch.setattr("kombu_toc.model.library.LOG_ENTRIES", room)
    monkeypatch.setattr("kombu_toc.model.library.LOG_LEAST", 1)
    monkeypatch.setattr(Recorder, "_keep", KEEP)
    databases = store.shards.databases
    locked, path = databases[0], options["toc_library"][0].removeprefix("sqlite:///")
    number_of = {True: 0, False: 0}
    for number in range(100):
        number_of[store.shards.of(f"order-{number}").database is locked] += 1

    def written(database: Database) -> int:
        shards = [one for one in store.shards.all if one.database is database]
        return sum(len(database.read(one.tables.pending.select())) for one in shards)

    def wait_for(holds: Any) -> None:
        wait_until(holds, 60)

    other = sqlite3.connect(path, isolation_level=None)
    how = {**options, "toc_library_timeout": 0.5}
    with Connection(server.toc_url, transport_options=how) as connection:
        declare(connection)
        publish(connection, "first")
        consume(connection, 1)
        other.execute("BEGIN IMMEDIATE")
        fill(connection, 100, **LATER)
        wait_for(lambda: written(databases[1]) == number_of[False])
        assert written(locked) == 0
        assert center.queues.unwritten("mail")[0].entries > 0
        other.execute("ROLLBACK")
        wait_for(lambda: written(locked) == number_of[True])
        wait_for(lambda: logs(center) == [])
    other.close()


#: A recorder in a process of its own: url, databases and tables as JSON.
RECORDER = """
import json, sys
from kombu_toc import TimeoutCenter, center_for
from kombu_toc.client.options import read_databases
from kombu_toc.library.deferred import Behind
from kombu_toc.library.shards import Shards
from kombu_toc.library.store import Store

url, options = json.loads(sys.argv[1])
shards = Shards(read_databases("toc_library", options["toc_library"]), 2, 5.0)
behind = Behind(Store(shards), center_for(url))
print("ready", flush=True)
while True:
    behind.turn()
"""


def test_a_recorder_that_is_killed_again_and_again_loses_nothing(
    server, mail, store, center, options
):
    random = Random(7)
    for turn in range(5):
        asked = json.dumps([server.toc_url, options])
        recorder = subprocess.Popen(
            [sys.executable, "-c", RECORDER, asked], stdout=subprocess.PIPE, cwd=ROOT
        )
        try:
            assert recorder.stdout.readline() == b"ready\n"
            after = random.randrange(10, 120)
            for number in range(120):
                publish(mail, f"order-{turn}-{number}", **LATER)
                if number % 10 == 3:
                    center.cancel(f"order-{turn}-{random.randrange(number)}")
                if number % 10 == 7:
                    center.reschedule(f"order-{turn}-{random.randrange(number)}", delay=7200)
                if number == after:
                    recorder.kill()
        finally:
            recorder.kill()
            recorder.wait()
            recorder.stdout.close()
    behind = Behind(store, center)
    while behind.turn():
        pass
    waiting = {one.id: one.time_us for one in center.scan("mail", limit=1000).messages}
    ids = [f"order-{turn}-{number}" for turn in range(5) for number in range(120)]
    rows = {row.id: row.action_us for row in store.of_ids(ids)}
    assert rows.keys() == waiting.keys()
    assert all(abs(rows[id] - waiting[id]) <= 2000 for id in rows)
    assert all(status_of(store, id) in ([], ["cancelled"]) for id in set(ids) - rows.keys())
    assert logs(center) == []


# -- where it is seen


def test_the_exporter_tells_how_far_behind_it_is(mail, center):
    center.queues.declare("other")
    fill(mail, 3, **LATER)
    lines = metrics_text(center).splitlines()
    assert 'celery_toc_library_unwritten{topic="mail"} 3.0' in lines
    assert 'celery_toc_library_incomplete{topic="mail"} 0.0' in lines
    [said] = [line for line in lines if line.startswith("celery_toc_library_unwritten_seconds{")]
    assert 0 <= float(said.split()[1]) < 60
    assert not [line for line in lines if "celery_toc_library" in line and '"other"' in line]


def test_the_page_says_how_to_ask(broker, center):
    """What docs/library.md has of `unwritten`, and its queues."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), re.S)
    [queues] = [block for block in blocks if "clicks" in block]
    [ask] = [block for block in blocks if "unwritten()" in block]
    app = Celery("shop", broker=broker.as_uri(), set_as_current=False)
    exec(queues, {"app": app})
    for queue in app.conf.task_queues:
        queue(broker.default_channel).declare()
    publish(broker, "note-1", queue="mail", **LATER)
    said: list[Any] = []
    asked = SimpleNamespace(timeout_center=lambda app: center)
    exec(ask, {"celery_toc": asked, "app": app, "print": lambda *all: said.append(all)})
    [(topic, entries, seconds, incomplete)] = said
    assert (topic, entries, incomplete) == ("mail", 1, False)
    assert 0 <= seconds < 60
    modes = {
        name: center.registry.topic(name).declaration.library
        for name in ("orders", "mail", "clicks")
    }
    assert modes == {"orders": None, "mail": "behind", "clicks": "off"}
