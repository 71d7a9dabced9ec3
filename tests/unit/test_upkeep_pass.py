"""One pass of the upkeep after another, with a server that replies what a test says."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError, ResponseError

from kombu_toc.center.calls import Context
from kombu_toc.center.registry import Registry
from kombu_toc.center.upkeep import MAX_EMPTY, MAX_REPEATS, REREAD, REST, Event, Upkeep
from kombu_toc.metrics import Metrics
from kombu_toc.model.limits import Limits
from kombu_toc.model.topic import Declaration, Keys
from kombu_toc.scripts.call import ScriptCall


class Server:
    """Topics of one server, or of a Cluster whose nodes have a slot each."""

    def __init__(self, *, clustered: bool = False) -> None:
        self.now = 1000.0
        self.clustered = clustered
        self.topics: dict[bytes, bytes] = {}
        self.holding: set[str] = set()  #: topics that hold messages
        self.refused: dict[str, Exception] = {}  #: part of a key -> what is replied
        self.more = False
        self.reply_events: list[Any] = []
        self.looks: Counter[str] = Counter()  #: announced_times of a slot -> how often looked at
        self.read = 0
        self.removed: list[tuple[bytes, bytes]] = []
        self.told: list[Event] = []
        keys = Keys("toc:")
        context = Context(keys, clustered, Limits(), 1000, Metrics(active=True).counts)
        runner: Any = SimpleNamespace(
            client=self,
            run_each=self.run_each,
            executor=SimpleNamespace(place_of=lambda key: key if clustered else None),
        )
        registry = Registry(runner, keys, steps=None, slots=8, clock=lambda: self.now)
        self.upkeep = Upkeep(
            runner,
            registry,
            context,
            {},
            in_time=lambda topic, slots: True,
            tell=self.told.append,
            on_step=lambda seconds: None,
            clock=lambda: self.now,
        )

    def declare(self, name: str, slots: int) -> None:
        self.topics[name.encode()] = Declaration(slots=slots).to_json().encode()

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        self.read += 1
        return dict(self.topics)

    def hdel(self, key: bytes, member: bytes) -> None:
        self.removed.append((key, member))

    def run_each(self, calls: list[ScriptCall]) -> list[Any]:
        return [self.reply(call) for call in calls]

    def reply(self, call: ScriptCall) -> Any:
        slots = [key for key in call.keys if key.endswith("armed")]
        self.looks.update(slots)
        for part, error in self.refused.items():
            if any(part in key for key in slots):
                return error
        parts = list(dict.fromkeys(key.partition("{")[2].partition(":")[0] for key in slots))
        holding = [at for at, name in enumerate(parts) if name in self.holding]
        return call.parse([5, int(self.more), holding, self.reply_events, [], []])

    def run(self) -> Counter[str]:
        """One pass; how often each slot was looked at."""
        self.looks.clear()
        self.upkeep.run(lambda: True)
        return self.looks.copy()


def test_a_pass_looks_at_every_slot_that_holds_something_and_at_others_in_turn() -> None:
    server = Server()
    server.declare("busy", 8)
    for number in range(2 * MAX_EMPTY // 256):
        server.declare(f"empty-{number}", 256)
    server.holding = {"busy"}
    server.run()
    seen: Counter[str] = Counter()
    for _ in range(3):
        looks = server.run()
        assert sum(looks.values()) <= MAX_EMPTY + 64 + 8
        assert all(looks[f"toc:{{busy:{slot}}}:armed"] == 1 for slot in range(8))
        seen += looks
    assert len(seen) == 8 + 2 * MAX_EMPTY


def test_what_is_more_than_a_call_may_do_is_done_in_the_same_pass_but_not_for_ever() -> None:
    server = Server()
    server.declare("mail", 4)
    server.more = True
    assert set(server.run().values()) == {MAX_REPEATS}


def test_which_topics_there_are_is_read_now_and_then() -> None:
    server = Server()
    server.declare("mail", 4)
    for _ in range(5):
        server.run()
    assert server.read == 1
    server.declare("new", 2)
    server.now += REREAD
    assert len(server.run()) == 6
    assert server.read == 2


def test_what_happened_is_told_and_copies_that_are_gone_leave_their_sets() -> None:
    server = Server()
    server.declare("mail", 4)
    server.reply_events = [0, b"1", 1, b"a", 0, b"2", 2, b"b", 0, b"3", 3, b"c#2"]
    server.run()
    assert server.told == [Event("mail", ["a"], ["b"], ["c#2"], [])]
    assert server.removed == [(b"toc:{mail:3}:copies:c", b"c#2")]


def test_a_slot_that_is_refused_keeps_no_other_waiting() -> None:
    server = Server()
    server.declare("mail", 4)
    server.declare("other", 4)
    error = ResponseError("WRONGTYPE")
    server.refused = {"{mail:2}": error}
    looks = server.run()
    assert server.upkeep.refused == {"mail": error}
    assert looks["toc:{mail:3}:armed"] == 3  # with all, with its topic's, and alone
    assert looks["toc:{other:0}:armed"] == 2
    server.refused = {}
    server.run()
    assert server.upkeep.refused == {}


def test_a_node_that_cannot_be_reached_is_left_alone_for_a_while() -> None:
    server = Server(clustered=True)
    server.declare("mail", 2)
    server.refused = {"{mail:1}": ConnectionError("gone")}
    assert len(server.run()) == 2
    assert list(server.run()) == ["toc:{mail:0}:armed"]
    server.now += REST
    assert len(server.run()) == 2


def test_a_server_that_cannot_be_reached_ends_the_pass() -> None:
    server = Server()
    server.declare("mail", 2)
    server.refused = {"{mail:0}": ConnectionError("gone")}
    with pytest.raises(ConnectionError):
        server.run()
