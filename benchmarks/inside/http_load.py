"""Loads the HTTP API of a broker and prints what it does, as JSON: BROKER SECONDS.

The server is one process, what loads it another. A connection sends its next request when the
answer has come.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import kombu_toc

HEAD = "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def request(path: str, document: Any) -> bytes:
    body = json.dumps(document).encode()
    return f"{HEAD.format(path=path)}content-length: {len(body)}\r\n\r\n".encode() + body


#: What to send after an answer with that body; None: nothing any more.
Following = Callable[[bytes], bytes | None]


class Connection(asyncio.Protocol):
    """Sends a request after the other."""

    def __init__(self, following: Following) -> None:
        self._following = following
        self._read = b""
        self._wanted = 0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._next(b"")

    def data_received(self, data: bytes) -> None:
        self._read += data
        if not self._wanted:
            end = self._read.find(b"\r\n\r\n")
            if end < 0:
                return
            assert self._read.startswith(b"HTTP/1.1 20"), self._read
            length = re.search(rb"content-length: (\d+)", self._read)
            assert length is not None
            self._wanted = end + 4 + int(length[1])
            self._begin = end + 4
        if len(self._read) >= self._wanted:
            body, self._read = self._read[self._begin : self._wanted], b""
            self._wanted = 0
            self._next(body)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionError(self._read[:500]))

    def _next(self, body: bytes) -> None:
        sent = None if self.ended.done() else self._following(body)
        if sent is None:
            if not self.ended.done():  # else nobody waits any more
                self.ended.set_result(None)
            self.transport.close()
        else:
            self.transport.write(sent)


async def load(port: int, connections: int, make: Callable[[], Following]) -> None:
    loop = asyncio.get_running_loop()
    made = [
        (await loop.create_connection(lambda: Connection(make()), "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    await asyncio.gather(*(one.ended for one in made))


async def puts(port: int, seconds: float) -> float:
    """Messages of 200 bytes that are put, a request each, in a second."""
    end, number = time.monotonic() + seconds, 0

    def make() -> Following:
        def following(body: bytes) -> bytes | None:
            nonlocal number
            if time.monotonic() > end:
                return None
            number += 1
            task = {"id": f"m{number}", "text": "x" * 200}
            return request("/v1/queues/bench/tasks", task)

        return following

    await load(port, 32, make)
    return number / seconds


async def pulls(port: int, broker: str) -> float:
    """Messages that are leased and acknowledged, 100 in a request, in a second."""
    total, handled = 60_000, 0
    center = kombu_toc.center_for(broker)
    center.put_many("pull", [(f"m{n}", b"x" * 200) for n in range(total)])

    def make() -> Following:
        leases, pending = True, 0

        def following(body: bytes) -> bytes | None:
            nonlocal leases, handled, pending
            if leases:
                if body:
                    handled += pending
                    if handled >= total:
                        return None
                leases = False
                return request("/v1/queues/pull:lease", {"limit": 100})
            receipts = [one["receipt"] for one in json.loads(body)["tasks"]]
            if not receipts:
                return None
            pending, leases = len(receipts), True
            return request("/v1/queues/pull:ack", {"receipts": receipts})

        return following

    began = time.monotonic()
    await load(port, 8, make)
    return handled / (time.monotonic() - began)


def one_lease(answered: list[float]) -> Callable[[], Following]:
    """A client that leases once; notes when it was answered."""

    def make() -> Following:
        asked = False

        def following(body: bytes) -> bytes | None:
            nonlocal asked
            if asked:
                answered.append(time.time())
                return None
            asked = True
            return request("/v1/queues/poll:lease", {"wait": 10})

        return following

    return make


async def polls(port: int, broker: str, number: int) -> float:
    """Milliseconds from the due time of a message to the answer of who waits: the median."""
    late = []
    center = kombu_toc.center_for(broker)
    center.queues.declare("poll")
    for turn in range(number):
        answered: list[float] = []
        waits = asyncio.ensure_future(load(port, 1, one_lease(answered)))
        await asyncio.sleep(0.05)
        due = time.time() + 0.15
        center.put("poll", f"m{turn}", b"x", at=due)
        await waits
        late.append((answered[0] - due) * 1000)
    return median(late)


async def waiting(port: int, pid: int, seconds: float) -> float:
    """Percent of a processor that the server uses while 1,000 clients wait, again and again."""
    end = time.monotonic() + seconds + 8

    def make() -> Following:
        def following(body: bytes) -> bytes | None:
            if time.monotonic() > end:
                return None
            return request("/v1/queues/idle:lease", {"wait": 30})

        return following

    tasks = asyncio.ensure_future(load(port, 1000, make))
    await asyncio.sleep(8)  # until all have come
    before, began = used(pid), time.monotonic()
    await asyncio.sleep(seconds)
    share = (used(pid) - before) / (time.monotonic() - began)
    tasks.cancel()
    await asyncio.wait({tasks})
    return 100 * share


def used(pid: int) -> float:
    """Seconds of processor time of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(broker: str, seconds: float) -> dict[str, float]:
    server = subprocess.Popen(
        [sys.executable, "-m", "kombu_toc.http", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TOC_HTTP_BROKER": broker},
    )
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if found := re.search(r"Listening at .*:(\d+)", line):
                port = int(found[1])
                break
        return {
            "puts": await puts(port, seconds),
            "pulls": await pulls(port, broker),
            "late": await polls(port, broker, 20),
            "waiting": await waiting(port, server.pid, 3 * seconds),
        }
    finally:
        server.terminate()
        server.communicate()


if __name__ == "__main__":
    broker, seconds = sys.argv[1], float(sys.argv[2])
    print(json.dumps(asyncio.run(measure(broker, seconds))))
