"""What a limit on starts, on keys or on puts may be: rates, choices, weights, names; and a target.

The kinds have what :class:`.limits.Number` has: ``check`` for a value from a program, ``read`` for
one that may be text, ``must`` and ``error`` for who gives another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigurationError

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


@dataclass(frozen=True)
class Rate:
    """So many in a second, a minute, an hour or a day. It is kept as text, such as ``100/s``."""

    called: str = ""
    error: type[ConfigurationError] = ConfigurationError

    #: what it must be, for an error
    must = (
        "a rate such as 100/s, 10/m, 5000/h or 20/d (a plain number: so many a second), from one "
        "in 366 days to 1000000/s"
    )

    def check(self, what: str, value: object) -> Any:
        """A rate as it is kept. Raises `error`, naming `what`."""
        found = None
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            found = _RATE.fullmatch(f"{value:.6f}" if isinstance(value, float) else str(value))
        if found is not None:
            count, unit = float(found[1]), found[2] or "s"
            if count and UNITS[unit] / MAX_INTERVAL <= count <= MAX_RATE * UNITS[unit]:
                return f"{f'{count:.6f}'.rstrip('0').rstrip('.')}/{unit}"
        raise self.error(f"{what} must be {self.must}, not {value!r}")

    read = check


@dataclass(frozen=True)
class Choice:
    """One of some words."""

    words: tuple[str, ...]
    called: str = ""
    error: type[ConfigurationError] = ConfigurationError

    @property
    def must(self) -> str:
        """What it must be, for an error."""
        return " or ".join(map(repr, self.words))

    def check(self, what: str, value: object) -> Any:
        """The word. Raises `error`, naming `what`."""
        for word in self.words:
            if value == word:
                return word
        raise self.error(f"{what} must be {self.must}, not {value!r}")

    read = check


@dataclass(frozen=True)
class Weights:
    """Keys and how much more often than others they have their turn: a mapping, or as text
    ``gold=3,silver=2`` or JSON."""

    called: str = ""
    error: type[ConfigurationError] = ConfigurationError

    #: what it must be, for an error
    must = (
        f"a mapping of at most {MAX_WEIGHTS} keys to numbers from 0.01 to 1000, such as "
        "{'gold': 3}, or text such as gold=3,silver=2"
    )

    def check(self, what: str, value: object) -> Any:
        """The weights by key. Raises `error`, naming `what`."""
        try:
            pairs = _pairs(value)
            weights = {str(key): float(weight) for key, weight in pairs.items()}
            for key in weights:
                key.encode()
        except (TypeError, ValueError, OverflowError):
            weights = {}
        if 0 < len(weights) <= MAX_WEIGHTS and all(
            key and 0.01 <= weight <= 1000 for key, weight in weights.items()
        ):
            return tuple(sorted(weights.items()))
        raise self.error(f"{what} must be {self.must}, not {value!r}")

    read = check


@dataclass(frozen=True)
class Header:
    """The name of a header of messages."""

    called: str = ""
    error: type[ConfigurationError] = ConfigurationError

    #: what it must be, for an error
    must = "the name of a header: 1 to 100 ASCII characters without blanks"

    def check(self, what: str, value: object) -> Any:
        """The name. Raises `error`, naming `what`."""
        if isinstance(value, str) and _HEADER.fullmatch(value):
            return value
        raise self.error(f"{what} must be {self.must}, not {value!r}")

    read = check


@dataclass(frozen=True)
class Url:
    """An address that messages are sent to by HTTP."""

    called: str = ""
    error: type[ConfigurationError] = ConfigurationError

    #: what it must be, for an error
    must = (
        "a URL such as https://shop.example.com/hook: https or http, at most 2000 ASCII "
        "characters, without user, password and fragment"
    )

    def check(self, what: str, value: object) -> Any:
        """The URL. Raises `error`, naming `what`; a password that the URL has is not told."""
        if isinstance(value, str) and _URL.fullmatch(value):
            try:
                found = urlsplit(value)
                port = found.port
            except ValueError:
                found, port = urlsplit(""), None
            is_web = found.scheme in ("https", "http") and found.hostname and port != 0
            if is_web and "@" not in found.netloc:
                return value
        if "@" in str(value):  # there may be a password before it
            raise self.error(f"{what} must be {self.must}")
        raise self.error(f"{what} must be {self.must}, not {value!r:.100}")

    read = check


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
