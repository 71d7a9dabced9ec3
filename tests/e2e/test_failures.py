"""A task that fails is found and retried: worker, ``celery toc failures`` and the page."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from celery import Celery

import kombu_toc

from ..support.commands import answer
from ..support.workers import POOLS, Live, wait_until


def listed(toc: kombu_toc.TimeoutCenter, number: int) -> dict[str, kombu_toc.FailedTask]:
    """The failures, as soon as there are so many."""

    def find() -> list[kombu_toc.FailedTask]:
        return toc.failures.find().failures

    wait_until(lambda: len(find()) == number, what=find)
    return {one.id: one for one in find()}


@pytest.mark.versions
@pytest.mark.parametrize("pool", list(POOLS))
def test_a_failed_task_is_listed_by_default_and_a_retry_is_the_same_task(
    live: Live, log_url: str, pool: str
) -> None:
    live.start_workers(1, *POOLS[pool])
    late = live.app.tasks["e2e.fail_late"].delay("<b>full</b>")
    listed(live.toc, 1)
    flaky = live.app.tasks["e2e.flaky"].apply_async(("disk",), {"seconds": 0.05}, countdown=0.1)
    one = listed(live.toc, 2)[flaky.id]
    assert (one.task, one.topic, one.exception) == ("e2e.flaky", "celery", "ValueError")
    assert one.error.startswith("ValueError: disk is broken\nTraceback (most recent call last):")
    assert one.args == "('disk',) {'seconds': 0.05}"
    assert "@" in one.worker
    assert one.runtime is not None and 0.05 <= one.runtime < 10

    said = answer(live.app, "failures", "list", "--json").json
    assert [each["id"] for each in said["failures"]] == [flaky.id, late.id]
    text = answer(live.app, "failures", "show", flaky.id).out
    assert "ValueError: disk is broken" in text and "Traceback" in text

    with redis.Redis.from_url(log_url) as log:
        log.set("mended", 1)
    wait_until(
        lambda: live.toc.counts("celery") == (0, 0, 0, 0), what=lambda: live.toc.counts("celery")
    )
    said = answer(live.app, "failures", "retry", flaky.id, "--yes")
    assert (said.code, said.out.splitlines()[0]) == (0, "Retried 1 task.")
    assert "without the `eta`, which had passed" in said.out
    wait_until(lambda: live.app.AsyncResult(flaky.id).state == "SUCCESS")
    again = answer(live.app, "failures", "retry", flaky.id, "--yes")
    again.fails(3, "no failure", flaky.id)
    # What fails once more is there once more.
    assert answer(live.app, "failures", "retry", "--task", "e2e.*", "--yes").code == 0
    wait_until(
        lambda: [other.failed_us > one.failed_us for other in live.toc.failures.get(late.id)]
    )
    assert answer(live.app, "failures", "clear", "--yes").out == "Deleted 1 failure.\n"


def test_what_is_no_failure_is_not_listed_and_a_dead_letter_once(live: Live) -> None:
    live.start_workers(1, "-c", "2")
    tasks: Any = live.app.tasks
    for name in ("fail_expected", "fail_unlisted"):
        tasks[f"e2e.{name}"].delay("x")
    tasks["e2e.ignore"].delay()
    again = tasks["e2e.fail_again"].delay("thrice")
    kept = tasks["e2e.fail_kept"].delay("x")
    rejected = tasks["e2e.fail_unacknowledged"].delay("x")
    lost = tasks["e2e.end"].delay()
    found = listed(live.toc, 4)
    assert {one.id: one.dead for one in found.values()} == {
        again.id: False,
        kept.id: True,
        rejected.id: True,
        lost.id: False,
    }
    assert found[again.id].retries == 2
    assert found[lost.id].exception == "WorkerLostError"
    assert live.toc.counts("celery").dead == 2
    assert live.toc.failures.retry(ids=[kept.id]) == kombu_toc.FailuresRetried(1)
    wait_until(lambda: live.toc.failures.get(kept.id) and live.toc.counts("celery").dead == 2)


def test_bounds_and_masks_hold_in_the_worker(live: Live) -> None:
    options = {"toc_failures": 1, "toc_failures_mask": ["name"], "toc_failures_message": 300}
    live.start_workers(1, "-c", "1", broker_transport_options=options)
    first = live.app.tasks["e2e.flaky"].delay("s3cret-name")
    one = listed(live.toc, 1)[first.id]
    assert (one.masked, one.retryable) == (True, False)
    assert "s3cret" not in repr(one._asdict())
    assert one.error.startswith("ValueError: •••• is broken")
    assert b"s3cret" not in b"".join(
        value for key in live.client.scan_iter("*failures") for value in live.client.hvals(key)
    )
    second = live.app.tasks["e2e.fail"].delay("x" * 2000 + first.id * 40)
    wait_until(lambda: bool(live.toc.failures.get(second.id)))
    [two] = live.toc.failures.find().failures
    assert (two.id, two.retryable, len(two.error) < 4000) == (second.id, False, True)
    said = answer(live.app, "failures", "retry", "--all", "--yes")
    assert (said.code, "the message is not kept" in said.out) == (6, True)


def test_show_says_what_became_of_an_id_without_a_message(live: Live) -> None:
    live.start_workers(1, "-c", "1")
    done, failed = live.app.tasks["e2e.add"].delay(1, 2), live.app.tasks["e2e.fail"].delay("x")
    assert done.get(timeout=10) == 3
    listed(live.toc, 1)
    gone = live.app.tasks["e2e.add"].apply_async((1, 2), countdown=3600)
    assert answer(live.app, "cancel", gone.id, "--yes").code == 0
    for id, words in (
        (done.id, ("the result backend", "SUCCESS")),
        (failed.id, ("ValueError: x", "Traceback", "FAILURE")),
        (gone.id, ("the cancellations", "cancelled or revoked", "REVOKED")),
    ):
        said = answer(live.app, "show", id)
        assert said.code == 0, said.err
        assert all(word in said.out for word in words), said.out
    sources = answer(live.app, "show", gone.id, "--json").json["sources"]
    assert [one["name"] for one in sources] == ["the cancellations", "the result backend"]


def test_a_source_that_does_not_answer_is_named(
    app: Celery, toc: kombu_toc.TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_toc.app.task.WITHIN", 0.5)
    toc.queues.declare("celery")
    app.conf.result_backend = "redis://127.0.0.1:1/0"
    answer(app, "show", "unknown").fails(3, "never saw it", "no answer from the result backend")


def test_nothing_is_kept_where_the_setting_says_none(live: Live) -> None:
    live.start_workers(1, "-c", "1", broker_transport_options={"toc_failures": 0})
    sent = live.app.tasks["e2e.fail"].delay("x")
    with pytest.raises(ValueError, match="x"):
        sent.get(timeout=10)
    assert live.app.tasks["e2e.add"].delay(1, 2).get(timeout=10) == 3
    assert live.toc.failures.find().failures == []
    assert list(live.client.scan_iter("*fail*")) == []
