"""What becomes of a message whose task has failed, by what Celery makes of the failure."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.exceptions import Terminated, WorkerLostError
from celery.exceptions import Ignore, Reject, Retry

import kombu_toc
from celery_toc.worker.failures import TEXT, TRACEBACK, Dying, explain, layered, report

from ..support.cases import each


class Message(kombu_toc.Message):
    def __init__(self) -> None:
        self.buried: list[str] = []
        self.reason = self.error = ""

    def bury(self, reason: str, error: str = "") -> None:
        self.buried.append(f"{reason}: {error}")


class Base:
    """As much of Celery's request as matters here; `does` is what it makes of a failure."""

    def __init__(self, *, late: bool, does: Callable[[Any], None]) -> None:
        self.task = SimpleNamespace(acks_late=late)
        self.message = Message()
        self.acknowledged = not late
        self.does = does
        self.said: list[str] = []

    def on_failure(self, exc_info: Any) -> None:
        self.does(self)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        self.does(self)

    def acknowledge(self) -> None:
        if not self.acknowledged:
            self.said.append("ack")
            self.acknowledged = True

    def reject(self, requeue: bool = False) -> None:
        if not self.acknowledged:
            self.said.append("requeue" if requeue else "reject")
            self.acknowledged = True

    def send_event(self, type: str, **fields: Any) -> None:
        pass


def failed(request: Any) -> None:
    if request.task.acks_late:
        request.acknowledge()
    request.send_event("task-failed")


def succeeded_before(request: Any) -> None:
    if request.task.acks_late:
        request.acknowledge()
    request.send_event("task-succeeded")


def retried(request: Any) -> None:
    if request.task.acks_late:
        request.acknowledge()
    request.send_event("task-retried")


def came_back(request: Any) -> None:
    request.reject(requeue=True)


def rejected(request: Any) -> None:
    request.reject(requeue=False)
    request.send_event("task-failed")


def broke(request: Any) -> None:
    failed(request)
    raise ConnectionError("the result backend is away")


def after(exc: BaseException, *, late: bool, does: Callable[[Any], None] = failed) -> Any:
    """The request after this failure."""
    request: Any = layered(Base, Dying)(late=late, does=does)
    try:
        request.on_failure(SimpleNamespace(exception=exc, traceback="Traceback\n  boom"))
    except ConnectionError:
        assert does is broke
    return request


@pytest.mark.parametrize("does", [failed, broke])
def test_who_has_failed_for_good_is_rejected_or_buried(does: Callable[[Any], None]) -> None:
    late = after(ValueError("x"), late=True, does=does)
    assert (late.said, late.message.buried) == (["reject"], [])
    assert (late.message.reason, late.message.error) == (
        "the task failed",
        "ValueError: x\nTraceback\n  boom",
    )
    early = after(ValueError("x"), late=False, does=does)
    assert early.said == []
    assert early.message.buried == ["the task failed: ValueError: x\nTraceback\n  boom"]


@each("late", [True, False])
@each("does", [succeeded_before, retried])
def test_who_has_not_failed_for_good_is_acknowledged(
    late: bool, does: Callable[[Any], None]
) -> None:
    request = after(WorkerLostError(), late=late, does=does)
    assert (request.said, request.message.buried) == (["ack"] if late else [], [])


@each("exc", [Ignore(), Reject("x"), Retry(), Terminated()])
def test_who_is_ignored_rejected_retried_or_ended_has_not_failed(exc: Exception) -> None:
    assert after(exc, late=True).said == ["ack"]
    assert after(exc, late=False).message.buried == []


def test_what_comes_back_is_not_dead() -> None:
    request = after(WorkerLostError(), late=True, does=came_back)
    assert request.said == ["requeue"]
    request.on_timeout(False, 5)  # whatever comes after that
    assert (request.said, request.message.buried) == (["requeue"], [])


def test_what_was_settled_before_its_task_failed_stays_so() -> None:
    request: Any = layered(Base, Dying)(late=True, does=failed)
    request.acknowledged = True
    request.on_failure(SimpleNamespace(exception=ValueError("x"), traceback=""))
    assert (request.said, request.message.buried) == ([], [])


def test_what_celery_rejects_itself_dies_once() -> None:
    request = after(ValueError("x"), late=True, does=rejected)
    assert (request.said, request.message.buried) == (["reject"], [])


@pytest.mark.parametrize("late", [True, False])
def test_a_time_limit_and_the_process_that_ends_of_it_are_one_failure(late: bool) -> None:
    request: Any = layered(Base, Dying)(late=late, does=failed)
    request.on_timeout(True, 1)  # a soft one is told to the task
    assert request.message.buried == []
    request = layered(Base, Dying)(late=late, does=failed)
    request.on_timeout(False, 5)
    request.on_failure(SimpleNamespace(exception=WorkerLostError(), traceback=""))
    assert request.said == (["reject"] if late else [])
    assert len(request.message.buried) == (not late)


def test_whose_process_is_told_to_end_has_failed_only_if_celery_says_so() -> None:
    def nothing(request: Any) -> None: ...

    assert after(SystemExit(), late=False, does=nothing).message.buried == []
    assert len(after(SystemExit(), late=False).message.buried) == 1


def test_who_is_revoked_while_it_runs_does_not_die_when_its_process_ends() -> None:
    request: Any = layered(Base, Dying)(late=False, does=failed)
    request.send_event("task-revoked")
    request.on_failure(SimpleNamespace(exception=WorkerLostError(), traceback=""))
    assert request.message.buried == []


def test_what_is_kept_of_an_error_is_bounded() -> None:
    traceback = "\n".join(f"line {number}" for number in range(9999))
    text, dots, first, *_, last = report(ValueError("x" * 9999), traceback).split("\n")
    assert len(text) == TEXT + 3
    assert (dots, first[:5], last) == ("...", "line ", "line 9998")
    assert len(report(ValueError("x" * 9999), "y" * 9999)) < TEXT + TRACEBACK + 20


def test_a_request_class_of_an_apps_own_hears_of_a_failure_once_after_a_reconnect() -> None:
    """Celery makes its strategies anew then."""
    task = SimpleNamespace(Request=Base, dead_on_failure=True)
    methods = ("on_unknown_message", "on_unknown_task", "on_invalid_task", "on_decode_error")
    consumer = SimpleNamespace(
        **dict.fromkeys((*methods, "update_strategies"), lambda: None),
        app=SimpleNamespace(tasks={"own": task}),
        connection=SimpleNamespace(transport=None),
    )
    explain(consumer)
    consumer.update_strategies()
    made = task.Request
    consumer.update_strategies()
    assert task.Request is made is not Base
