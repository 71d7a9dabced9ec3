"""Makes the client for a broker URL: one server, sentinels, a Cluster, a unix socket, or the
embedded server; each with or without TLS where that applies."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import redis
from kombu.utils.imports import symbol_by_name
from redis import CredentialProvider
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, InvalidResponse, NoPermissionError, ResponseError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection

from ..compat import is_open
from ..errors import ConfigurationError, FailoverError, ServerError
from ..scripts.call import Packer
from .connection import Client, ClusterClient, Place
from .embedded import EmbeddedServer
from .errors import is_demoted
from .options import SENTINEL_PORT, Address, Settings, read_requirement

#: Seconds after which a command without a reply counts as a broken connection. Of a Cluster's node,
#: as many as opening a connection may take.
SOCKET_TIMEOUT = 10.0

#: Seconds that opening a connection may take, where Kombu does not say.
CONNECT_TIMEOUT = 5.0

#: Seconds for which a bounded pool waits for a free connection, unless an option says otherwise.
POOL_TIMEOUT = 20.0


def connect(address: Address, settings: Settings, **how: Any) -> Any:
    """A client for the server at this address; nothing is sent yet.

    connect_timeout: seconds that opening a connection may take
    ssl: as in Celery's ``broker_use_ssl``: a bool, or a dict of arguments
    credential_provider: a redis.CredentialProvider, or the name of such a class
    classes: those of the client of one server, and of a Cluster

    Raises ConfigurationError for options that cannot be used together, EmbeddedServerError if the
    embedded server cannot be started.
    """
    return _KINDS[address.kind](_Request(address, settings, **how))


@dataclass(frozen=True)
class _Request:
    """What :func:`connect` was given."""

    address: Address
    settings: Settings
    connect_timeout: float | None = None
    ssl: Any = None
    credential_provider: Any = None
    classes: tuple[Callable[..., Any], Callable[..., Any]] = (Client, ClusterClient)

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
    arguments = request.arguments()  # raises for a wrong one before a server is started
    path = request.address.path
    if request.address.kind == "embedded":
        path = EmbeddedServer.join(path).socket
    arguments["path"] = path
    for name in ("socket_keepalive", "socket_keepalive_options"):
        arguments.pop(name, None)
    _refuse_tls(arguments)
    return _pooled(redis.UnixDomainSocketConnection, arguments, request)


def _sentinel(request: _Request) -> Any:
    """The client of a master that sentinels know. Raises ConfigurationError if it has no name."""
    address, settings, arguments = request.address, request.settings, request.tcp_arguments()
    most, timeout = _bound(arguments)
    if not settings.master_name:
        raise ConfigurationError(
            f"toc+sentinel://{_shown(address)}: which master? Name it, as the sentinels do: "
            "?master_name=mymaster in the URL, or master_name in broker_transport_options"
        )
    options = {
        "socket_timeout": PATIENCE,
        "socket_connect_timeout": PATIENCE,
        "socket_keepalive": True,
        **settings.sentinel_kwargs,
        "retry": Retry(NoBackoff(), 0),  # other sentinels can be asked
        "protocol": 2,
    }
    if settings.sentinel_ssl:
        options.setdefault("ssl", True)
    if options.pop("ssl", False):
        own = any(name.startswith("ssl_") for name in options)
        options.update(tls_arguments(options if own else arguments))
        options["connection_class"] = TLSConnection
    else:
        options["connection_class"] = redis.Connection
        options = {k: v for k, v in options.items() if not k.startswith("ssl_")}
    # A sentinel's answers are redis-py's own: nothing of them concerns the center.
    asking = redis.Redis if request.classes[0] is Client else request.classes[0]
    sentinels = Sentinels([], settings.min_other_sentinels)
    sentinels.sentinels = [
        asking(connection_pool=redis.ConnectionPool(host=host, port=port, **options))
        for host, port in address.hosts
    ]
    arguments["connection_class"] = MasterTLSConnection if request.tls else MasterConnection
    pool: type[SentinelConnectionPool] = SentinelConnectionPool
    if most:
        pool = BoundedMasterPool
        arguments.update(max_connections=most, timeout=timeout)
    return _client(pool(settings.master_name, sentinels, **arguments), request)


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

    return request.classes[1](request.address.hosts, client_of)


#: Kind of URL (the part between ``toc+`` and ``://``) -> the function that makes its client.
_KINDS: dict[str, Callable[[_Request], Any]] = {
    "redis": _tcp,
    "rediss": _tcp,
    "unix": _unix,
    "embedded": _unix,
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
    return request.classes[0](connection_pool=pool)


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


# -- TLS: certificates are checked unless told otherwise, and an error says what to change

_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")

#: OpenSSL's reasons for not trusting a certificate: x509_vfy.h.
_NOT_YET, _EXPIRED, _WRONG_NAMES = 9, 10, (62, 63, 64)


def tls_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of redis-py's TLS connections among these, with strict defaults."""
    found = {k: v for k, v in given.items() if k.startswith("ssl_")}
    found["ssl_cert_reqs"] = read_requirement(found.get("ssl_cert_reqs", "required"))
    if found["ssl_cert_reqs"] == "none":
        found["ssl_check_hostname"] = False
    else:  # False before redis-py 6
        found.setdefault("ssl_check_hostname", True)
    return found


def _ends(exc: BaseException | None, kind: type, words: str) -> bool:
    """Whether an error of this kind, with these words, is among the causes of an error."""
    while exc is not None:
        ours = isinstance(exc, (kind, redis.ConnectionError))
        if ours and re.search(words, str(exc), re.IGNORECASE):
            return True
        exc = exc.__cause__ or exc.__context__
    return False


class TLSConnection(redis.SSLConnection):
    """A TLS connection whose errors say what to change. Raises ServerError if it cannot be
    opened."""

    def connect(self) -> None:
        with self._explained():
            super().connect()

    def connect_check_health(self, *args: Any, **kwargs: Any) -> None:
        with self._explained():
            super().connect_check_health(*args, **kwargs)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (redis.ConnectionError, redis.TimeoutError, OSError, ValueError) as exc:
            text = None if isinstance(exc, ServerError) else self.explain(exc)
            if text is None:
                raise
            raise ServerError(f"{self.host}:{self.port}: {text}") from exc

    def explain(self, exc: BaseException) -> str | None:
        """What to change, if an error of opening such a connection says it; it need not be open."""
        missing = [(n, p) for n in _FILES if (p := self._file(n)) and not os.access(p, os.R_OK)]
        if missing:
            return f"{missing[0][0]} {missing[0][1]!r} cannot be read: name a file that can"
        cause: BaseException | None = exc
        while cause is not None and not isinstance(cause, ssl.SSLError):
            cause = cause.__cause__ or cause.__context__
        said = str(cause or exc)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return self._distrust(cause)
        if "WRONG_VERSION_NUMBER" in said or _ends(exc, TimeoutError, "handshake"):
            return (
                f"no TLS is spoken there ({said}): use toc+redis:// (for sentinels: no ssl), "
                "or name the TLS port"
            )
        if "CERTIFICATE_REQUIRED" in said or "BAD_CERTIFICATE" in said:
            return (
                "the server wants a client's certificate: give it with ssl_certfile and ssl_keyfile"
            )
        if "ALERT" in said and ("UNKNOWN_CA" in said or "CERTIFICATE" in said):
            return (
                f"the server does not accept this client's certificate ({said}): give another "
                "with ssl_certfile and ssl_keyfile"
            )
        if isinstance(cause, ssl.SSLEOFError):
            cause = None
        if cause is not None and "_ALERT_" not in said:
            files = ", ".join(f"{n} {p!r}" for n in _FILES if (p := self._file(n)))
            return f"TLS fails: {said}" + (f"; see to {files}" if files else "")
        if cause is not None:
            return f"the server refuses TLS: {said}"
        if _ends(exc, OSError, "closed|reset|broken pipe|EOF occurred"):
            # The alert is lost if the server closes before it has read what was sent.
            given = (
                "accepts this client's certificate"
                if self.certfile
                else (
                    "wants a client's certificate: if so, give it with ssl_certfile and ssl_keyfile"
                )
            )
            return f"the server closes the connection ({said}): see whether it {given}"
        return None

    def _file(self, name: str) -> str | None:
        return getattr(self, name.removeprefix("ssl_"), None)

    def _distrust(self, exc: ssl.SSLCertVerificationError) -> str:
        why = exc.verify_message
        if exc.verify_code == _EXPIRED:
            return (
                "the server's certificate has expired: renew it there (if it is not so old, "
                "see to this machine's clock)"
            )
        if exc.verify_code == _NOT_YET:
            return (
                "the server's certificate is not valid yet: see to this machine's clock and "
                "to the server's, or renew it"
            )
        if exc.verify_code in _WRONG_NAMES or "mismatch" in why.lower():
            return (
                f"the server's certificate is for another host ({why}): put a name into the URL "
                "that it has, or have it made for this one; ssl_check_hostname=false does "
                "without the check"
            )
        return (
            f"the server's certificate is not trusted ({why}): name the file of the authority "
            "that signed it, ssl_ca_certs=/path/ca.pem"
        )


# -- a master that sentinels know

#: Seconds that one sentinel may take to answer before the next is asked.
PATIENCE = 2.0


class Sentinels(Sentinel):
    """As redis-py's, with errors that say what to change.

    on_other: called when a connection leads to another server than the one before
    """

    _address: tuple[str, int] | None = None
    on_other: Callable[[], None] | None = None

    def connected_to(self, address: tuple[str, int], role: Any) -> None:
        """A connection was opened to this master.

        role: its answer to ROLE, or its error. Sentinels may be out of date; Redis's documentation
            tells clients to verify the role

        Raises FailoverError if it is not the master.
        """
        if isinstance(role, Exception) and not isinstance(role, NoPermissionError):
            raise role
        if isinstance(role, list) and role[0] not in (b"master", "master"):
            raise FailoverError(
                f"{address[0]}:{address[1]} is not the master, though a sentinel says so: "
                "a failover goes on"
            )
        before, self._address = self._address, address
        if before not in (None, address) and self.on_other is not None:
            self.on_other()

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Host and port of the master. Raises ServerError if no sentinel names one."""
        silent, wrong, away = [], [], []
        known: set[str] = set()
        for number, sentinel in enumerate(self.sentinels):
            where = "{host}:{port}".format_map(sentinel.connection_pool.connection_kwargs)
            try:
                masters: Any = sentinel.sentinel_masters()
            except AuthenticationError as exc:
                wrong.append(
                    f"{where} refuses the password ({exc}): sentinels have their own, "
                    "sentinel_kwargs={'password': ...} in broker_transport_options"
                )
            except NoPermissionError as exc:
                wrong.append(f"{where}: {exc}: its user needs the rule +sentinel|masters")
            except (redis.ConnectionError, redis.TimeoutError, OSError) as exc:
                silent.append(f"{where} ({exc})")
            except (ResponseError, InvalidResponse, ValueError) as exc:
                wrong.append(_not_a_sentinel(where, exc))
            else:
                state = masters.get(service_name)
                if state is None:
                    known.update(masters)
                elif self.check_master_state(state, service_name):
                    # It is the first to be asked next time.
                    self.sentinels[0], self.sentinels[number] = sentinel, self.sentinels[0]
                    return state["ip"], state["port"]
                elif state["num-other-sentinels"] < self.min_other_sentinels:
                    away.append(
                        f"{where} knows of {state['num-other-sentinels']} other sentinels, and "
                        f"min_other_sentinels is {self.min_other_sentinels}"
                    )
                else:
                    away.append(f"{where} says that {state['ip']}:{state['port']} is down")
        if away:
            raise FailoverError(f"there is no master {service_name!r} just now: {'; '.join(away)}")
        if known:
            names = ", ".join(repr(name) for name in sorted(known))
            text = (
                f"the sentinels know no master {service_name!r}, but {names}: "
                "set master_name to the right one"
            )
        elif wrong:
            text = "; ".join(wrong)
        elif silent:
            text = (
                f"no sentinel answers: {'; '.join(silent)}; name the sentinels' hosts and ports "
                f"({SENTINEL_PORT} as a rule), not the server's; if they speak TLS, say "
                "sentinel_ssl=true"
            )
        else:
            text = f"the sentinels know no master yet: see to 'sentinel monitor {service_name} ...'"
        raise ServerError(text)


def _not_a_sentinel(where: str, exc: Exception) -> str:
    if "unknown command" in str(exc).lower():
        return (
            f"{where} is a server and not a sentinel: use toc+redis://{where}, or name the port "
            f"of its sentinels ({SENTINEL_PORT} as a rule)"
        )
    return f"{where} does not answer as a sentinel: {exc}"


class MasterConnection(SentinelManagedConnection):
    """A connection to the master. It is closed when the server is no longer the master, and the
    next use asks the sentinels again."""

    def connect_to(self, address: tuple[str, int]) -> None:
        super().connect_to(address)
        try:
            self.send_command("ROLE", check_health=False)
            role = self.read_response()
        except NoPermissionError:
            role = None
        try:
            self.connection_pool.sentinel_manager.connected_to(address, role)
        except FailoverError:
            self.disconnect()
            raise

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        # redis-py would connect to the master that it was told last time.
        if not is_open(self):
            self.connect()
        super().send_packed_command(command, check_health)

    def read_response(
        self, *args: Any, disconnect_on_error: bool | None = True, **kwargs: Any
    ) -> Any:
        # Not as SentinelManagedConnection does it. That leaves the connection open if the reader is
        # interrupted, so that the next command would get this reply; and it does not recognise
        # the refusal of a write within a script.
        parent: Any = super(SentinelManagedConnection, self)
        try:
            return parent.read_response(*args, disconnect_on_error=disconnect_on_error, **kwargs)
        except ResponseError as exc:
            if not is_demoted(exc):
                raise
            self.disconnect()
            raise ServerError(f"{self.host}:{self.port} is not the master any more") from exc


class MasterTLSConnection(MasterConnection, TLSConnection):
    """The same over TLS."""


class BoundedMasterPool(SentinelConnectionPool, redis.BlockingConnectionPool):
    """A pool of connections to a named master, with a bound; callers wait for a free one."""

    def disconnect(self, inuse_connections: bool = True) -> None:
        if inuse_connections:
            super().disconnect()
            return
        # redis-py before 8 closes those in use, too.
        for connection in list(self.pool.queue):
            if connection is not None:
                connection.disconnect()


def _shown(address: Address) -> str:
    return ",".join(f"{host}:{port}" for host, port in address.hosts)
