"""Leases that wait, with a center that does what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kombu_toc.http import Problem
from kombu_toc.http.pull import SPELL, LongPolls
from kombu_toc.model.results import Delivery


def message(id: str) -> Delivery:
    return Delivery("mail", 0, 0, id, 0, b"x", 16)


class Center:
    """Pops what was put, and keeps what was released."""

    def __init__(self) -> None:
        self.put: asyncio.Queue[list[Delivery]] = asyncio.Queue()
        self.released: list[str] = []
        self.waits: list[float] = []
        self.extend: Callable[..., Any] = self._extend

    async def pop(
        self, topics: Any, limit: int = 1, *, wait: float = 0, visibility: float | None = None
    ) -> Any:
        if not wait:
            return popped([])
        self.waits.append(wait)
        try:
            return popped(await asyncio.wait_for(self.put.get(), wait))
        except asyncio.TimeoutError:
            return popped([])

    async def _extend(self, some: list[Delivery], visibility: float | None) -> list[Delivery]:
        return []

    async def release(self, some: list[Delivery]) -> int:
        self.released += [one.id for one in some]
        return len(some)


def popped(messages: list[Delivery]) -> Any:
    return SimpleNamespace(messages=messages)


async def ask(
    long_polls: LongPolls, queue: str = "mail", **how: Any
) -> asyncio.Task[list[Delivery]]:
    """A lease that stands in the line when this returns."""
    asked = {"limit": 1, "wait": 20.0, "visibility": None, **how}
    before = long_polls.waiting
    task = asyncio.create_task(long_polls.lease(queue, **asked))
    while long_polls.waiting == before and not task.done():
        await asyncio.sleep(0)
    return task


async def test_if_handing_out_fails_all_are_told_and_every_message_is_given_back() -> None:
    center: Any = Center()
    long_polls = LongPolls(center)

    async def extend(*args: Any) -> Any:
        raise ConnectionError("it is gone")

    center.extend = extend
    first = await ask(long_polls, visibility=None)
    others = [await ask(long_polls, visibility=60.0) for _ in range(2)]
    center.put.put_nowait([message(f"m{n}") for n in range(5)])
    assert [one.id for one in await first] == ["m0"]
    for other in others:
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(other, 10)
    assert center.released == ["m1", "m2", "m3", "m4"]
    assert long_polls.waiting == 0


async def test_who_goes_away_while_a_lease_is_extended_leaves_it_to_the_next_one() -> None:
    center: Any = Center()
    long_polls = LongPolls(center)
    extending, go_on = asyncio.Event(), asyncio.Event()

    async def extend(*args: Any) -> Any:
        extending.set()
        await go_on.wait()
        return []

    center.extend = extend
    first = await ask(long_polls)
    second = await ask(long_polls, visibility=60.0)
    third = await ask(long_polls, visibility=None)
    center.put.put_nowait([message("m0"), message("m1"), message("m2")])
    await extending.wait()
    second.cancel()
    go_on.set()
    assert [one.id for one in await first] == ["m0"]
    assert [one.id for one in await asyncio.wait_for(third, 10)] == ["m1"]
    while center.released != ["m2"]:
        await asyncio.sleep(0)
    await long_polls.aclose()


async def test_if_it_ends_while_messages_are_handed_out_they_are_given_back() -> None:
    center: Any = Center()
    long_polls = LongPolls(center)
    extending = asyncio.Event()

    async def extend(*args: Any) -> Any:
        extending.set()
        await asyncio.Event().wait()

    center.extend = extend
    first = await ask(long_polls)
    second = await ask(long_polls, visibility=60.0)
    center.put.put_nowait([message("m0"), message("m1")])
    await extending.wait()
    await long_polls.aclose()
    assert [one.id for one in await first] == ["m0"]
    assert await second == []
    assert center.released == ["m1"]


async def test_after_the_end_nobody_waits() -> None:
    center: Any = Center()
    long_polls = LongPolls(center)
    await long_polls.aclose()
    assert await long_polls.lease("mail", 1, 20.0, None) == []
    assert center.waits == []


async def test_each_asker_has_a_share_of_the_queues_and_nobody_elses() -> None:
    center: Any = Center()
    long_polls = LongPolls(center, askers=20)
    for number in range(10):
        await ask(long_polls, f"q{number}", who="one")
    with pytest.raises(Problem) as caught:
        await long_polls.lease("q10", 1, 20.0, None, "one")
    assert caught.value.status == 429
    await ask(long_polls, "q9", who="one")  # others wait for it already
    await ask(long_polls, "q10", who="two")
    assert long_polls.waiting == 12
    await long_polls.aclose()


async def test_a_pop_waits_no_longer_than_somebody_who_asks() -> None:
    center: Any = Center()
    long_polls = LongPolls(center)
    assert await long_polls.lease("mail", 1, 0.2, None) == []
    while long_polls.lines:
        await asyncio.sleep(0.01)
    assert max(center.waits) <= 0.2
    center.waits.clear()
    await ask(long_polls, "mail", wait=30.0)
    while not center.waits:
        await asyncio.sleep(0)
    assert center.waits == [SPELL]
    await long_polls.aclose()
