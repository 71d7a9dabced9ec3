"""Failed tasks are listed, retried and deleted as one list, whether Redis or the task library has
them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from kombu import Connection

import kombu_toc
from kombu_toc import FailureBounds, FailuresRetried, PartialError, TimeoutCenter, center_for

from ..contract.test_failures import failure
from ..support.http_server import HttpServer
from ..support.library import consume, publish, status_of
from ..support.page_visitor import Visitor, wait_for

pytestmark = pytest.mark.usefixtures("client")


def fail(broker: Any, *ids: str, listed: bool = True, **headers: Any) -> None:
    """Have tasks fail as a worker does.

    listed: whether Redis lists them, too
    """
    for id in ids:
        publish(broker, id, argsrepr=f"({id!r},)", **headers)

    def fails(message: Any) -> None:
        message.outcome, message.error = "failed", "ValueError: no\nTraceback"
        if listed:
            message.keep_failure("remind", "ValueError", dead=False, error=message.error)
            message.channel.transport.failures.flush(30)
        message.ack()

    consume(broker, len(ids), fails)


def ids_of(center: TimeoutCenter, **which: Any) -> list[str]:
    return [one.id for one in center.failures.find(**which).failures]


def waiting(center: TimeoutCenter, *ids: str) -> list[str]:
    """The ids of what was put, by whoever looks after the library."""
    until = time.monotonic() + 30
    while True:
        found = sorted(one.id for one in center.get(ids))
        if found == sorted(ids) or time.monotonic() > until:
            return found
        time.sleep(0.05)


@pytest.mark.every_engine
def test_what_redis_and_the_library_have_is_one_list(broker, store, center, recorded):
    """The latest first, in pages; each task once."""
    fail(broker, "both-1", "both-2")
    fail(broker, "row-1", "row-2", listed=False, **{"x-biz-id": "7", "x-biz-type": "o"})
    fail(broker, "both-3")
    every = ["both-3", "row-2", "row-1", "both-2", "both-1"]
    assert ids_of(center) == ["both-3", "both-2", "both-1"]
    assert ids_of(recorded) == every
    read: list[str] = []
    after = None
    while True:
        page = recorded.failures.find("mail", limit=2, after=after)
        read += [one.id for one in page.failures]
        after = page.after
        if after is None:
            break
    assert read == every
    assert ids_of(recorded, task="rem*", exception="ValueError") == every
    assert ids_of(recorded, exception="OSError") == ids_of(recorded, topic="other") == []
    [one] = recorded.failures.get("row-1")
    assert ids_of(recorded, until=one.failed_us / 1e6) == every[2:]
    assert ids_of(recorded, since=one.failed_us / 1e6) == every[:3]
    [listed] = [one for one in recorded.failures.find().failures if one.id == "row-1"]
    for shown in (one, listed):
        told = (shown.topic, shown.task, shown.exception, shown.error, shown.args)
        assert told == ("mail", "remind", "ValueError", "ValueError: no\nTraceback", "('row-1',)")
        assert shown.retryable
    [group] = recorded.failures.groups()
    assert (group.number, group.retryable, group.exception) == (5, 5, "ValueError")


@pytest.mark.every_engine
def test_a_retry_is_the_same_from_either_and_is_done_once(broker, store, recorded):
    """Also if the record of Redis is retried that the library has, and the other way round."""
    late = {"expires": "2020-01-01T00:00:00+00:00", "eta": "2020-01-01T00:00:00+00:00"}
    fail(broker, "both-1", "both-2", "both-3", **late)
    fail(broker, "row-1", "row-2", listed=False, **late)
    done = recorded.failures.retry(ids=["both-1", "row-1", "nothing"])
    assert done == FailuresRetried(2, expires=2, eta=2)
    assert ids_of(recorded) == ["row-2", "both-3", "both-2"]
    assert recorded.library.retry(status="failed", limit=2).number == 2
    [left] = ids_of(recorded)
    assert recorded.failures.retry(ids=[left]).number == 1
    assert recorded.failures.retry() == FailuresRetried()
    every = ["both-1", "both-2", "both-3", "row-1", "row-2"]
    assert waiting(recorded, *every) == every
    assert consume(broker, 5) and recorded.counts("mail").waiting == 0
    assert ids_of(recorded) == []
    assert {id: status_of(store, id) for id in every} == {id: ["retried", "done"] for id in every}


def test_what_is_deleted_stays_in_history_and_is_not_sent_again(broker, store, recorded):
    fail(broker, "both-1", "both-2")
    fail(broker, "row-1", "row-2", listed=False)
    assert recorded.failures.delete(ids=["both-1", "row-1"]) == 2
    assert ids_of(recorded) == ["row-2", "both-2"]
    assert recorded.failures.delete() == 2
    assert ids_of(recorded) == []
    assert status_of(store, "row-1") == status_of(store, "both-2") == ["failed"]
    assert recorded.library.retry(status="failed") == FailuresRetried(not_kept=4)


def test_what_an_app_hides_is_not_listed_from_the_library(broker, server, options, recorded):
    fail(broker, "row-1", listed=False)
    hiding = center_for(server.toc_url, toc_failures_mask=["n"], **options)
    for one in (*hiding.failures.get("row-1"), *hiding.failures.find().failures):
        assert (one.error, one.args, one.message) == ("ValueError", "", b"")
        assert one.masked and one.retryable
    assert hiding.failures.retry(ids=["row-1"]).number == 1


def test_while_the_library_is_away_what_redis_has_is_listed_and_that_is_said(
    broker, away, recorded
):
    fail(broker, "both-1")
    fail(broker, "row-1", listed=False)
    away.numbers = {0, 1}
    for ask in (recorded.failures.find, recorded.failures.groups):
        with pytest.raises(PartialError, match=r"the task library .*it is away") as raised:
            ask()
        assert "ValueError" in str(raised.value.results)
        assert "row-1" not in str(raised.value.results)
    with pytest.raises(kombu_toc.LibraryError):
        recorded.failures.retry()
    away.numbers = set()
    assert ids_of(recorded) == ["row-1", "both-1"]


def test_the_page_and_http_list_and_retry_what_only_the_library_has(server, client, library_url):
    """And hide of it what is hidden of messages."""
    client.flushall()
    options = {"toc_library": library_url}
    with Connection(server.toc_url, transport_options=options) as broker:
        fail(broker, "row-1", "row-2", listed=False)
        url = f"{server.toc_url}?toc_library=env:SHOP_LIBRARY"
        with HttpServer(url, "--mask", "n", environment={"SHOP_LIBRARY": library_url}) as made:
            visitor = Visitor(made)
            group = visitor.get("failures?queue=mail&task=remind&exception=ValueError")
            shown = group.body.decode()
            assert "choose row-1" in shown and "choose row-2" in shown
            assert "row-1&#39;" not in shown  # its arguments are read, and hidden, from its message
            path = "/v1/queues/mail/failures"
            listed = made.get(path).json["failures"]
            assert [(one["id"], one["retryable"]) for one in listed] == [
                ("row-2", True),
                ("row-1", True),
            ]
            assert made.get(f"{path}/row-1").json == listed[1]
            done = visitor.follow(visitor.send(group, "Retry", "choose row-1"))
            assert "1 task retried." in done.body.decode()
            wait_for(visitor, "failures", ">1</a>")
            job = visitor.send(visitor.get("failures"), "Retry all").headers["location"]
            wait_for(visitor, job, "Done: 1 task retried.")
            assert made.get(path).json["failures"] == []
        assert sorted(consume(broker, 2)) == ["row-1", "row-2"]
        keep = broker.default_channel.center.failures.keep
        assert keep([failure("redis-1")], FailureBounds()) == [True]
        away = {"SHOP_LIBRARY": "postgresql://shop@127.0.0.1:1/shop"}
        with HttpServer(url, environment=away) as made:
            said = made.get(path)
            assert [one["id"] for one in said.json["failures"]] == ["redis-1"]
            assert (said.status, said.json["missing"][:16]) == (200, "the task library")
            assert made.get(f"{path}/redis-1").json["task"] == "shop.pay"
            said = made.get(f"{path}/row-1")
            assert said.status == 503 and "the task library" in said.json["detail"]
            visitor = Visitor(made)
            for view in ("message?queue=mail&id=redis-1", "message?queue=mail&id=x", "search?q=x"):
                assert "o answer from the task library" in visitor.get(view).body.decode(), view
            shown = visitor.get("failures").body.decode()
            assert "Some are missing: no answer from the task library" in shown
            assert "shop.pay" in shown
