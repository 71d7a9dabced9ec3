"""What is used of a queue's limits, and what waits because of them: the center, the command, the
metrics."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from prometheus_client.parser import text_string_to_metric_families

from celery_toc.metrics import metrics_text
from kombu_toc import RateLimitedError, TimeoutCenter, UnknownTopicError, Usage

from ..support.cluster import Cluster
from ..support.commands import answer
from ..support.fixtures import own_server
from ..support.inspection import calls_of, put_some
from ..support.servers import Server

pytestmark = pytest.mark.cluster


def used(found: Usage) -> dict[str, tuple[int, int | None]]:
    return {one.name: (one.used, one.of) for one in found.limits}


def opens(found: Usage, limit: str) -> float:
    """Seconds until a limit lets the next start."""
    [one] = [one for one in found.limits if one.name == limit]
    return one.opens_us / 1e6


def test_a_topic_without_limits_uses_none(center: TimeoutCenter) -> None:
    center.put("mail", "x", b"")
    assert center.queues.usage("mail") == Usage("mail", (), 0, 1, 0, pytest.approx(0, abs=10**7))
    with pytest.raises(UnknownTopicError, match="there is no queue 'nowhere'"):
        center.queues.usage("nowhere")


def test_how_many_run_is_told_of_all_and_of_how_many_keys(center: TimeoutCenter) -> None:
    center.queues.declare("mail", concurrency=3, key_concurrency=2)
    for number in range(8):
        center.put("mail", f"m-{number}", b"", key="ab"[number % 2])
    empty = center.queues.usage("mail")
    assert used(empty) == {"concurrency": (0, 3), "key_concurrency": (0, None)}
    assert (empty.running, empty.waiting, empty.keys_waiting) == (0, 8, 0)
    taken = center.pop("mail", 10).messages
    found = center.queues.usage("mail")
    assert used(found) == {"concurrency": (3, 3), "key_concurrency": (2, None)}
    assert (found.running, found.waiting, found.keys_waiting) == (3, 5, 2)
    assert 0 < found.oldest_us < 60e6
    center.ack(taken)
    assert center.queues.usage("mail").running == 0


def test_what_waits_for_a_limit_is_overdue_in_a_summary_too(center: TimeoutCenter) -> None:
    center.queues.declare("mail", concurrency=1)
    put_some(center, "mail", 3, "m-")
    assert len(center.pop("mail", 10).messages) == 1
    [found] = center.queues.summary("mail")
    assert (found.counts.ready, found.counts.in_flight) == (2, 1)
    assert 0 < found.oldest_us <= center.queues.usage("mail").oldest_us < 60e6


def test_what_waits_for_a_limit_is_found_with_its_time_and_its_key(center: TimeoutCenter) -> None:
    """Also when it has been tried before."""
    center.queues.declare("mail", concurrency=1, slots=1, retry_backoff=0.1)
    center.put("mail", "tried", b"", key="a")
    [tried] = center.pop("mail").messages
    center.reject(tried, requeue=True)
    center.put("mail", "runs", b"", key="b")
    center.put("mail", "new", b"", key="c")
    assert [one.id for one in center.pop("mail").messages] == ["runs"]
    [before] = center.get("tried")
    while center.queues.summary("mail")[0].counts.ready < 2:
        pass  # the server's own clock must advance
    assert center.pop("mail", 10).messages == []
    [found] = center.get("tried")
    assert (found.key, found.time_us, found.retries_left) == ("a", before.time_us, 15)
    scanned = {one.id: one for one in center.scan("mail").messages}
    assert scanned["tried"] == found
    assert (scanned["new"].key, scanned["new"].state) == ("c", "waiting")
    assert scanned["new"].time_us > 10**15


def test_how_many_keys_wait_for_one_that_runs(center: TimeoutCenter) -> None:
    center.queues.declare("mail", key_order="serial")
    for number in range(9):
        center.put("mail", f"m-{number}", b"", key="abc"[number % 3])
    assert len(center.pop("mail", 10).messages) == 3
    found = center.queues.usage("mail")
    assert used(found) == {"key_order": (3, None)}
    assert (found.waiting, found.keys_waiting) == (6, 3)


def test_how_much_of_a_rate_is_used_and_when_the_next_may_start(center: TimeoutCenter) -> None:
    center.queues.declare("mail", rate="4/h", rate_burst=3, key_rate="2/h")
    for number in range(6):
        center.put("mail", f"m-{number}", b"", key="ab"[number % 2])
    before = center.queues.usage("mail")
    assert used(before) == {"rate": (0, 3), "key_rate": (0, None)}
    assert opens(before, "rate") == 0
    assert len(center.pop("mail", 10).messages) == 2
    found = center.queues.usage("mail")
    assert used(found) == {"rate": (2, 3), "key_rate": (2, None)}
    assert opens(found, "key_rate") == pytest.approx(1800, abs=20)
    assert (found.waiting, found.keys_waiting) == (4, 2)
    center.put("mail", "c", b"", key="c")
    assert len(center.pop("mail", 10).messages) == 1
    full = center.queues.usage("mail")
    assert used(full)["rate"] == (3, 3)
    assert opens(full, "rate") == pytest.approx(900, abs=20)


def test_what_is_used_of_the_puts_is_told(center: TimeoutCenter) -> None:
    center.queues.declare("mail", put_rate="4/h", key_put_rate="1/h")
    for number in range(4):
        center.put("mail", f"m-{number}", b"", key=f"k-{number}")
    with pytest.raises(RateLimitedError):
        center.put("mail", "m-9", b"")
    found = center.queues.usage("mail")
    assert used(found) == {"put_rate": (4, 4), "key_put_rate": (4, None)}
    assert opens(found, "put_rate") == pytest.approx(900, abs=20)


def test_keys_that_take_turns_are_told(center: TimeoutCenter) -> None:
    center.queues.declare("mail", key_fair=True)
    for number in range(6):
        center.put("mail", f"m-{number}", b"", key=f"k-{number}")
    assert len(center.pop("mail", 2).messages) == 2
    found = center.queues.usage("mail")
    assert found.waiting == 4
    assert found.keys_waiting == 0


@own_server
@pytest.mark.one_server("calls are counted on one server")
def test_it_takes_as_many_calls_whatever_waits(center: TimeoutCenter) -> None:
    center.queues.declare("mail", rate="1/h", key_rate="1/h")
    center.queues.usage("mail")  # a server that has not seen a script yet is asked twice
    for number in (1, 300):
        center.put_many("mail", [(f"m-{number}-{n}", b"") for n in range(number)])
        before = calls_of(center.client)
        center.queues.usage("mail")
        assert calls_of(center.client) - before == 8


# -- metrics


def test_the_metrics_have_each_limit_and_no_key(
    center: TimeoutCenter, server: Server | Cluster
) -> None:
    center.queues.declare("mail", concurrency=2, key_rate="1/h", put_rate="100/h")
    center.queues.declare("plain")
    for number in range(6):
        center.put("mail", f"m-{number}", b"", key=f"secret-{number % 3}")
    center.pop("mail", 10)
    text = metrics_text(center)
    assert "secret" not in text
    samples: dict[str, Any] = {
        (one.name, *(one.labels[n] for n in ("topic", "limit") if n in one.labels)): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if "limit" in one.name or one.name == "celery_toc_keys_waiting"
    }
    oldest = samples.pop(("celery_toc_limited_oldest_seconds", "mail"))
    assert 0 < oldest < 60
    assert samples == {
        ("celery_toc_limit_used", "mail", "concurrency"): 2,
        ("celery_toc_limit_max", "mail", "concurrency"): 2,
        ("celery_toc_limit_used", "mail", "key_rate"): 2,
        ("celery_toc_limit_used", "mail", "put_rate"): 6,
        ("celery_toc_limit_max", "mail", "put_rate"): 100,
        ("celery_toc_keys_waiting", "mail"): 3,
    }


# -- the command


def test_the_command_has_a_line_for_each_limit(
    center: TimeoutCenter, server: Server | Cluster
) -> None:
    with Celery("shop", broker=server.toc_url, set_as_current=False) as app:

        def run(*words: str) -> list[list[str]]:
            said = answer(app, "limits", *words)
            assert said.code == 0, said.err
            return [line.split() for line in said.out.splitlines()]

        center.queues.declare("plain")
        assert "No queue limits anything" in " ".join(run()[0])
        limits = {"concurrency": 2, "key_rate": "1/h", "key_fair": True, "key_weights": "gold=3"}
        center.queues.declare("mail", **limits)
        for number in range(6):
            center.put("mail", f"m-{number}", b"", key=f"k-{number % 3}")
        center.pop("mail", 10)
        heads, *rows = run()
        assert heads[:4] == ["QUEUE", "LIMIT", "VALUE", "USED"]
        assert [row[:4] for row in rows] == [
            ["mail", "concurrency", "2", "2/2"],
            ["mail", "key", "rate", "1/h"],
            ["mail", "key", "fair", "yes"],
        ]
        assert rows[0][5:7] == ["4", "3"]
        assert [row[:4] for row in run("mail")] == [heads[:4], *(row[:4] for row in rows)]
