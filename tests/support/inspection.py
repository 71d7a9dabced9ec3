"""What the tests of the center look at in Redis: keys, ids, announcements."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import redis

from kombu_toc import Delivery, TimeoutCenter, Topic
from kombu_toc.center.calls import PopRequest, PutRequest
from kombu_toc.model import scores
from kombu_toc.model.topic import base_of
from kombu_toc.scripts.call import ScriptCall

from .servers import Server


def put_call(center: TimeoutCenter, topic: Topic, id: str, body: bytes, **how: Any) -> ScriptCall:
    """The call that puts a message."""
    return center.commands.put(topic, PutRequest(id, body, **how))


def pop_call(center: TimeoutCenter, topic: Topic, *slots: Any, **how: Any) -> ScriptCall:
    """The call that pops messages."""
    return center.commands.pop(topic, PopRequest(center.deliveries.names.next(), *slots, **how))


def put_some(
    center: TimeoutCenter,
    queue: str,
    which: int | Iterable[str],
    prefix: str = "m",
    body: bytes = b"",
    **how: Any,
) -> None:
    """Put messages, one after the other. which: their ids, or how many: m0, m1, ..."""
    for id in [f"{prefix}{n}" for n in range(which)] if isinstance(which, int) else which:
        center.put(queue, id, body, **how)


def delivered(
    center: TimeoutCenter, queue: str = "one", id: str = "x", body: bytes = b"", **put: Any
) -> Delivery:
    """A message that is put, as it is delivered."""
    center.put(queue, id, body, **put)
    [message] = center.pop(queue).messages
    return message


def end_lease(center: TimeoutCenter, *deliveries: Delivery) -> None:
    """Let leases end now, so that nobody has to wait for it."""
    assert center.extend(deliveries, 0) == []


@contextmanager
def full_server(client: redis.Redis, most: int = 1) -> Iterator[None]:
    """In this block the server refuses whatever takes memory. most: bytes that it may have"""
    client.config_set("maxmemory", most)
    try:
        yield
    finally:
        client.config_set("maxmemory", 0)


def now_us(client: redis.Redis) -> int:
    """The server's clock."""
    seconds, rest = client.time()
    return seconds * 1_000_000 + rest


def residue(client: redis.Redis) -> list[str]:
    """Every key but the table of topics, what was counted, and what :func:`is_memory`: what a
    drained server may not have."""
    left = []
    for key in client.scan_iter():
        if (
            is_memory(client, key)
            or key.endswith(b"}:topics")
            or _goes_with_a_look(client, key)
            or _names(client, key)
            or _counts(client, key)
        ):
            continue
        else:
            left.append(key.decode())
    return sorted(left)


def slot_keys(client: redis.Redis) -> list[str]:
    """The keys of slots: a drained topic has none."""
    return keys_left(client, "toc:{*:*}:*")


def keys_left(client: redis.Redis, pattern: str = "*") -> list[str]:
    """The keys, but for what :func:`is_memory`, and the counters of topics that are declared."""
    left = []
    for key in client.keys(pattern):
        if not (
            is_memory(client, key)
            or _goes_with_a_look(client, key)
            or _names(client, key)
            or _counts(client, key)
        ):
            left.append(key.decode())
    return sorted(left)


def is_memory(client: redis.Redis, key: bytes) -> bool:
    """Whether the latest puts of somebody, or a pop that has waited, are remembered there: that
    goes by itself within a minute; that of a put with a token, when the caller said. Or tasks that
    have failed: for a week."""
    if key.endswith((b"}:failed", b"}:failures", b"}:failing")):
        assert client.ttl(key) != -1, key
        return True
    if b"}:sent:" not in key:
        return False
    ttl = client.ttl(key)
    assert ttl != -1 if b"}:sent:=" in key else ttl in (-2, *range(61)), key  # -2: gone by now
    return True


def _goes_with_a_look(client: redis.Redis, key: bytes) -> bool:
    """Whether it is about leases, of which there are none: who looks at them next takes it out."""
    if key.endswith(b"}:watch"):
        return client.exists(key[: -len(b"watch")] + b"prepare") == 0
    return key.endswith(b"}:tokens") and client.hkeys(key) == [b"\n"]


def _names(client: redis.Redis, key: bytes) -> bool:
    """Whether these are the names of topics, of those that there are."""
    stem, mark, _ = key.partition(b"{toc}:names")
    return bool(mark) and {*client.zrange(key, 0, -1)} == {*client.hkeys(stem + b"{toc}:topics")}


def _counts(client: redis.Redis, key: bytes) -> bool:
    """Whether counters are kept there, and may be: their topic is declared, and those of a
    minute go by themselves; as does what tells who consumes."""
    stem, mark, rest = key.partition(b"{toc}:")
    kind, _, topic = rest.partition(b":")
    if mark and kind == b"consumers":
        assert client.ttl(key) in (-2, *range(61))  # or gone by now
        return True
    if not mark or kind not in (b"scripts", b"counted", b"minutes"):
        return False
    if kind == b"minutes":
        assert client.ttl(key) in (-2, *range(64 * 60 + 1))  # or gone by now
    return kind == b"scripts" or client.hexists(stem + b"{toc}:topics", topic)


def minutes_pass(center: TimeoutCenter, topic: str, minutes: int) -> int:
    """As if what was counted of a topic until now was counted so many minutes before; the latest
    of these minutes."""
    client, ring = center.client, center.keys.minutes(topic)
    then = 0
    counted = {int(one.split(b"minute ")[1].split()[0]): one for one in client.hvals(ring)}
    for minute, said in sorted(counted.items()):  # none is moved to where another one still is
        then = minute - minutes
        earlier = said.replace(b"minute %d" % minute, b"minute %d" % (minute - minutes))
        client.hdel(ring, str(minute % 64))
        client.hset(ring, str((minute - minutes) % 64), earlier)
    return then


def birth_of(delivery: Delivery) -> str:
    """What is the same of all deliveries of one message."""
    found = re.match("[^;~@!]*", delivery.birth)
    assert found is not None
    return found[0]


def calls_of(client: redis.Redis, *names: str) -> int:
    """How many of these commands, or else of scripts, the server has run since its statistics were
    reset."""
    stats, names = client.info("commandstats"), names or ("eval", "evalsha")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in names)


@contextmanager
def commands_run(server: Server) -> Iterator[list[list[str]]]:
    """The commands that a server runs meanwhile, each with its arguments; known at the end."""
    found: list[list[str]] = []
    with server.client() as watching, server.client() as marking, watching.monitor() as monitor:
        marking.echo("begin")
        yield found
        marking.echo("end")
        while monitor.next_command()["command"] != "ECHO begin":
            pass
        while (command := monitor.next_command()["command"]) != "ECHO end":
            found.append(command.split(" "))


def time_passes(center: TimeoutCenter, topic: str, seconds: float) -> None:
    """Make everything of a topic that much older: as if the server's clock had gone on."""
    client, ms = center.client, int(seconds * 1000)
    slots = list(center.registry.topic(topic).all_slots())
    with client.pipeline(transaction=False) as asked:
        for slot in slots:
            for key in (*slot.stores, slot.prepare, slot.dead, slot.pace, slot.waits):
                asked.zrange(key, 0, -1, withscores=True)
            asked.zrange(slot.announced_times, 0, -1, withscores=True)
            asked.hgetall(slot.tokens).hkeys(slot.body)
        replies = iter(asked.execute())
    with client.pipeline(transaction=False) as said:
        for slot in slots:
            # What waits in a lane keeps its place there; rates open, and have been used, earlier.
            for key in (*slot.stores, slot.prepare, slot.dead, slot.pace, slot.waits):
                there = next(replies)
                if key not in (slot.pace, slot.waits):
                    there = [one for one in there if one[1] >= 1000]  # what is due stays so
                if there:
                    said.zadd(key, {id: at - ms * 1000 for id, at in there})
            announced_times, tokens, ids = islice(replies, 3)
            said.delete(slot.announced_times)
            if then := [int(us) - ms * 1000 for _, us in announced_times]:
                said.zadd(slot.announced_times, {str(us): us for us in then})
            for id, token in tokens.items():
                said.hset(slot.tokens, id, older(token.decode(), seconds))
            # When each copy of an id was put, and where the message of the id itself waited then.
            for base in {base_of(id.decode()) for id in ids if b"#" in id}:
                for copy, note in client.hgetall(slot.copies(base)).items():
                    put_at, _, plain = note.partition(b":")
                    if float(plain or 0) >= 1000:
                        plain = b"%d" % (float(plain) - ms * 1000)
                    note = b"%d:%s" % (int(put_at) - ms * 1000, plain)
                    said.hset(slot.copies(base), copy, note)
        said.execute()
    wake = center.keys.wake(topic)
    for slot, us in announced(center, topic):
        client.zrem(wake, f"{slot}:{us}")
        client.zadd(wake, {f"{slot}:{us - ms * 1000}": us - ms * 1000})


def aged(delivery: Delivery, seconds: float) -> Delivery:
    """A delivery as it is known after :func:`time_passes`: some of its times are in its name."""
    return delivery._replace(birth=older(delivery.birth, seconds))


def older(token: str, seconds: float) -> str:
    """A token as it is after :func:`time_passes`."""
    ms = int(seconds * 1000)
    return re.sub(r"(?<=[;,]x)\d+|(?<=!)\d+$", lambda at: str(int(at[0]) - ms), token)


def announced(center: TimeoutCenter, topic: str) -> set[tuple[int, int]]:
    """The announcements in the topic's wake index: (slot, microseconds)."""
    members = center.client.zrange(center.keys.wake(topic), 0, -1)
    return {tuple(int(part) for part in member.split(b":")) for member in members}


def forget_late(center: TimeoutCenter, topic: str) -> None:
    """On a Cluster, take away what somebody has announced when somebody else had settled it
    already, as the next consumer does."""
    if center.clustered:
        armed = {
            (slot.number, int(us))
            for slot in center.registry.topic(topic).all_slots()
            for us in center.client.zrange(slot.announced_times, 0, -1)
        }
        for slot, us in announced(center, topic) - armed:
            center.client.zrem(center.keys.wake(topic), f"{slot}:{us}")


def check_slots(center: TimeoutCenter, topic: str) -> None:
    """Assert what holds between any two operations, while nobody has claimed anything.

    Every id is in exactly one sorted set and has a body, every body has an id, what is in flight
    and only what lives has a birth, only what lives has an error and only what is dead a reason,
    and every slot that has something waiting has announced its first time, or an earlier one.
    """
    client = center.client
    now = now_us(client)
    armed: set[tuple[int, int]] = set()
    every = list(client.scan_iter(count=1000))
    slots = list(center.registry.topic(topic).all_slots())
    with client.pipeline(transaction=False) as asked:
        for slot in slots:
            for key in (*slot.stores, slot.prepare, slot.dead, slot.announced_times):
                asked.zrange(key, 0, -1, withscores=True)
            asked.hkeys(slot.body).hgetall(slot.reasons).hkeys(slot.tokens)
        replies = iter(asked.execute())
    for slot in slots:
        stores = [next(replies) for _ in slot.stores]
        prepare, dead, announced_times, bodies, notes, tokens = islice(replies, 6)
        ids = [id for one in (*stores, prepare, dead) for id, _ in one]
        assert len(ids) == len(set(ids)), f"an id in two places: {sorted(ids)}"
        assert set(ids) == set(bodies)
        assert set(notes) <= set(ids)
        named = set(tokens) - {b"\n"}  # that is how long leases may be
        assert {id for id, _ in prepare} <= named <= set(ids)
        told = {id for id, note in notes.items() if not note.startswith(b"\n")}
        assert told == {id for id, _ in dead}
        sharing = [key for key in every if key.startswith(slot.copies("").encode())]
        recorded = {id for key in sharing for id in client.hkeys(key)}
        assert recorded == {id for id in ids if b"#" in id}
        times = [int(score) for _, score in announced_times]
        armed |= {(slot.number, us) for us in times}
        firsts = [scores.action_time(int(store[0][1])) for store in stores if store]
        if firsts:
            assert times, f"slot {slot.number} waits and has announced nothing"
            assert min(times) <= max(min(firsts), now)
        else:
            assert not times, f"slot {slot.number} has announced something and holds nothing"
    assert announced(center, topic) == armed


def blocked(client: redis.Redis) -> int:
    """How many clients the server keeps waiting."""
    return int(client.info("clients")["blocked_clients"])
