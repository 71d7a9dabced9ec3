"""Idle consumers of many queues: ``consumers.py NUMBER QUEUES``; each as if it were a process.

That is, with a connection and a heartbeat of its own. It says when all of them listen, notes in
Redis when something was delivered, and goes on until its input ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from kombu import Connection, Consumer, Queue

try:
    from kombu_toc.consumer import lease_keeper
except ImportError:  # an earlier checkout
    from kombu_toc.transport import heartbeat as lease_keeper


def consume(connection: Connection, queues: list[Queue], listens: threading.Barrier) -> None:
    channel = connection.default_channel
    client = connection.transport.center.client

    def received(body: object, message: object) -> None:
        client.execute_command("RPUSH", "bench:got", f"{time.time():.6f}")
        message.ack()

    with Consumer(channel, queues, callbacks=[received], prefetch_count=1, auto_declare=False):
        poller = connection.transport.poller
        poller.long_running = poller.steady = True  # its name now, and before
        first = True
        while True:
            try:
                connection.drain_events(timeout=1)
            except TimeoutError:
                pass
            if first:
                first = False
                listens.wait()


def main() -> None:
    number, count = int(sys.argv[1]), int(sys.argv[2])
    threading.stack_size(256 * 1024)
    queues = [Queue(f"q{i}") for i in range(count)]
    listens = threading.Barrier(number + 1)
    for _ in range(number):
        connection = Connection(os.environ["BENCH_BROKER"])
        connection.connect()
        transport = connection.transport
        _ = getattr(transport, "lease_keeper", None) or transport.heartbeat  # made here, one each
        lease_keeper._keepers.clear()
        threading.Thread(target=consume, args=(connection, queues, listens), daemon=True).start()
    listens.wait()
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
