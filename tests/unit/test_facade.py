"""TimeoutCenter is a facade: its methods and options are those of its parts."""

from __future__ import annotations

import gc
import inspect
import weakref

import pytest
import redis

from kombu_toc import Limits, TimeoutCenter
from kombu_toc.center.delegate import Delegate, Option
from kombu_toc.center.lookup import Lookup

DELEGATES = sorted(
    name for name, value in vars(TimeoutCenter).items() if isinstance(value, Delegate)
)
OPTIONS = sorted(name for name, value in vars(TimeoutCenter).items() if isinstance(value, Option))


@pytest.fixture
def center() -> TimeoutCenter:
    """A center that reaches no server."""
    return TimeoutCenter(redis.Redis(port=1), steps=(0, 5), slots=16, wait_replicas=2, grace=3.0)


@pytest.mark.parametrize("name", DELEGATES)
def test_a_method_is_that_of_a_part_with_its_name_and_docstring(
    center: TimeoutCenter, name: str
) -> None:
    method = getattr(center, name)
    assert inspect.ismethod(method)
    assert method.__self__ is not center
    assert (method.__name__, method.__func__) == (name, getattr(TimeoutCenter, name))
    assert method.__doc__


def test_the_signature_is_that_of_the_part() -> None:
    assert TimeoutCenter.get is Lookup.get
    assert len(DELEGATES) > 40


def test_a_subclass_may_have_a_method_of_its_own() -> None:
    class Own(TimeoutCenter):
        def known(self, name: str) -> None:  # type: ignore[override]
            assert super().known(name) is None
            seen.append(name)

    seen: list[str] = []
    assert Own(redis.Redis(port=1)).known("mail") is None
    assert seen == ["mail"]


def test_options_are_read_and_changed_where_they_are_used(center: TimeoutCenter) -> None:
    assert {name: getattr(center, name) for name in OPTIONS} == {
        "steps": (0, 5),
        "slots": 16,
        "retries": 16,
        "limits": Limits(),
        "wait_replicas": 2,
        "wait_timeout": 1.0,
        "pop_bytes": 8_000_000,
        "grace": 3.0,
    }
    center.limits = limits = Limits(visibility=5.0)
    center.wait_replicas = 0
    assert center.context.limits is limits
    assert center.runner.wait_replicas == 0


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
