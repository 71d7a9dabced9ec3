"""Puts messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..errors import ConfigurationError, MessageError, ReplicationError, UniqueError
from ..model.delivery import traits_of
from ..model.keys import Slot
from ..model.message import KEEP_EARLIER, TAKES, Claim, Unique, claim_of, key_of
from ..model.results import ADDED, KEPT, REPEATED, REPLACED, WAITING, Put
from ..model.topic import Topic
from ..scripts.call import FreeNames, ScriptCall, load, microseconds, publish_of, text
from .calls import ADD, KEEP, REPLACE, Commands, NewMessage, PutRequest, named_by
from .core import CenterPart, Core, Recorder
from .find import Lookup
from .put_many import PutMany
from .runner import BROKEN
from .upkeep import Leases, home_of

# -- puts messages of which a queue has one at a time, by a unique key
#
# The server refuses a message whose key another one has, and says which one that is. If the message
# is to take its place, the sender makes it once more, under the id of the other, and asks again: it
# is replaced if all is as it was. So nobody waits for anybody, and a message that nobody competes
# with is put by one call.

#: How often a message is made anew because the one that it was to replace was replaced or delivered
#: meanwhile. Each time, somebody else's has been put.
ATTEMPTS = 100

#: What puts such a message.
PUT_UNIQUE = load("put_unique")

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


class UniquePut(NamedTuple):
    """A put of a message with a unique key.

    request: the message, under its own id
    takes: the message whose place it takes
    """

    call: ScriptCall
    request: PutRequest
    takes: Conflict | None


def put_unique(
    topic: str,
    make: Callable[[Conflict | None], UniquePut],
    ask: Callable[[UniquePut], Any],
    free: Callable[[Topic, int, str], bool],
    takes: Conflict | None = None,
) -> tuple[Put | Conflict, Conflict | None]:
    """Put a message, or find the one that is there and is kept: a :class:`Conflict`. Returns this,
    and the message whose place it has taken, if any.

    make: what :func:`unique_call` makes of the message; of one whose place it takes
    ask: runs its call, and returns the result
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


def put_recorded(
    recorder: Recorder,
    topic: Topic,
    request: PutRequest,
    put: Callable[[], Any],
    *,
    takes: bool = False,
    follows: bool = False,
) -> Any:
    """Write the row of a message, and put it; returns what `put` has returned.

    takes: whether it takes the place of another one
    follows: whether it is put later if the server does not answer
    """
    rows = recorder.putting(topic, [request])
    try:
        found = put()
    except ReplicationError:
        raise  # it is put, and on too few replicas
    except Exception as exc:
        if follows and rows and isinstance(exc, BROKEN):
            recorder.not_put(rows)
            return Put(request.id, ADDED)
        recorder.withdraw(rows)
        raise
    if found.outcome == KEPT:
        recorder.withdraw(rows)
    elif found.outcome == REPEATED:
        recorder.repeated(rows)
    elif takes or found.outcome == REPLACED:
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
) -> UniquePut:
    """The put of a message if it may have its key. Result of its call: :class:`Put`, or
    :class:`Conflict`.

    request: the message; of one that takes the place of another, under that one's id
    takes: the message whose place it takes
    goes_on: it goes on for the message of its own id, as a retry does, and so has its key
    adds: it is added in any case
    """
    own = request = request._replace(traits=claim.among(request.traits))
    if takes is not None:  # it is no addition: neither a full server nor a rate refuses it
        request = request._replace(id=takes.id, replaces=True)
    call = commands.put(topic, request, plain=False)
    slot = topic.slot_for(request.basis or request.id)
    at_most = "" if claim.at_most_us is None else claim.at_most_us
    how = (claim.checksum, "add" if adds else claim.conflict, at_most)
    before = ("" if takes is None else takes.id, int(goes_on))
    call = _unique(call, slot, (claim.name, claim.mode, claim.lasts_us, *how, *before))
    call = call._replace(parse=partial(_read, claim, topic, slot.number, call.parse))
    return UniquePut(call, own, takes)


def replace_call(commands: Commands, topic: Topic, request: PutRequest) -> ScriptCall:
    """The call that puts a message in the place of the newest one of its id that waits, or adds it
    if none does. Result: :class:`Put`."""
    call = commands.put(topic, request, plain=False)
    slot = topic.slot_for(request.basis or request.id)
    return _unique(call, slot, ("", 0, 0, 0, "", "", "", 0))


def _unique(call: ScriptCall, slot: Slot, args: tuple[Any, ...]) -> ScriptCall:
    """The call of put_unique.lua that does what one of put_special.lua does."""
    keys = (slot.claims, slot.dead, slot.reasons, slot.tokens, *slot.stores, *call.keys)
    return call._replace(script=PUT_UNIQUE, keys=keys, args=(len(slot.stores), *args, *call.args))


def _read(
    claim: Claim, topic: Topic, slot: int, parse: Callable[[Any], Put], raw: list[Any]
) -> Put | Conflict:
    if raw[1] != CONFLICT:
        return parse(raw)
    id, _, waits, base, *_ = raw
    return Conflict(text(id), text(base), bool(waits), claim, topic, slot)


# -- puts messages


def check_put(id: object, body: object, basis: object, priority: object, token: object) -> None:
    """Raise ConfigurationError for what no message is made of."""
    if not isinstance(id, str):
        raise ConfigurationError(f"id must be a str, not {id!r:.100}")
    if not isinstance(body, (bytes, bytearray, memoryview)):
        raise ConfigurationError(f"body must be bytes, not a {type(body).__name__}: encode it")
    if not isinstance(basis, (str, type(None))):
        raise ConfigurationError(f"slot basis must be a str, not {basis!r:.100}")
    if not isinstance(priority, int):
        raise ConfigurationError(f"priority must be an int, not {priority!r:.100}")
    if not isinstance(token, (str, type(None))):
        raise ConfigurationError(f"token must be a str, not {token!r:.100}")


class Puts(CenterPart):
    """Puts messages, one round trip or a few each."""

    def __init__(self, core: Core, lookup: Lookup, leases: Leases) -> None:
        super().__init__(core)
        self._lookup, self._leases = lookup, leases
        self._names = FreeNames()

    def put(
        self,
        topic: str,
        id: str,
        body: bytes,
        *,
        at: float | None = None,
        delay: float | None = None,
        basis: str | None = None,
        priority: int = 0,
        token: str | None = None,
        if_exists: str = ADD,
        visibility: float | None = None,
        max_lease: float | None = None,
        expiration: float | None = None,
        key: object = None,
        unique: Unique | str | None = None,
    ) -> Put:
        """Add a message. Returns the id that it is kept under, and what was done: see :class:`Put`.

        Each put is one message, whatever its id and its bytes are: a message whose id another live
        one has is kept under ``ID#SUFFIX``. If a connection breaks and the center repeats a put by
        itself, that is one put.

        at: action time, seconds since the epoch; a past one means now
        delay: instead of `at`, seconds from now by Redis's clock
        basis: slot basis; the key unless given, or the id
        priority: 0 goes first
        token: names this put for its caller: a repetition with the same id and token, until an
            hour after its time, is ``repeated`` and adds nothing, whatever has become of the
            message
        if_exists: ``"add"`` adds a message in any case. ``"keep"`` adds nothing if the topic has a
            message of this id, in any state. ``"replace"`` gives its body, time, priority and
            traits to the newest message of this id that waits; if none waits, it adds one
        visibility: seconds that a delivery of this message lasts unless it is renewed; as its
            topic says unless given
        max_lease: seconds for which one delivery of it may be renewed in all; 0: for ever; as its
            topic says unless given
        expiration: seconds after its due time when it expires: it is not delivered then. Where its
            topic has a ``message_ttl`` that is shorter, that holds
        key: what it is about, such as a customer, as text, a whole number or a UUID: its topic may
            limit what starts of each key
        unique: a :class:`Unique`, or its key alone: the topic has one message of that key at a
            time. If another one has it and is kept, its id is returned. The unique key is the slot
            basis if there is neither a basis nor a key

        Raises ActionTimeError beyond the year 2255, TraitError if one of the last five makes no
        sense, MessageError if a message that is to be replaced waits in another slot, because of
        another basis, UniqueError as `unique` says, RateLimitedError if its topic limits how many
        are put, ReplicationError as :meth:`run_puts`, PriorityStepsError as :meth:`declare`.
        """
        check_put(id, body, basis, priority, token)
        traits = ""
        if not (visibility is max_lease is expiration is key is None):
            what = f"message {id!r}"
            key = key_of(what, key)
            basis = basis or key or None
            traits = traits_of(
                what,
                visibility=visibility,
                max_lease=max_lease,
                expiration=expiration,
                key=key,
                basis=basis,
            )
        claim = None
        if unique is not None:
            claim = claim_of(f"message {id!r}", unique, basis)
            basis = basis or claim.shown
        declared = self._registry.agreed(self._registry.topic(topic))
        self._registry.admit(declared, id, basis, unique=claim is not None)
        if if_exists != ADD:
            check_if_exists(id, if_exists, unique)
            if other := self._elsewhere(declared, id, basis, if_exists):
                return Put(other, KEPT)
        names = self._names.take()
        request = PutRequest(
            id,
            body,
            microseconds(at),
            microseconds(delay),
            basis,
            priority,
            None,
            if_exists,
            publish_of(names.next()),
            traits=traits,
        )
        if token is not None:
            request = named_by(request, token, time.time())
        made = self._put(declared, request, claim)
        self._names.give(names)  # not after an error: the call may be on its way yet
        return made if token is not None else made.by_this_put

    def put_named(self, topic: str, request: PutRequest, token: str) -> Put:
        """As :meth:`put` with a token, of a message whose traits are known already."""
        declared = self._registry.agreed(self._registry.topic(topic))
        return self._put(declared, named_by(request, token, time.time()), None)

    def _put(self, topic: Topic, request: PutRequest, claim: Claim | None) -> Put:
        recorder = self._core.recorder
        if claim is not None:
            topic = home_of(self._runner, self._context, topic, claim, request.basis or request.id)
            if recorder is not None:
                request = recorder.named(topic, request)
            run = partial(self._run_unique, topic)
            make = partial(unique_call, self._commands, topic, request, claim)
            found, _ = put_unique(topic.name, make, run, self._leases.free)
            return found if isinstance(found, Put) else Put(found.id, KEPT)
        if recorder is not None:
            return self._put_recorded(recorder, topic, recorder.named(topic, request))
        made: Put = self._run(topic.name, self._call(topic, request))
        return made

    def _call(self, topic: Topic, request: PutRequest) -> ScriptCall:
        if request.if_exists == REPLACE:
            return replace_call(self._commands, topic, request)
        return self._commands.put(topic, request)

    def _elsewhere(self, topic: Topic, id: str, basis: str | None, if_exists: str) -> str | None:
        """The id of a message that is to be kept, of those with this id that the slot of this put
        does not have. Raises MessageError if one is to be replaced."""
        moves = bool(topic.declaration.draining_counts)
        slot = topic.slot_for(basis or id).number
        found = self._lookup.get(id, topic=topic.name)
        others = [one for one in found if one.slot != slot or moves]
        if if_exists == KEEP:
            return others[0].id if others else None
        for one in others:
            if one.state == WAITING and one.slot != slot and not one.far:
                raise MessageError(
                    f"message {id!r} waits in slot {one.slot} of {topic.name!r}, and this one goes "
                    f"to slot {slot}: it has another slot basis (or key), or the queue is being "
                    "resharded. Replace it under its own basis, or cancel it and put this one; "
                    "nothing was put"
                )
        return None

    def _put_recorded(self, recorder: Recorder, topic: Topic, request: PutRequest) -> Put:
        """Write the row of a message, and put it."""
        # What is wrong with it is found before.
        call = self._call(topic, request)
        if request.if_exists == REPLACE and (replaced := recorder.replace_far(topic, request)):
            return replaced
        if recorder.keep_far(topic, [request]):
            return Put(request.id, ADDED)
        run = partial(self._run, topic.name, call)
        put: Put = put_recorded(recorder, topic, request, run, follows=request.if_exists == ADD)
        return put

    def _run_unique(self, topic: Topic, put: UniquePut) -> Any:
        run, recorder = partial(self._run, topic.name, put.call), self._core.recorder
        if recorder is None:
            return run()
        request, takes = put.request, put.takes
        if takes is not None:
            request = request._replace(id=takes.id)
        return put_recorded(recorder, topic, request, run, takes=takes is not None)

    def _run(self, topic: str, call: ScriptCall) -> Any:
        """Run a call that puts a message, as :meth:`put` does."""
        reread = self._registry.rereading(topic)
        made, *read = self._runner.run_puts([call] if reread is None else [call, reread])
        if read == [None]:
            self._registry.mend(topic)
        return made

    def put_many(
        self,
        topic: str,
        messages: Iterable[NewMessage | Mapping[str, Any] | tuple[Any, ...]],
        *,
        token: str | None = None,
    ) -> list[Put]:
        """Add messages, thousands in a round trip; return what became of each, in their order.

        messages: each is a :class:`NewMessage`, a mapping with the arguments of :meth:`put`, such
            as ``{"id": "order-7", "body": b"...", "delay": 3600}``, or a tuple in their order,
            such as ``("order-7", b"...")``
        token: names this list for its caller, who may repeat it after an error: each of its
            messages has a token of its own, as of :meth:`put`, which follows from this one, its
            id, and how many of the list have that id before it. Such messages are put one by one,
            in common round trips

        Each message is added, whatever others there are. Messages with one action time and priority
        keep the order of the list, but for those whose id another live message has: they are put
        after the others.

        Raises MessageError, ActionTimeError or TraitError if a message cannot be put, and says
        which one: then none is. Raises PutManyError if some were not put, or perhaps not; its
        `results` say which. Raises RateLimitedError with such `results` if some are more than the
        topic takes; the others are put. Raises ReplicationError as :meth:`put`, with `results` as
        well, and PriorityStepsError as :meth:`declare`.
        """
        declared = self._registry.agreed(self._registry.topic(topic))
        names = self._names.take()
        recorder = self._core.recorder
        named = None if recorder is None else partial(recorder.named, declared)
        many = PutMany(self._context, self._commands, declared, messages, names, token, named)
        for id, basis in many.admitted():
            self._registry.admit(declared, id, basis)
        if recorder is None:
            put = self._put_list(many)
        else:
            many.leave_out(far := recorder.keep_far(declared, many.requests))
            near = [one for place, one in enumerate(many.requests) if place not in far]
            put = self._put_list(many, recorder.putting(declared, near) if near else ())
        self._names.give(names)
        return put

    def _put_list(self, many: PutMany, rows: Sequence[Any] = ()) -> list[Put]:
        """Put the messages of a list; rows: what is recorded of each"""
        while calls := many.next_calls():
            try:
                many.take(*self._runner.run_each_put(calls))
            except BROKEN as exc:
                many.fail(exc)
        self._runner.send_counters()
        if rows:
            self._settle_rows(rows, many.near_results)
        return many.finish()

    def _settle_rows(self, rows: Sequence[Any], results: Sequence[Any]) -> None:
        """Of a list that was put, take back the rows of what was refused; what perhaps was not put
        follows."""
        recorder = self._core.recorder
        assert recorder is not None
        refused, unknown = [], []
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, BROKEN):
                unknown.append(row)
            elif not isinstance(result, Put):
                refused.append(row)
        recorder.withdraw(refused)
        recorder.not_put(unknown)


def check_if_exists(id: str, if_exists: str, unique: object) -> None:
    """Raises MessageError for an `if_exists` that makes no sense."""
    if if_exists not in (ADD, KEEP, REPLACE):
        raise MessageError(
            f"message {id!r}: if_exists is 'add', 'keep' or 'replace', not {if_exists!r}"
        )
    if if_exists == REPLACE and unique is not None:
        raise MessageError(
            f"message {id!r}: it has a unique key, whose conflict says what it replaces; give "
            "that or if_exists='replace', not both"
        )
