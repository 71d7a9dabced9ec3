"""Nothing that is done to a message depends on how many others wait: what the server runs is the
same beside ten messages and beside thousands, and no command reads or removes without a bound.

Counted by MONITOR, which tells of the commands within scripts too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import redis

from kombu_toc import ScheduleChange, ScheduleFiring, TimeoutCenter, Unique
from kombu_toc.center.calls import read_call, written_call
from kombu_toc.center.schedules import changing
from kombu_toc.metrics import Metrics

from ..support.cases import each, night
from ..support.inspection import commands_run, put_call, put_some
from ..support.servers import Server

pytestmark = pytest.mark.one_server("MONITOR tells of one")

HOUR = 3600.0

#: Entries that one command may read or remove, at most.
BOUND = 1000

#: Commands of one name by which one operation may differ from itself.
MARGIN = 12

#: Commands that read a whole key, or go through keys.
WHOLE = {
    *("KEYS", "SCAN", "HGETALL", "HKEYS", "HVALS", "ZSCAN", "HSCAN"),
    *("SMEMBERS", "SSCAN", "SORT", "LRANGE"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One of its own: MONITOR tells of everybody's commands."""
    with Server(tmp_path_factory.mktemp("bounded")) as made:
        yield made


@pytest.fixture
def center(client: redis.Redis) -> TimeoutCenter:
    """It counts nothing: counters are sent when it is time to, with whatever is done then."""
    return TimeoutCenter(client, grace=0, slots=8, metrics=Metrics(active=False))


@pytest.fixture
def watch(server: Server) -> Callable[..., object]:
    return partial(commands_run, server)


def fill(center: TimeoutCenter, others: int, **limits: object) -> None:
    """Messages that wait for hours, that are due, in flight and dead; and one of each to act on."""
    topic = center.queues.declare("mail", slots=2, **limits)
    for start in range(0, others, 500):
        numbers = range(start, min(start + 500, others))
        center.runner.run_all(
            [put_call(center, topic, f"later-{n}", b"", delay_us=10**10 + n) for n in numbers]
        )
        center.runner.run_all([put_call(center, topic, f"flying-{n}", b"") for n in numbers])
        flying = center.pop("mail", 500, recover=0).messages
        assert len(flying) == len(numbers)
        reject = partial(center.commands.reject, requeue=False, reason="test")
        center.runner.run_all([reject(one) for one in flying[: len(flying) // 2]])
        center.runner.run_all([put_call(center, topic, f"due-{n}", b"") for n in numbers])
        # What is in flight was put before what is due, and that stays.
    changes = [
        ScheduleChange(f"s{n}", "", f"s{n}@1", 10**15 + 10 * (n // 9), fired=[f"s{n}@{n}\tx"])
        for n in range(others)
    ]
    center.runner.run_all([changing(center.context, topic, one) for one in changes])
    center.recurring.places.note("mail", [one.name for one in changes])
    put_some(center, "mail", ("cancelled", "moved", "seen"), delay=HOUR)
    # From then on each put says again what is due, however long it took to fill the topic.
    time.sleep(0.11)


OPERATIONS: dict[str, Callable[[TimeoutCenter], object]] = {
    "put": lambda center: center.put("mail", "new", b"", delay=HOUR),
    "put now": lambda center: center.put("mail", "now", b""),
    "put unique": lambda center: center.put("mail", "unique", b"", delay=HOUR, unique="k"),
    "replace": lambda center: center.put(
        "mail", "other", b"", delay=HOUR, unique=Unique("k", conflict="replace")
    ),
    "put many": lambda center: center.put_many(
        "mail", [(f"together-{n}", b"", None, HOUR) for n in range(4)] * 2
    ),
    "ensure": lambda center: center.put("mail", "sure", b"", delay=HOUR, if_exists="keep"),
    "get": lambda center: center.get("seen", topic="mail"),
    "cancel": lambda center: center.cancel("cancelled", topic="mail"),
    "reschedule": lambda center: center.reschedule("moved", topic="mail", delay=2 * HOUR),
    "pop and ack": lambda center: center.ack(center.pop("mail", 4).messages),
    "wait": lambda center: center.release(center.pop(["mail"], 4, wait=1).messages),
    "pop and extend": lambda center: center.extend(center.pop("mail", 4).messages),
    "pop and release": lambda center: center.release(center.pop("mail", 4).messages),
    "pop and reject": lambda center: [
        center.reject(one, requeue=True) for one in center.pop("mail", 2).messages
    ],
    "pop by id and release": lambda center: center.release(
        center.pop("mail", ids=["due-31", "due-32", "later-1", "nobody"]).messages
    ),
    "pop early and release": lambda center: center.release(
        center.pop("mail", ids=["later-1", "seen"], early=True).messages
    ),
    "pop what matches and release": lambda center: center.release(
        center.pop("mail", 2, where=lambda one: one.id[:4] == "due-", look=20).messages
    ),
    "pop and bury": lambda center: [
        center.bury(one, reason="failed") for one in center.pop("mail", 2).messages
    ],
    "counts": lambda center: center.counts("mail"),
    "summary": lambda center: center.queues.summary("mail"),
    "usage": lambda center: center.queues.usage("mail"),
    "coming": lambda center: center.queues.coming("mail", [60, 3600]),
    "a page": lambda center: center.scan("mail", limit=10),
    "alter": lambda center: center.queues.alter("mail", retries=9),
    "read a schedule": lambda center: center.recurring.read("mail", ["s1"], fired=True),
    "a page of schedules": lambda center: center.recurring.page("mail", 10, (str(10**15), "s5")),
    "a page of schedules by name": lambda center: center.recurring.by_name(["mail"], 10, "s2"),
    "find a schedule": lambda center: center.recurring.find("s1"),
    "queues with schedules": lambda center: center.recurring.topics(limit=10),
    "is paused": lambda center: center.queues.is_paused("mail"),
    "change a schedule": lambda center: center.recurring.change(
        "mail",
        ScheduleChange(
            "s1",
            "s1@1",
            "s1@1",
            2 * 10**15,
            take_out="s1@1",
            put=ScheduleFiring("s1@1", b"", 2 * 10**15),
            fired=[f"s1@{n}\tx" for n in range(30)],
        ),
    ),
    "delete if empty": lambda center: center.queues.delete("mail", if_empty=True),
}


def unbounded(command: list[str]) -> bool:
    name, *args = command
    name = name.upper()
    upper = [arg.upper() for arg in args]
    if name == "HKEYS" and "}:copies:" in args[0]:
        return False  # of one id: as many as are alive
    if name in WHOLE:
        return True
    if name in ("ZRANGEBYSCORE", "ZREVRANGEBYSCORE"):
        return "LIMIT" not in upper or int(args[upper.index("LIMIT") + 2]) > BOUND
    if name == "ZRANGE" and "BYLEX" in upper:
        return "LIMIT" not in upper or int(args[upper.index("LIMIT") + 2]) > BOUND
    if name in ("ZRANGE", "ZREVRANGE", "ZREMRANGEBYRANK"):
        first, last = int(args[1]), int(args[2])
        return last - first >= BOUND if (first < 0) == (last < 0) else True
    return name == "ZREMRANGEBYSCORE" and args[1:] != ["1", "0"]  # which is nothing


def run(
    center: TimeoutCenter,
    watch: Callable[..., object],
    operations: dict[str, Callable[[TimeoutCenter], object]] = OPERATIONS,
) -> dict[str, Counter[str]]:
    """What each operation makes the server run, by command."""
    found = {}
    for operation in operations.values():
        operation(center)  # declares what there is to be declared, and loads the script
    for name, operation in operations.items():
        with watch() as commands:
            operation(center)
        for command in commands:
            assert not unbounded(command), (name, command)
        found[name] = Counter(command[0].upper() for command in commands)
    return found


def test_a_plain_put_runs_six_commands_and_eight_into_an_empty_slot(
    center: TimeoutCenter, watch: Callable[..., object], client: redis.Redis
) -> None:
    """Three more if it is earlier than what is announced: that is taken back."""

    def put(id: str, **when: float) -> list[str]:
        with watch() as commands:
            assert center.put("mail", id, b"", **when).outcome == "added"
        return [command[0] for command in commands if command[0].upper() != "EVALSHA"]

    center.queues.declare("mail", slots=1)
    center.put("mail", "load", b"")
    center.ack(center.pop("mail").messages)
    center.put("mail", "later", b"", delay=HOUR)
    assert len(put("behind it", delay=HOUR)) <= 6
    assert len(put("before it", delay=5)) <= 10
    center.queues.purge("mail")
    assert len(put("alone")) <= 8
    assert len(put("beside it")) <= 6
    assert client.zpopmin(center.keys.wake("mail"))  # it is claimed
    time.sleep(0.15)  # for longer than a claim may be overdue, by the server's clock
    assert len(put("when who has claimed is dead")) <= 7
    assert client.zcard(center.keys.wake("mail")) == 1


def test_a_pop_of_four_runs_nine_commands_and_their_acknowledgement_five(
    center: TimeoutCenter, watch: Callable[..., object]
) -> None:
    """Of one slot, beside others that wait: one each for all four."""
    center.queues.declare("mail", slots=1)
    for n in range(12):
        center.put("mail", str(n), b"x")
    center.ack(center.pop("mail", 4).messages)
    with watch() as commands:
        popped = center.pop("mail", 4, recover=0)
    assert len(popped.messages) == 4
    assert len([one for one in commands if one[0].upper() != "EVALSHA"]) <= 9
    with watch() as commands:
        assert center.ack(popped.messages) == 4
    assert len([one for one in commands if one[0].upper() != "EVALSHA"]) <= 5


def compare(operation: str, few: Counter[str], many: Counter[str]) -> None:
    """An announcement more or less, or a step of a search, is nothing that grows as it does."""
    # A wait of a second looks into all slots once a second: once, or at its end once more.
    looks = 2 if operation == "wait" else 1
    for command, number in many.items():
        assert number <= looks * few[command] + MARGIN, (operation, command)


@each(
    "command",
    [
        *("ZRANGE key 0 -1", "ZRANGE key 0 5000", "ZRANGEBYSCORE key -inf 5", "HGETALL key"),
        *("HKEYS toc:{mail:0}:body", "SMEMBERS key"),
    ],
)
def test_a_command_without_a_bound_is_found(command: str) -> None:
    assert unbounded(command.split())


@pytest.mark.parametrize("command", ["ZRANGE key 0 5", "ZRANGEBYSCORE key -inf 5 LIMIT 0 9"])
def test_a_command_with_one_is_none(command: str) -> None:
    assert not unbounded(command.split())


def test_nothing_depends_on_how_much_else_waits(
    center: TimeoutCenter, client: redis.Redis, watch: Callable[..., object]
) -> None:
    """A9, Y2"""
    fill(center, 40)
    few = run(center, watch)
    client.flushall()
    center.registry.forget("mail")
    fill(center, 4000)
    many = run(center, watch)
    for name in OPERATIONS:
        assert few[name]
        compare(name, few[name], many[name])


def written(center: TimeoutCenter) -> None:
    """Read some entries of each log and delete them."""
    for slot in center.registry.topic("mail").all_slots():
        entries = center.runner.run(read_call(slot, 10, 10**6)).entries
        names = [one.name for one in entries]
        if names:
            center.runner.run(written_call(slot, names, [one.id for one in entries]))


def test_nothing_depends_on_how_much_is_logged(
    center: TimeoutCenter, client: redis.Redis, watch: Callable[..., object]
) -> None:
    operations = {name: OPERATIONS[name] for name in LOGGED}
    operations["unwritten"] = lambda center: center.queues.unwritten("mail")
    operations["written"] = written
    found = []
    for others in (40, 4000):
        client.flushall()
        center.registry.forget("mail")
        fill(center, others, library="behind")
        found.append(run(center, watch, operations))
    few, many = found
    for name in operations:
        compare(name, few[name], many[name])


#: What is done to a topic whose rows are written behind.
LOGGED = ("put", "put unique", "put many", "ensure", "cancel", "reschedule", "pop and reject")

#: What is done to a topic whose starts are limited.
LIMITED = (
    *("put", "put now", "cancel", "reschedule", "pop and ack", "pop and release"),
    *("pop and reject", "pop and bury", "wait", "counts", "summary", "a page"),
)


def fill_limited(center: TimeoutCenter, others: int, **limits: object) -> None:
    """As many wait in lanes as are due and in none; each key has a few."""
    center.queues.declare("mail", slots=2, **limits)
    for part in ("due", "more"):
        for start in range(0, others, 500):
            center.put_many(
                "mail",
                [
                    {"id": f"{part}-{n}", "body": b"", "key": f"{n % (others // 2)}"}
                    for n in range(start, min(start + 500, others))
                ],
            )
        if part == "due":
            for _ in range(max(others // 100, 1)):
                center.pop("mail", 50, recover=0)
    for id in ("cancelled", "moved", "seen"):
        center.put("mail", id, b"", delay=HOUR, key=id)


@pytest.mark.parametrize(
    "limits",
    [
        {"key_concurrency": 1},
        {"key_order": "serial", "concurrency": 10**6},
        # A rate that always lets start, and one that does once: neither depends on the clock.
        night({"key_fair": True, "key_rate": "1000000/s"}),
        {"key_fair": True, "key_rate": "1/h"},
        night({"rate": "1000/s", "rate_burst": 10**6}),
    ],
    ids=lambda limits: "-".join(limits),
)
def test_nothing_depends_on_how_much_else_waits_for_a_limit(
    center: TimeoutCenter,
    client: redis.Redis,
    watch: Callable[..., object],
    limits: dict[str, object],
) -> None:
    found = []
    for others in (400, 4000):
        client.flushall()
        center.registry.forget("mail")
        fill_limited(center, others, **limits)
        # What is sorted by and by, a bounded number at a time, is sorted now.
        for _ in range(100):
            center.release(center.pop("mail", 1, recover=0).messages)
        found.append(run(center, watch, {name: OPERATIONS[name] for name in LIMITED}))
    few, many = found
    for name in LIMITED:
        compare(name, few[name], many[name])
