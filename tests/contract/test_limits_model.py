"""Topics that are limited, over sequences of operations that nobody thought of: no limit is
exceeded, nothing is lost, what may start starts, and what is counted is what there is.

Nothing sleeps: time passes by making everything in Redis older.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import redis

from kombu_toc import Delivery, TimeoutCenter
from kombu_toc.model.limits import SLOWER

from ..support.inspection import aged, time_passes
from .test_limits import put

pytestmark = pytest.mark.cluster

TOPIC = "model"
KEYS = ("", "a", "b", "c c", "d")
HOUR = 3600.0

#: Limits that a topic is given, and changed to.
LIMITS: list[dict[str, Any]] = [
    {"key_concurrency": 1},
    {"key_concurrency": 2, "concurrency": 3},
    {"concurrency": 2},
    {"key_order": "serial"},
    {"key_order": "serial", "key_retry": "later"},
    {"key_order": "serial", "concurrency": 2, "key_fair": True},
    {"key_fair": True, "key_weights": {"a": 3}},
    {"rate": "100/h", "rate_burst": 3},
    {"key_rate": "60/h", "key_burst": 2, "key_concurrency": 2},
    {"rate": "2000/h", "rate_burst": 5, "key_rate": "30/h", "key_fair": True, "concurrency": 4},
    {},
]
EVERY = {name: None for limits in LIMITS for name in limits}


@dataclass
class Known:
    """What the model knows of a live message."""

    key: str
    due: bool
    number: int  #: in the order of putting
    step: int


class Model:
    def __init__(self, client: redis.Redis, seed: int, slots: int) -> None:
        self.client = client
        self.chance = random.Random(seed)
        self.center = TimeoutCenter(client, grace=0)
        #: on a Cluster, what is counted for the whole queue needs a queue of one slot
        self.choices = [
            limits
            for limits in LIMITS
            if not (self.center.clustered and slots > 1 and {"rate", "concurrency"} & {*limits})
        ]
        self.limits = self.chance.choice(self.choices[:-1])
        self.center.queues.declare(TOPIC, slots=slots, retries=2, **self.limits)
        self.live: dict[str, Known] = {}
        self.running: dict[str, Delivery] = {}
        self.stale: list[Delivery] = []
        #: of which who had them before has said the end: they run, and do not come back
        self.marked: set[str] = set()
        self.dead: set[str] = set()
        self.numbers = 0
        #: key, '' for the queue -> when something started, in microseconds
        self.starts: dict[str, list[int]] = {}

    # -- operations

    def put(self) -> None:
        self.numbers += 1
        id, key = f"m{self.numbers}", self.chance.choice(KEYS)
        due = self.chance.random() < 0.8
        step = self.chance.choice((0, 0, 0, 3))
        more: dict[str, Any] = {} if due else {"delay": HOUR / 2}
        put(self.center, id, key, TOPIC, priority=step, **more)
        self.live[id] = Known(key, due, self.numbers, step)

    def puts(self) -> None:
        for _ in range(self.chance.randrange(1, 6)):
            self.put()

    def pop(self, limit: int | None = None) -> None:
        limit = limit or self.chance.choice((1, 2, 5, 50))
        popped = self.center.pop(TOPIC, limit)
        for id in popped.rolled_back:
            self.ended(id)
        for id in popped.died:
            self.died(id)
        for id in popped.bare:
            assert id in self.marked
            self.gone(id)
        for message in popped.messages:
            self.start(message, popped.now_us)
        assert len(popped.messages) <= limit
        if popped.more and len(popped.messages) < limit:
            self.pop(limit)
        elif len(popped.messages) < limit:
            self.nothing_may_start(popped.now_us)

    def pick(self) -> None:
        """By id, whatever is next."""
        some = [id for id in self.live if self.chance.random() < 0.3]
        popped = self.center.pop(TOPIC, self.chance.choice((None, 2)), ids=some, recover=0)
        for message in popped.messages:
            assert message.id in some
            self.start(message, popped.now_us)

    def start(self, message: Delivery, now: int) -> None:
        known = self.live[message.id]
        assert message.id not in self.running and message.id not in self.dead
        assert known.due
        limits, key = self.limits, known.key
        ran = Counter(self.live[id].key for id, one in self.running.items() if one.has_place)
        if "concurrency" in limits:
            assert ran.total() < limits["concurrency"]
        places = 1 if "key_order" in limits else limits.get("key_concurrency")
        assert message.has_place == bool(places or "concurrency" in limits)
        if key and places:
            assert ran[key] < places, (message, ran)
        if "rate" in limits:
            self.spaced("", limits["rate"], limits.get("rate_burst", 1), message.start_us or now)
        if key and "key_rate" in limits:
            burst = limits.get("key_burst", 1)
            self.spaced(key, limits["key_rate"], burst, message.start_us or now)
        self.running[message.id] = message

    def spaced(self, key: str, rate: str, burst: int, at: int) -> None:
        interval = HOUR * 1e6 / int(rate.split("/")[0])
        starts = self.starts.setdefault(key, [])
        starts.append(at)
        for back, earlier in enumerate(reversed(starts)):
            assert back < burst + (at - earlier) / interval + 1e-6, (key, starts)

    def nothing_may_start(self, now: int) -> None:
        limits = self.limits
        ran = Counter(self.live[id].key for id, one in self.running.items() if one.has_place)
        if ran.total() >= limits.get("concurrency", 10**9) or self.closed("", "rate", now):
            return
        places = 1 if "key_order" in limits else limits.get("key_concurrency", 10**9)
        held = self.held()
        for id, known in self.live.items():
            if id in self.running or id in self.dead or not known.due:
                continue
            key = known.key
            if key and (ran[key] >= places or self.closed(key, "key_rate", now)):
                continue
            assert key and held.get(key, id) != id, (id, known, self.limits)

    def closed(self, key: str, name: str, now: int) -> bool:
        if name not in self.limits:
            return False
        burst = self.limits.get(
            name.replace("rate", "rate_burst" if name == "rate" else "burst"), 1
        )
        interval = SLOWER * HOUR * 1e6 / int(self.limits[name].split("/")[0])
        tat = 0.0
        for at in sorted(self.starts.get(key, [])):
            tat = max(tat, at) + interval
        return tat - (burst - 1) * interval > now

    def held(self) -> dict[str, str]:
        found = {}
        for slot in self.center.registry.topic(TOPIC).all_slots():
            for key, id in self.client.hgetall(slot.lane_keys[6]).items():
                found[key.decode().replace("%20", " ")] = id.decode()
        return found if "key_order" in self.limits else {}

    def ended(self, id: str) -> None:
        delivery = self.running.pop(id, None)
        if delivery is not None:
            self.stale.append(delivery)

    def died(self, id: str) -> None:
        self.ended(id)
        self.dead.add(id)
        self.marked.discard(id)

    def gone(self, id: str) -> None:
        self.ended(id)
        self.live.pop(id, None)
        self.dead.discard(id)
        self.marked.discard(id)

    def kept(self) -> list[Delivery]:
        """What runs, and comes back unless it is acknowledged."""
        return [one for id, one in self.running.items() if id not in self.marked]

    def one(self) -> Delivery | None:
        some = self.kept()
        return self.chance.choice(some) if some else None

    def ack(self) -> None:
        some = [one for one in self.running.values() if self.chance.random() < 0.5]
        assert self.center.ack(some) == len(some)
        for one in some:
            self.gone(one.id)

    def ack_stale(self) -> None:
        """What was rolled back, or given back, is acknowledged after all."""
        if self.stale:
            one = self.chance.choice(self.stale)
            there = one.id in self.live
            assert self.center.ack([one]) == there, one
            now = self.running.get(one.id)
            if now is not None and now.has_place:
                self.marked.add(one.id)  # its place is free when that one has ended
            else:
                self.gone(one.id)

    def dead_for_stale(self) -> None:
        """Who had a message before rejects or buries it; somebody else may have it by now."""
        if self.stale:
            one = self.chance.choice(self.stale)
            now = self.running.get(one.id)
            if now is None or not now.has_place:
                return
            if self.chance.random() < 0.5:
                state = self.center.reject(one, requeue=False)
                assert state == (None if one.id in self.marked else "dead")
            else:
                assert self.center.bury(one, reason="test") == one.id
            self.marked.add(one.id)

    def reject(self) -> None:
        if (one := self.one()) is not None:
            again = self.chance.random() < 0.7
            state = self.center.reject(one, requeue=again)
            assert state is not None
            self.died(one.id) if state == "dead" else self.ended(one.id)

    def release(self) -> None:
        some = [one for one in self.kept() if self.chance.random() < 0.5]
        assert self.center.release(some) == len(some)
        for one in some:
            self.ended(one.id)

    def bury(self) -> None:
        if (one := self.one()) is not None:
            assert self.center.bury(one, reason="test") == one.id
            self.died(one.id)
            # No acknowledgement that was on its way deletes what was buried.
            self.stale = [other for other in self.stale if other.id != one.id]

    def cancel(self) -> None:
        if self.live:
            id = self.chance.choice(list(self.live))
            [found] = self.center.cancel(id, topic=TOPIC, in_flight=True)
            assert found.deleted
            self.gone(id)

    def reschedule(self) -> None:
        waiting = [id for id in self.live if id not in self.running and id not in self.dead]
        if waiting:
            id, due = self.chance.choice(waiting), self.chance.random() < 0.5
            delay = None if due else HOUR / 2
            [found] = self.center.reschedule(id, delay=delay, topic=TOPIC)
            assert found.moved
            self.live[id].due = due

    def requeue(self) -> None:
        assert self.center.dead.requeue(TOPIC) == len(self.dead)
        for id in self.dead:
            self.live[id].due = True
        self.dead.clear()

    def purge(self) -> None:
        if self.chance.random() < 0.2:
            waiting = [id for id in self.live if id not in self.running and id not in self.dead]
            assert self.center.queues.purge(TOPIC) == len(waiting)
            for id in waiting:
                self.gone(id)

    def alter(self) -> None:
        if self.chance.random() < 0.2:
            self.limits = self.chance.choice(self.choices)
            self.center.queues.alter(TOPIC, **{**EVERY, **self.limits})
            # What ran before a limit of places was set has none, and is not counted.
            self.starts.clear()
            for slot in self.center.registry.topic(TOPIC).all_slots():
                self.client.delete(slot.pace)

    def time_passes(self) -> None:
        seconds = self.chance.choice((30.0, HOUR))
        time_passes(self.center, TOPIC, seconds)
        for starts in self.starts.values():
            starts[:] = [at - int(seconds * 1e6) for at in starts]
        self.stale = [aged(one, seconds) for one in self.stale]
        self.running = {id: aged(one, seconds) for id, one in self.running.items()}
        if seconds == HOUR:
            for known in self.live.values():
                known.due = True

    # -- what holds after each

    def check(self) -> None:
        placed: Counter[str] = Counter()
        found: list[str] = []
        slots = list(self.center.registry.topic(TOPIC).all_slots())
        with self.client.pipeline(transaction=False) as asked:
            for slot in slots:
                asked.hgetall(slot.tokens).hgetall(slot.busy).zrange(slot.lane_keys[0], 0, -1)
                for key in (*slot.stores, slot.prepare, slot.dead):
                    asked.zrange(key, 0, -1, withscores=True)
            replies = iter(asked.execute())
        for slot in slots:
            named, busy, lanes = islice(replies, 3)
            tokens = {k.decode(): v.decode() for k, v in named.items()}
            stores = [next(replies) for _ in slot.stores]
            prepare, dead = islice(replies, 2)
            here: Counter[str] = Counter()
            for id, _ in prepare:
                token = tokens[id.decode()]
                if ",p1" in token or ";p1" in token:
                    key = token.partition(";k")[2].partition(",")[0] if ";k" in token else ""
                    here[key] += 1
            placed += here
            counted = {k.decode(): int(v) for k, v in busy.items() if not k.startswith(b"!")}
            total = counted.pop("", 0)
            assert counted == {key: n for key, n in here.items() if key}
            if slot.number == 0 and not self.center.clustered:
                every = total
            elif self.center.clustered:
                assert total == here.total()
                every = None
            for part in (*stores, prepare, dead):
                found += [id.decode() for id, _ in part]
            sorted_ids = {id.decode() for store in stores for id, score in store if score < 0}
            entered = {entry.split(b"\0")[2].decode() for entry in lanes}
            assert sorted_ids <= entered
        if every is not None:
            assert every == placed.total()
        assert sorted(found) == sorted(self.live)

    def run(self, steps: int) -> None:
        operations = [
            *(self.puts, self.pop, self.pop, self.pop, self.ack, self.ack_stale, self.reject),
            self.dead_for_stale,
            *(self.release, self.bury, self.cancel, self.reschedule, self.requeue, self.purge),
            *(self.alter, self.time_passes, self.pick),
        ]
        for _ in range(steps):
            operation = self.chance.choice(operations)
            operation()
            self.check()
        self.drain()

    def drain(self) -> None:
        """All of it can be delivered in the end."""
        for _ in range(60 * len(self.live) + 60):
            if not self.live:
                break
            self.requeue()
            time_passes(self.center, TOPIC, 30.0)
            self.running = {id: aged(one, 30.0) for id, one in self.running.items()}
            for starts in self.starts.values():
                starts[:] = [at - 30_000_000 for at in starts]
            self.pop(50)
            done = list(self.running.values())
            assert self.center.ack(done) == len(done)
            for one in done:
                self.gone(one.id)
            if not done:
                for known in self.live.values():
                    known.due = True
                time_passes(self.center, TOPIC, HOUR)
                for starts in self.starts.values():
                    starts[:] = [at - int(HOUR * 1e6) for at in starts]
        assert not self.live
        self.check()


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 12))]
)
def test_limits_hold_and_nothing_is_lost(client: redis.Redis, seed: int, slots: int) -> None:
    Model(client, seed, slots).run(120)
