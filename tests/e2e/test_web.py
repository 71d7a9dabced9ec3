"""``celery toc web``: tasks that are sent over HTTP are Celery's, and run; schedules; metrics."""

from __future__ import annotations

import bz2
import json
import lzma
import os
import pickle
import re
import sys
import textwrap
import zlib
from base64 import b64encode
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from functools import reduce
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from celery import Celery
from kombu import pools

import celery_toc
from celery_toc import timeout_center
from kombu_toc import pack, unpack
from kombu_toc.http import new_token

from ..support import nursery
from ..support.cases import each
from ..support.http_server import HttpServer, peak_of
from ..support.page_visitor import Visitor, wait_for
from ..support.servers import Server
from ..support.workers import wait_until

#: What they share is started once, in one process of a run.
pytestmark = pytest.mark.xdist_group("web")

APP = """
import os
import time

from celery import Celery

app = Celery("shop", broker={broker!r}, backend={backend!r}, set_as_current=False)
app.conf.accept_content = ["json", "pickle"]
app.conf.task_routes = {{"shop.mail": {{"queue": "mail"}}}}


@app.task(name="shop.add", shared=False)
def add(a, b=1):
    return a + b


@app.task(name="shop.mail", bind=True, shared=False)
def mail(self, order):
    return dict(self.request.headers or {{}})


@app.task(name="shop.wait", shared=False)
def wait(path):
    while not os.path.exists(path):
        time.sleep(0.05)


@app.task(name="secret.drop", shared=False)
def drop():
    pass
"""

TASKS = "/v1/apps/shop/tasks"

ROLES_OF = {"reader": "read,operate", "writer": "read,write"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, single_server: Server) -> Path:
    made = tmp_path_factory.mktemp("web")
    text = APP.format(broker=single_server.toc_url, backend=single_server.url)
    (made / "webshop.py").write_text(textwrap.dedent(text))
    return made


@pytest.fixture(scope="module")
def shared(folder: Path, single_server: Server) -> Iterator[HttpServer]:
    with HttpServer(
        single_server.toc_url,
        *("--allow", "shop.*"),
        command=("-m", "celery", "-A", "webshop", "toc", "web"),
        environment=nursery.importing(folder),
    ) as made:
        yield made


@pytest.fixture(scope="module")
def app(folder: Path, shared: HttpServer) -> Iterator[Celery]:
    sys.path.insert(0, str(folder))
    import webshop

    yield webshop.app
    sys.path.remove(str(folder))
    pools.reset()


@pytest.fixture
def api(shared: HttpServer, app: Celery) -> HttpServer:
    """A server of an app whose queues are empty. Both go on to know what they have declared."""
    center = timeout_center(app)
    for queue in center.queues.names():
        center.queues.purge(queue)
        center.ack(center.pop(queue, 1000).messages)
    return shared


def worker(folder: Path, pool: str = "solo") -> AbstractContextManager[Any]:
    """One of its own process: Celery sets up the logging of the process that it runs in."""
    words = ("-m", "celery", "-A", "webshop", "worker", "-P", pool, "-Q", "celery,mail")
    # The app accepts pickle.
    environment = {**os.environ, **nursery.importing(folder), "C_FORCE_ROOT": "1"}
    return nursery.running(words, folder / "worker.log", env=environment)


@each(
    "fields, options",
    [
        ({"args": [2], "kwargs": {"b": 3}}, {}),
        ({"args": [2], "countdown": 3600}, {"countdown": 3600}),
        ({"args": [2], "queue": "other", "priority": 5}, {"queue": "other", "priority": 5}),
        ({"args": [2], "headers": {"x-key": "anna"}}, {"headers": {"x-key": "anna"}}),
        ({"args": [2], "expires": 60}, {"expires": 60}),
        (
            {"args": [2], "eta": "2035-01-01T02:00:00.123456+02:00"},
            {"eta": datetime(2035, 1, 1, 0, 0, 0, 123456, timezone.utc)},
        ),
        (
            {"args": ["t\u00e4sk \U0001f600", {"a": [None, True, 2**60]}], "priority": 0},
            {"priority": 0},
        ),
        (
            {"args": [], "kwargs": {"a": 1}, "countdown": 0.5, "expires": 1.5},
            {"countdown": 0.5, "expires": 1.5},
        ),
    ],
    ids=["args", "countdown", "queue", "headers", "expires", "eta", "texts", "both"],
)
def test_a_task_over_http_is_what_celery_sends(
    api: HttpServer, app: Celery, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    id = "5a6b1d2e-0000-4000-8000-000000000001"
    made = api.post(TASKS, {"task": "shop.add", "id": id, **fields})
    assert made.status == 201, made
    center = timeout_center(app)
    [found] = center.get(id)
    assert found.topic == made.json["queue"] == fields.get("queue", "celery")
    center.queues.purge(found.topic)
    app.tasks["shop.add"].apply_async(
        tuple(fields["args"]), fields.get("kwargs", {}), task_id=id, **options
    )
    [own] = center.get(id)
    over_http, celerys = unpack(found.body, id), unpack(own.body, id)
    assert over_http["body"] == celerys["body"]
    for message in (over_http, celerys):
        # Where and when it was made: another process, a moment later.
        message["headers"].pop("origin")
        for moment in ("eta", "expires"):
            if message["headers"].get(moment):
                message["headers"][moment] = message["headers"][moment][:13]
        for own in ("k", "reply_to"):  # tell messages of one id apart, and processes
            message["properties"].pop(own, None)
    for part in ("headers", "properties"):
        assert over_http[part] == celerys[part]
    assert over_http == celerys
    center.queues.purge(found.topic)


def test_a_task_runs_and_its_result_and_trace_come_back(
    api: HttpServer, app: Celery, folder: Path
) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent = api.post(TASKS, {"task": "shop.add", "args": [2], "kwargs": {"b": 3}}).json
    traced = api.post(TASKS, {"task": "shop.mail", "args": [7]}, headers={"traceparent": trace})
    assert traced.json["queue"] == "mail"
    assert api.get(f"{TASKS}/{sent['id']}").json == {"id": sent["id"], "state": "PENDING"}
    with worker(folder):
        app.AsyncResult(sent["id"]).get(timeout=30)
        headers = app.AsyncResult(traced.json["id"]).get(timeout=30)
    assert headers["traceparent"] == trace
    found = api.get(f"{TASKS}/{sent['id']}").json
    assert (found["state"], found["result"]) == ("SUCCESS", 5)


@each(
    "fields, status, field",
    [
        ({"task": "secret.drop"}, 403, "task"),
        ({"task": "shop.add"}, 422, "args"),
        ({"task": "shop.add", "args": [1, 2, 3]}, 422, "args"),
        ({"task": "shop.add", "args": {"a": 1}}, 422, "args"),
        (
            {"task": "shop.add", "args": [1], "headers": {"task": "secret.drop"}},
            422,
            "headers.task",
        ),
        ({"task": "shop.add", "args": [1], "serializer": "pickle"}, 422, "serializer"),
        ({"task": "shop.add", "args": [1], "eta": "now"}, 422, "eta"),
        ({"task": "shop.add", "args": [1], "eta": "9999-12-31T23:59:59Z"}, 422, "eta"),
        ({"task": "shop.add", "args": [1], "countdown": 1e308}, 422, "countdown"),
        ({"args": [1]}, 422, "task"),
    ],
)
def test_what_may_not_be_sent_is_refused_and_nothing_is(
    api: HttpServer, app: Celery, fields: dict[str, Any], status: int, field: str
) -> None:
    reply = api.post(TASKS, fields)
    assert (reply.status, reply.json["field"]) == (status, field)
    assert sum(found.counts.waiting for found in timeout_center(app).queues.summary()) == 0


HEADERS = {"task": "secret.drop", "id": "one"}
LINE = json.dumps({"h": HEADERS, "p": {}, "t": "application/json", "e": "utf-8"})
MESSAGE = {
    "headers": HEADERS,
    "properties": {},
    "content-type": "application/json",
    "content-encoding": "utf-8",
    "body": b"[[], {}, {}]",
}


@each(
    "fields",
    [
        {"json": [[], {}, {}], "headers": HEADERS},
        {"text": "[[], {}, {}]", "headers": HEADERS, "contentType": "application/json"},
        {"text": f"{LINE}\n[[], {{}}, {{}}]"},
        {"text": f"{LINE}\n"},
        {"body": b64encode(pack(MESSAGE, deflate=True)).decode()},
        # Under the id that a second message of this id would be kept under.
        {"body": b64encode(pack(MESSAGE, deflate=True, id="one#12345678")).decode()},
        {"json": {"task": "secret.drop", "id": "one"}, "contentType": "application/json"},
        {"json": {"task": "secret.drop", "id": "one"}, "headers": {"x-a": "b"}},
        {"body": "gASVAA==", "contentType": "application/x-python-serialize"},
        {"text": "task: secret.drop", "contentType": "application/x-yaml"},
        {"body": "eJw=", "headers": {"compression": "application/x-gzip"}},
    ],
    ids=[
        *("headers", "text", "envelope", "no body", "deflated", "copy", "protocol 1", "headers 1"),
        *("pickle", "yaml", "compressed"),
    ],
)
def test_a_message_that_a_worker_would_read_as_a_task_is_refused(
    api: HttpServer, app: Celery, fields: dict[str, Any]
) -> None:
    """Otherwise it would not matter which tasks are allowed."""
    one = {"id": "one", **fields}
    many = {"tasks": [{"id": "harmless", "text": "x"}, one]}
    for path, document in (("tasks", one), ("tasks:batch", many)):
        reply = api.post(f"/v1/queues/celery/{path}", document)
        assert reply.status == 403, reply
        assert "/v1/apps/shop/tasks" in reply.json["detail"]
    assert sum(found.counts.waiting for found in timeout_center(app).queues.summary()) == 0


def nested(line: str, depth: int) -> str:
    return line.replace('"DEEP"', "[" * depth + "]" * depth)


DEEP = {**HEADERS, "x": "DEEP"}
ENVELOPE = {"h": DEEP, "p": {}, "t": "application/json", "e": "utf-8"}


@each("depth", [700, 1_500, 100_000])
@each("where", ["headers", "body"])
def test_what_this_server_cannot_parse_is_not_let_in(
    api: HttpServer, app: Celery, where: str, depth: int
) -> None:
    """A worker on another Python may parse it: how deep JSON may be differs. Of 1,500 levels, which
    Python 3.11 does not parse, a worker on 3.13 runs the task."""
    if where == "headers":
        text = nested(f"{json.dumps(ENVELOPE)}\n[[], {{}}, {{}}]", depth)
        fields: dict[str, Any] = {"text": text}
    else:
        text = nested(json.dumps(DEEP), depth)
        fields = {"text": text, "contentType": "application/json"}
    for path, document in (("tasks", fields), ("tasks:batch", {"tasks": [fields]})):
        reply = api.post(f"/v1/queues/celery/{path}", document)
        assert reply.status == 403, reply
        assert "/v1/apps/shop/tasks" in reply.json["detail"]
    assert sum(found.counts.waiting for found in timeout_center(app).queues.summary()) == 0


@pytest.mark.parametrize(
    "text",
    [
        LINE.replace('"one"', "1" * 5_000) + "\n",  # an integer that only some Pythons read
        LINE.replace('"p": {}', '"p": {"a": {"__type__": "unknown", "__value__": 1}}') + "\nx",
        '{"__type__": "unknown", "__value__": 1}\nx',
    ],
    ids=["integer", "type", "type of all"],
)
def test_what_only_some_workers_can_parse_is_not_let_in(
    api: HttpServer, app: Celery, text: str
) -> None:
    reply = api.post("/v1/queues/celery/tasks", {"text": text})
    assert (reply.status, reply.json["type"]) == (403, "urn:celery-toc:forbidden"), reply


@each(
    "fields",
    [
        {"text": "{" + "[" * 100_000},
        {"text": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"},
        {"text": "[" * 100_000 + "\n"},
        {"text": '{\n  "h": {}\n}'},
        {"text": '{"h": {}, "p": {}}\n'},
        {"json": {"task": "secret.drop"}},
        {"json": {"task": 7}, "headers": {"x-a": "b"}},
        {"text": "x", "headers": {"x-task": "shop.add"}},
        {"text": '{"h": 1}'},
    ],
)
def test_other_messages_are_put(api: HttpServer, fields: dict[str, Any]) -> None:
    assert api.post("/v1/queues/celery/tasks", fields).status == 201


@each(
    "eta",
    [
        "9999-12-31T23:59:59Z",
        "9999-12-31T23:59:59.999999999Z",
        "9999-12-31T23:59:60Z",
        "9999-12-31T23:59:59-12:00",
    ],
)
def test_a_task_that_is_too_far_ahead_is_refused(api: HttpServer, eta: str) -> None:
    reply = api.post(TASKS, {"task": "shop.add", "args": [2], "eta": eta})
    assert (reply.status, reply.json["field"]) == (422, "eta"), reply
    assert "choose an earlier eta" in reply.json["detail"]


def test_another_app_is_not_found(api: HttpServer) -> None:
    reply = api.post("/v1/apps/blog/tasks", {"task": "shop.add"})
    assert (reply.status, "shop" in reply.json["detail"]) == (404, True)


def test_a_repeated_send_is_one_task(api: HttpServer, app: Celery) -> None:
    headers = {"idempotency-key": "once"}
    ids = {
        api.post(TASKS, {"task": "shop.add", "args": [1]}, headers=headers).json["id"]
        for _ in range(3)
    }
    assert len(ids) == 1
    assert timeout_center(app).counts("celery").ready == 1


def test_schedules_are_put_read_paused_resumed_run_and_deleted(
    api: HttpServer, app: Celery
) -> None:
    one = "/v1/schedules/nightly"
    put = api.ask("PUT", one, {"task": "shop.add", "cron": "0 3 * * *", "args": [7]})
    assert put.status == 200, put
    assert (put.json["state"], put.json["queue"]) == ("active", "celery")
    schedules = timeout_center(app).schedules
    found = schedules.get("nightly")
    assert found is not None and found.args == [7]
    assert api.get(one).json["nextTime"] == put.json["nextTime"]
    listed = api.get("/v1/schedules?queue=celery").json["schedules"]
    assert "nightly" in [schedule["name"] for schedule in listed]
    assert api.post(f"{one}:pause").json["state"] == "paused"
    assert api.post(f"{one}:resume").json["state"] == "active"
    skipped = api.post(f"{one}:skip").json
    assert skipped["nextTime"] > put.json["nextTime"]
    assert api.post(f"{one}:run").status == 200
    assert timeout_center(app).counts("celery").ready == 1
    history = api.get(f"{one}/history").json
    assert len(history["firings"]) >= 1
    whats = [edit["what"] for edit in history["edits"]]
    assert whats == ["ran it by hand", "left out the next firing", "resumed", "paused", "put"]
    assert {edit["by"] for edit in history["edits"]} == {"this machine (HTTP)"}
    past = {"startTime": "2020-01-01T00:00:00Z", "endTime": "2020-01-05T00:00:00Z"}
    assert len(api.post(f"{one}:backfill", past).json["ids"]) == 4
    assert api.post(f"{one}:backfill", past).json["ids"] == []
    assert api.post(f"{one}:backfill", {**past, "endTime": "2039-01-01T00:00:00Z"}).status == 409
    assert api.post("/v1/schedules/none:backfill", past).status == 404
    every = api.ask("PUT", "/v1/schedules/often", {"task": "shop.add", "every": 30, "args": [1]})
    assert every.json["schedule"]
    asked = {"task": "shop.add", "cron": "@daily", "args": [1], "exclude": ["2030-12-25"]}
    daily = api.ask("PUT", "/v1/schedules/often", {**asked, "overlap": "cancel"})
    assert (daily.json["schedule"], daily.json["exclude"]) == ("0 0 * * *", ["2030-12-25"])
    sunday = api.ask(
        "PUT", "/v1/schedules/often", {"task": "shop.add", "cron": "0 3 * * 7", "args": [1]}
    )
    assert sunday.json["schedule"] == "0 3 * * 0"
    for wrong, field in (
        ({"task": "shop.add", "cron": "x"}, "cron"),
        ({"task": "shop.add", "cron": "0, 3 * * *"}, "cron"),
        ({"task": "shop.add", "every": 3, "cron": "0 3 * * *"}, "every"),
        ({"task": "shop.add", "sun": "sunrise"}, "sun"),
        ({"task": "secret.drop", "every": 3}, "task"),
    ):
        reply = api.ask("PUT", "/v1/schedules/wrong", wrong)
        assert reply.json["field"] == field, reply
    assert api.ask("DELETE", one).json == {"deleted": True}
    assert api.get(one).status == 404
    assert api.post(f"{one}:pause").status == 404


def test_arguments_are_hidden_from_a_token_that_only_reads(
    api: HttpServer, app: Celery, folder: Path, single_server: Server
) -> None:
    secrets = {name: new_token(name, roles, "*") for name, roles in ROLES_OF.items()}
    task = {"task": "shop.add", "args": ["s3cret"], "kwargs": {"b": "t0ken"}}
    sent = api.post(TASKS, {**task, "countdown": 3600}).json["id"]
    api.ask("PUT", "/v1/schedules/hidden", {**task, "every": 3600})
    failed = {"status": "FAILURE", "traceback": None, "children": [], "task_id": "failed-1"}
    failed["result"] = {
        "exc_type": "ValueError",
        "exc_message": ["s3cret is weak"],
        "exc_module": "builtins",
    }
    done = {**failed, "status": "SUCCESS", "result": {"of": ["s3cret", 7], "x1": "s3cret"}}
    named = {"name": "shop.add", "args": ["s3cret"], "kwargs": {"b": "t0ken"}}
    said = {"result": "s3cret is for t0ken"}
    for id, meta in (
        ("failed-1", failed),
        ("done-1", {**done, **named}),
        ("done-2", {**done, **named, **said}),
        ("done-3", {**done, **said}),
    ):
        app.backend.set(app.backend.get_key_for_task(id), app.backend.encode(meta))
    with HttpServer(
        single_server.toc_url,
        *("--allow", "shop.*", "--mask", "a", "--mask", "x*"),
        command=("-m", "celery", "-A", "webshop", "toc", "web"),
        environment={
            **nursery.importing(folder),
            "TOC_HTTP_TOKENS": ";".join(line for _, line in secrets.values()),
        },
    ) as made:

        def ask(path: str, name: str) -> Any:
            headers = {"authorization": f"Bearer {secrets[name][0]}"}
            reply = made.get(path, headers=headers)
            assert reply.status == 200, reply
            assert (b"s3cret" in reply.body) == (name == "writer"), (path, name, reply)
            return reply.json

        for name in secrets:
            found = ask(f"/v1/queues/celery/tasks/{sent}", name)
            listed = ask("/v1/schedules?queue=celery", name)["schedules"]
            one = ask("/v1/schedules/hidden", name)
            assert one in listed
            ask(f"{TASKS}/failed-1", name)
            dots = "\u2022" * 4
            results = [ask(f"{TASKS}/done-{n}", name)["result"] for n in (1, 2, 3)]
            if name == "reader":
                assert results == [{"of": [dots, 7], "x1": dots}, f"{dots} is for t0ken", dots]
            else:
                assert results == [done["result"], said["result"], said["result"]]
            # The mask names the first parameter of the task, and not the second.
            args = ["s3cret"] if name == "writer" else ["\u2022" * 4]
            assert json.loads(found["text"])[:2] == [args, {"b": "t0ken"}]
            assert (one["args"], one["kwargs"]) == (args, {"b": "t0ken"})
    api.ask("DELETE", "/v1/schedules/hidden")


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def packed(body: bytes, kind: str = "application/json", **headers: Any) -> bytes:
    """A task of which a sender has said how its body is to be read."""
    headers = {"task": "shop.add", "id": "bomb", "argsrepr": "(1,)", "kwargsrepr": "{}", **headers}
    message = {**MESSAGE, "headers": headers, "content-type": kind, "body": body}
    return pack(message, deflate=False)


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, Path | None]]:
    """name -> a message that runs code, or expands to 512 MiB, where it is read as a worker would;
    and the file that it then makes."""
    file = tmp_path_factory.mktemp("bombs") / "unpickled"
    spaces = bytes(32 << 20).replace(b"\0", b" ")
    pickled = pickle.dumps([[Bomb(file)], {}, {}])

    def deflate(stream: Any, body: bytes) -> bytes:
        """What follows a full flush stands for itself: it can be repeated."""
        return stream.compress(body) + stream.flush(zlib.Z_FULL_FLUSH)

    whole = zlib.compressobj(wbits=-15)
    checksum = reduce(lambda value, _: zlib.adler32(spaces, value), range(16), 1)
    zipped = b"\x78\x9c" + deflate(whole, spaces) * 16 + whole.flush() + checksum.to_bytes(4, "big")
    line = packed(b"[[], {}, {}]").partition(b"\n")[0] + b"\n"
    raw = zlib.compressobj(9, wbits=-12)
    deflated = deflate(raw, line) + deflate(raw, spaces) * 15
    return {
        "pickle": (packed(pickled, "application/x-python-serialize"), file),
        "pickle-1": (
            packed(
                pickle.dumps({"task": "shop.add", "args": [Bomb(file)], "id": "bomb"}),
                "application/x-python-serialize",
                task=None,
            ),
            file,
        ),
        "pickle-in-gzip": (
            packed(
                zlib.compress(pickled),
                "application/x-python-serialize",
                compression="application/x-gzip",
            ),
            file,
        ),
        "bz2": (packed(bz2.compress(spaces, 1) * 16, compression="application/x-bz2"), None),
        "gzip": (packed(zipped, compression="application/x-gzip"), None),
        "lzma": (
            packed(lzma.compress(spaces, preset=0) * 16, compression="application/x-lzma"),
            None,
        ),
        "deflated": (b"\x01" + deflated + raw.flush(), None),
        "deep": (packed(b"[" * 100_000 + b"]" * 100_000), None),
    }


NAMES = ("pickle", "pickle-1", "pickle-in-gzip", "bz2", "gzip", "lzma", "deflated", "deep")


@pytest.mark.parametrize("name", NAMES)
def test_a_message_that_is_looked_at_runs_nothing_and_is_expanded_to_a_bound(
    api: HttpServer, app: Celery, bombs: dict[str, tuple[bytes, Path | None]], name: str
) -> None:
    body, file = bombs[name]
    center = timeout_center(app)
    center.put("mail", "bomb", body, delay=3600)
    before = peak_of(api.process.pid)
    person = Visitor(api)
    for view in ("queue?queue=mail", "queue?queue=mail&text=anna", "message?queue=mail&id=bomb"):
        reply = person.get(view)
        assert reply.status == 200, reply
        assert b"bomb" in reply.body or "text=" in view
    assert api.get("/v1/queues/mail/tasks?limit=10").status == 200
    # What is done to all that match is counted first, by their arguments.
    begun = person.post("all", queue="mail", act="cancel", state="waiting", text="anna")
    wait_for(person, begun.headers["location"], "0 messages match")
    [found] = center.get("bomb")
    task = center.task(found)
    assert (task.name, task.args) in (("shop.add", "(1,)"), (None, "(1,)"))
    assert "not decoded" in task.problem or "cannot be read" in task.problem
    assert peak_of(api.process.pid) - before < 100 << 20
    assert file is None or not file.exists()
    if file is not None:  # it is what the test says that it is
        assert center.task(found, decode="app").payload is not None
        file.unlink()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name in ("pickle", "gzip", "deflated") else pytest.mark.nightly
        )
        for name in NAMES
    ],
)
def test_a_command_that_shows_messages_runs_nothing_and_expands_them_to_a_bound(
    app: Celery,
    api: HttpServer,
    folder: Path,
    bombs: dict[str, tuple[bytes, Path | None]],
    name: str,
) -> None:
    body, file = bombs[name]
    center = timeout_center(app)
    center.put("mail", "bomb", body)
    [message] = center.pop("mail").messages
    center.reject(message, requeue=False)
    commands = """
import resource, sys
from click.testing import CliRunner
from celery.bin.base import CLIContext
from celery_toc.cli import toc
from webshop import app
context = CLIContext(app=app, no_color=True, workdir=None)
for line in sys.argv[1:]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = CliRunner().invoke(toc, line.split(), obj=context)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert done.exit_code == 0, (line, done.output, done.exception)
    assert grown < 100 << 10, (line, grown)
"""
    lines = [
        *("list --state dead", "list --state dead --task shop.*", "show bomb", "show bomb --json"),
        *("dead list", "dead list --task other", "dead requeue --task other"),
        *("cancel --task other --yes", "top --count 1"),
    ]
    nursery.done(("-c", commands, *lines), execute=True, environment=nursery.importing(folder))
    center.dead.purge("mail")
    assert file is None or not file.exists()


def test_what_is_cancelled_here_tells_whose_next_firing_it_was(
    api: HttpServer, app: Celery
) -> None:
    """As ``celery toc cancel`` does; also of all that match, on the page."""
    schedules = timeout_center(app).schedules

    def put(*names: str) -> list[str]:
        found = [schedules.put(name, "shop.add", 86_400, args=(1,)) for name in names]
        return [one.next_id or "" for one in found]

    [first] = put("first")
    said = api.ask("DELETE", f"/v1/queues/celery/tasks/{quote(first)}").json
    assert (said["cancelled"], said["schedules"]) == (1, ["first"])
    api.post(TASKS, {"task": "shop.add", "args": [1], "countdown": 60, "id": "no-firing"})
    said = api.post("/v1/queues/celery/tasks:cancel", {"ids": ["no-firing"]}).json
    assert (said["cancelled"], said["schedules"]) == (1, [])
    monthly = put("monthly")
    person = Visitor(api)
    person.get("queue?queue=celery")  # its form has what no other site knows
    done = person.post("do", queue="celery", act="cancel", id=monthly, sure="1")
    shown = unescape(person.get(done.headers["location"].removeprefix("/page/")).body.decode())
    assert "The next firing of 'monthly' was among them" in shown
    put("weekly", "yearly")
    begun = person.post("all", queue="celery", act="cancel", state="scheduled")
    view = begun.headers["location"].removeprefix("/page/")
    wait_for(person, view, "match")
    person.post("job", id=view.partition("id=")[2], do="go")
    shown = wait_for(person, view, "Done")
    assert re.search("The next firing of .*'weekly' and 'yearly' was among them", shown)
    for name in ("first", "monthly", "weekly", "yearly"):
        schedules.delete(name)


def test_what_runs_is_shown_although_it_is_acknowledged_and_not_in_flight(
    api: HttpServer, app: Celery, folder: Path, tmp_path: Path
) -> None:
    def status(*more: str) -> str:
        words = ("-m", "celery", "-A", "webshop", "toc", "status", *more)
        return nursery.done(words, environment=nursery.importing(folder)).stdout

    person = Visitor(api)
    end = tmp_path / "end"
    with worker(folder, "threads"):
        try:
            id = app.tasks["shop.wait"].apply_async((str(end),)).id
            shown = wait_for(person, "", "1 task runs.", seconds=20)
            assert id in shown and "runs without being in flight" in shown
            assert ">0</b><span>in flight, not acknowledged<" in shown
            said = json.loads(status("--running", "--json"))
            assert [(one["id"], one["task"]) for one in said["running"]] == [(id, "shop.wait")]
            assert sum(one["in_flight"] for one in said["topics"]) == 0
            assert "running" not in json.loads(status("--json"))
            assert re.search(rf"^{id} +shop.wait", status("--running"), re.M)
        finally:
            end.touch()
    assert "No worker that answers runs a task." in status("--running")
    flying = person.get("queue?queue=celery&state=in-flight").body.decode()
    assert "The overview shows what runs." in flying


def test_the_document_has_the_paths_of_the_app(api: HttpServer) -> None:
    paths = json.loads(api.get("/openapi.json").body)["paths"]
    assert {"/v1/apps/{app}/tasks", "/v1/schedules/{schedule}:pause", "/metrics"} <= set(paths)
    assert "/v1/queues/{queue}:lease" in paths


def test_what_the_library_knows_is_found_and_what_is_cancelled_is_recorded(
    single_server: Server, tmp_path: Path
) -> None:
    from celery import Celery

    url = (
        f"{single_server.toc_url}?toc_library=sqlite:///{tmp_path}/library.db&global_keyprefix=lib:"
    )
    app = Celery("shop", broker=url)

    @app.task(name="shop.expire")
    def expire(order: int) -> None: ...

    sent = [
        expire.apply_async((order,), countdown=3600, headers=celery_toc.biz("order", order))
        for order in (41, 42)
    ]
    with HttpServer(url) as api:

        def found(query: str) -> list[Any]:
            tasks: list[Any] = api.get(f"/v1/library/tasks?{query}").json["tasks"]
            return tasks

        [one] = found("bizType=order&bizId=42")
        assert (one["id"], one["task"], one["status"]) == (sent[1].id, "shop.expire", "pending")
        assert len(found("task=shop.expire")) == 2
        assert found("status=done") == []
        assert api.get("/v1/library/tasks?status=gone").status == 422
        cancelled = api.ask("DELETE", f"/v1/queues/celery/tasks/{sent[1].id}")
        assert cancelled.json["cancelled"] == 1
        assert found("bizId=42&status=cancelled")[0]["id"] == sent[1].id
        [record] = api.get(f"/v1/library/tasks/{sent[1].id}").json["tasks"]
        assert record["status"] == "cancelled"
        assert api.get("/v1/library/tasks/nobody").status == 404
        headers = {"x-biz-type": "order", "x-biz-id": "43"}
        api.post("/v1/queues/other/tasks", {"id": "note", "text": "x", "headers": headers})
        assert [one["id"] for one in found("bizType=order&bizId=43")] == ["note"]
        headers = {"x-biz-id": "44", "x-attributes": json.dumps({"shop": "berlin"})}
        api.post("/v1/queues/other/tasks", {"id": "sent", "text": "x", "headers": headers})
        [one] = found("attributes=shop%3Dberlin")
        assert (one["id"], one["attributes"]) == ("sent", {"shop": "berlin"})
        assert found("attributes=shop%3Dgraz") == []
        assert api.get("/v1/library/tasks?attributes=shop").status == 422
        [dead] = api.post("/v1/queues/other:lease", {}).json["tasks"]
        rejected = {"receipts": [dead["receipt"]], "dead": True}
        assert api.post("/v1/queues/other:reject", rejected).status == 200
        wait_until(lambda: [one["id"] for one in found("status=dead")] == [dead["id"]])
        retry = "/v1/library/tasks:retry"
        assert api.post(retry, {"status": ["failed", "dead"], "bizId": "nobody"}).json == {
            "retried": 0,
            "notKept": 0,
        }
        assert api.post(retry, {"status": ["done"]}).status == 422
        assert api.post(retry, {"status": ["dead"]}).json == {"retried": 1, "notKept": 0}
        assert api.post(retry, {"status": ["dead"]}).json == {"retried": 0, "notKept": 0}
    app.close()
