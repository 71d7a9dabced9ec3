"""The limits of a topic: one row each, with its type, unit, bounds and error.

URLs, transport options, arguments of queues and declarations are all checked by these rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from ..errors import ConfigurationError, SlotCountError
from .library_log import MODES, THROUGH
from .scores import TRIED
from .terms import Choice, Header, Rate, Url, Weights, interval_us

#: Slots of a topic that is declared without a number.
DEFAULT_SLOTS = 8

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
class Number:
    """What a number has to be.

    kind: int or float
    least, most: the bounds, inclusive
    unit: its unit, if it has one
    power_of_two: whether it has to be a power of two as well
    whole_floats: whether a whole number may be a float, such as 1e5
    zero: what 0 stands for, if it may be 0 although that is below the bounds
    called: the name for it in an error about a topic, if not its own
    error: what is raised for any other value
    """

    kind: type[int] | type[float]
    least: float
    most: float = HUGE
    unit: str = ""
    power_of_two: bool = False
    whole_floats: bool = False
    zero: str = ""
    called: str = ""
    error: type[ConfigurationError] = ConfigurationError

    @property
    def must(self) -> str:
        """What it must be, for an error."""
        what = "a whole number" if self.kind is int else "a number"
        if self.power_of_two:
            what = "a power of two"
        unit = f" of {self.unit}" if self.unit else ""
        bounds = f"{self.least} up" if self.most >= HUGE else f"{self.least} to {self.most}"
        return f"{what}{unit} from {bounds}{f', or 0 for {self.zero}' if self.zero else ''}"

    def check(self, what: str, value: object) -> Any:
        """Check a value from a program: a whole number has to be an int; seconds may also be text.

        what: its name, for an error

        Raises `error`, naming `what`.
        """
        if self.whole_floats and isinstance(value, float) and value.is_integer():
            value = int(value)
        if self.kind is int:
            fits = isinstance(value, int) and not isinstance(value, bool) and self._fits(value)
            if fits:
                return value
        else:
            try:
                number = float(cast(Any, value))
            except (TypeError, ValueError, OverflowError):
                number = float("nan")
            if self._fits(number) and not isinstance(value, bool):
                return number
        raise self.error(f"{what} must be {self.must}, not {value!r}")

    def read(self, what: str, value: object) -> Any:
        """Check an option, whose value may be text."""
        try:
            value = self.kind(cast(Any, value))
        except (TypeError, ValueError, OverflowError):
            pass  # check() raises
        return self.check(what, value)

    def _fits(self, number: float) -> bool:
        if self.zero and number == 0:
            return True
        if not self.least <= number <= self.most:  # also if it is not a number
            return False
        return not self.power_of_two or int(number) & int(number) - 1 == 0


@dataclass(frozen=True)
class Flag:
    """What is true or false; as text also, such as in the arguments of a queue."""

    called: str = ""
    error: type[ConfigurationError] = ConfigurationError

    #: what it must be, for an error
    must = "true or false"

    def check(self, what: str, value: object) -> bool:
        """Check a value. Raises `error`, naming `what`."""
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        try:
            return known[str(value).lower()]
        except KeyError:
            raise self.error(f"{what} must be {self.must}, not {value!r}") from None

    read = check


#: What a limit may be.
Kind = Number | Flag | Rate | Choice | Weights | Header | Url

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
        else LIMITS[name].check(f"{what}: {_called(name)}", value)
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


def _called(limit: str) -> str:
    return LIMITS[limit].called or limit


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
        """The same with its times as floats.

        Raises ConfigurationError, naming `what`, if a limit makes no sense.
        """
        given = {
            name: value
            for name, value in self._asdict().items()
            if value is not None or self._field_defaults[name] is not None
        }
        return Limits(**check_limits(what, given.items(), optional=False))
