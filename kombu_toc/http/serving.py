"""Serves the application with uvicorn, and bounds what a connection may cost."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext, SSLError
from typing import Any, TypeVar

import click

from ..client.programs import check_installed, raise_file_limit
from ..errors import ConfigurationError
from .app import KEEP_ANSWERS, MAX_BODY, Beside, HttpApi
from .fields import Problem, refusal, retry_after
from .request import CURRENT, is_loopback
from .tokens import TOKENS, tokens_of

logger = logging.getLogger(__name__)

# -- bounds what a connection may cost, and knows when it is lost
#
# A server of ASGI tells an application of a request when its headers are there. A client that sends
# them byte by byte, or that does not read its answer, would keep a connection for ever. The guard
# stands between the socket and the server's protocol, and uses nothing of the server but that it is
# an ``asyncio.Protocol``.

#: Seconds until the headers of a request must be there, from their first byte on or from the
#: beginning of the connection; for which an answer may lie unread without a byte being taken; and
#: for which a connection is kept that has no request.
HEADERS_WITHIN = 10.0
READ_WITHIN = 30.0
KEEP_ALIVE = 60.0

#: Bytes of headers that are taken before a request begins, and bytes that are taken while one
#: waits; more in one piece are bounded by the event loop, which reads 256 KiB at a time.
MOST_BYTES = 64 * 1024

#: Bytes that come while a request is dealt with: its body, in chunks of any size.
MOST_OF_BODY = 32 << 20

_CHECK = 2.0

#: Connections that are open at a time. One that waits to be signed in may take 64 KiB of headers.
CONNECTIONS = 2_000

#: Seconds for which one too many is kept, so that its client reads why; and between two lines of
#: the log that say so.
REFUSED_FOR = 1.0
_SAY_EVERY = 60.0

_BUSY = refusal(
    Problem(
        "busy", "try again later; --connections says how many there may be", headers=retry_after(1)
    )
)
_TOO_LARGE = refusal(
    Problem("headers-too-large", "path, query and headers may have 64 KiB together")
)


class Places:
    """The connections of a server.

    most: how many there may be
    """

    def __init__(self, most: int = CONNECTIONS) -> None:
        self.most = most
        self.taken = 0
        self._said_at = -_SAY_EVERY

    def refuse(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Turn away a connection for which there is no place."""
        if loop.time() - self._said_at >= _SAY_EVERY:
            self._said_at = loop.time()
            logger.warning(
                "%d connections are open, as many as there may be (--connections): further ones "
                "are answered 503",
                self.most,
            )
        if self.taken > 2 * self.most:  # they come faster than they can be told
            transport.abort()
            return
        transport.write(_BUSY)
        # Closed before its request has come, it would be reset, and nobody would see why.
        loop.call_later(REFUSED_FOR, transport.close)


class Guarded(asyncio.Protocol):
    """A connection.

    inner: the server's protocol
    most_of_body: bytes that may come while a request is dealt with
    places: of all connections of the server
    """

    def __init__(
        self,
        inner: asyncio.Protocol,
        most_of_body: int = MOST_OF_BODY,
        places: Places | None = None,
    ) -> None:
        self._inner = inner
        self._places = places or Places()
        self._is_refused = False
        self._most_of_body = most_of_body
        self._transport: Any = None
        self._loop = asyncio.get_running_loop()
        #: set when it is closed, by whichever side: a server may tell only the last request of
        #: several that a client has sent
        self.lost = asyncio.Event()
        self._is_broken = False
        #: set while nothing that was written has still to leave
        self._empty = asyncio.Event()
        self._empty.set()
        #: requests that are being dealt with, and since when there are none
        self._requests = 0
        self._idle_since = self._loop.time()
        #: seconds for which it may be idle
        self._idle_for = HEADERS_WITHIN
        self._bytes = 0
        #: what came while a request waits
        self._held: bytearray | None = None
        self._unread = 0
        self._unread_since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # -- told by the application

    def begin(self) -> None:
        """A request begins."""
        self._requests += 1
        self._bytes = 0

    def end(self) -> None:
        """A request has ended."""
        self._requests -= 1
        self._bytes = 0
        self._idle_since, self._idle_for = self._loop.time(), KEEP_ALIVE
        held, self._held = self._held, None
        if held and not self._transport.is_closing():
            self.data_received(bytes(held))

    def discard(self, number: int) -> None:
        """So many bytes more may come while this request is dealt with: they are thrown away."""
        self._bytes = -number

    def hold(self) -> None:
        """The request that is dealt with waits for something, and its body was read: what comes
        until it ends is of the next one, and is kept back. The server would stop reading for it,
        and would not see that the client goes away."""
        if self._held is None:
            self._held = bytearray()

    async def wait_until_sent(self) -> bool:
        """Return when what was written has left, or when the connection is lost; whether it has
        left before. A write to a connection that is broken leaves nothing that has to wait."""
        if not self._empty.is_set():
            ends = [asyncio.ensure_future(one.wait()) for one in (self._empty, self.lost)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for one in ends:
                one.cancel()
        if self._empty.is_set() and self._transport.is_closing():
            await self.lost.wait()  # which tells whether it was closed, or broke
        return self._empty.is_set() and not self._is_broken

    # -- told by the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._places.taken += 1
        if self._places.taken > self._places.most:
            self._is_refused, self._inner = True, asyncio.Protocol()
            self._places.refuse(transport, self._loop)
            return
        # So it is told of the first byte that has to wait, and when the last one has left.
        self._transport.set_write_buffer_limits(0)
        self._inner.connection_made(transport)
        self._timer = self._loop.call_later(_CHECK, self._check)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._bytes += len(data)
        if self._held is not None:
            self._held += data
            if len(self._held) > MOST_BYTES:
                self._transport.abort()
            return
        if self._requests:
            if self._bytes > self._most_of_body:
                self._transport.abort()
                return
        else:
            if self._bytes - len(data) > MOST_BYTES:
                self._transport.write(_TOO_LARGE)
                self._transport.close()
                return
            if self._idle_for == KEEP_ALIVE:  # the headers of the next request begin
                self._idle_since, self._idle_for = self._loop.time(), HEADERS_WITHIN
        token = CURRENT.set(self)  # the task of a request has it from here
        try:
            self._inner.data_received(data)
        finally:
            CURRENT.reset(token)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._places.taken -= 1
        self._is_broken = exc is not None
        self.lost.set()
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._empty.clear()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._empty.set()
        self._inner.resume_writing()

    def _check(self) -> None:
        self._timer = self._loop.call_later(_CHECK, self._check)
        now = self._loop.time()
        unread = self._transport.get_write_buffer_size()
        if unread:
            if not self._unread or unread < self._unread:
                self._unread_since = now  # it begins to lie there, or is being read
            elif now - self._unread_since > READ_WITHIN:
                self._transport.abort()
            self._unread = unread
            return
        if self._unread:  # it was read to its end this very moment
            self._unread, self._idle_since = 0, now
        if self._requests or now - self._idle_since <= self._idle_for:
            return
        if self._idle_for == KEEP_ALIVE:
            self._transport.close()
        else:
            self._transport.abort()


def guarded(
    protocol: Callable[..., asyncio.Protocol],
    most_of_body: int = MOST_OF_BODY,
    connections: int = CONNECTIONS,
) -> Callable[..., asyncio.Protocol]:
    """Makes guarded connections of a server's protocol, so many at a time; takes its arguments."""
    places = Places(connections)

    class Connection(Guarded):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(protocol(*args, **options), most_of_body, places)

    return Connection


# -- serves the application with uvicorn

PORT = 8088

#: Seconds for which requests may go on at the end.
END_WITHIN = 10

#: Seconds within which TLS must have begun.
HANDSHAKE_WITHIN = 10.0

#: Bytes of an answer that the system takes before they can leave.
UNSENT = 64 * 1024

#: Connections that may wait to be accepted.
BACKLOG = 2048


def check_needs(*, with_notifier: bool = False) -> None:
    """Raises ConfigurationError, naming the extra, if what serves is not installed.

    with_notifier: also what runs a notifier beside it
    """
    more, extra = (("aiohttp",), "http,notify") if with_notifier else ((), "http")
    check_installed("serving HTTP", extra, "greenlet", "jinja2", "uvicorn", *more)


def check_exposure(host: str, api: HttpApi) -> None:
    """Raises ConfigurationError if everybody who reaches this address could do everything."""
    if not api.tokens and not is_loopback(host):
        raise ConfigurationError(
            f"without tokens this listens on loopback only, and {host} is not: make a token with "
            "--new-token NAME, put its line into a file, and name that with --tokens"
        )


def check_tls(certificate: str | Path | None, key: str | Path | None) -> None:
    """Raises ConfigurationError for files that cannot be used for TLS, naming them."""
    if not certificate:
        if key:
            raise ConfigurationError("--key is of a certificate: name that with --certificate")
        return
    for file in (certificate, *([key] if key else [])):
        try:
            Path(file).open("rb").close()
        except OSError as exc:
            raise ConfigurationError(f"{file}: {exc.strerror}") from None
    try:
        # Nobody is asked for a passphrase.
        SSLContext(PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (SSLError, ValueError) as exc:
        files = f"{certificate}, with {key}" if key else f"{certificate}, without --key"
        raise ConfigurationError(
            f"{files}, cannot be used for TLS: they must be a certificate and its key in PEM, "
            f"without a passphrase ({exc})"
        ) from None


F = TypeVar("F", bound=Callable[..., Any])


def server_options(masked: str) -> Callable[[F], F]:
    """Give a command of click the options of :func:`serve_as_told`, and ``--mask``.

    masked: what that hides
    """

    def file(name: str, help: str) -> Callable[[F], F]:
        return click.option(name, metavar="FILE", help=help)

    def repeated(name: str, metavar: str, help: str, *names: str) -> Callable[[F], F]:
        help = f"{help}; may be repeated."
        return click.option(name, *names, multiple=True, metavar=metavar, help=help)

    def number(name: str, type: Any, default: float, help: str) -> Callable[[F], F]:
        return click.option(name, type=type, default=default, show_default=True, help=help)

    options = (
        click.option(
            "--host", default="127.0.0.1", show_default=True, help="The address to listen on."
        ),
        number("--port", click.IntRange(0, 65535), PORT, "0: a free one."),
        file("--tokens", f"Who may do what, one a line; or the environment variable {TOKENS}."),
        click.option(
            "--anonymous-read", is_flag=True, help="Let who has no token look at everything."
        ),
        repeated(
            "--name", "NAME", "A name of this server, by which who has no token may look", "names"
        ),
        number(
            "--keep-answers",
            click.FloatRange(1, 31_536_000),
            KEEP_ANSWERS,
            "Seconds for which answers are kept under an Idempotency-Key.",
        ),
        file(
            "--notify",
            "Also send what is due to the targets of queues, signed by the secrets in this file.",
        ),
        repeated(
            "--notify-allow", "NETWORK", "That these may be sent to although they are not public"
        ),
        repeated(
            "--mask",
            "NAME",
            f"{masked} that is hidden on the page, and from tokens that may not write; or a "
            "pattern, * for all",
        ),
        number(
            "--connections",
            click.IntRange(1),
            CONNECTIONS,
            "Connections that may be open at a time; further ones are answered 503.",
        ),
        file("--certificate", "For TLS."),
        file("--key", "Of the certificate."),
    )
    return lambda function: reduce(lambda made, option: option(made), reversed(options), function)


def serve_as_told(
    make: Callable[..., HttpApi],
    *,
    tokens: str | None,
    anonymous_read: bool,
    names: Sequence[str],
    keep_answers: float,
    notify: str | None,
    notify_allow: Sequence[str],
    **options: Any,
) -> None:
    """Make an application and serve it, as the options of a command line say.

    make: takes these keyword arguments of :func:`.app.api_for`: tokens, names, keep_answers, beside
    options: those of :func:`serve`

    Raises ConfigurationError and OSError.
    """
    check_needs(with_notifier=notify is not None)
    beside: list[Beside] = []
    if notify is not None:
        from ..notify import beside as notifier_beside

        beside.append(notifier_beside(notify, allow=notify_allow))
    known = tokens_of(tokens, anonymous_read)
    serve(make(tokens=known, names=names, keep_answers=keep_answers, beside=beside), **options)


def serve(
    api: HttpApi,
    host: str = "127.0.0.1",
    port: int = PORT,
    *,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    connections: int = CONNECTIONS,
    say: Callable[[str], None] = print,
) -> None:
    """Serve until SIGINT or SIGTERM. Who waits for a lease then is answered at once.

    port: 0 for a free one
    certificate, key: files for TLS
    connections: how many may be open at a time; further ones are answered 503
    say: is told where it listens, and who may use it

    Raises ConfigurationError as :func:`check_exposure`, or if uvicorn is not installed; OSError if
    the port is taken.
    """
    check_needs()
    import uvicorn

    check_exposure(host, api)
    check_tls(certificate, key)
    raise_file_limit()
    config = uvicorn.Config(
        api,
        loop="asyncio",
        http=_protocol(connections),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(KEEP_ALIVE),
        timeout_graceful_shutdown=END_WITHIN,
        backlog=BACKLOG,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            if certificate:  # uvicorn leaves it at asyncio's minute
                loop = asyncio.get_running_loop()
                create = partial(loop.create_server, ssl_handshake_timeout=HANDSHAKE_WITHIN)
                setattr(loop, "create_server", create)  # noqa: B010
            await super().startup(sockets)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await api.long_polls.aclose()
            await super().shutdown(sockets)

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    shown = f"[{host}]" if ":" in host else host
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as exc:
        raise OSError(f"cannot serve at {shown}:{port}: {exc.strerror or exc}") from exc
    # Its connections have it, too; asyncio sets it only where the protocol is named. Without it,
    # the second part of an answer would wait for the client to confirm the first, for 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # What has not left yet stays in this process, which so sees what a client has not got.
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
    scheme = "https" if certificate else "http"
    if not api.tokens:
        say("There are no tokens: this answers requests from this machine only, and any of them.")
    elif not certificate and not is_loopback(host):
        say("Tokens come unencrypted here: end TLS in a proxy before it, or give a certificate.")
    say(f"Listening at {scheme}://{shown}:{listening.getsockname()[1]}")
    server = Server(config)
    with _ended_by_signals(server):
        server.run(sockets=[listening])


@contextmanager
def _ended_by_signals(server: Any) -> Iterator[None]:
    """When uvicorn has ended in order, it raises the signal that it got once more: the process
    would die of it, or show a traceback, before it has closed what it uses."""
    if threading.current_thread() is not threading.main_thread():
        yield  # nobody else gets signals
        return

    def end(*_: Any) -> None:
        server.should_exit = True

    before = {one: signal.signal(one, end) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler or signal.SIG_DFL)


def _protocol(connections: int) -> Any:
    """uvicorn's fastest protocol that is installed, guarded.

    connections: how many may be open at a time
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as protocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import (  # type: ignore[assignment]
            H11Protocol as protocol,
        )

    class Protocol(protocol):
        def send_400_response(self, msg: str) -> None:
            """Answer what is no HTTP, as every error is answered."""
            self.transport.write(_NO_HTTP)
            self.transport.close()

    return guarded(Protocol, 2 * MAX_BODY, connections)  # which may come in small chunks


_NO_HTTP = refusal(Problem("bad-request", "this is no request of HTTP/1.1"))
