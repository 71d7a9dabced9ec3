"""Fixtures that every kind of test uses."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import celery._state  # what Celery gains is installed with the first transport
import hypothesis
import kombu.pools
import pytest
import redis
from kombu import Connection

from kombu_toc import TimeoutCenter
from kombu_toc.consumer import lease_keeper

from .cluster import Cluster
from .servers import Server

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell script: programs started by tests would ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Once in a process, before a test switches anything off in its environment.
Connection("toc+redis://").transport  # noqa: B018 - made here


# How long an example takes says nothing on a machine that does other things.
hypothesis.settings.register_profile("toc", deadline=None)
hypothesis.settings.load_profile("toc")

#: Whether tests that are for one server as well as for a cluster run on the latter.
ON_CLUSTER = os.environ.get("TOC_TEST_CLUSTER", "") not in ("", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if re.search("0x[0-9a-f]{8}", item.nodeid):
            raise pytest.UsageError(
                f"{item.nodeid}: its name holds an address, so each process of a run would collect"
                " another test: give the parameter an id"
            )
        mark = item.get_closest_marker("one_server")
        if mark is not None and ON_CLUSTER:
            item.add_marker(pytest.mark.skip(reason=f"of one server: {mark.args[0]}"))


@pytest.fixture(autouse=True)
def tasks_of_the_apps_that_a_test_makes_end_with_it() -> Iterator[None]:
    """Celery gives a task of one app to every app that is made later in the process."""
    before = set(celery._state._on_app_finalizers)
    yield
    for added in celery._state._on_app_finalizers - before:
        if added.__module__ == "celery.app.base":  # others are Celery's own
            celery._state._on_app_finalizers.discard(added)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup`, each test goes to whichever process is free, in their order."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from .scheduling import Scheduling

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Server | Cluster:
    """A real server, shared by the whole run; a cluster if TOC_TEST_CLUSTER is set."""
    return request.getfixturevalue("cluster" if ON_CLUSTER else "single_server")


@pytest.fixture(scope="session")
def single_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server, and never a cluster: for results, and for what is of one server."""
    made = Server(tmp_path_factory.mktemp("server")).start()
    yield made
    # Celery's results unsubscribe when they are collected: while there is a server to say it to.
    gc.collect()
    made.stop()


@pytest.fixture
def client(server: Server | Cluster) -> Iterator[redis.Redis]:
    """A client of the shared server, which is empty."""
    with server.client() as made:
        made.flushall()
        # Kombu keeps connections for later apps with the same URL: these would take for declared
        # what the tests before have declared.
        kombu.pools.reset()
        # A process looks for what has expired when the time of a queue that it used is over. What
        # earlier tests used must not have it take, just then, what this one is to take.
        for keeper in list(lease_keeper._heartbeats.values()):
            keeper._holdings.expiries.take(math.inf)
        yield made


@pytest.fixture
def center(client: redis.Redis) -> TimeoutCenter:
    """A timeout center on the shared server, which is empty; it knows that this is there all the
    time, and rolls a lease back when it has ended."""
    return TimeoutCenter(client, grace=0)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real Redis Cluster of three primaries, shared by the whole run."""
    made = Cluster(tmp_path_factory.mktemp("cluster")).start()
    yield made
    gc.collect()
    made.stop()


@pytest.fixture
def start_cluster(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Cluster]]:
    """Start clusters for one test, which may break or change them; arguments as Cluster's."""
    with contextlib.ExitStack() as stack:

        def start(*options: str, **how: Any) -> Cluster:
            made = Cluster(tmp_path_factory.mktemp("cluster"), *options, **how)
            stack.callback(made.stop)
            return made.start()

        yield start
