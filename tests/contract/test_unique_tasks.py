"""Unique tasks as their sender sees them: what is sent, and whose result is returned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain, group, signals
from kombu import Connection, Producer

import celery_toc
import kombu_toc
from celery_toc import Unique, unique

from ..meta.test_readme import named

HOUR = 3600


@pytest.fixture
def app(server: Any, client: Any) -> Iterator[Celery]:
    made = Celery("shop", broker=server.toc_url, backend="cache+memory://", set_as_current=False)
    made.task(add, name="add", shared=False)
    made.task(remind, name="remind", shared=False, toc_unique=Unique(lambda order, text="": order))
    made.task(
        remind,
        name="newest",
        shared=False,
        toc_unique=Unique(lambda order, text="": order, "start", "replace"),
    )
    made.task(remind, name="same", shared=False, toc_unique=Unique())
    made.task(
        remind, name="some", shared=False, toc_unique=Unique(lambda order, text="": text or None)
    )
    yield made
    made.close()


def add(x: int, y: int) -> int:
    return x + y


def number(n: int) -> int:
    return n


def remind(order: int, text: str = "") -> None:
    """A task that nobody runs here."""


@pytest.fixture
def tasks(app: Celery) -> celery_toc.TaskCenter:
    return celery_toc.timeout_center(app)


def waiting(tasks: celery_toc.TaskCenter) -> list[tuple[str, Any, Any]]:
    """Id, args and kwargs of what waits."""
    found = tasks.tasks(tasks.scan("celery", limit=1000).messages)
    return sorted((task.id, list(task.args), dict(task.kwargs)) for task in found)


# -- one call


@pytest.mark.cluster
def test_who_sends_what_is_there_gets_its_result(app, tasks):
    first = app.tasks["add"].apply_async((1, 2), countdown=HOUR, **unique("k"))
    again = app.tasks["add"].apply_async((3, 4), **unique("k"))
    by_name = app.send_task("elsewhere", (5,), **unique("k"))
    other = app.tasks["add"].apply_async((1, 2), **unique("other"))
    assert again.id == by_name.id == first.id != other.id
    assert type(again) is type(first)
    assert waiting(tasks) == sorted([(first.id, [1, 2], {}), (other.id, [1, 2], {})])


@pytest.mark.cluster
@pytest.mark.parametrize("conflict", ["replace", "push_back"])
def test_what_replaces_another_task_has_its_id_and_its_result(app, tasks, conflict):
    first = app.tasks["add"].apply_async((1, 2), countdown=60, **unique("k", conflict=conflict))
    again = app.tasks["add"].apply_async((3, 4), countdown=HOUR, **unique("k", conflict=conflict))
    assert again.id == first.id
    assert waiting(tasks) == [(first.id, [3, 4], {})]
    [found] = tasks.get(first.id)
    [task] = tasks.tasks([found])
    assert task.headers["id"] == task.headers["root_id"] == first.id
    assert task.properties["correlation_id"] == first.id
    seconds, _ = tasks.client.time()
    assert found.time_us / 1e6 - seconds > HOUR - 60


def test_signals_tell_of_what_is_sent_and_not_of_what_is_kept(app):
    sent: list[str] = []

    def on_sent(headers: dict[str, Any], **_: Any) -> None:
        sent.append(headers["id"])

    signals.after_task_publish.connect(on_sent)
    try:
        first = app.tasks["add"].apply_async((1, 2), countdown=HOUR, **unique("k"))
        app.tasks["add"].apply_async((1, 2), **unique("k"))
        app.tasks["add"].apply_async((1, 2), **unique("k", conflict="replace"))
    finally:
        signals.after_task_publish.disconnect(on_sent)
    assert sent[0] == first.id
    assert len(sent) == 2


def test_what_makes_no_sense_is_refused(app, tasks):
    for said, message in (
        ({"until": "soon"}, "x-unique-until must be 'start', 'done' or a number"),
        ({"conflict": "drop"}, "x-unique-conflict must be one of"),
        ({"at_most": 3}, "x-unique-at-most goes with conflict push_back"),
    ):
        with pytest.raises(kombu_toc.TraitError, match=message):
            app.tasks["add"].apply_async((1, 2), **unique("k", **said))
    assert waiting(tasks) == []


# -- the attribute of a task


def test_a_task_says_its_key_as_a_function_of_its_arguments(app, tasks):
    task = app.tasks["remind"]
    first = task.delay(1, "a")
    assert task.apply_async((1,), {"text": "b"}).id == first.id
    assert task.s(1, text="c").apply_async(countdown=5).id == first.id
    assert app.send_task("remind", (1,)).id == first.id
    assert app.tasks["newest"].delay(1).id != first.id  # another task: its name is before the key
    assert task.delay(2).id != first.id
    assert len(waiting(tasks)) == 3


def test_the_arguments_are_the_key_unless_a_task_says_another(app, tasks):
    task = app.tasks["same"]
    first = task.delay(1)
    assert task.delay(order=1).id == task.delay(1, "").id == first.id
    assert task.delay(1, "other").id != first.id
    with pytest.raises(kombu_toc.TraitError, match="task same: its arguments make no unique key"):
        task.delay({1: object()})


def test_a_task_without_a_key_is_not_unique_this_time(app, tasks):
    task = app.tasks["some"]
    assert task.delay(1).id != task.delay(1).id
    assert task.delay(1, "x").id == task.delay(2, "x").id


def test_what_a_call_says_goes_before_what_the_task_says(app, tasks):
    first = app.tasks["remind"].apply_async((1,), **unique("mine", conflict="raise"))
    assert app.tasks["remind"].delay(1).id != first.id
    with pytest.raises(kombu_toc.UniqueError):
        app.tasks["remind"].apply_async((1,), **unique("mine", conflict="raise"))


def test_canvas_sends_unique_tasks_once(app, tasks):
    task = app.tasks["remind"]
    group(task.si(1), task.si(1), task.si(2)).apply_async()
    chain(task.si(1), task.si(3)).apply_async()
    assert sorted(args for _, args, _ in waiting(tasks)) == [[1], [2]]


@pytest.mark.cluster
async def test_a_task_is_unique_that_is_sent_from_an_event_loop(app, tasks):
    from celery_toc import aio

    task = app.tasks["remind"]
    plain = [await aio.send(app.tasks["add"].s(1, n), countdown=HOUR) for n in range(3)]
    assert len({result.id for result in plain}) == 3
    sent = [await aio.send(task.s(1, text=str(n)), countdown=HOUR) for n in range(3)]
    newest = [await aio.send(app.tasks["newest"].s(1, text=str(n))) for n in range(3)]
    calls = [await aio.send(app.tasks["add"].s(1, n), **unique("k")) for n in range(3)]
    await aio.aclose(app)
    assert ([len({result.id for result in some}) for some in (sent, newest, calls)]) == [1, 1, 1]
    texts = [kwargs.get("text") for _, args, kwargs in waiting(tasks) if args == [1]]
    assert sorted(texts) == ["0", "2"]


# -- retries


def retried(app: Celery, sent: Any, **headers: Any) -> Any:
    """Send a task again as `self.retry` does."""
    return app.tasks["add"].apply_async(
        (9, 9), task_id=sent.id, headers={"x-unique": "k", **headers}, retries=1, countdown=HOUR
    )


@pytest.mark.parametrize("late", [True, False])
def test_a_retry_goes_on_for_its_task_and_keeps_the_key(app, tasks, late):
    sent = app.tasks["add"].apply_async((1, 2), **unique("k"))
    [delivery] = tasks.pop("celery").messages
    assert delivery.outlives_ack
    if late:
        retried(app, sent)
        tasks.ack([delivery])
    else:  # a worker of an older release acknowledges it before it runs
        tasks.ack([delivery])
        retried(app, sent)
    assert app.tasks["add"].apply_async((3, 4), **unique("k")).id == sent.id
    assert waiting(tasks) == [(sent.id, [9, 9], {})]
    replaced = app.tasks["add"].apply_async((5, 6), **unique("k", conflict="replace"))
    assert replaced.id == sent.id
    assert waiting(tasks) == [(sent.id, [5, 6], {})]
    tasks.cancel(sent.id)
    assert app.tasks["add"].apply_async((7, 8), **unique("k")).id != sent.id


def test_a_retry_is_sent_although_another_task_has_claimed_the_key(app, tasks):
    sent = app.tasks["add"].apply_async((1, 2), **unique("k", until="start"))
    [delivery] = tasks.pop("celery").messages
    other = app.tasks["add"].apply_async((3, 4), **unique("k", until="start"))
    assert other.id != sent.id
    retried(app, sent, **{"x-unique-until": "start", "x-unique-conflict": "raise"})
    assert app.tasks["add"].apply_async((5, 6), **unique("k", until="start")).id == other.id
    assert len(waiting(tasks)) == 3
    tasks.ack([delivery])


@pytest.mark.parametrize("until", ["start", 0.001])
def test_a_retry_does_not_claim_anew_what_ends_at_its_start_or_with_its_time(app, tasks, until):
    sent = app.tasks["add"].apply_async((1, 2), **unique("k", until=until))
    tasks.ack(tasks.pop("celery").messages)
    retried(app, sent, **{"x-unique-until": until})
    assert app.tasks["add"].apply_async((3, 4), **unique("k", until=until)).id != sent.id


def test_a_task_that_another_one_replaces_keeps_the_key(app, tasks):
    sent = app.tasks["add"].apply_async((1, 2), **unique("k"))
    [delivery] = tasks.pop("celery").messages
    app.tasks["add"].apply_async(
        (3, 4), task_id=sent.id, replaced_task_nesting=1, countdown=HOUR, **unique("k")
    )
    tasks.ack([delivery])
    assert waiting(tasks) == [(sent.id, [3, 4], {})]
    assert app.tasks["add"].apply_async((5, 6), **unique("k")).id == sent.id


# -- headers


def test_headers_say_the_same_for_who_has_no_python(app, tasks, server):
    with Connection(server.toc_url) as connection:
        producer = Producer(connection)

        def publish(body: str, **said: Any) -> None:
            headers = {f"x-unique{name.replace('_', '-')}": value for name, value in said.items()}
            producer.publish(body, routing_key="celery", headers=headers)

        publish("a", **{"": "k"})
        publish("b", **{"": "k"})
        publish("c", **{"": "k", "_conflict": "replace", "_until": "done"})
        publish("d", **{"": "other", "_until": "60"})
        with pytest.raises(kombu_toc.UniqueError):
            publish("e", **{"": "other", "_conflict": "raise"})
        publish("f", **{"": "other", "_conflict": "push_back", "_at_most": 5, "_until": "start"})
        bodies = [task.body for task in tasks.tasks(tasks.scan("celery", limit=9).messages)]
        assert sorted(bodies) == [b"c", b"f"]


@pytest.mark.cluster
def test_a_message_of_a_batch_may_be_unique(server, tasks):
    with Connection(server.toc_url) as connection:
        producer = Producer(connection)
        # Kombu before 5.7 publishes no batches.
        with producer.batch() if hasattr(producer, "batch") else contextlib.nullcontext():
            for body in "abc":
                producer.publish(body, routing_key="celery", headers={"x-unique": "k"})
    assert [one.topic for one in tasks.scan("celery", limit=9).messages] == ["celery"]


# -- docs/unique.md


def test_the_examples_of_the_page_run(app, tasks, capsys):
    task = app.task(number, name="number", shared=False)
    names: dict[str, Any] = {"app": app, "invoice": task, "index": task}
    exec(named("docs/unique.md", "print(again.id"), names)
    assert capsys.readouterr().out == "True\n"
    exec(named("docs/unique.md", "countdown=10"), names)
    exec(named("docs/unique.md", "toc_unique=Unique("), names)
    assert names["invoice"].delay(42).id == names["invoice"].delay(42, copies=3).id
    assert len(waiting(tasks)) == 3
