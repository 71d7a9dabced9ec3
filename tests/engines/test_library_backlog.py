"""What a process has yet to write into the task library: bad entries, bounds, one database of two
away (X12)."""

from __future__ import annotations

import gc
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from kombu import Connection, Producer, Queue
from sqlalchemy import select, text

from kombu_toc import DEAD, LibraryError
from kombu_toc.library import putting, statuses
from kombu_toc.library import rebuild as rebuilding
from kombu_toc.library.keeper import Keeper
from kombu_toc.library.outcomes import DAY_US
from kombu_toc.library.putting import DeadLetters
from kombu_toc.library.records import Key, expires_us, now_us, row_of_message
from kombu_toc.library.schema import TOPICS
from kombu_toc.library.shards import Database
from kombu_toc.library.store import Store

from ..support.databases import MariaDB, PostgreSQL
from ..support.library import close_libraries, consume, fill, publish, status_of
from ..support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("client")

#: What takes the days away that history has room for. MySQL's keeps one: an old one.
WITHOUT_DAYS = {
    PostgreSQL: ("DROP TABLE IF EXISTS {history}_{today}",),
    MariaDB: (
        "DELETE FROM {history}",
        "ALTER TABLE {history} PARTITION BY RANGE (day) (PARTITION d2 VALUES LESS THAN (3))",
    ),
}

#: No database keeps a number like this.
HUGE = 1 << 70


@pytest.fixture
def recorder(broker) -> Any:
    return broker.default_channel.recorder


@pytest.fixture
def unrecorded(broker) -> Callable[[], int]:
    """How many were given up since the test began. A process counts for a server, not for a
    connection."""
    topics = broker.default_channel.center.metrics.topics

    def count() -> int:
        return topics["mail"].unrecorded if "mail" in topics else 0

    before = count()
    return lambda: count() - before


@pytest.fixture
def threadless(monkeypatch) -> None:
    """What a recorder's thread does, a test does."""
    monkeypatch.setattr("kombu_toc.library.recorder.Recorder._start", lambda _: None)


def ids_of(store: Store, number: int, many: int = 3) -> list[str]:
    """Ids whose rows are in that database."""
    found = (f"order-{n}" for n in range(1000))
    there = [id for id in found if store.shards.of(id).database.number == number]
    return there[:many]


def note(recorder: Any, key: Key, status: int, **about: Any) -> None:
    """Something has become of a message."""
    recorder.gather(recorder.gathering.event_of(key, status, **about), watched=True)


def rest(recorder: Any) -> None:
    """What was away is asked again."""
    for database in recorder.store.shards.databases:
        database._rests_until = 0.0


# -- what a database does not take


def refuse_poison(store: Store) -> None:
    """A constraint of somebody's own."""
    for shard in store.shards.all:
        table = shard.tables.history.name
        if shard.database.url.is_sqlite:
            statement = (
                f"CREATE TRIGGER {table}_t BEFORE INSERT ON {table} WHEN NEW.error = 'poison' "
                "BEGIN SELECT RAISE(ABORT, 'no poison'); END"
            )
        else:
            check = "CHECK (error IS NULL OR error <> 'poison')"
            statement = f"ALTER TABLE {table} ADD CONSTRAINT {table}_c {check}"
        shard.database.execute(text(statement))


def test_what_is_to_be_written_keeps_nothing_of_its_message_but_what_history_is_told(
    broker, recorder, monkeypatch
):
    class Headers(dict[str, Any]):
        """A mapping whose end can be seen."""

    monkeypatch.setattr(recorder, "_start", lambda: None)
    headers = Headers({"task": "remind", "x-biz-type": "order", "x-biz-id": "42", "meta": ["a"]})
    kept = weakref.ref(headers)
    for status in (statuses.TAKEN, statuses.DONE):
        note(recorder, ("lone", "t", "mail"), status, message=(headers, 7), has_row=False)
    del headers
    gc.collect()
    assert kept() is None
    assert recorder.backlog == 1
    recorder.flush()
    [record] = broker.default_channel.center.library.history("lone")
    assert (record.status, record.task) == ("done", "remind")
    assert (record.biz_type, record.biz_id) == ("order", "42")


@pytest.mark.every_engine
def test_what_a_database_does_not_take_is_named_and_the_rest_is_written(
    broker, recorder, store, caplog, unrecorded
):
    fill(broker, 30)
    refuse_poison(store)
    for row in store.of_ids([f"order-{number}" for number in range(30)]):
        error = "poison" if row.id in ("order-7", "order-8") else ""
        note(recorder, row.key, statuses.DONE, attempts=1, error=error)
    recorder.flush()
    recorder.flush()
    assert recorder.backlog == 0
    assert store.count() == {"done": 28, "pending": 2, "not put": 0}
    named = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert sorted(text.partition(" of ")[0] for text in named) == [
        "message order-7",
        "message order-8",
    ]
    assert all("is not recorded, the database does not take it: " in text for text in named)
    assert unrecorded() == 2


def test_a_row_that_is_written_late_and_not_taken_holds_up_no_other(
    server, options, store, away, caplog, unrecorded
):
    chosen = {**options, "toc_library_required": False}
    with Connection(server.toc_url, transport_options=chosen) as connection:
        recorder = connection.default_channel.recorder
        publish(connection, "order-0")
        away.numbers.update((0, 1))
        for number in range(1, 6):
            publish(connection, f"order-{number}")
        rows = recorder.gathering._rows.items
        [bad] = [row for row in rows.values() if row.id == "order-3"]
        rows[bad.key] = bad._replace(priority=HUGE)
        away.numbers.clear()
        recorder.flush()
        assert recorder.backlog == 0
        assert store.count() == {"pending": 5, "not put": 0}
        assert "message order-3 of mail is not recorded" in caplog.text
        assert unrecorded() == 1
        recorder.close()


@pytest.mark.every_engine
def test_history_that_has_lost_a_day_gets_it_again_and_loses_no_event(
    broker, recorder, store, engine, unrecorded
):
    if engine is None:
        return  # SQLite's history has no partitions
    publish(broker, "order-1")
    publish(broker, "order-2")
    rows = {row.id: row for row in store.of_ids(["order-1", "order-2"])}
    note(recorder, rows["order-1"].key, statuses.DONE)
    recorder.flush()
    # As when a backup of before the day is restored, while this process goes on.
    for shard in store.shards.all:
        history = shard.tables.history.name
        for statement in WITHOUT_DAYS[type(engine)]:
            shard.database.execute(text(statement.format(history=history, today=today())))
    note(recorder, rows["order-2"].key, statuses.DONE)
    for _ in range(2):
        try:
            recorder.flush()
        except LibraryError:
            continue
    assert status_of(store, "order-2") == ["done"]
    assert unrecorded() == 0


def today() -> int:
    return now_us() // DAY_US


def test_what_has_ended_does_not_begin_again(client, broker, recorder, store, threadless, away):
    """Redis has come back as an older copy of it was, while the library is away."""
    publish(broker, "order-1")
    before = {key: client.dump(key) for key in client.scan_iter(match="*}:*")}
    away.numbers.update((0, 1))
    with pytest.raises(LibraryError, match="it is away"):
        consume(broker, 1)
    for key, value in before.items():
        client.restore(key, 0, value, replace=True)
    with pytest.raises(LibraryError, match="it is away"):
        consume(broker, 1, lambda message: None)  # its worker is lost, too
    away.numbers.clear()
    rest(recorder)
    recorder.flush()
    assert status_of(store, "order-1") == ["done"]
    assert store.of_ids(["order-1"]) == []


# -- bounds


def test_beyond_its_bounds_a_process_gives_up_says_so_and_counts(
    server, options, store, away, caplog, monkeypatch, unrecorded
):
    monkeypatch.setattr("kombu_toc.library.recorder.MAX_ROWS", 10)
    monkeypatch.setattr("kombu_toc.library.recorder.MAX_EVENTS", 20)
    chosen = {**options, "toc_library_required": False}
    with Connection(server.toc_url, transport_options=chosen) as connection:
        recorder = connection.default_channel.recorder
        publish(connection, "order-0")
        away.numbers.update((0, 1))
        asked = away.asked
        for number in range(1, 41):
            publish(connection, f"order-{number}", **{"x-delay": 60_000})
        # Who sends waits for each database once.
        assert away.asked - asked <= 4
        assert len(connection.default_channel.center.scan("mail", limit=100).messages) == 41
        assert recorder.backlog == 10
        assert unrecorded() == 30
        for number in range(50):
            note(recorder, (f"gone-{number}", "t", "mail"), statuses.DONE)
        assert recorder.backlog == 30
        assert unrecorded() == 60
        away.numbers.clear()
        rest(recorder)
        recorder.flush()
        counts = store.count()
        assert (counts["pending"], counts["done"]) == (11, 20)
        # The latest are kept.
        assert status_of(store, "gone-49") == ["done"]
        assert status_of(store, "gone-0") == []
        recorder.close()
    # It says so every few seconds, if there is more.
    said = r"(\d+) messages or their ends are not recorded: the library was away for too long"
    assert sum(map(int, re.findall(said, caplog.text))) == 60


def test_a_process_that_ends_while_the_library_is_away_says_what_is_not_recorded(
    broker, recorder, away, caplog
):
    publish(broker, "order-1")
    away.numbers.update((0, 1))
    note(recorder, ("order-1", "t", "mail"), statuses.DONE)
    began = time.monotonic()
    recorder.close()
    assert time.monotonic() - began < 10
    assert "1 messages or their ends are not recorded: this process ends" in caplog.text


def test_a_process_that_goes_on_after_a_database_stood_still_at_its_close_records_again(
    broker, recorder, store, monkeypatch
):
    monkeypatch.setattr("kombu_toc.library.recorder.CLOSING", 0.1)
    publish(broker, "order-1")
    reached, answers = threading.Event(), threading.Event()
    write = recorder.store.record

    def stand_still(events: Any) -> None:
        reached.set()
        assert answers.wait(20)
        write(events)

    monkeypatch.setattr(recorder.store, "record", stand_still)
    [row] = store.of_ids(["order-1"])
    note(recorder, row.key, statuses.TAKEN)
    assert reached.wait(10)
    recorder.close()
    publish(broker, "order-2")
    answers.set()
    [row] = store.of_ids(["order-2"])
    note(recorder, row.key, statuses.TAKEN)
    wait_until(lambda: status_of(store, "order-2") == ["taken"])
    note(recorder, row.key, statuses.DONE)
    wait_until(lambda: status_of(store, "order-2") == ["done"])


# -- one of two databases away


def test_with_one_database_away_the_other_is_used_as_ever(
    broker, recorder, store, threadless, away
):
    first, second = ids_of(store, 0), ids_of(store, 1)
    for id in (first[0], second[0]):
        publish(broker, id)
    rows = {row.id: row for row in store.of_ids([first[0], second[0]])}
    away.numbers.add(0)
    with pytest.raises(LibraryError, match="it is away"):
        publish(broker, first[1])
    publish(broker, second[1])
    publish(broker, second[2], queue="other")  # also to a queue that is new
    for row in rows.values():
        note(recorder, row.key, statuses.DONE, attempts=1)
    with pytest.raises(LibraryError, match="it is away"):
        recorder.flush()
    away.numbers.clear()
    assert status_of(store, second[0]) == ["done"]
    assert status_of(store, first[0]) == ["pending"]
    recorder.flush()
    assert status_of(store, first[0]) == ["done"]
    rest(recorder)
    recorder.store.declarations.owed.write()
    for database in store.shards.databases:
        assert {row["name"] for row in database.read(select(TOPICS))} == {"mail", "other"}


def test_a_process_that_starts_with_one_database_away_uses_the_other(
    server, options, store, threadless, away, center, monkeypatch
):
    monkeypatch.setattr("kombu_toc.library.store.DOUBT_US", 0)
    monkeypatch.setattr("kombu_toc.library.shards.REST", 60.0)  # longer than this test takes
    away.numbers.add(1)
    with Connection(server.toc_url, transport_options=options) as connection:
        [first], [second] = ids_of(store, 0, 1), ids_of(store, 1, 1)
        publish(connection, first)
        with pytest.raises(LibraryError, match="it is away"):
            publish(connection, second)
        recorder = connection.default_channel.recorder
        # The upkeep of the other begins, too.
        row = store.of_ids([first])[0]
        store.place([row.key], statuses.NOT_PUT)
        assert center.queues.purge("mail") == 1
        keeper = Keeper(recorder.store, center, "test", 86_400)
        away.asked = 0
        assert keeper.put_missing() == 1
        assert away.asked == 0  # it rests
        rest(recorder)
        store.place([row.key], statuses.NOT_PUT)
        with pytest.raises(LibraryError, match="it is away"):
            keeper.put_missing()
        away.numbers.clear()
        assert store.of_ids([first])[0].place == statuses.IN_REDIS
        recorder.close()


def test_what_takes_long_is_said_to_be_taken_though_another_database_is_away(
    broker, recorder, store, threadless, away
):
    [first], [second] = ids_of(store, 0, 1), ids_of(store, 1, 1)
    publish(broker, first)
    publish(broker, second)
    rows = {row.id: row for row in store.of_ids([first, second])}
    for row in rows.values():
        note(recorder, row.key, statuses.TAKEN, attempts=1)
    recorder.flush()
    before = {row.id: row.modified_us for row in store.of_ids([first, second])}
    away.numbers.add(0)
    with pytest.raises(LibraryError):
        recorder.gathering.touch(0.0)
    away.numbers.clear()
    after = {row.id: row.modified_us for row in store.of_ids([first, second])}
    assert after[second] > before[second]
    assert after[first] == before[first]
    rest(recorder)
    recorder.gathering.touch(0.0)
    [row] = store.of_ids([first])
    assert row.modified_us > before[first]


def test_a_cancel_whose_row_cannot_be_written_is_recorded_later(
    server, options, broker, store, threadless, away
):
    publish(broker, "order-1", **{"x-delay": 60_000})
    center = broker.default_channel.center
    away.numbers.update((0, 1))
    with pytest.raises(LibraryError):
        center.cancel("order-1")
    assert not center.get("order-1")
    away.numbers.clear()
    broker.default_channel.recorder.flush()
    assert status_of(store, "order-1") == ["cancelled"]


def test_queues_that_go_away_by_themselves_ask_no_database(broker, threadless, away):
    """A worker that starts deletes the queue of the replies to its greeting."""
    publish(broker, "order-1")
    away.numbers.update((0, 1))
    asked = away.asked
    reply = Queue("reply", auto_delete=True, expires=10)(broker.default_channel)
    reply.declare()
    publish(broker, "answer", queue="reply")
    reply.purge()
    publish(broker, "answer", queue="reply")
    reply.delete()
    assert away.asked == asked


# -- names


def test_two_processes_of_one_name_are_two(center, broker, store, monkeypatch):
    monkeypatch.setattr("kombu_toc.library.store.DOUBT_US", 0)
    publish(broker, "order-1", **{"x-delay": 60_000})
    [row] = store.of_ids(["order-1"])
    store.place([row.key], statuses.NOT_PUT)
    one, other = (Keeper(store, center, "web-1:1", 86_400) for _ in range(2))
    mine = store.claim(store.shards.of(row.id), [row.key])
    assert [found.id for found in mine] == ["order-1"]
    assert store.claim(store.shards.of(row.id), [row.key]) == []
    for keeper in (one, other):
        keeper.turn()
    assert [one.is_elected, other.is_elected] == [True, False]


def test_who_cannot_be_elected_again_leaves_the_library_to_others(center, store, monkeypatch):
    """It is elected for twelve seconds, if no attempt to stay so gets an answer."""
    clock = Mock(monotonic=Mock(return_value=1000.0))
    monkeypatch.setattr("kombu_toc.library.keeper.time", clock)
    keeper = Keeper(store, center, "web-1:1", 86_400)
    keeper.turn()
    assert keeper.is_elected

    monkeypatch.setattr(center.notes, "speaks_for", Mock(side_effect=ConnectionError))
    for clock.monotonic.return_value in (1004.0, 1008.0, 1012.0):
        with pytest.raises(ConnectionError):
            keeper.turn()
    clock.monotonic.return_value = 1012.5
    monkeypatch.setattr(keeper, "put_missing", lambda _: pytest.fail("it is not elected"))
    keeper.turn()
    assert not keeper.is_elected


# -- rows of messages that had none


@pytest.mark.parametrize(
    "given",
    [
        {"x-visibility": 7, "x-max-lease": 90},
        {"x-key": "customer 7"},
        {"expiration": 30},
        {"x-visibility": 7, "expiration": 30},
        {},
    ],
    ids=["lease", "key", "expiration", "both", "none"],
)
def test_a_row_that_is_made_of_a_message_has_its_traits(broker, store, center, given):
    for number, delay in enumerate((60_000, 0)):  # one waits, one is in flight
        headers = {name: value for name, value in given.items() if name != "expiration"}
        Producer(broker.default_channel).publish(
            {"n": 1},
            routing_key="mail",
            expiration=given.get("expiration"),
            headers={"id": f"order-{number}", "task": "remind", "x-delay": delay, **headers},
        )
    [delivery] = center.pop("mail").messages
    assert delivery.id == "order-1"
    for row in store.of_ids(["order-0", "order-1"]):
        [found] = center.get(row.id)
        made = row_of_message(found, row.key)
        assert (made.key, made.body, made.basis) == (row.key, row.body, row.basis)
        if "expiration" in given:
            assert expires_us(made) == pytest.approx(expires_us(row), abs=5_000_000)
        else:
            assert made.traits == row.traits


def test_a_rebuild_puts_what_the_other_database_has_and_says_what_is_missing(
    client, broker, store, threadless, away, recorded
):
    first, second = ids_of(store, 0), ids_of(store, 1)
    for id in (*first, *second):
        publish(broker, id, **{"x-delay": 60_000})
    client.flushall()
    close_libraries()
    # A process that begins meanwhile.
    away.numbers.add(0)
    with pytest.raises(LibraryError, match=r"is not put back: .*it is away.*: 3 messages were put"):
        recorded.library.rebuild()
    assert {one.id for one in recorded.scan("mail").messages} == set(second)
    away.numbers.add(1)
    with pytest.raises(LibraryError, match=r"^the library [^;]*: it is away$"):
        recorded.library.rebuild()
    away.numbers.clear()
    assert recorded.library.rebuild().put == len(first)
    assert recorded.library.rebuild().put == 0


def test_a_rebuild_during_which_a_database_goes_away_puts_what_the_other_has(
    client, broker, store, threadless, away, monkeypatch, recorded
):
    first, second = ids_of(store, 0, 12), ids_of(store, 1, 12)
    for id in (*first, *second):
        publish(broker, id, **{"x-delay": 60_000})
    client.flushall()
    read = Database.read

    def goes_away(database: Database, statement: Any) -> Any:
        if "toc_library_layout" not in str(statement):
            away.numbers.add(0)
        return read(database, statement)

    monkeypatch.setattr(Database, "read", goes_away)
    with pytest.raises(LibraryError, match=f"is not put back: .*: {len(second)} messages were put"):
        recorded.library.rebuild()
    assert {one.id for one in recorded.scan("mail").messages} == set(second)


@pytest.mark.parametrize(
    "asked",
    [
        (rebuilding, "ended_rows"),
        (putting, "ended_since"),
        (Store, "moments"),
        (Store, "claim"),
        (DeadLetters, "rebuild"),
    ],
    ids=lambda asked: asked[1],
)
def test_a_rebuild_puts_all_that_one_has_when_the_other_goes_away_after_its_rows_were_read(
    client, broker, store, threadless, away, monkeypatch, asked, recorded
):
    """What is held of its rows is not put, and is no error of the other's."""
    monkeypatch.setattr(rebuilding, "TOGETHER", 4)
    first, second = ids_of(store, 0, 13), ids_of(store, 1, 13)
    publish(broker, second[0])
    consume(broker, 1, lambda message: message.reject())
    for number in range(1, 13):
        # Some are due: they are looked at twice.
        due = {} if number < 4 else {"x-delay": 60_000}
        publish(broker, first[number], **due)
        publish(broker, second[number], **due)
    unput = store.of_ids([first[12], second[12]])
    store.forget([row.key for row in unput])
    store.insert(
        [row._replace(place=statuses.NOT_PUT, modified_us=row.created_us) for row in unput]
    )
    client.flushall()
    ask = getattr(*asked)

    def goes_away(*given: Any) -> Any:
        away.numbers.add(0)
        return ask(*given)

    monkeypatch.setattr(*asked, goes_away)
    with pytest.raises(LibraryError, match="is not put back"):
        recorded.library.rebuild()
    found = {one.id: one.state for one in recorded.scan("mail").messages}
    assert {id for id in found if id in second[1:]} == set(second[1:])
    assert [one.id for one in recorded.scan("mail", state=DEAD).messages] == [second[0]]
    # The rest comes when it answers.
    monkeypatch.setattr(*asked, ask)
    away.numbers.clear()
    recorded.library.rebuild()
    assert {one.id for one in recorded.scan("mail").messages} == {*first[1:], *second}
