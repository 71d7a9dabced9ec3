"""From where a request may come that has no token: this machine, and no page of another site."""

from __future__ import annotations

import ipaddress

from .problems import Problem
from .requests import Request, Scope

_PORT_DIGITS = 5
_LOCAL_NAMES = ("localhost", "ip6-localhost")


def check_local(scope: Scope, request: Request) -> None:
    """Raises Problem for what does not come from this machine: there are no tokens. Neither a page
    in a browser nor a proxy may reach it: they ask for somebody else."""
    client = scope.get("client")
    if client is not None and not is_loopback(client[0]):
        raise _not_local("it comes from another machine")
    for header in request.headers:
        if header in _OF_PROXIES or header.startswith(b"x-forwarded"):
            raise _not_local("it comes through a proxy")
    host = request.header(b"host")
    named = host_of(host)
    if named and not is_loopback(named):
        raise _not_local("it names another host")
    origin = request.header(b"origin")
    if origin and origin.partition("://")[2] != host:
        raise _not_local("it comes from a page of another site")


#: Headers by which a proxy says that it is one; those beginning with x-forwarded are others. A
#: proxy that says nothing cannot be told from a client.
_OF_PROXIES = frozenset((b"via", b"forwarded", b"x-real-ip", b"client-ip", b"x-client-ip"))


def host_of(host: str) -> str:
    """The host in a header ``Host``, without its port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).strip("[]").lower()


def port_of(host: str) -> str:
    """The port in a header ``Host``; empty if it is that of the scheme."""
    port = host.rpartition(":")[2]
    return port if port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS else ""


def check_name(request: Request, names: frozenset[str]) -> None:
    """Raises Problem for a request without a token that names a host which is not this server's:
    a page in a browser can have its own name lead here, and read what its user can reach. By an
    address no page can."""
    named = host_of(request.header(b"host"))
    if named and named not in names and not is_loopback(named) and not _is_address(named):
        raise Problem(
            "forbidden",
            f"without a token, this server answers to its address or to a name of its own, and "
            f"{named[:100]!r} is none: --name {named[:100]} makes it one",
            "host",
        )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _not_local(why: str) -> Problem:
    return Problem(
        "forbidden",
        f"without tokens, only requests from this machine are answered, and {why}; "
        "make a token: python -m kombu_toc.http --new-token NAME",
    )


def is_loopback(host: str) -> bool:
    """Whether a name or an address is of this machine only."""
    if host.lower() in _LOCAL_NAMES:
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback
