"""The targets of topics: which there are, and how one is stopped."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigurationError
from ..model.limits import interval_us
from ..model.topic import Declaration
from ..scripts.call import text

if TYPE_CHECKING:
    from ..center.center import TimeoutCenter


# -- the targets of topics


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


_ALLOWED = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*)):([0-9]{1,5})")


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
        if not address.scope_id:
            return address
        return ipaddress.IPv6Address(int(address))
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
