"""A fleet of consumers, with the real poller, against a model of the server; time is virtual.

What must hold, whatever happens: nothing is lost, nothing begins early, nobody waits for a process
while one is idle (so nobody starves, and idle workers come first), and no time is forgotten that
somebody has claimed. See :mod:`.simulation.fleet` for how each is checked.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kombu_toc.client.options import PRIORITY

from ..support.cases import each
from .simulation.fleet import Fleet

QUEUES = ["a", "b", "c"]

#: Histories that are tried: always the same ones, or so many that nobody has tried yet.
LONGER = os.environ.get("TOC_MODEL_HISTORIES")
EXAMPLES = int(LONGER or 25)


#: Drawn from lists: for integers, Hypothesis tries constants of whatever modules are loaded, so
#: that other histories would be tried in another process.
numbers = st.sampled_from(range(1001))
few = st.sampled_from((1, 2, 3))
delays = st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.3, 2.0, 30.0, 600.0])
durations = st.sampled_from([0.0005, 0.005, 0.03, 0.5, 7.0])

may_fail = precondition(lambda self: not self.fleet.faultless)


class Machine(RuleBasedStateMachine):
    """What a fleet goes through."""

    fleet: Fleet
    #: the slots that workers prefer, in turns
    zones: tuple[tuple[int, ...], ...] = ((),)
    #: how many workers have begun
    begun = 0

    @initialize(
        faultless=st.booleans(), queues=few, processes=st.lists(few, min_size=1, max_size=3)
    )
    def begin(self, faultless: bool, queues: int, processes: list[int]) -> None:
        self.fleet = Fleet(QUEUES[:queues], faultless=faultless)
        for number in processes:
            self.add(number)

    @rule(queue=numbers, delay=delays, duration=durations, many=st.sampled_from([1, 1, 2, 9, 40]))
    def put(self, queue: int, delay: float, duration: float, many: int) -> None:
        for number in range(many):
            names = self.fleet.queues
            self.fleet.put(names[(queue + number) % len(names)], delay, duration)

    @rule(seconds=st.sampled_from([0.0002, 0.004, 0.05, 0.7, 5.0, 40.0, 300.0]))
    def wait(self, seconds: float) -> None:
        self.fleet.run(seconds)

    @rule(processes=few)
    @precondition(lambda self: len(self.fleet.workers) < 4)
    def add(self, processes: int) -> None:
        zone = self.zones[self.begun % len(self.zones)]
        self.begun += 1
        self.fleet.add(processes, prefer=zone)

    @rule(which=numbers)
    @precondition(lambda self: len(self.fleet.workers) > 1)
    def stop(self, which: int) -> None:
        self.fleet.stop(self.fleet.workers[which % len(self.fleet.workers)])

    @rule(queue=numbers)
    def pause_or_resume(self, queue: int) -> None:
        name = self.fleet.queues[queue % len(self.fleet.queues)]
        self.fleet.pause(name, name not in self.fleet.paused)

    @rule(which=numbers, after_next=st.booleans())
    @may_fail
    def cut(self, which: int, after_next: bool) -> None:
        worker = self.fleet.workers[which % len(self.fleet.workers)]
        self.fleet.cut(worker, after_next=after_next)

    @rule(seconds=st.sampled_from([0.01, 1.0, 3.0, 8.0]))
    @may_fail
    def freeze(self, seconds: float) -> None:
        self.fleet.freeze(seconds)

    @rule(seconds=st.sampled_from([-60.0, -3.0, 3.0, 60.0]))
    @may_fail
    def set_clock(self, seconds: float) -> None:
        self.fleet.step_clock(seconds)

    @rule(which=numbers)
    @may_fail
    @precondition(lambda self: len(self.fleet.workers) > 1)
    def kill(self, which: int) -> None:
        self.fleet.kill(self.fleet.workers[which % len(self.fleet.workers)])

    @invariant()
    def nobody_waits_for_long(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.check()

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.finish()


class Zones(Machine):
    """A fleet in two zones, each with slots that it takes first; to one worker all are alike."""

    zones = ((0, 1), (2, 3), (2, 3), ())


@pytest.mark.parametrize("machine", [Machine, Zones])
def test_whatever_happens_nothing_is_lost_early_starved_or_forgotten(
    machine: type[Machine],
) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=25,
            derandomize=not LONGER,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("workers", [1, 3])
def test_queues_that_all_have_a_backlog_are_served_alike(workers: int) -> None:
    fleet = Fleet(QUEUES)
    for queue in QUEUES:
        for _ in range(200):
            fleet.put(queue, 0.0, 0.02)
    for _ in range(workers):
        fleet.add(2)
    fleet.finish()
    served: Counter[str] = Counter(dict.fromkeys(QUEUES, 0))
    for task in fleet.order[:450]:
        served[task.queue] += 1
        assert max(served.values()) - min(served.values()) <= 8 * workers


def test_by_priority_the_first_queue_is_served_before_the_others() -> None:
    fleet = Fleet(["first", "second"], strategy=PRIORITY)
    for _ in range(100):
        fleet.put("second", 0.0, 0.02)
        fleet.put("first", 0.0, 0.02)
    fleet.add(2)
    fleet.finish()
    assert sum(task.queue == "first" for task in fleet.order[:110]) >= 95


def test_short_tasks_do_not_wait_behind_a_long_one_while_another_worker_is_idle() -> None:
    fleet = Fleet(["a"])
    for _ in range(2):
        fleet.add(1)
    fleet.run(1.0)
    fleet.put("a", 0.0, 30.0)
    short = [fleet.put("a", 0.001 * number, 0.005) for number in range(8)]
    fleet.run(1.0)
    assert all(task.done for task in short)


def test_a_queue_that_goes_on_after_a_pause_wakes_its_consumers_as_before() -> None:
    fleet = Fleet(["a", "b"])
    fleet.pause("a", True)
    fleet.add(1)
    fleet.run(10.0)  # it waits for the other queue alone
    fleet.pause("a", False)
    fleet.run(6.0)
    task = fleet.put("a", 1.0)
    fleet.run(1.1)
    assert task.done


def test_a_worker_that_stops_leaves_the_times_that_it_has_claimed_to_the_others() -> None:
    fleet = Fleet(["a"])
    stops = fleet.add(2)
    for number in range(8):
        fleet.put("a", 30.0 + number)
    fleet.run(5.0)
    assert stops.poller is not None
    assert len(stops.poller.dispatcher.due) > 0
    fleet.add(1)
    fleet.stop(stops)
    fleet.finish()  # within the bound, although nobody looks for minutes


def test_a_worker_that_is_busy_when_its_claim_comes_due_leaves_it_to_an_idle_one() -> None:
    fleet = Fleet(["a"])
    fleet.add(1)
    fleet.put("a", 1.0)
    fleet.run(0.5)  # the claim is its own
    long = fleet.put("a", 0.0, 30.0)
    fleet.run(0.2)
    fleet.add(1)
    assert long.starts
    fleet.finish()


def test_what_a_worker_has_fetched_ahead_is_started_by_another_if_it_stops() -> None:
    fleet = Fleet(["a"])
    stops = fleet.add(1)
    fleet.run(1.0)
    task = fleet.put("a", 1.0)
    fleet.run(0.99)
    assert not fleet.network.server.waiting()  # it is held, ahead of its time
    fleet.add(1)
    fleet.stop(stops)
    fleet.run(0.2)
    assert task.done


def test_what_waits_for_a_process_that_is_not_free_after_all_is_started_elsewhere() -> None:
    fleet = Fleet(["a"])
    shrinks = fleet.add(2)
    fleet.run(1.0)
    tasks = [fleet.put("a", 1.0, 5.0) for _ in range(2)]
    fleet.run(0.99)
    shrinks.processes = 1
    fleet.add(1)
    fleet.run(0.2)
    assert all(task.starts for task in tasks)


def test_a_queue_is_served_although_its_only_worker_is_never_idle() -> None:
    fleet = Fleet(["busy", "b"])
    for _ in range(600):
        fleet.put("busy", 0.0, 0.02)
    fleet.add(2)
    fleet.run(2.0)
    tasks = [fleet.put("b") for _ in range(5)]
    fleet.run(0.5)
    assert all(task.done for task in tasks)
    assert len(fleet.order) < 400


def test_an_acknowledgement_counts_although_the_connection_was_cut_under_it() -> None:
    fleet = Fleet(["a"], faultless=False)
    worker = fleet.add(1)
    fleet.run(1.0)
    task = fleet.put("a")
    for _ in range(1000):
        if worker.acknowledges:
            break
        fleet.run(0.0001)
    assert worker.acknowledges
    fleet.cut(worker, after_next=False)
    fleet.run(2.0)
    assert fleet.network.server.is_empty()
    assert len(task.starts) == 1


def test_what_a_cut_connection_had_delivered_is_asked_for_by_the_next_one() -> None:
    fleet = Fleet(["a"], faultless=False)
    worker = fleet.add(1)
    fleet.run(1.0)
    task = fleet.put("a", 1.0)
    fleet.run(0.5)
    fleet.cut(worker, after_next=True)
    fleet.run(2.0)
    assert task.done  # and not only when its lease has ended


def test_a_message_of_after_a_step_of_the_clock_does_not_wait_for_a_time_of_before() -> None:
    fleet = Fleet(["a"], faultless=False)
    fleet.add(1)
    fleet.run(0.05)
    fleet.step_clock(-60.0)
    task = fleet.put("a", 0.02)
    fleet.run(2.0)
    assert task.done


@each("steps", [(-60.0,), (-60.0, -60.0), (60.0, -60.0)])
@each("prefer", [(), (0, 1)])
def test_what_is_held_for_a_time_that_is_far_again_keeps_no_process(
    prefer: tuple[int, ...], steps: tuple[float, ...]
) -> None:
    """The clock is set back while a message is held that is nearly due: it is given back."""
    fleet = Fleet(["a"], faultless=False)
    for step in steps[:-1]:
        fleet.step_clock(step)
    worker = fleet.add(2, prefer=prefer)
    fleet.run(0.05)
    held = fleet.put("a", 0.02)
    fleet.run(0.002)
    assert worker.poller is not None
    [state] = worker.poller.states.values()
    assert state.buffered == 1
    fleet.step_clock(steps[-1])
    fleet.put("a", 0.0, 0.001)  # its delivery tells of the clock
    fleet.run(0.05)
    assert state.buffered == 0
    assert worker.poller.dispatcher.due.first is None or not held.starts
    long, short = fleet.put("a", 0.0, 20.0), fleet.put("a", 0.0, 0.001)
    fleet.run(15.0)
    assert (long.starts != [], short.done, held.starts) == (True, True, [])
    fleet.finish()
    assert len(held.starts) == 1


def test_what_a_cut_connection_had_delivered_is_given_back_if_it_is_far_from_due_again() -> None:
    fleet = Fleet(["a"], faultless=False)
    worker = fleet.add(1)
    fleet.run(1.0)
    held = fleet.put("a", 0.5)
    fleet.run(0.45)
    fleet.cut(worker, after_next=True)
    fleet.run(0.04)
    fleet.step_clock(-60.0)
    fleet.run(2.0)
    task = fleet.put("a", 0.0)
    fleet.run(10.0)
    assert (task.done, held.starts) == (True, [])
    fleet.finish()
    assert len(held.starts) == 1


def test_an_hour_passes_and_each_task_starts_within_milliseconds_of_its_time() -> None:
    fleet = Fleet(QUEUES)
    for _ in range(3):
        fleet.add(2)
    tasks = [fleet.put(QUEUES[n % 3], 61.3 * n, 0.005) for n in range(60)]
    fleet.finish()
    server = fleet.network.server
    late = sorted(task.starts[0] - (task.due_us - server.ahead) / 1e6 for task in tasks)
    assert late[0] >= 0
    assert late[-1] < 0.003
