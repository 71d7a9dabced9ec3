"""The examples in Python of docs/*.md run as they stand, on a server of the tests."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import pools

from celery_toc import timeout_center
from celery_toc.beat import configured

from ..support.servers import Server

pytestmark = pytest.mark.one_server("the examples name one server")

ROOT = Path(__file__).parents[2]


def blocks_of(page: str) -> list[str]:
    """The examples in Python of a page."""
    return re.findall(
        r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )


def named(page: str, text: str) -> str:
    """The example of a page that has this text."""
    [block] = [block for block in blocks_of(page) if text in block]
    return block


def broker_of(page: str, text: str, places: dict[str, str]) -> str:
    """The broker URL that the example sets, with these places instead of its own."""
    example = named(page, text)
    for there, here in places.items():
        assert there in example
        example = example.replace(there, here)
    app = SimpleNamespace(conf=SimpleNamespace())
    exec(example, {"app": app})
    return str(app.conf.broker_url)


@pytest.fixture
def app(server: Server, client: redis.Redis) -> Iterator[Celery]:
    """The app that the pages talk of."""
    with Celery("shop", broker=server.toc_url, backend=server.url) as app:
        yield app
    pools.reset()  # Kombu keeps connections by URL, and what they know of queues is flushed now


@pytest.fixture
def remind(app: Celery) -> Any:
    """The task that the pages talk of."""

    @app.task(name="shop.remind", shared=False)
    def remind(order: int) -> None: ...

    return remind


def test_every_example_is_at_least_python() -> None:
    pages = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    blocks = [(page, block) for page in pages for block in blocks_of(page)]
    assert len(blocks) >= 14
    for page, block in blocks:
        compile(block, page, "exec")


def test_the_example_of_zones_sends_to_slots_of_the_zone(
    app: Celery, remind: Any, client: redis.Redis
) -> None:
    exec(named("docs/options.md", '"toc_prefer_slots": "0-3"}'), {"app": app})
    names: dict[str, Any] = {"remind": remind}
    for _ in range(20):
        exec(named("docs/options.md", "def basis_in("), names)
    held = [client.zcard(f"toc:{{celery:{slot}}}:store") for slot in range(8)]
    assert sum(held[:4]) == 20
    assert max(held) < 20
    with app.connection() as connection:
        assert connection.default_channel.settings.toc_prefer_slots == (0, 1, 2, 3)


def test_the_examples_of_what_a_task_has_of_its_own_run(app: Celery) -> None:
    @app.task(name="shop.report", shared=False)
    def report() -> None: ...

    center = timeout_center(app)
    exec(named("docs/options.md", "report.apply_async("), {"report": report})
    exec(named("docs/options.md", "notify.apply_async("), {"notify": report})
    center.reschedule(center.scan("celery", state="waiting").messages[-1].id)
    own, expires = sorted(center.pop("celery", 2).messages, key=lambda one: one.expires_us or 0)
    assert (own.visibility, own.ends_us is None, own.expires_us) == (600, False, None)
    assert expires.expires_us is not None
    center.ack([own, expires])


def test_the_example_of_operations_finds_moves_and_cancels_a_scheduled_task(
    app: Celery, remind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"app": app, "remind": remind}
    exec(named("docs/options.md", "remind.apply_async("), names)
    sent = remind.apply_async(args=[7], countdown=3600)
    names["task_id"] = sent.id
    exec(named("docs/python.md", "for found in center.get(task_id)"), names)
    assert "celery waiting shop.remind [7] " in capsys.readouterr().out
    assert names["center"].get(sent.id) == []  # cancelled, as it says


def test_the_examples_for_tasks_and_operations_run_one_after_the_other(
    app: Celery, remind: Any
) -> None:
    """Scheduled as it says, tasks are read in pages and seen by the predicate."""

    @app.task(name="shop.other", shared=False)
    def other(**kwargs: Any) -> None: ...

    names: dict[str, Any] = {"app": app, "remind": remind}
    exec(named("docs/options.md", "remind.apply_async("), names)
    other.apply_async(countdown=3600)  # what the predicate is asked about, too
    names["task_id"] = remind.apply_async(args=[7], countdown=3600).id
    exec(named("docs/python.md", "for found in center.get(task_id)"), names)
    names["time"] = time
    operations = named("docs/python.md", "page = center.scan(")
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


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("from kombu_toc import TimeoutCenter", "order-7 b'remind'"),
        ("center.put_many(", "10000 order-7 added\n"),
    ],
    ids=["one", "many"],
)
def test_the_examples_without_celery_run(
    single_server: Server, monkeypatch: pytest.MonkeyPatch, capsys: Any, text: str, printed: str
) -> None:
    made = redis.Redis
    monkeypatch.setattr(redis, "Redis", lambda: made(port=single_server.port, db=5))
    with made(port=single_server.port, db=5) as client:
        client.flushdb()
    exec(named("docs/python.md", text), {})
    assert printed in capsys.readouterr().out


def test_the_example_of_a_task_that_dies_when_it_fails_says_so(app: Celery) -> None:
    exec(named("docs/guarantees.md", "dead_on_failure=True"), {"app": app})
    [name] = [name for name in app.tasks if name.endswith("charge")]
    assert app.tasks[name].dead_on_failure is True


def test_the_example_with_the_embedded_server_runs(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    example = named("docs/connections.md", "toc+embedded:///")
    exec(example.replace("/tmp/shop", str(tmp_path / "shop")), names)
    app = names["app"]
    app.backend.set("key", "value")
    assert app.backend.get("key") == b"value"
    with app.connection_for_write() as connection:
        connection.connect()


def test_the_example_of_queues_is_declared(app: Celery) -> None:
    exec(named("docs/options.md", "app.conf.task_queues = ["), {"app": app})
    with app.connection_for_write() as connection:
        for queue in app.amqp.queues.values():
            queue(connection.default_channel).declare()
        center = connection.transport.center
        declared = center.registry.declared("mail").declaration
    assert (declared.slots, declared.retries, declared.visibility) == (1, 3, 30)


def test_the_examples_for_those_who_come_from_elsewhere_run(app: Celery, remind: Any) -> None:
    exec(named("docs/coming_from.md", "message_ttl"), {"app": app, "remind": remind})
    center = timeout_center(app)
    [found] = center.scan("mail").messages
    assert center.task(found).args == [7]
    assert center.queues.describe("mail").limits["message_ttl"].value == 3_600_000
    names: dict[str, Any] = {"app": app}
    exec(named("docs/coming_from.md", "def notify"), names)
    [found] = center.scan("celery").messages
    assert center.task(found).name == names["notify"].name
    assert names["notify"](8) == "notified 8"
    exec(named("docs/coming_from.md", "def tidy"), names)
    assert center.task(center.scan("celery").messages[0]).name == "shop.tidy"
    assert [one.name for one in configured.read(app).entries] == ["tidy"]


def test_the_examples_of_monitoring_read_what_was_counted(
    app: Celery, remind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    remind.apply_async(args=[7], countdown=3600)
    exec(named("docs/monitoring.md", "from kombu_toc import read_metrics"), {"app": app})
    assert capsys.readouterr().out.startswith("celery ")  # a process tells every five seconds
    names: dict[str, Any] = {"app": app}
    exec(named("docs/monitoring.md", "import serve").replace("9808", "0"), names)
    names["server"].shutdown()
    names["thread"].join()
    names["server"].server_close()


def test_the_example_of_asyncio_runs(
    server: Server, client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    example = named("docs/asyncio.md", "AsyncTimeoutCenter.from_url")
    exec(example.replace("toc+redis://localhost:6379/0", server.toc_url), {})
    assert "id='order-7', state='waiting'" in capsys.readouterr().out


def test_the_example_of_asyncio_sends_moves_and_cancels_a_task(
    server: Server, client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    example = blocks_of("docs/asyncio.md")[0]
    names: dict[str, Any] = {"__name__": "shop"}
    exec(example.replace("toc+redis://localhost:6379/0", server.toc_url), names)
    assert "topic='celery'" in capsys.readouterr().out
    assert client.hexists("toc:{toc}:topics", "celery")
    assert not client.keys("toc:*store*")  # cancelled
