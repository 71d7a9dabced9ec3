"""The samples of JSON in docs/commands.md have the fields that the commands print."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Queue, pools

from kombu_toc import TimeoutCenter

from ..support.commands import answer
from ..support.inspection import put_some
from ..support.servers import Server

pytestmark = pytest.mark.one_server("the samples are of one server")

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()


HOUR = 3600

Run = Callable[..., Any]


def samples() -> dict[str, list[Any]]:
    """Section -> the documents that it shows. (What a sample leaves out is empty here.)"""
    found: dict[str, list[Any]] = defaultdict(list)
    for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        for block in re.findall(r"^```json\n(.*?)^```$", part, re.DOTALL | re.MULTILINE):
            text = re.sub(r", \.\.\.(?=[],}])", "", block).replace("[ ... ]", "[]")
            text = text.replace(", ..., ", ", ")
            found[part.splitlines()[0].replace("`", "")] += _documents(text)
    return found


def _documents(text: str) -> Iterator[Any]:
    decode, text = json.JSONDecoder().raw_decode, text.strip()
    while text:
        document, end = decode(text)
        yield document
        text = text[end:].strip()


SAMPLES = samples()


def assert_alike(sample: Any, printed: Any, *, beside: Set[str] = frozenset()) -> None:
    """They have the same fields, and values of the same kind.

    beside: fields that the sample leaves out
    """
    if isinstance(sample, dict):
        assert sample.keys() | beside == printed.keys() | beside
        for name, value in sample.items():
            assert_alike(value, printed[name], beside=beside)
    elif isinstance(sample, list) and sample and isinstance(sample[0], dict):
        assert printed
        assert_alike(sample[0], printed[0], beside=beside)
    elif sample is not None and printed is not None:
        assert isinstance(printed, (int, float) if isinstance(sample, float) else type(sample))


@pytest.fixture
def app(server: Server, client: redis.Redis) -> Iterator[Celery]:
    with Celery("shop", broker=server.toc_url, backend=server.url) as app:
        app.conf.task_queues = [Queue("mail", routing_key="mail")]
        app.conf.task_default_queue = "mail"

        @app.task(name="shop.mail.remind", shared=False)
        def remind(order: int) -> None: ...

        yield app
    pools.reset()  # Kombu keeps connections by URL, and what they know of queues is flushed now


@pytest.fixture
def run(app: Celery) -> Run:
    """Run a command, and return the document that it prints."""
    return lambda *words: answer(app, *words, "--json").json


@pytest.fixture
def center(single_server: Server) -> TimeoutCenter:
    return TimeoutCenter(single_server.client())


def send(app: Celery, countdown: float | None = HOUR) -> str:
    return app.tasks["shop.mail.remind"].apply_async((1007,), countdown=countdown).id


def test_messages_are_shown_as_the_page_has_them(app: Celery, run: Run) -> None:
    id = send(app)
    assert_alike(*SAMPLES["status"], run("status"))
    assert_alike(*SAMPLES["list"], run("list"))
    [shown] = SAMPLES["show"]
    found = run("show", id)
    assert shown.keys() == found.keys()
    beside = {"headers", "properties", "content_type", "body"}
    [listed] = SAMPLES["list"]
    assert_alike(listed["messages"], found["messages"], beside=beside)
    assert beside <= found["messages"][0].keys()


def test_what_is_done_to_messages_is_told_as_the_page_has_it(app: Celery, run: Run) -> None:
    ids = [send(app) for _ in range(2)]
    by_id, matching = SAMPLES["reschedule and run"]
    assert_alike(by_id, run("reschedule", ids[0], "--countdown", "1h30m"))
    assert_alike(matching, run("reschedule", "--queue", "mail", "--countdown", "1d", "--yes"))
    by_id, matching = SAMPLES["cancel"]
    assert_alike(by_id, run("cancel", ids[0], "--yes"))
    assert_alike(matching, run("cancel", "--queue", "mail", "--yes"))


def test_dead_letters_and_faults_are_told_as_the_page_has_them(
    app: Celery, run: Run, center: TimeoutCenter, client: redis.Redis
) -> None:
    for _ in range(3):
        send(app, countdown=None)
    for message in center.pop("mail", 2).messages:
        center.reject(message, requeue=False, reason="rejected by the task")
    dead = [found["id"] for found in run("dead", "list")["messages"]]
    requeued, purged = SAMPLES["dead"]
    assert_alike(requeued, run("dead", "requeue", dead[0], "--yes"))
    assert_alike(purged, run("dead", "purge", dead[1], "--yes"))
    for key in client.scan_iter("toc:{mail:*}:body"):
        client.delete(key)
    assert_alike(*SAMPLES["check and repair"], run("check"))


def test_what_is_done_to_queues_is_told_as_the_page_has_it(
    app: Celery, run: Run, server: Server, client: redis.Redis
) -> None:
    send(app)
    with Celery("old", broker=server.url) as old:
        old.send_task("shop.mail.remind", (1007,), queue="mail")
    client.lpush("mail", "nonsense")
    assert_alike(*SAMPLES["pause and resume"], run("pause", "mail"))
    [looked], [status] = SAMPLES["top"], SAMPLES["status"]
    as_in_status = status["topics"][0].keys() - {"memory_bytes"}
    assert_alike(looked, run("top", "--count", "1"), beside=as_in_status)
    assert_alike(*SAMPLES["migrate"], run("migrate", server.url, "--dry-run"))
    purged, deleted = SAMPLES["purge and delete"]
    assert_alike(purged, run("purge", "mail", "--yes"))
    assert_alike(deleted, run("delete", "mail", "--yes"))


def test_what_is_used_of_limits_is_told_as_the_page_has_it(
    app: Celery, run: Run, center: TimeoutCenter
) -> None:
    assert run("limits") == {"limits": []}
    limits = {"rate": "100/s", "concurrency": 3, "key_concurrency": 1}
    center.queues.declare("mail", **limits)
    put_some(center, "mail", 3, "m-", key="k")
    center.pop("mail", 10)
    told = run("limits")
    assert_alike(*SAMPLES["limits"], told)
    assert {one["limit"]: one["value"] for one in told["limits"][0]["limits"]} == limits
    assert told["limits"][0]["limits"][1]["used"] == told["limits"][0]["running"] == 1
    center.queues.declare("plain")
    assert run("limits", "plain")["limits"][0]["limits"] == []


def test_what_queues_are_declared_with_is_told_as_the_page_has_it(app: Celery, run: Run) -> None:
    [sample] = SAMPLES["topic"]
    terms = ("--rate", "100/s", "--key-concurrency", "1")
    declared = run("topic", "declare", "mail", "--slots", "16", "--retries", "3", *terms)
    assert_alike(sample, declared)
    assert (declared["slots"], declared["limits"]["retries"]["value"]) == (16, 3)
    assert_alike(sample, run("topic", "show", "mail"))
    assert_alike({"topics": [sample]}, run("topic", "list"))
    changed = run("topic", "set", "mail", "--retries", "5", "--visibility", "2m")
    assert_alike({**sample, "changed": [""]}, changed)
    assert changed["changed"] == ["retries", "visibility"]
    assert_alike(sample["limits"], changed["limits"])
    assert changed["limits"]["visibility"] == {"value": 120.0, "source": "declared"}
    taken = run(
        "topic", "set", "mail", "--rate", "none", "--key-fair", "yes", "--key-weights", "a=2"
    )
    assert taken["changed"] == ["rate", "key_fair", "key_weights"]
    assert taken["limits"]["rate"] == {"value": None, "source": "default"}
    assert taken["limits"]["key_weights"] == {"value": {"a": 2.0}, "source": "declared"}
    run("topic", "delete", "mail", "--yes")
    assert run("topic", "list") == {"topics": []}


def test_schedules_are_told_as_the_page_has_them(app: Celery, run: Run) -> None:
    shown, sent, filled, deleted, synced, imported = SAMPLES["schedule"]
    beside = {"upcoming", "history", "edits"}
    one = {name: value for name, value in shown.items() if name not in beside}
    words = ("--cron", "0 3 * * *", "--args", "[1007]", "--options", '{"priority": 3}')
    words = (*words, "--exclude", "2030-12-25")
    put = run("schedule", "put", "nightly", "shop.mail.remind", *words)
    assert_alike({**one, "is_new": True, "has_changed": True}, put)
    assert_alike({"schedules": [one], "after": None}, run("schedule", "list"))
    for command in ("pause", "resume", "skip"):
        assert_alike({"schedules": [one]}, run("schedule", command, "nightly"))
    assert_alike(sent, run("schedule", "run", "nightly"))
    assert_alike(filled, run("schedule", "backfill", "nightly", "--from", "-3d"))
    assert_alike(shown, run("schedule", "show", "nightly"))
    assert_alike(deleted, run("schedule", "delete", "nightly", "--yes"))
    app.conf.beat_schedule = {
        "nightly": {"task": "shop.mail.remind", "schedule": 60},
        "hourly": {"task": "shop.mail.remind", "schedule": "hourly"},
    }
    assert_alike(synced, run("schedule", "sync"))
    with redis.Redis.from_url(app.conf.result_backend) as client:
        definitions = {
            "nightly": {"task": "t", "schedule": {"__type__": "interval", "every": 60}},
            "rule": {"task": "t", "schedule": {"__type__": "rrule"}},
        }
        for name, definition in definitions.items():
            client.hset(f"other:{name}", "definition", json.dumps(definition))
            client.zadd("other::schedule", {f"other:{name}": 1})
    app.conf.beat_schedule = {}
    run("schedule", "delete", "nightly", "--yes")
    url = app.conf.result_backend
    done = run("schedule", "import", "redbeat", url, "--key-prefix", "other:")
    assert_alike(imported, done)
