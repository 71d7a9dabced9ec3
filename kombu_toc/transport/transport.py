"""The transport: a connection of Kombu's to the timeout center."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache, cached_property, partial
from importlib.metadata import entry_points
from queue import Empty
from typing import Any
from urllib.parse import quote

import redis
from kombu.transport import virtual
from kombu.utils.url import as_url
from redis import exceptions

from ..center.center import CONSUMERS, PRODUCERS, TimeoutCenter, check_permitted, make_center
from ..center.exchanges import Routes
from ..center.failures import FailureWriter
from ..client.connect import CONNECT_TIMEOUT, connect
from ..client.connection import Client, ClusterClient
from ..client.errors import check_server
from ..client.options import (
    Address,
    Settings,
    hide,
    mask_password,
    mask_secrets,
    read,
    read_url,
    sentinel_url,
)
from ..compat import SOCKET
from ..consumer.connections import BROKEN, RestingNodes
from ..consumer.lease_keeper import LeaseKeeper
from ..consumer.poller import Poller
from ..errors import ConfigurationError, FailoverError, NotPermittedError, ServerError
from ..library.opening import attach, check_needs
from ..scripts.call import ScriptCall
from .channel import Channel

logger = logging.getLogger(__name__)

#: Seconds between attempts to reach a server that a replica is about to replace.
PAUSE = 0.1

#: Seconds that a node of a Cluster may take to answer the lease keeper, and to take an answer to
#: remote control.
BEAT_TIMEOUT = 2.0
BRIEFLY = 0.5

#: Seconds that a connection that closes waits until failed tasks are kept.
FLUSH = 2.0

#: The extensions that are installed; looked for once: that reads a file of each package.
_extensions = cache(lambda: tuple(entry_points(group="kombu_toc.extensions")))
_extended: set[str] = set()

#: The servers at which a process has consumed: see :attr:`Transport.identity`; and which process.
_consumers: dict[Hashable, int] = {}

#: The same -> what this process knows of a Cluster, whatever becomes of its connections: topics as
#: they were read last, bindings that were made, and nodes that were not reached.
_memories: dict[Hashable, tuple[dict[str, Any], set[Any], dict[Hashable, Any]]] = {}


def _load_extensions() -> None:
    """Load the extensions of this transport.

    The entry point of an extension has the name of a package. It is loaded when that package is in
    use.
    """
    for entry in _extensions():
        if entry.name in _extended or entry.name not in sys.modules:
            continue
        _extended.add(entry.name)
        try:
            entry.load()()
        except ConfigurationError:
            _extended.discard(entry.name)
            raise
        except Exception:  # the transport works without it
            logger.exception("cannot load the extension %s", entry.value)


class Transport(virtual.Transport):
    """Kombu's side of the timeout center."""

    Channel = Channel
    client: Any
    #: of the client of one server, and of a Cluster
    client_classes: tuple[type[Any], type[Any]] = (Client, ClusterClient)
    #: where exchanges send what is published to them
    routes: Routes | None = None

    can_parse_url = True
    default_port = 6379  # type: ignore[assignment]  # Kombu says None
    polling_interval = None  # type: ignore[assignment]  # Kombu's own way to have none
    #: Celery's events, gossip, mingle and worker_disable_prefetch ask for it by this name.
    driver_type = "redis"
    driver_name = "redis"

    implements = virtual.Transport.implements.extend(
        asynchronous=True,
        batch_publish=True,
        exchange_type=frozenset(["direct", "topic", "fanout"]),
    )

    connection_errors = (  # type: ignore[assignment]  # of any length, not of one
        *virtual.Transport.connection_errors,
        OSError,
        exceptions.ConnectionError,
        exceptions.TimeoutError,
        exceptions.BusyLoadingError,
        exceptions.AuthenticationError,
        exceptions.AuthorizationError,
        exceptions.InvalidResponse,
        exceptions.ReadOnlyError,
    )
    channel_errors = (  # type: ignore[assignment]  # as above
        *virtual.Transport.channel_errors,
        exceptions.DataError,
        exceptions.ResponseError,
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)  # type: ignore[no-untyped-call]  # Kombu's
        self.address, self.settings = self._read(client)
        if self.settings.toc_library:
            self._record(client)
        if self.settings.toc_otel:
            self._trace()
        if self.address.kind == "cluster":
            # Kombu tries once more after it has connected again, and as often as it was told to if
            # there is this: that it could connect says nothing of the node that it needs.
            self.recoverable_connection_errors = self.connection_errors
        # The URL stays in `hostname`, which Celery shows in `inspect stats`: not the password.
        if self.address.password and "://" in str(client.hostname or ""):
            client.password = self.address.password
            client.hostname = _with_login(client.hostname)
        self._center: TimeoutCenter | None = None
        self._poller: Poller | None = None
        self._failures: FailureWriter | None = None
        #: for what may take a moment only, and the nodes of a Cluster that did not answer it
        self._brief: TimeoutCenter | None = None
        self._resting: RestingNodes[Hashable] = RestingNodes()
        self._may_consume = False
        # The base class makes a cycle that polls each channel. The poller does its work.
        self.cycle = None
        _load_extensions()

    @staticmethod
    def _read(client: Any) -> tuple[Address, Settings]:
        hostname = str(client.hostname or "")
        if "://" in hostname:
            address = _read_all(client, hostname)
        else:
            # After a failover Kombu has taken the URL apart itself.
            scheme = str(client.transport_cls or "toc")
            kind = scheme.partition("+")[2] or "redis"
            rest = f"/{client.virtual_host}".replace("//", "/") if client.virtual_host else ""
            address = read_url(
                f"{kind}://{hostname}{f':{client.port}' if client.port else ''}{rest}"
            )
        address.username = address.username or client.userid or None
        address.password = address.password or client.password or None
        if callable(address.password):
            address.password = address.password()
        return address, read(address.query, client.transport_options or {})

    def _record(self, client: Any) -> None:
        """Have a library. Raises ConfigurationError where there cannot be one."""
        check_needs()
        from .recorded import RecordedChannel

        # Kombu shows the options to whoever asks a worker.
        client.transport_options = dict(client.transport_options or {})
        for name in ("toc_library", "toc_library_before"):
            hide(client.transport_options, name)
        self.Channel = RecordedChannel

    def _trace(self) -> None:
        """Have a span for each message. Raises ConfigurationError without OpenTelemetry's API."""
        from ..tracing import tracing_of  # it needs an extra
        from .traced import traced

        #: what the channels make spans with
        self.tracing = tracing_of(self.settings, self.address)
        self.Channel = traced(self.Channel)

    # -- what it is made of, made when first used

    def _connecting(self, settings: Settings) -> Callable[..., redis.Redis]:
        """Return a function that connects as this connection does, also when this one is closed:
        Kombu has taken its client away by then."""
        return partial(
            connect,
            self.address,
            settings,
            connect_timeout=self.client.connect_timeout,
            ssl=self.client.ssl,
            credential_provider=getattr(self.client, "credential_provider", None),
        )

    def _connect(self) -> redis.Redis:
        made = self._connecting(self.settings)(classes=self.client_classes)
        if self.address.kind == "sentinel":
            manager: Any = made.connection_pool.sentinel_manager  # type: ignore[attr-defined]
            manager.on_other = self._forget_clocks
        return made

    def _forget_clocks(self) -> None:
        """Another server answers from now on."""
        if self._poller is not None:
            self._poller.clock.forget()
        for channel in list(self.channels or ()):
            channel.publisher.forget_clock()

    @property
    def center(self) -> TimeoutCenter:
        """The timeout center behind this connection."""
        if self._center is None:
            self._center = make_center(self._connect(), self.settings)
            self.routes = Routes(self._center)
            if self._center.clustered:
                registry, runner = self._center.registry, self._center.runner
                memory = _memories.setdefault(self.identity, ({}, set(), {}))
                registry.memory, registry.bound, runner.unreached = memory
            if self.settings.toc_library:
                self._attach(self._center)
        return self._center

    def _attach(self, center: TimeoutCenter) -> None:
        """Have the center use the library."""
        attach(center, self.settings, self.address, self._making())

    @property
    def may_be_away(self) -> bool:
        """Whether a connection is of use while the server is away: what is sent is in the library,
        and follows. Who consumes waits for the server."""
        consumes = self._may_consume or _consumers.get(self.identity) == os.getpid()
        return bool(self.settings.toc_library) and not consumes

    @property
    def failures(self) -> FailureWriter:
        """What keeps failed tasks."""
        if self._failures is None:
            self._failures = FailureWriter(self.center.failures, self.settings.failures)
        return self._failures

    @property
    def identity(self) -> tuple[Any, ...]:
        """The identity of a server and a prefix."""
        a = self.address
        where = (a.kind, a.host, a.port, a.path, a.db, a.username, self.settings.prefix)
        return (*where, a.hosts, self.settings.master_name)

    @cached_property
    def lease_keeper(self) -> LeaseKeeper:
        """The lease keeper of this process for this server."""
        center = self._making(BEAT_TIMEOUT)
        # By the login too: a password that was in use before may not be valid any more.
        provider = getattr(self.client, "credential_provider", None)
        provider = provider or self.settings.connection.get("credential_provider")
        whose = (self.identity, (self.address.password, provider))
        return LeaseKeeper.of(whose, center, self.center.metrics)

    def _making(self, patience: float = 0.0) -> Callable[[], TimeoutCenter]:
        """Return a function that makes centers with connections of their own.

        patience: seconds that a node of a Cluster may take: one that hangs must not hold up what
            concerns the others; 0: as many as this connection's own
        """
        settings = self.settings
        if patience and self.address.kind == "cluster":
            patience = min(settings.connection.get("socket_timeout") or patience, patience)
            brief = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), patience)
            settings = replace(settings, connection={**settings.connection, **brief})
        connecting = self._connecting(settings)
        return lambda: make_center(connecting(), settings)

    def run_briefly(self, call: ScriptCall) -> None:
        """Run a call that puts a message; on a Cluster, only if its node answers within a moment.

        Raises what a broken connection raises, and at once if the node has just failed to answer.
        """
        if not self.center.clustered:
            self.center.runner.run_puts([call], wait=False)
            return
        if self._brief is None:
            self._brief = self._making(BRIEFLY)()
            self._brief.client.patience = BRIEFLY
        node = self._brief.client.place_of(call.keys[0])
        if self._resting.rests(node, time.monotonic()):
            raise ServerError(f"{node[0]}:{node[1]} did not answer a moment ago")
        try:
            self._brief.runner.run_puts([call], wait=False)
        except BROKEN:
            self._resting.lost(node, time.monotonic())
            raise
        self._resting.reached(node)

    @property
    def poller(self) -> Poller:
        if self._poller is None:
            self._poller = Poller(self.center, self.settings, self.lease_keeper, self.identity)
        return self._poller

    def check_consumer(self) -> None:
        """Make sure that this user may consume. Raises NotPermittedError."""
        if not self._may_consume:
            _consumers[self.identity] = os.getpid()
            SOCKET.usable()
            check_permitted(self.center, CONSUMERS)
            self._may_consume = True

    # -- Kombu's calls

    def driver_version(self) -> str:
        return redis.__version__

    @property
    def default_connection_params(self) -> dict[str, Any]:
        return {"hostname": "redis://localhost", "port": self.default_port}

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """The broker's URL, its passwords masked unless asked for."""
        client = self.client
        if "://" not in str(uri or ""):
            scheme = str(client.transport_cls or "toc")
            scheme = scheme if scheme.startswith("toc") else f"toc+{scheme}"
            uri = as_url(
                scheme,
                uri,
                client.port,
                client.userid,
                client.password,
                quote(str(client.virtual_host or "").strip("/")),
            )
        else:
            if client.password:
                uri = _with_login(uri, client.password)
            if not uri.startswith("toc"):
                uri = f"toc+{uri}"
        return uri if include_password else mask_password(uri, mask)

    def info(self) -> dict[str, Any]:
        """What its connection's `info` tells, without secrets."""
        told = {n: value for n, value in self.client.info().items() if n != "password"}
        masked: dict[str, Any] = mask_secrets(told)
        return masked

    def establish_connection(self) -> Transport:
        """Make sure that a usable server answers.

        Raises one of ``connection_errors``.
        """
        try:
            if self._reach():
                check_permitted(self.center, PRODUCERS)
                if self.identity in _consumers:  # it would be refused only a moment later
                    self.check_consumer()
            self._open_channel()
        except NotPermittedError:
            self._drop_client()
            raise
        except BROKEN:
            if not self.may_be_away:
                self._drop_client()
                raise
            self._open_channel()
        except BaseException:
            self._drop_client()
            raise
        return self

    def _open_channel(self) -> None:
        channel = self.create_channel(self)  # type: ignore[no-untyped-call]  # Kombu's
        self._avail_channels.append(channel)

    def _reach(self) -> bool:
        """Make sure that a usable server answers; of a Cluster, that the node does which the last
        publish has missed. False if the node that has the keys of no single slot is away: who
        consumes waits for it, and who has published before goes on with the others.

        While a Cluster or sentinels replace a server, this waits for the new one, as long as
        connecting may take: Kombu's own pauses between attempts may be longer, or too few.
        """
        center = self.center
        deadline = time.monotonic() + (self.client.connect_timeout or CONNECT_TIMEOUT)
        missed, self.client.toc_missed = getattr(self.client, "toc_missed", None), None
        consumes = _consumers.get(self.identity) == os.getpid()

        def usable() -> bool:
            check_server(center.client)
            # One that does not write for now is found out here, where who connects waits longer
            # and longer between attempts.
            center.client.unlink(center.keys.write_probe)
            return True

        def go_on(error: Exception) -> bool:
            if not center.registry.memory:
                raise error
            return False

        while True:
            try:
                if missed is not None and center.clustered:
                    center.client.client_for(missed).ping()
                if consumes:
                    return usable()
                return center.runner.at_home(center.keys.topics, usable, go_on)
            except (exceptions.AuthenticationError, exceptions.AuthorizationError):
                raise
            except BROKEN as exc:
                if not self._is_replaced(exc):
                    raise
                if time.monotonic() >= deadline:
                    if missed is None:
                        raise
                    missed = None  # the publish fails by itself, and others do not
                    continue
            if center.clustered:
                center.client.refresh()  # if no node answers, there is nothing to wait for
            center.client.sleep(PAUSE)  # they find a new one among themselves

    def _is_replaced(self, exc: Exception) -> bool:
        """Whether somebody may be about to take the place of a server that is away."""
        if self.address.kind == "sentinel":
            # The others say that the sentinels cannot be used, or know no such master.
            return isinstance(exc, FailoverError) or not isinstance(exc, ServerError)
        return self.center.clustered

    def miss(self, key: str | bytes) -> None:
        """A publish has failed for want of a Cluster's node: let the next attempt to connect, which
        Kombu makes before it repeats the publish, find out whether there is one again."""
        # On Kombu's connection, which outlives this.
        self.client.toc_missed = key

    def close_connection(self, connection: Any) -> None:
        try:
            for channels in self._avail_channels, self.channels:
                while channels:
                    channels.pop().close()
        finally:
            if self._poller is not None:
                self._poller.close()
                self._poller = None
            if self._failures is not None:
                self._failures.flush(FLUSH)
                self._failures = None
            self._drop_client()

    def _drop_client(self) -> None:
        used, self._center, self._brief = (self._center, self._brief), None, None
        for center in filter(None, used):
            center.client.close()
            center.client.connection_pool.disconnect()

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        self.poller.register(loop)

    def unregister_from_event_loop(self, connection: Any, loop: Any) -> None:
        self.poller.unregister()

    def drain_events(  # type: ignore[override]  # Kombu passes nothing else
        self, connection: Any, timeout: float | None = None
    ) -> None:
        """Deliver what has come; raises socket.timeout if nothing does in `timeout` seconds."""
        try:
            self.poller.get(None, timeout=timeout)
        except Empty:
            raise TimeoutError() from None


def _read_all(client: Any, hostname: str) -> Address:
    """A URL; or several of sentinels, of which Kombu would try one after the other as brokers."""
    urls = [str(url) for url in client.alt or ()]
    if any(url.partition("://")[0].removeprefix("toc+") != "sentinel" for url in urls):
        urls = []
    address = read_url(";".join(urls) or hostname)
    if address.kind == "sentinel":
        client.hostname = sentinel_url(address)
        if urls:
            client.alt, client.cycle = [], None
    return address


def _with_login(url: str, password: str | None = None) -> str:
    """The URL with this password and no other; without one if it is None."""
    scheme, _, rest = url.partition("://")
    head, slash, tail = rest.partition("/")
    login, _, host = head.rpartition("@")
    login = login.partition(":")[0]
    if password is not None:
        login = f"{login}:{quote(str(password), safe='')}"
    return f"{scheme}://{f'{login}@' if login else ''}{host}{slash}{tail}"


# A worker resolves this class before it decides on its bootsteps, but may make a connection
# only after that.
_load_extensions()
