"""Moves waiting messages from and to the broker that Kombu has for Redis."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import cached_property
from typing import Any, NamedTuple

from kombu import Connection
from kombu.utils.json import dumps, loads
from kombu.utils.uuid import uuid
from redis.exceptions import NoPermissionError

from . import errors
from .center.calls import POP_BYTES, SENT
from .center.exchanges import Bindings
from .client.connect import connect
from .client.options import mask_password, read, read_url
from .model import message as envelope
from .model.limits import PRIORITY_STEPS
from .model.message import key_of
from .model.results import IN_FLIGHT, WAITING, Cancelled, Found, OnProgress, tell_nobody
from .model.timetext import action_time, eta_us
from .scripts.call import PageSize, ScriptCall, when_of
from .transport.channel import Channel
from .transport.publisher import GROUP, message_traits

# -- A message as Kombu's own Redis transport keeps it, and as our channel takes it

#: Microseconds by which an ``eta`` may differ from the action time without being set to it: a
#: countdown is counted by Redis's clock, and the ``eta`` by the sender's.
NEAR = 1_000_000

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Unreadable(Exception):
    """Says why a message stays."""


def parse(raw: bytes) -> Any:
    """What JSON says. Raises Unreadable."""
    try:
        return loads(raw.decode())
    except Exception as exc:  # also whatever a decoder that was registered with Kombu raises
        raise Unreadable(f"it is not valid JSON: {exc}") from exc


def from_kombu(payload: Any) -> dict[str, Any]:
    """A message as our channel takes it. Raises Unreadable."""
    try:
        properties = dict(payload["properties"])
        headers = dict(payload.get("headers") or {})
        properties["delivery_info"] = dict(properties.get("delivery_info") or {})
        body = payload["body"]
        encoding = properties.pop("body_encoding", None)
        if encoding == "base64":
            body = base64.b64decode(body)
        elif encoding not in (None, "", "utf-8") or not isinstance(body, (str, type(None))):
            raise ValueError(f"its body is encoded as {encoding!r}")
        return {
            "headers": headers,
            "properties": properties,
            "content-type": payload.get("content-type"),
            "content-encoding": payload.get("content-encoding"),
            "body": body,
        }
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise Unreadable(f"it is not a message of Kombu's: {type(exc).__name__}: {exc}") from exc


def delivered(raw: bytes) -> tuple[dict[str, Any], str, str]:
    """A message that a worker had not acknowledged, and the exchange and the routing key that it
    was sent with. Raises Unreadable."""
    parsed = parse(raw)
    if not isinstance(parsed, list) or len(parsed) != 3:
        raise Unreadable("it is not a delivered message of Kombu's")
    payload, exchange, routing_key = parsed
    message = from_kombu(payload)
    # As Kombu does with what it restores: it may have been started.
    message["headers"]["redelivered"] = True
    message["properties"]["delivery_info"]["redelivered"] = True
    return message, str(exchange or ""), str(routing_key or "")


def tag_of(message: dict[str, Any], raw: bytes) -> str:
    """What tells a message from every other of its broker."""
    tag = message["properties"].get("delivery_tag")
    return tag if isinstance(tag, str) and tag else hashlib.sha1(raw).hexdigest()


def eta_or_none(message: dict[str, Any]) -> int | None:
    """Microseconds since the epoch of its ``eta``; None without one that can be read."""
    try:
        return eta_us(message["headers"].get("eta"))
    except (ValueError, TypeError, OverflowError):
        return None


def to_kombu(found: Found, now_us: int) -> dict[str, Any]:
    """The message as Kombu's transport keeps it. Raises Unreadable if it has to stay.

    now_us: Redis's clock, in microseconds since the epoch
    """
    try:
        message = envelope.unpack(found.body, found.id)
    except errors.EnvelopeError as exc:
        raise Unreadable(f"it is not a message of Kombu's: {exc}") from exc
    headers, properties = message["headers"], message["properties"]
    is_task = "task" in headers
    at_us = found.time_us if found.state == WAITING else 0
    if at_us > now_us and not is_task:
        raise Unreadable(
            "it is not due yet, and Kombu's transport delivers at once: only Celery's workers "
            "wait, with a task"
        )
    if is_task:
        _keep_time(message, at_us, now_us)
    properties.pop("k", None)
    properties["body_encoding"] = "base64"
    properties["delivery_tag"] = uuid()
    properties.setdefault("priority", 0)
    info = properties.setdefault("delivery_info", {})
    info.setdefault("exchange", "")
    info.setdefault("routing_key", found.topic)
    if found.state == IN_FLIGHT or found.retries_left is not None:
        # As Kombu does with what it restores: it may have been started.
        headers["redelivered"] = info["redelivered"] = True
    return {
        "body": base64.b64encode(message["body"]).decode(),
        "content-encoding": message["content-encoding"],
        "content-type": message["content-type"],
        "headers": headers,
        "properties": properties,
    }


def _keep_time(message: dict[str, Any], at_us: int, now_us: int) -> None:
    """Let the ``eta`` be when the task is due, if it says otherwise."""
    said = eta_or_none(message) or 0
    if abs(max(said, now_us) - max(at_us, now_us)) > NEAR:
        due = _EPOCH + timedelta(microseconds=at_us)
        message["headers"]["eta"] = due.isoformat() if at_us > now_us else None


# -- the other broker

#: What a broker's ``broker_transport_options`` may say of where its messages are.
_OPTIONS = {
    "global_keyprefix": "",
    "sep": "\x06\x16",
    "unacked_key": "unacked",
    "unacked_index_key": "unacked_index",
}

#: What URLs of Kombu's own Redis transport begin with, and a socket as read here.
SCHEMES = ("redis", "rediss", "redis+socket", "unix", "sentinel")


class Broker:
    """A broker of Kombu's own Redis transport.

    url: its URL
    options: its ``broker_transport_options``

    Raises ConfigurationError for a URL that cannot be used.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        if url.startswith("toc"):
            raise errors.ConfigurationError(
                f"{mask_password(url)} is a timeout center already; name the other broker, "
                "redis://..."
            )
        if url.partition("://")[0] not in SCHEMES:
            raise errors.ConfigurationError(
                f"{mask_password(url)} is not a broker of Kombu's Redis transport; its URL begins "
                f"with {', '.join(f'{one}://' for one in SCHEMES[:-1])} or {SCHEMES[-1]}://"
            )
        address = read_url(re.sub(r"^redis\+socket:", "unix:", url))
        options = dict(options)
        ssl = options.pop("ssl", None)
        where = {k: address.query.pop(k, options.pop(k, v)) for k, v in _OPTIONS.items()}
        settings = read(address.query, options)
        self.client = connect(address, settings, ssl=ssl)
        self.db = address.db
        self.shown = mask_password(url)
        self.prefix: str = where["global_keyprefix"]
        self.sep: str = where["sep"]
        self.unacked_key: str = where["unacked_key"]
        self.unacked = self.prefix + self.unacked_key
        self.index = self.prefix + where["unacked_index_key"]
        self.steps = settings.priority_steps or PRIORITY_STEPS

    def close(self) -> None:
        self.client.close()
        self.client.connection_pool.disconnect()


def connected(client: Any, shown: str) -> list[dict[str, Any]]:
    """Who is connected to a server. Raises ConsumersError if it does not say."""
    try:
        found: list[dict[str, Any]] = client.client_list()
        return found
    except NoPermissionError as exc:
        raise errors.ConsumersError(
            f"{shown} does not say who is connected ({exc}); make sure that its workers are "
            "stopped, and say so (force)"
        ) from exc


def refuse_if_any(
    consumers: Collection[str], shown: str, kind: str = "connection", hint: str = ""
) -> None:
    """Raises ConsumersError if there are consumers; `kind` is what they are."""
    if consumers:
        first = sorted(consumers)[:5]
        named = ", ".join(first) + (", ..." if len(consumers) > len(first) else "")
        consume = f"{kind} consumes" if len(consumers) == 1 else f"{kind}s consume"
        raise errors.ConsumersError(
            f"{len(consumers)} {consume} from {shown} ({named}): stop its workers and whatever "
            f"watches them, or what they have taken runs twice{hint}"
        )


def literally(text: str) -> str:
    """A text as a pattern of Redis's that only it matches."""
    return re.sub(r"([][*?\\^])", r"\\\1", text)


# -- what both ways of moving messages share

#: Messages that are written to one side, and then taken from the other, together.
BATCH = 200

#: Seconds for which a message is remembered that was written and not yet taken from where it was.
REMEMBER = 7 * 86400

#: Messages that are named of those that stay.
MAX_NAMED = 100


class Staying(NamedTuple):
    """A message that is left in the source."""

    place: str  #: the key it is in
    what: str  #: its task id or delivery tag, or how it begins
    reason: str


class Migrated(NamedTuple):
    """What was moved, or, of a dry run, what would be."""

    queues: dict[str, int]  #: queue -> how many
    unacknowledged: int  #: of these, how many a worker had
    scheduled: int  #: of these, how many are not due yet
    staying: int  #: how many are left in the source
    named: list[Staying]  #: the first of those
    skipped: dict[str, str]  #: key of a queue that is left as it is -> why
    unknown: list[str] = []
    refused: str = ""  #: of a dry run: why nothing would be moved
    dead: int = 0  #: of a way back: how many dead letters stay in the timeout center

    @property
    def moved(self) -> int:
        return sum(self.queues.values())


@dataclass(eq=False)
class Move:
    """Moves messages between a timeout center and a broker, one way, and adds up what is moved and
    what stays.

    channel: of the timeout center
    queues: those that are moved; None for all
    dry_run: count, and change nothing
    """

    channel: Channel
    broker: Broker
    queues: Collection[str] | None
    dry_run: bool

    def __post_init__(self) -> None:
        self.center = self.channel.center
        self.client: Any = self.broker.client
        self.only = None if self.queues is None else set(self.queues)
        self.moved: Counter[str] = Counter()
        self.unacknowledged = self.scheduled = self.staying = self.dead = 0
        self.named: list[Staying] = []
        self.skipped: dict[str, str] = {}

    def is_wanted(self, queue: str) -> bool:
        return self.only is None or queue in self.only

    def stays(self, place: str, what: str, reason: str) -> None:
        """A message is left where it is."""
        self.staying += 1
        if len(self.named) < MAX_NAMED:
            self.named.append(Staying(place, what, reason))

    def skip(self, queue: str, reason: str, messages: int = 0) -> None:
        """A queue, or its key, is left as it is, with so many messages that stay."""
        self.skipped[queue] = reason
        self.staying += messages

    def result(self, unknown: Iterable[str]) -> Migrated:
        """unknown: those of the queues that were named and that there are not"""
        return Migrated(
            dict(self.moved),
            self.unacknowledged,
            self.scheduled,
            self.staying,
            self.named,
            self.skipped,
            sorted(unknown),
            dead=self.dead,
        )

    def carry_out(self, force: bool, on_progress: OnProgress) -> Migrated:
        """Check, and then move.

        force: also while somebody consumes

        Raises ConsumersError if somebody does.
        """
        refused = ""
        if not force:
            try:
                self.check_for_consumers()
            except errors.ConsumersError as exc:
                if not self.dry_run:
                    raise
                refused = str(exc)
        found = self.run(on_progress)
        # Who migrates ends now, and may have no connection left when its process does.
        self.center.metrics.send(self.center.runner)
        return found._replace(refused=refused)

    def check_for_consumers(self) -> None:
        """Raises ConsumersError if somebody consumes from where messages are taken."""
        raise NotImplementedError

    def run(self, on_progress: OnProgress) -> Migrated:
        """Move everything."""
        raise NotImplementedError


@contextmanager
def both_sides(
    center: Connection, url: str, options: Mapping[str, Any] | None
) -> Iterator[tuple[Channel, Broker]]:
    """A channel of the timeout center, and the broker.

    center: a connection to the timeout center
    url, options: the broker's, and its ``broker_transport_options``

    Raises ConfigurationError for a URL that cannot be used.
    """
    with center.channel() as channel:
        if not isinstance(channel, Channel):
            raise errors.ConfigurationError(
                f"{mask_password(center.as_uri(include_password=True))} is not a timeout center: "
                "such a URL begins with toc+, as in toc+redis://localhost:6379/0"
            )
        broker = Broker(url, options or {})
        try:
            yield channel, broker
        finally:
            broker.close()


# -- moves the messages of a broker of Kombu's own Redis transport into a timeout center
#
# Kombu's Redis transport keeps what is ready in lists, one per queue and priority step, and what
# a worker has taken and not acknowledged in one hash. That hash also has the tasks with an ETA
# that workers hold in memory until they are due; in the timeout center they wait with all
# others.
#
# A message is written to the center first, and then taken from the source, if it is still there
# byte for byte: a process that is killed in between leaves it in both. The center remembers what
# was written (as a publish whose reply was lost) until it has gone from the source, or for a
# week. So a second run makes it one message again, whatever has become of it meanwhile.
#
# Only messages move. Queues that they need are declared; exchanges are bound by the app, when it
# declares its queues. Messages that cannot be read, those sent to a fanout exchange, and queues
# that expire by themselves (replies to remote control) stay where they are.


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
    on_progress: OnProgress = tell_nobody,
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
    on_progress: told how many messages have been looked at, and of how many

    Workers of the source must be stopped: messages that a running worker has taken move too.
    Raises ConsumersError if there are any, MigrationError if nothing there has that key prefix but
    others are there, ConfigurationError for a URL that cannot be used.
    """
    with both_sides(target, source, options) as sides:
        return _FromRedis(*sides, queues, dry_run, fanout).carry_out(force, on_progress)


class _Row(NamedTuple):
    """A message of the source."""

    raw: bytes
    tag: str
    queues: list[str]
    message: dict[str, Any]


@dataclass(eq=False)
class _FromRedis(Move):
    fanout: Collection[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.now_us = time.time_ns() // 1000
        #: exchange -> routing key, pattern and queue of what is bound to it in the source
        self._bindings: dict[str, list[list[str]]] = {}
        #: queues that have a list
        self.seen: set[str] = set()
        self._check_prefix()

    def _check_prefix(self) -> None:
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
            raise errors.MigrationError(
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

    def run(self, on_progress: OnProgress) -> Migrated:
        keys = list(self._lists())
        sizes = [self.client.llen(key) for key, _ in keys]
        total, done = sum(sizes) + self.client.hlen(self.broker.unacked), 0
        on_progress(0, total)
        for steps in (*(self._list(*key) for key in keys), self._unacknowledged()):
            for looked_at in steps:
                done += looked_at
                on_progress(done, max(total, done))
        if self.only is None:
            self._others_unacknowledged()
        return self.result(
            queue
            for queue in self.only or ()
            if queue not in self.seen and queue not in self.moved and not self._is_known(queue)
        )

    # -- what exchanges are bound to

    @cached_property
    def _bound(self) -> set[str]:
        """The queues that an exchange has."""
        pattern = f"{literally(self.broker.prefix)}{_BINDINGS}*"
        keys = self.client.scan_iter(pattern, count=1000, _type="set")
        members = (member for key in keys for member in self.client.smembers(key))
        return {one.decode("utf-8", "replace").split(self.broker.sep)[-1] for one in members}

    def _bound_to(self, exchange: str, routing_key: str) -> set[str]:
        """The queues that a message with this routing key goes to."""
        if exchange not in self._bindings:
            members = self.client.smembers(f"{self.broker.prefix}{_BINDINGS}{exchange}")
            split = [
                one.decode("utf-8", "surrogateescape").split(self.broker.sep) for one in members
            ]
            self._bindings[exchange] = [parts for parts in split if len(parts) == 3]
        return {
            queue
            for key, pattern, queue in self._bindings[exchange]
            if (re.match(pattern, routing_key) if pattern else key == routing_key)
        }

    # -- what is ready

    def _lists(self) -> Iterator[tuple[bytes, str]]:
        """(key, queue) of each list that has a queue's messages."""
        prefix = self.broker.prefix
        pattern = literally(prefix) + "*"
        for raw in sorted(set(self.client.scan_iter(pattern, count=1000, _type="list"))):
            key = raw.decode("utf-8", "surrogateescape")
            queue, _, step = key[len(prefix) :].partition(self.broker.sep)
            if not self.is_wanted(queue) or (step and not step.isdigit()):
                continue
            self.seen.add(queue)
            if self.client.pttl(raw) > 0:
                self.skip(key, "it expires by itself")
                continue
            if queue.endswith(".pidbox"):  # which older versions of Kombu do not let expire
                self.skip(key, "replies to remote control, which nobody waits for any more")
                continue
            message = self._one_of(raw)
            if message is not None and self._went_to(queue, message):
                yield raw, queue
            elif message is not None:
                self.skip(
                    key,
                    "its messages were not sent to this queue; perhaps they have another "
                    "global_keyprefix; else name it among the queues to move",
                    self.client.llen(raw),
                )
            elif queue in self._bound or self.only is not None:
                yield raw, queue  # nothing at its ends can be read: each will be named

    def _is_known(self, queue: str) -> bool:
        """Whether there is such a queue, although it is empty; or was, for it has been moved."""
        return queue in self._bound or self.center.registry.declared(queue) is not None

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
        if self.only is not None:
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
        while page := self.client.lrange(key, -(kept + page_size.next), -(kept + 1)):
            page_size.read(sum(map(len, page)))
            rows = []
            staying = self.staying
            for raw in reversed(page):
                try:
                    message = from_kombu(parse(raw))
                except Unreadable as exc:
                    self._stays(key, raw, exc)
                else:
                    rows.append(_Row(raw, tag_of(message, raw), [queue], message))

            self._move(key, rows, lambda pipe, row: pipe.lrem(key, -1, row.raw))
            kept += len(page) if self.dry_run else self.staying - staying
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
                    if any(map(self.is_wanted, row.queues)):
                        rows.append(row)

            self.unacknowledged += self._move(
                unacked,
                rows,
                lambda pipe, row: pipe.eval(_TAKE, 2, unacked, index, row.tag, row.raw),
            )
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
            self.skip(key, reason, self.client.hlen(raw))

    def _queues(self, exchange: str, routing_key: str) -> list[str]:
        """The queues that a message came from; Kombu keeps only how it was sent."""
        if not exchange:
            return [routing_key]
        if exchange in self.fanout:
            raise Unreadable("it is a broadcast, which reaches those who listen when it is sent")
        found = self._bound_to(exchange, routing_key)
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
        self.stays(place, what or begin, str(reason))

    def _move(self, key: bytes | str, rows: list[_Row], take: Callable[[Any, _Row], Any]) -> int:
        """Write to the center, then take from the source; return how many.

        take: the command that takes one
        """
        calls: list[ScriptCall] = []
        moving: list[_Row] = []
        for row in rows:
            try:
                self._check_time(row)
                made = [] if self.dry_run else [self._putting(q, row) for q in row.queues]
            except (errors.ActionTimeError, errors.TraitError) as exc:
                self._stays(key, row.raw, exc, row.message["headers"].get("id") or row.tag)
                continue
            calls += made
            moving.append(row)
        if not self.dry_run and moving:
            self.center.runner.run_puts(calls)
            with self.client.pipeline(transaction=False) as pipe:
                for row in moving:
                    take(pipe, row)
                pipe.execute()
            # They are gone from the source: nobody will write them again.
            with self.center.client.pipeline(transaction=False) as pipe:
                for call in calls:
                    pipe.unlink(call.keys[SENT])
                pipe.execute()
        for row in moving:
            self.moved.update(row.queues)
            self.scheduled += (eta_or_none(row.message) or 0) > self.now_us
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
        publisher = self.channel.publisher
        prepared = publisher.prepare(
            self.channel.queues.topic(queue),
            {**row.message, "properties": properties},
            publish=(f"moved:{row.tag}", row.tag),
            remember=REMEMBER,
            counted=False,
        )
        return publisher.call_of(prepared)


# -- moves the messages of a timeout center into a broker of Kombu's own Redis transport: a
# rollback
#
# What waits goes into the lists that Kombu has for a queue and its priorities, in the order of
# the action times. Kombu's transport knows no times: it delivers a task with an ``eta`` at once,
# and Celery's worker holds it until then. So a task keeps its time as its ``eta``, also if it
# was rescheduled or had a delay, and what is no task and is not due stays.
#
# A message is written to the broker first, and then taken from the center: killed in between, it
# is in both. So that it is one message when that is repeated, whatever has become of it
# meanwhile, the broker remembers what was written until it has gone from the center, or for a
# week.
#
# Dead letters stay, for Kombu has no place for them; so do messages of queues that expire by
# themselves or are bound to a fanout exchange, and what was put without Kombu.


#: What is told of processes that have said that they consume.
_FORGOTTEN = "; one that was killed is forgotten within a minute"

#: Of the key, after the prefix, that remembers what was written and not yet taken from the center.
_RETURNED = "toc-returned"

# KEYS[1] the queue's list   KEYS[2] what was written and not yet taken from the center
# ARGV[1] message   ARGV[2] its name   ARGV[3] 1: it goes first   ARGV[4] seconds it is remembered
_GIVE = """
if redis.call('SADD', KEYS[2], ARGV[2]) == 0 then return 0 end
redis.call(ARGV[3] == '1' and 'RPUSH' or 'LPUSH', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return 1
"""


def migrate_back(
    source: Connection,
    target: str,
    *,
    options: Mapping[str, Any] | None = None,
    queues: Collection[str] | None = None,
    dry_run: bool = False,
    force: bool = False,
    on_progress: OnProgress = tell_nobody,
) -> Migrated:
    """Move all messages into a ``redis://`` broker; a second run moves what is there by then.

    source: a connection to the timeout center, with the app's transport options
    target: the broker's URL
    options: the broker's ``broker_transport_options``; `global_keyprefix`, `sep` and
        `priority_steps` count, those of redis-py, and `ssl`
    queues: only these
    dry_run: count, and change nothing
    force: also while somebody consumes from the center; what a consumer has then stays
    on_progress: told how many messages have been looked at, and of how many

    Raises ConsumersError if somebody consumes, ConfigurationError for a URL that cannot be used.
    """
    with both_sides(source, target, options) as sides:
        move = _ToRedis(*sides, queues, dry_run, source.as_uri(), taken=not force)
        return move.carry_out(force, on_progress)


@dataclass(eq=False)
class _ToRedis(Move):
    """taken: whether what consumers have taken is moved, for there are none any more"""

    shown: str
    taken: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.returned = self.broker.prefix + _RETURNED
        seconds, us = self.center.client.time()
        self.now_us = seconds * 1_000_000 + us
        self.client.ping()

    def check_for_consumers(self) -> None:
        """Raises ConsumersError if somebody consumes from the center."""
        # Also of a worker that is busy, and of no other center on the same server.
        present = {one.name for every in self.center.queues.consumers().values() for one in every}
        refuse_if_any(present, self.shown, "worker", _FORGOTTEN)
        # Workers of a release that does not tell, and Flower.
        client = self.center.client
        db = self.channel.transport.address.db
        found: list[str] = []
        for node in client.primaries() if self.center.clustered else [client]:
            # An idle worker blocks until something is due, and in any case for remote control.
            found += [
                one.get("addr", "?")
                for one in connected(node, self.shown)
                if int(one.get("db", 0)) == db and one.get("cmd") in ("bzpopmin", "xread")
            ]
        refuse_if_any(found, self.shown)

    def run(self, on_progress: OnProgress) -> Migrated:
        declared = self.center.queues.names()
        names = [name for name in declared if self.is_wanted(name)]
        queues = [name for name in names if not self._is_skipped(name)]
        counts = {name: self.center.counts(name) for name in queues}
        total = sum(one.waiting + one.in_flight for one in counts.values())
        self.dead = sum(one.dead for one in counts.values())
        # By a run that was killed: of those that are still there, it will be known again.
        written = {} if self.dry_run else self._written(queues)
        done = 0
        on_progress(0, total)
        for name in queues:
            # What was delivered once goes before what was not, as where Kombu restores it.
            for state in (IN_FLIGHT, WAITING):
                after = None
                while True:
                    page = self.center.scan(name, state=state, limit=BATCH, after=after)
                    for one in page.messages:
                        written.pop(_name(one), None)
                    self._move(name, page.messages, state)
                    done += len(page.messages)
                    on_progress(done, max(total, done))
                    after = page.after
                    if after is None:
                        break
        self._forget(written)
        return self.result((self.only or set()).difference(declared))

    def _written(self, queues: Collection[str]) -> dict[str, None]:
        """Names of messages of these queues that a run before this one has written."""
        names = (
            raw.decode("utf-8", "surrogatepass") for raw in self.client.smembers(self.returned)
        )
        return {name: None for name in names if name.partition("\0")[0] in queues}

    def _is_skipped(self, name: str) -> bool:
        topic = self.center.registry.declared(name)
        if topic is None:  # it has gone just now
            return True
        counts = self.center.counts(name)
        if not counts.waiting + counts.in_flight:
            return False
        if topic.declaration.expires:
            self.skip(name, "it expires by itself")
            return True
        if name in self._copying:
            self.skip(
                name,
                "it is bound to a fanout exchange, of which Kombu's transport keeps no copies",
                counts.waiting + counts.in_flight,
            )
            return True
        return False

    @cached_property
    def _copying(self) -> set[str]:
        """The queues that keep copies of broadcasts."""
        bound = (json.loads(member) for _, member in Bindings(self.center).every())
        return {queue for _, _, queue, kind, *_ in bound if kind == "fanout"}

    def _move(self, queue: str, page: list[Found], state: str) -> None:
        """Write to the broker, then take from the center."""
        if state == IN_FLIGHT:
            if not self.taken:
                for one in page:
                    self._stays(one, "a consumer has it")
                return
            page = page[::-1]  # each goes before the others
        moving = []
        for one in page:
            try:
                moving.append((one, to_kombu(one, self.now_us)))
            except Unreadable as exc:
                self._stays(one, str(exc))
        if not self.dry_run and moving:
            self._give(moving)
            found = [one for one, _ in moving]
            gone = self.center.cancel(found, in_flight=self.taken, dead=False)
            self._give_what_was_another(found, gone)
            # What a consumer has taken meanwhile may come back, and has been written already.
            left = {one.id for one in gone if not one.deleted}
            self._forget(_name(one) for one in found if one.id not in left)
        if moving:
            self.moved[queue] += len(moving)
        for one, _ in moving:
            if state == IN_FLIGHT:
                self.unacknowledged += 1
            elif one.time_us > self.now_us:
                self.scheduled += 1

    def _give(self, moving: list[tuple[Found, dict[str, Any]]]) -> None:
        with self.client.pipeline(transaction=False) as pipe:
            for one, payload in moving:
                keys = self._list(one.topic, payload), self.returned
                args = dumps(payload), _name(one), int(one.state == IN_FLIGHT), REMEMBER
                pipe.eval(_GIVE, 2, *keys, *args)
            pipe.execute()

    def _give_what_was_another(self, moved: list[Found], gone: list[Cancelled]) -> None:
        """Where somebody consumes all the same, another message may have come under an id
        between the two steps, and be taken from the center for it: it is moved, too."""
        known = {(one.id, one.body) for one in moved}
        for taken in gone:
            if taken.deleted and (taken.id, taken.body) not in known:
                [first, *_] = (one for one in moved if one.id == taken.id)
                other = first._replace(body=taken.body)
                self._give([(other, to_kombu(other, self.now_us))])
                self._forget([_name(other)])

    def _forget(self, names: Iterable[str | bytes]) -> None:
        """Messages are in the broker, and no longer in the center."""
        every = list(names)
        for start in range(0, len(every), BATCH):
            self.client.srem(self.returned, *every[start : start + BATCH])

    def _list(self, queue: str, payload: dict[str, Any]) -> str:
        """The key of the list for a queue and a priority, as Kombu has it."""
        try:
            priority = max(min(int(payload["properties"]["priority"]), 9), 0)
        except (TypeError, ValueError, KeyError):
            priority = 0
        step = self.broker.steps[bisect(self.broker.steps, priority) - 1]
        return self.broker.prefix + (f"{queue}{self.broker.sep}{step}" if step else queue)

    def _stays(self, one: Found, reason: str) -> None:
        self.stays(one.topic, one.id, reason)


def _name(one: Found) -> str:
    """What tells a message from every other of the center."""
    digest = hashlib.sha1(one.body).hexdigest()
    return f"{one.topic}\0{one.id}\0{digest}"
