"""The verbs of TimeoutCenter are those of its parts; its options are checked."""

from __future__ import annotations

import gc
import inspect
import weakref

import pytest
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from kombu_toc import ConfigurationError, Limits, TimeoutCenter
from kombu_toc.center.center import Delegate
from kombu_toc.center.messages import Messages

from ..support.cases import each

VERBS = sorted(name for name, value in vars(TimeoutCenter).items() if isinstance(value, Delegate))


@pytest.fixture
def center() -> TimeoutCenter:
    """A center that reaches no server."""
    return TimeoutCenter(redis.Redis(port=1), steps=(0, 5), slots=16, wait_replicas=2, grace=3.0)


def test_a_verb_is_that_of_a_part_with_its_name_signature_and_docstring(
    center: TimeoutCenter,
) -> None:
    assert TimeoutCenter.get is Messages.get
    assert 12 < len(VERBS) < 25, "what is no verb of a message is a method of a part"
    for name in VERBS:
        method = getattr(center, name)
        assert inspect.ismethod(method), name
        assert method.__self__ is not center, name
        assert (method.__name__, method.__func__) == (name, getattr(TimeoutCenter, name))
        assert method.__doc__, name


def test_a_subclass_may_have_a_method_of_its_own() -> None:
    class Own(TimeoutCenter):
        def get(self, id: str) -> None:  # type: ignore[override]
            with pytest.raises(redis.ConnectionError):
                super().get(id)
            seen.append(id)

    seen: list[str] = []
    Own(redis.Redis(port=1, retry=Retry(NoBackoff(), 0))).get("x")
    assert seen == ["x"]


def test_options_are_kept_where_they_are_used(center: TimeoutCenter) -> None:
    assert (center.registry.steps, center.registry.slots, center.registry.retries) == (
        (0, 5),
        16,
        16,
    )
    assert (center.runner.wait_replicas, center.runner.wait_timeout) == (2, 1.0)
    assert (center.context.pop_bytes, center.leases.grace) == (8_000_000, 3.0)
    assert center.limits == Limits()
    center.context.limits = limits = Limits(visibility=5.0)
    assert center.limits is limits


def test_a_center_is_gone_with_its_last_reference() -> None:
    """So its connections are, at once: its parts do not refer to it."""
    gc.disable()
    try:
        center = TimeoutCenter(redis.Redis(port=1))
        gone = [weakref.ref(center), weakref.ref(center.runner), weakref.ref(center.registry)]
        del center
        assert [ref() for ref in gone] == [None, None, None]
    finally:
        gc.enable()


@each(
    ("arguments", "options", "said"),
    [
        (("redis://:sesame@h:6379/0",), {}, "client must be .*, not a str: TimeoutCenter.from_url"),
        ((6379,), {}, "client must be a client of redis-py, such as redis.Redis.., not a int"),
        ((None,), {}, "client must be a client of redis-py"),
        ((redis.ConnectionPool(),), {}, "client must be .*, not a ConnectionPool"),
        ((redis.asyncio.Redis(),), {}, "redis.asyncio is for AsyncTimeoutCenter"),
        ((redis.Redis(), 0), {}, "prefix must be a str, such as 'toc:', not 0"),
        ((redis.Redis(), b"toc:"), {}, "prefix must be a str, such as 'toc:', not b'toc:'"),
        ((redis.Redis(),), {"limits": {"visibility": 30}}, r"limits must be .*Limits.*, not {'vis"),
        ((redis.Redis(),), {"metrics": 5}, "metrics must be kombu_toc.Metrics.., not 5"),
        ((redis.Redis(),), {"slots": "eight"}, "slots must be a power of two"),
        ((redis.Redis(),), {"retries": "x"}, "retries must be a whole number from 0 to 31"),
        ((redis.Redis(),), {"wait_replicas": "2"}, "wait_replicas must be a whole number"),
        ((redis.Redis(),), {"wait_timeout": "soon"}, "wait_timeout must be a number of seconds"),
        ((redis.Redis(),), {"pop_bytes": "x"}, "pop_bytes must be a whole number"),
        ((redis.Redis(),), {"grace": "x"}, "grace must be a number of seconds"),
    ],
)
def test_an_argument_that_makes_no_sense_is_named_with_the_way_out(
    arguments: tuple[object, ...], options: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said) as raised:
        TimeoutCenter(*arguments, **options)  # type: ignore[arg-type]
    assert "sesame" not in str(raised.value)


def test_a_center_is_made_from_a_url() -> None:
    center = TimeoutCenter.from_url("toc+redis://localhost:1/3", toc_wait_replicas=2)
    assert type(center) is TimeoutCenter and center.runner.wait_replicas == 2
    assert center.client.connection_pool.connection_kwargs["db"] == 3
    with pytest.raises(ConfigurationError, match="toc_wait"):
        TimeoutCenter.from_url("toc+redis://localhost", toc_waits=2)
