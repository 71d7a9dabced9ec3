"""x-guard: what has ended in the task library is not run again (X12)."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from kombu import Connection, Consumer, Producer, Queue

from kombu_toc import ConfigurationError, Delivery, LibraryError, TimeoutCenter
from kombu_toc.library import guard as guarding
from kombu_toc.library import statuses
from kombu_toc.library.putting import Putter
from kombu_toc.library.records import Row
from kombu_toc.library.shards import Database
from kombu_toc.library.store import Store

from ..support.library import consume, publish, status_of

pytestmark = pytest.mark.usefixtures("client")


@pytest.fixture
def guarded(broker: Connection) -> Connection:
    """A connection to a broker whose queue ``mail`` has x-guard."""
    Queue("mail", queue_arguments={"x-guard": True})(broker.default_channel).declare()
    return broker


@pytest.fixture
def put_again(store: Store, center: TimeoutCenter) -> Any:
    """Puts messages into Redis as they were, as a snapshot of an hour ago would."""

    def put(rows: Sequence[Row]) -> None:
        assert Putter(store, center).put(rows) == (len(rows), set())

    return put


def nothing_is_left(connection: Connection, center: TimeoutCenter) -> None:
    """What is still there has ended, and goes without being delivered. (On a Cluster, queues of
    several nodes are popped at the same time.)"""
    channel = connection.channel()
    taken: list[Any] = []
    with Consumer(channel, Queue("mail"), on_message=taken.append, accept=["json"]):
        while sum(center.counts("mail")):
            with contextlib.suppress(TimeoutError):
                connection.drain_events(timeout=0.05)
    assert not taken
    connection.default_channel.recorder.flush()


def rows_of(store: Store, *ids: str) -> list[Row]:
    found = store.of_ids(ids)
    assert len(found) == len(ids)
    return found


def test_what_has_ended_is_not_run_again_and_is_gone(guarded, store, center, put_again):
    publish(guarded, "order-1")
    rows = rows_of(store, "order-1")
    consume(guarded, 1)
    [before] = store.history("order-1")
    put_again(rows)
    publish(guarded, "order-2")
    assert consume(guarded, 1) == ["order-2"]
    nothing_is_left(guarded, center)
    [after] = store.history("order-1")
    assert after == before._replace(error=guarding.AGAIN)
    put_again(rows)
    publish(guarded, "order-3")
    assert consume(guarded, 1) == ["order-3"]
    nothing_is_left(guarded, center)
    assert store.history("order-1") == [after]


def test_without_it_what_comes_again_runs_again_and_nobody_is_asked(broker, store, put_again):
    publish(broker, "order-1")
    rows = rows_of(store, "order-1")
    consume(broker, 1)
    put_again(rows)
    assert consume(broker, 1) == ["order-1"]
    recorder = broker.default_channel.recorder
    assert [asker._thread for asker in recorder.guard.askers] == [None, None]


def test_what_was_cancelled_does_not_run(guarded, store, center, put_again, recorded):
    publish(guarded, "order-1", **{"x-delay": 60_000})
    rows = rows_of(store, "order-1")
    recorded.cancel("order-1")
    put_again([rows[0]._replace(action_us=1)])
    publish(guarded, "order-2")
    assert consume(guarded, 1) == ["order-2"]
    nothing_is_left(guarded, center)
    assert status_of(store, "order-1") == ["cancelled"]


@pytest.mark.parametrize("goes_on", [{"retries": 1}, {"replaced_task_nesting": 1}], ids=str)
def test_what_goes_on_with_a_task_of_its_id_runs(guarded, store, center, put_again, goes_on):
    publish(guarded, "order-1")
    consume(guarded, 1)
    publish(guarded, "order-1", **goes_on)
    rows = rows_of(store, "order-1")
    assert consume(guarded, 1) == ["order-1"]
    put_again(rows)
    publish(guarded, "order-2")
    assert consume(guarded, 1) == ["order-2"], "and that has ended, too"
    nothing_is_left(guarded, center)


def test_what_was_not_finished_is_delivered_again(guarded, store):
    publish(guarded, "order-1")

    def refuse_once(message: Any) -> None:
        if message.delivery.redelivered:
            message.ack()
        else:
            message.requeue()

    assert consume(guarded, 2, refuse_once) == ["order-1", "order-1"]
    assert status_of(store, "order-1") == ["done"]


def test_an_id_that_is_sent_again_on_purpose_does_not_run_and_history_says_why(
    guarded, store, center
):
    publish(guarded, "order-1")
    consume(guarded, 1)
    publish(guarded, "order-1")
    publish(guarded, "order-2")
    assert consume(guarded, 1) == ["order-2"]
    nothing_is_left(guarded, center)
    done, again = store.history("order-1")
    assert (done.status, done.error) == ("done", None)
    assert (again.status, again.error) == ("cancelled", guarding.SENT_AGAIN)
    assert store.of_ids(["order-1"]) == []


def test_the_same_id_in_another_queue_runs(guarded, store):
    publish(guarded, "order-1", queue="other")
    channel = guarded.channel()
    other = Queue("other")(channel)
    other.get().ack()
    guarded.default_channel.recorder.flush()
    publish(guarded, "order-1")
    assert consume(guarded, 1) == ["order-1"]


def test_a_dead_letter_that_is_taken_up_again_runs(guarded, store, center):
    publish(guarded, "order-1")
    consume(guarded, 1, lambda message: message.reject())
    assert status_of(store, "order-1") == ["dead"]
    assert center.dead.requeue("mail")
    assert consume(guarded, 1) == ["order-1"]
    assert status_of(store, "order-1") == ["done"]


def test_a_message_that_is_got_one_by_one_is_asked_about_as_well(guarded, store, center, put_again):
    publish(guarded, "order-1")
    rows = rows_of(store, "order-1")
    consume(guarded, 1)
    put_again(rows)
    publish(guarded, "order-2")
    queue = Queue("mail")(guarded.channel())
    found = queue.get(no_ack=True)
    assert found is not None
    assert found.headers["id"] == "order-2"
    assert queue.get() is None


def test_one_statement_for_each_table_answers_for_many_deliveries(guarded, store, monkeypatch):
    publish(guarded, "order-0")
    guarded.default_channel.recorder.flush()
    made: list[int] = []
    real = guarding.ends_of

    def counted(store: Store, ids: Any) -> Any:
        ids = list(ids)
        made.append(len(ids))
        return real(store, ids)

    monkeypatch.setattr(guarding, "ends_of", counted)
    guard = guarded.default_channel.recorder.guard.askers[0]
    first, both, answers = threading.Event(), threading.Event(), []

    def answer(ended: Any) -> None:
        answers.append(ended)
        if len(answers) == 1:
            first.set()
        if len(answers) == 21:
            both.set()

    def deliveries(name: str) -> list[Delivery]:
        return [Delivery("mail", 0, 0, f"{name}-{n}", 16, b"x", 16, "b") for n in range(100)]

    with monkeypatch.context() as slow:
        # While the first question is being answered, twenty others come.
        slow.setattr(guarding, "ends_of", lambda *a: (both.wait(0.2), counted(*a))[1])
        assert guard.ask(deliveries("a"), answer)
        for number in range(20):
            assert guard.ask(deliveries(f"b{number}"), answer)
        assert both.wait(20)
    assert answers == [{}] * 21
    assert len(made) <= 3
    assert sum(made) == 2100


def test_while_the_library_does_not_answer_messages_are_late_and_then_delivered(
    server, options, store, put_again, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    with Connection(
        server.toc_url, transport_options={**options, "toc_library_timeout": 1}
    ) as connection:
        Queue("mail", queue_arguments={"x-guard": True})(connection.default_channel).declare()
        publish(connection, "order-1")
        rows = rows_of(store, "order-1")
        consume(connection, 1)
        put_again(rows)
        center = connection.default_channel.center
        counts = center.context.counts(center.registry.topic("mail"))
        before = counts.unguarded, counts.guarded
        standing, real = threading.Event(), guarding.ends_of

        def of(id: str) -> Database:
            return store.shards.of(id).database

        asked: list[Any] = []

        def stand_still(*given: Any) -> Any:
            asked.append(given)
            standing.wait()
            return real(*given)

        with monkeypatch.context() as away:
            away.setattr(guarding, "ends_of", stand_still)
            away.setattr(guarding, "AWAY", 60.0)
            began = time.monotonic()
            assert consume(connection, 1) == ["order-1"]
            assert time.monotonic() - began > 0.9
            other = next(
                id for id in (f"order-{n}" for n in range(4, 100)) if of(id) is of("order-1")
            )
            publish(connection, other)
            assert consume(connection, 1) == [other]
            assert len(asked) == 1, "nobody is asked who did not answer"
            standing.set()
        assert (counts.unguarded - before[0], counts.guarded - before[1]) == (2, 0)
        [record] = store.history("order-1")
        assert record.error is None, "what is said too late is not done"
        assert "delivered without asking the library" in caplog.text
        guard = connection.default_channel.recorder.guard
        while any(asker._is_away for asker in guard.askers):
            time.sleep(0.001)  # a thread says so a moment after it has its answer
        put_again(rows)
        publish(connection, "order-3")
        assert consume(connection, 1) == ["order-3"]
        nothing_is_left(connection, center)
        assert counts.guarded - before[1] == 1
        assert "the library says again what has ended" in caplog.text
        recorder = connection.default_channel.recorder
    recorder.close()


def test_while_the_library_is_away_messages_are_delivered(guarded, store, monkeypatch, caplog):
    publish(guarded, "order-1")
    publish(guarded, "order-2")

    def away(*_: Any) -> Any:
        raise LibraryError("gone")

    monkeypatch.setattr(guarding, "ends_of", away)
    assert sorted(consume(guarded, 2)) == ["order-1", "order-2"]
    said = [one for one in caplog.messages if "without asking the library" in one]
    asked = {store.shards.of(id).database for id in ("order-1", "order-2")}
    assert said == [
        "messages are delivered without asking the library whether they have ended: gone"
    ] * len(asked)


@pytest.mark.parametrize("by", ["a worker", "a center"])
def test_a_database_that_stands_still_keeps_what_another_knows_from_nobody(
    server, options, store, put_again, monkeypatch, by
):
    with Connection(
        server.toc_url, transport_options={**options, "toc_library_timeout": 1}
    ) as connection:
        channel = connection.default_channel
        Queue("mail", queue_arguments={"x-guard": True})(channel).declare()
        ids = [f"order-{n}" for n in range(40)]
        for id in ids:
            publish(connection, id)
        rows = rows_of(store, *ids)
        consume(connection, len(ids))
        put_again(rows)
        standing, run = threading.Event(), Database._run

        def stand_still(database: Database, *given: Any) -> Any:
            if database.number == 0 and threading.current_thread().name == "toc-guard":
                standing.wait()
            return run(database, *given)

        monkeypatch.setattr(Database, "_run", stand_still)
        of_the_first = [id for id in ids if store.shards.of(id).database.number == 0]
        assert 0 < len(of_the_first) < len(ids)
        if by == "a worker":
            taken = consume(connection, len(of_the_first))
        else:
            taken = []
            while len(taken) < len(of_the_first):
                some = channel.center.pop("mail", limit=100).messages
                channel.center.ack(some)
                taken += [one.id for one in some]
        standing.set()
        assert sorted(taken) == sorted(of_the_first)
        while any(channel.center.counts("mail")):
            nothing_is_left(connection, channel.center)
        channel.recorder.flush()
        again = {id for id in ids if guarding.AGAIN in str(store.history(id)[0].error)}
        assert again == set(ids) - set(of_the_first)
        recorder = channel.recorder
    recorder.close()


def test_who_is_asked_of_an_id_with_a_number_sign_is_the_database_that_has_its_row(
    guarded, store, center, put_again, monkeypatch
):
    """It is no copy's, although it looks like one: while another database is away, it is asked."""

    def number_of(id: str) -> int:
        return store.shards.of(id).database.number

    names = [name for name in (f"invoice-{n}" for n in range(60)) if number_of(name) == 0][:5]
    ids = [id for id in (f"{names[0]}#{n}" for n in range(60)) if number_of(id) == 1][:12]
    for id in (*names, *ids):
        publish(guarded, id)
    rows = rows_of(store, *names, *ids)
    consume(guarded, len(rows))
    put_again(rows)
    run, taken = Database._run, []

    def away(database: Database, *given: Any) -> Any:
        if database.number == 0 and threading.current_thread().name == "toc-guard":
            raise LibraryError("away")
        return run(database, *given)

    def take(message: Any) -> None:
        taken.append(message.headers["id"])
        message.ack()

    monkeypatch.setattr(Database, "_run", away)
    with Consumer(guarded.channel(), Queue("mail"), on_message=take, accept=["json"]):
        while any(center.counts("mail")):
            with contextlib.suppress(TimeoutError):
                guarded.drain_events(timeout=0.05)
    assert sorted(taken) == sorted(names)


def test_what_is_asked_about_goes_back_when_its_consumer_leaves(
    guarded, store, center, monkeypatch
):
    publish(guarded, "order-1")
    asked, go_on, real = threading.Event(), threading.Event(), guarding.ends_of

    def slowly(*given: Any) -> Any:
        asked.set()
        go_on.wait()
        return real(*given)

    monkeypatch.setattr(guarding, "ends_of", slowly)
    channel = guarded.channel()
    taken: list[Any] = []
    with Consumer(channel, Queue("mail"), on_message=taken.append, accept=["json"]):
        while not asked.is_set():
            with pytest.raises(TimeoutError):
                guarded.drain_events(timeout=0.05)
    go_on.set()
    assert not taken
    assert center.counts("mail").ready == 1
    assert consume(guarded, 1) == ["order-1"]


def test_it_is_declared_altered_and_described_like_every_limit(server, guarded, options, center):
    channel = guarded.default_channel
    assert channel.ignored["mail"] == []
    assert center.queues.describe("mail").limits["guard"].value is True
    center.queues.alter("mail", guard=None)
    assert center.queues.describe("mail").limits["guard"].value is None
    topics = {"toc_topics": {"sms": {"guard": True}}}
    with Connection(server.toc_url, transport_options={**options, **topics}) as other:
        Queue("sms")(other.default_channel).declare()
    assert center.registry.declared("sms").declaration.guard is True


def test_without_a_library_it_cannot_be_declared_and_a_consumer_warns(
    server, guarded, center, caplog
):
    with Connection(server.toc_url) as other:
        with pytest.raises(ConfigurationError, match=r"'sms': guard needs a task library: set"):
            Queue("sms", queue_arguments={"x-guard": True})(other.default_channel).declare()
        assert center.registry.declared("sms") is None
        Queue("sms", queue_arguments={"x-guard": False})(other.default_channel).declare()
        with Consumer(other.channel(), Queue("mail")):
            assert "'mail' was declared with x-guard, and this process has no" in caplog.text


def test_bytes_that_are_no_envelope_are_known_by_their_id(guarded, store, center):
    center.put("mail", "raw-1", b"\0\1")
    producer = Producer(guarded.default_channel)
    producer.publish({}, routing_key="mail", headers={"id": "order-1", "task": "remind"})
    assert consume(guarded, 1) == ["order-1"]
    assert store.count()["done"] == 1
    assert statuses.NAMES[statuses.DONE] == "done"
