"""The proxy and the watched loop of other tests do what they say: else those say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ..support.loops import in_loop, watched
from ..support.proxy import Proxy


class Echo:
    """Answers what it is sent; `heard` is all that has come."""

    def __init__(self) -> None:
        self.heard = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(client,), daemon=True).start()

    def _echo(self, client: socket.socket) -> None:
        with client:
            try:
                while data := client.recv(65536):
                    self.heard += data
                    client.sendall(data)
            except OSError:
                pass

    def stop(self) -> None:
        # Closing alone would leave the thread that waits for the next one waiting.
        with contextlib.suppress(OSError):  # it has stopped already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.stop()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo.port) as proxy:
        yield proxy


def dial(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def ask(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    return read(client, len(data))


def read(client: socket.socket, number: int) -> bytes:
    found = b""
    while len(found) < number:
        some = client.recv(number - len(found))
        assert some, found
        found += some
    return found


def is_silent(client: socket.socket) -> bool:
    client.settimeout(0.2)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(5)
    return False


def test_it_passes_on_what_comes_however_much_it_is(proxy: Proxy) -> None:
    data = bytes(range(256)) * 40_000  # ten times what it buffers
    with dial(proxy) as client:
        sender = threading.Thread(target=client.sendall, args=(data,))
        sender.start()
        assert read(client, len(data)) == data
        sender.join()


def test_a_cut_resets_present_connections_and_no_later_ones(proxy: Proxy) -> None:
    with dial(proxy) as client:
        assert ask(client, b"a") == b"a"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with dial(proxy) as client:
        assert ask(client, b"b") == b"b"


def test_frozen_it_is_silent_and_thawed_it_passes_on_what_was_said(
    proxy: Proxy, echo: Echo
) -> None:
    with dial(proxy) as old:
        assert ask(old, b"a") == b"a"
        proxy.freeze()
        old.sendall(b"b")
        with dial(proxy) as new:
            new.sendall(b"c")
            assert is_silent(old)
            assert is_silent(new)
            assert bytes(echo.heard) == b"a"
            proxy.thaw()
            assert (read(old, 1), read(new, 1)) == (b"b", b"c")


def test_a_reply_stops_halfway_and_new_connections_work(proxy: Proxy, echo: Echo) -> None:
    with dial(proxy) as client:
        assert ask(client, b"a") == b"a"
        proxy.freeze_replies_after(3)
        client.sendall(b"12345")
        assert read(client, 3) == b"123"
        assert is_silent(client)
        with dial(proxy) as other:
            assert ask(other, b"98765") == b"98765"
        assert bytes(echo.heard) == b"a1234598765"


def test_a_reply_is_cut_halfway(proxy: Proxy) -> None:
    with dial(proxy) as client:
        assert ask(client, b"a") == b"a"
        proxy.cut_replies_after(3)
        client.sendall(b"12345")
        found = b""
        with pytest.raises(ConnectionResetError):
            while some := client.recv(10):
                found += some
        assert b"123".startswith(found)


def test_a_dropped_reply_is_one_whose_request_was_heard(proxy: Proxy, echo: Echo) -> None:
    with dial(proxy) as client, dial(proxy) as other:
        dropped = proxy.drop_replies(b"put")
        assert ask(client, b"get") == b"get"
        assert not dropped.is_set()
        client.sendall(b"xpu")
        assert read(client, 3) == b"xpu"
        client.sendall(b"ty")
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert dropped.is_set()
        assert bytes(echo.heard) == b"getxputy"
        assert ask(other, b"put") == b"put"  # only the next one
        proxy.drop_replies(b"put", said=True)
        with pytest.raises(ConnectionResetError):
            ask(other, b"put")


def test_while_it_refuses_nobody_connects(proxy: Proxy) -> None:
    with dial(proxy) as client:
        assert ask(client, b"a") == b"a"
        proxy.refuse()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with pytest.raises(ConnectionRefusedError):
        dial(proxy)
    proxy.accept()
    with dial(proxy) as client:
        assert ask(client, b"b") == b"b"


def test_without_a_server_behind_it_connections_are_reset(echo: Echo, proxy: Proxy) -> None:
    echo.stop()
    # The reset may come while the client still connects.
    with pytest.raises(ConnectionResetError), dial(proxy) as client:
        client.recv(1)


def test_the_end_of_a_connection_is_passed_on(proxy: Proxy, echo: Echo) -> None:
    with dial(proxy) as client:
        assert ask(client, b"a") == b"a"
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""


def test_a_loop_that_is_blocked_is_shown_and_one_that_waits_is_not() -> None:
    async def use(blocks: bool) -> None:
        async with watched():
            time.sleep(2) if blocks else await asyncio.sleep(0.6)

    in_loop(use(False))
    with pytest.raises(AssertionError, match=r"stood still for [0-2]\.\d s(?s:.*)time\.sleep"):
        in_loop(use(True))
