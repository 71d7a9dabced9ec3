"""K7, X5: whatever happens between a worker and its server, it resumes, loses nothing and runs
nothing twice; in every pool."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery

from ..support.inspection import slot_keys
from ..support.nodes import Worker
from ..support.proxy import Proxy
from ..support.servers import Server
from ..support.tasks import make_app
from ..support.workers import LOOPS, POOLS, Journal, wait_until

#: What they share is started once, in one process of a run.
pytestmark = pytest.mark.xdist_group("faults")

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


@pytest.fixture(scope="module")
def site(
    pool: str, tmp_path_factory: pytest.TempPathFactory, start_worker: Callable[..., Worker]
) -> Iterator[Site]:
    options = ["--appendonly", "yes", "--appendfsync", "always"]
    server = Server(tmp_path_factory.mktemp("faulty"), *options).start()
    with Proxy(server.port) as proxy:
        worker = start_worker(
            *POOLS[pool],
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


def cuts(site: Site) -> None:
    """Connections that end in every way, one after the other."""
    kill_clients(site)
    time.sleep(0.7)  # the worker connects again
    site.proxy.cut()
    time.sleep(0.7)  # and again
    site.proxy.cut_replies_after(7)
    site.client.script_flush()


def freeze(site: Site) -> None:
    """A partition without a reset, longer than anybody waits for a reply."""
    site.proxy.freeze()
    time.sleep(2 * PATIENCE)  # the fault takes that long
    site.proxy.thaw()


def freeze_in_a_reply(site: Site) -> None:
    site.proxy.freeze_replies_after(7)


def stall(site: Site) -> None:
    """The server does nothing, longer than anybody waits."""
    site.proxy.freeze()
    time.sleep(PATIENCE / 2)  # shorter than anybody waits
    site.proxy.thaw()


def restart(site: Site) -> None:
    site.restart()


def loading(site: Site) -> None:
    """A restart after which the server takes a while to load its data."""
    with site.client.pipeline(transaction=False) as pipe:
        for i in range(6000):
            pipe.set(f"load-{i}", "x", ex=600)
        pipe.execute()
    before = site.server.options
    site.server.options = (*before, "--key-load-delay", "500")  # microseconds
    try:
        site.server.stop()
        site.server.launch()
        wait_until(lambda: _refuses(site.client, redis.exceptions.BusyLoadingError))
        site.server.wait()
    finally:
        site.server.options = before


def read_only(site: Site) -> None:
    """It is a replica for a while, as after a failover."""
    site.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        assert _refuses(site.client, redis.exceptions.ReadOnlyError)
        _let_the_worker_meet_it(site)
    finally:
        site.client.execute_command("REPLICAOF", "NO", "ONE")


def misconf(site: Site) -> None:
    """It cannot save its snapshots, and therefore refuses to write."""
    dump = site.server.directory / "dump.rdb"
    dump.unlink(missing_ok=True)
    dump.mkdir()
    site.client.config_set("save", "1 1")
    try:
        site.client.set("changed", 1, ex=60)
        wait_until(lambda: _refuses(site.client, redis.exceptions.ResponseError, "MISCONF"))
        _let_the_worker_meet_it(site)
    finally:
        site.client.config_set("save", "")
        dump.rmdir()


def out_of_memory(site: Site) -> None:
    site.client.config_set("maxmemory", "1")
    try:
        assert _refuses(site.client, redis.exceptions.OutOfMemoryError)
        _let_the_worker_meet_it(site)
    finally:
        site.client.config_set("maxmemory", "0")


def too_few_replicas(site: Site) -> None:
    site.client.config_set("min-replicas-to-write", "1")
    try:
        assert _refuses(site.client, redis.exceptions.ResponseError, "NOREPLICAS")
        _let_the_worker_meet_it(site)
    finally:
        site.client.config_set("min-replicas-to-write", "0")


def _let_the_worker_meet_it(site: Site) -> None:
    time.sleep(2)  # so that its acknowledgement and its looks into the slots are refused
    kill_clients(site)
    time.sleep(1)  # and so that it is refused while it connects


def _refuses(client: redis.Redis, error: type[Exception], text: str = "") -> bool:
    try:
        client.set("toc-test", "x", ex=60)
    except error as exc:
        return text in str(exc)
    except redis.exceptions.RedisError:
        return False
    return False


def _when(pool: str, fault: Callable[[Site], None]) -> Any:
    """By day: cuts in three pools, what is shorter than anybody waits in none."""
    if fault is cuts and pool in ("solo", "gevent"):
        return pytest.mark.every_pool
    return pytest.mark.nightly if fault is stall else ()


CONNECTION_FAULTS = [
    pytest.param(pool, fault, marks=_when(pool, fault))
    for pool in POOLS
    for fault in (cuts, freeze_in_a_reply, freeze, stall, restart)
]
REFUSALS = [
    *(loading, read_only, out_of_memory),
    *(pytest.param(fault, marks=pytest.mark.nightly) for fault in (misconf, too_few_replicas)),
]


@pytest.mark.parametrize(("pool", "fault"), CONNECTION_FAULTS, indirect=["pool"], scope="module")
def test_a_worker_goes_on_after(
    site: Site, journal: Journal, fault: Callable[[Site], None]
) -> None:
    go_on_after(fault, site, journal)


@pytest.mark.parametrize("pool", LOOPS, indirect=True, scope="module")
@pytest.mark.parametrize("fault", REFUSALS)
def test_a_worker_goes_on_after_a_server_that_was(
    site: Site, journal: Journal, fault: Callable[[Site], None]
) -> None:
    go_on_after(fault, site, journal)


def go_on_after(fault: Callable[[Site], None], site: Site, journal: Journal) -> None:
    """A task that is executing goes on and is not run again; what waits runs on time, once."""
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
    wait_until(lambda: not slot_keys(site.client), what=lambda: slot_keys(site.client))
    runs = journal.runs()
    assert set(runs.values()) == {1}, runs
