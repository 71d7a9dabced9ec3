"""Pages of schedules, by queue and name: those that a token may see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from kombu_toc.http import Token, invalid, page_of_names

if TYPE_CHECKING:
    from ..schedules.view import Schedule


async def page_of_schedules(
    schedules: Any, token: Token, limit: int, after: str = "", queue: str | None = None
) -> tuple[list[Schedule], str | None]:
    """A page of schedules, and where the next one begins, if there are more. It may have fewer than
    the limit, or none: a bounded number of queues is looked at, and of names.

    schedules: of an app, awaited
    after: where it begins, as this has returned it; empty: at the first one
    queue: only those of this one, which the token may see

    Raises Problem if this has never returned `after`.
    """
    first, name = _read(after)
    more = None
    if queue is None:
        queues, more = await page_of_names(schedules.queues, token, first, limit)
        if name and token.sees(first):
            queues = [first, *queues]
        else:
            name = ""
    else:
        if after and (first != queue or not name):
            raise _invalid(after)
        queues = [queue]
    found: list[Schedule]
    found, behind = await schedules.page(queues, limit=limit + 1, after=name)
    if len(found) > limit:
        last = found[limit - 1]
        return found[:limit], _written(last.queue, last.name)
    if behind is not None:
        return found, _written(*behind)
    return found, None if more is None else _written(more)


def _written(queue: str, name: str = "") -> str:
    return f"{_quoted(queue)}:{_quoted(name)}" if name else _quoted(queue)


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _read(after: str) -> tuple[str, str]:
    """The queue and the name behind which a page begins; without a name, behind all of that
    queue."""
    queue, *names = map(unquote, after.split(":"))
    if len(names) > 1 or (after and not queue) or names == [""]:
        raise _invalid(after)
    return queue, names[0] if names else ""


def _invalid(after: str) -> Exception:
    return invalid("after", f"{after[:80]!r} is not what a page of these schedules has given")
