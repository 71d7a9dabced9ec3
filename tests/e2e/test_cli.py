"""K9: `celery toc`, against a live app: what each command does, shows and answers to a script."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from celery import Celery

import kombu_toc
from celery_toc import timeout_center
from celery_toc.cli import screen
from celery_toc.cli import toc as command

from ..support import nursery
from ..support.cases import each
from ..support.commands import Answer, answer
from ..support.inspection import put_call
from ..support.nodes import ROOT
from ..support.servers import Server
from ..support.tasks import make_app
from ..support.workers import Live, environment_of, wait_until

HOUR = 3600

#: Celery's own program, of the environment that runs the tests.
CELERY = str(Path(sys.executable).with_name("celery"))


class Run(NamedTuple):
    """Runs commands on an app, whose broker is empty."""

    app: Celery
    toc: kombu_toc.TimeoutCenter

    def __call__(self, *args: object) -> Answer:
        return answer(self.app, *args)


@pytest.fixture
def run(app: Celery, toc: kombu_toc.TimeoutCenter, client: redis.Redis) -> Run:
    with app.connection_for_write() as connection:
        for queue in ("celery", "urgent", "one-slot"):
            app.amqp.queues[queue].bind(connection.default_channel).declare()
    return Run(app, toc)


def send(app: Celery, name: str, countdown: float | None = None, **options: Any) -> str:
    """Send a task that notes its name; return its id."""
    return app.tasks["e2e.note"].apply_async((name,), countdown=countdown, **options).id


def bury(toc: kombu_toc.TimeoutCenter, topic: str, *, error: str = "boom") -> list[str]:
    """Have what is due in a topic given up on; return the ids."""
    messages = toc.pop(topic, 100).messages
    for message in messages:
        toc.reject(message, requeue=False, reason="rejected by the task", error=error)
    return [message.id for message in messages]


# -- status


@pytest.mark.versions
def test_status_tells_what_each_topic_holds(run: Run) -> None:
    for i in range(3):
        send(run.app, f"later-{i}", HOUR)
    send(run.app, "dead", queue="urgent")
    bury(run.toc, "urgent")
    send(run.app, "due", queue="one-slot")
    send(run.app, "taken", queue="one-slot")
    run.toc.pop("one-slot", 1)
    time.sleep(0.05)  # the other one gets older
    said = run("status", "--json")
    assert said.code == 0
    topics = {row["queue"]: row for row in said.json["topics"]}
    numbers = ("slots", "scheduled", "ready", "in_flight", "dead")
    held = {name: tuple(row[key] for key in numbers) for name, row in topics.items()}
    assert held == {
        "celery": (1, 3, 0, 0, 0),
        "one-slot": (1, 0, 1, 1, 0),
        "urgent": (1, 0, 0, 0, 1),
    }
    assert 0.05 <= topics["one-slot"]["oldest_seconds"] < 30
    assert topics["celery"]["oldest_seconds"] == 0
    assert said.json["broker"] == run.app.conf.broker_url
    assert said.json["server"]["name"] in ("Redis", "Valkey")
    assert "no persistence" in said.json["warnings"][0]

    assert topics["celery"]["queue"] == "celery"
    text = run("status", "celery").out
    assert re.search(r"^celery +1 +3 +0 +0 +0 +-", text, re.M), text
    assert "urgent" not in text


def test_status_hides_what_goes_away_by_itself_while_it_is_empty(run: Run) -> None:
    run.toc.queues.declare("reply", slots=1, expires=60_000)
    assert "reply" not in run("status").out
    assert "reply" in run("status", "--all").out
    assert "reply" in run("status", "reply").out


def test_status_asks_no_more_of_the_server_if_more_is_scheduled(live: Live, run: Run) -> None:
    def asked() -> int:
        """The least of three: threads of earlier tests may ask the server, too."""
        found = []
        for _ in range(3):
            live.client.config_resetstat()
            assert run("status").code == 0
            found.append(sum(value["calls"] for value in live.client.info("commandstats").values()))
        return min(found)

    topic = live.toc.registry.topic("celery")
    far = time.time_ns() // 1000 + HOUR * 1_000_000
    for i in range(100):  # something in each slot
        live.toc.put("celery", f"first-{i}", b"{}", delay=HOUR)
    asked()  # its scripts are known to the server from now on
    few = asked()
    live.toc.runner.run_all(
        [put_call(live.toc, topic, f"more-{i}", b"{}", at_us=far + i) for i in range(5000)]
    )
    assert asked() == few


# -- list and show


def test_list_shows_messages_in_the_order_of_time_and_page_by_page(app: Celery, run: Run) -> None:
    ids = [send(app, f"n{i}", HOUR + 60 * i) for i in range(7)]
    pages, after = [], None
    while True:
        cursor = ("--after", after) if after else ()
        page = run("list", "--queue", "celery", "--limit", 3, "--json", *cursor).json
        pages.append([message["id"] for message in page["messages"]])
        after = page["after"]
        if after is None:
            break
    assert pages == [ids[:3], ids[3:6], ids[6:]]
    text = run("list", "--limit", 3).out
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ids[:3]
    assert "--after" in text


def test_list_tells_task_arguments_state_and_time(app: Celery, run: Run) -> None:
    before = time.time()
    id = app.tasks["e2e.nap"].apply_async(("x",), {"seconds": 2}, countdown=HOUR, priority=9).id
    [message] = run("list", "--json").json["messages"]
    due = datetime.fromisoformat(message.pop("time").replace("Z", "+00:00")).timestamp()
    assert before + HOUR - 1 <= due <= time.time() + HOUR + 1
    assert message.pop("slot") in range(8)
    assert message == {
        "id": id,
        "task": "e2e.nap",
        "queue": "celery",
        "priority": 9,
        "state": "scheduled",
        "retries_left": 16,
        "far": False,
        "key": None,
        "unique": None,
        "visibility": None,
        "max_lease": None,
        "expiration": None,
        "expires": None,
        "args": ["x"],
        "kwargs": {"seconds": 2},
        "argsrepr": "('x',)",
        "kwargsrepr": "{'seconds': 2}",
        "reason": None,
        "error": None,
        "problem": None,
    }
    text = run("list").out
    assert "('x',) {'seconds': 2}" in text
    assert re.search(r" 59m\d\ds| 1h00m", text), text


def test_list_chooses_by_topic_state_time_and_task(run: Run) -> None:
    def listed(*options: object) -> set[str]:
        said = run("list", "--json", *options)
        assert said.code == 0, said.err
        return {message["id"] for message in said.json["messages"]}

    soon, late = send(run.app, "soon", HOUR), send(run.app, "late", 24 * HOUR)
    other = run.app.tasks["e2e.add"].apply_async((1, 2), countdown=HOUR, queue="urgent").id
    send(run.app, "dead", queue="one-slot")
    [dead] = bury(run.toc, "one-slot")
    due = send(run.app, "due", queue="one-slot")

    assert listed() == {soon, late, other, dead, due}
    assert listed("--queue", "urgent") == {other}
    assert listed("--task", "e2e.add") == {other}
    assert listed("--task", "e2e.n*", "--state", "scheduled") == {soon, late}
    assert listed("--state", "ready") == {due}
    assert listed("--state", "dead") == {dead}
    assert listed("--state", "in-flight") == set()
    assert listed("--since", "2h") == {late}
    assert listed("--since", "30m", "--until", "2h") == {soon, other}
    assert listed("--since", "1 min ago", "--until", "now") == {dead, due}
    tomorrow = (datetime.now(timezone.utc) + timedelta(hours=20)).isoformat()
    assert listed("--since", tomorrow) == {late}
    assert run("list", "--queue", "celery", "--state", "dead").out == "No messages match.\n"


def test_show_tells_all_of_a_message_decoded(app: Celery, run: Run) -> None:
    id = (
        app.tasks["e2e.nap"]
        .apply_async(
            ("x",),
            {"seconds": 2},
            countdown=HOUR,
            headers={"tenant": "acme", "x-visibility": 600, "x-key": "c-42"},
            expiration=900,
        )
        .id
    )
    [message] = run("show", id, "--json").json["messages"]
    assert message["args"] == ["x"]
    assert message["kwargs"] == {"seconds": 2}
    assert message["headers"]["tenant"] == "acme"
    assert message["headers"]["eta"]
    assert (message["visibility"], message["max_lease"], message["expiration"]) == (600, None, 900)
    assert message["key"] == "c-42"
    assert datetime.fromisoformat(message["expires"].replace("Z", "+00:00")) == (
        datetime.fromisoformat(message["time"].replace("Z", "+00:00")) + timedelta(seconds=900)
    )
    assert message["properties"]["correlation_id"] == id
    assert json.loads(message["body"])[0] == ["x"]
    text = run("show", id).out
    for line in (
        "task +e2e.nap",
        "key +c-42",
        "state +scheduled",
        "headers.tenant +acme",
        "retries left +16",
        "visibility +600 s",
    ):
        assert re.search(f"^{line}$", text, re.M), text
    assert re.search(r"^due .*\(in (59m|1h)", text, re.M), text


def test_show_shows_every_message_that_has_the_id(run: Run) -> None:
    """As while a task runs that was retried."""
    send(run.app, "one", HOUR, task_id="same")
    send(run.app, "another", 2 * HOUR, task_id="same")
    send(run.app, "elsewhere", 3 * HOUR, task_id="same", queue="urgent")
    messages = run("show", "same", "--json").json["messages"]
    assert sorted(message["args"][0] for message in messages) == ["another", "elsewhere", "one"]
    assert len(run("show", "same", "--queue", "urgent", "--json").json["messages"]) == 1


def test_what_no_celery_has_written_is_shown_all_the_same(run: Run) -> None:
    run.toc.put("celery", "raw", b"\x00\xffnot an envelope\x1b[2J", delay=HOUR)
    with run.app.connection_for_write() as connection, connection.Producer() as producer:
        options = {"content_type": "application/x-python-serialize", "content_encoding": "binary"}
        producer.publish(
            b"x",
            routing_key="celery",
            headers={"id": "pickled", "task": "a.b", "eta": "2100-01-01T00:00:00"},
            **options,
        )
    listed = {m["id"]: m for m in run("list", "--json").json["messages"]}
    assert listed["raw"]["task"] is None
    assert (listed["pickled"]["task"], listed["pickled"]["args"]) == ("a.b", None)
    assert "unknown envelope version" in listed["raw"]["problem"]
    assert "only JSON" in listed["pickled"]["problem"]
    for id in ("raw", "pickled"):
        said = run("show", id)
        assert said.code == 0
        assert id in said.out
        assert "\x1b" not in said.out


# -- cancel, reschedule, run


def test_a_cancelled_task_is_gone_and_a_second_cancel_finds_nothing(run: Run) -> None:
    first, second = send(run.app, "a", HOUR), send(run.app, "b", HOUR)
    said = run("cancel", first, second, "--yes", "--json")
    assert said.code == 0
    assert said.json == {
        "results": [
            {
                **{"id": id, "queue": "celery"},
                **{"state": "scheduled", "cancelled": True, "revoked": True},
            }
            for id in (first, second)
        ],
        "schedules": [],
    }
    assert run.toc.counts("celery").waiting == 0
    run("cancel", first, "--yes").fails(3, "no message", first)


def test_what_a_worker_has_is_cancelled_too_late_and_says_so(live: Live, run: Run) -> None:
    """And `run` makes a task that waits run now."""
    live.start_workers(1, "-P", "solo")
    id = live.app.tasks["e2e.late_ack"].apply_async(("long", 3), countdown=HOUR).id
    assert run("run", id).code == 0
    live.journal.wait_for("long", 1)
    said = run("cancel", id, "--yes", "--json")
    said.fails(4, "too late", id, "in flight")
    assert said.json["results"][0] == {
        "id": id,
        "queue": "celery",
        "state": "in-flight",
        "cancelled": False,
        "revoked": False,
    }
    run("run", id).fails(4, "too late")
    run("reschedule", id, "--countdown", "1h").fails(4, "too late")
    [message] = run("show", id, "--json").json["messages"]
    assert message["state"] == "in-flight"
    live.journal.wait_for("long-done", 1)
    wait_until(lambda: not live.toc.get(id))
    ended = run("show", id)
    assert (ended.code, "SUCCESS" in ended.out) == (0, True), ended.out


@pytest.mark.parametrize(
    ("options", "seconds"),
    [(("--countdown", "1h30m"), 5400), (("--countdown", "90"), 90), (("--eta", "IN A DAY"), 86400)],
)
def test_reschedule_gives_another_time(run: Run, options: tuple[str, str], seconds: int) -> None:
    id = send(run.app, "moved", HOUR)
    eta = (datetime.now(timezone.utc) + timedelta(days=1)).isoformat()
    said = run("reschedule", id, options[0], options[1].replace("IN A DAY", eta), "--json")
    assert said.code == 0, said.err
    [result] = said.json["results"]
    due = datetime.fromisoformat(result.pop("time").replace("Z", "+00:00")).timestamp()
    assert abs(due - time.time() - seconds) < 2
    assert result == {**{"id": id, "queue": "celery"}, **{"state": "scheduled", "moved": True}}
    assert run("show", id, "--json").json["messages"][0]["time"] == said.json["results"][0]["time"]


# -- dead messages


@pytest.mark.versions
def test_a_dead_task_is_listed_shown_and_requeued_and_runs_again(live: Live, run: Run) -> None:
    live.start_workers(1, "-P", "solo")
    id = live.app.tasks["e2e.refuse"].delay("the order is cancelled").id
    wait_until(lambda: run("dead", "list", "--json").json["messages"])
    [message] = run("dead", "list", "--json").json["messages"]
    assert (message["id"], message["state"]) == (id, "dead")
    assert message["reason"] == "rejected by the task"
    assert message["error"] == "the order is cancelled"
    text = run("dead", "list").out
    assert "rejected by the task" in text
    assert "the order is cancelled" in text
    assert re.search(r"^died ", run("dead", "show", id).out, re.M)
    assert run("dead", "requeue", id, "--yes", "--json").json == {"requeued": 1}
    assert len(live.journal.wait_for("refused", 2)) == 2


def test_dead_messages_are_requeued_and_purged_by_task_topic_or_all(run: Run) -> None:
    for queue in ("celery", "urgent"):
        send(run.app, "note", queue=queue)
        run.app.tasks["e2e.add"].apply_async((1, 2), queue=queue)
        bury(run.toc, queue)
    said = run("dead", "requeue", "--queue", "urgent", "--task", "e2e.add", "--yes", "--json")
    assert said.json == {"requeued": 1}
    assert (run.toc.counts("urgent").ready, run.toc.counts("urgent").dead) == (1, 1)
    assert run("dead", "purge", "--task", "e2e.n*", "--yes").out == "Purged 2 messages.\n"
    assert run("dead", "purge", "--all", "--yes", "--json").json == {"purged": 1}
    assert run.toc.counts("celery").dead == run.toc.counts("urgent").dead == 0
    assert run.toc.counts("urgent").ready == 1


def test_dead_commands_touch_only_what_is_dead(app: Celery, run: Run) -> None:
    id = send(app, "alive", HOUR)
    run("dead", "show", id).fails(4, "waiting, not dead")
    run("dead", "purge", id, "--yes").fails(3, "not dead")
    run("dead", "requeue", id, "--yes").fails(3, "not dead")
    run("dead", "purge", "--yes").fails(2, "--all")
    run("dead", "purge", id, "--all", "--yes").fails(2, "not both")
    assert run("show", id).code == 0


# -- check and repair


def test_check_finds_what_cannot_be_and_repair_mends_it(live: Live, run: Run) -> None:
    assert run("check").out == "No inconsistencies found.\n"
    send(live.app, "broken", HOUR, task_id="broken")
    [found] = live.toc.get("broken")
    live.client.hdel(live.toc.registry.topic("celery").slot(found.slot).body, "broken")
    said = run("check", "--json")
    assert said.code == 5
    [fault] = said.json["faults"]
    assert fault.pop("places")[0].endswith(":store")
    assert fault == {
        **{"queue": "celery", "slot": found.slot},
        **{"kind": "no body", "id": "broken"},
    }
    assert run("check", "urgent").code == 0
    assert run("check").code == 5  # to look changes nothing
    said = run("repair", "--yes")
    assert said.code == 0
    assert "no body" in said.out
    assert run("check").code == 0


# -- top


def test_top_tells_rates_and_what_comes_due(run: Run) -> None:
    for i in range(6):
        send(run.app, f"soon-{i}", 25 + 10 * i)
    send(run.app, "far", HOUR)
    said = run("top", "celery", "--count", 2, "--interval", "100ms", "--span", "1m", "--json")
    assert said.code == 0
    looks = [json.loads(line) for line in said.out.splitlines()]
    assert len(looks) == 2
    for look in looks:
        [topic] = look["topics"]
        assert (topic["queue"], topic["scheduled"]) == ("celery", 7)
        assert look["coming"]["span_seconds"] == 60
        assert sum(look["coming"]["due"]) == 4  # in 25, 35, 45 and 55 seconds
        assert max(look["coming"]["due"]) == 1
    text = run("top", "--count", 2, "--interval", "100ms").out.splitlines()
    assert text[0].split()[:2] == ["TIME", "QUEUE"]
    assert len(text) == 7  # three topics, twice


def test_status_and_top_tell_how_late_workers_were_and_what_they_did(live: Live, run: Run) -> None:
    live.start_workers(1, "-P", "solo")
    before = time.time()
    for i in range(20):
        send(live.app, f"counted-{i}", 0.3)
    live.journal.wait_for("counted-", 20)
    wait_until(lambda: kombu_toc.read_metrics(live.toc)["celery"].totals["acked"] == 20)
    [topic] = run("status", "celery", "--json").json["topics"]
    assert 0 <= topic["late_p50_seconds"] <= topic["late_p99_seconds"] < time.time() - before
    assert re.search(r"^celery +1 .* \d[\d.]*m?s +\d[\d.]*m?s +1 +0B$", run("status").out, re.M)
    [look] = run("top", "celery", "--count", 1, "--json").out.splitlines()
    [topic] = json.loads(look)["topics"]
    rates = topic["per_second"]
    # This process may still have told of deliveries of its own, in the tests before.
    assert rates["delivered"] >= rates["acked"] > 0


# -- wrong input


@each(
    ("words", "code", "says"),
    [
        (("show", "missing"), 3, "'missing'"),
        (("cancel", "missing", "--yes"), 3, "'missing'"),
        (("reschedule", "missing", "--countdown", "1h"), 3, "'missing'"),
        (("run", "missing"), 3, "'missing'"),
        (("dead", "show", "missing"), 3, "'missing'"),
        (("status", "celry"), 3, "do you mean 'celery'?"),
        (("list", "--queue", "nowhere"), 3, "no queue 'nowhere'"),
        (("show", "x", "--queue", "nowhere"), 3, "'nowhere'"),
        (("check", "nowhere"), 3, "'nowhere'"),
        (("repair", "nowhere", "--yes"), 3, "'nowhere'"),
        (("top", "nowhere", "--count", "1"), 3, "'nowhere'"),
        (("dead", "list", "--queue", "nowhere"), 3, "'nowhere'"),
        (("reschedule", "x", "--eta", "tomorrow"), 2, "ISO 8601"),
        (("reschedule", "x", "--eta", "2300-01-01"), 2, "2255"),
        (("reschedule", "x", "--countdown", "soon"), 2, "1h30m"),
        (("reschedule", "x", "--countdown", "-5"), 2, "1h30m"),
        (("reschedule", "x"), 2, "either --eta or --countdown"),
        (("cancel",), 2, "say which: ids, --queue"),
        (("cancel", "x", "--task", "y"), 2, "not both"),
        (("cancel", "--queue", "celery", "--in-flight"), 2, "goes with ids"),
        (("cancel", "--queue", "nowhere"), 3, "no queue 'nowhere'"),
        (("run",), 2, "say which: ids, --queue"),
        (("pause", "nowhere"), 3, "no queue 'nowhere'"),
        (("purge", "nowhere"), 3, "no queue 'nowhere'"),
        (("delete", "nowhere", "--force"), 3, "no queue 'nowhere'"),
        (("cancel", "missing"), 3, "no message 'missing'"),
        (("list", "--state", "scheduled", "--until", "-1h"), 2, "--until is in the past"),
        (("list", "--state", "ready", "--since", "1h"), 2, "--since is in the future"),
        (("list", "--state", "dead", "--since", "1h"), 2, "--since is in the future"),
        (("dead", "list", "--since", "1h"), 2, "--since is in the future"),
        (("list", "--since", "2h", "--until", "1h"), 2, "--since is not before --until"),
        (("reschedule", "x", "--eta", "2030-01-01", "--countdown", "1"), 2, "either"),
        (("list", "--since", "yesterday"), 2, "--since: 'yesterday'"),
        (("list", "--state", "sleeping"), 2, "in-flight"),
        (("list", "--limit", "0"), 2, "--limit"),
        (("list", "--after", "nonsense"), 2, "'nonsense'"),
        (("top", "--interval", "x"), 2, "1h30m"),
        (("show",), 2, "toc show --help"),
        (("lst",), 2, "list"),
        (("show", "x", "--jsn"), 2, "--json"),
        (("show", "-A", "shop", "x"), 2, "celery -A ... toc"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_input_gets_one_line_and_an_exit_code(
    run: Run, words: tuple[str, ...], code: int, says: str
) -> None:
    said = run(*words)
    said.fails(code, says)
    assert said.out == ""


@pytest.fixture
def kept(app: Celery, run: Run, toc: kombu_toc.TimeoutCenter, client: redis.Redis) -> Any:
    """What is scheduled, beside a dead letter and what is to be repaired."""
    send(app, "kept", HOUR, task_id="x")
    client.zadd(toc.registry.topic("one-slot").slot(0).dead, {"broken": 1e15})
    send(app, "dead", queue="urgent")
    bury(toc, "urgent")
    [message] = toc.get("x")
    return message


@each(
    "words",
    [
        ("cancel", "x"),
        ("dead", "purge", "--all"),
        ("dead", "requeue", "--all"),
        ("cancel", "--queue", "celery"),
        ("reschedule", "--queue", "celery", "--countdown", "2h"),
        ("run", "--queue", "celery"),
        ("purge", "celery"),
        ("delete", "urgent", "--force"),
        ("repair",),
        ("delete", "one-slot"),  # the last: it needs an empty one
    ],
    ids=" ".join,
)
def test_without_a_terminal_to_ask_on_nothing_is_destroyed(
    run: Run, kept: Any, words: tuple[str, ...]
) -> None:
    if words == ("delete", "one-slot"):
        run.toc.client.delete(run.toc.registry.topic("one-slot").slot(0).dead)
    run(*words).fails(2, "cannot ask for confirmation without a terminal; pass --yes")
    assert run.toc.get("x") == [kept]
    assert "one-slot" in run.toc.queues.names()
    assert run.toc.counts("urgent").dead == 1


@each(
    ("broker", "code", "says"),
    [
        ("toc+redis://:secret@127.0.0.1:1/0", 1, "127.0.0.1:1"),
        ("toc+unix:///nowhere/redis.sock", 1, "/nowhere/redis.sock"),
        ("redis://127.0.0.1:1/0", 2, "toc+redis://"),
        ("memory://", 2, "toc+redis://"),
        ("toc+cluster://127.0.0.1:1", 1, "127.0.0.1:1"),
        ("toc+cluster://127.0.0.1:1/3", 2, "database"),
        ("toc+redis://127.0.0.1:1/0?toc_slot=3", 2, "toc_slots"),
        ("nonsense://127.0.0.1", 2, "nonsense"),
    ],
)
def test_a_broker_that_is_down_or_no_timeout_center_is_told_in_a_line(
    broker: str, code: int, says: str
) -> None:
    app = make_app(broker, "cache+memory://")
    for words in (
        ("status",),
        ("list",),
        ("show", "x"),
        ("cancel", "x", "--yes"),
        ("reschedule", "x", "--countdown", "1"),
        ("run", "x"),
        ("dead", "list"),
        ("dead", "purge", "--all", "--yes"),
        ("check",),
        ("repair", "--yes"),
        ("top", "--count", "1"),
    ):
        said = answer(app, *words)
        said.fails(code, says)
        assert said.out == ""
        assert "secret" not in said.err


@each("name", sorted(command.commands_at))
def test_every_command_has_help_with_an_example(name: str) -> None:
    said = answer(None, name, "--help")
    assert said.code == 0
    groups = ("dead", "failures", "library", "schedule", "topic")
    assert name in groups or f"  celery -A shop toc {name}" in said.out


# -- work that takes its time


def lines_of(app: Celery, monkeypatch: pytest.MonkeyPatch, *args: object) -> Answer:
    monkeypatch.setattr(screen, "LINES_EVERY", 0.0)
    found = answer(app, *args)
    assert found.code == 0, found.err
    return found


def test_long_work_says_in_lines_how_far_it_has_come_where_there_is_no_terminal(
    run: Run, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = 1_100

    def put(delay: float = HOUR) -> None:
        run.toc.put_many(
            "celery", [{"id": f"{n}", "body": b"{}", "delay": delay} for n in range(many)]
        )

    def failed() -> None:
        kept = [kombu_toc.FailedTask(f"{n}", "celery", "e2e.note", "OSError") for n in range(many)]
        run.toc.failures.keep(kept, kombu_toc.FailureBounds())

    def dead() -> None:
        put(0)
        while bury(run.toc, "celery"):
            pass

    everything = ("--queue", "celery", "--yes")
    for label, before, words in (
        ("Looking", put, ("list", "--task", "none")),
        ("Rescheduling", put, ("reschedule", *everything, "--countdown", "2h")),
        ("Cancelling", put, ("cancel", *everything)),
        ("Purging", put, ("purge", "celery", "--yes")),
        ("Requeuing", dead, ("dead", "requeue", *everything)),
        ("Purging", dead, ("dead", "purge", *everything)),
        ("Deleting", failed, ("failures", "delete", *everything)),
    ):
        before()
        said = lines_of(run.app, monkeypatch, *words)
        assert f"{label}: {many:,} of {many:,}\n" in said.err, (words, said.out, said.err)
        run.toc.queues.purge("celery")
    put()
    assert lines_of(run.app, monkeypatch, "purge", "celery", "--yes", "--json").err == ""
    run.toc.put("celery", "one", b"{}", delay=HOUR)
    assert lines_of(run.app, monkeypatch, "purge", "celery", "--yes").err == ""  # it is not long
    timeout_center(run.app).schedules.put("hourly", "e2e.note", 3600, args=["x"])
    words = ("schedule", "backfill", "hourly", "--from=-1200h", "--limit", "1300", "--rate", "1000")
    assert re.search(r"Sending: (1,\d+) of \1\n", lines_of(run.app, monkeypatch, *words).err)
    with Celery("old", broker=server.url, set_as_current=False) as old:
        for number in range(many):
            old.send_task("e2e.note", (number,))
    said = lines_of(run.app, monkeypatch, "migrate", server.url, "--yes")
    assert f"Moving: {many:,} of {many:,}\n" in said.err


def test_long_work_draws_a_bar_on_a_terminal(run: Run, server: Server) -> None:
    run.toc.put_many("celery", [{"id": f"{n}", "body": b"{}", "delay": HOUR} for n in range(1_100)])
    code, shown = in_a_terminal(
        "", "-b", server.toc_url, "toc", "cancel", "--queue", "celery", "--yes"
    )
    assert (code, run.toc.counts("celery").waiting) == (0, 0), shown
    assert re.search(r"Cancelling\W+#+", shown) and "100%" in shown, shown


# -- the real program


def celery(*words: str, **environment: str) -> subprocess.Popen[str]:
    """Celery's own program, started."""
    return nursery.Popen(
        [CELERY, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def in_a_terminal(typed: str, *words: str, **environment: str) -> tuple[int, str]:
    """The exit code and what is on the screen when that is typed."""
    master, slave = pty.openpty()
    process = nursery.Popen(
        [CELERY, *words],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", **environment},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    os.write(master, typed.encode())
    shown = b""
    try:
        while part := os.read(master, 65536):
            shown += part
    except OSError:  # that is how a terminal ends
        pass
    os.close(master)
    return process.wait(30), shown.decode()


@pytest.fixture
def environment(run: Run, log_url: str) -> dict[str, str]:
    return environment_of(run.app)


@pytest.mark.versions
def test_celerys_own_program_has_the_commands(app: Celery, environment: dict[str, str]) -> None:
    """The entry point, the app by -A, exit codes, and completion of commands, topics and ids."""
    start = {"TOC_TEST_EXEC": "1"}  # of these it is the start that is tested
    id = send(app, "scheduled", HOUR, queue="urgent")
    words = ("-A", "tests.support.tasks", "toc")
    complete = {"_CELERY_COMPLETE": "bash_complete"}
    started = {
        "status": celery(*words, "status", "--json", **environment, **start),
        "unknown": celery(*words, "show", "unknown", **environment),
        "no app": celery("toc", "status", CELERY_BROKER_URL="memory://", **start),
        "commands": celery(**complete, **environment, COMP_WORDS="celery toc re", COMP_CWORD="2"),
        "topics": celery(
            **complete,
            **environment,
            COMP_WORDS="celery -A tests.support.tasks toc status ur",
            COMP_CWORD="5",
        ),
        "ids": celery(
            **complete,
            **environment,
            **start,
            COMP_WORDS=f"celery -A tests.support.tasks toc show {id[:6]}",
            COMP_CWORD="5",
        ),
    }
    top = celery(*words, "top", "--interval", "100ms", **environment)
    assert top.stdout.readline().split()[:2] == ["TIME", "QUEUE"]
    top.send_signal(signal.SIGINT)
    _, err = top.communicate(timeout=30)
    assert (err, top.returncode) == ("", 0)  # Ctrl-C is how it ends
    said = {
        name: (*process.communicate(timeout=60), process.returncode)
        for name, process in started.items()
    }
    out, err, code = said["status"]
    assert code == 0, err
    assert {row["queue"]: row["scheduled"] for row in json.loads(out)["topics"]}["urgent"] == 1
    assert said["unknown"] == (
        "",
        "Error: there is no message 'unknown', and the failures, the cancellations, "
        "the result backend never saw it\n",
        3,
    )
    out, err, code = said["no app"]
    assert (out, code) == ("", 2)
    assert err.count("\n") == 1
    assert "celery -A APP toc" in err
    assert sorted(said["commands"][0].split()) == [
        *("plain,repair", "plain,reschedule", "plain,reshard", "plain,resume")
    ]
    assert said["topics"][0].split() == ["plain,urgent"]
    assert said["ids"][0].split() == [f"plain,{id}"]


def test_on_a_terminal_it_asks_and_shows_colours_unless_told_not_to(
    app: Celery, environment: dict[str, str], toc: kombu_toc.TimeoutCenter
) -> None:
    send(app, "kept", HOUR, task_id="the-id")
    send(app, "due", queue="urgent")
    words = ("-A", "tests.support.tasks", "toc")
    code, shown = in_a_terminal("n\n", *words, "cancel", "the-id", **environment)
    assert code == 1
    assert "e2e.note the-id in 'celery': scheduled, in " in shown
    assert "[y/N]" in shown
    assert "Cancelled; nothing was changed." in shown
    assert toc.counts("celery").scheduled == 1
    code, shown = in_a_terminal("y\n", *words, "cancel", "the-id", **environment)
    assert code == 0
    assert toc.counts("celery").scheduled == 0
    code, shown = in_a_terminal("", *words, "status", **environment)
    assert "\x1b[33m" in shown
    code, shown = in_a_terminal("", *words, "status", **environment, NO_COLOR="1")
    assert "\x1b[33m" not in shown
    assert "urgent" in shown
    code, shown = in_a_terminal("", *words, "top", "--count", "1", **environment)
    assert code == 0
    assert "coming due" in shown
