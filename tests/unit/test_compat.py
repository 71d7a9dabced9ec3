"""Uses of private names: each is checked on start, can be switched off, and is told of once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import kombu_toc
from kombu_toc.compat import registry
from kombu_toc.compat.registry import SWITCH, CompatPart


@pytest.fixture(autouse=True)
def own_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test makes is gone when it ends."""
    monkeypatch.setattr(registry, "_parts", dict(registry._parts))
    monkeypatch.delenv(SWITCH, raising=False)
    yield


def made(way_out: str = "") -> CompatPart:
    return CompatPart(
        "speed",
        touches="Thing._secret",
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
