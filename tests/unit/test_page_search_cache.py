"""Viewers of the page who look through the same filter share what it searches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kombu_toc import Found, Page
from kombu_toc.http import Mask, PageExtras
from kombu_toc.http.page import snapshots as cache_module
from kombu_toc.http.page.jobs import Listing, Selection
from kombu_toc.http.page.presentation import Reader
from kombu_toc.http.page.snapshots import Key, SearchCache

from ..support.page_messages import found

MAIL: Key = ("mail", "text", "")


class Center:
    """A center whose scans wait while they are held."""

    def __init__(self) -> None:
        self.scans = 0
        self.fails = False
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.messages: list[Found] = [found(b"text")]

    async def scan(self, queue: str, **how: Any) -> Page:
        self.scans += 1
        messages = list(self.messages)
        await self.go_on.wait()
        if self.fails:
            raise ConnectionError("the broker is away")
        return Page(messages, None)


def run(test: Callable[[Center, SearchCache], Awaitable[None]]) -> None:
    async def go() -> None:
        center = Center()
        searches = SearchCache(center, Reader(Mask(), PageExtras()))
        await test(center, searches)
        await searches.aclose()

    asyncio.run(go())


async def look(searches: SearchCache, key: Key = MAIL, is_live: bool = True) -> Listing:
    how: dict[str, Any] = {"now_us": 0, "limit": 100, "is_live": is_live}
    return (await searches.look(key, Selection(key[0], text=key[1]), **how)).listing


def slow(searches: SearchCache, key: Key, took: float) -> None:
    """As if a look had taken so many seconds."""
    seen = searches._seen[key]
    seen.listing = seen.listing._replace(took=took)


def test_ten_viewers_cost_what_one_does() -> None:
    async def test(center: Center, searches: SearchCache) -> None:
        for is_live in (True, False):
            center.go_on.clear()
            viewers = [asyncio.create_task(look(searches, is_live=is_live)) for _ in range(10)]
            await asyncio.sleep(0)
            viewers[0].cancel()  # the first one goes away: the others have its look
            await asyncio.sleep(0)
            center.go_on.set()
            shown = await asyncio.gather(*viewers[1:])
            assert all(one is shown[0] for one in shown) and len(shown[0].messages) == 1
            searches.forget("mail")
        assert (searches.taken, center.scans) == (2, 2)

    run(test)


def test_a_look_that_took_long_is_taken_again_by_whoever_opens_the_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(center: Center, searches: SearchCache) -> None:
        await look(searches)
        slow(searches, MAIL, 1000.0)
        first = await look(searches)
        assert first is await look(searches) is await look(searches, is_live=False)
        monkeypatch.setattr(cache_module, "OPENED", 0)
        assert await look(searches) is first
        assert await look(searches, is_live=False) is not first

    run(test)


def test_all_filters_together_take_a_tenth_of_the_time() -> None:
    async def test(center: Center, searches: SearchCache) -> None:
        keys = [("mail", f"t{n}", "") for n in range(5)]
        for key in keys:
            await look(searches, key)
            slow(searches, key, 2.0)
        for key in keys:
            assert 95 < searches.again_in(searches._seen[key]) <= 100

    run(test)


def test_who_changes_something_sees_it() -> None:
    async def test(center: Center, searches: SearchCache) -> None:
        await look(searches)
        slow(searches, MAIL, 1000.0)
        await look(searches, ("sms", "text", ""))
        slow(searches, ("sms", "text", ""), 1000.0)
        center.messages = []
        searches.forget("mail")
        assert (await look(searches)).messages == []
        assert len((await look(searches, ("sms", "text", ""))).messages) == 1
        # A look that has begun before is shown to nobody who comes after it.
        center.messages = [found(b"text")]
        searches.forget("mail")
        center.go_on.clear()
        early = asyncio.create_task(look(searches))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        center.messages = []
        searches.forget("mail")
        late = asyncio.create_task(look(searches))
        await asyncio.sleep(0)
        center.go_on.set()
        assert len((await early).messages) == 1 and (await late).messages == []
        slow(searches, MAIL, 1000.0)
        assert (await look(searches)).messages == []

    run(test)


def test_a_look_that_fails_is_told_and_taken_again() -> None:
    async def test(center: Center, searches: SearchCache) -> None:
        center.fails = True
        told = await asyncio.gather(*(look(searches) for _ in range(3)), return_exceptions=True)
        assert [type(one) for one in told] == [ConnectionError] * 3
        center.fails = False
        assert len((await look(searches)).messages) == 1
        assert searches.taken == 2

    run(test)


def test_a_bounded_number_of_looks_is_kept() -> None:
    async def test(center: Center, searches: SearchCache) -> None:
        for n in range(cache_module.MOST_SEEN + 5):
            await look(searches, ("mail", f"t{n}", ""))
        assert len(searches._seen) == cache_module.MOST_SEEN
        assert not searches._tasks

    run(test)
