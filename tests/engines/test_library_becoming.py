"""What becomes of messages is written for many at once, in each database's own way (X12)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy.event
from sqlalchemy import Engine

from kombu_toc.library import statuses
from kombu_toc.library.outcomes import DAY_US
from kombu_toc.library.rebuild import reading_ahead
from kombu_toc.library.records import Event, Row, now_us
from kombu_toc.library.store import Store

from ..support.waiting import at_once


def rows(number: int) -> list[Row]:
    now = now_us()
    return [
        Row(
            *(f"task-{n:04d}", f"t{n}", "mail", statuses.PENDING, now + n, f"shop.t{n}"),
            *("order", str(n), 0, None, None, now, now, statuses.NOT_PUT, 0, None, "", b"{}"),
        )
        for n in range(number)
    ]


def event(row: Row, status: int, error: str = "", attempts: int = 1, has_row: bool = True) -> Event:
    said = {"task": "other", "x-biz-type": "order", "x-biz-id": "ü-9"}
    return Event(row.key, status, now_us(), attempts, "w:1", error, (said, 7), has_row)


@pytest.mark.parametrize("has_row", [True, False], ids=["likely", "unlikely"])
def test_whatever_has_become_of_messages_is_written_together(store: Store, has_row: bool) -> None:
    """Whether they are taken to have rows or not."""
    all_ = rows(60)
    store.insert(all_[:50])  # ten have no rows
    ends = (statuses.DONE, statuses.DEAD, statuses.TAKEN, statuses.PENDING, statuses.EXPIRED)
    events = [
        event(row, ends[n % 5], f"error {n} ü" * (n % 2), has_row=has_row)
        for n, row in enumerate(all_)
    ]
    store.record(events)
    for n, (row, told) in enumerate(zip(all_, events, strict=True)):
        found = store.history(row.id)
        if n >= 50 and not told.has_ended:
            assert found == []
            continue
        [record] = found
        assert record.status == statuses.NAMES[told.status], n
        assert (record.attempts, record.worker) == (1, "w:1")
        assert record.modified_us >= told.at_us  # older databases write one time for several
        if told.has_ended:
            assert (record.error, record.modified_us) == (told.error or None, told.at_us)
        # What has no row has what its message says.
        known = (row.task, row.biz_id, row.action_us) if n < 50 else ("other", "ü-9", 7)
        assert (record.task, record.biz_id, record.action_us) == known
        assert record.biz_type == "order"
        assert record.created_us == (row.created_us if n < 50 else told.at_us)
    live = {row.id: row for row in store.of_ids([row.id for row in all_])}
    assert sorted(live) == [row.id for n, row in enumerate(all_[:50]) if n % 5 in (2, 3)]
    assert {live[row.id].place for row in all_[2:50:5]} == {statuses.IN_REDIS}
    assert {live[row.id].place for row in all_[3:50:5]} == {statuses.NOT_PUT}


@pytest.mark.every_engine
def test_what_ends_again_on_a_day_is_one_record_with_the_latest(store: Store) -> None:
    [row] = rows(1)
    store.insert([row])
    store.record([event(row, statuses.TAKEN)])
    store.record([event(row, statuses.DONE)])
    store.record([event(row, statuses.DONE, "ValueError: late", attempts=2)])
    [record] = store.history(row.id)
    assert (record.status, record.error, record.attempts) == ("done", "ValueError: late", 2)
    assert (record.task, record.biz_id) == (row.task, row.biz_id)
    store.insert([row])  # its row comes late
    store.record([event(row, statuses.DEAD, attempts=0)])
    [record] = store.history(row.id)
    assert (record.status, record.attempts) == ("dead", 0)


@pytest.mark.every_engine
def test_of_two_events_of_one_message_the_latest_counts(store: Store) -> None:
    [row] = rows(1)
    store.insert([row])
    store.record([event(row, statuses.DONE), event(row, statuses.DEAD, "ValueError")])
    [record] = store.history(row.id)
    assert (record.status, record.error) == ("dead", "ValueError")


def test_what_has_ended_is_found_from_the_day_on_which_it_was_sent(store: Store) -> None:
    all_ = rows(6)
    store.insert(all_)
    store.record([event(row, statuses.DONE) for row in all_[:3]])
    keys = [row.key for row in all_]
    assert store.ended_of(keys) == set(keys[:3])
    assert store.ended_of(keys, since_us=all_[0].created_us) == set(keys[:3])
    assert store.ended_of(keys, since_us=now_us() + 3 * DAY_US) == set()


@pytest.mark.every_engine
def test_ends_without_rows_take_few_statements(store: Store) -> None:
    """As those with rows do: most of what is run at once from a queue that is kept behind."""
    said: list[str] = []

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        said.append(statement)
        most.append(len(parameters) if isinstance(parameters, list) else 1)

    most: list[int] = []
    all_ = rows(400)
    others = all_[40:]
    store.record([event(row, statuses.DONE) for row in all_[:40]])  # there is room for the day
    sqlalchemy.event.listen(Engine, "before_cursor_execute", note)
    try:
        store.record([event(row, statuses.DONE, has_row=False) for row in others])
    finally:
        sqlalchemy.event.remove(Engine, "before_cursor_execute", note)
    assert len(said) == 2 * len(store.shards.all)
    assert max(most) < 10, "each names all its messages in one value"
    assert store.count() == {"done": 400, "not put": 0}


def test_rows_of_what_has_ended_are_forgotten(store: Store) -> None:
    all_ = rows(400)
    store.insert(all_)
    store.forget([row.key for row in all_[:300]])
    left = store.of_ids([row.id for row in all_])
    assert sorted(row.id for row in left) == [row.id for row in all_[300:]]


@pytest.mark.every_engine
def test_two_who_end_the_same_messages_do_not_stop_each_other(store: Store) -> None:
    all_ = rows(400)
    store.insert(all_)

    def end(some: list[Row]) -> None:
        for start in range(0, len(some), 100):
            store.record([event(row, statuses.DONE) for row in some[start : start + 100]])

    at_once(end, (all_, all_[::-1]))
    assert store.count() == {"done": 400, "not put": 0}


def test_reading_ahead_hands_over_what_is_raised_and_ends_with_its_reader() -> None:
    def failing() -> Iterator[int]:
        yield from range(3)
        raise KeyError("read")

    seen = []
    with pytest.raises(KeyError, match="read"), reading_ahead(failing()) as read:
        for one in read:
            seen.append(one)
    assert seen == [0, 1, 2]
    with reading_ahead(iter(range(10**9))) as read:
        assert [next(read), next(read)] == [0, 1]
    # Nobody reads on. What earlier tests have begun may end meanwhile.
    assert "toc-read-ahead" not in {thread.name for thread in threading.enumerate()}
