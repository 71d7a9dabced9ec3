"""Moves the messages of a broker of Kombu's own Redis transport into a timeout center.

Kombu's Redis transport keeps what is ready in lists, one per queue and priority step, and what a
worker has taken and not acknowledged in one hash. In that hash are the tasks with an ETA which
workers hold in memory until they are due; here they wait where every other message does.

A message is written to the center first, and then taken from the source, if it is still there
byte for byte: killed in between, it is in both. So that it is one message when that is repeated,
whatever has become of it meanwhile, the center remembers what was written (as a publish whose
reply was lost) until it has gone from the source, or for a week.

Only messages move. Queues that they need are declared; exchanges are bound by the app, when it
declares its queues. What cannot be read, what went to a fanout exchange, and queues that expire by
themselves (replies to remote control) stay where they are.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from kombu import Connection
from kombu.utils.json import loads
from redis.exceptions import NoPermissionError

from ..center.commands import SENT
from ..center.context import POP_BYTES
from ..client.connect import connect
from ..client.options import read
from ..client.urls import mask_password, read_url
from ..errors import ActionTimeError, ConfigurationError, ConsumersError, MigrationError
from ..model.topic import PRIORITY_STEPS
from ..scripts.call import Paces, ScriptCall, when_of
from ..transport.action_time import action_time, eta_us
from ..transport.channel import Channel

#: Messages that are written, and then taken from the source, together.
BATCH = 200

#: Seconds for which a message is remembered that was written and not yet taken from the source.
REMEMBER = 7 * 86400

#: Messages that are named of those that stay.
MAX_NAMED = 100

#: What a broker's ``broker_transport_options`` may say of where its messages are.
_OPTIONS = {
    "global_keyprefix": "",
    "sep": "\x06\x16",
    "unacked_key": "unacked",
    "unacked_index_key": "unacked_index",
}

#: How the keys of Kombu's bindings begin, after the prefix.
_BINDINGS = "_kombu.binding."

# KEYS[1] unacked   KEYS[2] unacked_index   ARGV[1] delivery tag   ARGV[2] what it has been
_TAKE = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
"""


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


class Unreadable(Exception):
    """Says why a message stays."""


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
            raise ConfigurationError(
                f"{mask_password(url)} is a timeout center already; name the other broker, "
                "redis://..."
            )
        if url.partition("://")[0] not in SCHEMES:
            raise ConfigurationError(
                f"{mask_password(url)} is not a broker of Kombu's Redis transport; its URL begins "
                f"with {', '.join(f'{one}://' for one in SCHEMES[:-1])} or {SCHEMES[-1]}://"
            )
        address = read_url(re.sub(r"^redis\+socket:", "unix:", url))
        options = dict(options)
        ssl = options.pop("ssl", None)
        where = {k: options.pop(k, default) for k, default in _OPTIONS.items()}
        where.update({k: address.query.pop(k) for k in _OPTIONS if k in address.query})
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
        return client.client_list()
    except NoPermissionError as exc:
        raise ConsumersError(
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
        raise ConsumersError(
            f"{len(consumers)} {consume} from {shown} ({named}): stop its workers and whatever "
            f"watches them, or what they have taken runs twice{hint}"
        )


class _Row(NamedTuple):
    """A message of the source."""

    raw: bytes
    tag: str
    queues: list[str]
    message: dict[str, Any]


def migrate_broker(
    source: str,
    target: Connection,
    *,
    options: Mapping[str, Any] | None = None,
    queues: Collection[str] | None = None,
    fanout: Collection[str] = (),
    dry_run: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Migrated:
    """Move all messages from a ``redis://`` broker; to repeat it moves what is there by then.

    source: its URL
    target: a connection to the timeout center, with the app's transport options
    options: the source's ``broker_transport_options``; `global_keyprefix`, `sep`, `unacked_key` and
        `unacked_index_key` count, those of redis-py, and `ssl`
    queues: only these
    fanout: names of fanout exchanges: nothing of theirs is moved
    dry_run: count, and change nothing
    force: also while somebody consumes from the source: what both take runs twice
    progress: is told how many messages have been looked at, and of how many

    Workers of the source must be stopped: one that lives has taken messages that are moved too.
    Raises ConsumersError if there are any, MigrationError if nothing there has that key prefix but
    others are there, ConfigurationError for a URL that cannot be used.
    """
    with target.channel() as channel:
        if not isinstance(channel, Channel):
            raise ConfigurationError(
                f"{mask_password(target.as_uri(include_password=True))} is not a timeout center: "
                "such a URL begins with toc+, as in toc+redis://localhost:6379/0"
            )
        broker = Broker(source, options or {})
        migration = _Migration(broker, channel, queues, fanout, dry_run)
        refused = ""
        try:
            migration.check_prefix()
            if not force:
                try:
                    migration.check_for_consumers()
                except ConsumersError as exc:
                    if not dry_run:
                        raise
                    refused = str(exc)
            return migration.run(progress)._replace(refused=refused)
        finally:
            broker.close()


class _Migration:
    def __init__(
        self,
        broker: Broker,
        channel: Channel,
        queues: Collection[str] | None,
        fanout: Collection[str],
        dry_run: bool,
    ) -> None:
        self.broker = broker
        self.client = broker.client
        self.prefix, self.sep = broker.prefix, broker.sep
        self.unacked, self.index = broker.unacked, broker.index
        self.channel = channel
        self.only = None if queues is None else set(queues)
        self.fanout = set(fanout)
        self.dry_run = dry_run
        self.now_us = time.time_ns() // 1000
        self.moved: Counter[str] = Counter()
        self.unacknowledged = self.scheduled = self.staying = 0
        self.named: list[Staying] = []
        self.skipped: dict[str, str] = {}
        #: queues that have a list
        self.seen: set[str] = set()
        self._bindings: dict[str, list[list[str]]] = {}
        self._bound: set[str] = set()

    def check_prefix(self) -> None:
        """Make sure that somebody has used that prefix, if somebody has used any."""
        if not self.prefix:
            return
        begins = _literally(self.prefix)
        if next(self.client.scan_iter(f"{begins}*", count=1000), None) is not None:
            return
        others = {
            key.decode("utf-8", "replace").partition(_BINDINGS)[0]
            for key in self.client.scan_iter(f"*{_BINDINGS}*", count=1000)
        }
        if others:
            known = " and ".join(repr(one) if one else "no prefix" for one in sorted(others))
            raise MigrationError(
                f"no key in {self.broker.shown} begins with the prefix {self.prefix!r}; in use "
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

    def run(self, progress: Callable[[int, int], None] | None) -> Migrated:
        keys = list(self._lists())
        sizes = [self.client.llen(key) for key, _ in keys]
        total, done = sum(sizes) + self.client.hlen(self.unacked), 0
        if progress is not None:
            progress(0, total)
        for steps in (*(self._list(*key) for key in keys), self._unacknowledged()):
            for looked_at in steps:
                done += looked_at
                if progress is not None:
                    progress(done, max(total, done))
        if self.only is None:
            self._others_unacknowledged()
        # Who migrates ends now, and may have no connection left when its process does.
        self.channel.center.metrics.send(self.channel.center)
        return Migrated(
            dict(self.moved),
            self.unacknowledged,
            self.scheduled,
            self.staying,
            self.named,
            self.skipped,
            [
                queue
                for queue in sorted(self.only or ())
                if queue not in self.seen and queue not in self.moved and not self._is_known(queue)
            ],
        )

    # -- what is ready

    def _lists(self) -> Iterator[tuple[bytes, str]]:
        """(key, queue) of each list that has a queue's messages."""
        pattern = _literally(self.prefix) + "*"
        for raw in sorted(set(self.client.scan_iter(pattern, count=1000, _type="list"))):
            key = raw.decode("utf-8", "surrogateescape")
            queue, _, step = key[len(self.prefix) :].partition(self.sep)
            if self.only is not None and queue not in self.only:
                continue
            if step and not step.isdigit():
                continue
            self.seen.add(queue)
            if self.client.pttl(raw) > 0:
                self.skipped[key] = "it expires by itself"
                continue
            if queue.endswith(".pidbox"):  # which older versions of Kombu do not let expire
                self.skipped[key] = "replies to remote control, which nobody waits for any more"
                continue
            message = self._one_of(raw)
            if message is not None and self._went_to(queue, message):
                yield raw, queue
            elif message is not None:
                self.skipped[key] = (
                    "its messages were not sent to this queue; perhaps they have another "
                    "global_keyprefix; else name it among the queues to move"
                )
                self.staying += self.client.llen(raw)
            elif self._is_bound(queue) or self.only is not None:
                yield raw, queue  # nothing at its ends can be read: each will be named

    def _is_known(self, queue: str) -> bool:
        """Whether there is such a queue, although it is empty; or was, for it has been moved."""
        return self._is_bound(queue) or self.channel.center.declared(queue) is not None

    def _is_bound(self, queue: str) -> bool:
        """Whether an exchange has that queue."""
        if not self._bound:
            pattern = f"{_literally(self.prefix)}{_BINDINGS}*"
            for key in self.client.scan_iter(pattern, count=1000, _type="set"):
                for member in self.client.smembers(key):
                    self._bound.add(member.decode("utf-8", "replace").split(self.sep)[-1])
            self._bound.add("")
        return queue in self._bound

    def _one_of(self, key: bytes) -> dict[str, Any] | None:
        """A message of a list, which may be anybody's: one of its ends, if one is a message."""
        for end in (-1, 0):
            raw = self.client.lindex(key, end)
            try:
                return self._message(self._parsed(raw or b""))
            except Unreadable:
                continue
        return None

    def _went_to(self, queue: str, message: dict[str, Any]) -> bool:
        """Whether it was sent to this queue, or somebody says that it is one."""
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
        paces = Paces(BATCH, POP_BYTES)
        while page := self.client.lrange(key, -(kept + paces.next), -(kept + 1)):
            paces.read(sum(map(len, page)))
            rows = []
            staying = self.staying
            for raw in reversed(page):
                try:
                    message = self._message(self._parsed(raw))
                except Unreadable as exc:
                    self._stays(key, raw, exc)
                else:
                    rows.append(_Row(raw, self._tag(message, raw), [queue], message))

            def take(rows: list[_Row]) -> None:
                with self.client.pipeline(transaction=False) as pipe:
                    for row in rows:
                        pipe.lrem(key, -1, row.raw)
                    pipe.execute()

            self._move(key, rows, take)
            kept += len(page) if self.dry_run else self.staying - staying
            yield len(page)

    # -- what workers had

    def _unacknowledged(self) -> Iterator[int]:
        cursor = 0
        paces = Paces(BATCH, POP_BYTES)
        while True:
            cursor, page = self.client.hscan(self.unacked, cursor, count=paces.next)
            paces.read(sum(map(len, page.values())))
            rows = []
            for raw_tag, raw in page.items():
                tag = raw_tag.decode("utf-8", "surrogateescape")
                try:
                    row = self._delivered(tag, raw)
                except Unreadable as exc:
                    self._stays(self.unacked, raw, exc)
                else:
                    if self.only is None or self.only.intersection(row.queues):
                        rows.append(row)

            def take(rows: list[_Row]) -> None:
                with self.client.pipeline(transaction=False) as pipe:
                    for row in rows:
                        pipe.eval(_TAKE, 2, self.unacked, self.index, row.tag, row.raw)
                    pipe.execute()

            self.unacknowledged += self._move(self.unacked, rows, take)
            yield len(page)
            if not cursor:
                return

    def _others_unacknowledged(self) -> None:
        """Of brokers with another prefix, which is perhaps the one that was meant."""
        pattern = f"{_literally(self.prefix)}*{_literally(self.broker.unacked_key)}"
        for raw in self.client.scan_iter(pattern, count=1000, _type="hash"):
            key = raw.decode("utf-8", "surrogateescape")
            _, page = self.client.hscan(raw, count=1)
            if key == self.unacked or not page:
                continue
            try:
                self._delivered("", next(iter(page.values())))
            except Unreadable:
                continue
            self.skipped[key] = "workers of a broker with another global_keyprefix had these"
            self.staying += self.client.hlen(raw)

    def _delivered(self, tag: str, raw: bytes) -> _Row:
        parsed = self._parsed(raw)
        if not isinstance(parsed, list) or len(parsed) != 3:
            raise Unreadable("it is not a delivered message of Kombu's")
        payload, exchange, routing_key = parsed
        message = self._message(payload)
        queues = self._queues(str(exchange or ""), str(routing_key or ""))
        # As Kombu does with what it restores: it may have been started.
        message["headers"]["redelivered"] = True
        message["properties"]["delivery_info"]["redelivered"] = True
        return _Row(raw, tag, queues, message)

    def _queues(self, exchange: str, routing_key: str) -> list[str]:
        """The queues that a message came from; Kombu keeps only how it was sent."""
        if not exchange:
            return [routing_key]
        if exchange in self.fanout:
            raise Unreadable("it is a broadcast, which reaches those who listen when it is sent")
        if exchange not in self._bindings:
            members = self.client.smembers(f"{self.prefix}{_BINDINGS}{exchange}")
            split = [
                member.decode("utf-8", "surrogateescape").split(self.sep) for member in members
            ]
            self._bindings[exchange] = [parts for parts in split if len(parts) == 3]
        found = {
            queue
            for key, pattern, queue in self._bindings[exchange]
            if (re.match(pattern, routing_key) if pattern else key == routing_key)
        }
        # Perhaps the app has declared its queues in the timeout center already.
        found = found or set(self.channel._lookup(exchange, routing_key))
        if not found:
            raise Unreadable(
                f"no queue is bound to exchange {exchange!r} with the key {routing_key!r}"
            )
        return sorted(found)

    # -- messages

    def _parsed(self, raw: bytes) -> Any:
        try:
            return loads(raw.decode())
        except Exception as exc:  # also whatever a decoder that was registered with Kombu raises
            raise Unreadable(f"it is not valid JSON: {exc}") from exc

    def _message(self, payload: Any) -> dict[str, Any]:
        """A message as our channel takes it."""
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
            raise Unreadable(
                f"it is not a message of Kombu's: {type(exc).__name__}: {exc}"
            ) from exc

    def _tag(self, message: dict[str, Any], raw: bytes) -> str:
        tag = message["properties"].get("delivery_tag")
        return tag if isinstance(tag, str) and tag else hashlib.sha1(raw).hexdigest()

    def _stays(self, key: bytes | str, raw: bytes, reason: Exception, what: str = "") -> None:
        self.staying += 1
        if len(self.named) < MAX_NAMED:
            place = key.decode("utf-8", "replace") if isinstance(key, bytes) else key
            begin = raw[:60].decode("utf-8", "replace")
            self.named.append(Staying(place, what or begin, str(reason)))

    def _move(self, key: bytes | str, rows: list[_Row], take: Callable[[list[_Row]], None]) -> int:
        """Write to the center, then take from the source; return how many."""
        calls: list[ScriptCall] = []
        moving: list[_Row] = []
        for row in rows:
            try:
                self._check_time(row)
                made = [] if self.dry_run else [self._putting(q, row) for q in row.queues]
            except ActionTimeError as exc:
                self._stays(key, row.raw, exc, row.message["headers"].get("id") or row.tag)
                continue
            calls += made
            moving.append(row)
        if not self.dry_run and moving:
            center = self.channel.center
            center.run_puts(calls)
            take(moving)
            # They are gone from the source: nobody will write them again.
            with center.client.pipeline(transaction=False) as pipe:
                for call in calls:
                    pipe.unlink(call.keys[SENT])
                pipe.execute()
        for row in moving:
            self.moved.update(row.queues)
            self.scheduled += self._is_ahead(row)
        return len(moving)

    def _check_time(self, row: _Row) -> None:
        """Raises ActionTimeError if the center would not take it: also a dry run is to tell."""
        at_us, delay_us = action_time(row.message["headers"], row.tag)
        when_of(at_us, delay_us)

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
        )

    def _is_ahead(self, row: _Row) -> bool:
        try:
            return eta_us(row.message["headers"].get("eta")) > self.now_us
        except (ValueError, TypeError, OverflowError):
            return False


def _literally(text: str) -> str:
    """A text as a pattern of Redis's that only it matches."""
    return re.sub(r"([][*?\\^])", r"\\\1", text)
