"""A message comes out of its envelope as it went in (X3)."""

from __future__ import annotations

import json
import zlib
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from uuid import UUID

import pytest
from celery import Celery
from hypothesis import example, given
from hypothesis import strategies as st
from kombu.serialization import dumps

from kombu_toc import EnvelopeError
from kombu_toc.model import message as envelope

from ..support.cases import each

texts = st.text(max_size=20)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
#: What JSON knows, and what Kombu's JSON adds to it.
rich = (
    plain
    | st.datetimes(timezones=st.none() | st.just(timezone.utc))
    | st.dates()
    | st.times()
    | st.uuids()
    | st.decimals(allow_nan=False)
    | st.binary(max_size=20)
)
values = st.recursive(
    rich,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
#: All but those that mean something only until the message is sent. (Hypothesis knows them: it
#: reads the constants of the code that it tests.)
property_names = texts.filter(
    lambda name: name not in ("body_encoding", "delivery_tag", envelope.COUNTDOWN, envelope.ENSURE)
)
messages = st.fixed_dictionaries(
    {
        "headers": st.dictionaries(texts, values, max_size=6),
        "properties": st.dictionaries(property_names, values, max_size=6),
        "content-type": st.none() | texts,
        "content-encoding": st.none() | texts,
        "body": st.binary(max_size=300),
    }
)


def message(body=b"[]", **headers):
    return {
        "headers": headers,
        "properties": {"correlation_id": "7", "delivery_info": {"exchange": ""}},
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "body": body,
    }


def celery_message() -> dict:
    """What Celery sends for a task with an eta, as Channel.prepare_message returns it."""
    id = "7b0e1f5c-44c5-4a52-93d7-0c5d62ab3f1e"
    app = Celery("shop")
    task = app.amqp.as_task_v2(
        id,
        "shop.orders.tasks.cancel_unpaid_order",
        args=(982734, "EUR"),
        kwargs={"notify": True, "template": "order_cancelled"},
        eta=datetime(2026, 3, 14, 15, 9, 26, 535897, tzinfo=timezone.utc),
        reply_to="c6a4ee55-9d41-3f04-8b0d-8f52a1f8e6f0",
        root_id=id,
        origin="gen4711@web-3",
    )
    content_type, content_encoding, body = dumps(task.body, "json")
    return {
        "headers": json.loads(json.dumps(task.headers)),
        "properties": {
            **task.properties,
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": "orders"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": "0f4d3a6e-8d1c-4b1f-b8ad-6a8e7d0a3c11",
        },
        "content-type": content_type,
        "content-encoding": content_encoding,
        "body": body,
    }


#: Ids, also with what UTF-8 has no place for, and too long for their length to be told.
ids = st.text(st.characters(codec=None), max_size=40) | st.just("ü" * 128) | st.just("i" * 255)


@given(messages, st.booleans(), ids, ids)
@example(message(), True, "7", "")
@example(message(b"x" * 99), True, "", "7")
def test_any_message_comes_out_as_it_went_in(message, deflate, id, tail):
    """Also of a copy, whose id begins with the one that it was sent under."""
    assert "delivery_tag" not in message["properties"]
    message["properties"].pop("body_encoding", None)
    packed = envelope.pack(message, deflate=deflate, id=id)
    assert envelope.unpack(packed, id) == message
    assert envelope.unpack(packed, id + tail) == message


@given(st.binary(), st.booleans())
@example(b"\n\n", False)
@example(b"", True)
@example(b"\x01\x00{", False)
def test_a_body_may_hold_any_bytes(body, deflate):
    assert envelope.unpack(envelope.pack(message(body), deflate=deflate))["body"] == body


@pytest.mark.versions
@each(
    "value",
    [
        datetime(2026, 3, 14, 15, 9, 26, 535897, tzinfo=timezone(timedelta(hours=-5))),
        datetime(2026, 3, 14),
        date(2026, 3, 14),
        time(15, 9),
        UUID("7b0e1f5c-44c5-4a52-93d7-0c5d62ab3f1e"),
        Decimal("0.10"),
        b"\xff\x00",
    ],
)
def test_what_kombus_json_knows_stays_what_it_is(value):
    out = envelope.unpack(envelope.pack(message(at=value, deep=[{"x": value}]), deflate=True))
    assert out["headers"] == {"at": value, "deep": [{"x": value}]}
    assert type(out["headers"]["at"]) is type(value)


def test_a_body_of_text_is_stored_as_utf_8_and_none_as_nothing():
    assert (
        envelope.unpack(envelope.pack(message("Grüße"), deflate=False))["body"] == "Grüße".encode()
    )
    assert envelope.unpack(envelope.pack(message(None), deflate=False))["body"] == b""


def test_what_means_something_only_within_a_process_is_left_out():
    kept = envelope.unpack(envelope.pack(celery_message(), deflate=False))["properties"]
    assert "delivery_tag" not in kept
    assert "body_encoding" not in kept
    assert kept["delivery_info"] == {"exchange": "", "routing_key": "orders"}


def test_a_message_that_is_due_at_once_can_be_read_by_a_person():
    """The design: one line of JSON, then the raw body."""
    line, _, body = envelope.pack(celery_message(), deflate=False).partition(b"\n")
    assert json.loads(line)["h"]["task"] == "shop.orders.tasks.cancel_unpaid_order"
    assert json.loads(body)[0] == [982734, "EUR"]


def test_a_waiting_celery_message_takes_less_than_three_tenths_of_its_size():
    """X3"""
    made = celery_message()
    whole = len(envelope.pack(made, deflate=False))
    small = len(envelope.pack(made, deflate=True))
    assert 800 <= whole <= 1000
    assert small < 0.3 * whole
    assert envelope.unpack(envelope.pack(made, deflate=True))["headers"] == made["headers"]


def test_the_id_that_a_message_is_kept_under_takes_next_to_nothing_in_it():
    """X3: what is random of an id is some twenty bytes, however small it is made."""
    made = celery_message()
    id = made["headers"]["id"]
    without = envelope.pack(made, deflate=True)
    small = envelope.pack(made, deflate=True, id=id)
    assert len(small) < len(without) - 15
    assert len(small) < 0.25 * len(envelope.pack(made, deflate=False))
    assert envelope.unpack(small, id)["headers"]["id"] == id


def test_what_was_packed_with_an_id_is_not_read_without_it():
    packed = envelope.pack(celery_message(), deflate=True, id="an-id")
    with pytest.raises(EnvelopeError, match="give the id that it is kept under") as raised:
        envelope.unpack(packed, "an")
    assert "an id of 5 bytes and is read as that of 'an'" in str(raised.value)
    with pytest.raises(EnvelopeError):
        envelope.unpack(packed)


@given(st.binary(max_size=200))
def test_deflating_never_makes_a_message_larger(body):
    made = message(body)
    plain = len(envelope.pack(made, deflate=False))
    assert len(envelope.pack(made, deflate=True)) <= plain
    assert len(envelope.pack(made, deflate=True, id="an-id")) <= plain


# Whatever was stored stays readable.
DICTIONARY_CRC = 0x677BC0FE
STORED = (
    "01832621b01f13f37481343c0d1567e417e815a5e602231928889cc890d28c81b1aea14988a1a99581a59591"
    "999ea9b1a985a5393405e10c4c732502a1554b6c4820157eb5b100",
    "020583a623b047c1028884549c915fa057949a0b8c69a020724a434a3806c6ba86262186a65606965646667a"
    "a6c6a61696e6d064843344cd950804592db1c1815402d6c60200",
)


def test_the_dictionary_of_version_1_never_changes():
    assert zlib.crc32(envelope.DICTIONARY) == DICTIONARY_CRC


@pytest.mark.versions
@pytest.mark.parametrize("stored", STORED)
def test_what_was_stored_in_either_deflated_form_stays_readable(stored):
    out = envelope.unpack(bytes.fromhex(stored), "an-id")
    sent = {"id": "an-id", "task": "shop.remind", "lang": "py"}
    assert out == message(b"[[1, 2, 3], {}]", **sent, eta="2026-03-14T15:09:26.535897+00:00")


# -- damage


@given(st.binary(max_size=300))
@example(b"")
@example(b"{")
@example(b"{}\n")
@example(b"\x01")
@example(b'{"h":[],"p":{},"t":null,"e":null}\n')
@example(b'{"h":' + b"[" * 100_000)
@example(b'{"h":{"a":{"__type__":"decimal","__value__":"x"}},"p":{},"t":null,"e":null}\n')
@example(b'{"h":{"a":{"__type__":"datetime","__value__":7}},"p":{},"t":null,"e":null}\n')
@example(b'{"h":{"a":{"__type__":"bytes","__value__":7}},"p":{},"t":null,"e":null}\n')
@example(b'{"h":{"a":{"__type__":[],"__value__":7}},"p":{},"t":null,"e":null}\n')
def test_bytes_that_are_no_envelope_raise_envelope_error_and_nothing_else(data):
    try:
        envelope.unpack(data)
    except EnvelopeError as exc:
        assert "envelope" in str(exc)


@given(st.sampled_from([b"\x01", b"\x02\x00", b"\x02\x02", b"\x02\xff"]), st.binary(max_size=300))
@example(b"\x02", b"")
def test_bytes_that_cannot_be_inflated_raise_envelope_error_and_nothing_else(first, tail):
    try:
        envelope.unpack(first + tail, "an-id")
    except EnvelopeError:
        pass


@each(("deflate", "id"), [(False, ""), (True, ""), (True, "an-id")])
def test_an_envelope_cut_short_before_its_body_is_damaged(deflate, id):
    data = envelope.pack(celery_message(), deflate=deflate, id=id)
    end = len(data) if deflate else data.index(b"\n") + 1
    for length in range(1, end):
        with pytest.raises(EnvelopeError):
            envelope.unpack(data[:length], id)


@given(st.data(), st.booleans())
def test_a_flipped_byte_raises_envelope_error_or_nothing(data, deflate):
    packed = bytearray(envelope.pack(celery_message(), deflate=deflate, id="an-id"))
    where = data.draw(st.integers(0, len(packed) - 1))
    packed[where] ^= data.draw(st.integers(1, 255))
    try:
        out = envelope.unpack(bytes(packed), "an-id")
    except EnvelopeError:
        return
    assert isinstance(out["headers"], dict)
    assert isinstance(out["properties"], dict)
    assert isinstance(out["body"], bytes)


@each("first", [b"\x00", b"\x03", b"\x7f", b"[", b" "])
def test_a_form_of_a_newer_release_is_named(first):
    with pytest.raises(EnvelopeError, match="unknown envelope version") as raised:
        envelope.unpack(first + b'{"h":{}}\n')
    assert repr(first) in str(raised.value)


def test_what_expands_to_more_than_may_be_is_not_expanded() -> None:
    packed = envelope.pack(message(b"0" * 1_000_000), deflate=True)
    assert len(packed) < 10_000
    assert len(envelope.unpack(packed, most=1_001_000)["body"]) == 1_000_000
    with pytest.raises(EnvelopeError, match="expands to more than 500000 bytes"):
        envelope.unpack(packed, most=500_000)
    bomb = envelope.compress(b"0" * (1 << 24))
    with pytest.raises(EnvelopeError, match="expands to more than 4096 bytes"):
        envelope.unpack(bomb, most=4096)
