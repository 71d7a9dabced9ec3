"""Rows with a business id lie in its table, those without in that of their message id (A10)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection
from sqlalchemy import Engine, create_engine, event, text

from kombu_toc import LibraryError, NewMessage, center_for, outbox, pack
from kombu_toc.client.options import DatabaseURL, read_databases
from kombu_toc.library import statuses
from kombu_toc.library.schema import LOCATOR
from kombu_toc.library.shards import Shards

from ..support import nursery
from ..support.library import close_libraries, consume, publish, rebuilt, status_of
from ..support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("client")

OURS = re.compile(r"\btoc_(?:pending|history)_\d+")


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Every statement that this process sends to a database, but for those of its recorder's
    thread."""
    statements: list[str] = []

    def note(connection: object, cursor: object, statement: str, *rest: object) -> None:
        # A new connection asks for other things.
        if "toc_" in statement and threading.current_thread().name != "toc-library":
            statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield statements
    event.remove(Engine, "before_cursor_execute", note)


def send(broker: Connection, id: str, biz: str | None, **headers: Any) -> None:
    headers |= {} if biz is None else {"x-biz-id": biz, "x-biz-type": "order"}
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
    publish(broker, id, **{"eta": at, **headers})


def database_of(biz: str) -> int:
    """The database of a business id, of two with two tables each."""
    return (zlib.crc32(biz.encode()) & 0xFFFFF) % 4 // 2


def biz_in(number: int, many: int) -> list[str]:
    found = (f"customer-{n}" for n in range(1000))
    return [one for one in found if database_of(one) == number][:many]


def where(store: Any, table: str, id: str) -> list[int]:
    """The numbers of the shards that have rows of an id."""
    return [
        shard.number
        for shard in store.shards.all
        if shard.database.read(
            getattr(shard.tables, table).select().where(getattr(shard.tables, table).c.id == id)
        )
    ]


def test_a_row_lies_in_the_table_of_its_business_id(broker, store, recorded):
    for number in range(20):
        send(broker, f"task-{number}", "customer-7")
        send(broker, f"plain-{number}", None)
    body = pack(
        {"body": "1", "headers": {"x-biz-id": "customer-7"}, "properties": {}},
        deflate=False,
        id="put",
    )
    recorded.put("mail", "put", body, delay=600)
    recorded.put_many("mail", [NewMessage(f"many-{n}", body, delay=600) for n in range(9)])
    mine = (zlib.crc32(b"customer-7") & 0xFFFFF) % 4
    for id in [f"task-{n}" for n in range(20)] + ["put"] + [f"many-{n}" for n in range(9)]:
        assert where(store, "pending", id) == [mine]
    for number in range(20):
        id = f"plain-{number}"
        assert where(store, "pending", id) == [zlib.crc32(id.encode()) % 4]


def test_a_row_stays_in_the_table_of_its_business_id_to_its_end(broker, store):
    def fail(message: Any) -> None:
        message.reject(requeue=False)

    for number in range(8):
        publish(broker, f"order-{number}", **{"x-biz-id": f"customer-{number}"})
    consume(broker, 4)
    consume(broker, 4, fail)
    for number in range(8):
        mine = (zlib.crc32(f"customer-{number}".encode()) & 0xFFFFF) % 4
        assert where(store, "history", f"order-{number}") == [mine]
        [status] = status_of(store, f"order-{number}")
        assert status in ("done", "dead")


@pytest.mark.every_engine
def test_a_search_by_business_id_is_one_statement(broker, said):
    for number in range(9):
        send(broker, f"task-{number}", f"customer-{number % 3}")
        publish(broker, f"done-{number}", **{"x-biz-id": f"customer-{number % 3}"})
    consume(broker, 9)
    library = broker.default_channel.center.library
    library.find(limit=1)  # tables are looked at
    said.clear()
    found = library.find(biz_id="customer-1")
    assert len(said) == 1
    assert len(set(re.findall(r"\btoc_\w+_(\d+)\b", said[0]))) == 1
    ids = {record.id for record in found.records}
    assert ids == {f"{kind}-{n}" for kind in ("task", "done") for n in (1, 4, 7)}
    pages, after = [], None
    while True:
        page = library.find(biz_id="customer-1", limit=2, after=after)
        pages += [record.id for record in page.records]
        after = page.after
        if after is None:
            break
    assert pages == [record.id for record in found.records]


def test_with_one_database_away_the_business_ids_of_the_others_work(broker, away):
    first, second = biz_in(0, 3), biz_in(1, 3)
    center = broker.default_channel.center
    # Each id's own table is in the other database as often as not.
    for biz in (*first, *second):
        for number in range(4):
            send(broker, f"{biz}/{number}", biz)
    away.numbers.add(1)
    library = center.library
    for biz in first:
        assert len(library.find(biz_id=biz).records) == 4
        moved = library.reschedule(biz_id=biz, delay=7200)
        assert [one.moved for one in moved] == [True] * 4
        assert all(r.action_us > (time.time() + 7000) * 1e6 for r in library.find(biz_id=biz)[0])
        gone = library.cancel(biz_id=biz)
        assert [one.deleted for one in gone] == [True] * 4
        assert {one.status for one in library.find(biz_id=biz).records} == {"cancelled"}
    with pytest.raises(LibraryError, match="it is away"):
        library.cancel(biz_id=second[0])
    away.numbers.clear()
    for database in center.recorder.recorder.store.shards.databases:
        database._rests_until = 0.0
    assert len(library.cancel(biz_id=second[0])) == 4


def test_what_redis_has_lost_is_cancelled_by_its_business_id_with_one_database_away(
    broker, client, away
):
    [biz, *_] = biz_in(0, 1)
    for number in range(6):
        send(broker, f"lost-{number}", biz)
    client.flushall()
    away.numbers.add(1)
    library = broker.default_channel.center.library
    assert len(library.cancel(biz_id=biz)) == 6
    assert {one.status for one in library.find(biz_id=biz).records} == {"cancelled"}


def test_a_search_of_all_tables_says_which_databases_are_away(broker, away):
    first, second = biz_in(0, 6), biz_in(1, 6)
    for biz in (*first, *second):
        send(broker, biz, biz)
    library = broker.default_channel.center.library
    whole = library.find(task="remind")
    assert {record.id for record in whole.records} == {*first, *second} and whole.away == ()
    away.numbers.add(1)
    page = library.find(task="remind")
    assert {record.id for record in page.records} == set(first)
    urls = [str(one.url) for one in broker.default_channel.recorder.store.shards.databases]
    assert page.away == (urls[1],)
    away.numbers.add(0)
    with pytest.raises(LibraryError):
        library.find(task="remind")


@pytest.mark.every_engine
def test_what_has_ended_is_found_by_its_id(broker, store, said):
    """The locator is written behind the row, and what it does not know is asked of all tables."""
    ids = [f"order-{number}" for number in range(12)]
    for number, id in enumerate(ids):
        publish(broker, id, **({"x-biz-id": f"customer-{number}"} if number % 3 else {}))
    consume(broker, 12)  # and the recorder has written all
    with_biz = [id for number, id in enumerate(ids) if number % 3]
    rows = [r["id"] for database in store.shards.databases for r in database.read(LOCATOR.select())]
    assert sorted(rows) == sorted(with_biz)
    for id in ids:
        said.clear()
        assert status_of(store, id) == ["done"]
        asked = [one for one in said if "toc_library_locator" in one or "toc_history" in one]
        assert len(asked) == 2, "the locator, and the shard"
    for database in store.shards.databases:
        database.execute(LOCATOR.delete())
    for id in ids:
        assert status_of(store, id) == ["done"]
    assert status_of(store, "nobody") == []
    store.locator.owed.write()
    said.clear()
    assert status_of(store, with_biz[0]) == ["done"]
    assert len(said) == 2, "what was found is noted"


def test_a_publish_meets_the_database_of_its_business_id_only(broker, away):
    [biz, *_] = biz_in(0, 1)
    away.numbers.add(1)
    for number in range(8):
        publish(broker, f"order-{number}", **{"x-biz-id": biz})
    assert len(consume(broker, 8)) == 8
    library = broker.default_channel.center.library
    assert {one.status for one in library.find(biz_id=biz).records} == {"done"}


def test_by_their_ids_messages_are_cancelled_and_moved_with_their_rows(broker, store):
    center = broker.default_channel.center
    ids = [f"order-{number}" for number in range(8)]
    for number, id in enumerate(ids):
        send(broker, id, f"customer-{number}")
    for id in ids[:4]:
        assert [one.moved for one in center.reschedule(id, delay=7200)] == [True]
    found = {
        one.id: one for n in range(8) for one in center.library.find(biz_id=f"customer-{n}")[0]
    }
    later = (time.time() + 7000) * 1e6
    assert [found[id].action_us > later for id in ids] == [True] * 4 + [False] * 4
    assert len(center.cancel(ids)) == 8
    center.recorder.recorder.flush()
    assert [status_of(store, id) for id in ids] == [["cancelled"]] * 8


def test_a_rebuild_puts_back_what_lies_by_business_ids(broker, client, store):
    center = broker.default_channel.center
    ids = [f"order-{number}" for number in range(8)]
    for number, id in enumerate(ids):
        send(broker, id, f"customer-{number}")
        publish(broker, f"run-{number}", **{"x-biz-id": f"customer-{number}"})
    consume(broker, 8)
    assert rebuilt(center) == 8
    assert sorted(one.id for one in center.scan("mail", limit=99).messages) == ids
    assert center.library.check() == []
    assert {row.place for row in store.of_ids(ids)} == {statuses.IN_REDIS}


def test_a_dead_letter_with_a_business_id_is_requeued_with_its_row(broker, store):
    def fail(message: Any) -> None:
        message.reject(requeue=False)

    for number in range(6):
        publish(broker, f"order-{number}", **{"x-biz-id": f"customer-{number}"})
    consume(broker, 6, fail)
    center = broker.default_channel.center
    assert center.dead.requeue(topic="mail") == 6
    assert consume(broker, 6) and json.dumps(store.count())
    assert [status_of(store, f"order-{n}")[-1] for n in range(6)] == ["done"] * 6


@pytest.fixture
def callers(options) -> Iterator[list[Engine]]:
    """The application's own engines, of the databases of the library."""
    made = [create_engine(DatabaseURL(url).reveal()) for url in options["toc_library"]]
    yield made
    for one in made:
        one.dispose()


def wait_for(center: Any, ids: list[str]) -> None:
    wait_until(lambda: len(center.get(ids)) == len(ids), 30)  # a thread puts them


@pytest.mark.parametrize("number", [0, 1])
def test_an_outbox_writes_to_the_database_of_its_caller_only(
    broker, store, callers, away, said, number
):
    center = broker.default_channel.center
    ids = [f"order-{n}" for n in range(6)]
    mine = [*biz_in(0, 3), *biz_in(1, 3)]
    publish(broker, "first")  # the queue is known
    recorder = broker.default_channel.recorder
    recorder.flush()
    recorder._start = lambda: None  # nothing is done before it is looked at
    recorder.close()
    with callers[number].begin() as connection, outbox(connection):
        away.numbers.add(1 - number)
        for id, biz in zip(ids, mine, strict=True):
            send(broker, id, biz)
    with callers[number].connect() as connection, outbox(connection):
        send(broker, "rolled-back", mine[0])
        connection.rollback()
    there = {id: [shard // 2 for shard in where_of(callers, id)] for id in ids}
    assert there == {id: [number] for id in ids}
    away.numbers.clear()
    for database in recorder.store.shards.databases:
        database._rests_until = 0.0
    del recorder._start
    recorder.wake()
    wait_for(center, ids)
    for id, biz in zip(ids, mine, strict=True):
        assert where(store, "pending", id) == [(zlib.crc32(biz.encode()) & 0xFFFFF) % 4]
        assert [one.id for one in center.library.find(biz_id=biz).records] == [id]
    assert not center.get("rolled-back") and status_of(store, "rolled-back") == []
    assert {row.place for row in store.of_ids(ids)} == {statuses.IN_REDIS}


def where_of(callers: list[Engine], id: str) -> list[int]:
    """The shards that have an id, as the application sees it."""
    found = []
    for number, one in enumerate(callers):
        with one.connect() as connection:
            for table in range(2):
                asked = text(f"SELECT COUNT(*) FROM toc_pending_{table} WHERE id = :id")
                if connection.execute(asked, {"id": id}).scalar_one():
                    found.append(2 * number + table)
    return found


@pytest.mark.parametrize("by", ["a keeper", "one that asks a database a second", "a rebuild"])
def test_what_an_outbox_has_written_elsewhere_is_put_by_whoever_looks(
    server, broker, store, callers, by, monkeypatch, recorded
):
    """The process was killed after the commit."""
    from kombu_toc.library.keeper import Keeper

    center = center_for(server.toc_url)
    publish(broker, "first")
    ids = [f"order-{n}" for n in range(6)]
    recorder = broker.default_channel.recorder
    recorder.flush()
    recorder._start = lambda: None
    recorder.close()
    caller = callers[by.startswith("one")]
    with caller.begin() as connection, outbox(connection):
        for id, biz in zip(ids, [*biz_in(0, 3), *biz_in(1, 3)], strict=True):
            send(broker, id, biz)
    if by == "a keeper":
        keeper = Keeper(store, center_for(server.toc_url), "w:1", 30 * 86_400)
        while keeper.put_missing() or keeper.has_more:
            pass
        keeper.close()
    elif by == "one that asks a database a second":
        monkeypatch.setattr("kombu_toc.library.keeper.ASKED", 1)
        keeper = Keeper(store, center_for(server.toc_url), "w:1", 30 * 86_400)
        wait_until(lambda: (keeper.turn(), len(center.get(ids)) == len(ids))[1])
        keeper.close()
    else:
        recorded.library.rebuild()
    wait_for(center, ids)
    for number, id in enumerate(ids):
        assert [n // 2 for n in where(store, "pending", id)] == [number // 3]
    assert {row.place for row in store.of_ids(ids)} == {statuses.IN_REDIS}


# -- another layout


@pytest.fixture
def changed(options, new_url) -> dict[str, Any]:
    """The options of a library that gets three databases with three tables each."""
    return {
        "toc_library": [options["toc_library"][1], new_url(), new_url()],
        "toc_library_tables": 3,
        "toc_library_before": options["toc_library"],
        "toc_library_tables_before": options["toc_library_tables"],
    }


def fill(broker: Connection, prefix: str, many: int) -> list[str]:
    """Send some, half of them with business ids, which wait."""
    ids = [f"{prefix}-{n}" for n in range(many)]
    for n, id in enumerate(ids):
        send(broker, id, f"customer-{n}" if n % 2 else None)
    return ids


def places(options: dict[str, Any], before: bool) -> Shards:
    if before:
        urls, tables = options["toc_library_before"], options["toc_library_tables_before"]
    else:
        urls, tables = options["toc_library"], options["toc_library_tables"]
    return Shards(read_databases("toc_library", urls), tables, 5.0)


def lie(options: dict[str, Any]) -> None:
    """Each row is where its layout has it, and none is anywhere else."""
    shards = places(options, before=False)
    old = places(options, before=True)
    there = 0
    for shard in shards.all:
        for table in shard.tables:
            for row in shard.database.read(table.select()):
                spread = zlib.crc32(row["id"].encode())
                if row["biz_id"] is not None:
                    spread = zlib.crc32(row["biz_id"].encode()) & 0xFFFFF
                assert spread % len(shards.all) == shard.number
                there += 1
    urls = {one.url for one in shards.databases}
    for shard in old.all:
        if shard.database.url not in urls:
            assert not any(shard.database.read(table.select()) for table in shard.tables)
    shards.close()
    old.close()
    assert there


@pytest.mark.every_engine
def test_a_library_gets_another_layout_while_it_is_used(server, broker, options, changed, client):
    waiting = fill(broker, "before", 30)
    for n in range(12):
        publish(broker, f"done-{n}", queue="run", **{"x-biz-id": f"customer-{n}"})
    center = broker.default_channel.center
    center.ack(center.pop("run", limit=6).messages)
    taken = center.pop("run", limit=6).messages
    center.queues.pause("mail")
    broker.default_channel.recorder.flush()
    seen: list[Any] = []
    with Connection(server.toc_url, transport_options=changed) as other:
        # Until all is moved, both are read and written.
        library = center_for(server.toc_url, **changed).library
        library.create()
        new = other.default_channel.center
        after = fill(other, "since", 30)
        assert len(library.find(biz_id="customer-1").records) == 3
        assert {r.id for r in library.find(status="pending", limit=99)[0]} == {*waiting, *after}
        assert [one.moved for one in new.reschedule(waiting[1], delay=7200)] == [True]
        assert [one.deleted for one in new.cancel([waiting[3], waiting[4], after[5]])] == [True] * 3
        new.ack(taken)
        other.default_channel.recorder.flush()
        assert [library.history(f"done-{n}")[0].status for n in range(12)] == ["done"] * 12
        assert new.library.check() == []
        # A process that does not know of it yet goes on.
        late = fill(broker, "late", 10)

        def on_progress(rows: int, of_rows: int) -> None:
            seen.append(rows)
            if len(seen) == 3:
                fill(other, "meanwhile", 10)
                new.cancel(late[3])

        done = library.reshard(on_progress)
        assert done.moved and seen[-1] >= done.rows > 0 and seen == sorted(seen)
        other.default_channel.recorder.flush()
        lie(changed)
        ids = {*waiting, *after, *late, *(f"meanwhile-{n}" for n in range(10))}
        ids -= {waiting[3], waiting[4], after[5], late[3]}
        found = library.find(status="pending", limit=999).records
        assert sorted(record.id for record in found) == sorted(ids)
        other.default_channel.recorder.close()
    del changed["toc_library_before"], changed["toc_library_tables_before"]
    last = center_for(server.toc_url, **changed)
    assert last.library.history(late[3])[0].status == "cancelled"
    assert [last.library.history(f"done-{n}")[0].status for n in range(12)] == ["done"] * 12
    client.flushall()
    assert last.library.rebuild().put == len(ids)
    assert sorted(one.id for one in last.scan("mail", limit=999).messages) == sorted(ids)
    assert last.queues.is_paused("mail")
    with pytest.raises(LibraryError, match="toc_library_before"):
        last.library.reshard()


def test_whoever_has_the_former_layout_only_is_told(server, broker, options, changed):
    fill(broker, "before", 4)
    broker.default_channel.recorder.flush()
    made = center_for(server.toc_url, **changed)
    made.library.create()
    assert made.library.reshard().moved
    close_libraries()
    old = center_for(server.toc_url, **options)
    with pytest.raises(LibraryError, match=r"has given its rows|was created as"):
        old.library.find(biz_id="customer-1")


def test_a_reshard_may_be_killed_and_repeated_while_the_library_is_used(
    server, broker, changed, client, tmp_path
):
    (tmp_path / "shop.py").write_text(
        "from celery import Celery\n"
        f"app = Celery('shop', broker={server.toc_url!r})\n"
        f"app.conf.broker_transport_options = {changed!r}\n"
    )
    command = [sys.executable, "-m", "celery", "-A", "shop", "toc", "library", "reshard", "--json"]

    def start() -> Any:
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return nursery.Popen(command, cwd=tmp_path, **how)

    waiting = [*fill(broker, "before", 400)]
    center = broker.default_channel.center
    later = time.time() + 3600
    many = [NewMessage(f"many-{n}", b"%d" % n, at=later) for n in range(2000)]
    center.put_many("mail", many)
    waiting += [one.id for one in many]
    new = center_for(server.toc_url, **changed)
    new.library.create()
    shards = places(changed, before=False)
    moved_to = [one for one in shards.all if one.database.number]

    def number_moved() -> int:
        asked = (text(f"SELECT COUNT(*) AS n FROM {s.tables.pending.name}") for s in moved_to)
        return sum(
            shard.database.read(one)[0]["n"] for shard, one in zip(moved_to, asked, strict=True)
        )

    gone: list[str] = []
    for _ in range(3):
        moved, running = number_moved(), start()
        while number_moved() < moved + 150 and running.poll() is None:
            id = waiting[len(gone)]
            assert [one.deleted for one in new.cancel(id)] == [True]
            gone.append(id)
        running.kill()
        running.communicate()
    running = start()
    said, error = running.communicate(timeout=60)
    assert running.returncode == 0, error
    assert json.loads(said)["rows"] >= len(waiting) - len(gone)
    new.recorder.recorder.flush()
    shards.close()
    lie(changed)
    left = set(waiting) - set(gone)
    assert new.library.counts()["pending"] == len(left)
    assert {new.library.history(id)[0].status for id in gone} == {"cancelled"}
    client.flushall()
    new.library.rebuild()
    assert {one.id for one in new.scan("mail", limit=9999).messages} == left
