"""The script calls of producers and consumers: arguments in, a :class:`ScriptCall` out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from operator import itemgetter
from secrets import token_hex
from typing import Any, NamedTuple, TypeVar

from ..errors import ConfigurationError, MessageError, RateLimitedError
from ..metrics import TopicCounts, count_first
from ..model import results, scores
from ..model.limits import Limits
from ..model.results import Delivery, Popped, Put
from ..model.topic import Keys, Slot, Topic
from ..scripts.call import (
    Countdown,
    ScriptCall,
    load,
    microseconds,
    parts_of,
    rows,
    text,
    texts,
    when_of,
)

# -- what all calls of one center share

T = TypeVar("T")

#: Bytes that the bodies of one pop may have together. A longer body is delivered alone.
POP_BYTES = 8_000_000


@dataclass(slots=True)
class Context:
    """What all commands of one center share.

    keys: the keys that belong to no single slot
    clustered: whether slots may lie on several servers: then a call may name one slot only
    limits: hold for topics whose declarations do not say
    pop_bytes: bytes that the bodies of one reply may have together; the first may have any
    counts: where to count what happens in a topic
    """

    keys: Keys
    clustered: bool
    limits: Limits
    pop_bytes: int
    counts: Callable[[Topic], TopicCounts]

    def groups(self, items: Iterable[T]) -> list[list[T]]:
        """Slots, or what belongs to one slot each, grouped by what one call may name."""
        return [[item] for item in items] if self.clustered else [list(items)]

    def gate_of(self, topic: Topic, slot: Slot) -> Slot:
        """Where the limits of the whole topic are kept, for who has to do with this slot. On a
        Cluster a script can name no other."""
        return slot if self.clustered else topic.slot(0)

    def announcing(
        self,
        topic: Topic,
        script: str,
        keys: Sequence[str],
        args: Sequence[Any],
        parse: Callable[[Any], Any],
        *,
        keys_recur: bool = False,
        limited: Slot | None = None,
    ) -> ScriptCall:
        """A call of a script that writes into the topic's wake index.

        limited: the slot that it is about, if the topic is limited; then the script is the one
            that knows lanes

        On a Cluster the index is not on the node of its keys: the script replies what is to be
        written there.
        """
        if limited is not None:
            gate = self.gate_of(topic, limited)
            args = (*args, topic.gates, gate.number, len(keys))
            keys = (*keys, *limited.lane_keys, gate.announced_times, gate.pace, gate.busy)
            script = f"{script}_limited"
        wake = self.keys.wake(topic.name)
        if self.clustered:
            elsewhere = (wake, topic.declaration.keys_ms)
            return ScriptCall(load(script), keys, args, parse, keys_recur, elsewhere)
        return ScriptCall(load(script), (*keys, wake), args, parse, keys_recur)


# -- what producers and consumers ask for

#: What a put does if a live message has its id: it adds another one, adds nothing, or gives body
#: and time to the newest one that waits.
ADD, KEEP, REPLACE = "add", "keep", "replace"

#: Seconds for which a producer's latest publish to a slot is remembered, so that a repeated one is
#: recognised.
REMEMBER = 60

#: Seconds for which a put with a token of its caller's is remembered after its message was due.
REMEMBER_TOKEN = 3600


def suffix_of(name: str) -> str:
    """What tells the message of a put from others with the same id."""
    return sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class PutRequest(NamedTuple):
    """A message to be added.

    at_us: action time, microseconds since the epoch; one that has passed means now
    delay_us: instead of `at_us`, microseconds from now by Redis's clock
    basis: slot basis; the id unless given
    priority: 0 goes first
    token: made of the name of this put: tells this message from others with the same id; any
        unless given
    if_exists: ADD, KEEP or REPLACE: what is done if a live message has this id
    publish: (producer, name of this put): a repeated put adds nothing
    remember: seconds for which a repeated `publish` is recognised
    has_name: its body says which put it is of: the same bytes under its id are the same message
    replaces: it takes the place of a message that was delivered; a server that is full accepts it
    traits: what holds for it and not for its topic, as :func:`.model.delivery.traits_of` makes it
    counted: whether it counts among what may be put into its topic; what `replaces` another does
        not unless this says so: then it counts, and is not refused
    goes_on: it goes on for the message of its id that was delivered, as what `replaces` one does:
        where the messages of a key start in their order, it holds the key in its place
    """

    id: str
    body: bytes
    at_us: int | Countdown | None = None
    delay_us: int | None = None
    basis: str | None = None
    priority: int = 0
    token: str | None = None
    if_exists: str = ADD
    publish: tuple[str, str] | None = None
    remember: int = REMEMBER
    replaces: bool = False
    traits: str = ""
    counted: bool | None = None
    goes_on: bool = False
    has_name: bool = False


def named_by(request: PutRequest, token: str, now: float) -> PutRequest:
    """A message whose put has a token of its caller's, for its id.

    now: seconds since the epoch
    """
    name = suffix_of(f"{request.id}\0{token}")
    at_us, waits_us = request.at_us, request.delay_us or 0
    if isinstance(at_us, int):
        waits_us = at_us - int(now * 1_000_000)
    remember = REMEMBER_TOKEN + max(waits_us, 0) // 1_000_000
    return request._replace(token=name, publish=(f"={name}", name), remember=remember)


class NewMessage(NamedTuple):
    """A message of :meth:`.put.Puts.put_many`; the fields are the arguments of
    :meth:`.pop.Deliveries.put`.

    at: action time, seconds since the epoch; a past one means now
    delay: instead of `at`, seconds from now by Redis's clock
    basis: slot basis; the key unless given, or the id
    priority: 0 goes first
    token: names its put for the caller
    visibility: seconds that a delivery of it lasts unless it is renewed
    max_lease: seconds for which one delivery of it may be renewed in all; 0: for ever
    expiration: seconds after its due time when it expires
    key: what it is about; its topic may limit what starts of each key
    """

    id: str
    body: bytes
    at: float | None = None
    delay: float | None = None
    basis: str | None = None
    priority: int = 0
    token: str | None = None
    visibility: float | None = None
    max_lease: float | None = None
    expiration: float | None = None
    key: str | int | None = None


class ScheduleFiring(NamedTuple):
    """A message to be put.

    at_us: its action time, microseconds since the epoch
    """

    id: str
    body: bytes
    at_us: int
    priority: int = 0
    traits: str = ""


class ScheduleChange(NamedTuple):
    """A change of a schedule.

    record: as it was read; empty if there was none
    wanted: the new one; empty: the schedule goes
    next_us: when it fires next, microseconds since the epoch; None: never
    template: the new one; empty: the one that it has
    take_out: id of a message that goes if it still waits
    put: the message of the next firing; it is not put if there is one with its id
    more: further messages, with the priority and the traits of the first one; each is put unless
        there is one with its id
    fired: lines for its latest firings, each an id, a tab and text. It takes the place of the line
        of that id
    replaces: a firing that was delivered is to be followed: a full server accepts it
    """

    name: str
    record: str
    wanted: str
    next_us: int | None = None
    template: bytes = b""
    take_out: str = ""
    put: ScheduleFiring | None = None
    fired: Sequence[str] = ()
    replaces: bool = False
    more: Sequence[ScheduleFiring] = ()


class PopRequest(NamedTuple):
    """What a pop asks for.

    name: a name that no other pop has: a consumer, a dot and a number
    slots: only these; all unless given. On a Cluster, exactly one
    ready_limit, lookahead_us: deliver up to so many messages that are due within so many
        microseconds
    overdue_limit, behind_us: deliver up to so many messages that have been due for so many
        microseconds; the two limits include each other
    visibility: seconds that the messages may stay unacknowledged and unrenewed; as each says, or
        its topic, unless given
    recover: roll back up to so many leases a slot that have ended
    claimed: announce again what is left even if it was announced: who pops may have claimed that.
        It matters on a Cluster
    heads: of how many messages a pop that may deliver none tells step and score
    remember: seconds for which :meth:`Commands.recall` delivers the messages once more; the
        consumer's next pop that begins with the same slot ends it
    """

    name: str
    slots: Iterable[int] | None = None
    ready_limit: int = 1
    lookahead_us: int = 0
    overdue_limit: int = 0
    behind_us: int = 0
    visibility: float | None = None
    recover: int = 0
    claimed: bool = True
    remember: int = 0
    heads: int = 0


#: Expired leases that one pop rolls back per slot, at most.
RECOVER = 100

#: Messages that a predicate is asked about, unless the caller says.
LOOK = 1000


class Choice(NamedTuple):
    """What a pop asks for: the arguments of :meth:`.pop.Deliveries.pop`.

    ahead_us: its `ahead`, in microseconds
    """

    limit: int | None = None
    ids: str | Iterable[str] | None = None
    where: Callable[[results.Found], Any] | None = None
    early: bool = False
    look: int = LOOK
    visibility: float | None = None
    slots: Collection[int] | None = None
    recover: int = RECOVER
    ahead_us: int = 0

    @property
    def chooses(self) -> bool:
        """Whether it asks for certain messages, and not for the next ones."""
        return self.ids is not None or self.where is not None or self.early


# -- reads the replies of the scripts of producers and consumers, and counts what they have done


def read_deliveries(
    topic: Topic,
    numbers: Sequence[int],
    name: str,
    flat: list[Any],
    births: Sequence[bytes] = (),
    starts: Sequence[int] = (),
) -> list[Delivery]:
    """The deliveries of a pop of that name.

    births: the token of each, where they are not beside its id: of a topic that is limited
    starts: numbers of those that may start later only, each with its microseconds
    """
    retries = topic.declaration.retries
    deliveries: list[Delivery] = []
    for slot, step, id, score, body in rows(flat, 5):
        birth, start_us = name, 0
        if births:
            birth = births[len(deliveries)].decode()
        if isinstance(id, list):
            id, birth, start_us = id[0], id[1].decode(), id[2] if len(id) > 2 else 0
        id = id.decode("utf-8", "surrogatepass")
        deliveries.append(
            Delivery(topic.name, numbers[slot], step, id, score, body, retries, birth, start_us)
        )
    for at, start_us in zip(starts[::2], starts[1::2], strict=True):
        deliveries[at] = deliveries[at]._replace(start_us=start_us)
    return deliveries


def read_put(counts: TopicCounts, raw: Any, asked: str = "") -> Put:
    """The result of a put; a number, if the message was added under the id that was `asked` for."""
    id, outcome, now, *_ = raw if isinstance(raw, list) else (b"", 1, raw)
    counts.put += now > 0
    return Put(text(id) if id else asked, results.OUTCOMES[outcome], int(now) or None)


def read_settled(counts: TopicCounts, counter: str, raw: list[Any] | int) -> results.Settled:
    """The result of an ack or a release; `counter` counts what was there."""
    there, stale, *_ = (raw, []) if isinstance(raw, int) else raw
    return results.Settled(count_first(counts, counter, [there]), [number - 1 for number in stale])


def read_put_many(counts: TopicCounts, number: int, raw: list[Any]) -> results.PutTogether:
    """The result of a call that puts so many messages."""
    now, there, taken, *_ = raw
    counts.put += number - len(there) - len(taken)
    return results.PutTogether(int(now), there, taken)


def read_reject(counts: TopicCounts, counter: str, raw: list[Any]) -> str | None:
    """The state that a rejected message is in now; `counter` counts it if it comes back."""
    count_first(counts, counter, [raw[0] == 1])
    counts.dead += raw[0] == 2
    return {1: results.WAITING, 2: results.DEAD, 3: results.DEAD}.get(raw[0])


# -- how many messages may be put


def pace_key(topic: Topic, slot: Slot, *, clustered: bool) -> str:
    """Where the puts of a topic are counted: in one place, unless its slots are on several nodes.
    Then each key is counted in its own slot, and a topic that is counted as a whole has one."""
    return slot.put_pace if clustered else topic.slot(0).put_pace


def read_limited_put(topic: Topic, counts: TopicCounts, raw: list[Any]) -> Put | RateLimitedError:
    """The result of a put into a topic whose puts are limited; an error that runners raise."""
    if raw[1] >= 0:
        return read_put(counts, raw)
    counts.refused += 1
    return _refused(topic, raw[3], raw[4])


def read_limited_put_many(
    topic: Topic, counts: TopicCounts, number: int, raw: list[Any]
) -> results.PutTogether:
    """The result of a call that puts so many messages into such a topic."""
    now, there, taken, flat, *_ = raw
    refused = {at: _refused(topic, wait_us, kind) for at, wait_us, kind in rows(flat, 3)}
    counts.refused += len(refused)
    put = read_put_many(counts, number - len(refused), [now, there, taken])
    return put._replace(refused=refused)


def _refused(topic: Topic, wait_us: int, kind: bytes) -> RateLimitedError:
    limit = "put_rate" if kind == b"p" else "key_put_rate"
    rate = getattr(topic.declaration, limit)
    whose = f"queue {topic.name!r}" if kind == b"p" else f"each key of queue {topic.name!r}"
    seconds = wait_us / 1e6
    return RateLimitedError(
        f"{whose} takes {rate} ({limit}), and has got as many; the message was not kept. One more "
        f"may be put in {seconds:.6g} seconds",
        limit,
        seconds,
    )


# -- the logs that scripts keep for the task library
#
# A log says which messages to look at; whoever reads it is given these as they are by then. So its
# entries may be read twice, late, or by two at a time.

#: What an entry says has happened: see ``log.lua``.
PUT, MOVE, CANCEL, FULL = "p", "m", "c", "full"


class Entry(NamedTuple):
    """An entry of a log, and the message that it is about as this is now.

    name: by which it is deleted
    what: PUT, MOVE, CANCEL or FULL
    id: that the message is kept under
    state: its state; empty if it is gone
    """

    name: str
    what: str
    id: str
    state: str
    step: int
    score: int
    body: bytes
    token: str

    @property
    def ms(self) -> int:
        """When it was written, in milliseconds since the epoch."""
        return int(self.name.partition("-")[0])


class Read(NamedTuple):
    """What was read of a log.

    entries: the oldest first
    gone: how many more there were, whose messages are gone: these are deleted
    more: whether there may be more
    """

    entries: list[Entry]
    gone: int
    more: bool


def read_call(
    slot: Slot, limit: int, bytes: int, age_ms: int = 0, after: str | None = None
) -> ScriptCall:
    """Read a log, and delete what it says of messages that are gone by now, but for those that
    were cancelled. Result: a :class:`Read`.

    limit: how many entries at most
    bytes: that their bodies may have together; the first may have any
    age_ms: how old they are at least, in milliseconds
    after: the entry before the first
    """

    def parse(raw: list[Any]) -> Read:
        gone, more, found = raw
        entries = []
        for name, what, id, state, step, score, body, token in rows(found, 8):
            now = (results.STATES.get(state, ""), step, int(float(score)), body, text(token))
            entries.append(Entry(text(name), text(what), text(id), *now))
        return Read(entries, gone, bool(more))

    keys = (slot.log, slot.prepare, slot.dead, slot.body, slot.tokens, *slot.stores)
    start = "-" if after is None else f"({after}"
    return ScriptCall(load("logged"), keys, (limit, bytes, age_ms, start), parse)


def written_call(slot: Slot, entries: Sequence[str], ids: Sequence[str] = ()) -> ScriptCall:
    """Delete entries of a log, one at least. Result: those of the ids whose messages are gone;
    None if an entry had gone: somebody else has written it, or everything was lost just now."""

    def parse(raw: list[Any]) -> list[str] | None:
        return texts(raw[1:]) if raw[0] else None

    return ScriptCall(load("written"), (slot.log, slot.body), (len(entries), *entries, *ids), parse)


def logs_of(topic: Topic) -> list[Slot]:
    """The slots of a topic that may have a log: also those that it had before it was resharded."""
    declaration = topic.declaration
    span = max(topic.slot_span, *declaration.previous_counts, 0)
    return [topic.slot(number) for number in range(span)]


# -- the script calls of producers and consumers
#
# Nothing here asks a server or reads a clock. A call is run by a :class:`.runner.Runner`, or sent
# over a connection of the caller's own. ``parse`` of a call also counts what it did.

#: Index among the keys of a put: the one that remembers the producer's latest publish.
SENT = 4

#: Characters of a reason, and of an error, that are kept with a message.
REASON_LENGTH, ERROR_LENGTH = 1000, 4000

#: Seconds for which a message pauses that is requeued on purpose for the second time, twice as long
#: the third time, and so on; and the longest of these pauses.
PAUSE, LONGEST_PAUSE = 0.05, 1.0

#: Leases that one call renews, or releases: no call may keep the server busy for long.
LEASES_PER_CALL = 500

#: Messages that one call acknowledges, for the same reason.
ACKS_PER_CALL = 1000


#: Bytes that an envelope may have: Redis takes no longer argument, and cuts the connection of who
#: sends one.
MOST_BYTES = 512 << 20


def too_large(size: int) -> str:
    """Why no message of so many bytes can be put."""
    return (
        f"it has {size:,} bytes, and Redis takes {MOST_BYTES:,} at most (512 MB, "
        "proto-max-bulk-len); keep what is large elsewhere, and send where it is"
    )


class Commands:
    """Makes the calls of producers and consumers.

    topic_of: the topic of a delivery; asks nobody
    """

    def __init__(self, context: Context, topic_of: Callable[[Delivery], Topic]) -> None:
        self._context = context
        self._topic_of = topic_of
        self._announcing = context.announcing
        self._counts = context.counts

    # -- producers

    def put(self, topic: Topic, request: PutRequest, *, plain: bool = True) -> ScriptCall:
        """Add a message. Result: :class:`Put`.

        plain: whether put.lua may do it; otherwise keys and arguments are those of put_special.lua

        Look-ups by id find the message if :meth:`.registry.Registry.admit` was called before.
        Raises ActionTimeError beyond the year 2255, and MessageError for one that is too large.
        """
        # Unpacked at once: this runs for each message, and each field would cost a look-up.
        id, body, at_us, delay_us, basis, priority, token, if_exists, publish, *rest = request
        remember, replaces, traits, counted, goes_on, has_name = rest
        if len(body) > MOST_BYTES:
            raise MessageError(f"message {id!r}: {too_large(len(body))}")
        slot = topic.slot_for(basis or id)
        producer, name = publish or ("", "")
        if token is None:
            token = suffix_of(name) if name else token_hex(8)
        declared = topic.declaration
        expires = declared.keys_ms
        keys: tuple[str, ...] = (
            slot.stores[topic.step_index(priority) if priority else 0],
            slot.body,
            slot.announced_times,
            slot.copies(id),
            slot.sent(producer),
        )
        when = when_of(at_us, delay_us)
        args: tuple[Any, ...]
        parse: Any = partial(read_put, self._counts(topic), asked=id)
        if plain and not (
            traits
            or replaces
            or expires
            or declared.lanes
            or declared.put_gates
            or declared.logs
            or if_exists == KEEP
            or remember != REMEMBER
            or not name
        ):
            args = (id, body, when, name, token) if has_name else (id, body, when, name, token, 1)
            return self._announcing(topic, "put", keys, args, parse)
        args = (
            id,
            body,
            when,
            slot.number,
            token,
            expires,
            1 if if_exists == KEEP else 2 if has_name else 0,
            name,
            remember,
            1 if replaces else 0,
        )
        limits = declared.put_gates
        if limits and (replaces or counted is False):
            limits = f"!{limits}" if counted else ""
        # Where those of a key start in their order, what is sent again holds its key in its place;
        # but nothing else that happens to have its id.
        ordered = (
            (replaces or goes_on)
            and declared.key_order
            and declared.key_retry != "later"
            and traits
        )
        # Where they take turns, what is due at once goes to its lane; but if those of a key start
        # in their order, not before what has been due for longer and is not there yet.
        turns = declared.key_fair and not declared.key_order and not expires
        logs = declared.logs
        if limits or ordered or turns or logs:
            pace = pace_key(topic, slot, clustered=self._context.clustered)
            keys, args = (*keys, slot.tokens, pace), (*args, traits, limits)
            others: list[str] = []
            if ordered:
                here = [] if self._context.clustered else topic.slots_for(basis or id)
                others = [one.holders for one in here if one.number != slot.number]
                keys = (*keys, slot.holders, *others)
            elif turns:
                keys = (*keys, *slot.lane_keys[:3])
            step = 1 + (topic.step_index(priority) if priority else 0)
            args = (*args, 1 + len(others) if ordered else 0, 0 if ordered or not turns else step)
            if logs:
                keys, args = (*keys, slot.log), (*args, logs)
            parse = partial(read_limited_put, topic, self._counts(topic))
        elif traits or expires:
            keys, args = (*keys, slot.tokens), (*args, traits)
        return self._announcing(topic, "put_special", keys, args, parse)

    # -- consumers

    def pop(self, topic: Topic, request: PopRequest) -> ScriptCall:
        """Deliver messages. Result: :class:`Popped`; the caller removes what is `stray`."""
        numbers = self._pop_numbers(topic, request.slots)
        limited = topic.declaration.lanes
        name = request.name
        first = topic.slot(numbers[0])
        gate = self._context.gate_of(topic, first)
        keys = [*_script_keys(topic.prefix, topic.name, topic.steps, tuple(numbers))]
        if limited:
            keys = _limited_keys(map(topic.slot, numbers), gate)
        keys.append(first.given(name.rpartition(".")[0]))
        limits = topic.declaration.limits(self._context.limits)
        counts = self._counts(topic)

        def parse(raw: list[Any]) -> Popped:
            now, more, flat, *rest = raw
            if not rest:
                messages = read_deliveries(topic, numbers, name, flat)
                counts.popped(len(messages), 0, 0, 0)
                return Popped(int(now), bool(more), messages, [], [], [], [], [], [])
            gone, rolled, died, dropped, late, births, starts, *_ = rest
            told = (births, starts) if limited else ()
            messages = read_deliveries(topic, numbers, name, flat, *told)
            lost, old, expired = texts(gone[1::2]), texts(dropped[1::2]), texts(late[1::2])
            places, ids = gone[::2] + dropped[::2], lost + old
            if expired and not limits.dead_expired:
                places, ids = places + late[::2], ids + expired
            stray = [
                (topic.slot(numbers[at]).copies(id.rpartition("#")[0]), id)
                for at, id in zip(places, ids, strict=True)
                if "#" in id
            ]
            rolled, died = texts(rolled), texts(died)
            counts.popped(len(messages), len(rolled), len(died), len(old))
            if expired:
                counts.expire(len(expired), limits.dead_expired)
            return Popped(int(now), bool(more), messages, lost, rolled, died, old, stray, expired)

        return self._announcing(
            topic,
            "pop_limited" if limited else "pop",
            keys,
            (
                len(numbers),
                len(topic.steps),
                request.ready_limit,
                request.lookahead_us,
                request.overdue_limit,
                request.behind_us,
                lease_ms(request.visibility, limits),
                topic.declaration.retries,
                request.recover,
                *_backoff_ms(limits),
                int(limits.dead_age * 1000),
                -(-limits.dead_limit // topic.slots),
                request.heads or int(request.claimed),
                scores.LAST_MS
                * 1000,  # the caller knows better than to wait, or rolls back nothing
                name,
                request.remember,
                self._context.pop_bytes,
                terms_of(limits, own_of(request.visibility, limits)),
                *((topic.gates, gate.number) if limited else ()),
                *(numbers if limited or request.slots is not None else ()),
            ),
            parse,
            keys_recur=True,
        )

    def _pop_numbers(self, topic: Topic, slots: Iterable[int] | None) -> Sequence[int]:
        """The slots that a pop of these slots is for: all, where one slot's messages may have to
        wait for another's."""
        if slots is not None and topic.declaration.lanes and not self._context.clustered:
            slots = None if topic.counts_together else slots
        return slot_numbers(topic, slots)

    def recall(
        self,
        topic: Topic,
        slots: Iterable[int] | None,
        name: str,
        *,
        visibility: float | None = None,
        bodies: bool = True,
        remember: int = REMEMBER,
    ) -> ScriptCall:
        """Deliver once more the messages of a pop whose reply was lost, those that are still in
        flight by it; renew their leases. Result: :class:`Popped`.

        topic, slots, name: those of the pop
        bodies: whether the messages are to have their bodies
        remember: seconds for which the pop delivers nothing if it has not run yet; 0: it may
        """
        numbers = self._pop_numbers(topic, slots)
        asked = map(topic.slot, numbers)
        keys = [key for slot in asked for key in (slot.prepare, slot.body, slot.tokens)]
        keys.append(topic.slot(numbers[0]).given(name.rpartition(".")[0]))
        counts = self._counts(topic)

        def parse(raw: list[Any]) -> Popped:
            now, flat = raw
            found = read_deliveries(topic, numbers, name, flat)
            if found and bodies:
                counts.popped(len(found), 0, 0, 0)
            return Popped(int(now), False, found, [], [], [], [], [])

        limits = topic.declaration.limits(self._context.limits)
        args = (
            name,
            lease_ms(visibility, limits),
            topic.declaration.retries,
            remember,
            int(bodies),
            own_of(visibility, limits),
        )
        return ScriptCall(load("recall"), keys, args, parse)

    def find_due(self, topics: Sequence[str], also: Sequence[str] = ()) -> ScriptCall:
        """Find topics that have due messages that nobody has claimed. Result: their indexes.

        also: more keys with announcements, whose indexes follow
        """
        wakes = [self._context.keys.wake(name) for name in topics]
        return ScriptCall(load("due"), [*wakes, *also], (), list)

    def pass_on(self, topic: str, slot: int, us: int) -> ScriptCall:
        """Leave a claim to the workers that prefer its slot. Result: how many of the slot's nobody
        has claimed."""
        key = self._context.keys.passed_on(topic, slot)
        return ScriptCall(load("pass_on"), (key,), (slot, us), int)

    def reannounce(self, topic: Topic, claims: Iterable[tuple[int, int]]) -> list[ScriptCall]:
        """Announce claims again, each a slot and a time in microseconds.

        What was settled meanwhile is not announced. Result of each call: how many were.
        """
        return [
            self._announcing(
                topic,
                "hand_back",
                [topic.slot(slot).announced_times for slot, _ in some],
                [value for pair in some for value in pair],
                itemgetter(0),
            )
            for some in self._context.groups(claims)
        ]

    # -- what ends a delivery, or prolongs it

    def ack(self, deliveries: Iterable[Delivery]) -> list[ScriptCall]:
        """Acknowledge messages, in as few calls as possible. Result of each: :class:`Settled`,
        with positions in the batch of :meth:`ack_batches`, by slot."""
        batches = self.ack_batches(deliveries)
        return [self._ack(self._topic_of(batch[0]), batch) for batch in batches]

    def ack_batches(self, deliveries: Iterable[Delivery]) -> list[list[Delivery]]:
        """What each call of :meth:`ack` acknowledges."""
        if type(deliveries) is list and len(deliveries) < 2:  # as a solo worker's, each time
            return [deliveries] if deliveries else []
        by_topic: dict[tuple[str, int], list[Delivery]] = defaultdict(list)
        for delivery in deliveries:
            place = delivery.slot if self._context.clustered else 0
            by_topic[delivery.topic, place].append(delivery)
        return [[*part] for batch in by_topic.values() for part in parts_of(batch, ACKS_PER_CALL)]

    def _ack(self, topic: Topic, batch: list[Delivery]) -> ScriptCall:
        # Of one that was not, a message may have come to a place since.
        limited = topic.declaration.lanes
        #: slot -> ids, and births
        by_slot: dict[int, tuple[list[str], list[str]]] = {}
        copies: list[Any] = []
        for delivery in batch:
            ids, births = by_slot.setdefault(delivery.slot, ([], []))
            ids.append(delivery.id)
            births.append(delivery.birth)
            if ";" in delivery.birth:
                limited = limited or delivery.has_place
            if "#" in delivery.id:
                copies += (delivery.slot, delivery.id)
        keys: list[str] = []
        args: list[Any] = []
        for number, (ids, births) in sorted(by_slot.items()):
            slot = topic.slot(number)
            keys += slot.script_keys
            if limited:
                keys += slot.lane_keys
            args += (number, len(ids), *ids, *births)
        sets = [topic.slot(at).copies(id.rpartition("#")[0]) for at, id in rows(copies, 2)]
        if limited:
            gate = self._context.gate_of(topic, slot)
            keys += (gate.announced_times, gate.pace, gate.busy)
            args = [topic.gates, gate.number, *args]
        return self._announcing(
            topic,
            "ack_limited" if limited else "ack",
            [*keys, *sets],
            (len(by_slot), len(topic.steps), len(sets), *args, *copies),
            partial(read_settled, self._counts(topic), "acked"),
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
        on_purpose: bool = False,
    ) -> ScriptCall:
        """Give a message back after a failure. Result: its new state, or None if it was no longer
        in flight.

        requeue: roll it back with one retry less; without it, or with no retries left, it goes to
            DeadQueue with the reason
        on_purpose: nothing has failed: a requeue costs no retry, and comes back at once the first
            time, then after a pause that doubles
        error: what went wrong; kept with the message, the latest only
        backoff: seconds until it is due again; as the topic says unless given
        """
        topic = self._topic_of(delivery)
        slot = topic.slot(delivery.slot)
        limits = topic.declaration.limits(self._context.limits)
        if backoff is not None:
            microseconds(backoff)  # it is a time
            limits = limits._replace(retry_backoff=backoff, retry_backoff_max=backoff)
        on_purpose = on_purpose and requeue
        if on_purpose:
            limits = limits._replace(retry_backoff=PAUSE, retry_backoff_max=LONGEST_PAUSE)
        elif requeue:
            reason = f"no retries left: {reason or 'rejected again and again'}"
        return self._announcing(
            topic,
            "reject",
            slot.script_keys,
            (
                len(topic.steps),
                slot.number,
                delivery.id,
                2 if on_purpose else int(requeue),
                *_backoff_ms(limits),
                encoded(" ".join(reason.split())[:REASON_LENGTH] or "rejected"),
                encoded(error[:ERROR_LENGTH]),
                topic.declaration.retries,
                delivery.lease_token,
                delivery.birth,
            ),
            partial(read_reject, self._counts(topic), "released" if on_purpose else "rolled_back"),
            limited=slot if topic.declaration.lanes or delivery.has_place else None,
        )

    def spent_requeues(self, delivery: Delivery) -> str:
        """Why a message is to die instead of being requeued on purpose once more; empty: it is
        not."""
        limits = self._topic_of(delivery).declaration.limits(self._context.limits)
        most = limits.requeue_limit
        if most is None or delivery.requeues < most:
            return ""
        return f"requeued {most} times, and x-requeue-limit allows no more"

    def release(self, deliveries: Iterable[Delivery], *, handed: bool = False) -> list[ScriptCall]:
        """Take messages back unhandled. Result of each call: :class:`Settled`, with positions in
        the batch of :func:`batches_by_slot`.

        handed: a consumer was handed them, so that their next deliveries are redeliveries
        """
        calls = []
        for batch in batches_by_slot(deliveries):
            topic = self._topic_of(batch[0])
            slot = topic.slot(batch[0].slot)
            args: list[Any] = []
            for one in batch:
                args += (one.id, one.score, one.step, one.lease_token, one.birth)
            calls.append(
                self._announcing(
                    topic,
                    "release",
                    (slot.announced_times, slot.prepare, slot.tokens, *slot.stores),
                    (len(topic.steps), slot.number, int(handed), *args),
                    partial(read_settled, self._counts(topic), "released"),
                    limited=slot if topic.declaration.lanes or batch[0].has_place else None,
                )
            )
        return calls

    def extend(
        self, deliveries: Iterable[Delivery], visibility: float | None = None
    ) -> list[ScriptCall]:
        """Renew leases. Result of each call: the deliveries whose leases had ended already, a
        :class:`Lost`.

        visibility: seconds; as each message says, or its topic, unless given
        """
        return [self._extend(batch, visibility) for batch in batches_by_slot(deliveries)]

    def _extend(self, batch: list[Delivery], visibility: float | None) -> ScriptCall:
        topic = self._topic_of(batch[0])
        limits = topic.declaration.limits(self._context.limits)
        renewed_ms, own = lease_ms(visibility, limits), own_of(visibility, limits)

        def parse(raw: list[int]) -> results.Lost:
            return results.Lost(
                (batch[abs(number) - 1] for number in raw),
                [batch[-number - 1] for number in raw if number < 0],
            )

        slot = topic.slot(batch[0].slot)
        return ScriptCall(
            load("extend"),
            (slot.prepare, slot.tokens),
            (renewed_ms, own, *(x for d in batch for x in (d.id, d.lease_token, d.birth))),
            parse,
        )


def announce_presence(keys: Keys, statement: str, before: Iterable[str], ttl_ms: int) -> ScriptCall:
    """Report which topics a process consumes.

    statement: its host, its pid and the topics, as JSON; empty if it consumes none
    before: what it reported until now
    ttl_ms: milliseconds until it is forgotten
    """
    return ScriptCall(load("present"), (keys.consumers,), (statement, ttl_ms, *before), int)


def add_counters(keys: Keys, topic: str | None, added: dict[str, int]) -> ScriptCall:
    """Add to a topic's counters, or to those of scripts if None. Result: whether there is such a
    topic."""
    pairs = [value for pair in added.items() for value in pair]
    if topic is None:
        return ScriptCall(load("count"), (keys.topics, keys.scripts), ("", *pairs), bool)
    places = (keys.topics, keys.counted(topic), keys.minutes(topic))
    return ScriptCall(load("count"), places, (topic, *pairs), bool)


def slot_numbers(topic: Topic, slots: Iterable[int] | None) -> Sequence[int]:
    """Slot numbers in order, each once; all of the topic's if None."""
    return range(topic.slot_span) if slots is None else sorted(set(slots))


def divide_evenly(total: int, among: Sequence[int]) -> list[tuple[int, int]]:
    """Divide a number of things: (who, how many), without those who get none."""
    each, rest = divmod(total, len(among))
    return [(who, each + (at < rest)) for at, who in enumerate(among) if each or at < rest]


def batches_within(
    items: Iterable[T], most: Sequence[int], weigh: Callable[[T], Sequence[int]]
) -> Iterator[list[T]]:
    """Items in their order, as many together as weigh no more than `most`; one weighs anything.

    weigh: what one counts for, of each kind that has a bound
    """
    batch: list[T] = []
    total: Sequence[int] = [0] * len(most)
    for item in items:
        weight = weigh(item)
        total = [former + own for former, own in zip(total, weight, strict=True)]
        if batch and any(one > bound for one, bound in zip(total, most, strict=True)):
            yield batch
            batch, total = [], weight
        batch.append(item)
    if batch:
        yield batch


@lru_cache(maxsize=1024)
def _script_keys(
    prefix: str, topic: str, steps: tuple[int, ...], numbers: tuple[int, ...]
) -> list[str]:
    slots = [Slot(prefix, topic, number, steps) for number in numbers]
    stores = zip(*(slot.stores for slot in slots), strict=True)
    return [key for keys in (*(slot.script_keys[:6] for slot in slots), *stores) for key in keys]


def _limited_keys(slots: Iterable[Slot], gate: Slot) -> list[str]:
    keys: list[str] = []
    for slot in slots:
        keys += (*slot.script_keys, *slot.lane_keys)
    keys += (gate.announced_times, gate.pace, gate.busy)
    return keys


def batches_by_slot(deliveries: Iterable[Delivery]) -> list[list[Delivery]]:
    """Deliveries of one topic and slot each, as many as one call releases or renews."""
    by_slot: dict[tuple[str, int], list[Delivery]] = defaultdict(list)
    for delivery in deliveries:
        by_slot[delivery.topic, delivery.slot].append(delivery)
    return [[*part] for batch in by_slot.values() for part in parts_of(batch, LEASES_PER_CALL)]


def lease_ms(visibility: float | None, limits: Limits) -> int:
    """How long leases last, in milliseconds, unless messages have their own visibility.

    visibility: what the caller says, in seconds, if anything; limits: those of the topic

    Raises ConfigurationError for a negative one.
    """
    given_us = microseconds(visibility)
    if given_us is None:
        return int(limits.visibility * 1000)
    if given_us < 0:
        raise ConfigurationError(f"visibility must be seconds from 0 up, not {visibility!r}")
    return given_us // 1000


def own_of(visibility: float | None, limits: Limits) -> int:
    """Whether what a caller says of visibility goes before the messages' own: 0 if nothing is said,
    2 if it is longer than usual (lease.lua)."""
    if visibility is None:
        return 0
    return 2 if visibility > min(limits.visibility, Limits().visibility) else 1


@lru_cache(maxsize=1024)
def terms_of(limits: Limits, own: int = 0) -> str:
    """What else holds for the messages of a topic with these limits, as deliver.lua reads it.

    own: whether the caller's visibility goes before the messages' own, as :func:`own_of` says it
    """
    terms = {
        "own": own,
        "far": own == 2 or (not own and limits.visibility > Limits().visibility),
        "drop": not limits.dead_expired,
        f"m{int(limits.max_lease * 1000)}": limits.max_lease,
        f"t{limits.message_ttl}": limits.message_ttl is not None,
    }
    return "".join(f"{term}," for term, holds in terms.items() if holds)


def _backoff_ms(limits: Limits) -> tuple[int, int]:
    """The first wait after a failure and the longest, in milliseconds."""
    return int(limits.retry_backoff * 1000), int(limits.retry_backoff_max * 1000)


def encoded(text: str) -> bytes:
    """A text as it is kept. What UTF-8 cannot hold, such as half a surrogate pair, is escaped."""
    return text.encode("utf-8", "backslashreplace")
