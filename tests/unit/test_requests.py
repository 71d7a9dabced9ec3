"""Which tasks a pool of threads has, and which of them may be given back; the time is handed in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state

from celery_toc.worker.pool import SubmittedRequests

pytestmark = pytest.mark.versions


class Request:
    """As much of Celery's as is asked for."""

    def __init__(self) -> None:
        self.id = f"id-{id(self)}"
        self.message = SimpleNamespace(given_back=False, acknowledged=False)


class Nudges(list[None]):
    def __call__(self) -> None:
        self.append(None)


@pytest.fixture
def ends() -> Nudges:
    return Nudges()


@pytest.fixture
def submitted(ends: Nudges) -> SubmittedRequests:
    return SubmittedRequests(ends)


def test_what_no_thread_has_begun_is_taken_back_when_it_has_waited(
    submitted: SubmittedRequests,
) -> None:
    """And what the pool was given behind it, which would start before it."""
    begun, queued, new = Request(), Request(), Request()
    submitted.add(begun, 10.0, starts=False)
    submitted.add(queued, 10.0, starts=False)
    submitted.add(new, 10.5, starts=False)
    assert submitted.accept(begun)
    assert submitted.take_queued(9.9) == []
    assert submitted.take_queued(10.2) == [queued.message, new.message]
    assert queued.message.given_back and new.message.given_back
    assert submitted.take_queued(10.2) == []


def test_a_thread_does_not_begin_what_was_given_back(
    submitted: SubmittedRequests, ends: Nudges
) -> None:
    request = Request()
    submitted.add(request, 10.0, starts=False)
    [message] = submitted.take_queued(10.0)
    assert message is request.message
    assert not submitted.accept(request)
    assert submitted.busy() == set()
    assert len(ends) == 1  # the event loop is told that there is room


def test_what_is_acknowledged_or_a_greenlet_has_is_not_taken_back(
    submitted: SubmittedRequests,
) -> None:
    acknowledged, green = Request(), Request()
    acknowledged.message.acknowledged = True
    submitted.add(acknowledged, 10.0, starts=False)
    submitted.add(green, 10.0, starts=True)
    assert submitted.take_queued(20.0) == []
    assert submitted.begun(green.message)
    assert not submitted.begun(acknowledged.message)


def test_a_task_is_busy_from_when_the_pool_is_given_it_until_it_ends(
    submitted: SubmittedRequests, ends: Nudges
) -> None:
    request: Any = Request()
    state.reserved_requests.add(request)
    assert len(submitted.busy()) == 1
    submitted.add(request, 10.0, starts=False)
    assert len(submitted.busy()) == 1
    state.reserved_requests.discard(request)  # Celery forgets it when its connection breaks
    assert len(submitted.busy()) == 1
    assert submitted.executing(request.message) is request
    submitted.end(request)
    assert submitted.busy() == set()
    assert submitted.executing(request.message) is None
    assert len(ends) == 1


def test_references_are_the_same_without_the_private_name(
    monkeypatch: pytest.MonkeyPatch, submitted: SubmittedRequests
) -> None:
    monkeypatch.setenv("TOC_COMPAT_OFF", "weak-sets")
    plain = SubmittedRequests(print)
    request: Any = Request()
    state.active_requests.add(request)
    assert plain.busy() == submitted.busy()
    assert len(plain.busy()) == 1
