"""The task library under deaths between any two steps, in one process.

``python -m tests.chaos.steps --lives 2000 --seed 1 --engine postgresql --way behind``

Senders, workers, keepers and rebuilds live one after the other, each with connections and a memory
of its own. Many die: before or after any statement to a database, and any command to Redis; what
they knew is gone. Now and then Redis loses everything. At the end each message whose publish
returned has run; what has run twice was with a worker that died before it could say so; and library
and Redis agree. What each way of keeping a queue promises beyond that is in `tests.chaos.ways`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import redis
from kombu import Connection, Producer
from redis.connection import AbstractConnection

from kombu_toc import center_for
from kombu_toc.library import opening, rebuild, store
from kombu_toc.library import rebuild as reconcile
from kombu_toc.library.keeper import Keeper
from kombu_toc.library.recorder import Recorder
from kombu_toc.library.shards import Database

from .ways import QUEUE, WAYS, make_library

#: The most steps that one lives to take.
STEPS = 24

#: Seconds after which what a dead worker had comes back; no life may last so long.
LEASE = 2.0


class DiedError(BaseException):
    """Whoever lived is gone. Nothing that handles errors sees it as one."""


class Fate:
    """Ends the life that goes on, at one of its steps."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        #: steps that are left; None: it lives
        self.left: int | None = None
        self.is_over = False
        self.role = ""
        self.deaths: Counter[str] = Counter()

    def passes(self, what: str) -> None:
        if threading.get_ident() != self._thread:
            return
        if self.is_over:
            raise DiedError  # whoever is gone does not clean up
        if self.left is None:
            return
        if not self.left:
            self.is_over = True
            self.deaths[f"{self.role}, {what}"] += 1
            raise DiedError
        self.left -= 1

    @contextmanager
    def installed(self) -> Iterator[None]:
        attempt = Database._attempt
        send, read = AbstractConnection.send_packed_command, AbstractConnection.read_response

        def around(function: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
            def done(*args: Any, **kwargs: Any) -> Any:
                if before:
                    self.passes(before)
                found = function(*args, **kwargs)
                if after:
                    self.passes(after)
                return found

            return done

        whole = around(attempt, "before a statement", "after a statement")
        with (
            mock.patch.object(Database, "_attempt", whole),
            mock.patch.object(
                AbstractConnection, "send_packed_command", around(send, "before a command", "")
            ),
            mock.patch.object(
                AbstractConnection, "read_response", around(read, "", "after a command")
            ),
        ):
            yield


class Verdict(NamedTuple):
    """What has come of it."""

    sent: int
    lost: list[str]  #: ids whose publish returned, and that never ran
    unexplained: list[str]  #: ids that ran more often than a worker died without saying so
    again: int  #: runs that this explains
    left: list[str]  #: what the library and Redis do not agree on, and rows that have not ended
    losses: int
    deaths: Counter[str]
    seconds: float
    early: list[str]  #: ids that were delivered before their time, and by how much
    broken: list[str]  #: what else is promised of a queue that is kept so, and does not hold
    counted: dict[str, int]  #: what shows that this way was gone

    @property
    def holds(self) -> bool:
        return not (self.lost or self.unexplained or self.left or self.early or self.broken)


class Chaos:
    """One run.

    client: of the server, which may be flushed; url: of the same, for centers
    options: with the library, whose tables are there
    way: how the queue is kept, of WAYS
    """

    def __init__(
        self,
        client: redis.Redis,
        url: str,
        options: dict[str, Any],
        seed: int,
        way: str = "through",
    ) -> None:
        self._client, self._url = client, url
        self._options = {**options, "visibility_timeout": LEASE, "toc_library_timeout": 30.0}
        self.dice = random.Random(seed)
        self.fate = Fate()
        self._number = self._losses = 0
        #: ids whose publish returned, and how often each was delivered
        self.sent: set[str] = set()
        self.ran: Counter[str] = Counter()
        #: seconds since the epoch before which they must not be, as far as they are ahead
        self._due: dict[str, float] = {}
        self._early: list[str] = []
        #: runs whose worker has not said so
        self._unsaid: Counter[str] = Counter()
        self._keeper: Keeper | None = None
        self.way = WAYS[way](self, options)

    def run(self, lives: int) -> Verdict:
        began = time.monotonic()
        with self.way.installed(), self.fate.installed(), _hastily():
            for _ in range(lives):
                self._live()
            self._settle()
            left = self._disagreements()
            self._dismiss()
            self._forget()
            self.way.judge()
            lost = sorted(self.way.promised() - self.ran.keys())
            counted = self.way.counted()
        more = {id: number - 1 - self._unsaid[id] for id, number in self.ran.items()}
        again = sum(number - 1 for number in self.ran.values())
        return Verdict(
            len(self.sent),
            lost,
            sorted(id for id, number in more.items() if number > 0),
            again,
            left,
            self._losses,
            self.fate.deaths,
            time.monotonic() - began,
            self._early,
            self.way.broken,
            counted,
        )

    def aside(self, do: Callable[..., Any], *args: Any) -> Any:
        """Look at something: that is no step of whoever lives."""
        left, self.fate.left = self.fate.left, None
        try:
            return do(*args)
        finally:
            self.fate.left = left

    def _live(self) -> None:
        roles = (self._send, self._work, self._work, self._keep, self._lose)
        role = self.dice.choices(roles, (8, 5, 5, 4, 1))[0]
        dies = self.dice.random() < 0.6
        most = self.way.keeper_steps if role == self._keep else STEPS
        self._as(role, self.dice.randrange(most) if dies else None)

    def _as(self, role: Callable[[], None], left: int | None) -> bool:
        """Live once; return whether nobody died."""
        fate = self.fate
        fate.left, fate.is_over, fate.role = left, False, role.__name__.strip("_")
        try:
            role()
        except DiedError:
            pass
        finally:
            died, fate.is_over, fate.left = fate.is_over, False, None
            if died:
                self._dismiss()
            self._forget()
        return not died

    def _dismiss(self) -> None:
        """The keeper, which lives longer than others, is gone."""
        if self._keeper is not None:
            self._keeper._store.shards.close()
            self._keeper.close()
            self._keeper = None

    def _forget(self) -> None:
        """What a process knew is gone."""
        for recorder in opening._opened.values():
            recorder.store.shards.close()
        opening._opened.clear()

    # -- the roles

    def _send(self) -> None:
        with Connection(self._url, transport_options=self._options) as connection:
            channel = connection.default_channel
            self.way.declare(channel.center)
            producer = Producer(channel)
            for _ in range(self.dice.randrange(1, 4)):
                self._number += 1
                id = f"order-{self._number}"
                ms = self.dice.choice(self.way.delays)
                self._due[id] = time.time() + ms / 1000
                if self.way.send(producer, id, ms):
                    self.sent.add(id)
            channel.recorder._turn()

    def _work(self) -> None:
        began = time.monotonic()
        center = center_for(self._url, **self._options)
        ran: list[str] = []
        said = False
        try:
            self.way.declare(center)
            for one in center.pop(QUEUE, self.dice.choice((1, 4, 16))).messages:
                id = one.id.partition("#")[0]
                if (now := time.time()) < self._due[id]:
                    self._early.append(f"{id} by {self._due[id] - now:.6f} s")
                self.ran[id] += 1
                ran.append(id)
                center.ack([one])
            center.recorder.recorder.flush()  # type: ignore[union-attr]
            said = time.monotonic() - began < LEASE - 0.5
            if said:
                self.way.said(ran)
        finally:
            if not said:
                self._unsaid.update(ran)

    def _keep(self) -> None:
        if self._keeper is None:
            center = center_for(self._url, **self._options)
            recorder = center.recorder.recorder  # type: ignore[union-attr]
            self._keeper = Keeper(recorder.store, recorder._make_center(), "keeper", 86_400)
        self.way.keep(self._keeper)
        self._keeper.put_missing()
        self._keeper._reconciler.look()

    def _lose(self) -> None:
        """Redis loses everything; somebody puts it back, and may die at that, too."""
        self._losses += 1
        library = self.aside(self._flush)
        self.fate.role = "rebuild"
        library.rebuild()

    def _flush(self) -> Any:
        self.way.losing()
        self._client.flushall()
        return center_for(self._url, **self._options).library

    # -- the end

    def _settle(self) -> None:
        """Nobody dies any more, until all is done."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for role in (self._keep, self._keep, self._work):
                self._as(role, None)
            counts = center_for(self._url, **self._options).library.counts()
            if not counts.get("pending", 0) + counts.get("taken", 0):
                return
            time.sleep(0.05)  # leases end meanwhile

    def _disagreements(self) -> list[str]:
        library = center_for(self._url, **self._options).library
        found = [f"{one.kind}: {one.id}" for one in library.check()]
        rows = library.find(status=["pending", "taken"], limit=5).records
        return found + [f"{one.status}: {one.id}" for one in rows]


@contextmanager
def _hastily() -> Iterator[None]:
    """One life goes on at a time: nothing is under way meanwhile, and no thread does anything."""
    with (
        mock.patch.object(Recorder, "_start", lambda _: None),
        mock.patch.object(reconcile, "UNDER_WAY_US", 0),
        mock.patch.object(reconcile, "CONFIRM", 0.0),
        mock.patch.object(store, "DOUBT_US", 0),
        mock.patch.object(rebuild, "SETTLE", 0.0),
        mock.patch.object(rebuild, "YOUNG", 0.0),
    ):
        yield


def main() -> int:
    from ..support.databases import ENGINES
    from ..support.servers import Server

    parser = argparse.ArgumentParser(description="The task library under kills, in one process")
    parser.add_argument("--lives", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=list(ENGINES), default="sqlite")
    parser.add_argument("--way", choices=list(WAYS), default="through", help="to keep the queue")
    chosen = parser.parse_args()
    kind = ENGINES[chosen.engine]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder)).start()
        database = kind().start() if kind else None
        try:
            urls = [
                database.new_url() if database else f"sqlite:///{folder}/{number}.db"
                for number in range(WAYS[chosen.way].databases)
            ]
            with server.client() as client:
                options = make_library(urls)
                run = Chaos(client, server.toc_url, options, chosen.seed, chosen.way)
                found = run.run(chosen.lives)
        finally:
            server.stop()
            if database:
                database.stop()
    print(f"messages     {found.sent}, in {found.seconds:.0f} s, seed {chosen.seed}")
    print(f"run twice    {found.again}")
    for what in ("lost", "unexplained", "early", "left", "broken"):
        listed = getattr(found, what)
        print(f"{what:12} {len(listed)} {listed[:3]}")
    for what, number in found.counted.items():
        print(f"{what:12} {number}")
    print(f"Redis lost   {found.losses}")
    for what, number in sorted(found.deaths.items()):
        print(f"deaths       {number:6} {what}")
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())
