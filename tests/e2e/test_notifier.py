"""``celery toc notify`` and ``celery toc topic set --target``: a task goes to a URL when it is
due."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_toc import timeout_center

from ..support import nursery
from ..support.http_server import HttpServer
from ..support.notifier import SECRET, NotifierProcess, Target, signatures
from ..support.servers import Server
from .test_acl import rules

APP = """
from celery import Celery

app = Celery("shop", broker={broker!r}, set_as_current=False)
app.conf.task_routes = {{"shop.remind": {{"queue": "mail"}}}}


@app.task(name="shop.remind", shared=False)
def remind(order, text=""):
    pass
"""


@pytest.fixture
def environment(tmp_path: Path, single_server: Server) -> dict[str, str]:
    with single_server.client() as client:
        client.flushall()
    (tmp_path / "hookshop.py").write_text(textwrap.dedent(APP.format(broker=single_server.toc_url)))
    return {**os.environ, **nursery.importing(tmp_path)}


@pytest.fixture
def toc(environment: dict[str, str]) -> Callable[..., Any]:
    """Run ``celery toc`` with ``--json``."""

    def run(*command: str) -> Any:
        words = ("-m", "celery", "-A", "hookshop", "toc", *command, "--json")
        return json.loads(nursery.done(words, env=environment).stdout)

    return run


def test_a_task_is_sent_to_the_target_of_its_queue_when_it_is_due(
    toc: Callable[..., Any], environment: dict[str, str], single_server: Server
) -> None:
    app = Celery("shop", broker=single_server.toc_url, set_as_current=False)
    app.conf.task_routes = {"shop.remind": {"queue": "mail"}}
    answers = [(410, {}, b""), (204, {}, b""), (204, {}, b"")]
    with (
        Target(lambda _: answers.pop(0)) as target,  # type: ignore[arg-type, return-value]
        NotifierProcess(
            single_server.toc_url,
            command=("-m", "celery", "-A", "hookshop", "toc", "notify"),
            environment=environment,
        ) as notifier,
    ):
        toc("topic", "declare", "mail", "--target", target.url)
        sent = app.send_task("shop.remind", (7,), {"text": "pay"}, countdown=0.5)
        got = target.next()
        assert got.id == sent.id
        assert json.loads(got.body)[:2] == [[7], {"text": "pay"}]
        assert got.headers["content-type"] == "application/json"
        assert signatures(got, SECRET)
        notifier.wait_for("410 Gone")
        shown = toc("topic", "show", "mail")
        assert shown["target_stopped"].startswith("HTTP 410 at ")
        assert shown["ready"] == 1
        warnings = toc("status", "mail")["warnings"]
        assert any(
            text.startswith("the target of 'mail' is stopped (HTTP 410") for text in warnings
        )
        assert target.received.empty()
        changed = toc("topic", "set", "mail", "--target", target.url)
        assert (changed["target_stopped"], changed["changed"]) == (None, [])
        assert target.next().id == sent.id
        assert notifier.end() == 0
        app.send_task("shop.remind", (8,), countdown=3600)
        assert (
            "nobody sends 'mail' to its target, in which 1 message waits; start 'celery toc notify'"
            in toc("status", "mail")["warnings"]
        )
        toc("topic", "set", "mail", "--target", "none")
        assert toc("topic", "show", "mail")["limits"]["target"]["value"] is None
        timeout_center(app).queues.purge("mail")
    assert timeout_center(app).counts("mail") == (0, 0, 0, 0)


def test_a_server_of_an_apps_http_api_may_send_too(
    environment: dict[str, str], single_server: Server, tmp_path: Path
) -> None:
    (tmp_path / "secrets.txt").write_text(f"* {SECRET}\n")
    app = Celery("shop", broker=single_server.toc_url, set_as_current=False)
    command = ("-m", "celery", "-A", "hookshop", "toc", "web", "--notify")
    options = (str(tmp_path / "secrets.txt"), "--notify-allow", "127.0.0.1")
    with Target() as target:
        timeout_center(app).queues.declare("mail", target=target.url)
        with HttpServer(
            single_server.toc_url, command=(*command, *options), environment=environment
        ) as api:
            api.post("/v1/queues/mail/tasks", {"id": "order-7", "json": {"order": 7}})
            got = target.next()
            assert (got.id, got.body) == ("order-7", b'{"order":7}')
            assert signatures(got, SECRET)
    missing = nursery.done((*command, tmp_path / "none.txt"), code=1, env=environment)
    assert missing.stderr.startswith("Error: the secrets cannot be read: [Errno 2] No such file")


def test_a_broker_that_cannot_be_used_is_not_blamed_on_the_secrets() -> None:
    words = ("-m", "celery", "-b", "toc+embedded:///dev/null/x", "toc", "notify", "--unsigned")
    said = nursery.done(words, code=1).stderr
    assert "broker" in said and "secrets" not in said, said


def test_a_worker_has_the_rights_that_a_notifier_needs(tmp_path: Path) -> None:
    server = Server(tmp_path).start()
    try:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "n", "on", ">pw", *rules("worker"))
        url = server.toc_url.replace("//", "//n:pw@")
        app = Celery("shop", broker=server.toc_url, set_as_current=False)
        answers = [(500, {}, b""), (204, {}, b""), (410, {}, b"")]
        with (
            Target(lambda _: answers.pop(0)) as target,  # type: ignore[arg-type, return-value]
            NotifierProcess(url, "--backoff", "0") as notifier,
        ):
            center = timeout_center(app)
            center.queues.declare("mail", target=target.url)
            center.put("mail", "order-7", b"remind")
            target.take(2)
            center.put("mail", "order-8", b"remind")
            notifier.wait_for("410 Gone")
            assert notifier.end() == 0
            assert not any("right" in line or "NOPERM" in line for line in notifier.said)
            assert "pw@" not in "".join(notifier.said)
    finally:
        server.stop()
