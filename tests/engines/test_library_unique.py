"""Tasks with a unique key have rows, and have their keys again after a rebuild (X12)."""

from __future__ import annotations

from typing import Any

import pytest
from kombu import Connection

from kombu_toc import Unique, UniqueError
from kombu_toc.library.putting import is_unique

from ..support.library import consume, fill, publish, rebuilt, status_of

pytestmark = pytest.mark.usefixtures("client")

LATER = {"x-delay": 600_000}


def unique(key: str, **how: Any) -> dict[str, Any]:
    return {"x-unique": key, **{f"x-unique-{name}": value for name, value in how.items()}, **LATER}


def test_a_unique_task_has_a_row_and_one_that_is_not_sent_has_none(broker, store, center):
    publish(broker, "order-1", **unique("42"))
    publish(broker, "order-2", **unique("42"))
    [row] = store.of_ids(["order-1", "order-2"])
    assert row.id == "order-1"
    assert is_unique(row)
    with pytest.raises(UniqueError):
        publish(broker, "order-3", **unique("42", conflict="raise"))
    assert store.count() == {"pending": 1, "not put": 0}


def test_it_ends_like_every_task(broker, store):
    publish(broker, "order-1", **{"x-unique": "42"})
    assert consume(broker, 1) == ["order-1"]
    assert status_of(store, "order-1") == ["done"]
    publish(broker, "order-2", **{"x-unique": "42"})
    assert consume(broker, 1) == ["order-2"]
    assert store.count() == {"done": 2, "not put": 0}


@pytest.mark.parametrize("conflict", ["replace", "push_back"])
def test_what_is_replaced_has_ended_and_what_replaces_it_comes_back(
    server, client, broker, store, options, center, conflict, recorded
):
    publish(broker, "order-1", **unique("42"))
    later = {**unique("42", conflict=conflict), "x-delay": 900_000}
    publish(broker, "order-2", **later)
    [found] = center.get("order-1")
    [row] = store.of_ids(["order-1", "order-2"])
    assert (row.id, row.body) == ("order-1", found.body)
    assert sorted(status_of(store, "order-1")) == ["cancelled", "pending"]
    assert rebuilt(recorded) == 1
    center.registry.forget("mail")
    [back] = center.get("order-1")
    assert back.body == found.body


def test_after_a_rebuild_a_key_is_held_again(client, broker, store, center, recorded):
    for number in range(3):
        publish(broker, f"order-{number}", **unique(f"key-{number}", until=1000 + number))
    publish(broker, "plain", **LATER)
    assert rebuilt(recorded) == 4
    assert recorded.library.rebuild().put == 0
    recorded.registry.forget("mail")
    for number in range(3):
        kept = recorded.put("mail", f"other-{number}", b"x", unique=f"key-{number}", delay=60).id
        assert kept == f"order-{number}"
    assert store.count()["pending"] == 4


def test_who_has_the_key_by_the_time_of_the_rebuild_keeps_it(
    server, client, broker, store, options, center, recorded
):
    publish(broker, "order-1", **unique("42"))
    client.flushall()
    with Connection(server.toc_url, transport_options=options) as other:
        publish(other, "order-2", **unique("42"))
    assert recorded.library.rebuild().put == 0
    [record] = store.history("order-1")
    assert (record.status, record.error) == ("cancelled", "another message has its unique key")
    assert status_of(store, "order-2") == ["pending"]


def test_a_center_records_what_has_a_unique_key(client, recorded, store, center):
    assert recorded.put("mail", "order-1", b"one", unique="42", delay=600).id == "order-1"
    assert recorded.put("mail", "order-2", b"two", unique="42", delay=600).id == "order-1"
    assert store.count() == {"pending": 1, "not put": 0}
    replace = Unique("42", conflict="replace")
    assert recorded.put("mail", "order-3", b"three", unique=replace, delay=600).id == "order-1"
    assert sorted(status_of(store, "order-1")) == ["cancelled", "pending"]
    assert rebuilt(recorded) == 1
    center.registry.forget("mail")
    [found] = center.get("order-1")
    assert found.body == b"three"
    assert recorded.put("mail", "order-4", b"four", unique="42", delay=600).id == "order-1"


def test_a_retry_of_a_unique_task_comes_back_beside_another_of_its_key(
    server, client, broker, store, options, recorded, center
):
    publish(broker, "order-1", **{"x-unique": "42"})

    def retry(message: Any) -> None:
        publish(broker, "order-1", retries=1, **unique("42"))
        message.ack()

    consume(broker, 1, retry)
    assert sorted(status_of(store, "order-1")) == ["done", "pending"]
    client.flushall()
    with Connection(server.toc_url, transport_options=options) as other:
        publish(other, "order-2", **unique("42"))
    assert recorded.library.rebuild().put == 1
    center.registry.forget("mail")
    assert len(center.get(["order-1", "order-2"])) == 2


def test_messages_that_take_the_places_of_others_leave_one_row(broker, store):
    fill(broker, 3, **unique("42", conflict="replace"))
    publish(broker, "order-9", **unique("42"))
    with pytest.raises(UniqueError):
        publish(broker, "order-8", **unique("42", conflict="raise"))
    assert store.count()["pending"] == 1
