"""Broker URL -> redis-py client: standalone, Sentinel, Cluster, TLS, unix socket, embedded
server."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit
from weakref import WeakSet

import redis
from kombu.utils.imports import symbol_by_name
from redis import CredentialProvider
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    InvalidResponse,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.retry import Retry

from ..center.center import TimeoutCenter
from ..center.permissions import explained, is_refused
from ..errors import ConfigurationError, ServerError
from ..metrics.counters import Metrics
from ..plugin import KINDS
from ..scripts.call import Packer, patience_for, pieces
from .options import Settings, is_redis_pys, read
from .tls import TLSConnection, tls_arguments

DEFAULT_PORT = 6379

#: Seconds after which a command without a reply counts as a broken connection.
SOCKET_TIMEOUT = 10.0

#: Seconds that opening a connection may take, where Kombu does not say.
CONNECT_TIMEOUT = 5.0

#: Seconds without use after which a connection may have been closed by the server.
IDLE = 0.05

#: How a server refuses the number of a database.
_NO_DATABASE = re.compile(r"DB index is out of range|invalid DB index", re.IGNORECASE)

#: The oldest server whose commands suffice.
OLDEST = (6, 2)

# The second form is a password with a '/', '?' or '#' that should have been percent-encoded, or
# what lacks a scheme: unusable, and therefore shown in an error.
_SECRET = re.compile(
    r"(://[^/?#]*?:)[^/?#]*(@)"
    r"|((?:^|://)[^/?#@:;]*:(?!//|\d*(?:/\d*)?\?))[^;]*(@)"
    r"|([?&](?:password|ssl_password)=)[^&#;]*"
)


def mask_password(url: str, mask: str = "**") -> str:
    """The URL without its passwords."""

    def hide(match: re.Match[str]) -> str:
        if match[5]:
            return f"{match[5]}{mask}"
        return f"{match[1] or match[3]}{mask}@"

    return _SECRET.sub(hide, url)


#: Errors that pass by themselves or by an operator's hand. redis-py takes the first word off
#: those that it has a class for, and Redis 6.2 puts a script's name before those of a script.
_NOT_NOW = (ReadOnlyError, OutOfMemoryError, MasterDownError, ClusterDownError)
_NOT_NOW_WORDS = re.compile(
    r"\b(READONLY|MISCONF|NOREPLICAS|OOM|LOADING|MASTERDOWN|CLUSTERDOWN|BUSY|UNBLOCKED)\b"
)


def is_not_now(exc: BaseException) -> bool:
    """Whether an error reply means that the server cannot do it for now."""
    return isinstance(exc, _NOT_NOW) or _NOT_NOW_WORDS.search(str(exc)) is not None


def _told(reply: Any, pool: Any) -> Any:
    """A reply; in place of an error that passes, or that a rule may cure, a ServerError, caused
    by it."""
    if not isinstance(reply, ResponseError) or isinstance(reply, ServerError):
        return reply
    if is_refused(reply):
        return explained(reply, pool)
    if _NO_DATABASE.search(str(reply)):
        return _no_database(reply, pool)
    if not is_not_now(reply):
        return reply
    error = ServerError(refusal(reply, pool))
    error.__cause__ = reply
    return error


def refusal(exc: BaseException, pool: Any) -> str:
    """What to say of an error reply that passes by itself or by an operator's hand."""
    if isinstance(exc, OutOfMemoryError) or re.search(r"\bOOM\b", str(exc)):
        return (
            f"{_where(pool)} is full (maxmemory), and nothing was kept. Let workers drain it, "
            f"which they do all the same, or raise its maxmemory; then try again: {exc}"
        )
    return f"Redis refused a command: {exc}"


def _no_database(exc: Exception, pool: Any) -> ConfigurationError:
    error = ConfigurationError(
        f"{_where(pool)} has no database {pool.connection_kwargs.get('db')}; use a number that its "
        "setting 'databases' allows: 0 to 15 unless it is set"
    )
    error.__cause__ = exc
    return error


def open_of(pool: Any) -> Any:
    """An open connection of redis-py's pool that nobody uses, or None: the pool itself would make
    sure that it works, and so might wait."""
    idle = getattr(pool, "_available_connections", None)
    connection = idle.pop() if idle else None
    return None if connection is None or connection._sock is None else connection


#: Those of this process; a fork's child has them, too.
_clients: WeakSet[Client] = WeakSet()


class Client(redis.Redis):
    """Raises ServerError, a ConnectionError, where a server cannot do something for now: whoever
    uses it goes on as after a lost connection, and tries again."""

    def __init__(self, connection_pool: redis.ConnectionPool) -> None:
        super().__init__(connection_pool=connection_pool)
        self.thread = threading.get_native_id()
        #: connections of its own that nobody uses just now, and the monotonic seconds when
        #: somebody did
        self._free: deque[tuple[Any, float]] = deque()
        # A pool with a bound counts its connections, and new credentials reach only the pool's.
        pooled = isinstance(connection_pool, redis.BlockingConnectionPool)
        if pooled or connection_pool.connection_kwargs.get("credential_provider") is not None:
            self.run_packed = None
        else:
            _clients.add(self)

    def run_packed(self, commands: Sequence[bytes]) -> list[Any]:
        """Send commands as they go over the wire, and return their replies; of one that is
        refused, the error.

        For what runs often: as execute_command does it, redis-py's own work for a command takes
        longer than the server's.
        """
        with self.sending(commands) as read:
            return read(len(commands))

    @contextmanager
    def sending(self, commands: Sequence[bytes]) -> Iterator[Callable[[int], list[Any]]]:
        """As :meth:`run_packed`, in two steps: what it gives reads so many replies."""
        connection = self._connection()
        packed = b"".join(commands)

        def read(number: int) -> list[Any]:
            if more := patience_for(len(packed)):
                connection.can_read(timeout=more)
            replies: list[Any] = []
            for _ in range(number):
                try:
                    replies.append(connection.read_response())
                except ResponseError as exc:
                    replies.append(_told(exc, self.connection_pool))
            return replies

        try:
            connection.send_packed_command(pieces(packed))
            yield read
        except BaseException as exc:
            connection.disconnect()  # replies may come yet
            if isinstance(exc, ResponseError):  # it was refused when it connected
                raise _told(exc, self.connection_pool)  # noqa: B904 - as below
            raise
        finally:
            self._free.append((connection, time.monotonic()))

    def _connection(self) -> Any:
        """One that is this thread's until it is put back."""
        while self._free:
            try:
                connection, used = self._free.pop()
            except IndexError:  # another thread was faster
                break
            if connection.pid != os.getpid():  # its parent's
                continue
            if time.monotonic() > used + IDLE:
                _disconnect_if_broken(connection)
            return connection
        pool = self.connection_pool
        return pool.connection_class(**pool.connection_kwargs)

    def take_open(self) -> Any:
        """A connection that is open and that nobody uses just now, or None; asks nobody."""
        while self._free:
            try:
                connection, _ = self._free.pop()
            except IndexError:  # another thread was faster
                break
            if connection.pid == os.getpid() and connection._sock is not None:
                return connection
        return open_of(self.connection_pool)

    def drop_idle(self, seconds: float = 0.0) -> None:
        """Close the connections that nobody has used for so long: they may have been cut with
        another, or nobody needs them any more."""
        latest = time.monotonic() - seconds
        with suppress(IndexError):  # another thread was faster
            while self._free[0][1] <= latest:
                self._free.popleft()[0].disconnect()

    def close(self) -> None:
        """Close its connections; they open again when they are needed."""
        self.drop_idle()
        super().close()

    def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            if self.run_packed is None:
                return super().execute_command(*args, **options)
            return self.execute_all([(args, options)], True)[0]
        except ResponseError as exc:
            raise _told(exc, self.connection_pool)  # noqa: B904 - it has its cause already, if it is another

    def execute_all(self, commands: Sequence[tuple[Any, Any]], raises: bool) -> list[Any]:
        """As redis-py executes commands and reads what they reply, over the same connections as
        what is packed: a process seldom needs another one."""
        connection = self._connection()
        replies: list[Any] = []
        try:
            connection.send_packed_command(connection.pack_commands([args for args, _ in commands]))
            for args, options in commands:
                try:
                    replies.append(self.parse_response(connection, args[0], **options))
                except ResponseError as exc:
                    replies.append(exc)
        except BaseException:
            connection.disconnect()  # replies may come yet
            raise
        finally:
            self._free.append((connection, time.monotonic()))
        for reply in replies if raises else ():
            if isinstance(reply, Exception):
                raise reply
        return replies

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Pipeline:
        made = Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        made.run = None if transaction or self.run_packed is None else self.execute_all
        return made


def close_idle(seconds: float, thread: int | None = None) -> None:
    """Close the connections of this process that nobody has used for so long.

    thread: only those of clients that were made in this one, by its native id: where sockets are a
        loop's, no other thread may close them
    """
    for client in list(_clients):
        if thread in (None, client.thread):
            client.drop_idle(seconds)


def _disconnect_if_broken(connection: Any) -> None:
    """If the server has closed it, so do we: it connects anew when something is sent."""
    try:
        broken = connection.can_read(timeout=0)
    except (redis.ConnectionError, redis.TimeoutError, OSError):
        broken = True
    if broken:
        connection.disconnect()


class Pipeline(redis.client.Pipeline):
    """As :class:`Client`, for commands that are sent together."""

    #: what executes them instead of redis-py
    run: Callable[[Sequence[tuple[Any, Any]], bool], list[Any]] | None = None

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        try:
            if self.run is not None and not self.watching:
                stack, self.command_stack = self.command_stack, []
                replies = self.run(stack, raise_on_error) if stack else []
                return [_told(reply, self.connection_pool) for reply in replies]
            return [_told(r, self.connection_pool) for r in super().execute(raise_on_error)]
        except ResponseError as exc:
            raise _told(exc, self.connection_pool)  # noqa: B904 - as above


@dataclass
class Address:
    """Where a server is, and how to get in."""

    kind: str
    host: str = "localhost"
    port: int = DEFAULT_PORT
    path: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    query: dict[str, str] = field(default_factory=dict, repr=False)
    #: of the sentinels, or those of a Cluster's nodes that are named
    hosts: tuple[tuple[str, int], ...] = ()


def read_url(url: str) -> Address:
    """Take a broker URL apart, with or without its ``toc+``.

    Raises ConfigurationError, without the password in it, if it cannot be used.
    """
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
    except ValueError:  # its text may hold the password
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
    """``toc+cluster://user:password@h1:7000,h2:7000``: some nodes of a Cluster."""
    netloc, slash, tail = rest.partition("/")
    if not slash:
        netloc, mark, query = netloc.partition("?")
        tail = mark + query
    login, _, hosts = netloc.rpartition("@")
    login = f"{login}@" if login else ""
    each = [read_url(f"redis://{login}{host}/{tail}") for host in hosts.split(",") if host]
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
    """Hosts with commas between them, or URLs with semicolons between them, as Kombu has it.

    What only one of the URLs says holds for all.
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
            parts = urlsplit("//" + rest)
            for one in parts.netloc.split(","):
                host = urlsplit("//" + one)
                hosts.append((unquote(host.hostname or "localhost"), host.port or 26379))
                if host.username:
                    say("user", unquote(host.username))
                if host.password:
                    say("password", unquote(host.password))
        except ConfigurationError:
            raise
        except ValueError:  # its text may hold the password
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
    """Such a URL in the form with commas, without its password."""
    hosts = ",".join(
        f"[{host}]:{port}" if ":" in host else f"{quote(host)}:{port}"
        for host, port in address.hosts
    )
    user = f"{quote(address.username, safe='')}@" if address.username else ""
    query = f"?{urlencode(address.query)}" if address.query else ""
    return f"sentinel://{user}{hosts}/{address.db}{query}"


def server_url(url: str) -> str:
    """A broker URL as others than this transport have it: ``redis://``, ``rediss://`` or
    ``redis+socket://``, with those of its options that are redis-py's.

    Joins the embedded server if it is one's. Raises ConfigurationError for a URL that cannot be
    used, and for one of a Cluster or of sentinels, which is more than a server.
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
            from .embedded import EmbeddedServer

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


def connect(
    address: Address,
    settings: Settings,
    *,
    connect_timeout: float | None = None,
    ssl: Any = None,
    credential_provider: Any = None,
) -> redis.Redis:
    """A client for the server at this address; nothing is sent yet.

    Raises EmbeddedServerError if the embedded server cannot be started.
    """
    arguments: dict[str, Any] = {
        "db": address.db,
        "username": address.username,
        "password": address.password,
        "socket_timeout": SOCKET_TIMEOUT,
        "socket_connect_timeout": connect_timeout or CONNECT_TIMEOUT,
        "socket_keepalive": True,
        "health_check_interval": 0,
        **settings.connection,
        # A command whose reply was lost may have run: only who sent it knows what to do.
        "retry": Retry(NoBackoff(), 0),
        "command_packer": Packer(),
        # Replies are read raw; the older protocol is the one that every server version shares.
        "protocol": 2,
    }
    if address.kind == "cluster":
        from .cluster import ClusterClient

        def client_of(place: tuple[str, int]) -> Client:
            node = replace(address, kind="redis", host=place[0], port=place[1], hosts=())
            return connect(
                node,
                settings,
                connect_timeout=connect_timeout,
                ssl=ssl,
                credential_provider=credential_provider,
            )

        return ClusterClient(address.hosts, client_of)
    most = arguments.pop("max_connections", None)
    timeout = arguments.pop("timeout", None)
    if credential_provider is not None:
        arguments["credential_provider"] = credential_provider
    if arguments.get("credential_provider") is not None:
        arguments["credential_provider"] = _provider(arguments["credential_provider"])
        arguments["username"] = arguments["password"] = None
    if address.kind in ("unix", "embedded"):
        if address.kind == "embedded":
            from .embedded import EmbeddedServer

            arguments["path"] = EmbeddedServer.join(address.path).socket
        else:
            arguments["path"] = address.path
        for name in ("socket_keepalive", "socket_keepalive_options"):
            arguments.pop(name, None)
        _refuse_tls(arguments)
        cls: type = redis.UnixDomainSocketConnection
    else:
        cls = redis.Connection
        tls = address.kind == "rediss" or bool(ssl) or settings.ssl
        if tls:
            cls = TLSConnection
            if isinstance(ssl, dict):
                # With or without the prefix: so is Kombu's for other transports.
                arguments.update(
                    (k if k.startswith("ssl_") else f"ssl_{k}", v) for k, v in ssl.items()
                )
            arguments.update(tls_arguments(arguments))
        else:
            _refuse_tls(arguments)
        if address.kind == "sentinel":
            from .sentinel import make_pool

            pool = make_pool(address, settings, arguments, tls=tls, most=most, timeout=timeout)
            pool.prefix = settings.prefix
            return Client(connection_pool=pool)
        arguments.update(host=address.host, port=address.port)
    if most:
        pool: redis.ConnectionPool = redis.BlockingConnectionPool(
            connection_class=cls, max_connections=int(most), timeout=timeout or 20, **arguments
        )
    else:
        pool = redis.ConnectionPool(connection_class=cls, **arguments)
    pool.prefix = settings.prefix
    return Client(connection_pool=pool)


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


def _where(pool: Any) -> str:
    """The server that a pool's connections lead to, for an error."""
    if name := getattr(pool, "service_name", None):
        host, port = pool.master_address or ("?", "?")
        return f"{host}:{port} (master {name!r})"
    where = pool.connection_kwargs
    return where.get("path") or f"{where.get('host')}:{where.get('port')}"


def _speaks_tls(client: redis.Redis) -> bool:
    return issubclass(client.connection_pool.connection_class, redis.SSLConnection)


def check_server(client: redis.Redis) -> dict[str, Any]:
    """Make sure that a usable Redis or Valkey answers; return its ``INFO server``.

    Raises ServerError, or redis-py's own AuthenticationError and ConnectionError.
    """
    cluster = hasattr(client, "primaries")
    where = _where((client.client_for() if cluster else client).connection_pool)
    try:
        info = client.info("server")
    except (AuthenticationError, AuthorizationError):
        raise
    except redis.ConnectionError as exc:
        if not _speaks_tls(client) and re.search("closed|reset", str(exc)):
            raise ServerError(
                f"{where} closes the connection ({exc}): if it speaks TLS there, use "
                "toc+rediss://, or toc+sentinel://...&ssl=true"
            ) from exc
        raise
    except NoPermissionError:
        client.ping()  # an ACL user who may not ask; the scripts will tell
        return {}
    except ConfigurationError:
        raise
    except (InvalidResponse, ResponseError, ValueError, IndexError, AttributeError) as exc:
        hint = ""
        if "unknown command" in str(exc).lower():
            hint = f"; if it is a sentinel, use toc+sentinel://{where}/0?master_name=..."
        raise ServerError(
            f"{where} does not answer as a Redis or Valkey server: {exc}{hint}"
        ) from exc
    if "sentinel" in (info.get("redis_mode"), info.get("server_mode")):
        raise ServerError(
            f"{where} is a sentinel and not a server: use "
            f"toc+sentinel://{where}/0?master_name=..., with the name that it watches it by"
        )
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get("valkey_version") or info.get("redis_version") or "")
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if not numbers:
        raise ServerError(f"{where} does not answer as a Redis or Valkey server")
    if numbers < OLDEST:
        raise ServerError(
            f"{where} runs {name} {version}; 6.2 is the oldest that will do: upgrade it"
        )
    if not cluster and "cluster" in (info.get("redis_mode"), info.get("server_mode")):
        raise ServerError(
            f"{where} is a node of a Redis Cluster; use toc+cluster://{where}, and name more of "
            "its nodes, separated by commas"
        )
    return info


def durability_warnings(client: redis.Redis) -> list[str]:
    """What in a server's configuration may lose messages, each with what to set instead.

    Empty if nothing does, or if the server does not say. Source: the Redis manual on key
    eviction and on persistence.
    """
    warnings: dict[str, None] = {}
    for node in client.primaries() if hasattr(client, "primaries") else [client]:
        try:
            for warning in _durability_warnings(node):
                warnings[warning] = None
        except (ResponseError, NoPermissionError):
            pass  # a managed server that does not tell its configuration
    return list(warnings)


def _durability_warnings(client: redis.Redis) -> Iterator[str]:
    memory, persistence = client.info("memory"), client.info("persistence")
    policy = memory.get("maxmemory_policy", "noeviction")
    if memory.get("maxmemory") and policy != "noeviction":
        yield (
            f"Redis evicts keys when its memory is full (maxmemory-policy {policy}): tasks "
            "may vanish; set maxmemory-policy noeviction"
        )
    if persistence.get("aof_enabled"):
        return
    rules = str(client.config_get("save").get("save") or "")
    if not rules:
        yield "Redis has no persistence: all tasks are lost when it restarts; set appendonly yes"
        return
    # Each rule: a snapshot after so many seconds, if so many keys have changed.
    numbers = [int(number) for number in rules.split()]
    few, seconds = min(zip(numbers[1::2], numbers[::2], strict=True))
    within = f" in the {_minutes(seconds)} before" if few == 1 else " since the last one"
    yield (
        f"Redis writes snapshots only (save {rules}): a crash can lose all tasks that were sent"
        f"{within}; set appendonly yes"
    )


def _minutes(seconds: int) -> str:
    return f"{seconds} seconds" if seconds < 120 else f"{round(seconds / 60)} minutes"


class Memory(NamedTuple):
    """How much memory a server uses."""

    server: str  #: host and port, or its socket
    used: int  #: bytes
    most: int  #: bytes (``maxmemory``); 0 if nothing bounds it


def read_memory(client: redis.Redis) -> list[Memory]:
    """How much memory the server uses, or each node of a Cluster that has slots. Empty if the user
    may not ask."""
    found = []
    for node in client.primaries() if hasattr(client, "primaries") else [client]:
        try:
            info = node.info("memory")
        except (NoPermissionError, ResponseError):
            return []
        used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
        found.append(Memory(_where(node.connection_pool), used, most))
    return found


def center_for(url: str, *, ssl: Any = None, **options: Any) -> TimeoutCenter:
    """The timeout center behind a broker URL.

    ssl: as in Celery's ``broker_use_ssl``
    options: as in ``broker_transport_options``

    Raises ConfigurationError; the connection is made when it is first used.
    """
    address = read_url(url)
    settings = read(address.query, options)
    return make_center(connect(address, settings, ssl=ssl), settings)


def make_center(client: redis.Redis, settings: Settings) -> TimeoutCenter:
    """A center with these settings."""
    return TimeoutCenter(
        client,
        settings.prefix,
        steps=settings.priority_steps,
        slots=settings.slots,
        limits=settings.limits,
        wait_replicas=settings.toc_wait_replicas,
        wait_timeout=settings.toc_wait_timeout,
        metrics=_metrics(client, settings),
        pop_bytes=settings.toc_pop_bytes,
    )


def _metrics(client: redis.Redis, settings: Settings) -> Metrics:
    """Those of this process for a server: its connections come and go."""
    if not settings.toc_metrics:
        return Metrics(active=False)
    pool = client.connection_pool
    where = pool.connection_kwargs
    place = tuple(where.get(name) for name in ("host", "port", "path", "db"))
    if name := getattr(pool, "service_name", None):
        place = (repr(pool.sentinel_manager), name, where.get("db"))
    return Metrics.of((*place, settings.prefix))
