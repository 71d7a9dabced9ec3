"""Publishing: from a message of Kombu's to the call that puts or broadcasts it."""

from __future__ import annotations

import json
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from kombu.exceptions import KombuError
from redis.exceptions import ResponseError

from ..center.calls import ADD, KEEP, REMEMBER, SENT, PutRequest
from ..center.center import TimeoutCenter
from ..center.clock import SendersClock
from ..center.exchanges import Bindings, broadcast_call, keepers
from ..center.put import Conflict, UniquePut, put_unique, unique_call
from ..center.upkeep import home_of
from ..client.connection import pipelined
from ..client.options import Settings
from ..consumer.connections import BROKEN
from ..errors import AlreadyThereError, KeptError
from ..model import message as envelope
from ..model.delivery import token_with, traits_of
from ..model.message import KEEP_EARLIER, UNIQUE, Claim, Unique, claim_of, key_of
from ..model.results import KEPT, Put
from ..model.timetext import action_time
from ..model.topic import Topic
from ..scripts.call import Countdown, Names, ScriptCall, parts_of

# -- publishes that leave together, for Producer.batch() of Kombu 5.7

try:
    from kombu.exceptions import BatchPublishError
except ImportError:  # Kombu before 5.7 publishes no batches

    class BatchPublishError(KombuError):  # type: ignore[no-redef]
        """A batch failed; what of it was delivered is uncertain."""


#: Messages of a batch for which it is forgotten, when it is complete, that they were put; of more,
#: this goes by itself.
MAX_NOTED = 50_000

#: Keys that one command deletes.
PAGE = 100


class PublishBatch:
    """Publishes that leave together, for ``Producer.batch()`` of Kombu 5.7.

    A message that is sent twice because a reply was lost stays one message, so the messages of a
    batch that has failed may be published again in another one, whatever has become of them.
    """

    #: makes a function repeat what fails because of a connection
    run_again: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None

    def __init__(self, channel: Any, max_size: int) -> None:
        self.channel = channel
        self.max_size = max_size
        #: the message that was published last
        self.last: dict[str, Any] | None = None
        #: each with the key in which it is remembered that a message of the batch was put
        self._calls: list[tuple[ScriptCall, str]] = []
        self._over = ""
        #: of those that are recorded, the record of each
        self._records: list[Any] = []
        #: what takes back those that are in the task library only, and have not left yet
        self._withdraws: list[Callable[[], None]] = []
        #: the keys of those that were put
        self._noted: deque[str] = deque(maxlen=MAX_NOTED)

    @property
    def is_open(self) -> bool:
        return not self._over

    def publish(self, message: dict[str, Any], **kwargs: Any) -> Any:
        """Route a prepared message and keep it until the batch is full or flushed."""
        self._check()
        result = self.channel.basic_publish(message, _publish_batch=self, **kwargs)
        self.last = message
        if len(self._calls) >= self.max_size:
            self.flush()
        return result

    def publish_made(self, make: Callable[[str], bytes], queue: str, id: str, *said: Any) -> None:
        """As :meth:`.AsyncChannel.publish_made`, in the batch."""
        self._check()
        publisher = self.channel.publisher
        name = publisher.next_name()
        token = token_of(name)
        call = publisher.putting_plain(queue, id, name, token, make(token), *said, alone=False)
        self.add(call, call.keys[SENT])
        if len(self._calls) >= self.max_size:
            self.flush()

    def add(self, call: ScriptCall, note: str) -> None:
        """Take what the channel has made of a message.

        note: the key in which it is remembered that it was put
        """
        self._calls.append((call, note))

    def record(self, record: Any) -> None:
        """Keep the record of a message until the messages leave: the publisher writes it before."""
        self._records.append(record)

    def add_far(self, withdraw: Callable[[], None]) -> None:
        """A message of the batch is in the task library only.

        withdraw: takes it back if the batch is aborted before it leaves
        """
        self._withdraws.append(withdraw)

    def flush(self) -> None:
        """Send what has gathered. Raises Kombu's BatchPublishError if any of it fails."""
        self._check()
        calls, self._calls = self._calls, []
        records, self._records = self._records, []
        self._withdraws = []
        try:
            if records:
                self.channel.publisher.write_records(records)
            run = partial(self.channel.center.runner.run_puts, [call for call, _ in calls])
            (run if self.run_again is None else self.run_again(run))()
        except Exception as exc:
            self._over = "has failed before"
            raise BatchPublishError("publish batch failed; delivery is uncertain") from exc
        self._noted.extend(note for _, note in calls)

    def discard(self) -> None:
        """Forget what was not sent yet."""
        self._calls, self._records = [], []
        withdraws, self._withdraws = self._withdraws, []
        for withdraw in withdraws:
            withdraw()
        self._over = "is aborted"

    def close(self) -> None:
        """The batch is complete, unless it has failed: nobody will repeat it."""
        if self._over:
            return
        self._over = "is closed"
        by_slot: dict[str, list[str]] = defaultdict(list)
        for key in self._noted:
            by_slot[key.rpartition(":sent:")[0]].append(key)
        parts = (part for keys in by_slot.values() for part in parts_of(keys, PAGE))
        with suppress(*BROKEN, ResponseError):  # they go by themselves within a minute
            pipelined(self.channel.center.client, [("UNLINK", *part) for part in parts])

    def _check(self) -> None:
        if self._over:
            raise RuntimeError(f"the publish batch {self._over}")


# -- unique keys of published messages

#: The headers of a message with a unique key, or properties. Celery sends headers along with a
#: retry, and no properties.
UNTIL, CONFLICT, AT_MOST = "x-unique-until", "x-unique-conflict", "x-unique-at-most"


@dataclass(slots=True)
class UniqueAnswer:
    """What became of a message of this id."""

    id: str  #: that it has now: of the one whose place it has taken


_awaited: ContextVar[UniqueAnswer | None] = ContextVar("awaited", default=None)


@contextmanager
def unique_answer(id: str) -> Iterator[UniqueAnswer]:
    """Within the block, the sender of the message of this id learns what became of it: its id if it
    takes the place of another one, and KeptError if it is not sent because there is another one,
    which nobody is told otherwise."""
    answer = UniqueAnswer(id)
    token = _awaited.set(answer)
    try:
        yield answer
    finally:
        _awaited.reset(token)


def is_unique(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> bool:
    """Whether a message has a unique key."""
    return UNIQUE in headers or UNIQUE in properties


def take_claim(message: dict[str, Any], id: str, basis: str | None) -> Claim:
    """The claim of a message with a unique key; what says so is written into its headers.

    basis: what picks its slot if it is not the unique key

    Raises TraitError for what makes no sense.
    """
    headers, properties = message.get("headers") or {}, message["properties"]
    said = properties if UNIQUE in properties else headers
    found = {name: said.get(name) for name in (UNIQUE, UNTIL, CONFLICT, AT_MOST)}
    if said is properties:
        others = {n: v for n, v in headers.items() if n not in found}
        message["headers"] = others | {n: v for n, v in found.items() if v is not None}
        message["properties"] = {n: v for n, v in properties.items() if n not in found}
    unique = Unique(found[UNIQUE], found[UNTIL], found[CONFLICT] or KEEP_EARLIER, found[AT_MOST])
    return claim_of(f"message {id}", unique, basis, "x-unique-")


def under(message: dict[str, Any], id: str) -> dict[str, Any]:
    """The message with another id."""
    headers, properties = dict(message["headers"]), dict(message["properties"])
    before = headers.get("id")
    headers["id"] = id
    if headers.get("root_id") == before:
        headers["root_id"] = id
    if properties.get("correlation_id") == before:
        properties["correlation_id"] = id
    return {**message, "headers": headers, "properties": properties}


# -- publishing

#: Seconds that a publish takes before it fails for a node of a Cluster that cannot be reached: as
#: Celery pauses before it connects again.
ATTEMPT_PAUSE = 0.2

#: The property, or header, that names a message's key as in SQS.
GROUP = "MessageGroupId"


class PublishName(str):
    """The producer's name, a dot, and a number: no other publish has the same."""

    __slots__ = ("slots", "takes", "trace")

    #: queue -> slot count by which it was sent there first: where a repeated publish is recognised
    slots: dict[str, int]

    #: queue -> the message there whose place it was to take: if the publish is repeated, perhaps it
    #: has done so
    takes: dict[str, Conflict | None]

    #: of a traced channel: queue -> the headers that went along, which a repeated publish has too
    trace: dict[str, dict[str, str]]


class Prepared(NamedTuple):
    """A message of Kombu's as what is asked of the center.

    claim: that of its unique key, if it has one
    """

    topic: Topic
    request: PutRequest
    claim: Claim | None


class Publisher:
    """Publishes for a channel. Threads may share it."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._center: TimeoutCenter = channel.center
        self._settings: Settings = channel.settings
        #: gives a queue's topic
        self._topic_of: Callable[[str], Topic] = channel.queues.topic
        #: gives a message's priority, as Kombu does
        self._priority_of: Callable[[dict[str, Any]], int] = channel._get_message_priority
        #: gives a name that no other publish has
        self.next_name = Names().next
        self._clock = SendersClock()

    def forget_clock(self) -> None:
        """Another server answers from now on."""
        self._clock.forget()

    def address(self, message: dict[str, Any], exchange: str, routing_key: str) -> None:
        """Note in a prepared message where it goes, and name the publish."""
        properties = message["properties"]
        # Kombu repeats a publish with the same properties: it stays one message. (Any other tag
        # is of a delivered message, ours or another transport's, whose properties somebody sends
        # along, and perhaps more than once.)
        if not isinstance(properties.get("delivery_tag"), PublishName):
            name = properties["delivery_tag"] = PublishName(self.next_name())
            name.slots, name.takes = {}, {}
        properties["delivery_info"].update(exchange=exchange, routing_key=routing_key)

    def put(self, queue: str, message: dict[str, Any], batch: PublishBatch | None = None) -> None:
        """Put an addressed message into a queue.

        batch: takes the call instead of the server
        """
        self.put_into(self._topic_of(queue), message, batch)

    def put_into(self, topic: Topic, message: dict[str, Any], batch: PublishBatch | None) -> None:
        """As :meth:`put`, where the queue's topic was just asked for."""
        name = message["properties"]["delivery_tag"]
        declared = topic.declaration
        slots = name.slots.setdefault(topic.name, declared.slots)
        if slots != declared.slots:  # resharded between two attempts
            topic = replace(topic, declaration=replace(declared, slots=slots))
        # What goes away by itself is no harm twice: a reply.
        publish = None if declared.expires else publish_of(name, batch)
        prepared = self.prepare(topic, message, publish)
        if prepared.claim is not None:  # not in a batch: its sender is told
            self._put_unique(topic, prepared, message)
            return
        call = self.call_of(prepared)
        if batch is not None:
            batch.add(call, call.keys[SENT])
            return
        self.run(topic.name, call, wait=not declared.expires)

    def _put_unique(self, topic: Topic, prepared: Prepared, message: dict[str, Any]) -> None:
        """Put an addressed message with a unique key. Raises UniqueError; and KeptError, if who
        sends it wants to know."""
        id = (message.get("headers") or {}).get("id")
        takes_in = message["properties"]["delivery_tag"].takes

        def make(takes: Conflict | None) -> UniquePut:
            takes_in[topic.name] = takes
            if takes is None or id is None:
                return self.unique_put(prepared, takes)
            made = under(message, takes.base)
            return self.unique_put(self.prepare(topic, made, prepared.request.publish), takes)

        free = self._center.leases.free
        found, taken = put_unique(
            topic.name, make, partial(self.run_unique, topic), free, takes_in.get(topic.name)
        )
        answer = _awaited.get()
        if answer is None or answer.id != id:
            return
        if isinstance(found, Conflict):
            raise KeptError(found.base)
        if taken is not None:
            answer.id = taken.base

    def run(self, queue: str, call: ScriptCall, *, wait: bool = True) -> Any:
        """Run a call that puts a message into a queue. Returns its result.

        wait: for the replicas, if that is set
        """
        registry = self._center.registry
        reread = registry.rereading(queue)
        calls = [call] if reread is None else [call, reread]
        began = time.monotonic()
        try:
            put, *read = self._center.runner.run_puts(calls, wait=wait)
        except BaseException as exc:
            self._clock.forget()
            if self._center.clustered and isinstance(exc, BROKEN):
                self._channel.transport.miss(call.keys[0])
                # Kombu pauses between attempts only if it cannot connect; but to the others it can.
                self._center.client.sleep(ATTEMPT_PAUSE)
            raise
        if put.now_us is not None and not self._center.clustered:  # whose clocks may differ
            self._clock.sample(put.now_us, began)
        if read == [None]:
            registry.mend(queue)
        return put

    def broadcast(
        self,
        exchange: str,
        message: dict[str, Any],
        routing_key: str,
        batch: PublishBatch | None = None,
    ) -> None:
        """Send an addressed message to all queues that are bound to a fanout exchange."""
        call = broadcast_call(
            self._center,
            exchange,
            routing_key,
            envelope.pack(message, deflate=False),
            self._settings.toc_fanout_length,
            publish_of(message["properties"]["delivery_tag"], batch),
        )
        if batch is not None:
            batch.add(call, call.keys[2])
            bound = Bindings(self._center).kept(exchange)
        else:
            # Celery ends a worker whose greeting to the others fails otherwise than by its
            # connection; and a broadcast is kept for a while at best.
            [bound] = self._center.runner.run_puts([call], wait=False)
        for queue in keepers(bound, routing_key):
            self.put(queue, message, batch)

    def prepare(
        self,
        topic: Topic,
        message: dict[str, Any],
        publish: tuple[str, str] | None = None,
        remember: int = REMEMBER,
        *,
        counted: bool = True,
        admit: bool = True,
    ) -> Prepared:
        """What is to be asked for to put a message.

        publish: (producer, name of the publish), by which a repeated one is recognised
        remember: seconds for which it is
        counted: whether it counts among what may be put into its topic; if not, it is added also
            if another one has its unique key
        admit: see to it that the message is found by its id, which may take a call

        Raises ActionTimeError if its time cannot be read or lies beyond what can be kept, and
        TraitError if a trait makes no sense.
        """
        headers = message.get("headers") or {}
        properties = message["properties"]
        tag = properties["delivery_tag"]
        id = named = headers.get("id")
        if not isinstance(id, str) or not id:
            id, named = tag, None
        at_us: int | Countdown | None
        at_us, delay_us = action_time(headers, id)
        if at_us is not None and properties.get(envelope.COUNTDOWN):
            at_us = _countdown_to(at_us, self._clock, time.time_ns() // 1000, time.monotonic())
        waits = at_us is not None or delay_us is not None
        basis = headers.get("x-slot-basis")
        basis = None if basis is None else str(basis)
        key = headers.get("x-key")
        if key is None:
            key = properties.get(GROUP, headers.get(GROUP))
            if key is not None:  # Celery sends headers along with a retry, and no properties
                message["headers"] = headers = {**headers, "x-key": key}
            elif topic.declaration.key_header is not None:
                key = headers.get(topic.declaration.key_header)
        if key is not None:
            key = key_of(f"message {id}", key)
            basis = basis or key or None
        claim = None
        if envelope.UNIQUE in headers or envelope.UNIQUE in properties:
            claim = take_claim(message, id, basis)
            headers, properties = message["headers"], message["properties"]
            basis = basis or claim.shown
            topic = home_of(self._center.runner, self._center.context, topic, claim, basis)
        if admit:
            self._center.registry.admit(topic, named, basis, unique=claim is not None)
        properties["k"] = token = token_with(token_of(tag), headers)
        packed = envelope.pack(message, deflate=waits and self._settings.toc_deflate, id=id)
        ensure = bool(properties.get(envelope.ENSURE))
        request = PutRequest(
            id,
            packed,
            at_us,
            delay_us,
            basis,
            self._priority_of(message),
            token,
            KEEP if ensure else ADD,
            publish,
            remember,
            # A retry is sent before its task ends, or after it was acknowledged: to refuse it, as a
            # server does that is full, would be to lose it.
            replaces=bool(headers.get("retries")),
            traits=message_traits(headers, properties, id, key or ""),
            counted=None if counted else False,
            # As Task.replace sends it: under the id of the task.
            goes_on=bool(headers.get("replaced_task_nesting")),
            has_name=True,
        )
        return Prepared(topic, request, claim)

    def call_of(self, prepared: Prepared) -> ScriptCall:
        """The call that puts a message, and returns a Put; of one with a unique key, perhaps a
        Conflict."""
        topic, request, claim = prepared
        if claim is not None:
            return self.unique_put(prepared).call
        call = self._center.commands.put(topic, request)
        return only_if_added(call) if request.if_exists == KEEP else call

    def unique_put(self, prepared: Prepared, takes: Conflict | None = None) -> UniquePut:
        """The put of a message with a unique key; takes: the message whose place it takes."""
        topic, request, claim = prepared
        assert claim is not None
        # A retry has the claim of the task, and is sent in any case.
        made = unique_call(
            self._center.commands,
            topic,
            request,
            claim,
            takes,
            goes_on=request.replaces or request.goes_on,
            adds=request.replaces or request.counted is False,
        )
        if request.if_exists == KEEP:
            made = made._replace(call=only_if_added(made.call))
        return made

    def run_unique(self, topic: Topic, put: UniquePut) -> Any:
        """Run the put of a message with a unique key. Returns its result."""
        return self.run(topic.name, put.call, wait=not topic.declaration.expires)

    def putting_plain(
        self,
        queue: str,
        id: str,
        name: str,
        token: str,
        plain: bytes,
        priority: int,
        eta: str,
        counts: bool,
        key: str = "",
        *,
        alone: bool = True,
    ) -> ScriptCall:
        """As :meth:`putting`, for a message that somebody else has made, of a task that is sent for
        the first time.

        id: of the task
        name, token: by :meth:`next_name`, and what :func:`token_of` makes of it
        plain: what :func:`kombu_toc.model.message.pack_plain` would make of the message
        eta: its header, or nothing
        counts: whether that is a countdown
        key: its header `x-key`, or nothing
        alone: it is in no batch
        """
        topic = self._topic_of(queue)
        if not key and topic.declaration.key_header is not None:
            headers = json.loads(plain.partition(b"\n")[0])["h"]
            key = key_of(f"message {id}", headers.get(topic.declaration.key_header))
        at_us: int | Countdown | None = None
        packed = plain
        if eta:
            at_us, _ = action_time({"eta": eta}, id)
            if counts and at_us is not None:
                at_us = _countdown_to(at_us, self._clock, time.time_ns() // 1000, time.monotonic())
            if at_us is not None and self._settings.toc_deflate:
                packed = envelope.compress(plain, id)
        self._center.registry.admit(topic, id, key or None)
        producer = name.rpartition(".")[0] if alone else name
        publish = None if topic.declaration.expires else (producer, name)
        request = PutRequest(
            id, packed, at_us, priority=priority, token=token, publish=publish, has_name=True
        )
        if key:
            request = request._replace(basis=key, traits=traits_of("", key=key))
        return self._center.commands.put(topic, request)


def token_of(name: str) -> str:
    """The token of a message, by the name of its publish: two messages of one id differ in it."""
    return f"{zlib.crc32(name.encode()):08x}"


def _countdown_to(at_us: int, clock: SendersClock, wall_us: int, now: float) -> Countdown | None:
    """What is left of a countdown now: less than at first if Kombu repeats the publish.

    at_us: when it ends by this machine's clock, as `wall_us`; now: monotonic seconds, read after
        that: if the process stands still in between, the message is late and not early
    """
    left_us = at_us - wall_us
    if left_us <= 0:
        return None
    now_us = clock.at(now)
    # If nothing was heard of the server's clock, it begins when it gets there: a bit later.
    return Countdown(None if now_us is None else now_us + left_us, now + left_us / 1_000_000)


def message_traits(
    headers: Mapping[str, Any], properties: Mapping[str, Any], id: str, key: str = ""
) -> str:
    """What holds for this message and not for its queue; `key` as :func:`key_of` gives it."""
    visibility, max_lease = headers.get("x-visibility"), headers.get("x-max-lease")
    expiration = properties.get("expiration")
    # With a task's `expires`, Celery also sets the property. Such a task goes to a worker however
    # late it is, which marks its result.
    if expiration is not None and headers.get("expires") is not None:
        expiration = None
    if visibility is None and max_lease is None and expiration is None:
        return traits_of("", key=key) if key else ""
    named = {"x-visibility": visibility, "x-max-lease": max_lease, "expiration_ms": expiration}
    return traits_of(f"message {id}", key=key, **named)


def publish_of(name: str, batch: PublishBatch | None = None) -> tuple[str, str]:
    """(producer, name of the publish): of a producer, its latest publish is remembered. In a batch
    each message is as one of a producer of its own, for all of them may be repeated."""
    return name if batch is not None else name.rpartition(".")[0], name


def only_if_added(call: ScriptCall) -> ScriptCall:
    """The call raises AlreadyThereError if a message of this id is there already."""

    def added(raw: Any) -> Any:
        put = call.parse(raw)
        if isinstance(put, Put) and put.outcome == KEPT:
            raise AlreadyThereError(f"there is a message {put.id!r} already")
        return put

    return call._replace(parse=added)
