"""Loads the page of a broker with many scheduled messages and prints what it does, as JSON: BROKER
MESSAGES SECONDS.

The server is one process, which is new for each first view; what loads it is another.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import kombu_toc

WEEK = 7 * 86_400

#: Viewers that look all the time, and seconds between two looks of one.
VIEWERS = 20
EVERY = 1.0


def fill(broker: str, number: int) -> None:
    """Messages like tasks, of 300 bytes, spread over a week; and a few dead ones."""
    center = kombu_toc.center_for(broker)
    content = {
        "headers": {"task": "shop.remind", "id": "x" * 36, "retries": 0, "origin": "bench"},
        "properties": {"delivery_mode": 2},
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "body": b'[["anna@example.com", 7], {"late": true}, {}]',
    }
    body = kombu_toc.pack(content, deflate=False)
    for start in range(0, number, 10_000):
        some = range(start, min(start + 10_000, number))
        delays = (1 + WEEK * place / number for place in some)
        center.put_many(
            "bench",
            [
                {"id": f"m{place}", "body": body, "delay": delay}
                for place, delay in zip(some, delays, strict=True)
            ],
        )


@contextmanager
def serving(broker: str) -> Iterator[tuple[int, int]]:
    """A new server: its port and its process."""
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
                yield int(found[1]), server.pid
                break
    finally:
        server.terminate()
        server.communicate()


def look(port: int, view: str) -> float:
    """Seconds until a view is there, as a browser asks for it."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", f"/page/{view}")
    answer = connection.getresponse()
    body = answer.read()
    took = time.monotonic() - began
    connection.close()
    assert answer.status == 200, body
    return took


def first(broker: str, view: str) -> float:
    """Milliseconds until the first view of a new server is there."""
    with serving(broker) as (port, _):
        return look(port, view) * 1000


def used(pid: int) -> float:
    """Seconds of processor time of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def used_by_redis(broker: str) -> float:
    info = kombu_toc.center_for(broker).client.info("cpu")
    return float(info["used_cpu_sys"] + info["used_cpu_user"])


def viewers(broker: str, seconds: float) -> tuple[float, float]:
    """Percent of a processor that the server, and Redis, use while many look at the overview."""
    with serving(broker) as (port, pid):
        look(port, "")
        end = threading.Event()

        def view() -> None:
            while not end.wait(EVERY):
                look(port, "")

        threads = [threading.Thread(target=view) for _ in range(VIEWERS)]
        for thread in threads:
            thread.start()
        time.sleep(2)
        began = time.monotonic(), used(pid), used_by_redis(broker)
        time.sleep(seconds)
        took = time.monotonic() - began[0]
        shares = (used(pid) - began[1]) / took, (used_by_redis(broker) - began[2]) / took
        end.set()
        for thread in threads:
            thread.join()
    return 100 * shares[0], 100 * shares[1]


def measure(broker: str, number: int, seconds: float) -> dict[str, float]:
    fill(broker, number)
    found = {
        "overview": first(broker, ""),
        "queue": first(broker, "queue?queue=bench"),
        "message": first(broker, f"message?queue=bench&id=m{number // 2}"),
    }
    found["viewers"], found["viewers_redis"] = viewers(broker, seconds)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
