"""What the threads of a process say to its lease keeper at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from kombu_toc import TimeoutCenter
from kombu_toc.consumer.lease_keeper import LeaseKeeper
from kombu_toc.scripts.call import ScriptCall, load


class Wanted(dict[Hashable, float]):
    """Who wants the topics kept up; calls `meanwhile` when it is asked whether anybody does."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def __bool__(self) -> bool:
        there = len(self) > 0
        self.meanwhile()
        return there


def test_who_begins_to_consume_while_the_last_one_leaves_takes_part_in_the_upkeep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere() -> TimeoutCenter:
        raise ConnectionError

    keeper = LeaseKeeper(nowhere)
    monkeypatch.setattr(keeper._thread, "beat_within", lambda seconds: None)
    begins = threading.Thread(target=keeper.keep_up, args=("another", 0.7))

    def meanwhile() -> None:
        if not begins.ident:
            begins.start()
            begins.join(0.2)  # unless it has to wait for the one that leaves

    election = keeper.upkeeper.election
    election._wanted = Wanted(meanwhile)
    keeper.keep_up("one", 0.7)
    keeper.leave_up("one")
    begins.join(10)
    assert dict(election._wanted) == {"another": 0.7}
    assert election.due == 0.0


def test_calls_that_are_being_tried_are_owed_and_go_first_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, third = (ScriptCall(load("ack"), [name], [], int) for name in "abc")
    keeper = LeaseKeeper(TimeoutCenter)  # type: ignore[arg-type]  # it is not called
    monkeypatch.setattr(keeper._thread, "beat_within", lambda seconds: None)
    keeper.retry_later([first, second])
    answers: list[list[object]] = [[1, redis.ConnectionError()], [redis.TimeoutError(), 1]]
    seen = []

    def run_each(calls: list[ScriptCall]) -> list[object]:
        if len(seen) == 2:
            raise redis.ConnectionError
        seen.append((calls, len(keeper.calls)))
        if calls == [first, second]:
            keeper.retry_later([third])
            assert len(keeper.calls) == 3
        return answers.pop(0)

    center: Any = SimpleNamespace(runner=SimpleNamespace(run_each=run_each))
    keeper._run_owed_calls(center)
    assert keeper.calls == [second, third]
    keeper._run_owed_calls(center)
    assert keeper.calls == [second]
    with pytest.raises(redis.ConnectionError):
        keeper._run_owed_calls(center)
    assert keeper.calls == [second]
