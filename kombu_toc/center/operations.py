"""Changes messages and topics: cancel, reschedule, requeue, purge, delete, pause."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ..errors import PartialError
from ..model.delivery import is_receipt, origin_in
from ..model.keys import Keys, check_name
from ..model.results import (
    DEAD,
    IN_FLIGHT,
    WAITING,
    Cancelled,
    Delivery,
    Found,
    Purged,
    Rescheduled,
)
from ..model.topic import Topic, base_of
from ..scripts.call import ScriptCall, as_bytes, microseconds, texts, when_of
from .admin_commands import PURGE_STEP, AdminCommands, CancelReply, Place
from .find import CALLS_TOGETHER, IDS_PER_CALL, Lookup, Scan, ids_of
from .pop_wait import sleep_of
from .recording import Far, Recorder
from .registry import RELOAD, Registry, pages
from .runner import Away, Runner
from .schedules import Recurring

T = TypeVar("T", Cancelled, Rescheduled)

#: Seconds between two looks whether something was put into a topic that was deleted.
LOOK_AGAIN = 0.25


class Operations:
    """Operations of people and tools. `topic` is the name of the topic to look at; without it, all
    declared topics are."""

    def __init__(
        self,
        runner: Runner,
        registry: Registry,
        keys: Keys,
        commands: AdminCommands,
        lookup: Lookup,
        scan: Scan,
        recurring: Recurring,
    ) -> None:
        self._runner = runner
        self._client = runner.client
        self._registry = registry
        self._keys = keys
        self._commands = commands
        self._lookup = lookup
        self._scan = scan
        self._recurring = recurring
        self._sleep = sleep_of(runner.client)
        #: who keeps a record of what is done here, if anybody does
        self.recorder: Recorder | None = None

    # -- by id

    def cancel(
        self,
        id: str | Iterable[str],
        *,
        topic: str | None = None,
        basis: str | None = None,
        in_flight: bool = False,
        dead: bool = True,
        revoked: bool = False,
    ) -> list[Cancelled]:
        """Delete messages by id, and the copies that share it.

        id: one, or several; a receipt of a delivery stands for just its message
        in_flight: also delete those that a consumer has taken; it is not told
        dead: also delete those that were given up on
        revoked: whether a task library is to have them as revoked, not as cancelled

        Returns what there was and whether it is deleted: a message that is in flight was cancelled
        too late. An empty list if there was none. Raises PartialError as :meth:`get`: what the
        other nodes have is deleted.
        """
        states = _states_to_cancel(in_flight, dead)

        def command(place: Place) -> ScriptCall:
            return self._commands.cancel(place, states, copies=True, bodies=True)

        named = ids_of(id)
        if receipts := [one for one in named if is_receipt(one)]:
            meant = [one for receipt in receipts for one in self._delivered_by(receipt)]
            how = {"in_flight": in_flight, "dead": dead, "revoked": revoked}
            gone = self.cancel_found(meant, **how)
            if named := [one for one in named if one not in receipts]:
                gone += self.cancel(named, topic=topic, basis=basis, **how)
            return gone
        far = self._far(topic)
        ahead = far.cancel(named, topic, revoked) if far is not None else []
        away = Away()
        replies = self._lookup.run_at(self._lookup.places(named, topic, basis), command, away)
        found = self._all_cancelled(replies, command)
        if self.recorder is not None:
            known = named
            if away:  # of the others nothing is known
                there = {base_of(one.id) for one in found} | {one.id for one in found}
                known = [one for one in named if one in there]
            found += self.recorder.cancelled(known, found, topic, revoked)
        return self._lookup.checked(named, _with(ahead, found), away)

    def _delivered_by(self, receipt: str) -> list[Found]:
        """The message of a receipt, if it is still there."""
        delivery = Delivery.of_receipt(receipt)
        origin = origin_in(delivery.birth, delivery.slot)
        return [
            one
            for one in self._lookup.get(delivery.id, topic=delivery.topic)
            if one.id == delivery.id and origin_in(one.own_token, one.slot) == origin
        ]

    def cancel_found(
        self,
        found: Iterable[Found],
        *,
        in_flight: bool = False,
        dead: bool = True,
        revoked: bool = False,
    ) -> list[Cancelled]:
        """Delete just these messages, and none that share their ids; otherwise as :meth:`cancel`.

        A message that has changed its state meanwhile is deleted if messages of that state are.
        Raises PartialError, with what the others had, while nodes of a Cluster are away.
        """
        states = _states_to_cancel(in_flight, dead)

        def command(place: Place) -> ScriptCall:
            return self._commands.cancel(place, states, copies=False, bodies=True)

        ahead: list[Cancelled] = []
        if self.recorder is not None:
            found = list(found)
            far = [one for one in found if one.far]
            ahead = self.recorder.far.cancel_found(far, revoked)
        away = Away()
        cancelled = self._all_cancelled(self._run_for(found, command, away), command)
        if self.recorder is not None:
            self.recorder.deleted(cancelled, revoked)
        return away.checked(_with(ahead, cancelled))

    def _all_cancelled(
        self, replies: Iterable[tuple[Place, CancelReply]], command: Callable[[Place], ScriptCall]
    ) -> list[Cancelled]:
        """What was cancelled; asks again for ids that a call has not looked at."""
        cancelled: list[Cancelled] = []
        left: list[Place] = []
        for place, reply in replies:
            cancelled += reply.cancelled
            if reply.done < len(place.ids):
                left.append(place._replace(ids=place.ids[reply.done :]))
        while left:
            place = left.pop()
            reply = self._runner.run(command(place))
            cancelled += reply.cancelled
            if reply.done < len(place.ids):
                left.append(place._replace(ids=place.ids[reply.done :]))
        firings: dict[str, list[str]] = defaultdict(list)
        for one in cancelled:
            if one.deleted and "@" in one.id:
                firings[one.topic].append(one.id)
        gone = {
            (topic, name)
            for topic, ids in firings.items()
            for name in self._recurring.recheck(topic, ids)
        }
        if not gone:
            return cancelled
        named = ((one, one.id.rpartition("@")[0]) for one in cancelled)
        return [
            one._replace(schedule=name) if one.deleted and (one.topic, name) in gone else one
            for one, name in named
        ]

    def reschedule(
        self,
        id: str,
        *,
        at: float | None = None,
        delay: float | None = None,
        topic: str | None = None,
        basis: str | None = None,
    ) -> list[Rescheduled]:
        """Give a waiting message, and waiting copies of it, another action time; neither `at`
        nor `delay` means now.

        at: seconds since the epoch
        delay: seconds from now by Redis's clock

        Returns what there was and whether it is moved: only what is waiting can be. An empty
        list if there was none. Raises ActionTimeError beyond the year 2255, PartialError as
        :meth:`cancel`.
        """
        ids_of(id)
        when = when_of(microseconds(at), microseconds(delay))
        far, ahead = self._far(topic), list[Rescheduled]()
        if far is not None:
            ahead = far.reschedule([id], topic, microseconds(at), microseconds(delay))

        def command(place: Place) -> ScriptCall:
            [one] = place.ids
            return self._commands.reschedule(place.topic, place.slot, one, when, copies=True)

        away = Away()
        replies = self._lookup.run_at(self._lookup.places(id, topic, basis), command, away)
        moved = [one for _, part in replies for one in part]
        if self.recorder is not None and (moved or not away):
            times = microseconds(at), microseconds(delay)
            moved += self.recorder.rescheduled([id], moved, topic, *times)
        return self._lookup.checked(id, _with(ahead, moved), away)

    def reschedule_found(
        self, found: Iterable[Found], *, at: float | None = None, delay: float | None = None
    ) -> list[Rescheduled]:
        """Give just these messages another action time, and none that share their ids;
        otherwise as :meth:`reschedule`. Raises PartialError as :meth:`cancel_found`."""
        when = when_of(microseconds(at), microseconds(delay))
        ahead: list[Rescheduled] = []
        found = list(found)
        if self.recorder is not None:
            far = [one for one in found if one.far]
            times = microseconds(at), microseconds(delay)
            ahead = self.recorder.far.reschedule_found(far, *times)
        calls = []
        for one in found:
            topic = self._registry.resolved(one.topic)
            slot = topic.slot(one.slot)
            calls.append(self._commands.reschedule(topic, slot, one.id, when, copies=False))
        moved, away = list[Rescheduled](), Away()
        for start in range(0, len(calls), CALLS_TOGETHER):
            for part in self._runner.run_there(calls[start : start + CALLS_TOGETHER], away):
                moved += part or ()
        self._runner.send_counters()
        if self.recorder is not None:
            self.recorder.moved(moved, found)
        return away.checked(_with(ahead, moved))

    def _far(self, topic: str | None) -> Far | None:
        """What is too far ahead to be in Redis, if a topic may have such messages."""
        recorder = self.recorder
        return recorder.far if recorder is not None and self._registry.far(topic) else None

    def run_now(
        self, id: str, *, topic: str | None = None, basis: str | None = None
    ) -> list[Rescheduled]:
        """Make a waiting message due now; as :meth:`reschedule`."""
        return self.reschedule(id, topic=topic, basis=basis)

    # -- dead messages

    def requeue_dead(
        self,
        topic: str | None = None,
        *,
        ids: Iterable[str] | None = None,
        where: Callable[[Found], Any] | None = None,
    ) -> int:
        """Take messages out of DeadQueue and have them delivered now, with all their retries.

        ids: only these, and the copies that share them
        where: only messages for which this is true

        Returns how many. In bounded steps; what dies meanwhile stays dead. Raises PartialError,
        with the number of the others, while nodes of a Cluster are away.
        """
        recorder, total, away = self.recorder, 0, Away()
        dead = self._dead(topic, ids, where, away, bodies=recorder is not None)
        while batch := list(itertools.islice(dead, IDS_PER_CALL)):
            if recorder is not None:
                recorder.requeuing(batch)
            for place, number in self._run_for(batch, self._commands.requeue, away):
                if number and recorder is not None:
                    recorder.requeued([(place.topic.name, id) for id in place.ids])
                total += number
        return away.checked(total)

    def purge_dead(
        self,
        topic: str | None = None,
        *,
        ids: Iterable[str] | None = None,
        where: Callable[[Found], Any] | None = None,
    ) -> int:
        """Delete dead messages; return how many. Otherwise as :meth:`requeue_dead`."""

        def command(place: Place) -> ScriptCall:
            return self._commands.cancel(place, (DEAD,), copies=False, bodies=False)

        away = Away()
        replies = self._run_for(self._dead(topic, ids, where, away), command, away)
        deleted = [one for _, reply in replies for one in reply.cancelled if one.deleted]
        if self.recorder is not None:
            self.recorder.purged_dead([(one.topic, one.id) for one in deleted])
        return away.checked(len(deleted))

    def _dead(
        self,
        topic: str | None,
        ids: Iterable[str] | None,
        where: Callable[[Found], Any] | None,
        away: Away,
        *,
        bodies: bool = False,
    ) -> Iterator[Found]:
        """The dead messages, but not those that die from now on.

        away: notes the slots of nodes that are away
        """
        if ids is None:
            seconds, us = self._client.time()
            until = seconds + us / 1e6
            bodies = bodies or where is not None
            pairs = self._scan.read(topic, DEAD, until=until, bodies=bodies, away=away)
            found: Iterator[Found] = (one for one, _ in pairs)
        else:
            try:
                known = self._lookup.get(ids, topic=topic)
            except PartialError as exc:
                known = exc.results
                away.add(exc.missing)
            found = (one for one in known if one.state == DEAD)
        return found if where is None else filter(where, found)

    def _run_for(
        self, found: Iterable[Found], command: Callable[[Place], ScriptCall], away: Away
    ) -> Iterator[tuple[Place, Any]]:
        """Run a command for these messages, a bounded number at a time; the place and the result
        of each call.

        away: notes the slots of nodes that are away
        """
        found = iter(found)
        while batch := list(itertools.islice(found, IDS_PER_CALL)):
            by_slot: dict[tuple[str, int], list[str]] = defaultdict(list)
            for one in batch:
                by_slot[one.topic, one.slot].append(one.id)
            places = []
            for (name, number), ids in by_slot.items():
                topic = self._registry.standing(name)
                places.append(Place(topic, topic.slot(number), ids))
            results = self._runner.run_there([command(place) for place in places], away)
            for place, result in zip(places, results, strict=True):
                if result is not None:
                    yield place, result
        self._runner.send_counters()

    # -- whole topics

    def purge(self, topic: str) -> Purged:
        """Delete every waiting message, due or not; return how many there were, and which schedules
        have lost their next firing by that.

        Messages in flight and dead messages stay. In bounded steps, so that a large topic does not
        block the server; what is put meanwhile may survive.
        """
        declared = self._registry.standing(topic)
        if declared.declaration.expires:
            return Purged(self._purge(declared))
        purged = self._purge_far(topic) + self._purge(declared)
        if self.recorder is not None:
            self.recorder.purged(topic)
        return Purged(purged, self._recurring.recheck(topic) if purged else ())

    def _purge_far(self, topic: str) -> int:
        far = self._far(topic)
        return 0 if far is None else far.purge(topic)

    def _purge(self, topic: Topic) -> int:
        total = 0
        for slot in topic.all_slots():
            call = self._commands.purge(topic, slot)
            while True:
                count, copies = self._runner.run(call)
                total += count
                self._runner.send_counters()
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
        recorder = None if declared.declaration.expires else self.recorder
        if recorder is not None:
            self._purge_far(topic)
        self._purge(declared)
        copies = [
            slot.copies(id.rpartition("#")[0])
            for slot in declared.all_slots()
            for key in (slot.prepare, slot.dead)
            for id in texts(raw for raw, _ in self._client.zscan_iter(key, match="*#*"))
        ]
        coming = declared.slot(0).coming
        schedules = [name for some in pages(self._client, coming, "zscan") for name in texts(some)]
        if if_undeclared and self._registry.declared(topic) is not None:
            return False
        with self._client.pipeline(transaction=False) as pipe:
            for slot in declared.all_slots():
                pipe.unlink(*slot.all(), *map(slot.store, declared.other_steps()))
            for key in copies:
                pipe.unlink(as_bytes(key))
            pipe.execute()
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
        calls = [self._commands.vacate(topic, slot) for slot in topic.all_slots()]
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
        far = self._far(topic.name)
        if far is not None and far.count(topic.name, 1):
            return True
        with self._client.pipeline(transaction=False) as pipe:
            for slot in topic.all_slots():
                pipe.exists(slot.body)
            pipe.exists(topic.slot(0).schedules)
            return any(pipe.execute())

    def _undeclare(
        self, declared: Topic, schedules: Sequence[str] = (), *, is_declared: bool = True
    ) -> None:
        keys, topic = self._keys, declared.name
        with self._client.pipeline(transaction=False) as pipe:
            zones = [keys.passed_on(topic, slot) for slot in range(declared.slot_span)]
            pipe.unlink(keys.wake(topic), *zones)
            if is_declared:  # else the script that found it expired has done that
                pipe.unlink(keys.users(topic))
                pipe.hdel(keys.topics, topic)
                pipe.zrem(keys.names, topic)
                pipe.zrem(keys.expiring, f"topic:{topic}")
            pipe.srem(keys.paused, topic)
            pipe.unlink(keys.counted(topic), *keys.minutes(topic))
            pipe.zscore(keys.scheduled_names, topic)
            *_, had_schedules = pipe.execute()
        self._registry.forget(topic)
        if had_schedules is not None or schedules:
            self._recurring.places.gone(topic, schedules)

    def pause(self, name: str, paused: bool = True) -> bool:
        """Stop consumers from taking messages of a topic, or let them go on; return whether that
        is a change.

        Consumers of the transport notice within five seconds. Messages can be put as ever, and are
        kept; what is in flight goes on. Callers of :meth:`pop` get messages all the same.

        With a task library, raises LibraryError if that cannot be told: it is paused all the same.
        """
        check_name(name)
        change = self._client.sadd if paused else self._client.srem
        is_new = bool(change(self._keys.paused, name))
        if self.recorder is not None:
            self.recorder.paused(name, paused)
        return is_new

    def paused(self) -> set[str]:
        """The topics that are paused."""
        return set(texts(self._client.smembers(self._keys.paused)))

    def is_paused(self, topic: str) -> bool:
        """Whether a topic is paused, however many others are."""
        return bool(self._client.sismember(self._keys.paused, topic))


def _with(ahead: list[T], found: list[T]) -> list[T]:
    """What was found in the task library and in Redis: each once."""
    there = {one[:2] for one in found}
    return found + [one for one in ahead if one[:2] not in there]


def _states_to_cancel(in_flight: bool, dead: bool) -> Collection[str]:
    return (WAITING, *[IN_FLIGHT] * in_flight, *[DEAD] * dead)
