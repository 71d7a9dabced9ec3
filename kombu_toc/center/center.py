"""The timeout center: messages in Redis that become visible at their action time.

Plain redis-py; nothing of Kombu and nothing of Celery. Bodies are bytes that the center does
not look into::

    center = TimeoutCenter(redis.Redis())
    center.put("mail", "order-7", b"remind", delay=3600)
    for message in center.pop("mail", limit=10).messages:
        ...
        center.ack([message])

Every operation is one script (``scripts/``), atomic, by Redis's own clock. Operations are first
built as a :class:`Call` and then run, so that the transport can send many at once over a
connection of its own without waiting for each reply.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from operator import itemgetter
from secrets import token_urlsafe
from typing import Any, NamedTuple

import redis
from redis.exceptions import NoScriptError, ResponseError

from ..errors import (
    ConfigurationError,
    PriorityStepsError,
    ReplicationError,
    ServerError,
    SlotCountError,
)
from ..metrics.counters import TopicCounts, count_first
from ..metrics.sender import Metrics
from ..model import scores
from ..model.topic import (
    DEFAULT_SLOTS,
    PRIORITY_STEPS,
    Declaration,
    Keys,
    Limits,
    Slot,
    Topic,
    base_of,
    check_name,
    check_steps,
)
from ..scripts.call import (
    Countdown,
    Paces,
    ScriptCall,
    as_bytes,
    microseconds,
    pack_command,
    text,
    texts,
    together,
    when_of,
)
from ..scripts.loader import load
from .operations import DEAD, WAITING, Operating
from .operations import IN_FLIGHT as IN_FLIGHT
from .operations import Counts as Counts
from .upkeep import Kept, Part, keeping
from .watch import Watch, grace_after_step

logger = logging.getLogger(__name__)

#: What a broken connection raises.
BROKEN = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)

#: Expired leases that one pop rolls back per slot, at most.
RECOVER = 100

#: Bytes that the bodies of one pop may have together: one that is longer goes alone.
POP_BYTES = 8_000_000

#: Seconds for which a producer's latest publish to a slot is remembered, lest it is repeated.
REMEMBER = 60

#: Which of the keys of a put that is: where the producer's latest publish is remembered.
SENT = 4

#: Ids that one call of check looks at, about.
CHECK_STEP = 200

#: Characters of an error, and of a reason, that are kept with a message.
ERROR_LENGTH = 1000

#: Messages that one call of purge deletes per slot.
PURGE_STEP = 1000

#: Leases that one call renews: no call is to keep the server busy for long.
LEASES_PER_CALL = 500

#: Topics whose declarations a center remembers.
MAX_KNOWN = 4096

#: Seconds for which a topic's declaration is not read again: it may have been resharded, or
#: deleted and declared anew, by somebody else.
RELOAD = 30.0

#: Seconds for which a center that cannot roll leases back does not look again whether it may.
NOTE_AGAIN = 0.5


class Delivery(NamedTuple):
    """A message as pop delivered it."""

    topic: str
    slot: int
    step: int
    id: str
    score: int
    body: bytes
    limit: int  #: the topic's retries
    #: what tells the message from others that had or will have its id, and what else is delivered
    #: of it from this
    birth: str = ""

    @property
    def action_us(self) -> int:
        """Microseconds since the epoch when it was due; 0 if it was rolled back."""
        return scores.action_time(self.score)

    @property
    def retries_left(self) -> int:
        left = scores.retries_left(self.score)
        return self.limit if left is None else left

    @property
    def mark(self) -> int:
        """What tells its lease from one of another delivery of the same message."""
        return scores.lease(0, self.step, self.retries_left)

    @property
    def failures(self) -> int:
        """How often it was delivered before and rolled back."""
        return max(self.limit - self.retries_left, 0)


class Consumer(NamedTuple):
    """A process that consumes a topic."""

    host: str
    pid: int

    @property
    def name(self) -> str:
        return f"{self.host}:{self.pid}"


class Put(NamedTuple):
    """What one put did."""

    id: str  #: under which the message is kept
    added: bool  #: it was not there already
    now_us: int | None  #: Redis's clock, if it was added


class Popped(NamedTuple):
    """What one pop did."""

    now_us: int  #: Redis's clock
    more: bool  #: something that is due was left
    messages: list[Delivery]
    bare: list[str]  #: ids without a body; they are removed
    rolled_back: list[str]  #: ids whose leases had ended
    died: list[str]  #: of these, those that had no retries left
    dropped: list[str]  #: ids that DeadQueue no longer keeps: too old, or too many
    stray: list[tuple[str, str]]  #: (key, member) of copies sets: what is gone with these ids


class Fault(NamedTuple):
    """What check found wrong."""

    topic: str
    slot: int
    #: NO_BODY, NO_ENTRY, TWICE, STRAY_REASON, STRAY_TOKEN, STRAY_COPY, UNANNOUNCED or OTHER_STEP
    kind: str
    id: str  #: empty if it is about the slot
    places: tuple[str, ...]  #: the keys that have the id


#: Kinds of faults, and what repair does about each.
NO_BODY = "no body"  #: an id without a body: it is removed, for there is nothing to deliver
NO_ENTRY = "no entry"  #: a body without an id: to DeadQueue, for nobody knows when it was due
TWICE = "twice"  #: an id in several places: the one nearest to delivery stays, in flight first
STRAY_REASON = "stray reason"  #: a reason or an error of no message: removed
STRAY_TOKEN = "stray token"  #: the name of a delivery of no message: removed
STRAY_COPY = "stray copy"  #: a copies set names a message that is gone: it does so no more
UNANNOUNCED = "unannounced"  #: a slot's next time is not announced: it is announced
OTHER_STEP = "other step"  #: it waits under a priority step that the topic has not: it gets one

_KINDS = {
    1: NO_BODY,
    2: NO_ENTRY,
    3: TWICE,
    4: STRAY_REASON,
    5: UNANNOUNCED,
    6: OTHER_STEP,
    7: STRAY_TOKEN,
}


@dataclass
class _Known:
    """A topic that a center remembers."""

    topic: Topic
    read_at: float  #: monotonic seconds when its declaration was read


class TimeoutCenter(Operating):
    """The operations on topics.

    client: a redis-py client that returns bytes (``decode_responses=False``)
    prefix: what every key begins with
    steps: priority steps of topics that this center declares; None leaves the default, and
        agrees with whatever a topic was declared with
    slots: slot count of a topic that is used before anyone has declared it
    limits: what holds for topics whose declarations do not say
    wait_replicas: how many replicas must have a message before its put returns
    wait_timeout: seconds that a put waits for them
    metrics: where to count what happens; of its own unless given
    pop_bytes: bytes that the bodies of one pop may have together; the first may have any
    grace: seconds for which a center must have watched the server before it rolls back leases that
        have ended: the server may have been away, or its clock set, and those who hold them be
        about to renew them. A third of the visibility timeout unless given, but at least two
        seconds and at most fifteen; 0 for who knows better
    """

    def __init__(
        self,
        client: Any,
        prefix: str = "toc:",
        *,
        steps: Sequence[int] | None = None,
        slots: int = DEFAULT_SLOTS,
        limits: Limits = Limits(),  # noqa: B008 - it is immutable
        wait_replicas: int = 0,
        wait_timeout: float = 1.0,
        metrics: Metrics | None = None,
        pop_bytes: int = POP_BYTES,
        grace: float | None = None,
    ) -> None:
        if client.get_encoder().decode_responses:
            raise ConfigurationError(
                "the center keeps bytes: give it a redis-py client without decode_responses=True"
            )
        self.client = client
        if isinstance(client, redis.RedisCluster):
            raise ConfigurationError(
                "the center has a client of its own for a Redis Cluster, which knows what has run: "
                "use kombu_toc.center_for('toc+cluster://h1:7000,h2:7000')"
            )
        #: whether slots may lie on several servers
        self.clustered = hasattr(client, "run_keyed")
        self._run_packed = getattr(client, "run_packed", None)
        self.keys = Keys(prefix)
        self.steps = None if steps is None else check_steps(steps)
        self.slots = slots
        self.limits = limits.checked("limits")
        self.wait_replicas = wait_replicas
        self.wait_timeout = wait_timeout
        self.metrics = metrics or Metrics()
        self.pop_bytes = pop_bytes
        self.grace = grace
        #: what has been seen of the server, or of each node of a Cluster
        self._watches: dict[Hashable, Watch] = {}
        #: topic -> monotonic seconds when it was last noted which of its leases have ended
        self._noted: dict[str, float] = {}
        #: Threads share it: what belongs together is one entry, and an entry is one reference.
        self._topics: dict[str, _Known] = {}
        #: process, name, numbers: what names its pops
        self._consumer: tuple[int, str, Iterator[int]] | None = None

    # -- running

    def run(self, call: ScriptCall) -> Any:
        """Run one operation and return what it found."""
        began = time.monotonic()
        [reply] = self._replies([call])
        if isinstance(reply, NoScriptError):
            whole = call.command(whole=True)
            if self._run_packed is not None:
                [reply] = self._run_packed([pack_command(*whole)])
            else:
                reply = self.client.execute_command(*whole)
        if isinstance(reply, Exception):
            raise reply
        times = self.metrics.scripts[call.script.name]
        times[0] += 1
        times[1] += time.monotonic() - began
        return call.parse(reply)

    def run_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run operations in one round trip; return what each found.

        Raises the first error, after all have run.
        """
        found = self.run_each(calls)
        for result in found:
            if isinstance(result, Exception):
                raise result
        return found

    def run_each(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """As :meth:`run_all`, but what Redis refused has the error in place of its result; on a
        Cluster, what is asked of a node that cannot be reached, too."""
        if not calls:
            return []
        if len(calls) == 1:
            return [self._run_or_error(calls[0])]
        found: list[Any] = []
        for call, reply in zip(calls, self._replies(calls), strict=True):
            if isinstance(reply, NoScriptError):
                found.append(self._run_or_error(call))
            else:
                self.metrics.scripts[call.script.name][2] += 1
                found.append(reply if isinstance(reply, Exception) else call.parse(reply))
        return found

    def _replies(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """What Redis answers; in place of what it refuses, the error."""
        if self.clustered:
            return self._replies_of_nodes(calls)[0]
        if self._run_packed is not None:
            return self._run_packed([call.packed() for call in calls])
        with self.client.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.execute_command(*call.command())
            return pipe.execute(raise_on_error=False)

    def _replies_of_nodes(
        self, calls: Sequence[ScriptCall], wait: tuple[Any, ...] = ()
    ) -> tuple[list[Any], list[Any]]:
        """What the nodes of a Cluster answer, and what to `wait`, which each is asked after that.

        What the scripts could not write into the wake index is written then.
        """
        client = self.client
        packed = [(call.keys[0], call.packed()) for call in calls]
        replies, waited = client.run_keyed(packed, wait)
        unknown = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            whole = [
                (calls[i].keys[0], pack_command(*calls[i].command(whole=True))) for i in unknown
            ]
            for i, reply, waits in zip(unknown, *client.run_keyed(whole, wait), strict=True):
                replies[i], waited[i] = reply, waits
        announcing = [
            found
            for call, reply in zip(calls, replies, strict=True)
            if not isinstance(reply, Exception) and (found := call.announcing(reply)) is not None
        ]
        if announcing:
            told, _ = self._replies_of_nodes(together(announcing))
            for error in told:
                if isinstance(error, Exception):
                    # Consumers look into all slots every second, and find what they are not told.
                    logger.debug("what is due is not announced: %s", error)
        return replies, waited

    def _run_or_error(self, call: ScriptCall) -> Any:
        try:
            return self.run(call)
        except (ResponseError, ServerError) as exc:
            return exc
        except BROKEN as exc:
            if self.clustered:  # the other nodes are none the worse
                return exc
            raise

    def run_puts(self, calls: Sequence[ScriptCall], *, wait: bool = True) -> list[Any]:
        """Run calls that add messages; return what each found.

        wait: for the replicas, if `wait_replicas` is set; what is of use for moments only need not

        Raises ReplicationError if `wait_replicas` is set and not so many have them in time.
        """
        if not (wait and self.wait_replicas):
            found = self.run_all(calls)
            if time.monotonic() >= self.metrics.due:
                self.metrics.send(self)
            return found
        if self.clustered:
            wait = ("WAIT", self.wait_replicas, int(self.wait_timeout * 1000))
            replies, waited = self._replies_of_nodes(calls, wait)
            return self._confirmed(calls, replies, waited)
        replies = [None] * len(calls)
        open_, whole = list(range(len(calls))), False
        while open_:
            # WAIT speaks of what its own connection has written; of that, and all before it.
            with self.client.pipeline(transaction=False) as pipe:
                for number in open_:
                    pipe.execute_command(*calls[number].command(whole=whole))
                pipe.execute_command("WAIT", self.wait_replicas, int(self.wait_timeout * 1000))
                *some, replicas = pipe.execute(raise_on_error=False)
            for number, reply in zip(open_, some, strict=True):
                replies[number] = reply
            open_ = [number for number in open_ if isinstance(replies[number], NoScriptError)]
            whole = True
        return self._confirmed(calls, replies, [replicas])

    def _confirmed(
        self, calls: Sequence[ScriptCall], replies: list[Any], waited: list[Any]
    ) -> list[Any]:
        """What calls found, if so many replicas have each as must."""
        for reply in (*replies, *waited):
            if isinstance(reply, Exception):
                raise reply
        found = [call.parse(reply) for call, reply in zip(calls, replies, strict=True)]
        self.metrics.pass_by(self)
        replicas = min(waited, default=self.wait_replicas)
        if replicas < self.wait_replicas:
            raise ReplicationError(
                f"the message is kept, but only {replicas} of {self.wait_replicas} replicas have "
                f"it after {self.wait_timeout:g} seconds; see to the replicas, or set "
                "toc_wait_replicas lower"
            )
        return found

    # -- topics

    def declare(self, name: str, **limits: Any) -> Topic:
        """Declare a topic and return it as it stands.

        limits: ``slots`` (a power of two), ``retries``, ``expires`` (milliseconds), ``steps`` and
            those of :class:`Limits` (seconds); what is left out agrees with any declaration.

        The first declaration stands. Raises SlotCountError if it has another slot count than
        the one asked for, PriorityStepsError if it has other steps than this center or `limits`
        name, ConfigurationError if a limit makes no sense.
        """
        steps = self.steps
        if limits.get("steps") is not None:
            steps = check_steps(limits["steps"])
        limits = {**limits, "steps": steps or PRIORITY_STEPS}
        check_name(name)
        asked = limits.get("slots")
        if asked is None:
            limits = {**limits, "slots": self.slots}
        wanted = replace(Declaration.of(name, **limits), bases=False)
        if wanted.expires:
            wanted = replace(wanted, named=False)
        topic = self.run(self.declaring(name, wanted))
        if steps is not None:
            topic = self._agreed(self._completed(topic, steps), steps)
        if asked not in (None, topic.slots, *topic.declaration.previous_counts):
            raise SlotCountError(
                f"queue {name!r} was declared with {topic.slots} slots, not {asked}; "
                f"declare it with {topic.slots}, or change it: "
                f"'celery toc reshard {name} --slots {asked}'"
            )
        return topic

    def agreed(self, topic: Topic) -> Topic:
        """The same topic. Raises PriorityStepsError if it was declared with other steps than those
        that this center was told."""
        return topic if self.steps is None else self._agreed(topic, self.steps)

    def _agreed(self, topic: Topic, steps: tuple[int, ...]) -> Topic:
        standing = topic.declaration.steps
        # What goes away by itself is used by many who know nothing of each other: replies, events.
        if standing in (None, steps) or topic.declaration.expires:
            return topic
        raise PriorityStepsError(
            f"queue {topic.name!r} was declared with priority_steps {_listed(standing)}, not "
            f"{_listed(steps)}; set priority_steps to {_listed(standing)}, or leave it out, for "
            "then a queue's own are used; to give it others, let it run empty and delete it first: "
            f"'celery amqp queue.delete {topic.name}'"
        )

    def _completed(self, topic: Topic, steps: tuple[int, ...]) -> Topic:
        """The topic, in whose declaration, if it is of an older release, these steps are kept from
        now on: in all places of such an app they are set alike, or its messages get lost."""
        while topic.declaration.steps is None and not topic.declaration.expires:
            there = self._steps_in_use(topic, set(PRIORITY_STEPS) - set(steps))
            if there:
                raise PriorityStepsError(
                    f"queue {topic.name!r} holds messages under the priority steps "
                    f"{_listed(there)}, which {_listed(steps)} lack: they were sent with "
                    f"priority_steps {_listed(PRIORITY_STEPS)}, the default; leave priority_steps "
                    f"out, or 'celery toc repair {topic.name}' moves them"
                )
            self.redeclare(topic, replace(topic.declaration, steps=steps))
            found = self.declared(topic.name)
            if found is None:  # deleted just now
                return topic
            topic = found
        return topic

    def _steps_in_use(self, topic: Topic, steps: Iterable[int]) -> list[int]:
        """Those of some steps under which messages wait."""
        pairs = [(step, slot.store(step)) for slot in topic.all_slots() for step in sorted(steps)]
        with self.client.pipeline(transaction=False) as pipe:
            for _, key in pairs:
                pipe.exists(key)
            replies = pipe.execute() if pairs else []
        return sorted({step for (step, _), there in zip(pairs, replies, strict=True) if there})

    def declaring(self, name: str, wanted: Declaration) -> ScriptCall:
        """The call that declares a topic; its result is the topic as it stands."""

        def parse(raw: bytes) -> Topic:
            return self._remember(name, raw)

        return ScriptCall(
            load("declare"),
            (self.keys.topics, self.keys.expiring),
            (name, wanted.to_json(), wanted.expires or 0),
            parse,
        )

    def topic(self, name: str) -> Topic:
        """The topic of that name; it is declared with the defaults if nobody has done so.

        What this center knows of it is at most half a minute old.
        """
        known = self._topics.get(name)
        if known is None:
            return self.declare(name)
        if time.monotonic() - known.read_at >= RELOAD:
            raw = self.client.hget(self.keys.topics, name)
            if raw is not None:
                return self._remember(name, raw)
            known.read_at = time.monotonic()  # gone: whoever needs it declares it as it was
        return known.topic

    def known(self, name: str) -> Topic | None:
        """The topic of that name, if this center has dealt with it before; asks nobody."""
        known = self._topics.get(name)
        return None if known is None else known.topic

    def declared(self, name: str) -> Topic | None:
        """The topic of that name, or None if nobody has declared it."""
        check_name(name)
        return self.learn(name, self.client.hget(self.keys.topics, name))

    def learn(self, name: str, raw: bytes | None) -> Topic | None:
        """The topic as its declaration, read by somebody, says; None if there is none."""
        if raw is None:
            self.forget(name)
            return None
        return self._remember(name, raw)

    def _remember(self, name: str, raw: bytes) -> Topic:
        topic = self._made(name, Declaration.from_json(raw))
        if len(self._topics) > MAX_KNOWN:  # reply queues come and go
            self._topics.clear()
        self._topics[name] = _Known(topic, time.monotonic())
        return topic

    def redeclare(self, topic: Topic, declaration: Declaration) -> bool:
        """Put another declaration in the place of the one that `topic` has.

        Returns whether it was that one until now: else somebody else has changed it.
        """
        if declaration == topic.declaration:
            return True
        self.forget(topic.name)
        raw = self.client.hget(self.keys.topics, topic.name)
        if raw is None or Declaration.from_json(raw) != topic.declaration:
            return False
        call = ScriptCall(
            load("redeclare"), (self.keys.topics,), (topic.name, raw, declaration.over(raw)), bool
        )
        return self.run(call)

    def admit(self, topic: Topic, id: str | None, basis: str | None) -> None:
        """To be called before a message is put: look-ups by id that begin after that find it.

        id: None if nobody looks for it by that
        basis: slot basis, if there is one

        Does nothing but for the first message of its kind, as far as this center knows.
        """
        said = topic.declaration
        news = []
        if said.bases is False and basis and basis != id:
            news.append("bases")
        if said.named is False and id is not None:
            news.append("named")
        if news:
            call = ScriptCall(
                load("admit"), (self.keys.topics,), (topic.name, *news), lambda raw: raw
            )
            raw = self.run(call)
            if raw is not None:
                self._remember(topic.name, raw)

    def pause(self, name: str, paused: bool = True) -> bool:
        """Have consumers take nothing from a topic, or take from it again; whether that is new.

        Consumers of the transport know within five seconds. Messages can be put as ever, and are
        kept; what is in flight goes on. Who calls :meth:`pop` gets messages all the same.
        """
        change = self.client.sadd if paused else self.client.srem
        return bool(change(self.keys.paused, name))

    def paused(self) -> set[str]:
        """The topics that are paused."""
        return set(texts(self.client.smembers(self.keys.paused)))

    # -- who consumes

    def consumers(self) -> dict[str, list[Consumer]]:
        """The processes that consume each topic, by the transport.

        They tell within a second what they consume, and are forgotten a minute after they died.
        """
        seconds, us = self.client.time()
        now = seconds * 1000 + us // 1000
        found: dict[str, list[Consumer]] = {}
        for raw in self.client.zrangebyscore(self.keys.consumers, f"({now}", "+inf"):
            name, pid, *topics = json.loads(raw)
            for topic in topics:
                found.setdefault(topic, []).append(Consumer(name, pid))
        return found

    def appearing(self, said: str, before: Iterable[str], ttl_ms: int) -> ScriptCall:
        """The call that says which topics a process consumes.

        said: its host, its pid and the topics, as JSON; nothing if it consumes none
        before: what it said until now
        """
        return ScriptCall(load("present"), (self.keys.consumers,), (said, ttl_ms, *before), int)

    def reach(self, name: str, slot: int) -> Topic | None:
        """The topic as it is declared, and so that its consumers look into this slot.

        For who has seen an announcement of a slot that the topic has no more: a producer that
        was suspended, or kept its messages for long, has not heard that it was resharded.
        """
        topic = self.declared(name)
        if (
            topic is None
            or slot < topic.slot_span
            or not self.client.exists(topic.slot(slot).announced_times)
        ):
            return topic
        was = {*topic.declaration.draining_counts, 1 << slot.bit_length()}
        if self.redeclare(topic, replace(topic.declaration, draining_counts=tuple(sorted(was)))):
            logger.warning(
                "queue %s: a producer has used slot %d, and it has only %d slots since it was "
                "resharded; 'celery toc reshard %s --slots %d' moves what is there",
                *(name, slot, topic.slots, name, topic.slots),
            )
        return self.declared(name)

    def _standing(self, name: str) -> Topic:
        """The topic of that name as it is declared now; by default if nobody has done so."""
        return self.declared(name) or self._made(name, Declaration(slots=self.slots))

    def _made(self, name: str, declaration: Declaration) -> Topic:
        steps = declaration.steps or self.steps or PRIORITY_STEPS
        return Topic(name, declaration, self.keys.prefix, steps)

    def _topic_of(self, delivery: Delivery) -> Topic:
        """The topic of a delivery, which may be deleted by now; asks nobody."""
        return self.known(delivery.topic) or self._made(
            delivery.topic, Declaration(slots=self.slots, retries=delivery.limit)
        )

    def topics(self) -> list[str]:
        """The names of all declared topics."""
        return sorted(texts(self.client.hkeys(self.keys.topics)))

    def forget(self, name: str) -> None:
        """Read the topic's declaration anew when it is next used."""
        self._topics.pop(name, None)

    def refresh(self, name: str, expires_ms: int) -> None:
        """Keep a topic that expires, and what is in it, from going stale; declare it again if
        it has."""
        declared = self.topic(name).declaration
        topic = self.run(self.declaring(name, replace(declared, expires=expires_ms)))
        with self.client.pipeline(transaction=False) as pipe:
            for slot in topic.all_slots():
                for key in slot.all():
                    pipe.pexpire(key, expires_ms)
            pipe.pexpire(self.keys.wake(name), expires_ms)
            pipe.execute()

    def stale(self, most: int = 100) -> list[str]:
        """Take the names of what went stale: ``topic:NAME`` and ``exchange:NAME``."""
        return self.run(
            ScriptCall(load("sweep"), (self.keys.expiring, self.keys.topics), (most,), texts)
        )

    # -- put, pop, and what ends a delivery

    def put(
        self,
        topic: str,
        id: str,
        body: bytes,
        *,
        at: float | None = None,
        delay: float | None = None,
        basis: str | None = None,
        priority: int = 0,
        token: str | None = None,
        ensure: bool = False,
        publish: tuple[str, str] | None = None,
    ) -> str | None:
        """Add a message and return the id it is kept under.

        at: action time, seconds since the epoch; a past one means now
        delay: instead of `at`, seconds from now by Redis's clock
        basis: slot basis; the id unless given
        priority: 0 goes first
        token: tells this message from another live one with the same id, which may then have
            two; without it, the CRC-32 of the body does
        ensure: return None, and add nothing, if a live message has this id
        publish: (producer, name of this publish): to repeat a producer's latest publish within
            a minute, because its reply was lost, adds nothing, whatever has become of the message

        Raises ActionTimeError beyond the year 2255, ReplicationError as :meth:`run_puts`,
        PriorityStepsError as :meth:`declare`.
        """
        declared = self.agreed(self.topic(topic))
        self.admit(declared, id, basis)
        if (
            ensure
            and declared.declaration.draining_counts
            and self._lies_elsewhere(declared, id, basis or id)
        ):
            return None
        call = self.putting(
            declared,
            id,
            body,
            at_us=microseconds(at),
            delay_us=microseconds(delay),
            basis=basis,
            priority=priority,
            token=token,
            ensure=ensure,
            publish=publish,
        )
        [made] = self.run_puts([call])
        return made.id if made.added or not ensure else None

    def putting(
        self,
        topic: Topic,
        id: str,
        body: bytes,
        *,
        at_us: int | Countdown | None = None,
        delay_us: int | None = None,
        basis: str | None = None,
        priority: int = 0,
        token: str | None = None,
        ensure: bool = False,
        publish: tuple[str, str] | None = None,
        remember: int = REMEMBER,
        replaces: bool = False,
    ) -> ScriptCall:
        """The call that adds a message; times in microseconds. Result: :class:`Put`. Look-ups by id
        find it if :meth:`admit` was called before.

        remember: seconds for which a repeated `publish` is recognised
        replaces: it takes the place of one that was delivered: a full server takes it, too
        """
        slot = topic.slot_for(basis or id)
        if token is None:
            token = f"{zlib.crc32(body):08x}"
        producer, name = publish or ("", "")
        return self._announcing(
            topic,
            "put",
            (
                slot.stores[topic.step_index(priority)],
                slot.body,
                slot.announced_times,
                slot.copies(id),
                slot.sent(producer),
            ),
            (
                id,
                body,
                when_of(at_us, delay_us),
                slot.number,
                token,
                topic.declaration.expires or 0,
                1 if ensure else 0,
                name,
                remember,
                1 if replaces else 0,
            ),
            partial(_read_put, self.metrics.counts(topic)),
        )

    def _lies_elsewhere(self, topic: Topic, id: str, basis: str) -> bool:
        """Whether a message of this id is in the topic, which is being resharded."""
        return bool(Operating.get(self, id, topic=topic.name, basis=basis))

    def pop(
        self,
        topic: str,
        limit: int = 1,
        *,
        visibility: float | None = None,
        slots: Iterable[int] | None = None,
        recover: int = RECOVER,
    ) -> Popped:
        """Deliver up to `limit` messages that are due.

        visibility: seconds they may stay unacknowledged and unrenewed, unless the topic says
        slots: only these; all unless given
        recover: expired leases to roll back first, per slot, and messages that DeadQueue need
            not keep any longer

        Raises PriorityStepsError as :meth:`declare`.
        """
        declared = self.agreed(self.topic(topic))
        numbers = range(declared.slot_span) if slots is None else sorted(set(slots))
        # Who has not watched the server only notes what has ended, for whoever comes later.
        until: dict[int, int | None] = {}
        if recover and numbers and self.clustered:
            until = {number: self.watched_until(declared, number) for number in numbers}
        elif recover and numbers:
            until = dict.fromkeys(numbers, self.watched_until(declared, numbers[0]))
        noted = self._note(declared, [n for n, us in until.items() if us is None], recover)
        sent = time.monotonic()
        if self.clustered and len(numbers) > 1:
            popped = self._pop_apart(declared, numbers, limit, visibility, recover, until)
        else:
            us = until.get(numbers[0]) if numbers else None
            popped = self.run(
                self.popping(
                    declared,
                    numbers,
                    soon=limit,
                    visibility=visibility,
                    recover=recover,
                    until_us=us or 0,
                )
            )
            self.watched(declared, numbers[0] if numbers else 0, popped.now_us, sent)
        for kept in noted:
            for event in kept.events:
                for found, more in zip(popped[4:7], event[1:], strict=True):
                    found.extend(more)
            popped.stray.extend(kept.stray)
        for key, member in popped.stray:
            self.client.srem(as_bytes(key), as_bytes(member))
        for message in popped.messages:
            if message.action_us:
                self.metrics.late(topic, popped.now_us - message.action_us)
        self.metrics.pass_by(self)
        return popped

    def popping(
        self,
        topic: Topic,
        slots: Iterable[int] | None = None,
        *,
        soon: int,
        lookahead_us: int = 0,
        late: int = 0,
        behind_us: int = 0,
        visibility: float | None = None,
        recover: int = 0,
        until_us: int | None = None,
        claimed: bool = True,
        name: str | None = None,
        remember: int = 0,
    ) -> ScriptCall:
        """The call that delivers messages. Result: :class:`Popped`.

        soon, lookahead_us: how many that are due within that many microseconds
        late, behind_us: how many that have been due for that many microseconds (the two
            numbers include each other)
        recover, until_us: how many leases may be rolled back that ended by then, by Redis's clock;
            by now unless given
        claimed: whether what is left has to be announced again even if it was already, for who
            pops may have claimed that; it matters on a Cluster
        name: what no other pop has: a consumer, a dot and a number; made up unless given
        remember: seconds for which :meth:`recalling` gives the messages once more; a consumer's
            next pop that begins with the same slot ends it

        What is `stray` then is for the caller to remove. On a Cluster it can be one slot only.
        """
        numbers = range(topic.slot_span) if slots is None else sorted(set(slots))
        name = name or self._name_pop()
        keys = self._slot_keys(topic, numbers)
        keys.append(topic.slot(numbers[0]).given(name.rpartition(".")[0]))
        limits = topic.declaration.limits(self.limits)
        seconds = topic.declaration.visibility or visibility or limits.visibility
        retries = topic.declaration.retries
        counts = self.metrics.counts(topic)

        def parse(raw: list[Any]) -> Popped:
            now, more, flat, gone, rolled, died, dropped, *_ = raw
            messages = _read_deliveries(topic, numbers, name, flat)
            lost, old = (texts(ids[1::2]) for ids in (gone, dropped))
            stray = [
                (topic.slot(numbers[slot]).copies(id.rpartition("#")[0]), id)
                for slot, id in zip(gone[::2] + dropped[::2], lost + old, strict=True)
                if "#" in id
            ]
            rolled, died = texts(rolled), texts(died)
            counts.popped(len(messages), len(rolled), len(died), len(old))
            return Popped(now, bool(more), messages, lost, rolled, died, old, stray)

        return self._announcing(
            topic,
            "pop",
            keys,
            (
                len(numbers),
                len(topic.steps),
                soon,
                lookahead_us,
                late,
                behind_us,
                int(seconds * 1000),
                retries,
                recover,
                *_backing_off(limits),
                int(limits.dead_age * 1000),
                -(-limits.dead_limit // topic.slots),
                int(claimed),
                scores.LAST_MS * 1000 if until_us is None else until_us,
                name,
                remember,
                self.pop_bytes,
                *numbers,
            ),
            parse,
            keys_recur=True,
        )

    def recalling(
        self,
        topic: Topic,
        slots: Iterable[int] | None,
        name: str,
        *,
        visibility: float | None = None,
        bodies: bool = True,
        remember: int = REMEMBER,
    ) -> ScriptCall:
        """The call that delivers once more what a pop has given whose reply was lost, as far as it
        is still in flight by that; the leases are renewed. Result: :class:`Popped`.

        topic, slots, name: as they were
        bodies: whether the messages are to have theirs
        remember: seconds for which the pop delivers nothing if it has not run yet; 0: it may
        """
        numbers = range(topic.slot_span) if slots is None else sorted(set(slots))
        keys: list[str] = []
        for number in numbers:
            slot = topic.slot(number)
            keys += (slot.prepare, slot.body, slot.tokens)
        keys.append(topic.slot(numbers[0]).given(name.rpartition(".")[0]))
        seconds = topic.declaration.visibility or visibility or self.limits.visibility
        counts = self.metrics.counts(topic)

        def parse(raw: list[Any]) -> Popped:
            now, flat = raw
            found = _read_deliveries(topic, numbers, name, flat)
            if found and bodies:
                counts.popped(len(found), 0, 0, 0)
            return Popped(now, False, found, [], [], [], [], [])

        retries = topic.declaration.retries
        args = (name, int(seconds * 1000), retries, remember, int(bodies))
        return ScriptCall(load("recall"), keys, args, parse)

    def _name_pop(self) -> str:
        """A name that no other pop has."""
        consumer = self._consumer
        if consumer is None or consumer[0] != os.getpid():  # a forked child is another consumer
            consumer = self._consumer = (os.getpid(), token_urlsafe(9), count(1))
        return f"{consumer[1]}.{next(consumer[2]):x}"

    def _pop_apart(
        self,
        topic: Topic,
        numbers: Sequence[int],
        limit: int,
        visibility: float | None,
        recover: int,
        until: dict[int, int | None],
    ) -> Popped:
        """Deliver messages of slots that are not on one server: first to see which have any."""

        def call(number: int, soon: int, recover: int = 0) -> ScriptCall:
            us = until.get(number)
            return self.popping(
                topic,
                [number],
                soon=soon,
                visibility=visibility,
                recover=recover,
                until_us=us or 0,
                claimed=not soon,
            )

        sent = time.monotonic()
        parts = self.run_all([call(number, 0, recover) for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            self.watched(topic, number, part.now_us, sent)
        ready = [n for n, part in zip(numbers, parts, strict=True) if part.more]
        left = limit
        while ready and left > 0:
            asked = dict(shares(left, ready))
            some = self.run_all([call(number, share) for number, share in asked.items()])
            parts += some
            left -= sum(len(part.messages) for part in some)
            empty = [n for n, part in zip(asked, some, strict=True) if not part.more]
            ready = [n for n in ready if n not in empty]
        messages = [message for part in parts for message in part.messages]
        messages.sort(key=lambda message: (message.step, message.score))
        # What has been one pop counts as one.
        self.metrics.counts(topic).empty += (not messages) - sum(not p.messages for p in parts)
        lists = zip(*(part[3:] for part in parts), strict=True)
        return Popped(
            max(part.now_us for part in parts),
            bool(ready),
            messages,
            *([one for part in some for one in part] for some in lists),
        )

    def finding_due(self, topics: Sequence[str]) -> ScriptCall:
        """The call that tells in which topics something is due that nobody has claimed. Result:
        the indexes of those."""
        return ScriptCall(load("due"), [self.keys.wake(name) for name in topics], (), list)

    # -- leases that have ended

    def watched_until(self, topic: Topic, slot: int) -> int | None:
        """Until when, by the server's clock in microseconds, leases that have ended may be rolled
        back in a slot; None as long as this center has not watched its server for long enough."""
        if self.grace == 0:
            return scores.LAST_MS * 1000
        visibility = topic.declaration.limits(self.limits).visibility
        return self._watch(topic, slot).until(time.monotonic(), visibility, self.grace)

    def watched(self, topic: Topic, slot: int, now_us: int, sent: float) -> None:
        """Learn that the server of a slot showed this time, since `sent`, in monotonic seconds."""
        self._watch(topic, slot).sample(now_us, sent, time.monotonic())

    def _watch(self, topic: Topic, slot: int) -> Watch:
        place = None
        if self.clustered:
            place = self.client.place_of(topic.slot(slot).announced_times)
        found = self._watches.get(place)
        return found or self._watches.setdefault(place, Watch())

    def noting(
        self, topic: Topic, slots: Sequence[int], recover: int = RECOVER
    ) -> list[ScriptCall]:
        """The calls of who may not roll leases back: what has ended is noted in Redis, and rolled
        back by the next who asks, a grace later, if it was not renewed. Result: :class:`Kept`."""
        visibility = topic.declaration.limits(self.limits).visibility
        grace = grace_after_step(visibility) if self.grace is None else self.grace
        parts = [tuple(slots)] if not self.clustered else [(number,) for number in slots]
        most = recover * max(len(slots), 1)
        calls = [
            keeping(self, [(Part(topic, part), 0)], grace=grace, most=most, each=recover)
            for part in parts
        ]
        counts = self.metrics.counts(topic)

        def counted(parse: Callable[[Any], Kept]) -> Callable[[Any], Kept]:
            def parsed(raw: Any) -> Kept:
                kept = parse(raw)
                for event in kept.events:
                    counts.kept(*(len(ids) for ids in event[1:]))
                return kept

            return parsed

        return [call._replace(parse=counted(call.parse)) for call in calls]

    def _note(self, topic: Topic, slots: Sequence[int], recover: int) -> list[Kept]:
        now = time.monotonic()
        if not slots or now < self._noted.get(topic.name, float("-inf")) + NOTE_AGAIN:
            return []
        if len(self._noted) > MAX_KNOWN:
            self._noted.clear()
        self._noted[topic.name] = now
        return self.run_all(self.noting(topic, slots, recover))

    def ack(self, deliveries: Iterable[Delivery]) -> int:
        """Acknowledge messages; return how many there still were."""
        return sum(self.run_all(self.acking(deliveries)))

    def acking(self, deliveries: Iterable[Delivery]) -> list[ScriptCall]:
        """The calls that acknowledge messages, as few as can be. Result: how many there were."""
        by_topic: dict[Any, list[Delivery]] = defaultdict(list)
        for delivery in deliveries:
            by_topic[self._together(delivery)].append(delivery)
        return [self._acking(self._topic_of(batch[0]), batch) for batch in by_topic.values()]

    def _together(self, delivery: Delivery) -> tuple[Any, ...]:
        """What is the same of messages that one call can settle."""
        return (delivery.topic, delivery.slot if self.clustered else 0)

    def _acking(self, topic: Topic, batch: list[Delivery]) -> ScriptCall:
        by_slot: dict[int, list[Delivery]] = {}
        for delivery in batch:
            by_slot.setdefault(delivery.slot, []).append(delivery)
        numbers = sorted(by_slot)
        keys = self._slot_keys(topic, numbers)
        args: list[Any] = []
        sets: list[str] = []
        copies: list[Any] = []
        for number in numbers:
            some = by_slot[number]
            args += (number, len(some), *(d.id for d in some), *(d.birth for d in some))
            for delivery in some:
                base, copy, _ = delivery.id.rpartition("#")
                if copy:
                    sets.append(topic.slot(number).copies(base))
                    copies += (number, delivery.id)
        return self._announcing(
            topic,
            "ack",
            [*keys, *sets],
            (len(numbers), len(topic.steps), len(sets), *args, *copies),
            partial(count_first, self.metrics.counts(topic), "acked"),
            keys_recur=not sets,
        )

    def reject(
        self,
        delivery: Delivery,
        *,
        requeue: bool,
        reason: str = "",
        error: str = "",
        backoff: float | None = None,
    ) -> str | None:
        """Give a message back after a failure.

        requeue: roll it back with one retry less; without it, or with no retries left, it goes
            to DeadQueue with the reason
        error: what went wrong; it is kept with the message, the latest only
        backoff: seconds until it is due again; as the topic says unless given

        Returns the state it is in now, or None if it was in flight no more.
        """
        call = self.rejecting(
            delivery, requeue=requeue, reason=reason, error=error, backoff=backoff
        )
        return self.run(call)

    def rejecting(
        self,
        delivery: Delivery,
        *,
        requeue: bool,
        reason: str = "",
        error: str = "",
        backoff: float | None = None,
    ) -> ScriptCall:
        """The call that gives a message back after a failure. Result: as :meth:`reject`."""
        topic = self._topic_of(delivery)
        slot = topic.slot(delivery.slot)
        limits = topic.declaration.limits(self.limits)
        if backoff is not None:
            limits = limits._replace(retry_backoff=backoff, retry_backoff_max=backoff)
        if requeue:
            reason = f"no retries left: {reason or 'rejected again and again'}"
        return self._announcing(
            topic,
            "reject",
            (
                slot.announced_times,
                slot.prepare,
                slot.dead,
                slot.reasons,
                slot.tokens,
                *slot.stores,
            ),
            (
                len(topic.steps),
                slot.number,
                delivery.id,
                1 if requeue else 0,
                *_backing_off(limits),
                _readable(" ".join(reason.split())[:ERROR_LENGTH] or "rejected"),
                _readable(error[:ERROR_LENGTH]),
                topic.declaration.retries,
                delivery.mark,
                delivery.birth,
            ),
            partial(_read_reject, self.metrics.counts(topic)),
        )

    def release(self, deliveries: Iterable[Delivery]) -> int:
        """Take messages back unhandled, their time, order and retries unchanged.

        Returns how many were still in flight; one that was delivered again since is another's.
        """
        return sum(self.run_all(self.releasing(deliveries)))

    def releasing(self, deliveries: Iterable[Delivery]) -> list[ScriptCall]:
        """The calls that take messages back, one per slot. Result: how many there were."""
        by_slot: dict[tuple[str, int], list[Delivery]] = defaultdict(list)
        for delivery in deliveries:
            by_slot[delivery.topic, delivery.slot].append(delivery)
        calls = []
        for (_, number), batch in by_slot.items():
            topic = self._topic_of(batch[0])
            slot = topic.slot(number)
            args: list[Any] = []
            for delivery in batch:
                args += (delivery.id, delivery.score, delivery.step, delivery.mark, delivery.birth)
            calls.append(
                self._announcing(
                    topic,
                    "release",
                    (slot.announced_times, slot.prepare, slot.tokens, *slot.stores),
                    (len(topic.steps), number, *args),
                    partial(count_first, self.metrics.counts(topic), "released"),
                )
            )
        return calls

    def extend(
        self, deliveries: Iterable[Delivery], visibility: float | None = None
    ) -> list[Delivery]:
        """Renew leases: each ends `visibility` seconds from now, or what its topic says.

        Returns those whose leases had ended already.
        """
        return [
            lost for part in self.run_all(self.extending(deliveries, visibility)) for lost in part
        ]

    def extending(
        self, deliveries: Iterable[Delivery], visibility: float | None = None
    ) -> list[ScriptCall]:
        """The calls that renew leases. Result: those whose leases had ended already."""
        by_slot: dict[tuple[str, int], list[Delivery]] = defaultdict(list)
        for delivery in deliveries:
            by_slot[delivery.topic, delivery.slot].append(delivery)
        return [
            self._extending(held[start : start + LEASES_PER_CALL], visibility)
            for held in by_slot.values()
            for start in range(0, len(held), LEASES_PER_CALL)
        ]

    def _extending(self, batch: list[Delivery], visibility: float) -> ScriptCall:
        topic = self._topic_of(batch[0])
        seconds = topic.declaration.visibility or visibility
        if seconds is None:
            seconds = self.limits.visibility

        def parse(raw: list[int]) -> list[Delivery]:
            return [batch[number - 1] for number in raw]

        slot = topic.slot(batch[0].slot)
        return ScriptCall(
            load("extend"),
            (slot.prepare, slot.tokens),
            (int(seconds * 1000), *(x for d in batch for x in (d.id, d.mark, d.birth))),
            parse,
        )

    # -- for whole topics

    def purge(self, topic: str) -> int:
        """Delete every waiting message, due or not; return how many there were.

        Those in flight and those dead stay. In bounded steps, so that a large topic does not
        block the server; what is put meanwhile may survive.
        """
        declared = self._standing(topic)
        total = 0
        for slot in declared.all_slots():
            call = self._announcing(
                declared,
                "purge",
                (slot.announced_times, slot.body, slot.reasons, slot.tokens, *slot.stores),
                (len(slot.stores), slot.number, PURGE_STEP),
                lambda raw: (raw[0], texts(raw[1])),
            )
            while True:
                count, copies = self.run(call)
                total += count
                self.metrics.counts(declared).purged += count
                self.metrics.pass_by(self)
                for id in copies:
                    self.client.srem(as_bytes(slot.copies(base_of(id))), as_bytes(id))
                if count < PURGE_STEP:
                    break
        return total

    def delete(self, topic: str) -> None:
        """Delete a topic with everything in it: waiting, in flight and dead."""
        declared = self._standing(topic)
        self.purge(topic)
        copies = [
            slot.copies(id.rpartition("#")[0])
            for slot in declared.all_slots()
            for key in (slot.prepare, slot.dead)
            for id in texts(raw for raw, _ in self.client.zscan_iter(key, match="*#*"))
        ]
        with self.client.pipeline(transaction=False) as pipe:
            for slot in declared.all_slots():
                pipe.unlink(*slot.all(), *map(slot.store, declared.other_steps()))
            for key in copies:
                pipe.unlink(as_bytes(key))
            pipe.unlink(self.keys.wake(topic))
            pipe.hdel(self.keys.topics, topic)
            pipe.srem(self.keys.paused, topic)
            pipe.zrem(self.keys.expiring, f"topic:{topic}")
            pipe.unlink(self.keys.counted(topic), *self.keys.minutes(topic))
            pipe.execute()
        self.forget(topic)

    def check(self, topic: str, *, step: int = CHECK_STEP) -> list[Fault]:
        """Look for what cannot be; return what was found.

        That is: an id that is not in exactly one of store, prepare and dead with its body, a
        body or a reason without an id, a message under a priority step that the topic has not,
        and a slot whose next time is not announced. (What a
        consumer that died had claimed is no fault: the others look into all slots every second.)

        step: about how many ids one call to the server looks at; the topic may be live
        """
        return self._check(topic, step, mend=False)

    def repair(self, topic: str, *, step: int = CHECK_STEP) -> list[Fault]:
        """Check, and mend each fault in the moment it is found; return what was mended.

        How: see NO_BODY and the others. A body without an id goes to DeadQueue.
        """
        return self._check(topic, step, mend=True)

    def _check(self, topic: str, step: int, *, mend: bool) -> list[Fault]:
        declared = self._standing(topic)
        found: list[Fault] = []
        stores, copies = self._strays(declared, step)
        for slot in declared.all_slots():
            others = sorted({*declared.other_steps(), *stores[slot.number]} - {*declared.steps})
            keys = (
                slot.announced_times,
                slot.prepare,
                slot.body,
                slot.dead,
                slot.reasons,
                slot.tokens,
                *slot.stores,
            )
            own = len(keys)
            keys += tuple(map(slot.store, others))
            for part in range(1, len(keys) + 1):
                if part > own and others[part - own - 1] not in stores[slot.number]:
                    continue
                cursor = "0"
                # Redis reads the bodies with their ids.
                paces = Paces(step, self.pop_bytes)
                while True:
                    call = self._announcing(
                        declared,
                        "check",
                        keys,
                        (
                            len(slot.stores),
                            slot.number,
                            part,
                            cursor,
                            paces.next,
                            int(mend),
                            scores.lease(0, 0, declared.declaration.retries),
                            *(declared.step_index(other) for other in others),
                        ),
                        list,
                    )
                    raw, flat, size, *_ = self.run(call)
                    paces.read(size)
                    for kind, id, places in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
                        where = tuple(keys[place - 1] for place in places)
                        found.append(Fault(topic, slot.number, _KINDS[kind], text(id), where))
                    cursor = raw.decode()
                    if cursor == "0":
                        break
        for slot, key in copies:
            call = ScriptCall(load("check_copies"), (key, slot.body), (int(mend),), texts)
            found += [
                Fault(topic, slot.number, STRAY_COPY, id, (text(key),)) for id in self.run(call)
            ]
        return list(dict.fromkeys(found))

    def _strays(
        self, topic: Topic, step: int
    ) -> tuple[dict[int, set[int]], list[tuple[Slot, bytes]]]:
        """Per slot, the priority steps that the topic has not and something waits under; and the
        copies sets, each with its slot. One look at all keys, for nothing else names them."""
        slots = {slot.stem: slot for slot in topic.all_slots()}
        stores: dict[int, set[int]] = defaultdict(set)
        copies = []
        stem = topic.slot(0).stem.rpartition("0")[0]
        for raw in self.client.scan_iter(re.sub(r"([][*?\\^])", r"\\\1", stem) + "*", count=step):
            stem, mark, rest = text(raw).partition("}:")
            slot = slots.get(stem + mark)
            if slot is None:  # of a topic with a longer name
                continue
            if rest.startswith("copies:"):
                copies.append((slot, raw))
            elif rest.startswith("store:"):
                stores[slot.number].add(int(rest.removeprefix("store:")))
        return stores, copies

    # -- the wake index

    def handing_back(self, topic: str, claims: Iterable[tuple[int, int]]) -> list[ScriptCall]:
        """The calls that announce claims again, each a slot and a time in microseconds.

        What was settled meanwhile is not announced. Result: how many were.
        """
        pairs = list(claims)
        declared = self.known(topic) or self._standing(topic)
        return [
            self._announcing(
                declared,
                "hand_back",
                [declared.slot(slot).announced_times for slot, _ in some],
                [value for pair in some for value in pair],
                itemgetter(0),
            )
            for some in ([[pair] for pair in pairs] if self.clustered else [pairs])
        ]

    # -- metrics

    def counting(self, topic: str | None, added: dict[str, int]) -> ScriptCall:
        """The call that adds to a topic's counters, or to those of scripts. Result: whether
        there is such a topic."""
        keys, pairs = self.keys, [value for pair in added.items() for value in pair]
        if topic is None:
            return ScriptCall(load("count"), (keys.topics, keys.scripts), ("", *pairs), bool)
        places = (keys.topics, keys.counted(topic), *keys.minutes(topic))
        return ScriptCall(load("count"), places, (topic, *pairs), bool)

    # -- shared

    def _slot_keys(self, topic: Topic, numbers: Iterable[int]) -> list[str]:
        keys: list[str] = []
        for number in numbers:
            slot = topic.slot(number)
            keys += (
                slot.announced_times,
                slot.prepare,
                slot.body,
                slot.dead,
                slot.reasons,
                slot.tokens,
                *slot.stores,
            )
        return keys

    def _announcing(
        self,
        topic: Topic,
        script: str,
        keys: Sequence[str],
        args: Sequence[Any],
        parse: Callable[[Any], Any],
        *,
        keys_recur: bool = False,
    ) -> ScriptCall:
        """A call of a script that writes into the topic's wake index; on a Cluster, that is not
        on the node of its keys, and the script says what is to be written."""
        wake = self.keys.wake(topic.name)
        if self.clustered:
            elsewhere = (wake, topic.declaration.expires or 0)
            return ScriptCall(load(script), keys, args, parse, keys_recur, elsewhere)
        return ScriptCall(load(script), (*keys, wake), args, parse, keys_recur)


def _listed(steps: Iterable[int]) -> str:
    """Priority steps as a URL has them."""
    return ",".join(map(str, steps))


def shares(most: int, among: Sequence[int]) -> list[tuple[int, int]]:
    """So many things, dealt out evenly: (who, how many), without those who get none."""
    each, rest = divmod(most, len(among))
    return [(who, each + (at < rest)) for at, who in enumerate(among) if each or at < rest]


def _backing_off(limits: Limits) -> tuple[int, int]:
    """The first wait after a failure and the longest, in milliseconds."""
    return int(limits.retry_backoff * 1000), int(limits.retry_backoff_max * 1000)


def _readable(text: str) -> bytes:
    """A text as it is kept: what no UTF-8 can hold, such as half of a file's name, is escaped."""
    return text.encode("utf-8", "backslashreplace")


def _read_deliveries(
    topic: Topic, numbers: Sequence[int], name: str, flat: list[Any]
) -> list[Delivery]:
    """What a pop of that name has delivered."""
    retries = topic.declaration.retries

    def named(id: bytes | list[bytes]) -> tuple[bytes, str]:
        return (id[0], id[1].decode()) if isinstance(id, list) else (id, name)

    return [
        Delivery(
            topic.name,
            numbers[flat[i]],
            flat[i + 1],
            id.decode("utf-8", "surrogatepass"),
            flat[i + 3],
            flat[i + 4],
            retries,
            birth,
        )
        for i in range(0, len(flat), 5)
        for id, birth in [named(flat[i + 2])]
    ]


def _read_put(counts: TopicCounts, raw: list[Any]) -> Put:
    id, added, now, *_ = raw
    counts.put += added
    return Put(text(id), bool(added), now or None)


def _read_reject(counts: TopicCounts, raw: list[Any]) -> str | None:
    counts.rolled_back += raw[0] == 1
    counts.dead += raw[0] == 2
    return {1: WAITING, 2: DEAD}.get(raw[0])
