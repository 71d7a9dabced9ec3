"""Limits of starts, keys and puts: declared, described, altered while a queue is in use, and what
a Cluster changes. What they do is in other files."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection

from kombu_toc import TERMS, ConfigurationError, Limit, TimeoutCenter, reshard_topic

from ..unit.test_terms import EVERY

pytestmark = pytest.mark.cluster

Connect = Callable[..., Connection]

#: One slot: as a queue needs on a Cluster if something counts it as a whole.
GIVEN = {"slots": 1, **{name: given for name, (given, _) in EVERY.items()}}
KEPT = {name: kept for name, (_, kept) in EVERY.items()}


def standing(center: TimeoutCenter, topic: str = "mail") -> dict[str, Any]:
    """The limits that a topic is declared with."""
    found = center.registry.declared(topic)
    assert found is not None
    return {name: v for name in TERMS if (v := getattr(found.declaration, name)) is not None}


def test_a_topic_is_declared_with_all_of_them_and_described(center: TimeoutCenter) -> None:
    center.queues.declare("mail", **GIVEN)
    assert standing(center) == KEPT
    described = center.queues.describe("mail").limits
    assert described["rate"] == Limit("100/s", "declared")
    assert described["key_weights"] == Limit({"gold": 3.0, "a b": 0.5}, "declared")
    center.queues.declare("plain")
    assert center.queues.describe("plain").limits["rate"] == Limit(None, "default")


def test_a_queues_arguments_declare_them(connect: Connect) -> None:
    channel = connect().default_channel
    arguments = {f"x-{name.replace('_', '-')}": value for name, value in GIVEN.items()}
    channel.queue_declare("mail", arguments=arguments)
    assert standing(channel.connection.client.transport.center) == KEPT
    assert channel.ignored["mail"] == []


def test_options_declare_them(connect: Connect) -> None:
    channel = connect(toc_topics={"mail": GIVEN}).default_channel
    channel.queue_declare("mail")
    assert standing(channel.connection.client.transport.center) == KEPT
    with pytest.raises(ConfigurationError, match="queue 'mail': rate must be a rate such as"):
        connect(toc_topics={"mail": {"rate": "fast"}})


def test_an_argument_that_makes_no_sense_declares_nothing(connect: Connect) -> None:
    channel = connect().default_channel
    with pytest.raises(ConfigurationError, match="queue 'mail': key_rate must be a rate such as"):
        channel.queue_declare("mail", arguments={"x-key-rate": "1/fortnight"})
    with pytest.raises(ConfigurationError, match="rate_burst says nothing without rate"):
        channel.queue_declare("mail", arguments={"x-rate-burst": 3})
    assert channel.connection.client.transport.center.registry.declared("mail") is None


def test_what_contradicts_the_declaration_is_one_warning(
    connect: Connect, caplog: pytest.LogCaptureFixture, forgotten: None
) -> None:
    said = {"x-slots": 1, "x-rate": "60/m", "x-key-fair": True, "x-key-weights": "a=2,b=3"}
    connect().default_channel.queue_declare("mail", arguments=said)
    alike = {**said, "x-rate": 1, "x-rate-burst": 1}
    connect().default_channel.queue_declare("mail", arguments=alike)
    assert caplog.records == []
    other = {"x-slots": 1, "x-rate": "2/s", "x-key-weights": {"a": 1.5}, "x-key-fair": True}
    with caplog.at_level(logging.WARNING):
        connect().default_channel.queue_declare("mail", arguments={**other, "x-key-concurrency": 1})
    assert [record.getMessage() for record in caplog.records] == [
        "queue 'mail' was declared with rate=60/m, key_concurrency=none, key_weights=a=2,b=3, and "
        "this process asks for rate=2/s, key_concurrency=1, key_weights=a=1.5: the former stands; "
        "'celery toc topic set mail --rate 2/s --key-concurrency 1 --key-weights a=1.5' changes it"
    ]


def test_they_are_changed_and_taken_away(center: TimeoutCenter) -> None:
    center.queues.declare("mail", **GIVEN)
    center.queues.alter("mail", rate="7/m", key_concurrency=9, key_retry=None)
    changed = {**KEPT, "rate": "7/m", "key_concurrency": 9}
    del changed["key_retry"]
    assert standing(center) == changed
    center.queues.alter("mail", **dict.fromkeys(TERMS))
    assert standing(center) == {}


def test_what_says_nothing_any_more_is_taken_away_with_the_other(center: TimeoutCenter) -> None:
    center.queues.declare("mail", **GIVEN)
    center.queues.alter("mail", rate=None, key_fair=None)
    assert {"rate", "rate_burst", "key_fair", "key_weights"} & standing(center).keys() == set()
    with pytest.raises(ConfigurationError, match="rate_burst says nothing without rate"):
        center.queues.alter("mail", rate_burst=3)


def test_a_queue_that_is_counted_as_a_whole_has_one_slot_on_a_cluster(
    center: TimeoutCenter, connect: Connect
) -> None:
    """With toc_slots, too; on one server it has as many as others."""
    center.queues.declare("mail", rate="100/s")
    assert center.queues.describe("mail").slots == (1 if center.clustered else 8)
    center.queues.declare("keyed", key_rate="100/s")
    assert center.queues.describe("keyed").slots == 8
    channel = connect(toc_slots=4).default_channel
    channel.queue_declare("news", arguments={"x-concurrency": 3})
    assert center.queues.describe("news").slots == (1 if center.clustered else 4)
    assert channel.ignored["news"] == []


def test_more_slots_with_a_count_of_the_whole_queue_are_refused_on_a_cluster(
    center: TimeoutCenter,
) -> None:
    center.queues.declare("plain", slots=2)
    for refused in (
        lambda: center.queues.declare("mail", rate="100/s", slots=2),
        lambda: center.queues.alter("plain", concurrency=3),
    ):
        if center.clustered:
            with pytest.raises(ConfigurationError, match=r"needs one slot, not 2; 'celery toc"):
                refused()
        else:
            refused()
    assert (center.registry.declared("mail") is None) is center.clustered


def test_a_queue_that_is_counted_as_a_whole_keeps_its_slot_on_a_cluster(
    center: TimeoutCenter,
) -> None:
    center.queues.declare("mail", concurrency=3, slots=1)
    if center.clustered:
        with pytest.raises(ConfigurationError, match="'mail': concurrency counts the whole queue"):
            reshard_topic(center, "mail", 4)
        assert center.queues.describe("mail").slots == 1
    center.queues.alter("mail", concurrency=None)
    reshard_topic(center, "mail", 4, settle=0)
    assert center.queues.describe("mail").slots == 4
