"""The task library in an event loop: what is sent, put and popped there is recorded (X12)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from celery import Celery

import celery_toc
from celery_toc import aio
from kombu_toc import AsyncTimeoutCenter, ConfigurationError, LibraryError, TimeoutCenter
from kombu_toc.library.putting import Putter
from kombu_toc.library.store import Store

from ..support.library import status_of
from ..support.loops import watched

pytestmark = pytest.mark.usefixtures("client")


@pytest.fixture
def app(app: Celery, options: dict[str, Any]) -> Celery:
    app.conf.broker_transport_options = options
    return app


def remind(app: Celery, order: int, **options: Any) -> Any:
    headers = celery_toc.biz("order", order)
    return aio.send(app.tasks["shop.remind"].s(order), headers=headers, **options)


async def test_what_is_sent_from_a_loop_has_a_row_and_comes_back(app, client, store, center):
    sent = await asyncio.gather(*(remind(app, n, countdown=600) for n in range(30)))
    await aio.aclose(app)
    ids = [one.id for one in sent]
    rows = {row.id: row for row in store.of_ids(ids)}
    assert rows.keys() == set(ids)
    assert {row.biz_id for row in rows.values()} == {str(n) for n in range(30)}
    [found] = center.get(ids[3])
    assert found.body == rows[ids[3]].body
    client.flushall()
    assert celery_toc.timeout_center(app).library.rebuild().put == 30


async def test_the_library_is_asked_and_told_from_a_loop(app, store):
    one, two = [await remind(app, n, countdown=600) for n in (1, 2)]
    library = aio.timeout_center(app).library
    page = await library.find(biz_id="1")
    assert [record.id for record in page.records] == [one.id]
    await aio.cancel(one.id, app=app)
    await aio.reschedule(two.id, countdown=7200, app=app)
    assert [record.status for record in await library.history(one.id)] == ["cancelled"]
    assert [found.deleted for found in await library.cancel(biz_id="2")] == [True]
    assert await library.counts() == {"cancelled": 2, "not put": 0}
    await aio.aclose(app)


async def test_without_a_row_nothing_is_sent_and_the_loop_goes_on_meanwhile(
    app, store, monkeypatch
):
    def slow(*_: Any) -> Any:
        time.sleep(1.0)  # a database that takes its time
        raise LibraryError("gone")

    await remind(app, 1, countdown=600)
    monkeypatch.setattr(Store, "insert", slow)
    async with watched():
        with pytest.raises(LibraryError):
            await remind(app, 2, countdown=600)
    await aio.aclose(app)
    assert store.count()["pending"] == 1


async def test_a_center_of_a_loop_records_what_it_puts_and_pops(server, options, client, store):
    async with AsyncTimeoutCenter.from_url(server.toc_url, **options) as center:
        await center.put_many("mail", [(f"order-{n}", b"%d" % n) for n in range(20)])
        assert await center.library.counts() == {"pending": 20, "not put": 0}
        async with center.consume("mail", limit=5, idle=0.2) as messages:
            async for message in messages:
                if message.id == "order-3":
                    await message.reject(requeue=False, error="no")
        recorder = center.center.recorder.recorder
        await asyncio.to_thread(recorder._inner.flush)
        assert await center.library.counts() == {"done": 19, "dead": 1, "not put": 0}
        await center.put("mail", "later", b"x", delay=600)
    assert status_of(store, "order-3") == ["dead"]
    client.flushall()


async def test_a_guarded_queue_gives_a_loop_nothing_that_has_ended(
    server, options, center: TimeoutCenter, store
):
    async with AsyncTimeoutCenter.from_url(server.toc_url, **options) as mine:
        await mine.queues.declare("mail", guard=True)
        await mine.put("mail", "order-1", b"one")
        rows = store.of_ids(["order-1"])
        await mine.ack((await mine.pop("mail")).messages)
        await asyncio.to_thread(mine.center.recorder.recorder._inner.flush)
        Putter(store, center).put(rows)
        assert (await mine.pop("mail", wait=0.2)).messages == []
        assert sum(center.counts("mail")) == 0


def test_without_a_library_a_center_of_a_loop_has_none_to_ask(server):
    center = AsyncTimeoutCenter.from_url(server.toc_url)
    with pytest.raises(ConfigurationError, match=r"from_url"):
        _ = center.library
