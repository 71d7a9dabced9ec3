"""Unique keys of rows: a message that is put back has its key again, if no other message has it."""

from __future__ import annotations

import zlib
from typing import Any

from ..center.center import TimeoutCenter
from ..center.put import Conflict, unique_call
from ..center.upkeep import home_of
from ..model.message import FOR_A_TIME, KEEP_EARLIER, UNIQUE, Claim, Unique, claim_of, decode_key
from ..model.topic import Topic
from ..scripts.call import ScriptCall
from .records import Row, identity_of, request_of

#: The mode of a claim that holds until its message is done.
UNTIL_DONE = "1"

#: The header that says for how long a message has its key.
UNTIL = "x-unique-until"


def is_unique(row: Row) -> bool:
    """Whether a row's message has a unique key."""
    return ";u" in row.traits or ",u" in row.traits


def _claim_of(row: Row, until: Any) -> tuple[Claim, str]:
    """The claim of a row's message, and its other traits.

    until: what its header says of that
    """
    said = row.traits.lstrip(";").split(",")
    own = next(one for one in said if one.startswith("u"))
    others = ",".join(one for one in said if one is not own)
    mode, _, name = own[1:].partition(".")
    shown = decode_key(name).rpartition("\x1f")[2]
    lasts_us = 0
    if int(mode) == FOR_A_TIME:
        # It holds anew. What does not say for how long has it until it is done.
        try:
            lasts_us = claim_of("", Unique(shown, float(until)), row.basis).lasts_us
        except (TypeError, ValueError):
            mode = UNTIL_DONE
    basis = row.basis or shown
    checksum = zlib.crc32(basis.encode("utf-8", "surrogatepass"))
    claim = Claim(shown, name, int(mode), lasts_us, checksum, KEEP_EARLIER, None)
    return claim, f";{others}" if others else ""


def putting(center: TimeoutCenter, topic: Topic, row: Row) -> ScriptCall:
    """The call that puts the message of a row with a unique key back. Result: a Put, or a
    Conflict if another message has its key by now."""
    headers = identity_of(row.topic, row.id, row.body, row.traits)[1]
    claim, traits = _claim_of(row, headers.get(UNTIL) if UNIQUE in headers else None)
    goes_on = bool(headers.get("retries")) or bool(headers.get("replaced_task_nesting"))
    basis = row.basis or claim.shown
    request = request_of(row)._replace(traits=traits, basis=basis)
    topic = home_of(center.runner, topic, claim, basis)
    center.registry.admit(topic, row.id, basis, unique=True)
    return unique_call(
        center.commands, topic, request, claim, goes_on=goes_on, adds=bool(headers.get("retries"))
    )


def is_anothers(row: Row, result: Any) -> bool:
    """Whether another message has the key of one that was to be put."""
    return isinstance(result, Conflict) and result.base != row.id
