"""K9: `celery toc metrics`, against a live app."""

from __future__ import annotations

import re
import signal
import urllib.request

import pytest
import redis
from celery import Celery

from celery_toc import timeout_center
from celery_toc.cli.screen import clean

from ..support import nursery
from ..support.cases import each
from ..support.commands import answer
from ..support.tasks import make_app
from ..support.workers import environment_of
from .test_cli import celery, in_a_terminal


@pytest.fixture
def scheduled(app: Celery, client: redis.Redis) -> Celery:
    """The app, with three tasks an hour ahead."""
    with app.connection_for_write() as connection:
        app.amqp.queues["celery"].bind(connection.default_channel).declare()
    for i in range(3):
        app.tasks["e2e.note"].apply_async((f"{i}",), countdown=3600)
    return app


def test_without_serve_the_metrics_are_printed_once(scheduled: Celery) -> None:
    said = answer(scheduled, "metrics")
    assert (said.code, said.err) == (0, "")
    assert 'celery_toc_messages{state="scheduled",topic="celery"} 3.0' in said.out
    assert said.out.endswith("\n") and not said.out.endswith("\n\n")


def test_on_a_terminal_no_name_of_a_queue_moves_the_cursor(scheduled: Celery) -> None:
    """K9: elsewhere it is as Prometheus reads it."""
    name = "\x1b[31mred\r\x9b0m"
    timeout_center(scheduled).put(name, "x", b"")
    words = ("-A", "tests.support.tasks", "toc", "metrics")
    code, said = in_a_terminal("", *words, **environment_of(scheduled))
    assert (code, clean(name) in said) == (0, True)
    assert not {"\x1b", "\x9b"} & {*said}


def test_as_json_they_are_a_list_of_samples(scheduled: Celery) -> None:
    labels = {"topic": "celery", "state": "scheduled"}
    sample = {"name": "celery_toc_messages", "labels": labels, "value": 3.0}
    assert sample in answer(scheduled, "metrics", "--json").json


def test_served_they_are_there_until_ctrl_c(scheduled: Celery) -> None:
    words = ("-A", "tests.support.tasks", "toc", "metrics", "--serve", "127.0.0.1:0")
    program = celery(*words, **environment_of(scheduled))
    try:
        line = program.stderr.readline()
        [url] = re.findall(r"^Serving metrics at (http://127\.0\.0\.1:\d+/metrics)$", line)
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert b'celery_toc_messages{state="scheduled",topic="celery"} 3.0' in answer.read()
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=30)
        assert (program.returncode, out, err) == (0, "", "")
    finally:
        program.kill()
        program.wait()


@each("address", ["nowhere", "host:", ":99999", "1.2.3.4:http", ":-1"])
def test_a_wrong_address_is_one_line_and_wrong_usage(app: Celery, address: str) -> None:
    answer(app, "metrics", "--serve", address).fails(2, "is not an address")


def test_a_port_that_is_taken_is_one_line(app: Celery, client: redis.Redis, server) -> None:
    taken = f"127.0.0.1:{server.port}"
    answer(app, "metrics", "--serve", taken).fails(1, f"cannot serve at {taken}")


@each(
    ("broker", "code", "says"),
    [
        ("toc+redis://127.0.0.1:1/0", 1, "cannot be used"),
        ("memory://", 2, "not a timeout center"),
    ],
)
def test_a_broker_that_is_down_or_of_another_kind_is_one_line(
    broker: str, code: int, says: str
) -> None:
    app = make_app(broker, "cache+memory://")
    for args in ((), ("--serve", "127.0.0.1:0"), ("--json",)):
        said = answer(app, "metrics", *args)
        said.fails(code, says)
        assert said.out == ""


MISSING = """
import sys
sys.modules["prometheus_client"] = None
from celery.bin.celery import main
sys.exit(main())
"""


def test_without_prometheus_client_the_command_says_what_to_install(app: Celery) -> None:
    words = ("-c", MISSING, "-A", "tests.support.tasks", "toc", "metrics")
    ran = nursery.done(words, code=2, execute=True, environment=environment_of(app))
    assert ran.stderr.count("\n") == 1
    assert "pip install 'celery-toc[metrics]'" in ran.stderr
