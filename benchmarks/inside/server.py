"""Replays plain publishes, and what takes and acknowledges their messages in batches, beside
scripts that do no more than they must; prints as JSON the server's processor time and the commands
that the scripts run.

Arguments: the broker's URL, and how many messages. The bytes of each call are recorded once and
sent again in one stream: so the client's own time does not matter, and the caches are warm.
"""

from __future__ import annotations

import json
import socket
import sys
from urllib.parse import urlsplit

import celery
import redis

import kombu_toc

ROUNDS, BATCH = 5, 4

#: Nothing that keeps a message by its time can put it with less, nor take several with less.
PUT = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if redis.call('HSETNX', KEYS[2], ARGV[1], ARGV[2]) == 1 then
  redis.call('ZADD', KEYS[1], now, ARGV[1])
end
return {ARGV[1], 1, now}
"""
TAKE = """
local ids = redis.call('ZRANGE', KEYS[1], 0, ARGV[1] - 1)
local bodies = redis.call('HMGET', KEYS[2], unpack(ids))
redis.call('ZREM', KEYS[1], unpack(ids))
redis.call('HDEL', KEYS[2], unpack(ids))
return {ids, bodies}
"""

sent: list[bytes] | None = None
_sendall = socket.socket.sendall


def recording(self: socket.socket, data: bytes, *flags: int) -> None:
    if sent is not None:
        sent.append(bytes(data))
    _sendall(self, data, *flags)


def main(url: str, number: int) -> None:
    global sent
    place = urlsplit(url)
    server = redis.Redis(place.hostname, place.port)
    socket.socket.sendall = recording  # type: ignore[method-assign]
    app = celery.Celery(broker=url)
    app.conf.task_ignore_result = True
    # One slot: otherwise a batch is of several, and the floor is that of several.
    center = kombu_toc.center_for(url)
    center.queues.declare("celery", slots=1)
    app.send_task("add", (1, 2))
    center.ack(center.pop("celery").messages)
    sent = puts = []
    for n in range(number):
        app.send_task("add", (n, 2))
    sent = takes = []
    while messages := center.pop("celery", BATCH).messages:
        center.ack(messages)
    sent = None

    def packed(script: str, *args: object) -> bytes:
        parts = ("EVALSHA", server.script_load(script), 2, "{floor}:store", "{floor}:body", *args)
        return b"".join(redis.Connection().pack_command(*parts))

    body = max(puts, key=len)
    floor = [packed(PUT, f"message-{n}", body) for n in range(number)]
    rest = [packed(TAKE, BATCH)] * (number // BATCH)
    streams = {"put": puts, "drain": takes, "put_floor": floor, "drain_floor": rest}
    times: dict[str, list[float]] = {name: [] for name in streams}
    found: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, stream in streams.items():
            if name.startswith("put"):
                server.flushall()
            server.config_resetstat()
            times[name].append(replay(server, place.port or 6379, stream) / number * 1e6)
            ran = server.info("commandstats").items()
            calls = {at: one["calls"] for at, one in ran if at not in OWN}
            found[f"{name}_commands"] = sum(calls.values()) / number
    best = {name: min(each) for name, each in times.items()}
    print(
        json.dumps(
            {
                "put": best["put"],
                "put_over": best["put"] / best["put_floor"],
                "put_commands": found["put_commands"],
                "drain": best["drain"],
                "drain_over": best["drain"] / best["drain_floor"],
                "drain_commands": found["drain_commands"],
            }
        )
    )


#: Commands that are not run by a script.
OWN = {f"cmdstat_{name}" for name in ("evalsha", "info", "ping", "config|resetstat", "flushall")}


def replay(server: redis.Redis, port: int, stream: list[bytes]) -> float:
    """Send all of it; return the server's seconds of processor."""

    def spent() -> float:
        found = server.info("cpu")
        return float(found["used_cpu_user"] + found["used_cpu_sys"])

    before = spent()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for start in range(0, len(stream), 50):
            some = stream[start : start + 50]
            connection.sendall(b"".join(some) + b"PING\r\n")
            tail = b""
            while not tail.endswith(b"+PONG\r\n"):
                tail = (tail + connection.recv(1 << 20))[-7:]
    return spent() - before


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
