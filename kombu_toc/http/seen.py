"""Which queues a token may see, page by page."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

from .tokens import Token


async def page_of_names(
    topics: Callable[..., Awaitable[list[str]]], token: Token, after: str, limit: int
) -> tuple[list[str], str | None]:
    """Names of queues that a token may see, and behind which it goes on, if there are more. Read
    are those only that begin as its patterns do, a page of each.

    topics: reads names, as :meth:`AsyncTimeoutCenter.topics` does
    """
    heads = sorted({re.split(r"[*?]", pattern)[0] for pattern in token.queues})
    heads = [
        one for one in heads if not any(one != head and one.startswith(head) for head in heads)
    ]
    pages = await asyncio.gather(
        *(topics(prefix=head, after=after, limit=limit + 1) for head in heads)
    )
    # What is behind the last name of a full page is not known.
    until = min((page[-1] for page in pages if len(page) > limit), default=None)
    names = [
        one
        for one in sorted(one for page in pages for one in page)
        if token.sees(one) and (until is None or one <= until)
    ]
    if len(names) > limit:
        return names[:limit], names[limit - 1]
    return names, until
