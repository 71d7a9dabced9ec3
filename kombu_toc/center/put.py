"""Puts messages."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

from .. import errors
from ..errors import ConfigurationError, MessageError, ReplicationError, UniqueError
from ..model.delivery import traits_of
from ..model.message import KEEP_EARLIER, TAKES, Claim, Unique, claim_of, key_of
from ..model.results import ADDED, KEPT, REPEATED, REPLACED, WAITING, Put, PutTogether
from ..model.topic import Slot, Topic, slot_of
from ..scripts.call import (
    FreeNames,
    Names,
    ScriptCall,
    load,
    microseconds,
    publish_of,
    text,
    when_of,
)
from .calls import (
    ADD,
    KEEP,
    MOST_BYTES,
    REMEMBER,
    REPLACE,
    Commands,
    Context,
    NewMessage,
    PutRequest,
    batches_within,
    named_by,
    pace_key,
    read_limited_put_many,
    read_put_many,
    too_large,
)
from .core import CenterPart, Core, Recorder
from .messages import Messages
from .runner import BROKEN
from .upkeep import Leases, home_of

# -- many messages in a few calls

#: Messages, and bytes of their bodies, that one call adds: no call may keep the server busy for
#: long. A longer body goes alone.
MESSAGES_PER_CALL = 500
BYTES_PER_CALL = 1_000_000

#: Messages, and bytes, that leave together.
MESSAGES_TOGETHER = 20_000
BYTES_TOGETHER = 8_000_000

_FIELDS = frozenset(NewMessage._fields)

#: The last fields of a message without traits.
_NONE = (None, None, None, None)


@dataclass(slots=True)
class _Batch:
    """Messages that one call adds.

    slot, step: number of the slot, and index of the priority step, that they go to
    numbers: their places in the list
    flat: the arguments for the script
    bytes: how long their bodies are together
    """

    slot: int
    step: int
    numbers: list[int] = field(default_factory=list)
    flat: list[Any] = field(default_factory=list)
    bytes: int = 0


T = TypeVar("T")

#: A message of a list, as callers give it.
Given: TypeAlias = NewMessage | Mapping[str, Any] | tuple[Any, ...]

#: What a call is remembered by at the server: a producer, and the call's name.
Publish = tuple[str, str]


def put_many_call(
    context: Context,
    topic: Topic,
    slot: Slot,
    step: int,
    flat: Sequence[Any],
    width: int = 3,
    publish: Publish = ("", ""),
) -> ScriptCall:
    """Add messages of one slot and one priority step, in their order. No two have one id.
    Result: :class:`PutTogether`.

    step: index of the priority step
    flat: of each its id, its body, and its time as :func:`.scripts.call.when_of` gives it; its
        traits, if `width` is more than 3, as it is where puts are limited; and of what is put back
        the suffix under which it may be there
    publish: (producer, name of this call): a repeated call adds nothing
    """
    producer, name = publish
    expires = topic.declaration.keys_ms
    if expires:  # what goes away by itself leaves nothing behind
        name = ""
    sent = slot.sent(f"many:{producer}")
    keys = [slot.stores[step], slot.body, slot.announced_times, sent, slot.tokens]
    limits, number = topic.declaration.put_gates, len(flat) // width
    parse: Callable[[Any], PutTogether] = partial(read_put_many, context.counts(topic), number)
    if limits:
        keys.append(pace_key(topic, slot, clustered=context.clustered))
        parse = partial(read_limited_put_many, topic, context.counts(topic), number)
    declared, turns = topic.declaration, ""
    if declared.key_fair and not declared.key_order and not expires:  # as commands.put has it
        keys += slot.lane_keys[:3]
        turns = f"f{step + 1},"
    remember = str(REMEMBER)
    if declared.logs:
        keys.append(slot.log)
        remember += f",{declared.logs}"
    args = (slot.number, expires, f"{width}{turns}{limits}", name, remember, *flat)
    return context.announcing(topic, "put_many", keys, args, parse)


class PutMany(CenterPart):
    """A put of many messages.

    Raises MessageError, errors.ActionTimeError or TraitError if a message cannot be put.
    """

    def __init__(
        self, core: Core, topic: Topic, messages: Iterable[Given], names: Names, token: str | None
    ) -> None:
        super().__init__(core)
        self._topic, self._names, self._token = topic, names, token
        self._messages = _read(messages)
        #: of each message a Put, the error of who knows that it was not put or does not know
        #: whether it was, or None if it was not sent
        self.results: list[Any] = [None] * len(self._messages)
        #: of each, its time and its traits as scripts read them
        self._said = [
            (_when(number, one.id, one.at, one.delay), _traits(number, one))
            for number, one in enumerate(self._messages)
        ]
        #: where messages are recorded: each as what is asked for
        self.requests: list[PutRequest] = []
        if core.recorder is not None:
            requests = map(self._request, range(len(self._said)))
            self.requests = [core.recorder.named(topic, one) for one in requests]
            pairs = zip(self._said, self.requests, strict=True)
            self._said = [(when, request.traits) for (when, _), request in pairs]
        self._has_traits = any(map(itemgetter(1), self._said))
        #: the places of those whose id another one of the list or of the topic has, and of those
        #: that have tokens. Put one by one: a copy is recorded in a key of its id
        self._apart: list[int] = []
        self._left_out: Collection[int] = ()
        self._error: Exception | None = None
        self._shortage: Exception | None = None

    @cached_property
    def _tokens(self) -> list[str | None]:
        """The token of each message; of a list with a token, those that follow from it."""
        if self._token is None:
            return [one.token for one in self._messages]
        seen: Counter[str] = Counter()
        tokens: list[str | None] = []
        for one in self._messages:
            tokens.append(one.token or f"{self._token}\0{seen[one.id]}")
            seen[one.id] += 1
        return tokens

    def _request(self, number: int, publish: Publish | None = None) -> PutRequest:
        """A message as what is asked for."""
        one = self._messages[number]
        request = PutRequest(
            *(one.id, one.body, microseconds(one.at), microseconds(one.delay)),
            basis=one.basis,
            priority=one.priority,
            publish=publish,
            traits=self._said[number][1],
        )
        token = self._tokens[number]
        return request if token is None else named_by(request, token, time.time())

    def run(self) -> list[Put]:
        """Put them; what became of each. Raises PutManyError, RateLimitedError or ReplicationError
        if not all are put for sure, or not on enough replicas."""
        others = (one for one in self._messages if one.basis not in (None, one.id))
        for one in (*self._messages[:1], *itertools.islice(others, 1)):  # one of each kind
            self._registry.admit(self._topic, one.id, one.basis)
        recorder, rows = self._core.recorder, list[Any]()
        if recorder is not None:
            self._left_out = recorder.keep_far(self._topic, self.requests)
            for place in self._left_out:
                self.results[place] = Put(self._messages[place].id, ADDED)
            if near := self._near(self.requests):
                rows = [*recorder.putting(self._topic, near)]
        for batches in batches_within(
            self._divided(),
            (MESSAGES_TOGETHER, BYTES_TOGETHER),
            lambda batch: (len(batch.numbers), batch.bytes),
        ):
            self._send([(batch.numbers, self._call(batch)) for batch in batches])
        for numbers in batches_within(
            sorted(self._apart),
            (MESSAGES_PER_CALL, BYTES_TOGETHER),
            lambda number: (1, len(self._messages[number].body)),
        ):
            self._send([([one], self._call_apart(at, one)) for at, one in enumerate(numbers)])
        self._runner.send_counters()
        if recorder is not None and rows:
            # What was refused goes; what perhaps was not put follows.
            pairs = list(zip(rows, self._near(self.results), strict=True))
            unknown = [row for row, result in pairs if isinstance(result, BROKEN)]
            recorder.withdraw(
                [row for row, result in pairs if not isinstance(result, (Put, *BROKEN))]
            )
            recorder.not_put(unknown)
        return self._finish()

    def _near(self, of: Sequence[T]) -> list[T]:
        """Of the messages those that are not kept elsewhere."""
        return [one for place, one in enumerate(of) if place not in self._left_out]

    def _call(self, batch: _Batch) -> ScriptCall:
        topic, flat, width = self._topic, batch.flat, 3
        traits = [self._said[number][1] for number in batch.numbers] if self._has_traits else []
        if any(traits) or topic.declaration.put_gates:
            traits = traits or [""] * len(batch.numbers)
            rows = zip(flat[::3], flat[1::3], flat[2::3], traits, strict=True)
            flat, width = [value for row in rows for value in row], 4
        slot, publish = topic.slot(batch.slot), publish_of(self._names.next())
        return put_many_call(self._context, topic, slot, batch.step, flat, width, publish)

    def _call_apart(self, at: int, number: int) -> ScriptCall:
        """The call for a message that is put alone; at: its place among those sent with it."""
        producer, name = publish_of(self._names.next())
        request = self._request(number, (f"{producer}+{at}", name))
        if self.requests:
            own = self.requests[number]
            request = request._replace(token=own.token, traits=own.traits)
        return self._commands.put(self._topic, request)

    def _send(self, calls: Sequence[tuple[list[int], ScriptCall]]) -> None:
        """Run calls, each given with the messages that it is about, unless an earlier one has
        failed; note what has become of these."""
        if self._error is not None:
            return
        results: Sequence[Any]
        try:
            results, shortage = self._runner.run_each_put([call for _, call in calls])
            self._shortage = self._shortage or shortage
        except BROKEN as exc:  # they may have run or not
            results = [exc] * len(calls)
        put, messages = self.results, self._messages
        for (numbers, _), result in zip(calls, results, strict=True):
            if isinstance(result, PutTogether):
                now = result.now_us
                for number in numbers:
                    put[number] = Put(messages[number].id, ADDED, now)
                for place in result.there:
                    put[numbers[place]] = Put(messages[numbers[place]].id, ADDED)
                for place, refused in result.refused.items():
                    put[numbers[place]] = refused
                for place in result.taken:
                    put[numbers[place]] = None
                    self._apart.append(numbers[place])
                continue
            for number in numbers:
                put[number] = result
                if isinstance(result, Put) and self._tokens[number] is None:
                    put[number] = result.by_this_put
            if isinstance(result, Exception) and not isinstance(result, errors.RateLimitedError):
                self._error = self._error or result

    def _finish(self) -> list[Put]:
        if self._error is not None:
            raise self._not_all(self._error) from self._error
        if refused := [one for one in self.results if isinstance(one, errors.RateLimitedError)]:
            raise self._too_many(refused)
        if self._shortage is not None:
            if isinstance(self._shortage, errors.ReplicationError):
                self._shortage.results = self.results
            raise self._shortage
        return self.results

    def _not_all(self, error: Exception) -> errors.PutManyError:
        unsent = errors.ServerError(
            f"it was not sent, because another message was refused: {error}"
        )
        results = [unsent if result is None else result for result in self.results]
        failed = [at for at, result in enumerate(results) if isinstance(result, Exception)]
        return errors.PutManyError(
            f"{len(failed)} of {len(results)} messages were not put, or perhaps not; the first is "
            f"number {failed[0]} ({self._messages[failed[0]].id!r}): {error}. The error's results "
            "say which; a list with a token may be put again, and adds none twice",
            results,
        )

    def _too_many(self, refused: Sequence[errors.RateLimitedError]) -> errors.RateLimitedError:
        soonest = min(refused, key=lambda error: error.retry_after)
        return errors.RateLimitedError(
            f"{len(refused)} of {len(self.results)} messages were not put: {soonest}. The error's "
            "results say which; a list with a token may be put again, and adds none twice",
            soonest.limit,
            soonest.retry_after,
            self.results,
        )

    def _divided(self) -> list[_Batch]:
        """The messages in batches, each in the order of the list; but for those that share an
        id with an earlier one."""
        topic, apart = self._topic, self._apart
        slots, step_of = topic.declaration.slots, topic.step_index
        batches: list[_Batch] = []
        begun: dict[tuple[int, int], _Batch] = {}
        ids: set[str] = set()
        for number, (id, body, _, _, basis, priority, token, *_) in enumerate(self._messages):
            if number in self._left_out:
                continue
            if id in ids or token is not None or self._token is not None:
                apart.append(number)
                continue
            ids.add(id)
            place = slot_of(basis or id, slots), step_of(priority) if priority else 0
            batch = begun.get(place)
            if batch is None or (
                len(batch.numbers) >= MESSAGES_PER_CALL or batch.bytes + len(body) > BYTES_PER_CALL
            ):
                batch = begun[place] = _Batch(*place)
                batches.append(batch)
            batch.numbers.append(number)
            batch.flat += (id, body, self._said[number][0])
            batch.bytes += len(body)
        return batches


def _when(number: int, id: str, at: float | None, delay: float | None) -> Any:
    """The time of a message as a script reads it. Raises ActionTimeError, naming the message."""
    if at is None and delay is None:
        return ""
    try:
        return when_of(microseconds(at), microseconds(delay))
    except errors.ActionTimeError as exc:
        raise errors.ActionTimeError(f"message {number} ({id!r}): {exc}; nothing was put") from None


def _traits(number: int, message: NewMessage) -> str:
    """What holds for this message only. Raises TraitError, naming the message."""
    if message[7:] == _NONE:
        return ""
    return traits_of(
        f"message {number} ({message.id!r})",
        visibility=message.visibility,
        max_lease=message.max_lease,
        expiration=message.expiration,
        key=str(message.key or ""),
        basis=message.basis,
    )


def _read(messages: Iterable[Given]) -> list[NewMessage]:
    """The messages, checked. Raises MessageError, naming the first that cannot be put."""
    read: list[NewMessage] = []
    for number, given in enumerate(messages):
        message = given if type(given) is NewMessage else _made(number, given)
        if wrong := _wrong(message):
            raise errors.MessageError(
                f"message {number}{_named(message.id)}: {wrong}; nothing was put"
            )
        if message.key is not None:
            key = key_of(f"message {number} ({message.id!r})", message.key) or None
            message = message._replace(key=key, basis=message.basis or key)
        read.append(message)
    return read


def _made(number: int, given: object) -> NewMessage:
    try:
        if isinstance(given, Mapping):
            return NewMessage(**given)
        if isinstance(given, tuple):
            return NewMessage(*given)
    except TypeError:
        pass
    fields = ", ".join(NewMessage._fields)
    what = f"a {type(given).__name__}"
    if isinstance(given, Mapping):
        unknown = sorted(str(key) for key in given if key not in _FIELDS)
        missing = [name for name in ("id", "body") if name not in given]
        what = f"without {' and '.join(missing)}" if missing else f"with {', '.join(unknown)}"
    elif isinstance(given, tuple):
        what = f"a tuple of {len(given)}"
    raise errors.MessageError(
        f"message {number} is {what}; give a NewMessage, a mapping or a tuple with id and body, "
        f"and what it needs of {fields}; nothing was put"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _named(id: object) -> str:
    return f" ({id!r})" if isinstance(id, str) else ""


def _wrong(message: NewMessage) -> str:
    """What is wrong with a message; nothing as a rule."""
    id, body, at, delay, basis, priority, token, *_ = message
    if not isinstance(id, str):
        return f"its id must be a str, not {id!r}"
    if not isinstance(body, bytes):
        return f"its body must be bytes, not a {type(body).__name__}; encode it"
    if len(body) > MOST_BYTES:
        return too_large(len(body))
    if at is not None and delay is not None:
        return "it has at and delay; give one of them"
    if not (at is None or _is_number(at)):
        return f"at must be a number of seconds, not {at!r}"
    if not (delay is None or _is_number(delay)):
        return f"delay must be a number of seconds, not {delay!r}"
    if not isinstance(priority, int):
        return f"its priority must be an int, not {priority!r}"
    if not (basis is None or isinstance(basis, str)):
        return f"its basis must be a str, not {basis!r}"
    return (
        "" if token is None or isinstance(token, str) else f"its token must be a str, not {token!r}"
    )


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
    call = call._replace(parse=partial(_read_unique, claim, topic, slot.number, call.parse))
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


def _read_unique(
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

    def __init__(self, core: Core, messages: Messages, leases: Leases) -> None:
        super().__init__(core)
        self._messages, self._leases = messages, leases
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
        body, traits = bytes(body), ""
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
        result = self._put(declared, request, claim)
        self._names.give(names)  # not after an error: the call may be on its way yet
        return result.by_this_put if token is None and result.outcome == REPEATED else result

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
            outcome, _ = put_unique(topic.name, make, run, self._leases.free)
            return outcome if isinstance(outcome, Put) else Put(outcome.id, KEPT)
        if recorder is not None:
            return self._put_recorded(recorder, topic, recorder.named(topic, request))
        result: Put = self._run(topic.name, self._call(topic, request))
        return result

    def _call(self, topic: Topic, request: PutRequest) -> ScriptCall:
        if request.if_exists == REPLACE:
            return replace_call(self._commands, topic, request)
        return self._commands.put(topic, request)

    def _elsewhere(self, topic: Topic, id: str, basis: str | None, if_exists: str) -> str | None:
        """The id of a message that is to be kept, of those with this id that the slot of this put
        does not have. Raises MessageError if one is to be replaced."""
        moves = bool(topic.declaration.draining_counts)
        slot = topic.slot_for(basis or id).number
        messages = self._messages.get(id, topic=topic.name)
        others = [one for one in messages if one.slot != slot or moves]
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
        result, *read = self._runner.run_puts([call] if reread is None else [call, reread])
        if read == [None]:
            self._registry.mend(topic)
        return result

    def put_many(
        self, topic: str, messages: Iterable[Given], *, token: str | None = None
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
        put = PutMany(self._core, declared, messages, names, token).run()
        self._names.give(names)
        return put


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
