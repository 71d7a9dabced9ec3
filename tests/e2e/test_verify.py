"""``python -m kombu_toc.verify`` on real servers, also under faults of clocks and network."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ..support.cases import night
from ..support.proxy import Proxy
from ..support.servers import Server, SteppedServer
from ..support.waiting import running

#: Seconds that a run may take besides: until its consumers have done what is left.
PATIENCE = 180.0

DAY = 86400


RUN: Sequence[str] = ("-m", "kombu_toc.verify")

#: The same under libfaketime: where that fakes the monotonic clock no wait for a lock ends, and
#: where it does not the call behind time.sleep fails.
WITHOUT_SLEEP = """
import runpy, select, time
time.sleep = lambda seconds: select.select([], [], [], seconds)
runpy.run_module("kombu_toc.verify", run_name="__main__", alter_sys=True)
"""


def start(
    url: str, seconds: float, run: Sequence[str] = RUN, **environment: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *run, "--broker", url, "--minutes", str(seconds / 60)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[SteppedServer]:
    made = SteppedServer(tmp_path)
    made.start()
    yield made
    made.stop()


def finish(run: subprocess.Popen[str], server: Server) -> Counter[str]:
    """What was done, and how often; nothing was broken, and nothing is left."""
    told, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, told
    with server.client() as client:
        assert client.keys("*verify-*") == []
    found = re.findall(r"^(.+?)  +(\d+)$", told, re.MULTILINE)
    return Counter({name: int(number) for name, number in found})


def start_working(url: str, seconds: float, server: Server, *how: Any, **environment: str) -> Any:
    """Start a run, and return it when it has put something."""
    run = start(url, seconds, *how, **environment)
    with server.client() as client:
        for _ in running(PATIENCE):
            if client.keys("*verify-*:body"):
                return run
            time.sleep(0.01)
    raise AssertionError(run.poll())


def test_a_run_keeps_all_promises_and_leaves_nothing_in_the_broker(server: Server) -> None:
    """X22"""
    done = finish(start(server.toc_url, 15), server)
    assert done["run done"] > 100
    assert done["killed done"] + done["stopped done"] > 0


def test_who_interrupts_it_leaves_nothing_in_the_broker_either(server: Server) -> None:
    run = start_working(server.toc_url, 600, server)  # its processes are still being started
    os.killpg(run.pid, signal.SIGINT)
    told, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 130, told
    with server.client() as client:
        assert client.keys("*verify-*") == []


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_verify.py::"
    "test_a_run_keeps_all_promises_and_leaves_nothing_in_the_broker"
)
@pytest.mark.one_server("its clock is set")
def test_clocks_that_drift_and_are_set_break_nothing(own_server: SteppedServer) -> None:
    """The clock of clients goes a second a minute too fast; the server is set an hour and 30 days
    forward and back."""
    faked = own_server.environment() | {"FAKETIME": "+0 x1.0167"}
    del faked["FAKETIME_TIMESTAMP_FILE"]  # the server's
    run = start_working(own_server.toc_url, 24, own_server, ("-c", WITHOUT_SLEEP), **faked)
    # At last it is ahead of all that it showed, so that everything is due.
    for step in (3600, -7200, -30 * DAY, 31 * DAY):
        time.sleep(4)  # while it works
        own_server.step(step)
    assert finish(run, own_server)["stepped done"] > 0


def one_way(proxy: Proxy) -> None:
    """Requests arrive, and no reply comes."""
    proxy.freeze_replies_after(0)
    time.sleep(1)
    proxy.cut()


def flap(proxy: Proxy) -> None:
    for _ in range(5):
        proxy.refuse()
        time.sleep(0.3)
        proxy.accept()
        time.sleep(0.3)


def freeze(proxy: Proxy) -> None:
    proxy.freeze()
    time.sleep(7)  # for longer than a lease
    proxy.thaw()


def slow_and_lossy(proxy: Proxy) -> None:
    proxy.throttle(4_000)  # bytes a second of each connection
    time.sleep(4)
    proxy.cut_replies_after(20)
    proxy.throttle(None)


@pytest.mark.one_server("a proxy is between")
@pytest.mark.parametrize("fault", [one_way, flap, night(freeze), night(slow_and_lossy)])
def test_a_network_that_parts_breaks_nothing(
    fault: Callable[[Proxy], None], own_server: Server
) -> None:
    with Proxy(own_server.port) as proxy:
        run = start_working(proxy.toc_url, 16, own_server)
        for _ in range(2):
            time.sleep(3)  # while it works
            fault(proxy)
        finish(run, own_server)
