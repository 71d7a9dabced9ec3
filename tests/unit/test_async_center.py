"""AsyncTimeoutCenter has what TimeoutCenter has; replies are read as they come."""

from __future__ import annotations

import random
from inspect import signature

import pytest
import redis
from redis.exceptions import NoScriptError, ResponseError

from kombu_toc import AsyncTimeoutCenter, ConfigurationError, TimeoutCenter
from kombu_toc.aio.client import ReplyReader, _patience, run, wait_for
from kombu_toc.center.center import Delegate

from ..support import nursery
from ..support.cases import each
from ..support.loops import in_loop


def test_whatever_a_timeout_center_offers_can_be_awaited() -> None:
    for name, value in vars(TimeoutCenter).items():
        if isinstance(value, Delegate):
            own, its = (getattr(center, name) for center in (AsyncTimeoutCenter, TimeoutCenter))
            # A loop over messages is another one here; it takes the same.
            assert own is its or (
                name == "consume" and [*signature(own).parameters] == [*signature(its).parameters]
            )
    toc = AsyncTimeoutCenter.from_url("toc+redis://localhost:1/0", toc_slots=4, toc_retries=2)
    for part in (*TimeoutCenter.PARTS, "registry", "runner"):
        methods = public(getattr(toc.center, part))
        assert methods
        assert methods <= public(getattr(toc, part))
    assert toc.registry.slots == 4
    assert toc.limits is toc.center.limits


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if name[0] != "_" and callable(getattr(thing, name))}


def test_a_function_gets_what_is_awaited_for_it() -> None:
    async def twice(number: int) -> int:
        return 2 * number

    def function(number: int, *, more: int) -> int:
        return wait_for(twice(number)) + wait_for(twice(more))

    assert in_loop(run(function, 1, more=2)) == 6


def test_an_error_is_raised_where_it_is_waited_for_and_may_be_caught_there() -> None:
    async def fail() -> None:
        raise ValueError("no")

    def function() -> str:
        try:
            wait_for(fail())
        except ValueError as exc:
            return f"caught {exc}"
        return "not raised"

    assert in_loop(run(function)) == "caught no"


def test_outside_of_it_nothing_can_be_waited_for() -> None:
    async def never() -> None: ...

    with pytest.raises(ConfigurationError, match="with await"):
        wait_for(never())


def test_nothing_of_it_is_loaded_before_it_is_used_and_then_greenlet_is_asked_for() -> None:
    program = (
        "import sys, kombu_toc; kombu_toc.center_for('toc+redis://')\n"
        "print({'greenlet', 'kombu_toc.aio'} & set(sys.modules))\n"
        "sys.modules['greenlet'] = None\n"
        "try: kombu_toc.AsyncTimeoutCenter.from_url('toc+redis://')\n"
        "except kombu_toc.ConfigurationError as exc: print(exc)"
    )
    said = nursery.done(("-c", program), execute=True).stdout
    assert said.startswith("set()\n") and "pip install 'celery-toc[asyncio]'" in said


REPLIES = [
    (b":12\r\n", 12),
    (b":-3\r\n", -3),
    (b"+OK\r\n", b"OK"),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"$0\r\n\r\n", b""),
    (b"$4\r\n\r\n\r\n\r\n", b"\r\n\r\n"),
    (b"*0\r\n", []),
    (b"*3\r\n:1\r\n*2\r\n$1\r\na\r\n*0\r\n$-1\r\n", [1, [b"a", []], None]),
    (b"*1\r\n*1\r\n*1\r\n:7\r\n", [[[7]]]),
    (b"$200000\r\n" + b"x" * 200_000 + b"\r\n", b"x" * 200_000),
]


@pytest.mark.versions
@each("seed", range(20))
def test_replies_are_read_however_they_are_cut(seed: int) -> None:
    chance = random.Random(seed)
    chosen = chance.choices(REPLIES, k=30)
    stream = b"".join(raw for raw, _ in chosen)
    reader = ReplyReader()
    while stream:
        size = chance.choice((1, 2, 3, 7, 100, 70_000))
        reader.feed(stream[:size])
        stream = stream[size:]
    assert reader.take(len(chosen)) == [value for _, value in chosen]
    assert reader.replies == []


@pytest.mark.versions
def test_an_error_takes_the_place_of_its_reply() -> None:
    reader = ReplyReader()
    reader.feed(b"-NOSCRIPT No matching script\r\n*2\r\n-ERR no\r\n:1\r\n:2\r\n")
    first, [second, one], two = reader.take(3)
    assert isinstance(first, NoScriptError)
    assert isinstance(second, ResponseError)
    assert (one, two) == (1, 2)


@pytest.mark.versions
def test_what_is_no_reply_is_an_error() -> None:
    with pytest.raises(redis.exceptions.InvalidResponse, match="not Redis's protocol"):
        ReplyReader().feed(b"HTTP/1.1 400 Bad Request\r\n")


def test_commands_that_block_are_told_from_others() -> None:
    assert _patience([("HGET", "a", "b"), ("EVALSHA", "x", 0)]) is None
    assert _patience([("BZPOPMIN", "a", "b", 2.5)]) == 2.5
    assert _patience([("EVALSHA", "x", 0), ("WAIT", 1, 500)]) == 0.5
    assert _patience([("XREAD", "COUNT", 5, "BLOCK", 2000, "STREAMS", "a", 0)]) == 2.0
    assert _patience([("XREAD", "COUNT", 5, "STREAMS", "a", 0)]) is None
