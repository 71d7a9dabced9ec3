"""The outbox of an event loop: tasks belong to the transactions of SQLAlchemy's asyncio (X12)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Column, Integer, MetaData, Table, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.ext.asyncio import create_async_engine as create
from sqlalchemy.orm import DeclarativeBase

import celery_toc
from celery_toc import aio
from kombu_toc import AsyncTimeoutCenter, LibraryError, outbox
from kombu_toc.client.options import DatabaseURL
from kombu_toc.library import statuses
from kombu_toc.library.store import Store

from ..meta.test_readme import named
from ..support.library import shards_of

pytestmark = [
    pytest.mark.usefixtures("client"),
    # Of the drivers that are installed, psycopg alone can be awaited.
    pytest.mark.parametrize("engine", ["postgresql"], indirect=True, scope="session"),
]


@pytest.fixture
def url(new_url: Callable[[], str]) -> str:
    return new_url()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with shards_of([url], create=True) as shards:
        shards.databases[0].execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY)"))
        yield Store(shards)


@pytest.fixture
def app(server: Any, url: str) -> Iterator[Celery]:
    with Celery("shop", broker=server.toc_url, set_as_current=False) as made:
        made.conf.broker_transport_options = {"toc_library": url}

        @made.task(name="shop.expire", shared=False)
        def expire(order: int) -> None: ...

        yield made


@asynccontextmanager
async def opened(url: str, how: str) -> Any:
    made = create(DatabaseURL(url).reveal())
    try:
        if how == "connection":
            async with made.connect() as connection:
                yield connection
        elif how == "session":
            async with AsyncSession(made) as session:
                yield session
        else:
            sessions = async_scoped_session(async_sessionmaker(made), asyncio.current_task)
            yield sessions
            await sessions.remove()
    finally:
        await made.dispose()


async def arrives(center: Any, id: str) -> None:
    deadline = time.monotonic() + 30
    while not await center.get(id):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)  # a thread puts it


@pytest.mark.parametrize("how", ["connection", "session", "registry"])
async def test_what_is_awaited_is_sent_with_its_transaction(app, store, url, how):
    center = aio.timeout_center(app)
    async with opened(url, how) as connection:
        for order in (1, 2):
            with outbox(connection):
                await connection.execute(text(f"INSERT INTO orders VALUES ({order})"))
                signature = app.tasks["shop.expire"].s(order)
                await aio.send(signature, task_id=f"order-{order}", countdown=600)
            assert store.of_ids([f"order-{order}"]) == []  # for nobody else
            assert not await center.get(f"order-{order}")
            await (connection.rollback() if order == 1 else connection.commit())
    await arrives(center, "order-2")
    assert not await center.get("order-1")
    await aio.aclose(app)
    assert store.of_ids(["order-1"]) == []
    [row] = store.of_ids(["order-2"])
    assert row.place == statuses.IN_REDIS


async def test_the_example_of_the_page_commits_order_and_task(app, store, url):
    """docs/library.md"""

    class Base(DeclarativeBase): ...

    class Order(Base):
        __table__ = Table("orders", MetaData(), Column("id", Integer, primary_key=True))

    names = {**globals(), "Order": Order, "expire": app.tasks["shop.expire"]}
    exec(named("docs/library.md", "AsyncSession"), names)
    made = create(DatabaseURL(url).reveal())
    await names["place"](made)
    await made.dispose()
    await aio.aclose(app)
    [row] = store.shards.databases[0].read(text("SELECT id FROM orders"))
    assert row["id"] == 42
    assert len(celery_toc.timeout_center(app).library.find(task="shop.expire").records) == 1


async def test_a_center_of_a_loop_puts_after_the_commit(server, store, url):
    async with (
        AsyncTimeoutCenter.from_url(server.toc_url, toc_library=url) as center,
        opened(url, "session") as session,
    ):
        await center.queues.declare("mail")
        for end in (session.rollback, session.commit):
            with outbox(session):
                await center.put("mail", f"one-{end.__name__}", b"1", delay=60)
                await center.put_many("mail", [(f"many-{end.__name__}", b"2", time.time() + 60)])
            assert not await center.get(["one-commit", "many-commit"])
            await end()
        await arrives(center, "one-commit")
        await arrives(center, "many-commit")
        assert not await center.get(["one-rollback", "many-rollback"])


async def test_what_waits_for_the_loop_is_not_sent_and_says_how(app, store, url):
    task = app.tasks["shop.expire"]
    async with opened(url, "session") as session:
        with outbox(session), pytest.raises(LibraryError, match=r"send with celery_toc.aio"):
            task.apply_async((1,), task_id="order-1")

        def send(inner: Any) -> None:
            with outbox(inner):
                task.apply_async((2,), task_id="order-2", countdown=600)

        await session.run_sync(send)
        await session.commit()
    assert store.of_ids(["order-1"]) == []
    assert len(store.of_ids(["order-2"])) == 1
