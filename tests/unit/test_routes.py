"""When a producer reads the bindings of an exchange again."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_toc.center.exchanges import Routes, binding
from kombu_toc.model.topic import Keys
from kombu_toc.scripts.call import ScriptCall


class Center:
    """Replies the bindings of an exchange, unless the caller has that version of them."""

    def __init__(self) -> None:
        self.keys, self.runner = Keys("toc:"), self
        self.bound: dict[str, str] = {}  #: routing key -> queue
        self.version = 0
        self.asked = self.read = 0

    def bind(self, routing_key: str, queue: str) -> None:
        self.bound[routing_key] = queue
        self.version += 1

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
        self.center: Any = Center()
        self.routes = Routes(self.center)

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
