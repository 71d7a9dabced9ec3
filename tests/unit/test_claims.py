"""What times are claimed and whose they are, without a server."""

from __future__ import annotations

from kombu_toc.center.waiting import by_topic
from kombu_toc.consumer.state import WakeTopics, claimant, idle_topics

from ..support.consumers import consumer


def test_another_wake_index_comes_first_each_time() -> None:
    topics = WakeTopics()
    first = [topics.listen(["a", "b", "c"], str)[0] for _ in range(6)]
    assert sorted(first) == ["a", "a", "b", "b", "c", "c"]
    assert first[:3] == first[3:]


def test_a_claim_is_read_by_its_key_once() -> None:
    topics = WakeTopics()
    topics.listen(["a", "b"], lambda topic: f"wake:{topic}")
    assert "b" in topics
    assert "c" not in topics
    assert topics.received([b"wake:b", b"3:1700000000000000", b"1"]) == (
        "b",
        3,
        1_700_000_000_000_000,
    )
    assert "b" not in topics
    topics.listen(["a"], str)
    assert topics.received(None) is None


def test_only_who_could_start_something_and_has_nothing_to_ask_for_claims_times() -> None:
    idle, busy, asks, waits, paused = (consumer(name) for name in "abcde")
    busy.sink.free = 0  # type: ignore[attr-defined]
    asks.pending.ask("c")
    waits.pops_in_flight.add(1)
    paused.pending.pause({"e"})
    assert idle_topics([idle, busy, asks, waits, paused]) == ["a"]


def test_a_claim_is_for_the_consumer_that_can_start_most() -> None:
    few, many, other = consumer("a", free=1), consumer("a", free=3), consumer("b", free=9)
    assert claimant([few, many, other], "a") is many
    assert claimant([few, many, other], "gone") is None


def test_claims_by_topic() -> None:
    claims = [("a", 1, 5), ("b", 0, 6), ("a", 2, 7)]
    assert by_topic(claims) == {"a": [(1, 5), (2, 7)], "b": [(0, 6)]}
