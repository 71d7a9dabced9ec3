"""A queue has one message of a unique key at a time: what the center promises of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kombu_toc import (
    DEAD,
    WAITING,
    Delivery,
    Found,
    RateLimitedError,
    ServerError,
    TimeoutCenter,
    TraitError,
    Unique,
    UniqueError,
    center_for,
    reshard_topic,
)
from kombu_toc.center.pop import mark_calls
from kombu_toc.center.upkeep import ClaimSweep

from ..meta.test_readme import named
from ..support.cases import each, night
from ..support.inspection import check_slots, full_server, now_us
from ..support.servers import Server
from ..support.waiting import at_once
from .test_reshard import packed

HOUR = 3600.0


def put(center: TimeoutCenter, id: str, key: Any = "k", /, **how: Any) -> str | None:
    """Put a message whose body is its id. `how`: of Unique, and of put."""
    said = {name: how.pop(name) for name in Unique._fields[1:] if name in how}
    return center.put("mail", id, id.encode(), unique=Unique(key, **said), **how).id


def found(center: TimeoutCenter, id: str) -> Found:
    [one] = center.get(id, topic="mail")
    return one


def bodies(center: TimeoutCenter) -> list[bytes]:
    return sorted(one.body for one in center.scan("mail", limit=1000).messages)


def pop(center: TimeoutCenter, **how: Any) -> Delivery:
    [delivery] = center.pop("mail", **how).messages
    return delivery


def run_out(center: TimeoutCenter) -> None:
    while messages := center.pop("mail", 1000).messages:
        center.ack(messages)


def claims(center: TimeoutCenter) -> dict[str, str]:
    """Unique key -> the id under which its message is kept."""
    topic = center.registry.topic("mail")
    return {
        name.decode(): value.decode().split(",", 5)[5]
        for slot in topic.all_slots()
        for name, value in center.client.hgetall(slot.claims).items()
    }


def expire_lease(center: TimeoutCenter, delivery: Delivery) -> None:
    """Let the lease of a delivery be one that ended long ago."""
    slot = center.registry.topic("mail").slot(delivery.slot)
    center.client.zadd(slot.prepare, {delivery.id: delivery.lease_token})


# -- what is kept


@pytest.mark.cluster
@pytest.mark.parametrize("key", ["k", 42, "ключ, ~ und so;~@!{}", "x" * 500])
def test_of_a_unique_key_a_queue_has_one_message_at_a_time(center, key):
    assert put(center, "a", key) == "a"
    assert put(center, "b", key) == "a"
    assert put(center, "c", f"{key}!") == "c"
    assert bodies(center) == [b"a", b"c"]
    check_slots(center, "mail")
    assert center.admin.check("mail") == []


def test_a_message_tells_its_unique_key(center):
    put(center, "a", "k, 1", delay=HOUR)
    put(center, "b", "k, 1", delay=HOUR, basis="other")
    put(center, "c", "x" * 500, delay=HOUR)
    center.put("mail", "d", b"", delay=HOUR)
    assert [found(center, id).unique for id in "ab"] == ["k, 1", "k, 1"]
    assert found(center, "c").unique.startswith("h.")
    assert found(center, "d").unique is None


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("until", "holds"), [("start", False), ("done", True), (None, True), (HOUR, True)]
)
def test_a_claim_holds_until_the_message_starts_or_is_done_or_for_a_time(center, until, holds):
    put(center, "a", until=until)
    delivery = pop(center)
    assert put(center, "b", until=until) == ("a" if holds else "b")
    center.ack([delivery])
    if holds:
        assert put(center, "c", until=until) == ("a" if until == HOUR else "c")


def test_a_throttle_ends_with_its_time_whatever_waits(center, client):
    put(center, "a", until=0.3, delay=HOUR)
    assert put(center, "b", until=0.3, delay=HOUR) == "a"
    began = now_us(client)
    while put(center, "b", until=0.3, delay=HOUR) == "a":
        assert now_us(client) - began < 10_000_000
    assert bodies(center) == [b"a", b"b"]


def test_a_throttle_lasts_no_longer_although_the_clock_is_set_back(center, client):
    put(center, "a", until=HOUR)
    center.ack([pop(center)])
    slot = center.registry.topic("mail").slot_for("k")
    mode, first, ends, rest = client.hget(slot.claims, "k").decode().split(",", 3)
    moved = (mode, str(int(first) + 10**12), str(int(ends) + 10**12), rest)
    client.hset(slot.claims, "k", ",".join(moved))
    assert put(center, "b", until=HOUR) == "a"
    _, first, ends, _ = client.hget(slot.claims, "k").decode().split(",", 3)
    now = now_us(client)
    assert now - 10**7 < int(first) <= now
    assert int(ends) - int(first) == HOUR * 1e6


@pytest.mark.cluster
@pytest.mark.parametrize("until", ["start", "done", HOUR])
def test_what_was_cancelled_purged_or_is_dead_has_no_key(center, until):
    ends = {
        "cancel": lambda: center.cancel("a"),
        "purge": lambda: center.queues.purge("mail"),
        "dead": lambda: center.reject(pop(center), requeue=False),
        "bury": lambda: center.bury(pop(center), reason="failed"),
        "delete": lambda: center.queues.delete("mail"),
        "cancel what was found": lambda: center.cancel(center.get("a")),
    }
    for how, end in ends.items():
        assert put(center, "a", until=until) == "a", how
        end()
        assert put(center, "b", until=until) == "b", how
        assert center.cancel("b")[0].deleted
        center.dead.purge("mail")


def test_what_has_expired_has_no_key(center, client):
    put(center, "a", expiration=0.0)
    put_at = now_us(client)
    while now_us(client) < put_at + 2000:
        pass  # it expires in the millisecond behind its due time
    assert center.pop("mail").expired == ["a"]
    assert found(center, "a").state == DEAD
    assert put(center, "b") == "b"


def test_a_message_that_comes_back_has_its_key_until_it_is_done(center):
    put(center, "a")
    delivery = pop(center)
    expire_lease(center, delivery)
    assert put(center, "b") == "a"
    again = pop(center)
    center.reject(again, requeue=True)
    assert put(center, "c") == "a"
    center.release([pop(center)])
    assert put(center, "d") == "a"
    center.ack([pop(center)])
    assert put(center, "e") == "e"


@pytest.mark.parametrize("acknowledged", [True, False], ids=["early", "late"])
def test_a_dead_workers_key_is_free_for_who_asks_although_nobody_consumes(
    server: Server, client: redis.Redis, acknowledged: bool
) -> None:
    center = center_for(server.toc_url)
    center.queues.declare("mail", visibility=1)
    assert put(center, "a", until="done") == "a"
    held = pop(center)
    if acknowledged:  # before it ran, as a worker does
        center.runner.run_all(mark_calls(center.registry.topic_of, [held]))
    assert put(center, "b") == "a"
    time.sleep(1.2)  # its lease ends
    began = time.monotonic()
    assert put(center, "b") == ("b" if acknowledged else "a")
    assert time.monotonic() - began < 3
    assert acknowledged or found(center, "a").state == WAITING
    assert bodies(center) == [b"b" if acknowledged else b"a"]
    center.client.close()


def test_a_dead_message_that_is_replayed_does_not_stand_in_the_way(center):
    put(center, "a")
    center.reject(pop(center), requeue=False)
    center.dead.requeue("mail")
    assert put(center, "b") == "b"
    assert bodies(center) == [b"a", b"b"]
    assert put(center, "c") == "b"


@pytest.mark.parametrize("how", ["lose", "reject", "release"])
def test_a_message_that_has_started_does_not_claim_again_until_it_starts(center, how):
    put(center, "a", until="start")
    delivery = pop(center)
    if how == "lose":
        expire_lease(center, delivery)
        center.pop("mail", 0)
    elif how == "reject":
        center.reject(delivery, requeue=True, backoff=HOUR)
    else:
        center.release([delivery])
    assert found(center, "a").state == WAITING
    assert put(center, "b", until="start") == "b"


# -- replace, push back, raise


@pytest.mark.cluster
def test_a_message_takes_the_place_of_the_one_that_waits_and_its_id(center, client):
    put(center, "a", delay=HOUR, priority=9)
    before = now_us(client)
    assert put(center, "b", conflict="replace", delay=60.0) == "a"
    one = found(center, "a")
    assert (one.body, one.state, one.step) == (b"b", WAITING, 0)
    assert abs(one.time_us - before - 60_000_000) < 10_000_000
    assert bodies(center) == [b"b"]
    assert put(center, "c", conflict="replace") == "a"
    delivery = pop(center)
    assert (delivery.id, delivery.body) == ("a", b"c")
    center.ack([delivery])
    check_slots(center, "mail")
    assert center.admin.check("mail") == []


def test_what_has_started_is_neither_replaced_nor_pushed_back(center):
    put(center, "a")
    pop(center)
    for conflict in ("replace", "push_back"):
        with pytest.raises(UniqueError, match="has started") as caught:
            put(center, "b", until="done", conflict=conflict)
        assert (caught.value.id, caught.value.key, caught.value.topic) == ("a", "k", "mail")
        assert caught.value.has_started
    assert bodies(center) == [b"a"]


@pytest.mark.cluster
def test_a_push_back_only_makes_it_later_and_no_later_than_at_most(center, client):
    how: dict[str, Any] = {"conflict": "push_back", "at_most": 100.0}
    first = now_us(client)
    put(center, "a", delay=30.0, **how)

    def due() -> float:
        return (found(center, "a").time_us - first) / 1e6

    for delay, expected in ((60.0, 60), (10.0, 60), (None, 60), (99.0, 99), (HOUR, 100)):
        assert put(center, "b", delay=delay, **how) == "a"
        assert expected - 0.01 <= due() < expected + 10
    for _ in range(50):
        put(center, "c", delay=HOUR, **how)
    assert 100 <= due() < 100 + 5
    assert put(center, "d", delay=2 * HOUR, conflict="push_back") == "a"
    assert due() >= 2 * HOUR
    assert bodies(center) == [b"d"]


def test_who_wants_an_error_gets_it_with_the_id(center):
    put(center, "a", delay=HOUR)
    with pytest.raises(UniqueError, match=r"has a message 'a' with the unique key 'k'.*waits") as e:
        put(center, "b", conflict="raise")
    assert (e.value.id, e.value.has_started) == ("a", False)


# -- bad input


@each(
    ("said", "message"),
    [
        ({"key": ""}, "message 'a': its unique key is empty"),
        ({"key": 1.5}, "the key must be text, a whole number or a UUID, not 1.5"),
        ({"until": "soon"}, "until must be 'start', 'done' or a number of seconds from 0 to"),
        ({"until": 0}, "until must be more than 0 seconds"),
        ({"until": float("nan")}, "until must be"),
        ({"until": float("inf")}, "until must be"),
        ({"until": True}, "until must be"),
        ({"conflict": "drop"}, "conflict must be one of keep, replace, push_back, raise, not"),
        ({"at_most": 5}, "at_most goes with conflict push_back, not keep"),
        ({"at_most": -1, "conflict": "push_back"}, "at_most must be a number of seconds"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_put(center, said, message):
    with pytest.raises(TraitError, match=message):
        center.put("mail", "a", b"", unique=Unique(**{"key": "k", **said}))
    assert center.scan("mail").messages == []


# -- identity


def test_an_id_that_is_used_again_does_not_inherit_a_claim(center):
    put(center, "a")
    center.ack([pop(center)])
    center.put("mail", "a", b"plain", basis="k", delay=HOUR)
    assert put(center, "b") == "b"
    assert bodies(center) == [b"b", b"plain"]


def test_the_same_put_once_more_is_no_conflict(center):
    """By its token; another put of the same id and bytes is one."""
    for conflict in ("keep", "raise", "replace", "push_back"):
        assert put(center, "a", conflict=conflict, delay=HOUR, token="t") == "a"
    with pytest.raises(UniqueError):
        put(center, "a", conflict="raise", delay=HOUR)
    assert bodies(center) == [b"a"]


@pytest.mark.cluster
def test_a_message_with_another_slot_basis_has_a_claim_of_its_own(center):
    put(center, "a", basis="one")
    put(center, "b", basis="two")
    center.put("mail", "c", b"c", key="three", unique="k")
    assert put(center, "d", basis="one") == "a"
    assert center.put("mail", "e", b"", key="three", unique="k").id == "c"
    assert bodies(center) == [b"a", b"b", b"c"]


def test_two_queues_have_claims_of_their_own(center):
    assert center.put("one", "a", b"", unique="k").id == "a"
    assert center.put("two", "b", b"", unique="k").id == "b"


@pytest.mark.cluster
@pytest.mark.parametrize("conflict", ["keep", "raise"])
def test_of_many_that_put_at_once_one_is_added(center, conflict):
    added, errors = [], []

    def run(number: int) -> None:
        for n in range(50):
            try:
                if put(center, f"{n}-{number}", f"k{n}", conflict=conflict) == f"{n}-{number}":
                    added.append(n)
            except UniqueError as exc:
                errors.append(exc)

    at_once(run, range(4))
    assert sorted(added) == list(range(50))
    assert len(errors) == (150 if conflict == "raise" else 0)
    assert center.counts("mail").ready == 50


@pytest.mark.cluster
def test_of_many_that_replace_at_once_the_last_one_stays(center):
    def run(number: int) -> None:
        for n in range(50):
            put(center, f"{number}-{n}", conflict="replace", delay=HOUR)

    at_once(run, range(4))
    [body] = bodies(center)
    assert body.endswith(b"-49")


# -- number


@pytest.mark.cluster
def test_claims_that_hold_no_longer_are_swept_as_others_are_put(center):
    center.queues.declare("mail", slots=1)
    for n in range(300):
        put(center, f"m{n}", f"k{n}")
        center.ack([pop(center)])
    assert len(claims(center)) < 40
    for n in range(100):
        put(center, f"n{n}", f"k{n}", delay=HOUR)
    held = claims(center)
    assert {f"k{n}" for n in range(100)} <= held.keys()
    assert len(held) < 200
    assert put(center, "x", "k7") == "n7"


def test_a_sweep_leaves_nothing_behind_of_what_is_done(center, client):
    for n in range(250):
        put(center, f"m{n}", f"k{n}")
    put(center, "a", delay=HOUR)
    put(center, "b", "throttle", until=HOUR)
    run_out(center)
    assert len(claims(center)) == 252
    sweep = ClaimSweep(center.runner)
    topics = [center.registry.declared("mail")]
    assert topics[0].declaration.unique
    for n in range(100):
        sweep.run(topics, 10.0 * n)
    assert claims(center) == {"k": "a", "throttle": "b"}
    center.cancel("a")
    center.queues.purge("mail")
    assert sum(client.exists(slot.claims) for slot in topics[0].all_slots()) == 1


@pytest.mark.cluster
def test_a_sweep_goes_on_where_there_is_much_and_rests_else(center):
    center.queues.declare("mail", slots=1)
    for n in range(500):
        put(center, f"m{n}", f"k{n}")
    run_out(center)
    sweep = ClaimSweep(center.runner)
    topics = [center.registry.declared("mail")]
    for left in (400, 300, 200, 100, 0, 0):
        sweep.run(topics, 1.0)
        assert len(claims(center)) == left
    put(center, "a")
    center.ack([pop(center)])
    sweep.run(topics, 2.0)
    sweep.run(topics, 10.9)
    assert len(claims(center)) == 1
    sweep.run(topics, 11.0)
    assert claims(center) == {}


@pytest.mark.cluster
def test_a_queue_that_goes_away_by_itself_takes_its_claims_along(center, client):
    center.queues.declare("mail", slots=1, expires=60_000)
    put(center, "a")
    assert 0 < client.pttl(center.registry.topic("mail").slot(0).claims) <= 60_000


def test_a_put_that_is_repeated_finds_its_message_and_not_a_conflict(center):
    how = {"token": "t", "conflict": "raise"}
    assert put(center, "a", **how) == "a"
    center.ack([pop(center)])
    assert put(center, "a", **how) == "a"  # its reply was lost
    assert bodies(center) == []


def test_a_full_server_refuses_a_new_key_and_knows_the_ones_it_has(server, client):
    center = center_for(server.toc_url)
    put(center, "a", delay=HOUR)
    with full_server(client):
        with pytest.raises(ServerError, match="is full"):
            put(center, "b", "other")
        assert put(center, "b") == "a"
        assert put(center, "b", conflict="replace", delay=HOUR) == "a"
    assert bodies(center) == [b"b"]
    assert list(claims(center)) == ["k"]
    assert put(center, "c", "other") == "c"


@pytest.mark.one_server("its nodes would each need the user")
def test_who_may_not_sweep_puts_all_the_same(client):
    client.execute_command(
        *("ACL", "SETUSER", "sender", "on", ">pw", "~*", "+@all", "-hrandfield", "-info")
    )
    try:
        pool = client.connection_pool.connection_kwargs
        user = redis.Redis(pool["host"], pool["port"], username="sender", password="pw")
        sender = TimeoutCenter(user, grace=0)
        for n in range(30):
            assert put(sender, f"m{n}", f"k{n}", delay=HOUR) == f"m{n}"
            assert put(sender, "other", f"k{n}") == f"m{n}"
        user.close()
    finally:
        client.acl_deluser("sender")


# -- together with limits


@pytest.mark.cluster
@pytest.mark.parametrize("conflict", ["keep", "replace", "push_back", "raise"])
def test_what_waits_for_its_turn_in_a_lane_has_its_unique_key(center, conflict):
    center.queues.declare("mail", key_concurrency=1)
    for id, key in (("a", "k1"), ("b", "k2"), ("c", "k3")):
        put(center, id, key, key="customer")
    running = pop(center)
    assert center.pop("mail", 5).messages == []  # both have been looked at, and wait in the lane
    assert running.id == "a"
    again = {"key": "customer", "conflict": conflict, "until": "done"}
    if conflict == "raise":
        with pytest.raises(UniqueError, match="waits"):
            put(center, "d", "k2", **again)
    else:
        assert put(center, "d", "k2", **again) == "b"
    center.ack([running])
    got = []
    while messages := center.pop("mail", 5).messages:
        [one] = messages
        got.append((one.id, one.body))
        assert put(center, "e", {"b": "k2", "c": "k3"}[one.id], key="customer") == one.id
        center.ack([one])
    new = conflict in ("replace", "push_back")
    assert sorted(got) == [("b", b"d" if new else b"b"), ("c", b"c")]
    assert center.admin.check("mail") == []
    assert put(center, "f", "k2", key="customer") == "f"


@pytest.mark.parametrize("order", ["serial", None])
def test_a_key_is_held_while_its_task_has_a_place_and_until_it_is_freed(center, order):
    center.queues.declare("mail", slots=1, key_order=order, concurrency=1)
    put(center, "a", "k1", key="customer")
    put(center, "b", "k2", key="customer")
    first = pop(center)
    assert first.has_place and first.outlives_ack
    assert put(center, "x", "k1", key="customer") == "a"
    center.reject(first, requeue=True, backoff=0)
    assert put(center, "x", "k1", key="customer") == "a"
    assert center.cancel("b")[0].deleted
    assert put(center, "b2", "k2", key="customer") == "b2"
    again = pop(center)
    assert again.id == "a"
    center.reject(again, requeue=False)
    assert put(center, "c", "k1", key="customer") == "c"
    assert {pop(center).id} <= {"b2", "c"}


def test_what_may_not_be_put_claims_nothing_and_what_is_kept_does_not_count(center):
    center.queues.declare("mail", slots=1, put_rate="2/h")
    put(center, "a", "k1", delay=HOUR)
    for _ in range(3):
        assert put(center, "b", "k1") == "a"
        assert put(center, "b", "k1", conflict="replace", delay=HOUR) == "a"
    put(center, "c", "k2", until=HOUR)
    for _ in range(2):
        with pytest.raises(RateLimitedError):
            put(center, "d", "k3", until=HOUR)
    assert sorted(claims(center)) == ["k1", "k2"]
    assert bodies(center) == [b"b", b"c"]


# -- whatever happens


class Model:
    """What becomes of messages with unique keys, in the plainest way to write it."""

    def __init__(self) -> None:
        self.state: dict[str, str] = {}  #: id -> waiting, flying, dead; gone if it is not there
        self.body: dict[str, str] = {}
        self.started: set[str] = set()
        self.holder: dict[str, tuple[str, str]] = {}  #: key -> id, until

    def held(self, key: str) -> str | None:
        id, until = self.holder.get(key, ("", ""))
        state = self.state.get(id)
        if until == "done":
            return id if state in ("waiting", "flying") else None
        return id if state == "waiting" and id not in self.started else None

    def put(self, id: str, key: str, until: str, conflict: str) -> str:
        """The id that it has; or an error's name."""
        other = self.held(key)
        if other is None:
            self.state[id], self.body[id], self.holder[key] = "waiting", id, (id, until)
            return id
        if conflict == "keep":
            return other
        if conflict == "raise" or self.state[other] != "waiting":
            return "error"
        self.body[other], self.holder[key] = id, (other, until)
        self.started.discard(other)
        return other


def one_of(words: str) -> st.SearchStrategy[str]:
    return st.sampled_from(words.split())


events = st.one_of(
    st.tuples(
        *(st.just("put"), one_of("k1 k2 k3"), one_of("start done")),
        one_of("keep replace push_back raise"),
    ),
    st.tuples(one_of("pop ack back release die lose cancel replay"), st.integers(0, 3)),
)


def live_through(client, steps):
    client.flushall()
    center = TimeoutCenter(client, grace=0)
    center.queues.declare("mail", slots=4, retries=16)
    model = Model()
    flying: list[Delivery] = []
    for number, (what, *rest) in enumerate(steps):
        if what == "put":
            key, until, conflict = rest
            try:
                made = put(center, f"m{number}", key, until=until, conflict=conflict)
            except UniqueError as exc:
                assert exc.id == model.held(key)
                made = "error"
            assert made == model.put(f"m{number}", key, until, conflict)
            continue
        if what == "pop":
            for message in center.pop("mail", 1).messages:
                assert model.state[message.id] == "waiting"
                assert message.body.decode() == model.body[message.id]
                model.state[message.id] = "flying"
                model.started.add(message.id)
                flying.append(message)
        elif what == "cancel":
            waiting = sorted(id for id, state in model.state.items() if state == "waiting")
            for id in waiting[: rest[0]]:
                center.cancel(id)
                del model.state[id]
        elif what == "replay":
            center.dead.requeue("mail")
            dead = {id for id, state in model.state.items() if state == "dead"}
            model.state.update(dict.fromkeys(dead, "waiting"))
            model.holder = {k: held for k, held in model.holder.items() if held[0] not in dead}
        elif flying:
            message = flying.pop(rest[0] % len(flying))
            if what == "ack":
                center.ack([message])
                del model.state[message.id]
            elif what == "die":
                center.reject(message, requeue=False)
                model.state[message.id] = "dead"
            else:
                model.state[message.id] = "waiting"
                if what == "back":
                    center.reject(message, requeue=True, backoff=0)
                elif what == "release":
                    center.release([message])
                else:
                    expire_lease(center, message)
                    center.pop("mail", 0)
    assert {one.id: one.body.decode() for one in center.scan("mail", limit=100).messages} == {
        id: model.body[id] for id in model.state
    }
    assert center.admin.check("mail") == []


@pytest.mark.cluster
@pytest.mark.parametrize("examples", [100, night(200)])
def test_whatever_happens_a_key_is_held_by_what_is_still_there(client, examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(events, max_size=40))
    def run(steps):
        live_through(client, steps)

    run()


# -- another number of slots


@pytest.mark.cluster
@pytest.mark.parametrize("is_envelope", [True, False])
@pytest.mark.parametrize("slots", [1, 16])
def test_claims_go_along_with_another_number_of_slots(server, client, slots, is_envelope):
    """Whether the messages are moved, or stay where they are until they are delivered."""
    center = center_for(server.toc_url)
    center.queues.declare("mail", slots=4)
    keys = {f"m{n}": f"k{n}" for n in range(20)}

    def add(id: str, key: str, **how: Any) -> str | None:
        body = packed(id, **{"x-unique": key}) if is_envelope else b"plain"
        return center_for(server.toc_url).put("mail", id, body, unique=Unique(key, **how)).id

    for id, key in {"throttled": "throttle", "running": "run"}.items():
        add(id, key, until=HOUR if id == "throttled" else "done")
    held = {one.id: one for one in center.pop("mail", 2).messages}
    center.ack([held["throttled"]])
    for id, key in keys.items():
        add(id, key)
    keys |= {"throttled": "throttle", "running": "run"}

    def all_are_held() -> None:
        for id, key in keys.items():
            assert add("other", key) == id

    def reshard(**how: Any) -> bool:
        progress = lambda *how_far: all_are_held()  # noqa: E731
        return reshard_topic(center, "mail", slots, settle=0.0, on_progress=progress, **how).done

    done = reshard()
    all_are_held()
    if is_envelope:
        assert add("new", "k7", conflict="replace", until="done") == "m7"
    center.ack([held["running"]])
    assert add("next", "run") == "next"
    keys["next"] = keys.pop("running")
    reshard()
    all_are_held()
    run_out(center)
    assert done or reshard()
    assert add("later", "k3") == "later"
    assert add("other", "throttle") == "throttled"
    assert center.admin.check("mail") == []
    assert center.registry.declared("mail").declaration.draining_counts == ()


# -- docs/unique.md


def test_the_example_of_a_center_runs(center, capsys):
    exec(named("docs/unique.md", 'unique="weekly"'), {"center": center})
    assert capsys.readouterr().out.splitlines() == ["r1", "kept", "replaced", "b'wednesday'", "r1"]


@pytest.mark.cluster
@pytest.mark.parametrize(
    "one, other",
    [
        (("a\x1fb", "c"), ("a", "b\x1fc")),
        ((None, "a\x1fb"), ("a", "b")),
        ((None, "a\x1fb"), ("a\x1fb", "a\x1fb\x1f")),
        (("\x1f1", "a"), (None, "\x1f1\x1fa")),
    ],
)
def test_keys_and_slot_bases_are_told_apart_whatever_they_hold(center, one, other):
    center.queues.declare("mail", slots=1)
    for number, (basis, key) in enumerate((one, other)):
        assert center.put("mail", f"m{number}", b"", basis=basis, unique=key).id == f"m{number}"
        assert center.put("mail", "again", b"", basis=basis, unique=key).id == f"m{number}"
    shown = {found.id: found.unique for found in center.scan("mail").messages}
    assert shown == {"m0": one[1], "m1": other[1]}
