"""What holds for one message and not for its queue, with real workers."""

from __future__ import annotations

from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from kombu import Queue

import kombu_toc
from kombu_toc import DEAD

from ..support.workers import Live, wait_until


@pytest.mark.versions
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_task_that_hangs_gives_its_message_back_when_its_max_lease_has_passed(
    live: Live, pool: str
) -> None:
    """And its late acknowledgement does no harm; a task beside it runs longer than that."""
    short = {"visibility_timeout": 2}
    [worker] = live.start_workers(1, "-P", pool, "-c", "4", broker_transport_options=short)
    hangs = live.app.tasks["e2e.hang"].apply_async(("hangs", 9.0), headers={"x-max-lease": 3})
    beside = live.app.tasks["e2e.hang"].apply_async(("beside", 9.0))
    first, second = live.journal.wait_for("hangs", 2)
    assert 3 <= second["by_redis"] - first["by_redis"] < 7
    assert (first["redelivered"], second["redelivered"]) == (False, True)
    wait_until(
        lambda: (
            f"message {hangs.id} of celery (task e2e.hang): its max lease has passed although"
            in worker.logs()
        )
    )
    live.journal.wait_for("done-beside", 1)
    live.journal.wait_for("done-hangs", 2)
    assert beside.get(timeout=10) == "beside"
    wait_until(lambda: live.toc.counts("celery") == (0, 0, 0, 0))
    assert len(live.journal.entries("beside")) == 1
    assert worker.logs().count("its max lease has passed") == 1
    wait_until(lambda: kombu_toc.read_metrics(live.toc)["celery"].totals["overran"] == 1)


@pytest.mark.parametrize("key", [{"headers": {"x-key": "c 1"}}, {"MessageGroupId": "c 1"}], ids=str)
def test_a_retry_keeps_the_visibility_the_max_lease_and_the_key_of_its_task(
    live: Live, key: dict[str, Any]
) -> None:
    live.start_workers(1, "-P", "solo")
    headers = {"x-visibility": 200, "x-max-lease": 300, **key.get("headers", {})}
    sent = live.app.tasks["e2e.again"].apply_async((1, 3600), **{**key, "headers": headers})
    wait_until(lambda: len(live.journal.entries(f"again-{sent.id}")) == 1)
    wait_until(lambda: [found.state for found in live.toc.get(sent.id)] == ["waiting"])
    slots = live.toc.registry.topic("celery").all_slots()
    [retry] = live.toc.get(sent.id)
    tokens = [live.toc.client.hget(slot.tokens, retry.id) for slot in slots]
    assert [token for token in tokens if token] == [b";v200000,m300000,kc%201"]
    live.toc.reschedule(sent.id)
    assert sent.get(timeout=10) == 1


def test_what_celery_lets_expire_is_marked_by_a_worker_and_what_kombu_does_is_a_dead_letter(
    live: Live,
) -> None:
    with live.app.connection_for_write() as connection:
        Queue("urgent", message_ttl=0.5)(connection).declare()
    add = live.app.tasks["e2e.add"]
    expires = add.apply_async((1, 1), expires=0.5)
    expiration = add.apply_async((1, 1), expiration=0.5)
    both = add.apply_async((1, 1), expiration=0.2, expires=0.5)
    queue = add.apply_async((1, 1), queue="urgent")
    later = add.apply_async((1, 1), countdown=600, expiration=3600)
    fine = add.apply_async((1, 1), expiration=3600, expires=3600)
    now = live.toc.client.time()[0]
    wait_until(lambda: live.toc.client.time()[0] >= now + 2)
    [worker] = live.start_workers(1, "-P", "solo", "-Q", "celery,urgent")
    assert fine.get(timeout=10) == 2
    for one in (expires, both):
        with pytest.raises(TaskRevokedError):
            one.get(timeout=10)
    for one, topic in ((expiration, "celery"), (queue, "urgent")):
        wait_until(lambda: [m.state for m in live.toc.get(one.id)] == [DEAD])  # noqa: B023
        [found] = live.toc.get(one.id)
        assert (found.topic, found.reason) == (topic, "expired")
        line = f"{topic}: 1 messages have expired, they are not delivered: {one.id}"
        wait_until(lambda: line in worker.logs(), what=worker.logs)  # noqa: B023
    live.toc.reschedule(later.id)
    assert later.get(timeout=10) == 2
    assert live.toc.dead.requeue("celery") == live.toc.dead.requeue("urgent") == 1
    assert expiration.get(timeout=10) == queue.get(timeout=10) == 2
