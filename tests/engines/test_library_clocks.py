"""Clocks that are wrong, and numbers that grow: what the task library keeps of them."""

from __future__ import annotations

import time

import pytest

from kombu_toc import center_for
from kombu_toc.center.calls import PutRequest
from kombu_toc.library import center as centers
from kombu_toc.library import keeper, rebuild, records, statuses
from kombu_toc.library.library import ServerTime
from kombu_toc.library.outcomes import DAY_US
from kombu_toc.library.records import Event, Row, now_us
from kombu_toc.library.store import Store

from ..support.library import publish, rebuilt, status_of
from ..support.ports import free_port

HOUR = 3_600_000_000


def done(id: str, at_us: int, attempts: int = 1) -> Event:
    return Event((id, "token", "mail"), statuses.DONE, at_us, attempts, "w:1", "", ({}, 0))


def test_a_clock_that_was_far_ahead_keeps_no_history_from_being_dropped(store: Store) -> None:
    now = now_us()
    ids = ["ahead", "long-ago", "today", "in-5-days", "in-6-days"]
    store.record([done("ahead", now + 30_000 * DAY_US), done("long-ago", 5)])
    for id, at in zip(ids[2:], (0, 5, 6), strict=True):
        store.record([done(id, now + at * DAY_US)])
        store = Store(store.shards)  # as another process, which has seen no day
        store.record([done(id, now + at * DAY_US + 1)])
    assert all(status_of(store, id) == ["done"] for id in ids)
    for shard in store.shards.all:
        list(store.pruning(shard, (now + 6 * DAY_US) // DAY_US))
    assert [id for id in ids if store.history(id)] == ["ahead", "in-6-days"]


def test_a_clock_that_is_behind_records_what_ends(store: Store) -> None:
    now = now_us()
    store.record([done("now", now)])
    store.record([done("then", 5), done("last month", now - 33 * DAY_US)])
    assert [status_of(store, id) for id in ("now", "then", "last month")] == [["done"]] * 3


@pytest.mark.parametrize("attempts", [32_767, 32_768, 10**9])
@pytest.mark.parametrize("status", [statuses.TAKEN, statuses.DONE, statuses.DEAD])
def test_what_was_tried_however_often_has_its_record(
    store: Store, status: int, attempts: int
) -> None:
    now = now_us()
    row = Row(
        *("order-1", "token", "mail", statuses.PENDING, now, None, None, None, 0, None, None),
        *(now, now, statuses.IN_REDIS, 0, None, "", b"{}"),
    )
    store.insert([row])
    store.record([Event(row.key, status, now + 1, attempts, "w:1", "", ({}, 0))])
    [record] = store.history("order-1")
    assert (record.status, record.attempts) == (statuses.NAMES[status], 32_767)


@pytest.mark.parametrize("wrong", [HOUR, -HOUR], ids=["ahead", "behind"])
def test_a_countdown_is_counted_by_redis_in_its_row_as_well(
    server, client, broker, store, center, options, monkeypatch: pytest.MonkeyPatch, wrong: int
):
    """Whatever the clock of the sender shows: so it is not an hour late, or early, if it is put
    back."""
    monkeypatch.setattr(records, "now_us", lambda: now_us() + wrong)
    # Who rebuilds or looks after it has another clock: it was imported before.
    assert {one.now_us for one in (rebuild, keeper)} == {now_us} and centers
    recorded = center_for(server.toc_url, **options)
    recorded.queues.declare("mail")
    publish(broker, "sent", **{"x-delay": 600_000})
    recorded.put("mail", "put", b"1", delay=600)
    recorded.put_many("mail", [("now", b"2", None)])
    found = {one.id: one.time_us for one in center.get(["sent", "put"])}
    for row in store.of_ids(["sent", "put"]):
        assert abs(row.action_us - found[row.id]) < 60_000_000
    [row] = store.of_ids(["now"])
    assert abs(row.action_us - now_us()) < 60_000_000
    assert rebuilt(recorded) == 3
    back = {one.id: one.time_us for one in center.get(["sent", "put"])}
    assert all(abs(back[id] - found[id]) < 60_000_000 for id in ("sent", "put"))


def test_a_server_is_asked_for_its_time_now_and_then(server, client):
    asked: list[float] = []

    class Client:
        def time(self) -> tuple[int, int]:
            asked.append(time.monotonic())
            return 7_000, 5

    clock = ServerTime(Client())
    counted = PutRequest("id", b"", None, delay_us=9)
    assert all(abs(clock.of(counted) - 7_000_000_005) < 20_000_000 for _ in range(5))
    assert clock.of(PutRequest("id", b"", 123)) is None
    assert len(asked) == 1
    away = center_for(f"toc+redis://127.0.0.1:{free_port()}/0")
    assert ServerTime(away.client).of(counted) is None
