"""celery_toc.aio and send_many: tasks are sent as Celery sends them, byte for byte; nothing blocks
an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import zlib
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import kombu
import pytest
import redis
from celery import Celery, chain, chord, group, signals
from kombu.exceptions import OperationalError

import celery_toc
from celery_toc import aio
from celery_toc.app.sending import LANES, sender_of
from celery_toc.compat import sending
from kombu_toc import AsyncChannel, ConfigurationError, TimeoutCenter
from kombu_toc.model.message import DICTIONARY
from kombu_toc.transport.publisher import PublishBatch

from ..support.cluster import Cluster
from ..support.loops import in_loop, watched
from ..support.proxy import Proxy
from ..support.sentinels import Deployment
from ..support.servers import Server, frozen


def make_app(url: str, **settings: Any) -> Celery:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(settings)

    @app.task(name="shop.add", shared=False)
    def add(x: Any = 1, y: Any = 2, **more: Any) -> None: ...

    @app.task(name="shop.urgent", shared=False, time_limit=30, ignore_result=True)
    def urgent(x: int) -> None: ...

    return app


@pytest.fixture
def app(client: redis.Redis, server: Server | Cluster) -> Iterator[Celery]:
    with make_app(server.toc_url) as made:
        yield made


@contextlib.contextmanager
def counting(by: type) -> Iterator[mock.Mock]:
    """Counts the messages that were not made by Celery's own code. What was learned of Celery's
    holds for as long as a test takes."""
    made = mock.patch.object(by, "publish_made", autospec=True, side_effect=by.publish_made)
    with mock.patch.object(sending, "FRESH", 60.0), made as counted:
        yield counted


@pytest.fixture
def made_quickly() -> Iterator[mock.Mock]:
    with counting(AsyncChannel) as counted:
        yield counted


@pytest.fixture
def proxied(single_server: Server, client: redis.Redis) -> Iterator[tuple[Celery, Proxy]]:
    """An app of one server, which is empty, and what stands before that."""
    with single_server.client() as made:
        made.flushall()
    with Proxy(single_server.port) as proxy, make_app(proxy.toc_url) as app:
        yield app, proxy


def plain(body: bytes, id: str) -> bytes:
    """A message as it is before it is compressed."""
    if body[:1] == b"{":
        return body
    assert body[:1] == b"\x02"
    inflater = zlib.decompressobj(-12, DICTIONARY + id.encode())
    return inflater.decompress(body[2:])


#: What differs between two publishes of one message: a token, and the moments that are worked out.
TOKEN = re.compile(rb'"k":"[0-9a-f]{8}"')
TIMES = re.compile(rb'"(eta|expires|expiration)":"[-0-9T:.+]+"')


def stored(center: TimeoutCenter, id: str) -> tuple[bytes, Any]:
    """The bytes of a message, and where it is; it is removed."""
    [found] = center.get(id)
    center.cancel(id)
    body = TOKEN.sub(b'"k":""', plain(found.body, id))
    return TIMES.sub(rb'"\1":""', body), (found.topic, found.step, found.state)


LATER = datetime(2040, 1, 2, 3, 4, 5, 6, tzinfo=timezone.utc)

#: Arguments, and options of apply_async; whether it is made quickly once it is known.
SHAPES: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Any], bool]] = {
    "nothing": ((), {}, {}, True),
    "args": ((1, "two"), {}, {}, True),
    "kwargs": ((), {"x": [1, {"a": None}], "y": "\u00e9'\"\\%s"}, {}, True),
    "many": ((list(range(500)),), {"y": "z" * 3000}, {}, True),
    "types": ((LATER, 1.5), {"x_more": b"bytes".decode(), "n": -7}, {}, True),
    "countdown": ((1,), {}, {"countdown": 3600}, True),
    "short countdown": ((1,), {"y": 3}, {"countdown": 0.75}, True),
    "no countdown": ((1,), {}, {"countdown": 0}, False),
    "eta": ((1,), {}, {"eta": LATER}, True),
    "eta elsewhere": ((1,), {}, {"eta": LATER.astimezone(timezone(timedelta(hours=2)))}, True),
    "eta without a zone": ((1,), {}, {"eta": LATER.replace(tzinfo=None)}, True),
    "priority": ((1,), {}, {"priority": 6, "countdown": 100}, True),
    "queue": ((1,), {}, {"queue": "mail"}, True),
    "ignored": ((1,), {}, {"ignore_result": True}, True),
    "headers": ((1,), {}, {"headers": {"x-slot-basis": "u1", "more": 1}}, False),
    "key": ((1,), {}, {"headers": {"x-key": "customer 'é%s"}}, True),
    "key of a group": ((1,), {}, {"MessageGroupId": "c-42", "countdown": 5}, True),
    "key twice": ((1,), {}, {"headers": {"x-key": "a"}, "MessageGroupId": "b"}, False),
    "key that is a number": ((1,), {}, {"headers": {"x-key": 42}}, False),
    "expires": ((1,), {}, {"expires": 3600.0}, False),
    "expires at": ((1,), {}, {"expires": LATER, "countdown": 5}, False),
    "link": ((1,), {}, {"link": "LINK"}, False),
    "shadow": ((1,), {}, {"shadow": "other"}, False),
    "repr": ((1,), {}, {"argsrepr": "<secret>"}, False),
    "root": ((1,), {}, {"root_id": "r", "parent_id": "p"}, False),
    "pickled": ((1,), {}, {"serializer": "pickle"}, False),
    "compressed": ((1,), {}, {"compression": "gzip"}, False),
    "limits": ((1,), {}, {"time_limit": 5, "soft_time_limit": 3}, False),
}


#: Of tasks; as long as those that Celery makes.
IDS = [f"6b3f0d3a-6ae2-4a58-8a4c-3a6b2f0000{number:02}" for number in range(5)]


def shaped(app: Celery, shape: str) -> tuple[Any, ...]:
    """A task, its arguments and options; whether it is made quickly."""
    args, kwargs, options, quick = SHAPES[shape]
    add = app.tasks["shop.add"]
    if options.get("link") == "LINK":
        options = {"link": add.s(5), "link_error": add.s(6)}
    return add, args, kwargs, options, quick


@pytest.mark.parametrize("shape", SHAPES)
def test_many_messages_are_byte_for_byte_what_celery_sends(
    app: Celery, center: TimeoutCenter, shape: str
) -> None:
    add, args, kwargs, options, quick = shaped(app, shape)
    asked = [add.apply_async(args, kwargs, task_id=id, **options) for id in IDS]
    expected = [stored(center, id) for id in IDS]
    signatures = [add.signature(args, kwargs, task_id=id, **options) for id in IDS]
    with counting(PublishBatch) as made:
        results = celery_toc.send_many(signatures, app)
    assert [stored(center, id) for id in IDS] == expected
    assert [one.id for one in results] == IDS
    assert [one.ignored for one in results] == [one.ignored for one in asked]
    assert made.call_count == (3 if quick else 0)


def test_many_tasks_go_before_one_that_cannot_be_sent(app: Celery, center: TimeoutCenter) -> None:
    add = app.tasks["shop.add"]
    with pytest.raises(TypeError):
        celery_toc.send_many([*(add.s(n) for n in range(7)), add.s(1, 2, 3), add.s(9)], app)
    assert center.counts("celery").waiting == 7


@pytest.mark.one_server("the proxy stands before one server")
def test_many_tasks_are_sent_once_although_a_reply_is_lost(
    server: Server, center: TimeoutCenter
) -> None:
    with Proxy(server.port) as proxy, make_app(proxy.toc_url) as app:
        add = app.tasks["shop.add"]
        lost = proxy.drop_replies(b"task-30")
        some = [add.s(n).set(task_id=f"task-{n}") for n in range(40)]
        sent = celery_toc.send_many([*some, group(add.s(1), add.s(2))], app)
        assert lost.is_set()
        assert len(sent) == 41
        assert center.counts("celery").waiting == 42


def test_many_tasks_go_to_a_timeout_center_only() -> None:
    with make_app("memory://") as app, pytest.raises(ConfigurationError, match="memory://"):
        celery_toc.send_many([app.tasks["shop.add"].s(1)], app)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_message_is_byte_for_byte_what_celery_sends(
    app: Celery, center: TimeoutCenter, made_quickly: mock.Mock, shape: str
) -> None:
    add, args, kwargs, options, quick = shaped(app, shape)
    for id in IDS:
        asked = add.apply_async(args, kwargs, task_id=id, **options)
        expected = stored(center, id)
        result = await aio.send(add.s(*args, **kwargs), task_id=id, **options)
        assert (result.id, result.ignored) == (asked.id, asked.ignored)
        assert type(result) is type(asked)
        assert stored(center, id) == expected
    await aio.aclose(app)
    assert made_quickly.call_count == (3 if quick else 0)


class RouteByArgument:
    """A router that is called; its name is the same in every process of a test run."""

    def __call__(self, name: str, args: Any, *rest: Any, **more: Any) -> dict[str, str]:
        return {"queue": f"by{args[0]}"}

    def __repr__(self) -> str:
        return "by argument"


@pytest.mark.parametrize(
    "settings",
    [
        {"task_protocol": 1},
        {"task_serializer": "pickle"},
        {"timezone": "Europe/Berlin"},
        {"enable_utc": False, "timezone": "Asia/Tokyo"},
        {"task_default_queue": "own", "task_default_priority": 3},
        {"task_routes": {"shop.*": {"queue": "routed", "priority": 4}}},
        {"task_routes": [RouteByArgument()]},
        {"task_compression": "zlib"},
        {"task_ignore_result": True, "task_send_sent_event": True},
        {"task_default_delivery_mode": 1},
    ],
    ids=str,
)
def test_whatever_is_set_messages_are_what_celery_sends(
    client: redis.Redis, server: Server | Cluster, center: TimeoutCenter, settings: dict[str, Any]
) -> None:
    with make_app(server.toc_url, **settings) as app:

        async def send() -> None:
            for name in ("shop.add", "shop.urgent"):
                task = app.tasks[name]
                for number in range(4):
                    for options in ({}, {"countdown": 60}):
                        id = f"task-{name}-{number}-{len(options)}"
                        task.apply_async((number,), task_id=id, **options)
                        expected = stored(center, id)
                        await aio.send(task.s(number), task_id=id, **options)
                        found = stored(center, id)
                        if "timezone" in settings or settings.get("task_protocol") == 1:
                            expected, found = map(without_times, (expected, found))
                        assert found == expected
            await aio.aclose(app)

        in_loop(send())


def without_times(message: tuple[bytes, Any]) -> tuple[bytes, Any]:
    times = re.compile(rb'\\*"eta\\*": ?\\*"[-0-9T:.+]+\\*"')
    return times.sub(b"", message[0]), message[1]


async def test_what_changes_holds_after_a_second(
    app: Celery, center: TimeoutCenter, made_quickly: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = app.tasks["shop.add"]
    monkeypatch.setattr(sending, "FRESH", 0.5)

    for _ in range(4):
        await aio.send(add.s(1))
    assert made_quickly.called
    add.time_limit, add._exec_options = 77, None
    await asyncio.sleep(0.51)  # what was learned does not hold any more
    for _ in range(4):
        result = await aio.send(add.s(1))
        assert b'"timelimit":[77,null]' in stored(center, result.id)[0]
    await aio.aclose(app)


async def test_a_signature_has_options_of_its_own(app: Celery, center: TimeoutCenter) -> None:
    add = app.tasks["shop.add"]

    signature = add.signature((1,), {"y": 2}, countdown=60, queue="mail", immutable=True)
    for number in range(4):
        await aio.send(signature, task_id=f"first{number}", priority=3)
        signature.apply_async(task_id=f"other{number}", priority=3)
        a, b = stored(center, f"first{number}"), stored(center, f"other{number}")
        assert (a[0].replace(b"first%d" % number, b""), a[1]) == (
            b[0].replace(b"other%d" % number, b""),
            b[1],
        )
    await aio.aclose(app)


async def test_arguments_that_a_task_does_not_take_are_refused(app: Celery) -> None:
    urgent = app.tasks["shop.urgent"]

    for _ in range(4):
        await aio.send(urgent.s(1))
    with pytest.raises(TypeError, match="missing 1 required"):
        await aio.send(urgent.s())
    await aio.aclose(app)


async def test_signals_are_sent_and_may_change_the_message(
    app: Celery, center: TimeoutCenter, made_quickly: mock.Mock
) -> None:
    add = app.tasks["shop.add"]
    seen: list[tuple[str, str]] = []

    def before(sender: str, headers: dict[str, Any], **_: Any) -> None:
        seen.append(("before", headers["id"]))
        headers["trace"] = "t-1"

    def after(sender: str, headers: dict[str, Any], **_: Any) -> None:
        seen.append(("after", headers["id"]))

    for _ in range(3):
        await aio.send(add.s(1))
    quickly = made_quickly.call_count
    signals.before_task_publish.connect(before, weak=False)
    signals.after_task_publish.connect(after, weak=False)
    try:
        for number in range(3):
            await aio.send(add.s(1), task_id=f"t{number}")
    finally:
        signals.before_task_publish.disconnect(before)
        signals.after_task_publish.disconnect(after)
    assert made_quickly.call_count == quickly
    await aio.aclose(app)
    assert seen == [(when, f"t{n}") for n in range(3) for when in ("before", "after")]
    for number in range(3):
        assert b'"trace":"t-1"' in stored(center, f"t{number}")[0]


async def test_what_somebody_has_replaced_is_called(app: Celery, made_quickly: mock.Mock) -> None:
    add = app.tasks["shop.add"]
    called: list[Any] = []

    for _ in range(3):
        await aio.send(add.s(1))
    quickly = made_quickly.call_count
    original = add.apply_async
    with mock.patch.object(
        type(add), "apply_async", lambda self, *a, **k: called.append(a) or original(*a, **k)
    ):
        for _ in range(3):
            await aio.send(add.s(1))
    assert made_quickly.call_count == quickly
    await aio.aclose(app)
    assert len(called) == 3


async def test_chains_groups_and_chords(app: Celery, center: TimeoutCenter) -> None:
    add = app.tasks["shop.add"]

    result = await aio.send(chain(add.s(1), add.s(2), add.s(3)))
    assert result.parent.parent.id == center.scan("celery").messages[0].id
    center.queues.purge("celery")
    await aio.send(group(add.s(n) for n in range(5)))
    assert center.counts("celery").ready == 5
    center.queues.purge("celery")
    # The backend is disabled: Celery refuses a chord, which it does in a thread.
    with pytest.raises(NotImplementedError, match="backend"):
        await aio.send(chord([add.s(1), add.s(2)], add.s(3)))
    await aio.aclose(app)


async def test_operations_return_what_a_task_center_returns(
    app: Celery, center: TimeoutCenter
) -> None:
    add = app.tasks["shop.add"]

    result = await aio.send(add.s(1), countdown=3600)
    [found] = await aio.get(result.id, app=app)
    assert [found] == center.get(result.id)
    [moved] = await aio.reschedule(result.id, countdown=60, app=app)
    assert moved.moved and moved.time_us < found.time_us
    toc = aio.timeout_center(app)
    assert (await toc.task(found)).name == "shop.add"
    assert await toc.count(where=lambda task: task.name == "shop.add") == 1
    [gone] = await aio.cancel([result.id], app=app)
    assert gone.deleted
    assert await aio.get(result.id, app=app) == []
    await aio.aclose(app)


def test_the_current_app_is_used_unless_one_is_given(
    client: redis.Redis, server: Server | Cluster
) -> None:
    with make_app(server.toc_url) as app:
        app.set_current()

        async def use() -> None:
            result = await aio.send(app.tasks["shop.add"].s(), countdown=60)
            assert [one.id for one in await aio.get(result.id)] == [result.id]
            await aio.aclose()

        in_loop(use())


async def test_another_broker_is_refused() -> None:
    app = Celery("other", broker="memory://", set_as_current=False)

    @app.task(name="other.add", shared=False)
    def add() -> None: ...

    with pytest.raises(ConfigurationError, match="is not a timeout center"):
        await aio.send(add.s())


# -- the loop, and faults


async def test_many_sends_leave_the_loop_turning(app: Celery) -> None:
    add = app.tasks["shop.add"]

    async with watched():
        results = await asyncio.gather(*[aio.send(add.s(n), countdown=60) for n in range(1000)])
    assert len({one.id for one in results}) == 1000
    counts = await aio.timeout_center(app).counts("celery")
    assert counts.scheduled == 1000
    assert len(sender_of(app)._idle) <= LANES
    await aio.aclose(app)


async def test_the_loop_turns_while_the_server_stands_still(tmp_path: Path) -> None:
    with Server(tmp_path) as server, make_app(server.toc_url) as app:
        add = app.tasks["shop.add"]
        async with watched():
            with frozen(server):  # it has not even been connected to
                waiting = [asyncio.create_task(aio.send(add.s(n))) for n in range(50)]
                done, _ = await asyncio.wait(waiting, timeout=0.7)
                assert not done
            await asyncio.gather(*waiting)
        assert (await aio.timeout_center(app).counts("celery")).ready == 50
        await aio.aclose(app)


@pytest.mark.parametrize("known", [False, True])
async def test_a_server_that_is_away_for_a_moment_is_waited_for(proxied: Any, known: bool) -> None:
    app, proxy = proxied
    add = app.tasks["shop.add"]
    for _ in range(3 if known else 0):
        await aio.send(add.s(1))
    proxy.refuse()
    proxy.cut()
    async with watched():
        queue = "celery" if known else "other"
        waiting = asyncio.create_task(aio.send(add.s(2), task_id="once", queue=queue))
        await asyncio.sleep(0.1)
        proxy.accept()
        await waiting
    assert len(await aio.get("once", app=app)) == 1
    proxy.refuse()
    proxy.cut()
    with pytest.raises(OperationalError):
        await aio.send(add.s(3))
    proxy.accept()
    await aio.aclose(app)


async def test_a_reply_that_is_lost_does_not_send_twice(proxied: Any) -> None:
    app, proxy = proxied
    add = app.tasks["shop.add"]
    for _ in range(3):
        await aio.send(add.s(1))
    dropped = proxy.drop_replies(b"once")
    waiting = asyncio.create_task(aio.send(add.s(2), task_id="once"))
    while not dropped.is_set():
        await asyncio.sleep(0.01)
    proxy.cut()
    await waiting
    assert len(await aio.get("once", app=app)) == 1
    await aio.aclose(app)


def test_results_in_redis_do_not_block_the_loop(
    client: redis.Redis, server: Server | Cluster, single_server: Server
) -> None:
    async def send(app: Celery, proxy: Proxy) -> None:
        add = app.tasks["shop.add"]
        proxy.freeze()  # the server of the results
        async with watched():
            results = [await asyncio.wait_for(aio.send(add.s(n)), 10) for n in range(10)]
        proxy.thaw()
        app.backend.store_result(results[0].id, 7, "SUCCESS")
        assert await asyncio.to_thread(results[0].get, timeout=10) == 7
        results.clear()
        gc.collect()  # a result unsubscribes then: while there is a server to say it to
        await aio.aclose(app)

    with (
        Proxy(single_server.port) as proxy,
        make_app(server.toc_url, result_backend=proxy.url) as app,
    ):
        in_loop(send(app, proxy))
        app.backend.result_consumer.stop()
    kombu.pools.reset()


def test_loops_one_after_the_other(app: Celery, center: TimeoutCenter) -> None:
    add = app.tasks["shop.add"]

    async def send() -> None:
        await aio.send(add.s(1))
        await aio.aclose(app)

    for _ in range(3):
        in_loop(send())
    assert center.counts("celery").ready == 3


@pytest.mark.one_server("of sentinels")
def test_through_sentinels(tmp_path: Path) -> None:
    with Deployment(tmp_path, sentinels=2) as deployment, make_app(deployment.toc_url) as app:

        async def send() -> None:
            for number in range(5):
                await aio.send(app.tasks["shop.add"].s(number))
            counts = await aio.timeout_center(app).counts("celery")
            assert counts.ready == 5
            await aio.aclose(app)

        in_loop(send())
