"""Which queues are consumed and what is kept fresh, without a server."""

from __future__ import annotations

import json
import threading

import pytest

from kombu_toc.consumer.holdings import PRESENCE_INTERVAL, KeptFresh, Presence


@pytest.fixture
def presence() -> Presence:
    return Presence(threading.RLock(), "host", 42)


def test_a_process_announces_what_it_consumes_at_once_and_now_and_then(presence: Presence) -> None:
    presence.add("b", "channel 1")
    presence.add("a", "channel 1")
    assert presence.is_due(0.0)
    statement, before = presence.next(100.0)
    assert (json.loads(statement), before) == (["host", 42, "a", "b"], [])
    presence.announced(statement)
    assert not presence.is_due(100.0 + PRESENCE_INTERVAL - 0.1)
    assert presence.is_due(100.0 + PRESENCE_INTERVAL)
    assert presence.next(115.0) == (statement, [])


def test_a_change_replaces_what_was_announced_and_the_end_takes_it_back(presence: Presence) -> None:
    presence.add("a", "channel 1")
    presence.announced(first := presence.next(100.0)[0])
    assert presence.remove("a", "channel 1")
    assert presence, "Redis still says that it consumes"
    assert presence.is_due(100.1)
    assert presence.next(100.1) == ("", [first])
    presence.announced("")
    assert not presence


def test_a_process_that_ends_takes_back_what_it_announced(presence: Presence) -> None:
    assert not presence.end(), "it has announced nothing"
    presence.add("a", "channel 1")
    presence.announced(first := presence.next(100.0)[0])
    assert presence.end()
    assert presence.is_due(100.1)
    assert presence.next(100.1) == ("", [first])
    presence.announced("")
    assert not presence.end()


def test_a_process_that_ends_while_it_announces_takes_that_back_too(presence: Presence) -> None:
    presence.add("a", "channel 1")
    statement, _ = presence.next(100.0)
    assert presence.end()
    presence.announced(statement)
    assert presence.is_due(100.1)
    assert presence.next(100.1) == ("", [statement])


def test_a_queue_is_consumed_until_its_last_channel_leaves(presence: Presence) -> None:
    presence.add("a", "channel 1")
    presence.add("a", "channel 2")
    assert not presence.remove("b", "channel 1")
    assert presence.remove_all("channel 1")
    assert not presence.remove_all("channel 1")
    assert json.loads(presence.next(0.0)[0]) == ["host", 42, "a"]


def test_what_could_not_be_announced_is_due_again(presence: Presence) -> None:
    presence.add("a", "channel 1")
    presence.next(100.0)
    presence.failed()
    assert presence.is_due(100.1)


def test_an_announcement_whose_reply_was_lost_is_taken_back_too(presence: Presence) -> None:
    presence.add("a", "channel 1")
    lost, _ = presence.next(100.0)
    presence.failed()
    assert presence.end()
    assert presence.next(100.1) == ("", [lost])
    presence.announced("")
    assert not presence


def test_a_name_is_kept_fresh_until_its_last_holder_leaves_it() -> None:
    kept: KeptFresh[str] = KeptFresh(threading.RLock(), min)
    kept.keep("reply", 60_000, "one")
    kept.keep("reply", 10_000, "two")
    kept.keep("events", 5_000, "two")
    assert kept.lifetimes() == {"reply": 10_000, "events": 5_000}
    kept.leave_all("two")
    assert kept.lifetimes() == {"reply": 60_000}
    kept.leave("reply", "unknown")
    assert "reply" in kept
    kept.forget("reply")
    assert not kept
