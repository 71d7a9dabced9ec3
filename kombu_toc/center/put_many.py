"""Puts many messages with few calls: which calls, and what became of each message.

Nothing here asks a server: whoever sends the calls gives back the results.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, cast

from .. import errors
from ..model.delivery import traits_of
from ..model.keys import Slot
from ..model.message import key_of
from ..model.results import ADDED, Put, PutTogether
from ..model.topic import Topic, slot_of
from ..scripts.call import Names, ScriptCall, microseconds, publish_of, when_of
from .calls import (
    MOST_BYTES,
    REMEMBER,
    Commands,
    Context,
    NewMessage,
    PutRequest,
    named_by,
    pace_key,
    read_limited_put_many,
    read_put_many,
    too_large,
)

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


class PutMany:
    """A put of many messages: send what :meth:`next_calls` returns and give the results to
    :meth:`take`, until there are no more calls; then :meth:`finish` has what became of each.

    Raises MessageError, errors.ActionTimeError or TraitError if a message cannot be put.
    """

    def __init__(
        self,
        context: Context,
        commands: Commands,
        topic: Topic,
        messages: Iterable[NewMessage | Mapping[str, Any] | tuple[Any, ...]],
        names: Names,
        token: str | None = None,
        named: Callable[[PutRequest], PutRequest] | None = None,
    ) -> None:
        self._names = names
        self._token = token
        self._context = context
        self._commands = commands
        self._topic = topic
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
        if named is not None:
            self.requests = [named(one) for one in map(self._request, range(len(self._said)))]
            self._said = [
                (when, request.traits)
                for (when, _), request in zip(self._said, self.requests, strict=True)
            ]
        #: the places of those whose id another one of the list or of the topic has, and of those
        #: that have tokens. Put one by one: a copy is recorded in a key of its id
        self._apart: list[int] = []
        self._left_out: Collection[int] = ()
        self._batches: Iterator[_Batch] | None = None
        self._ahead: _Batch | None = None
        self._sent: list[list[int]] = []  #: the messages of each call that is on its way
        self._error: Exception | None = None
        self._shortage: Exception | None = None
        self._refused: list[errors.RateLimitedError] = []

    def admitted(self) -> list[tuple[str, str | None]]:
        """An id and a slot basis of each kind of messages, for :meth:`.registry.Registry.admit`."""
        others = (one for one in self._messages if one.basis not in (None, one.id))
        found = [*self._messages[:1], *itertools.islice(others, 1)]
        return [(message.id, message.basis) for message in found]

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

    def leave_out(self, places: Collection[int]) -> None:
        """The messages at these places are kept elsewhere."""
        self._left_out = places
        for place in places:
            self.results[place] = Put(self._messages[place].id, ADDED)

    @property
    def near_results(self) -> list[Any]:
        """As :attr:`results`, of those that are not left out."""
        return [one for place, one in enumerate(self.results) if place not in self._left_out]

    def next_calls(self) -> list[ScriptCall]:
        """The calls that are to be sent next, together."""
        if self._error is not None:
            return []
        if self._batches is None:
            self._batches = iter(self._divided())
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
        self._sent.append(numbers)
        if batch.traits or topic.declaration.put_gates:
            traits = (batch.traits.get(number, "") for number in numbers)
            rows = zip(flat[::3], flat[1::3], flat[2::3], traits, strict=True)
            flat, width = [value for row in rows for value in row], 4
        slot = topic.slot(batch.slot)
        return put_many_call(
            self._context, topic, slot, batch.step, flat, width, publish_of(self._names.next())
        )

    def _next_apart(self) -> list[ScriptCall]:
        calls: list[ScriptCall] = []
        bytes = 0
        self._apart.sort(reverse=True)
        while self._apart and len(calls) < MESSAGES_PER_CALL:
            number = self._apart[-1]
            bytes += len(self._messages[number].body)
            if calls and bytes > BYTES_TOGETHER:
                break
            producer, name = publish_of(self._names.next())
            request = self._request(number, (f"{producer}+{len(calls)}", name))
            if self.requests:
                own = self.requests[number]
                request = request._replace(token=own.token, traits=own.traits)
            self._sent.append([number])
            calls.append(self._commands.put(self._topic, request))
            self._apart.pop()
        return calls

    def take(self, results: Iterable[Any], shortage: Exception | None = None) -> None:
        """The results of the calls that were sent last, or the errors that took their places.

        shortage: too few replicas have what they added
        """
        self._shortage = self._shortage or shortage
        put, messages = self.results, self._messages
        for numbers, result in zip(self._sent, results, strict=True):
            if isinstance(result, PutTogether):
                now = result.now_us
                for number in numbers:
                    put[number] = Put(messages[number].id, ADDED, now)
                for place in result.there:
                    put[numbers[place]] = Put(messages[numbers[place]].id, ADDED)
                for place, refused in result.refused.items():
                    self._refuse(numbers[place], refused)
                for place in result.taken:
                    put[numbers[place]] = None
                    self._apart.append(numbers[place])
            elif isinstance(result, errors.RateLimitedError):
                self._refuse(numbers[0], result)
            else:
                for number in numbers:
                    put[number] = result
                    if isinstance(result, Put) and self._tokens[number] is None:
                        put[number] = result.by_this_put
                if isinstance(result, Exception):
                    self._error = self._error or result
        self._sent = []

    def _refuse(self, number: int, error: Exception) -> None:
        """A message was not put because of a rate; others may be, of other keys."""
        self.results[number] = error
        self._refused.append(cast(errors.RateLimitedError, error))

    def fail(self, error: Exception) -> None:
        """The calls that were sent last have no results: they may have run or not."""
        self.take([error] * len(self._sent))

    def finish(self) -> list[Put]:
        """What became of each message. Raises PutManyError, RateLimitedError or ReplicationError if
        not all are put for sure, or not on enough replicas."""
        found = self.results
        if self._error is not None:
            raise self._not_all()
        if self._refused:
            raise self._too_many()
        if self._shortage is not None:
            if isinstance(self._shortage, errors.ReplicationError):
                self._shortage.results = found
            raise self._shortage
        return found

    def _not_all(self) -> errors.PutManyError:
        found, error = self.results, cast(Exception, self._error)
        unsent = errors.ServerError(
            f"it was not sent, because another message was refused: {error}"
        )
        found = [unsent if result is None else result for result in found]
        failed = [at for at, result in enumerate(found) if isinstance(result, Exception)]
        made = errors.PutManyError(
            f"{len(failed)} of {len(found)} messages were not put, or perhaps not; the first is "
            f"number {failed[0]} ({self._messages[failed[0]].id!r}): {error}. The error's results "
            "say which; a list with a token may be put again, and adds none twice",
            found,
        )
        made.__cause__ = error
        return made

    def _too_many(self) -> errors.RateLimitedError:
        found, refused = self.results, self._refused
        soonest = min(refused, key=lambda error: error.retry_after)
        return errors.RateLimitedError(
            f"{len(refused)} of {len(found)} messages were not put: {soonest}. The error's results "
            "say which; a list with a token may be put again, and adds none twice",
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
        for number, (id, body, _, _, basis, priority, token, *_) in enumerate(self._messages):
            if number in self._left_out:
                continue
            if id in ids or token is not None or self._token is not None:
                apart.append(number)
                continue
            ids.add(id)
            when, traits = self._said[number]
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


def _read(messages: Iterable[NewMessage | Mapping[str, Any] | tuple[Any, ...]]) -> list[NewMessage]:
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
