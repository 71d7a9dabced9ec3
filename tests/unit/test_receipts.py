"""Receipts: what they hold, and what is wrong with those that cannot be read."""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import crc32
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_toc import Delivery, ReceiptError
from kombu_toc.model import scores
from kombu_toc.model.delivery import MAX_LENGTH

from ..support.cases import each

DELIVERY = Delivery(
    "mail", 3, 1, "order-7", scores.action(10**15), b"body", 16, "pq0_Rc-7hL9a.1f~xYz.2"
)


def forged(*fields: Any) -> str:
    """A receipt with a sound checksum and other fields."""
    text = json.dumps(fields).encode()
    whole = text + crc32(text).to_bytes(4, "big")
    return "toc1." + urlsafe_b64encode(whole).decode().rstrip("=")


texts = st.text(st.characters(exclude_categories=()), max_size=40)  # halves of surrogates, too


@given(
    topic=texts,
    slot=st.integers(0, 511),
    step=st.integers(0, 9),
    id=texts,
    score=st.integers(0, scores.LAST_MS * 1000),
    limit=st.integers(0, 31),
    birth=texts,
)
def test_a_receipt_names_its_delivery_whatever_that_is_called(
    topic: str, slot: int, step: int, id: str, score: int, limit: int, birth: str
) -> None:
    delivery = Delivery(topic, slot, step, id, score, b"some body", limit, birth)
    receipt = delivery.receipt
    assert Delivery.of_receipt(receipt) == delivery._replace(body=b"")
    assert re.fullmatch(r"toc1\.[A-Za-z0-9_-]+", receipt)


def test_a_receipt_is_as_long_as_its_names_and_has_no_body() -> None:
    long = DELIVERY._replace(body=b"x" * 1_000_000)
    assert long.receipt == DELIVERY.receipt
    names = len(DELIVERY.topic) + len(DELIVERY.id) + len(DELIVERY.birth)
    assert len(DELIVERY.receipt) < 4 / 3 * names + 80
    assert Delivery.of_receipt(DELIVERY._replace(id="x" * 10_000).receipt).id == "x" * 10_000


def test_every_receipt_that_was_cut_is_told_for_that() -> None:
    receipt = DELIVERY.receipt
    for end in range(len(receipt)):
        with pytest.raises(ReceiptError, match=r"is damaged: it was cut|is no receipt") as caught:
            Delivery.of_receipt(receipt[:end])
        assert repr(receipt[: min(end, 40)])[1:-1] in str(caught.value)
    with pytest.raises(ReceiptError):
        Delivery.of_receipt(receipt + "A")


def test_every_receipt_with_another_character_is_told_for_that() -> None:
    receipt = DELIVERY.receipt
    # The last character has bits that say nothing.
    for at in range(5, len(receipt) - 1):
        other = "A" if receipt[at] != "A" else "B"
        with pytest.raises(ReceiptError, match="is damaged"):
            Delivery.of_receipt(receipt[:at] + other + receipt[at + 1 :])


def test_a_receipt_of_a_later_release_is_told_for_what_it_is() -> None:
    with pytest.raises(ReceiptError, match=r"is a receipt of version 12, and this release knows"):
        Delivery.of_receipt("toc12." + DELIVERY.receipt[5:])


@each(
    "text",
    ["", "toc", "toc1.", "toc1", "order-7", "TOC1.aaaa", "toc1.\x00", "toc1.é", "toc1.a b", "1.1"],
)
def test_what_is_no_receipt_is_named(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Delivery.of_receipt(text)
    assert isinstance(caught.value, ReceiptError)
    assert str(caught.value).startswith(repr(text))


@each(
    "fields",
    [
        (),
        ("mail", 0, 0, "a", 1, 16),
        (7, 0, 0, "a", 1, 16, "b"),
        ("mail", -1, 0, "a", 1, 16, "b"),
        ("mail", 10**9, 0, "a", 1, 16, "b"),
        ("mail", True, 0, "a", 1, 16, "b"),
        ("mail", 0, 30, "a", 1, 16, "b"),
        ("mail", 0, 0, None, 1, 16, "b"),
        ("mail", 0, 0, "a", 1.5, 16, "b"),
        ("mail", 0, 0, "a", 10**20, 16, "b"),
        ("mail", 0, 0, "a", 1, 99, "b"),
        ("mail", 0, 0, "a", 1, 16, ["b"]),
    ],
)
def test_fields_that_no_delivery_has_are_refused(fields: tuple[Any, ...]) -> None:
    with pytest.raises(ReceiptError, match="no delivery has such fields"):
        Delivery.of_receipt(forged(*fields))


def test_a_text_that_is_too_long_is_not_read_and_not_repeated() -> None:
    with pytest.raises(ReceiptError, match="is longer than any receipt") as caught:
        Delivery.of_receipt("toc1." + "A" * MAX_LENGTH)
    assert len(str(caught.value)) < 200


def test_a_receipt_is_made_as_the_protocol_says() -> None:
    """docs/protocol.md: a client in another language makes the same, or one that means the same"""
    text = json.dumps(["mail", 3, 1, "order-7", DELIVERY.score, 16, "me.1~you.2"])
    whole = text.encode() + crc32(text.encode()).to_bytes(4, "big")
    receipt = "toc1." + urlsafe_b64encode(whole).decode().rstrip("=")
    delivery = DELIVERY._replace(body=b"", birth="me.1~you.2")
    assert Delivery.of_receipt(receipt) == delivery
    stem = delivery.receipt.removeprefix("toc1.")
    whole = urlsafe_b64decode(stem + "=" * (-len(stem) % 4))
    assert json.loads(whole[:-4]) == json.loads(text)
    assert int.from_bytes(whole[-4:], "big") == crc32(whole[:-4])
