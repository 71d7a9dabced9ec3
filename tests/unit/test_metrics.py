"""Lateness and its histogram; what a process keeps without a server."""

from __future__ import annotations

import gc
import os
import weakref
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_toc.metrics import _FIELDS, BOUNDS_US, Lateness, Metrics, TopicCounts
from kombu_toc.model.topic import Declaration, Topic


def topic(name: str, **declaration: int) -> Topic:
    return Topic(name, Declaration(**declaration), "toc:")


def lateness(*us: int) -> Lateness:
    counts = TopicCounts()
    for each in us:
        counts.late_by(each)
    return counts.lateness


def test_the_bounds_of_the_histogram_grow_by_the_root_of_two() -> None:
    assert BOUNDS_US[0] == 250
    assert BOUNDS_US[2] == 500
    assert 3600 * 10**6 < BOUNDS_US[-1] < 4500 * 10**6
    ratios = [b / a for a, b in pairwise(BOUNDS_US)]
    assert max(ratios) < 1.42 and min(ratios) > 1.41


def test_a_lateness_is_counted_in_the_first_bucket_that_holds_it() -> None:
    assert lateness(0, 250).buckets[0] == 2
    assert lateness(251).buckets[:2] == (0, 1)
    assert lateness(10**12).buckets[-1] == 1
    assert lateness(1000, 3000).us == 4000


def test_nothing_delivered_has_no_quantile() -> None:
    assert lateness().quantile(0.5) is None


@given(st.lists(st.integers(0, 4 * 10**9), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_quantile_is_in_the_bucket_of_the_true_one(values: list[int], q: float) -> None:
    found = lateness(*values).quantile(q)
    rank = max(-(-q * len(values) // 1), 1)
    true = sorted(values)[int(rank) - 1]
    place = next(i for i, bound in enumerate(BOUNDS_US) if true <= bound)
    lower = BOUNDS_US[place - 1] if place else 0
    assert lower - 1 <= found * 1_000_000 <= BOUNDS_US[place] + 1


def test_what_is_beyond_the_histogram_counts_as_its_end() -> None:
    assert lateness(10**12).quantile(0.99) == BOUNDS_US[-1] / 1_000_000


def test_two_latenesses_add_up() -> None:
    assert lateness(100) + lateness(100, 300) == lateness(100, 100, 300)


def test_a_forked_child_does_not_send_again_what_its_parent_has_counted() -> None:
    metrics = Metrics()
    counts = metrics.counts(topic("mail"))
    counts.put += 7
    metrics.scripts["put"] = [1, 0.001, 0]
    turn = metrics._turn.pop()  # another thread is sending just now
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        counts.put += 2
        metrics.scripts["put"] = [2, 0.003, 0]
        sent = [(one.topic, one.added) for one in metrics.changed(idle=True)]
        os.write(writing, repr((sent, metrics._turn)).encode())
        os._exit(0)
    metrics._turn.append(turn)
    os.waitpid(child, 0)
    said = os.read(reading, 10_000).decode()
    scripts = {"put:calls": 1, "put:timed": 1, "put:us": 2000}
    assert said == repr(([("mail", {"put": 2}), (None, scripts)], [True]))
    assert metrics.changed(idle=False)[0].added == {"put": 7}


@pytest.mark.parametrize("idle", [False, True])
def test_what_idle_consumers_count_is_sent_only_with_the_rest_or_now_and_then(idle: bool) -> None:
    metrics = Metrics()
    metrics.counts(topic("mail")).empty += 1
    metrics.scripts["pop"][0] += 1
    assert bool(metrics.changed(idle=idle)) == idle
    metrics.counts(topic("mail")).put += 1
    changed = {one.topic: one.added for one in metrics.changed(idle=False)}
    assert changed["mail"] == {"put": 1, "empty": 1}
    assert changed[None]["pop:calls"] == 1


def test_each_counter_has_a_field_of_its_own() -> None:
    assert len(_FIELDS) == len(set(_FIELDS)) == len(TopicCounts().values())


# -- sending: whoever adds the numbers up is handed in


class Outlet:
    """Adds up what it is sent, unless it is told to fail."""

    clustered = False
    client = None

    def __init__(self) -> None:
        self.totals: Counter[tuple[str | None, str]] = Counter()
        self.fails: Exception | None = None
        self.calls = 0

    def counting(self, topic: str | None, added: dict[str, int]) -> tuple[str | None, dict]:
        return topic, added

    def run_each(self, calls: list) -> list:
        self.calls += 1
        if self.fails is not None:
            return [self.fails] * len(calls)
        for topic, added in calls:
            self.totals.update({(topic, name): number for name, number in added.items()})
        return [True] * len(calls)


def test_a_sender_keeps_no_outlet_alive() -> None:
    metrics, outlet = Metrics(), Outlet()
    metrics.counts(topic("mail")).put += 1
    metrics.send(outlet)
    gone = weakref.ref(outlet)
    del outlet
    gc.collect()
    assert gone() is None
    metrics.send_at_exit()
