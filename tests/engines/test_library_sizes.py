"""Messages of megabytes in the task library: what a database takes, and what is read at a time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kombu_toc import LibraryError, TimeoutCenter, center_for
from kombu_toc.library import statuses
from kombu_toc.library import store as pages
from kombu_toc.library.rebuild import Comparison, Rebuild
from kombu_toc.library.records import Event, now_us
from kombu_toc.library.store import Store

from ..support.library import status_of

pytestmark = pytest.mark.usefixtures("client")

#: More than MariaDB takes in one statement, as it is configured, in hexadecimal digits.
LARGE = b"\xff" * 9_000_000


@pytest.mark.every_engine
@pytest.mark.parametrize("required", [True, False], ids=["required", "not required"])
def test_a_message_that_is_too_large_for_a_database_says_so_and_holds_up_no_other(
    server, store, center, options, engine, required
):
    recorded = center_for(server.toc_url, **options, toc_library_required=required)
    recorded.queues.declare("mail")
    if engine and engine.url("").startswith("mariadb"):
        with pytest.raises(LibraryError, match="max_allowed_packet"):
            recorded.put("mail", "large", LARGE, delay=60)
        assert store.of_ids(["large"]) == [] and not center.get("large")
    else:
        recorded.put("mail", "large", LARGE, delay=60)
        assert store.of_ids(["large"])[0].body == LARGE
    ids = [f"small-{number}" for number in range(8)]  # in every table
    for id in ids:
        recorded.put("mail", id, b"small", delay=60)
        assert len(store.of_ids([id])) == 1
    recorded.recorder.recorder.flush()
    assert recorded.recorder.recorder.backlog == 0


@pytest.mark.every_engine
def test_ends_with_long_errors_are_recorded_together(store):
    now = now_us()
    events = [
        Event((f"id-{n}", "token", "mail"), statuses.DEAD, now, 1, "", "\U0001f642" * 4000, ({}, 0))
        for n in range(1200)
    ]
    store.record(events)
    assert status_of(store, "id-0") == status_of(store, "id-1199") == ["dead"]


def test_a_rebuild_reads_large_messages_a_few_at_a_time(
    server, client, store, options, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pages, "BYTES", 100_000)
    recorded = center_for(server.toc_url, **options)
    recorded.queues.declare("mail")
    bodies = {f"{n}": bytes([n]) * (30_000 if n % 3 else 40) for n in range(60)}
    bodies["huge"] = b"\xfe" * 250_000  # goes alone
    at = time.time() + 600
    recorded.put_many("mail", [(id, body, at + len(body)) for id, body in bodies.items()])
    read, worked_on = [], []
    found, wanted = Store.pages, Rebuild._wanted
    monkeypatch.setattr(
        Store, "pages", lambda _, *args, **how: (_noted(read, page) for page in found(*args, **how))
    )
    monkeypatch.setattr(
        Rebuild, "_wanted", lambda self, rows: wanted(self, _noted(worked_on, rows))
    )
    client.flushall()
    assert recorded.library.rebuild().put == len(bodies)
    # A page has what is due at the same moment, and what is later.
    assert all(size <= 250_000 + 100_000 + 60 * 40 for size, _ in read)
    assert all(size <= 100_000 or number == 1 for size, number in worked_on)
    assert max(number for _, number in worked_on) < 40
    assert {one.id: one.body for one in recorded.get(list(bodies))} == bodies


def test_what_is_large_and_ends_while_it_is_read_ends_no_page(
    server, store, options, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pages, "BYTES", 20_000)
    recorded = center_for(server.toc_url, **options)
    recorded.queues.declare("mail")
    at = time.time() + 600
    for n in range(12):
        recorded.put("mail", f"{n}", bytes([n]) * 20_000, at=at + n)
    [shard] = {store.shards.of("3")}
    ids = [f"{n}" for n in range(12) if store.shards.of(f"{n}") == shard]
    fill = pages._with_bodies

    def ending(shard: Any, rows: Any, large: Any) -> Any:
        if large[0][0] == ids[0]:
            store.forget([large[0]])
        return fill(shard, rows, large)

    monkeypatch.setattr(pages, "_with_bodies", ending)
    found = next(store.pages(shard, statuses.IN_REDIS, size=100))
    assert [row.id for row in found] == ids[1:2]


def test_check_compares_large_messages_a_few_at_a_time(
    server, client, store, options, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pages, "BYTES", 50_000)
    monkeypatch.setattr("kombu_toc.library.rebuild.UNDER_WAY_US", 0)
    recorded: TimeoutCenter = center_for(server.toc_url, **options)
    recorded.queues.declare("mail")
    at = time.time() + 600
    recorded.put_many("mail", [(f"{n}", bytes([n]) * 30_000, at) for n in range(12)])
    client.flushall()
    found = list(recorded.library.check(fix=True))
    assert sorted(one.id for one in found) == sorted(f"{n}" for n in range(12))
    assert len(recorded.get([f"{n}" for n in range(12)])) == 12


@pytest.mark.parametrize(
    "bound", [{"MAX_FOUND": 1}, {"MAX_FOUND_BYTES": 1}], ids=["number", "bytes"]
)
def test_check_keeps_a_bounded_number_of_what_disagrees(
    server, client, store, options, monkeypatch: pytest.MonkeyPatch, bound
):
    """Of a million that are missing, some are mended before the others are read."""
    for name, value in {"UNDER_WAY_US": 0, "CHUNK": 5, **bound}.items():
        monkeypatch.setattr(f"kombu_toc.library.rebuild.{name}", value)
    recorded = center_for(server.toc_url, **options)
    recorded.queues.declare("mail")
    at = time.time() + 600
    ids = [f"missing-{n}" for n in range(24)]
    recorded.put_many("mail", [(id, b"body", at) for id in ids])
    client.flushall()
    unrecorded = center_for(server.toc_url)
    unrecorded.queues.declare("mail")
    others = [f"unknown-{n}" for n in range(11)]
    unrecorded.put_many("mail", [(id, b"body", at) for id in others])
    settled: list[int] = []
    settle = Comparison._settle
    monkeypatch.setattr(
        Comparison,
        "_settle",
        lambda self, rows, messages, fix: (
            settled.append(len(rows) + len(messages)) or settle(self, rows, messages, fix)
        ),
    )
    found = list(recorded.library.check(fix=True))
    assert sorted(one.id for one in found) == sorted(ids + others)
    assert max(settled) <= 5 < len(settled)
    assert list(recorded.library.check()) == []
    assert len(recorded.get(ids + others)) == len(store.of_ids(ids + others)) == 35


def _noted(seen: list[tuple[int, int]], rows: Any) -> Any:
    """Rows, of which size and number are noted."""
    seen.append((sum(len(row.body) for row in rows), len(rows)))
    return rows
