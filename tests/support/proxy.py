"""A TCP proxy on the loopback that breaks connections the way networks do."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

#: Bytes on their way in one direction beyond which the sender has to wait.
MAX_BUFFERED = 1 << 20

#: Seconds between two portions of what a slow proxy lets pass.
PORTION = 0.02


class _Link:
    """A client's connection and the one made to the server for it."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.server: socket.socket | None = None
        self.requests = bytearray()  #: on their way to the server
        self.replies = bytearray()  #: on their way to the client
        self.tail = b""  #: the end of what was requested, for a match across two reads
        self.budget: int | None = None  #: bytes of replies that may still pass
        self.resets = False  #: what happens when they have passed: a reset, or silence
        self.portion: dict[socket.socket, int] = {}  #: bytes that each end may still send, if slow
        self.doomed: threading.Event | None = None  #: its next reply is dropped: set this


class Proxy:
    """Forwards connections to a port of this machine, until it is told to misbehave.

    Every fault has happened when its method returns.

    target_port: where to; it need not listen yet
    port, url, toc_url: where this proxy listens, as `tests.support.servers.Server` names it
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self._listener: socket.socket | None = None
        #: holds the port while connections are refused
        self._kept: socket.socket | None = None
        self._links: set[_Link] = set()
        self._frozen = False
        #: bytes a second that pass on a connection, in each direction
        self._rate: int | None = None
        self._drops: list[tuple[bytes, bool, threading.Event]] = []
        #: what becomes of the next reply, if anything
        self._spoil: Callable[[bytes], bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._ours, self._loops = socket.socketpair()
        self._orders: list[tuple[Callable[[], None], threading.Event]] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="proxy", daemon=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def toc_url(self) -> str:
        return f"toc+{self.url}"

    def start(self) -> Proxy:
        self._listen()
        self._selector.register(self._loops, selectors.EVENT_READ, self._take_orders)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Reset all connections and listen no more."""
        if not self._thread.is_alive():
            return
        self.refuse()
        self._order(self._end)
        self._thread.join()
        if self._kept is not None:
            self._kept.close()
        self._selector.close()
        self._ours.close()
        self._loops.close()

    def __enter__(self) -> Proxy:
        return self.start()

    def __exit__(self, *exc_info: Any) -> None:
        self.stop()

    # -- faults

    def cut(self) -> None:
        """Reset all present connections, to both sides."""
        self._order(self._cut)

    def freeze(self) -> None:
        """Pass nothing on, in either direction, not even the end of a connection.

        Connections are accepted, but not served.
        """
        self._order(self._freeze)

    def thaw(self) -> None:
        """Pass on what has piled up since `freeze`, and what comes."""
        self._order(self._thaw)

    def throttle(self, rate: int | None) -> None:
        """Let so many bytes a second pass on each connection, in each direction; None: all."""
        self._order(partial(self._throttle, rate))

    def freeze_replies_after(self, number: int) -> None:
        """Let so many more bytes of replies pass, on each present connection; then none."""
        self._order(partial(self._limit, number, False))

    def cut_replies_after(self, number: int) -> None:
        """The same, but a connection is reset when a byte more arrives."""
        self._order(partial(self._limit, number, True))

    def drop_replies(self, match: bytes, *, said: bool = False) -> threading.Event:
        """Reset the connection of the next request that contains `match`, after it was answered
        and before the answer has passed. Other requests on it must have been answered; where they
        may not have been, tell it by a short `match` in the answer (`said`).

        Returns what is set when that has happened.
        """
        dropped = threading.Event()
        self._order(partial(self._drops.append, (match, said, dropped)))
        return dropped

    def spoil_reply(self, spoil: Callable[[bytes], bytes] | None) -> None:
        """Pass on what this makes of the next reply, and reset its connection."""
        self._spoil = spoil

    def refuse(self) -> None:
        """Reset all connections and accept none."""
        self._order(self._refuse)

    def accept(self) -> None:
        """Accept connections again, on the same port."""
        self._order(self._listen)

    # -- in the proxy's thread, but for `_order`

    def _order(self, do: Callable[[], None]) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the proxy does not run")
        done = threading.Event()
        self._orders.append((do, done))
        self._ours.send(b"!")
        if not done.wait(30):
            raise RuntimeError("the proxy does not answer")

    def _take_orders(self, events: int) -> None:
        for _ in self._loops.recv(4096):
            do, done = self._orders.pop(0)
            do()
            done.set()

    def _loop(self) -> None:
        next_portion = 0.0
        while not self._stopped:
            if self._rate is not None and time.monotonic() >= next_portion:
                next_portion = time.monotonic() + PORTION
                self._deal()
            for key, events in self._selector.select(None if self._rate is None else PORTION):
                if key.fileobj.fileno() != -1:  # it was closed since, as one of a pair
                    key.data(events)

    def _end(self) -> None:
        self._stopped = True

    def _listen(self) -> None:
        if self._listener is not None:
            return
        self._listener = self._kept or socket.create_server(("127.0.0.1", self.port))
        self._kept = None
        self._listener.listen(512)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._selector.register(self._listener, selectors.EVENT_READ, self._admit)

    def _admit(self, events: int) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has thought better of it
            return
        link = _Link(client)
        self._links.add(link)
        if not self._frozen:
            self._connect(link)

    def _connect(self, link: _Link) -> None:
        try:
            link.server = socket.create_connection(("127.0.0.1", self.target_port), timeout=5)
        except OSError:
            self._reset(link)
            return
        for end in link.client, link.server:
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch(link)

    def _watch(self, link: _Link) -> None:
        """Wait for what may happen next on both ends, which may be nothing."""
        for end, unread, unsent in (
            (link.client, link.requests, link.replies),
            (link.server, link.replies, link.requests),
        ):
            if end is None:
                continue
            events = 0
            if not self._frozen:
                silent = end is link.server and link.budget == 0 and not link.resets
                most = MAX_BUFFERED if self._rate is None else 1 << 16
                spent = self._rate is not None and link.portion.get(end, 1) <= 0
                if len(unread) < most and not silent and not spent:
                    events |= selectors.EVENT_READ
                if unsent:
                    events |= selectors.EVENT_WRITE
            known = end in self._selector.get_map()
            if known and not events:
                self._selector.unregister(end)
            elif known:
                self._selector.modify(end, events, partial(self._serve, link, end))
            elif events:
                self._selector.register(end, events, partial(self._serve, link, end))

    def _serve(self, link: _Link, end: socket.socket, events: int) -> None:
        if self._frozen:  # since these events were collected
            return
        try:
            if events & selectors.EVENT_READ:
                data = end.recv(1 << 16)
                if self._rate is not None:
                    link.portion[end] = link.portion.get(end, 0) - len(data)
                if not data:
                    self._close(link)
                    return
                if end is link.client:
                    self._request(link, data)
                elif not self._reply(link, data):
                    self._reset(link)
                    return
            if events & selectors.EVENT_WRITE:
                unsent = link.replies if end is link.client else link.requests
                del unsent[: end.send(unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._reset(link)
            return
        self._watch(link)

    def _request(self, link: _Link, data: bytes) -> None:
        link.requests += data
        seen = link.tail + data
        self._doom(link, seen, False)
        longest = max((len(match) for match, _, _ in self._drops), default=1)
        link.tail = seen[-longest + 1 :] if longest > 1 else b""

    def _doom(self, link: _Link, seen: bytes, said: bool) -> None:
        for drop in [drop for drop in self._drops if drop[0] in seen and drop[1] is said][:1]:
            link.doomed = drop[2]
            self._drops.remove(drop)

    def _reply(self, link: _Link, data: bytes) -> bool:
        """Take note of a reply; false if the connection is to be reset instead."""
        self._doom(link, data, True)
        if link.doomed is not None:
            link.doomed.set()
            return False
        if (spoil := self._spoil) is not None:
            self._spoil = None
            with contextlib.suppress(OSError):
                link.client.send(link.replies + spoil(data))
            return False
        if link.budget is None:
            link.replies += data
            return True
        passing, link.budget = data[: link.budget], max(link.budget - len(data), 0)
        link.replies += passing
        if len(passing) < len(data) and link.resets:
            with contextlib.suppress(OSError):
                link.client.send(link.replies)
            return False
        return True

    def _close(self, link: _Link) -> None:
        """One side has ended: pass on what is left, and end the other."""
        for end, unsent in (link.server, link.requests), (link.client, link.replies):
            with contextlib.suppress(OSError):
                end.settimeout(1)
                end.sendall(unsent)
        self._forget(link)

    def _reset(self, link: _Link) -> None:
        for end in self._ends(link):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._forget(link)

    def _forget(self, link: _Link) -> None:
        self._links.discard(link)
        for end in self._ends(link):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(end)
            end.close()

    @staticmethod
    def _ends(link: _Link) -> Iterator[socket.socket]:
        yield link.client
        if link.server is not None:
            yield link.server

    def _cut(self) -> None:
        for link in list(self._links):
            self._reset(link)

    def _freeze(self) -> None:
        self._frozen = True
        for link in self._links:
            self._watch(link)

    def _thaw(self) -> None:
        self._frozen = False
        for link in list(self._links):
            if link.server is None:
                self._connect(link)
            else:
                self._watch(link)

    def _throttle(self, rate: int | None) -> None:
        self._rate = rate
        for link in self._links:
            self._watch(link)

    def _deal(self) -> None:
        for link in list(self._links):
            if link.server is None:
                continue
            for end in self._ends(link):
                had = link.portion.get(end, 0)
                link.portion[end] = min(had + int(self._rate * PORTION), int(self._rate * PORTION))
            self._watch(link)

    def _limit(self, number: int, resets: bool) -> None:
        for link in self._links:
            link.budget, link.resets = number, resets
            self._watch(link)

    def _refuse(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
            # Nobody else is given its port meanwhile. What does not listen refuses.
            self._kept = socket.socket()
            self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._kept.bind(("127.0.0.1", self.port))
        self._cut()
