"""Uses of private names: each is checked on start, can be switched off, and is told of once."""

from __future__ import annotations

import ast
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kombu
import pytest

import celery_toc
import kombu_toc
from celery_toc import compat
from kombu_toc import compat as registry
from kombu_toc.compat import SWITCH, CompatPart

from ..support.cases import each

pytestmark = pytest.mark.versions


@pytest.fixture(autouse=True)
def own_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test makes is gone when it ends."""
    monkeypatch.setattr(registry, "_parts", dict(registry._parts))
    monkeypatch.delenv(SWITCH, raising=False)
    yield


def made(way_out: str = "") -> CompatPart:
    return CompatPart(
        "speed",
        lost="it is slower",
        check=lambda thing: CompatPart.missing(thing, "_secret"),
        way_out=way_out,
    )


THERE, GONE = SimpleNamespace(_secret=1), SimpleNamespace()


def test_a_part_is_used_if_what_it_expects_is_there(caplog: pytest.LogCaptureFixture) -> None:
    assert made().usable(THERE)
    assert not caplog.records


def test_one_line_tells_what_is_missing_and_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    part = made()
    assert not part.usable(GONE)
    assert not part.usable(GONE)  # after a reconnect
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "Compatibility: speed: SimpleNamespace._secret is missing: it is slower"
    )


def test_a_part_that_is_switched_off_is_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(SWITCH, " idle-connections, speed")
    assert not made().usable(THERE)
    assert [record.getMessage() for record in caplog.records] == [
        "Compatibility: speed is switched off: it is slower"
    ]


def test_an_unknown_name_is_an_error_that_lists_what_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made()
    monkeypatch.setenv(SWITCH, "speed,sped")
    with pytest.raises(kombu_toc.ConfigurationError, match="'sped', which is no part") as error:
        CompatPart.check_names()
    assert "idle-connections, " in str(error.value)
    assert "speed" in str(error.value)
    assert "redis-socket" not in str(error.value)


def test_without_what_nothing_may_start_without_an_error_names_the_way_out() -> None:
    part = made("Install thing 1")
    assert part.usable(THERE)
    with pytest.raises(kombu_toc.CompatError, match=r"_secret is missing.*Install thing 1"):
        part.usable(GONE)


def test_what_nothing_may_start_without_cannot_be_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = made("Install thing 1")
    monkeypatch.setenv(SWITCH, "speed")
    with pytest.raises(kombu_toc.ConfigurationError, match="cannot be switched off"):
        part.usable(THERE)
    with pytest.raises(kombu_toc.ConfigurationError, match="cannot be switched off"):
        CompatPart.check_names()


def test_a_name_is_given_once() -> None:
    made()
    with pytest.raises(ValueError, match="'speed'"):
        made()


# -- the parts themselves


def everything() -> dict[str, CompatPart]:
    """The parts of both packages: those who import these know them."""
    assert compat
    return registry.parts()


class Bare:
    """An object that has nothing that anybody expects."""


def subjects() -> dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """By a part's name, what its check gets: as it is in what is installed, and bare."""
    from celery import Celery
    from celery.app import utils
    from celery.app.amqp import AMQP
    from celery.backends.redis import RedisBackend
    from celery.bin import control as bin_control
    from celery.concurrency.asynpool import AsynPool
    from celery.concurrency.solo import TaskPool
    from celery.worker import control, state
    from celery.worker.consumer import Consumer
    from celery.worker.pidbox import gPidbox
    from celery.worker.request import Request
    from kombu.asynchronous.timer import Timer
    from kombu.pidbox import Mailbox, Node

    consumer: Any = Consumer.__new__(Consumer)
    consumer.on_task_request, consumer.strategies, consumer.timer = print, {}, Timer()
    behind: Any = AsynPool.__new__(AsynPool)
    vars(behind).update(_cache={}, _pool=[], outbound_buffer=[], _processes=1, _tref_for_id={})
    behind._all_inqueues, behind.on_poll_start = set(), print
    box: Any = gPidbox.__new__(gPidbox)
    box.node = Node(None, mailbox=Mailbox("celery"))
    bare = (Bare(),)
    return {
        "acks-at-once": ((consumer,), bare),
        "async-results": ((RedisBackend,), (Bare,)),
        "async-streams": ((), ()),
        "bootstep": ((Consumer.Blueprint,), bare),
        "command-line": ((bin_control, control.Panel), (Bare(), Bare())),
        "connect-pause": ((consumer,), bare),
        "countdowns": ((AMQP,), (Bare,)),
        "due-times": ((consumer,), bare),
        "failure-reasons": ((consumer,), bare),
        "hidden-settings": ((utils,), bare),
        "idle-connections": ((), ()),
        "inspect": ((control,), bare),
        "known-queues": ((kombu.Producer,), (Bare,)),
        "missing-processes": ((behind,), bare),
        "pool-hooks": ((TaskPool(1),), bare),
        "processes": ((SimpleNamespace(_pool=behind, flush=None),), bare),
        "quick-messages": ((AMQP,), (Bare,)),
        "quick-times": ((Request,), (Bare,)),
        "redis-socket": ((), ()),
        "remote-control": ((box,), bare),
        "revoke-removes": ((Mailbox,), bare),
        "send-now": ((behind,), bare),
        "solo-hooks": ((TaskPool(1),), bare),
        "time-limits": ((behind,), bare),
        "uniqueness": ((Celery,), (Bare,)),
        "weak-sets": ((state.reserved_requests,), bare),
        "worker-state": ((state,), bare),
    }


#: Those whose check has nothing to find: what they touch came with a later Celery, or Flower,
#: which is not installed, or needs a channel, as every test of the transport makes one, or a
#: connector within a loop, as every test of what targets answer does.
UNCHECKED = {"flower", "http-protocol", "kombu-channel", "soft-shutdown"}


def test_every_part_is_looked_at_here() -> None:
    assert subjects().keys() | UNCHECKED == everything().keys()


def test_what_every_part_expects_is_in_what_is_installed() -> None:
    parts = everything()
    missing = {name: list(parts[name].check(*there)) for name, (there, _) in subjects().items()}
    assert {name: names for name, names in missing.items() if names} == {}


def test_every_part_misses_its_names_where_they_are_gone() -> None:
    parts = everything()
    for name, (_, gone) in subjects().items():
        if gone:
            assert list(parts[name].check(*gone)), name


def test_redis_pys_names_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    import redis

    parts = everything()
    monkeypatch.setattr(redis, "Connection", Bare)
    monkeypatch.setattr(redis, "ConnectionPool", Bare)
    assert list(parts["redis-socket"].check()) == ["Bare._sock"]
    assert list(parts["idle-connections"].check()) == ["Bare._available_connections"]
    with pytest.raises(kombu_toc.CompatError, match="Install redis-py"):
        parts["redis-socket"].usable()


@each("name", ["_cache", "outbound_buffer", "_pool"])
def test_a_worker_does_not_start_with_a_pool_whose_books_have_another_name(name: str) -> None:
    """It would give back a message while a process executes its task."""
    from celery_toc.compat.worker import SentTasks

    books = {"_cache": {}, "outbound_buffer": [], "_pool": [], "mark_as_worker_lost": print}
    pool = SimpleNamespace(_pool=SimpleNamespace(**books), flush=None)
    SentTasks(pool)
    delattr(pool._pool, name)
    with pytest.raises(kombu_toc.CompatError, match=f"{name} is missing.*--pool threads"):
        SentTasks(pool)


def test_every_part_has_a_line_in_the_page() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "compat.md").read_text()
    rows = [line.split("|")[1].strip().strip("`") for line in page.splitlines() if "| `" in line]
    assert sorted(name for name in rows if name) == sorted(everything())


def test_every_file_of_parts_says_what_why_which_versions_and_what_is_lost() -> None:
    everything()
    of_celery = Path(celery_toc.__file__).with_name("compat")
    for path in (Path(registry.__file__), *of_celery.glob("*.py")):
        if path.name == "__init__.py":
            continue
        said = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert said.count("\nTouches: "), path.name
        for fact in ("Why: ", "Read in ", "Without"):
            assert said.count(f"\n{fact}") >= said.count("\nTouches: "), (path.name, fact)
        parts = re.findall(r'CompatPart\(\s*"([\w-]+)"', path.read_text())
        assert [name for name in parts if f"`{name}`" not in said] == [], path.name


def test_a_worker_does_not_start_without_a_module_of_celerys(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Celery logs what its signal handlers raise, and would go on."""
    from celery import signals

    from celery_toc import plugin

    monkeypatch.setitem(sys.modules, "celery_toc.worker.step", None)
    signals.worker_init.connect(plugin._on_worker_init, weak=False, dispatch_uid="celery_toc")
    with pytest.raises(SystemExit):
        signals.worker_init.send(sender="worker")
    assert "This worker does not start: " in caplog.text
