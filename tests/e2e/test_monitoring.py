"""D8: what workers and producers count, what a worker tells of itself, and what it logs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery

import kombu_toc
from kombu_toc.metrics import _all

from ..support import nursery
from ..support.nodes import Worker
from ..support.servers import Server
from ..support.workers import ALONE, Live, StartWorkers, environment_of, wait_until

POOLS = {
    "prefork": ("-P", "prefork", "-c", "2"),
    "solo": ("-P", "solo"),
    "gevent": ("-P", "gevent", "-c", "4"),
}


@pytest.fixture(autouse=True)
def _earlier_tests_have_counted() -> None:
    """What this process has not sent of other tests' tasks is not sent to these."""
    for metrics in list(_all):
        metrics.reset()


def totals(toc: kombu_toc.TimeoutCenter, topic: str = "celery") -> dict[str, int]:
    """What Redis has of a topic that is not 0, but for pops that found nothing."""
    measured = kombu_toc.read_metrics(toc).get(topic)
    found = measured.totals if measured else {}
    return {name: n for name, n in found.items() if n and name != "empty"}


def inspect(app: Celery, worker: Worker) -> dict[str, object]:
    name = worker.hostname()
    [answer] = app.control.broadcast("toc", destination=[name], reply=True, timeout=5)
    return answer[name]


@pytest.mark.parametrize("pool", list(POOLS))
def test_the_counts_in_redis_agree_with_what_producers_and_workers_did(
    live: Live, pool: str
) -> None:
    """Whichever process counted what, within seconds, and without anybody asking for it."""
    [worker] = live.start_workers(1, *POOLS[pool], *ALONE)
    due = datetime.now(timezone.utc) + timedelta(seconds=1)
    live.fill("note", 20, "counted-", eta=due)
    live.app.tasks["e2e.refuse"].delay("no")
    revoked = live.app.tasks["e2e.note"].apply_async(("never",), countdown=3600)
    live.toc.cancel(revoked.id)
    live.journal.wait_for("counted-", 20)
    live.begin("note", "last")
    with live.app.connection_for_write() as connection:
        producer = connection.default_channel.center
    producer.metrics.send(producer.runner)  # the last seconds of this process
    live.toc.metrics.send(live.toc.runner)
    expected = {"put": 23, "delivered": 22, "acked": 21, "dead": 1, "cancelled": 1}
    wait_until(lambda: totals(live.toc) == expected, 20, lambda: totals(live.toc))
    measured = kombu_toc.read_metrics(live.toc)["celery"]
    assert measured.recent_lateness.count == 22
    assert 0 < measured.recent_lateness.quantile(0.5) < 10
    assert measured.totals == measured.recent
    # A worker that stops leaves nothing uncounted.
    live.fill("note", 5, "brief-")
    live.journal.wait_for("brief-", 5)
    worker.teardown()
    wait_until(lambda: totals(live.toc).get("acked") == 26, 5, lambda: totals(live.toc))


def test_inspect_toc_tells_what_a_worker_holds_serves_and_has_counted(live: Live) -> None:
    [worker] = live.start_workers(1, "-P", "prefork", "-c", "1", *ALONE)
    live.begin("note", "before")
    sent = live.begin("late_ack", "busy", 4)
    report = inspect(live.app, worker)
    assert report["leases"] == {
        "count": 1,
        "renewed_in_time": True,
        "messages": [
            {
                "id": sent.id,
                "task": "e2e.late_ack",
                "topic": "celery",
                "slot": report["leases"]["messages"][0]["slot"],
                "failures": 0,
            }
        ],
    }
    assert report["capacity"]["free"] == 0
    assert report["paused"] is False
    topics = report["topics"]
    assert set(topics) == {"celery", "urgent", "news", "one-slot"}
    assert (topics["celery"]["slots"], topics["one-slot"]["slots"]) == (1, 1)
    assert topics["celery"]["counts"]["delivered"] == 2
    assert 0 < topics["celery"]["late_p50"] < 10
    assert abs(report["clock_ahead"]) < 1
    sent.get(timeout=10)
    live.app.tasks["e2e.note"].apply_async(("soon",), countdown=2)

    def claimed() -> bool:
        claims = inspect(live.app, worker)["claims"]
        return any(one["topic"] == "celery" and 0 < one["due_in"] < 2 for one in claims)

    wait_until(claimed, what=lambda: inspect(live.app, worker))


def test_celerys_command_line_knows_the_remote_commands(live: Live) -> None:
    [worker] = live.start_workers(1, "-P", "solo", *ALONE)
    # It waits for no other.
    to = ("-t", "5", "-d", worker.hostname())
    for command, text in {
        ("inspect", "toc"): "leases",
        ("control", "toc_pause"): "paused",
        ("control", "toc_resume"): "takes tasks again",
    }.items():
        words = ("-m", "celery", "-A", "tests.support.tasks", *command, *to)
        said = nursery.done(words, environment=environment_of(live.app)).stdout
        assert worker.hostname() in said and text in said


@pytest.mark.parametrize("pool", list(POOLS))
def test_a_paused_worker_takes_nothing_until_it_is_resumed(live: Live, pool: str) -> None:
    """Also not by a claim that it has made before, nor after a reconnect."""
    [worker] = live.start_workers(1, *POOLS[pool], *ALONE)
    live.app.tasks["e2e.note"].apply_async(("scheduled",), countdown=1)
    time.sleep(0.3)  # it has claimed that time
    name = worker.hostname()
    [answer] = live.app.control.broadcast("toc_pause", destination=[name], reply=True, timeout=5)
    assert answer == {name: {"ok": "paused"}}
    assert inspect(live.app, worker)["paused"] is True
    live.fill("note", 5, "waits-")
    time.sleep(2.5)  # it would have looked twice meanwhile
    assert live.journal.entries() == []
    assert live.toc.counts("celery").ready == 6
    [beside] = live.start_workers(1, "-P", "solo", *ALONE)
    live.journal.wait_for("", 6)
    beside.teardown()
    lines = worker.logs().count("Connected to")
    live.client.client_kill_filter(_type="normal", skipme=True)
    wait_until(lambda: worker.logs().count("Connected to") > lines, 30, worker.logs)
    live.app.tasks["e2e.note"].delay("afterwards")
    time.sleep(2.5)  # it would have looked twice meanwhile
    assert not live.journal.entries("afterwards")
    [answer] = live.app.control.broadcast("toc_resume", destination=[name], reply=True, timeout=5)
    assert answer == {name: {"ok": "takes tasks again"}}
    live.journal.wait_for("afterwards", 1)


def test_a_worker_says_at_its_start_what_it_serves(start_workers: StartWorkers) -> None:
    [worker] = start_workers(1, "-P", "solo", *ALONE)
    [line] = re.findall(r"Timeout center at (.*)", worker.logs())
    where, _, served = line.partition(": ")
    assert where.startswith("toc+redis://127.0.0.1")
    what_holds = "visibility timeout 60 s, 16 retries"
    assert set(re.findall(r"\S+ \(.*?\)", served)) == {
        f"celery (1 slot, {what_holds})",
        f"urgent (1 slot, {what_holds})",
        f"news (1 slot, {what_holds})",
        f"one-slot (1 slot, {what_holds})",
    }
    assert "Without effect" not in worker.logs()
    assert "visibility_timeout" not in worker.logs()


def test_a_visibility_timeout_that_is_left_from_another_broker_is_told(
    start_workers: StartWorkers, single_server: Server
) -> None:
    """43200 is what many have set for long countdowns; a killed worker's tasks wait as long."""
    options = {"visibility_timeout": 43200}
    [worker] = start_workers(1, "-P", "solo", *ALONE, broker_transport_options=options)
    [line] = re.findall(r"WARNING/MainProcess\] The option (.*)", worker.logs())
    assert "visibility_timeout is 43200 seconds (12 hours)" in line and "remove it" in line
    for seconds, is_told in ((43200, True), (3600, True), (600, False)):
        url = f"{single_server.toc_url}?visibility_timeout={seconds}"
        words = ("-m", "celery", "-b", url, "toc", "status", "--json")
        warnings = json.loads(nursery.done(words).stdout)["warnings"]
        assert any("visibility_timeout is" in one for one in warnings) is is_told, warnings


def test_a_worker_says_at_its_start_what_has_no_effect(live: Live) -> None:
    """Options that are misspelt or another transport's, and limits that others have declared."""
    live.toc.queues.declare("celery", slots=4, retries=2, visibility=20)
    options = {
        "visibilty_timeout": 3600,
        "sep": ":",
        "max_retries": 3,
        "toc_topics": {"celery": {"slots": 4, "retries": 5, "visibility": 20, "dead_age": 60}},
    }
    [worker] = live.start_workers(1, "-P", "solo", *ALONE, broker_transport_options=options)
    [line] = re.findall(r"Timeout center at .*", worker.logs())
    assert "celery (4 slots, visibility timeout 20 s, 2 retries)" in line
    assert "urgent (1 slot, visibility timeout 60 s, 16 retries)" in line
    [line] = re.findall(r"WARNING/MainProcess\] Without effect: (.*)", worker.logs())
    assert line == (
        "the broker's options 'visibilty_timeout' (no such option; did you mean "
        "'visibility_timeout'?), 'sep' (an option of Kombu's redis transport, not needed here)"
    )
    [line] = re.findall(r"WARNING/MainProcess\] (queue 'celery' was declared .*)", worker.logs())
    assert line == (
        "queue 'celery' was declared with retries=2, dead_age=default, and this process asks for "
        "retries=5, dead_age=60: the former stands; "
        "'celery toc topic set celery --retries 5 --dead-age 60' changes it"
    )


def test_a_worker_whose_broker_has_no_such_database_ends_and_says_so(
    start_worker: Callable[..., Worker], single_server: Server
) -> None:
    worker = start_worker("-P", "solo", broker=f"toc+redis://127.0.0.1:{single_server.port}/99")
    wait_until(lambda: worker.container.status == "exited", 30, worker.logs)
    assert "has no database 99; use a number that its setting 'databases' allows" in worker.logs()


def test_what_comes_back_or_dies_is_logged_with_the_tasks_name_and_id(live: Live) -> None:
    """Of a worker that was killed, and of a task that rejects its message."""
    options = {"visibility_timeout": 1, "toc_topics": {"urgent": {"retries": 0}}}
    victims = live.start_workers(2, "-P", "solo", *ALONE, broker_transport_options=options)
    back = live.app.tasks["e2e.late_ack"].delay("back", 2)
    dead = live.app.tasks["e2e.late_ack"].apply_async(("dead", 2), queue="urgent")
    live.journal.wait_for("", 2)
    for victim in victims:
        victim.kill()
    [worker] = live.start_workers(1, "-P", "solo", *ALONE, broker_transport_options=options)
    refused = live.app.tasks["e2e.refuse"].delay("no")
    for line in (
        f"message {back.id} of celery (task e2e.late_ack): its lease ended, it is delivered again",
        f"message {dead.id} of urgent (task e2e.late_ack): lost for good, it is in DeadQueue",
        f"message {refused.id} of celery (task e2e.refuse) goes to DeadQueue: rejected by the task",
    ):
        wait_until(lambda line=line: line in worker.logs(), 20, worker.logs)
