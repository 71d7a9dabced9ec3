"""Limits of starts, keys and puts: what they may be, and the text that scripts get."""

from __future__ import annotations

import json
import pickle
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_toc import LIMITS, TERMS, ConfigurationError, Put, RateLimitedError, TraitError
from kombu_toc.center.registry import shown
from kombu_toc.model.limits import interval_us, same
from kombu_toc.model.message import MAX_ENCODED, decode_key, encode_key, key_of
from kombu_toc.model.topic import Declaration

from ..support.cases import each

#: A value for each, as a user may write it, and as it is kept.
EVERY: dict[str, tuple[Any, Any]] = {
    "rate": ("100/s", "100/s"),
    "rate_burst": (5, 5),
    "concurrency": (3, 3),
    "key_rate": ("10 / m", "10/m"),
    "key_burst": (2, 2),
    "key_concurrency": (1, 1),
    "key_order": ("serial", "serial"),
    "key_retry": ("later", "later"),
    "key_fair": (True, True),
    "key_weights": ({"gold": 3, "a b": 0.5}, (("a b", 0.5), ("gold", 3.0))),
    "put_rate": (50, "50/s"),
    "key_put_rate": ("5000/h", "5000/h"),
    "key_header": ("tenant", "tenant"),
}


def declared(**limits: Any) -> Declaration:
    return Declaration.of("mail", **limits)


# -- what is declared


def test_every_limit_is_kept_as_it_was_declared_and_comes_back_from_redis() -> None:
    assert set(EVERY) == set(TERMS)
    made = declared(**{name: given for name, (given, _) in EVERY.items()})
    assert {name: getattr(made, name) for name in EVERY} == {n: k for n, (_, k) in EVERY.items()}
    assert made.gates, "what is computed once is not written"
    back = Declaration.from_json(made.to_json())
    assert (back, back.gates, hash(back)) == (made, made.gates, hash(made))
    assert json.loads(made.to_json())["key_weights"] == {"a b": 0.5, "gold": 3.0}
    assert made.over(made.to_json()) == made.to_json()


def test_a_declaration_without_them_says_nothing_of_them() -> None:
    assert Declaration().to_json() == '{"slots":8,"retries":16}'
    assert (Declaration().gates, Declaration().put_gates) == ("", "")


@each(
    ("rate", "kept", "us"),
    [
        ("100/s", "100/s", 10_000),
        ("10/m", "10/m", 6e6),
        ("5000/h", "5000/h", 720_000),
        ("1/d", "1/d", 86400e6),
        (" 7 / m ", "7/m", 60e6 / 7),
        ("100", "100/s", 10_000),
        (100, "100/s", 10_000),
        (0.5, "0.5/s", 2e6),
        ("0.5/s", "0.5/s", 2e6),
        ("2.50/m", "2.5/m", 24e6),
        (1e-06, "0.000001/s", 1e12),
        ("100000000/d", "100000000/d", 864),
        (1_000_000, "1000000/s", 1),
    ],
)
def test_a_rate_is_so_many_in_a_second_minute_hour_or_day(rate: Any, kept: str, us: float) -> None:
    for accept in (LIMITS["rate"].check, LIMITS["rate"].read):
        assert accept("x", rate) == kept
    assert interval_us(kept) == pytest.approx(us)


@each(
    "rate",
    [
        *("", "/s", "100/", "100/w", "100/sec", "1e3/s", "-1/s", "0", "0/m", "ten/s", "100/s/s"),
        *(0, -5, True, 1_000_001, 1e-9, float("nan"), float("inf"), [], "1000001/s", "0.001/d"),
        *("\u0661/s", 10**400, "9" * 500, {}, b"100/s"),
    ],
)
def test_any_other_rate_is_refused_with_an_example(rate: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"'mail': rate must be a rate such as 100/s,"
    ) as e:
        declared(rate=rate)
    assert repr(rate) in str(e.value)


@each(
    ("given", "kept"),
    [
        ({"gold": 3}, (("gold", 3.0),)),
        ("gold=3,silver=2", (("gold", 3.0), ("silver", 2.0))),
        ('{"gold": 3}', (("gold", 3.0),)),
        ("a=b=2", (("a=b", 2.0),)),
        ({7: "1.5"}, (("7", 1.5),)),
    ],
)
def test_weights_are_a_mapping_or_text(given: Any, kept: Any) -> None:
    assert declared(key_weights=given).key_weights == kept
    assert LIMITS["key_weights"].read("x", shown("key_weights", kept)) == kept


@each(
    "weights",
    [
        *("gold", "gold=", "=3", "gold=many", "{", "[1]", {}, {"gold": 0}, {"gold": -1}, 3, [1]),
        *({"gold": float("nan")}, {"gold": 1001}, {"": 1}, {"gold": None}, {"\ud800": 1}),
        {str(n): 1 for n in range(101)},
    ],
)
def test_other_weights_are_refused(weights: Any) -> None:
    with pytest.raises(
        ConfigurationError, match="'mail': key_weights must be a mapping of at most"
    ):
        declared(key_weights=weights)


@each(
    ("limits", "said"),
    [
        ({"concurrency": 0}, "concurrency must be a whole number from 1 to 1000000"),
        ({"rate_burst": 1.5}, "rate_burst must be a whole number from 1 to 1000000"),
        ({"key_order": "fifo"}, "key_order must be 'serial', not 'fifo'"),
        ({"key_retry": True}, "key_retry must be 'hold' or 'later', not True"),
        ({"key_header": "a b"}, "key_header must be the name of a header: 1 to 100 ASCII"),
        ({"key_fair": "perhaps"}, "key_fair must be true or false, not 'perhaps'"),
    ],
)
def test_what_makes_no_sense_is_refused(limits: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"queue 'mail': {said}"):
        declared(**limits)


# -- what does not go together


@each(
    ("limits", "said"),
    [
        ({"rate_burst": 5}, "rate_burst says nothing without rate; set rate, or leave"),
        ({"key_burst": 5, "rate": 1}, "key_burst says nothing without key_rate"),
        ({"key_retry": "later"}, "key_retry says nothing without key_order"),
        ({"key_weights": "a=1", "key_fair": False}, "key_weights says nothing without key_fair"),
    ],
)
def test_a_limit_that_says_nothing_is_refused(limits: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"queue 'mail': {said}"):
        declared(**limits).check_gates("mail", clustered=False)


@each("limits", [{"rate": 1}, {"concurrency": 1}, {"put_rate": 1}])
def test_what_counts_the_whole_queue_needs_one_slot_on_a_cluster(limits: dict[str, Any]) -> None:
    many, one = declared(slots=4, **limits), declared(slots=1, **limits)
    many.check_gates("mail", clustered=False)
    one.check_gates("mail", clustered=True)
    for said in (many, Declaration(1, draining_counts=(4,), **dict.fromkeys(limits, "1/s"))):
        with pytest.raises(ConfigurationError, match=r"needs one slot.*reshard mail --slots 1"):
            said.check_gates("mail", clustered=True)


@each("limits", [{"key_rate": 1}, {"key_order": "serial"}, {"key_put_rate": 1}])
def test_what_counts_each_key_needs_nothing_on_a_cluster(limits: dict[str, Any]) -> None:
    declared(slots=8, **limits).check_gates("mail", clustered=True)


@each(
    ("limit", "one", "other", "alike"),
    [
        ("rate", "60/m", "1/s", True),
        ("rate", "60/m", "1/m", False),
        ("rate", None, "1/s", False),
        ("rate_burst", None, 1, True),
        ("rate_burst", None, 2, False),
        ("key_retry", None, "hold", True),
        ("key_fair", None, False, True),
        ("key_fair", None, True, False),
        ("retries", 3, 3, True),
        ("steps", (0, 3), (0,), False),
    ],
)
def test_what_means_the_same_is_no_contradiction(
    limit: str, one: Any, other: Any, alike: bool
) -> None:
    assert same(limit, one, other) is same(limit, other, one) is alike


# -- the text for scripts


@each(
    ("limits", "gates"),
    [
        ({"rate": "100/s"}, "r10050.000:1,"),
        ({"rate": "7/m", "rate_burst": 9}, "r8614285.714:9,"),
        ({"concurrency": 3}, "c3,"),
        ({"key_rate": "10/m", "key_burst": 2}, "R6030000.000:2,"),
        ({"key_concurrency": 4}, "C4,"),
        ({"key_order": "serial"}, "S,"),
        ({"key_order": "serial", "key_retry": "hold"}, "S,"),
        ({"key_order": "serial", "key_retry": "later"}, "S,L,"),
        ({"key_fair": True}, "F,"),
        ({"key_fair": False}, ""),
        ({"key_fair": True, "key_weights": {"a b": 0.5, "gold": 3}}, "F,wa%20b=0.5,wgold=3,"),
        ({"key_header": "tenant", "put_rate": 1, "key_put_rate": 2}, ""),
        ({"rate": 1, "concurrency": 2, "key_concurrency": 3}, "r1005000.000:1,c2,C3,"),
    ],
)
def test_what_limits_starts_is_a_text_for_scripts(limits: dict[str, Any], gates: str) -> None:
    assert declared(**limits).gates == gates


def test_so_many_may_be_put_at_once_as_the_rate_says() -> None:
    said = declared(put_rate="100/s", key_put_rate="0.5/m", rate=1)
    assert said.put_gates == "p10000.000:100,P120000000.000:1,"


def test_the_error_of_a_put_survives_the_way_back_from_a_pool_process() -> None:
    """A task that sends may raise it."""
    results = [Put("a", True, 1), RateLimitedError("one", "put_rate", 1.5)]
    error = RateLimitedError("some were not put", "key_put_rate", 0.25, results)
    back = pickle.loads(pickle.dumps(error))
    assert (str(back), back.limit, back.retry_after) == (str(error), "key_put_rate", 0.25)
    assert back.results[0] == results[0]
    assert back.results[1].retry_after == 1.5
    assert str(RateLimitedError("alone")) == "alone"


# -- keys


@each(
    ("given", "key"),
    [
        *(
            (None, ""),
            ("", ""),
            ("customer-42", "customer-42"),
            (42, "42"),
            (b"a\xc3\xa9", "a\xe9"),
        ),
        (uuid.UUID(int=7), "00000000-0000-0000-0000-000000000007"),
    ],
)
def test_a_key_is_text_a_whole_number_or_a_uuid(given: Any, key: str) -> None:
    assert key_of("message 'x'", given) == key


@each("given", [True, 1.5, [], {}, b"\xff", object])
def test_anything_else_is_no_key(given: Any) -> None:
    with pytest.raises(TraitError, match=r"^message 'x': the key must be text, a whole"):
        key_of("message 'x'", given)


@given(st.text(), st.text())
def test_a_key_in_a_script_has_no_character_that_means_something_there(
    one: str, other: str
) -> None:
    encoded = encode_key(one)
    assert set(encoded) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.%-")
    assert (encode_key(other) == encoded) == (one == other)
    if not encoded.startswith("h.") or one.startswith("h."):
        assert decode_key(encoded) == one


def test_a_long_key_stays_apart_from_others_and_short() -> None:
    one, other = "x" * 1000, "x" * 999 + "y"
    assert encode_key(one) == encode_key(one) != encode_key(other)
    assert encode_key(one).startswith("h.")
    assert len(encode_key("x" * MAX_ENCODED)) == MAX_ENCODED > len(encode_key(one))
    assert encode_key("\ud800") == "%ED%A0%80"
