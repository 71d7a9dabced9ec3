"""Numbers and names in a sentence."""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """``1 message``, ``1,234 messages``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural(noun)}"


def plural(noun: str) -> str:
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"


def skipped(schedules: Iterable[str]) -> str:
    """What becomes of schedules whose next firing was deleted."""
    names = sorted(set(schedules))
    goes = "it goes" if len(names) == 1 else "each goes"
    return f"The next firing of {listed(names)} was among them; {goes} on with the one after that."


def listed(names: Iterable[str]) -> str:
    """Names in a sentence: ``'a'``, ``'a' and 'b'``, ``'a', 'b' and 'c'``."""
    *some, last = [repr(name) for name in names]
    return f"{', '.join(some)} and {last}" if some else last
