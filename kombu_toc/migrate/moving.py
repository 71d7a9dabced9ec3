"""What both ways of moving messages share: the order of the steps, and the account of what was
moved and what stays."""

from __future__ import annotations

import base64
import hashlib
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

from kombu import Connection
from kombu.utils.json import loads
from kombu.utils.uuid import uuid
from redis.exceptions import NoPermissionError

from ..client.connect import connect
from ..client.options import read
from ..client.urls import mask_password, read_url
from ..errors import ConfigurationError, ConsumersError, EnvelopeError
from ..model import message as envelope
from ..model.limits import PRIORITY_STEPS
from ..model.results import IN_FLIGHT, WAITING, Found
from ..transport.action_time import eta_us
from ..transport.channel import Channel

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
    except EnvelopeError as exc:
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
        found: list[dict[str, Any]] = client.client_list()
        return found
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

#: Told how many messages have been looked at, and of how many.
Progress = Callable[[int, int], None]


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


class Account:
    """Adds up what is moved and what stays.

    only: the queues that are moved; None for all
    dry_run: count, and change nothing
    """

    def __init__(self, only: Collection[str] | None, dry_run: bool) -> None:
        self.only = None if only is None else set(only)
        self.dry_run = dry_run
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


class Move(ABC):
    """Moves messages between a timeout center and a broker, one way.

    channel: of the timeout center
    """

    def __init__(self, channel: Channel, broker: Broker, account: Account) -> None:
        self.channel = channel
        self.center = channel.center
        self.broker = broker
        self.account = account

    @abstractmethod
    def check(self) -> None:
        """Make sure that both sides can be used; raises if not."""

    @abstractmethod
    def check_for_consumers(self) -> None:
        """Raises ConsumersError if somebody consumes from where messages are taken."""

    @abstractmethod
    def run(self, progress: Progress) -> Migrated:
        """Move everything."""


def carry_out(
    center: Connection,
    url: str,
    options: Mapping[str, Any] | None,
    make: Callable[[Channel, Broker], Move],
    *,
    dry_run: bool,
    force: bool,
    progress: Progress | None,
) -> Migrated:
    """Check, and then move.

    center: a connection to the timeout center
    url, options: the broker's, and its ``broker_transport_options``
    force: also while somebody consumes

    Raises ConsumersError if somebody does, ConfigurationError for a URL that cannot be used.
    """
    with center.channel() as channel:
        if not isinstance(channel, Channel):
            raise ConfigurationError(
                f"{mask_password(center.as_uri(include_password=True))} is not a timeout center: "
                "such a URL begins with toc+, as in toc+redis://localhost:6379/0"
            )
        broker = Broker(url, options or {})
        refused = ""
        try:
            move = make(channel, broker)
            move.check()
            if not force:
                try:
                    move.check_for_consumers()
                except ConsumersError as exc:
                    if not dry_run:
                        raise
                    refused = str(exc)
            found = move.run(progress or _tell_nobody)
            # Who migrates ends now, and may have no connection left when its process does.
            channel.center.metrics.send(channel.center.runner)
            return found._replace(refused=refused)
        finally:
            broker.close()


def _tell_nobody(done: int, total: int) -> None:
    """No progress was asked for."""
