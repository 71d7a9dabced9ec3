"""Makes the client for a broker URL: one server, sentinels, a Cluster, a unix socket, or the
embedded server; each with or without TLS where that applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import redis
from kombu.utils.imports import symbol_by_name
from redis import CredentialProvider
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..errors import ConfigurationError
from ..scripts.call import Packer
from .cluster import ClusterClient, Place
from .connection import Client
from .embedded import EmbeddedServer
from .options import Settings
from .sentinel import make_pool
from .tls import TLSConnection, tls_arguments
from .urls import Address

#: Seconds after which a command without a reply counts as a broken connection. Of a Cluster's node,
#: as many as opening a connection may take.
SOCKET_TIMEOUT = 10.0

#: Seconds that opening a connection may take, where Kombu does not say.
CONNECT_TIMEOUT = 5.0

#: Seconds for which a bounded pool waits for a free connection, unless an option says otherwise.
POOL_TIMEOUT = 20.0


def connect(
    address: Address,
    settings: Settings,
    *,
    connect_timeout: float | None = None,
    ssl: Any = None,
    credential_provider: Any = None,
    classes: tuple[Callable[..., Any], Callable[..., Any]] = (Client, ClusterClient),
) -> Any:
    """A client for the server at this address; nothing is sent yet.

    connect_timeout: seconds that opening a connection may take
    ssl: as in Celery's ``broker_use_ssl``: a bool, or a dict of arguments
    credential_provider: a redis.CredentialProvider, or the name of such a class
    classes: those of the client of one server, and of a Cluster

    Raises ConfigurationError for options that cannot be used together, EmbeddedServerError if the
    embedded server cannot be started.
    """
    request = _Request(address, settings, connect_timeout, ssl, credential_provider, *classes)
    return _KINDS[address.kind](request)


@dataclass(frozen=True)
class _Request:
    """What :func:`connect` was given."""

    address: Address
    settings: Settings
    connect_timeout: float | None
    ssl: Any
    credential_provider: Any
    client: Callable[..., Any]
    cluster: Callable[..., Any]

    @property
    def tls(self) -> bool:
        return self.address.kind == "rediss" or bool(self.ssl) or self.settings.ssl

    def arguments(self) -> dict[str, Any]:
        """redis-py's arguments for a connection, and those of its pool."""
        arguments: dict[str, Any] = {
            "db": self.address.db,
            "username": self.address.username,
            "password": self.address.password,
            "socket_timeout": SOCKET_TIMEOUT,
            "socket_connect_timeout": self.connect_timeout or CONNECT_TIMEOUT,
            "socket_keepalive": True,
            "health_check_interval": 0,
            **self.settings.connection,
            # A command whose reply was lost may have run: only its sender knows what to do.
            "retry": Retry(NoBackoff(), 0),
            "command_packer": Packer(),
            # Replies are read raw, and every server version speaks the older protocol.
            "protocol": 2,
        }
        if self.credential_provider is not None:
            arguments["credential_provider"] = self.credential_provider
        if arguments.get("credential_provider") is not None:
            arguments["credential_provider"] = _provider(arguments["credential_provider"])
            arguments["username"] = arguments["password"] = None
        return arguments

    def tcp_arguments(self) -> dict[str, Any]:
        """The same, with those of TLS if the server speaks it."""
        arguments = self.arguments()
        if not self.tls:
            _refuse_tls(arguments)
            return arguments
        if isinstance(self.ssl, dict):
            # With or without the prefix ssl_, as Kombu's other transports take it.
            arguments.update(
                (k if k.startswith("ssl_") else f"ssl_{k}", v) for k, v in self.ssl.items()
            )
        arguments.update(tls_arguments(arguments))
        return arguments


def _tcp(request: _Request) -> Any:
    arguments = request.tcp_arguments()
    arguments.update(host=request.address.host, port=request.address.port)
    return _pooled(TLSConnection if request.tls else redis.Connection, arguments, request)


def _unix(request: _Request) -> Any:
    return _over_socket(request, request.arguments(), request.address.path)


def _embedded(request: _Request) -> Any:
    arguments = request.arguments()  # raises for a wrong one before a server is started
    return _over_socket(request, arguments, EmbeddedServer.join(request.address.path).socket)


def _over_socket(request: _Request, arguments: dict[str, Any], path: str) -> Any:
    arguments["path"] = path
    for name in ("socket_keepalive", "socket_keepalive_options"):
        arguments.pop(name, None)
    _refuse_tls(arguments)
    return _pooled(redis.UnixDomainSocketConnection, arguments, request)


def _sentinel(request: _Request) -> Any:
    arguments = request.tcp_arguments()
    most, timeout = _bound(arguments)
    pool = make_pool(
        request.address,
        request.settings,
        arguments,
        tls=request.tls,
        most=most,
        timeout=timeout,
        # A sentinel's answers are redis-py's own: nothing of them concerns the center.
        asking=redis.Redis if request.client is Client else request.client,
    )
    return _client(pool, request)


def _cluster(request: _Request) -> Any:
    settings = request.settings
    # Another node may be about to take over from one that hangs.
    patience = request.connect_timeout or CONNECT_TIMEOUT
    if settings.toc_wait_replicas:
        patience += settings.toc_wait_timeout
    settings = replace(settings, connection={"socket_timeout": patience, **settings.connection})
    request = replace(request, settings=settings)

    def client_of(place: Place) -> Any:
        node = replace(request.address, kind="redis", host=place[0], port=place[1], hosts=())
        return _tcp(replace(request, address=node))

    return request.cluster(request.address.hosts, client_of)


#: Kind of URL (the part between ``toc+`` and ``://``) -> the function that makes its client.
_KINDS: dict[str, Callable[[_Request], Any]] = {
    "redis": _tcp,
    "rediss": _tcp,
    "unix": _unix,
    "embedded": _embedded,
    "sentinel": _sentinel,
    "cluster": _cluster,
}


def _pooled(cls: type[Any], arguments: dict[str, Any], request: _Request) -> Any:
    most, timeout = _bound(arguments)
    pool: Any
    if most:
        pool = redis.BlockingConnectionPool(
            connection_class=cls, max_connections=most, timeout=timeout, **arguments
        )
    else:
        pool = redis.ConnectionPool(connection_class=cls, **arguments)
    return _client(pool, request)


def _bound(arguments: dict[str, Any]) -> tuple[int, float]:
    """Remove the pool's bound from the arguments: how many connections (0: any number), and how
    many seconds to wait for one."""
    most, timeout = arguments.pop("max_connections", None), arguments.pop("timeout", None)
    return int(most or 0), timeout or POOL_TIMEOUT


def _client(pool: Any, request: _Request) -> Any:
    pool.prefix = request.settings.prefix  # for the error that explains a refusal by an ACL
    return request.client(connection_pool=pool)


def _provider(given: Any) -> CredentialProvider:
    """A credential provider, or, as in Kombu, the name of a class of them."""
    made = given
    if isinstance(given, str):
        try:
            made = symbol_by_name(given)()
        except (ImportError, AttributeError, TypeError, ValueError) as exc:
            raise ConfigurationError(
                f"credential_provider {given!r} cannot be made: {exc}"
            ) from exc
    if not isinstance(made, CredentialProvider):
        raise ConfigurationError(
            "credential_provider must be a redis.CredentialProvider, or the name of such a class "
            f"(package.module:Class), not {given!r}"
        )
    return made


def _refuse_tls(arguments: dict[str, Any]) -> None:
    for name in arguments:
        if name.startswith("ssl_"):
            raise ConfigurationError(
                f"{name} is for TLS: use toc+rediss://, or ?ssl=true with toc+sentinel:// and "
                "toc+cluster://, or broker_use_ssl"
            )
