"""The examples of docs/limits.md, and of the limits in docs/python.md, run as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, pools

import kombu_toc
from celery_toc import timeout_center
from kombu_toc import TERMS, TimeoutCenter

from ..support.cluster import Cluster
from ..support.servers import Server
from .test_readme import named

PAGE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()

#: The arguments in the table of limits, and the example of each row.
ROWS = [
    (re.findall(r"`(x-[a-z-]+)`", row.split(" | ")[0]), json.loads(example))
    for row in re.findall(r"^\| (`x-.*) \|$", PAGE, re.MULTILINE)
    for example in re.findall(r"`(\{.*\})`$", row)
]


def test_the_table_has_every_limit() -> None:
    named_there = {name for names, _ in ROWS for name in names}
    assert named_there == {f"x-{name.replace('_', '-')}" for name in TERMS}
    assert all(set(names) <= set(example) for names, example in ROWS)


@pytest.mark.parametrize("example", [example for _, example in ROWS], ids=str)
def test_the_example_of_each_row_declares_a_queue(
    server: Server | Cluster, center: TimeoutCenter, example: dict[str, Any]
) -> None:
    with Connection(server.toc_url) as connection:
        channel = connection.default_channel
        channel.queue_declare("mail", arguments=example)
        assert channel.ignored["mail"] == []
    declared = center.registry.declared("mail")
    assert declared is not None
    for name in example:
        assert getattr(declared.declaration, name[2:].replace("-", "_")) is not None


def test_the_first_sentence_says_that_starts_are_counted() -> None:
    first = PAGE.split("\n\n")[1]
    assert first.startswith("What is counted is *starts*")


def test_the_smallest_example_runs(server: Server | Cluster, client: redis.Redis) -> None:
    with Celery("shop", broker=server.toc_url, set_as_current=False) as app:

        @app.task(name="shop.remind", shared=False)
        def remind(customer: str) -> None: ...

        names = {"app": app, "remind": remind}
        exec(named("docs/limits.md", '"x-rate": "100/s", "x-key-concurrency": 1}'), names)
        center = timeout_center(app)
        limits = center.queues.describe("mail").limits
        assert (limits["rate"].value, limits["key_concurrency"].value) == ("100/s", 1)
        [delivery] = center.center.pop("mail").messages
        assert delivery.key == "anna"
        center.ack([delivery])
    pools.reset()  # Kombu keeps connections by URL, and what they know of queues is flushed now


def test_the_example_of_limits_in_python_runs(
    center: TimeoutCenter, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(named("docs/python.md", 'key_order="serial"'), {"center": center, "kombu_toc": kombu_toc})
    assert capsys.readouterr().out.splitlines() == [
        "[('call-1', 'anna'), ('call-3', None)]",
        "2 1 1",
    ]
