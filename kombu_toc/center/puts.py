"""Puts messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import PutManyError, RateLimitedError, ReplicationError
from ..model.message_key import key_of
from ..model.results import Put
from ..model.topic import Topic
from ..model.traits import traits_of
from ..model.uniqueness import Claim, Unique, claim_of
from ..scripts.call import ScriptCall, microseconds
from .claims import home_of
from .commands import Commands
from .context import Context
from .lookup import Lookup
from .put_many import PutMany, PutNames
from .recording import Recorder
from .registry import Registry
from .requests import NewMessage, PutRequest
from .runner import BROKEN, Runner
from .unique_put import Conflict, ask_recorded, put_unique, unique_call
from .waiting import PopNames


class Puts:
    """Puts messages, one round trip or a few each."""

    def __init__(
        self,
        runner: Runner,
        registry: Registry,
        context: Context,
        commands: Commands,
        lookup: Lookup,
    ) -> None:
        self._runner = runner
        self._context = context
        self._registry = registry
        self._commands = commands
        self._lookup = lookup
        self._put_names = PutNames(PopNames().next)
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
        ensure: bool = False,
        publish: tuple[str, str] | None = None,
        visibility: float | None = None,
        max_lease: float | None = None,
        expiration: float | None = None,
        key: object = None,
        unique: Unique | str | None = None,
    ) -> str | None:
        """Add a message and return the id it is kept under.

        at: action time, seconds since the epoch; a past one means now
        delay: instead of `at`, seconds from now by Redis's clock
        basis: slot basis; the key unless given, or the id
        priority: 0 goes first
        token: tells this message from another live one with the same id, which may then have
            two; without it, the CRC-32 of the body does
        ensure: return None, and add nothing, if a live message has this id
        publish: (producer, name of this publish): to repeat a producer's latest publish within
            a minute, because its reply was lost, adds nothing, whatever has become of the message
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
        sense, UniqueError as `unique` says, RateLimitedError if its topic limits how many are put,
        ReplicationError as :meth:`run_puts`, PriorityStepsError as :meth:`declare`.
        """
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
        # While the topic is resharded, the message may lie in another slot.
        moves = ensure and declared.declaration.draining_counts
        if moves and self._lookup.get(id, topic=topic, basis=basis or id):
            return None
        request = PutRequest(
            id,
            body,
            microseconds(at),
            microseconds(delay),
            basis,
            priority,
            token,
            ensure,
            publish,
            traits=traits,
        )
        if claim is not None:
            declared = home_of(self._runner, declared, claim, basis or id)
            if self.recorder is None:
                make = partial(unique_call, self._commands, declared, request, claim)
                found, _ = put_unique(topic, make, partial(self._run, topic))
            else:
                how = self._recording(self.recorder, declared, request, claim)
                found, _ = put_unique(topic, *how)
            return found.id if found.added or not ensure else None
        if self.recorder is not None:
            return self._put_recorded(self.recorder, declared, request)
        put: Put = self._run(topic, self._commands.put(declared, request))
        return put.id if put.added or not ensure else None

    def _put_recorded(self, recorder: Recorder, topic: Topic, request: PutRequest) -> str | None:
        """Write the row of a message, and put it."""
        # What is wrong with it is found before.
        call = self._commands.put(topic, request)
        if recorder.keep_far(topic, [request]):
            return request.id
        rows = recorder.putting(topic, [request])
        try:
            put: Put = self._run(topic.name, call)
        except ReplicationError:
            raise  # it is put, and on too few replicas
        except BROKEN:
            if request.ensure or not rows:
                recorder.withdraw(rows)
                raise
            recorder.not_put(rows)
            return request.id
        except Exception:
            recorder.withdraw(rows)
            raise
        if not put.added:  # it has one, or is another
            recorder.withdraw(rows)
        return put.id if put.added or not request.ensure else None

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
        self, topic: str, messages: Iterable[NewMessage | Mapping[str, Any] | tuple[Any, ...]]
    ) -> list[Put]:
        """Add messages, thousands in a round trip; return what became of each, in their order.

        messages: each is a :class:`NewMessage`, a mapping with the arguments of :meth:`put`, such
            as ``{"id": "order-7", "body": b"...", "delay": 3600}``, or a tuple in their order,
            such as ``("order-7", b"...")``

        Messages with one action time and priority keep the order of the list, but for those whose
        id another live message has: they are put after the others. A message that is there
        already, with the same bytes, is not added again: so a list may be repeated after an error.
        If the same center repeats it within a minute, what was consumed meanwhile is not added
        again either.

        Raises MessageError, ActionTimeError or TraitError if a message cannot be put, and says
        which one: then none is. Raises PutManyError if some were not put, or perhaps not; its
        `results` say which. Raises RateLimitedError with such `results` if some are more than the
        topic takes; the others are put. Raises ReplicationError as :meth:`put`, with `results` as
        well, and PriorityStepsError as :meth:`declare`.
        """
        declared = self._registry.agreed(self._registry.topic(topic))
        many = PutMany(self._context, self._commands, declared, messages, self._put_names)
        for id, basis in many.admitted():
            self._registry.admit(declared, id, basis)
        if self.recorder is None:
            return self._put_list(many)
        if not (far := self.recorder.keep_far(declared, many.requests())):
            return self._put_list(many, self.recorder.putting(declared, many.requests()))
        # The others are put without them; what became of each is told in the order of the list.
        messages = many.without(far)
        near = PutMany(self._context, self._commands, declared, messages, self._put_names)
        try:
            put = self._put_list(near, self.recorder.putting(declared, near.requests()))
        except (PutManyError, RateLimitedError, ReplicationError) as exc:
            if exc.results is not None:
                exc.results = many.filled(far, exc.results)
            raise
        return many.filled(far, put)

    def _put_list(self, many: PutMany, rows: Sequence[Any] = ()) -> list[Put]:
        """Put the messages of a list; rows: what is recorded of each"""
        while calls := many.next_calls():
            try:
                many.take(*self._runner.run_each_put(calls))
            except BROKEN as exc:
                many.fail(exc)
        self._runner.send_counters()
        if rows:
            self._settle_rows(rows, many.results)
        return many.finish()

    def _settle_rows(self, rows: Sequence[Any], results: Sequence[Any]) -> None:
        """Of a list that was put, take back the rows of what was refused; what perhaps was not put
        follows."""
        assert self.recorder is not None
        refused, unknown = [], []
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, BROKEN):
                unknown.append(row)
            elif not isinstance(result, Put) or not result.added:
                refused.append(row)
        self.recorder.withdraw(refused)
        self.recorder.not_put(unknown)

    def ensure(
        self,
        topic: str,
        id: str,
        body: bytes,
        *,
        at: float | None = None,
        delay: float | None = None,
        basis: str | None = None,
        priority: int = 0,
        visibility: float | None = None,
        max_lease: float | None = None,
        expiration: float | None = None,
        key: object = None,
    ) -> bool:
        """Add a message as :meth:`put` does, unless the topic has one of this id, in any state.

        Returns whether it was added. Of several that try at the same time with the same slot
        basis, or with none, one adds it.
        """
        if self._lookup.get(id, topic=topic):
            return False  # perhaps in another slot, because of another basis
        made = self.put(
            topic,
            id,
            body,
            at=at,
            delay=delay,
            basis=basis,
            priority=priority,
            ensure=True,
            visibility=visibility,
            max_lease=max_lease,
            expiration=expiration,
            key=key,
        )
        return made is not None
