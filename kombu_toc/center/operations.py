"""Changes messages by id, and dead messages: cancel, reschedule, requeue, purge."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ..errors import PartialError
from ..model import results
from ..model.delivery import is_receipt, origin_in
from ..model.topic import base_of
from ..scripts.call import ScriptCall, microseconds, parts_of, when_of
from .admin_commands import CancelReply, Place
from .core import CenterPart, Core
from .find import CALLS_TOGETHER, IDS_PER_CALL, Lookup, Scan, ids_of
from .runner import Away
from .schedules import Recurring

T = TypeVar("T", results.Cancelled, results.Rescheduled)


class Operations(CenterPart):
    """Changes messages by id. `topic` is the name of the topic to look at; without it, all declared
    topics are."""

    def __init__(self, core: Core, lookup: Lookup, recurring: Recurring) -> None:
        super().__init__(core)
        self._lookup, self._recurring = lookup, recurring

    def cancel(
        self,
        id: str | results.Found | Iterable[str | results.Found],
        *,
        topic: str | None = None,
        basis: str | None = None,
        in_flight: bool = False,
        dead: bool = True,
        revoked: bool = False,
    ) -> list[results.Cancelled]:
        """Delete messages by id, and the copies that share it.

        id: one, or several; a receipt of a delivery, and what :meth:`get` or :meth:`scan` has
            found, stand for just that message. One that has changed its state since is deleted if
            messages of that state are
        in_flight: also delete those that a consumer has taken; it is not told
        dead: also delete those that were given up on
        revoked: whether a task library is to have them as revoked, not as cancelled

        Returns what there was and whether it is deleted: a message that is in flight was cancelled
        too late. An empty list if there was none. Raises PartialError as :meth:`get`: what the
        other nodes have is deleted.
        """
        how = {"in_flight": in_flight, "dead": dead, "revoked": revoked}
        named, meant = _named(id)
        if receipts := [one for one in named if is_receipt(one)]:
            meant += [one for receipt in receipts for one in self._delivered_by(receipt)]
            named = [one for one in named if one not in receipts]
        if meant or not named:
            gone = self._cancel_found(meant, **how)
            return gone + (self.cancel(named, topic=topic, basis=basis, **how) if named else [])
        states = _states_to_cancel(in_flight, dead)

        def command(place: Place) -> ScriptCall:
            return self._admin.cancel(place, states, copies=True, bodies=True)

        far = self._far_of(topic)
        ahead = far.cancel(named, topic, revoked) if far is not None else []
        away = Away()
        replies = self._lookup.run_at(self._lookup.places(named, topic, basis), command, away)
        found = self._all_cancelled(replies, command)
        if self._lookup.arrived(named, found, topic, away):
            replies = self._lookup.run_at(self._lookup.places(named, topic, basis), command, away)
            found += self._all_cancelled(replies, command)
        if self._core.recorder is not None:
            known = named
            if away:  # of the others nothing is known
                there = {base_of(one.id) for one in found} | {one.id for one in found}
                known = [one for one in named if one in there]
            found += self._core.recorder.cancelled(known, found, topic, revoked)
        return self._lookup.checked(named, _with(ahead, found), away)

    def _delivered_by(self, receipt: str) -> list[results.Found]:
        """The message of a receipt, if it is still there."""
        delivery = results.Delivery.of_receipt(receipt)
        origin = origin_in(delivery.birth, delivery.slot)
        return [
            one
            for one in self._lookup.get(delivery.id, topic=delivery.topic)
            if one.id == delivery.id and origin_in(one.own_token, one.slot) == origin
        ]

    def _cancel_found(
        self, found: Sequence[results.Found], *, in_flight: bool, dead: bool, revoked: bool
    ) -> list[results.Cancelled]:
        states = _states_to_cancel(in_flight, dead)

        def command(place: Place) -> ScriptCall:
            return self._admin.cancel(place, states, copies=False, bodies=True)

        ahead: list[results.Cancelled] = []
        if self._core.recorder is not None:
            far = [one for one in found if one.far]
            ahead = self._core.recorder.far.cancel_found(far, revoked)
        away = Away()
        cancelled = self._all_cancelled(self._lookup.run_for(found, command, away), command)
        if self._core.recorder is not None:
            self._core.recorder.deleted(cancelled, revoked)
        return away.checked(_with(ahead, cancelled))

    def _all_cancelled(
        self, replies: Iterable[tuple[Place, CancelReply]], command: Callable[[Place], ScriptCall]
    ) -> list[results.Cancelled]:
        """What was cancelled; asks again for ids that a call has not looked at."""
        cancelled: list[results.Cancelled] = []
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
        id: str | results.Found | Iterable[str | results.Found],
        *,
        at: float | None = None,
        delay: float | None = None,
        topic: str | None = None,
        basis: str | None = None,
    ) -> list[results.Rescheduled]:
        """Give a waiting message, and waiting copies of it, another action time; neither `at`
        nor `delay` means now.

        id: one or several; what :meth:`get` or :meth:`scan` has found stands for just these
            messages
        at: seconds since the epoch
        delay: seconds from now by Redis's clock

        Returns what there was and whether it is moved: only what is waiting can be. An empty
        list if there was none. Raises ActionTimeError beyond the year 2255, PartialError as
        :meth:`cancel`.
        """
        named, meant = _named(id)
        if meant or len(named) != 1:
            moved = self._reschedule_found(meant, at=at, delay=delay)
            for one in named:
                moved += self.reschedule(one, at=at, delay=delay, topic=topic, basis=basis)
            return moved
        [id] = named
        when = when_of(microseconds(at), microseconds(delay))
        far, ahead = self._far_of(topic), list[results.Rescheduled]()
        if far is not None:
            ahead = far.reschedule([id], topic, microseconds(at), microseconds(delay))

        def command(place: Place) -> ScriptCall:
            [one] = place.ids
            return self._admin.reschedule(place.topic, place.slot, one, when, copies=True)

        away = Away()
        replies = self._lookup.run_at(self._lookup.places(id, topic, basis), command, away)
        moved = [one for _, part in replies for one in part]
        if self._lookup.arrived([id], moved, topic, away):
            replies = self._lookup.run_at(self._lookup.places(id, topic, basis), command, away)
            moved += [one for _, part in replies for one in part]
        if self._core.recorder is not None and (moved or not away):
            times = microseconds(at), microseconds(delay)
            moved += self._core.recorder.rescheduled([id], moved, topic, *times)
        return self._lookup.checked(id, _with(ahead, moved), away)

    def _reschedule_found(
        self, found: Sequence[results.Found], *, at: float | None, delay: float | None
    ) -> list[results.Rescheduled]:
        when = when_of(microseconds(at), microseconds(delay))
        ahead: list[results.Rescheduled] = []
        if self._core.recorder is not None:
            far = [one for one in found if one.far]
            times = microseconds(at), microseconds(delay)
            ahead = self._core.recorder.far.reschedule_found(far, *times)
        calls = []
        for one in found:
            topic = self._registry.resolved(one.topic)
            slot = topic.slot(one.slot)
            calls.append(self._admin.reschedule(topic, slot, one.id, when, copies=False))
        moved, away = list[results.Rescheduled](), Away()
        for some in parts_of(calls, CALLS_TOGETHER):
            for part in self._runner.run_there(some, away):
                moved += part or ()
        self._runner.send_counters()
        if self._core.recorder is not None:
            self._core.recorder.moved(moved, found)
        return away.checked(_with(ahead, moved))

    def run_now(
        self, id: str, *, topic: str | None = None, basis: str | None = None
    ) -> list[results.Rescheduled]:
        """Make a waiting message due now; as :meth:`reschedule`."""
        return self.reschedule(id, topic=topic, basis=basis)


class Dead(CenterPart):
    """Dead messages: those that were given up on. `topic` is the name of the topic to look at;
    without it, all declared topics are."""

    def __init__(self, core: Core, lookup: Lookup, scan: Scan) -> None:
        super().__init__(core)
        self._lookup, self._scan = lookup, scan

    def requeue(
        self,
        topic: str | None = None,
        *,
        ids: Iterable[str] | None = None,
        where: Callable[[results.Found], Any] | None = None,
        on_progress: results.OnProgress = results.tell_nobody,
    ) -> int:
        """Take messages out of DeadQueue and have them delivered now, with all their retries.

        ids: only these, and the copies that share them
        where: only messages for which this is true

        Returns how many. In bounded steps; what dies meanwhile stays dead. Raises PartialError,
        with the number of the others, while nodes of a Cluster are away.
        """
        recorder, total, away = self._core.recorder, 0, Away()
        dead = self._dead(topic, ids, where, away, bodies=recorder is not None)
        while batch := list(itertools.islice(dead, IDS_PER_CALL)):
            if recorder is not None:
                recorder.requeuing(batch)
            for place, number in self._lookup.run_for(batch, self._admin.requeue, away):
                if number and recorder is not None:
                    recorder.requeued([(place.topic.name, id) for id in place.ids])
                total += number
            on_progress(total, 0)
        return away.checked(total)

    def purge(
        self,
        topic: str | None = None,
        *,
        ids: Iterable[str] | None = None,
        where: Callable[[results.Found], Any] | None = None,
        on_progress: results.OnProgress = results.tell_nobody,
    ) -> int:
        """Delete dead messages; return how many. Otherwise as :meth:`requeue`."""

        def command(place: Place) -> ScriptCall:
            return self._admin.cancel(place, (results.DEAD,), copies=False, bodies=False)

        away = Away()
        replies = self._lookup.run_for(self._dead(topic, ids, where, away), command, away)
        deleted: list[results.Cancelled] = []
        for _, reply in replies:
            deleted += [one for one in reply.cancelled if one.deleted]
            on_progress(len(deleted), 0)
        if self._core.recorder is not None:
            self._core.recorder.purged_dead([(one.topic, one.id) for one in deleted])
        return away.checked(len(deleted))

    def _dead(
        self,
        topic: str | None,
        ids: Iterable[str] | None,
        where: Callable[[results.Found], Any] | None,
        away: Away,
        *,
        bodies: bool = False,
    ) -> Iterator[results.Found]:
        """The dead messages, but not those that die from now on.

        away: notes the slots of nodes that are away
        """
        if ids is None:
            seconds, us = self._runner.client.time()
            until = seconds + us / 1e6
            bodies = bodies or where is not None
            pairs = self._scan.read(topic, results.DEAD, until=until, bodies=bodies, away=away)
            found: Iterator[results.Found] = (one for one, _ in pairs)
        else:
            try:
                known = self._lookup.get(ids, topic=topic)
            except PartialError as exc:
                known = exc.results
                away.add(exc.missing)
            found = (one for one in known if one.state == results.DEAD)
        return found if where is None else filter(where, found)


def _with(ahead: list[T], found: list[T]) -> list[T]:
    """What was found in the task library and in Redis: each once."""
    there = {one[:2] for one in found}
    return found + [one for one in ahead if one[:2] not in there]


def _named(
    given: str | results.Found | Iterable[str | results.Found],
) -> tuple[list[str], list[results.Found]]:
    """Ids and messages that a caller names. Raises ConfigurationError for what is neither."""
    if isinstance(given, results.Found):
        return [], [given]
    if isinstance(given, str) or not isinstance(given, Iterable):
        return ids_of(given), []
    given = list(given)
    messages = [one for one in given if isinstance(one, results.Found)]
    return ids_of([one for one in given if not isinstance(one, results.Found)]), messages


def _states_to_cancel(in_flight: bool, dead: bool) -> Collection[str]:
    return (results.WAITING, *[results.IN_FLIGHT] * in_flight, *[results.DEAD] * dead)
