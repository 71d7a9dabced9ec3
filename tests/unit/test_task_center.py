"""A TaskCenter is a TimeoutCenter of the same parts, to which messages are tasks."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import redis
from celery import Celery

from celery_toc import Task, TaskCenter
from kombu_toc import DEAD, WAITING, Cancelled, Found, Page, TimeoutCenter


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


def test_its_parts_are_those_of_the_center(center, tasks):
    assert isinstance(tasks, TimeoutCenter)
    own = {name for name, part in vars(center).items() if getattr(tasks, name) is not part}
    assert own == {"dead"}, "a predicate of it is given a Task"
    for name in ("get", "put", "cancel", "ack"):
        assert getattr(tasks, name) == getattr(center, name)


def test_a_type_checker_is_told_the_arguments_that_there_are():
    """Of the methods whose predicate is given a Task it knows signatures that nothing runs."""

    def arguments(method: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(method).parameters.values()
        return [(one.name, one.kind, one.default) for one in parameters]

    [own] = ast.parse(inspect.getsource(TaskCenter)).body
    [told] = [part for part in own.body if isinstance(part, ast.If)]
    methods: dict[str, Any] = {}
    exec(compile(ast.Module(told.body, []), "TaskCenter", "exec"), methods)
    for name in ("scan", "count", "pop"):
        assert arguments(methods[name]) == arguments(getattr(TimeoutCenter, name)), name


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

    monkeypatch.setattr(center.messages, "scan", scan)
    [one] = tasks.scan("mail", state=DEAD, where=where, limit=9).messages
    assert one.id == "b"
    assert [type(task) for task in asked] == [Task, Task]
    assert asked[0].app is app


@pytest.mark.parametrize("name", ["scan", "count", "requeue", "purge"])
def test_who_has_no_predicate_reads_no_task(center, tasks, monkeypatch, name):
    """The center reads bodies, and in larger steps, only for a predicate."""
    given = []

    def called(topic, **options):
        given.append(options["where"])
        return 0

    part = "messages" if name in ("scan", "count") else "dead"
    monkeypatch.setattr(getattr(center, part), name, called)
    getattr(tasks if part == "messages" else tasks.dead, name)("mail")
    assert given == [None]


def test_what_was_cancelled_is_a_task_without_a_time(tasks):
    read = tasks.task(Cancelled("mail", "id-1", WAITING, True))
    assert (read.id, read.eta) == ("id-1", None)
