"""What the upkeep of a library costs while nothing is due: few statements, however many tables."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import event

from kombu_toc import center_for
from kombu_toc.library import statuses
from kombu_toc.library.keeper import PRUNED

from ..support.inspection import put_some
from ..support.library import status_of
from ..support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("client")

#: Seconds for which statements are counted: they are sent or not in that time.
SECONDS = 6.0


@pytest.fixture
def center(server: Any, new_url: Any) -> Any:
    made = center_for(
        server.toc_url,
        toc_library=[new_url(), new_url()],
        toc_library_tables=64,
        toc_topics={"far": {"horizon": 60}},
    )
    made.library.create()
    yield made
    made.recorder.recorder.close()


def test_what_is_idle_is_asked_with_a_few_statements_a_second(center: Any) -> None:
    """All tables of a database in one, each second; the others are those of history that is dropped
    once in an hour, which are bounded, too."""
    recorder = center.recorder.recorder
    counted: Counter[int] = Counter()
    databases = recorder.store.shards.databases
    for database in databases:
        for one in (database.engine, database._single):
            event.listen(
                *(one, "after_cursor_execute"),
                lambda *_, number=database.number: counted.update([number]),
            )
    recorder.consumes()
    wait_until(lambda: all(counted[one.number] for one in databases), 60)
    counted.clear()
    time.sleep(SECONDS)
    for database in databases:
        # What is not put, what is far ahead, what is overdue, which queues there are.
        assert counted[database.number] <= (SECONDS + 1) * (2 + PRUNED * 2), counted


def test_what_is_not_put_is_put_from_whichever_table(center: Any, monkeypatch: Any) -> None:
    """Also where one turn does not look at all of them."""
    monkeypatch.setattr("kombu_toc.library.keeper.TABLES", 5)
    recorder = center.recorder.recorder
    put_some(center, "mail", 40, "order-", b"one", delay=60)
    rows = recorder.store.of_ids([f"order-{number}" for number in range(40)])
    center.client.flushall()
    center.registry.forget("mail")
    recorder.store.place([row.key for row in rows], statuses.NOT_PUT)
    recorder.consumes()
    wait_until(lambda: sum(center.counts("mail")[:2]) == 40, 60)
    assert {one for row in rows for one in status_of(recorder.store, row.id)} == {"pending"}
