"""The README's examples in Python run as they stand, on a server of the tests."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from ..servers import Server

pytestmark = pytest.mark.one_server("the examples name one server")

BLOCKS = re.findall(
    r"^```python\n(.*?)^```$",
    (Path(__file__).parents[2] / "README.md").read_text(),
    re.DOTALL | re.MULTILINE,
)


@pytest.fixture
def app(server: Server, client: redis.Redis) -> Iterator[Celery]:
    """The app that the README talks of."""
    with Celery("shop", broker=server.toc_url, backend=server.url) as app:
        yield app


def named(text: str) -> str:
    """The example that has this text."""
    [block] = [block for block in BLOCKS if text in block]
    return block


def test_every_example_is_at_least_python() -> None:
    assert len(BLOCKS) >= 6
    for block in BLOCKS:
        compile(block, "README.md", "exec")


def test_the_examples_for_tasks_and_operations_run_one_after_the_other(
    app: Celery, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scheduled as it says, a task is found, moved, seen by the predicate, and cancelled."""

    @app.task(name="shop.remind")
    def remind(order: int) -> None: ...

    @app.task(name="shop.other")
    def other(**kwargs: Any) -> None: ...

    names: dict[str, Any] = {"app": app, "remind": remind}
    exec(named("remind.apply_async("), names)
    other.apply_async(countdown=3600)  # what the predicate is asked about, too
    sent = remind.apply_async(args=[7], countdown=3600)
    names["task_id"] = sent.id
    exec(named("for found in center.get(task_id)"), names)
    assert "celery waiting shop.remind [7] " in capsys.readouterr().out
    assert names["center"].get(sent.id) == []  # cancelled, as it says
    names["time"] = time
    operations = named("page = center.scan(")
    before = names["center"].counts("celery").waiting
    found: list[Any] = []
    scan = names["center"].scan

    def noted(*args: Any, **kwargs: Any) -> Any:
        page = scan(*args, **kwargs)
        found.append((kwargs, page))
        return page

    names["center"].scan = noted
    exec(operations, names)
    [matching] = [page for kwargs, page in found if "where" in kwargs]
    assert len(matching.messages) == 2
    assert names["center"].counts("celery").waiting == before


def test_the_example_without_celery_runs(
    single_server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = redis.Redis
    monkeypatch.setattr(redis, "Redis", lambda: made(port=single_server.port, db=5))
    exec(named("from kombu_toc import TimeoutCenter"), {})
    assert "order-7 b'remind'" in capsys.readouterr().out


def test_the_example_with_the_embedded_server_runs(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(named("toc+embedded:///").replace("/tmp/shop", str(tmp_path / "shop")), names)
    app = names["app"]
    app.backend.set("key", "value")
    assert app.backend.get("key") == b"value"
    with app.connection_for_write() as connection:
        connection.connect()


def test_the_example_of_queues_is_declared(app: Celery) -> None:
    exec(named("app.conf.task_queues = ["), {"app": app})
    with app.connection_for_write() as connection:
        for queue in app.amqp.queues.values():
            queue(connection.default_channel).declare()
        center = connection.transport.center
        declared = center.declared("mail").declaration
    assert (declared.slots, declared.retries, declared.visibility) == (1, 3, 30)
