"""What a consumer reads again, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kombu_toc.consumer.poller import REREAD, Rereading
from kombu_toc.model.topic import Declaration

from ..support.consumers import consumer


class Work:
    """Answers with declarations that the test gives."""

    def __init__(self) -> None:
        self.declared: dict[str, Declaration] = {}

    def send(self, items: Any) -> None:
        for (command, _, *names), tell in items:
            if command == "HMGET":
                tell([self.declared[name] for name in names])


def test_a_queue_whose_limits_are_others_is_looked_into() -> None:
    registry = SimpleNamespace(learn=lambda name, raw: SimpleNamespace(declaration=raw))
    keys = SimpleNamespace(topics="topics", paused="paused")
    center: Any = SimpleNamespace(registry=registry, keys=keys, paused=set)
    work, state = Work(), consumer("a", "b")
    rereading = Rereading(SimpleNamespace(center=center, work=work, states={1: state}))
    now = 100.0

    def read(**limits: Any) -> list[str]:
        nonlocal now
        now += REREAD
        work.declared = {"a": Declaration.of("a", **limits), "b": Declaration(slots=8)}
        state.pending.slots.clear()
        rereading.read(now)
        return list(state.pending.slots)

    assert read(slots=8) == []
    assert read(slots=8, retries=3) == []
    assert read(slots=8, concurrency=2) == ["a"]
    assert read(slots=8, concurrency=2) == []
    assert read(slots=8, concurrency=5) == ["a"]
    assert read(slots=8) == ["a"]
