"""Topics: what they were declared with, which slot a message goes to, and the name of every Redis
key. Nothing else builds a key."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import crcmod.predefined

from ..errors import ConfigurationError
from .library import BEHIND, OFF, log_bound
from .limits import (
    CLUSTER_SLOTS,
    LIMITS,
    NEEDS,
    PRIORITIES,
    PRIORITY_STEPS,
    WHOLE_QUEUE,
    Limits,
    check_limits,
    check_steps,
    count_of,
    interval_us,
    spacing_us,
)
from .message import encode_key
from .scores import MAX_RETRIES

# -- the name of every Redis key

#: Minutes for which counters are kept one by one.
MINUTES = 64


def check_name(name: str) -> None:
    """Raise ConfigurationError for a name that is none, or cannot be encoded as UTF-8."""
    if not isinstance(name, str):
        raise ConfigurationError(f"a queue is named by a str, not {name!r:.100}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"{name!r} cannot name a queue: it has half of a surrogate pair, which no UTF-8 can "
            "hold; a name that was read from bytes has to be decoded as what it is"
        ) from None


def encode_name(name: str) -> str:
    """Percent-encode the characters that would end a hash tag early or leave it empty."""
    return name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")


def slot_of_key(key: str | bytes) -> tuple[str, int] | None:
    """The topic and the number of the slot that a key belongs to; None if it belongs to none."""
    name = key if isinstance(key, str) else key.decode("utf-8", "surrogatepass")
    topic, colon, number = name.partition("{")[2].partition("}")[0].rpartition(":")
    if not (colon and number.isdigit()):
        return None
    return topic.replace("%7D", "}").replace("%7B", "{").replace("%25", "%"), int(number)


def schedule_place(name: str, topic: str = "") -> str:
    """A member of `schedule_places`. Without the topic, all members of that name begin with it."""
    return name.replace("%", "%25").replace("\0", "%00") + "\0" + topic


#: Keys that are hashes, by the first word after their tag.
_HASHES = (
    *("body", "reasons", "tokens", "claims", "busy", "holders", "schedules", "templates"),
    *("leaving", "topics", "counted", "minutes", "firings", "copies", "parts", "edition"),
    *("scripts", "failures"),
)

#: Of keys, by the first word after their tag: the command that reads any key of its type, and what
#: that is. All others are sorted sets.
_READ: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(_HASHES, (("HEXISTS", ""), "hash")),
    **dict.fromkeys(
        ("watch", "sent", "bound", "upkeep", "speaker", "look", "restored"), (("GET",), "string")
    ),
    "paused": (("SCARD",), "set"),
    **dict.fromkeys(("log", "fanout", "part", "audit"), (("XLEN",), "stream")),
}


def reading(key: str) -> tuple[tuple[str, ...], str]:
    """The command that Redis refuses if the key is of another type than it should be, and that
    type."""
    word = key.partition("}:")[2].partition(":")[0]
    (name, *rest), kind = _READ.get(word, (("ZCARD",), "sorted set"))
    return (name, key, *rest), kind


def _named(kind: str) -> Callable[[Keys, str], str]:
    def key(keys: Keys, name: str) -> str:
        return f"{keys.stem}{kind}:{name}"

    return key


class Keys:
    """The keys that belong to no slot; all share the tag ``{toc}``."""

    #: name -> string: the answer to a request over HTTP that has an Idempotency-Key, or that
    #: somebody is at it; expires
    answer = _named("answer")
    #: name -> string: the token with which a session of the page was begun; expires
    session = _named("session")
    #: name -> hash: how far the page has come with what it does to many messages; expires
    job = _named("job")
    #: topic -> sorted set: the topic's announcements that no consumer has claimed
    wake = _named("wake")
    #: exchange -> sorted set: binding -> when it expires, in ms
    bindings = _named("bindings")
    #: exchange -> string: the version of the bindings
    bound = _named("bound")
    #: exchange -> stream: the exchange's broadcast messages, without those of parts
    fanout = _named("fanout")
    #: exchange -> hash: part -> until when it has a reader, in ms
    parts = _named("parts")
    #: producer -> string: the producer's latest broadcast, kept for as long as it may be repeated
    sent = _named("sent")
    #: topic -> string: the process elected to report what is in the topic
    speaker = _named("speaker")
    #: source -> hash: which edition of a source's schedules is in force, and who puts it
    edition = _named("edition")
    #: source -> sorted set: former editions of a source's schedules -> when they were replaced, in
    #: ms
    editions = _named("editions")
    #: topic -> sorted set, of a topic that its consumers keep: process -> until when it counts as
    #: one, in ms
    users = _named("users")
    #: topic -> hash: counter -> number since the topic was declared
    counted = _named("counted")
    #: topic -> hash, a ring: the same for each of the last minutes, by the minute's number since
    #: the epoch, modulo MINUTES
    minutes = _named("minutes")

    def __init__(self, prefix: str) -> None:
        if "{" in prefix or "}" in prefix:
            raise ConfigurationError(f"key prefix {prefix!r} may not contain braces")
        self.prefix = prefix
        self.stem = stem = f"{prefix}{{toc}}:"
        #: hash: topic -> its declaration
        self.topics = stem + "topics"
        #: sorted set: the names of all topics, each with 0: they are read in order, in pages
        self.names = stem + "names"
        #: sorted set: transient topic or binding -> when it expires unless it is refreshed, in ms
        self.expiring = stem + "expiring"
        #: sorted set: a consumer and its topics -> when that entry expires, in ms
        self.consumers = stem + "consumers"
        #: set: topics whose consumption is paused
        self.paused = stem + "paused"
        #: string: there unless Redis lost what operators have done; expires while that is restored
        self.restored = stem + "restored"
        #: never set: deleting it shows whether the server accepts writes
        self.write_probe = stem + "nothing"
        #: hash: script:calls, script:timed, script:us -> number, for all topics
        self.scripts = stem + "scripts"
        #: sorted set: id of a message whose cancelling is to be reported -> when, in ms
        self.cancelled = stem + "cancelled"
        #: sorted set: topics that have schedules, each with 0
        self.scheduled_names = stem + "scheduled-names"
        #: sorted set: the names of schedules, each with its topic (:func:`schedule_place`) and 0
        self.schedule_places = stem + "schedule-places"
        #: string: the process elected for the upkeep of all topics; expires unless it is renewed
        self.upkeep = stem + "upkeep"
        #: the same: the process elected for what only some can do, such as to carry schedules on
        self.upkeep_also = stem + "upkeep:also"
        #: stream: what people have done on the page
        self.audit = stem + "audit"
        #: sorted set: the jobs that were begun last, by when; expires
        self.jobs = stem + "jobs"
        #: sorted set: queue of which failed tasks are kept -> when one failed, to a minute; expires
        self.failing = stem + "failing"

    def look(self, topic: str, place: int) -> str:
        """String: the process that looks into a topic for all pops that wait for it, or that stands
        next; expires."""
        return f"{self.stem}look:{place}:{topic}"

    def passed_on(self, topic: str, slot: int) -> str:
        """Sorted set: the slot's announcements that were passed on to those who prefer it, and
        that none of them has claimed; with the members of :meth:`wake`."""
        return f"{self.stem}zone:{slot}:{topic}"

    def part(self, exchange: str, part: str) -> str:
        """Stream: the broadcast messages of a part, which is a number or ``*``."""
        return f"{self.stem}part:{part}:{exchange}"


class Slot:
    """The keys of one slot; all share one hash tag, so they live on one node."""

    def __init__(self, prefix: str, topic: str, number: int, steps: tuple[int, ...]) -> None:
        self.number = number
        self.stem = stem = f"{prefix}{{{encode_name(topic)}:{number}}}:"
        #: sorted sets, one per priority step: id -> score
        self.stores = tuple(map(self.store, steps))
        #: sorted set: id -> when its lease ends
        self.prepare = stem + "prepare"
        #: sorted set: id -> when it died
        self.dead = stem + "dead"
        #: hash: id -> why it died and its last error, a line each; while it lives, the first is
        #: empty
        self.reasons = stem + "reasons"
        #: hash: id -> envelope
        self.body = stem + "body"
        #: hash: id -> the token of its lease, of messages that have been delivered
        self.tokens = stem + "tokens"
        #: sorted set: the times of the slot that are announced in the wake index and have not
        #: passed
        self.announced_times = stem + "armed"
        #: string: since when its leases are looked at without a gap, when they were last, and when
        #: one was first seen to have ended: see ``upkeep.lua``
        self.watch = stem + "watch"
        #: hash: schedule -> its record
        self.schedules = stem + "schedules"
        #: hash: schedule -> the envelope of which each of its firings is made
        self.templates = stem + "templates"
        #: hash: schedule -> its latest firings, a line each
        self.firings = stem + "firings"
        #: sorted set: schedule -> when it fires next, in microseconds since the epoch
        self.coming = stem + "coming"
        #: sorted set: the names of the schedules, each with 0
        self.schedule_names = stem + "schedule-names"
        #: sorted set, one member: when a schedule was changed last, in microseconds. It is ahead of
        #: the clock if that was set back since
        self.schedules_changed = stem + "schedules-changed"
        #: sorted set: key -> when what may be put of it has been used up to, in us; ':' for all.
        #: It expires. Where all slots are on one server, slot 0 has those of all
        self.put_pace = stem + "put-pace"
        #: hash: unique key -> which message has it, since when, and until when
        self.claims = stem + "claims"
        #: of slot 0: sorted set: id of a task -> when it failed last, in microseconds; hash: id ->
        #: its record, and under the empty field the bytes of all
        self.failure_keys = (stem + "failed", stem + "failures")
        #: stream: which messages the recorder of the task library is to look at, and why
        self.log = stem + "log"
        #: hash: batch -> messages on their way to a slot of another node
        self.leaving = stem + "leaving"
        #: the keys in the order in which most scripts take them
        self.script_keys = (
            self.announced_times,
            self.prepare,
            self.body,
            self.dead,
            self.reasons,
            self.tokens,
            *self.stores,
        )
        #: sorted set: key -> when its rate has been used up to, in us; of slot 0, under the empty
        #: key, that of the whole topic
        self.pace = stem + "pace"
        #: sorted set: key that waits for its rate -> when it may go on, in us; for one that runs:
        #: infinity
        self.waits = stem + "waits"
        #: hash: key -> id that it is held by
        self.holders = stem + "holders"
        #: hash: key -> how many of it run; under the empty key, all of the slot
        self.busy = stem + "busy"
        #: the keys of its lanes, in the order in which scripts take them (``lanes.lua``):
        #: of a topic that limits what may start
        self.lane_keys = (
            #: sorted set without scores: key, priority step, score and id of what waits in a lane
            stem + "lanes",
            #: sorted set: key that may start something -> its order
            stem + "turns",
            self.waits,
            self.pace,
            #: sorted set: key -> where its last turn ended, of keys that take turns
            stem + "tags",
            self.busy,
            self.holders,
        )

    def store(self, step: int) -> str:
        """Sorted set: the waiting messages of a priority step, which need not be one of the
        topic's."""
        return self.stem + ("store" if not step else f"store:{step}")

    def copies(self, id: str) -> str:
        """Hash: id of each other live message that shares this id -> microseconds when it was put,
        a colon, and the score with which the message of this id waited then, if it did."""
        return f"{self.stem}copies:{id}"

    def sent(self, producer: str) -> str:
        """String: the producer's latest publish to this slot, kept for as long as it may be
        repeated."""
        return f"{self.stem}sent:{producer}"

    def given(self, consumer: str) -> str:
        """String: the reply to a consumer's latest pop of this slot and others, kept for as long as
        the consumer may ask for it again."""
        return f"{self.stem}sent:to:{consumer}"

    def all(self) -> list[str]:
        """Every key of the slot but `copies`, `sent` and `given`."""
        return [
            *self.script_keys,
            self.watch,
            *self.lane_keys,
            *self.of_schedules(),
            *(() if self.number else self.failure_keys),
            *(self.put_pace, self.claims, self.log, self.leaving),
        ]

    def of_schedules(self) -> list[str]:
        """The keys of the topic's schedules: its slot 0 has them."""
        if self.number:
            return []
        named = (self.schedule_names, self.schedules_changed)
        return [self.schedules, self.templates, self.firings, self.coming, *named]


# -- what a topic was declared with, and which slot a message goes to

_crc32: Callable[[bytes], int] = crcmod.predefined.mkPredefinedCrcFun("crc-32")


def checksum_of(text: str) -> int:
    """The CRC-32 of a text."""
    return _crc32(text.encode("utf-8", "surrogatepass"))


def slot_of(basis: str, slots: int) -> int:
    """The slot that CRC-32 of the slot basis picks."""
    return _crc32(basis.encode("utf-8", "surrogatepass")) % slots


def base_of(id: str) -> str:
    """The id that a copy shares with its original; any other id as it is."""
    return id.rpartition("#")[0] if "#" in id else id


def check_slots(topic: str, slots: object) -> int:
    """Return `slots`, or raise SlotCountError if it is not a power of two within bounds."""
    checked: int = LIMITS["slots"].check(f"queue {topic!r}: the slot count", slots)
    return checked


#: Fields that are not declared: they record what has happened to the topic.
_NOT_SAID = (
    *("draining_counts", "previous_counts", "bases", "named", "closed_steps", "altered"),
    *("kept", "lanes", "unique", "far", "target_stopped"),
)

#: Fields whose names in Redis are older than those here.
_IN_REDIS = {"draining_counts": "was", "previous_counts": "formerly"}
_FROM_REDIS = {old: new for new, old in _IN_REDIS.items()}


@dataclass(frozen=True)
class Declaration:
    """The declaration of a topic; stored in Redis, once per topic.

    slots: number of shards, a power of two
    retries: redeliveries of a message
    expires: milliseconds after which an unused topic is deleted, or None
    steps: the distinct priority levels; None: those of each connection
    draining_counts: other slot counts by which messages may still be placed, after a reshard
    previous_counts: slot counts that it had; a declaration with one of them is not refused
    bases: whether a message may be in another slot than the one that its id selects
    named: of a topic that expires, whether it may have messages that somebody looks for by id;
        replies have no such id. `bases` and `named` may be None: that is not known.
    unique: whether a message with a unique key was put
    closed_steps: those of `steps` under which nothing is put any more; messages may still be there,
        and consumers read them
    kept: of a topic that is kept by its consumers, and goes `expires` after the last one has left:
        milliseconds for which one that says nothing counts; None for one that is kept by whoever
        has declared it
    altered: whether the steps were changed after it was declared; a connection with others is not
        refused then
    lanes: whether its starts are limited, or have been: then something may wait in lanes
    far: whether it has a horizon, or has had one: then something may be in the task library only
    target_stopped: why nothing is sent to its target any more, if that has said so

    Those from `rate` to `key_header` limit starts, keys and puts (docs/limits.md); None: they do
    not. `library`, `guard` and `horizon` are for the task library (docs/library.md), `target` is
    for the notifier (docs/notifier.md). The others are those of :class:`Limits`, or None for the
    limits of the consumer's connection.

    Its fields are what Redis has of a topic, in one flat document that other languages read, which
    is why they are more than fifteen.
    """

    slots: int = CLUSTER_SLOTS
    retries: int = MAX_RETRIES
    visibility: float | None = None
    expires: int | None = None
    retry_backoff: float | None = None
    retry_backoff_max: float | None = None
    dead_age: float | None = None
    dead_limit: int | None = None
    max_lease: float | None = None
    message_ttl: int | None = None
    dead_expired: bool | None = None
    requeue_limit: int | None = None
    steps: tuple[int, ...] | None = None
    draining_counts: tuple[int, ...] = ()
    previous_counts: tuple[int, ...] = ()
    bases: bool | None = None
    named: bool | None = None
    closed_steps: tuple[int, ...] = ()
    altered: bool | None = None
    kept: int | None = None
    rate: str | None = None
    rate_burst: int | None = None
    concurrency: int | None = None
    key_rate: str | None = None
    key_burst: int | None = None
    key_concurrency: int | None = None
    key_order: str | None = None
    key_retry: str | None = None
    key_fair: bool | None = None
    key_weights: tuple[tuple[str, float], ...] | None = None
    put_rate: str | None = None
    key_put_rate: str | None = None
    key_header: str | None = None
    guard: bool | None = None
    library: str | None = None
    horizon: float | None = None
    target: str | None = None
    lanes: bool | None = None
    unique: bool | None = None
    far: bool | None = None
    target_stopped: str | None = None

    @cached_property
    def gates(self) -> str:
        """The limits on its starts, as text for scripts (:mod:`.limits`); empty without any."""
        gates = []
        if self.rate:
            gates.append(f"r{spacing_us(self.rate):.3f}:{self.rate_burst or 1}")
        if self.concurrency:
            gates.append(f"c{self.concurrency}")
        if self.key_rate:
            gates.append(f"R{spacing_us(self.key_rate):.3f}:{self.key_burst or 1}")
        if self.key_concurrency:
            gates.append(f"C{self.key_concurrency}")
        if self.key_order == "serial":
            gates.append("S")
            if self.key_retry == "later":
                gates.append("L")
        if self.key_fair:
            gates.append("F")
            gates += [f"w{encode_key(key)}={weight:.15g}" for key, weight in self.key_weights or ()]
        return "".join(f"{one}," for one in gates)

    @cached_property
    def paced(self) -> bool:
        """Whether it has a rate, or its keys have: what may start in a moment is known."""
        return bool(self.rate or self.key_rate)

    @cached_property
    def put_gates(self) -> str:
        """The limits on its puts, as text for scripts; empty without any. As many as the rate says
        may come at once: 100 of ``100/s``."""
        rates = (("p", self.put_rate), ("P", self.key_put_rate))
        return "".join(
            f"{name}{interval_us(rate):.3f}:{count_of(rate)}," for name, rate in rates if rate
        )

    @cached_property
    def logs(self) -> int:
        """Entries that the log of a slot may have, for the task library; 0: nothing is logged."""
        return log_bound(self.slots) if self.library == BEHIND and not self.expires else 0

    @cached_property
    def rows_first(self) -> bool:
        """Whether the task library has the row of a message before Redis has it, or may have."""
        if self.expires or self.library == OFF:
            return False
        return self.library != BEHIND or self.horizon is not None

    @property
    def keys_ms(self) -> int:
        """Milliseconds that its keys live without being refreshed; 0 for ever."""
        return self.kept or self.expires or 0

    @classmethod
    def of(cls, topic: str, /, **limits: object) -> Declaration:
        """A checked declaration; what is None in `limits` takes the default.

        Raises SlotCountError or ConfigurationError, naming the topic.
        """
        given: dict[str, Any] = {k: v for k, v in limits.items() if v is not None}
        unknown = set(given) - {*LIMITS, "steps"}
        if unknown:
            known = [name for name in cls.__dataclass_fields__ if name not in _NOT_SAID]
            raise ConfigurationError(
                f"queue {topic!r}: unknown limit {min(unknown)!r}; there are {', '.join(known)}"
            )
        steps = given.pop("steps", None)
        checked = check_limits(f"queue {topic!r}", given.items())
        made = cls(**checked, steps=None if steps is None else check_steps(steps))
        return made.with_lanes()

    def with_lanes(self) -> Declaration:
        """This declaration; if it limits starts, it says that something may wait in lanes; if it
        has a horizon, that something may be in the task library only."""
        lanes, far = self.lanes or bool(self.gates), self.far or self.horizon is not None
        if (lanes, far) == (bool(self.lanes), bool(self.far)):
            return self
        return replace(self, lanes=lanes or None, far=far or None)

    def check_gates(self, topic: str, *, clustered: bool) -> None:
        """Raise ConfigurationError, naming the topic, if limits do not go together."""
        for name, needed in NEEDS.items():
            if getattr(self, name) and not getattr(self, needed):
                raise ConfigurationError(
                    f"queue {topic!r}: {name} says nothing without {needed}; set {needed}, or "
                    f"leave {name} out"
                )
        if clustered:
            self.check_one_slot(topic, self.slots)

    def check_one_slot(self, topic: str, slots: int) -> None:
        """Raise ConfigurationError for a queue on a Cluster that something counts as a whole, if it
        is to have other slots than one."""
        limit = next((name for name in WHOLE_QUEUE if getattr(self, name)), None)
        if limit and (slots != 1 or self.draining_counts):
            former = " and former ones" if slots == 1 else ""
            raise ConfigurationError(
                f"queue {topic!r}: {limit} counts the whole queue, and on a Cluster the slots of a "
                f"queue are on several nodes: it needs one slot, not {slots}{former}; "
                f"'celery toc reshard {topic} --slots 1' changes that, or limit each key instead: "
                f"key_{limit}"
            )

    def check_horizon(self, topic: str) -> None:
        """Raise ConfigurationError, naming the topic, if it has a horizon and no rows."""
        if self.horizon is not None and self.library == OFF:
            raise ConfigurationError(
                f"queue {topic!r}: horizon keeps rows in the task library, and library={OFF} keeps "
                "none: leave one of them out"
            )

    @cached_property
    def _limits(self) -> dict[Limits, Limits]:
        return {}

    def limits(self, otherwise: Limits) -> Limits:
        """The topic's limits, with those of `otherwise` where it was declared without."""
        if otherwise not in self._limits:
            said = {name: getattr(self, name) for name in Limits._fields}
            said = {name: value for name, value in said.items() if value is not None}
            self._limits[otherwise] = otherwise._replace(**said)
        return self._limits[otherwise]

    def to_json(self) -> str:
        said = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if self.key_weights:
            said["key_weights"] = dict(self.key_weights)
        return json.dumps(
            {_IN_REDIS.get(k, k): v for k, v in said.items() if v not in (None, ())},
            separators=(",", ":"),
        )

    def over(self, text: str | bytes) -> str:
        """As :meth:`to_json`, with the fields of another declaration (JSON) that only newer
        releases know."""
        known = self.__dataclass_fields__
        newer = {k: v for k, v in json.loads(text).items() if _FROM_REDIS.get(k, k) not in known}
        return json.dumps({**newer, **json.loads(self.to_json())}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Declaration:
        known = cls.__dataclass_fields__
        said = {_FROM_REDIS.get(k, k): v for k, v in json.loads(text).items()}
        kept: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in said.items() if k in known
        }
        if "key_weights" in kept:
            kept["key_weights"] = tuple(sorted(kept["key_weights"].items()))
        return cls(**kept)


@dataclass(frozen=True)
class Topic:
    """A declared topic, and its keys."""

    name: str
    declaration: Declaration
    prefix: str
    steps: tuple[int, ...] = PRIORITY_STEPS

    @property
    def slots(self) -> int:
        """How many slots messages are put into."""
        return self.declaration.slots

    @property
    def slot_span(self) -> int:
        """How many slots may hold messages: more than `slots` after a reshard to fewer."""
        return max(self.declaration.slots, *self.declaration.draining_counts, 1)

    @property
    def gates(self) -> str:
        """The limits on starts, as text for scripts: those of the declaration, and whether it is
        being resharded: then a key may have messages in several slots."""
        said = self.declaration
        return said.gates + "d," if said.draining_counts else said.gates

    @property
    def counts_together(self) -> bool:
        """Whether what may start in one of its slots depends on the others: on what runs in the
        whole topic, on whose turn it is, or on what a reshard has not moved yet."""
        said = self.declaration
        return bool(said.rate or said.concurrency or said.key_fair or said.draining_counts)

    def slot(self, number: int) -> Slot:
        return _slot(self.prefix, self.name, number, self.steps)

    def slot_for(self, basis: str) -> Slot:
        """The slot that a message with this slot basis goes to."""
        return _slot(self.prefix, self.name, slot_of(basis, self.declaration.slots), self.steps)

    def slots_for(self, basis: str | None) -> list[Slot]:
        """Where a message with this slot basis may be: the slot that it goes to now, and those
        that it went to before the topic was resharded. Without a basis, every slot.

        A slot that messages are moved out of comes before the one that they are moved into: a
        search in this order finds a message also if it is moved meanwhile.
        """
        counts = (self.declaration.slots, *self.declaration.draining_counts)
        numbers: Sequence[int] = range(self.slot_span)
        if basis is not None:
            numbers = sorted({slot_of(basis, count) for count in counts})
        first = [n for n in numbers if n >= self.declaration.slots]
        return [self.slot(n) for n in (*first, *numbers[: len(numbers) - len(first)])]

    def places_of(
        self, ids: Sequence[str], basis: str | None = None
    ) -> list[tuple[Slot, Sequence[str]]]:
        """Where messages of these ids, and copies that share them, may be: each slot with the
        ids to look for in it, in the order of :meth:`slots_for`.

        basis: slot basis, if the sender gave one
        """
        if basis is not None or self.declaration.bases is not False:
            return [(slot, ids) for slot in self.slots_for(basis)]
        # A producer that has not read the new declaration yet puts by a previous count.
        known = self.declaration
        counts = {known.slots, *known.draining_counts, *known.previous_counts}
        by_slot: dict[int, list[str]] = defaultdict(list)
        for id in ids:
            # A copy is in the slot of the message whose id it shares.
            stems = {id, base_of(id)}
            for number in {slot_of(stem, count) for stem in stems for count in counts}:
                by_slot[number].append(id)
        return [
            (slot, by_slot[slot.number]) for slot in self.slots_for(None) if slot.number in by_slot
        ]

    def all_slots(self) -> list[Slot]:
        """Every slot that may hold messages."""
        return [self.slot(number) for number in range(self.slot_span)]

    def other_steps(self) -> list[int]:
        """Steps that the topic's consumers do not read, and that may hold messages all the same."""
        return [step for step in PRIORITIES if step not in self.steps]

    @property
    def open_steps(self) -> tuple[int, ...]:
        """The steps under which messages are put; consumers read all of `steps`."""
        closed = self.declaration.closed_steps
        return tuple(step for step in self.steps if step not in closed) if closed else self.steps

    def step_index(self, priority: int) -> int:
        """Index of the highest step that does not exceed `priority` and is not closed."""
        index, closed = 0, self.declaration.closed_steps
        for number, step in enumerate(self.steps):
            if step <= priority and step not in closed:
                index = number
        return index


@lru_cache(maxsize=4096)
def _slot(prefix: str, topic: str, number: int, steps: tuple[int, ...]) -> Slot:
    return Slot(prefix, topic, number, steps)
