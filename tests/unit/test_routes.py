"""When a producer reads the bindings of an exchange again, under a simulated clock."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_toc.center.exchanges import MANY, READ_AGAIN, READ_ALL_AGAIN, Routes, binding
from kombu_toc.model.keys import Keys
from kombu_toc.scripts.call import ScriptCall

pytestmark = pytest.mark.versions


class Center:
    """Replies the bindings of an exchange, unless the caller has that version of them."""

    def __init__(self) -> None:
        self.keys = Keys("toc:")
        self.bound: dict[str, str] = {}  #: routing key -> queue
        self.version = 0
        self.asked = self.read = 0

    def bind(self, routing_key: str, queue: str, *, seen: bool = True) -> None:
        self.bound[routing_key] = queue
        self.version += seen

    def run(self, call: ScriptCall) -> Any:
        self.asked += 1
        [known] = call.args
        version = str(self.version).encode()
        if known == str(self.version):
            return [version]
        self.read += 1
        members = [binding("direct", key, None, queue) for key, queue in self.bound.items()]
        return [version, *(part for one in members for part in (one.encode(), 0))]


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.center: Any = Center()
        self.routes = Routes(self.center, clock=lambda: self.now)

    def find(self, routing_key: str) -> list[str]:
        return self.routes.of("exchange").direct(routing_key)


@pytest.fixture
def world() -> World:
    return World()


def test_each_look_asks_and_reads_only_what_has_changed(world: World) -> None:
    world.center.bind("a", "one")
    for _ in range(3):
        assert world.find("a") == ["one"]
    assert (world.center.asked, world.center.read) == (3, 1)
    world.center.bind("a", "two")
    assert world.find("a") == ["two"]
    assert world.center.read == 2


def test_a_change_that_the_version_does_not_tell_is_seen_within_a_second(world: World) -> None:
    world.center.bind("a", "one")
    world.find("a")
    world.center.bind("a", "two", seen=False)
    world.now += READ_AGAIN - 0.001
    assert world.find("a") == ["one"]
    world.now += 0.001
    assert world.find("a") == ["two"]


def test_many_bindings_are_read_again_rarely(world: World) -> None:
    for number in range(MANY + 1):
        world.center.bind(f"{number}", "one")
    world.find("0")
    world.center.bind("0", "two", seen=False)
    world.now += READ_ALL_AGAIN - 0.001
    assert world.find("0") == ["one"]
    world.now += 0.001
    assert world.find("0") == ["two"]


def test_who_finds_no_queue_reads_again_but_many_bindings_once_a_second(world: World) -> None:
    world.center.bind("a", "one")
    world.find("b")
    world.center.bind("b", "two", seen=False)
    assert world.routes.anew("exchange").direct("b") == ["two"]

    for number in range(MANY + 1):
        world.center.bind(f"{number}", "one")
    world.find("c")
    world.routes.anew("exchange")
    world.center.bind("c", "three", seen=False)
    assert world.routes.anew("exchange").direct("c") == []
    world.now += READ_AGAIN
    assert world.routes.anew("exchange").direct("c") == ["three"]
