"""What the task library says to whoever asks for what cannot be."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import Any

import pytest

from kombu_toc import LibraryError, center_for

pytestmark = pytest.mark.usefixtures("client")

#: Arguments of find, and what the error names.
WRONG = [
    ({"limit": 0}, "limit must be"),
    ({"limit": 2.5}, "limit must be"),
    ({"limit": None}, "limit must be"),
    ({"between": 5}, "between must be two times"),
    ({"between": (math.nan, None)}, "between must be two times"),
    ({"between": (datetime(2026, 11, 22, tzinfo=timezone.utc), None)}, "between must be two times"),
    ({"status": "gone"}, "there is no status 'gone'"),
    ({"status": 2}, "status must be"),
    ({"biz_id": "a\0b"}, "biz_id 'a.x00b' has characters"),
    ({"biz_type": "\udcff"}, "biz_type '.udcff' has characters"),
    ({"task": b"shop"}, "task must be a text"),
    ({"after": 5}, "not where a page ends"),
    ({"after": '[1e400, "a", "b", "c", 1]'}, "not where a page ends"),
    ({"after": '[99999999999999999999, "a", "b", "c", 1]'}, "not where a page ends"),
    ({"after": '[1, "a\\u0000", "b", "c", 1]'}, "not where a page ends"),
]


@pytest.fixture
def library(server, options) -> Any:
    center = center_for(server.toc_url, **options)
    center.put("mail", "order-42", b"expire", delay=3600)
    return center.library


def test_a_search_that_cannot_be_says_what_is_wrong(library):
    for how, said in WRONG:
        with pytest.raises(LibraryError, match=said):
            library.find(**how)


def test_what_is_endless_is_a_bound_as_well(library):
    for between in ((-math.inf, math.inf), (0, 1e30), (-1e30, None), None):
        assert [one.id for one in library.find(between=between, limit=10**12).records] == [
            "order-42"
        ]
    assert library.find(between=(math.inf, None)).records == []


@pytest.mark.parametrize("wrong", [None, b"42", "4\0002"], ids=["none", "bytes", "nul"])
def test_without_a_business_id_nothing_is_cancelled_or_moved(library, wrong):
    for act in (library.cancel, library.reschedule):
        with pytest.raises(LibraryError, match="biz_id"):
            act(biz_id=wrong)
        with pytest.raises(LibraryError, match="biz_id"):
            act(biz_id=wrong, biz_type="order")
    [record] = library.find().records
    assert record.status == "pending"


@pytest.mark.every_engine
def test_what_was_due_before_the_epoch_is_found(recorded):
    recorded.put("mail", "old", b"x", at=-(10**6))
    recorded.put("mail", "first", b"x", at=0)
    assert [one.id for one in recorded.library.find().records] == ["old", "first"]
    assert [one.id for one in recorded.library.find(between=(None, -1)).records] == ["old"]


@pytest.mark.parametrize("days", [0, -1, math.nan, "7"], ids=str)
def test_days_that_cannot_be_kept_drop_nothing(library, days):
    with pytest.raises(LibraryError, match="days must be"):
        library.prune(days)
    assert library.prune(math.inf) == 0


def test_the_history_of_nothing_is_no_error_of_the_database(library):
    assert library.history(5) == library.history("") == []
    for wrong in (None, "a\0b", "\udcff"):
        with pytest.raises(LibraryError, match="id "):
            library.history(wrong)
