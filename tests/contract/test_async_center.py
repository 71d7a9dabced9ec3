"""AsyncTimeoutCenter: the center's methods, awaited; nothing blocks the loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import threading
import time
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from kombu_toc import (
    DEAD,
    AsyncTimeoutCenter,
    ConfigurationError,
    Put,
    ReplicationError,
    ServerError,
    TimeoutCenter,
    read_metrics,
)

from ..support.certificates import Authority, TLSServer, tls_program
from ..support.loops import in_loop, watched
from ..support.proxy import Proxy
from ..support.sentinels import NAME, Deployment
from ..support.servers import Server, frozen


@contextlib.asynccontextmanager
async def center_at(url: str, **options: Any) -> AsyncIterator[AsyncTimeoutCenter]:
    async with AsyncTimeoutCenter.from_url(url, **options) as made:
        made.center.leases.grace = 0
        yield made


@pytest.mark.parametrize("slots", [1, 16])
async def test_every_operation_works_and_is_that_of_the_center(
    url: str, center: TimeoutCenter, slots: int
) -> None:
    async with center_at(url) as toc:
        await toc.queues.declare("mail", slots=slots)
        assert await toc.queues.names() == ["mail"]
        ids = [f"m{i}" for i in range(60)]
        for number, id in enumerate(ids):
            delay = 3600 if number < 20 else 0
            assert (await toc.put("mail", id, b"body", delay=delay, priority=number % 10)).id == id
        await toc.put("mail", "m0", b"another body", delay=3600)  # a copy
        assert (await toc.put("mail", "m1", b"body", if_exists="keep")).added is False
        assert await toc.counts("mail") == center.counts("mail")
        assert await toc.queues.counts_by_slot("mail") == center.queues.counts_by_slot("mail")
        assert await toc.get("m0") == center.get("m0") != []
        assert (await toc.scan("mail", limit=200)).messages == center.scan(
            "mail", limit=200
        ).messages
        assert await toc.count("mail", where=lambda found: found.id == "m3") == 1
        assert [one.topic for one in await toc.queues.summary("mail")] == ["mail"]
        assert await toc.queues.coming("mail", [10, 7200]) == center.queues.coming(
            "mail", [10, 7200]
        )
        assert await toc.admin.check("mail") == await toc.admin.repair("mail") == []

        messages: list[Any] = []
        while popped := (await toc.pop("mail", 7)).messages:
            messages += popped
        assert {message.id for message in messages} == set(ids[20:])
        assert await toc.extend(messages) == []
        early = (await toc.pop("mail", ids=["m1", "m2"], early=True)).messages
        early += (await toc.pop("mail", where=lambda found: found.id == "m3", early=True)).messages
        assert {message.id for message in early} == {"m1", "m2", "m3"}
        assert await toc.release([message.receipt for message in early]) == 3
        assert await toc.ack([message.receipt for message in messages[:20]]) == 20
        assert (await toc.ack(messages[:20])).stale == messages[:20]
        assert await toc.release(messages[20:30]) == 10
        for message in messages[30:]:
            assert await toc.reject(message, requeue=False, reason="done for") == DEAD
        assert await toc.dead.requeue("mail", ids=[messages[30].id]) == 1
        assert await toc.dead.purge("mail") == 9

        [moved] = await toc.reschedule("m5", delay=10)
        assert moved.moved
        assert [one.id for one in await toc.run_now("m6")] == ["m6"]
        [gone] = await toc.cancel("m5")
        assert gone.deleted
        assert await toc.get("m5") == []
        assert await toc.queues.pause("mail") is True
        assert await toc.queues.paused() == {"mail"}
        await toc.notes.remember_cancelled(["m5"], most=5, seconds=60)
        assert await toc.notes.cancelled_lately(60) == ["m5"]
        assert await toc.queues.purge("mail") > 0
        await toc.queues.delete("mail")
        assert await toc.queues.names() == []


async def test_what_it_puts_is_what_the_center_puts(url: str, center: TimeoutCenter) -> None:
    async with center_at(url, toc_slots=8) as toc:
        await toc.put("mail", "one", b"body", at=4e9, priority=3)
    center.put("mail", "two", b"body", at=4e9, priority=3)
    one, two = (center.get(id)[0] for id in ("one", "two"))
    assert one._replace(id="", slot=0) == two._replace(id="", slot=0)


async def test_many_tasks_share_a_few_connections(url: str) -> None:
    async with center_at(url, max_connections=3) as toc:
        await asyncio.gather(*[toc.put("mail", f"m{i}", b"x") for i in range(2000)])
        assert (await toc.counts("mail")).ready == 2000
        found = await asyncio.gather(*[toc.get(f"m{i}", topic="mail") for i in range(200)])
        assert [[one.id for one in some] for some in found] == [[f"m{i}"] for i in range(200)]
        pools = (
            [client.links for client in toc.client._clients.values() if client._links]
            if toc.clustered
            else [toc.client.links]
        )
        assert sum(links.count for links in pools) <= 3 * len(pools)


async def test_a_client_of_redis_asyncio_says_where_the_server_is(single_server: Server) -> None:
    client = redis.asyncio.Redis(port=single_server.port, db=3, max_connections=2)
    async with AsyncTimeoutCenter(client, "own:") as toc:
        await toc.put("mail", "a", b"x")
        assert toc.client.most == 2
        assert await toc.queues.names() == ["mail"]
        assert await client.hexists("own:{toc}:topics", "mail")
        await toc.queues.delete("mail")
    await client.aclose()


@pytest.mark.parametrize(
    "client, said",
    [
        (redis.Redis(), "takes a redis.asyncio.Redis, not Redis"),
        ("toc+redis://", "from_url takes a URL"),
        (redis.asyncio.Redis(decode_responses=True), "decode_responses"),
    ],
)
def test_a_client_that_cannot_be_used_is_refused(client: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        AsyncTimeoutCenter(client)


def test_a_wrong_option_is_refused_before_it_connects() -> None:
    with pytest.raises(ConfigurationError, match="toc_slot"):
        AsyncTimeoutCenter.from_url("toc+redis://localhost/0?toc_slot=3")


def test_what_is_not_awaited_says_so(url: str) -> None:
    toc = AsyncTimeoutCenter.from_url(url)
    with pytest.raises(ConfigurationError, match="with await"):
        toc.center.queues.names()


def test_a_function_that_takes_a_center_can_be_called(url: str) -> None:
    async def use() -> dict[str, Any]:
        async with center_at(url, global_keyprefix="counted:") as toc:
            await toc.put("mail", "a", b"x")
            await toc.aclose()  # it sends the counters; it can be used again
            return await toc.call(read_metrics)

    assert in_loop(use())["mail"].totals["put"] == 1


# -- the loop


async def test_the_loop_turns_while_the_server_stands_still(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        async with center_at(server.toc_url) as toc, watched():
            await toc.put("mail", "first", b"x")
            with frozen(server):
                puts = [toc.put("mail", f"m{i}", b"x", delay=60) for i in range(100)]
                waiting = [asyncio.create_task(put) for put in puts]
                lookup = asyncio.create_task(toc.get("first"))
                done, _ = await asyncio.wait([*waiting, lookup], timeout=1.0)
                assert not done
            assert len(await asyncio.gather(*waiting)) == 100
            assert len(await lookup) == 1


async def test_each_put_is_a_message_and_a_token_names_one(url: str) -> None:
    """As of the center; also of tasks that put at once."""
    async with center_at(url) as toc:
        tokens = (None, None, "t", "t", "u")
        made = [await toc.put("mail", "x", b"", token=token) for token in tokens]
        assert [one.outcome for one in made] == ["added"] * 3 + ["repeated", "added"]
        again = [await toc.put_many("mail", [("l", b""), ("l", b"")], token="t") for _ in "12"]
        outcomes = [one.outcome for many in again for one in many]
        assert outcomes == ["added"] * 2 + ["repeated"] * 2
        made = await asyncio.gather(*[toc.put("mail", "same", b"") for _ in range(50)])
        assert len({one.id for one in made}) == 50
        assert (await toc.counts("mail")).ready == 56


async def test_a_server_that_is_silent_is_an_error_after_the_timeout(single_server: Server) -> None:
    with Proxy(single_server.port) as proxy:
        async with center_at(f"{proxy.toc_url}?socket_timeout=0.3") as toc:
            await toc.put("mail", "a", b"x")
            proxy.freeze()
            async with watched():
                began = time.monotonic()
                found = await asyncio.gather(
                    *[toc.put("mail", f"m{i}", b"x") for i in range(20)], return_exceptions=True
                )
                assert all(
                    isinstance(one, (redis.TimeoutError, redis.ConnectionError)) for one in found
                )
                assert 0.3 <= time.monotonic() - began < 5
            proxy.thaw()
            assert [one.id for one in await toc.get("a")] == ["a"]


async def test_a_cut_connection_is_an_error_for_those_who_wait_and_opened_again(
    single_server: Server,
) -> None:
    with Proxy(single_server.port) as proxy:
        async with center_at(proxy.toc_url) as toc:
            await toc.put("mail", "a", b"x")
            proxy.freeze()
            waiting = asyncio.create_task(toc.put("mail", "b", b"x", delay=60, token="t"))
            await asyncio.sleep(0.05)  # it is on its way
            proxy.thaw()
            proxy.cut()
            with contextlib.suppress(redis.ConnectionError):
                await waiting
            for _ in range(2):  # the same put again is the same message
                await toc.put("mail", "b", b"x", delay=60, token="t")
            assert len(await toc.get("b")) == 1
            proxy.cut()  # while nobody uses it
            await asyncio.sleep(0.05)  # the loop hears of it
            assert len(await toc.get("b")) == 1
        proxy.refuse()
        async with center_at(proxy.toc_url) as toc:
            with pytest.raises(redis.ConnectionError):
                await toc.queues.names()


async def test_it_is_closed_while_what_was_asked_for_ends(url: str) -> None:
    for turns in range(12):
        async with center_at(url) as toc:
            asked = [asyncio.create_task(toc.put("mail", f"m{n}", b"x")) for n in range(40)]
            for _ in range(turns):
                await asyncio.sleep(0)
        # Who still waited has got an error, and nobody waits for ever.
        found = await asyncio.gather(*asked, return_exceptions=True)
        await toc.aclose()  # who asked for more has opened connections again
        assert all(isinstance(one, (Put, redis.ConnectionError, OSError)) for one in found)


async def test_a_cancelled_task_leaves_no_reply_unread(url: str) -> None:
    async with center_at(url, max_connections=1) as toc:
        await toc.queues.declare("mail", slots=4)
        for number in range(50):
            task = asyncio.create_task(toc.put("mail", f"c{number}", b"x", delay=60, token="t"))
            for _ in range(number % 5):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            # Whatever was cut off, the next one gets its own reply.
            id = f"m{number}"
            assert (await toc.put("mail", id, b"x", delay=60)).id == id
            assert [one.id for one in await toc.get(id, topic="mail")] == [id]
        ids = [f"c{number}" for number in range(50)]
        for id in ids:  # put or not: again, it is there once
            await toc.put("mail", id, b"x", delay=60, token="t")
        assert sorted(one.id for one in await toc.get(ids, topic="mail")) == sorted(ids)


async def test_a_task_that_is_cancelled_while_it_connects_ends(
    single_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if redis-py loses the cancellation, as it may before Python 3.12"""

    connects = asyncio.Event()

    async def connect(self: Any, real: Any = redis.asyncio.Connection.connect) -> None:
        connects.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.2)
        await real(self)

    async with center_at(single_server.toc_url) as toc:
        await toc.counts("idle")  # where no other test puts anything
        before = toc.client.links.count
        monkeypatch.setattr(redis.asyncio.Connection, "connect", connect)
        task = asyncio.create_task(toc.pop("idle", wait=60))
        await connects.wait()
        task.cancel()
        await asyncio.wait({task}, timeout=10)
        assert task.cancelled()
        assert toc.client.links.count == before


async def test_a_task_that_is_cancelled_before_the_loop_turns_sends_nothing(url: str) -> None:
    async with center_at(url) as toc:
        await toc.queues.declare("mail")
        task = asyncio.create_task(toc.put("mail", "a", b"x"))
        await asyncio.sleep(0)  # it has asked; what was asked leaves at the end of the turn
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert await toc.get("a", topic="mail") == []


async def test_a_timeout_of_the_callers_ends_what_blocks(single_server: Server) -> None:
    async with center_at(single_server.toc_url, max_connections=2) as toc:
        await toc.queues.names()
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(
                    toc.call(lambda center: center.client.bzpopmin("none", 30)), 0.1
                )
            await toc.queues.names()
        assert toc.client.links.count <= 2


async def test_who_blocks_leaves_a_connection_to_the_others(single_server: Server) -> None:
    async with center_at(single_server.toc_url, max_connections=2) as toc:
        toc.client._timeout = 0.3
        block = lambda center: center.client.bzpopmin("none", 1)  # noqa: E731
        blocked = [asyncio.create_task(toc.call(block)) for _ in range(2)]
        await asyncio.sleep(0.05)
        await toc.queues.names()
        assert not all(one.done() for one in blocked)
        found = await asyncio.gather(*blocked, return_exceptions=True)
        assert None in found
        [error] = [one for one in found if one is not None]
        assert "none of 2 connections became free" in str(error)


async def test_a_script_that_the_server_has_forgotten_is_sent_again(url: str, client: Any) -> None:
    async with center_at(url) as toc:
        await toc.put("mail", "a", b"x", delay=60)
        client.script_flush()
        assert await asyncio.gather(*[toc.put("mail", f"m{i}", b"x") for i in range(20)])
        assert (await toc.counts("mail")).waiting == 21


async def test_replicas_are_waited_for(tmp_path: Path) -> None:
    options = {"toc_wait_replicas": 1, "toc_wait_timeout": 0.1}
    with Server(tmp_path) as primary:
        async with center_at(primary.toc_url, **options) as toc, watched():
            with pytest.raises(ReplicationError, match="only 0 of 1"):
                await toc.put("mail", "a", b"x")
            assert len(await toc.get("a")) == 1


async def test_tls_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    tls_program()
    authority = Authority(tmp_path / "ca")
    with TLSServer(tmp_path, authority, authority.certificate("server")) as server:
        url = f"toc+rediss://127.0.0.1:{server.tls_port}/0"
        async with center_at(url, ssl={"ca_certs": authority.file}) as toc:
            await toc.put("mail", "a", b"x")
            assert len(await toc.get("a")) == 1
        async with center_at(url) as toc:
            with pytest.raises(ServerError, match="the server's certificate is not trusted"):
                await toc.queues.names()


@pytest.mark.one_server("whose users the test changes")
def test_users_passwords_and_databases(server: Server, client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "ann", "on", ">secret", "~*", "&*", "+@all")
    place = f"127.0.0.1:{server.port}"

    async def use() -> None:
        async with center_at(f"toc+redis://ann:secret@{place}/2") as toc:
            assert await toc.queues.names() == []
            [who] = await toc.call(lambda center: [center.client.acl_whoami()])
            assert who in (b"ann", "ann")
        async with center_at(f"toc+redis://ann:wrong@{place}/0") as toc:
            with pytest.raises(redis.AuthenticationError):
                await toc.queues.names()
        async with center_at(f"toc+redis://{place}/999") as toc:
            with pytest.raises(ConfigurationError, match="has no database 999"):
                await toc.queues.names()

    try:
        in_loop(use())
    finally:
        client.acl_deluser("ann")


async def test_an_option_that_redis_asyncio_does_not_know_is_refused(single_server: Server) -> None:
    async with center_at(single_server.toc_url) as toc:
        toc.client.connection_pool.connection_kwargs["ssl_validate_ocsp"] = True
        with pytest.raises(ConfigurationError, match="knows no 'ssl_validate_ocsp'"):
            await toc.queues.names()


# -- loops, threads, processes


async def test_another_loop_is_refused_while_the_first_one_lives(url: str) -> None:
    toc = AsyncTimeoutCenter.from_url(url)
    await toc.queues.names()
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            asyncio.run(toc.queues.names())
        except ConfigurationError as exc:
            caught.append(exc)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    while thread.is_alive():
        await asyncio.sleep(0.01)
    assert "one for each loop" in str(caught[0])
    await toc.aclose()


# redis-py's older connections try to close themselves when they are collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_after_the_first_one_may_use_it(url: str) -> None:
    toc = AsyncTimeoutCenter.from_url(url)
    with warnings.catch_warnings():
        # asyncio's transports warn of a loop that ended before they were closed.
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(3):
            assert asyncio.run(toc.queues.names()) == []
        del toc
        gc.collect()


async def test_the_child_of_a_fork_has_connections_of_its_own(url: str) -> None:
    toc = AsyncTimeoutCenter.from_url(url)

    await toc.put("mail", "a", b"x", delay=60)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=in_a_child, args=(toc,))
    child.start()
    while child.is_alive():
        await asyncio.sleep(0.01)
    assert child.exitcode == 0
    assert len(await toc.get(["a", "b"])) == 2
    await toc.aclose()


def in_a_child(toc: AsyncTimeoutCenter) -> None:
    asyncio.events._set_running_loop(None)
    asyncio.run(toc.put("mail", "b", b"x", delay=60))


# -- Sentinel


@pytest.mark.one_server("of sentinels")
async def test_sentinels_lead_to_the_master_and_to_the_next_one(failing: Deployment) -> None:
    async with center_at(failing.toc_url) as toc, watched():
        await toc.put("mail", "a", b"x", delay=60)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, failing.primary.kill)
        deadline = time.monotonic() + 30
        while True:
            try:
                await toc.put("mail", "b", b"x", delay=60)
                break
            except (redis.ConnectionError, redis.TimeoutError, OSError):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)
        assert sorted(one.id for one in await toc.get(["a", "b"])) == ["a", "b"]


@pytest.mark.one_server("of sentinels")
async def test_a_wrong_name_of_a_master_is_explained(failing: Deployment) -> None:
    async with center_at(failing.toc_url.replace(NAME, "other")) as toc:
        with pytest.raises(ServerError, match="set master_name to the right one"):
            await toc.queues.names()
