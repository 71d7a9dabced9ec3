"""Has one notifier send what a broker holds, and prints how fast it does, as JSON: BROKER SECONDS.

The notifier is one process; this one puts the messages and receives them again.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from statistics import median, quantiles
from typing import Any

import kombu_toc

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
BODY = json.dumps({"order": 7, "text": "remind " * 20}).encode()
ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"

#: Messages a second that are put, at most: more than is to be sent.
MOST = 4000

#: Seconds between two messages while the other target is slow, and how many there are.
APART = 0.01
SINGLE = 300

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_ID = re.compile(rb"toc-id: (\S+)", re.IGNORECASE)


class Receiver(asyncio.Protocol):
    """A connection of a target: reads requests, and answers each at once, or never."""

    def __init__(self, received: dict[str, float], answers: bool) -> None:
        self._received = received
        self._answers = answers
        self._read = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        while True:
            end = self._read.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._read[:end]
            length, id = _LENGTH.search(head), _ID.search(head)
            assert length is not None and id is not None, head
            size = end + 4 + int(length[1])
            if len(self._read) < size:
                return
            self._read = self._read[size:]
            self._received[id[1].decode()] = time.monotonic()
            if self._answers:
                self._transport.write(ANSWER)


async def listen(received: dict[str, float], answers: bool = True) -> tuple[Any, str]:
    """A target, and its URL."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Receiver(received, answers), "127.0.0.1", 0, backlog=1024
    )
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"


async def reach(received: dict[str, float], number: int) -> None:
    """Wait until so many have come."""
    until = time.monotonic() + 120
    while len(received) < number:
        assert time.monotonic() < until, f"only {len(received)} of {number} have come"
        await asyncio.sleep(0.005)


async def single(center: Any, received: dict[str, float], name: str) -> list[float]:
    """Milliseconds from when each message was put until it was received."""
    took = []
    for number in range(SINGLE):
        id = f"{name}-{number}"
        began = time.monotonic()
        await center.put("fast", id, BODY)
        while id not in received:
            await asyncio.sleep(0.0002)
        took.append((received[id] - began) * 1000)
        await asyncio.sleep(APART)
    return took


async def measure(broker: str, seconds: float) -> dict[str, float]:
    received: dict[str, float] = {}
    held: dict[str, float] = {}
    fast, url = await listen(received)
    slow, slow_url = await listen(held, answers=False)
    number = int(MOST * seconds)
    async with kombu_toc.AsyncTimeoutCenter.from_url(broker) as center:
        await center.queues.declare("fast", target=url)
        for begin in range(0, number, 1000):
            some = [{"id": f"{n}", "body": BODY} for n in range(begin, begin + 1000)]
            await center.put_many("fast", some)
        notifier = subprocess.Popen(
            [sys.executable, "-m", "kombu_toc.notify", "--allow", "127.0.0.1"],
            env={**os.environ, "TOC_NOTIFY_BROKER": broker, "TOC_NOTIFY_SECRETS": f"* {SECRET}"},
        )
        try:
            await reach(received, number)
            at = sorted(received.values())
            rate = (number - number // 10) / (at[-1] - at[number // 10])
            alone = await single(center, received, "alone")
            await center.queues.declare("slow", target=slow_url)
            some = [{"id": f"slow-{n}", "body": BODY} for n in range(2000)]
            await center.put_many("slow", some)
            await reach(held, 100)
            beside = await single(center, received, "beside")
        finally:
            notifier.kill()
            notifier.wait()
            fast.close()
            slow.close()
    return {
        "rate": rate,
        "alone": median(alone),
        "beside": median(beside),
        "beside_p99": quantiles(beside, n=100)[-1],
    }


def main() -> None:
    print(json.dumps(asyncio.run(measure(sys.argv[1], float(sys.argv[2])))))


if __name__ == "__main__":
    main()
