"""What is limited stays limited while its queue gets another number of slots, and while the slots
of a Cluster move to other nodes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kombu_toc
from kombu_toc import Delivery, TimeoutCenter
from kombu_toc.center import reshard as reshard_module
from kombu_toc.center.reshard import reshard_topic
from kombu_toc.model.topic import slot_of

from ..support.cluster import Cluster
from ..support.inspection import keys_left, time_passes
from ..support.waiting import in_thread
from .test_limits import ids, many, pop, put, run_out
from .test_reshard import packed

#: Slots of which another one than the first is very likely.
MANY = 64

KEYS = [f"key {number}" for number in range(20)] + ["long " * 100]

Change = tuple[int, int]

#: From so many slots to so many.
reshards = pytest.mark.parametrize("change", [(8, 2), (2, 8), (1, 4)])
one_server = pytest.mark.one_server(
    "what counts the whole queue has one slot on a Cluster, and a key is counted in both of its "
    "slots while it has messages in both"
)


def put_each(center: TimeoutCenter, what: object, keys: list[str] = KEYS) -> None:
    """A message of each of these keys."""
    for key in keys:
        put(center, f"{what} of {key}", key)


@pytest.fixture
def moving(cluster: Cluster) -> Iterator[TimeoutCenter]:
    """A center on the shared Cluster, which is empty."""
    with cluster.client() as client:
        client.flushall()
        yield TimeoutCenter(client, grace=0)


def reshard(center: TimeoutCenter, slots: int) -> bool:
    return reshard_topic(center, "mail", slots, settle=0).done


# -- another number of slots


@pytest.mark.cluster
@reshards
def test_a_key_that_has_used_its_rate_has_used_it_in_its_new_slot(
    center: TimeoutCenter, change: Change
) -> None:
    center.queues.declare("mail", slots=change[0], key_rate="2/h", key_burst=2)
    put_each(center, "first")
    put_each(center, "second", KEYS[::2])
    got = pop(center)
    assert len(got) == len(KEYS) + len(KEYS[::2])
    center.ack(got)
    assert reshard(center, change[1])
    put_each(center, "third")
    got = pop(center)
    assert sorted(ids(got)) == sorted(f"third of {key}" for key in KEYS[1::2])
    center.ack(got)
    time_passes(center, "mail", 1900)
    assert len(pop(center)) == len(KEYS[::2])


@pytest.mark.cluster
@reshards
def test_a_key_that_was_put_as_often_as_it_may_be_is_refused_in_its_new_slot(
    center: TimeoutCenter, change: Change
) -> None:
    center.queues.declare("mail", slots=change[0], key_put_rate="1/h")
    put_each(center, "first")
    center.ack(pop(center))
    assert reshard(center, change[1])
    for key in KEYS:
        with pytest.raises(kombu_toc.RateLimitedError):
            put(center, f"second of {key}", key)
    assert min(center.client.pttl(key) for key in paces(center)) > 0


def paces(center: TimeoutCenter) -> list[str]:
    return keys_left(center.client, "*:put-pace")


@one_server
@reshards
def test_the_rate_of_a_queue_goes_on_where_it_was(center: TimeoutCenter, change: Change) -> None:
    center.queues.declare("mail", slots=change[0], rate="3/h", rate_burst=3)
    for number in range(2):
        put(center, f"a{number}", KEYS[number])
    center.ack(pop(center))
    for number in range(8):
        put(center, f"b{number}", KEYS[number])
    assert reshard(center, change[1])
    assert len(pop(center)) == 1
    assert pop(center) == []


@one_server
@reshards
def test_no_more_of_a_queue_run_at_once_than_it_may(center: TimeoutCenter, change: Change) -> None:
    center.queues.declare("mail", slots=change[0], concurrency=3)
    for number in range(30):
        put(center, f"m{number}", KEYS[number % 10])
    running = pop(center)
    got = Counter(ids(running))
    assert len(running) == 3
    done = reshard(center, change[1])
    while len(got) < 30:
        assert pop(center) == []
        center.ack([running.pop(0)])
        more = pop(center)
        assert len(more) == 1
        running += more
        got.update(ids(more))
        done = done or reshard(center, change[1])
    assert set(got.values()) == {1}
    center.ack(running)
    assert reshard(center, change[1])
    assert center.queues.usage("mail").running == 0
    assert center.admin.check("mail") == []


@one_server
@pytest.mark.parametrize("limits", [{"concurrency": 2}, {"rate": "2/h", "rate_burst": 2}])
def test_what_counts_the_queue_stays_when_the_slot_that_keeps_it_is_emptied(
    center: TimeoutCenter, limits: Any
) -> None:
    center.queues.declare("mail", slots=2, **limits)
    first = next(key for key in KEYS if slot_of(key, 2) == 1)
    second = next(key for key in KEYS if slot_of(key, 4) == 2)
    for number in range(2):
        put(center, f"a{number}", first)
    assert len(pop(center)) == 2
    for number in range(2):
        put(center, f"b{number}", second)
    reshard(center, 4)
    assert center.counts("mail") == (2, 0, 2, 0)
    assert pop(center) == []


@one_server
@reshards
def test_no_more_of_a_key_run_at_once_than_it_may(center: TimeoutCenter, change: Change) -> None:
    center.queues.declare("mail", slots=change[0], key_concurrency=2)
    for number in range(4):
        put_each(center, number)
    got: Counter[str] = Counter()
    running: dict[str, list[Delivery]] = {key: [] for key in KEYS}

    def start() -> None:
        for message in pop(center):
            of_key = running[message.id.partition(" of ")[2]]
            of_key.append(message)
            assert len(of_key) <= 2
            got[message.id] += 1

    start()
    assert got.total() == 2 * len(KEYS)
    reshard(center, change[1])
    while got.total() < 4 * len(KEYS):
        start()
        for of_key in running.values():
            center.ack(of_key[:1])
            del of_key[:1]
        reshard(center, change[1])
    assert set(got.values()) == {1}


def comes_in_its_turn(center: TimeoutCenter, id: str, key: str) -> None:
    put(center, id, key)
    some: list[Delivery] = []
    while id not in ids(some):
        some += center.pop("mail", 1).messages
        assert len(some) <= 4
    center.ack(some)


@pytest.mark.cluster
@reshards
def test_keys_take_turns_before_during_and_after(center: TimeoutCenter, change: Change) -> None:
    """The large one delays a small one by a message of its own, and one of each other key."""
    center.queues.declare("mail", slots=change[0], key_fair=True)
    center.put_many("mail", many(400))
    number = 0

    def small_ones() -> None:
        nonlocal number
        for key in KEYS[:3]:
            number += 1
            comes_in_its_turn(center, f"s{number}", key)

    small_ones()
    center.ack(pop(center, 50))
    state = reshard(center, change[1])
    small_ones()
    while not state:
        center.ack(pop(center, 50))
        small_ones()
        state = reshard(center, change[1])
    put(center, "last", "another")
    small_ones()


@one_server
@pytest.mark.parametrize("limits", [{"key_concurrency": 1}, {"key_order": "serial"}])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_who_has_not_read_of_new_slots_yet_starts_nothing_beside_what_runs_there(
    center: TimeoutCenter,
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, Any],
    before: int,
    after: int,
) -> None:
    center.queues.declare("mail", slots=before, **limits)
    key = next(key for key in "abcdefgh" if slot_of(key, 2) == 1)
    seconds = 0.0
    other = TimeoutCenter(client, grace=0)
    other.registry.clock = lambda: seconds
    assert pop(other) == []
    pauses: list[float] = []

    def sleep(pause: float) -> None:
        nonlocal seconds
        if len(pauses) == 0:
            put(other, "first", key)  # by the former count
        elif len(pauses) == 1:
            # The new count is there; `other` has not read of it since.
            put(center, "second", key)
            put(other, "third", key)
            got = []
            while running := [*pop(center, 1), *pop(other, 1), *pop(center, 1), *pop(other, 1)]:
                [one] = running
                got.append(one.id)
                assert center.ack(running) == 1
            assert sorted(got) == ["first", "second", "third"]
            assert got.index("first") < got.index("third")
            raise Enough
        pauses.append(pause)
        seconds += pause
        other.registry.topic("mail")  # read again if that is due

    class Enough(Exception):
        pass

    monkeypatch.setattr(reshard_module, "sleep_of", lambda _: sleep)
    with pytest.raises(Enough):
        reshard_topic(center, "mail", after)
    assert pauses == [reshard_module.KNOWN]


@pytest.mark.cluster
@pytest.mark.parametrize("limits", [{}, {"key_concurrency": 1}])
def test_only_the_consumers_of_a_limited_queue_are_told_of_new_slots_before(
    center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any]
) -> None:
    center.queues.declare("mail", slots=2, **limits)
    found: list[tuple[int, tuple[int, ...]]] = []

    def sleep(pause: float) -> None:
        said = center.queues.describe("mail")
        found.append((said.slots, said.draining_counts))

    monkeypatch.setattr(reshard_module, "sleep_of", lambda _: sleep)
    assert reshard_topic(center, "mail", 4, settle=0).done
    assert found == ([(2, (4,))] if limits and not center.clustered else [])


@one_server
@pytest.mark.parametrize("then", [4, 2, 8])
def test_who_is_killed_before_anything_is_put_into_new_slots_is_followed_by_whoever_comes(
    center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch, then: int
) -> None:
    center.queues.declare("mail", slots=2, key_order="serial")
    put_each(center, "first", KEYS[:4])

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(reshard_module, "sleep_of", lambda _: killed)
        with pytest.raises(KeyboardInterrupt):
            reshard_topic(center, "mail", 4)
    put_each(center, "second", KEYS[:4])
    got = pop(center)
    assert sorted(ids(got)) == sorted(f"first of {key}" for key in KEYS[:4])
    center.ack(got)
    assert reshard(center, then)
    said = center.queues.describe("mail")
    assert (said.slots, said.draining_counts) == (then, ())
    assert sorted(ids(pop(center))) == sorted(f"second of {key}" for key in KEYS[:4])
    assert center.admin.check("mail") == []


# -- where a message goes whose key can be told, and which stays


LONG = "long " * 100


def lies(center: TimeoutCenter, id: str) -> int:
    [found] = center.get(id, topic="mail")
    return found.slot


@one_server
@pytest.mark.parametrize("key", ["a key", LONG], ids=["short", "long"])
@pytest.mark.parametrize("header", ["x-key", "tenant"])
def test_what_has_a_key_goes_to_the_slot_of_its_key(
    center: TimeoutCenter, key: str, header: str
) -> None:
    center.queues.declare("mail", slots=1, key_order="serial", key_header="tenant")
    for number in range(10):
        center.put("mail", f"{number}", packed(f"{number}", **{header: key}), key=key)
    assert reshard(center, MANY)
    for number in range(10, 12):
        center.put("mail", f"{number}", packed(f"{number}"), key=key)
    assert {lies(center, f"{number}") for number in range(12)} == {slot_of(key, MANY)}


@one_server
def test_a_key_is_the_one_that_a_message_was_put_with_whatever_names_keys_now(
    center: TimeoutCenter,
) -> None:
    center.queues.declare("mail", slots=1, key_order="serial", key_header="tenant")
    for number in range(10):
        center.put("mail", f"{number}", packed(f"{number}", tenant="anna", other="x"), key="anna")
    center.queues.alter("mail", key_header="other")
    assert reshard(center, MANY)
    assert {lies(center, f"{number}") for number in range(10)} == {slot_of("anna", MANY)}
    for number in range(10):  # one at a time, in their order
        [one] = pop(center)
        assert one.id == f"{number}"
        center.ack([one])


@one_server
def test_what_has_a_key_of_which_the_hash_is_known_stays_until_it_is_delivered(
    center: TimeoutCenter,
) -> None:
    center.queues.declare("mail", slots=1, key_order="serial")
    for number in range(3):
        put(center, f"{number}", LONG)
    state = reshard_topic(center, "mail", MANY, settle=0)
    assert (state.moved, state.left, state.done) == (0, 3, False)
    put(center, "3", LONG)
    assert run_out(center, at_once=1) == ["0", "1", "2", "3"]
    assert reshard(center, MANY)


@one_server
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("body", [b"raw", None], ids=["bytes", "envelopes"])
def test_what_has_a_key_and_another_slot_basis_stays_and_is_found(
    center: TimeoutCenter, body: bytes | None, many: bool
) -> None:
    center.queues.declare("mail", slots=1, key_concurrency=1)
    wanted = [
        {"id": f"{number}", "body": body or packed(f"{number}"), "key": "k", "basis": "b"}
        for number in range(3)
    ]
    if many:
        center.put_many("mail", wanted)
    else:
        for message in wanted:
            center.put("mail", **message)
    state = reshard_topic(center, "mail", MANY, settle=0)
    assert (state.moved, state.left, state.done) == (0, 3, False)
    for number in range(3):
        assert [one.key for one in center.get(f"{number}", basis="b")] == ["k"]
    for number in range(3):
        [one] = pop(center)
        assert one.id == f"{number}"
        center.ack([one])
    assert reshard(center, MANY)


# -- hash slots that move to another node


class Limited:
    """Uses a queue whose keys are limited, and sees that they are."""

    def __init__(self, center: TimeoutCenter, rounds: int) -> None:
        self.center, self.rounds = center, rounds
        self.got: Counter[str] = Counter()
        self.order: dict[str, list[int]] = {}

    def put_all(self, keys: list[str]) -> None:
        for number in range(self.rounds):
            for key in keys:
                self.center.put("mail", f"{number} of {key}", b"", key=key)

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            popped = self.center.pop("mail", 5)
            for message in popped.messages:
                number, _, key = message.id.partition(" of ")
                self.got[message.id] += 1
                self.order.setdefault(key, []).append(int(number))
            keys = [message.id.partition(" of ")[2] for message in popped.messages]
            assert len(keys) == len(set(keys))
            assert self.center.ack(popped.messages) == len(popped.messages)


@pytest.mark.parametrize("fair", [False, True])
def test_a_serial_key_keeps_its_order_while_its_slot_moves(
    cluster: Cluster, moving: TimeoutCenter, fair: bool
) -> None:
    moving.queues.declare("mail", slots=4, key_order="serial", key_fair=fair or None)
    limited = Limited(moving, 12)
    limited.put_all(KEYS)
    moves(cluster, moving, lambda over: limited.run(over))
    limited.run(lambda: len(limited.got) == 12 * len(KEYS))
    assert set(limited.got.values()) == {1}
    assert set(map(tuple, limited.order.values())) == {tuple(range(12))}
    assert moving.admin.check("mail") == []


def test_rates_bursts_and_places_are_kept_while_their_slots_move(
    cluster: Cluster, moving: TimeoutCenter
) -> None:
    limits = {"key_rate": "3/h", "key_burst": 3, "key_concurrency": 2}
    moving.queues.declare("mail", slots=4, **limits)
    for number in range(5):
        put_each(moving, number)
    running = pop(moving)
    assert len(running) == 2 * len(KEYS)
    more = popped_while_it_moves(cluster, moving)
    assert more == []  # all places are taken
    moving.ack(running)
    more += pop(moving)
    assert len(more) == len(KEYS)  # the rest of the burst
    moving.ack(more)
    assert pop(moving) == []
    assert moving.admin.check("mail") == []
    moving.queues.alter("mail", key_rate=None, key_concurrency=1)
    assert len(pop(moving)) == len(KEYS)


@pytest.mark.parametrize("limits", [{"concurrency": 3}, {"rate": "3/h", "rate_burst": 3}])
def test_what_counts_the_queue_is_kept_while_its_slot_moves(
    cluster: Cluster, moving: TimeoutCenter, limits: Any
) -> None:
    moving.queues.declare("mail", **limits)
    for number in range(9):
        put(moving, f"m{number}", KEYS[number])
    running = pop(moving, 2)
    assert len(running) == 2
    more = popped_while_it_moves(cluster, moving)
    more += pop(moving)
    assert ids(more) == ["m2"]
    moving.ack(running)
    assert ids(pop(moving)) == (["m3", "m4"] if "concurrency" in limits else [])
    assert moving.admin.check("mail") == []


def test_keys_take_turns_while_their_slots_move(cluster: Cluster, moving: TimeoutCenter) -> None:
    moving.queues.declare("mail", slots=2, key_fair=True)
    moving.put_many("mail", many(3000))
    moving.ack(pop(moving, 10))
    number = 0

    def meanwhile(over: Callable[[], bool]) -> None:
        nonlocal number
        while not over() or number < 10:
            for key in KEYS[:2]:
                number += 1
                comes_in_its_turn(moving, f"s{number}", key)

    moves(cluster, moving, meanwhile)


def popped_while_it_moves(cluster: Cluster, center: TimeoutCenter) -> list[Delivery]:
    more: list[Delivery] = []

    def meanwhile(over: Callable[[], bool]) -> None:
        while not over():
            more.extend(pop(center))

    moves(cluster, center, meanwhile)
    return more


def moves(
    cluster: Cluster, center: TimeoutCenter, meanwhile: Callable[[Callable[[], bool]], Any]
) -> None:
    """Move the topic's hash slots to another node and back, and do something meanwhile."""
    slots = {cluster.slot_of(slot.body) for slot in center.registry.topic("mail").all_slots()}
    homes = {slot: cluster.owner(slot) for slot in sorted(slots)}
    over = threading.Event()

    def move() -> None:
        try:
            for slot, home in homes.items():
                to = next(node for node in cluster.primaries() if node is not home)
                cluster.migrate_slots([slot], to, step=1)
                cluster.migrate_slots([slot], home, step=1)
        finally:
            over.set()

    with in_thread(move):
        meanwhile(over.is_set)
    assert {slot: cluster.owner(slot) for slot in slots} == homes
