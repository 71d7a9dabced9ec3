"""A Celery worker executes what a client in Node.js has put: examples/node."""

from __future__ import annotations

from celery import Celery

from kombu_toc import TimeoutCenter

from ..contract.test_protocol import Node, address, node, protocol
from ..support.workers import Journal, StartWorkers

__all__ = ("address", "node", "protocol")


def test_a_worker_executes_what_node_sends_at_its_time(
    start_workers: StartWorkers, node: Node, app: Celery, toc: TimeoutCenter, journal: Journal
) -> None:
    """X15"""
    [worker] = start_workers(1, "-P", "prefork", "-c", "2")
    topic = node.topic("celery")
    node.send(topic, "now", "e2e.told", ["now"])
    node.send(topic, "later-\N{SNOWMAN}", "e2e.told", ["later-\N{SNOWMAN}"], {"delay": 1})
    node.send(topic, "never", "e2e.told", ["never"], {"delay": 1})
    [found] = toc.get("never", topic="celery")
    assert found.state == "waiting"
    assert node.cancel(topic, "never") == ["never"]
    [now] = journal.wait_for("now-done", 1)
    [later] = journal.wait_for("later-\N{SNOWMAN}-done", 1)
    assert 0.5 < later["by_redis"] - now["by_redis"] < 5
    # The other way: what Celery has scheduled, Node.js finds and cancels.
    sent = app.tasks["e2e.told"].apply_async(("never",), countdown=60)
    assert node.cancel(topic, sent.id) == [sent.id]
    assert journal.entries("never") == []
    assert worker.hostname() == next(entry for entry in journal.entries("now"))["worker"]
