"""The limits of a topic: one row each, with its type, unit, bounds and error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from ..errors import ConfigurationError, SlotCountError
from .library import MODES, THROUGH
from .scores import TRIED

# -- what a limit on starts, on keys or on puts may be

#: The units of a rate, in seconds.
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

#: Starts a second, at most; and the longest time between two of them, in seconds.
MAX_RATE = 1_000_000
MAX_INTERVAL = 366 * 86400

#: Keys of a queue that may have a weight: each pop reads them.
MAX_WEIGHTS = 100

_RATE = re.compile(r"\s*(\d{1,9}(?:\.\d{1,6})?)\s*(?:/\s*([smhd]))?\s*", re.ASCII)
_HEADER = re.compile(r"[\x21-\x7e]{1,100}")

#: What readers of URLs take for different things is in none of them.
_URL = re.compile(r"[!$-;=?-\[\]_a-z~]{1,2000}")


def interval_us(rate: str) -> float:
    """Microseconds between two starts at a rate that was checked."""
    count, unit = rate.split("/")
    return UNITS[unit] * 1e6 / float(count)


def count_of(rate: str) -> int:
    """The number in a rate: 100 of ``100/s``; at least 1."""
    return max(1, int(float(rate.split("/")[0])))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of limit: its bounds and its error.

    called: the name for it in an error about a topic, if not its own
    error: what is raised for any other value
    """

    called: str = ""
    error: type[ConfigurationError] = ConfigurationError

    @property
    def must(self) -> str:
        """The allowed values, for an error."""
        raise NotImplementedError

    def kept(self, value: Any) -> Any:
        """A value as it is kept. Raises TypeError, ValueError, OverflowError or KeyError for any
        other."""
        raise NotImplementedError

    def told(self, value: object) -> str:
        """What an error says of a value."""
        return f", not {value!r}"

    def check(self, what: str, value: object) -> Any:
        """Check a value from a program; return it as it is kept. Raises `error`, naming `what`."""
        try:
            return self.kept(value)
        except (TypeError, ValueError, OverflowError, KeyError):
            raise self.error(f"{what} must be {self.must}{self.told(value)}") from None

    def read(self, what: str, value: object) -> Any:
        """Check an option, whose value may be text. Raises as :meth:`check`."""
        return self.check(what, value)


@dataclass(frozen=True)
class Rate(Kind):
    """So many in a second, a minute, an hour or a day. It is kept as text, such as ``100/s``."""

    must = (
        "a rate such as 100/s, 10/m, 5000/h or 20/d (a plain number: so many a second), from one "
        "in 366 days to 1000000/s"
    )

    def kept(self, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise TypeError(value)
        found = _RATE.fullmatch(f"{value:.6f}" if isinstance(value, float) else str(value))
        count, unit = (float(found[1]), found[2] or "s") if found else (0.0, "s")
        if not UNITS[unit] / MAX_INTERVAL <= count <= MAX_RATE * UNITS[unit]:
            raise ValueError(value)
        return f"{f'{count:.6f}'.rstrip('0').rstrip('.')}/{unit}"


@dataclass(frozen=True)
class Choice(Kind):
    """One of some words."""

    words: tuple[str, ...]

    @property
    def must(self) -> str:
        """The allowed values, for an error."""
        return " or ".join(map(repr, self.words))

    def kept(self, value: Any) -> Any:
        return self.words[self.words.index(value)]


@dataclass(frozen=True)
class Weights(Kind):
    """Keys and how much more often than others they have their turn: a mapping, or as text
    ``gold=3,silver=2`` or JSON."""

    must = (
        f"a mapping of at most {MAX_WEIGHTS} keys to numbers from 0.01 to 1000, such as "
        "{'gold': 3}, or text such as gold=3,silver=2"
    )

    def kept(self, value: Any) -> Any:
        weights = {str(key): float(weight) for key, weight in _pairs(value).items()}
        if not 0 < len(weights) <= MAX_WEIGHTS or not all(
            key.encode() and 0.01 <= weight <= 1000 for key, weight in weights.items()
        ):
            raise ValueError(value)
        return tuple(sorted(weights.items()))


@dataclass(frozen=True)
class Header(Kind):
    """The name of a header of messages."""

    must = "the name of a header: 1 to 100 ASCII characters without blanks"

    def kept(self, value: Any) -> Any:
        if not _HEADER.fullmatch(value):
            raise ValueError(value)
        return value


@dataclass(frozen=True)
class Url(Kind):
    """An address that messages are sent to by HTTP."""

    must = (
        "a URL such as https://shop.example.com/hook: https or http, at most 2000 ASCII "
        "characters, without user, password and fragment"
    )

    def kept(self, value: Any) -> Any:
        found = urlsplit(value if _URL.fullmatch(value) else "")
        is_web = found.scheme in ("https", "http") and found.hostname and found.port != 0
        if not is_web or "@" in found.netloc:
            raise ValueError(value)
        return value

    def told(self, value: object) -> str:
        """A password that the URL has is not told."""
        return "" if "@" in str(value) else f", not {value!r:.100}"


def _pairs(value: Any) -> dict[Any, Any]:
    if isinstance(value, str):
        if value.lstrip().startswith("{"):
            value = json.loads(value)
        else:
            parts = [part.rpartition("=") for part in value.split(",")]
            return {key.strip(): weight for key, _, weight in parts}
    if not isinstance(value, (Mapping, tuple, list)):
        raise TypeError(value)
    return dict(value)


# -- the limits of a topic
#
# URLs, transport options, arguments of queues and declarations are all checked by these rows.

#: Slots of a topic that is declared without a number: on one server, where each costs something
#: and gains nothing, and on a Cluster.
DEFAULT_SLOTS, CLUSTER_SLOTS = 1, 8

#: More slots than this cost every idle consumer time and gain nothing.
MAX_SLOTS = 512

#: Seconds for which a DeadQueue keeps a message, and how many it keeps, without a limit of its own.
DEAD_AGE = 7 * 86400.0
DEAD_LIMIT = 100_000

#: Priority steps, as in Kombu's Redis transport: 0 goes first.
PRIORITY_STEPS = (0, 3, 6, 9)

#: The priorities that a message may have, as in Kombu.
PRIORITIES = range(10)

#: An upper bound that only keeps numbers within what Redis computes exactly.
HUGE = 10**9


@dataclass(frozen=True)
class Number(Kind):
    """A number within bounds.

    kind: int or float
    least, most: the bounds, inclusive
    unit: its unit, if it has one
    power_of_two: whether it has to be a power of two as well
    whole_floats: whether a whole number may be a float, such as 1e5
    zero: what 0 stands for, if it may be 0 although that is below the bounds
    """

    kind: type[int] | type[float]
    least: float
    most: float = HUGE
    unit: str = ""
    power_of_two: bool = False
    whole_floats: bool = False
    zero: str = ""

    @property
    def must(self) -> str:
        """The allowed values, for an error."""
        what = "a whole number" if self.kind is int else "a number"
        if self.power_of_two:
            what = "a power of two"
        unit = f" of {self.unit}" if self.unit else ""
        bounds = f"{self.least} up" if self.most >= HUGE else f"{self.least} to {self.most}"
        return f"{what}{unit} from {bounds}{f', or 0 for {self.zero}' if self.zero else ''}"

    def kept(self, value: Any) -> Any:
        """A whole number has to be an int; seconds may also be text."""
        if self.whole_floats and isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or (self.kind is int and not isinstance(value, int)):
            raise TypeError(value)
        number = value if self.kind is int else float(value)
        if self.zero and number == 0:
            return number
        if not self.least <= number <= self.most:  # also if it is not a number
            raise ValueError(value)
        if self.power_of_two and int(number) & int(number) - 1:
            raise ValueError(value)
        return number

    def read(self, what: str, value: object) -> Any:
        """Check an option, whose value may be text."""
        with suppress(TypeError, ValueError, OverflowError):  # check() raises
            value = self.kind(cast(Any, value))
        return self.check(what, value)


@dataclass(frozen=True)
class Flag(Kind):
    """A value that is true or false; as text also, such as in the arguments of a queue."""

    must = "true or false"

    def kept(self, value: Any) -> Any:
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        return known[str(value).lower()]


#: Limits of starts, of keys and of puts: without one there is none.
TERMS: dict[str, Kind] = {
    "rate": Rate(),
    "rate_burst": Number(int, 1, 10**6),
    "concurrency": Number(int, 1, 10**6),
    "key_rate": Rate(),
    "key_burst": Number(int, 1, 10**6),
    "key_concurrency": Number(int, 1, 10**6),
    "key_order": Choice(("serial",)),
    "key_retry": Choice(("hold", "later")),
    "key_fair": Flag(),
    "key_weights": Weights(),
    "put_rate": Rate(),
    "key_put_rate": Rate(),
    "key_header": Header(),
}

#: What the task library does for a topic: without one, what it does for all.
LIBRARY_TERMS: dict[str, Kind] = {
    "library": Choice(MODES),
    "guard": Flag(),
    "horizon": Number(float, 60, unit="seconds"),
}

#: What the notifier does for a topic: without one, nothing.
NOTIFIER_TERMS: dict[str, Kind] = {"target": Url()}

#: The limits that a topic may be declared with, except its priority steps.
LIMITS: dict[str, Kind] = {
    "slots": Number(
        int, 1, MAX_SLOTS, power_of_two=True, called="the slot count", error=SlotCountError
    ),
    "retries": Number(int, 0, TRIED),
    "visibility": Number(float, 1, unit="seconds", called="the visibility timeout"),
    "expires": Number(int, 1, 10**12, unit="milliseconds"),
    "retry_backoff": Number(float, 0, unit="seconds"),
    "retry_backoff_max": Number(float, 0, unit="seconds"),
    "dead_age": Number(float, 1, unit="seconds"),
    "dead_limit": Number(int, 1, whole_floats=True),
    "max_lease": Number(float, 1, unit="seconds", zero="none"),
    "message_ttl": Number(int, 0, 10**12, unit="milliseconds", whole_floats=True),
    "dead_expired": Flag(),
    "requeue_limit": Number(int, 0),
    **TERMS,
    **LIBRARY_TERMS,
    **NOTIFIER_TERMS,
}


def check_limits(
    what: str, limits: Iterable[tuple[str, object]], *, optional: bool = True
) -> dict[str, Any]:
    """Check limits; return them as they are stored.

    what: whose they are, for an error
    optional: whether one may be None, and then stays None

    Raises ConfigurationError, or SlotCountError, naming `what` and the limit.
    """
    return {
        name: None
        if value is None and optional
        else LIMITS[name].check(f"{what}: {LIMITS[name].called or name}", value)
        for name, value in limits
    }


#: What holds where a topic is declared without, of limits that go with another.
_OTHERWISE: dict[str, Any] = {
    "rate_burst": 1,
    "key_burst": 1,
    "key_retry": "hold",
    "key_fair": False,
    "guard": False,
    "library": THROUGH,
}


def same(limit: str, one: Any, other: Any) -> bool:
    """Whether two values of a limit, as they are stored, mean the same: 60/m is 1/s."""
    if one is None or other is None:
        otherwise = _OTHERWISE.get(limit)
        one, other = (otherwise if value is None else value for value in (one, other))
    elif isinstance(LIMITS.get(limit), Rate):
        return interval_us(one) == interval_us(other)
    return bool(one == other)


def check_steps(steps: object) -> tuple[int, ...]:
    """Priority steps as a tuple: increasing integers that begin with 0, at most ten."""
    try:
        made = tuple(int(step) for step in steps)  # type: ignore[attr-defined]
    except (TypeError, ValueError, OverflowError):
        made = ()
    if not made or made[0] != 0 or list(made) != sorted(set(made)) or len(made) > 10:
        raise ConfigurationError(
            f"priority_steps must be increasing integers that begin with 0, at most ten, "
            f"not {steps!r}"
        )
    return made


class Limits(NamedTuple):
    """Limits of topics that are declared without them. Times are in seconds.

    visibility: how long a delivered message may stay unacknowledged without a renewal
    retry_backoff: how long a message waits after its first failed delivery; twice as long after
        the second, and so on; 0 for not at all
    retry_backoff_max: the longest of these waits
    dead_age: how long DeadQueue keeps a message
    dead_limit: how many messages the topic's DeadQueue keeps, the latest ones; a few more, because
        each slot keeps its share
    max_lease: for how long one delivery may be renewed in all; 0: for ever
    message_ttl: milliseconds after its due time when a message expires; None: never
    dead_expired: whether a message that has expired goes to DeadQueue; if not, it is deleted
    requeue_limit: how often a message may be requeued on purpose before it goes to DeadQueue;
        None: for ever
    """

    visibility: float = 60.0
    retry_backoff: float = 0.0
    retry_backoff_max: float = 600.0
    dead_age: float = DEAD_AGE
    dead_limit: int = DEAD_LIMIT
    max_lease: float = 0.0
    message_ttl: int | None = None
    dead_expired: bool = True
    requeue_limit: int | None = None

    def checked(self, what: str) -> Limits:
        """These limits with their times as floats.

        Raises ConfigurationError, naming `what`, if a limit makes no sense.
        """
        given = {
            name: value
            for name, value in self._asdict().items()
            if value is not None or self._field_defaults[name] is not None
        }
        return Limits(**check_limits(what, given.items(), optional=False))


# -- what limits the starts and the puts of a topic, as text for scripts
#
# A comma is behind each. Of starts:
#
# ==============  =================================================================================
# ``r<us>:<n>,``  the whole queue: microseconds between starts, and how many may come at once
# ``c<n>,``       the whole queue: how many run at once
# ``R<us>:<n>,``  each key: microseconds between starts, and how many may come at once
# ``C<n>,``       each key: how many run at once
# ``S,``          each key: one at a time, strictly in order
# ``L,``          with ``S``: a message that waits for its retry lets the others pass
# ``F,``          keys take turns
# ``w<k>=<x>,``   with ``F``: the weight of a key, encoded
# ==============  =================================================================================
#
# Of puts: ``p<us>:<n>,`` for the whole queue, ``P<us>:<n>,`` for each key.

#: How much longer than a rate says two starts are apart. A task starts some milliseconds after it
#: may, now more and now less; so that no stretch of time has more starts than the rate says, there
#: are half a percent fewer.
SLOWER = 1.005

#: Limits that say nothing without another, and which.
NEEDS = {
    "rate_burst": "rate",
    "key_burst": "key_rate",
    "key_retry": "key_order",
    "key_weights": "key_fair",
}

#: Limits that count the whole queue: on a Cluster such a queue has one slot.
WHOLE_QUEUE = ("rate", "concurrency", "put_rate")


def spacing_us(rate: str) -> float:
    """Microseconds between two starts of a queue or key with this rate."""
    return interval_us(rate) * SLOWER
