"""Numbers and names in a sentence."""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """``1 message``, ``1,234 messages``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural(noun)}"


def plural(noun: str) -> str:
    return f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"


def listed(names: Iterable[str]) -> str:
    """Names in a sentence: ``'a'``, ``'a' and 'b'``, ``'a', 'b' and 'c'``."""
    *some, last = [repr(name) for name in names]
    return f"{', '.join(some)} and {last}" if some else last
