"""What the chaos harness says of what was sent and run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kombu_toc.verify import QUIT, SILENT

from ..chaos.verdict import Event, Report, judge


def task(
    id: str, *steps: tuple[float, str, dict[str, Any]], **sending: Any
) -> list[dict[str, Any]]:
    """The entries of a task that was sent at second 0 unless told."""
    begun = {"eta": None, "queue": "celery", "times": 0, "at": 0.0, **sending}
    entries = [{"what": "sending", "id": id, "pid": 1, **begun}]
    entries.append({"what": "sent", "id": id, "pid": 1, "at": begun["at"] + 0.001})
    common = {"worker": "w", "pid": 2, "retries": 0, "redelivered": False}
    return entries + [
        {"id": id, "at": at, "what": what, **common, **more} for at, what, more in steps
    ]


def run(began: float, **more: Any) -> list[tuple[float, str, dict[str, Any]]]:
    return [(began, "started", more), (began + 0.1, "finished", more)]


def verdict(*tasks: list[dict[str, Any]], events: list[Event] | None = None) -> Report:
    entries = [entry for one in tasks for entry in one]
    return judge(Report("toc", 1), entries, events or [])


def test_a_task_that_ran_once_is_no_fault() -> None:
    report = verdict(task("a", *run(1)))
    assert report.faultless and report.executed == 1


def test_what_was_sent_again_and_never_ran_again_is_lost() -> None:
    """Unless its worker was killed, which had acknowledged it already."""
    again = (1.05, "retrying", {"again": 1, "countdown": 1.0})
    lost = task("a", *run(1), again, times=1)
    assert verdict(lost).lost == ["a"]
    kill = Event(2.5, "kill worker", "kill", "w", explains=True)
    assert verdict(lost, events=[kill]).gone == ["a"]
    assert verdict(task("a", *run(1), again, *run(2.2, retries=1), times=1)).faultless


def test_what_was_sent_again_twice_runs_twice() -> None:
    """The one that is asked for an explanation is the run that was one too many."""
    again = {"again": 1, "countdown": 1.0}
    steps = [(1.05, "retrying", again), *run(1), (1.25, "retrying", again), *run(1.2)]
    report = verdict(task("a", *steps, *run(2.4, retries=1), *run(2.6, retries=1), times=1))
    assert report.unexplained == ["a"]


def test_what_a_task_has_put_itself_runs_once_more_and_not_before_its_time() -> None:
    puts = [(1.05, "putting", {"delay": 1.0}), (1.06, "put", {})]
    assert verdict(task("a", *run(1), *puts)).lost == ["a"]
    assert verdict(task("a", *run(1), *puts, *run(2.2))).faultless
    assert verdict(task("a", *run(1), *puts, *run(1.9))).early == ["a"]
    assert verdict(task("a", *run(1), *puts, *run(2.2), *run(3.2))).unexplained == ["a"]
    # Whoever could not put it, nor heard that it did, promises nothing.
    assert verdict(task("a", *run(1), puts[0])).faultless


def test_a_task_that_was_killed_when_it_had_put_itself_runs_twice_more() -> None:
    puts = [(1.05, "putting", {"delay": 1.0}), (1.06, "put", {})]
    quit = [Event(1.07, "quit", "term", "w", explains=True)]
    steps = [(1, "started", {}), *puts, *run(2.2), *run(6.1, redelivered=True)]
    report = verdict(task("a", *steps), events=quit)
    assert report.faultless and report.explained == {QUIT: 1}


def test_a_task_that_was_put_off_may_run_again_after_a_cold_stop_that_it_is_told_of() -> None:
    quit = [Event(1.05, "quit", "term", "w", explains=True)]
    put_off, begun = (0.1, "put off", {}), (1, "started", {"redelivered": True})
    report = verdict(task("a", put_off, begun, *run(2, redelivered=True)), events=quit)
    assert report.faultless and report.explained == {QUIT: 1}
    assert verdict(task("a", put_off, begun, *run(2)), events=quit).unexplained == ["a"]
    assert verdict(task("a", put_off, begun, *run(2, redelivered=True))).unexplained == ["a"]


def test_a_worker_that_ends_while_the_server_is_away_may_leave_unsaid_what_ended_since() -> None:
    """Not if it does not say so, nor if the server was there; and it ends what it has begun."""
    away, ended = Event(3, "crash", "restart", until=5.5), Event(6, "ended", worker="w")
    gave_up, cut = replace(ended, gave_up=True), Event(5.9, "cut", "cut")
    tasks = task("a", *run(2.5), *run(9)), task("b", *run(1.5), *run(9))
    assert verdict(*tasks, events=[away, ended]).unexplained == ["a", "b"]
    report = verdict(*tasks, events=[away, gave_up])
    assert report.unexplained == ["b"] and report.explained == {SILENT: 1}
    there = [[cut, gave_up], [replace(away, until=4.9), cut, gave_up]]
    for events in (*there, [away, replace(gave_up, worker="v")], [replace(away, at=6.1), gave_up]):
        assert verdict(*tasks, events=events).unexplained == ["a", "b"]
    begun = task("a", (3.5, "started", {}), *run(9, worker="v"))
    assert verdict(begun, events=[away, gave_up]).unexplained == ["a"]
    early = task("a", (3.5, "started", {}), times=1)
    assert verdict(early, events=[away, gave_up]).lost == ["a"]


def test_a_run_before_its_time_is_early_unless_the_servers_clock_was_set_forward() -> None:
    early = task("a", *run(4), eta=10.0)
    assert verdict(early).early == ["a"]
    assert verdict(early, events=[Event(3, "clock forward", "clock", step=7.0)]).faultless
    assert verdict(early, events=[Event(5, "clock forward", "clock", step=7.0)]).early == ["a"]
    retried = (1.05, "retrying", {"again": 1, "countdown": 5.0})
    counted = task("a", *run(1), retried, *run(2.2, retries=1), times=1)
    assert verdict(counted).early == ["a"]
    # A clock that was ahead before it was sent makes no countdown shorter.
    ahead = [Event(0.5, "clock forward", "clock", step=7.0)]
    assert verdict(counted, events=ahead).early == ["a"]
    assert verdict(counted, events=[Event(1.5, "clock forward", "clock", step=7.0)]).faultless


def test_what_is_put_while_the_servers_clock_is_set_back_may_be_due_by_either_clock() -> None:
    again = (1.05, "retrying", {"again": 1, "countdown": 1.0})
    put = task("a", (1, "started", {}), again, (1.5, "finished", {}), *run(3.4, retries=1), times=1)
    forward = Event(-9, "clock forward", "clock", step=7.0)
    assert verdict(put, events=[forward, Event(1.2, "clock back", "clock", step=-7.0)]).faultless
    assert verdict(put, events=[forward, Event(1.6, "clock back", "clock", step=-7.0)]).early


def test_what_was_on_its_way_when_the_servers_clock_was_set_back_is_not_early() -> None:
    forward = Event(0, "clock forward", "clock", step=7.0)
    delivered = task("a", *run(4), eta=10.0)
    soon = [forward, Event(3.9, "clock back", "clock", step=-7.0)]
    assert verdict(delivered, events=soon).faultless
    later = [forward, Event(2.9, "clock back", "clock", step=-7.0)]
    assert verdict(delivered, events=later).early == ["a"]


def test_a_queue_of_which_nothing_starts_while_others_tasks_do_is_starved() -> None:
    others = [task(f"o{n}", *run(1 + n * 0.3), at=n * 0.3) for n in range(60)]
    assert verdict(*others, task("late", *run(15), queue="second")).starved == ["late"]
    # Not if its own queue was being worked off meanwhile, nor if nothing was.
    own = task("own", *run(7), queue="second", at=5.0)
    assert not verdict(*others, own, task("late", *run(15), queue="second")).starved
    assert not verdict(*others[:20], task("late", *run(15), queue="second")).starved


def of_key(id: str, key: str, *steps: Any, queue: str = "keyed", **sending: Any) -> Any:
    return task(id, *steps, queue=queue, key=key, **sending)


def test_what_a_library_had_while_the_broker_was_away_is_overtaken_by_others_of_its_key() -> None:
    tasks = of_key("a", "k", *run(3)), of_key("b", "k", *run(1), at=0.5)
    assert verdict(*tasks).disordered == ["b"]
    crash = Event(-0.9, "crash", "restart", until=-0.5, held=0.2)
    assert verdict(*tasks, events=[crash]).faultless


def test_a_task_that_sends_itself_again_holds_its_key_meanwhile() -> None:
    again = (1.05, "retrying", {"again": 1, "countdown": 1.0})
    first = of_key("a", "k", *run(1), again, *run(2.2, retries=1), times=1)
    assert verdict(first, of_key("b", "k", *run(1.6), at=0.5)).crowded == ["b"]
    assert verdict(first, of_key("b", "k", *run(2.4), at=0.5)).faultless
