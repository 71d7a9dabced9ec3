"""The judge names the promise that a broken history breaks, and accepts good histories."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kombu_toc import verify as v
from kombu_toc.verify import ASKED, DONE, PUT, RUN, Event, Limit, Rules, judge

RULES = Rules(3.0, {"keyed": Limit(serial=True), "few": Limit(2), "rated": Limit(rate=10, burst=2)})
History = list[Event]


def act(what: str, id: str, at: float, process: str, answer: Any = "", **more: Any) -> History:
    """What is asked, and answered 10 ms later; by a server whose clock shows the same."""
    return [
        Event(at, process, what, ASKED, id, server=at, **more),
        Event(at + 0.01, process, what, DONE, id, server=at + 0.01, answer=answer),
    ]


def put(id: str = "a", at: float = 0.0, answer: str = "", **more: Any) -> History:
    return act(PUT, id, at, "p", answer, **more)


def begin(id: str, at: float, process: str = "c", **more: Any) -> History:
    return [Event(at, process, RUN, ASKED, id, server=at, **more)]


def run(id: str = "a", at: float = 1.0, process: str = "c", **more: Any) -> History:
    """A run of 100 ms that is acknowledged."""
    ended = [Event(at + 0.1, process, RUN, DONE, id)]
    return begin(id, at, process, **more) + ended + act(v.ACK, id, at + 0.11, process)


def fault(what: str, at: float, *target: str, **more: Any) -> History:
    return [Event(at, "k", what, target=target, **more)]


def numbered(*events: Event) -> History:
    return [replace(one, number=number) for number, one in enumerate(events)]


def starts(*times: float) -> History:
    found = []
    for number, at in enumerate(times):
        id = str(number)
        found += put(id, queue="rated") + run(id, at)
        found.append(
            Event(at, "c", v.DELIVER, DONE, id, queue="rated", since=at - 0.001, server=at + 0.001)
        )
    return found


def at_clock(ahead: float, history: History) -> History:
    """That history at a server whose clock is ahead by so many seconds."""
    return [
        one if one.server is None else replace(one, server=one.server + ahead) for one in history
    ]


KEYED: dict[str, Any] = {"queue": "keyed", "key": "k"}
TWO = put() + put("b", 0.1)
CLOSE = Event(9, "c", v.CLOSED)
PLANNED = [Event(9, "k", v.PLAN, id=f"s@{time}", due=time) for time in (1.0, 2.0)]
UNLEASED = [Event(1, "c", v.DELIVER, DONE, "a", lease=3.0, since=0.9, server=1.0)]
LATE = [Event(5, "c", v.DELIVER, DONE, "a", lease=3.0, since=0.9, server=5.0)]
UNIQUE_PUTS = put(unique="u") + put("b", 0.5, unique="u")
CHAIN = put(root="a", **KEYED) + put("a+1", 1.2, root="a", **KEYED)
STEPPED_BACK = fault(v.STEPPED, 1.6, since=1.4)
#: A failover: what was done from half a second before time 0 until 2 may be forgotten.
FORGOTTEN = fault(v.FORGOT, 0.5, "q:", "keyed:", until=2.0)


BROKEN: list[tuple[str, str, History]] = [
    ("never run", v.LOST, TWO + run("b")),
    ("begun and not ended", v.LOST, TWO + run("b") + begin("a", 2)),
    ("put twice and run once", v.LOST, put() + put(at=0.5) + run()),
    ("a failure is no run", v.LOST, TWO + run("b") + begin("a", 2) + act(v.REJECT, "a", 2.1, "c")),
    ("cancelled too late and never run", v.LOST, put() + act(v.CANCEL, "a", 0.5, "p", "late")),
    ("acknowledged early, nobody killed", v.LOST, put(early_ack=True) + begin("a", 1)),
    ("before its time", v.EARLY, put(due=2.0) + run(at=1.999)),
    ("before its delay", v.EARLY, put(delay=1.5) + run(at=1.499)),
    ("the second of two puts", v.EARLY, put() + put(at=0.5, delay=2.0) + run() + run(at=2.4)),
    ("moved to later", v.EARLY, put(due=1) + act(v.MOVE, "a", 0.5, "p", "yes", due=5) + run(at=2)),
    ("again after an acknowledgement", v.TWICE, put() + run() + run(at=3)),
    ("a kill of another", v.TWICE, put() + run() + fault(v.KILLED, 2, "d") + run(at=3)),
    ("a kill before", v.TWICE, put() + fault(v.KILLED, 0.5, "c") + run() + run(at=3)),
    ("a kill after", v.TWICE, put() + run() + run(at=3) + fault(v.KILLED, 3.5, "c")),
    ("one kill, two more runs", v.TWICE,
     put() + begin("a", 1) + fault(v.KILLED, 1.05, "c") + run(at=3, process="d")
     + run(at=4, process="e")),
    ("a kill when it was acknowledged", v.TWICE,
     put() + run() + fault(v.KILLED, 2, "c") + run(at=3, process="d")),
    ("a short stop", v.TWICE, put() + run() + fault(v.STOPPED, 1.05, "c", until=2.5) + run(at=3)),
    ("a stop before, and long acknowledged", v.TWICE,
     put() + fault(v.STOPPED, 0.5, "c", until=4.5) + run(at=4.55) + run(at=7, process="d")),
    ("a lease that lasts", v.TWICE, put() + UNLEASED + run() + run(at=3.5, process="d")),
    ("acknowledged in time", v.TWICE, put() + UNLEASED + run(at=3) + run(at=4.5, process="d")),
    ("a clock that was set before it was there", v.TWICE,
     put() + fault(v.STEPPED, 0.5, since=0.1) + run(at=6) + run(at=7, process="d")),
    ("the clock was set back, and it was not due", v.EARLY,
     at_clock(100, put() + run() + put(at=1.2, delay=1.0)) + STEPPED_BACK
     + run(at=6, process="d")),
    ("a cold stop, not told", v.TWICE,
     put() + run() + fault(v.QUIT, 1.05, "c") + put(at=1.2) + run(at=2, redelivered=False)
     + run(at=3, redelivered=False)),
    ("the later one first", v.ORDER,
     put(**KEYED) + put("b", 0.1, **KEYED) + run("b") + run(at=2)),
    ("the later one first, and the clock was set before", v.ORDER,
     fault(v.STEPPED, -1, since=-2) + put(**KEYED) + put("b", 0.1, **KEYED) + run("b") + run(at=2)),
    ("the later one first, and the broker was there when the other was put", v.ORDER,
     fault(v.HELD, -1, "keyed", until=-0.1) + put(**KEYED) + put("b", 0.1, **KEYED) + run("b")
     + run(at=2)),
    ("two of a key at once", v.LIMITS,
     put(**KEYED) + put("b", 0.1, **KEYED) + run()
     + run("b", 1.05, "d")),
    ("between two of a chain", v.LIMITS,
     CHAIN + put("b", 1.5, **KEYED) + run() + run("b", 1.6) + run("a+1", 2)),
    ("three of two at once", v.LIMITS,
     [one for id in "abc" for one in put(id, queue="few") + run(id, 1 + ord(id) / 1e4, id)]),
    ("faster than the rate", v.LIMITS, starts(1.0, 1.01, 1.05)),
    ("two of a unique key", v.UNIQUE, UNIQUE_PUTS + run() + run("b", 2)),
    ("refused for nothing", v.UNIQUE,
     put(unique="u") + run() + put("b", 2, "kept a", unique="u")),
    ("cancelled and run", v.CANCELLED, put() + act(v.CANCEL, "a", 0.5, "p", "yes") + run()),
    ("run and then cancelled in time", v.CANCELLED,
     put() + run() + act(v.CANCEL, "a", 2, "p", "yes")),
    ("not found by a cancel", v.CANCELLED,
     put(due=5.0) + act(v.CANCEL, "a", 1, "p", "none") + run(at=5.1)),
    ("not found by a move", v.MOVED, put(due=5.0) + act(v.MOVE, "a", 1, "p", "none") + run(at=5.1)),
    ("moved when it had ended", v.MOVED, put() + run() + act(v.MOVE, "a", 2, "p", "yes", due=2.0)),
    ("a firing is missed", v.SCHEDULES, PLANNED + run("s@1.0", 1.001)),
    ("a firing is repeated", v.SCHEDULES,
     PLANNED + run("s@1.0", 1.001) + run("s@2.0", 2.001) + run("s@2.0", 2.5)),
    ("a firing is early", v.SCHEDULES, PLANNED + run("s@1.0", 1.001) + run("s@2.0", 1.9)),
    ("a firing of no time", v.SCHEDULES,
     PLANNED + run("s@1.0", 1.001) + run("s@2.0", 2.001) + run("s@2.5", 2.6)),
    ("another body", v.BODY, put(body=1) + run(body=2)),
    ("left in the broker", v.EMPTY, put() + run() + [Event(9, "k", v.LEFT, id="z")]),
    ("run and never put", v.HISTORY, put() + run() + run("z")),
    ("an answer to nothing", v.HISTORY, put() + run() + act(v.ACK, "a", 2, "c")[1:]),
    ("a line is missing", v.HISTORY, put() + numbered(*run(), CLOSE)[:1]
     + numbered(*run(), CLOSE)[2:]),
    ("no last line", v.HISTORY, put() + numbered(*run())),
    ("delivered and not begun", v.HISTORY,
     TWO + numbered(Event(0.5, "c", v.DELIVER, DONE, "b"), *run(), CLOSE) + run("b", 2, "d")),
    ("cancelled after what was forgotten", v.CANCELLED,
     put(queue="q") + FORGOTTEN + act(v.CANCEL, "a", 2.1, "p", "yes") + run(at=2.5)),
    ("forgotten, and not found", v.LOST,
     put(queue="q", due=5.0) + FORGOTTEN + act(v.MOVE, "a", 2.1, "p", "none", due=4.0)
     + put("b", 3) + run("b", 4)),
    ("two at once after what was forgotten", v.LIMITS,
     FORGOTTEN + put(**KEYED) + put("b", 0.1, **KEYED) + run(at=3) + run("b", 3.05, "d")),
    ("nothing has run", v.HISTORY, []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("promise", "history"), [pytest.param(one, history, id=id) for id, one, history in BROKEN]
)
def test_a_broken_history_is_found_with_the_promise_that_was_broken(
    promise: str, history: History
) -> None:
    broken = judge(history, RULES).broken
    assert promise in {one.promise for one in broken}, broken
    # What is lost, or is missing in the history, may show elsewhere; all else is one finding.
    assert len({one.promise for one in broken} - {v.LOST, v.HISTORY, v.EARLY}) <= 1, broken


GOOD: list[tuple[str, str | None, History]] = [
    ("run once", None, put() + run()),
    ("killed", v.KILLED, put() + begin("a", 1) + fault(v.KILLED, 1.05, "c") + run(at=4)),
    ("killed with its pool", v.KILLED,
     put() + begin("a", 1, "c/7") + fault(v.KILLED, 1.05, "c") + run(at=4)),
    ("told of a cold stop", v.QUIT,
     put() + begin("a", 1) + fault(v.QUIT, 1.05, "c") + run(at=4, redelivered=True)),
    ("stopped for longer than the lease", v.STOPPED,
     put() + begin("a", 1) + fault(v.STOPPED, 1.05, "c", until=5.0) + run(at=4, process="d")),
    ("had it when it was stopped", "stopped, not begun",
     put() + fault(v.STOPPED, 0.5, "c", until=4.5) + run(at=4, process="d") + run(at=4.6)),
    ("went on before that was written down", "stopped, not begun",
     put(**KEYED) + fault(v.STOPPED, 0.5, "c", until=4.5) + run(at=4.4, process="d")
     + run(at=4.48)),
    ("had it when it was stopped, and went on before the other began", "stopped, not begun",
     put() + fault(v.STOPPED, 0.5, "c", until=4.5) + run(at=4.55) + run(at=4.6, process="d")),
    ("not renewed", "its lease had ended",
     put() + UNLEASED + begin("a", 1) + run(at=4.01, process="d")),
    ("acknowledged when another had it", "its lease had ended",
     put() + LATE + run(at=5) + run(at=5.2, process="d")),
    ("the clock was set forward while the lease lasted", "its lease had ended",
     put() + UNLEASED + begin("a", 1) + fault(v.STEPPED, 2.0, since=1.5)
     + run(at=2.5, process="d")),
    ("the clock was set forward when it was renewed", "its lease had ended",
     put() + run() + fault(v.STEPPED, 2.0, since=0.9) + run(at=1.2, process="d")),
    ("put again when the clock was set back", None,
     at_clock(100, put() + run() + put(at=1.2, delay=1.0)) + STEPPED_BACK
     + put(at=4, delay=1.0) + run(at=6, process="d")
     + at_clock(200, run(at=8, process="e"))),
    ("given back, and then the clock was set back", "given back",
     at_clock(100, put() + begin("a", 1) + act(v.REJECT, "a", 1.1, "c")) + STEPPED_BACK
     + run(at=3)),
    ("begun when its lease had ended", "its lease had ended",
     put() + UNLEASED + run(at=4.1, process="d") + run(at=4.5)),
    ("given back", "given back",
     put() + begin("a", 1) + act(v.REJECT, "a", 1.1, "c") + run(at=1.2)),
    ("acknowledged and not answered", "its acknowledgement was not answered",
     put() + run()[:3] + [Event(1.2, "c", v.ACK, v.FAILED, "a")] + run(at=4, process="d")),
    ("failed over", v.FORGOT,
     put(queue="q:3") + run() + fault(v.FORGOT, 1.5, "q:3", until=3.0) + run(at=4)),
    ("a cancel was forgotten", None,
     put(queue="q") + FORGOTTEN + act(v.CANCEL, "a", 0.5, "p", "yes") + run(at=2.5)),
    ("a move was forgotten", None,
     put(queue="q") + FORGOTTEN + act(v.MOVE, "a", 0.5, "p", "yes", due=5.0) + run(at=2.5)),
    ("an acknowledgement was forgotten", v.FORGOT,
     put(queue="q") + FORGOTTEN + run() + act(v.MOVE, "a", 2.1, "p", "yes", due=2.2) + run(at=3)),
    ("who has a unique key was forgotten", v.FORGOT,
     put(queue="q", unique="u") + put("b", 2.1, queue="q", unique="u") + FORGOTTEN
     + begin("a", 1) + run("a", 3, "d") + run("b", 4)),
    ("its delivery was forgotten", v.FORGOT,
     put(queue="q") + FORGOTTEN + UNLEASED + run(at=2.1) + run(at=2.5, process="d")),
    ("the delivery of the later one was forgotten", v.FORGOT,
     put(queue="q") + FORGOTTEN + UNLEASED + run(at=2.1, process="d") + run(at=2.5)),
    ("two masters, each with one of a key", None,
     put(**KEYED) + put("b", 0.1, **KEYED) + FORGOTTEN + run() + run("b", 1.05, "d")),
    ("put twice", None, put() + put(at=0.5, delay=1.0) + run() + run(at=1.6)),
    ("the first of two puts came back before the second was due", v.FORGOT,
     put() + run() + fault(v.FORGOT, 1.5, "c") + put(at=2.0, delay=1.0)
     + run(at=2.5, redelivered=False) + run(at=3.1, redelivered=False)),
    ("put and not answered", None, put()[:1] + put("b") + run("b")),
    ("cancelled", None, TWO + act(v.CANCEL, "a", 0.5, "p", "yes") + run("b")),
    ("cancelled when it came back", v.KILLED,
     put() + put("b") + begin("a", 1) + fault(v.KILLED, 1.05, "c") + run("b", 3, "d")
     + begin("a", 4, "d") + fault(v.KILLED, 4.05, "d") + act(v.CANCEL, "a", 8, "p", "yes")),
    ("moved to sooner", None,
     put(due=9.0) + act(v.MOVE, "a", 0.5, "p", "yes", due=1.0) + run(at=1.01)),
    ("while it is moved", None,
     put(due=9.0) + run(at=1.0) + act(v.MOVE, "a", 0.995, "p", "yes", due=0.0)),
    ("of another key", None,
     put(**KEYED) + put("b", 0.1, queue="keyed", key="l")
     + run("b", 1.05, "d") + run()),
    ("taken before the clock was set back, and lost", None,
     at_clock(100, put(**KEYED)) + STEPPED_BACK + put("b", 2, **KEYED)
     + at_clock(200, run(at=4) + run("b", 5))),
    ("a library had it, and the broker had only the later one", None,
     fault(v.HELD, -1, "keyed", until=0.05) + put(**KEYED) + put("b", 0.1, **KEYED) + run("b")
     + run(at=2)),
    ("not due yet", None,
     put(**KEYED, due=1.5) + put("b", 0.1, **KEYED)
     + run("b") + run(at=2)),
    ("its place came free by a kill", v.KILLED,
     put(**KEYED) + put("b", 0.1, **KEYED) + begin("a", 1)
     + fault(v.KILLED, 1.02, "c") + run(at=4, process="d") + run("b", 5)),
    ("a chain holds its key", None,
     CHAIN + put("b", 1.5, **KEYED) + run() + run("a+1", 2) + run("b", 2.2)),
    ("as fast as the rate", None, starts(1.0, 1.01, 1.11, 1.21)),
    ("the clock was set back", None, starts(1.0, 1.01, 1.05) + fault(v.STEPPED, 1.0)),
    ("refused in time", None,
     put(unique="u") + put("b", 0.5, "kept a", unique="u") + run()
     + put("d", 3, unique="u") + run("d", 4)),
    ("a dead letter leaves its unique key", "given back",
     put(unique="u") + begin("a", 0.2) + act(v.REJECT, "a", 0.3, "c", "dead")
     + put("b", 0.5, unique="u") + run() + run("b", 2)),
    ("each firing", None, PLANNED + run("s@1.0", 1.001) + run("s@2.0", 2.001)),
    ("killed before its last line", None,
     put() + put("b") + numbered(*begin("b", 1)) + fault(v.KILLED, 1.05, "c")
     + run("b", 4, "d") + run("a", 5, "d")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cause", "history"), [pytest.param(one, history, id=id) for id, one, history in GOOD]
)
def test_a_good_history_breaks_nothing_and_names_the_cause_of_a_second_run(
    cause: str | None, history: History
) -> None:
    verdict = judge(history, RULES)
    assert verdict.broken == []
    assert cause is None or cause in verdict.explained


def test_what_was_acknowledged_early_goes_with_its_process() -> None:
    history = put(early_ack=True) + put("b") + run("b") + begin("a", 1) + fault(v.KILLED, 1.05, "c")
    assert judge(history, RULES).gone == ["a"]
    assert judge(history, RULES).broken == []
