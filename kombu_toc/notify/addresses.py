"""Which addresses may be connected to: decided of the very address of each connection, so that it
does not matter what a name resolved to before."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache

from ..errors import ConfigurationError

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
