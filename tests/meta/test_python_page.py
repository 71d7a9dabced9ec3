"""The examples of docs/python.md that need no app run as they stand, on one server and on a
Cluster."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_toc import timeout_center
from kombu_toc import TimeoutCenter

from ..support.inspection import residue
from .test_readme import named


def test_the_example_of_receipts_runs(
    center: TimeoutCenter, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"center": center}
    exec(named("docs/python.md", "receipt = message.receipt"), names)
    length = len(names["receipt"])
    assert capsys.readouterr().out.splitlines() == [f"{length} toc1.", "1 []", "0 True"]
    stem = len("orders") + len("order-7")
    assert length < 4 / 3 * stem + 80
    assert residue(center.client) == []


def test_the_example_of_what_a_message_has_of_its_own_runs(
    center: TimeoutCenter, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(named("docs/python.md", 'center.put("reports", "big"'), {"center": center})
    assert capsys.readouterr().out.splitlines() == ["600.0 None", "True None True"]
    assert residue(center.client) == []


def test_the_example_of_choosing_what_to_take_runs(
    center: TimeoutCenter, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"center": center}
    exec(named("docs/python.md", "early=True)  # due or not"), names)
    assert capsys.readouterr().out.splitlines() == [
        "['anna-1']",
        "['anna-4']",
        "['ben-1', 'ben-2'] True",
    ]
    assert sorted(found.id for found in center.scan("calls").messages) == [
        "anna-2",
        "anna-3",
        "ben-3",
    ]


def test_the_example_of_taking_tasks_runs(app: Celery, capsys: pytest.CaptureFixture[str]) -> None:
    @app.task(name="shop.other", shared=False)
    def other() -> None: ...

    other.apply_async(countdown=3600)
    for order in (7, 8):
        app.tasks["shop.remind"].apply_async((order,), countdown=3600 + order)
    center = timeout_center(app)
    names: dict[str, Any] = {"center": center}
    exec(named("docs/python.md", "taken = center.pop(\n"), names)
    assert capsys.readouterr().out.splitlines() == ["shop.remind [7]", "shop.remind [8]"]
    assert repr(names["task"]).endswith(" in flight in celery>")
    [left] = center.scan("celery").messages
    assert center.task(left).name == "shop.other"


def test_the_example_of_recurring_tasks_runs(
    app: Celery, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(named("docs/python.md", "schedules = center.schedules"), {"center": timeout_center(app)})
    assert capsys.readouterr().out == "0 3 * * * 1\n"
    assert timeout_center(app).schedules.count() == 0


def test_the_example_of_topics_at_run_time_runs(
    center: TimeoutCenter, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(named("docs/python.md", "center.queues.alter("), {"center": center})
    assert capsys.readouterr().out.splitlines() == [
        "5 declared",
        "Counts(ready=0, scheduled=0, in_flight=0, dead=0) False []",
        "['mail']",
    ]
    assert residue(center.client) == []
