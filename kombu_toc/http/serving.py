"""Serves the application with uvicorn."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext, SSLError
from typing import Any

from ..client.programs import check_installed
from ..client.urls import raise_file_limit
from ..errors import ConfigurationError
from .app import HttpApi
from .fields import Problem, refusal
from .guard import CONNECTIONS, KEEP_ALIVE, guarded
from .request import is_loopback

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
        http=_protocol(api.max_body, connections),
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
    listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    # Its connections have it, too; asyncio sets it only where the protocol is named. Without it,
    # the second part of an answer would wait for the client to confirm the first, for 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # What has not left yet stays in this process, which so sees what a client has not got.
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
    shown = f"[{host}]" if ":" in host else host
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


def _protocol(max_body: int, connections: int) -> Any:
    """uvicorn's fastest protocol that is installed, guarded.

    max_body: bytes of a body, which may come in small chunks
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

    return guarded(Protocol, 2 * max_body, connections)


_NO_HTTP = refusal(Problem("bad-request", "this is no request of HTTP/1.1"))
