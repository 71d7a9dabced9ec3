"""What the tests of the center look at in Redis: keys, ids, announcements."""

from __future__ import annotations

import redis

from kombu_toc import TimeoutCenter, scores


def now_us(client: redis.Redis) -> int:
    """The server's clock."""
    seconds, rest = client.time()
    return seconds * 1_000_000 + rest


def residue(client: redis.Redis) -> list[str]:
    """Every key but the table of topics: what a drained server may not have."""
    return sorted(key.decode() for key in client.scan_iter() if not key.endswith(b"}:topics"))


def announced(center: TimeoutCenter, topic: str) -> set[tuple[int, int]]:
    """The announcements in the topic's wake index: (slot, microseconds)."""
    members = center.client.zrange(center.keys.wake(topic), 0, -1)
    return {tuple(int(part) for part in member.split(b":")) for member in members}


def check_slots(center: TimeoutCenter, topic: str) -> None:
    """Assert what holds between any two operations, while nobody has claimed anything.

    Every id is in exactly one sorted set and has a body, every body has an id, dead ids alone
    have reasons, and every slot that has something waiting has announced its first time, or an
    earlier one.
    """
    client = center.client
    now = now_us(client)
    armed: set[tuple[int, int]] = set()
    for slot in center.topic(topic).all_slots():
        sets = [client.zrange(key, 0, -1) for key in (*slot.stores, slot.prepare, slot.dead)]
        ids = [id for one in sets for id in one]
        assert len(ids) == len(set(ids)), f"an id in two places: {sorted(ids)}"
        assert set(ids) == set(client.hkeys(slot.body))
        assert set(sets[-1]) == set(client.hkeys(slot.reasons))
        copies = {id for id in ids if b"#" in id}
        recorded: set[bytes] = set()
        for key in client.scan_iter(slot.copies("*").replace("[", "\\["), count=1000):
            recorded |= client.smembers(key)
        assert recorded == copies
        times = [int(score) for _, score in client.zrange(slot.armed, 0, -1, withscores=True)]
        armed |= {(slot.number, us) for us in times}
        heads = [client.zrange(key, 0, 0, withscores=True) for key in slot.stores]
        firsts = [scores.action_time(int(head[0][1])) for head in heads if head]
        if firsts:
            assert times, f"slot {slot.number} waits and has announced nothing"
            assert min(times) <= max(min(firsts), now)
        else:
            assert not times, f"slot {slot.number} has announced something and holds nothing"
    assert announced(center, topic) == armed
