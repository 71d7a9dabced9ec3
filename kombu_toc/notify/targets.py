"""The targets of topics: which there are, what is under way to each, and what becomes of that.
Times are handed in."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import re
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from redis.exceptions import RedisError

from ..aio.center import AsyncTimeoutCenter
from ..center.calls import announce_presence
from ..center.runner import BROKEN
from ..center.waiting import passes
from ..client.programs import one_line
from ..consumer.holdings import PRESENCE_INTERVAL, PRESENCE_MS
from ..errors import ConfigurationError, TocError
from ..model.limits import interval_us
from ..model.results import Delivery
from ..model.topic import Declaration
from ..scripts.call import text

if TYPE_CHECKING:
    from ..center.center import TimeoutCenter


class Target(NamedTuple):
    """What the declaration of a topic says of what is sent of it."""

    url: str
    retry_backoff: float  #: seconds; 0: the notifier's
    retry_backoff_max: float  #: seconds
    spacing: float = 0.0  #: seconds between two messages, of a rate that lets them start one by one


def read_targets(center: TimeoutCenter) -> dict[str, Target]:
    """The topics that something is to be sent of now: they have a target that was not stopped, and
    are not paused."""
    found = {
        text(name): declaration
        for name, raw in center.client.hgetall(center.keys.topics).items()
        if b'"target":' in raw and (declaration := Declaration.from_json(raw)).target
    }
    if not found:
        return {}
    paused = center.queues.paused()
    made = {}
    for name, declaration in found.items():
        if declaration.target and not declaration.target_stopped and name not in paused:
            limits = declaration.limits(center.limits)
            one_by_one = declaration.rate and (declaration.rate_burst or 1) == 1
            made[name] = Target(
                declaration.target,
                limits.retry_backoff,
                limits.retry_backoff_max,
                interval_us(declaration.rate) / 1e6 if one_by_one and declaration.rate else 0.0,
            )
    return made


def stop_target(center: TimeoutCenter, topic: str, url: str, why: str) -> bool:
    """Have nothing sent to the target of a topic any more, until somebody names one again.

    url: the target that is meant: if the topic has another one by now, nothing is done
    why: is shown with the topic

    Returns whether it was this call that has stopped it.
    """
    while True:
        found = center.registry.declared(topic)
        if found is None or found.declaration.target != url or found.declaration.target_stopped:
            return False
        if center.registry.redeclare(found, replace(found.declaration, target_stopped=why)):
            return True


# -- which addresses may be connected to

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: IPv6 addresses that the internet routes; all others are local, or of a special use.
_GLOBAL = ipaddress.IPv6Network("2000::/3")

#: Prefixes whose addresses have an IPv4 address in them, which counts: how many bits are behind it.
_EMBEDDING = (
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),  # mapped
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), 0),  # translated
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),  # NAT64
    (ipaddress.IPv6Network("2002::/16"), 80),  # 6to4
)

#: Of these some count as global; documentation, tunnels and benchmarks are nobody's target.
_SPECIAL = (
    ipaddress.IPv6Network("2001::/23"),
    ipaddress.IPv6Network("2001:db8::/32"),
    ipaddress.IPv6Network("3fff::/20"),
    ipaddress.IPv4Network("192.0.0.0/24"),
    ipaddress.IPv4Network("192.88.99.0/24"),
)

#: Global addresses by which clouds tell a machine about itself.
_METADATA = frozenset((ipaddress.IPv4Address("168.63.129.16"),))


class AddressRefused(OSError):
    """An address that may not be connected to."""


class Addresses:
    """The addresses that may be connected to: those of the internet by TLS, and those of networks
    that are named in any way.

    allowed: networks, as ``10.1.0.0/16``, or addresses; each may have a port, as
        ``10.1.0.7:8080`` or ``[fd00::7]:8080``, and is then allowed there only
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = tuple(map(read_allowed, allowed))
        self._refusal = lru_cache(maxsize=4096)(self._judge)

    def check(self, address: str, port: int = 443, *, encrypted: bool) -> None:
        """Raise AddressRefused, with the way out, for an address that may not be connected to.

        encrypted: whether what is sent there is
        """
        why = self._refusal(address, port, encrypted)
        if why:
            raise AddressRefused(why)

    def _judge(self, address: str, port: int, encrypted: bool) -> str:
        try:
            found = effective(ipaddress.ip_address(address.partition("%")[0]))
        except ValueError:  # a number that the system would take for one
            return f"{address} is no address: write it as 203.0.113.7"
        if any(found in network and at in (None, port) for network, at in self._allowed):
            return ""
        if not is_public(found):
            place = f"{found}:{port}" if found.version == 4 else f"[{found}]:{port}"
            return f"{found} is no public address: --allow {place} lets it be a target"
        if not encrypted:
            return f"{found} is reached over the internet: give its target a URL with https"
        return ""


_ALLOWED = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]*)):([0-9]{1,5})")


def read_allowed(text: str) -> tuple[Network, int | None]:
    """A network and the only port there, or None for all. Raises ConfigurationError."""
    found = _ALLOWED.fullmatch(text.strip())
    if found is None or not 0 < int(found[3]) < 65536:
        return read_network(text), None
    return read_network(found[1] or found[2]), int(found[3])


def read_network(text: str) -> Network:
    """A network, or an address. Raises ConfigurationError."""
    try:
        found = ipaddress.ip_network(text.strip())
    except ValueError:
        raise ConfigurationError(
            "--allow takes an address or a network, such as 10.1.0.0/16, perhaps with a port, such "
            f"as 10.1.0.7:8080 or [fd00::7]:8080, not {text!r}"
        ) from None
    if isinstance(found, ipaddress.IPv6Network) and found.prefixlen >= 96:
        inner = effective(found.network_address)
        if isinstance(inner, ipaddress.IPv4Address):
            return ipaddress.IPv4Network(f"{inner}/{found.prefixlen - 96}", strict=False)
    return found


def effective(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, or the same address."""
    if isinstance(address, ipaddress.IPv6Address):
        for network, behind in _EMBEDDING:
            if address in network:
                return ipaddress.IPv4Address(int(address) >> behind & 0xFFFFFFFF)
        return ipaddress.IPv6Address(int(address))  # without a scope
    return address


def is_public(address: Address) -> bool:
    """Whether it is an address of the internet: of one machine, and neither local nor special."""
    if address in _METADATA or any(
        address in network for network in _SPECIAL if network.version == address.version
    ):
        return False
    if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL:
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


# -- the hosts that single messages of a queue name

#: Parts of what may be under way of which a host has one, at most: less, if there are more hosts.
SHARES = 4

#: Messages that wait for their hosts, at most, beside what may be under way.
MOST_WAITING = 1000


class Hosts:
    """What is under way to each host.

    on_wait: called when one more message waits
    """

    def __init__(self, on_wait: Callable[[], None]) -> None:
        self._on_wait = on_wait
        self._under_way: dict[str, int] = {}
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}
        #: how many messages wait for their hosts
        self.waiting = 0

    @asynccontextmanager
    async def visit(self, host: str, limit: int) -> AsyncIterator[None]:
        """In this block a message is sent to a host. It begins when that has room for it.

        limit: how many may be under way to all hosts
        """
        if host in self._queues or self._under_way.get(host, 0) >= self._share(host, limit):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queues.setdefault(host, deque()).append(turn)
            self.waiting += 1
            self._on_wait()
            try:
                await turn
            except BaseException:
                if not turn.cancelled():
                    self._leave(host, limit)
                raise
            finally:
                self.waiting -= 1
        else:
            self._begin(host)
        try:
            yield
        finally:
            self._leave(host, limit)

    def close(self) -> None:
        """Let all begin: they are given back, and not sent."""
        for host, queue in self._queues.items():
            for turn in queue:
                if not turn.done():
                    self._begin(host)
                    turn.set_result(None)
        self._queues.clear()

    def _share(self, host: str, limit: int) -> int:
        hosts = len(self._under_way) + (host not in self._under_way)
        return max(limit // max(hosts + 1, SHARES), 1)

    def _begin(self, host: str) -> None:
        self._under_way[host] = self._under_way.get(host, 0) + 1

    def _leave(self, host: str, limit: int) -> None:
        self._under_way[host] -= 1
        queue = self._queues.get(host, deque())
        while queue and self._under_way[host] < self._share(host, limit):
            turn = queue.popleft()
            if not turn.done():
                self._begin(host)
                turn.set_result(None)
        if not queue:
            self._queues.pop(host, None)
        if not self._under_way[host]:
            del self._under_way[host]


# -- acknowledges, rejects and releases what was sent; tries again while the leases last

T = TypeVar("T")

#: Seconds between two attempts: at first, and at most.
FIRST_PAUSE, MOST_PAUSE = 0.05, 1.0


class Settler:
    """Settles messages.

    patience: the seconds for which it is tried, while the broker cannot be used
    """

    def __init__(self, center: AsyncTimeoutCenter, patience: float) -> None:
        self._center = center
        self._patience = patience
        self._acks: list[tuple[Delivery, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ack(self, message: Delivery) -> None:
        """Acknowledge a message, together with others that are acknowledged just now."""
        done = asyncio.get_running_loop().create_future()
        self._acks.append((message, done))
        if self._task is None:
            self._task = asyncio.create_task(self._ack_all())
        await done

    async def _ack_all(self) -> None:
        try:
            while self._acks:
                some, self._acks = self._acks, []
                messages = [message for message, _ in some]
                await self._try(partial(self._center.ack, messages), messages)
                for _, done in some:
                    if not done.done():
                        done.set_result(None)
        finally:
            self._task = None

    async def reject(self, message: Delivery, **how: Any) -> str | None:
        """Give a message back after a failure; returns its state, None if it is not held any
        more or that is not known."""
        return await self._try(partial(self._center.reject, message, **how), [message])

    async def release(self, message: Delivery) -> None:
        """Give a message back as it was."""
        await self._try(partial(self._center.release, message), [message])

    async def _try(self, settle: Callable[[], Awaitable[T]], messages: list[Delivery]) -> T | None:
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self._patience, FIRST_PAUSE
        while True:
            began = loop.time()  # or one that fails because the process stood still is the last
            try:
                return await settle()
            except Exception as exc:
                if (
                    began + pause > until
                    or not isinstance(exc, (RedisError, *BROKEN))
                    or not passes(exc)
                ):
                    logger.warning(
                        "%d messages that were sent are sent again when their leases end: %s",
                        *(len(messages), exc),
                    )
                    return None
            await asyncio.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE)


# -- renews the leases of what is under way

#: Seconds of a lease, unless requests are so short that it may be shorter.
LEASE = 15.0

#: How often leases are renewed while they last.
TIMES = 5


class Keeper:
    """Renews leases. It belongs to one event loop.

    lease: their seconds
    """

    def __init__(self, center: AsyncTimeoutCenter, lease: float) -> None:
        self._center = center
        self._lease = lease
        #: what is under way, by its identity, and since when it is
        self._held: dict[int, tuple[Delivery, float]] = {}
        self._beat_at = inf
        #: until when what is fetched may have been fetched before this process stood still
        self._unsure_until = -inf
        self._failing = False

    def hold(self, message: Delivery) -> None:
        """Renew its lease from now on."""
        self._held[id(message)] = message, asyncio.get_running_loop().time()

    def drop(self, message: Delivery) -> None:
        """Renew it no more."""
        self._held.pop(id(message), None)

    async def run(self) -> None:
        """Renew leases until it is cancelled."""
        loop = asyncio.get_running_loop()
        self._beat_at = loop.time()
        while True:
            await asyncio.sleep(self._lease / TIMES)
            # What is new is renewed later, unless it may be as old as the others.
            since = inf if self.is_unsure() else self._beat_at
            old = [message for message, held_at in self._held.values() if held_at < since]
            if old:
                await self._renew(old)
            self._notice(loop.time())
            self._beat_at = loop.time()

    def _notice(self, now: float) -> None:
        """If the process stood still, a lease may have ended that it takes for a new one."""
        if now - self._beat_at > self._lease / 2:
            self._unsure_until = now + self.unsure_for

    def is_unsure(self) -> bool:
        """Whether leases may have ended, because the process stood still not long ago."""
        now = asyncio.get_running_loop().time()
        self._notice(now)
        return now < self._unsure_until

    @property
    def unsure_for(self) -> float:
        """Seconds for which it is unsure, after it stood still."""
        return self._lease / TIMES

    async def has(self, message: Delivery) -> bool:
        """Whether a message that was just fetched may be sent: not if another process has it."""
        return not self.is_unsure() or await self._renew([message])

    async def _renew(self, messages: Sequence[Delivery]) -> bool:
        """Renew these leases; whether it is known that none had ended."""
        try:
            lost = await self._center.extend(messages, self._lease)
        except Exception as exc:  # whatever it is, the next beat may renew them
            if not self._failing:
                logger.warning("cannot renew the leases of what is sent just now: %s", exc)
            self._failing = True
            return False
        self._failing = False
        return not lost


# -- tells others which queues a notifier sends


class Presence:
    """What a notifier has told of itself."""

    def __init__(self, center: AsyncTimeoutCenter) -> None:
        self._center = center
        self._told = ""
        self._due = -inf

    async def tell(self, queues: Iterable[str]) -> None:
        """It sends these just now; nothing is done if that was told a moment ago."""
        now = asyncio.get_running_loop().time()
        names = sorted(queues)
        statement = json.dumps([socket.gethostname(), os.getpid(), *names]) if names else ""
        if statement == self._told and (not statement or now < self._due):
            return
        before = [self._told] if self._told not in ("", statement) else []
        keys = self._center.keys
        try:
            await self._center.runner.run(announce_presence(keys, statement, before, PRESENCE_MS))
        except (RedisError, *BROKEN, TocError) as exc:
            logger.debug("nobody is told what is sent here: %s", exc)
            return
        self._told, self._due = statement, now + PRESENCE_INTERVAL


# -- the time of a request

#: Seconds for which the event loop may still read what has come when the time is over.
MOMENT = 0.01


class TimeLimit:
    """The time of a request, which a ``with`` block is. When it is over, the task is cancelled and
    the block ends; if the headers of an answer have come, only the reading of its rest ends.

    The loop reads what has come before that. If that is nothing, and this process stood still, the
    request has as much time again as its end was late, `seconds` at most: what stopped this process
    may have stopped the target too, or lost what it has sent, which its system then sends again.

    seconds: the time
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        #: the answer whose headers have come; it is closed when the time is over
        self.answer: Any = None
        #: whether the time is over
        self.is_over = False
        self._is_extended = self._has_cancelled = False
        self._cancelled_before = 0

    def __enter__(self) -> TimeLimit:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        if sys.version_info >= (3, 11):
            self._cancelled_before = task.cancelling()
        self._ends = self._loop.time() + self._seconds
        self._step: asyncio.Handle = self._loop.call_at(self._ends, self._read_on)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._step.cancel()
        if not self._has_cancelled:
            return False
        if sys.version_info >= (3, 11) and self._task.uncancel() > self._cancelled_before:
            return False  # somebody else has cancelled it, too
        return kind is not None and issubclass(kind, asyncio.CancelledError)

    def _read_on(self) -> None:
        """The time is over: let the loop read what has come."""
        late = self._loop.time() - self._ends
        self._step = self._loop.call_later(MOMENT, self._hand_over, late)

    def _hand_over(self, late: float) -> None:
        """Let the task have what was read in this turn of the loop. If it were cancelled now, it
        would not get that."""
        self._step = self._loop.call_soon(self._end, late)

    def _end(self, late: float) -> None:
        if self.answer is not None:
            self.is_over = True
            self.answer.close()
        elif late > MOMENT and not self._is_extended:
            self._is_extended = True
            self._step = self._loop.call_later(min(late, self._seconds), self._read_on)
        else:
            self.is_over = self._has_cancelled = True
            self._task.cancel()


# -- what becomes of a message by what its target has answered

#: Seconds after which a message comes again at the latest, whatever a target says.
MAX_BACKOFF = 86_400.0

#: Seconds after which it comes again at the earliest.
LEAST_BACKOFF = 1.0

#: Seconds for which nothing else is sent to a target that wants to be left alone, at most.
MAX_REST = 60.0

#: Bytes of an answer that are kept.
KEPT = 500


class Answer(NamedTuple):
    """What a target has answered."""

    status: int
    reason: str = ""
    retry_after: str = ""
    begin: bytes = b""  #: its first bytes


#: What becomes of a message.
DONE, AGAIN, GONE = "done", "again", "gone"


class Verdict(NamedTuple):
    """What becomes of a message."""

    what: str  #: DONE; AGAIN: it is rejected; GONE: its target wants nothing any more
    reason: str = ""  #: why, in a few words
    error: str = ""  #: the same with what was answered
    backoff: float | None = None  #: seconds until it comes again; None: as its topic says
    rest: float = 0.0  #: seconds for which the target wants to be left alone


def judge(answer: Answer | str, target: str, now: datetime) -> Verdict:
    """What becomes of a message.

    answer: or why there is none
    target: where it was sent to
    now: for a time at which the target wants to be asked again
    """
    where = shown(target)
    if isinstance(answer, str):
        return Verdict(AGAIN, answer, f"{where}: {answer}")
    if 200 <= answer.status < 300:
        return Verdict(DONE)
    reason = f"HTTP {answer.status}"
    if 300 <= answer.status < 400:
        reason += " (redirects are not followed)"
    said = "".join(
        c if c.isprintable() or c == "\n" else "\ufffd"
        for c in answer.begin[:KEPT].decode("utf-8", "replace")
    )
    error = f"{where}: {reason} {answer.reason}".rstrip() + (f"\n{said}" if said else "")
    if answer.status == 410:
        return Verdict(GONE, reason, error)
    if answer.status in (429, 503):
        seconds = seconds_of(answer.retry_after, now)
        if seconds is not None:
            return Verdict(AGAIN, reason, error, seconds, min(seconds, MAX_REST))
    return Verdict(AGAIN, reason, error)


def seconds_of(retry_after: str, now: datetime) -> float | None:
    """The header ``Retry-After`` in seconds; None if it says nothing."""
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return min(max(float(text[:9]), LEAST_BACKOFF), MAX_BACKOFF)
    try:
        at = parsedate_to_datetime(text)
        if at.tzinfo is None:
            at = at.replace(tzinfo=timezone.utc)
        seconds = (at - now).total_seconds()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return min(max(seconds, LEAST_BACKOFF), MAX_BACKOFF)


def backoff_of(failures: int, first: float, longest: float) -> float:
    """Seconds until a message comes again whose topic does not say."""
    return float(min(first * 2 ** min(failures, 30), max(longest, first)))


def shown(target: str) -> str:
    """A target as it is logged and kept: a query may have what is secret."""
    found = urlsplit(target)
    return f"{found.scheme}://{found.netloc}{found.path}" + ("?..." if found.query else "")


# -- what is under way to each target, and what may be fetched for it

logger = logging.getLogger(__name__)

#: Seconds that a lane waits for more room than a little: so a fetch brings several messages.
GATHER = 0.01

#: Bytes of messages that may be under way to one target; and of what compressed ones of these have
#: become, beside one.
MOST_BYTES = 32 << 20

#: Seconds that a message of a queue with a rate waits for its turn here, at most: its rate may have
#: been another one, and the clock that it is counted by may have been set.
MOST_TURN = 1.0

#: Seconds between two lines in the log about a target that fails.
SAY_EVERY = 60.0


class Lane:
    """A queue and its target.

    room: how many of its messages may be under way in this process
    on_room: called when it may be fetched for again, after it could not be, and when it must not be
        any more
    """

    def __init__(self, queue: str, target: str, room: int) -> None:
        self.queue = queue
        self.target = target
        self.limit = room
        self.on_room: Callable[[], None] = lambda: None
        self.under_way = 0
        #: those that messages name; what waits for these leaves its room to others
        self.hosts = Hosts(self._tell)
        self._bytes = 0
        #: bytes of what was compressed, and what rings when these are fewer
        self._expanded = 0
        self._freed = asyncio.Event()
        #: whether its target wants nothing any more, or it has none any more
        self.closed = False
        #: whether it was left out of a fetch
        self.left_out = False
        #: what else its topic says
        self.terms = Target(target, 0.0, 0.0)
        #: when the next message may be sent, if there are seconds between two
        self._next_at = -inf
        self._rests_until = -inf
        self._short_since = -inf
        self._failed = self._dead = 0
        self._says_again = -inf

    @property
    def room(self) -> int:
        """How many more may be fetched."""
        full = self._bytes + self._expanded >= MOST_BYTES
        busy = self.under_way - min(self.hosts.waiting, MOST_WAITING)
        return 0 if full else max(self.limit - busy, 0)

    def begin(self, now: float, size: int = 0) -> None:
        """One more is under way, of so many bytes."""
        self.under_way += 1
        self._bytes += size
        if self.room < self._enough:
            self._short_since = now

    def end(self, size: int = 0) -> None:
        """One has ended."""
        self.under_way -= 1
        self._bytes -= size
        self._tell()

    def _tell(self) -> None:
        if self.left_out:
            self.on_room()

    @asynccontextmanager
    async def expanding(self) -> AsyncIterator[Callable[[int], None]]:
        """In this block a message is expanded and sent. It begins when others have left memory for
        it; what it yields is told the bytes."""
        while self._expanded >= MOST_BYTES:
            self._freed.clear()
            await self._freed.wait()
        sizes: list[int] = []

        def tell(size: int) -> None:
            self._expanded += size
            sizes.append(size)

        try:
            yield tell
        finally:
            self._expanded -= sum(sizes)
            self._freed.set()

    @property
    def _enough(self) -> int:
        return max(self.limit // 4, 1)

    def ready_at(self) -> float:
        """From when on it may be fetched for; infinity: when something has ended."""
        if self.closed or not self.room:
            return inf
        if self.room >= self._enough:
            return self._rests_until
        return max(self._rests_until, self._short_since + GATHER)

    def turn(self, now: float) -> float:
        """Seconds until the next message may be sent, which has its turn then: nothing makes up
        for a moment in which the process stood still."""
        at = max(now, min(self._next_at, now + MOST_TURN))
        self._next_at = at + self.terms.spacing
        return at - now

    def rest(self, until: float) -> None:
        """Its target wants to be left alone until then."""
        self._rests_until = max(self._rests_until, until)
        self.on_room()

    def wants(self, now: float) -> bool:
        """Whether its target wants to be sent something."""
        return not self.closed and now >= self._rests_until

    def close(self) -> None:
        """Fetch nothing for it any more."""
        self.closed = True
        self.hosts.close()
        self.on_room()

    # -- what is said about it

    def failed(self, why: str, now: float, *, dead: bool) -> None:
        """A message was not taken.

        dead: whether it is a dead letter now
        """
        self._failed += 1
        self._dead += dead
        if now >= self._says_again:
            self._says_again = now + SAY_EVERY
            logger.warning(
                "queue %s: its target does not take messages (%d failed, %d of them dead now): %s",
                one_line(self.queue),
                *(self._failed, self._dead, one_line(" ".join(why.split())[:300])),
            )

    def worked(self) -> None:
        """A message was taken."""
        if self._failed:
            name = one_line(self.queue)
            logger.info("queue %s: %s takes messages again", name, shown(self.target))
            self._failed = self._dead = 0
            self._says_again = -inf
