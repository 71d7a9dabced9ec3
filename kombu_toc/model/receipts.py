"""Receipts: texts that name one delivery of a message each.

A receipt is ``toc1.`` and the fields of a :class:`.results.Delivery` without its body, as JSON with
a checksum, in URL-safe base64. So it can be kept in a database, sent in a URL, and used in any
process. The checksum finds what was cut or mistyped. It keeps nobody from making a receipt.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, urlsafe_b64encode
from binascii import crc32
from typing import Any

from ..errors import ReceiptError
from .limits import MAX_SLOTS
from .scores import LAST_MS, TRIED

#: What each receipt of this version begins with.
VERSION = "toc1."

#: Characters of the longest receipt that is read.
MAX_LENGTH = 1_000_000

#: Characters of a receipt that an error shows.
_SHOWN = 40

#: The highest index of a priority step.
_LAST_STEP = 29

#: topic, slot, step, id, score, limit, birth
Fields = tuple[str, int, int, str, int, int, str]


def write_receipt(fields: Fields) -> str:
    """The receipt of a delivery."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    whole = text + crc32(text).to_bytes(4, "big")
    return VERSION + urlsafe_b64encode(whole).decode().rstrip("=")


def read_receipt(receipt: str) -> Fields:
    """The inverse of :func:`write_receipt`. Raises ReceiptError."""
    stem = receipt[len(VERSION) :]
    if not receipt.startswith(VERSION):
        if other := re.match(r"toc(\d{1,9})\.", receipt):
            raise ReceiptError(
                f"{shown(receipt)} is a receipt of version {other[1]}, and this release knows "
                "version 1; use it with the release that made it"
            )
        raise ReceiptError(f"{shown(receipt)} is no receipt: one begins with {VERSION!r}")
    if len(receipt) > MAX_LENGTH:
        raise ReceiptError(
            f"{shown(receipt)} is longer than any receipt: {len(receipt)} characters"
        )
    try:
        whole = b64decode(stem + "=" * (-len(stem) % 4), b"-_", validate=True)
    except ValueError:
        whole = b""
    text, sum = whole[:-4], whole[-4:]
    if not text or crc32(text).to_bytes(4, "big") != sum:
        raise ReceiptError(f"{shown(receipt)} is damaged: it was cut, or changed on its way")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not _is_sound(fields):
        raise ReceiptError(f"{shown(receipt)} is no receipt: no delivery has such fields")
    topic, slot, step, id, score, limit, birth = fields
    return topic, slot, step, id, score, limit, birth


def is_receipt(text: str) -> bool:
    """Whether a text, which may be an id, is a receipt that can be used."""
    if not text.startswith(VERSION):
        return False
    try:
        read_receipt(text)
    except ReceiptError:
        return False
    return True


def shown(receipt: str) -> str:
    """A receipt as an error names it."""
    if len(receipt) <= _SHOWN:
        return repr(receipt)
    return f"{receipt[:_SHOWN]!r}... ({len(receipt)} characters)"


def _is_sound(fields: Any) -> bool:
    if not isinstance(fields, list) or len(fields) != 7:
        return False
    topic, slot, step, id, score, limit, birth = fields
    numbers = (
        (slot, MAX_SLOTS - 1),
        (step, _LAST_STEP),
        (score, LAST_MS * 1000 + 999),
        (limit, TRIED),
    )
    return all(isinstance(text, str) for text in (topic, id, birth)) and all(
        type(number) is int and 0 <= number <= most for number, most in numbers
    )
