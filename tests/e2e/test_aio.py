"""celery_toc.aio with a worker: what is sent from an event loop runs, and its results come."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from pytest_celery import CeleryBackendCluster

import kombu_toc
from celery_toc import aio

from ..support.cluster import Cluster
from ..support.loops import watched
from ..support.servers import Server
from ..support.tasks import make_app
from ..support.workers import Journal, StartWorkers


class Site:
    """A broker with a worker, and the app as who sends has it."""

    def __init__(self, app: Celery, url: str) -> None:
        self.app = app
        self.toc = kombu_toc.center_for(url)


@pytest.fixture(params=["server", pytest.param("cluster", marks=pytest.mark.nightly)])
def site(
    request: pytest.FixtureRequest,
    start_workers: StartWorkers,
    celery_backend_cluster: CeleryBackendCluster,
    journal: Journal,
) -> Iterator[Site]:
    broker: Server | Cluster = request.getfixturevalue(
        "single_server" if request.param == "server" else "cluster"
    )
    with broker.client() as client:
        client.flushdb() if request.param == "server" else client.flushall()
    start_workers(1, "-P", "threads", "-c", "4", broker=broker.toc_url)
    app = make_app(broker.toc_url, celery_backend_cluster[0].config()["url"])
    try:
        yield Site(app, broker.toc_url)
    finally:
        gc.collect()  # results unsubscribe now, not when the server is gone
        app.backend.result_consumer.stop()
        app.close()


async def got(*results: Any) -> list[Any]:
    """All in one thread: before 5.7, Celery's backend is for one at a time."""
    return await asyncio.to_thread(lambda: [result.get(timeout=20) for result in results])


@pytest.mark.alone
async def test_tasks_that_a_loop_sends_run_and_their_results_are_awaited(site: Site) -> None:
    add = site.app.tasks["e2e.add"]
    async with watched():
        sent = await asyncio.gather(*(aio.send(add.s(n, 1)) for n in range(50)))
        later = await aio.send(add.s(40, 2), countdown=0.5)
        assert await got(*sent, later) == [*(n + 1 for n in range(50)), 42]
    await aio.aclose(site.app)


@pytest.mark.versions
async def test_a_chain_a_group_and_a_chord_that_a_loop_sends_end_with_their_results(
    site: Site,
) -> None:
    """A group's members are awaited one by one: Celery has a backend for each thread."""
    add, mul, total = (site.app.tasks[f"e2e.{name}"] for name in ("add", "mul", "total"))
    linked, members, joined, mixed = await asyncio.gather(
        aio.send(chain(add.s(1, 2), add.s(3), mul.s(10))),
        aio.send(group(add.s(n, n) for n in range(5))),
        aio.send(chord([add.s(n, n) for n in range(5)], total.s())),
        aio.send(chain(group(add.s(n, n) for n in range(3)), total.s()), countdown=0.2),
    )
    assert await got(linked, joined, mixed) == [60, 20, 6]
    assert await got(*members.results) == [0, 2, 4, 6, 8]
    await aio.aclose(site.app)


@pytest.mark.versions
async def test_what_a_loop_cancels_never_runs_and_what_it_moves_runs_then(
    site: Site, journal: Journal
) -> None:
    note = site.app.tasks["e2e.note"]
    cancelled = await aio.send(note.s("cancelled", 0), countdown=4, queue="urgent")
    moved = await aio.send(note.s("moved", 0), countdown=3600)
    assert [one.deleted for one in await aio.cancel(cancelled.id, app=site.app)] == [True]
    assert [one.moved for one in await aio.reschedule(moved.id, countdown=4.5, app=site.app)]
    await asyncio.to_thread(journal.wait_for, "moved", 1)
    assert await aio.get(cancelled.id, app=site.app) == []
    await aio.aclose(site.app)
    assert journal.entries("cancelled") == []
