"""What a consumer's process has beside its poller: connections, leases, a loop; all of virtual
time, and all of them may fail."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from threading import RLock
from types import SimpleNamespace
from typing import Any, NamedTuple

import redis

from kombu_toc.center.calls import PopRequest
from kombu_toc.center.upkeep import Kept
from kombu_toc.consumer.holdings import EarlyAcks, UnansweredPop, UnansweredPops
from kombu_toc.consumer.loop import Loop
from kombu_toc.model.results import Delivery
from kombu_toc.model.topic import Declaration, Limits, Topic

from .server import ModelServer

#: Seconds that a command takes to the server, and a reply back.
LATENCY = 0.0002

#: Seconds after which a reply is overdue.
PATIENCE = 5.0

SLOTS = 4
VISIBILITY = 10.0
GONE = redis.exceptions.ConnectionError


class Network:
    """Virtual time, the server, and whether it can be reached."""

    def __init__(self) -> None:
        self.time = 100.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.server = ModelServer(lambda: self.time)
        #: seconds until which the server answers nothing
        self.frozen_until = 0.0

    def at(self, when: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.time), next(self._order), function))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.time, _, function = heapq.heappop(self._events)
            function()
        self.time = until

    @property
    def frozen(self) -> bool:
        return self.time < self.frozen_until


def passed_on(topic: str, slot: int) -> str:
    """The key of what was passed on for a slot."""
    return f"{topic}/{slot}"


class Call(NamedTuple):
    """A script call: what the server does."""

    run: Callable[[], Any]
    name: str = ""
    keys: tuple[str, ...] = ("",)


class Center:
    """A timeout center of the model: the pure half of the real one's methods."""

    clustered = False
    limits = Limits(visibility=VISIBILITY)

    def __init__(self, network: Network, now: Callable[[], float]) -> None:
        self._network, self._server = network, network.server
        self.commands = Commands(network.server)
        self.leases = EndedLeases(network.server)
        self.registry = SimpleNamespace(
            resolved=str, known=lambda topic: None, topic=self.topic, reach=self.reach
        )
        self.queues = SimpleNamespace(paused=self.paused)
        self.runner = SimpleNamespace(run_all=self.run_all)
        self._topics: dict[str, Topic] = {}
        self.keys = SimpleNamespace(wake=str, passed_on=passed_on, paused="paused", topics="topics")
        self.metrics = SimpleNamespace(late=lambda topic, us: None)
        self.client = SimpleNamespace(drop_idle=lambda: None, execute_command=self._unblock)
        self.connected: Callable[[], bool] = lambda: True

    def topic(self, name: str) -> Topic:
        if name not in self._topics:
            self._topics[name] = Topic(name, Declaration(slots=SLOTS), "")
        return self._topics[name]

    def reach(self, name: str, slot: int) -> None:
        raise AssertionError("there are no more slots")

    def _check(self) -> None:
        if self._network.frozen or not self.connected():
            raise GONE("away")

    def _unblock(self, *command: Any) -> int:
        self._check()
        connection = command[2]
        if self._server.blocked.pop(connection, None) is None:
            return 0
        connection.arrive(None)
        return 1

    def run_all(self, calls: Sequence[Call]) -> list[Any]:
        self._check()
        return [call.run() for call in calls]

    def paused(self) -> set[str]:
        self._check()
        return set(self._server.paused)


class Commands:
    """The calls of the model, as the center makes those of Redis."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server

    def pop(self, topic: Topic, request: PopRequest) -> Call:
        numbers = range(SLOTS) if request.slots is None else sorted(request.slots)
        return Call(lambda: self._server.pop(topic.name, numbers, request, VISIBILITY))

    def recall(
        self, topic: Topic, slots: Any, name: str, *, bodies: bool = True, remember: int = 60
    ) -> Call:
        first = min(slots) if slots else 0
        return Call(lambda: self._server.recall(topic.name, first, name, VISIBILITY, remember))

    def ack(self, deliveries: list[Delivery]) -> list[Call]:
        done = list(deliveries)
        return [Call(lambda: self._server.ack(done), "ack")] if done else []

    def release(self, deliveries: list[Delivery], *, handed: bool = False) -> list[Call]:
        back = list(deliveries)
        return [Call(lambda: self._server.release(back))]

    def reannounce(self, topic: str, pairs: Any) -> list[Call]:
        claims = list(pairs)
        return [Call(lambda: self._server.reannounce(topic, claims))]

    def find_due(self, topics: Sequence[str], also: Sequence[str] = ()) -> Call:
        return Call(lambda: self._server.find_due([*topics, *also]))

    def pass_on(self, topic: str, slot: int, us: int) -> Call:
        return Call(lambda: self._server.pass_on(passed_on(topic, slot), slot, us), "pass_on")


class EndedLeases:
    """Looks at leases, and rolls back those that have ended."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server

    def look_calls(self, topic: Topic, slots: Sequence[int]) -> list[Call]:
        def look() -> Kept:
            self._server.look(topic.name, slots, VISIBILITY)
            return Kept(self._server.clock_us(), False, [], [], [])

        return [Call(look)]

    def sample(self, topic: Topic, slot: int, now_us: int, sent: float) -> None: ...


@dataclass(eq=False)
class Batch:
    """What was sent in one go, and the replies once the server has done it."""

    items: Sequence[tuple[Any, ...]]
    loses_reply: bool
    replies: list[Any] | None = None


class Connection:
    """Sends to the model. It is cut without notice, and finds that out like a real one."""

    def __init__(self, process: Process) -> None:
        self.client_id = self  # by which the server unblocks it
        self._process = process
        #: what replies are awaited for: item, must it run, when it was sent
        self._waiting: deque[tuple[tuple[Any, ...], bool, float]] = deque()
        self._inbox: deque[Any] = deque()
        self._broken = False
        #: what is on its way, there or back
        self._batches: list[Batch] = []
        #: how often it was closed
        self._generation = 0
        #: it is to be cut as soon as the server has done what is sent next
        self.lose_next_reply = False

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    @property
    def acknowledges(self) -> bool:
        """Whether an acknowledgement is on its way."""
        calls = [item[0] for item, _, _ in self._waiting]
        return any(isinstance(call, Call) and call.name == "ack" for call in calls)

    @property
    def has_news(self) -> bool:
        return bool(self._inbox) or (self._broken and bool(self._waiting))

    def readable(self) -> bool:
        return self.has_news

    def wait(self, seconds: float) -> bool:
        return self.has_news

    def send(self, items: Sequence[tuple[Any, ...]], *, owed: int = 0, block: float = 0.0) -> None:
        now = self._process.now()
        for number, item in enumerate(items):
            self._waiting.append((item, number < owed, now + block))
        if self._broken:
            self.close()
            raise GONE("cut")
        if not items:
            return
        if items[0][0][0] == "BZPOPMIN":
            self._block(items[0][0][1:-1], block)
            return
        batch = Batch(items, self.lose_next_reply)
        self._batches.append(batch)
        self.lose_next_reply = False
        self._process.network.at(now + LATENCY, lambda: self._execute(batch))

    def _execute(self, batch: Batch) -> None:
        network = self._process.network
        if network.frozen:
            network.at(network.frozen_until, lambda: self._execute(batch))
            return
        if batch in self._batches:  # else it never got there
            for one in self._batches[: self._batches.index(batch) + 1]:
                if one in self._batches:
                    self._do(one)

    def _do(self, batch: Batch) -> None:
        if batch.replies is not None:
            return
        batch.replies = [self._answer(item[0]) for item in batch.items]
        if batch.loses_reply:
            self.cut()
        else:
            network = self._process.network
            network.at(network.time + LATENCY, lambda: self._come(batch))

    def _come(self, batch: Batch) -> None:
        if batch in self._batches:
            self._batches.remove(batch)
            for reply in batch.replies or ():
                self.arrive(reply)

    def _answer(self, what: Any) -> Any:
        if isinstance(what, Call):
            self._process.network.server.ran[what.name] += 1
            return what.run()
        if what[0] == "SMEMBERS":
            return [name.encode() for name in self._process.network.server.paused]
        if what[0] == "HMGET":
            return [None] * (len(what) - 2)
        raise AssertionError(what)

    def _block(self, topics: Sequence[str], seconds: float) -> None:
        network, generation = self._process.network, self._generation

        def claimed(reply: Any) -> None:
            if generation == self._generation and not self._broken:
                self.arrive(reply)  # else it is lost with the connection

        network.server.block(self, list(topics), claimed)

        def ends() -> None:
            if network.server.blocked.get(self, (0, None))[1] is claimed:
                del network.server.blocked[self]
                claimed(None)

        network.at(self._process.now() + seconds, ends)

    def arrive(self, reply: Any) -> None:
        self._inbox.append(reply)
        self._process.wake_up()

    def read(self) -> None:
        if not self._inbox and not self._broken:
            self._wait_for_replies()
        if self._broken:
            self.close()
            raise GONE("cut")
        while self._inbox and self._waiting:
            reply = self._inbox.popleft()
            item, _, _ = self._waiting.popleft()
            if item[1] is not None:
                item[1](reply)

    def _wait_for_replies(self) -> None:
        """Whoever reads with nothing there stands still until something comes."""
        if self._process.network.frozen:
            self._broken = True  # until it times out, that is
            return
        for batch in list(self._batches):
            self._execute(batch)
            self._come(batch)

    def check(self) -> None:
        if self._waiting and self._process.now() > self._waiting[0][2] + PATIENCE:
            self.close()
            raise redis.exceptions.TimeoutError("no reply")

    def cut(self) -> None:
        """Nothing comes through any more, neither way; nobody is told."""
        self._broken = True
        self._batches.clear()
        self._process.wake_up()

    def close(self) -> None:
        self._generation += 1
        self._broken = False
        self._batches.clear()
        self._inbox.clear()
        self._process.network.server.blocked.pop(self, None)
        waiting, self._waiting = self._waiting, deque()
        owed = [item[0] for item, must, _ in waiting if must and isinstance(item[0], Call)]
        for item, must, _ in waiting:
            if not must and len(item) > 2:
                item[2]()
        if owed:
            self._process.leases.retry_later(owed)


class Leases:
    """The lease keeper: its thread's work is done every quarter of a second."""

    def __init__(self, process: Process, center: Center, kept_up: bool) -> None:
        self.kept_up = kept_up
        self._process, self._center = process, center
        self._held: dict[tuple[str, int, str], Delivery] = {}
        self._owed: list[Call] = []
        self._renewed = process.now()
        self._safe_until = float("inf")
        self.flights = UnansweredPops(RLock, process.now)
        self.early_acks = EarlyAcks(RLock())

    def hold_all(self, some: list[Delivery], visibility: float, now_us: int) -> None:
        self._held.update({(one.topic, one.slot, one.id): one for one in some})
        self._safe_until = min(self._safe_until, self._process.now() + visibility)

    def drop(self, delivery: Delivery) -> None:
        key = (delivery.topic, delivery.slot, delivery.id)
        if key in self._held and self._held[key].birth == delivery.birth:
            del self._held[key]

    def in_time(self, *place: Any) -> bool:
        return not self._held or self._process.now() < self._safe_until

    def retry_later(self, calls: list[Call]) -> None:
        self._owed += calls

    def expect(self, flight: UnansweredPop) -> None:
        self.flights.expect(flight)

    def lose(self, flight: UnansweredPop) -> None:
        self.flights.lose(flight)

    def flush_deferred_logs(self) -> None: ...

    def keep_up(self, who: object, interval: float, on_step: object) -> None: ...

    def leave_up(self, who: object) -> None: ...

    def refresh(self) -> None: ...

    @property
    def idle(self) -> bool:
        return not (self._held or self._owed or self.flights)

    def beat(self) -> None:
        """What its thread does; it has a connection of its own."""
        now, center, server = self._process.now(), self._center, self._process.network.server
        if self._process.network.frozen:
            return
        owed, self._owed = self._owed, []
        for call in owed:
            call.run()
        for flight in self.flights.take_kept():
            server.release(flight.recalling(center, bodies=False).run().messages)  # type: ignore[arg-type]
        for flight in self.flights.flying():
            flight.recalling(center, bodies=False, remember=0).run()  # type: ignore[arg-type]
        if now >= self._renewed + VISIBILITY / 3 or now >= self._safe_until - VISIBILITY / 2:
            self._renewed = now
            server.extend(self._held.values(), VISIBILITY)
            self._safe_until = now + VISIBILITY if self._held else float("inf")


class Process:
    """What the connections and the loop of one process share."""

    network: Network
    leases: Leases

    def now(self) -> float:
        raise NotImplementedError

    def wake_up(self) -> None:
        raise NotImplementedError


class VirtualLoop(Loop):
    """A loop of a process, without sockets: a nudge is a note that the process turns on."""

    def __init__(self, process: Any, on_nudged: Callable[[], None]) -> None:
        super().__init__(on_nudged)
        self.now = process.now  # type: ignore[method-assign]
        self.sleep = process.sleep  # type: ignore[method-assign]
        self.nudged = False
        self._process = process

    def nudge(self) -> None:
        self.nudged = True
        self._process.wake_up()

    def open_pipe(self) -> None: ...

    def take_nudge(self) -> None:
        if self.nudged:
            self.nudged = False
            self._on_nudged()
