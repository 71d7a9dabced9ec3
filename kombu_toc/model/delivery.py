"""Traits: what holds for one message and not for its whole topic.

They are kept in the slot's hash ``tokens``, so that a message without traits costs nothing:

* before its first delivery, a message with traits has the entry ``;v30000,m60000,e5000`` there;
* a delivered one has them behind its name: ``NAME;v30000,x1700000005000``, and behind them the
  latest delivery, as without traits.

=========  ==============================================================================
letter     what it says
=========  ==============================================================================
``v``      visibility: milliseconds for which a lease lasts unless it is renewed
``m``      max lease: milliseconds for which one delivery may be renewed in all; 0: for ever
``e``      expiration: milliseconds after its due time when it expires
``x``      when it expires, in milliseconds since the epoch; known since its first delivery
``k``      its key, encoded (:mod:`.message`)
``o``      1: it has a key, and another slot basis, which is nowhere to be read
``u``      its unique key (:mod:`.message`): a number, a dot, and the key encoded
``i``      where a message that was moved was delivered first: the number of the slot, a dot, and
           its birth there
``l``      how often the library has put it back because a worker that had it was lost
``n``      the name of its put, if a task library has a row of it and its body says no name
``r``      it was handed to a consumer that has given it back; how often that was a requeue
``s``      1: a firing of a schedule of which no two may run at once: it is in flight until its
           task has ended
=========  ==============================================================================

Behind a ``!``, at its end, the token of a delivery with a max lease says when that has passed, in
milliseconds since the epoch. ``token.lua`` has the same for the scripts.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, urlsafe_b64encode
from binascii import crc32
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..errors import ReceiptError, TraitError
from .limits import LIMITS, MAX_SLOTS, Kind, Number
from .message import decode_key, encode_key, key_of_name
from .scores import LAST_MS, TRIED
from .topic import checksum_of

_TRAIT = re.compile(r"[;,]([a-z])(\d+)")
_KEY = re.compile(r"[;,]k([\w.%-]+)", re.ASCII)
_UNIQUE = re.compile(r"[;,]u\d\.([\w.%-]+)", re.ASCII)
_ORIGIN = re.compile(r"[;,]i(\d+)\.([^,~@!]+)")
_NAME = re.compile(r"[;,]n([0-9a-f]+)")
_END = re.compile(r"!(\d+)$")

#: The letters of what a message is put with.
_LASTING = frozenset("vmkuoelsn")

#: Seconds within which a message expires at most.
_LIVES = Number(float, 0, unit="seconds")

#: name of a trait -> its letter, its bounds, and how many milliseconds its unit has
_TRAITS: dict[str, tuple[str, Kind, int]] = {
    "visibility": ("v", LIMITS["visibility"], 1000),
    "max_lease": ("m", LIMITS["max_lease"], 1000),
    "expiration": ("e", _LIVES, 1000),
    "x-visibility": ("v", LIMITS["visibility"], 1000),
    "x-max-lease": ("m", LIMITS["max_lease"], 1000),
    "expiration_ms": ("e", LIMITS["message_ttl"], 1),
}


def traits_of(what: str, *, key: str = "", basis: str | None = None, **given: object) -> str:
    """The entry of a message before its first delivery; empty if it has no traits.

    what: which message it is, for an error
    key: its key, as :func:`.message.key_of` gives it
    basis: its slot basis, if its body does not say that
    given: of ``visibility``, ``max_lease`` and ``expiration`` (seconds), or under the names that
        senders know: ``x-visibility`` and ``x-max-lease`` (seconds), ``expiration_ms``
        (milliseconds). What is None is not said.

    Raises TraitError, naming the message and the trait, for a value that makes no sense.
    """
    said = []
    for name, value in given.items():
        if value is not None:
            letter, bounds, unit_ms = _TRAITS[name]
            try:
                number = bounds.read(f"{what}: {name}", value)
            except ValueError as exc:
                raise TraitError(str(exc)) from None
            said.append(f"{letter}{int(number * unit_ms)}")
    if key:
        said.append(f"k{encode_key(key)}")
        if basis is not None and basis != key:
            said.append("o1")
    return f";{','.join(said)}" if said else ""


@lru_cache(maxsize=1024)  # a message's visibility is asked for more than once
def trait(token: str, letter: str) -> int | None:
    """What a token says by this letter; None if it does not."""
    if ";" not in token:
        return None
    said = token[token.index(";") :]
    return next((int(value) for key, value in _TRAIT.findall(said) if key == letter), None)


def as_put(token: str, due_ms: int) -> str:
    """The entry with which a message may be put once more: the traits that it was put with, without
    what its deliveries have made of them.

    due_ms: when it will be due, in milliseconds since the epoch
    """
    if ";" not in token:
        return ""
    text = re.split("[~@!]", token[token.index(";") + 1 :], maxsplit=1)[0]
    kept = [one for one in text.split(",") if one[:1] in _LASTING]
    expires_ms = trait(token, "x")
    if expires_ms is not None:
        kept = [one for one in kept if one[:1] != "e"] + [f"e{max(expires_ms - due_ms, 0)}"]
    return f";{','.join(kept)}" if kept else ""


def with_trait(entry: str, letter: str, number: int) -> str:
    """The entry of a message before its first delivery, with another value of a trait."""
    kept = [one for one in entry[1:].split(",") if one and one[0] != letter]
    return f";{','.join([*kept, f'{letter}{number}'])}"


def is_still(token: str, score: int) -> bool:
    """Whether a token is of the message that waits with this score, and was not left by another
    one of its id; as in ``token.lua``."""
    return score % 1000 < 32 or token.endswith("@") or token.startswith(";")


def encoded_key_in(token: str) -> str | None:
    """The key that a token has, as scripts know it; None if it has none."""
    return _found(_KEY, token)


def key_in(token: str) -> str | None:
    """The key that a token has; None if it has none. Of a key that was too long, what stands for
    it."""
    encoded = encoded_key_in(token)
    return None if encoded is None else decode_key(encoded)


def name_in(token: str) -> str | None:
    """The name of its put that a token has; None if it has none."""
    return _found(_NAME, token)


def unique_in(token: str) -> str | None:
    """The unique key that a token has, as its sender named it; None if it has none."""
    unique = _found(_UNIQUE, token)
    return None if unique is None else key_of_name(decode_key(unique))


def _found(trait: re.Pattern[str], token: str) -> str | None:
    found = trait.search(token) if ";" in token else None
    return found[1] if found else None


def origin_in(token: str, slot: int) -> tuple[int, str]:
    """The slot in which a message was delivered first, and its birth there: they tell it from all
    others of its topic that have its id, and stay for as long as it lives.

    slot: where it is
    """
    if ";" in token and (found := _ORIGIN.search(token)):
        return int(found[1]), found[2]
    return slot, re.split("[;~@!]", token, maxsplit=1)[0]


def last_end(token: str) -> int | None:
    """When the delivery with this token ends although it is renewed, in milliseconds since the
    epoch; None: never."""
    found = _END.search(token)
    return int(found[1]) if found else None


# -- receipts
#
# A receipt is ``toc1.`` and the fields of a :class:`.results.Delivery` without its body, as JSON
# with a checksum, in URL-safe base64. So it can be kept in a database, sent in a URL, and used in
# any process. The checksum finds what was cut or mistyped. It keeps nobody from making a receipt.

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
    topic, *numbers, birth = fields
    id = numbers.pop(2)
    bounds = zip(numbers, (MAX_SLOTS - 1, _LAST_STEP, LAST_MS * 1000 + 999, TRIED), strict=True)
    return all(isinstance(text, str) for text in (topic, id, birth)) and all(
        type(number) is int and 0 <= number <= most for number, most in bounds
    )


# -- spreads
#
# The spread of a message is a number that picks its table in a task library. Of a message with a
# business id it is made of that, and its token ends with it: who knows the message knows where its
# row is. The spread of any other is made of its id.

#: The header with the business id of a task.
BIZ_ID = "x-biz-id"

#: Hexadecimal digits of a token that are its own, and behind them those of a business id. No other
#: token has as many.
OWN, SPREAD = 8, 5
_LENGTH = OWN + SPREAD


def spread_of_biz(biz_id: str) -> int:
    """The spread of what has this business id."""
    return checksum_of(biz_id) & ((1 << 4 * SPREAD) - 1)


def spread_of(id: str, token: str) -> int:
    """The spread of a message."""
    if len(token) == _LENGTH:
        try:
            return int(token[OWN:], 16)
        except ValueError:
            pass  # another client's
    return checksum_of(id)


def has_biz(token: str) -> bool:
    """Whether a token says a business id."""
    return len(token) == _LENGTH


def token_with(token: str, headers: Mapping[str, Any]) -> str:
    """The token of a message with these headers, of one that has any number of digits."""
    biz_id = headers.get(BIZ_ID)
    if biz_id is None:
        return token
    return f"{token[:OWN]}{spread_of_biz(str(biz_id)):0{SPREAD}x}"
