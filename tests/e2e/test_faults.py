"""K7, X5: whatever happens between a worker and its server, it resumes, loses nothing and runs
nothing twice; in every pool."""

from __future__ import annotations

import itertools
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import redis
from celery import Celery

from ..integration.inspection import slot_keys
from ..proxy import Proxy
from ..servers import Server
from .conftest import POOLS, Journal
from .nodes import Worker
from .tasks import make_app

StartWorkers = Callable[..., list[Worker]]

#: Seconds without a reply after which a connection is taken for broken, for the tests' sake.
PATIENCE = 1.5

_numbers = itertools.count(1)


class Site:
    """A server that takes faults, a proxy before it, and one worker behind the proxy."""

    def __init__(self, server: Server, proxy: Proxy, worker: Worker, app: Celery) -> None:
        self.server = server
        self.proxy = proxy
        self.worker = worker
        self.app = app
        self.client = server.client()

    def restart(self) -> None:
        self.server.stop()
        time.sleep(0.5)  # the worker finds nobody there
        self.server.start()


@pytest.fixture(scope="module", params=list(POOLS))
def site(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    _start: Callable[..., Worker],
) -> Iterator[Site]:
    options = ["--appendonly", "yes", "--appendfsync", "always"]
    options += ["--repl-diskless-sync-delay", "0"]
    server = Server(tmp_path_factory.mktemp("faulty"), *options).start()
    with Proxy(server.port) as proxy:
        worker = _start(
            *POOLS[request.param],
            broker=proxy.toc_url,
            broker_transport_options={"socket_timeout": PATIENCE, "visibility_timeout": 20},
            broker_connection_max_retries=None,
        )
        worker.ready()
        app = make_app(server.toc_url, "disabled://")
        yield Site(server, proxy, worker, app)
        worker.teardown()
        app.close()
    server.stop()


def kill_clients(site: Site) -> None:
    site.client.client_kill_filter(_type="normal", skipme=True)


def cut(site: Site) -> None:
    site.proxy.cut()


def freeze(site: Site) -> None:
    """A partition without a reset, longer than anybody waits for a reply."""
    site.proxy.freeze()
    time.sleep(2 * PATIENCE)  # the fault takes that long
    site.proxy.thaw()


def cut_in_a_reply(site: Site) -> None:
    site.proxy.cut_replies_after(7)


def freeze_in_a_reply(site: Site) -> None:
    site.proxy.freeze_replies_after(7)


def stall(site: Site) -> None:
    """The server does nothing, longer than anybody waits."""
    site.proxy.freeze()
    time.sleep(PATIENCE / 2)  # shorter than anybody waits
    site.proxy.thaw()


def script_flush(site: Site) -> None:
    site.client.script_flush()


def restart(site: Site) -> None:
    site.restart()


def loading(site: Site) -> None:
    """A restart after which the server takes a while to load its data."""
    site.client.config_set("appendonly", "no")
    with site.client.pipeline(transaction=False) as pipe:
        for i in range(2000):
            pipe.set(f"load-{i}", "x", ex=600)
        pipe.execute()
    site.client.save()
    with _extra_options(site.server, "--key-load-delay", "1000", "--appendonly", "no"):
        site.server.stop()
        site.server.launch()
        deadline = time.monotonic() + 20
        while not _says(site.client, "LOADING"):
            assert time.monotonic() < deadline
        site.server.wait()
    site.client.config_set("appendonly", "yes")


def read_only(site: Site) -> None:
    """It is a replica for a while, as after a failover."""
    with _replica_of_nobody(site.client):
        assert _says(site.client, "READONLY")
        time.sleep(2)  # the worker meets the error


def misconf(site: Site) -> None:
    """It cannot save its snapshots, and therefore refuses to write."""
    client, directory = site.client, site.server.directory
    hidden = directory.with_name(directory.name + "-hidden")
    client.config_set("appendonly", "no")
    client.config_set("save", "1 1")
    directory.rename(hidden)
    client.set("changed", 1, ex=60)
    try:
        deadline = time.monotonic() + 20
        while not _says(client, "MISCONF"):
            assert time.monotonic() < deadline
            time.sleep(0.1)  # it saves in the background
        time.sleep(2)  # the worker meets the error
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        hidden.rename(directory)
        client.config_set("save", "")
        client.config_set("stop-writes-on-bgsave-error", "no")
        client.config_set("appendonly", "yes")


def out_of_memory(site: Site) -> None:
    site.client.config_set("maxmemory", "1")
    assert _says(site.client, "OOM")
    time.sleep(2)  # the worker meets the error
    kill_clients(site)
    time.sleep(1)  # and connects anew
    site.client.config_set("maxmemory", "0")


def too_few_replicas(site: Site) -> None:
    site.client.config_set("min-replicas-to-write", "1")
    assert _says(site.client, "NOREPLICAS")
    time.sleep(2)  # the worker meets the error
    kill_clients(site)
    time.sleep(1)  # and connects anew
    site.client.config_set("min-replicas-to-write", "0")


def _says(client: redis.Redis, word: str) -> bool:
    try:
        client.set("toc-test", "x", ex=60)
    except redis.exceptions.RedisError as exc:
        return word in str(exc) or word in type(exc).__name__.upper()
    return False


@contextmanager
def _replica_of_nobody(client: redis.Redis) -> Iterator[None]:
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        yield
    finally:
        client.execute_command("REPLICAOF", "NO", "ONE")


@contextmanager
def _extra_options(server: Server, *options: str) -> Iterator[None]:
    before, server.options = server.options, (*server.options, *options)
    try:
        yield
    finally:
        server.options = before


FAULTS = [
    kill_clients,
    cut,
    cut_in_a_reply,
    freeze_in_a_reply,
    freeze,
    stall,
    script_flush,
    restart,
    loading,
    read_only,
    misconf,
    out_of_memory,
    too_few_replicas,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_goes_on_after(
    site: Site, journal: Journal, fault: Callable[[Site], None]
) -> None:
    number = next(_numbers)
    late_ack, note = site.app.tasks["e2e.late_ack"], site.app.tasks["e2e.note"]
    late_ack.delay(f"executing-{number}", 2.5)
    journal.wait_for(f"executing-{number}", 1)
    for i in range(5):
        note.apply_async((f"waiting-{number}-{i}",), countdown=1.5)
    fault(site)
    note.delay(f"afterwards-{number}")
    journal.wait_for(f"afterwards-{number}", 1)
    journal.wait_for(f"waiting-{number}-", 5)
    journal.wait_for(f"executing-{number}-done", 1)
    deadline = time.monotonic() + 10
    while slot_keys(site.client):
        assert time.monotonic() < deadline, slot_keys(site.client)
        time.sleep(0.05)  # the acknowledgements are on their way
    runs = Counter(entry["name"] for entry in journal.entries())
    assert set(runs.values()) == {1}, runs
