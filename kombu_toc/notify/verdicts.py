"""What becomes of a message by what its target has answered."""

from __future__ import annotations

from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import urlsplit

#: Seconds after which a message comes again at the latest, whatever a target says.
MAX_BACKOFF = 86_400.0

#: Seconds after which it comes again at the earliest.
LEAST_BACKOFF = 1.0

#: Seconds for which nothing else is sent to a target that wants to be left alone, at most.
MAX_REST = 60.0

#: Bytes of an answer that are kept.
KEPT = 500


class Answer(NamedTuple):
    """What a target has answered."""

    status: int
    reason: str = ""
    retry_after: str = ""
    begin: bytes = b""  #: its first bytes


#: What becomes of a message.
DONE, AGAIN, GONE = "done", "again", "gone"


class Verdict(NamedTuple):
    """What becomes of a message."""

    what: str  #: DONE; AGAIN: it is rejected; GONE: its target wants nothing any more
    reason: str = ""  #: why, in a few words
    error: str = ""  #: the same with what was answered
    backoff: float | None = None  #: seconds until it comes again; None: as its topic says
    rest: float = 0.0  #: seconds for which the target wants to be left alone


def judge(answer: Answer | str, target: str, now: datetime) -> Verdict:
    """What becomes of a message.

    answer: or why there is none
    target: where it was sent to
    now: for a time at which the target wants to be asked again
    """
    where = shown(target)
    if isinstance(answer, str):
        return Verdict(AGAIN, answer, f"{where}: {answer}")
    if 200 <= answer.status < 300:
        return Verdict(DONE)
    reason = f"HTTP {answer.status}"
    if 300 <= answer.status < 400:
        reason += " (redirects are not followed)"
    said = "".join(
        c if c.isprintable() or c == "\n" else "\ufffd"
        for c in answer.begin[:KEPT].decode("utf-8", "replace")
    )
    error = f"{where}: {reason} {answer.reason}".rstrip() + (f"\n{said}" if said else "")
    if answer.status == 410:
        return Verdict(GONE, reason, error)
    if answer.status in (429, 503):
        seconds = seconds_of(answer.retry_after, now)
        if seconds is not None:
            return Verdict(AGAIN, reason, error, seconds, min(seconds, MAX_REST))
    return Verdict(AGAIN, reason, error)


def seconds_of(retry_after: str, now: datetime) -> float | None:
    """The header ``Retry-After`` in seconds; None if it says nothing."""
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return min(max(float(text[:9]), LEAST_BACKOFF), MAX_BACKOFF)
    try:
        at = parsedate_to_datetime(text)
        if at.tzinfo is None:
            at = at.replace(tzinfo=timezone.utc)
        seconds = (at - now).total_seconds()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return min(max(seconds, LEAST_BACKOFF), MAX_BACKOFF)


def backoff_of(failures: int, first: float, longest: float) -> float:
    """Seconds until a message comes again whose topic does not say."""
    return float(min(first * 2 ** min(failures, 30), max(longest, first)))


def shown(target: str) -> str:
    """A target as it is logged and kept: a query may have what is secret."""
    found = urlsplit(target)
    return f"{found.scheme}://{found.netloc}{found.path}" + ("?..." if found.query else "")
