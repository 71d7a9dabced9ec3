"""Topics, slots, and the name of every Redis key. Nothing else builds a key."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import crcmod.predefined

from ..errors import ConfigurationError, SlotCountError
from .scores import MAX_RETRIES, TRIED

#: Slots of a topic that nobody has declared otherwise.
DEFAULT_SLOTS = 8

#: More slots than this cost every idle consumer time and gain nothing.
MAX_SLOTS = 512

#: Seconds and messages for which a topic's DeadQueue is kept, unless somebody says otherwise.
DEAD_AGE = 7 * 86400.0
DEAD_LIMIT = 100_000

#: Minutes for which counters are kept one by one.
MINUTES = 16

#: Priority steps, as in Kombu's Redis transport: 0 goes first.
PRIORITY_STEPS = (0, 3, 6, 9)

#: What a message's priority may be, as Kombu has it.
PRIORITIES = range(10)

_crc32 = crcmod.predefined.mkPredefinedCrcFun("crc-32")


def slot_of(basis: str, slots: int) -> int:
    """The slot that CRC-32 of the slot basis picks."""
    return _crc32(basis.encode("utf-8", "surrogatepass")) % slots


def base_of(id: str) -> str:
    """The id that is shared, of a copy; of what is none, the id itself."""
    return id.rpartition("#")[0] if "#" in id else id


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_slots(topic: str, slots: object) -> int:
    """Return `slots`, or raise SlotCountError if it is not a power of two within bounds."""
    if (
        isinstance(slots, bool)
        or not isinstance(slots, int)
        or not 1 <= slots <= MAX_SLOTS
        or slots & (slots - 1)
    ):
        raise SlotCountError(
            f"queue {topic!r}: a slot count must be a power of two from 1 to {MAX_SLOTS}, "
            f"not {slots!r}; the default is {DEFAULT_SLOTS}"
        )
    return slots


def check_name(name: str) -> None:
    """Raise ConfigurationError for a name that no key can have."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"{name!r} cannot name a queue: it has half of a surrogate pair, which no UTF-8 can "
            "hold; a name that was read from bytes has to be decoded as what it is"
        ) from None


def encode_name(name: str) -> str:
    """Percent-encode what would cut a hash tag short or leave it empty."""
    return name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")


class Limits(NamedTuple):
    """What holds for a topic whose declaration does not say. Times are in seconds.

    visibility: how long a delivered message may stay unacknowledged and unrenewed
    retry_backoff: how long a message waits after its first failed delivery; twice as long after
        the second, and so on; 0 for not at all
    retry_backoff_max: the longest of these waits
    dead_age: how long DeadQueue keeps a message
    dead_limit: how many messages the topic's DeadQueue keeps, the latest; a little more, for
        every slot keeps its share
    """

    visibility: float = 60.0
    retry_backoff: float = 0.0
    retry_backoff_max: float = 600.0
    dead_age: float = DEAD_AGE
    dead_limit: int = DEAD_LIMIT

    def checked(self, what: str) -> Limits:
        """The same with its times as floats.

        Raises ConfigurationError, naming `what`, if a limit makes no sense.
        """
        seconds = {}
        for name, least in (("retry_backoff", 0), ("retry_backoff_max", 0), ("dead_age", 1)):
            value = getattr(self, name)
            try:
                seconds[name] = float(value)
            except (TypeError, ValueError):
                seconds[name] = -1.0
            if not least <= seconds[name] <= 10**9:
                raise ConfigurationError(
                    f"{what}: {name} must be a number of seconds from {least} up, not {value!r}"
                )
        if not _whole(self.dead_limit) or not 1 <= self.dead_limit <= 10**9:
            raise ConfigurationError(
                f"{what}: dead_limit must be a whole number from 1 up, not {self.dead_limit!r}"
            )
        return self._replace(visibility=check_visibility(what, self.visibility), **seconds)


#: Fields of a declaration that nobody declares: they tell what has become of the topic.
_NOT_SAID = ("draining_counts", "previous_counts", "bases", "named")

#: Fields whose names in Redis are older than those here.
_IN_REDIS = {"draining_counts": "was", "previous_counts": "formerly"}
_FROM_REDIS = {old: new for new, old in _IN_REDIS.items()}


@dataclass(frozen=True)
class Declaration:
    """What a topic was declared with; kept once per topic, in Redis.

    slots: how many shards it has, a power of two
    retries: redeliveries a message may have
    expires: milliseconds after which the topic goes away if nobody uses it, or None
    steps: the priorities that are told apart; None in declarations of older releases, whose
        messages lie under the steps that the connections of their senders had
    draining_counts: other slot counts by which messages may still lie in it, for it was resharded
    previous_counts: slot counts that it had; who still declares the topic with one is not refused
    bases: whether it has been given a message whose slot may be another than its id picks
    named: of a topic that expires, whether it has been given a message under an id that somebody
        may look for; a reply has none. Both are None if a release that did not tell declared it.

    The others are those of :class:`Limits`, or None for what the consumer's connection says.
    """

    slots: int = DEFAULT_SLOTS
    retries: int = MAX_RETRIES
    visibility: float | None = None
    expires: int | None = None
    retry_backoff: float | None = None
    retry_backoff_max: float | None = None
    dead_age: float | None = None
    dead_limit: int | None = None
    steps: tuple[int, ...] | None = None
    draining_counts: tuple[int, ...] = ()
    previous_counts: tuple[int, ...] = ()
    bases: bool | None = None
    named: bool | None = None

    @classmethod
    def of(cls, topic: str, **limits: object) -> Declaration:
        """A checked declaration; what is None in `limits` takes the default.

        Raises SlotCountError or ConfigurationError, naming the topic.
        """
        given = {key: value for key, value in limits.items() if value is not None}
        known = [name for name in cls.__dataclass_fields__ if name not in _NOT_SAID]
        unknown = set(given) - set(known)
        if unknown:
            raise ConfigurationError(
                f"queue {topic!r}: unknown limit {min(unknown)!r}; there are {', '.join(known)}"
            )
        if "steps" in given:
            given["steps"] = check_steps(given["steps"])
        made = cls(**given)
        check_slots(topic, made.slots)
        if not _whole(made.retries) or not 0 <= made.retries <= TRIED:
            raise ConfigurationError(
                f"queue {topic!r}: retries must be within 0..{TRIED}, not {made.retries!r}"
            )
        checked = made.limits(Limits()).checked(f"queue {topic!r}")
        made = replace(made, **{k: v for k, v in checked._asdict().items() if k in given})
        if made.expires is not None and not (_whole(made.expires) and 1 <= made.expires <= 10**12):
            raise ConfigurationError(
                f"queue {topic!r}: expires must be a whole number of milliseconds from 1 up, "
                f"not {made.expires!r}"
            )
        return made

    @lru_cache(maxsize=1024)  # noqa: B019 - declarations are few, and small
    def limits(self, otherwise: Limits) -> Limits:
        """What holds for the topic; `otherwise` where the declaration does not say."""
        said = {name: getattr(self, name) for name in Limits._fields}
        return otherwise._replace(**{k: v for k, v in said.items() if v is not None})

    def to_json(self) -> str:
        return json.dumps(
            {_IN_REDIS.get(k, k): v for k, v in self.__dict__.items() if v not in (None, ())},
            separators=(",", ":"),
        )

    def over(self, text: str | bytes) -> str:
        """As :meth:`to_json`, with what only a newer release knows of from another declaration."""
        known = self.__dataclass_fields__
        newer = {k: v for k, v in json.loads(text).items() if _FROM_REDIS.get(k, k) not in known}
        return json.dumps({**newer, **json.loads(self.to_json())}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Declaration:
        known = cls.__dataclass_fields__
        said = {_FROM_REDIS.get(k, k): v for k, v in json.loads(text).items()}
        return cls(
            **{k: tuple(v) if isinstance(v, list) else v for k, v in said.items() if k in known}
        )


def check_visibility(what: str, seconds: object) -> float:
    """Return a visibility timeout in seconds, or raise ConfigurationError naming `what`."""
    try:
        value = float(seconds)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = 0.0
    if not 1 <= value <= 10**9:
        raise ConfigurationError(
            f"{what}: the visibility timeout must be a number of seconds from 1 up, not {seconds!r}"
        )
    return value


class Keys:
    """The keys that belong to no single slot; all share the tag ``{toc}``."""

    __slots__ = (
        "bindings_",
        "bound_",
        "cancelled",
        "consumers",
        "counted_",
        "expiring",
        "fanout_",
        "minute_",
        "part_",
        "parts_",
        "paused",
        "prefix",
        "readers_",
        "scripts",
        "sent_",
        "speaker_",
        "topics",
        "upkeep",
        "wake_",
        "write_probe",
    )

    def __init__(self, prefix: str) -> None:
        if "{" in prefix or "}" in prefix:
            raise ConfigurationError(f"key prefix {prefix!r} may not contain braces")
        self.prefix = prefix
        #: hash: topic -> its declaration
        self.topics = f"{prefix}{{toc}}:topics"
        #: sorted set: what goes stale unless somebody refreshes it -> when, in ms
        self.expiring = f"{prefix}{{toc}}:expiring"
        #: sorted set: who consumes which topics -> when that goes stale, in ms
        self.consumers = f"{prefix}{{toc}}:consumers"
        #: set: topics from which consumers take nothing for now
        self.paused = f"{prefix}{{toc}}:paused"
        #: never set: to delete it shows whether the server writes
        self.write_probe = f"{prefix}{{toc}}:nothing"
        #: hash: script:calls, script:timed, script:us -> how many, of all topics
        self.scripts = f"{prefix}{{toc}}:scripts"
        #: sorted set: id of what was cancelled, if somebody is to see it -> when, in ms
        self.cancelled = f"{prefix}{{toc}}:cancelled"
        #: string: the process that keeps all topics up; goes away unless that renews it
        self.upkeep = f"{prefix}{{toc}}:upkeep"
        self.wake_ = f"{prefix}{{toc}}:wake:"
        self.bindings_ = f"{prefix}{{toc}}:bindings:"
        self.bound_ = f"{prefix}{{toc}}:bound:"
        self.fanout_ = f"{prefix}{{toc}}:fanout:"
        self.part_ = f"{prefix}{{toc}}:part:"
        self.parts_ = f"{prefix}{{toc}}:parts:"
        self.readers_ = f"{prefix}{{toc}}:readers:"
        self.sent_ = f"{prefix}{{toc}}:sent:"
        self.counted_ = f"{prefix}{{toc}}:counted:"
        self.minute_ = f"{prefix}{{toc}}:minute:"
        self.speaker_ = f"{prefix}{{toc}}:speaker:"

    def wake(self, topic: str) -> str:
        """Sorted set: the topic's announcements that nobody has claimed."""
        return self.wake_ + topic

    def bindings(self, exchange: str) -> str:
        """Sorted set: binding -> when it goes stale, in ms."""
        return self.bindings_ + exchange

    def bound(self, exchange: str) -> str:
        """String: the version of the bindings."""
        return self.bound_ + exchange

    def fanout(self, exchange: str) -> str:
        """Stream: the exchange's broadcast messages; of those that go by parts, none."""
        return self.fanout_ + exchange

    def part(self, exchange: str, part: str) -> str:
        """Stream: the broadcast messages of a part, which is a number or ``*``."""
        return f"{self.part_}{part}:{exchange}"

    def parts(self, exchange: str) -> str:
        """Hash: part -> until when somebody reads it, in ms."""
        return self.parts_ + exchange

    def readers(self, exchange: str) -> str:
        """Sorted set: the bindings of who reads a part, as they are in the bindings."""
        return self.readers_ + exchange

    def sent(self, producer: str) -> str:
        """String: the producer's latest broadcast, for as long as it may be repeated."""
        return self.sent_ + producer

    def speaker(self, topic: str) -> str:
        """String: the process that tells what is in the topic, where one is to do so."""
        return self.speaker_ + topic

    def counted(self, topic: str) -> str:
        """Hash: counter -> how many since the topic was declared."""
        return self.counted_ + topic

    def minutes(self, topic: str) -> list[str]:
        """Hashes: the same of one minute each, and its number since the epoch; a ring."""
        return [f"{self.minute_}{place}:{topic}" for place in range(MINUTES)]


class Slot:
    """The keys of one slot; all share one hash tag, so they live on one node."""

    __slots__ = (
        "announced_times",
        "body",
        "dead",
        "ended",
        "number",
        "prepare",
        "reasons",
        "stem",
        "stores",
        "tokens",
    )

    def __init__(self, prefix: str, topic: str, number: int, steps: tuple[int, ...]) -> None:
        self.number = number
        self.stem = stem = f"{prefix}{{{encode_name(topic)}:{number}}}:"
        #: sorted sets, one per priority step: id -> score
        self.stores = tuple(map(self.store, steps))
        #: sorted set: id -> when its lease ends
        self.prepare = stem + "prepare"
        #: sorted set: id -> when it died
        self.dead = stem + "dead"
        #: hash: id -> why it died and the last error, a line each; the first is empty until then
        self.reasons = stem + "reasons"
        #: hash: id -> envelope
        self.body = stem + "body"
        #: hash: id -> what names its deliveries; of messages that have been delivered
        self.tokens = stem + "tokens"
        #: sorted set: the time announced in the wake index and not yet passed
        self.announced_times = stem + "armed"
        #: string: when somebody who had not watched the server saw that leases had ended
        self.ended = stem + "ended"

    def store(self, step: int) -> str:
        """Sorted set: the messages of a priority step, of the topic's or another."""
        return self.stem + ("store" if not step else f"store:{step}")

    def copies(self, id: str) -> str:
        """Set: the other live messages that share this id."""
        return f"{self.stem}copies:{id}"

    def sent(self, producer: str) -> str:
        """String: the producer's latest publish to this slot, for as long as it may be
        repeated."""
        return f"{self.stem}sent:{producer}"

    def given(self, consumer: str) -> str:
        """String: what a consumer was given last of this slot and others, for as long as it may
        ask for it again."""
        return f"{self.stem}sent:to:{consumer}"

    def all(self) -> list[str]:
        """Every key of the slot but `copies`, `sent` and `given`."""
        return [
            *self.stores,
            self.prepare,
            self.dead,
            self.reasons,
            self.body,
            self.tokens,
            self.announced_times,
            self.ended,
        ]


@dataclass(frozen=True)
class Topic:
    """A declared topic, and its keys."""

    name: str
    declaration: Declaration
    prefix: str
    steps: tuple[int, ...] = PRIORITY_STEPS

    @property
    def slots(self) -> int:
        """The slots that messages are put into."""
        return self.declaration.slots

    @property
    def slot_span(self) -> int:
        """The slots that may hold something: more than `slots` after it was resharded to fewer."""
        return max(self.declaration.slots, *self.declaration.draining_counts, 1)

    #: the name that releases before this one had for it
    span = slot_span

    def slot(self, number: int) -> Slot:
        return _slot(self.prefix, self.name, number, self.steps)

    def slot_for(self, basis: str) -> Slot:
        """The slot that a message with this slot basis goes to."""
        return self.slot(slot_of(basis, self.declaration.slots))

    def slots_for(self, basis: str | None) -> list[Slot]:
        """Where a message with this slot basis may be: the slot it goes to, and those that it
        went to before the topic was resharded. Without a basis, every slot.

        In the order in which one who looks for it finds it, although it may be moved meanwhile:
        a slot from which it may be moved comes before the one it is moved to.
        """
        counts = (self.declaration.slots, *self.declaration.draining_counts)
        numbers = range(self.slot_span)
        if basis is not None:
            numbers = sorted({slot_of(basis, count) for count in counts})
        first = [n for n in numbers if n >= self.declaration.slots]
        return [self.slot(n) for n in (*first, *numbers[: len(numbers) - len(first)])]

    def places_of(
        self, ids: Sequence[str], basis: str | None = None
    ) -> list[tuple[Slot, Sequence[str]]]:
        """Where messages of these ids may be, and copies that share them: each slot with the ids
        that it is to be asked for. In the order of :meth:`slots_for`.

        basis: slot basis, if the sender gave one
        """
        if basis is not None or self.declaration.bases is not False:
            return [(slot, ids) for slot in self.slots_for(basis)]
        # Who has not heard yet that the topic was resharded puts by a count that it had.
        known = self.declaration
        counts = {known.slots, *known.draining_counts, *known.previous_counts}
        by_slot: dict[int, list[str]] = defaultdict(list)
        for id in ids:
            # A copy lies where the message is whose id it shares.
            stems = {id, base_of(id)}
            for number in {slot_of(stem, count) for stem in stems for count in counts}:
                by_slot[number].append(id)
        return [
            (slot, by_slot[slot.number]) for slot in self.slots_for(None) if slot.number in by_slot
        ]

    def all_slots(self) -> list[Slot]:
        """Every slot that may hold something."""
        return [self.slot(number) for number in range(self.slot_span)]

    def other_steps(self) -> list[int]:
        """Steps under which nobody looks for its messages, and somebody may have put some."""
        return [step for step in PRIORITIES if step not in self.steps]

    def step_index(self, priority: int) -> int:
        """Index of the highest step that does not exceed `priority`."""
        index = 0
        for number, step in enumerate(self.steps):
            if step <= priority:
                index = number
        return index


@lru_cache(maxsize=4096)
def _slot(prefix: str, topic: str, number: int, steps: tuple[int, ...]) -> Slot:
    return Slot(prefix, topic, number, steps)


def check_steps(steps: object) -> tuple[int, ...]:
    """Priority steps as a tuple: increasing integers that begin with 0, at most ten."""
    try:
        made = tuple(int(step) for step in steps)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        made = ()
    if not made or made[0] != 0 or list(made) != sorted(set(made)) or len(made) > 10:
        raise ConfigurationError(
            f"priority_steps must be increasing integers that begin with 0, at most ten, "
            f"not {steps!r}"
        )
    return made
