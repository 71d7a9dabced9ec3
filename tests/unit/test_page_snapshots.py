"""One look at the queues a second, however many look; what is known while the broker is away."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from kombu_toc.http import Problem
from kombu_toc.http.page import snapshots
from kombu_toc.http.page.snapshots import Snapshot, SnapshotCache


class Center:
    """A center of which each look takes some seconds, or fails."""

    def __init__(self) -> None:
        self.now = 100.0
        self.takes = 0.0
        self.fails = False
        self.looks: list[float] = []
        self.spans: list[frozenset[str]] = []
        #: a look does not end before
        self.answers = asyncio.Event()
        self.answers.set()

    async def call(self, take: Any, spans: frozenset[str], number: int) -> Snapshot:
        self.looks.append(self.now)
        self.spans.append(spans)
        await asyncio.sleep(0)
        await self.answers.wait()
        self.now += self.takes
        if self.fails:
            raise ConnectionError("refused")
        return Snapshot(number, round(self.now * 1e6), [], spans)


@pytest.fixture
def center() -> Center:
    return Center()


def of(center: Center) -> SnapshotCache:
    return SnapshotCache(center, clock=lambda: center.now)  # type: ignore[arg-type]


async def test_all_viewers_share_one_look_a_second(center: Center) -> None:
    shown = of(center)
    for _ in range(100):  # ten seconds, in which twenty look all the time
        await asyncio.gather(*(shown.read("hour") for _ in range(20)))
        center.now += 0.1
    await shown.aclose()
    assert len(center.looks) == 10
    pairs = itertools.pairwise(center.looks)
    assert all(later - sooner >= snapshots.EVERY - 1e-6 for sooner, later in pairs)


async def test_a_look_that_takes_long_takes_a_fifth_of_the_time_at_most(center: Center) -> None:
    center.takes = 0.8
    shown = of(center)
    for _ in range(200):
        await shown.read("hour")
        center.now += 0.1
    await shown.aclose()
    pairs = itertools.pairwise(center.looks)
    assert len(center.looks) > 3
    assert all(later - sooner >= 0.8 * snapshots.FIFTH - 1e-6 for sooner, later in pairs)


async def test_nobody_looks_and_nothing_is_asked(center: Center) -> None:
    shown = of(center)
    await shown.read("hour")
    center.now += 60
    await asyncio.sleep(0.01)  # nothing is to happen
    await shown.aclose()
    assert len(center.looks) == 1


async def test_only_the_spans_that_somebody_wants_are_counted(center: Center) -> None:
    shown = of(center)
    await shown.read("week")
    center.now += 2
    await shown.read("minute")
    center.now += 9
    await shown.read("minute")
    await shown.aclose()
    assert center.spans == [{"week"}, {"week", "minute"}, {"minute"}]


async def test_the_latest_look_is_shown_while_the_broker_is_away(
    center: Center, caplog: pytest.LogCaptureFixture
) -> None:
    shown = of(center)
    first = await shown.read("hour")
    center.fails = True
    for _ in range(10):
        center.now += 2
        assert await shown.read("hour") == first
    assert "cannot be reached" in shown.trouble
    assert shown.age() >= 20
    center.fails = False
    for _ in range(3):
        center.now += 2
        latest = await shown.read("hour")
        await asyncio.sleep(0.01)
    assert latest.number > first.number
    assert not shown.trouble
    await shown.aclose()
    assert len([one for one in caplog.records if "cannot be used" in one.message]) == 1


async def test_without_a_look_at_all_it_is_an_error(center: Center) -> None:
    center.fails = True
    with pytest.raises(Problem) as raised:
        await of(center).read("hour")
    assert raised.value.status == 503


async def test_a_look_that_takes_longer_than_anybody_waits_is_shown_when_it_ends(
    center: Center, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshots, "WAIT", 0.01)
    shown = of(center)
    center.answers.clear()
    with pytest.raises(Problem, match="has not answered"):
        await shown.read("hour")
    while not shown.trouble:  # who sees an older look is told, too
        await asyncio.sleep(0.001)
    assert "has not answered for" in shown.trouble
    center.answers.set()
    while shown.trouble:
        await asyncio.sleep(0.001)
    assert (await shown.read("hour")).number == 1
    assert len(center.looks) == 1
    await shown.aclose()


async def test_a_look_that_never_ends_is_given_up(
    center: Center, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "WAIT", 0.01)
    monkeypatch.setattr(snapshots, "LONGEST", 0.02)
    shown = of(center)
    center.answers.clear()
    while len(center.looks) < 2:
        with pytest.raises(Problem):
            await shown.read("hour")
        center.now += 2
    center.answers.set()
    await shown.aclose()


async def test_closing_ends_a_look_that_is_under_way(center: Center) -> None:
    before, shown = asyncio.all_tasks(), of(center)
    center.answers.clear()
    looking = asyncio.create_task(shown.read("hour"))
    while not center.looks:
        await asyncio.sleep(0)
    await shown.aclose()
    with pytest.raises(Problem):
        await looking
    assert asyncio.all_tasks() == before
