"""Puts many messages with few calls: which calls, and what became of each message.

Nothing here asks a server: whoever sends the calls gives back the results.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from ..errors import (
    ActionTimeError,
    MessageError,
    PutManyError,
    RateLimitedError,
    ReplicationError,
    ServerError,
)
from ..model.keys import Slot
from ..model.message_key import key_of
from ..model.results import Put, PutTogether
from ..model.topic import Topic, slot_of
from ..model.traits import traits_of
from ..scripts.call import ScriptCall, microseconds, when_of
from .commands import Commands
from .context import Context
from .logs import logging
from .put_rates import pace_key, read_limited_put_many
from .replies import read_put_many
from .requests import REMEMBER, NewMessage, PutRequest

#: Messages, and bytes of their bodies, that one call adds: no call may keep the server busy for
#: long. A longer body goes alone.
MESSAGES_PER_CALL = 500
BYTES_PER_CALL = 1_000_000

#: Messages, and bytes, that leave together.
MESSAGES_TOGETHER = 20_000
BYTES_TOGETHER = 8_000_000

_FIELDS = frozenset(NewMessage._fields)

#: Where a message goes that is put alone, as its call's digest has it.
APART = ("apart",)

#: The last fields of a message without traits.
_NONE = [None, None, None, None]


class _Batch:
    """Messages that one call adds.

    slot, step: number of the slot, and index of the priority step, that they go to
    numbers: their places in the list
    flat: the arguments for the script
    bytes: how long their bodies are together
    traits: by their places in the list, of those that have any
    """

    __slots__ = ("bytes", "flat", "numbers", "slot", "step", "traits")

    def __init__(self, slot: int, step: int) -> None:
        self.slot = slot
        self.step = step
        self.numbers: list[int] = []
        self.flat: list[Any] = []
        self.bytes = 0
        self.traits: dict[int, str] = {}


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
    flat: of each its id, its body, and its time as :func:`.scripts.call.when_of` gives it; and its
        traits, if `width` is 4, as it is where puts are limited
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
    args = (slot.number, expires, f"{width}{turns}{limits}", name, REMEMBER, *flat)
    if declared.logs:
        return context.announcing(topic, *logging(topic, slot, "put_many", keys, args), parse)
    return context.announcing(topic, "put_many", keys, args, parse)


#: Calls without a reply that are kept in mind, at most.
MOST_LOST = 1000


class PutNames:
    """Names of the calls of one center's lists. A call whose reply was lost keeps its name for a
    minute: if the same messages are put again, the server knows what it has added already.

    next: makes a name that no other has: a producer, a dot and a number
    clock: monotonic seconds
    """

    def __init__(
        self, next: Callable[[], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._next = next
        self._clock = clock
        #: what a call has -> its name, and until when it is kept
        self._lost: dict[bytes, tuple[Publish, float]] = {}

    def name(self, make: Callable[[], bytes], place: int | None = None) -> Publish:
        """The name of a call.

        make: makes the digest of what it has; called only if replies were lost
        place: its number among calls that each have a memory of their own
        """
        if self._lost:
            kept = self._lost.pop(make(), None)
            if kept is not None and kept[1] >= self._clock():
                return kept[0]
        producer, _, number = self._next().rpartition(".")
        return (producer if place is None else f"{producer}+{place}"), number

    def __bool__(self) -> bool:
        """Whether any replies were lost."""
        return bool(self._lost)

    def __contains__(self, digest: bytes) -> bool:
        """Whether the reply to such a call was lost."""
        return digest in self._lost

    def lose(self, digest: bytes, name: Publish) -> None:
        """A call with that name may have run or not."""
        while len(self._lost) >= MOST_LOST:
            self._lost.pop(next(iter(self._lost)))
        self._lost[digest] = name, self._clock() + REMEMBER


class _Sent(NamedTuple):
    """A call that is on its way.

    numbers: the places of its messages in the list
    name: what it is remembered by
    digest: makes the digest of what it has
    """

    numbers: list[int]
    name: Publish
    digest: Callable[[], bytes]


class PutMany:
    """A put of many messages: send what :meth:`next_calls` returns and give the results to
    :meth:`take`, until there are no more calls; then :meth:`finish` has what became of each.

    Raises MessageError, ActionTimeError or TraitError if a message cannot be put.
    """

    def __init__(
        self,
        context: Context,
        commands: Commands,
        topic: Topic,
        messages: Iterable[NewMessage | Mapping[str, Any] | tuple[Any, ...]],
        names: PutNames,
    ) -> None:
        self._names = names
        self._context = context
        self._commands = commands
        self._topic = topic
        self._messages = _read(messages)
        self._results: list[Any] = [None] * len(self._messages)
        #: of one that has an id which another one of the list or of the topic has: its place. Put
        #: one by one, for a copy is recorded in a key of its id
        self._apart: list[int] = []
        self._with_basis: NewMessage | None = None
        self._batches: Iterator[_Batch] = iter(self._divided())
        self._ahead: _Batch | None = None
        self._sent: list[_Sent] = []  #: what is on its way
        self._error: Exception | None = None
        self._shortage: Exception | None = None
        self._refused: list[RateLimitedError] = []

    def admitted(self) -> list[tuple[str, str | None]]:
        """An id and a slot basis of each kind of messages, for :meth:`.registry.Registry.admit`."""
        found = [self._messages[:1], [self._with_basis] if self._with_basis else []]
        return [(message.id, message.basis) for some in found for message in some]

    def requests(self) -> list[PutRequest]:
        """The messages, each as what is asked for."""
        return [
            PutRequest(
                *(one.id, one.body, microseconds(one.at), microseconds(one.delay)),
                basis=one.basis,
                priority=one.priority,
                token=one.token,
                traits="" if [*one[7:]] == _NONE else _traits(number, one),
            )
            for number, one in enumerate(self._messages)
        ]

    def without(self, places: Collection[int]) -> list[NewMessage]:
        """The messages but for those at these places."""
        return [one for place, one in enumerate(self._messages) if place not in places]

    def filled(self, places: Collection[int], others: Iterable[Any]) -> list[Any]:
        """What became of all messages: those at these places are kept elsewhere.

        others: what became of the others
        """
        rest = iter(others)
        return [
            Put(one.id, True, None) if place in places else next(rest)
            for place, one in enumerate(self._messages)
        ]

    @property
    def results(self) -> list[Any]:
        """Of each message a Put, the error of who knows that it was not put or does not know
        whether it was, or None if it was not sent."""
        return self._results

    def next_calls(self) -> list[ScriptCall]:
        """The calls that are to be sent next, together."""
        if self._error is not None:
            return []
        calls: list[ScriptCall] = []
        messages = bytes = 0
        while (batch := self._ahead or next(self._batches, None)) is not None:
            self._ahead = batch
            messages += len(batch.numbers)
            bytes += batch.bytes
            if calls and (messages > MESSAGES_TOGETHER or bytes > BYTES_TOGETHER):
                return calls
            self._ahead = None
            calls.append(self._call(batch))
        return calls or self._next_apart()

    def _call(self, batch: _Batch) -> ScriptCall:
        topic = self._topic
        numbers, flat, width = batch.numbers, batch.flat, 3
        sent = self._leaves(numbers, partial(self._digest, (batch.slot, batch.step), numbers))
        if batch.traits or topic.declaration.put_gates:
            traits = (batch.traits.get(number, "") for number in numbers)
            rows = zip(flat[::3], flat[1::3], flat[2::3], traits, strict=True)
            flat, width = [value for row in rows for value in row], 4
        slot = topic.slot(batch.slot)
        return put_many_call(self._context, topic, slot, batch.step, flat, width, sent.name)

    def _leaves(
        self, numbers: list[int], digest: Callable[[], bytes], place: int | None = None
    ) -> _Sent:
        """A call with these messages is on its way."""
        sent = _Sent(numbers, self._names.name(digest, place), digest)
        self._sent.append(sent)
        return sent

    def _digest(self, where: Sequence[object], numbers: Iterable[int]) -> bytes:
        """Tells a call from those with other messages."""
        topic = self._topic
        made = hashlib.sha256(repr((topic.name, topic.declaration.slots, *where)).encode())
        for number in numbers:
            message = self._messages[number]
            made.update(repr((message.id, len(message.body), *message[2:])).encode())
            made.update(message.body)
        return made.digest()

    def _next_apart(self) -> list[ScriptCall]:
        calls: list[ScriptCall] = []
        bytes = 0
        self._apart.sort(reverse=True)
        while self._apart and len(calls) < MESSAGES_PER_CALL:
            number = self._apart[-1]
            message = self._messages[number]
            id, body, at, delay, basis, priority, token, *own = message
            bytes += len(body)
            if calls and bytes > BYTES_TOGETHER:
                break
            at_us, delay_us = microseconds(at), microseconds(delay)
            digest = partial(self._digest, APART, (number,))
            producer, name = self._leaves([number], digest, len(calls)).name
            publish = f"many:{producer}", name
            request = PutRequest(id, body, at_us, delay_us, basis, priority, token, publish=publish)
            if own != _NONE:
                request = request._replace(traits=_traits(number, message))
            calls.append(self._commands.put(self._topic, request))
            self._apart.pop()
        return calls

    def take(self, results: Iterable[Any], shortage: Exception | None = None) -> None:
        """The results of the calls that were sent last, or the errors that took their places.

        shortage: too few replicas have what they added
        """
        self._shortage = self._shortage or shortage
        put, messages = self._results, self._messages
        for sent, result in zip(self._sent, results, strict=True):
            numbers = sent.numbers
            if isinstance(result, PutTogether):
                now = result.now_us
                for number in numbers:
                    put[number] = Put(messages[number].id, True, now)
                for place in result.there:
                    put[numbers[place]] = Put(messages[numbers[place]].id, False, None)
                for place, refused in result.refused.items():
                    self._refuse(numbers[place], refused)
                for place in result.taken:
                    put[numbers[place]] = None
                    self._apart.append(numbers[place])
            elif isinstance(result, RateLimitedError):
                self._refuse(numbers[0], result)
            else:
                for number in numbers:
                    put[number] = result
                if isinstance(result, Exception):
                    self._error = self._error or result
                    self._names.lose(sent.digest(), sent.name)
        self._sent = []

    def _refuse(self, number: int, error: Exception) -> None:
        """A message was not put because of a rate; others may be, of other keys."""
        self._results[number] = error
        self._refused.append(cast(RateLimitedError, error))

    def fail(self, error: Exception) -> None:
        """The calls that were sent last have no results: they may have run or not."""
        self.take([error] * len(self._sent))

    def finish(self) -> list[Put]:
        """What became of each message. Raises PutManyError, RateLimitedError or ReplicationError if
        not all are put for sure, or not on enough replicas."""
        found = self._results
        if self._error is not None:
            raise self._not_all()
        if self._refused:
            raise self._too_many()
        if self._shortage is not None:
            if isinstance(self._shortage, ReplicationError):
                self._shortage.results = found
            raise self._shortage
        return found

    def _not_all(self) -> PutManyError:
        found, error = self._results, cast(Exception, self._error)
        unsent = ServerError(f"it was not sent, because another message was refused: {error}")
        found = [unsent if result is None else result for result in found]
        failed = [at for at, result in enumerate(found) if isinstance(result, Exception)]
        made = PutManyError(
            f"{len(failed)} of {len(found)} messages were not put, or perhaps not; the first is "
            f"number {failed[0]} ({self._messages[failed[0]].id!r}): {error}. The error's results "
            "say which; to put the list again adds none twice that is still there",
            found,
        )
        made.__cause__ = error
        return made

    def _too_many(self) -> RateLimitedError:
        found, refused = self._results, self._refused
        soonest = min(refused, key=lambda error: error.retry_after)
        return RateLimitedError(
            f"{len(refused)} of {len(found)} messages were not put: {soonest}. The error's results "
            "say which; to put the list again adds none twice that is still there",
            soonest.limit,
            soonest.retry_after,
            found,
        )

    def _divided(self) -> list[_Batch]:
        """The messages in batches, each in the order of the list; but for those that share an
        id with an earlier one."""
        topic, apart = self._topic, self._apart
        slots, step_of = topic.declaration.slots, topic.step_index
        made: list[_Batch] = []
        begun: dict[tuple[int, int], _Batch] = {}
        ids: set[str] = set()
        lost = self._names if self._names else None  # mostly none are
        for number, message in enumerate(self._messages):
            id, body, at, delay, basis, priority, _, *own = message
            if basis is not None and basis != id and self._with_basis is None:
                self._with_basis = message
            traits = "" if own == _NONE else _traits(number, message)
            when = _when(number, id, at, delay)
            # One that was put alone is repeated alone.
            if id in ids or (lost is not None and self._digest(APART, (number,)) in lost):
                apart.append(number)
                continue
            ids.add(id)
            place = slot_of(basis or id, slots), step_of(priority) if priority else 0
            batch = begun.get(place)
            if batch is None or (
                len(batch.numbers) >= MESSAGES_PER_CALL or batch.bytes + len(body) > BYTES_PER_CALL
            ):
                batch = begun[place] = _Batch(*place)
                made.append(batch)
            batch.numbers.append(number)
            batch.flat += (id, body, when)
            batch.bytes += len(body)
            if traits:
                batch.traits[number] = traits
        return made


def _when(number: int, id: str, at: float | None, delay: float | None) -> Any:
    """The time of a message as a script reads it. Raises ActionTimeError, naming the message."""
    if at is None and delay is None:
        return ""
    try:
        return when_of(microseconds(at), microseconds(delay))
    except ActionTimeError as exc:
        raise ActionTimeError(f"message {number} ({id!r}): {exc}; nothing was put") from None


def _traits(number: int, message: NewMessage) -> str:
    """What holds for this message only. Raises TraitError, naming the message."""
    return traits_of(
        f"message {number} ({message.id!r})",
        visibility=message.visibility,
        max_lease=message.max_lease,
        expiration=message.expiration,
        key=str(message.key or ""),
        basis=message.basis,
    )


def _read(messages: Iterable[NewMessage | Mapping[str, Any] | tuple[Any, ...]]) -> list[NewMessage]:
    """The messages, checked. Raises MessageError, naming the first that cannot be put."""
    read: list[NewMessage] = []
    for number, given in enumerate(messages):
        message = given if type(given) is NewMessage else _made(number, given)
        id, body, at, delay, basis, priority, token, *_ = message
        # What is right is recognised at once: this runs for each message.
        if not (
            isinstance(id, str)
            and isinstance(body, bytes)
            and (at is None or delay is None)
            and isinstance(priority, int)
            and (at is None or _is_number(at))
            and (delay is None or _is_number(delay))
            and (basis is None or isinstance(basis, str))
            and (token is None or isinstance(token, str))
        ):
            raise MessageError(f"message {number}{_named(id)}: {_wrong(message)}; nothing was put")
        if message.key is not None:
            key = key_of(f"message {number} ({id!r})", message.key) or None
            message = message._replace(key=key, basis=basis or key)
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
    raise MessageError(
        f"message {number} is {what}; give a NewMessage, a mapping or a tuple with id and body, "
        f"and what it needs of {fields}; nothing was put"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _named(id: object) -> str:
    return f" ({id!r})" if isinstance(id, str) else ""


def _wrong(message: NewMessage) -> str:
    """What is wrong with a message."""
    id, body, at, delay, basis, priority, token, *_ = message
    if not isinstance(id, str):
        return f"its id must be a str, not {id!r}"
    if not isinstance(body, bytes):
        return f"its body must be bytes, not a {type(body).__name__}; encode it"
    if at is not None and delay is not None:
        return "it has at and delay; give one of them"
    for name, value in (("at", at), ("delay", delay)):
        if value is not None and not _is_number(value):
            return f"{name} must be a number of seconds, not {value!r}"
    if not isinstance(priority, int):
        return f"its priority must be an int, not {priority!r}"
    if not isinstance(basis, (str, type(None))):
        return f"its basis must be a str, not {basis!r}"
    return f"its token must be a str, not {token!r}"
