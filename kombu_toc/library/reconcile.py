"""Compares the library with Redis, and brings them to agree."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..center.center import TimeoutCenter
from ..errors import EnvelopeError, LibraryError
from ..model import message
from ..model.delivery import name_in
from ..model.library import DISAGREEMENTS, OFF, Disagreement
from ..model.results import IN_FLIGHT, WAITING, Found
from . import statuses
from .dead import DeadLetters
from .guard import over_of
from .pages import together
from .presence import DEAD, MISSING, THERE, states_in_redis
from .putting import Putter
from .rebuild import rows_by_time
from .records import (
    Event,
    Key,
    Row,
    identity_of,
    is_raw_key,
    lease_us,
    now_us,
    row_of_message,
)
from .returning import Returner, ended, ended_since, off_among, withdraw
from .shards import Shard
from .store import CHUNK, Store

logger = logging.getLogger(__name__)

#: Microseconds for which a row or a message may be on its way.
UNDER_WAY_US = 5_000_000

#: Seconds between two looks at what is overdue, and after which what was missing is still missing.
LOOK_INTERVAL = 10.0
CONFIRM = 8.0

#: Rows, and pages of them, that one look reads at most; the next one goes on there, a second
#: later.
ROWS_PER_LOOK, PAGES_PER_LOOK = 2000, 50

#: Rows of a shard that are known to be missing, and rows that were put back, at most.
MAX_SUSPECTS = 100_000

#: Seconds for which it is watched whether what was put back has ended elsewhere meanwhile.
WATCH = 600.0


#: How many that disagree a comparison has in memory at a time, and bytes of their bodies. Each time
#: costs a moment of waiting.
MAX_FOUND, MAX_FOUND_BYTES = 50_000, 64_000_000


class _Suspect(NamedTuple):
    since: float
    modified_us: int


class Reconciler:
    """What the upkeep does about what is overdue. Used by one thread."""

    def __init__(self, store: Store, center: TimeoutCenter, putter: Putter) -> None:
        self._store = store
        self._center = center
        self._returner = Returner(store, center, putter)
        #: the shards that are looked at in this round, and where each goes on, by its number
        self._round: deque[Shard] = deque()
        self._after: dict[int, tuple[int, str, str, str] | None] = {}
        #: by the number of a shard: what was missing in the latest round through it, and what is in
        #: this one. Whatever is not met again has ended
        self._suspects: dict[int, dict[Key, _Suspect]] = defaultdict(dict)
        self._seen: dict[int, dict[Key, _Suspect]] = defaultdict(dict)
        #: by the number of a shard: what was put back, and when that was
        self._returned: dict[int, dict[Key, tuple[Row, float]]] = {}

    @property
    def goes_on(self) -> bool:
        """Whether a round is under way: the next look goes on with it."""
        return bool(self._round)

    def look(self, *, begins: bool = True) -> int:
        """Put back what is overdue and has been missing for a while; return how many. A look is
        bounded: a round through all that is overdue may take several.

        begins: whether to begin with a round, unless one is under way
        """
        put, read, pages, error = 0, 0, 0, None
        if begins and not self._round:
            error = self._begin()
        while self._round and read < ROWS_PER_LOOK and pages < PAGES_PER_LOOK:
            shard = self._round.popleft()
            try:
                if shard.database.rests:
                    self._forget(shard)
                    continue
                pages += 1
                rows, ends = self._page(shard)
                put += self._judge(shard, rows)
            except LibraryError as exc:
                self._forget(shard)
                error = error or exc
                continue
            read += len(rows)
            if ends or len(self._seen[shard.number]) >= MAX_SUSPECTS:
                # Its round is over: with so many that are missing, the first of them come first.
                self._after[shard.number] = None
                self._suspects[shard.number] = self._seen.pop(shard.number, {})
            else:
                self._round.append(shard)
        try:
            self._withdraw_ended()
        except LibraryError as exc:
            error = error or exc
        if put:
            logger.warning(
                "%d messages were overdue and not in Redis: put there again from the library", put
            )
        if error is not None:
            raise error
        return put

    def _begin(self) -> LibraryError | None:
        """Begin a round through the shards that have something overdue; return the error of the
        first database that is away."""
        until, error = now_us() - UNDER_WAY_US, None
        overdue: set[int] = set()
        for database in self._store.shards.databases:
            if database.rests:
                continue
            try:
                for _, shard in self._store.holding(database, statuses.IN_REDIS, until):
                    overdue.add(shard.number)
            except LibraryError as exc:
                error = error or exc
        for shard in self._store.shards.all:
            if shard.number in overdue:
                self._round.append(shard)
            else:
                self._forget(shard)
        return error

    def _forget(self, shard: Shard) -> None:
        """Begin anew with a shard that was away, or has nothing overdue: of one that was away, what
        has ended meanwhile is recorded first."""
        for kept in (self._after, self._suspects, self._seen):
            kept.pop(shard.number, None)

    def _page(self, shard: Shard) -> tuple[list[Row], bool]:
        """The next rows that are overdue, and whether there are no more."""
        until = now_us() - UNDER_WAY_US
        rows = self._store.page(
            shard, statuses.IN_REDIS, self._after.get(shard.number), CHUNK, until
        )
        last = rows[-1] if rows else None
        self._after[shard.number] = None if last is None else (last.action_us, *last.key)
        return rows, last is None

    def _judge(self, shard: Shard, rows: Sequence[Row]) -> int:
        now, limits = now_us(), self._center.limits
        rows = [
            row
            for row in rows
            if row.status != statuses.TAKEN or row.modified_us + lease_us(row, limits) < now
        ]
        events: list[Event] = []
        confirmed: list[Row] = []
        for row, state in zip(rows, states_in_redis(self._center, rows), strict=True):
            if state == THERE:
                continue
            if state == DEAD:
                events.append(ended(row, statuses.DEAD))
            elif self._is_confirmed(shard, row):
                confirmed.append(row)
        if events:
            self._store.record(events)
        return self._put(confirmed)

    def _is_confirmed(self, shard: Shard, row: Row) -> bool:
        """Whether it was missing before, and nothing has become of it since."""
        now = time.monotonic()
        suspect = self._suspects[shard.number].get(row.key)
        if suspect is None or suspect.modified_us != row.modified_us:
            suspect = _Suspect(now, row.modified_us)
        if suspect.since < now - CONFIRM:
            return True
        self._seen[shard.number][row.key] = suspect
        return False

    def _put(self, rows: Sequence[Row]) -> int:
        put = self._returner.put_missing(rows)
        self.watch(put.rows)
        return put.number

    def watch(self, rows: Iterable[Row]) -> None:
        """These were put, and it is not known what has become of them."""
        now = time.monotonic()
        for row in rows:
            number = self._store.shards.of_key(row.key).number
            self._returned.setdefault(number, {})[row.key] = row, now
        while sum(map(len, self._returned.values())) > MAX_SUSPECTS:
            longest = max(self._returned.values(), key=len)
            longest.pop(next(iter(longest)))

    def _withdraw_ended(self) -> None:
        """A worker may have ended after all what was put back for it: then it does not run
        again. As with a round, some shards are looked at, and the next look goes on."""
        since, asked = time.monotonic() - WATCH, []
        awake = {shard.number for shard in self._store.shards.awake()}
        for number in list(self._returned)[:PAGES_PER_LOOK]:
            kept = self._returned.pop(number)
            for key in [key for key, (_, at) in kept.items() if at < since]:
                kept.pop(key)
            if kept:
                self._returned[number] = kept  # behind the others
            if number in awake:
                asked += [row for row, _ in kept.values()]
        if asked:
            over = ended_since(self._store, asked)
            withdraw(self._center, [row for row in asked if row.key in over])
            for kept in self._returned.values():
                for key in over & kept.keys():
                    kept.pop(key)


class Comparison:
    """Everything that disagrees: what is found is looked at once more after a moment, for much is
    on its way.

    sleep: waits for so many seconds
    """

    def __init__(
        self,
        store: Store,
        center: TimeoutCenter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._center = center
        self._sleep = sleep

    def run(self, *, fix: bool = False) -> Iterator[Disagreement]:
        """Yield what disagrees; with `fix`, mend it."""
        suspects: list[Row] = []
        messages: list[tuple[Found, Key]] = []
        for rows in self._rows():
            suspects += self._apart(rows)
            if _is_much(suspects):
                yield from self._settle(suspects, [], fix)
                suspects = []
        for page in self._messages():
            messages += self._unknown(page)
            if _is_much([one for one, _ in messages]):
                yield from self._settle(suspects, messages, fix)
                suspects, messages = [], []
        if suspects or messages:
            yield from self._settle(suspects, messages, fix)

    def _settle(
        self, suspects: Sequence[Row], messages: Sequence[tuple[Found, Key]], fix: bool
    ) -> Iterator[Disagreement]:
        """Yield what disagrees still, of what did a moment ago."""
        self._sleep(UNDER_WAY_US / 1e6)
        again = {row.key: row for row in self._store.of_keys([row.key for row in suspects])}
        rows = [row for row in suspects if again.get(row.key, row._replace(body=b"")) == row]
        states = states_in_redis(self._center, rows)
        missing = [row for row, state in zip(rows, states, strict=True) if state == MISSING]
        dead = [row for row, state in zip(rows, states, strict=True) if state == DEAD]
        there = self._center.get([one.id for one, _ in messages]) if messages else []
        still = {(one.topic, one.id, one.body) for one in there}
        messages = [
            pair
            for pair in self._unknown([one for one, _ in messages])
            if (pair[0].topic, pair[0].id, pair[0].body) in still
        ]
        # Of bytes that a center has put nobody knows whether they are the message that has ended.
        over = over_of(self._store, [key for one, key in messages if not is_raw_key(key, one.body)])
        off = off_among(self._center, missing)
        if fix:
            self._store.forget([row.key for row in missing if row.topic in off])
        missing = [row for row in missing if row.topic not in off]
        if fix:
            self._mend(missing, dead, messages, over)
        for row in missing:
            yield Disagreement(DISAGREEMENTS[0], row.id, row.topic, row.action_us)
        for row in dead:
            yield Disagreement(DISAGREEMENTS[1], row.id, row.topic, row.action_us)
        for one, key in messages:
            kind = DISAGREEMENTS[3] if key in over else DISAGREEMENTS[2]
            yield Disagreement(kind, one.id, one.topic, one.time_us)

    def _mend(
        self,
        missing: Sequence[Row],
        dead: Sequence[Row],
        messages: Sequence[tuple[Found, Key]],
        over: set[Key],
    ) -> None:
        putter = Putter(self._center, self._store.topics, self._store.take_over)
        Returner(self._store, self._center, putter).put_missing(missing)
        self._store.record([ended(row, statuses.DEAD) for row in dead])
        new = [row_of_message(one, key) for one, key in messages if key not in over]
        if new:
            self._store.insert(new)
            # What was handled before has ended, and whoever has done that has said so.
            states = states_in_redis(self._center, new)
            gone = [row.key for row, state in zip(new, states, strict=True) if state == MISSING]
            self._store.forget(gone)
            # What was requeued by somebody who does not know the library has one already.
            DeadLetters(self._store).requeued([(row.topic, row.id) for row in new])
        self._center.cancel_found(
            [one for one, key in messages if key in over and one.state == WAITING], dead=False
        )

    def _rows(self) -> Iterator[list[Row]]:
        """Rows whose messages are to be in Redis, and not just now."""
        for shard in self._store.shards.all:
            rows = rows_by_time(self._store, shard, statuses.IN_REDIS)
            yield from together(
                (row for row in rows if row.modified_us < now_us() - UNDER_WAY_US), CHUNK
            )

    def _apart(self, rows: Sequence[Row]) -> list[Row]:
        now, limits = now_us(), self._center.limits
        return [
            row
            for row, state in zip(rows, states_in_redis(self._center, rows), strict=True)
            if state != THERE
            and (row.status != statuses.TAKEN or row.modified_us + lease_us(row, limits) < now)
        ]

    def _messages(self) -> Iterator[list[Found]]:
        """What is in Redis and was recorded."""
        for topic in self._center.registry.select(None):
            if topic.declaration.expires or topic.declaration.library == OFF:
                continue
            after = None
            while True:
                page = self._center.scan(
                    topic.name, state=(WAITING, IN_FLIGHT), limit=CHUNK, after=after
                )
                yield page.messages
                after = page.after
                if after is None:
                    break

    def _unknown(self, messages: Sequence[Found]) -> list[tuple[Found, Key]]:
        """Messages without a row, and the keys that their rows would have."""
        keyed = [(one, key) for one in messages if (key := _key(one)) is not None]
        known = {row.key for row in self._store.of_keys([key for _, key in keyed])}
        return [(one, key) for one, key in keyed if key not in known]


def _is_much(found: Sequence[Row | Found]) -> bool:
    """Whether no more are to be in memory at a time."""
    return len(found) >= MAX_FOUND or sum(len(one.body) for one in found) >= MAX_FOUND_BYTES


def _key(found: Found) -> Key | None:
    """The key of a message's row; None if it is to have none."""
    try:
        return key_of(found, message.unpack(found.body, found.id))
    except EnvelopeError:
        return identity_of(found.topic, found.id, found.body, found.token)[0]


def key_of(found: Found, content: Mapping[str, Any]) -> Key | None:
    """As :func:`_key`, of a message that is unpacked."""
    token = content["properties"].get("k") or name_in(found.own_token)
    if not token or message.SCHEDULE in content["headers"]:
        return None
    return identity_of(found.topic, found.id, found.body, found.own_token)[0]
