"""In an event loop: pops that wait, and loops over messages. Nothing blocks the loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from kombu_toc import AsyncTaken, AsyncTimeoutCenter, TimeoutCenter
from kombu_toc.aio.client import Link

from ..meta.test_readme import named
from ..support.inspection import announced, blocked, put_some
from ..support.loops import in_loop, watched
from ..support.servers import Server, frozen

HOUR = 3600.0


@contextlib.asynccontextmanager
async def center_at(url: str) -> AsyncIterator[AsyncTimeoutCenter]:
    async with AsyncTimeoutCenter.from_url(url) as made:
        made.center.leases.grace = 0
        yield made


async def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_a_task_waits_for_messages_and_blocks_no_other(
    url: str, center: TimeoutCenter
) -> None:
    async with center_at(url) as toc, watched():
        began = time.monotonic()
        waits = asyncio.create_task(toc.pop(["mail", "sms"], 10, wait=30))
        await asyncio.sleep(0.2)  # others run meanwhile
        await toc.put("sms", "m", b"body", delay=0.2)
        popped = await waits
        assert 0.4 <= time.monotonic() - began < 3
        assert [message.id for message in popped.messages] == ["m"]
        assert await toc.ack(popped.messages) == 1
        assert (await toc.pop("mail", wait=0.2)).messages == []
    assert blocked(center.client) == 0


async def test_of_many_tasks_that_wait_one_gets_a_message(url: str, center: TimeoutCenter) -> None:
    async with center_at(url) as toc:
        got: list[str] = []

        async def wait() -> None:
            for message in (await toc.pop(["mail", "sms"], wait=10)).messages:
                got.append(message.id)
                await toc.ack(message)

        tasks = [asyncio.create_task(wait()) for _ in range(10)]
        for number in range(10):
            await toc.put(("mail", "sms")[number % 2], f"m{number}", b"", delay=0.1)
        await asyncio.gather(*tasks)
        assert sorted(got) == [f"m{number}" for number in range(10)]


async def test_a_task_that_is_cancelled_hands_back_what_it_had_claimed(
    url: str, center: TimeoutCenter, client: redis.Redis
) -> None:
    for number in range(40):
        center.put("mail", f"later{number}", b"", delay=HOUR + number)
    before = announced(center, "mail")

    async with center_at(url) as toc:
        waits = asyncio.create_task(toc.pop("mail", wait=None))
        await until(lambda: not announced(center, "mail"))
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
    assert announced(center, "mail") == before
    assert blocked(client) == 0


@pytest.mark.parametrize("topics", ["mail", ["mail", "sms"]])
def test_a_task_that_is_cancelled_gives_back_what_it_was_just_delivered(
    url: str, center: TimeoutCenter, topics: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it was cancelled before it has read the reply, or while it hands back its claims."""
    waits: asyncio.Task[Any] | None = None
    delivered = 0

    async def exchange(self: Link, *args: Any, real: Any = Link.exchange) -> Any:
        nonlocal delivered
        replies = await real(self, *args)
        if waits is not None and center.counts("mail").in_flight:
            delivered += 1
            if delivered == turn:
                waits.cancel()
        return replies

    async def use() -> None:
        nonlocal waits
        async with center_at(url) as toc:
            await toc.pop(topics, wait=0.01)  # so that its scripts are known
            waits = asyncio.create_task(toc.pop(topics, wait=60))
            await toc.put("mail", "m", b"")
            await asyncio.wait({waits})

    monkeypatch.setattr(Link, "exchange", exchange)
    for turn in range(1, 4):
        waits, delivered = None, 0
        in_loop(use())
        assert waits is not None
        if waits.cancelled():
            assert center.counts("mail") == (1, 0, 0, 0)
        else:  # it had ended before
            assert turn > 1 and center.counts("mail").in_flight == 1
            break
        center.queues.purge("mail")


async def test_a_loop_over_messages_renews_their_leases_and_settles_them(
    url: str, center: TimeoutCenter
) -> None:
    center.queues.declare("mail", visibility=3, slots=1, retry_backoff=HOUR, retry_backoff_max=HOUR)
    put_some(center, "mail", ("a", "b", "c", "d"))

    async with center_at(url) as toc:
        with pytest.raises(ValueError, match="broken"):
            async with toc.consume("mail", "sms", limit=10) as messages:
                async for message in messages:
                    assert isinstance(message, AsyncTaken)
                    if message.id == "a":
                        end = time.monotonic() + 4
                        while time.monotonic() < end:  # longer than a lease
                            assert center.pop("mail").messages == []
                            await asyncio.sleep(0.05)
                    elif message.id == "b":
                        assert await message.reject(requeue=False) == "dead"
                    else:
                        raise ValueError("broken")
        async with toc.consume("mail", idle=0) as messages:
            assert [message.id async for message in messages] == ["d"]
    assert center.get("a") == center.get("d") == []
    assert center.counts("mail").dead == 1
    [failed] = center.get("c")
    assert failed.retries_left == 15
    assert failed.error.startswith("ValueError: broken")


@pytest.mark.one_server("it stops the server's process")
async def test_a_server_that_is_frozen_for_a_while_is_waited_for(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        async with center_at(server.toc_url) as toc, watched():
            await toc.put("mail", "m", b"", delay=1)
            waits = asyncio.create_task(toc.pop("mail", wait=30))
            await asyncio.sleep(0.3)  # it waits by then
            with frozen(server):
                await asyncio.sleep(1.5)  # for so long the server stands still
            assert [message.id for message in (await waits).messages] == ["m"]


async def test_a_cut_connection_is_made_again(
    url: str, client: redis.Redis, center: TimeoutCenter, caplog: pytest.LogCaptureFixture
) -> None:
    async with center_at(url) as toc:
        waits = asyncio.create_task(toc.pop("mail", wait=20))
        await until(lambda: blocked(client))
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await until(lambda: "cannot wait for messages of mail for now" in caplog.text)
        center.put("mail", "m", b"")
        assert [message.id for message in (await waits).messages] == ["m"]


async def test_the_example_of_a_loop_runs(
    url: str, center: TimeoutCenter, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    exec(named("docs/asyncio.md", "async def consume(center)"), names)
    center.put("mail", "order-7", b"remind")

    async with center_at(url) as toc:
        await names["consume"](toc)
    assert "mail order-7 b'remind'" in capsys.readouterr().out
    assert sum(center.counts("mail")) == 0
