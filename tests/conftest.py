"""Fixtures that every kind of test uses."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import celery._state  # what Celery gains is installed with the first transport
import hypothesis
import kombu.pools
import pytest
import redis
from kombu import Connection

from kombu_toc import TimeoutCenter
from kombu_toc.consumer import lease_keeper

from .support import databases, nursery
from .support.cluster import Cluster
from .support.estimate import Estimate
from .support.run import memory
from .support.scheduling import Scheduling
from .support.servers import Server

pytest_plugins = ["tests.support.fixtures", "tests.support.loops"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell script: programs started by tests would ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

nursery.keep_the_version_of_redis()

# Once in a process, before a test switches anything off in its environment.
Connection("toc+redis://").transport  # noqa: B018 - made here


#: Whether tests that are for one server as well as for a cluster run on the latter.
ON_CLUSTER = os.environ.get("TOC_TEST_CLUSTER", "") not in ("", "0")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly",
        action="store_true",
        help="run also what is dear and guarded by a test of the day (nightly)",
    )
    parser.addoption(
        "--require-namespaces",
        action="store_true",
        help="fail, instead of skipping, where this machine has no network namespaces",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m versions`, cluster or alone, a file without such a mark is not even imported."""
    wanted = config.option.markexpr
    if wanted not in ("versions", "cluster", "alone") or collection_path.suffix != ".py":
        return None
    return f"mark.{wanted}" not in collection_path.read_text() or None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected is there to the end. To look through it for garbage takes a
    fifth of a second, and many tests ask for such a look."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # How a pool is looked into is held by tests/meta/test_compat.py for each of them.
    prefork = config.option.markexpr == "versions"
    for item in items:
        if re.search("0x[0-9a-f]{8}", item.nodeid):
            raise pytest.UsageError(
                f"{item.nodeid}: its name holds an address, so each process of a run would collect"
                " another test: give the parameter an id"
            )
        mark = item.get_closest_marker("one_server")
        if mark is not None and ON_CLUSTER:
            item.add_marker(pytest.mark.skip(reason=f"of one server: {mark.args[0]}"))
        if _another_pool(item) and (prefork or item.get_closest_marker("every_pool") is None):
            item.add_marker("nightly")  # its guard is prefork's
    night = [item for item in items if item.get_closest_marker("nightly") is not None]
    if not any("::" in argument for argument in config.args):  # whole files
        _check_guards(items, night)
    if night and not config.getoption("nightly"):
        items[:] = [item for item in items if item not in set(night)]
        config.hook.pytest_deselected(items=night)


def _another_pool(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("pool", "prefork") != "prefork"


def _check_guards(items: list[pytest.Item], night: list[pytest.Item]) -> None:
    """Each names a test of the day, or has cases that run by day."""
    files = {item.nodeid.partition("::")[0] for item in items}
    day = {item.nodeid for item in items if item.get_closest_marker("nightly") is None}
    day |= {nodeid.partition("[")[0] for nodeid in day}
    for item in night:
        own = item.nodeid.partition("[")[0]
        guard = item.get_closest_marker("nightly").kwargs.get("guarded_by", own)
        if guard.partition("::")[0] in files and guard not in day:
            raise pytest.UsageError(f"{item.nodeid}: its guard {guard} is no test of the day")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of the task library run on SQLite, and at night on PostgreSQL as well; those marked
    `every_engine` run on all three."""
    named = (mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "engine" not in metafunc.fixturenames or any("engine" in names for names in named):
        return
    names = ["sqlite"]
    if metafunc.definition.get_closest_marker("every_engine"):
        names = list(databases.ENGINES)
    elif metafunc.config.getoption("nightly", False):
        names.append("postgresql")
    metafunc.parametrize("engine", names, indirect=True, scope="session")


@pytest.hookimpl(trylast=True)  # pytest's cache is there
def pytest_configure(config: pytest.Config) -> None:
    # How long an example takes says nothing on a machine that does other things.
    examples = 100 if config.getoption("nightly", False) else 40
    hypothesis.settings.register_profile("toc", deadline=None, max_examples=examples)
    hypothesis.settings.load_profile("toc")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Estimate(config))
    # For what all processes of a run share, and other users must read. ./run-tests has made one.
    if not os.environ.get("TOC_TEST_RUN"):
        folder = tempfile.mkdtemp(prefix="toc-tests-", dir=memory())
        os.chmod(folder, 0o755)
        os.environ["TOC_TEST_RUN"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.add_cleanup(lambda: os.environ.pop("TOC_TEST_RUN"))


def pytest_unconfigure(config: pytest.Config) -> None:
    nursery.close_all()
    if not hasattr(config, "workerinput"):
        databases.stop_all(Path(os.environ["TOC_TEST_RUN"]))


@pytest.fixture(autouse=True)
def what_a_test_makes_ends_with_it() -> Iterator[None]:
    """Celery gives a task of one app to every app that is made later in the process. A task library
    that a test has opened would look after the shared server in the tests that follow."""
    before = set(celery._state._on_app_finalizers)
    yield
    if (library := sys.modules.get("kombu_toc.library.opening")) and library._opened:
        from .support.library import close_libraries  # most tests need none of what it imports

        close_libraries()
    left = [thread for thread in threading.enumerate() if thread.name == "toc-library"]
    assert not left, "a task library was used after it was closed: it looks after the server on"
    for added in celery._state._on_app_finalizers - before:
        if added.__module__ == "celery.app.base":  # others are Celery's own
            celery._state._on_app_finalizers.discard(added)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup`, each test goes to whichever process is free, in their order."""
    if config.getvalue("dist") != "loadgroup":
        return None
    return Scheduling(config, log)


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server | Cluster]:
    """A real server, shared by the whole run, or a test's own (`own_server`); the shared cluster if
    TOC_TEST_CLUSTER is set."""
    if ON_CLUSTER or not hasattr(request, "param"):
        yield request.getfixturevalue("cluster" if ON_CLUSTER else "single_server")
        return
    made = Server(tmp_path_factory.mktemp("own")).start()
    yield made
    gc.collect()
    made.stop()


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
        for keeper in list(lease_keeper._keepers.values()):
            keeper.expiries.take(math.inf)
        yield made


@pytest.fixture
def center(client: redis.Redis) -> TimeoutCenter:
    """A center on the shared, empty server, which it knows to be there always: leases that end
    are rolled back. Its queues have several slots, unlike those of workers and connections."""
    return TimeoutCenter(client, grace=0, slots=8)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real Redis Cluster of three primaries, shared by the whole run."""
    made = Cluster(tmp_path_factory.mktemp("cluster")).start()
    yield made
    gc.collect()
    made.stop()


@pytest.fixture
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Start clusters for one test, which may break or change them; arguments as Cluster's."""
    with contextlib.ExitStack() as stack:

        def start(*options: str, **how: Any) -> Cluster:
            made = Cluster(tmp_path_factory.mktemp("cluster"), *options, **how)
            stack.callback(made.stop)
            return made.start()

        yield start
