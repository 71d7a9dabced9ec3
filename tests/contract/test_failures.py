"""Failed tasks are kept in Redis, bounded; they are found, retried once, and deleted."""

from __future__ import annotations

import json
import time
from datetime import datetime, timedelta, timezone

import pytest
from redis.exceptions import ResponseError

import kombu_toc
from kombu_toc import FailedTask, FailureBounds, TimeoutCenter
from kombu_toc.center.failures import FailureWriter
from kombu_toc.model import failures as model
from kombu_toc.model.message import pack

from ..support.inspection import full_server, residue
from ..support.waiting import at_once

BOUNDS = FailureBounds()


pytestmark = pytest.mark.cluster


def envelope(id: str, *, task: str = "shop.pay", **headers: object) -> bytes:
    headers = {"id": id, "task": task, "retries": 0, "eta": None, "expires": None, **headers}
    message = {
        "headers": headers,
        "properties": {"correlation_id": id, "priority": 0},
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "body": json.dumps([[7], {}, {}]),
    }
    return pack(message, deflate=True, id=id)


def failure(id: str, topic: str = "mail", task: str = "shop.pay", **more: object) -> FailedTask:
    exception = str(more.pop("exception", "ValueError"))
    headers = more.pop("headers", {})
    assert isinstance(headers, dict)
    message = more.pop("message", envelope(id, task=task, **headers))
    more = {"error": f"{exception}: boom", "kept_id": id, "message": message, **more}
    return FailedTask(id, topic, task, exception, **more)  # type: ignore[arg-type]


def keep(center: TimeoutCenter, *failures: FailedTask, bounds: FailureBounds = BOUNDS) -> None:
    assert all(one is True for one in center.failures.keep(failures, bounds))


def ids(page: kombu_toc.FailurePage) -> list[str]:
    return [one.id for one in page.failures]


def test_the_latest_come_first_in_pages_and_by_what_is_asked_for(center: TimeoutCenter) -> None:
    for number in range(12):
        topic, task = ("mail", "urgent")[number % 2], ("shop.pay", "shop.send")[number % 3 == 0]
        center.queues.declare(topic, slots=2)
        keep(
            center,
            failure(f"t{number}", topic, task, exception=("KeyError", "OSError")[number < 4]),
        )
    every = [f"t{number}" for number in reversed(range(12))]
    assert ids(center.failures.find()) == every
    read: list[str] = []
    after = None
    while True:
        page = center.failures.find(limit=5, after=after)
        read += ids(page)
        after = page.after
        if after is None:
            break
    assert read == every
    for limit in (0, -1, 1.5):
        with pytest.raises(ValueError, match="limit must be a whole number from 1 up"):
            center.failures.find(limit=limit)  # type: ignore[arg-type]
    assert ids(center.failures.find("mail", task="shop.s*")) == ["t6", "t0"]
    assert ids(center.failures.find(exception="OSError", limit=2)) == ["t3", "t2"]
    [first] = center.failures.get("t0")
    assert ids(center.failures.find(until=first.failed_us / 1e6)) == ["t0"]
    assert ids(center.failures.find(since=first.failed_us / 1e6 + 60)) == []
    groups = [(one.topic, one.task, one.exception, one.number) for one in center.failures.groups()]
    assert (
        groups[:2] == [("urgent", "shop.pay", "KeyError", 3), ("mail", "shop.pay", "KeyError", 3)]
        or groups
    )
    assert sum(one.number for one in center.failures.groups()) == 12
    with pytest.raises(ValueError):
        center.failures.find(after="never")


def test_a_record_says_what_was_kept_and_a_task_has_one(center: TimeoutCenter) -> None:
    center.queues.declare("mail")
    told = {
        "args": "(7,) {'late': True}",
        "worker": "w@host",
        "runtime": 0.25,
        "retries": 3,
        "priority": 3,
        "traits": ";v30000",
    }
    keep(center, failure("a", **told))
    [one] = center.failures.get("a")
    assert one._replace(failed_us=0, has_message=False) == failure("a", **told)
    assert (one.retryable, abs(one.failed_us / 1e6 - time.time()) < 60) == (True, True)
    keep(center, failure("a", exception="KeyError"))
    assert [one.exception for one in center.failures.find().failures] == ["KeyError"]
    assert center.failures.get(["a", "b", ""], topic="mail")[0].exception == "KeyError"
    assert center.failures.get("a", topic="other") == []


def test_records_are_bounded_in_number_bytes_and_age(center: TimeoutCenter, client: object) -> None:
    center.queues.declare("mail")
    for number in range(20):
        keep(center, failure(f"t{number}"), bounds=BOUNDS._replace(number=10))
    assert ids(center.failures.find()) == [f"t{number}" for number in reversed(range(10, 20))]
    small = BOUNDS._replace(bytes=20_000)
    for number in range(40):
        keep(center, failure(f"u{number}", message=b"x" * 900), bounds=small)
        keep(center, failure("again", message=b"x" * number), bounds=small)
    keys = center.registry.topic("mail").slot(0).failure_keys
    records = {k: v for k, v in center.client.hgetall(keys[1]).items() if k}
    size = sum(len(k) + len(v) for k, v in records.items())
    assert 18_000 < size <= 20_000
    assert int(center.client.hget(keys[1], "")) == size
    assert len(records) == center.client.zcard(keys[0])
    assert all(0 < center.client.pttl(key) <= 7 * 86_400_000 for key in keys)
    assert center.failures.keep([failure("huge", message=b"x" * 30_000)], small) == [False]
    time.sleep(0.2)
    keep(center, failure("last"), bounds=BOUNDS._replace(age=0.1))
    assert ids(center.failures.find()) == ["last"]


def test_a_retry_is_the_same_task_once_and_has_no_record_any_more(center: TimeoutCenter) -> None:
    center.queues.declare("mail", slots=4, steps=[0, 3])
    past = datetime.now(timezone.utc) - timedelta(minutes=1)
    ahead = (past + timedelta(days=1)).isoformat()
    late = {"eta": past.isoformat(), "expires": past.isoformat(), "retries": 3, "group": "g"}
    keep(center, failure("a", priority=3, traits=";v30000", headers=late))
    keep(center, failure("b", headers={"expires": ahead}), failure("c", message=b""))
    [stale] = center.failures.get("a")
    done = center.failures.retry(ids=["a", "b", "c", "d"])
    assert done == kombu_toc.FailuresRetried(2, not_kept=1, expires=1, eta=1, chords=1)
    assert ids(center.failures.find()) == ["c"]
    messages = {one.id: one for one in center.pop("mail", 10, visibility=None).messages}
    assert set(messages) == {"a", "b"}
    content = kombu_toc.unpack(messages["a"].body, "a")
    assert json.loads(content["body"]) == [[7], {}, {}]
    assert [content["headers"][name] for name in ("id", "task", "eta", "expires", "retries")] == [
        "a",
        "shop.pay",
        None,
        None,
        0,
    ]
    assert (messages["a"].step, messages["a"].birth.partition(";")[2]) == (1, "v30000")
    assert kombu_toc.unpack(messages["b"].body, "b")["headers"]["expires"] == ahead
    center.ack(list(messages.values()))
    # A process that died behind the put has left the record: its failure was retried all the same.
    key = center.registry.topic("mail").slot(0).failure_keys
    center.client.zadd(key[0], {"a": stale.failed_us})
    center.client.hset(key[1], "a", model.write_record(stale))
    assert center.failures.retry() == kombu_toc.FailuresRetried(not_kept=1, gone=1)
    assert center.counts("mail").waiting == 0


def test_many_that_match_are_retried_by_two_at_once_once_each(center: TimeoutCenter) -> None:
    center.queues.declare("mail")
    keep(center, *(failure(f"t{n}", exception=("KeyError", "OSError")[n % 2]) for n in range(40)))
    done: list[kombu_toc.FailuresRetried] = []

    def retry(task: str) -> None:
        done.append(center.failures.retry("mail", task=task, exception="OSError"))

    at_once(retry, ["shop.*"] * 2)
    assert sum(one.number for one in done) == 20
    assert center.counts("mail").waiting == 20
    assert len(center.failures.find().failures) == 20
    assert center.failures.retry(limit=3).number == 3
    assert center.failures.delete(exception="KeyError", task="shop.send") == 0
    assert center.failures.delete(ids=["t0"]) == 1
    assert center.failures.delete() == 16
    assert center.failures.find().failures == []


def test_a_dead_letter_is_requeued_and_not_put_once_more(center: TimeoutCenter) -> None:
    center.queues.declare("mail")
    for id in ("a", "b"):
        center.put("mail", id, envelope(id))
    for one in center.pop("mail", 10).messages:
        center.bury(one, reason="the task failed")
    keep(center, *(failure(id, dead=True, message=b"") for id in ("a", "b")))
    assert [one.retryable for one in center.failures.find().failures] == [True, True]
    assert center.failures.retry(ids=["a"]) == kombu_toc.FailuresRetried(1)
    assert center.dead.requeue("mail", ids=["b"]) == 1
    assert center.failures.retry() == kombu_toc.FailuresRetried(gone=1)
    assert center.counts("mail")[:] == (2, 0, 0, 0)


@pytest.mark.one_server("its memory is bounded")
def test_they_go_with_their_queue_and_are_left_out_when_redis_is_full(
    center: TimeoutCenter, client: object
) -> None:
    center.queues.declare("mail")
    keep(center, failure("a"))
    used = center.client.info("memory")["used_memory"]
    with full_server(center.client, used // 2):
        [error] = center.failures.keep([failure("b")], BOUNDS)
        assert isinstance(error, ResponseError)
        assert "maxmemory" in str(error)
    assert ids(center.failures.find()) == ["a"]
    assert center.admin.check("mail") == []
    center.queues.delete("mail")
    assert residue(client) == []


def test_the_writer_writes_a_hundred_a_second_and_counts_the_rest(
    center: TimeoutCenter, caplog: pytest.LogCaptureFixture
) -> None:
    center.queues.declare("mail")
    writer = FailureWriter(center.failures, BOUNDS)
    began = time.monotonic()
    for number in range(400):
        writer.note(failure(f"t{number}"))
    took = time.monotonic() - began
    writer.flush(5)
    kept = len(center.failures.find(limit=1000).failures)
    assert kept + writer.left_out == 400
    assert 100 <= kept <= model.WRITES * (2 + int(took))
    [record] = [one for one in caplog.records if "left out" in one.getMessage()]
    assert "too many fail at once" in record.getMessage()


def test_what_fails_is_kept_while_only_the_node_that_counts_the_queues_is_away(
    center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def shares(*given: object) -> None:
        asked.append(given)
        raise ConnectionError("its node is away")

    center.queues.declare("mail")
    monkeypatch.setattr(center.failures, "_shares", shares)
    writer = FailureWriter(center.failures, BOUNDS)
    for number in range(3):
        writer.note(failure(f"t{number}"))
        writer.flush(30)
    assert ids(center.failures.find()) == ["t2", "t1", "t0"] and writer.left_out == 0
    assert len(asked) == 1  # which may take as long as a node has to answer


def test_what_all_queues_keep_is_bounded_together(center: TimeoutCenter) -> None:
    """Whichever processes write; the queue that fails most gives way."""
    bounds = BOUNDS._replace(number=400)
    for number in range(5):
        center.queues.declare(f"mail-{number}", slots=1)
        writer = FailureWriter(center.failures, bounds)
        writer.note(failure("first", topic=f"mail-{number}"))
        writer.flush(30)
    center.failures.keep([failure(f"t{n}", topic="mail-0") for n in range(150)], bounds)
    writer.note(failure("last", topic="mail-0"))
    writer.flush(30)
    assert len(center.failures.find("mail-0", limit=1000).failures) == 100
    assert model.share_of(bounds, 2) == bounds._replace(number=200, bytes=bounds.bytes // 2)
    assert model.share_of(bounds, 1) == bounds
    assert 6 * 86_400_000 < center.client.pttl(center.keys.failing) <= bounds.age * 1000
