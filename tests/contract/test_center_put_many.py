"""Many messages put by one call: each as if it had been put alone, and an answer for each."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from kombu_toc import (
    ActionTimeError,
    MessageError,
    NewMessage,
    Put,
    PutManyError,
    ReplicationError,
    TimeoutCenter,
    TraitError,
    center_for,
    reshard_topic,
)
from kombu_toc.center import put as put_many
from kombu_toc.model import message as envelope

from ..support.cases import each, night
from ..support.fixtures import own_server
from ..support.inspection import calls_of, check_slots, residue
from ..support.proxy import Proxy
from ..support.servers import frozen
from .test_center_delivery import AT, fill, placed

HOUR = 3600.0

#: More than one call adds.
MANY = 3 * put_many.MESSAGES_PER_CALL + 7


def numbered(number: int = MANY, **more: object) -> list[NewMessage]:
    return [NewMessage(f"m{n}", b"%d" % n, **more) for n in range(number)]


def drained(center: TimeoutCenter, topic: str) -> list[tuple[str, bytes]]:
    """What is due, in the order in which it is delivered; it is acknowledged."""
    found = []
    while messages := center.pop(topic, 1000).messages:
        assert center.ack(messages) == len(messages)
        found += [(message.id, message.body) for message in messages]
    return found


# -- what is put


def test_each_message_is_answered_for_in_the_order_of_the_list(center, client):
    messages = numbered()
    answers = center.put_many("mail", messages)
    assert [answer.id for answer in answers] == [message.id for message in messages]
    assert all(isinstance(answer, Put) and answer.added and answer.now_us for answer in answers)
    check_slots(center, "mail")
    assert center.admin.check("mail") == []
    assert sorted(drained(center, "mail")) == sorted((m.id, m.body) for m in messages)
    assert residue(client) == []
    assert center.put_many("mail", []) == []
    assert [answer.id for answer in center.put_many("mail", iter([("a", b"")]))] == ["a"]


def test_a_message_may_be_a_mapping_or_a_tuple_or_have_names(center):
    at = int(time.time()) + 60
    center.put_many(
        "mail",
        [
            {"id": "a", "body": b"1", "delay": HOUR, "basis": "x", "priority": 9},
            ("b", b"2"),
            ("c", b"3", at),
            NewMessage("d", b"4", priority=3, basis="x"),
        ],
    )
    topic = center.registry.topic("mail")
    [a], [b], [c], [d] = (center.get(id, topic="mail") for id in "abcd")
    assert (a.slot, a.step, a.body) == (topic.slot_for("x").number, 3, b"1")
    assert abs(a.time_us / 1e6 - time.time() - HOUR) < 10
    assert (b.slot, b.step, b.body) == (topic.slot_for("b").number, 0, b"2")
    assert (c.time_us, c.body) == (at * 1_000_000, b"3")
    assert (d.slot, d.step, d.body) == (a.slot, 1, b"4")
    assert [id for id, _ in drained(center, "mail")] == ["b", "d"]


@pytest.mark.parametrize("there", [0, night(967), 61_888])
@pytest.mark.parametrize("scattered", [False, True])
def test_messages_with_one_action_time_keep_the_order_of_the_list(one, client, there, scattered):
    """K5, also among those of other times, and behind as many as there are"""
    slot = one.registry.topic("one").slot(0)
    fill(client, slot, there)
    ids = [f"{(number * 3701) % 4999}" for number in range(4999)]
    messages = [NewMessage(id, b"", at=AT / 1000) for id in ids]
    if scattered:
        for number in range(0, 4999, 3):
            messages.insert(2 * number, NewMessage(f"other {number}", b"", at=(AT + number) / 1000))
    assert all(answer.added for answer in one.put_many("one", messages))
    scores = placed(client, slot, ids)
    assert scores == sorted(set(scores))
    assert scores[-1] // 1000 - AT < 1.4 * (there + len(messages)) / 968 + 3
    if not there:  # what it was filled with is announced nowhere
        check_slots(one, "one")


def test_messages_for_now_keep_the_order_of_the_list(one):
    """K5: behind what was due before, a time that has passed among them"""
    one.put("one", "first", b"")
    messages = [
        NewMessage(f"{(number * 37) % 2003}", b"", **({"at": 1.0} if number % 3 else {}))
        for number in range(2003)
    ]
    one.put_many("one", messages)
    assert [id for id, _ in drained(one, "one")] == ["first", *(m.id for m in messages)]


def test_a_message_among_many_is_never_early(center, client):
    """A3"""
    now = time.time()
    times = [now + random.Random(7).uniform(0.05, 0.2) for _ in range(MANY)]
    center.put_many("mail", [(f"{n}", b"", at) for n, at in enumerate(times)])
    seen = 0
    while seen < MANY:
        assert time.time() < now + 30
        popped = center.pop("mail", 1000)
        for message in popped.messages:
            assert popped.now_us / 1e6 >= times[int(message.id)]
        seen += center.ack(popped.messages)


@pytest.mark.one_server("on a Cluster nobody knows there what is claimed, and it stays announced")
def test_what_is_due_first_is_announced(center, client):
    """The earliest of each slot; what a slot had announced later is taken back."""
    center.queues.declare("mail", slots=2)
    center.put_many("mail", [(f"a{n}", b"", time.time() + HOUR + n) for n in range(100)])
    check_slots(center, "mail")
    wake = center.keys.wake("mail")
    later = client.zrange(wake, 0, -1)
    center.put_many("mail", [(f"b{n}", b"", time.time() + 60 + (n * 37) % 100) for n in range(100)])
    check_slots(center, "mail")
    assert client.zcard(wake) == 2
    assert not set(later) & set(client.zrange(wake, 0, -1))
    center.put_many("mail", [(f"c{n}", b"", time.time() + 2 * HOUR) for n in range(100)])
    assert client.zcard(wake) == 2


def test_each_entry_is_a_message_whatever_its_id_and_its_bytes_are(center):
    """As by put: what is there, and what comes twice, gets copies"""
    center.put("mail", "a", b"0")
    center.put("mail", "c", b"1")
    puts = [
        *[("a", b"1"), ("b", b"1"), ("b", b"2"), ("b", b"1"), ("c", b"1"), ("b", b"3")],
        *[("d", b"1"), ("d", b"1"), ("a", b"2"), ("e", b"1")],
    ]
    answers = center.put_many("mail", puts)
    assert [answer.outcome for answer in answers] == ["added"] * len(puts)
    assert [answer.id.partition("#")[0] for answer in answers] == [id for id, _ in puts]
    assert len({answer.id for answer in answers}) == len(puts)
    there = [(id.partition("#")[0], body) for id, body in drained(center, "mail")]
    assert sorted(there) == sorted([("a", b"0"), ("c", b"1"), *puts])


def test_copies_keep_the_order_of_the_list(one):
    """They come after the others, for they are put then."""
    one.put_many("one", [("a", b"%d" % n) for n in range(9)] + [("b", b"9")])
    assert [body for _, body in drained(one, "one")] == [
        b"0",
        b"9",
        *(b"%d" % n for n in range(1, 9)),
    ]


def test_an_id_in_several_slots_is_several_messages(center):
    """As by put: another slot basis, another slot"""
    topic = center.registry.topic("mail")
    other = next(f"{n}" for n in range(99) if topic.slot_for(f"{n}") != topic.slot_for("a"))
    answers = center.put_many("mail", [("a", b"1"), NewMessage("a", b"1", basis=other)])
    assert [answer.id for answer in answers] == ["a", "a"]
    assert len(center.get("a")) == 2  # it looks for one with a slot basis, too


def test_a_list_with_a_token_is_repeated_by_its_caller(center):
    """Whatever has become of its messages; another list is another one."""
    messages = [*numbered(delay=HOUR), NewMessage("m1", b"1", delay=HOUR), ("now", b"")]
    first = center.put_many("mail", messages, token="import 7")
    assert all(answer.added for answer in first)
    assert [one.id for one in center.pop("mail", 2).messages] == ["now"]
    again = center.put_many("mail", messages, token="import 7")
    assert [answer.id for answer in again] == [answer.id for answer in first]
    assert {answer.outcome for answer in again} == {"repeated"}
    assert center.counts("mail").scheduled == len(messages) - 1
    assert all(answer.added for answer in center.put_many("mail", messages[:9], token="import 8"))
    assert all(answer.added for answer in center.put_many("mail", messages[:9]))


def test_an_entry_may_have_a_token_of_its_own(center):
    """As of put."""
    center.put("mail", "a", b"1", token="t")
    answers = center.put_many("mail", [NewMessage("a", b"1", token="t"), ("a", b"1")])
    assert [answer.outcome for answer in answers] == ["repeated", "added"]


def test_a_list_goes_beside_what_is_in_flight_or_dead(center):
    center.put_many("mail", [("a", b"1"), ("b", b"1")])
    for message in center.pop("mail", 2).messages:
        if message.id == "b":
            center.reject(message, requeue=False)
    answers = center.put_many("mail", [("a", b"1"), ("b", b"1"), ("a", b"3")])
    assert all(answer.added for answer in answers)
    assert center.counts("mail").waiting == 3


def test_it_is_counted(center):
    center.put("mail", "m0", b"another")
    before = center.metrics.counts(center.registry.topic("mail")).put
    center.put_many("mail", numbered(), token="t")
    center.put_many("mail", numbered(), token="t")
    center.put_many("mail", numbered(5))
    assert center.metrics.counts(center.registry.topic("mail")).put - before == MANY + 5


def test_bodies_may_be_of_any_size(center, client):
    bodies = [b"", b"x" * 3_000_000, b"y" * 999_999, *[b"z" * 400_000] * 9, b"\0\r\n$5\r\n"]
    center.put_many("mail", [(f"{n}", body) for n, body in enumerate(bodies)])
    assert dict(drained(center, "mail")) == {f"{n}": body for n, body in enumerate(bodies)}


def test_a_server_that_has_just_come_knows_no_script(center, client):
    client.script_flush()
    assert all(answer.added for answer in center.put_many("mail", numbered()))


def test_a_topic_that_expires_goes_with_what_was_put_together(center, client):
    center.queues.declare("reply", expires=60_000)
    center.put_many("reply", numbered(20))
    keys = [key for key in client.scan_iter() if b"reply" in key and b"counted" not in key]
    assert len(keys) > 8
    assert all(50_000 < client.pttl(key) <= 60_000 for key in keys)
    assert len(center.get("m3", topic="reply")) == 1


@pytest.mark.one_server("messages are not moved from node to node")
def test_a_topic_that_is_resharded_gets_them_where_they_belong(center):
    def packed(number: int) -> list[tuple[object, ...]]:
        ids = [f"m{n}" for n in range(number)]
        messages = [{"headers": {"id": id}, "properties": {}, "body": b"[]"} for id in ids]
        bodies = [envelope.pack(message, deflate=False) for message in messages]
        return [(id, body, None, HOUR) for id, body in zip(ids, bodies, strict=True)]

    center.queues.declare("mail", slots=2)
    center.put_many("mail", packed(50))
    reshard_topic(center, "mail", 8, settle=0.0)
    center.put_many("mail", packed(60)[50:])
    assert [counts.scheduled > 0 for counts in center.queues.counts_by_slot("mail")] == [True] * 8
    assert center.counts("mail").scheduled == 60


def test_messages_have_traits_of_their_own(center, client):
    """Beside others that have none, also if they are put apart."""
    center.put("mail", "c", b"0")
    center.put_many(
        "mail",
        [
            NewMessage("a", b"1", visibility=5),
            ("b", b"1"),
            {"id": "c", "body": b"1", "max_lease": 9, "expiration": 60},
            {"id": "d", "body": b"1", "visibility": 7.5, "expiration": 60},
        ],
    )
    check_slots(center, "mail")
    messages = {one.id[:1] + one.body.decode(): one for one in center.pop("mail", 9).messages}
    own = {
        name: (one.visibility, bool(one.ends_us), bool(one.expires_us))
        for name, one in messages.items()
    }
    assert own == {
        "a1": (5.0, False, False),
        "b1": (None, False, False),
        "c0": (None, False, False),
        "c1": (None, True, True),
        "d1": (7.5, False, True),
    }
    assert center.ack(messages.values()) == 5
    assert residue(client) == []


@pytest.mark.parametrize("other", [[], [("late", b"first")]])
def test_a_trait_that_makes_no_sense_says_which_and_nothing_is_put(center, other):
    with pytest.raises(TraitError, match=r"^message \d \('late'\): visibility must be"):
        center.put_many("mail", [*numbered(3), *other, NewMessage("late", b"", visibility=-1)])
    assert center.counts("mail") == (0, 0, 0, 0)


def test_what_an_expired_slot_left_is_no_trait_of_a_later_message(center, client):
    topic = center.queues.declare("reply", slots=1, expires=60_000)
    client.hset(topic.slot(0).tokens, "a", ";v5000")
    center.put_many("reply", [("a", b"1")])
    [message] = center.pop("reply").messages
    assert message.visibility is None


# -- how


@own_server
@pytest.mark.one_server("commands are counted at it")
def test_a_slot_takes_one_call_and_all_leave_together(center, client):
    center.queues.declare("mail", slots=4)
    center.put_many("mail", numbered(10))
    client.config_resetstat()
    center.put_many("mail", [NewMessage(f"n{n}", b"", delay=n) for n in range(1000)])
    assert calls_of(client) == 4
    assert client.info("commandstats")["cmdstat_hset"]["calls"] == 4
    slots = map(center.registry.topic("mail").slot, range(4))
    assert sum(client.hlen(slot.body) for slot in slots) == 1010


@pytest.mark.one_server("commands are counted at it")
@pytest.mark.parametrize("there", [1000, 62_000])
def test_it_looks_for_few_places_however_many_have_their_time(one, client, there):
    fill(client, one.registry.topic("one").slot(0), there)
    client.config_resetstat()
    one.put_many("one", numbered(at=AT / 1000))
    stats = client.info("commandstats")
    used = ("cmdstat_zrevrangebyscore", "cmdstat_zcount")
    assert sum(stats[name]["calls"] for name in used if name in stats) <= 10 * 25


# -- what cannot be put


@each(
    "wrong, text",
    [
        ("m", r"message 3 is a str; give a NewMessage, a mapping or a tuple"),
        (("a",), r"message 3 is a tuple of 1; give"),
        (("a", b"", 1, 1, "", 1, "", 1, 1, 1, 1, 1, 1, 1), r"message 3 is a tuple of 14; give"),
        ({"id": "a"}, r"message 3 is without body; give"),
        ({"id": "a", "body": b"", "when": 5}, r"message 3 is with when; give .* at, delay"),
        ((7, b""), r"message 3: its id must be a str, not 7"),
        (("a", "text"), r"message 3 \('a'\): its body must be bytes, not a str; encode it"),
        (("a", b"", 5.0, 5.0), r"message 3 \('a'\): it has at and delay; give one of them"),
        (("a", b"", "now"), r"message 3 \('a'\): at must be a number of seconds, not 'now'"),
        (("a", b"", None, True), r"message 3 \('a'\): delay must be a number of seconds"),
        (NewMessage("a", b"", priority="9"), r"message 3 \('a'\): its priority must be an int"),
        (NewMessage("a", b"", basis=7), r"message 3 \('a'\): its basis must be a str, not 7"),
        (NewMessage("a", b"", token=7), r"message 3 \('a'\): its token must be a str, not 7"),
    ],
)
def test_what_is_wrong_says_which_and_nothing_is_put(center, client, wrong, text):
    with pytest.raises(MessageError, match=text + r".*; nothing was put$"):
        center.put_many("mail", [*numbered(3), wrong, *numbered(3)])
    assert center.counts("mail") == (0, 0, 0, 0)


@pytest.mark.parametrize("when", [{"at": 9.1e9}, {"delay": 9e9}, {"at": float("nan")}])
def test_a_time_that_is_none_says_which_and_nothing_is_put(center, when):
    with pytest.raises(ActionTimeError, match=r"^message 3 \('late'\): .*; nothing was put$"):
        center.put_many("mail", [*numbered(3), NewMessage("late", b"", **when)])
    assert center.counts("mail") == (0, 0, 0, 0)


# -- what fails


def test_a_full_server_says_which_were_not_put(center, client, full):
    center.put_many("mail", numbered(100, delay=HOUR), token="t")
    full()
    # Those that are there need no memory.
    again = center.put_many("mail", numbered(100, delay=HOUR), token="t")
    assert {answer.outcome for answer in again} == {"repeated"}
    messages = numbered(delay=HOUR)
    with pytest.raises(PutManyError, match=r"number \d+ \('m\d+'\): .*'maxmemory'") as caught:
        center.put_many("mail", messages, token="t")
    results = caught.value.results
    assert len(results) == MANY
    assert all(isinstance(result, Exception) for result in results[100:])
    assert center.counts("mail").scheduled == 100
    assert f"{sum(isinstance(r, Exception) for r in results)} of {MANY} mess" in str(caught.value)
    client.config_set("maxmemory", "0")
    answers = center.put_many("mail", messages, token="t")
    assert sum(answer.added for answer in answers) == MANY - 100
    check_slots(center, "mail")


def test_of_copies_too(center, client, full):
    """They are put one by one, after the others."""
    center.put_many("mail", [("a", b"1", 1e9), ("b", b"1", 1e9)])
    full()
    with pytest.raises(PutManyError, match=r"2 of 2 messages .* number 0 \('a'\)"):
        center.put_many("mail", [("a", b"2"), ("a", b"3")])
    client.config_set("maxmemory", "0")
    assert sum(answer.added for answer in center.put_many("mail", [("a", b"2"), ("a", b"3")])) == 2


def test_nothing_more_is_sent_when_some_were_refused(center, full, monkeypatch):
    monkeypatch.setattr(put_many, "MESSAGES_TOGETHER", 10)
    center.queues.declare("mail", slots=8)
    full()
    with pytest.raises(PutManyError) as caught:
        center.put_many("mail", numbered(200))
    unsent = [r for r in caught.value.results if "it was not sent" in str(r)]
    assert 100 < len(unsent) < 200


@pytest.mark.one_server("the proxy that loses replies stands before one")
def test_a_lost_reply_is_told_and_the_list_can_be_put_again(server, client, center):
    center.queues.declare("mail", slots=2)
    center.put_many("mail", numbered(10, delay=HOUR))
    with Proxy(server.port) as proxy:
        behind = center_for(proxy.toc_url)
        behind.put_many("mail", numbered(10, delay=HOUR), token="t")
        messages = [*numbered(200, delay=HOUR), NewMessage("last", b"the only one", delay=HOUR)]
        proxy.drop_replies(b"the only one")
        with pytest.raises(PutManyError, match="not put, or perhaps not") as caught:
            behind.put_many("mail", messages, token="t")
        assert len(caught.value.results) == 201
        there = center.counts("mail").scheduled
        assert 11 < there <= 211
        again = behind.put_many("mail", messages, token="t")
        assert sum(answer.outcome == "repeated" for answer in again) == there - 10
    assert center.counts("mail").scheduled == 211


@contextmanager
def replies_lost(center: TimeoutCenter, *, at: int = 0) -> Iterator[None]:
    """Lose the replies to the calls that leave together, from the one of that number on: they
    have run. (On a Cluster no proxy stands between.)"""
    executor = center.runner.executor
    replies, number = executor.replies, 0

    def lost(calls):
        nonlocal number
        found = replies(calls)
        if calls[0].script.name in ("put_many", "put", "put_special"):
            number += 1
            if number > at:
                error = redis.ConnectionError("the connection was cut")
                if len(calls) == 1 or not center.runner.clustered:
                    raise error
                return [error] * len(calls)
        return found

    executor.replies = lost
    try:
        yield
    finally:
        del executor.replies


@pytest.mark.parametrize("number", [3, MANY])
def test_what_was_consumed_before_a_list_is_repeated_is_not_added_again(center, number):
    """Its replies were lost; another process repeats it, by its token."""
    messages = [*numbered(number), ("m0", b"0"), ("m0", b"another")]
    with replies_lost(center), pytest.raises(PutManyError) as caught:
        center.put_many("mail", messages, token="t")
    assert all(isinstance(result, Exception) for result in caught.value.results)
    other = TimeoutCenter(center.client, grace=0)
    consumed = len(drained(other, "mail"))
    answers = other.put_many("mail", messages, token="t")
    assert sum(answer.added for answer in answers) == len(messages) - consumed
    assert len(drained(other, "mail")) == len(messages) - consumed


def test_a_list_that_is_repeated_adds_what_was_not_added(center, full):
    messages = numbered(30)
    full()
    with pytest.raises(PutManyError):
        center.put_many("mail", messages, token="t")
    center.client.config_set("maxmemory", "0")
    assert all(answer.added for answer in center.put_many("mail", messages, token="t"))
    assert len(drained(center, "mail")) == 30


@pytest.mark.one_server("a call of one server is repeated")
def test_a_call_of_a_list_that_the_client_repeats_adds_nothing(center):
    """As redis-py does after a lost reply: whatever has become of its messages."""
    run = center.runner.executor.replies

    def twice(calls):
        run(calls)
        if calls[0].script.name in ("put_many", "put", "put_special"):
            center.runner.executor.replies = run
            assert len(drained(TimeoutCenter(center.client, grace=0), "mail")) in (30, 1)
            center.runner.executor.replies = twice
        return run(calls)

    center.runner.executor.replies = twice
    try:
        answers = center.put_many("mail", [*numbered(30), ("m1", b"1")])
    finally:
        del center.runner.executor.replies
    assert all(answer.added for answer in answers)
    assert center.counts("mail").waiting == 0


def test_what_is_remembered_of_lists_is_bounded_and_goes(center, client):
    center.queues.declare("mail", slots=2)
    for _ in range(300):
        center.put_many("mail", numbered(3))
        drained(center, "mail")
    kept = client.keys("*:sent:many:*")
    assert 1 <= len(kept) <= 2
    assert all(client.strlen(key) <= 2000 and 0 < client.ttl(key) <= 60 for key in kept)


def test_a_server_that_is_away_is_told_as_such():
    center = TimeoutCenter(redis.Redis(port=1))
    with pytest.raises(redis.ConnectionError):
        center.put_many("mail", numbered(3))


@pytest.mark.one_server("its replica is one server")
def test_it_waits_for_replicas_and_says_if_they_are_too_few(client, replica):
    with replica.client() as follower:
        center = TimeoutCenter(client, wait_replicas=1, wait_timeout=5)
        center.put_many("mail", numbered(100, delay=HOUR))
        assert TimeoutCenter(follower).counts("mail").scheduled == 100
    center.runner.wait_timeout = 0.05
    messages = numbered(200, delay=HOUR)
    with frozen(replica):
        for added in (200, 0):  # what is there already is waited for, too
            with pytest.raises(ReplicationError, match="only 0 of 1 replicas") as caught:
                center.put_many("mail", messages, token="t")
            assert sum(answer.added for answer in caught.value.results) == added
            client.connection_pool.disconnect()
        assert center.counts("mail").scheduled == 300


# -- acknowledging many


@own_server
@pytest.mark.one_server("commands are counted at it")
def test_many_are_acknowledged_in_calls_of_a_bounded_size(center, client):
    center.put_many("mail", numbered(5000))
    messages = center.pop("mail", 5000).messages
    center.release(messages[:1])
    assert center.ack(center.pop("mail", 1).messages) == 1  # the script is known
    client.config_resetstat()
    assert center.ack(messages) == 4999
    assert calls_of(client) == 5
    assert residue(client) == []
