"""The rules of docs/security.md: enough for a worker, a producer, an operator, and no more."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import redis
from celery import Celery

import kombu_toc
from kombu_toc.http import new_token
from kombu_toc.scripts.call import commands_of

from ..support.commands import answer
from ..support.fixtures import failure
from ..support.http_server import HttpServer
from ..support.inspection import put_some
from ..support.nodes import ROOT, WorkerProcess
from ..support.page_visitor import Visitor
from ..support.servers import Server
from ..support.tasks import make_app
from ..support.workers import Journal, Live, wait_until

#: The scripts that a role runs.
PRODUCER = {"admit", "bind", "bound", "broadcast", "cancel", "count", "counts", "declare"}
PRODUCER |= {"cancelled", "get", "put", "put_many", "put_special", "unbind"}
CONSUMER = {
    "ack",
    "bury",
    "due",
    "extend",
    "hand_back",
    "pop",
    "present",
    "purge",
    "reject",
    "release",
}
CONSUMER |= {"bury", "recall", "sweep"}
LIMITED = {f"{name}_limited" for name in ("ack", "bury", "pop", "purge", "reject", "release")}
WORKER = PRODUCER | CONSUMER | LIMITED | {"edition", "elect", "mark", "upkeep"}
SCRIPTS = {
    "producer": PRODUCER,
    "worker": WORKER,
    "operator": {path.stem for path in (ROOT / "kombu_toc/scripts/operations").glob("*.lua")}
    # The others are run where unique tasks are sent and consumed, and where the task library is
    # behind, by users with some rights more.
    - {"allowed", "put_unique", "sweep_claims", "logged", "written"},
}

#: What it is refused, and does without: redis-py's name for itself, and what is optional.
OPTIONAL = {"client|setinfo", "client", "config|get", "config", "info", "role", "hello"}


def rules(role: str) -> list[str]:
    """Those that the document gives a role."""
    text = (ROOT / "docs" / "security.md").read_text()
    [rule] = re.findall(rf"^ACL SETUSER {role} on >PASSWORD (.*)$", text, re.MULTILINE)
    return rule.split()


def commands(role: str) -> set[str]:
    return {rule[1:] for rule in rules(role) if rule[0] == "+"}


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Server]:
    """A server with a user for each role."""
    server = Server(tmp_path).start()
    with server.client() as client:
        for role in SCRIPTS:
            client.execute_command("ACL", "SETUSER", role, "on", f">{role}-pw", *rules(role))
    yield server
    server.stop()


def url(server: Server, role: str) -> str:
    return f"toc+redis://{role}:{role}-pw@127.0.0.1:{server.port}/0"


def refused(server: Server, role: str) -> set[str]:
    """What the server has refused it."""
    with server.client() as client:
        log = client.acl_log()
    found = {(str(e["object"]), str(e["reason"])) for e in log if e["username"] == role}
    return {what for what, reason in found if what not in OPTIONAL}


def unused(client: redis.Redis, commands: set[str]) -> set[str]:
    """Which of these the server has not been sent since its statistics were reset."""
    sent = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    # Redis 6.2 counts a command with all of its subcommands.
    return {name for name in commands if not {name, name.partition("|")[0]} & sent}


@pytest.fixture
def admin(guarded: Server, journal: Journal) -> Iterator[Celery]:
    made = make_app(guarded.toc_url, "disabled://")
    yield made
    made.close()


def test_a_producer_needs_its_rules_and_no_more(guarded: Server, journal: Journal) -> None:
    app = make_app(url(guarded, "producer"), "disabled://")
    with guarded.client() as client:
        client.config_resetstat()
        sent = [app.tasks["e2e.note"].apply_async((str(i),), countdown=i * 60) for i in range(3)]
        app.tasks["e2e.note"].apply_async(("slow",), routing_key="news.x", exchange="news")
        sent[1].revoke()
        app.control.revoke("unknown")
        with app.producer_pool.acquire() as producer:
            producer.channel.center.metrics.send(producer.channel.center.runner)
        app.close()
        assert refused(guarded, "producer") == set()
        in_scripts = commands_of(SCRIPTS["producer"])
        assert in_scripts <= commands("producer")
        # What is left is what it sends itself. (PING stands in for INFO.)
        assert unused(client, commands("producer") - in_scripts) == set()
        assert kombu_toc.center_for(guarded.toc_url).counts("celery").scheduled == 1


def test_a_worker_needs_its_rules_and_no_more(guarded: Server, admin: Celery, live: Live) -> None:
    admin.tasks["e2e.late_ack"].delay("late", 0.2)
    admin.tasks["e2e.again"].delay(2, 0.1)
    admin.tasks["e2e.refuse"].delay("for good")
    admin.tasks["e2e.note"].apply_async(("soon",), countdown=1)
    with guarded.client() as client:
        [worker] = live.start_workers(
            1, *("-P", "threads", "-c", "2", "-E"), mingle=True, broker=url(guarded, "worker")
        )
        live.journal.wait_for("soon", 1)
        live.journal.wait_for("late-done", 1)
        live.journal.wait_for("refused", 1)
        live.journal.wait_for("again", 3)
        assert admin.control.broadcast("toc", reply=True, timeout=3)
        center = kombu_toc.center_for(guarded.toc_url)
        wait_until(lambda: center.counts("celery").in_flight == 0)
        client.config_resetstat()
        client.script_flush()
        worker.container.restart()
        admin.tasks["e2e.note"].delay("afterwards")
        live.journal.wait_for("afterwards", 1)
        time.sleep(6)  # the worker reads its topics' declarations again
        worker.teardown()
        assert refused(guarded, "worker") == set()
        in_scripts = commands_of(SCRIPTS["worker"])
        assert in_scripts <= commands("worker")
        # What is left is what it sends itself.
        rare = {"zscan", "client|unblock"}  # when a stale queue is deleted; when it is busy
        assert unused(client, commands("worker") - in_scripts) <= rare
        assert "Traceback" not in worker.container.logs()


def test_an_operator_needs_its_rules_and_no_more(
    guarded: Server, admin: Celery, live: Live
) -> None:
    center = kombu_toc.center_for(guarded.toc_url)
    sent = [admin.tasks["e2e.note"].apply_async((str(i),), countdown=100) for i in range(4)]
    for name in ("a", "b"):
        admin.tasks["e2e.note"].delay(name)
    for message in center.pop("celery", 10).messages:
        center.reject(message, requeue=False, reason="on purpose", error="boom")
    first = sent[0].id
    app = make_app(url(guarded, "operator"), "disabled://")
    with guarded.client() as client:
        client.config_resetstat()
        for words in (
            ("status",),
            ("list",),
            ("show", first),
            ("reschedule", first, "--countdown", "2h"),
            ("run", first),
            ("dead", "list"),
            ("dead", "show", center.scan("celery", state="dead").messages[0].id),
            ("dead", "requeue", "--yes", center.scan("celery", state="dead").messages[0].id),
            ("dead", "purge", "--yes", "--all"),
            ("topic", "list"),
            ("limits", "celery"),
            ("topic", "show", "celery"),
            ("topic", "set", "celery", "--retries", "3"),
            ("topic", "declare", "old-mail"),
            ("topic", "delete", "old-mail", "--yes"),
            ("schedule", "put", "poll", "e2e.note", "--every", "1h", "--args", '["poll"]'),
            ("schedule", "list"),
            ("schedule", "show", "poll"),
            ("pause", "celery"),
            ("resume", "celery"),
            ("schedule", "pause", "poll"),
            ("schedule", "resume", "poll"),
            ("schedule", "skip", "poll"),
            ("schedule", "run", "poll"),
            ("schedule", "backfill", "poll", "--from", "-3h"),
            ("schedule", "sync"),
            ("schedule", "delete", "poll", "--yes"),
            ("check",),
            ("repair", "--yes"),
            ("reshard", "celery", "--slots", "16", "--settle", "0", "--yes"),
            *[("metrics", "--json")][: find_spec("prometheus_client") is not None],
            ("cancel", sent[1].id, "--yes"),
        ):
            said = answer(app, *words)
            assert said.code == 0, (words, said.out, said.err)
        live.start_workers(1, "-P", "solo", broker=guarded.toc_url)
        assert app.control.inspect(timeout=3).ping()
        assert refused(guarded, "operator") == set()
        in_scripts = commands_of(SCRIPTS["operator"])
        # Where the script chooses one of two, it is not to be read there.
        in_scripts |= {"hscan", "zscan"}
        assert in_scripts <= commands("operator")
        rare = {"client|id", "client|unblock", "hmget"}  # when replies take longer
        rare |= {"renamenx", "scard"}  # when repair sets a key of another type aside
        rare |= {"ping"} if find_spec("prometheus_client") is None else set()  # the exporter's
        assert unused(client, commands("operator") - in_scripts) <= rare
    app.close()


def test_the_page_needs_the_rules_of_an_operator(guarded: Server) -> None:
    center = kombu_toc.center_for(guarded.toc_url)
    put_some(center, "mail", 4, "m-", b"{}", delay=100, key="anna")
    center.put("mail", "dead", b"{}")
    center.reject(center.pop("mail").messages[0], requeue=False, error="boom")
    secret, line = new_token("anna", "read,write,operate", "*")
    with HttpServer(url(guarded, "operator"), environment={"TOC_HTTP_TOKENS": line}) as made:
        visitor = Visitor(made)
        assert visitor.sign_in(secret).status == 303
        queue = {"queue": "mail"}
        assert visitor.post("limits", **queue, **{"limit.key_concurrency": "1"}).status == 303
        for view in ("", "queue?queue=mail&text=x", "message?queue=mail&id=m-1", "dead"):
            assert visitor.get(view).status == 200
        for view in ("limits", "limits?queue=mail"):
            assert visitor.get(view).status == 200
        for id, act in (("m-0", "cancel"), ("m-1", "run"), ("dead", "requeue")):
            assert visitor.post("do", **queue, id=id, act=act, sure="1").status == 303
        assert visitor.post("pause", **queue, act="pause").status == 303
        begun = visitor.post("all", **queue, act="run", text="{")
        assert begun.status == 303, refused(guarded, "operator")
        job = begun.headers["location"]
        wait_until(lambda: "match" in visitor.get(job).body.decode(), 20)
        assert visitor.post("job", id=job.partition("=")[2], do="go").status == 303
        wait_until(lambda: "Done:" in visitor.get(job).body.decode(), 20)
        assert visitor.post("job", id=job.partition("=")[2], do="stop").status == 303
        assert visitor.get("audit").status == 200
        assert visitor.post("leave").status == 303
    assert refused(guarded, "operator") == set()


@pytest.mark.parametrize("role", [*SCRIPTS])
def test_each_role_can_change_every_task_and_touches_nothing_else(
    guarded: Server, role: str
) -> None:
    assert [rule for rule in rules(role) if rule[0] not in "+~"] == []
    assert [rule for rule in rules(role) if rule[0] == "~"] == ["~toc:*"]
    center = kombu_toc.center_for(guarded.toc_url)
    center.queues.declare("mail", slots=1)
    center.put("mail", "order-7", b"secret")
    with redis.Redis(port=guarded.port, username=role, password=f"{role}-pw") as client:
        assert b"secret" in client.hgetall("toc:{mail:0}:body")[b"order-7"]
        client.hset("toc:{mail:0}:body", "order-7", b"changed")
        assert [found.body for found in center.get("order-7")] == [b"changed"]
        client.unlink("toc:{mail:0}:body", "toc:{mail:0}:store")
        assert center.get("order-7") == []
        for command in (
            "HGET celery-task-meta x",
            "EVALSHA 0 1 celery-task-meta",
            "KEYS toc:*",
            "FLUSHALL",
            "CONFIG SET maxmemory 1",
            "ACL LIST",
            "CLIENT LIST",
            "REPLICAOF NO ONE",
            "SHUTDOWN NOSAVE",
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command.split())


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ("-zadd", ("may not run zadd,", "ACL SETUSER producer +zadd;")),
        ("-evalsha", ("may not run 'evalsha'", "ACL SETUSER producer +evalsha;")),
        ("-unlink", ("may not run 'unlink'", "ACL SETUSER producer +unlink;")),
        ("resetkeys", ("may not use keys that begin with 'toc:'", "ACL SETUSER producer ~toc:*;")),
    ],
)
def test_who_lacks_a_right_is_told_the_rule_to_add(
    guarded: Server, lacks: str, words: tuple[str, ...]
) -> None:
    app = make_app(url(guarded, "producer"), "disabled://")
    with guarded.client() as client:
        client.execute_command("ACL", "SETUSER", "producer", lacks)
    with app.connection() as connection:
        text = str(failure(connection, kombu_toc.NotPermittedError))
    for word in ("the user 'producer'", *words, "docs/security.md"):
        assert word in text
    app.close()


def test_celery_toc_tells_an_operator_the_rule_to_add(guarded: Server) -> None:
    app = make_app(url(guarded, "operator"), "disabled://")
    with guarded.client() as client:
        client.execute_command("ACL", "SETUSER", "operator", "-hgetall", "-hkeys")
    answer(app, "status").fails(1, "the user 'operator' may not run", "ACL SETUSER operator +h")
    app.close()


def test_a_worker_that_lacks_a_right_says_so_takes_nothing_and_goes_on_when_it_has_it(
    guarded: Server, admin: Celery, log_url: str, journal: Journal, tmp_path: Path
) -> None:
    for i in range(5):
        admin.tasks["e2e.note"].delay(f"kept-{i}")
    (tmp_path / "worker").mkdir()
    worker = WorkerProcess(
        *(tmp_path / "worker", url(guarded, "worker"), "disabled://", log_url, "-P", "solo")
    )
    with guarded.client() as client:
        # A pop would take messages out of one set and could not give their bodies.
        client.execute_command("ACL", "SETUSER", "worker", "-hmget")
        worker.start()
        try:
            wait_until(lambda: "may not run hmget" in worker.logs(), 30, worker.logs)
            assert "ACL SETUSER worker +hmget" in worker.logs()
            wait_until(lambda: "Cannot connect to" in worker.logs(), 30, worker.logs)
            assert "Logging error" not in worker.logs()
            assert kombu_toc.center_for(guarded.toc_url).counts("celery").ready == 5
            client.execute_command("ACL", "SETUSER", "worker", "+hmget")
            journal.wait_for("kept-", 5)
        finally:
            worker.teardown()
    assert len(journal.entries("kept-")) == 5
