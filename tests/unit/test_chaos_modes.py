"""What the chaos harness says of queues that are kept otherwise in the task library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..chaos.library import LostEvent
from ..chaos.modes import ELECTED, MODES, WRITTEN, Behind, Far, Guard, Outbox
from ..chaos.verdict import Event, Report, by_id, judge
from ..support.cases import each
from .test_chaos_verdict import run, task


def told(mode: Any, *entries: list[dict[str, Any]], events: list[Event] | None = None) -> Report:
    """What is said of some tasks, after some events."""
    faults, every = events or [], [entry for some in entries for entry in some]
    mode.run.events, mode.run.entries = faults, every
    mode.run.losses = [event for event in faults if isinstance(event, LostEvent)]
    report = judge(Report("toc", 1), every, faults)
    mode.weigh(report, by_id(every))
    return report


def of(kind: Any, **known: Any) -> Any:
    report = Report("toc", 1)
    return kind(SimpleNamespace(report=report, events=[], losses=[], away=[], unsaid=12.0, **known))


def loss(at: float, unwritten: float) -> LostEvent:
    event = LostEvent(at, "redis flushed", "lost", until=at + 0.2)
    event.unwritten = unwritten
    return event


def test_what_had_no_row_is_missing_and_what_was_sent_before_is_lost() -> None:
    events = [loss(10.0, 1.2)]
    report = told(
        of(Behind),
        task("before", at=8.0),
        task("unwritten", at=9.5),
        task("after", at=10.6),
        task("ran", *run(9.6), at=9.5),
        events=list(events),
    )
    assert report.lost == ["before", "after"]
    assert report.counted == {"lost with Redis, without a row": 1}


def test_a_retry_that_had_no_row_is_missing_too() -> None:
    again = [(9.5, "retrying", {"again": 1, "countdown": 1.0})]
    steps = [(9.4, "started", {}), *again, (9.6, "finished", {})]
    report = told(of(Behind), task("a", *steps, at=5.0, times=1), events=[loss(10.0, 1.2)])
    assert not report.lost
    assert report.counted == {"lost with Redis, without a row": 1}


@each(
    ("event", "excused"),
    [
        (None, False),
        (Event(90.0, "database killed", "database", until=95.0), True),
        (Event(80.0, "database killed", "database", until=85.0), False),
        (Event(95.0, "kill keeper", "keeper", "w", explains=True), True),
        (Event(100 - ELECTED - 6, "kill keeper", "keeper", "w", explains=True), False),
        (Event(97.0, "term", "term", "w"), False),
    ],
)
def test_rows_are_late_only_while_nobody_writes_them(event: Event | None, excused: bool) -> None:
    mode = of(Behind)
    mode.run.events = [event] if event else []
    assert mode._is_excused(100 - WRITTEN - 1, 100.0) is excused


def test_what_has_ended_and_runs_again_is_told_unless_its_database_was_away() -> None:
    steps = [*run(1), (7.0, "sent again", {}), *run(7.1)]
    report = told(of(Guard), task("a", *steps))
    assert report.unexplained == ["a"]
    assert report.counted == {"sent again after their end": 1, "  and run again": 1}
    mode = of(Guard)
    mode.run.away = [Event(6.5, "database killed", "database", until=7.5)]
    assert not told(mode, task("a", *steps)).unexplained


def test_what_was_far_ahead_is_not_late() -> None:
    mode = of(Far)
    report = told(
        mode,
        task("punctual", *run(70.01), at=1.0, eta=70.0),
        task("late", *run(75.0), at=1.0, eta=70.0),
        task("near", *run(15.0), at=1.0, eta=10.0),
        events=[Event(20.0, "kill keeper", "keeper", "w", explains=True)],
    )
    assert mode.broken == ["late was far ahead, and 5.0 s late"]
    assert list(report.counted.values()) == [2, 0, 5000]


def test_what_was_lost_in_redis_and_not_rebuilt_may_be_late() -> None:
    """It is put again when it is overdue. What was not in Redis yet is on time all the same."""
    mode = of(Far)
    lost = loss(15.0, 0.0)
    lost.family = "alone"
    report = told(
        mode,
        task("loaded", *run(90.0), at=1.0, eta=70.0),
        task("far", *run(85.0), at=1.0, eta=80.0),
        events=[lost],
    )
    assert mode.broken == ["far was far ahead, and 5.0 s late"]
    assert list(report.counted.values()) == [2, 1, 5000]


def test_an_order_without_its_task_is_told_and_a_task_without_its_order(tmp_path: Any) -> None:
    mode = of(Outbox, urls=[f"sqlite:///{tmp_path}/orders.db"])
    assert mode.environment() == {"CHAOS_MODE": "outbox"}
    engine = mode._engine()
    with engine.begin() as connection:
        for id in ("whole", "no-task"):
            connection.exec_driver_sql("INSERT INTO orders (id) VALUES (?)", (id,))
    engine.dispose()
    tasks = (task("whole", *run(1)), task("no-task"), task("no-order", *run(1)), task("neither"))
    mode.finish(by_id([entry for some in tasks for entry in some]))
    assert mode.broken == [
        "no-order has run, and its order is not there",
        "the order no-task is there, and its task has not run",
    ]
    assert set(MODES) == {"through", "outbox", "behind", "guard", "far"}
