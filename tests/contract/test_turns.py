"""A consumer of several queues that are full: each gets its share, and none waits for another."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import product
from typing import Any

import pytest
import redis
from kombu import Connection, Consumer, Message, Producer, Queue

from kombu_toc import ConfigurationError, TimeoutCenter
from kombu_toc.consumer.state import WorkerPolicy

from ..support.cases import night
from ..support.consuming import Inbox, Loop, deliver_until

Connect = Callable[..., Connection]
Fill = Callable[..., None]


class Taker:
    """A consumer that settles what it was delivered when it has as much as it may have.

    loop: in an event loop, as a worker has one
    early: settle at once
    """

    def __init__(
        self,
        connection: Connection,
        queues: list[str],
        prefetch: int,
        *,
        early: bool = False,
        loop: bool = False,
    ) -> None:
        self.taken: list[str] = []
        self._connection = connection
        self._early = early
        self._prefetch = prefetch
        self._unsettled: list[Message] = []
        self._loop = Loop(connection) if loop else None
        self._consumer = Consumer(
            connection,
            [Queue(name) for name in queues],
            callbacks=[self._received],
            prefetch_count=prefetch,
        )
        self._consumer.consume()
        connection.transport.poller.long_running = True

    def _received(self, body: str, message: Message) -> None:
        self.taken.append(message.delivery_info["routing_key"])
        if self._early:
            message.ack()
        else:
            self._unsettled.append(message)

    def take(self, number: int) -> None:
        """Go on until so many have been delivered."""
        deadline = time.monotonic() + 20
        while len(self.taken) < number:
            assert time.monotonic() < deadline, Counter(self.taken)
            if len(self._unsettled) >= self._prefetch:
                self._unsettled.pop(0).ack()
            if self._loop is not None:
                self._loop.hub.run_once()
                continue
            with suppress(TimeoutError):
                self._connection.drain_events(timeout=0.5)

    def close(self) -> None:
        for message in self._unsettled:
            message.ack()
        self._consumer.cancel()
        (self._loop or self._connection).close()


@pytest.fixture
def taker(connect: Connect) -> Iterator[Callable[..., Taker]]:
    with ExitStack() as made:

        def make(*args: Any, options: dict[str, Any] | None = None, **how: bool) -> Taker:
            return made.enter_context(closing(Taker(connect(**(options or {})), *args, **how)))

        yield make


@pytest.fixture
def fill(connect: Connect) -> Fill:
    connection = connect()

    def fill(queue: str, number: int, **options: object) -> None:
        with connection.channel() as channel, (producer := Producer(channel)).batch(max_size=100):
            for i in range(number):
                producer.publish(str(i), routing_key=queue, **options)

    return fill


def assert_shared(taken: list[str], queues: list[str], within: int = 100) -> None:
    """Each queue got its share, give or take 20 percent, of any `within` in a row."""
    share = within / len(queues)
    for first in range(len(taken) - within + 1):
        got = Counter(taken[first : first + within])
        for queue in queues:
            assert 0.8 * share <= got[queue] <= 1.2 * share, (first, got)


def shapes() -> Iterator[Any]:
    """Numbers of queues and of messages ahead, how it settles and drains; by day so many that each
    three of them go together in every way."""
    for number, prefetch, early, loop in product(
        (2, 3), (1, 2, 4, 8, 16, 32), *[(False, True)] * 2
    ):
        by_day = prefetch in (2, 16) and (number == 3) ^ (prefetch == 16) ^ early ^ loop
        id = f"{number}-{prefetch}-{'early' if early else 'late'}-{'loop' if loop else 'drained'}"
        yield (pytest.param if by_day else night)(number, prefetch, early, loop, id=id)


@pytest.mark.parametrize("number, prefetch, early, loop", list(shapes()))
def test_queues_that_are_full_get_equal_shares(
    fill: Fill,
    taker: Callable[..., Taker],
    number: int,
    prefetch: int,
    early: bool,
    loop: bool,
) -> None:
    """X8"""
    names = [f"q{i}" for i in range(number)]
    for name in names:
        fill(name, 300 // number + 40)
    one = taker(names, prefetch, early=early, loop=loop)
    one.take(260)
    assert_shared(one.taken, names)


@pytest.mark.one_server("the nodes of a Cluster answer each in its time")
@pytest.mark.parametrize("loop", [False, True], ids=["drained", "loop"])
@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_replies_that_come_one_by_one_change_no_shares(
    fill: Fill,
    taker: Callable[..., Taker],
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    early: bool,
    loop: bool,
) -> None:
    """A server that knows no script any more is asked again by each pop for itself."""
    monkeypatch.setattr("kombu_toc.consumer.state.REST_OF_BATCH", 10.0)  # however slow it is
    names = ["q0", "q1", "q2"]
    for name in names:
        fill(name, 120)
    one = taker(names, 32, early=early, loop=loop)
    for taken in range(0, 260, 52):
        client.script_flush()
        one.take(taken + 52)
    assert_shared(one.taken, names)


def test_queues_with_priorities_get_equal_shares(fill: Fill, taker: Callable[..., Taker]) -> None:
    """A priority is one of messages of the same queue."""
    fill("low", 180, priority=9)
    fill("high", 90, priority=0)
    fill("high", 90, priority=3)
    one = taker(["low", "high"], 8)
    one.take(260)
    assert_shared(one.taken, ["low", "high"])


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("prefetch", [1, 2, 8])
def test_a_queue_is_served_at_once_although_another_has_a_backlog(
    fill: Fill, taker: Callable[..., Taker], prefetch: int, early: bool
) -> None:
    fill("full", 1500)
    # It looks into all queues once in half a minute: what it does not ask about comes last.
    seldom = {"toc_poll_interval": 30}
    one = taker(["full", "late"], prefetch, early=early, loop=True, options=seldom)
    one.take(50)
    fill("late", 5)
    before = len(one.taken)
    while one.taken.count("late") < 5:
        one.take(len(one.taken) + 1)
        assert len(one.taken) - before < 1200, "the backlog came first"
    # Then in turns.
    turns = one.taken[one.taken.index("late", before) :]
    while turns[-1] != "late":
        turns.pop()
    assert len(turns) <= 10 + 2 * prefetch, turns


@pytest.mark.parametrize(
    ("strategy", "queues", "first"),
    [("priority", ["b", "a", "c"], "b"), ("sorted", ["b", "c", "a"], "a")],
)
def test_a_queue_that_goes_before_all_others_does(
    fill: Fill, taker: Callable[..., Taker], strategy: str, queues: list[str], first: str
) -> None:
    others = [name for name in queues if name != first]
    for name in others:
        fill(name, 400)
    one = taker(queues, 2, options={"queue_order_strategy": strategy}, loop=True)
    one.take(20)
    assert set(one.taken) == {others[0]}
    fill(first, 50)
    before = len(one.taken)
    one.take(before + 51)
    first_at = one.taken.index(first)
    one.take(first_at + 50)
    assert set(one.taken[first_at : first_at + 50]) == {first}


def test_an_unknown_strategy_is_an_error_that_names_those_there_are(connect: Connect) -> None:
    with pytest.raises(ConfigurationError, match=r"queue_order_strategy.*round_robin.*'fair'"):
        connect(queue_order_strategy="fair")


def test_messages_of_a_pop_come_in_the_order_of_their_priority(
    fill: Fill, connection: Connection
) -> None:
    """Whatever their times: all of them are due."""
    fill("mail", 3, priority=9, headers={"x-slot-basis": "one"})
    fill("mail", 3, priority=0, headers={"x-slot-basis": "one"})
    inbox = Inbox(connection, ack=False, prefetch_count=6)
    assert deliver_until(connection, lambda: len(inbox.messages) == 6)
    assert [one.properties["priority"] for one in inbox.messages] == [0, 0, 0, 9, 9, 9]


class Worker(WorkerPolicy):
    """A consumer in an event loop that says how many tasks it could start, as Celery's do.

    ahead: how many it expects to start soon
    """

    def __init__(self, connection: Connection, processes: int, ahead: int) -> None:
        self.executing: list[Message] = []
        self.processes = processes
        self.ahead = ahead
        self.connection, self.loop = connection, Loop(connection)
        channel = connection.default_channel
        channel.policy = self
        self.consumer = Consumer(
            channel, [Queue("mail")], on_message=self.executing.append, prefetch_count=16
        )
        self.consumer.consume()
        connection.transport.poller.long_running = True

    def idle_slots(self) -> int:
        return self.processes - len(self.executing)

    def idle_within(self, seconds: float) -> int:
        return self.ahead

    def start_limit(self) -> int:
        return self.idle_slots()

    def turn(self, until: Callable[[], object], seconds: float = 5) -> None:
        self.loop.until(until, seconds, "nothing comes of it")

    @property
    def held(self) -> int:
        state = self.connection.transport.poller.states[self.connection.default_channel]
        return state.buffered

    def close(self) -> None:
        for message in self.executing:
            message.ack()
        self.consumer.cancel()
        self.loop.close()


@pytest.fixture
def worker(connect: Connect) -> Iterator[Callable[..., Worker]]:
    with ExitStack() as made:
        yield lambda **how: made.enter_context(closing(Worker(connect(), **how)))


def in_flight(center: TimeoutCenter) -> int:
    return center.counts("mail").in_flight


def test_a_worker_hands_over_what_can_start_and_keeps_the_rest(
    fill: Fill, worker: Callable[..., Worker], center: TimeoutCenter
) -> None:
    fill("mail", 20)
    one = worker(processes=2, ahead=3)
    one.turn(lambda: len(one.executing) == 2)
    for _ in range(9):
        one.executing.pop(0).ack()
        one.turn(lambda: len(one.executing) == 2)
    assert one.held <= 3
    assert in_flight(center) <= 5 + 2  # acknowledgements leave a bit later


def test_what_waits_too_long_for_a_process_is_given_back_once_and_unchanged(
    fill: Fill, worker: Callable[..., Worker], center: TimeoutCenter
) -> None:
    fill("mail", 20, headers={"x-slot-basis": "one"})
    one = worker(processes=2, ahead=3)
    counts = one.connection.transport.center.metrics.topics["mail"]
    before = counts.delivered - counts.released
    one.turn(lambda: len(one.executing) == 2)
    one.loop.turn_for(0.01)  # what waits has been due for toc_queue_after, which is 0.005
    one.executing.pop(0).ack()
    one.turn(lambda: one.held)  # a task has ended: some more are fetched ahead
    one.ahead = 0  # those that are executed now turn out to be long
    one.turn(lambda: not one.held, seconds=1)
    one.turn(lambda: in_flight(center) == 2)
    # The replies have come, too: they count what they have released.
    one.turn(lambda: counts.delivered - counts.released - before == 1 + 2)
    released = center.counts("mail").ready
    assert released == 20 - 1 - 2
    # Nothing changes, so nothing is fetched and given back again.
    scripts = one.connection.transport.center.metrics.scripts
    calls = scripts["release"][0], scripts["pop"][0]
    one.loop.turn_for(0.5)
    assert (scripts["release"][0], scripts["pop"][0]) == calls
    # Whoever idles takes it at once, in its order, and no retry was spent.
    other = worker(processes=2, ahead=0)
    other.turn(lambda: len(other.executing) == 2)
    assert [int(message.body) for message in other.executing] == [3, 4]
    assert [message.delivery.failures for message in other.executing] == [0, 0]
    assert not any(message.delivery.redelivered for message in other.executing), "none had begun"
    # And who gave it back takes what is left as soon as there is a process for it.
    one.executing.pop(0).ack()
    one.turn(lambda: len(one.executing) == 2)
    assert int(one.executing[-1].body) == 5
