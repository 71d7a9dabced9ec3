"""Workers with a task library whose database stands still, or never says anything; and what they
tell of its password (X12, W8)."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery

from ..support import nursery
from ..support.databases import PostgreSQL
from ..support.library import create_tables
from ..support.library import own_engine as engine
from ..support.nodes import Worker
from ..support.workers import LOOPS, POOLS, Journal, Live, wait_until

#: What they share is started once, in one process of a run.
pytestmark = pytest.mark.xdist_group("library_faults")

__all__ = ("engine",)  # a fixture

ON_POSTGRESQL = pytest.mark.parametrize("engine", ["postgresql"], indirect=True, scope="session")

#: What no part of may be seen: the password as it is in a URL, and as it is.
SECRETS = ("se%40same", "se@same")


@pytest.fixture
def options(engine: PostgreSQL) -> dict[str, Any]:
    url = engine.new_url()
    create_tables([url])
    return {"broker_transport_options": {"toc_library": url, "toc_library_timeout": 1}}


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where every connection is accepted, and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield server.getsockname()[1]


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def run_and_stop(app: Celery, journal: Journal, worker: Worker, name: str, tells: str = "") -> None:
    """Tasks start and end, remote control is answered, and the worker ends when it is asked to.

    tells: what it has logged by then
    """
    now = time.time()
    for number in range(30):
        due = now + number / 10
        app.tasks["e2e.note"].apply_async((f"{name}-{number}", due), eta=at(due))
    entries = journal.wait_for(name, 30)
    # Nobody has waited for the database in between.
    assert max(entry["at"] - entry["due"] for entry in entries) < 10
    assert app.control.ping([worker.hostname()], timeout=10)
    if tells:  # a write that waits for the database is given up after some seconds
        wait_until(lambda: tells in worker.container.logs())
    began = time.monotonic()
    worker.teardown()
    assert time.monotonic() - began < 30


@ON_POSTGRESQL
@pytest.mark.parametrize("pool", LOOPS)
def test_a_worker_whose_database_stands_still_goes_on_and_ends(
    live: Live, options: dict[str, Any], engine: PostgreSQL, pool: str
) -> None:
    [worker] = live.start_workers(1, *POOLS[pool], **options)
    live.begin("note", "before")
    engine.pause()
    try:
        run_and_stop(
            live.app, live.journal, worker, "while", "what becomes of tasks is recorded later: "
        )
    finally:
        engine.resume()
    said = worker.container.logs()
    assert "are not recorded: this process ends while the library is away" in said


@pytest.mark.parametrize("scheme", ["postgresql", pytest.param("mysql", marks=pytest.mark.nightly)])
def test_a_worker_whose_database_never_answers_starts_goes_on_and_ends(
    live: Live, silent: int, scheme: str
) -> None:
    url = f"{scheme}://toc:{SECRETS[0]}@127.0.0.1:{silent}/library"
    chosen = {"toc_library": url, "toc_library_timeout": 1}
    [worker] = live.start_workers(1, *POOLS["prefork"], broker_transport_options=chosen)
    run_and_stop(live.app, live.journal, worker, "never")
    assert not any(secret in worker.container.logs() for secret in SECRETS)


@ON_POSTGRESQL
def test_nothing_that_a_worker_tells_has_the_password(
    live: Live, options: dict[str, Any], engine: PostgreSQL, tmp_path: Path
) -> None:
    chosen = options["broker_transport_options"]
    # What is wrong with a database is told, too.
    wrong = chosen["toc_library"].replace("same", "samez")
    assert wrong != chosen["toc_library"]
    # Executed: what a process list shows of them is their own.
    [worker] = live.start_workers(1, "-c", "1", "-l", "DEBUG", execute=True, **options)
    [failing] = live.start_workers(
        *(1, "-c", "1", "-l", "DEBUG", "-Q", "urgent"),
        execute=True,
        broker_transport_options={**chosen, "toc_library": wrong},
    )
    for queue in ("celery", "urgent"):
        live.app.tasks["e2e.note"].apply_async((f"one-{queue}",), queue=queue)
    live.journal.wait_for("one", 2)
    wait_until(lambda: "recorded later" in failing.container.logs())
    inspect = live.app.control.inspect([worker.hostname()], timeout=10)
    told = [repr(inspect.stats()), repr(inspect.conf(with_defaults=True)), repr(inspect.report())]
    assert "toc_library" in told[1]
    told += [one.container.logs() for one in (worker, failing)]
    live.app.conf.update(options)
    told += [live.app.bugreport(), live.app.conf.humanize(with_defaults=False)]
    told += [repr(live.app.connection()), str(live.app.connection().info())]
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):  # the database's, too
        with contextlib.suppress(psutil.Error):
            told.append(" ".join(process.cmdline()))
    program = tmp_path / "shop.py"
    program.write_text(
        "from celery import Celery\n"
        f"app = Celery('shop', broker={live.app.conf.broker_url!r})\n"
        f"app.conf.broker_transport_options = {chosen!r}\n"
    )
    for command in (
        ["report"],
        ["toc", "library", "status"],
        ["toc", "library", "status", "--json"],
    ):
        words = ("-m", "celery", "-A", "shop", *command)
        done = nursery.done(words, cwd=tmp_path, environment=nursery.importing(tmp_path))
        told += [done.stdout, done.stderr]
    assert len(told) > 20
    for text in told:
        for secret in (*SECRETS, "samez"):
            assert secret not in text, text[max(text.find(secret) - 300, 0) :][:600]
