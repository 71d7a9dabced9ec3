"""Topics, slots, and the name of every Redis key. Nothing else builds a key."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache

import crcmod.predefined

from .errors import ConfigurationError, SlotCountError
from .scores import MAX_RETRIES, TRIED

#: Slots of a topic that nobody has declared otherwise.
DEFAULT_SLOTS = 8

#: More slots than this cost every idle consumer time and gain nothing.
MAX_SLOTS = 512

#: Priority steps, as in Kombu's Redis transport: 0 goes first.
PRIORITY_STEPS = (0, 3, 6, 9)

_crc32 = crcmod.predefined.mkPredefinedCrcFun("crc-32")


def slot_of(basis: str, slots: int) -> int:
    """The slot that CRC-32 of the slot basis picks."""
    return _crc32(basis.encode("utf-8", "surrogatepass")) % slots


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
            f"topic {topic!r}: a slot count must be a power of two from 1 to {MAX_SLOTS}, "
            f"not {slots!r}; the default is {DEFAULT_SLOTS}"
        )
    return slots


def encode_name(name: str) -> str:
    """Percent-encode what would cut a hash tag short or leave it empty."""
    return name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")


@dataclass(frozen=True)
class Declaration:
    """What a topic was declared with; kept once per topic, in Redis.

    slots: how many shards it has, a power of two
    retries: redeliveries a message may have
    visibility: seconds a delivered message may stay unacknowledged and unrenewed,
        or None for what the consumer's connection says
    expires: milliseconds after which the topic goes away if nobody uses it, or None
    """

    slots: int = DEFAULT_SLOTS
    retries: int = MAX_RETRIES
    visibility: float | None = None
    expires: int | None = None

    @classmethod
    def of(cls, topic: str, **limits: object) -> Declaration:
        """A checked declaration; what is None in `limits` takes the default.

        Raises SlotCountError or ConfigurationError, naming the topic.
        """
        given = {key: value for key, value in limits.items() if value is not None}
        unknown = set(given) - set(cls.__dataclass_fields__)
        if unknown:
            raise ConfigurationError(
                f"topic {topic!r}: unknown limit {min(unknown)!r}; "
                f"there are {', '.join(cls.__dataclass_fields__)}"
            )
        made = cls(**given)
        check_slots(topic, made.slots)
        if not _whole(made.retries) or not 0 <= made.retries <= TRIED:
            raise ConfigurationError(
                f"topic {topic!r}: retries must be within 0..{TRIED}, not {made.retries!r}"
            )
        if made.visibility is not None:
            seconds = check_visibility(f"topic {topic!r}", made.visibility)
            made = replace(made, visibility=seconds)
        if made.expires is not None and not (_whole(made.expires) and 1 <= made.expires <= 10**12):
            raise ConfigurationError(
                f"topic {topic!r}: expires must be a whole number of milliseconds from 1 up, "
                f"not {made.expires!r}"
            )
        return made

    def to_json(self) -> str:
        return json.dumps(
            {k: v for k, v in self.__dict__.items() if v is not None}, separators=(",", ":")
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Declaration:
        known = cls.__dataclass_fields__
        return cls(**{k: v for k, v in json.loads(text).items() if k in known})


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

    __slots__ = ("bindings_", "expiring", "fanout_", "prefix", "topics", "wake_")

    def __init__(self, prefix: str) -> None:
        if "{" in prefix or "}" in prefix:
            raise ConfigurationError(f"key prefix {prefix!r} may not contain braces")
        self.prefix = prefix
        #: hash: topic -> its declaration
        self.topics = f"{prefix}{{toc}}:topics"
        #: sorted set: what goes stale unless somebody refreshes it -> when, in ms
        self.expiring = f"{prefix}{{toc}}:expiring"
        self.wake_ = f"{prefix}{{toc}}:wake:"
        self.bindings_ = f"{prefix}{{toc}}:bindings:"
        self.fanout_ = f"{prefix}{{toc}}:fanout:"

    def wake(self, topic: str) -> str:
        """Sorted set: the topic's announcements that nobody has claimed."""
        return self.wake_ + topic

    def bindings(self, exchange: str) -> str:
        """Sorted set: binding -> when it goes stale, in ms."""
        return self.bindings_ + exchange

    def fanout(self, exchange: str) -> str:
        """Stream: the exchange's broadcast messages."""
        return self.fanout_ + exchange


class Slot:
    """The keys of one slot; all share one hash tag, so they live on one node."""

    __slots__ = ("armed", "body", "dead", "number", "prepare", "reasons", "stem", "stores")

    def __init__(self, prefix: str, topic: str, number: int, steps: tuple[int, ...]) -> None:
        self.number = number
        self.stem = stem = f"{prefix}{{{encode_name(topic)}:{number}}}:"
        #: sorted sets, one per priority step: id -> score
        self.stores = tuple(stem + ("store" if not step else f"store:{step}") for step in steps)
        #: sorted set: id -> when its lease ends
        self.prepare = stem + "prepare"
        #: sorted set: id -> when it died
        self.dead = stem + "dead"
        #: hash: id -> why it died
        self.reasons = stem + "reasons"
        #: hash: id -> envelope
        self.body = stem + "body"
        #: sorted set: times announced in the wake index and not yet passed
        self.armed = stem + "armed"

    def copies(self, id: str) -> str:
        """Set: the other live messages that share this id."""
        return f"{self.stem}copies:{id}"

    def all(self) -> list[str]:
        """Every key of the slot but the `copies`."""
        return [*self.stores, self.prepare, self.dead, self.reasons, self.body, self.armed]


@dataclass(frozen=True)
class Topic:
    """A declared topic, and its keys."""

    name: str
    declaration: Declaration
    prefix: str
    steps: tuple[int, ...] = PRIORITY_STEPS

    @property
    def slots(self) -> int:
        return self.declaration.slots

    def slot(self, number: int) -> Slot:
        return _slot(self.prefix, self.name, number, self.steps)

    def slot_for(self, basis: str) -> Slot:
        """The slot that a message with this slot basis goes to."""
        return self.slot(slot_of(basis, self.declaration.slots))

    def all_slots(self) -> list[Slot]:
        return [self.slot(number) for number in range(self.declaration.slots)]

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
