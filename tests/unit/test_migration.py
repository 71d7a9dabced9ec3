"""A message on its way between Kombu's Redis transport and ours, and the account of a migration."""

from __future__ import annotations

import base64
import json
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_toc.migrate import (
    MAX_NAMED,
    NEAR,
    Move,
    Unreadable,
    delivered,
    eta_or_none,
    from_kombu,
    parse,
    tag_of,
    to_kombu,
)
from kombu_toc.model import scores
from kombu_toc.model.message import pack
from kombu_toc.model.results import WAITING, Found

from ..support.cases import each

NOW_US = 1_800_000_000_000_000
HOUR_US = 3_600_000_000


def payload(body: bytes = b"body", headers: dict[str, Any] | None = None) -> dict[str, Any]:
    """A message as Kombu's Redis transport keeps it."""
    return {
        "body": base64.b64encode(body).decode(),
        "content-encoding": "binary",
        "content-type": "application/data",
        "headers": headers or {},
        "properties": {
            "body_encoding": "base64",
            "delivery_tag": "tag",
            "delivery_info": {"exchange": "", "routing_key": "mail"},
            "priority": 3,
        },
    }


def found(message: dict[str, Any], at_us: int = 0, state: str = WAITING) -> Found:
    """The same message as the timeout center has it."""
    score = scores.action(at_us) if state == WAITING else scores.lease(at_us // 1000, 0, 16)
    body = pack(message, deflate=False, id="x")
    return Found("mail", 0, "x", state, 0, score, body, "")


@given(st.binary(), st.dictionaries(st.text(), st.integers() | st.text() | st.none()))
def test_a_message_that_goes_there_and_back_is_what_it_was(
    body: bytes, headers: dict[str, Any]
) -> None:
    headers.pop("task", None)
    there = from_kombu(parse(json.dumps(payload(body, headers)).encode()))
    assert there["body"] == body
    back = to_kombu(found(there), NOW_US)
    assert from_kombu(back)["body"] == body
    assert back["headers"] == headers
    assert back["properties"]["priority"] == 3
    assert back["properties"]["delivery_info"] == {"exchange": "", "routing_key": "mail"}


def test_a_delivered_message_is_marked_for_it_may_have_been_started() -> None:
    raw = json.dumps([payload(), "news", "news.it"]).encode()
    message, exchange, key = delivered(raw)
    assert (exchange, key) == ("news", "news.it")
    assert message["headers"]["redelivered"] is True
    assert message["properties"]["delivery_info"]["redelivered"] is True


@each(
    ("raw", "reason"),
    [
        (b"\xff", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1, 2]", "not a delivered message"),
        (b'[{"body": "x"}, "", ""]', "not a message of Kombu's: KeyError"),
        (b'[7, "", ""]', "not a message of Kombu's: TypeError"),
    ],
)
def test_what_cannot_be_read_stays_and_the_reason_is_given(raw: bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        delivered(raw)


def test_a_body_in_an_encoding_that_nobody_knows_stays() -> None:
    odd = payload()
    odd["properties"]["body_encoding"] = "rot13"
    with pytest.raises(Unreadable, match="rot13"):
        from_kombu(odd)


def test_a_message_without_a_tag_is_told_by_its_bytes() -> None:
    message = from_kombu(payload())
    assert tag_of(message, b"raw") == "tag"
    message["properties"]["delivery_tag"] = None
    assert tag_of(message, b"raw") == tag_of(message, b"raw") != tag_of(message, b"other")


@each("wrong_by", [0, NEAR - 10, 10 - NEAR])
def test_a_task_keeps_an_eta_that_is_near_its_action_time(wrong_by: int) -> None:
    task = from_kombu(payload(headers={"task": "t", "eta": "2027-01-15T09:00:00+00:00"}))
    eta_us = eta_or_none(task)
    assert eta_us == NOW_US + HOUR_US
    made = to_kombu(found(task, eta_us + wrong_by), NOW_US)
    assert made["headers"]["eta"] == "2027-01-15T09:00:00+00:00"


def test_a_move_names_the_first_of_those_that_stay_and_counts_all() -> None:
    account = Move(mock.Mock(), mock.Mock(), ["mail"], dry_run=False)
    assert account.is_wanted("mail") and not account.is_wanted("other")
    for number in range(MAX_NAMED + 5):
        account.stays("mail", f"{number}", "reason")
    account.skip("odd", "it expires by itself", 7)
    account.moved["mail"] += 3
    result = account.result({"zzz", "aaa"})
    assert (result.moved, result.staying, len(result.named)) == (3, MAX_NAMED + 12, MAX_NAMED)
    assert result.skipped == {"odd": "it expires by itself"}
    assert result.unknown == ["aaa", "zzz"]
