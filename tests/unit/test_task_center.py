"""A TaskCenter wraps a TimeoutCenter, and has all of its public names."""

from __future__ import annotations

import inspect
from unittest import mock

import pytest
import redis
from celery import Celery

from celery_toc import Task, TaskCenter
from kombu_toc import DEAD, WAITING, Cancelled, Found, Limits, Page, TimeoutCenter

pytestmark = pytest.mark.versions

#: What users have had since the first release, on the object that `timeout_center` returns.
METHODS = {
    *("ack", "admit", "agreed", "cancel", "cancel_found"),
    *("cancelled_lately", "check", "coming", "consumers", "count", "counts"),
    *("counts_by_slot", "declare", "declared", "delete", "ensure_task"),
    *("extend", "forget", "get", "known", "learn"),
    *("pause", "paused", "pop", "purge", "purge_dead", "put"),
    *("reach", "redeclare", "refresh", "reject", "release"),
    *("remember_cancelled", "repair", "requeue_dead", "reschedule"),
    *("reschedule_found", "run", "run_all", "run_each", "run_now", "run_puts", "scan"),
    *("scheduled", "speaks_for", "stale", "summary", "task", "tasks", "topic", "topics"),
}
ATTRIBUTES = {
    *("app", "client", "clustered", "grace", "keys", "limits", "metrics", "pop_bytes", "slots"),
    *("steps", "wait_replicas", "wait_timeout"),
}

#: What a TaskCenter does in a way of its own.
OWN = {"alter", "count", "declare", "pop", "purge_dead", "requeue_dead", "reschedule", "scan"}


@pytest.fixture
def center() -> TimeoutCenter:
    """A center that reaches no server."""
    return TimeoutCenter(redis.Redis(port=1), steps=(0, 5), grace=3.0, pop_bytes=77)


@pytest.fixture
def app():
    with Celery("shop", broker="toc+redis://127.0.0.1:1/0", set_as_current=False) as made:
        yield made


@pytest.fixture
def tasks(app, center) -> TaskCenter:
    return TaskCenter(app, center)


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def test_what_users_have_is_there(tasks):
    assert public(tasks) >= {*METHODS, *ATTRIBUTES}
    assert all(callable(getattr(tasks, name)) for name in METHODS)


def test_whatever_a_timeout_center_offers_a_task_center_does_too(center, tasks):
    methods = {name for name in public(TimeoutCenter) if callable(getattr(TimeoutCenter, name))}
    methods.discard("from_url")  # of an app it is celery_toc.timeout_center
    assert methods
    assert methods - public(tasks) == set()
    for name in methods - OWN:
        of_tasks, of_center = getattr(tasks, name), getattr(center, name)
        assert of_tasks.__name__ == of_center.__name__ == name
        assert inspect.signature(of_tasks) == inspect.signature(of_center)
        assert of_tasks.__doc__ == of_center.__doc__


def test_what_is_the_same_is_asked_of_the_center(center, tasks, monkeypatch):
    for name in METHODS & (public(TimeoutCenter) - OWN):
        asked = mock.Mock()
        monkeypatch.setattr(center, name, asked)
        assert getattr(tasks, name)("mail", topic="x") is asked.return_value, name
        assert asked.mock_calls == [mock.call("mail", topic="x")], name


def test_attributes_are_those_of_the_center(center, tasks):
    for name in ATTRIBUTES - {"app"}:
        assert getattr(tasks, name) is getattr(center, name)
    tasks.limits = Limits(visibility=5)
    assert center.limits.visibility == 5
    assert (tasks.pop_bytes, tasks.grace, tasks.steps) == (77, 3.0, (0, 5))


def test_a_task_center_of_a_task_center_wraps_the_same_center(app, center, tasks):
    again = TaskCenter(app, tasks)
    assert again.center is tasks.center is center


def found(id: str, state: str = WAITING) -> Found:
    return Found("mail", 0, id, state, 0, 16, b"", "")


def test_a_predicate_is_asked_about_a_task(app, center, tasks, monkeypatch):
    asked = []

    def where(task: Task) -> bool:
        asked.append(task)
        return task.id == "b"

    def scan(topic, *, where, **options):
        assert (topic, options["state"], options["limit"]) == ("mail", DEAD, 9)
        return Page([one for one in (found("a"), found("b")) if where(one)], None)

    monkeypatch.setattr(center, "scan", scan)
    [one] = tasks.scan("mail", state=DEAD, where=where, limit=9).messages
    assert one.id == "b"
    assert [type(task) for task in asked] == [Task, Task]
    assert asked[0].app is app


@pytest.mark.parametrize("name", ["scan", "count", "requeue_dead", "purge_dead"])
def test_who_has_no_predicate_reads_no_task(center, tasks, monkeypatch, name):
    """The center reads bodies, and in larger steps, only for a predicate."""
    given = []
    monkeypatch.setattr(center, name, lambda topic, **options: given.append(options["where"]))
    getattr(tasks, name)("mail")
    assert given == [None]


def test_what_was_cancelled_is_a_task_without_a_time(tasks):
    read = tasks.task(Cancelled("mail", "id-1", WAITING, True))
    assert (read.id, read.eta) == ("id-1", None)
