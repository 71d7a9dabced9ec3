"""Puts messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import ConfigurationError, MessageError, ReplicationError
from ..model.delivery import traits_of
from ..model.message import Claim, Unique, claim_of, key_of
from ..model.results import ADDED, KEPT, REPEATED, REPLACED, WAITING, Put
from ..model.topic import Topic
from ..scripts.call import ScriptCall, microseconds
from .claims import home_of
from .commands import Commands
from .context import Context
from .leases import Leases
from .lookup import Lookup
from .put_many import PutMany, PutNames
from .recording import Recorder
from .registry import Registry
from .requests import ADD, KEEP, REPLACE, NewMessage, PutRequest, named_by
from .runner import BROKEN, Runner
from .unique_put import Conflict, ask_recorded, put_unique, replace_call, unique_call


def check_put(id: object, body: object, basis: object, priority: object) -> None:
    """Raise ConfigurationError for what no message is made of."""
    if not isinstance(id, str):
        raise ConfigurationError(f"id must be a str, not {id!r:.100}")
    if not isinstance(body, (bytes, bytearray, memoryview)):
        raise ConfigurationError(f"body must be bytes, not a {type(body).__name__}: encode it")
    if not isinstance(basis, (str, type(None))):
        raise ConfigurationError(f"slot basis must be a str, not {basis!r:.100}")
    if not isinstance(priority, int):
        raise ConfigurationError(f"priority must be an int, not {priority!r:.100}")


class Puts:
    """Puts messages, one round trip or a few each."""

    def __init__(
        self,
        runner: Runner,
        registry: Registry,
        context: Context,
        commands: Commands,
        lookup: Lookup,
        leases: Leases,
    ) -> None:
        self._runner = runner
        self._context = context
        self._registry = registry
        self._commands = commands
        self._lookup = lookup
        self._leases = leases
        self._names = PutNames()
        #: who keeps a record of what is put here, if anybody does
        self.recorder: Recorder | None = None

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
        check_put(id, body, basis, priority)
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
        lane = self._names.take()
        request = PutRequest(
            id,
            body,
            microseconds(at),
            microseconds(delay),
            basis,
            priority,
            None,
            if_exists,
            lane.next(),
            traits=traits,
        )
        if token is not None:
            request = named_by(request, token, time.time())
        made = self._put(declared, request, claim)
        self._names.give(lane)  # not after an error: the call may be on its way yet
        return made if token is not None else made.by_this_put

    def _put(self, topic: Topic, request: PutRequest, claim: Claim | None) -> Put:
        recorder = self.recorder
        if claim is not None:
            topic = home_of(self._runner, topic, claim, request.basis or request.id)
            if recorder is None:
                make = partial(unique_call, self._commands, topic, request, claim)
                run = partial(self._run, topic.name)
                found, _ = put_unique(topic.name, make, run, self._leases.free)
            else:
                request = recorder.named(topic, request)
                how = self._recording(recorder, topic, request, claim)
                found, _ = put_unique(topic.name, *how, self._leases.free)
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
        rows = recorder.putting(topic, [request])
        try:
            put: Put = self._run(topic.name, call)
        except ReplicationError:
            raise  # it is put, and on too few replicas
        except BROKEN:
            if request.if_exists != ADD or not rows:
                recorder.withdraw(rows)
                raise
            recorder.not_put(rows)
            return Put(request.id, ADDED)
        except Exception:
            recorder.withdraw(rows)
            raise
        if put.outcome == KEPT:
            recorder.withdraw(rows)
        elif put.outcome == REPLACED:
            recorder.replaced(rows)
        elif put.outcome == REPEATED:
            recorder.repeated(rows)
        return put

    def _recording(
        self, recorder: Recorder, topic: Topic, request: PutRequest, claim: Claim
    ) -> tuple[Callable[[Conflict | None], ScriptCall], Callable[[ScriptCall], Any]]:
        """What makes and runs the calls that put a message with a unique key, and its row."""
        before: list[Conflict | None] = [None]

        def make(takes: Conflict | None) -> ScriptCall:
            before[0] = takes
            return unique_call(self._commands, topic, request, claim, takes)

        def ask(call: ScriptCall) -> Any:
            takes = before[0]
            own = request._replace(traits=claim.among(request.traits))
            own = own if takes is None else own._replace(id=takes.id)
            return ask_recorded(recorder, topic, own, takes, partial(self._run, topic.name, call))

        return make, ask

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
        lane = self._names.take()
        recorder = self.recorder
        named = None if recorder is None else partial(recorder.named, declared)
        many = PutMany(self._context, self._commands, declared, messages, lane, token, named)
        for id, basis in many.admitted():
            self._registry.admit(declared, id, basis)
        if recorder is None:
            put = self._put_list(many)
        else:
            many.leave_out(far := recorder.keep_far(declared, many.requests))
            near = [one for place, one in enumerate(many.requests) if place not in far]
            put = self._put_list(many, recorder.putting(declared, near) if near else ())
        self._names.give(lane)
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
        assert self.recorder is not None
        refused, unknown = [], []
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, BROKEN):
                unknown.append(row)
            elif not isinstance(result, Put):
                refused.append(row)
        self.recorder.withdraw(refused)
        self.recorder.not_put(unknown)


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
