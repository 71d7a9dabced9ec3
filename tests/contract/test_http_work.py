"""What a GET over HTTP asks of Redis does not grow with what there is: commands, those within
scripts too, and the bytes that the server sends."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import redis
from celery import Celery

from celery_toc.web import api_for_app
from kombu_toc import FailedTask, FailureBounds, ScheduleChange, TimeoutCenter

from ..support.http_server import HttpServer
from ..support.inspection import put_call
from ..support.servers import Server

pytestmark = pytest.mark.one_server("its commands are counted")

APP = """
from celery import Celery

app = Celery("shop", broker={broker!r}, backend={backend!r}, set_as_current=False)
"""

#: Of each kind: queues, schedules, queues with limits, paused ones, dead letters, messages, keys.
FEW, MANY = 300, 1000

#: Commands of which one server may send some more: they tell of time that passes.
MARGIN = 20

#: Bytes by which an answer may differ: longer numbers.
BYTES = 600

GETS = {
    "/v1/queues": ("?limit=10", "?limit=10&after=q00100"),
    "/v1/queues/{queue}": ("/v1/queues/big", "/v1/queues/q00003", "/v1/queues/nobody"),
    "/v1/queues/{queue}/counts": ("/v1/queues/big/counts", "/v1/queues/big/counts?within=300"),
    "/v1/queues/{queue}/limits": ("/v1/queues/big/limits", "/v1/queues/keyed/limits"),
    "/v1/queues/{queue}/dead": ("/v1/queues/big/dead?limit=10",),
    "/v1/queues/{queue}/jobs": ("/v1/queues/big/jobs",),
    "/v1/queues/{queue}/jobs/{id}": ("/v1/queues/big/jobs/none",),
    "/v1/queues/{queue}/failures": ("/v1/queues/big/failures?limit=10",),
    "/v1/queues/{queue}/failures/{id}": ("/v1/queues/big/failures/00003",),
    "/v1/queues/{queue}/tasks": (
        "/v1/queues/big/tasks?limit=10",
        "/v1/queues/big/tasks?limit=10&state=inFlight",
        "/v1/queues/keyed/tasks?limit=10",
    ),
    "/v1/queues/{queue}/tasks/{id}": (
        "/v1/queues/big/tasks/later-00003",
        "/v1/queues/big/tasks/none",
    ),
    "/v1/schedules": (
        "?limit=10",
        "?limit=10&after=big:big-00009",
        "?limit=10&after=q00009",
        "?limit=10&queue=big",
    ),
    "/v1/schedules/{schedule}": ("/v1/schedules/big-00003", "/v1/schedules/none"),
    "/v1/schedules/{schedule}/history": ("/v1/schedules/q-00003/history",),
    "/v1/apps/{app}/tasks/{id}": ("/v1/apps/shop/tasks/x",),
    "/scale/{queue}": ("/scale/big?within=300", "/scale/keyed", "/scale/none"),
    "/readyz": ("",),
    "/healthz": ("",),
    "/openapi.json": ("",),
}

#: Those that are about all queues, as docs/http.md says, or about databases.
OTHERS = {"/metrics", "/v1/library/tasks", "/v1/library/tasks/{id}"}

#: Those of the page that do not show the latest look at all queues.
VIEWS = (
    "queue?queue=big",
    "queue?queue=big&state=dead",
    "queue?queue=big&state=in-flight",
    "queue?queue=q00003",
    "message?queue=big&id=later-00003",
    "limits?queue=q00003",
    "limits?queue=keyed",
    "schedules",
    "schedules?after=q00009",
    "schedules?name=big-00003",
    "audit",
)


ABSENT = dict.fromkeys(
    (
        *("/v1/queues/nobody", "/v1/queues/big/tasks/none", "/v1/queues/big/jobs/none"),
        "/v1/schedules/none",
    ),
    404,
)


class Work(NamedTuple):
    commands: int
    bytes: int


def paths() -> list[str]:
    found = [
        one if one.startswith("/") else path + one for path, some in GETS.items() for one in some
    ]
    return found + [f"/page/{view}" for view in VIEWS]


def fill(center: TimeoutCenter, model: tuple[str, bytes], start: int, end: int) -> None:
    record, template = model
    keyed, big = (
        center.queues.declare("keyed", slots=1, key_concurrency=1),
        center.queues.declare("big", slots=2),
    )

    def schedule(queue: str, *names: str) -> None:
        made = [
            ScheduleChange(name, "", record.replace("model", name), 4 * 10**15, template)
            for name in names
        ]
        assert all(changed.done for changed in center.recurring.change_many(queue, made))

    numbers = [f"{number:05}" for number in range(start, end)]
    for number in numbers:
        center.queues.declare(f"q{number}", rate="100/s")
        center.queues.pause(f"q{number}")
        schedule(f"q{number}", f"q-{number}")
    schedule("big", *(f"big-{number}" for number in numbers))
    for kind, far in (("later", 10**11), ("dead", 0), ("flying", 0)):
        ids = [f"{kind}-{number}" for number in numbers]
        center.runner.run_all([put_call(center, big, id, b"x", delay_us=far) for id in ids])
        got = [] if far else center.pop("big", len(ids), recover=0, visibility=86_400).messages
        if kind == "dead":
            center.runner.run_all(
                [center.commands.reject(one, requeue=False, reason="test") for one in got]
            )
    failed = [FailedTask(one, "big", "shop.pay", "ValueError") for one in numbers]
    center.failures.keep(failed, FailureBounds())
    for number in numbers:
        for which in "ab":
            center.put("keyed", f"{which}-{number}", b"x", key=number)
    center.pop("keyed", end - start, recover=0, visibility=86_400)
    assert keyed.slots == 1


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Callable[[int], dict[str, Work]]]:
    """Asks for everything, beside so many of each kind."""
    own = Server(tmp_path).start()
    (tmp_path / "workshop.py").write_text(APP.format(broker=own.toc_url, backend=own.url))
    command = ("-m", "celery", "-A", "workshop", "toc", "web")
    there = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    api = HttpServer(own.toc_url, "--allow", "*", command=command, environment=there)
    client = own.client()
    center = TimeoutCenter(client)
    document = {"task": "shop.remind", "every": 3600, "queue": "model"}
    assert api.ask("PUT", "/v1/schedules/model", document).status == 200
    [model] = center.recurring.find("model", template=True)[1]
    filled = 0

    def ask(number: int) -> dict[str, Work]:
        nonlocal filled
        fill(center, (model.record, model.template), filled, number)
        filled = number
        return {path: work(client, api, path) for path in paths()}

    yield ask
    client.close()
    api.stop()
    own.stop()


def work(client: redis.Redis, api: HttpServer, path: str) -> Work:
    """What one answer takes, when the server knows the queues that it is about. The least of two:
    it counts what it does, and sends that now and then."""
    found = []
    for number in range(3):
        client.config_resetstat()
        before = client.info("stats")["total_net_output_bytes"]
        # What a view of a queue has found is shown again for a second: it looks for something else.
        other = f"&since=2020-01-0{number + 1}" if path.startswith("/page/queue") else ""
        reply = api.get(path + other)
        assert reply.status == ABSENT.get(path, 200), (path, reply)
        sent = client.info("stats")["total_net_output_bytes"] - before
        used = client.info("commandstats")
        own = {"cmdstat_info", "cmdstat_config|resetstat", "cmdstat_config"}
        commands = sum(said["calls"] for name, said in used.items() if name not in own)
        found.append(Work(commands, sent))
    return Work(*map(min, zip(*found[1:], strict=True)))


def test_no_answer_takes_more_work_the_more_there_is(
    asked: Callable[[int], dict[str, Work]],
) -> None:
    few, many = asked(FEW), asked(MANY)
    assert few["/page/queue?queue=big"].commands > 500  # it is looked, and not shown again
    grown = {
        path: (few[path], more)
        for path, more in many.items()
        if more.commands > few[path].commands + MARGIN or more.bytes > few[path].bytes + BYTES
    }
    assert grown == {}


def test_every_get_of_the_api_is_asked_or_named() -> None:
    api = api_for_app(Celery("shop", broker="toc+redis://localhost:1/0", set_as_current=False))
    shown = {path for path, operations in api.document["paths"].items() if "get" in operations}
    assert shown == {*GETS, *OTHERS}
    assert all(re.sub(r"\?.*", "", one) for one in paths())
