"""Whatever comes in by an entrance is understood, or refused by an error of the product's own: a
thousand cases each by day, and a million of all at night."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

from celery_toc.schedules import rules
from kombu_toc import Delivery, TocError, Unique
from kombu_toc.client import options
from kombu_toc.client.options import Settings
from kombu_toc.http import fields, request, tokens
from kombu_toc.http.fields import Problem
from kombu_toc.model import delivery, message, timetext, topic
from kombu_toc.notify import message as notification
from kombu_toc.notify import targets

from ..support.cases import night

NOW = 1_790_000_000.0

TRAITS = ("visibility", "max_lease", "expiration", "x-visibility", "x-max-lease", "expiration_ms")

#: Of each type, what may be meant and what cannot be.
ODD: list[Any] = [None, True, False, 0, 1, -1, 16, 1024, 2**53, 2**63, -(10**30), 10**400]
ODD += [0.0, -0.0, 0.5, 1e-9, 1e18, math.inf, -math.inf, math.nan, "", " ", "0", "16", "1.5", "-1"]
ODD += ["nan", "1e999", "9" * 400, "10/s", "0/m", "start", "raise", "on", "true", "a=1,b=2", "\0"]
ODD += ["\ud800", "x" * 2_000, "https://example.com/x", b"", b"\xff", b"16", [], [0, 3, 6, 9]]
ODD += [["a", 1], [None], [[]], {}, {"a": 1}, {"a": math.nan}, {1: []}, {"mail": {"slots": 3}}]
ODD += [(), {1}, object(), datetime(1, 1, 1), datetime.max, timedelta.max, timedelta(-1), date.min]
ODD += [Decimal("NaN"), uuid.UUID(int=0), Path("/nowhere"), {"mail": {"topic": 3}}, {"a": {1: 2}}]

values = st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=20)


def words(*known: str, size: int = 6) -> st.SearchStrategy[str]:
    """Texts that are put together of what an entrance knows."""
    word = st.sampled_from(known) | st.integers(-9, 10**20).map(str) | st.text(max_size=3)
    return st.lists(word, max_size=size).map("".join)


def named(names: Any, inner: st.SearchStrategy[Any] = values) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(sorted(names)) | st.text(max_size=8), inner, max_size=5)


brokers = words(
    *("toc+", "redis", "rediss", "unix", "sentinel", "cluster", "embedded", "socket", "://", ":"),
    *("user", "pass%40", "@", "[::1]", "[", "host", ",", ";", "/", "?", "&", "db=", "ssl=true"),
    *("%", "master_name=m", "#", "toc_slots=", "65536"),
    size=12,
)
times = words(
    *("now", "in ", "+", "-", "1h", "30m", " ago", "2026-11-27", "T", "10:00", "Z", "+25:00", "d"),
    *("ms", ".", "e", "inf", "nan", "9999-12-31", "0001-01-01", "٣"),
)
lines = words(
    "shop ", f"sha256:{'0' * 64}", " read", ",write", " *", " rate=", "/s", "\n", ";", "#"
)
documents = words("{", "}", "[", "]", '"', ":", ",", "1e999", "NaN", "\\ud800", "null", size=20)
field = words("*", "/", "-", ",", "mon", "sun", "jan", "L", "#", "0", "7", "59", size=4)
crons = st.lists(field, min_size=4, max_size=6).map(" ".join) | words(
    "@", "daily", "hourly", "yearly"
)


def broker_options(given: dict[str, Any]) -> None:
    options.read({}, given)


def query(given: dict[str, str]) -> None:
    options.read(given, {})


def databases(given: Any) -> None:
    options.read_databases("library", given)


def declaration(given: dict[str, Any]) -> None:
    made = topic.Declaration.of("mail", **given)
    assert topic.Declaration.from_json(made.to_json()) == made


def time(text: str) -> None:
    timetext.read_time(text, NOW)


def headers(given: dict[str, Any]) -> None:
    timetext.action_time(given, "id")
    message.key_of("a message", given.get("x-key"))


def traits(given: dict[str, Any]) -> None:
    known = {name: value for name, value in given.items() if name in TRAITS}
    delivery.traits_of("a message", **known)


def unique(given: dict[str, Any], basis: str | None) -> None:
    known = {name: value for name, value in given.items() if name in Unique._fields}
    message.claim_of("a message", Unique(**{"key": "k", **known}), basis)


def body(raw: bytes) -> None:
    notification.content_of(Delivery("mail", 0, 0, "id", 0, raw, 16))
    message.look(raw)


def timing(given: Any) -> None:
    rules.read_seconds("a", "grace", given)
    rules.read_time("a", "start", given, "Europe/Berlin")
    rules.read_exclusions("a", given)
    rules.read_schedule("a", given, "UTC", None, int(NOW * 1e6))


def token_file(text: str) -> None:
    tokens.read_tokens(text, "TOC_HTTP_TOKENS")


#: What is given at an entrance, what reads it there, and what that may raise besides errors of the
#: product.
ENTRANCES: dict[str, tuple[Callable[..., Any], list[Any], tuple[type[Exception], ...]]] = {
    "URL": (options.read_url, [brokers | st.text() | values], ()),
    "query": (query, [named(Settings.__annotations__, st.text(max_size=20) | times)], ()),
    "options": (broker_options, [named(Settings.__annotations__)], ()),
    "databases": (databases, [brokers | values], ()),
    "limits": (declaration, [named({*topic.LIMITS, "steps"}, values | times)], ()),
    "span": (timetext.read_span, [times], (ValueError,)),
    "time": (time, [times], (ValueError,)),
    "headers": (headers, [named({"eta", "x-delay", "x-key"}, times | values)], ()),
    "traits": (traits, [named(TRAITS)], ()),
    "unique": (unique, [named(Unique._fields), st.none() | st.text()], ()),
    "body": (body, [st.binary()], ()),
    "receipt": (delivery.read_receipt, [words("toc", "_", ".", "-", "0", "mail", size=12)], ()),
    "cron": (rules.read_cron, [crons], (ValueError,)),
    "schedule": (timing, [times | values], ()),
    "tokens": (token_file, [lines], ()),
    "network": (targets.read_allowed, [words("10.0.0.0", "/8", ":", "[", "]", "::", "80")], ()),
    "JSON": (request.read_json, [st.binary() | documents.map(str.encode)], (Problem,)),
    "field": (fields.Time().read, [times | values, st.just("at")], (Problem,)),
}


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("examples", [60, night(56_000)])
@pytest.mark.parametrize("name", ENTRANCES)
def test_whatever_comes_in_is_understood_or_refused(name: str, examples: int) -> None:
    read, given, refusals = ENTRANCES[name]

    @hypothesis.settings(
        max_examples=examples,
        derandomize=examples < 1_000,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(st.tuples(*given))
    def check(arguments: tuple[Any, ...]) -> None:
        try:
            read(*arguments)
        except (TocError, *refusals) as exc:
            assert len(str(exc)) > 10

    check()
