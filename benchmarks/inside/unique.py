"""Puts messages of 200 bytes with unique keys; prints as JSON how many a second, how long the
server takes, and how many claims are left over.

Arguments: the broker's URL, and how many messages.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import kombu_toc


def main(url: str, number: int) -> None:
    center = kombu_toc.center_for(url)
    begin = time.time() + 86_400
    body = b"x" * 200
    found: dict[str, float] = {}

    def server() -> tuple[int, int]:
        said: dict[str, Any] = center.client.info("commandstats").get("cmdstat_evalsha", {})
        return said.get("usec", 0), said.get("calls", 0)

    def run(name: str, put: Callable[[int], object]) -> None:
        before, began = server(), time.perf_counter()
        for n in range(number):
            put(n)
        took, after = time.perf_counter() - began, server()
        found[name] = number / took
        found[f"{name}_us"] = (after[0] - before[0]) / max(after[1] - before[1], 1)

    def when(n: int) -> float:  # over an hour in no order, as messages of many senders are
        return begin + n * 7919 % 3600 + n * 1e-4

    replace = [kombu_toc.Unique(f"k{n}", conflict="replace") for n in range(number)]
    center.put("warm-up", "a", body, unique="a")
    run("plain", lambda n: center.put("plain", f"m-{n:08d}", body, at=when(n), basis=f"k{n}"))
    run("new", lambda n: center.put("one", f"m-{n:08d}", body, at=when(n), unique=f"k{n}"))
    run("kept", lambda n: center.put("one", f"o-{n:08d}", body, at=when(n), unique=f"k{n}"))
    run("replaced", lambda n: center.put("one", f"o-{n:08d}", body, at=when(n), unique=replace[n]))
    for n in range(number):
        center.put("done", f"m-{n:08d}", body, unique=f"k{n}")
        center.ack(center.pop("done").messages)
    slots = center.registry.topic("done").all_slots()
    found["void"] = 100 * sum(center.client.hlen(slot.claims) for slot in slots) / number
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
