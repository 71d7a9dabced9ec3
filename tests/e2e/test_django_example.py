"""X7: examples/django_orders does what its README says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import redis
import sqlalchemy

from kombu_toc import TimeoutCenter
from kombu_toc.client.options import DatabaseURL

from ..meta.test_readme import blocks_of
from ..support import nursery
from ..support.library import on_engines
from ..support.nodes import ROOT
from ..support.ports import free_port
from ..support.servers import Server
from ..support.workers import wait_until

PROJECT = ROOT / "examples" / "django_orders"

Manage = Callable[..., str]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Where a project of its own keeps its orders; the rest is as the example has it."""
    return {**os.environ, "DATABASE": f"sqlite:///{tmp_path / 'orders.sqlite3'}"}


@pytest.fixture
def manage(environment: dict[str, str]) -> Manage:
    """Run one of Django's commands; return all that it prints."""

    def run(*arguments: str, code: int = 0) -> str:
        how: dict[str, Any] = {"cwd": PROJECT, "env": environment}
        done = nursery.done(("manage.py", *arguments), code=code, execute=True, **how)
        return done.stdout + done.stderr

    return run


@pytest.fixture
def set_up(environment: dict[str, str], manage: Manage) -> Callable[..., None]:
    """Make the tables, with these variables of the environment from then on."""

    def run(**variables: str) -> None:
        environment.update(variables)
        manage("migrate")
        words = ("-m", "celery", "-A", "config", "toc", "library", "create")
        nursery.done(words, execute=True, cwd=PROJECT, env=environment)

    return run


@pytest.fixture
def start_worker(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Start the project's worker; its log is what is returned."""
    with start_programs(environment, tmp_path) as begin:
        yield lambda: begin("worker", "-m", "celery", "-A", "config", "worker", "-c", "1")


@contextmanager
def start_programs(environment: dict[str, str], folder: Path) -> Iterator[Callable[..., Path]]:
    """Start programs of the project by a name, and words; their logs are what is returned."""
    with ExitStack() as programs:

        def start(name: str, *words: str) -> Path:
            log = folder / f"{name}.log"
            how: dict[str, Any] = {"cwd": PROJECT, "env": environment}
            programs.enter_context(nursery.running(words, log, execute=True, **how))
            return log

        yield start


class Site:
    """The running web server, and what it has written."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self.log = log

    def request(self, path: str, **form: str) -> tuple[int, dict[str, Any]]:
        """The status and the body of an answer; a POST if there is a form."""
        try:
            with urlopen(self.url + path, urlencode(form).encode() or None, 20) as answer:
                return answer.status, json.load(answer)
        except HTTPError as error:
            with error:
                return error.code, json.load(error)

    def answers(self) -> bool:
        try:
            urlopen(self.url, timeout=5).close()
        except HTTPError:
            return True
        except OSError:
            return False
        return True


@pytest.fixture
def site(
    environment: dict[str, str], set_up: Callable[..., None], tmp_path: Path
) -> Iterator[Callable[..., Site]]:
    """Start the web server on an empty database, with these variables of the environment."""

    def start(**variables: str) -> Site:
        set_up(**variables)
        port = free_port()
        log = begin("site", "manage.py", "runserver", "--noreload", str(port))
        made = Site(f"http://127.0.0.1:{port}", log)
        wait_until(made.answers, 30, made.log.read_text)
        return made

    with start_programs(environment, tmp_path) as begin:
        yield start


def test_the_readme_goes_as_it_says(
    environment: dict[str, str], server: Server, client: redis.Redis, tmp_path: Path
) -> None:
    """Command by command, but for those that install; its own tests run at night."""
    environment["CELERY_BROKER_URL"] = server.toc_url
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    port = free_port()
    text = (PROJECT / "README.md").read_text().replace("localhost:8000", f"127.0.0.1:{port}")
    text = text.replace("manage.py runserver", f"manage.py runserver --noreload {port}")
    with ExitStack() as running, (tmp_path / "log").open("wb") as log:
        how: Any = {"cwd": PROJECT, "env": environment, "stderr": log, "shell": True}

        def run(line: str) -> str:
            return subprocess.check_output(line, text=True, timeout=90, **how)

        for line in "".join(re.findall(r"^```\n(.*?)^```$", text, re.S | re.M)).splitlines():
            if re.match(r"python3 -m venv|\. |pip |cd |python manage.py test", line):
                continue
            if "worker" in line or "runserver" in line:
                process = subprocess.Popen(f"exec env {line}", stdout=log, **how)
                running.enter_context(process)
                running.callback(process.terminate)
                if "runserver" in line:
                    site = Site(f"http://127.0.0.1:{port}", tmp_path / "log")
                    wait_until(site.answers, 60, site.log.read_text)
            elif (said := run(line)).count('"status"') == 2:  # the last: of both orders
                wait_until(lambda: '"status": "expired"' in run(line), 60, site.log.read_text)  # noqa: B023
        assert re.findall('"status": "(.*?)"', said)[0] == "paid"


#: What the examples for Django in docs/library.md take as given, and what is there after them.
GIVEN = """
import celery_toc
from django.utils import timezone
from orders.models import Order
from orders.tasks import expire_order as expire
order = Order(item="tea", due=timezone.now())
"""


def test_the_examples_of_the_library_run(set_up: Callable[..., None], manage: Manage) -> None:
    """docs/library.md"""
    set_up()
    blocks = [block for block in blocks_of("docs/library.md") if "jango" in block]
    assert len(blocks) == 4
    code = "\n".join((GIVEN, *blocks, "print(PendingTask.objects.count())"))
    assert manage("shell", "-c", code).endswith("1\n")


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_django_example.py::"
    "test_an_order_expires_although_its_process_is_killed_between_commit_and_publish"
)
def test_its_own_tests_pass(manage: Manage) -> None:
    """They run a web server, a worker and an embedded broker."""
    assert "OK" in manage("test", "--noinput").splitlines()


def test_its_migrations_are_those_of_its_models(manage: Manage) -> None:
    manage("makemigrations", "--check", "--dry-run")


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_django_example.py::"
    "test_an_order_expires_although_its_process_is_killed_between_commit_and_publish"
)
def test_an_order_waits_in_redis_until_it_is_paid(
    site: Callable[..., Site], server: Server, client: redis.Redis, center: TimeoutCenter
) -> None:
    """With a Redis of one's own, and before any worker has run."""
    shop = site(CELERY_BROKER_URL=server.toc_url)
    status, order = shop.request("/orders/", item="tea")
    assert (status, order["status"]) == (201, "pending")
    # It is put after the commit, by a thread.
    wait_until(lambda: "celery" in center.queues.names() and center.counts("celery").scheduled == 1)
    status, order = shop.request(f"/orders/{order['id']}/pay/", by="card")
    assert (status, order["status"]) == (200, "paid")
    assert center.counts("celery").scheduled == 0


@pytest.mark.nightly(
    guarded_by="tests/e2e/test_django_example.py::"
    "test_an_order_expires_although_its_process_is_killed_between_commit_and_publish"
)
def test_orders_are_placed_and_paid_while_the_broker_is_away_and_expire_when_it_is_back(
    site: Callable[..., Site],
    environment: dict[str, str],
    start_worker: Callable[[], Path],
    server: Server,
) -> None:
    nobody = f"toc+redis://127.0.0.1:{free_port()}/0"
    shop = site(CELERY_BROKER_URL=nobody, ORDER_TIMEOUT="1")
    status, order = shop.request("/orders/", item="tea")
    assert (status, order["status"]) == (201, "pending")
    paid = shop.request("/orders/", item="cake")[1]
    assert shop.request(f"/orders/{paid['id']}/pay/", by="card")[0] == 200
    environment["CELERY_BROKER_URL"] = server.toc_url
    log = start_worker()
    wait_until(
        lambda: shop.request(f"/orders/{order['id']}/")[1]["status"] == "expired",
        120,
        log.read_text,
    )
    assert shop.request(f"/orders/{paid['id']}/")[1]["status"] == "paid"


#: Places an order by the view, and is killed between the commit and whatever comes after it.
KILLED = """
import os, signal
from django.db import transaction
from django.test import Client
with transaction.atomic():
    transaction.on_commit(lambda: os.kill(os.getpid(), signal.SIGKILL))
    answer = Client(headers={"host": "localhost"}).post("/orders/", {"item": "tea"})
    assert answer.status_code == 201, answer.content
"""


@on_engines("sqlite", "postgresql")
def test_an_order_expires_although_its_process_is_killed_between_commit_and_publish(
    set_up: Callable[..., None],
    manage: Manage,
    start_worker: Callable[[], Path],
    new_url: Callable[[], str],
    server: Server,
    client: redis.Redis,
    center: TimeoutCenter,
) -> None:
    """X12: no window between the commit and the publish loses a task."""
    database = new_url()
    set_up(DATABASE=database, CELERY_BROKER_URL=server.toc_url, ORDER_TIMEOUT="1")
    manage("shell", "-c", KILLED, code=-signal.SIGKILL)
    engine = sqlalchemy.create_engine(DatabaseURL(database).reveal())

    def state() -> list[tuple[str, ...]]:
        with engine.connect() as connection:
            return [
                tuple(connection.execute(sqlalchemy.text(text)).scalars())
                for text in ("SELECT status FROM orders_order", "SELECT biz_id FROM toc_pending_0")
            ]

    assert state() == [("pending",), ("1",)]
    assert not any(center.counts(name).waiting for name in center.queues.names())
    log = start_worker()
    wait_until(lambda: state() == [("expired",), ()], 120, log.read_text)
    engine.dispose()
