"""What producers and tasks have done, written to a server that no fault touches."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import redis

_clients: dict[int, redis.Redis] = {}


def write(what: str, id: str, **details: Any) -> None:
    """Add a line. at: seconds since the epoch; now unless it is given."""
    pid = os.getpid()
    client = _clients.get(pid)
    if client is None:  # a process that was forked must not share its parent's connection
        client = _clients[pid] = redis.Redis.from_url(os.environ["CHAOS_LEDGER"])
    entry = {"what": what, "id": id, "at": time.time(), "pid": pid, **details}
    client.rpush("ledger", json.dumps(entry))


def put_off(id: str) -> int:
    """A task asks to be put back into its queue; return how often it has."""
    write("put off", id)
    return int(_clients[os.getpid()].hincrby("put off", id, 1))


def puts_first(id: str) -> bool:
    """A task is about to put its own job; return whether none of its runs was before."""
    return bool(_clients[os.getpid()].hsetnx("puts", id, 1))


def note_end(id: str) -> None:
    """A task has ended for good; anybody can ask for that."""
    _clients[os.getpid()].zadd("ended", {id: time.time()})


def ended(id: str) -> float | None:
    """When a task has ended for good, in seconds since the epoch."""
    found: float | None = _clients[os.getpid()].zscore("ended", id)
    return found


class Ledger:
    """Reads it, each line once."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.entries: list[dict[str, Any]] = []

    def read(self) -> int:
        """Take the lines that are new; return how many there were."""
        found = self.client.lrange("ledger", len(self.entries), -1)
        self.entries += map(json.loads, found)
        return len(found)

    def done(self) -> set[str]:
        """Tasks that have run, as often as they were to send themselves again."""
        times = {
            entry["id"]: entry["times"] for entry in self.entries if entry["what"] == "sending"
        }
        return {
            entry["id"]
            for entry in self.entries
            if entry["what"] == "finished" and entry["retries"] >= times[entry["id"]]
        }

    def ids(self, what: str) -> set[str]:
        return {entry["id"] for entry in self.entries if entry["what"] == what}
