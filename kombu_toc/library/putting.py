"""Puts the messages of rows into Redis, many at once: none that is there already is added again.
Dead letters become dead letters again."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, delete, select, text, tuple_, update

from ..center.calls import ScheduleChange, ScheduleFiring
from ..center.center import TimeoutCenter
from ..center.messages import Place, cancel_call
from ..center.pop import bury_call
from ..center.put import BYTES_PER_CALL, MESSAGES_PER_CALL, Conflict, put_many_call, unique_call
from ..center.upkeep import home_of
from ..client.connection import pipelined
from ..errors import LibraryError
from ..model import message, results, scores
from ..model.delivery import trait, with_trait
from ..model.library import OFF
from ..model.message import FOR_A_TIME, KEEP_EARLIER, UNIQUE, Claim, Unique, claim_of, decode_key
from ..model.results import WAITING, Delivery, Found, PutTogether
from ..model.topic import Slot, Topic
from ..scripts.call import ScriptCall
from . import records, statuses
from .guard import ended_rows, ends_of, over_of
from .outcomes import are
from .records import identity_of
from .schema import IS_NOT_FAR, MAX_ERROR, SCHEDULES
from .shards import CHUNK, Database, Owed, Shard, chunks
from .store import Store, together

# -- unique keys of rows

#: The mode of a claim that holds until its message is done.
UNTIL_DONE = "1"

#: The header that says for how long a message has its key.
UNTIL = "x-unique-until"


def is_unique(row: records.Row) -> bool:
    """Whether a row's message has a unique key."""
    return ";u" in row.traits or ",u" in row.traits


def _claim_of(row: records.Row, until: Any) -> tuple[Claim, str]:
    """The claim of a row's message, and its other traits.

    until: what its header says of that
    """
    said = row.traits.lstrip(";").split(",")
    own = next(one for one in said if one.startswith("u"))
    others = ",".join(one for one in said if one is not own)
    mode, _, name = own[1:].partition(".")
    shown = decode_key(name).rpartition("\x1f")[2]
    lasts_us = 0
    if int(mode) == FOR_A_TIME:
        # It holds anew. What does not say for how long has it until it is done.
        try:
            lasts_us = claim_of("", Unique(shown, float(until)), row.basis).lasts_us
        except (TypeError, ValueError):
            mode = UNTIL_DONE
    basis = row.basis or shown
    checksum = zlib.crc32(basis.encode("utf-8", "surrogatepass"))
    claim = Claim(shown, name, int(mode), lasts_us, checksum, KEEP_EARLIER, None)
    return claim, f";{others}" if others else ""


def putting(center: TimeoutCenter, topic: Topic, row: records.Row, *, counted: bool) -> ScriptCall:
    """The call that puts the message of a row with a unique key back. Result: a Put, or a
    Conflict if another message has its key by now."""
    headers = records.identity_of(row.topic, row.id, row.body, row.traits)[1]
    claim, traits = _claim_of(row, headers.get(UNTIL) if UNIQUE in headers else None)
    goes_on = bool(headers.get("retries")) or bool(headers.get("replaced_task_nesting"))
    basis = row.basis or claim.shown
    request = records.request_of(row, counted=counted)._replace(traits=traits, basis=basis)
    topic = home_of(center.runner, center.context, topic, claim, basis)
    center.registry.admit(topic, row.id, basis, unique=True)
    return unique_call(
        center.commands, topic, request, claim, goes_on=goes_on, adds=bool(headers.get("retries"))
    ).call


# -- puts the messages of rows into Redis, many at once
#
# Between the look at a row and the put of its message, anything may happen to it: just before, what
# has ended is left out; right after, what has ended meanwhile is taken back.

#: Why a message is dead that was put back again and again.
LOST = "no retries left: the workers that ran it were lost"


class Returned(NamedTuple):
    """What was put back.

    number: how many messages were not there
    rows: whose messages are there now
    expired: how many were too old for that
    """

    number: int
    rows: list[records.Row]
    expired: int


class Putter:
    """Puts rows back."""

    def __init__(self, store: Store, center: TimeoutCenter) -> None:
        self.store, self.center = store, center

    def topic(self, name: str) -> Topic:
        """The topic of that name; if Redis has none, it is declared as it was."""
        registry = self.center.registry
        found = registry.recent(name)
        if found is not None:
            return found
        declaration = self.store.topics().get(name)
        if declaration is None:
            return registry.topic(name)
        declared: Topic = self.center.runner.run(registry.declare_call(name, declaration))
        return declared

    def put(
        self, rows: Iterable[records.Row], *, counted: bool = False
    ) -> tuple[int, set[records.Key]]:
        """Put the messages of these rows, those that are due first in the order of the list;
        return how many were not there, and the keys of those that have expired: they are left out,
        and whoever has them put records that.

        counted: whether they are put for the first time, and count among what may be put
        """
        now, expired = records.now_us(), set[records.Key]()
        by_place: dict[tuple[str, int, int], list[records.Row]] = defaultdict(list)
        topics: dict[str, Topic] = {}
        unique: list[records.Row] = []
        for row in rows:
            topic = topics.get(row.topic)
            if topic is None:
                topic = topics[row.topic] = self.topic(row.topic)
            ttl_ms = topic.declaration.limits(self.center.limits).message_ttl
            timely = records.as_of(row, ttl_ms, now)
            if timely is None:
                expired.add(row.key)
                continue
            row = timely
            if is_unique(row):
                unique.append(row)
                continue
            self.center.registry.admit(topic, row.id, row.basis)
            slot = topic.slot_for(row.basis or row.id).number
            by_place[row.topic, slot, topic.step_index(row.priority)].append(row)
        calls: list[ScriptCall] = []
        of_call: list[tuple[Topic, list[records.Row]]] = []
        apart: list[ScriptCall] = []
        for (name, slot, step), some in by_place.items():
            topic = topics[name]
            if topic.declaration.put_gates:
                puts = self.center.commands.put
                apart += [puts(topic, records.request_of(row, counted=counted)) for row in some]
                continue
            for batch in together(some, MESSAGES_PER_CALL, BYTES_PER_CALL, once=True):
                flat: list[Any] = []
                for row in batch:
                    flat += (row.id, row.body, row.action_us, row.traits, row.token)
                context = self.center.context
                calls.append(put_many_call(context, topic, topic.slot(slot), step, flat, 5))
                of_call.append((topic, batch))
        added = 0
        for (topic, batch), result in zip(of_call, self.center.runner.run_puts(calls), strict=True):
            assert isinstance(result, PutTogether)
            added += len(batch) - len(result.there) - len(result.taken)
            for number in result.taken:
                apart.append(self.center.commands.put(topic, records.request_of(batch[number])))
        if apart:
            added += sum(one.added for one in self.center.runner.run_puts(apart))
        return added + self._put_unique(unique, topics, counted), expired

    def _put_unique(
        self, rows: Sequence[records.Row], topics: Mapping[str, Topic], counted: bool
    ) -> int:
        """Put what has a unique key, if no other message has it by now."""
        calls = [putting(self.center, topics[row.topic], row, counted=counted) for row in rows]
        results = self.center.runner.run_puts(calls)
        pairs = list(zip(rows, results, strict=True))
        refused = ((row, result.base) for row, result in pairs if isinstance(result, Conflict))
        self.store.take_over(row for row, base in refused if base != row.id)
        return sum(bool(result.added) for _, result in pairs)

    def put_missing(self, rows: Sequence[records.Row]) -> Returned:
        """Put the messages of rows that are not in Redis. What has ended, or is in a queue without
        a library by now, has no row from then on."""
        if not rows:
            return Returned(0, [], 0)
        over = ended_rows(self.store, rows)
        off = off_among(self.center, rows)
        over |= {row.key for row in rows if row.topic in off}
        self.store.forget([row.key for row in rows if row.key in over])
        wanted = self._counted([row for row in rows if row.key not in over])
        self.store.note([row.key for row in wanted], statuses.PENDING)
        return self.put_back(wanted)

    def _counted(self, rows: Sequence[records.Row]) -> list[records.Row]:
        """The same, each with how often it was put back; a message of which no retries are left for
        that becomes a dead letter: it may be what kills its workers. Of one that no worker has said
        to have, Redis may have lost the message: it is put back once in any case."""
        lost: list[records.Row] = []
        dead: list[records.Row] = []
        for row in rows:
            times = (trait(row.traits, "l") or 0) + 1
            retries = self.topic(row.topic).declaration.retries
            if times > (retries if row.status == statuses.TAKEN else max(retries, 1)):
                error = f"{times} workers, one after the other"
                dead.append(row._replace(error=error))
            else:
                lost.append(row._replace(traits=with_trait(row.traits, "l", times)))
        if lost:
            self.store.set_traits(lost)
        if dead:
            DeadLetters.bury(self, dead, LOST)
            self.store.record(
                [records.event_of(row.key, statuses.DEAD, row.error or "") for row in dead]
            )
        return lost

    def put_back(self, rows: Sequence[records.Row], *, counted: bool = False) -> Returned:
        """Put the messages of rows, but for those that have expired; take back those that have
        ended since the rows were read.

        counted: as for :meth:`put`
        """
        number, expired = self.put(rows, counted=counted)
        self.store.note(expired, statuses.EXPIRED)
        put = [row for row in rows if row.key not in expired]
        over = ended_since(self.store, put)
        if over:
            number -= withdraw(self.center, [row for row in put if row.key in over])
            put = [row for row in put if row.key not in over]
        return Returned(max(number, 0), put, len(expired))


# -- where the messages of rows are in Redis

#: What a row's message is found to be.
THERE, DEAD, MISSING = "there", "dead", "missing"


def states_in_redis(center: TimeoutCenter, rows: Sequence[records.Row]) -> list[str]:
    """Where the message of each row is."""
    return [state for chunk in chunks(rows) for state in _states(center, chunk)]


def missing_of(center: TimeoutCenter, rows: Sequence[records.Row]) -> list[records.Row]:
    """The rows whose messages are not in Redis."""
    states = zip(rows, states_in_redis(center, rows), strict=True)
    return [row for row, state in states if state == MISSING]


def _states(center: TimeoutCenter, rows: Sequence[records.Row]) -> list[str]:
    found = [MISSING] * len(rows)
    # Each slot is asked once for all: there may be many that merely wait for a worker.
    of_slot: dict[str, tuple[Slot, list[int]]] = {}
    for place, row in enumerate(rows):
        topic = center.registry.resolved(row.topic)
        for slot in topic.slots_for(row.basis or row.id):
            of_slot.setdefault(slot.body, (slot, []))[1].append(place)
    asked: list[tuple[str, ...]] = []
    for slot, places in of_slot.values():
        names = [name for place in places for name in _names(rows[place])]
        asked += ("HMGET", slot.body, *names), ("ZMSCORE", slot.dead, *names)
        asked.append(("HMGET", slot.tokens, *names))
    answers = iter(pipelined(center.client, asked))
    for _, places in of_slot.values():
        bodies, dead, tokens = next(answers), next(answers), next(answers)
        for at, place in enumerate(places):
            # Under the id there may be another message; then it is known by a name of its own.
            at += at if records.is_of(rows[place], bodies[2 * at], tokens[2 * at]) else at + 1
            if bodies[at] is not None:
                found[place] = THERE if dead[at] is None else DEAD
    for place, row in enumerate(rows):
        if found[place] == MISSING and is_unique(row):
            found[place] = _elsewhere(center, row)
    return found


def _elsewhere(center: TimeoutCenter, row: records.Row) -> str:
    """Where the message of a row is that may have the name of the one whose place it has taken."""
    for one in center.get(row.id, topic=row.topic, basis=row.basis):
        if records.is_of(row, one.body, one.token.encode()):
            return DEAD if one.state == results.DEAD else THERE
    return MISSING


def _names(row: records.Row) -> tuple[str, str]:
    """What a row's message is known by in its slot."""
    return row.id, f"{row.id}#{row.token}"


# -- dead letters: history says that they are dead, and their rows stay, so that a rebuild makes
# dead letters of them again

#: Why a message is dead that was so when Redis was lost.
REASON = "it was dead when Redis was lost"

#: Rows that a rebuild reads at a time.
PAGE = 500


class DeadLetters:
    """The rows of dead letters."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def _change(self, named: Iterable[tuple[str, str]], make: Any) -> None:
        """Run a statement for the dead letters of these queues and ids.

        make: makes it, of a table and a condition
        """
        by_topic: dict[str, set[str]] = {}
        for topic, id in named:
            by_topic.setdefault(topic, set()).update(records.ids_of(id))
        for topic, ids in by_topic.items():
            for shard, some in self._store.locator.shards_of(sorted(ids)).items():
                table = shard.tables.pending
                for chunk in chunks(some):
                    which = table.c.id.in_(chunk) & (table.c.topic == topic)
                    which &= table.c.place == statuses.IN_DEAD_QUEUE
                    shard.database.execute(make(table, which))

    def purged(self, named: Iterable[tuple[str, str]]) -> None:
        """Dead letters were deleted; named: queue and id of each. Raises LibraryError."""
        self._change(named, lambda table, which: delete(table).where(which))

    def requeuing(self, found: Sequence[Found]) -> None:
        """These are about to wait again: see to it that the library has them as dead. A task that
        was acknowledged when it began is done there, although its worker was lost. Raises
        LibraryError."""
        rows: dict[records.Key, tuple[records.Row, Mapping[str, Any]]] = {}
        for one in found:
            key, headers = records.identity_of(one.topic, one.id, one.body, one.token)
            if not key[1] or message.SCHEDULE in headers or not records.is_storable(key):
                continue  # it has no row, as its sender has put it
            with suppress(LibraryError, ValueError, TypeError):  # nor has what cannot be kept
                error = records.storable(one.error)[:MAX_ERROR] or None
                rows[key] = records.dead_row(records.row_of_message(one, key), error=error), headers
        over = over_of(self._store, list(rows))
        ends = ends_of(self._store, over) if over else {}
        events = []
        for key in over:
            row, headers = rows[key]
            end = ends[key]
            how = end.attempts, end.worker or "", row.error or end.error or ""
            said = (headers, end.action_us)
            events.append(records.Event(key, statuses.DEAD, records.now_us(), *how, said))
        if events:
            self._store.record(events)
        if rows:
            self._store.insert([row for row, _ in rows.values()])
            # Of some, their workers could not say yet that they are dead.
            self._store.keep_dead(rows)

    def requeued(self, named: Iterable[tuple[str, str]]) -> None:
        """Dead letters wait again. Raises LibraryError."""
        values = _alive()
        self._change(named, lambda table, which: update(table).where(which).values(**values))

    def go_on(self, center: TimeoutCenter, rows: Sequence[records.Row]) -> None:
        """The messages of these rows were not dead a moment ago: somebody has requeued those that
        the library has as dead, unless they have just died. Raises LibraryError."""
        values = _alive()
        self._store.shards.pull([row.key for row in rows])
        for shard, some in self._store.shards.divided(rows, attrgetter("key")).items():
            table = shard.tables.pending
            names = (table.c.id, table.c.token, table.c.topic, table.c.modified_us)
            for chunk in chunks(some):
                which = are(table, [row.key for row in chunk])
                which &= table.c.place == statuses.IN_DEAD_QUEUE
                said = shard.database.keyed(table, table.c.modified_us, which)
                # Redis is asked after that: what waits there now has not died before.
                dead = [row for row in chunk if row.key in said]
                states = states_in_redis(center, dead)
                alive = [row.key for row, one in zip(dead, states, strict=True) if one != DEAD]
                if alive:
                    which &= table.c.id.in_([key[0] for key in alive])
                    which &= tuple_(*names).in_([(*key, said[key]) for key in alive])
                    shard.database.execute(update(table).where(which).values(**values))

    def forget(self, topic: str) -> None:
        """A queue was deleted, with its dead letters. Raises LibraryError."""
        for shard in self._store.shards.all:
            mine = text(IS_NOT_FAR) & (shard.tables.pending.c.topic == topic)
            list(self._deleting(shard, mine))

    def pruning(self, shard: Shard, before_us: int) -> Iterator[int]:
        """Delete those of a shard that have died before; yield after each statement that reads
        some. Raises LibraryError."""
        return self._deleting(shard, shard.tables.pending.c.modified_us < before_us)

    @staticmethod
    def _deleting(shard: Shard, condition: Any) -> Iterator[int]:
        table: Table = shard.tables.pending
        dead = table.c.place == statuses.IN_DEAD_QUEUE
        # A few at a time: however many there are, no statement takes long.
        while keys := shard.database.keyed(table, table.c.token, dead, condition, limit=CHUNK):
            shard.database.execute(delete(table).where(dead, are(table, keys)))
            yield len(keys)
        yield 0

    def rebuild(self, putter: Putter, database: Database) -> int:
        """Make dead letters of what was dead in a database and is not in Redis; return how many.
        Their age counts from now on."""
        number = 0
        for shard in self._store.shards.of_database(database):
            for rows in self._store.pages(shard, statuses.IN_DEAD_QUEUE, size=PAGE):
                number += self.bury(putter, rows)
        return number

    @staticmethod
    def bury(putter: Putter, rows: Sequence[records.Row], reason: str = REASON) -> int:
        """Make dead letters of rows whose messages are not in Redis, with their errors; return how
        many."""
        calls, center = [], putter.center
        for row, state in zip(rows, states_in_redis(center, rows), strict=True):
            topic = putter.topic(row.topic)
            age_us = topic.declaration.limits(center.limits).dead_age * 1_000_000
            if state != MISSING or row.modified_us + age_us < records.now_us():
                continue
            center.registry.admit(topic, row.id, row.basis)
            delivery = Delivery(
                topic=topic.name,
                slot=topic.slot_for(row.basis or row.id).number,
                step=topic.step_index(row.priority),
                id=row.id,
                score=scores.action(row.action_us),
                body=row.body,
                limit=topic.declaration.retries,
                birth=f"lost{row.traits}",
            )
            calls.append(bury_call(center.context, topic, delivery, reason, row.error or ""))
        center.runner.run_all(calls)
        return len(calls)


def _alive() -> dict[str, int]:
    """The columns of a row whose message waits again from now on."""
    now = records.now_us()
    place = {"status": statuses.PENDING, "place": statuses.IN_REDIS}
    return {**place, "action_us": now, "modified_us": now}


def off_among(center: TimeoutCenter, rows: Iterable[records.Row]) -> set[str]:
    """The queues of rows that are kept without a library by now."""
    known = {name: center.registry.recent(name) for name in {row.topic for row in rows}}
    return {name for name, one in known.items() if one and one.declaration.library == OFF}


def ended_since(store: Store, rows: Sequence[records.Row]) -> set[records.Key]:
    """Those of some rows whose messages have ended since they were read. One that is there again
    is another message, with the same id and the same bytes."""
    over = ended_rows(store, rows)
    return over - store.moments(list(over)).keys() if over else over


def withdraw(center: TimeoutCenter, rows: Iterable[records.Row]) -> int:
    """Delete the messages of rows, where they wait; return how many. What has become of them is
    known: nobody is told."""
    found = [
        one
        for row in rows
        for one in center.get(row.id, topic=row.topic, basis=row.basis)
        if records.is_of(row, one.body, one.token.encode()) and one.state == WAITING and not one.far
    ]
    calls = []
    for one in found:
        topic = center.registry.resolved(one.topic)
        place = Place(topic, topic.slot(one.slot), [one.id])
        calls.append(cancel_call(center.context, place, (WAITING,), copies=False, bodies=False))
    return sum(one.deleted for reply in center.runner.run_all(calls) for one in reply.cancelled)


# -- schedules in the library: what each is, and the message that waits for its next firing
#
# A schedule changes with each firing, in a worker that must not wait for a database. So the latest
# change of each is gathered here, and written by the recorder's thread; a change that is older by
# Redis's clock never takes the place of a newer one.


#: Topic and name.
Name = tuple[str, str]

#: Schedules of which a process keeps a change while a database is away.
MAX_CHANGES = 10_000

#: Microseconds for which it is known that a schedule was deleted.
GONE_US = 24 * 3600 * 1_000_000

#: What a change may say: when, by Redis's clock, and the columns that it says then. A record is
#: empty if the schedule is gone.
_PARTS = {
    "modified_us": ("record", "next_us"),
    "template_us": ("template",),
    "firing_us": ("firing", "firing_id", "priority", "traits"),
}

#: A row that is not there yet.
_NEW: dict[str, Any] = {
    **{"record": "", "next_us": None, "modified_us": 0, "template": b"", "template_us": 0},
    **{"firing": None, "firing_id": None, "priority": 0, "traits": "", "firing_us": 0},
}


def _over(there: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A row, or a change that is not written yet, after another change: each part as it was said
    last, whichever comes first."""
    found = dict(there)
    for at, columns in _PARTS.items():
        if at in change and change[at] >= there.get(at, 0):
            found.update({column: change[column] for column in (at, *columns)})
    return found


def write_schedules(database: Database, changes: Sequence[tuple[Name, Mapping[str, Any]]]) -> None:
    """Write what has changed of schedules, as far as it is newer."""
    database.run(partial(_merge, database, changes))


def _merge(
    database: Database, changes: Sequence[tuple[Name, Mapping[str, Any]]], connection: Connection
) -> None:
    names = [SCHEDULES.c.name.in_([name for (_, name), _ in changes])]
    reading = select(SCHEDULES).where(*names, SCHEDULES.c.topic.in_([t for (t, _), _ in changes]))
    reading = reading.order_by(SCHEDULES.c.topic, SCHEDULES.c.name).with_for_update()
    read = connection.execute(reading).mappings()
    there: dict[Name, Any] = {(row["topic"], row["name"]): row for row in read}
    # In one order, so that two processes do not wait for each other.
    rows = [
        {"topic": name[0], "name": name[1], **_over(there.get(name) or _NEW, change)}
        for name, change in sorted(changes, key=itemgetter(0))
    ]
    connection.execute(database.dialect.upsert(SCHEDULES, ("topic", "name"), list(_NEW)), rows)


class Schedules:
    """Writes schedules, and puts them back. Any thread may tell a change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.owed: Owed[Name, dict[str, Any]] = Owed(
            lambda name: store.shards.of(name[1]), write_schedules, MAX_CHANGES, _over
        )

    def changed(self, topic: str, change: ScheduleChange, at_us: int) -> None:
        """A schedule was changed in Redis."""
        made: dict[str, Any] = {"record": change.wanted, "next_us": change.next_us}
        made["modified_us"] = at_us
        if change.template:
            made |= {"template": change.template, "template_us": at_us}
        put = change.put
        if put is not None:
            made |= {"firing": put.body, "firing_id": put.id, "priority": put.priority}
            made |= {"traits": put.traits, "firing_us": at_us}
        elif change.take_out or not change.wanted:
            made |= {"firing": None, "firing_id": None, "priority": 0, "traits": ""}
            made["firing_us"] = at_us
        self.owed.add([((topic, change.name), made)])

    def forget(self, topic: str) -> None:
        """A topic was deleted, with its schedules."""
        self.owed.forget(lambda name: name[0] == topic)
        for database in self._store.shards.databases:
            database.execute(delete(SCHEDULES).where(SCHEDULES.c.topic == topic))

    # -- in the recorder's thread

    def prune(self, before_us: int) -> None:
        """Drop what was deleted before that time: nobody writes an earlier change of it now."""
        gone = (SCHEDULES.c.record == "") & (SCHEDULES.c.modified_us < before_us)
        for database in self._store.shards.databases:
            database.execute(delete(SCHEDULES).where(gone))

    # -- a rebuild

    def rebuild(self, putter: Putter, database: Database) -> int:
        """Put back the schedules of a database that Redis has lost, each with the message of its
        next firing; return how many."""
        there = select(SCHEDULES).where(SCHEDULES.c.record != "")
        pages = database.pages(there, SCHEDULES.c.topic, SCHEDULES.c.name, size=PAGE)
        return sum(self._put(putter, rows) for rows in pages)

    def any_before(self, database: Database, us: int) -> bool:
        """Whether a schedule fires next before that time: a worker may have just taken it on."""
        soon = (SCHEDULES.c.next_us < us) & (SCHEDULES.c.record != "")
        reading = select(SCHEDULES.c.name).where(soon).limit(1)
        return bool(database.read(reading))

    def _put(self, putter: Putter, rows: Sequence[Any]) -> int:
        """Put back those of these schedules that are gone, those of a queue together; return how
        many."""
        keys = {
            (row["topic"], row["name"]): identity_of(
                row["topic"], row["firing_id"], row["firing"], row["traits"]
            )[0]
            for row in rows
            if row["firing"] is not None and row["next_us"] is not None
        }
        # One that has run is not put again; who looks after schedules finds it gone, and goes on.
        known = list(keys.values())
        run = self._store.ended_of(known) | {row.key for row in self._store.of_keys(known)}
        waiting = {place for place, key in keys.items() if key not in run}
        by_topic: dict[str, list[Any]] = defaultdict(list)
        for row in rows:
            by_topic[row["topic"]].append(row)
        number, recurring = 0, putter.center.recurring
        for topic, some in by_topic.items():
            putter.topic(topic)
            _, found = recurring.read(topic, [row["name"] for row in some])
            there = {one.name for one in found}
            changes = [
                _change(row, puts=(topic, row["name"]) in waiting)
                for row in some
                if row["name"] not in there
            ]
            number += sum(one.done for one in recurring.change_many(topic, changes))
        return number


def _change(row: Any, *, puts: bool) -> ScheduleChange:
    """The change that puts back a schedule; puts: with the message of its next firing."""
    put = None
    if puts:
        how = (row["firing_id"], row["firing"], row["next_us"], row["priority"], row["traits"])
        put = ScheduleFiring(*how)
    kept = (row["name"], "", row["record"], row["next_us"], row["template"])
    return ScheduleChange(*kept, put=put, replaces=True)
