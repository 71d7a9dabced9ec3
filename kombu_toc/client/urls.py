"""Broker URLs: parsed, masked, and converted to the form that other libraries read."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from ..errors import ConfigurationError
from ..plugin import KINDS
from .embedded import EmbeddedServer
from .options import is_redis_pys, read

# -- broker URLs

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379

# The second form is a password with a '/', '?' or '#' that is not percent-encoded, or a URL without
# a scheme. Neither can be used, so both are shown in errors.
_SECRET = re.compile(
    r"(://[^/?#]*?:)[^/?#]*(@)"
    r"|((?:^|://)[^/?#@:;]*:(?!//|\d*(?:/\d*)?\?))[^;]*(@)"
    r"|([?&](?:password|ssl_password)=)[^&#;]*"
)

# Several hosts, then path and query. `urlsplit` refuses [::1] beside another host in newer Pythons.
_HOSTS_AND_TAIL = re.compile(r"([^/?]*)(.*)", re.DOTALL)


def mask_password(url: str, mask: str = "**") -> str:
    """The URL without its passwords."""

    def hide(match: re.Match[str]) -> str:
        if match[5]:
            return f"{match[5]}{mask}"
        return f"{match[1] or match[3]}{mask}@"

    return _SECRET.sub(hide, url)


@dataclass
class Address:
    """Where a server is, and the login for it."""

    kind: str
    host: str = "localhost"
    port: int = DEFAULT_PORT
    path: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    query: dict[str, str] = field(default_factory=dict, repr=False)
    #: host and port of each sentinel, or of the Cluster's nodes that the URL names
    hosts: tuple[tuple[str, int], ...] = ()


def read_url(url: str) -> Address:
    """Parse a broker URL, with or without its ``toc+``.

    Raises ConfigurationError, whose text has no password, if the URL cannot be used.
    """
    if not isinstance(url, str):
        raise ConfigurationError(
            f"a broker URL is a str: toc+redis://localhost:6379/0, not a {type(url).__name__}"
        )
    scheme, _, rest = url.partition("://")
    kind = "redis" if scheme == "toc" else scheme.removeprefix("toc+")
    shown = mask_password(url)
    if kind not in KINDS:
        raise ConfigurationError(
            f"{shown}: unknown scheme; use one of {', '.join('toc+' + k for k in KINDS)}"
        )
    if kind == "cluster":
        return _read_cluster(rest, shown)
    if kind == "sentinel":
        return _read_sentinels(url, shown)
    try:
        parts = urlsplit("//" + rest)
        port = parts.port
    except ValueError:  # its text may contain the password
        raise _unreadable(shown) from None
    address = Address(
        kind,
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        query=dict(parse_qsl(parts.query, keep_blank_values=True)),
    )
    if kind in ("unix", "embedded"):
        # Kombu's own spelling of sockets, redis+socket://, allows a host part: a relative path.
        address.path = unquote((parts.netloc.rpartition("@")[2]) + parts.path)
        address.db = _database(shown, address.query.pop("virtual_host", None))
        address.db = _database(shown, address.query.pop("db", None)) or address.db
        if kind == "unix" and not address.path:
            raise ConfigurationError(f"{shown}: name the socket, as in toc+unix:///run/redis.sock")
        return address
    address.host = unquote(parts.hostname or "localhost")
    address.port = port or DEFAULT_PORT
    path = unquote(parts.path).strip("/")
    address.db = _database(shown, address.query.pop("db", None) or path)
    return address


def _read_cluster(rest: str, shown: str) -> Address:
    """``toc+cluster://user:password@h1:7000,h2:7000``: one or more nodes of a Cluster."""
    netloc, tail = _HOSTS_AND_TAIL.findall(rest)[0]
    login, _, hosts = netloc.rpartition("@")
    login = f"{login}@" if login else ""
    each = [read_url(f"redis://{login}{host}{tail}") for host in hosts.split(",") if host]
    if not each:
        raise ConfigurationError(f"{shown}: name a node, as in toc+cluster://host:7000")
    address = each[0]
    address.kind = "cluster"
    address.hosts = tuple(dict.fromkeys((one.host, one.port) for one in each))
    if address.db:
        raise ConfigurationError(
            f"{shown}: a Redis Cluster has no database numbers, only 0; leave /{address.db} out, "
            "and tell apps apart by global_keyprefix in broker_transport_options"
        )
    return address


def _unreadable(shown: str) -> ConfigurationError:
    return ConfigurationError(
        f"{shown}: the host or the port cannot be read; in a password, percent-encode '/', "
        "'?', '#' and '@'"
    )


def _read_sentinels(url: str, shown: str) -> Address:
    """Sentinels, separated by commas, or as Kombu's list of URLs, separated by semicolons.

    A setting that one URL of a list has applies to all of them.
    """
    address = Address("sentinel")
    hosts: list[tuple[str, int]] = []
    said: dict[str, Any] = {}

    def say(name: str, value: Any) -> None:
        if said.setdefault(name, value) != value:
            raise ConfigurationError(
                f"{shown}: its sentinels' URLs differ in {name}; they lead to one broker"
            )

    for part in url.split(";"):
        scheme, _, rest = part.partition("://")
        if scheme.removeprefix("toc+") != "sentinel":
            raise ConfigurationError(f"{shown}: sentinels stand among others; name them alone")
        try:
            netloc, tail = _HOSTS_AND_TAIL.findall(rest)[0]
            parts = urlsplit("//" + tail)
            for one in netloc.split(","):
                host = urlsplit("//" + one)
                hosts.append((unquote(host.hostname or "localhost"), host.port or SENTINEL_PORT))
                if host.username:
                    say("user", unquote(host.username))
                if host.password:
                    say("password", unquote(host.password))
        except ConfigurationError:
            raise
        except ValueError:  # its text may contain the password
            raise _unreadable(shown) from None
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            say(f"?{name}", value)
        if path := unquote(parts.path).strip("/"):
            say("database", _database(shown, path))
    address.hosts = tuple(dict.fromkeys(hosts))
    address.host, address.port = address.hosts[0]
    address.username, address.password = said.get("user"), said.get("password")
    address.query = {name[1:]: value for name, value in said.items() if name[0] == "?"}
    address.db = _database(shown, address.query.pop("db", None) or said.get("database"))
    return address


def sentinel_url(address: Address) -> str:
    """The URL of sentinels in the form with commas, without its password."""
    hosts = ",".join(
        f"[{host}]:{port}" if ":" in host else f"{quote(host)}:{port}"
        for host, port in address.hosts
    )
    user = f"{quote(address.username, safe='')}@" if address.username else ""
    query = f"?{urlencode(address.query)}" if address.query else ""
    return f"sentinel://{user}{hosts}/{address.db}{query}"


def server_url(url: str) -> str:
    """A broker URL as other libraries read it: ``redis://``, ``rediss://`` or
    ``redis+socket://``, with those of its options that are redis-py's.

    Joins the embedded server if the URL names one. Raises ConfigurationError for a URL that cannot
    be used, and for the URL of a Cluster or of sentinels, which name several servers.
    """
    address = read_url(url)
    if address.kind in ("cluster", "sentinel"):
        raise ConfigurationError(f"{mask_password(url)} is not the URL of one server")
    query = {name: value for name, value in address.query.items() if is_redis_pys(name)}
    tls = address.kind == "rediss" or read(address.query, {}).ssl
    login = ""
    if address.username or address.password:
        user, password = (quote(s or "", safe="") for s in (address.username, address.password))
        login = f"{user}:{password}@"
    if address.kind in ("unix", "embedded"):
        path = address.path
        if address.kind == "embedded":
            path = EmbeddedServer.join(address.path).socket
        if address.db:
            query["virtual_host"] = str(address.db)
        plain = f"redis+socket://{login}{quote(path)}"
    else:
        host = f"[{address.host}]" if ":" in address.host else quote(address.host)
        scheme = "rediss" if tls else "redis"
        plain = f"{scheme}://{login}{host}:{address.port}/{address.db}"
        if tls:
            query.setdefault("ssl_cert_reqs", "required")
    return f"{plain}?{urlencode(query)}" if query else plain


def _database(shown: str, text: Any) -> int:
    text = str(text or "0").strip("/") or "0"
    if not (text.isascii() and text.isdigit()):
        raise ConfigurationError(f"{shown}: the database must be a number")
    return int(text)


# -- how many files the process may have open

logger = logging.getLogger(__name__)

#: As many as a server for thousands needs.
WANTED = 65_536


def raise_file_limit() -> None:
    """Let as many connections be open as the system allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as exc:
            logger.debug("the limit of open files stays %d: %s", soft, exc)
