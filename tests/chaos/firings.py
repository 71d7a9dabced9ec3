"""Schedules under kills, in one process: each firing is one message, and none is missed.

``python -m tests.chaos.firings --firings 100000 --seed 1``

Virtual workers share a real server. Each pops, takes what it was given as a worker does, and
acknowledges it. It dies at random: before or after any command that it sends, so that the reply to
a pop, to a change of a schedule or to an acknowledgement may be lost. Its messages come back when
their leases end. Now and then a message that waits for a firing is cancelled, which may be one that
comes back; what keeps the queues up puts the following one. Or all that waits is purged, also the
firing of a schedule that is hours ahead: each schedule has a next firing again, one behind what was
lost.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from celery import Celery

import kombu_toc
from celery_toc import timeout_center
from celery_toc.schedules.state import firing_id
from celery_toc.worker import schedules as recurring
from kombu_toc import TimeoutCenter

#: Milliseconds between two firings of a schedule.
PERIOD_MS = 2

#: A schedule that is never due: its firings can only be lost.
RARE = "rare"

#: Seconds for which what a worker holds that has died stays away.
LEASE = 0.05


class DiedError(Exception):
    """A virtual worker is gone."""


class Mortal:
    """An executor that dies at a command: before it is sent, or before its reply has come."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.clustered = executor.clustered
        #: commands that it sends before it dies; None: it lives
        self.left: int | None = None
        self.sends_last = False
        self.deaths: Counter[tuple[str, str]] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def replies(self, calls: Sequence[Any]) -> list[Any]:
        self._tick(calls, "before")
        found: list[Any] = self._executor.replies(calls)
        self._tick(calls, "after")
        return found

    def _tick(self, calls: Sequence[Any], when: str) -> None:
        if self.left is None or (when == "after") != self.sends_last:
            return
        if self.left == 0:
            self.left = None
            self.deaths[when, calls[0].script.name] += 1
            raise DiedError
        self.left -= 1


class Verdict(NamedTuple):
    """What has come of it."""

    firings: int  #: planned times that have come
    duplicates: list[str]  #: ids for which there was more than one message
    missed: list[str]  #: ids of planned times for which there was none
    never_run: list[str]  #: ids of messages that were never run, although nobody withdrew them
    unfollowed: list[str]  #: ids of next firings that were purged, and nothing came of that
    cancelled: int
    purges: int
    deaths: Counter[tuple[str, str]]
    seconds: float

    @property
    def holds(self) -> bool:
        return not (self.duplicates or self.missed or self.never_run or self.unfollowed)


def remind() -> None:
    """What fires."""


class Chaos:
    """One run.

    url: of an empty broker
    """

    def __init__(self, url: str, seed: int, schedules: int = 20, deaths: float = 0.2) -> None:
        self._random = random.Random(seed)
        self._deaths = deaths
        self._app = app = Celery("chaos", broker=url, set_as_current=False)
        app.conf.task_default_queue = "jobs"
        app.task(name="chaos.remind")(remind)
        self._center = timeout_center(app)
        #: what a worker has; that of one that is dead is made anew
        self._worker = TimeoutCenter(self._center.client, self._center.keys.prefix, grace=0)
        self._mortal = Mortal(self._worker.runner.executor)
        self._worker.runner.executor = self._mortal  # type: ignore[assignment]
        self._together = recurring.Together(self._worker.recurring, self._take)
        self._followers = recurring.Followers()
        self._names = [f"s{number}" for number in range(schedules)]
        #: id -> the births of its messages
        self._births: dict[str, set[str]] = defaultdict(set)
        self._ran: Counter[str] = Counter()
        self._cancelled: set[str] = set()
        self._purges = 0
        self._unfollowed: list[str] = []
        #: ids of those that a pause withdrew
        self._paused: set[str] = set()
        self._firsts: dict[str, int] = {}

    def run(self, firings: int, seconds: float) -> Verdict:
        """Until so many firings have come, or for so many seconds."""
        began = time.monotonic()
        for name in self._names:
            made = self._center.schedules.put(
                name, "chaos.remind", timedelta(milliseconds=PERIOD_MS), misfire="all"
            )
            assert made.record.next is not None
            self._firsts[name] = made.record.next
        self._center.schedules.put(RARE, "chaos.remind", timedelta(hours=1), misfire="all")
        while len(self._births) < firings and time.monotonic() < began + seconds:
            self._work()
            if self._random.random() < 0.002:
                self._cancel()
            if self._random.random() < 0.03:
                self._purge()
            if self._random.random() < 0.01:
                self._follow()
        for name in (*self._names, RARE):
            self._pause(name)
        self._mortal.left = None
        deadline = time.monotonic() + 30
        while self._center.count("jobs") and time.monotonic() < deadline:
            self._work(dies=False)
        return self._verdict(time.monotonic() - began)

    def _work(self, dies: bool = True) -> None:
        """One worker's life: some of them end early."""
        self._mortal.left = None
        if dies and self._random.random() < self._deaths:
            self._mortal.left = self._random.randrange(8)
            self._mortal.sends_last = self._random.random() < 0.5
        worker = self._worker
        try:
            popped = worker.pop("jobs", self._random.choice((1, 4, 16)), visibility=LEASE)
            for delivery in popped.messages:
                self._births[delivery.id].add(delivery.birth.partition("~")[0])
            taken: list[tuple[str, str]] = []
            if popped.messages and self._random.random() < 0.5:
                taken, calls = self._together.take(popped.messages)
                worker.runner.run_all(calls)
            for delivery in popped.messages:
                if ("jobs", delivery.id) not in taken:
                    assert self._take(delivery, delivery.id.partition("@")[0]) == "run"
                self._ran[delivery.id] += 1
                worker.ack([delivery])
        except DiedError:
            # What it was delivered is still there, and may be withdrawn before it comes back.
            if self._random.random() < 0.1:
                self._cancel()

    def _take(self, delivery: kombu_toc.Delivery, name: str) -> str:
        return recurring.take(self._worker.recurring, delivery, name)[0]

    def _cancel(self) -> None:
        made = self._center.schedules.get(self._random.choice(self._names))
        if made is not None and made.next_id is not None:
            for one in self._center.cancel(made.next_id):
                if one.deleted:
                    self._cancelled.add(one.id)

    def _purge(self) -> None:
        """All that waits goes, and the schedules that have lost their next firing go on."""
        center = self._center.center
        lost = _waiting(center)
        planned = {name: self._center.schedules.get(name) for name in lost.values()}
        self._cancelled |= {one.id for one in center.scan("jobs", state=kombu_toc.WAITING).messages}
        told = center.queues.purge("jobs").schedules
        self._follow()
        self._purges += 1
        waits = _waiting(center)
        for id, name in lost.items():
            noted = [(one.id, one.outcome) for one in self._center.schedules.history(name)[:1]]
            before, after = planned[name], self._center.schedules.get(name)
            assert before is not None and after is not None
            goes_on = after.next == before.upcoming(2)[1] and waits.get(str(after.next_id)) == name
            if name not in told or noted != [(id, "lost")] or not goes_on:
                self._unfollowed.append(id)

    def _pause(self, name: str) -> None:
        """It withdraws a firing that waits, also one that a dead worker was delivered."""
        made = self._center.schedules.get(name)
        next_id = made.next_id if made is not None else None
        if next_id and [one.state for one in self._center.get(next_id)] == [kombu_toc.WAITING]:
            self._paused.add(next_id)
        self._center.schedules.pause(name)

    def _follow(self) -> None:
        self._followers(self._center.center, lambda *_: None, lambda: True)

    def _verdict(self, seconds: float) -> Verdict:
        duplicates = [id for id, births in self._births.items() if len(births) > 1]
        missed = []
        planned = 0
        for name in self._names:
            made = self._center.schedules.get(name)
            assert made is not None and made.record.last is not None
            for us in range(self._firsts[name], made.record.last + 1, PERIOD_MS * 1000):
                planned += 1
                id = firing_id(name, us)
                if id not in self._births and id not in self._cancelled:
                    missed.append(id)
        withdrawn = self._cancelled | self._paused
        never = [id for id in self._births if not self._ran[id] and id not in withdrawn]
        return Verdict(
            planned,
            duplicates,
            missed,
            never,
            self._unfollowed,
            len(self._cancelled),
            self._purges,
            self._mortal.deaths,
            seconds,
        )


def _waiting(center: TimeoutCenter) -> dict[str, str]:
    """The messages of next firings that wait: id -> schedule."""
    every = center.recurring.page("jobs", 1000)[1]
    return {one.record.partition("\n")[0]: one.name for one in every if one.state == "waiting"}


def chaos(url: str, firings: int, seed: int, seconds: float = 600.0) -> Verdict:
    """Run it, with firings that are gone followed at once."""
    gone, interval = recurring.GONE_US, recurring.LOOK_INTERVAL
    recurring.GONE_US, recurring.LOOK_INTERVAL = 0, 0.0
    try:
        return Chaos(url, seed).run(firings, seconds)
    finally:
        recurring.GONE_US, recurring.LOOK_INTERVAL = gone, interval


def main() -> int:
    from ..support.servers import Server

    parser = argparse.ArgumentParser(description="Schedules under kills, in one process")
    parser.add_argument("--firings", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder)).start()
        try:
            found = chaos(server.toc_url, chosen.firings, chosen.seed, chosen.seconds)
        finally:
            server.stop()
    print(f"firings     {found.firings}, in {found.seconds:.0f} s, seed {chosen.seed}")
    print(f"duplicates  {len(found.duplicates)} {found.duplicates[:3]}")
    print(f"missed      {len(found.missed)} {found.missed[:3]}")
    print(f"never run   {len(found.never_run)} {found.never_run[:3]}")
    print(f"unfollowed  {len(found.unfollowed)} {found.unfollowed[:3]}")
    print(f"cancelled   {found.cancelled}, also by {found.purges} purges")
    for (when, script), number in sorted(found.deaths.items()):
        print(f"deaths      {number:6} {when} {script}")
    return 0 if found.holds else 1


if __name__ == "__main__":
    assert kombu_toc.__version__
    sys.exit(main())
