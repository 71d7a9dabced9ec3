"""A6: what no worker can or may execute is in DeadQueue, with its reason and the last error."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from celery import Celery

import kombu_toc
from kombu_toc import DEAD, Found
from kombu_toc.model import message as envelope

from ..support.workers import POOLS, Live, wait_until


def dead(toc: kombu_toc.TimeoutCenter, id: str) -> Found:
    """The message, as soon as it is dead."""
    wait_until(lambda: [found.state for found in toc.get(id, topic="celery")] == [DEAD])
    return toc.get(id, topic="celery")[0]


def send(app: Celery, body: object, **options: object) -> str:
    """Publish to the workers' queue what Celery itself would not."""
    id = f"odd-{time.time_ns()}"
    with app.connection_for_write() as connection, connection.Producer() as producer:
        headers = {"id": id, **options.pop("headers", {})}
        producer.publish(body, routing_key="celery", headers=headers, **options)
    return id


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_what_cannot_be_executed_is_kept_with_its_reason(live: Live, pool: str) -> None:
    live.start_workers(1, *POOLS[pool])
    text = {"content_type": "application/json", "content_encoding": "utf-8"}
    task = {"headers": {"task": "e2e.add", "lang": "py"}}
    undecodable = send(live.app, b"{no json", **text, **task)
    unreadable = send(live.app, b"\xff\xfe", **text, **task)
    disallowed = send(live.app, b"x", content_type="application/x-python-serialize", **task)
    no_task = send(live.app, {"hello": "world"})
    unknown = send(live.app, [[], {}, {}], headers={"task": "shop.missing", "lang": "py"})
    for id in (undecodable, unreadable):
        found = dead(live.toc, id)
        assert found.reason == "its body cannot be decoded"
        assert "DecodeError" in found.error
    assert dead(live.toc, undecodable).body.endswith(b"{no json")
    assert dead(live.toc, disallowed).reason in ("its body cannot be decoded", "invalid task")
    assert "ContentDisallowed" in dead(live.toc, disallowed).error
    assert dead(live.toc, no_task).reason == "not a task: no consumer understands it"
    assert "shop.missing" in dead(live.toc, unknown).reason

    rejected = live.app.tasks["e2e.refuse"].delay("the order is cancelled")
    found = dead(live.toc, rejected.id)
    assert (found.reason, found.error) == ("rejected by the task", "the order is cancelled")

    failed = live.app.tasks["e2e.fail_unacknowledged"].delay("disk full")
    found = dead(live.toc, failed.id)
    assert (found.reason, found.error) == ("the task failed", "ValueError: disk full")

    assert live.app.tasks["e2e.add"].delay(1, 2).get(timeout=10) == 3
    wait_until(lambda: live.toc.counts("celery").in_flight == 0)  # it is acknowledged just now
    counts = live.toc.counts("celery")
    assert (counts.waiting, counts.in_flight, counts.dead) == (0, 0, 7)


@pytest.mark.parametrize(
    "eta", ["tomorrow", *(pytest.param(eta, marks=pytest.mark.nightly) for eta in ("", 7))]
)
def test_a_time_that_nobody_can_read_is_kept_with_its_reason_whoever_has_sent_it(
    live: Live, eta: object
) -> None:
    """A sender with celery-toc is refused; another, or an old one, is not."""
    add = live.app.tasks["e2e.add"]
    if isinstance(eta, str):
        with pytest.raises(kombu_toc.ActionTimeError, match="is not a time"):
            add.apply_async((1, 2), eta=eta)
        # What Celery's worker can read, the sender may send.
        sent = add.apply_async((1, 2), eta="20200101T10,5")
    else:
        sent = add.delay(1, 2)
    [found] = live.toc.get(sent.id, topic="celery")
    message = kombu_toc.unpack(found.body, found.id)
    message["headers"].update(id="odd", eta=eta)
    live.toc.put("celery", "odd", envelope.pack(message, deflate=False))
    live.start_workers(1, "-P", "solo")
    assert sent.get(timeout=10) == 3
    found = dead(live.toc, "odd")
    assert found.reason == "invalid task"
    assert repr(eta) in found.error
    assert live.toc.counts("celery")[:3] == (0, 0, 0)


@pytest.mark.parametrize("pool", ["prefork", "solo", "gevent"])
def test_a_task_that_is_rejected_as_not_now_runs_again_until_the_limit_of_its_queue(
    live: Live, pool: str
) -> None:
    """A6: it costs no retry; after the first, pauses of 50, 100 and 200 ms come before it runs"""
    options = {"toc_retries": 0, "toc_topics": {"celery": {"requeue_limit": 4}}}
    live.start_workers(1, "-P", pool, broker_transport_options=options)
    sent = live.app.tasks["e2e.refuse"].delay("not now", requeue=True)
    found = dead(live.toc, sent.id)
    assert found.error == "not now"
    spent = "requeued 4 times, and x-requeue-limit allows no more"
    assert found.reason == f"{spent}: rejected by the task"
    runs = live.journal.entries("refused")
    assert [bool(run["redelivered"]) for run in runs] == [False, True, True, True, True]
    waits = [b["at"] - a["at"] for a, b in itertools.pairwise(runs)]
    assert all(w > least for w, least in zip(waits, (0, 0.05, 0.1, 0.2), strict=True)), waits


def test_a_task_that_costs_its_process_its_life_spends_a_retry_each_time(live: Live) -> None:
    """A6: Celery requeues it with the same call as a task that asks for that"""
    live.start_workers(1, "-c", "1", broker_transport_options={"toc_retries": 1})
    for how, seconds, limit in (("time limit", 30, 0.5), ("lost process", -1, None)):
        sent = live.app.tasks["e2e.told_late"].apply_async((how, seconds), time_limit=limit)
        assert dead(live.toc, sent.id).reason.startswith("no retries left")
        told = [(run["redelivered"], run["count"]) for run in live.journal.entries(how)]
        assert told == [(False, None), (True, 1)], how


def test_a_task_imported_by_a_pool_restart_says_why_it_died(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_later.py").write_text(
        "from celery import current_app\n"
        "@current_app.task(name='later.fail', acks_late=True, acks_on_failure_or_timeout=False)\n"
        "def fail(): raise ValueError('on purpose')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    live.start_workers(1, "-c", "1", worker_pool_restarts=True)
    arguments = {"modules": ["imported_later"]}
    [answer] = live.app.control.broadcast(
        "pool_restart", arguments=arguments, reply=True, timeout=5
    )
    assert all("ok" in said for said in answer.values())
    found = dead(live.toc, live.app.send_task("later.fail").id)
    assert (found.reason, found.error) == ("the task failed", "ValueError: on purpose")
