"""How old a declaration may be: one rule, under a simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kombu_toc.center.registry import MAX_KNOWN, RELOAD, Registry
from kombu_toc.model.results import Delivery
from kombu_toc.model.topic import Declaration, Keys
from kombu_toc.scripts.call import ScriptCall


class Server:
    """The declarations that a server has; counts how often it is asked. It is its own runner."""

    clustered = False

    def __init__(self) -> None:
        self.topics: dict[str, bytes] = {}
        self.read = self.ran = 0
        self.client = self
        #: why it cannot be reached
        self.away: Exception | None = None

    def hget(self, key: str, name: str) -> bytes | None:
        self.read += 1
        return self.topics.get(name)

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        return {name.encode(): raw for name, raw in self.topics.items()}

    def at_home(self, key: str, ask: Callable[[], Any], otherwise: Any) -> Any:
        return ask() if self.away is None else otherwise(self.away)

    def run(self, call: ScriptCall) -> Any:
        self.ran += 1
        name, wanted, *more = call.args
        if call.script.name == "declare":
            return call.parse(self.topics.setdefault(name, wanted.encode()))
        if call.script.name == "admit":
            told = Declaration.from_json(self.topics[name])
            news = dict.fromkeys((wanted, *more), True)
            self.topics[name] = Declaration(**{**told.__dict__, **news}).to_json().encode()
            return call.parse(self.topics[name])
        assert call.script.name == "redeclare"
        there = self.topics.get(name) == wanted
        if there:
            self.topics[name] = more[0].encode()
        return call.parse(int(there))

    def change(self, name: str, **declared: Any) -> None:
        """As another process would."""
        self.topics[name] = Declaration(**declared).to_json().encode()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(server: Server, clock: Clock) -> Registry:
    runner: Any = server
    return Registry(runner, Keys("toc:"), steps=None, slots=4, clock=clock)


# -- freshness


def test_a_topic_is_read_again_after_five_seconds(
    registry: Registry, server: Server, clock: Clock
) -> None:
    assert registry.topic("mail").slots == 4
    server.change("mail", slots=16)
    clock.now += RELOAD - 0.001
    assert registry.topic("mail").slots == 4
    assert server.read == 0
    clock.now += 0.001
    assert registry.topic("mail").slots == 16
    clock.now += RELOAD - 0.001
    registry.topic("mail")
    assert server.read == 1


def test_who_may_not_declare_is_told_that_nobody_has(
    registry: Registry, server: Server, clock: Clock
) -> None:
    assert registry.recent("mail") is None
    server.change("mail", slots=2)
    found = registry.recent("mail")
    assert found is not None
    assert registry.recent("mail") is found
    assert server.read == 2
    server.topics.clear()
    clock.now += RELOAD
    assert registry.recent("mail") is None
    assert registry.known("mail") is None


def test_who_asks_for_what_is_declared_now_reads_it_each_time(
    registry: Registry, server: Server
) -> None:
    assert registry.declared("mail") is None
    server.change("mail", slots=2)
    found = registry.declared("mail")
    assert found is not None
    assert found.slots == 2
    assert server.read == 2
    assert server.ran == 0  # it declares nothing


def test_reading_makes_a_topic_fresh_whoever_has_read(
    registry: Registry, server: Server, clock: Clock
) -> None:
    """One rule: it is the age that counts, not by which way a declaration was read."""
    server.change("mail", slots=2)
    for read in (
        lambda: registry.declared("mail"),
        lambda: registry.learn("mail", server.topics["mail"]),
        lambda: registry.select(None),
        lambda: registry.standing("mail"),
        lambda: registry.declare("mail"),
    ):
        clock.now += RELOAD
        read()
        clock.now += RELOAD - 0.001
        before = server.read
        assert registry.topic("mail").slots == 2
        assert server.read == before


def test_what_is_known_is_of_any_age_and_asks_nobody(
    registry: Registry, server: Server, clock: Clock
) -> None:
    assert registry.known("mail") is None
    registry.declare("mail")
    clock.now += 10**6
    known = registry.known("mail")
    assert known is not None
    assert registry.resolved("mail") is known
    assert server.read == 0


def test_a_topic_that_was_deleted_is_declared_again_as_it_was(
    registry: Registry, server: Server, clock: Clock
) -> None:
    registry.declare("mail", slots=8, visibility=5)
    registry.declare("reply", expires=1000)
    server.topics.clear()
    clock.now += RELOAD
    assert registry.topic("mail").slots == 8
    assert Declaration.from_json(server.topics["mail"]).visibility == 5
    assert registry.topic("reply").declaration.expires == 1000
    assert list(server.topics) == ["mail"]  # who consumes the other declares it, or it goes
    server.topics.clear()
    server.change("mail", slots=2)
    clock.now += RELOAD
    assert registry.topic("mail").slots == 2


def test_what_is_forgotten_is_declared_when_it_is_used(registry: Registry, server: Server) -> None:
    registry.declare("mail")
    registry.forget("mail")
    server.change("mail", slots=16)
    assert registry.topic("mail").slots == 16


def test_only_so_many_topics_are_remembered(registry: Registry, server: Server) -> None:
    server.change("mail", slots=2)
    for number in range(3 * MAX_KNOWN):
        registry.learn(f"reply-{number}", server.topics["mail"])
    assert len(registry._known) <= MAX_KNOWN + 1


def test_the_topic_of_a_delivery_asks_nobody(registry: Registry, server: Server) -> None:
    """It may have been deleted meanwhile."""
    delivery = Delivery("mail", 1, 0, "a", 0, b"", 5)
    found = registry.topic_of(delivery)
    assert (found.slots, found.declaration.retries) == (4, 5)
    registry.declare("mail", retries=9)
    assert registry.topic_of(delivery).declaration.retries == 9
    assert server.read == 0


# -- declaring


def test_the_first_message_of_a_kind_is_admitted_and_no_other(
    registry: Registry, server: Server
) -> None:
    topic = registry.declare("mail")
    registry.admit(topic, "a", None)
    registry.admit(topic, "a", "a")
    assert server.ran == 1  # the declaration
    registry.admit(topic, "a", "b")
    known = registry.known("mail")
    assert known is not None
    assert known.declaration.bases
    registry.admit(known, "c", "d")
    assert server.ran == 2


def test_while_a_clusters_node_with_the_declarations_is_away_they_hold_as_they_were_read(
    registry: Registry, server: Server, clock: Clock
) -> None:
    plain, limited = registry.topic("mail"), registry.declare("sms", key_order="serial")
    server.away = ConnectionError("refused")
    clock.now += RELOAD
    for found in (registry.topic("mail"), registry.recent("mail"), registry.declared("mail")):
        assert found is plain
    assert registry.declare("mail") is plain
    assert registry.topic("sms") is limited
    with pytest.raises(ConnectionError):
        registry.topic("unknown")
    clock.now += 2 * RELOAD + 0.001
    assert registry.topic("mail") is plain
    for ask in (registry.topic, registry.declared, registry.declare):
        with pytest.raises(ConnectionError):  # it may have been resharded in between
            ask("sms")
    server.away = None
    server.change("mail", slots=16)
    clock.now += RELOAD
    assert registry.topic("mail").slots == 16
