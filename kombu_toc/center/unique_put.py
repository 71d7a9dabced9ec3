"""Puts messages of which a queue has one at a time, by a unique key.

The server refuses a message whose key another one has, and says which one that is. If the message
is to take its place, the sender makes it once more, under the id of the other, and asks again: it
is replaced if all is as it was. So nobody waits for anybody, and a message that nobody competes
with is put by one call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..errors import ReplicationError, UniqueError
from ..model.message import KEEP_EARLIER, TAKES, Claim
from ..model.results import KEPT, REPEATED, Put
from ..model.topic import Topic
from ..scripts.call import ScriptCall, load, text
from .commands import Commands
from .recording import Recorder
from .requests import PutRequest

#: How often a message is made anew because the one that it was to replace was replaced or delivered
#: meanwhile. Each time, somebody else's has been put.
ATTEMPTS = 100

#: What puts such a message.
PUT_UNIQUE = load("put_unique")

#: The same, where it is logged for the task library.
PUT_UNIQUE_LOGGED = load("put_unique_logged")

#: What the script replies in place of how many were added.
CONFLICT = 2


class Conflict(NamedTuple):
    """A message was not added: another one has its key."""

    id: str  #: the id that the other one is kept under; empty if there is none any more
    base: str  #: its own id
    waits: bool  #: whether it waits; else it was delivered
    claim: Claim  #: that of the message that was not added
    home: Topic  #: the topic, with the slot count by which it was to be put
    slot: int  #: where the other one is
    outcome: str = KEPT
    now_us: None = None
    added: bool = False
    is_new: bool = False


def put_unique(
    topic: str,
    make: Callable[[Conflict | None], ScriptCall],
    ask: Callable[[ScriptCall], Any],
    free: Callable[[Topic, int, str], bool],
    takes: Conflict | None = None,
) -> tuple[Put | Conflict, Conflict | None]:
    """Put a message, or find the one that is there and is kept: a :class:`Conflict`. Returns this,
    and the message whose place it has taken, if any.

    make: the call of :func:`unique_call` that puts the message; of one whose place it takes
    ask: runs a call, and returns its result
    free: gives back what workers of a slot hold that are gone, because a message is among it;
        returns whether to try again
    takes: the message whose place it was to take when this was tried before

    Raises UniqueError.
    """
    looked = False
    for _ in range(ATTEMPTS):
        found: Put | Conflict = ask(make(takes))
        if not isinstance(found, Conflict):
            return found, takes
        claim, other = found.claim, found if found.id else None
        if other is not None and not other.waits and not looked:
            looked = True
            if free(other.home, other.slot, other.id):
                continue
        if other is not None and claim.conflict == KEEP_EARLIER:
            return other, None
        if other is not None and not (claim.conflict in TAKES and other.waits):
            raise UniqueError(topic, claim.shown, other.base, has_started=not other.waits)
        takes = other
    raise UniqueError(topic, claim.shown, "" if takes is None else takes.base, has_started=False)


def ask_recorded(
    recorder: Recorder,
    topic: Topic,
    request: PutRequest,
    takes: Conflict | None,
    ask: Callable[[], Any],
) -> Any:
    """Write the row of a message, and run the call that puts it if it may have its key.

    request, takes: as :func:`unique_call` was given them; ask: runs the call
    """
    rows = recorder.putting(topic, [request])
    try:
        found = ask()
    except ReplicationError:
        raise  # it is put, and on too few replicas
    except Exception:
        recorder.withdraw(rows)
        raise
    if found.outcome == KEPT:
        recorder.withdraw(rows)
    elif found.outcome == REPEATED:
        recorder.repeated(rows)
    elif takes is not None:
        recorder.replaced(rows)
    return found


def unique_call(
    commands: Commands,
    topic: Topic,
    request: PutRequest,
    claim: Claim,
    takes: Conflict | None = None,
    *,
    goes_on: bool = False,
    adds: bool = False,
) -> ScriptCall:
    """The call that adds a message if it may have its key. Result: :class:`Put`, or
    :class:`Conflict`.

    request: the message; of one that takes the place of another, under that one's id
    takes: the message whose place it takes
    goes_on: it goes on for the message of its own id, as a retry does, and so has its key
    adds: it is added in any case
    """
    if takes is not None:  # it is no addition: neither a full server nor a rate refuses it
        request = request._replace(id=takes.id, replaces=True)
    request = request._replace(traits=claim.among(request.traits))
    call = commands.put(topic, request)
    slot = topic.slot_for(request.basis or request.id)
    at_most = "" if claim.at_most_us is None else claim.at_most_us
    return call._replace(
        script=PUT_UNIQUE_LOGGED if topic.declaration.logs else PUT_UNIQUE,
        keys=(slot.claims, slot.dead, slot.reasons, slot.tokens, *slot.stores, *call.keys),
        args=(
            len(slot.stores),
            claim.name,
            claim.mode,
            claim.lasts_us,
            claim.checksum,
            "add" if adds else claim.conflict,
            at_most,
            "" if takes is None else takes.id,
            int(goes_on),
            *call.args,
        ),
        parse=partial(_read, claim, topic, slot.number, call.parse),
    )


def replace_call(commands: Commands, topic: Topic, request: PutRequest) -> ScriptCall:
    """The call that puts a message in the place of the newest one of its id that waits, or adds it
    if none does. Result: :class:`Put`."""
    call = commands.put(topic, request)
    slot = topic.slot_for(request.basis or request.id)
    return call._replace(
        script=PUT_UNIQUE_LOGGED if topic.declaration.logs else PUT_UNIQUE,
        keys=(slot.claims, slot.dead, slot.reasons, slot.tokens, *slot.stores, *call.keys),
        args=(len(slot.stores), "", 0, 0, 0, "", "", "", 0, *call.args),
    )


def is_unique_call(call: ScriptCall) -> bool:
    """Whether a call is one of :func:`unique_call`."""
    return call.script is PUT_UNIQUE or call.script is PUT_UNIQUE_LOGGED


def _read(
    claim: Claim, topic: Topic, slot: int, parse: Callable[[Any], Put], raw: list[Any]
) -> Put | Conflict:
    if raw[1] != CONFLICT:
        return parse(raw)
    id, _, waits, base, *_ = raw
    return Conflict(text(id), text(base), bool(waits), claim, topic, slot)
