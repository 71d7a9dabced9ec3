"""``celery_setup`` and its parts, as pytest-celery names them, on local processes."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import redis
from celery import Celery
from celery.result import AsyncResult
from pytest_celery import (
    CeleryBackendCluster,
    CeleryBrokerCluster,
    CeleryTestSetup,
    CeleryWorkerCluster,
)

import kombu_toc

from .cluster import Cluster
from .nodes import Backend, Broker, ServerProcess, Worker, WorkerProcess
from .servers import Server
from .tasks import make_app
from .waiting import wait_until

POOLS = {
    "prefork": ("-P", "prefork", "-c", "2"),
    "threads": ("-P", "threads", "-c", "4"),
    "solo": ("-P", "solo"),
    "gevent": ("-P", "gevent", "-c", "20"),
    "eventlet": ("-P", "eventlet", "-c", "20"),
}

#: Options of workers that need not wait for each other, and of those that start often: without
#: what costs a second each time.
ALONE = ("--without-mingle", "--without-gossip")
QUICK = (*ALONE, "--without-heartbeat")

#: All pools, for what each does in a way of its own: by day in prefork and solo.
EACH_POOL = [
    pytest.param(name, marks=pytest.mark.every_pool) if name == "solo" else name for name in POOLS
]

#: One pool of each way in which a worker asks the broker: with Kombu's event loop (prefork,
#: threads, solo), or blocking, in patched threads (gevent, eventlet). Enough for what depends on
#: the broker alone. TOC_TEST_ALL=1 runs all. By day it is prefork that runs (tests/conftest.py).
LOOPS = list(POOLS) if os.environ.get("TOC_TEST_ALL") else ["prefork", "gevent"]

#: The same for what was looked at with Kombu's event loop only.
EVENT_LOOP = ["prefork", "threads"] if os.environ.get("TOC_TEST_ALL") else ["prefork"]


def stop_when_done(workers: Iterable[Worker], done: Callable[[], bool]) -> None:
    """Stop workers as soon as the broker has nothing more for them: what has not run twice by
    then never will.

    done: whether it has nothing; asked once more afterwards, for a worker that stops ends what it
        has begun, and gives back the rest
    """
    wait_until(done)
    for worker in workers:
        worker.teardown()
    assert done()


class Journal:
    """What tasks have written down."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        #: what was read: many ask again and again
        self._read: list[dict[str, Any]] = []

    def entries(self, prefix: str = "") -> list[dict[str, Any]]:
        self._read += map(json.loads, self._client.lrange("log", len(self._read), -1))
        return [entry for entry in self._read if entry["name"].startswith(prefix)]

    def runs(self, prefix: str = "") -> Counter[str]:
        """How often each name was written down."""
        return Counter(entry["name"] for entry in self.entries(prefix))

    def wait_for(self, prefix: str, number: int, timeout: float = 30) -> list[dict[str, Any]]:
        """The entries of that prefix as soon as there are so many."""
        deadline = time.monotonic() + timeout
        while len(found := self.entries(prefix)) < number:
            assert time.monotonic() < deadline, f"{len(found)} of {number} {prefix!r}: {found}"
            time.sleep(0.02)  # the tasks run in other processes
        return found


@pytest.fixture(scope="session")
def celery_broker_cluster(server: Server | Cluster) -> CeleryBrokerCluster:
    """The timeout center: database 0 of the shared server, or the shared cluster."""
    return CeleryBrokerCluster(Broker(ServerProcess(server, server.toc_url)))


@pytest.fixture(scope="session")
def celery_backend_cluster(single_server: Server) -> CeleryBackendCluster:
    """Results, in database 1: Celery has no backend for a cluster."""
    url = single_server.url.removesuffix("/0") + "/1"
    return CeleryBackendCluster(Backend(ServerProcess(single_server, url)))


@pytest.fixture(scope="session")
def log_url(single_server: Server) -> Iterator[str]:
    """What tasks write down, in database 2."""
    url = single_server.url.removesuffix("/0") + "/2"
    os.environ["E2E_LOG"] = url
    yield url
    os.environ.pop("E2E_LOG", None)


@pytest.fixture
def journal(single_server: Server, log_url: str) -> Iterator[Journal]:
    with single_server.client(2) as client:
        client.flushdb()
        yield Journal(client)


StartWorkers = Callable[..., list[Worker]]


@pytest.fixture(scope="session")
def start_worker(
    tmp_path_factory: pytest.TempPathFactory,
    celery_broker_cluster: CeleryBrokerCluster,
    celery_backend_cluster: CeleryBackendCluster,
    log_url: str,
) -> Callable[..., Worker]:
    def start(
        *options: str,
        broker: str | None = None,
        backend: str | None = None,
        skew: float | None = None,
        execute: bool = False,
        **settings: Any,
    ) -> Worker:
        process = WorkerProcess(
            tmp_path_factory.mktemp("worker"),
            broker or celery_broker_cluster[0].config()["url"],
            backend or celery_backend_cluster[0].config()["url"],
            log_url,
            *options,
            settings=settings,
            skew=skew,
            execute=execute,
        )
        return Worker(process.start(), None)

    return start


@pytest.fixture
def start_workers(
    start_worker: Callable[..., Worker], client: redis.Redis
) -> Iterator[Callable[..., list[Worker]]]:
    """Start workers for one test, on an empty broker: options and settings as a worker's.

    mingle: whether it asks the others first what they know, which takes a second
    """
    with contextlib.ExitStack() as stack:
        started: list[Worker] = []

        def stop_all() -> None:
            # Each takes two seconds to stop, and has what it needs for a quarter of one: nearly
            # all of it Celery's and billiard's looks, once a second, whether to. How workers stop
            # is tested by tests that stop them. TOC_TEST_ALL=1 stops all.
            if not os.environ.get("TOC_TEST_ALL"):
                for worker in started:
                    worker.container.end()
                return
            for worker in started:
                worker.container.ask_to_stop()
            for worker in started:
                worker.teardown()

        stack.callback(stop_all)

        def start(
            number: int, *options: str, mingle: bool = False, **settings: Any
        ) -> list[Worker]:
            if not (mingle or "--without-mingle" in options):
                options = (*options, "--without-mingle")
            workers = [start_worker(*options, **settings) for _ in range(number)]
            started.extend(workers)
            for worker in workers:
                worker.ready()
            return workers

        yield start


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in POOLS],
)
def pool(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def celery_worker_cluster(
    start_worker: Callable[..., Worker], server: Server | Cluster, pool: str
) -> Iterator[CeleryWorkerCluster]:
    """One worker, in the pool that the test is for; shared by the tests of a module. Its start is
    that of a user's worker."""
    with server.client() as client:
        client.flushall()
    worker = start_worker(*POOLS[pool], execute=True)
    worker.ready()
    yield CeleryWorkerCluster(worker)
    worker.teardown()


@pytest.fixture
def celery_setup_app(
    celery_broker_cluster: CeleryBrokerCluster,
    celery_backend_cluster: CeleryBackendCluster,
    journal: Journal,
) -> Iterator[Celery]:
    """The app as a producer has it; nothing of kombu_toc is imported for it."""
    with _app(celery_broker_cluster, celery_backend_cluster) as app:
        yield app


@contextlib.contextmanager
def _app(broker: CeleryBrokerCluster, backend: CeleryBackendCluster) -> Iterator[Celery]:
    app = make_app(broker[0].config()["url"], backend[0].config()["url"])
    app.set_default()
    try:
        yield app
    finally:
        gc.collect()  # results that are not needed any more unsubscribe now, not after the server
        app.backend.result_consumer.stop()
        app.close()


@pytest.fixture
def app(celery_setup_app: Celery) -> Celery:
    """The app, for tests that start workers of their own."""
    return celery_setup_app


@pytest.fixture
def toc(server: Server | Cluster) -> kombu_toc.TimeoutCenter:
    """The timeout center of the broker."""
    return kombu_toc.center_for(server.toc_url)


class Live(NamedTuple):
    """What a test of workers works with, on an empty broker."""

    start_workers: StartWorkers
    app: Celery  #: as a producer has it
    journal: Journal
    toc: kombu_toc.TimeoutCenter
    client: redis.Redis
    server: Server

    def begin(self, task: str, name: str, *args: Any, **options: Any) -> AsyncResult:
        """Send a task of tests/support/tasks.py that writes down its name, and return when it has
        begun. options: as apply_async has them"""
        sent = self.app.tasks[f"e2e.{task}"].apply_async((name, *args), **options)
        self.journal.wait_for(name, 1)
        return sent

    def fill(self, task: str, number: int, prefix: str, *args: Any, **options: Any) -> None:
        """Send so many of these tasks, which write down the prefix and their number."""
        for one in range(number):
            self.app.tasks[f"e2e.{task}"].apply_async((f"{prefix}{one}", *args), **options)


@pytest.fixture
def live(request: pytest.FixtureRequest) -> Live:
    return Live(*map(request.getfixturevalue, Live._fields))


def environment_of(app: Celery) -> dict[str, str]:
    """What tells another process of the app."""
    return {"E2E_BROKER": app.conf.broker_url, "E2E_BACKEND": app.conf.result_backend}


@pytest.fixture
def brisk(server: Server | Cluster) -> kombu_toc.TimeoutCenter:
    """The same, for short leases: it rolls back what has ended when it has watched for two
    seconds."""
    return kombu_toc.center_for(server.toc_url, visibility_timeout=1)


@pytest.fixture
def setup(celery_setup: CeleryTestSetup) -> CeleryTestSetup:
    """pytest-celery's setup; short, because nearly every test asks for it."""
    return celery_setup
