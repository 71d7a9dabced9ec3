"""Topics at run time: what one is declared with, and how that is changed while it is in use."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from secrets import token_urlsafe
from typing import Any

from redis.exceptions import ResponseError

from .. import errors
from ..client.connection import pipelined
from ..metrics import count_first
from ..model import limits as terms
from ..model import results
from ..model.topic import Declaration, Slot, Topic, base_of, check_name
from ..scripts.call import ScriptCall, as_bytes, load, microseconds, rows, texts
from .calls import FULL, Context, logs_of
from .core import CenterPart, Core
from .registry import AT_ONCE, RELOAD
from .runner import Away, named
from .schedules import Recurring
from .waiting import sleep_of

# -- topics that go away when nobody uses them
#
# There are two kinds. A topic for replies or events is kept by whoever has declared it, and its
# keys live as long as its declaration says without being refreshed. A topic with ``kept``, which is
# a queue's ``x-expires``, goes to the second: that long after its last consumer has left, and after
# the last declaration or put. Its keys outlive that, lest a server that stands still for a moment
# takes messages from consumers that live: somebody sweeps the topic when its time has come.


@lru_cache(maxsize=1)
def _user(pid: int) -> str:
    """The name of this process among those that use a topic; a forked child is another one."""
    return f"{socket.gethostname()}:{pid}:{token_urlsafe(6)}"


class Expiring(CenterPart):
    """Keeps topics that expire, and finds those that have expired."""

    def refresh(self, name: str, expires_ms: int) -> None:
        """Keep a topic that expires, with its messages; declare it again if it has expired.

        One that this center has never seen, and that nobody has declared, was deleted just now:
        nothing is done.
        """
        registry = self._registry
        before = registry.known(name)  # to find that it is gone is to forget it
        known = registry.recent(name) or before
        if known is None:
            return
        if known.declaration.kept:
            self.hold(known)
            return
        wanted = replace(known.declaration, expires=expires_ms)
        self._keep(expires_ms, registry.declare_call(name, wanted))

    def hold(self, topic: Topic) -> None:
        """Keep a topic with ``kept`` for that long, because it is consumed here."""
        kept = topic.declaration.kept or 0
        self._keep(kept, self._using(topic, kept))

    def leave(self, topic: Topic) -> None:
        """A topic is consumed here no more: it expires, unless others use it."""
        self._runner.run(self._using(topic, 0))

    def touch(self, topic: Topic, margin_ms: int = 0) -> None:
        """A topic with ``kept`` was declared, or something is put: it begins to expire anew.

        margin_ms: milliseconds that it lasts longer
        """
        declaration = topic.declaration
        call = self._registry.declare_call(topic.name, declaration)
        name, wanted, expires = call.args
        call = call._replace(args=(name, wanted, expires + margin_ms))
        self._keep(declaration.kept or 0, call)

    def _using(self, topic: Topic, hold_ms: int) -> ScriptCall:
        name, declaration = topic.name, topic.declaration
        return ScriptCall(
            load("use"),
            (self._keys.topics, self._keys.expiring, self._keys.users(name), self._keys.names),
            (name, declaration.to_json(), declaration.expires or 0, _user(os.getpid()), hold_ms),
            lambda raw: self._registry.learn(name, raw),
        )

    def _keep(self, lifetime_ms: int, call: ScriptCall) -> None:
        """Run the call that keeps a topic, and keep its keys for that long. If the call tells that
        somebody has deleted it, and declared it to stay, its keys are left alone."""
        topic: Topic = self._runner.run(call)
        if topic.declaration.expires:
            keys = [key for slot in topic.all_slots() for key in slot.all()]
            keys.append(self._keys.wake(topic.name))
            pipelined(self._client, [("PEXPIRE", key, lifetime_ms) for key in keys])

    def stale(self, most: int = 100) -> list[str]:
        """Take the names of what has expired: ``topic:NAME`` and ``exchange:NAME``."""
        names: list[str] = self._runner.run(
            ScriptCall(
                load("sweep"),
                (self._keys.expiring, self._keys.topics, self._keys.names),
                (most,),
                texts,
            )
        )
        return names


# -- topics at run time

#: Priority steps that consumers read, at most: a lease has room for the number of one.
MAX_STEPS = 30

#: The limits that can be changed while a topic is in use, by name.
ALTERABLE = (*(name for name in terms.LIMITS if name not in ("slots", "expires")), "steps")

#: What is far ahead of a topic is counted up to so many in each table of the library.
MOST_FAR = 100_000

#: Seconds between two looks whether something was put into a topic that was deleted.
LOOK_AGAIN = 0.25


# -- the calls: arguments in, a :class:`ScriptCall` out

#: Messages that one call of purge deletes per slot.
PURGE_STEP = 1000


def purge_call(context: Context, topic: Topic, slot: Slot) -> ScriptCall:
    """Delete waiting messages, at most PURGE_STEP. Result: how many, and the ids of copies
    that are to be removed from their copies sets."""
    counted = partial(count_first, context.counts(topic), "purged")

    return context.announcing(
        topic,
        "purge",
        (slot.announced_times, slot.body, slot.reasons, slot.tokens, *slot.stores, slot.claims),
        (len(slot.stores), slot.number, PURGE_STEP),
        lambda raw: (counted(raw), texts(raw[1])),
        limited=slot if topic.declaration.lanes else None,
    )


def vacate_call(topic: Topic, slot: Slot) -> ScriptCall:
    """Delete what is left of a slot without messages. Result: False if it has any."""
    kept = {slot.body, slot.leaving, *slot.of_schedules()} - {slot.schedule_names}
    others = [key for key in slot.all() if key not in kept]
    return ScriptCall(
        load("vacate"), (slot.body, *others, *map(slot.store, topic.other_steps())), (), bool
    )


def counts_call(topic: Topic, slots: Sequence[Slot]) -> ScriptCall:
    """Count messages. Result: a list of :class:`Counts`, one a slot."""
    keys: list[str] = []
    for slot in slots:
        keys += (slot.prepare, slot.dead, *slot.stores)
    return ScriptCall(
        load("counts"),
        keys,
        (len(slots), len(topic.steps), 0),
        lambda raw: [results.Counts(*counts[:4]) for counts in rows(raw, 5)],
    )


def coming_call(slot: Slot, times_us: Sequence[int]) -> ScriptCall:
    """Count waiting messages that are due by each of some times, microseconds from now.
    Result: a list of numbers."""
    return ScriptCall(load("coming"), slot.stores, times_us, list)


def summary_call(slot: Slot) -> ScriptCall:
    """Result: :class:`Counts`, and for how many microseconds the oldest due message has been
    due."""
    return ScriptCall(
        load("counts"),
        (slot.prepare, slot.dead, *slot.stores),
        (1, len(slot.stores), 1),
        lambda raw: (results.Counts(*raw[:4]), raw[4]),
    )


def usage_call(slot: Slot) -> ScriptCall:
    """Tell what is used of a topic's limits in a slot. Result: :class:`SlotUsage`."""
    _, turns, waits, pace, _, busy, _ = slot.lane_keys
    return ScriptCall(
        load("usage"),
        (turns, waits, pace, busy, slot.put_pace, *slot.stores),
        (),
        lambda raw: results.SlotUsage(*raw),
    )


class Queues(CenterPart):
    """Queues: what they are declared with, what they hold, and who consumes them."""

    def __init__(self, core: Core, recurring: Recurring) -> None:
        super().__init__(core)
        self._recurring = recurring
        self._sleep = sleep_of(self._client)
        self.declare = core.registry.declare
        self.names = core.registry.topics

    # -- declarations

    def alter(self, /, topic: str, **limits: Any) -> Topic:
        """Change limits of a declared topic while it is in use; return it as it is declared then.

        limits: those of :meth:`declare`, but for ``slots`` and ``expires``; None takes one back to
            the default of whoever uses the topic (``retries`` and ``steps``: of this center); of
            those for starts, keys and puts, None takes one away

        Consumers and producers know within five seconds. Several may alter a topic at the same
        time: what each has named holds, and nothing else changes. What a message has already, it
        keeps: the lease of one that is in flight, the retries that one has left that was tried.

        Messages under a step that is removed are delivered like the others: consumers go on
        reading it, and nothing is put there any more. While steps are added, a message that is in
        flight or dead may come back under a neighbouring one.

        Raises UnknownTopicError if nobody has declared the topic, ConfigurationError for a limit
        that makes no sense or cannot be altered, or does not go with the others; with a task
        library, LibraryError if that cannot be told: it is altered all the same.
        """
        wanted = self._checked(topic, limits)
        self._registry.check_horizon(topic, limits)
        while True:
            declared = self._require(topic)
            changed = self._changed(declared, wanted)
            # If not, somebody else has changed it meanwhile, and this begins anew.
            if self._registry.redeclare(declared, changed):
                altered = self._registry.declared(topic) or replace(declared, declaration=changed)
                if self._core.recorder is not None:
                    self._core.recorder.altered(declared, altered)
                return altered

    def describe(self, topic: str) -> results.Description:
        """What a topic is declared with, where each limit comes from, and what is in it.

        Raises UnknownTopicError if nobody has declared it, PartialError as :meth:`counts`.
        """
        declared = self._require(topic)
        standing = declared.declaration
        in_force = standing.limits(self._context.limits)
        own = (*terms.TERMS, *terms.LIBRARY_TERMS, *terms.NOTIFIER_TERMS, "steps")
        limits = {}
        for name in ("retries", *terms.Limits._fields, *own):
            said = getattr(standing, name)
            value = getattr(in_force, name, None) if said is None else said
            if name == "steps":
                value = declared.open_steps
            elif name == "key_weights" and value:
                value = dict(value)
            origin = results.DEFAULT if said is None else results.DECLARED
            limits[name] = results.Limit(value, origin)
        away: tuple[Any, ...] = ()
        try:
            counts = self.counts(topic)
        except errors.PartialError as exc:
            counts, away = exc.results, tuple(exc.missing)
        described = results.Description(
            topic,
            declared.slots,
            limits,
            standing.closed_steps,
            standing.expires,
            standing.draining_counts,
            self.is_paused(topic),
            counts,
            self.consumers().get(topic, []),
            standing.target_stopped,
        )
        if away:
            raise errors.PartialError(described, away)
        return described

    def _require(self, topic: str) -> Topic:
        """The topic as it is declared now. Raises UnknownTopicError if nobody has declared it."""
        declared = self._registry.declared(topic)
        if declared is None:
            raise errors.UnknownTopicError(f"there is no queue {topic!r}")
        return declared

    @staticmethod
    def _checked(topic: str, limits: dict[str, Any]) -> dict[str, Any]:
        """The limits as they are stored; None stays None."""
        if "slots" in limits:
            raise errors.SlotCountError(
                f"queue {topic!r}: the slot count is changed by another command: "
                f"'celery toc reshard {topic} --slots {limits['slots']}'"
            )
        if "expires" in limits:
            raise errors.ConfigurationError(
                f"queue {topic!r}: whether it expires, and when, is settled when it is declared; "
                f"delete it, and declare it anew"
            )
        unknown = set(limits) - set(ALTERABLE)
        if unknown:
            raise errors.ConfigurationError(
                f"queue {topic!r}: unknown limit {min(unknown)!r}; there are {', '.join(ALTERABLE)}"
            )
        checked = Declaration.of(topic, **limits)
        return {
            name: None if value is None else getattr(checked, name)
            for name, value in limits.items()
        }

    def _changed(self, topic: Topic, wanted: dict[str, Any]) -> Declaration:
        fields = dict(wanted)
        if "retries" in fields and fields["retries"] is None:
            fields["retries"] = self._registry.retries
        if "steps" in fields:
            fields.update(self._steps(topic, fields["steps"] or self._registry.steps))
        for name, needed in terms.NEEDS.items():  # what says nothing any more goes with the other
            if needed in fields and not fields[needed]:
                fields.setdefault(name, None)
        if "target" in fields:  # whoever names one wants something sent there
            fields["target_stopped"] = None
        changed = replace(topic.declaration, **fields).with_lanes()
        if not fields.keys().isdisjoint(terms.LIBRARY_TERMS):
            changed.check_horizon(topic.name)
        if not fields.keys().isdisjoint(terms.TERMS):
            changed.check_gates(topic.name, clustered=self._context.clustered)
        return changed

    @staticmethod
    def _steps(topic: Topic, wanted: tuple[int, ...] | None) -> dict[str, Any]:
        """The fields of a declaration with these steps. Those that it has had stay among those
        that consumers read: messages may be there, and a producer that does not know yet may put
        one there."""
        steps = terms.check_steps(wanted or terms.PRIORITY_STEPS)
        before = topic.declaration.steps or {*topic.steps, *terms.PRIORITY_STEPS}
        every = tuple(sorted({*before, *steps}))
        if len(every) > MAX_STEPS:
            raise errors.ConfigurationError(
                f"queue {topic.name!r} has had {len(before)} priority steps, and with these there "
                f"would be more than {MAX_STEPS}: use some that it has had, or let it run empty "
                "and delete it"
            )
        closed = tuple(step for step in every if step not in steps)
        return {"steps": every, "closed_steps": closed, "altered": True}

    # -- what they hold, and who consumes them

    def counts_by_slot(self, topic: str, *, reachable: bool = False) -> list[results.Counts]:
        """How many messages each slot holds, by slot number.

        reachable: without the slots on nodes of a Cluster that cannot be reached; otherwise these
            raise PartialError, whose results have no number for them
        """
        declared = self._registry.standing(topic)
        calls = [
            counts_call(declared, slots) for slots in self._context.groups(declared.all_slots())
        ]
        away = Away()
        parts = self._runner.run_there(calls, away)
        found = [counts for part in parts for counts in part or ()]
        return found if reachable else away.checked(found)

    def counts(self, topic: str) -> results.Counts:
        """How many messages a topic holds. Raises PartialError, with what the others hold, while
        nodes of a Cluster are away."""
        try:
            return _sum(self.counts_by_slot(topic))
        except errors.PartialError as exc:
            raise errors.PartialError(_sum(exc.results), exc.missing) from exc.__cause__

    def coming(self, topic: str, seconds: Sequence[float]) -> list[int]:
        """How many waiting messages are due by each of some times.

        seconds: the times, from now by Redis's clock; 0 counts what is due already

        Raises PartialError as :meth:`counts`.
        """
        times = [microseconds(time) or 0 for time in seconds]
        slots = self._registry.standing(topic).all_slots()
        away = Away()
        calls = [coming_call(slot, times) for slot in slots]
        by_slot = [part for part in self._runner.run_there(calls, away) if part is not None]
        none = [0] * len(times)
        return away.checked([sum(column) for column in zip(none, *by_slot, strict=True)])

    def summary(self, topic: str | Iterable[str] | None = None) -> list[results.Summary]:
        """How many messages topics hold, and how long their oldest due message has been due.

        topic: one, or several; all declared topics unless given

        Raises PartialError as :meth:`counts`, also for slots with a key that another program has
        written; a topic of which no slot answers is left out.
        """
        if topic is None or isinstance(topic, str):
            topics = self._registry.select(topic)
        else:
            named = set(topic)
            topics = [one for one in self._registry.select(None) if one.name in named]
        calls = [summary_call(slot) for one in topics for slot in one.all_slots()]
        away = Away()
        parts = iter(self._runner.run_there(calls, away, misused=True))
        summaries = []
        for one in topics:
            by_slot = [part for part in itertools.islice(parts, one.slot_span) if part is not None]
            if not by_slot:
                continue
            summaries.append(
                results.Summary(
                    one.name,
                    one.slots,
                    _sum(counts for counts, _ in by_slot),
                    max(oldest for _, oldest in by_slot),
                )
            )
        return away.checked(summaries)

    def usage(self, topic: str) -> results.Usage:
        """What is used of a topic's limits of starts, keys and puts, and what waits because of
        them. O(log n), however many keys there are.

        Raises UnknownTopicError if nobody has declared the topic, PartialError as :meth:`counts`.
        """
        declared = self._require(topic)
        calls = [usage_call(slot) for slot in declared.all_slots()]
        away = Away()
        slots = [one for one in self._runner.run_there(calls, away) if one is not None]
        if not slots:
            raise errors.PartialError(None, away.missing)
        return away.checked(results.usage_of(topic, declared.declaration, slots))

    def unwritten(self, topic: str | None = None) -> list[results.Unwritten]:
        """What the task library has no rows of yet, of topics that are declared with ``library``
        as ``behind``.

        topic: all of these unless given
        """
        seconds, us = self._client.time()
        now = seconds * 1_000_000 + us
        found = []
        for one in self._registry.select(topic):
            bound = one.declaration.logs
            if not bound:
                continue
            asked: list[tuple[Any, ...]] = []
            for slot in logs_of(one):
                asked += ("XLEN", slot.log), ("XRANGE", slot.log, "-", "+", "COUNT", 1)
            replies = pipelined(self._client, asked)
            first = [entry for some in replies[1::2] for entry in some]
            oldest = min((int(name.split(b"-")[0]) * 1000 for name, _ in first), default=now)
            full = any(FULL.encode() in said for _, said in first)
            full = full or any(length >= bound for length in replies[::2])
            found.append(results.Unwritten(one.name, sum(replies[::2]), max(now - oldest, 0), full))
        return found

    def consumers(self) -> dict[str, list[results.Consumer]]:
        """The processes that consume each topic through the transport.

        They report within a second what they consume, and are forgotten a minute after they died.
        """
        seconds, us = self._client.time()
        now = seconds * 1000 + us // 1000
        by_topic: dict[str, list[results.Consumer]] = {}
        for raw in self._client.zrangebyscore(self._keys.consumers, f"({now}", "+inf"):
            host, pid, *topics = json.loads(raw)
            for topic in topics:
                by_topic.setdefault(topic, []).append(results.Consumer(host, pid))
        return by_topic

    def count_far(self, topic: str | None = None, *, limit: int = MOST_FAR) -> dict[str, int]:
        """How many messages are in the task library only, because they are further ahead than the
        horizon (``x-horizon``) of their topic. The other counts are of what is in Redis.

        topic: all declared topics unless given
        limit: of each topic, so many are counted in each table of the library at most

        Returns the number of each topic with a horizon. Raises LibraryError, also if there is such
        a topic and this center has no library.
        """
        topics, far = self._registry.far(topic), self.far
        if topics and far is None:
            raise errors.LibraryError(
                f"topic {topics[0].name!r} has a horizon, and this process no task library: set "
                "toc_library"
            )
        return {one.name: far.count(one.name, limit) for one in topics if far}

    def purge(
        self, topic: str, *, on_progress: results.OnProgress = results.tell_nobody
    ) -> results.Purged:
        """Delete every waiting message, due or not; return how many there were, and which schedules
        have lost their next firing by that.

        Messages in flight and dead messages stay. In bounded steps, so that a large topic does not
        block the server; what is put meanwhile may survive.
        """
        declared = self._registry.standing(topic)
        if declared.declaration.expires:
            return results.Purged(self._purge(declared, on_progress))
        purged = self._purge_far(topic) + self._purge(declared, on_progress)
        if self._core.recorder is not None:
            self._core.recorder.purged(topic)
        return results.Purged(purged, self._recurring.recheck(topic) if purged else ())

    def _purge_far(self, topic: str) -> int:
        far = self._far_of(topic)
        return 0 if far is None else far.purge(topic)

    def _purge(self, topic: Topic, on_progress: results.OnProgress = results.tell_nobody) -> int:
        total = 0
        for slot in topic.all_slots():
            call = purge_call(self._context, topic, slot)
            while True:
                count, copies = self._runner.run(call)
                total += count
                self._runner.send_counters()
                on_progress(total, 0)
                for id in copies:
                    self._client.hdel(as_bytes(slot.copies(base_of(id))), as_bytes(id))
                if count < PURGE_STEP:
                    break
        return total

    def delete(
        self,
        topic: str,
        *,
        if_empty: bool = False,
        if_undeclared: bool = False,
        settle: float = RELOAD,
    ) -> bool:
        """Delete a topic with everything in it: waiting, in flight and dead.

        if_empty: only if it holds no message in any state. One that is put meanwhile stays, and
            so does the topic
        if_undeclared: only what a topic that has expired has left. One that is declared anew
            meanwhile stays
        settle: with `if_empty`, seconds for which this waits for such a message. For five seconds
            a producer may put messages by what it has read before; who says less may leave one
            in a topic that nobody has declared

        Returns whether it is deleted. Who uses it later declares it anew.
        """
        if if_undeclared and self._registry.declared(topic) is not None:
            return False
        declared = self._registry.standing(topic)
        if if_empty:
            return self._delete_empty(declared, settle)
        # What goes away by itself has no rows: nobody waits for a database.
        recorder = None if declared.declaration.expires else self._core.recorder
        if recorder is not None:
            self._purge_far(topic)
        self._purge(declared)
        copies = [
            slot.copies(id.rpartition("#")[0])
            for slot in declared.all_slots()
            for key in (slot.prepare, slot.dead)
            for id in texts(raw for raw, _ in self._client.zscan_iter(key, match="*#*"))
        ]
        coming = self._client.zscan_iter(declared.slot(0).coming, count=AT_ONCE)
        schedules = texts(name for name, _ in coming)
        if if_undeclared and self._registry.declared(topic) is not None:
            return False
        steps = declared.other_steps()
        gone = [(*slot.all(), *map(slot.store, steps)) for slot in declared.all_slots()]
        gone += [(key,) for key in copies]
        pipelined(self._client, [("UNLINK", *keys) for keys in gone])
        self._undeclare(declared, schedules, is_declared=not if_undeclared)
        if recorder is not None:
            recorder.purged(topic)
            recorder.forgotten(topic)
        return True

    def _delete_empty(self, topic: Topic, settle: float) -> bool:
        if self._holds_any(topic):
            return False
        until = time.monotonic() + settle
        paused = topic.name in self.paused()
        self._undeclare(topic)
        # Who puts a message from now on declares the topic; who has read the declaration before
        # may have put one just now.
        calls = [vacate_call(topic, slot) for slot in topic.all_slots()]
        stays = not all(self._runner.run_all(calls))
        while not stays and (left := until - time.monotonic()) > 0:
            self._sleep(min(left, LOOK_AGAIN))
            stays = self._holds_any(topic)
        if not stays:
            return True
        standing = self._registry.declared(topic.name)
        if standing is None:
            self._registry.declare_again(topic)
            if paused:
                self.pause(topic.name)
        elif standing.slots != topic.slots:
            # Somebody has declared it anew meanwhile, with another slot count.
            counts = {*standing.declaration.draining_counts, topic.slots}
            drains = replace(standing.declaration, draining_counts=tuple(sorted(counts)))
            self._registry.redeclare(standing, drains)
        return False

    def _holds_any(self, topic: Topic) -> bool:
        far = self._far_of(topic.name)
        if far is not None and far.count(topic.name, 1):
            return True
        places = [(slot.body, slot.leaving) for slot in topic.all_slots()]
        asked = (*places, (topic.slot(0).schedules,))
        return any(pipelined(self._client, [("EXISTS", *keys) for keys in asked]))

    def _undeclare(
        self, declared: Topic, schedules: Sequence[str] = (), *, is_declared: bool = True
    ) -> None:
        keys, topic = self._keys, declared.name
        zones = [keys.passed_on(topic, slot) for slot in range(declared.slot_span)]
        commands: list[tuple[str, ...]] = [("UNLINK", keys.wake(topic), *zones)]
        if is_declared:  # else the script that found it expired has done that
            commands += ("UNLINK", keys.users(topic)), ("HDEL", keys.topics, topic)
            commands += (("ZREM", keys.names, topic), ("ZREM", keys.expiring, f"topic:{topic}"))
        commands += (
            ("SREM", keys.paused, topic),
            ("UNLINK", keys.counted(topic), keys.minutes(topic)),
            ("ZSCORE", keys.scheduled_names, topic),
        )
        *_, had_schedules = pipelined(self._client, commands)
        self._registry.forget(topic)
        if had_schedules is not None or schedules:
            self._recurring.places.gone(topic, schedules)

    def pause(self, topic: str) -> bool:
        """Stop consumers from taking messages of a topic; return whether that is a change.

        Consumers of the transport notice within five seconds. Messages can be put as ever, and are
        kept; what is in flight goes on. Callers of :meth:`pop` get messages all the same.

        With a task library, raises LibraryError if that cannot be told: it is paused all the same.
        """
        return self._pause(topic, True)

    def resume(self, topic: str) -> bool:
        """Let consumers of a topic go on; otherwise as :meth:`pause`."""
        return self._pause(topic, False)

    def _pause(self, topic: str, paused: bool) -> bool:
        check_name(topic)
        is_new = bool(self._of_paused("SADD" if paused else "SREM", topic))
        if self._core.recorder is not None:
            self._core.recorder.paused(topic, paused)
        return is_new

    def paused(self) -> set[str]:
        """The topics that are paused."""
        return set(texts(self._of_paused("SMEMBERS")))

    def is_paused(self, topic: str) -> bool:
        """Whether a topic is paused, however many others are."""
        return bool(self._of_paused("SISMEMBER", topic))

    def _of_paused(self, command: str, *topics: str) -> Any:
        key = self._keys.paused
        try:
            return self._client.execute_command(command, key, *topics)
        except ResponseError as exc:
            raise named(exc, self._client, [key]) from exc


def _sum(counts: Iterable[results.Counts]) -> results.Counts:
    return results.Counts(
        *(sum(column) for column in zip(results.Counts(0, 0, 0, 0), *counts, strict=True))
    )
