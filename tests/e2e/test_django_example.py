"""X7: examples/django_orders does what its README says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import redis

from kombu_toc import TimeoutCenter

from ..ports import free_port
from ..servers import Server
from .conftest import wait_until
from .nodes import ROOT

PROJECT = ROOT / "examples" / "django_orders"

Manage = Callable[..., str]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Where a project of its own keeps its orders; the rest is as the example has it."""
    return {**os.environ, "DATABASE": str(tmp_path / "orders.sqlite3")}


@pytest.fixture
def manage(environment: dict[str, str]) -> Manage:
    """Run one of Django's commands; return all that it prints."""

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=PROJECT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


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
    environment: dict[str, str], manage: Manage, tmp_path: Path
) -> Iterator[Callable[..., Site]]:
    """Start the web server on an empty database, with these variables of the environment."""
    processes = []

    def start(**variables: str) -> Site:
        environment.update(variables)
        manage("migrate")
        port = free_port()
        command = [sys.executable, "manage.py", "runserver", "--noreload", str(port)]
        with open(tmp_path / "site.log", "wb") as log:
            process = subprocess.Popen(
                command, cwd=PROJECT, env=environment, stdout=log, stderr=log
            )
        processes.append(process)
        made = Site(f"http://127.0.0.1:{port}", tmp_path / "site.log")
        wait_until(made.answers, 30, made.log.read_text)
        return made

    yield start
    for process in processes:
        process.terminate()
        process.wait(10)


def test_its_own_tests_pass(manage: Manage) -> None:
    """They run a web server, a worker and an embedded broker."""
    assert "OK" in manage("test", "--noinput").splitlines()


def test_its_migrations_are_those_of_its_models(manage: Manage) -> None:
    manage("makemigrations", "--check", "--dry-run")


def test_an_order_waits_in_redis_until_it_is_paid(
    site: Callable[..., Site], server: Server, client: redis.Redis, center: TimeoutCenter
) -> None:
    """With a Redis of one's own, and before any worker has run."""
    shop = site(CELERY_BROKER_URL=server.toc_url)
    status, order = shop.request("/orders/", item="tea")
    assert (status, order["status"]) == (201, "pending")
    assert center.counts("celery").scheduled == 1
    status, order = shop.request(f"/orders/{order['id']}/pay/", by="card")
    assert (status, order["status"]) == (200, "paid")
    assert center.counts("celery").scheduled == 0


def test_orders_are_placed_and_paid_while_the_broker_is_away_and_found_overdue_later(
    site: Callable[..., Site], manage: Manage
) -> None:
    nobody = f"toc+redis://127.0.0.1:{free_port()}/0"
    shop = site(CELERY_BROKER_URL=nobody, ORDER_TIMEOUT="-120")
    status, order = shop.request("/orders/", item="tea")
    assert (status, order["status"]) == (201, "pending")
    assert "Error calling place.<locals>.send_timeout" in shop.log.read_text()
    paid = shop.request("/orders/", item="cake")[1]
    assert shop.request(f"/orders/{paid['id']}/pay/", by="card")[0] == 200
    assert "orders expired: 1" in manage("expire_overdue")
    assert shop.request(f"/orders/{order['id']}/")[1]["status"] == "expired"
