"""Unique keys: of the messages with one, a queue has one at a time.

Which message has a key is kept in the slot's hash ``claims`` (``scripts/claim.lua``). The message
itself has the key among its traits (:mod:`.traits`), as ``u1.invoice-42``: a digit says how long
the claim holds, and behind the dot is the key, encoded.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

from ..errors import TraitError
from .message_key import encode_key, key_of

#: How long a claim holds: until its message is delivered, or until it is done.
START, DONE = "start", "done"

#: A claim's mode that holds for a time; the others are 0, until it starts, and 1, until done.
FOR_A_TIME = 2

#: What is done with a message whose key another one has.
KEEP, REPLACE, PUSH_BACK, RAISE = "keep", "replace", "push_back", "raise"
CONFLICTS = (KEEP, REPLACE, PUSH_BACK, RAISE)

#: Those by which a message takes the place of the other one.
TAKES = (REPLACE, PUSH_BACK)

#: Stands between what picks the slot and the key.
_BETWEEN = "\x1f"

#: Seconds for which a claim may hold, or be pushed back, at most: ten years.
_LONGEST = 316_224_000


class Unique(NamedTuple):
    """That a queue is to have one message of a key at a time.

    key: the key: text, a whole number or a UUID
    until: how long the message that is put has the key: ``"start"``, until it is first delivered;
        ``"done"``, until it is acknowledged; or for so many seconds, also if it is done before. If
        it is cancelled, purged or dead, it has no key. ``"done"`` unless given; with ``replace``
        and ``push_back``, ``"start"``
    conflict: what is done with another message of that key meanwhile: ``"keep"``, nothing: the one
        that is there stays as it is; ``"replace"``, the one that waits gets the new body and the
        new time, and keeps its id; ``"push_back"``, the same, and its time only gets later;
        ``"raise"``, UniqueError. What has been delivered cannot be replaced or pushed back: then
        UniqueError is raised
    at_most: with ``push_back``: seconds after the first put beyond which it is not pushed back; as
        far as asked for unless given
    """

    key: Any
    until: str | float | None = None
    conflict: str = KEEP
    at_most: float | None = None


class Claim(NamedTuple):
    """The same as scripts know it.

    shown: the key as its sender knows it
    name: the key, encoded. Of a message whose slot is picked by something else than its unique key
        it includes that: messages of one key are unique among those of one slot basis
    mode: 0 until it starts, 1 until it is done, 2 for a time
    lasts_us: that time, in microseconds
    checksum: CRC-32 of the slot basis
    conflict, at_most_us: as in :class:`Unique`
    """

    shown: str
    name: str
    mode: int
    lasts_us: int
    checksum: int
    conflict: str
    at_most_us: int | None

    @property
    def trait(self) -> str:
        """As it is written among a message's traits."""
        return f"u{self.mode}.{self.name}"

    def among(self, traits: str) -> str:
        """The traits with this one."""
        return f"{traits},{self.trait}" if traits else f";{self.trait}"


def claim_of(what: str, unique: Unique | str, basis: str | None, names: str = "") -> Claim:
    """A claim as scripts know it.

    what: which message it is of, for an error
    basis: what picks the message's slot if it is not the unique key
    names: what the names of the fields begin with for the sender, such as ``x-unique-``

    Raises TraitError for what makes no sense.
    """
    if not isinstance(unique, Unique):
        unique = Unique(unique)
    key = key_of(f"{what}: unique", unique.key)
    if not key:
        raise TraitError(f"{what}: its unique key is empty; leave it out, or give it a key")
    conflict = unique.conflict
    if conflict not in CONFLICTS:
        raise TraitError(
            f"{what}: {names}conflict must be one of {', '.join(CONFLICTS)}, not {conflict!r}"
        )
    until = unique.until
    if until is None:
        until = START if conflict in TAKES else DONE
    lasts_us = 0
    if until not in (START, DONE):
        lasts_us = _microseconds(what, f"{names}until", until, "'start', 'done' or a number")
        if not lasts_us:
            raise TraitError(f"{what}: {names}until must be more than 0 seconds")
    at_most_us = None
    if unique.at_most is not None:
        at_most = f"{names}at-most" if names else "at_most"
        at_most_us = _microseconds(what, at_most, unique.at_most)
        if conflict != PUSH_BACK:
            raise TraitError(f"{what}: {at_most} goes with conflict push_back, not {conflict}")
    picks = basis or key
    return Claim(
        key,
        encode_key(_name_of(picks, key)),
        FOR_A_TIME if lasts_us else int(until == DONE),
        lasts_us,
        zlib.crc32(picks.encode("utf-8", "surrogatepass")),
        conflict,
        at_most_us,
    )


def _name_of(picks: str, key: str) -> str:
    """What a claim goes by: no two keys, nor two slot bases, have the same."""
    if _BETWEEN in picks or _BETWEEN in key:
        return _BETWEEN.join(("", str(len(picks)), picks, key))
    return key if picks == key else f"{picks}{_BETWEEN}{key}"


def key_of_name(name: str) -> str:
    """The key in what a claim goes by."""
    if name.startswith(_BETWEEN):
        length, _, rest = name[1:].partition(_BETWEEN)
        if length.isdecimal():
            return rest[int(length) + 1 :]
    return name.rpartition(_BETWEEN)[2]


def _microseconds(what: str, name: str, value: object, kinds: str = "a number") -> int:
    """A number of seconds, also as text, in microseconds. Raises TraitError."""
    seconds = math.nan
    if not isinstance(value, bool) and isinstance(value, (int, float, str)):
        try:
            seconds = float(value)
        except ValueError:
            pass  # as below
    if not 0 <= seconds <= _LONGEST:
        raise TraitError(
            f"{what}: {name} must be {kinds} of seconds from 0 to 316224000, not {value!r}"
        )
    return math.ceil(seconds * 1_000_000)
