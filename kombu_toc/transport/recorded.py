"""Channels of a connection with a task library: each message has a row before it is put.

While Redis is away, what is sent is in the library, and follows. So such a connection can be made
without Redis by whoever only publishes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import time_ns
from typing import Any

from ..center.calls import ADD, SENT
from ..center.put import UniquePut, put_recorded
from ..center.runner import BROKEN
from ..consumer.fetcher import Guarding
from ..errors import AlreadyThereError, NotPermittedError, ReplicationError
from ..library import outbox
from ..library.center import OpenLibrary
from ..library.horizon import is_far
from ..library.recorder import FLUSH_AT
from ..library.records import ATTRIBUTES, BIZ_TYPE, Event, Row, row_of, stem_of
from ..library.statuses import DEAD, DONE, FAR, NAMES, NOT_PUT, PENDING, TAKEN
from ..model.delivery import BIZ_ID, name_in
from ..model.library import BEHIND, OFF, OUTBOX
from ..model.message import KEEP_EARLIER
from ..model.results import Delivery
from ..model.topic import Declaration, Topic
from .channel import Channel
from .publisher import PublishBatch, Publisher, is_unique, publish_of
from .receiving import Message, QoS


class RecordedPublisher(Publisher):
    """Writes the row of a message, and then puts it."""

    def __init__(self, channel: Any) -> None:
        super().__init__(channel)
        #: where what this process sends and consumes is recorded
        self.library: OpenLibrary = channel.center.recorder

    def put(self, queue: str, message: dict[str, Any], batch: PublishBatch | None = None) -> None:
        recorder = self.library.recorder
        is_away = recorder.away_until and recorder.is_away
        topic = None if is_away else self._topic(queue)
        connection = outbox.current()
        if topic is not None and connection is None and not topic.declaration.rows_first:
            self.put_into(topic, message, batch)
            return
        headers = message.get("headers") or {}
        unique = is_unique(headers, message["properties"])
        if unique and (connection is None or topic is None):
            if connection is None and topic is not None and not headers.get("retries"):
                self._check_outbox(topic)
            # Which of two is kept is known in Redis only.
            outbox.refuse(queue, "a message with a unique key, while Redis is away,")
            super().put(queue, message, batch)
            return
        away = topic is None
        topic = topic or self._center.registry.known(queue)
        if topic is None:
            # Nobody can be asked about it. One of replies is known by its binding, which was read
            # just before: put later, they would stay for ever.
            declaration = Declaration(expires=self._channel.queues.lifetime(queue))
            topic = Topic(queue, declaration, self._settings.prefix)
        declared, mode = topic.declaration, topic.declaration.library
        behind = mode == BEHIND and connection is None
        if declared.expires:
            outbox.refuse(queue, "a message to a queue that goes away by itself")
        elif mode == OFF:
            outbox.refuse(queue, f"a message to a queue that is declared with library={OFF!r}")
        if declared.expires or mode == OFF or (behind and declared.horizon is None):
            super().put(queue, message, batch)
            return
        if connection is None and not headers.get("retries"):
            self._check_outbox(topic)
        # What is wrong with a message is found before its row is written; and nothing may be asked
        # of Redis that is away.
        name = None if away else publish_of(message["properties"]["delivery_tag"], batch)
        prepared = self.prepare(topic, message, name, admit=not away)
        request = self.unique_put(prepared).request if unique else prepared.request
        if unique and message["headers"].get("x-unique-conflict", KEEP_EARLIER) != KEEP_EARLIER:
            outbox.refuse(queue, "a message with a unique key and another conflict than 'keep'")
        server_us = None if away else self.library.server_time.of(request)
        row = row_of(queue, request, headers, server_us=server_us)
        far = is_far(declared, row.action_us) and request.if_exists == ADD
        if connection is not None:
            row = row._replace(place=FAR if far else NOT_PUT)
            recorder.write_with(connection, row, None if away else topic)
            return
        if far and recorder.write_far([row._replace(place=FAR)], topic):
            if batch is not None:
                batch.add_far(lambda: recorder.withdraw(row))
            return
        if behind:
            super().put(queue, message, batch)
            return
        if away:
            recorder.write([row._replace(place=NOT_PUT)])
            recorder.not_put([row.key], noted=True)
            return
        call = self.call_of(prepared)
        if batch is not None:
            batch.record((topic, row))
            batch.add(call, call.keys[SENT])
            return
        recorder.write([row], topic)
        try:
            self.run(queue, call)
        except ReplicationError:
            raise  # it is put, and on too few replicas
        except Exception as exc:
            if not isinstance(exc, BROKEN) or isinstance(
                exc, (NotPermittedError, AlreadyThereError)
            ):
                recorder.withdraw(row)
                raise
            recorder.not_put([row.key], noted=False)

    @staticmethod
    def _check_outbox(topic: Topic) -> None:
        """Raises LibraryError for what is sent without an outbox to a queue that needs one."""
        if topic.declaration.library == OUTBOX:
            raise outbox.needed(topic.name)

    def write_records(self, records: list[tuple[Topic, Row]]) -> None:
        """Write the rows of a batch that is about to be put."""
        by_topic: dict[str, tuple[Topic, list[Row]]] = {}
        for topic, row in records:
            by_topic.setdefault(topic.name, (topic, []))[1].append(row)
        for topic, rows in by_topic.values():
            self.library.recorder.write(rows, topic)

    def _topic(self, queue: str) -> Topic | None:
        """The topic of a queue; None if Redis does not answer."""
        try:
            return self._topic_of(queue)
        except NotPermittedError:
            raise
        except BROKEN:
            return None

    def run_unique(self, topic: Topic, put: UniquePut) -> Any:
        run = partial(super().run_unique, topic, put)
        takes = put.takes is not None
        return put_recorded(self.library, topic, put.request, run, takes=takes)


_DEAD = NAMES[DEAD]


class RecordedQoS(QoS):
    """Tells the library what becomes of each message."""

    def __init__(self, channel: RecordedChannel, prefetch_count: int = 0) -> None:
        super().__init__(channel, prefetch_count)
        self._recorder = channel.recorder
        self._notes = self._recorder.gathering.notes_of(self, channel.center.registry.known)
        channel.noting = self
        channel.observers = (*channel.observers, self.settled)

    def append(self, message: Message, delivery_tag: int) -> None:
        super().append(message, delivery_tag)
        if message.delivery is not None:
            self._notes.fresh[delivery_tag] = time_ns()
            if self._recorder.sleeps:
                self._recorder.wake()

    def taken(self, tag: int, at_us: int) -> Event | None:
        message = self._delivered.get(tag)
        return None if message is None else self.channel.event_of(message, TAKEN, at_us=at_us)

    def settled(self, operation: str, message: Message) -> None:
        """What is noted of a message, by what has become of it: see :attr:`.Channel.observers`."""
        if operation == "ack":
            # What may be dead yet is noted when that is decided.
            if message.delivery is not None and not message.dies_later:
                self._notes.fresh.pop(message.delivery_tag, None)
                self.note_end(message, message.delivery)
        elif operation == "end":
            if not (message.delivery is None or message.dies_later or message.outcome == _DEAD):
                self.note_end(message, message.delivery)
        elif operation == "bury":
            message.outcome = _DEAD
            message.dies_later = False
            self.channel.note(message, DEAD)
        else:
            self.channel.note(message, DEAD if operation == "reject" else PENDING)

    def note_end(self, message: Message, delivery: Delivery) -> None:
        """Note the outcome of a message that is acknowledged."""
        # Of each message that is handled: see :class:`.recorder.Notes`.
        notes, headers = self._notes, message.headers.get
        ended = notes.ended
        ended[message.delivery_tag] = (
            *(headers("id"), message.properties.get("k") or name_in(delivery.birth)),
            *(delivery.id, delivery.topic),
            *(time_ns(), delivery.score, delivery.limit, message.error),
            *(headers("task"), headers(BIZ_TYPE), headers(BIZ_ID), headers(ATTRIBUTES)),
            *(message.outcome, delivery if message.outcome == "failed" else None),
        )
        if not len(ended) % FLUSH_AT:
            self._recorder.gathering.bound(notes)
            self._recorder.wake()
        elif self._recorder.sleeps:
            self._recorder.wake()

    def _runs_on(self, message: Message) -> Callable[[bool], Any]:
        # Until its task has ended it may be dead yet.
        message.dies_later = True
        if self._notes.fresh.pop(message.delivery_tag, None) is not None:
            self.channel.note(message, TAKEN)
        end = partial(self.channel.note_end, message)
        self.channel.recorder.running[id(message)] = end
        return end


class RecordedChannel(Channel):
    """A channel whose messages are recorded.

    What it is asked to declare while Redis is away is declared before it publishes again.
    """

    QoS = RecordedQoS
    publisher_class = RecordedPublisher

    #: what notes the ends of its messages, also of those that end when it is closed
    noting: RecordedQoS

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.recorder = self.center.recorder.recorder
        #: queue or binding -> what declares it
        self._undeclared: dict[Any, Callable[[], Any]] = {}

    # -- what becomes of messages

    def note(self, message: Message, status: int, *, watched: bool = True) -> None:
        """Something has become of a message that was delivered here.

        watched: as in :meth:`.recorder.Recorder.gather`
        """
        event = self.event_of(message, status)
        if event is not None:
            self.recorder.gather(event, watched=watched)

    def event_of(self, message: Message, status: int, *, at_us: int = 0) -> Event | None:
        """What is written of something that has become of a message; None if nothing is.

        at_us: as in :meth:`.recorder.Gathering.event_of`
        """
        delivery = message.delivery
        if delivery is None:
            return None
        topic = self.center.registry.known(delivery.topic)
        mode = None
        if topic is not None:
            mode = topic.declaration.library
            if mode == OFF or topic.declaration.expires:
                return None
        headers = message.headers
        id = headers.get("id")
        key = (
            id if isinstance(id, str) and id else stem_of(delivery.id)[0],
            str(message.properties.get("k") or name_in(delivery.birth) or ""),
            delivery.topic,
        )
        event: Event | None = self.recorder.gathering.event_of(
            *(key, status),
            at_us=at_us,
            attempts=delivery.failures + 1,
            error=message.error,
            message=(headers, delivery.action_us),
            has_row=mode != BEHIND,
        )
        return event

    def note_end(self, message: Message, is_over: bool) -> None:
        """A message is acknowledged for good whose task has run on, or its lease had ended before:
        then Redis says what has become of it."""
        self.recorder.running.pop(id(message), None)
        if message.dies_later:  # it is not dead
            message.dies_later = False
            if is_over and message.delivery is not None:
                self.noting.note_end(message, message.delivery)
            else:
                self.note(message, TAKEN, watched=False)

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], *args: Any, **kwargs: Any
    ) -> None:
        def delivered(message: Message) -> Any:
            self.note(message, DONE)
            return callback(message)

        self.recorder.consumes()
        poller = self.poller
        if poller.guarding is None:
            poller.guarding = Guarding(self.recorder.guard, poller)
        received = delivered if no_ack else callback
        super().basic_consume(queue, no_ack, received, *args, **kwargs)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Message | None:
        message = super().basic_get(queue, no_ack, **kwargs)
        if message is not None and no_ack:
            self.note(message, DONE)
        return message

    # -- without Redis

    def basic_publish(
        self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any
    ) -> Any:
        if self._undeclared and not self.recorder.is_away:
            self._declare_late()
        return super().basic_publish(message, exchange, routing_key, **kwargs)

    def _declare_late(self) -> None:
        for name, declare in list(self._undeclared.items()):
            try:
                declare()
            except NotPermittedError:
                raise
            except BROKEN:
                return
            self._undeclared.pop(name, None)

    def _or_later(self, what: Any, do: Callable[[], int | None], transient: bool) -> int | None:
        try:
            return do()
        except NotPermittedError:
            raise
        except BROKEN:
            queue = what[0] if isinstance(what, tuple) else what
            known = queue in self._undeclared and what != queue
            if transient or not (known or self.transport.may_be_away):
                raise
            self._undeclared[what] = do
            return None
