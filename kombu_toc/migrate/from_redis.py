"""Moves the messages of a broker of Kombu's own Redis transport into a timeout center.

Kombu's Redis transport keeps what is ready in lists, one per queue and priority step, and what a
worker has taken and not acknowledged in one hash. That hash also has the tasks with an ETA that
workers hold in memory until they are due; in the timeout center they wait with all others.

A message is written to the center first, and then taken from the source, if it is still there
byte for byte: a process that is killed in between leaves it in both. The center remembers what was
written (as a publish whose reply was lost) until it has gone from the source, or for a week. So a
second run makes it one message again, whatever has become of it meanwhile.

Only messages move. Queues that they need are declared; exchanges are bound by the app, when it
declares its queues. Messages that cannot be read, those sent to a fanout exchange, and queues that
expire by themselves (replies to remote control) stay where they are.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from kombu import Connection

from ..center.calls import SENT
from ..center.core import POP_BYTES
from ..errors import ActionTimeError, MigrationError, TraitError
from ..model.message import key_of
from ..scripts.call import PageSize, ScriptCall, when_of
from ..transport.action_time import action_time
from ..transport.channel import Channel
from ..transport.publisher import GROUP, message_traits
from .moving import (
    BATCH,
    REMEMBER,
    Account,
    Broker,
    Migrated,
    Move,
    Progress,
    Unreadable,
    carry_out,
    connected,
    delivered,
    eta_or_none,
    from_kombu,
    literally,
    parse,
    refuse_if_any,
    tag_of,
)

#: How the keys of Kombu's bindings begin, after the prefix.
_BINDINGS = "_kombu.binding."

# KEYS[1] unacked   KEYS[2] unacked_index   ARGV[1] delivery tag   ARGV[2] what it has been
_TAKE = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
"""


def migrate_broker(
    source: str,
    target: Connection,
    *,
    options: Mapping[str, Any] | None = None,
    queues: Collection[str] | None = None,
    fanout: Collection[str] = (),
    dry_run: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Migrated:
    """Move all messages from a ``redis://`` broker; a second run moves what is there by then.

    source: its URL
    target: a connection to the timeout center, with the app's transport options
    options: the source's ``broker_transport_options``; `global_keyprefix`, `sep`, `unacked_key` and
        `unacked_index_key` count, those of redis-py, and `ssl`
    queues: only these
    fanout: names of fanout exchanges, whose messages stay
    dry_run: count, and change nothing
    force: also while somebody consumes from the source: what both take runs twice
    progress: called with how many messages have been looked at, and of how many

    Workers of the source must be stopped: messages that a running worker has taken move too.
    Raises ConsumersError if there are any, MigrationError if nothing there has that key prefix but
    others are there, ConfigurationError for a URL that cannot be used.
    """
    return carry_out(
        target,
        source,
        options,
        lambda channel, broker: _FromRedis(channel, broker, Account(queues, dry_run), fanout),
        dry_run=dry_run,
        force=force,
        progress=progress,
    )


class _Row(NamedTuple):
    """A message of the source."""

    raw: bytes
    tag: str
    queues: list[str]
    message: dict[str, Any]


class _Bindings:
    """What Kombu's exchanges are bound to in the source."""

    def __init__(self, broker: Broker) -> None:
        self._client: Any = broker.client
        self._prefix, self._sep = broker.prefix, broker.sep
        self._of_exchange: dict[str, list[list[str]]] = {}
        self._bound: set[str] = set()

    def is_bound(self, queue: str) -> bool:
        """Whether an exchange has that queue."""
        if not self._bound:
            pattern = f"{literally(self._prefix)}{_BINDINGS}*"
            for key in self._client.scan_iter(pattern, count=1000, _type="set"):
                for member in self._client.smembers(key):
                    self._bound.add(member.decode("utf-8", "replace").split(self._sep)[-1])
            self._bound.add("")
        return queue in self._bound

    def queues(self, exchange: str, routing_key: str) -> set[str]:
        """The queues that a message with this routing key goes to."""
        if exchange not in self._of_exchange:
            members = self._client.smembers(f"{self._prefix}{_BINDINGS}{exchange}")
            split = [
                member.decode("utf-8", "surrogateescape").split(self._sep) for member in members
            ]
            self._of_exchange[exchange] = [parts for parts in split if len(parts) == 3]
        return {
            queue
            for key, pattern, queue in self._of_exchange[exchange]
            if (re.match(pattern, routing_key) if pattern else key == routing_key)
        }


class _FromRedis(Move):
    def __init__(
        self, channel: Channel, broker: Broker, account: Account, fanout: Collection[str]
    ) -> None:
        super().__init__(channel, broker, account)
        self.client: Any = broker.client
        self.fanout = set(fanout)
        self.now_us = time.time_ns() // 1000
        self.bindings = _Bindings(broker)
        #: queues that have a list
        self.seen: set[str] = set()

    def check(self) -> None:
        """Make sure that somebody has used that prefix, if somebody has used any."""
        prefix = self.broker.prefix
        if not prefix:
            return
        if next(self.client.scan_iter(f"{literally(prefix)}*", count=1000), None) is not None:
            return
        others = {
            key.decode("utf-8", "replace").partition(_BINDINGS)[0]
            for key in self.client.scan_iter(f"*{_BINDINGS}*", count=1000)
        }
        if others:
            known = " and ".join(repr(one) if one else "no prefix" for one in sorted(others))
            raise MigrationError(
                f"no key in {self.broker.shown} begins with the prefix {prefix!r}; in use "
                f"there: {known}"
            )

    def check_for_consumers(self) -> None:
        # A worker waits for tasks with BRPOP, or has no room for any; for remote control it has
        # subscribed to patterns in any case. So has Flower.
        found = [
            one.get("addr", "?")
            for one in connected(self.client, self.broker.shown)
            if int(one.get("db", 0)) == self.broker.db
            and (one.get("cmd", "").startswith("brpop") or int(one.get("psub", 0)) > 0)
        ]
        refuse_if_any(found, self.broker.shown)

    def run(self, progress: Progress) -> Migrated:
        keys = list(self._lists())
        sizes = [self.client.llen(key) for key, _ in keys]
        total, done = sum(sizes) + self.client.hlen(self.broker.unacked), 0
        progress(0, total)
        for steps in (*(self._list(*key) for key in keys), self._unacknowledged()):
            for looked_at in steps:
                done += looked_at
                progress(done, max(total, done))
        only = self.account.only
        if only is None:
            self._others_unacknowledged()
        return self.account.result(
            queue
            for queue in only or ()
            if queue not in self.seen
            and queue not in self.account.moved
            and not self._is_known(queue)
        )

    # -- what is ready

    def _lists(self) -> Iterator[tuple[bytes, str]]:
        """(key, queue) of each list that has a queue's messages."""
        prefix, account = self.broker.prefix, self.account
        pattern = literally(prefix) + "*"
        for raw in sorted(set(self.client.scan_iter(pattern, count=1000, _type="list"))):
            key = raw.decode("utf-8", "surrogateescape")
            queue, _, step = key[len(prefix) :].partition(self.broker.sep)
            if not account.is_wanted(queue) or (step and not step.isdigit()):
                continue
            self.seen.add(queue)
            if self.client.pttl(raw) > 0:
                account.skip(key, "it expires by itself")
                continue
            if queue.endswith(".pidbox"):  # which older versions of Kombu do not let expire
                account.skip(key, "replies to remote control, which nobody waits for any more")
                continue
            message = self._one_of(raw)
            if message is not None and self._went_to(queue, message):
                yield raw, queue
            elif message is not None:
                account.skip(
                    key,
                    "its messages were not sent to this queue; perhaps they have another "
                    "global_keyprefix; else name it among the queues to move",
                    self.client.llen(raw),
                )
            elif self.bindings.is_bound(queue) or account.only is not None:
                yield raw, queue  # nothing at its ends can be read: each will be named

    def _is_known(self, queue: str) -> bool:
        """Whether there is such a queue, although it is empty; or was, for it has been moved."""
        return self.bindings.is_bound(queue) or self.center.registry.declared(queue) is not None

    def _one_of(self, key: bytes) -> dict[str, Any] | None:
        """A message of a list, which may be anybody's: one of its ends, if one is a message."""
        for end in (-1, 0):
            raw = self.client.lindex(key, end)
            try:
                return from_kombu(parse(raw or b""))
            except Unreadable:
                continue
        return None

    def _went_to(self, queue: str, message: dict[str, Any]) -> bool:
        """Whether it was sent to this queue, or the caller names it as one."""
        if self.account.only is not None:
            return True
        info = message["properties"]["delivery_info"]
        try:
            found = self._queues(
                str(info.get("exchange") or ""), str(info.get("routing_key") or "")
            )
        except Unreadable:
            return False
        return queue in found

    def _list(self, key: bytes, queue: str) -> Iterator[int]:
        kept = 0  # at the end of the list, where the oldest are
        page_size = PageSize(BATCH, POP_BYTES)
        account = self.account
        while page := self.client.lrange(key, -(kept + page_size.next), -(kept + 1)):
            page_size.read(sum(map(len, page)))
            rows = []
            staying = account.staying
            for raw in reversed(page):
                try:
                    message = from_kombu(parse(raw))
                except Unreadable as exc:
                    self._stays(key, raw, exc)
                else:
                    rows.append(_Row(raw, tag_of(message, raw), [queue], message))

            def take(rows: list[_Row]) -> None:
                with self.client.pipeline(transaction=False) as pipe:
                    for row in rows:
                        pipe.lrem(key, -1, row.raw)
                    pipe.execute()

            self._move(key, rows, take)
            kept += len(page) if account.dry_run else account.staying - staying
            yield len(page)

    # -- what workers had

    def _unacknowledged(self) -> Iterator[int]:
        unacked, index = self.broker.unacked, self.broker.index
        cursor = 0
        page_size = PageSize(BATCH, POP_BYTES)
        while True:
            cursor, page = self.client.hscan(unacked, cursor, count=page_size.next)
            page_size.read(sum(map(len, page.values())))
            rows = []
            for raw_tag, raw in page.items():
                tag = raw_tag.decode("utf-8", "surrogateescape")
                try:
                    message, *sent_to = delivered(raw)
                    row = _Row(raw, tag, self._queues(*sent_to), message)
                except Unreadable as exc:
                    self._stays(unacked, raw, exc)
                else:
                    if any(map(self.account.is_wanted, row.queues)):
                        rows.append(row)

            def take(rows: list[_Row]) -> None:
                with self.client.pipeline(transaction=False) as pipe:
                    for row in rows:
                        pipe.eval(_TAKE, 2, unacked, index, row.tag, row.raw)
                    pipe.execute()

            self.account.unacknowledged += self._move(unacked, rows, take)
            yield len(page)
            if not cursor:
                return

    def _others_unacknowledged(self) -> None:
        """Of brokers with another prefix, which is perhaps the one that was meant."""
        pattern = f"{literally(self.broker.prefix)}*{literally(self.broker.unacked_key)}"
        for raw in self.client.scan_iter(pattern, count=1000, _type="hash"):
            key = raw.decode("utf-8", "surrogateescape")
            _, page = self.client.hscan(raw, count=1)
            if key == self.broker.unacked or not page:
                continue
            try:
                _, *sent_to = delivered(next(iter(page.values())))
                self._queues(*sent_to)
            except Unreadable:
                continue
            reason = "workers of a broker with another global_keyprefix had these"
            self.account.skip(key, reason, self.client.hlen(raw))

    def _queues(self, exchange: str, routing_key: str) -> list[str]:
        """The queues that a message came from; Kombu keeps only how it was sent."""
        if not exchange:
            return [routing_key]
        if exchange in self.fanout:
            raise Unreadable("it is a broadcast, which reaches those who listen when it is sent")
        found = self.bindings.queues(exchange, routing_key)
        # Perhaps the app has declared its queues in the timeout center already.
        found = found or set(self.channel._lookup(exchange, routing_key))
        if not found:
            raise Unreadable(
                f"no queue is bound to exchange {exchange!r} with the key {routing_key!r}"
            )
        return sorted(found)

    # -- moving

    def _stays(self, key: bytes | str, raw: bytes, reason: Exception, what: str = "") -> None:
        place = key.decode("utf-8", "replace") if isinstance(key, bytes) else key
        begin = raw[:60].decode("utf-8", "replace")
        self.account.stays(place, what or begin, str(reason))

    def _move(self, key: bytes | str, rows: list[_Row], take: Callable[[list[_Row]], None]) -> int:
        """Write to the center, then take from the source; return how many."""
        dry_run = self.account.dry_run
        calls: list[ScriptCall] = []
        moving: list[_Row] = []
        for row in rows:
            try:
                self._check_time(row)
                made = [] if dry_run else [self._putting(q, row) for q in row.queues]
            except (ActionTimeError, TraitError) as exc:
                self._stays(key, row.raw, exc, row.message["headers"].get("id") or row.tag)
                continue
            calls += made
            moving.append(row)
        if not dry_run and moving:
            self.center.runner.run_puts(calls)
            take(moving)
            # They are gone from the source: nobody will write them again.
            with self.center.client.pipeline(transaction=False) as pipe:
                for call in calls:
                    pipe.unlink(call.keys[SENT])
                pipe.execute()
        for row in moving:
            self.account.moved.update(row.queues)
            self.account.scheduled += (eta_or_none(row.message) or 0) > self.now_us
        return len(moving)

    def _check_time(self, row: _Row) -> None:
        """Raises ActionTimeError or TraitError if the center would not take it: also a dry run is
        to tell."""
        headers, properties = row.message["headers"], row.message["properties"]
        at_us, delay_us = action_time(headers, row.tag)
        when_of(at_us, delay_us)
        key_of(f"message {row.tag}", headers.get("x-key", properties.get(GROUP)))
        message_traits(headers, properties, row.tag)

    def _putting(self, queue: str, row: _Row) -> ScriptCall:
        properties = {
            **row.message["properties"],
            "delivery_tag": row.tag,
            "delivery_info": dict(row.message["properties"]["delivery_info"]),
        }
        return self.channel.publisher.putting(
            self.channel.queues.topic(queue),
            {**row.message, "properties": properties},
            publish=(f"moved:{row.tag}", row.tag),
            remember=REMEMBER,
            counted=False,
        )
