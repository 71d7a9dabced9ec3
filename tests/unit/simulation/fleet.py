"""Workers that run the real poller on virtual time, and what must hold of all of them together."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import redis

from kombu_toc.client.options import ROUND_ROBIN, Settings
from kombu_toc.consumer.loop import Wiring
from kombu_toc.consumer.poller import Poller
from kombu_toc.consumer.state import WorkerPolicy
from kombu_toc.model import scores
from kombu_toc.model.results import Delivery

from .process import SLOTS, Center, Connection, Leases, Network, Process, VirtualLoop

BROKEN = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)

#: Seconds that a turn of a loop takes.
TURN = 0.00002

#: Seconds after which a worker connects again.
RECONNECT = 0.3

#: Seconds for which a pool has work queued, as Celery's workers have here.
AHEAD = 0.02

#: Seconds that a message may wait for a process although one is idle. (One that was fetched for a
#: process that is not free after all is given back after 0.05.)
BOUND = 0.08

#: Seconds after which who starts tasks all the time looks into the slots of others again.
AGAIN = 1.0

#: Seconds after a fault within which that may take longer.
RECOVERY = 4.0


@dataclass
class Task:
    """A message, and what has become of it."""

    id: str
    queue: str
    due_us: int
    put_at: float
    duration: float
    slot: int = 0
    starts: list[float] = field(default_factory=list)
    #: who started it
    by: list[Worker] = field(default_factory=list)
    done: bool = False
    #: a worker died that had it: it comes back when its lease has ended
    excused: bool = False


class Timer:
    """Of a hub."""

    def __init__(self, when: float, function: Callable[[], None]) -> None:
        self.when, self.function, self.canceled = when, function, False

    def cancel(self) -> None:
        self.canceled = True


class Hub:
    """Kombu's, as far as the poller uses it."""

    def __init__(self, worker: Worker) -> None:
        self.on_tick: set[Callable[[], None]] = set()
        self._worker = worker
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = count()

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        timer = Timer(self._worker.now() + seconds, function)
        heapq.heappush(self._timers, (timer.when, next(self._order), timer))
        return timer

    def call_repeatedly(self, seconds: float, function: Callable[[], None]) -> Timer:
        def again() -> None:
            function()
            if not repeating.canceled:
                self.call_later(seconds, again)

        repeating = Timer(0.0, function)
        self.call_later(seconds, again)
        return repeating

    def fire(self, now: float) -> float:
        """Run what is due, ten at most as Kombu's hub; return when the next one is."""
        for _ in range(10):
            if not self._timers or self._timers[0][0] > now:
                break
            timer = heapq.heappop(self._timers)[2]
            if not timer.canceled:
                timer.function()
        while self._timers and self._timers[0][2].canceled:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else now + 1.0


class VirtualWiring(Wiring):
    """Loop and connections of a worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def loop(self, on_nudged: Callable[[], None]) -> VirtualLoop:
        self._worker.loop = VirtualLoop(self._worker, on_nudged)
        return self._worker.loop

    def close_idle(self, now: float) -> None: ...

    def reads(self, key: str) -> bool:
        return True

    def blocking(self, *args: Any) -> Any:
        return self.work()

    def work(self, *args: Any) -> Any:
        self._worker.connections.append(Connection(self._worker))
        return self._worker.connections[-1]


class Policy(WorkerPolicy):
    """What a prefork worker says."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def idle_slots(self) -> int:
        return self._worker.idle

    def idle_within(self, seconds: float) -> int:
        until = self._worker.now() + seconds
        return sum(end <= until for end in self._worker.executing.values())

    def start_limit(self) -> int:
        return self._worker.idle

    def flush_pool(self) -> bool:
        return True


class Channel:
    """What the poller delivers to."""

    def __init__(self, worker: Worker) -> None:
        self.qos = self
        self.policy = Policy(worker)
        self.receive = worker.receive
        self._worker = worker

    def capacity(self, held: int, early: int = 0) -> tuple[int, int, int]:
        window = 4 * self._worker.processes
        room = max(window - len(self._worker.unsettled), 0) - (held - early)
        free = self.policy.idle_slots() - held
        ahead = self.policy.idle_within(AHEAD)
        return free, min(room, free + ahead), min(window, ahead)


class Worker(Process):
    """A process that consumes queues, and executes so many tasks at a time."""

    def __init__(
        self,
        fleet: Fleet,
        queues: list[str],
        processes: int,
        kept_up: bool,
        prefer: tuple[int, ...] = (),
    ) -> None:
        self.fleet, self.queues, self.processes = fleet, queues, processes
        self.prefer = prefer
        self.network = fleet.network
        self._busy_until = 0.0
        self._next_turn = float("inf")
        self.alive = self.stopping = False
        self.alive = True
        self.center = Center(self.network, self.now)
        self.leases = Leases(self, self.center, kept_up)
        self.loop: VirtualLoop
        self.poller: Poller | None = None
        self.connections: list[Connection] = []
        self.hub = Hub(self)
        self.executing: dict[str, float] = {}
        self.queued: deque[Delivery] = deque()
        self.unsettled: dict[str, Delivery] = {}
        self.connect()
        self._beat()

    # -- time

    def now(self) -> float:
        return max(self.network.time, self._busy_until)

    def sleep(self, seconds: float) -> None:
        self._busy_until = self.now() + seconds

    def wake_up(self) -> None:
        self.wake_at(self.network.time)

    def wake_at(self, when: float) -> None:
        when = max(when, self._busy_until)
        if when < self._next_turn:
            self._next_turn = when
            self.network.at(when, lambda: self._turn_at(when))

    def _turn_at(self, when: float) -> None:
        if when == self._next_turn:
            self._next_turn = float("inf")
            self._turn()

    def _beat(self) -> None:
        if self.alive:
            self.leases.beat()
            self.network.at(self.network.time + 0.25, self._beat)

    # -- the loop

    def _turn(self) -> None:
        if not self.alive or self.poller is None:
            return
        self.sleep(TURN)
        try:
            following = self.hub.fire(self.now())
            for tick in list(self.hub.on_tick):
                tick()
            again = self.loop.nudged
            for connection in self.connections:
                if connection.has_news:
                    again = True
                    connection.read()
            self.loop.take_nudge()
            following = self.hub.fire(0.0)
        except BROKEN:
            self._reconnect()
            return
        if again or self.loop.nudged:
            self.wake_at(self.now())
        else:  # the hub waits whole milliseconds
            wait = min(max(following - self.now(), 0.0), 1.0)
            self.wake_at(self.now() + math.ceil(wait * 1000) / 1000)

    def connect(self) -> None:
        if not self.alive:
            return
        self.hub, self.connections = Hub(self), []
        settings = Settings(queue_order_strategy=self.fleet.strategy, toc_prefer_slots=self.prefer)
        poller: Any = Poller(
            self.center,  # type: ignore[arg-type]
            settings,
            self.leases,  # type: ignore[arg-type]
            id(self),
            VirtualWiring(self),
        )
        poller.register(self.hub)
        channel = Channel(self)
        try:
            for queue in self.queues:
                poller.consume(channel, queue)
        except BROKEN:
            poller.close()
            self.network.at(self.now() + RECONNECT, self.connect)
            return
        self.poller = poller
        self.fleet.note_idle()
        self.wake_up()

    def _close(self) -> None:
        """The channel gives back what has not begun, and the connection is closed."""
        poller, self.poller = self.poller, None
        self.fleet.note_idle()
        if poller is not None:
            back, self.queued = list(self.queued), deque()
            for delivery in back:
                del self.unsettled[delivery.id]
            poller.release(back)
            poller.close()

    def _reconnect(self) -> None:
        self._close()
        self.network.at(self.now() + RECONNECT, self.connect)

    # -- the pool

    @property
    def idle(self) -> int:
        return self.processes - len(self.executing) - len(self.queued)

    @property
    def acknowledges(self) -> bool:
        """Whether an acknowledgement is on its way."""
        return any(connection.acknowledges for connection in self.connections)

    def receive(self, delivery: Delivery) -> None:
        self.unsettled[delivery.id] = delivery
        if len(self.executing) < self.processes and delivery.id not in self.executing:
            self._start(delivery)
        else:
            self.queued.append(delivery)
        self.fleet.note_idle()

    def _start(self, delivery: Delivery) -> None:
        task = self.fleet.started(delivery, self.now(), self)
        end = self.now() + task.duration
        self.executing[delivery.id] = end
        self.network.at(end, lambda: self._finish(delivery, task))

    def _finish(self, delivery: Delivery, task: Task) -> None:
        if not self.alive:
            return
        del self.executing[delivery.id]
        self.unsettled.pop(delivery.id, None)
        task.done = True
        if self.poller is not None:
            try:
                self.poller.ack(delivery)
            except BROKEN:
                self._reconnect()
        else:
            self.leases.drop(delivery)
            self.leases.retry_later(self.center.commands.ack([delivery]))
        if self.queued:
            self._start(self.queued.popleft())
        self.fleet.note_idle()
        self.wake_up()

    # -- its end

    def die(self) -> None:
        self.alive = False
        self.poller = None
        for connection in self.connections:
            connection.cut()
            # The server finds out that it is gone.
            self.network.server.blocked.pop(connection, None)

    def stop(self) -> None:
        """As a worker that is told to stop: it ends what it executes, and takes nothing more."""
        self._close()
        self.queues = []


class Fleet:
    """Workers and tasks, and the checks."""

    def __init__(
        self, queues: list[str], *, faultless: bool = True, strategy: str = ROUND_ROBIN
    ) -> None:
        self.network = Network()
        self.queues, self.faultless, self.strategy = queues, faultless, strategy
        self.workers: list[Worker] = []
        self.tasks: dict[str, Task] = {}
        self.order: list[Task] = []
        self.paused: set[str] = set()
        #: queue -> since when a process has been idle that serves it
        self._idle_since: dict[str, float] = {}
        self._disturbed_until = 0.0
        #: whether workers prefer slots; queue, slot -> since when a process has been idle of those
        #: that prefer it (one to which all are alike may not be told of a message for a second)
        self._zones = False
        self._zone_idle_since: dict[tuple[str, int], float] = {}
        #: seconds that a task may wait for an idle process
        self._bound = BOUND

    # -- what happens

    def add(
        self, processes: int = 1, queues: list[str] | None = None, prefer: tuple[int, ...] = ()
    ) -> Worker:
        kept_up = self.faultless
        self._zones = self._zones or bool(prefer)
        worker = Worker(self, queues or self.queues, processes, kept_up, prefer)
        self.workers.append(worker)
        self.note_idle()
        return worker

    def put(
        self, queue: str, delay: float = 0.0, duration: float = 0.01, slot: int | None = None
    ) -> Task:
        server, id = self.network.server, f"m{len(self.tasks)}"
        number = len(self.tasks) % SLOTS if slot is None else slot
        due_us = server.clock_us() + int(delay * 1_000_000)
        task = self.tasks[id] = Task(id, queue, due_us, self.network.time, duration, number)

        def put() -> None:
            # It is due when it comes at the latest: by the clock of then, which may be set since.
            task.due_us = max(due_us, server.clock_us())
            server.put(queue, number, id, due_us, b"")

        self.network.at(self.network.frozen_until, put)
        task.put_at = max(task.put_at, self.network.frozen_until)
        return task

    def run(self, seconds: float) -> None:
        self.network.run(self.network.time + seconds)

    def disturb(self, seconds: float = RECOVERY) -> None:
        """Something fails: for so long nothing is promised but that nothing is lost. A claim may
        be lost with it, however far ahead: a look makes up for it, every second or every other."""
        if not self.faultless:
            self._bound = BOUND + 2.0
        until = max(self.network.time, self.network.frozen_until) + seconds
        self._disturbed_until = max(self._disturbed_until, until)

    def cut(self, worker: Worker, *, after_next: bool) -> None:
        self.disturb()
        for connection in worker.connections:
            if after_next:
                connection.lose_next_reply = True
            else:
                connection.cut()

    def freeze(self, seconds: float) -> None:
        network = self.network
        network.frozen_until = max(network.frozen_until, network.time + seconds)
        self.disturb()

    def step_clock(self, seconds: float) -> None:
        self.network.server.ahead += int(seconds * 1_000_000)
        self.disturb(RECOVERY + 5.0)

    def kill(self, worker: Worker) -> None:
        worker.die()
        self.workers.remove(worker)
        for slots in self.network.server.slots.values():
            for slot in slots.values():
                for id in slot.prepare:
                    self.tasks[id].excused = True
        self.note_idle()
        self.disturb()

    def stop(self, worker: Worker) -> None:
        worker.stop()
        self.workers.remove(worker)
        if self.network.frozen:  # what it cannot give back comes back when its lease ends
            for task in self.tasks.values():
                task.excused = True
        self.note_idle()

    def pause(self, queue: str, paused: bool) -> None:
        (self.paused.add if paused else self.paused.discard)(queue)
        (self.network.server.paused.add if paused else self.network.server.paused.discard)(queue)
        self.disturb(RECOVERY + 2.0)

    # -- what is checked

    def note_idle(self) -> None:
        for queue in self.queues:
            idle = any(
                worker.poller is not None and worker.idle > 0 and queue in worker.queues
                for worker in self.workers
            )
            if not idle:
                self._idle_since.pop(queue, None)
            else:
                self._idle_since.setdefault(queue, self.network.time)
            if not self._zones:
                continue
            for slot in range(SLOTS):
                zone = any(
                    worker.poller is not None and worker.idle > 0 and queue in worker.queues
                    for worker in self.workers
                    if slot in worker.prefer
                )
                if not zone:
                    self._zone_idle_since.pop((queue, slot), None)
                else:
                    self._zone_idle_since.setdefault((queue, slot), self.network.time)

    def _waited(self, task: Task, now: float) -> float:
        """Seconds that a task has waited although a process was idle all the time; of one that
        only another zone could start, beyond the second for which it leaves it."""
        if task.queue not in self._idle_since or task.queue in self.paused or task.excused:
            return 0.0
        due_at = (task.due_us - self.network.server.ahead) / 1e6
        first = max(due_at, task.put_at, self._disturbed_until)
        waited = now - max(first, self._idle_since[task.queue])
        if self._zones:
            zone = self._zone_idle_since.get((task.queue, task.slot), math.inf)
            # Who has just become idle asks for what is overdue once a second.
            waited = max(waited - 1.0 - AGAIN, now - max(first, zone))
        return waited

    def started(self, delivery: Delivery, now: float, worker: Worker) -> Task:
        task = self.tasks[delivery.id]
        if now > self._disturbed_until:
            server_us = int(now * 1_000_000) + self.network.server.ahead
            assert server_us >= task.due_us, f"{task} starts early at {now}"
        assert self._waited(task, now) < self._bound or task.starts, f"{task} starts late at {now}"
        if self.faultless:
            assert not task.starts, f"{task} starts twice"
        task.starts.append(now)
        task.by.append(worker)
        self.order.append(task)
        return task

    def check(self) -> None:
        now = self.network.time
        for task in self.tasks.values():
            if not task.starts:
                assert self._waited(task, now) < self._bound, f"at {now} nobody starts {task}"
        if self.faultless:
            self._check_announcements()

    def _check_announcements(self) -> None:
        """Somebody knows of the next time of every slot, or can."""
        uncovered = self._find_uncovered()
        for _ in range(5):
            if not uncovered:
                return
            self.run(0.004)  # what is on its way is nowhere
            uncovered &= self._find_uncovered()
        assert not uncovered, f"nobody wakes for {uncovered}"

    def _find_uncovered(self) -> set[tuple[str, int]]:
        return {
            (queue, number)
            for queue, slots in self.network.server.slots.items()
            for number, slot in slots.items()
            if slot.store
            and not self._is_covered(queue, number, scores.action_time(slot.store[0][0]))
        }

    def _is_covered(self, queue: str, number: int, next_us: int) -> bool:
        now = self.network.server.clock_us()
        if any(
            slot == number and us <= max(next_us, now)
            for us, slot in self.network.server.wake[queue]
        ):
            return True
        return any(self._knows(worker, queue, number, max(next_us, now)) for worker in self.workers)

    @staticmethod
    def _knows(worker: Worker, queue: str, number: int, until_us: int) -> bool:
        if worker.poller is None:
            return False
        claims = [entry[3] for entry in worker.poller.dispatcher.due]
        for state in worker.poller.states.values():
            claims += state.due_claims
            if queue in state.pending.slots or state.pops_in_flight:
                return True
        return any(
            not isinstance(claim, Delivery)
            and claim[:2] == (queue, number)
            and claim[2] <= until_us
            for claim in claims
        )

    def finish(self, seconds: float = 400.0) -> None:
        """Nothing fails any more: everything is done in the end, and nothing is left behind."""
        for queue in list(self.paused):
            self.pause(queue, False)
        if not any(worker.alive for worker in self.workers):
            self.add()
        missing: list[Task] = []
        deadline = self.network.time + seconds
        deadline += max(
            (task.due_us - self.network.server.clock_us()) / 1e6 for task in self._all()
        )
        # One process may have to execute it all.
        deadline += sum(task.duration for task in self.tasks.values() if not task.done)
        while self.network.time < deadline:
            self.run(1.0)
            self.check()
            missing = [task for task in self.tasks.values() if not task.done]
            if not missing and self.network.server.is_empty():
                break
        assert not missing, f"lost: {missing[:3]} and {len(missing)} in all"
        assert self.network.server.is_empty(), "something is left behind"
        for worker in self.workers:
            assert not worker.leases._held, "a lease is renewed for ever"
            assert not worker.leases._owed

    def _all(self) -> list[Task]:
        now = self.network.server.clock_us()
        return [*self.tasks.values(), Task("", "", now, 0.0, 0.0)]
