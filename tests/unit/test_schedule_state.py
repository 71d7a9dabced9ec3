"""How a schedule goes on, whatever happens: a model of the center, and random histories."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone

import pytest

from celery_toc.schedules import state
from celery_toc.schedules.rules import SECOND_US, Every, to_us
from celery_toc.schedules.state import (
    DROP,
    RUN,
    WAIT,
    Record,
    Step,
    firing_id,
    planned_of,
    read_line,
)

from ..support.cases import each, night

PERIOD = 10 * SECOND_US
START = 1_700_000_000 * SECOND_US


def at_utc(*moment: int) -> int:
    return to_us(datetime(*moment, tzinfo=timezone.utc))  # type: ignore[misc,arg-type]


def record(**fields: object) -> Record:
    return Record("jobs.tick", Every(PERIOD, START).to_json(), "UTC", **fields)  # type: ignore[arg-type]


class Store:
    """What the center keeps of one schedule, as its script changes it."""

    name = "tick"

    def __init__(self) -> None:
        self.text = ""
        #: id -> planned time, of what waits, and of what is in flight
        self.waiting: dict[str, int] = {}
        self.in_flight: dict[str, int] = {}
        self.lines: dict[str, str] = {}
        self.puts: Counter[str] = Counter()
        #: the text that was read last, and its record, which does not change
        self._read: tuple[str, Record | None] = "", None

    @property
    def record(self) -> Record | None:
        if self.text != self._read[0]:
            self._read = self.text, Record.of_text(self.text) if self.text else None
        return self._read[1]

    def run(self, read: str, step: Step | None) -> bool:
        """Whether the record was the one that was read."""
        if step is None:
            return True
        if self.text != read:
            return False
        self.text = "" if step.record is None else step.record.to_text(self.name)
        if step.take_out is not None:
            id = firing_id(self.name, step.take_out)
            if self.waiting.pop(id, None) is not None:
                self.puts[id] -= 1  # it was not run, and may be put again
        if step.put is not None:
            id = firing_id(self.name, step.put)
            if id not in self.waiting and id not in self.in_flight:
                self.waiting[id] = step.put
                self.puts[id] += 1
        for line in step.lines:
            self.lines[read_line(line)[0]] = line
        return True

    def noted(self, id: str) -> str | None:
        return read_line(self.lines[id])[1][1] if id in self.lines else None


class Hand:
    """A worker that has read the schedule, and has not changed it yet."""

    def __init__(self, store: Store, id: str, now: int) -> None:
        self.store, self.id = store, id
        self.read()
        self.now = now

    def read(self) -> None:
        self.text = self.store.text
        self.running = any(other != self.id for other in self.store.in_flight)
        self.noted = self.store.noted(self.id)

    def change(self) -> str | None:
        """What is to be done with the firing; None: it has to be read again."""
        if not self.text:
            return RUN
        found = Record.of_text(self.text)
        verdict, step = state.take(
            self.store.name, found, self.id, self.now, self.running, self.noted
        )
        return verdict if self.store.run(self.text, step) else None


class History:
    """A random history of a schedule, of workers that die, and of a clock that is set."""

    def __init__(self, seed: int, **fields: object) -> None:
        self.chance = random.Random(seed)
        self.fields = fields
        self.now = START
        self.store = Store()
        self.store.run("", state.begin(record(**fields), self.now))
        self.hands: list[Hand] = []
        self.ran: Counter[str] = Counter()
        self.dropped: set[str] = set()
        self.popped: set[str] = set()
        #: messages that were taken out of the store by somebody else
        self.cancelled: set[str] = set()
        #: next firings that were gone, and were followed
        self.lost: set[str] = set()
        #: who deleted the next firing has said so
        self.told = False

    # -- what may happen

    def pass_time(self) -> None:
        self.now += self.chance.choice((1, 2, 5, 20)) * SECOND_US

    def set_clock(self) -> None:
        self.now += self.chance.choice((-3600, -30, 30, 600)) * SECOND_US

    def set_clock_far(self) -> None:
        """By a month; and the leader sees that."""
        self.now += self.chance.choice((-30, 30)) * 86_400 * SECOND_US
        self._event(
            lambda one: (
                state.set_back(one, self.now) if state.is_late(one, self.now) else state.Step(one)
            )
        )

    def pop(self) -> None:
        due = [id for id, at in self.store.waiting.items() if at <= self.now]
        if due:
            id = self.chance.choice(due)
            self.popped.add(id)
            self.store.in_flight[id] = self.store.waiting.pop(id)
            self.hands.append(Hand(self.store, id, self.now))

    def change(self) -> None:
        """A worker does the step, and its task."""
        if not self.hands:
            return
        hand = self.hands.pop(self.chance.randrange(len(self.hands)))
        hand.now = self.now if self.chance.random() < 0.5 else hand.now
        verdict = hand.change()
        if verdict is None:
            hand.read()
            self.hands.append(hand)
        elif verdict == WAIT or self.chance.random() < 0.2:
            self.back(hand.id)
        else:
            if verdict == RUN:
                self.ran[hand.id] += 1
            else:
                assert verdict == DROP
                self.dropped.add(hand.id)
            self.store.in_flight.pop(hand.id, None)

    def die(self) -> None:
        """A worker dies before the step; another may have the same firing again."""
        if self.hands:
            hand = self.hands.pop(self.chance.randrange(len(self.hands)))
            self.back(hand.id)

    def slow(self) -> None:
        """A lease ends although its worker lives, and another is given the firing."""
        if self.hands:
            hand = self.chance.choice(self.hands)
            self.hands.append(Hand(self.store, hand.id, self.now))

    def cancel(self) -> None:
        if self.store.waiting and self.chance.random() < 0.3:
            id = self.chance.choice(list(self.store.waiting))
            del self.store.waiting[id]
            self.cancelled.add(id)
            self.store.puts[id] -= 1  # it was not run, and may be put again

    def follow(self) -> None:
        """The process that keeps the queues up looks: at what is due, and where it was told to."""
        found = self.store.record
        if found is None or found.next is None:
            return
        id = firing_id(self.store.name, found.next)
        is_gone = id not in self.store.waiting and id not in self.store.in_flight
        if is_gone and (found.next <= self.now or self.told):
            assert self.store.run(self.store.text, state.lose(self.store.name, found, self.now))
            after = self.store.record
            assert after is not None
            assert self.store.noted(id) == "lost"
            assert after.next is not None and after.next > found.next
            assert self.store.waiting[firing_id(self.store.name, after.next)] == after.next
            self.lost.add(id)
        self.told = False

    def purge(self) -> None:
        """All that waits is deleted, also what is not due yet."""
        if self.chance.random() < 0.3:
            for id in self.store.waiting:
                self.cancelled.add(id)
                self.store.puts[id] -= 1
            self.store.waiting.clear()
            self.told = True

    def pause(self) -> None:
        self._event(lambda one: state.pause(one))

    def resume(self) -> None:
        self._event(lambda one: state.resume(one, self.now))

    def skip(self) -> None:
        self._event(lambda one: state.leave_out(self.store.name, one, self.now))

    def put_again(self) -> None:
        self._event(lambda one: state.change(one, record(**self.fields), self.now))

    def _event(self, event: Callable[[Record], Step]) -> None:
        found = self.store.record
        assert found is not None
        step = event(found)
        if step.record != found:
            assert self.store.run(self.store.text, step)

    def back(self, id: str) -> None:
        """A message comes back."""
        planned = self.store.in_flight.pop(id, None)
        if planned is not None:
            self.store.waiting[id] = planned

    # -- a run

    def run(self, events: tuple[str, ...], steps: int = 300) -> None:
        for _ in range(steps):
            getattr(self, self.chance.choice(events))()
            self.check()
        # In the end somebody takes what is there, and nothing has stopped.
        self._event(lambda one: state.resume(one, self.now))
        last = self.store.record
        assert last is not None
        self.now = max(self.now, last.next or 0)
        for _ in range(200):
            for event in ("pop", "change", "change", "follow"):
                getattr(self, event)()
            self.check()
        assert self.store.record is not None
        assert self.store.record.ended or (self.store.record.next or 0) > (last.next or 0)

    def check(self) -> None:
        store, found = self.store, self.store.record
        assert found is not None
        assert max(store.puts.values(), default=0) <= 1, "a firing had two messages"
        fresh = {at for id, at in store.waiting.items() if id not in self.popped}
        assert fresh <= {found.next}, "more than the next one waits"


TAKES = ("pass_time", "pop", "change", "change", "die", "slow")
FAR = "set_clock_far"
PEOPLE = ("pause", "resume", "skip", "put_again")

#: Histories of the day, and those of the night.
seeds = pytest.mark.parametrize("seeds", [range(8), night(range(8, 40))], ids=str)


@seeds
@each("misfire", state.MISFIRES)
@each("overlap", state.OVERLAPS)
def test_whatever_happens_a_firing_is_one_message_and_the_schedule_goes_on(
    misfire: str, overlap: str, seeds: range
) -> None:
    for seed in seeds:
        history = History(seed, misfire=misfire, overlap=overlap)
        history.run((*TAKES, *PEOPLE, "cancel", "purge", "follow", "follow", "set_clock", FAR))


@each("seed", range(20))
def test_with_all_each_planned_time_is_run_whoever_dies_and_whatever_the_clock(seed: int) -> None:
    history = History(seed, misfire="all")
    history.run((*TAKES, "set_clock"))
    found = history.store.record
    assert found is not None and found.last is not None
    for planned in range(START + PERIOD, found.last + 1, PERIOD):
        id = firing_id("tick", planned)
        assert history.ran[id] or id in {*history.store.in_flight, *history.store.waiting}


@each("seed", range(20))
def test_a_purge_at_any_moment_loses_the_next_firing_and_no_other(seed: int) -> None:
    history = History(seed, misfire="all")
    history.run((*TAKES, "set_clock", "purge", "follow"))
    found = history.store.record
    assert found is not None and found.last is not None and found.next is not None
    assert history.lost
    for planned in range(START + PERIOD, found.last + 1, PERIOD):
        id = firing_id("tick", planned)
        there = {*history.store.in_flight, *history.store.waiting}
        assert history.ran[id] or id in there or id in history.cancelled
        # What was delivered may have come back when it was purged.
        assert id in history.lost or id in history.popped
        assert not (id in history.lost and id in there)


@seeds
def test_what_was_left_out_by_a_rule_is_not_run_when_it_comes_again(seeds: range) -> None:
    for seed in seeds:
        history = History(seed, misfire="skip", grace_us=SECOND_US)
        history.run((*TAKES, "pass_time"))
        assert history.dropped
        for id in history.dropped:
            assert not history.ran[id]


# -- the rules, one by one


def taken(late: float, **fields: object) -> tuple[str, Record]:
    """What is done with a firing that comes so many seconds late."""
    first = state.begin(record(**fields), START).record
    assert first is not None and first.next is not None
    now = first.next + round(late * SECOND_US)
    verdict, step = state.take("tick", first, firing_id("tick", first.next), now, False, None)
    assert step is not None and step.record is not None
    return verdict, step.record


@each(
    "misfire, late, verdict, following",
    [
        ("once", 0, RUN, 2),
        ("once", 60, RUN, 2),  # within the grace, each is run
        ("once", 61, RUN, 8),  # one for all, and the next one after now
        ("skip", 60, RUN, 2),
        ("skip", 61, DROP, 2),  # the next one is within the grace
        ("skip", 95, DROP, 5),
        ("all", 61, RUN, 2),
        ("all", 86_000, RUN, 2),
        ("all", 86_450, RUN, 7),  # what is more than a day late is run once
    ],
)
def test_a_firing_that_is_late(misfire: str, late: float, verdict: str, following: int) -> None:
    """It was planned as number 1."""
    found, after = taken(late, misfire=misfire)
    assert found == verdict
    assert after.next == START + following * PERIOD
    assert after.runs == (verdict == RUN)


def test_jitter_is_the_same_for_a_firing_wherever_it_is_computed() -> None:
    made = record(jitter_us=5 * SECOND_US)
    dues = [made.due("tick", START + number * PERIOD) for number in range(100)]
    offsets = {due - START - number * PERIOD for number, due in enumerate(dues)}
    assert len(offsets) > 90
    assert all(0 <= offset <= 5 * SECOND_US for offset in offsets)
    again = Record.of_text(made.to_text("tick"))
    assert [again.due("tick", START + number * PERIOD) for number in range(100)] == dues


def test_a_schedule_ends_by_its_bounds() -> None:
    bounded = record(start=START + 25 * SECOND_US, end=START + 55 * SECOND_US)
    first = state.begin(bounded, START).record
    assert first is not None
    planned = []
    while first.next is not None:
        planned.append((first.next - START) // SECOND_US)
        id = firing_id("tick", first.next)
        _, step = state.take("tick", first, id, first.next, False, None)
        assert step is not None and step.record is not None
        first = step.record
    assert planned == [30, 40, 50]
    assert first.ended
    once = taken(0, max_runs=1)[1]
    assert (once.next, once.ended, once.runs) == (None, True, 1)
    assert state.resume(replace(once, paused=True), START).record == once


def test_a_record_keeps_what_only_newer_releases_know() -> None:
    made = record(rest={"colour": "red"})
    text = made.to_text("tick")
    assert '"colour":"red"' in text
    assert Record.of_text(text) == made


@each(
    "us, id",
    [
        (START, "a b@2023-11-14T22:13:20Z"),
        (START + 1500, "a b@2023-11-14T22:13:20.001500Z"),
        (START + 2000, "a b@2023-11-14T22:13:20.002Z"),
    ],
)
def test_the_id_of_a_firing_says_when_it_was_planned(us: int, id: str) -> None:
    assert firing_id("a b", us) == id
    assert planned_of("a b", id) == us


@each("id", ["a@now", "b@2023-11-14T22:13:20Z", "a@2023-11-14T22:13:20Z!", "aZ"])
def test_another_id_is_no_firings(id: str) -> None:
    assert planned_of("a", id) is None


def test_what_is_due_when_a_schedule_is_changed_still_runs() -> None:
    """It may wait for its jitter, or for a worker."""
    old = state.begin(record(jitter_us=5 * SECOND_US), START).record
    assert old is not None and old.next is not None
    new = replace(old, fingerprint="other")
    step = state.change(old, new, old.next + 1)
    assert (step.take_out, step.put) == (old.next, old.next)
    assert step.record is not None and step.record.next == old.next
    step = state.change(old, replace(new, end=old.next - 1), old.next + 1)
    assert step.put is None


# -- what comes back while another one runs


def test_what_is_next_while_the_former_one_runs_waits_or_is_left_out() -> None:
    for overlap, verdict in (("allow", RUN), ("wait", WAIT), ("skip", DROP)):
        _, record = taken(0, overlap=overlap)
        assert record.next is not None
        id = firing_id("tick", record.next)
        found, step = state.take("tick", record, id, record.next, True, None)
        assert found == verdict
        assert step is not None and step.record is not None
        assert (step.record.next == record.next) is (verdict == WAIT)


def test_what_comes_back_while_another_one_runs_waits_or_is_left_out() -> None:
    for overlap, verdict in (("allow", RUN), ("wait", WAIT), ("skip", DROP)):
        _, record = taken(0, overlap=overlap)
        assert record.last is not None
        id = firing_id("tick", record.last)
        found, step = state.take("tick", record, id, record.last, True, "started")
        assert found == verdict
        if overlap == "skip":
            assert step is not None
            [line] = step.lines
            assert read_line(line)[1][1] == "skipped"
        # What Celery sends again by itself is a task of its own.
        retried = state.take("tick", record, id, record.last, True, "started", alone=False)
        assert retried == (RUN, None)


def test_who_runs_again_is_seen_by_whoever_takes_another_one_at_that_moment() -> None:
    _, record = taken(0, overlap="wait")
    assert record.last is not None
    id = firing_id("tick", record.last)
    verdict, step = state.take("tick", record, id, record.last, False, "started")
    assert verdict == RUN and step is not None and step.record is not None
    assert step.record.to_text("tick") != record.to_text("tick")
    assert (step.put, step.take_out, step.lines) == (None, None, ())


def test_no_firing_is_on_an_excluded_day_of_its_zone():
    """Neither of an interval; and one that waits for such a day is not carried over."""
    zoned = {"zone": "Europe/Berlin", "exclude": ("2026-12-25", "2026-12-26")}
    hourly = replace(record(), when=Every(3600 * SECOND_US, 0).to_json(), **zoned)
    last = at_utc(2026, 12, 24, 22)
    assert hourly.after(last - 1) == last
    assert hourly.after(last) == at_utc(2026, 12, 26, 23)
    assert state.change(
        replace(hourly, next=at_utc(2026, 12, 25, 3)), hourly, at_utc(2026, 12, 25, 4)
    ) == state.Step(
        replace(hourly, next=at_utc(2026, 12, 26, 23), changed=at_utc(2026, 12, 25, 4)),
        take_out=at_utc(2026, 12, 25, 3),
        put=at_utc(2026, 12, 26, 23),
    )


def test_a_range_of_the_past_is_filled_once_around_what_was_followed():
    """What waits is left to come by itself, and times that are filled come no more."""
    times = [START + number * PERIOD for number in range(12)]
    one = record(next=times[10])
    for followed in (times[3], times[4], times[7]):
        one = one.follow(followed)
    found = one.unfollowed(times[1], times[11], 3)
    assert found == [times[1], times[2], times[5]]
    one = one.fill(found, due=9, now=5)
    assert one.unfollowed(times[0], times[11], 99) == [times[0], times[6], times[8], times[9]]
    one = one.fill(one.unfollowed(times[0], times[11], 99), due=9, now=5)
    assert one.unfollowed(times[0], times[11], 99) == []
    assert one.followed == ((times[0], times[9]),)
    assert one.after(times[0] - 1) == times[10]
    ids = [firing_id("a", times[number]) for number in (0, 1, 2, 5, 6, 8, 9)]
    assert (sorted(one.filled_ids("a", now=5)), one.filled_ids("a", now=9)) == (sorted(ids), [])


def test_it_is_known_of_which_times_nothing_is_known():
    one = record()
    for number in range(state.STRETCHES + 3):
        assert one.forgot is None or number > state.STRETCHES
        one = one.follow(START + number * 3 * PERIOD)
    assert one.forgot == START + 3 * PERIOD


def test_a_change_is_told_for_people():
    one = record()
    other = replace(one, when=Every(2 * PERIOD, START).to_json(), overlap="skip", grace_us=1)
    assert state.difference(one, other) == (
        "put: schedule every 10 s -> every 20 s, grace, overlap allow -> skip"
    )
    assert state.difference(one, one) == "put: message"
    for number in range(state.EDITS + 2):
        one = one.edited(number, "ann", "paused")
    assert [at for at, *_ in one.edits] == list(range(2, state.EDITS + 2))
    assert Record.of_text(one.to_text("tick")) == one
